"Models: counts, names, weights from files, and models as pure functions."
import copy, pickle
import pytest, torch
from safetensors.torch import save_file
from torch.func import functional_call, grad, vmap
from torch import nn
from fedbook import models
from fedbook.errors import Refused
from fedbook.models import BUILT_IN, Classifier, Net, build, load_body, local_weights, n_parameters, own_weights, read_weights, weights_fingerprint
from fedbook.streams import seeded

SMALL = dict(softmax={}, mlp=dict(hidden=(16,8)), cnn_fedcspack_fmnist={}, resnet18=dict(stem='cifar', in_channels=1), vit_tiny32=dict(in_channels=1, patch=4, dim=16, depth=2, heads=2))
def small(name, seed=0):
    m = build(name, seed=seed, **dict(dict(image_size=28), **SMALL[name]))
    if name == 'resnet18': # half of it is enough
        with seeded(seed, 'head'): m.body.layer3,m.body.layer4,m.head = nn.Identity(),nn.Identity(),nn.Linear(128, 10)
    return m
def stack(ds): return {k: torch.stack([d[k] for d in ds]) for k in ds[0]}
def batch(n, seed, size=28): return torch.rand(n, 1, size, size, generator=torch.Generator().manual_seed(seed))
def close(a, b, tol): return all(torch.allclose(a[k].double(), b[k].double(), rtol=tol, atol=tol) for k in b) and a.keys() == b.keys()

@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv('FEDBOOK_DATA', str(tmp_path)); monkeypatch.setenv('FEDBOOK_OFFLINE', '1')
    monkeypatch.setenv('HF_HUB_CACHE', str(tmp_path/'hub'))
    (tmp_path/'weights').mkdir()
    return tmp_path

@pytest.mark.parametrize('name,classes,n', [('softmax',10,7_850), ('mlp',10,199_210), ('cnn',10,1_663_370), ('cnn_fedcspack_fmnist',10,100_816),
    ('cnn_fedcspack_emnist',None,3_787_710), ('cnn_fedcspack_cifar',10,541_094), ('cnn_fedcspack_cifar',100,586_184), ('resnet18',100,11_227_812),
    ('cnn_fedref_femnist',None,1_165_246), ('cnn_fedref_cinic',10,620_362), ('resnet50',1000,25_557_032), ('vit_small_patch16_224.dino',100,21_704_164)])
def test_parameter_counts(name, classes, n): assert n_parameters(build(name, classes)) == n

@pytest.mark.parametrize('name', BUILT_IN)
def test_every_model_is_body_and_head(name):
    net = Net(build(name, n_classes=7))
    m = net.module
    c = next((l.in_channels for l in m.modules() if isinstance(l, nn.Conv2d)), 1)
    x = torch.rand(2, c, *(2*[32 if c == 3 else 28]))
    w,b = net.weights(),net.buffers()
    z = net.features(w, b, x)
    assert all(k.startswith(('body.','head.')) for k in {**w, **b})
    assert z.shape == (2, m.n_features) and net.logits(w, b, x).shape == (2, 7)
    assert torch.equal(net.head(w, z), net.logits(w, b, x)) and torch.equal(m(x), net.logits(w, b, x))

@pytest.mark.parametrize('name', [n for n in BUILT_IN if not n.startswith(('softmax','mlp','resnet'))])
def test_other_image_sizes_and_channels(name):
    assert build(name, in_channels=2, image_size=40)(torch.rand(2, 2, 40, 40)).shape[0] == 2

def test_the_small_vit_has_a_batching_rule():
    assert not any(b.attn.fused_attn for b in build('vit_tiny32').body.blocks)

def test_names_follow_torchvision():
    names = dict(build('resnet18').named_parameters())
    assert {'body.conv1.weight','body.bn1.bias','body.layer1.0.conv1.weight','body.layer2.0.downsample.0.weight','head.bias'} <= names.keys()
    cifar = build('resnet18', stem='cifar').body
    assert cifar.conv1.stride == (1,1) and cifar.conv1.kernel_size == (3,3) and isinstance(cifar.maxpool, nn.Identity)

