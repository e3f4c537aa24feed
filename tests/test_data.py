"Data sets are what they claim to be, archives stay in their folder, and augmentation moves each image by itself"
import gzip, hashlib, http.client, io, os, pickle, shutil, socket, stat, struct, tarfile, zipfile
from pathlib import Path
import numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st
from fedbook import data
from fedbook.data import *
from fedbook.errors import Refused
from fedbook.streams import seeded

@pytest.fixture
def folder(tmp_path, monkeypatch):
    "An empty data folder, no network, and small catalogue entries"
    monkeypatch.setenv('FEDBOOK_DATA', str(tmp_path/'data'))
    monkeypatch.setenv('FEDBOOK_OFFLINE', '1')
    monkeypatch.setitem(data.CATALOGUE, 'mnist', data.Known((4,4), 20, 10, 10, 'MNIST'))
    monkeypatch.setitem(data.CATALOGUE, 'cifar10', data.Known((32,32,3), 50, 10, 10, 'CIFAR10'))
    return tmp_path/'data'

def made_up(name, label=np.uint8):
    "Arrays as the catalogue wants them"
    k,rng = data.CATALOGUE[name],np.random.default_rng(0)
    return {f'{s}_{a}': rng.integers(0, 256, (n,*k.image)).astype(np.uint8) if a=='x' else (np.arange(n)%k.n_classes).astype(label)
            for s,n in (('train',k.n_train),('test',k.n_test)) for a in 'xy'}

def put(folder, name='mnist', save=np.savez, **changes):
    "Write `name` into the data folder; a change to `None` leaves an array out"
    folder.mkdir(exist_ok=True, parents=True)
    save(folder/f'{name}.npz', **{k: v for k,v in {**made_up(name), **changes}.items() if v is not None})
    return folder/f'{name}.npz'

def one_sentence(e, *parts):
    text = str(e.value)
    assert '\n' not in text and text[-1] in '.?' and all(str(p) in text for p in parts), text

# The set inside the package

def test_embedded_set_is_stratified_small_and_credited():
    d = load('fashion_mnist_mini')
    assert d.source == 'embedded' and d.stand_in_for is None and d.n_classes == 10 and d.classes[9] == 'Ankle boot'
    assert (np.bincount(d.train_y) == 400).all() and (np.bincount(d.test_y) == 100).all()
    assert d.fingerprint == '95ae8c20e3bf3d15'
    assets = Path(data.__file__).parent/'assets'
    assert (assets/'fashion_mnist_mini.npz').stat().st_size < 2.5e6
    assert all(w in (assets/'fashion_mnist_mini.LICENCE.txt').read_text() for w in ('MIT License', 'Zalando', 'Xiao', 'Rasul', 'Vollgraf', '2017'))

def test_embedded_set_ignores_the_data_folder(folder):
    put(folder, 'fashion_mnist_mini', train_x=np.zeros(3))
    assert load('fashion_mnist_mini').fingerprint == '95ae8c20e3bf3d15'

def test_no_test_image_is_a_training_image():
    d = load('fashion_mnist_mini')
    rows = {x.tobytes() for x in d.train_x}
    assert not any(x.tobytes() in rows for x in d.test_x)

# A data set

@pytest.mark.parametrize('name', ['mnist', 'cifar10'])
def test_tensors_are_copies_in_the_right_order(folder, name):
    put(folder, name)
    d = load(name)
    x,y = d.images('train'),d.labels('test')
    assert x.dtype == torch.uint8 and y.dtype == torch.int64 and x.is_contiguous()
    channels = 1 if name == 'mnist' else 3
    assert x.shape == (len(d.train_x), channels, *d.train_x.shape[1:3]) and d.images('test').shape[0] == len(y) == 10
    assert x[3,channels-1,2,1] == (d.train_x[3,2,1] if channels==1 else d.train_x[3,2,1,2])
    before = d.train_x.copy(), d.test_y.copy()
    x.fill_(7), y.fill_(7)
    assert (d.train_x == before[0]).all() and (d.test_y == before[1]).all()
    with pytest.raises(Refused) as e: d.images('tset')
    one_sentence(e, "'test'")

def test_fingerprint_sees_each_array_but_not_the_label_type(folder):
    prints = []
    for change in [{}, *[{k: np.roll(v, 1, 0)} for k,v in made_up('mnist').items()]]:
        put(folder, **change)
        prints.append(load('mnist').fingerprint)
    assert len(set(prints)) == 5
    for t in (np.int64, np.int16, '>i4'):
        put(folder, **made_up('mnist', t))
        d = load('mnist')
        assert d.fingerprint == prints[0] and d.train_y.dtype == d.test_y.dtype == np.int64

