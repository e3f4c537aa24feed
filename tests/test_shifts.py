"Shifts: the published arithmetic, keyed draws, and nothing changed but what a client holds"
import numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st
from fedbook import corruptions as C, further_corruptions as F, shifts as S
from fedbook.errors import Refused
from fedbook.streams import stream

quick = settings(max_examples=40, deadline=None)

def photos(n=6, size=32, channels=3):
    "Smooth images with every colour, so that blurs and bends do something"
    a = np.linspace(0, 6, size)
    waves = [127+120*np.sin((i+1)*a[:,None] + (c+1)*a) for i in range(n) for c in range(channels)]
    return torch.tensor(np.array(waves)).view(n, channels, size, size).to(torch.uint8)

@pytest.mark.parametrize('kind', C.CORRUPTIONS | F.FURTHER)
def test_each_corruption_keeps_shape_and_is_keyed(kind):
    x,y = photos(),torch.arange(6)
    for severity in range(1, 6):
        a,b = (S.corruption(kind, severity)(x, y, stream(0, 'shift', 1)) for _ in range(2))
        assert a[0].shape == x.shape and a[0].dtype == torch.uint8 and (a[0] == b[0]).all() and (a[1] == y).all()
        assert (a[0] != x).any()
    assert (x == photos()).all()

@pytest.mark.parametrize('kind', ['gaussian_noise','shot_noise','impulse_noise','speckle_noise','defocus_blur','gaussian_blur','zoom_blur','fog','snow','brightness','contrast','jpeg_compression','pixelate', *sorted(F.FURTHER.keys() - {'quadrilateral_no_bars','perspective_no_bars'})])
def test_severity_hurts(kind):
    x = photos(20)
    far = [(S.corruption(kind, s)(x, None, stream(0))[0].double() - x).abs().mean().item() for s in (1, 3, 5)]
    assert far[0] < far[1] < far[2], far

EVERY,COLOURS = [*C.CORRUPTIONS, *F.FURTHER],['saturate','color_balance','hue_shift','technicolor']

@pytest.mark.parametrize('kind', [k for k in EVERY if k not in COLOURS])
@pytest.mark.parametrize('n, h, w, channels', [(2, 28, 28, 1), (1, 45, 45, 1), (2, 33, 24, 3)])
def test_grey_images_and_other_sizes(kind, n, h, w, channels):
    x = photos(n, max(h, w), channels)[:,:,:h,:w]
    with np.errstate(all='raise', under='ignore'): assert S.corruption(kind, 5)(x, None, stream(0))[0].shape == x.shape

@pytest.mark.parametrize('kind', COLOURS)
def test_what_changes_colours_needs_them(kind):
    with pytest.raises(Refused, match='grey'): S.corruption(kind)(photos(1, 8, 1), None, stream(0))

def test_there_are_fifty_types():
    assert len(C.CORRUPTIONS)==19 and len(F.FURTHER)==31 and set(EVERY) <= set(S.SHIFTS)

@pytest.mark.parametrize('kind', EVERY)
def test_an_image_does_not_depend_on_the_next(kind):
    f,x = (C.CORRUPTIONS | F.FURTHER)[kind][0],photos(2).permute(0, 2, 3, 1).numpy()
    level,other = (C.CORRUPTIONS | F.FURTHER)[kind][3],np.stack([x[0], 255-x[1]])
    a,b = (C.corrupted(images, stream(0), f, level)[0] for images in (x, other))
    assert (a==b).all()

STILL = ['single_frequency_greyscale','cocentric_sine_waves','plasma_noise','voronoi_noise','caustic_noise','perlin_noise','blue_noise','brownish_noise','scatter','chromatic_abberation','transverse_chromatic_abberation','circular_motion_blur',
         'color_balance','bleach_bypass','technicolor','pseudocolor','checkerboard_cutout','lines','ripple','water_drop','fish_eye','caustic_refraction','quadrilateral_no_bars','perspective_no_bars']