def test_fresh_weights_have_their_own_stream():
    torch.manual_seed(1); before = torch.get_rng_state()
    a = build('cnn_fedcspack_fmnist', seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    assert weights_fingerprint(a) == weights_fingerprint(build('cnn_fedcspack_fmnist', seed=3)) != weights_fingerprint(build('cnn_fedcspack_fmnist', seed=4))

@pytest.mark.parametrize('call,word', [(lambda: build('resnet_18'), 'resnet18'), (lambda: build('mlp', hiden=(3,)), "'hidden'"), (lambda: build('mlp', hidden=()), 'softmax'),
    (lambda: build('cnn', image_size=4, padding=0), 'too small'), (lambda: build('cnn', n_classes='10'), 'n_classes'), (lambda: build('resnet18', stem='cifr'), 'cifar'),
    (lambda: build('resnet18', depth=50), 'depth'), (lambda: build('vit_tiny32', image_size=30), 'multiple'), (lambda: build('vit_tiny32', heads=3), 'multiple'),
    (lambda: build('vit_small_patch16_224.dinno'), 'vit_small_patch16_224.dino'), (lambda: Net(build('mlp'), 'body.fc3'), 'body.fc'), (lambda: Net(build('mlp'), 'bod'), 'body')])
def test_refusals(call, word):
    with pytest.raises(Refused, match=word): call()

@pytest.mark.parametrize('train', [False, True])
@pytest.mark.parametrize('name', ['softmax','cnn_fedcspack_fmnist','resnet18','vit_tiny32'])
def test_stacked_clients_equal_the_loop(name, train):
    nets = [Net(small(name, s)) for s in range(3)]
    net,size = nets[0],(8 if name == 'resnet18' else 28)
    if name == 'cnn_fedcspack_fmnist': net = Net(build(name, dropout_maps=0.))
    xs,ys = torch.stack([batch(4, s, size) for s in range(3)]),torch.arange(4).repeat(3, 1)
    for dtype,tol in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        cast = lambda d: {k: v.to(dtype) if v.is_floating_point() else v for k,v in d.items()}
        ws,bs,x = [cast(n.weights()) for n in nets],[cast(n.buffers()) for n in nets],xs.to(dtype)
        sw,sb = stack(ws),stack(bs)
        f = lambda w, b, x: net.logits(w, b, x, train=train)
        out = vmap(f)(sw, sb, x)
        loop = torch.stack([f(w, b, x) for w,b,x in zip(ws, bs, x)])
        assert torch.allclose(out, loop, rtol=tol, atol=tol) and close(sb, stack(bs), tol)
        if dtype == torch.float64:
            loss = lambda w, b, x, y: nn.functional.cross_entropy(f(w, b, x), y)
            g = vmap(grad(loss))(sw, sb, x, ys)
            assert close(g, stack([grad(loss)(*a) for a in zip(ws, bs, x, ys)]), 1e-9) and close(sb, stack(bs), tol)

def test_gradient_equals_autograd():
    net,x,y = Net(small('resnet18')),batch(4, 0, 16),torch.arange(4)
    w,b = net.weights(),net.buffers()
    g = grad(lambda w, b: nn.functional.cross_entropy(net.logits(w, b, x, train=True), y))(w, b)
    m = small('resnet18').train()
    nn.functional.cross_entropy(m(x), y).backward()
    assert close(g, {k: p.grad for k,p in m.named_parameters()}, 1e-5) and close(b, dict(m.named_buffers()), 1e-6)

def test_batch_statistics_move_only_in_training():
    net,x = Net(small('resnet18')),batch(4, 0, 16)
    w,b = net.weights(),net.buffers(); old = {k: v.clone() for k,v in b.items()}
    net.logits(w, b, x)
    assert close(b, old, 0)
    net.logits(w, b, x, train=True)
    assert not torch.equal(b['body.bn1.running_mean'], old['body.bn1.running_mean']) and b['body.bn1.num_batches_tracked'] == 1
    assert close(net.buffers(), old, 0)

def test_frozen_parts_stay_in_evaluation_mode():
    model = small('resnet18'); x = batch(4, 0, 16)
    half = Net(model, frozen=('body.conv1','body.bn1','body.layer1'))
    w,b = half.weights(),half.buffers()
    half.logits(w, b, x, train=True)
    assert not any(k.startswith(('body.conv1','body.bn1','body.layer1')) for k in {**w, **b}) and 'body.layer2.0.bn1.running_mean' in b
    assert not half.module.body.bn1.training and half.module.body.layer2[0].bn1.training
    assert torch.equal(half.module.body.bn1.running_mean, torch.zeros(64))
    whole = Net(model, 'body')
    assert torch.equal(whole.logits(whole.weights(), {}, x, train=True), whole.logits(whole.weights(), {}, x)) and whole.buffers() == {}
    drop = Net(build('cnn_fedcspack_cifar', dropout=.9), 'body')
    x = torch.rand(4, 3, 32, 32)
    assert torch.equal(drop.features(drop.weights(), {}, x, train=True), drop.features(drop.weights(), {}, x))

def test_a_prefix_ends_at_a_dot():
    net = Net(Classifier(nn.Sequential(*[nn.Linear(2, 2) for _ in range(11)]), nn.Linear(2, 2)), 'body.1')
    assert 'body.10.weight' in net.weights() and 'body.1.weight' not in net.weights()

def test_dropout_follows_train():
    net,x = Net(build('cnn_fedcspack_fmnist')),batch(8, 0)
    w = net.weights()
    a = net.logits(w, {}, x)
    assert not torch.equal(a, net.logits(w, {}, x, train=True)) and torch.equal(a, net.logits(w, {}, x))
    sw = {k: torch.stack([v]*2) for k,v in w.items()}
    two = vmap(lambda w: net.logits(w, {}, x, train=True), randomness='different')(sw)
    assert not torch.equal(two[0], two[1])

def test_the_module_is_left_alone():
    model = build('mlp').train(); before = weights_fingerprint(model)
    net = Net(model, 'body.fc1')
    w = {k: v+1 for k,v in net.weights().items()}
    net.logits(w, {}, batch(2, 0), train=False)
    assert model.training and weights_fingerprint(model) == before == weights_fingerprint(net.module) and all(p.requires_grad for p in model.parameters())
    with pytest.raises(RuntimeError): net.logits(w, {}, torch.rand(2, 3))
    assert weights_fingerprint(net.module) == before, 'given back after a failure'
    with pytest.raises(KeyError): net.logits({}, {}, batch(2, 0))

def test_agrees_with_functional_call():
    net,x = Net(small('resnet18', 1)),batch(3, 0, 16)
    other = Net(small('resnet18', 2)); w,b = other.weights(),other.buffers()
    assert torch.equal(net.logits(w, b, x), functional_call(small('resnet18', 1).eval(), {**w, **b}, (x,)))
    assert not torch.equal(net.logits(w, b, x), net.logits(net.weights(), net.buffers(), x))

def test_copies_and_pickles_of_a_net_are_independent():
    net,x = Net(build('mlp', hidden=(4,))),batch(2, 0)
    w = {k: v+1 for k,v in net.weights().items()}
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))): assert torch.equal(other.logits(w, {}, x), net.logits(w, {}, x))

