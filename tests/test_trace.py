"A traced step computes what the plain step computes, and changes weights only when everybody has read them."
from dataclasses import dataclass
import pytest, torch
from torch import nn
from torch.utils._pytree import tree_flatten
from fedbook import engines
from fedbook.engines import FellBack, stacked, Traced
from fedbook.method import FedAvg, LocalTraining, METHODS
from fedbook.models import build, Net
from fedbook.optim import Adam, SGD
from fedbook.rounds import run
from fedbook.streams import seeded
from fedbook.trace import flat_step, in_place, pool_first, simplify, trace
from test_engines import distance, precise
from test_rounds import federation, same

ONE = torch.tensor(1., dtype=torch.float64)

@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(engines, 'OFTEN', 0)

def step_of(net, local=LocalTraining()):
    w = net.weights()
    flat,spec = tree_flatten(((w, local.optimiser.init(w), net.buffers()), (dict(w=w), {}, {})))
    return flat, flat_step(FedAvg(), local, net, spec)

def test_pooling_first_changes_no_bit():
    net = Net(build('cnn', 3, 1, 8, channels=(4,5), hidden=(6,)))
    flat,step = step_of(net)
    with seeded(0, 'pool'): batch = [torch.randn(6, 1, 8, 8).round(decimals=1), torch.randint(0, 3, (6,))] # rounded: windows with ties
    flat[1] -= .3 # most windows are negative
    plain,moved = trace(step, *flat, *batch, ONE),trace(step, *flat, *batch, ONE)
    for gm in (plain, moved): simplify(gm.graph)
    pool_first(moved.graph); moved.recompile(); plain.recompile()
    def order(gm): return [n.target for n in gm.graph.nodes if n.op=='call_function'].index(torch.ops.aten.relu.default)
    assert order(moved) > order(plain)
    with torch.no_grad(): assert all(torch.equal(a, b) for a,b in zip(plain(*flat, *batch, ONE), moved(*flat, *batch, ONE)))

@pytest.mark.parametrize('local', [LocalTraining(optimiser=SGD(.1)), LocalTraining(optimiser=SGD(.1, .9, 1e-2)), LocalTraining(optimiser=Adam(.1))], ids=['sgd','momentum','adam'])
def test_in_place_is_out_of_place(local):
    net = Net(build('mlp', 3, 1, 4, hidden=(5,)).double())
    flat,step = step_of(net, local)
    flat = [t.clone() for t in flat] # the message is not the weights
    with seeded(0, 'batch'): batch = [torch.randn(6, 1, 4, 4).double(), torch.randint(0, 3, (6,))]
    expected = step(*flat, *batch, .5)
    gm = trace(step, *flat, *batch, ONE); simplify(gm.graph)
    message = [t.clone() for t in flat[-4:]]
    in_place(gm, len(expected)-1, len(flat)+2)
    with torch.no_grad(): loss = gm(*flat, *batch, torch.tensor(.5, dtype=torch.float64), .5)
    assert torch.allclose(loss, expected[-1])
    for a,b in zip(flat, expected[:-1]): assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)
    assert all(torch.equal(a, b) for a,b in zip(flat[-4:], message))

class Product(nn.Module):
    "A weight that is the product of two: the gradient of each has the other as a factor"
    def __init__(self):
        super().__init__()
        with seeded(0, 'product'): self.a,self.b = nn.Parameter(torch.randn(4, 6)),nn.Parameter(torch.randn(3, 4))
    def forward(self, x): return x@(self.b@self.a).T

@pytest.mark.parametrize('engine', [Traced, stacked])
def test_a_weight_is_changed_after_everybody_has_read_it(engine):
    fed = precise(federation(module=Product(), local=LocalTraining(2, 4, SGD(.2))))
    assert distance(run(fed)[0], run(fed, engine=engine())[0]) < 1e-10

@dataclass(frozen=True)
class Noisy(FedAvg):
    "Draws in its loss"
    def loss(self, w, batch, c): return super().loss(w, dict(x=batch['x'] + .1*torch.randn_like(batch['x']), y=batch['y']), c)
@dataclass(frozen=True)
class Shuffles(FedAvg):
    "Draws what cannot be drawn ahead"
    def loss(self, w, batch, c): return super().loss(w, dict(x=batch['x'][:, torch.randperm(6)], y=batch['y']), c)
METHODS.pop('noisy'); METHODS.pop('shuffles')

@pytest.mark.parametrize('engine', [Traced, stacked])
def test_a_loss_may_draw(engine):
    fed = precise(federation(Noisy()))
    assert distance(run(fed)[0], run(fed, engine=engine())[0]) < 1e-10

def test_what_cannot_be_drawn_ahead_goes_one_by_one():
    fed = precise(federation(Shuffles()))
    assert distance(run(fed)[0], run(fed, engine=Traced())[0]) < 1e-10
    with pytest.warns(FellBack, match='randperm'): assert same(run(fed)[0], run(fed, engine=stacked())[0])
