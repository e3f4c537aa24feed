"Every engine gives what the reference gives, for every method there is."
from dataclasses import dataclass, replace
import numpy as np, pytest, torch
from torch import nn
from fedbook.engines import due, Processes, stacked
from fedbook.errors import Refused
from fedbook.method import FedAvg, Local, method, METHODS, methods
from fedbook.models import build, Net
from fedbook.optim import AdamW, Cosine, SGD
from fedbook.rounds import begin, run
from fedbook.streams import seeded
from fedbook.tensors import flatten, leaves, stack
from test_rounds import federation, mlp, Remembers, same

def distance(a, b):
    a,b = flatten(a),flatten(b)
    assert a.keys()==b.keys()
    return max(((a[k].double()-b[k].double()).abs().max()/(a[k].double().abs().max()+1e-30)).item() for k in a)

def precise(fed):
    "The same run in float64"
    fed.data.x,fed.data.test = fed.data.x.double(),(fed.data.test[0].double(),fed.data.test[1])
    return replace(fed, net=Net(fed.net.module.double(), fed.net.frozen))

def normed():
    "No bias before BatchNorm: its gradient is zero but for rounding, and Adam would step along the rounding"
    with seeded(0, 'test model'): return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

LOCALS = dict(sgd=Local(2, 4, SGD(.1, .9, 1e-3)), adamw=Local(2, 5, AdamW(.01), Cosine(per='batch', period=5)), whole=Local(1, 100, SGD(.1), label_smoothing=.1))

@pytest.mark.parametrize('local', LOCALS.values(), ids=LOCALS)
@pytest.mark.parametrize('module', [mlp(), normed()], ids=['plain','batchnorm'])
@pytest.mark.parametrize('name', sorted(methods()))
def test_stacked_is_one_by_one(name, module, local):
    "Unequal clients, unequal numbers of steps, statistics of BatchNorm: 1e-5 in float32, 1e-10 in float64"
    for precision,bound in ((lambda f: f, 1e-5), (precise, 1e-10)):
        fed = precision(federation(method(name), module=module, local=local))
        (a,rows),(b,rows_b) = run(fed),run(fed, engine=stacked)
        assert distance(a, b) < bound
        assert [r[:3] for r in rows]==[r[:3] for r in rows_b]
        assert not same(a['server'], begin(fed)['server'])

@pytest.mark.parametrize('name', sorted(methods()))
def test_processes_are_one_by_one_to_the_bit(name):
    fed = federation(method(name), module=mlp(bn=True, dropout=.3))
    (a,rows),(b,rows_b) = run(fed),run(fed, engine=Processes(2))
    assert same(a, b) and rows==rows_b

@pytest.mark.parametrize('buffers', ['average','local','drop'])
def test_memory_and_buffers_come_back(buffers):
    fed = precise(federation(Remembers(), rounds=4, module=mlp(bn=True), buffers=buffers))
    assert distance(run(fed)[0], run(fed, engine=stacked)[0]) < 1e-10

@dataclass(frozen=True)
class Drifts(FedAvg):
    "Uses every seam: memory and message in the loss and in the step, and sends less than it has"
    def client(self, w): return dict(past=dict(w))
    def start(self, c): return {k: v + .1*c.memory['past'][k] for k,v in c.message['w'].items()}
    def loss(self, w, batch, c): return super().loss(w, batch, c) + sum(((w[k]-c.memory['past'][k])**2).sum() for k in w)
    def step(self, g, w, c): return {k: g[k] + .01*(w[k]-c.message['w'][k]) for k in g}
    def finish(self, w, c): return dict(w={k: .5*v for k,v in w.items()}), dict(past=w)
METHODS.pop('drifts')

def test_every_seam_can_be_stacked():
    fed = precise(federation(Drifts(), rounds=4))
    assert distance(run(fed)[0], run(fed, engine=stacked)[0]) < 1e-10

def test_what_a_stacked_client_cannot_see_fails_loudly():
    @dataclass(frozen=True)
    class Peeks(FedAvg):
        def loss(self, w, batch, c): return super().loss(w, batch, c)*len(c.y)
    METHODS.pop('peeks')
    with pytest.raises(TypeError): run(federation(Peeks()), engine=stacked)

@pytest.mark.parametrize('name,settings', [('cnn', dict(channels=(3,4), hidden=(5,))), ('resnet18', dict(stem='cifar')), ('vit_tiny32', dict(patch=4, dim=8, depth=1, heads=2))])
def test_convolutions_and_attention(name, settings):
    fed = federation(sizes=(5,3), rounds=1, per_round=2, local=Local(1, 3, SGD(.01)))
    with seeded(0, 'images'): fed.data.x = torch.randn(8, 1, 8, 8).double()
    fed.data.test = (fed.data.x, fed.data.y); fed.data.test_clients = None
    fed = replace(fed, net=Net(build(name, 3, 1, 8, **settings).double()))
    assert distance(run(fed)[0], run(fed, engine=stacked)[0]) < 1e-9

def test_what_cannot_be_stacked_is_said_and_run_all_the_same():
    fed = federation(module=mlp(dropout=.5))
    with pytest.warns(UserWarning, match='Dropout') as said: b = run(fed, engine=stacked)[0]
    assert same(run(fed)[0], b) and len(str(said[0].message).splitlines())==1
    fed = federation(); fed.data.augment = lambda x: x + torch.randn_like(x)
    with pytest.warns(UserWarning, match='augmentation'): assert same(run(fed)[0], run(fed, engine=stacked)[0])

def test_who_is_due():
    plans = [[(range(b), None) for b in sizes] for sizes in ((4, 4, 2, 4, 4, 2), (4, 1, 4, 1), (3, 3))]
    done,steps = [0]*3,0
    while who := due(plans, done):
        assert len({len(plans[j][done[j]][0]) for j in who})==1
        for j in who: done[j] += 1
        steps += 1
    assert done==[6, 4, 2] and steps < 12

def test_stack_and_leaves():
    trees = [dict(a=dict(b=torch.tensor([i, i+1.])), c={}) for i in range(3)]
    assert all(same(leaves(lambda t: t[i], stack(trees)), t) for i,t in enumerate(trees))