def test_tied_weights_are_one():
    a = nn.Linear(3, 3); net = Net(Classifier(nn.Sequential(a, a), nn.Linear(3, 2)))
    w = {k: torch.zeros_like(v) for k,v in net.weights().items()}; w['body.0.bias'] += 1
    assert len(w) == 4 and torch.equal(net.features(w, {}, torch.rand(1, 3)), torch.ones(1, 3))

def test_displays():
    assert '| softmax | 7,850 | 784 | random, seed 0 |' in build('softmax')._repr_markdown_()
    assert '| mlp | 199,210 | 2,010 | 0 | 200 | body |' in Net(build('mlp'), 'body')._repr_markdown_()
    assert 'Linear' in Net(nn.Linear(2, 2))._repr_markdown_()

# weights from files

def dino(): return build('vit_small_patch16_224.dino', seed=9).body.state_dict()

def test_dino_from_a_made_up_checkpoint(data):
    file = {k: v.half().contiguous() for k,v in dino().items()}
    save_file(file | {'head.weight': torch.rand(1000, 384)}, data/'weights'/'vit_small_patch16_224.dino.safetensors')
    m = build('vit_small_patch16_224.dino', n_classes=100, pretrained=True)
    assert all(torch.equal(v, file[k].float()) for k,v in m.body.state_dict().items()) and m.head.weight.shape == (100, 384)
    assert m.origin == 'vit_small_patch16_224.dino.safetensors' and m.head.weight.dtype == torch.float32
    assert torch.equal(m.head.weight, build('vit_small_patch16_224.dino', n_classes=100).head.weight)
    with pytest.raises(Refused, match='vit_small_patch16_224.augreg_in1k'): build('vit_small_patch16_224.augreg_in1k', pretrained=True)

