"Cached features: exact, keyed by all they depend on, never half-written."
import pytest, torch
from torch import nn
from torch.func import grad
from fedbook import features, tensors
from fedbook.errors import Refused
from fedbook.features import cached_features, extract, feature_file, head_net
from fedbook.models import Net, build

IMAGES = torch.randint(0, 256, (30, 1, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
def half(x): return (x.float()/255 - .5)/.5
def fails(x): raise AssertionError('computed')
def model(seed=0): return build('cnn_fedcspack_fmnist', seed=seed)
KEY = dict(prepare='half')

@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv('FEDBOOK_DATA', str(tmp_path))
    return tmp_path

@pytest.mark.parametrize('batch_size', [1, 7, 30, 999])
def test_features_are_the_bodys_in_evaluation_mode(batch_size):
    m = model().train()
    z = extract(IMAGES, m.body, half, batch_size)
    assert z.dtype == torch.float32 and m.body.training and not z.is_inference()
    assert torch.allclose(z, m.eval().body(half(IMAGES)), atol=1e-6)

def test_half_precision_gives_float32_and_leaves_the_module_alone():
    m = model().body.bfloat16()
    assert extract(IMAGES, m, lambda x: half(x).bfloat16()).dtype == torch.float32 and next(m.parameters()).requires_grad

def test_computed_once(data):
    z = cached_features(IMAGES, model().body, half, KEY)
    assert torch.equal(z, cached_features(IMAGES, model().body, fails, KEY))
    assert [p.suffix for p in (data/'features').iterdir() if p.suffix!='.lock'] == ['.safetensors']
    assert tensors.load(next((data/'features').glob('*.safetensors')))[1] == dict(key='{"prepare": "half"}', images='30', dims='50')

def test_everything_it_depends_on_is_in_the_name(data, monkeypatch):
    m,changed = model().body,IMAGES.clone(); changed[3,0,5,5] += 1
    names = [feature_file(IMAGES, m, KEY), feature_file(changed, m, KEY), feature_file(IMAGES.flip(0), m, KEY), feature_file(IMAGES, model(1).body, KEY),
             feature_file(IMAGES, m, dict(prepare='imagenet')), feature_file(IMAGES.reshape(15, 2, 28, 28), m, KEY),
             feature_file(IMAGES, nn.Flatten(), KEY), feature_file(IMAGES, nn.Identity(), KEY)]
    monkeypatch.setattr(features, 'FORMAT', 2); names.append(feature_file(IMAGES, m, KEY))
    assert len(set(names)) == len(names)

def test_damaged_caches_are_named(data):
    cached_features(IMAGES, model().body, half, KEY)
    path = next((data/'features').glob('*.safetensors')); whole = path.read_bytes()
    for bad in (whole[:100], b'', whole[:-4]):
        path.write_bytes(bad)
        with pytest.raises(Refused, match=f'{path.name} are damaged; delete'): cached_features(IMAGES, model().body, fails, KEY)
    for tree in (dict(features=torch.rand(29, 50)), dict(other=torch.rand(30, 50)), dict(features=torch.rand(30, 50).double())):
        tensors.save(tree, path)
        with pytest.raises(Refused, match='damaged'): cached_features(IMAGES, model().body, fails, KEY)
    path.unlink()
    assert len(cached_features(IMAGES, model().body, half, KEY)) == 30

def test_a_folder_without_permission_is_refused_before_computing(data, monkeypatch):
    (data/'file').touch()
    monkeypatch.setenv('FEDBOOK_DATA', str(data/'file'))
    with pytest.raises(Refused, match='Cannot write'): cached_features(IMAGES, model().body, fails, KEY)

def test_a_failure_leaves_no_file(data):
    with pytest.raises(AssertionError): cached_features(IMAGES, model().body, fails, KEY)
    assert not list((data/'features').glob('*.safetensors'))

@pytest.mark.parametrize('call,word', [(lambda: extract(IMAGES.float(), model().body, half), 'uint8'), (lambda: extract(IMAGES[:0], model().body, half), 'at least one'),
    (lambda: extract(IMAGES, model().body, half, 0), 'batch_size'), (lambda: feature_file(IMAGES, model().body, dict(prepare=half)), 'JSON')])
def test_refusals(call, word):
    with pytest.raises(Refused, match=word): call()

@pytest.mark.parametrize('m', [model(), build('resnet18', in_channels=1, stem='cifar')], ids=['cnn','resnet18'])
def test_training_on_features_is_training_on_images(m):
    x,y = IMAGES[:, :, :14, :14] if m.name == 'resnet18' else IMAGES,torch.arange(30) % 10
    def descend(net, x):
        w = net.weights()
        for t in range(6):
            b = slice(10*(t % 3), 10*(t % 3) + 10)
            g = grad(lambda w: nn.functional.cross_entropy(net.logits(w, {}, x[b], train=True), y[b]))(w)
            w = tensors.tmap(lambda w,g: w - .1*g, w, g)
        return w
    slow,fast = descend(Net(m, 'body'), half(x)),descend(head_net(m), extract(x, m.body, half))
    assert slow.keys() == fast.keys() and all(torch.allclose(slow[k], fast[k], rtol=0, atol=1e-6) for k in slow)
    assert not torch.equal(slow['head.weight'], m.head.weight)