def test_display_counts_and_is_escaped(folder):
    put(folder, names=np.array([f'<{c}>' for c in 'abcdefghij']))
    d = load('mnist')
    d.stand_in_for = 'cifar10'
    assert 'mnist: 20 training images (2 per class) and 10 test images, 4×4, 10 classes, mnist.npz, standing in for cifar10' == repr(d)
    h = d._repr_html_()
    assert '&lt;a&gt;, &lt;b&gt;' in h and '<a>' not in h and 'data:image/png;base64,' in h
    assert strip(d.train_x, d.train_y).size == (2*40, 2*4)
    many = np.arange(25)
    x = np.broadcast_to(many[:,None,None,None].astype(np.uint8), (25,4,4,3))
    picture = np.asarray(strip(x, many))
    assert picture.shape == (2*8, 2*80, 3) and picture[0,8,0] == 1 and picture[8,0,0] == 20 and picture[8,-1,0] == 0

# Reading

@pytest.mark.parametrize('key', ['names','names_y','names_fine','names_label'])
def test_class_names_and_further_arrays(folder, key):
    put(folder, **{key: np.array(list('abcdefghij')), 'train_coarse': np.array([object()])})
    d = load('mnist')
    assert d.classes == list('abcdefghij') and d.source == 'mnist.npz'

def test_names_are_optional_but_not_arbitrary(folder):
    put(folder)
    assert load('mnist').classes is None
    for bad in (np.arange(10), np.array(['a','b'])):
        put(folder, names=bad)
        with pytest.raises(Refused) as e: load('mnist')
        one_sentence(e, 'mnist.npz', '10 texts')

@pytest.mark.parametrize('change, says', [
    (dict(test_y=None), "no array 'test_y'"), (dict(train_x=None), "no array 'train_x'"),
    (dict(train_x=np.zeros((20,4,4))), 'train_x'), (dict(test_x=np.zeros((10,4,4), np.int8)), 'test_x'),
    (dict(train_x=np.zeros((19,4,4), np.uint8)), '(20, 4, 4)'), (dict(test_x=np.zeros((10,4,4,3), np.uint8)), '(10, 4, 4)'),
    (dict(train_y=np.zeros(20)), 'integers'), (dict(train_y=np.zeros(20, bool)), 'integers'), (dict(test_y=np.zeros(9, int)), '(10,)'),
    (dict(test_y=np.zeros((10,1), int)), '(10,)'), (dict(train_y=np.full(20, 10)), '0 … 9'), (dict(test_y=np.full(10, -1)), '0 … 9')])
def test_wrong_arrays_are_refused(folder, change, says):
    path = put(folder, **change)
    with pytest.raises(Refused) as e: load('mnist')
    one_sentence(e, path, says)

def test_pickles_are_never_read(folder):
    class Bomb:
        def __reduce__(self): return os.mkdir, (str(folder/'boom'),)
    path = put(folder, train_y=np.array([Bomb()]*20, dtype=object))
    with pytest.raises(Refused) as e: load('mnist')
    one_sentence(e, path, 'delete it')
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(Refused) as e: load('mnist')
    one_sentence(e, path, 'delete it')
    assert not (folder/'boom').exists()