@pytest.mark.parametrize('damage,word', [(lambda f: f.pop('fc1.bias'), "lack 'fc1.bias'"), (lambda f: f.update({'fc2.weight': torch.rand(3, 3)}), "'fc2.weight' is"),
    (lambda f: f.update({'fc9.weight': torch.rand(3)}), "no 'fc9.weight'")])
def test_never_half_loaded(damage, word):
    m,f = build('mlp', hidden=(4,4)),build('mlp', hidden=(4,4), seed=1).body.state_dict()
    before = weights_fingerprint(m); damage(f)
    with pytest.raises(Refused, match=word): load_body(m, f, 'x')
    assert weights_fingerprint(m) == before and m.origin == 'random, seed 0'

def test_counters_of_batches_may_be_missing_or_of_length_one():
    m,f = small('resnet18'),small('resnet18', 1).body.state_dict()
    for k in [k for k in f if k.endswith('num_batches_tracked')]: f[k] = torch.ones(1)
    del f['layer1.0.bn1.num_batches_tracked']
    load_body(m, f, 'x')
    assert torch.equal(m.body.conv1.weight, f['conv1.weight']) and m.body.bn1.num_batches_tracked.shape == () and m.body.bn1.num_batches_tracked.dtype == torch.int64

def test_damaged_files_are_named(tmp_path):
    path = tmp_path/'a.safetensors'; save_file(dict(a=torch.rand(99)), path)
    whole = path.read_bytes()
    for bad in (whole[:50], b'', b'\xff'*200, whole[:-1]):
        path.write_bytes(bad)
        with pytest.raises(Refused, match='a.safetensors is damaged'): read_weights(path)
    with pytest.raises(Refused, match='no weights file'): read_weights(tmp_path/'b.safetensors')
    with pytest.raises(Refused, match='safetensors files only'): read_weights(tmp_path/'b.pth')

@pytest.mark.parametrize('file,name,found', [('efficientnet_lite0_imagenet_fp16','tf_efficientnet_lite0',True), ('efficientnet_lite0_imagenet','tf_efficientnet_lite0.in1k',False),
    ('resnet18d_x','resnet18',False), ('resnet18-mine','resnet18',True), ('resnet18.tv_in1k','resnet18',True), ('vit_small_patch16_224','vit_small_patch16_224.dino',False),
    ('vit_small_patch16_224.dino','vit_small_patch16_224.dino',True), ('my_vit_small_patch16_224_dino_fp16','vit_small_patch16_224.dino',True)])
def test_which_file(data, file, name, found):
    (data/'weights'/f'{file}.safetensors').touch()
    assert (local_weights(name) is not None) == found

def test_ambiguous_files_are_refused(data):
    for f in ('resnet18_a','resnet18_b'): (data/'weights'/f'{f}.safetensors').touch()
    with pytest.raises(Refused, match='keep one'): local_weights('resnet18')
    (data/'weights'/'resnet18.safetensors').touch()
    assert local_weights('resnet18').name == 'resnet18.safetensors'