@pytest.mark.parametrize('kind', STILL)
def test_a_level_of_nothing_changes_nothing(kind):
    x = photos(3).permute(0, 2, 3, 1).numpy()
    np.testing.assert_allclose(F.FURTHER[kind][0](x, stream(0), 0), x/255, atol=1e-9)

def test_hue_is_that_of_matplotlib():
    from matplotlib.colors import hsv_to_rgb, rgb_to_hsv
    x = np.random.default_rng(0).integers(0, 256, (8,6,6,3)).astype(np.uint8)
    turned = [hsv_to_rgb((rgb_to_hsv(x/255) + [d,0,0])%[1,2,2]) for d in (.1,-.1)]
    new = F.hue_shift(x, stream(0), 2)
    either = np.minimum(*(np.abs(new-t).max((1,2,3)) for t in turned))
    assert either.max() < 1e-9 and {int(np.abs(new[i]-turned[0][i]).max() < 1e-9) for i in range(8)}=={0,1}

def test_noise_has_its_spectrum():
    flat = np.zeros((200,16,16,1))
    f = np.hypot(np.fft.fftfreq(16)[:,None]*16, np.fft.fftfreq(16)*16)
    for weight in F.blue,F.brownish:
        power = (np.abs(np.fft.fft2(F.of_spectrum(flat, stream(0), 1, weight)[...,0]))**2).mean(0)
        inside = (f > 0) & (f < 8)
        assert np.corrcoef(np.log(power[inside]), np.log(weight(f[inside])))[0,1] > .95

def test_weights_of_frequencies():
    f = np.array([0., 1., 3.])
    assert F.blue(f).tolist() == [0,1,3] and F.brownish(f) == pytest.approx([1,.5,.1])

def test_distances_and_gloss_stay_within_an_image():
    at = stream(0).random((4,12,9)) < .2
    assert (F.nearest(at) == np.concatenate([F.nearest(a[None]) for a in at])).all()
    assert (C.gloss(at) == np.concatenate([C.gloss(a[None]) for a in at])).all()

def test_grey_levels_are_spread_as_by_the_definition():
    x = np.random.default_rng(0).integers(0, 21, (3,9,9))
    for image,new in zip(x, C.even(x)):
        lower = (image==image.min()).sum()
        for v in np.unique(image):
            assert (new[image==v] == round(((image <= v).sum()-lower)/(81-lower)*255)).all()

def test_noise_has_its_published_strength():
    x = torch.full((50,3,32,32), 128, dtype=torch.uint8)
    def spread(kind, severity): return ((S.corruption(kind, severity)(x, None, stream(0))[0].double()-128)/255).std().item()
    assert spread('gaussian_noise', 1) == pytest.approx(.04, rel=.02) and spread('gaussian_noise', 5) == pytest.approx(.10, rel=.02)
    assert spread('speckle_noise', 3) == pytest.approx(.12*128/255, rel=.02)
    assert spread('shot_noise', 3) == pytest.approx((128/255/100)**.5, rel=.05)
    hit = S.corruption('impulse_noise', 5)(x, None, stream(0))[0]
    assert (hit != 128).double().mean().item() == pytest.approx(.07, abs=.005) and (hit == 255).sum() == pytest.approx((hit == 0).sum().item(), rel=.1)

def test_floats_are_truncated_not_rounded():
    x = torch.tensor([0, 12, 201], dtype=torch.uint8).view(1,1,1,3)                # their mean is 71
    assert S.corruption('contrast', 1)(x, None, None)[0].flatten().tolist() == [int(71+.75*(v-71)) for v in (0, 12, 201)] == [17, 26, 168]

