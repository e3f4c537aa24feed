"A frozen stem sees each image once, and its tokens are a data set like any other."
import json, os, subprocess, sys
from pathlib import Path
import numpy as np, pytest, torch
from torch.nn.functional import avg_pool2d
from fedbook import tokens
from fedbook.chapters.mean_token import mlp_tokens
from fedbook.data import load, normaliser
from fedbook.errors import Refused
from fedbook.experiments import federation, Setting
from fedbook.features import extract
from fedbook.models import build, Net
from fedbook.rounds import run
from fedbook.tokens import as_bytes, encoded, kept, Stem, tokens_of

TINY = dict(stem='test_efficientnet', size=64, pretrained=False)

@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv('FEDBOOK_DATA', str(tmp_path)); tokens_of.cache_clear()
    return tmp_path

def test_a_token_is_a_place_of_the_last_two_stages():
    body = build('test_efficientnet', in_channels=3).body
    stem,x = Stem(body),torch.rand(2, 3, 64, 64)
    fine,coarse = body.eval().forward_intermediates(x, indices=2, intermediates_only=True)
    z = stem(x).unflatten(1, (-1, stem.width))
    n = coarse.shape[-1]
    for i in range(n):
        for j in range(n):
            pooled = avg_pool2d(fine, fine.shape[-1]//n)[:,:,i,j]
            assert torch.allclose(z[:,i*n+j], torch.cat([pooled, coarse[:,:,i,j]], 1), atol=1e-6)

def test_a_stem_never_trains():
    assert not any(p.requires_grad for p in Stem(build('test_efficientnet', in_channels=3).body).parameters())

def test_bytes_are_steps_of_a_standard_deviation():
    z = torch.randn(200, 4, 3)*torch.tensor([1., 5., .1]) + torch.tensor([0., 3., -9.])
    mean,std = z.mean((0, 1)),z.std((0, 1), correction=0)
    back = (torch.from_numpy(as_bytes(z, mean, std)).float()/127.5 - 1)*4*std + mean
    inside = ((z-mean)/std).abs() < 4
    assert ((back-z).abs() <= std*4/255 + 1e-5)[inside].all()

def test_a_channel_that_never_changes_is_its_mean(data):
    stem = Stem(build('test_efficientnet', in_channels=3).body)
    with torch.no_grad(): [p.zero_() for p in stem.parameters()]
    x = torch.randint(0, 256, (6, 1, 28, 28), dtype=torch.uint8)
    assert {int(v) for part in encoded([x, x[:2]], stem, normaliser('half', size=64, channels=3), {}) for v in np.unique(part)}=={128}

def test_classes_keep_their_shares_and_the_same_images_are_kept():
    y = np.random.default_rng(0).permutation(np.repeat([0, 1, 2], [60, 30, 10]))
    where = kept(y, 50)
    assert np.bincount(y[where]).tolist()==[30, 15, 5] and np.array_equal(where, kept(y, 50)) and len(set(where))==50
    assert np.array_equal(kept(y, None), np.arange(100)) and np.array_equal(kept(y, 100), np.arange(100))

def test_the_data_set_has_the_labels_of_its_images(data):
    d,whole = tokens_of('fashion_mnist_mini', n_train=100, **TINY),load('fashion_mnist_mini')
    where = kept(whole.train_y, 100)
    assert d.name=='fashion_mnist_mini_tokens100' and np.array_equal(d.train_y, whole.train_y[where]) and np.array_equal(d.test_y, whole.test_y)
    stem = Stem(build('test_efficientnet', in_channels=3).body)
    z = extract(whole.images('train')[where], stem, normaliser('half', size=64, channels=3)).unflatten(1, (-1, stem.width))
    assert np.array_equal(d.train_x, as_bytes(z, z.mean((0, 1)), z.std((0, 1), correction=0).clamp_min(1e-6)))

def test_the_stem_works_once(data, monkeypatch):
    first = tokens_of('fashion_mnist_mini', n_train=60, **TINY)
    monkeypatch.setattr(Stem, 'forward', lambda *a: 1/0); tokens_of.cache_clear()
    assert tokens_of('fashion_mnist_mini', n_train=60, **TINY).fingerprint==first.fingerprint

@pytest.mark.parametrize('n', [0, 4001, -1])
def test_more_images_than_there_are(n, data):
    with pytest.raises(Refused, match=f'must lie in 1 … 4000, not {n}'): tokens_of('fashion_mnist_mini', n_train=n, **TINY)

def test_heads_divide_the_width():
    with pytest.raises(Refused, match='dim must be a multiple of heads, and 30 is none of 4'): build('vit_tokens', dim=30)

def test_every_block_can_be_edited():
    from fedbook.methods.ptalos import blocks
    assert blocks(Net(build('vit_tokens', n_classes=100)).weights())==[f'body.blocks.{i}' for i in range(8)]

def test_stacked_clients_are_clients_one_by_one(data):
    from fedbook.engines import engine
    d = tokens_of('fashion_mnist_mini', n_train=60, **TINY)
    s = Setting(d.name, model=dict(name='vit_tokens', image_size=4, width=d.train_x.shape[2], dim=8, depth=2, heads=2), input=dict(mean='half'), partition=dict(name='iid', n_clients=3),
        protocol=dict(rounds=2, per_round=2), local=dict(batch_size=8))
    (a,_),(b,_) = (run(federation(s), engine=engine(name, 'cpu')) for name in ('one_by_one','stacked'))
    assert all(torch.allclose(v, b['server']['w'][k], atol=1e-5) for k,v in a['server']['w'].items())

def test_the_perceptron_on_the_mean_token_is_two_lines_of_numpy():
    torch.manual_seed(0)
    model,x = mlp_tokens(n_classes=3, image_size=4, width=6, hidden=(5,)),torch.rand(7, 1, 4, 6)
    (W,b),(V,c) = ((l.weight.detach().numpy(), l.bias.detach().numpy()) for l in (model.body.fc1, model.head))
    hidden = np.maximum(x.numpy().mean((1, 2))@W.T + b, 0)
    np.testing.assert_allclose(model(x).detach().numpy(), hidden@V.T + c, atol=1e-6)

def test_a_column_of_fedcspacks_table_1_is_run_on_tokens(tmp_path):
    column = 'CIFAR-10={data="fashion_mnist_mini",tokens={n_train=400,stem="test_efficientnet",size=64,pretrained=false},model={name="mlp_tokens",width=112},input={mean="half"},stand_in={data="tokens of Fashion-MNIST"}}'
    run = subprocess.run([str(Path(sys.executable).with_name('fedbook')), 'reproduce', '003-table1', '-j', '1', '-p', f'columns={{{column}}}', '-p', 'reference={}'],
        capture_output=True, text=True, env=os.environ | dict(FEDBOOK_FIGURES=str(tmp_path/'figures'), FEDBOOK_DATA=str(tmp_path/'data')))
    assert run.returncode==0, run.stdout + run.stderr
    [rows] = (tmp_path/'figures').glob('003/table1/*/rows.jsonl')
    found = [json.loads(l) for l in rows.read_text().splitlines()]
    assert {(r['data'], r['model'], r['cell']['dataset']) for r in found}=={('fashion_mnist_mini_tokens400', 'mlp_tokens', 'CIFAR-10')} and len(found)==15
    assert 'Data: fashion_mnist_mini_tokens400. Model: mlp_tokens.' in (said := (rows.parent/'table.md').read_text()) and 'tokens of Fashion-MNIST' in said