def test_offline_is_said_at_once(data, monkeypatch):
    knocks = []; monkeypatch.setattr(models, 'reachable', lambda a: knocks.append(a))
    with pytest.raises(Refused, match='offline by request'): build('resnet18', pretrained=True)
    assert not knocks
    monkeypatch.delenv('FEDBOOK_OFFLINE'); monkeypatch.delenv('HF_HUB_OFFLINE', raising=False)
    with pytest.raises(Refused, match='cannot be reached'): build('resnet18', pretrained=True)
    assert len(knocks) == 1
    with pytest.raises(Refused, match='nor are any published'): build('mlp', pretrained=True)

def test_the_hub_is_asked_for_torchvisions_weights(data, monkeypatch):
    import huggingface_hub
    body = build('resnet18', seed=4).body.state_dict(); save_file(body, data/'model.safetensors'); asked = []
    monkeypatch.delenv('FEDBOOK_OFFLINE'); monkeypatch.delenv('HF_HUB_OFFLINE', raising=False)
    monkeypatch.setattr(models, 'reachable', lambda a: True)
    monkeypatch.setattr(huggingface_hub, 'try_to_load_from_cache', lambda *a: None)
    monkeypatch.setattr(huggingface_hub, 'hf_hub_download', lambda *a: asked.append(a) or str(data/'model.safetensors'))
    m = build('resnet18', pretrained=True)
    assert asked == [('timm/resnet18.tv_in1k','model.safetensors')] and torch.equal(m.body.conv1.weight, body['conv1.weight']) and m.origin == 'resnet18.tv_in1k'
    def fails(*a): raise OSError('404')
    monkeypatch.setattr(huggingface_hub, 'hf_hub_download', fails)
    with pytest.raises(Refused, match='resnet18.tv_in1k.*OSError'): build('resnet18', pretrained=True)

def test_fingerprints_see_values_names_and_types():
    a = nn.Linear(2, 2); f = weights_fingerprint(a)
    assert f == weights_fingerprint(copy.deepcopy(a)) != weights_fingerprint(copy.deepcopy(a).double())
    assert f != weights_fingerprint(nn.Sequential(copy.deepcopy(a)))
    with torch.no_grad(): a.bias[1] += 1e-6
    assert f != weights_fingerprint(a)
    assert weights_fingerprint(nn.BatchNorm1d(2).bfloat16())

def test_the_weights_that_come_with_the_package(data, monkeypatch, tmp_path):
    "Found without any file or network; a changed byte is refused; a file of the user's goes first"
    import shutil
    m = build('vit_tiny32', n_classes=100, pretrained=True)
    assert m.origin=='vit_tiny32.safetensors' and own_weights('vit_tiny32').stat().st_size < 8e6 and own_weights('mlp') is None
    assert torch.equal(m.head.weight, build('vit_tiny32', n_classes=100).head.weight) and not torch.equal(m.body.norm.weight, build('vit_tiny32').body.norm.weight)
    assets = tmp_path/'assets'; shutil.copytree(own_weights('vit_tiny32').parent.parent, assets)
    f = assets/'weights'/'vit_tiny32.safetensors'; b = bytearray(f.read_bytes()); b[-1] ^= 1; f.write_bytes(b)
    monkeypatch.setattr(models, '__file__', str(tmp_path/'models.py'))
    with pytest.raises(Refused, match='damaged; install'): build('vit_tiny32', pretrained=True)
    save_file({k: v.contiguous() for k,v in build('vit_tiny32', seed=3).body.state_dict().items()}, data/'weights'/'vit_tiny32.safetensors')
    assert torch.equal(build('vit_tiny32', pretrained=True).body.norm.weight, build('vit_tiny32', seed=3).body.norm.weight)
    with pytest.raises(Refused, match='do not fit'): build('vit_tiny32', pretrained=True, depth=4)