def test_brightness_and_saturation_are_those_of_hsv():
    from matplotlib.colors import hsv_to_rgb, rgb_to_hsv
    x = np.random.default_rng(0).integers(0, 256, (1,40,40,3)).astype(np.uint8)
    x[0,0,:3] = [[0,0,0],[90,90,90],[255,255,255]]
    for s,more in enumerate((.05,.1,.15,.2,.3), 1):
        h = rgb_to_hsv(x/255)
        h[...,2] = np.clip(h[...,2]+more, 0, 1)
        np.testing.assert_allclose(np.clip(C.brightness(x, None, more), 0, 1), hsv_to_rgb(h), atol=1e-12)
    for factor,more in ((.3,0),(.1,0),(1.5,0),(2,.1),(2.5,.2)):
        h = rgb_to_hsv(x/255)
        h[...,1] = np.clip(h[...,1]*factor+more, 0, 1)
        np.testing.assert_allclose(C.saturate(x, None, factor, more), hsv_to_rgb(h), atol=1e-12)

def test_zoom_is_scipys():
    from scipy.ndimage import zoom
    x = np.random.default_rng(0).random((2,32,32,3))
    for z in (1.05, 1.11, 1.26, 2.25):
        part = -int(-32//z)
        top = (32-part)//2
        large = zoom(x[:,top:top+part,top:top+part], (1,z,z,1), order=1)
        t = (large.shape[1]-32)//2
        np.testing.assert_allclose(C.enlarged(x, z), large[:,t:t+32,t:t+32], atol=1e-12)

def test_a_landscape_wraps_around():
    m = C.landscape(40, 32, 3., stream(0))
    inside,across = np.abs(np.diff(m, axis=1)).mean(),np.abs(m[:,0]-m[:,-1]).mean()
    assert across < 1.5*inside and m.min() == 0 and m.max() == 1

def test_smear_shifts_along_the_angle():
    x = np.zeros((2,19,19,1)); x[:,9,9] = 1
    out = C.smear(x, np.array([0.,90.]), 3, 2)[...,0]
    assert out[0,9].sum() == pytest.approx(1) and out[1,:,9].sum() == pytest.approx(1) and np.argmax(out[0,9]) == 9
    np.testing.assert_allclose(out[0,9,9:2:-1]/out[0,9,9], np.exp(-np.arange(7)**2/8))

# Labels, turns, names

def test_label_flip():
    y = torch.arange(4).repeat(1000)
    _,new = S.label_flip([[0,2]], .25)(None, y, stream(0))
    for a,b in ((0,2),(2,0)): assert set(new[y==a].tolist()) == {a,b} and (new[y==a]==b).double().mean().item() == pytest.approx(.25, abs=.05)
    assert (new[(y==1)|(y==3)] == y[(y==1)|(y==3)]).all() and (y == torch.arange(4).repeat(1000)).all()
    assert (S.label_flip([[0,2]])(None, S.label_flip([[0,2]])(None, y, stream(0))[1], stream(0))[1] == y).all()

@pytest.mark.parametrize('bad,said', [
    ('foggy', "'fog'"), (dict(name='fog', severity=0), '1, 2, 3, 4 or 5'), (dict(name='fog', severity=2.5), '2.5'), (dict(name='fog', severity=True), 'severity'), (dict(severity=2), 'None'), (dict(name='fog', level=2), 'level'),
    ('rotate', 'angle'), (dict(name='rotate', angle='x'), 'angle'), (dict(name='rotate', angle=float('nan')), 'angle'), ('label_flip', 'pairs'), (dict(name='label_flip', pairs=[]), 'pairs'), (dict(name='label_flip', pairs=[[0,1],[1,2]]), 'pairs'),
    (dict(name='label_flip', pairs=[[0,1,2]]), 'pairs'), (dict(name='label_flip', pairs=[[0,1]], share=2), 'share'), (dict(name='colour', hue=2), 'hue'), (dict(name='negative', x=1), "no setting 'x'")])
def test_bad_shifts_are_refused_in_one_sentence(bad, said):
    with pytest.raises(Refused) as e: S.named(bad)
    assert said in str(e.value) and str(e.value)[-1] in '.?' and '\n' not in str(e.value)

@quick
@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 99))
def test_shifts_are_dealt_out_equally(k, n, seed):
    shifts = [dict(name='rotate', angle=10*i) for i in range(k)]
    mine = S.for_clients(shifts, n, seed)
    counts = [mine.count(s) for s in shifts]
    assert len(mine) == n and max(counts)-min(counts) <= 1 and mine == S.for_clients(shifts, n, seed)