@pytest.mark.parametrize('save', [np.savez, np.savez_compressed])
def test_damaged_files_are_one_sentence_and_stay(folder, save):
    path = put(folder, save=save)
    npy = io.BytesIO()
    np.save(npy, made_up('mnist')['train_x'])
    good,whole = path.read_bytes(),load('mnist').fingerprint
    rng = np.random.default_rng(1)
    cases = [good[:n] for n in (0, 1, 100, len(good)//2, len(good)-1)] + [b'<html>', b'\x93NUMPY' + good, npy.getvalue()]
    for i in rng.integers(len(good), size=400): cases.append(good[:i] + bytes([good[i] ^ (1 << int(rng.integers(8)))]) + good[i+1:])
    refused = 0
    for bad in cases:
        path.write_bytes(bad)
        try: assert load('mnist').fingerprint == whole
        except Refused as e:
            refused += 1
            assert str(path) in str(e) and str(e).endswith('.')
        assert path.read_bytes() == bad
    assert refused > 200

def test_a_folder_in_place_of_the_file(folder):
    (folder/'mnist.npz').mkdir(parents=True)
    with pytest.raises(Refused) as e: load('mnist')
    one_sentence(e, folder/'mnist.npz', 'Is a directory')
    assert 'delete' not in str(e.value)

# Downloading

def test_unknown_and_missing(folder):
    with pytest.raises(Refused) as e: load('fashion-mnist')
    one_sentence(e, "'fashion_mnist'")
    with pytest.raises(Refused) as e: load('cifar100')
    one_sentence(e, folder/'cifar100.npz', 'fedbook data fetch cifar100', 'fashion_mnist_mini', 'train_x', 'FEDBOOK_OFFLINE')
    assert not folder.exists()

def serve_files(monkeypatch):
    "torchvision reads file:// addresses; its checksums stay"
    from fedbook.compat import vision
    def retrieve(url, to):
        print('downloading')
        assert socket.getdefaulttimeout() == 10
        shutil.copyfile(url.removeprefix('file://'), to)
    monkeypatch.setattr(vision().datasets.utils, '_urlretrieve', retrieve)
    monkeypatch.delenv('FEDBOOK_OFFLINE')

def serve_mnist(tmp_path, monkeypatch, spoil=False):
    "Official-looking MNIST files with made-up content, behind file:// addresses"
    from fedbook.compat import vision
    arrays,resources = made_up('mnist'),[]
    (tmp_path/'site').mkdir()
    for split,part in (('train','train'),('t10k','test')):
        for kind,a,magic in (('images-idx3',arrays[f'{part}_x'],0x803),('labels-idx1',arrays[f'{part}_y'],0x801)):
            raw = gzip.compress(struct.pack(f'>{1+a.ndim}I', magic, *a.shape) + a.tobytes())
            resources.append((f'{split}-{kind}-ubyte.gz', hashlib.md5(raw).hexdigest()))
            (tmp_path/'site'/resources[-1][0]).write_bytes(raw + b'!'*spoil)
    monkeypatch.setattr(vision().datasets.MNIST, 'mirrors', [f'file://{tmp_path}/site/'])
    monkeypatch.setattr(vision().datasets.MNIST, 'resources', resources)
    serve_files(monkeypatch)
    return arrays

def test_mnist_through_torchvision(folder, tmp_path, monkeypatch, capfd):
    arrays = serve_mnist(tmp_path, monkeypatch)
    d = load('mnist')
    assert all((getattr(d, k) == v).all() for k,v in arrays.items())
    assert d.classes[:2] == ['0', '1'] and d.source == 'mnist.npz' and os.listdir(folder) == ['mnist.npz']
    shutil.rmtree(tmp_path/'site')
    assert load('mnist').fingerprint == d.fingerprint
    assert capfd.readouterr().out == '' and socket.getdefaulttimeout() is None

def test_wrong_checksum_is_refused(folder, tmp_path, monkeypatch):
    serve_mnist(tmp_path, monkeypatch, spoil=True)
    with pytest.raises(Refused) as e: load('mnist')
    one_sentence(e, folder/'mnist.npz', 'fedbook data fetch mnist', 'corrupted')
    assert not folder.exists()

def test_a_download_of_another_size_is_refused(folder, tmp_path, monkeypatch):
    serve_mnist(tmp_path, monkeypatch)
    monkeypatch.setitem(data.CATALOGUE, 'mnist', data.Known((4,4), 21, 10, 10, 'MNIST'))
    with pytest.raises(Refused) as e: load('mnist')
    one_sentence(e, 'The download', '(21, 4, 4)')
    assert not folder.exists()

def test_cifar_through_torchvision(folder, tmp_path, monkeypatch):
    from fedbook.compat import vision
    arrays,C = made_up('cifar10'),vision().datasets.CIFAR10
    def entry(tar, name, value):
        raw = pickle.dumps(value)
        info = tarfile.TarInfo(f'{C.base_folder}/{name}')
        info.size = len(raw)
        tar.addfile(info, io.BytesIO(raw))
        return hashlib.md5(raw).hexdigest()
    flat = lambda x: x.transpose(0,3,1,2).reshape(len(x), -1)
    with tarfile.open(tmp_path/C.filename, 'w:gz') as tar:
        train = [[n, entry(tar, n, dict(data=flat(arrays['train_x'][i::5]), labels=arrays['train_y'][i::5].tolist()))] for i,(n,_) in enumerate(C.train_list)]
        test = [['test_batch', entry(tar, 'test_batch', dict(data=flat(arrays['test_x']), labels=arrays['test_y'].tolist()))]]
        meta = dict(C.meta, md5=entry(tar, C.meta['filename'], dict(label_names=list('abcdefghij'))))
    for k,v in dict(url=f'file://{tmp_path}/{C.filename}', tgz_md5=hashlib.md5((tmp_path/C.filename).read_bytes()).hexdigest(),
                    train_list=train, test_list=test, meta=meta).items(): monkeypatch.setattr(C, k, v)
    serve_files(monkeypatch)
    d = load('cifar10')
    assert d.classes == list('abcdefghij') and (d.test_x == arrays['test_x']).all()
    assert (d.train_x == np.concatenate([arrays['train_x'][i::5] for i in range(5)])).all() and d.train_y.dtype == np.int64

@pytest.mark.parametrize('error', [OSError('timed out'), http.client.BadStatusLine('?'), RuntimeError('Error downloading x:\nTried y, got:\nno route\n'), OSError()])
def test_no_network(folder, monkeypatch, error):
    seen = []
    def download(name): seen.append(name); raise error
    monkeypatch.setattr(data, 'download', download)
    with pytest.raises(Refused) as e: load('mnist')
    assert not seen
    monkeypatch.delenv('FEDBOOK_OFFLINE')
    with pytest.raises(Refused) as e: load('mnist')
    one_sentence(e, folder/'mnist.npz')
    assert seen == ['mnist'] and not folder.exists()

def test_patience_ends():
    with pytest.raises(KeyError):
        with patience(3):
            assert socket.getdefaulttimeout() == 3
            raise KeyError
    assert socket.getdefaulttimeout() is None

def test_describe(folder):
    path = put(folder)
    d = {e['name']: e for e in describe()}
    assert [n for n in d if n in CATALOGUE] == list(CATALOGUE) and d['mnist']['where'] == str(path) and d['cifar10']['where'] is None
    assert d['cifar10'] == dict(name='cifar10', where=None, stand_in='fashion_mnist_mini', how='fedbook data fetch cifar10')
    assert d['fashion_mnist_mini']['where'] == 'embedded' and d['fashion_mnist_mini']['stand_in'] is None

# Archives

def pack(path, members):
    "A zip or tar archive of (name, content), where content is bytes or a key of `ODD`"
    if path.suffix == '.zip':
        with zipfile.ZipFile(path, 'w') as z:
            for name,content in members:
                info = zipfile.ZipInfo(name)
                if content == LINK: info.external_attr,content = (stat.S_IFLNK|0o777) << 16,b'/etc'
                z.writestr(info, content)
    else:
        with tarfile.open(path, 'w:' + {'.tar':'','.tgz':'gz','.xz':'xz'}[path.suffix]) as t:
            for name,content in members:
                info = tarfile.TarInfo(name)
                if isinstance(content, bytes): info.size = len(content); t.addfile(info, io.BytesIO(content))
                else: info.type,info.linkname = ODD[content],'/etc'; t.addfile(info)
    return path

LINK = 'a symbolic link'
ODD = {LINK: tarfile.SYMTYPE, 'a hard link': tarfile.LNKTYPE, 'a pipe': tarfile.FIFOTYPE, 'a device': tarfile.CHRTYPE}
KINDS = ['a.zip', 'a.tar', 'a.tgz', 'a.tar.xz']

@pytest.mark.parametrize('kind', KINDS)
def test_extract(tmp_path, kind):
    a = pack(tmp_path/kind, [('x/y.txt', b'hello'), ('z', b'')])
    to = tmp_path/'deep'/'out'
    assert extract(a, to) == to and (to/'x'/'y.txt').read_bytes() == b'hello' and sorted(os.listdir(to)) == ['x','z']
    assert os.listdir(tmp_path/'deep') == ['out']
    with pytest.raises(Refused) as e: extract(a, to)
    one_sentence(e, to, 'exists')

@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('bad', [('../evil', b'!'), ('a/../../evil', b'!'), ('/evil', b'!'), ('..\\evil', b'!'), ('C:\\evil', b'!'), ('link', LINK)])
def test_unsafe_archives_are_refused_before_anything_is_written(tmp_path, monkeypatch, kind, bad):
    a = pack(tmp_path/kind, [('fine', b'ok'), bad])
    written = []
    monkeypatch.setattr(data.tempfile, 'TemporaryDirectory', lambda *a, **k: written.append(a))
    with pytest.raises(Refused) as e: extract(a, tmp_path/'deep'/'out')
    one_sentence(e, a, bad[0].replace('\\','\\\\'))
    assert os.listdir(tmp_path) == [kind] and not written

@pytest.mark.parametrize('kind', list(ODD))
def test_hard_links_and_devices_are_refused(tmp_path, kind):
    with pytest.raises(Refused): extract(pack(tmp_path/'a.tar', [('x', kind)]), tmp_path/'out')
    assert os.listdir(tmp_path) == ['a.tar']

@pytest.mark.parametrize('how', [0, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, 'w:', 'w:gz', 'w:bz2', 'w:xz'])
def test_flipped_bits_never_escape_as_another_exception(tmp_path, how):
    a,rng = tmp_path/'a',np.random.default_rng(2)
    if isinstance(how, int):
        with zipfile.ZipFile(a, 'w', how) as z: z.writestr('d/x', b'ab'*50), z.writestr('y', b'c'*60)
    else:
        with tarfile.open(a, how) as t: t.add(data.__file__, 'd/x'), t.add(__file__, 'y')
    good = a.read_bytes()
    for i in [*range(min(60, len(good))), *rng.integers(len(good), size=60)]:
        a.write_bytes(good[:i] + bytes([good[i] ^ (1 << int(rng.integers(8)))]) + good[i+1:])
        try: shutil.rmtree(extract(a, tmp_path/'out'))
        except Refused as e: assert str(a) in str(e) and not (tmp_path/'out').exists()
        assert os.listdir(tmp_path) == ['a']

@pytest.mark.parametrize('kind', KINDS)
def test_damaged_archives_are_one_sentence(tmp_path, kind):
    a = pack(tmp_path/kind, [(f'f{i}', np.random.default_rng(i).bytes(3000)) for i in range(4)])
    good = a.read_bytes()
    for bad in (b'', b'no archive', good[:len(good)//2], good[:5000]):
        a.write_bytes(bad)
        with pytest.raises(Refused) as e: extract(a, tmp_path/'out')
        one_sentence(e, a)
        assert os.listdir(tmp_path) == [kind]
    a.unlink()
    with pytest.raises(Refused) as e: extract(a, tmp_path/'out')
    one_sentence(e, a, 'No such file')

def test_a_folder_that_cannot_be_made(tmp_path):
    a = pack(tmp_path/'a.zip', [('x', b'')])
    (tmp_path/'file').write_text('')
    with pytest.raises(Refused) as e: extract(a, tmp_path/'file'/'out')
    one_sentence(e, tmp_path/'file'/'out')

@pytest.mark.parametrize('kind', KINDS)
def test_install(folder, tmp_path, kind):
    files = [(f'some/where/{n}.npz', put(tmp_path/'made', n).read_bytes()) for n in ('cifar10','mnist')]
    a = pack(tmp_path/kind, [('read.me', b'hi'), ('__MACOSX/._mnist.npz', b'?'), *files])
    assert install(a) == ['cifar10','mnist'] and sorted(os.listdir(folder)) == ['cifar10.npz','mnist.npz']
    assert load('mnist').n_classes == 10
    with pytest.raises(Refused) as e: install(a)
    one_sentence(e, folder/'cifar10.npz', 'delete it')

def test_install_of_one_file(folder, tmp_path):
    assert install(put(tmp_path/'made')) == ['mnist'] and load('mnist').source == 'mnist.npz'

@pytest.mark.parametrize('bad', [('cifra10.npz', b''), ('mnist.npz', b'damaged'), ('fashion_mnist_mini.npz', b''), ('x.txt', None)])
def test_install_refuses_as_a_whole(folder, tmp_path, bad):
    good = put(tmp_path/'made', 'cifar10').read_bytes()
    members = [('x.txt', b'')] if bad[1] is None else [('cifar10.npz', good), bad]
    with pytest.raises(Refused) as e: install(pack(tmp_path/'a.zip', members))
    one_sentence(e)
    assert not folder.exists()

# The validation part

@given(y=st.lists(st.integers(0,5), min_size=0, max_size=80), share=st.floats(.01,.99), seed=st.integers(0,5))
@settings(max_examples=200, deadline=None)
def test_split_is_disjoint_complete_and_stratified(y, share, seed):
    train,val = split_validation(y, share, seed)
    n,m = len(y),len(val)
    assert sorted([*train, *val]) == list(range(n)) and (np.diff(train) > 0).all() and (np.diff(val) > 0).all()
    if n < 2: assert m == 0; return
    assert m == min(max(1, round(share*n)), n-1)
    for c in set(y):
        exact = y.count(c)*m/n
        assert np.floor(exact) <= sum(y[i]==c for i in val) <= np.ceil(exact)
    assert all((a == b).all() for a,b in zip((train,val), split_validation(y, share, seed)))

def test_split_by_number_and_its_key():
    train,val = split_validation(1000, .1)
    assert len(val) == 100 and len(train) == 900
    others = [split_validation(1000, .1, 1)[1], split_validation(1000, .1, 0, 'client', 3)[1], split_validation(torch.zeros(1000), .1, 2)[1]]
    assert all(len(o) == 100 and (o != val).any() for o in others)
    assert len({tuple(split_validation(20, .25, s)[1]) for s in range(100)}) > 90
    assert {int(split_validation([0]*5+[1]*5, .1, s)[1][0]) // 5 for s in range(20)} == {0,1}
    counts = sum(np.isin(np.arange(20), split_validation(20, .25, s)[1]).astype(int) for s in range(400))
    assert counts.min() > 60 and counts.max() < 140 # each sample in a quarter of 400 draws

@pytest.mark.parametrize('share', [0, 1, -.1, 1.5, float('nan')])
def test_share_is_checked(share):
    with pytest.raises(Refused): split_validation(10, share)

# Normalisation

@pytest.mark.parametrize('name', list(STATISTICS))
def test_normaliser_is_its_formula(name):
    mean,std = (np.array(v).reshape(-1,1,1) for v in STATISTICS[name])
    x = torch.randint(0, 256, (5, 3, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    y = normaliser(name)(x)
    assert y.dtype == torch.float32 and y.shape == x.shape
    np.testing.assert_allclose(y, (x.numpy()/255-mean)/std, atol=2e-6)
    torch.testing.assert_close(normaliser(*map(list, STATISTICS[name]))(x), y)

def test_resizing_and_cropping():
    "A grey image stays grey, sizes are as asked for, and a crop is the middle"
    x = torch.full((2, 1, 6, 6), 51, dtype=torch.uint8)
    assert torch.allclose(normaliser(size=9)(x), torch.full((2, 1, 9, 9), -.6))
    x = torch.arange(36, dtype=torch.uint8).view(1, 1, 6, 6)
    assert (normaliser(crop=2)(x) == normaliser()(x)[:,:,2:4,2:4]).all()
    assert normaliser(size=8, crop=6, channels=3)(x).shape == (1, 3, 6, 6)

def test_grey_becomes_colour():
    x = torch.arange(16, dtype=torch.uint8).view(1,1,4,4)
    z = normaliser('imagenet', channels=3)(x)
    assert z.shape == (1,3,4,4)
    assert (z == normaliser('imagenet')(x.repeat(1,3,1,1))).all() and (x.flatten() == torch.arange(16)).all()
    assert normaliser('mnist', channels=3)(x).shape == (1,3,4,4)

@pytest.mark.parametrize('bad', [dict(mean='cifar1000'), dict(mean='cifar10', std=.5), dict(mean=.5), dict(mean=[.5], std=[0]), dict(mean=[.5]*3, std=[.5]),
    dict(mean=[.5]*2, std=[.5]*2), dict(channels=2), dict(size=0), dict(size=2.5), dict(crop=-1), dict(mean=[.5], std=['a'])])
def test_bad_normalisers(bad):
    with pytest.raises(Refused) as e: normaliser(**bad)
    one_sentence(e)

def test_bad_images():
    with pytest.raises(Refused): normaliser()(torch.zeros(1,1,2,2))
    with pytest.raises(Refused) as e: normaliser('cifar10')(torch.zeros(1,1,2,2, dtype=torch.uint8))
    one_sentence(e, 'channels=3')

# Augmentation

def by_hand(x, top, left, mirrored, size, padding):
    "The augmentation of one image, in plain words"
    y = np.pad(x, ((0,0),(padding,padding),(padding,padding)))[:, top:top+size, left:left+size]
    return y[:,:,::-1] if mirrored else y

@pytest.mark.parametrize('channels, size, padding', [(1,8,2), (3,8,4), (3,6,0), (1,11,2)])
def test_each_image_is_a_window_of_itself(channels, size, padding):
    x = torch.randint(1, 256, (12, channels, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    out = augmenter('flip_crop', size=size, padding=padding)(x, torch.zeros(12))[0]
    assert out.shape == (12, channels, size, size) and out.dtype == torch.uint8
    steps = range(8+2*padding-size+1)
    for a,b in zip(x.numpy(), out.numpy()):
        assert sum((by_hand(a, t, l, m, size, padding) == b).all() for t in steps for l in steps for m in (0,1)) == 1

def test_all_windows_occur_inside_one_batch_and_evenly():
    x = torch.arange(1, 17, dtype=torch.uint8).view(1,1,4,4).expand(9000,-1,-1,-1)
    with seeded(0, 'windows'): kinds,counts = augmenter(size=4, padding=1)(x, torch.zeros(len(x)))[0].unique(dim=0, return_counts=True)
    assert len(kinds) == 18 and counts.min() > 400 and counts.max() < 600

def test_augmentation_is_decided_by_the_stream():
    x,change = load('fashion_mnist_mini').images('train')[:50],augmenter(size=28)
    def f(x): return change(x, torch.zeros(len(x)))[0]
    with seeded(0, 'a'): a = f(x)
    torch.rand(7)
    with seeded(0, 'a'): assert (f(x) == a).all()
    with seeded(1, 'a'): assert (f(x) != a).any()

def test_bad_augmentations():
    for bad in (dict(name='flipcrop'), dict(sise=3), dict(size=-1), dict(padding=-1), dict(padding=1.5)):
        with pytest.raises(Refused) as e: augmenter(**bad)
        one_sentence(e)
    with pytest.raises(Refused) as e: augmenter(size=32, padding=1)(torch.zeros(1,1,28,28, dtype=torch.uint8), torch.zeros(1))
    one_sentence(e, '32', '30')

# Groups, other targets, and test sets that nobody set apart

def entry(monkeypatch, **kw):
    monkeypatch.setitem(data.CATALOGUE, 'odd', data.Known(**{**dict(image=(4,4), n_train=16, n_test=4, n_classes=2, official=None, origin='a thing of ours'), **kw}))

def odd(n=20, **more): return dict(train_x=np.repeat(np.arange(n, dtype=np.uint8), 16).reshape(n,4,4), train_y=np.arange(n)%2, **more)

def write(folder, name, arrays):
    folder.mkdir(exist_ok=True, parents=True)
    np.savez(folder/f'{name}.npz', **arrays)

def test_groups_of_a_file_leave_its_fingerprint(folder):
    put(folder)
    plain = load('mnist')
    put(folder, train_coarse=np.arange(20)//5, test_coarse=np.arange(10)//5, names_coarse=np.array(list('wxyz')), train_age=np.arange(20), train_z=np.zeros(20), test_z=np.zeros(10))
    d = load('mnist')
    assert list(d.groups) == ['coarse'] and d.group_names == dict(coarse=list('wxyz')) and d.classes is None
    assert d.fingerprint == plain.fingerprint == d.fingerprint_with() != d.fingerprint_with('coarse')
    assert d.groups_of('test')['coarse'].tolist() == [0]*5+[1]*5 and d.groups_of('train', [3,7])['coarse'].tolist() == [0,1]
    assert '4 values of coarse' in repr(d) and '4 values of coarse' in d._repr_html_()
    with pytest.raises(Refused) as e: d.group('coarze')
    one_sentence(e, "'coarse'")

@pytest.mark.parametrize('change', [dict(train_coarse=np.zeros(19, int)), dict(test_coarse=np.zeros(11, int))])
def test_groups_of_a_wrong_length_are_refused(folder, change):
    put(folder, **{**dict(train_coarse=np.zeros(20, int), test_coarse=np.zeros(10, int)), **change})
    with pytest.raises(Refused) as e: load('mnist')
    one_sentence(e, "'coarse'")

@pytest.mark.parametrize('bad', [np.zeros(3), np.zeros(2, int), np.zeros((3,1), int), np.array(['a']*3)])
def test_groups_are_whole_numbers(bad):
    with pytest.raises(Refused) as e: data.Dataset('d', np.zeros((3,4,4), np.uint8), np.zeros(3, int), np.zeros((1,4,4), np.uint8), np.zeros(1, int), groups=dict(g=(bad, np.zeros(1, int))))
    one_sentence(e, "'g'", 'd')

def test_a_fifth_becomes_the_test_set(folder, monkeypatch):
    entry(monkeypatch, cut=('kind','y'))
    write(folder, 'odd', odd(train_kind=np.arange(20)//10))
    d = load('odd')
    assert [len(d.train_y), len(d.test_y)] == [16, 4] and (d.fingerprint == load('odd').fingerprint)
    assert sorted(zip(d.test_y.tolist(), d.group('kind')[1].tolist())) == [(0,0),(0,1),(1,0),(1,1)]
    seen = {x.tobytes() for x in d.train_x} | {x.tobytes() for x in d.test_x}
    assert len(seen) == 20
    entry(monkeypatch, cut='patient')
    write(folder, 'odd', odd(train_patient=np.arange(20)//4*7))
    d = load('odd')
    assert not set(d.group('patient')[0]) & set(d.group('patient')[1]) and len(d.test_y) == 4

@pytest.mark.parametrize('without', ['train_patient','train_x','train_y'])
def test_what_a_test_set_is_cut_from_must_be_there(folder, monkeypatch, without):
    entry(monkeypatch, cut='patient')
    write(folder, 'odd', {k: a for k,a in odd(train_patient=np.arange(20)).items() if k != without})
    with pytest.raises(Refused) as e: load('odd')
    one_sentence(e, without, 'odd.npz')

def test_several_labels_and_masks(folder, monkeypatch):
    entry(monkeypatch, target='multilabel', n_classes=3, cut=())
    many = np.eye(3, dtype=np.float64)[np.arange(20)%3]
    many[0,1] = float('nan')
    write(folder, 'odd', dict(train_x=odd()['train_x'], train_multilabel=many, names_multilabel=np.array(list('abc'))))
    d = load('odd')
    assert d.kind == 'labels' and d.n_classes == 3 and d.classes == list('abc') and d.labels('train').dtype == torch.float32
    assert np.isnan(np.concatenate([d.train_y, d.test_y])).sum() == 1 and not d.strata('train').any() and len(d.strata('test')) == 4
    assert '3 labels' in repr(d) and 'image/png' in d._repr_html_()
    entry(monkeypatch, target='mask', cut=())
    write(folder, 'odd', dict(train_x=odd()['train_x'], train_mask=(np.arange(320).reshape(20,4,4)%3==0).astype(np.uint8)*255))
    d = load('odd')
    assert d.kind == 'masks' and d.n_classes == 2 and d.labels('test').shape == (4,4,4) and d.labels('test').dtype == torch.int64
    assert d.train_y.max() == 1 and '2 classes of pixels' in repr(d) and d._repr_html_()

@pytest.mark.parametrize('target,bad', [('multilabel', np.full((20,2), 2)), ('multilabel', np.zeros((20,3))), ('mask', np.full((20,4,4), 2)), ('mask', np.zeros((20,3,4), int)), ('mask', np.zeros((20,4,4)))])
def test_wrong_targets_are_refused(folder, monkeypatch, target, bad):
    entry(monkeypatch, target=target, cut=())
    write(folder, 'odd', {'train_x': odd()['train_x'], f'train_{target}': bad})
    with pytest.raises(Refused) as e: load('odd')
    one_sentence(e, f'_{target}')
    np.savez(folder/'odd.npz', train_x=odd()['train_x'])
    with pytest.raises(Refused) as e: load('odd')
    one_sentence(e, f'train_{target}')

@pytest.mark.parametrize('name', [n for n,k in CATALOGUE.items() if k.origin])
def test_what_nothing_can_download_says_what_it_is(folder, monkeypatch, name):
    monkeypatch.delenv('FEDBOOK_OFFLINE')
    with pytest.raises(Refused) as e: load(name)
    one_sentence(e, folder/f'{name}.npz', CATALOGUE[name].origin, f'train_{CATALOGUE[name].target}', CATALOGUE[name].stand_in)

def test_what_nothing_can_download_can_be_installed(folder, tmp_path, monkeypatch):
    entry(monkeypatch, cut='patient')
    write(tmp_path/'made', 'odd', odd(train_patient=np.arange(20)//4))
    how = {e['name']: e['how'] for e in describe()}
    assert how['odd'] == 'fedbook data install odd.npz' and how['usps'] == 'fedbook data fetch usps'
    assert install(tmp_path/'made'/'odd.npz') == ['odd'] and len(load('odd').groups) == 1

# The reader's own

def mine(n=8, m=4, **kw):
    x = np.arange((n+m)*16, dtype=np.uint8).reshape(-1,4,4)
    return {**dict(train_x=x[:n], train_y=np.arange(n)%2, test_x=x[n:], test_y=np.arange(m)%2), **kw}

@pytest.fixture
def own(monkeypatch): monkeypatch.setattr(data, 'OWN', {}), monkeypatch.setattr(data, 'STATISTICS', dict(STATISTICS))

def test_own_data_is_found_by_name(own):
    d = add('mine', **mine(), classes=('a','b'), groups=dict(who=(np.arange(8)%4, np.arange(4))))
    assert load('mine') is d and d.classes == ['a','b'] and d.n_classes == 2 and 'mine: 8 training images' in repr(d) and d._repr_html_()
    assert [e for e in describe() if e['name']=='mine'][0]['where'] == 'memory'
    assert add('mine', **mine(), classes=['a','b'], groups=d.groups) is d
    assert abs(normaliser('mine')(d.images('train')).mean()) < 1e-6
    for other in dict(mine(), train_y=np.ones(8, int)), dict(mine(), groups={}), dict(mine(), classes=['a','c'], groups=d.groups):
        with pytest.raises(Refused) as e: add('mine', **other)
        one_sentence(e, "'mine'", 'another name')
    with pytest.raises(Refused) as e: add('mnist', **mine())
    one_sentence(e, "'mnist'")
    with pytest.raises(Refused) as e: load('mien')
    one_sentence(e, "'mine'")

def test_own_data_is_a_copy(own):
    arrays = mine()
    d = add('mine', **arrays)
    before = d.fingerprint
    arrays['train_x'][:] = 0
    assert d.train_x.max() > 0 and before == arrays_fingerprint(d.train_x, d.train_y, d.test_x, d.test_y)

@pytest.mark.parametrize('y', [np.array([[0,1.],[1,float('nan')]]*4), np.arange(8*16).reshape(8,4,4)%3])
def test_own_targets_of_other_kinds(own, y):
    d = add('mine', **mine(train_y=y, test_y=y[:4]))
    assert d.kind == ('labels' if y.ndim==2 else 'masks') and d.n_classes == y.ndim and len(d.labels('train')) == 8

@pytest.mark.parametrize('bad', [dict(train_x=np.zeros((8,4,4))), dict(test_x=np.zeros((4,5,4), np.uint8)), dict(train_x=np.zeros((8,16), np.uint8)), dict(train_x=np.zeros((8,4,4,4), np.uint8)),
    dict(train_y=np.zeros(7, int)), dict(train_y=np.zeros(8)-1), dict(test_y=np.full(4, 2), classes=['a','b']), dict(train_y=np.zeros((8,2,2,2), int)), dict(groups=dict(g=np.zeros(8, int))),
    dict(train_x=np.zeros((0,4,4), np.uint8), train_y=np.zeros(0, int)), dict(train_y=np.full((8,2), 3), test_y=np.zeros((4,2)))])
def test_own_data_that_does_not_fit_is_refused(own, bad):
    with pytest.raises(Refused) as e: add('mine', **mine(**bad))
    one_sentence(e, 'mine')
    assert not data.OWN

def test_own_data_makes_a_federation(own):
    from fedbook.experiments import dataset, federation, Setting
    dataset.cache_clear()
    add('mine', **mine(40, 8))
    fed = federation(Setting('mine', partition=dict(name='iid', n_clients=4), protocol=dict(per_round=4)))
    assert len(fed.data.clients) == 4 and fed.data.x.shape == (40,1,4,4)
    dataset.cache_clear()

# Several sources

def test_join(own):
    a = add('a', **mine(), classes=['p','q'])
    colour = {k: np.stack([v]*3, -1).repeat(2, 1).repeat(2, 2) if k.endswith('x') else v for k,v in mine(6, 2).items()}
    b = add('b', **colour)
    j = join(['a', b], size=8)
    assert j.name == 'a+b' and j.train_x.shape == (14,8,8,3) and j.test_x.shape == (6,8,8,3) and j.classes == ['p','q']
    assert j.group('domain')[0].tolist() == [0]*8+[1]*6 and j.group('domain')[1].tolist() == [0]*4+[1]*2 and j.group_names == dict(domain=['a','b'])
    assert (j.train_x[8:] == b.train_x).all() and (j.train_y == np.concatenate([a.train_y, b.train_y])).all()
    assert (j.train_x[...,0] == j.train_x[...,2]).all()
    grey = join([a, b], size=4, channels=1, name='grey')
    assert (grey.train_x[:8] == a.train_x).all() and grey.train_x.shape == (14,4,4) and keep(grey) is load('grey')
    for other in dict(mine(), classes=['q','p']), dict(mine(), train_y=np.arange(8)%3):
        with pytest.raises(Refused) as e: join([a, data.Dataset('other', **other)])
        one_sentence(e, 'other', 'same classes')
    for bad in dict(size=0), dict(channels=2), dict(datasets=[]):
        with pytest.raises(Refused): join(**{**dict(datasets=[a]), **bad})