def test_dealing_depends_on_the_seed_and_checks_names():
    shifts = [dict(name='rotate', angle=i) for i in range(10)]
    assert S.for_clients(shifts, 10, 0) != S.for_clients(shifts, 10, 1)
    for bad in [], 'fog', ['fogg']:
        with pytest.raises(Refused): S.for_clients(bad, 3)

# Applying

def test_only_the_clients_own_samples_change():
    x,y = photos(20, 8),torch.arange(20)%3
    parts = [np.array([0,7,3]), np.array([], int), np.array([4]), np.array([9,8])]
    fs = [S.named(s) for s in (dict(name='label_flip', pairs=[[0,1]]), 'negative', 'negative', 'gaussian_noise')]
    nx,ny = S.shifted(x, y, parts, fs, 3)
    assert (x == photos(20, 8)).all() and (ny[[4,8,9]] == y[[4,8,9]]).all() and ny[[0,7,3]].tolist() == [1,0,1]
    same = np.setdiff1d(np.arange(20), [4,8,9])
    assert (nx[same] == x[same]).all() and (nx[4] == 255-x[4]).all() and (nx[[8,9]] != x[[8,9]]).any()

def test_a_clients_draws_are_its_own():
    "Whoever else is there, and whatever they do"
    x,y,noise = photos(6),torch.zeros(6, dtype=torch.int64),S.named('gaussian_noise')
    parts = [np.array([0,1]), np.array([2,3])]
    a,_ = S.shifted(x, y, parts, [noise, noise])
    b,_ = S.shifted(x, y, parts, [S.named('negative'), noise])
    c,_ = S.shifted(x, y, parts, [noise, noise], 1)
    d,_ = S.shifted(x, y, parts, [noise, noise], 0, 'test')
    assert (a[2:4] == b[2:4]).all() and (a[2:4] != c[2:4]).any() and (a[2:4] != d[2:4]).any()
    flat = torch.full_like(x, 128)
    e,_ = S.shifted(flat, y, parts, [noise, noise])
    assert (e[:2] != e[2:4]).any()

def test_test_parts_may_overlap_and_the_test_set_stays():
    x,y = photos(5),torch.arange(5)%2
    parts = [np.array([0,1]), np.array([1,4]), np.array([], int)]
    nx,ny,places = S.shifted_test(x, y, parts, [S.named(s) for s in ('negative', dict(name='label_flip', pairs=[[0,1]]), 'none')])
    assert (nx[:5] == x).all() and (ny[:5] == y).all() and [p.tolist() for p in places] == [[5,6],[7,8],[]]
    noise = S.named('gaussian_noise')
    assert (S.shifted_test(x, y, [np.arange(5)], [noise])[0][5:] != S.shifted(x, y, [np.arange(5)], [noise])[0]).any()   # a test image draws for itself
    assert (nx[5:7] == 255-x[:2]).all() and (nx[7:] == x[[1,4]]).all() and ny[7:].tolist() == [0,1]

def test_what_cannot_be_shifted_is_refused():
    x,y,f = photos(4, 8),torch.zeros(4, dtype=torch.int64),S.named('negative')
    with pytest.raises(Refused, match='Sample 1 is held 2 times'): S.shifted(x, y, [np.array([0,1]), np.array([1])], [f, f])
    with pytest.raises(Refused, match='one shift per client'): S.shifted(x, y, [np.array([0])], [f, f])
    for bad in (lambda x,y,r: (x.float(), y)), (lambda x,y,r: (x[...,:4], y)), (lambda x,y,r: (x, y.float())):
        with pytest.raises(Refused, match='client 1'): S.shifted(x, y, [np.array([0]), np.array([1])], [f, bad])
