"What the protocol can say: parts of the local work, optimisers that live on, clients of different shapes; on every engine alike."
from dataclasses import dataclass, replace
import warnings
import pytest, torch
from torch import nn
from fedbook.engines import FellBack, Processes, stacked, Traced
from fedbook.method import FedAvg, LocalTraining, METHODS
from fedbook.models import Net
from fedbook.optim import SGD
from fedbook.client import one_by_one
from fedbook.federation import begin, client_view
from fedbook.rounds import run
from fedbook.tensors import flatten, leaves, tmap
from test_rounds import federation, mlp, same

ENGINES = dict(traced=Traced, stacked=stacked, processes=lambda: Processes(2))

def away(method):
    "A method of this file, out of the registry"
    METHODS.pop(method.__name__.lower())
    return method

@away
@dataclass(frozen=True)
class HeadFirst(FedAvg):
    "Trains the head for `epochs` local epochs and then everything: FedRep and LP-FT in two lines"
    epochs: int = 1
    def phases(self, epochs, round): return ('head',)*min(self.epochs, epochs) + (None,)*(epochs-self.epochs)
    def trains(self, phase): return ('head',) if phase=='head' else ()

@away
@dataclass(frozen=True)
class Momentum(FedAvg):
    "The optimiser's state lives on between rounds"
    def init(self, w, c): return c.memory.get('s') or super().init(w, c)
    def finish(self, w, c): return dict(w=w), dict(s=c.s)

@away
@dataclass(frozen=True)
class LastLoss(FedAvg):
    "Weighs clients by the loss of their last step"
    def finish(self, w, c): return dict(w=w, loss=c.losses[-1].double(), steps=torch.tensor(len(c.losses))), {}
    def aggregate(self, state, messages, weights): return super().aggregate(state, messages, [m['loss'].item() for m in messages])

@away
@dataclass(frozen=True)
class HeteroFL(FedAvg):
    "Every second client has the first half of the hidden neurons (Diao et al. 2021, in small)"
    def width(self, n, i, now): return torch.arange(n if i%2 else n//2)
    def part(self, w, rows): return {'0.weight': w['0.weight'][rows], '0.bias': w['0.bias'][rows], '2.weight': w['2.weight'][:,rows], '2.bias': w['2.bias']}
    def server(self, w, n): return dict(w=w, round=dict(now=torch.zeros((), dtype=torch.int64)))
    def send(self, state, i): rows = self.width(len(state['w']['0.bias']), i, state['round']['now']); return dict(w=self.part(state['w'], rows), rows=dict(at=rows))
    def finish(self, w, c): return dict(w=w, rows=c.message['rows']), {}
    def aggregate(self, state, messages, weights):
        total,count = ({k: torch.zeros_like(v) for k,v in state['w'].items()} for _ in range(2))
        for m,n in zip(messages, weights):
            rows = m['rows']['at']
            for k,v in m['w'].items():
                at = (slice(None), rows) if k=='2.weight' else (slice(None),) if k=='2.bias' else (rows,)
                total[k][at] += n*v; count[k][at] += n
        return dict(w={k: torch.where(count[k] > 0, total[k]/count[k].clamp_min(1e-30), v) for k,v in state['w'].items()}, round=dict(now=state['round']['now']+1))

@away
@dataclass(frozen=True)
class FedRolex(HeteroFL):
    "The same with a window that rolls on in every round (Alam et al. 2022)"
    def width(self, n, i, now): return torch.arange(n) if i%2 else (torch.arange(n//2)+now)%n

CASES = dict(head_first=(HeadFirst(), dict(blocks=True)), momentum=(Momentum(), {}), last_loss=(LastLoss(), {}), heterofl=(HeteroFL(), {}), fedrolex=(FedRolex(), {}))

def double(m, module, **kw):
    return federation(m, module=mlp(**module).double(), local=LocalTraining(3, 4, SGD(.1, .9)), dtype=torch.float64, **kw)

@pytest.mark.parametrize('engine', ENGINES)
@pytest.mark.parametrize('case', CASES)
def test_every_engine_agrees_and_none_falls_back(case, engine):
    fed = double(*CASES[case])
    with warnings.catch_warnings(): warnings.simplefilter('error', FellBack); state,_ = run(fed, engine=ENGINES[engine]())
    want,_ = run(fed)
    if engine=='processes': assert same(state, want)
    for k,v in flatten(state['server']).items(): torch.testing.assert_close(v, flatten(want['server'])[k], rtol=1e-10, atol=1e-10)

def test_a_method_with_one_phase_is_the_method_without():
    "Without epochs for the head it is FedAvg to the bit, and with all epochs for the head the body stays"
    a,b = run(double(HeadFirst(epochs=0), dict(blocks=True)))[0],run(double(FedAvg(), dict(blocks=True)))[0]
    assert same(a['server'], b['server'])
    fed = double(HeadFirst(epochs=3), dict(blocks=True))
    w,w0 = run(fed)[0]['server']['w'],fed.net.weights()
    assert all(torch.equal(w[k], w0[k])==(not k.startswith('head.')) for k in w)

def test_a_phase_of_the_head_leaves_the_body_of_the_first_epoch():
    fed = double(HeadFirst(), dict(blocks=True), rounds=1, per_round=4)
    one = replace(fed, local=replace(fed.local, epochs=1))
    w,w0 = run(one)[0]['server']['w'],fed.net.weights()
    assert all(torch.equal(w[k], w0[k]) for k in w if k.startswith('body.')) and not same(run(fed)[0]['server']['w'], w)

def test_the_optimiser_lives_on():
    "One client with one batch: two rounds of one step each with persistent momentum are two steps of torch.optim.SGD"
    fed = federation(Momentum(), sizes=(20,), per_round=1, rounds=3, local=LocalTraining(1, 100, SGD(.1, .9)))
    module = mlp(); opt = torch.optim.SGD(module.parameters(), .1, .9)
    for _ in range(3): opt.zero_grad(); nn.functional.cross_entropy(module(fed.data.x), fed.data.y).backward(); opt.step()
    w = run(fed)[0]['server']['w']
    for k,v in module.state_dict().items(): torch.testing.assert_close(w[k], v)
    assert not same(w, run(replace(fed, method=FedAvg()))[0]['server']['w'])

def test_finish_sees_the_losses_of_all_steps():
    fed = federation(LastLoss(), sizes=(7,12,20,5), per_round=4, rounds=1)
    steps = [r['message']['steps'].item() for r in one_by_one(fed, begin(fed), range(4), 0)]
    assert steps==[4, 6, 10, 4]

def test_clients_of_all_widths_are_stacked_with_those_of_theirs(monkeypatch):
    from fedbook import engines
    sizes,plain = [],engines.train_stack
    monkeypatch.setattr(engines, 'train_stack', lambda pairs, *a: sizes.append(len(pairs)) or plain(pairs, *a))
    run(double(HeteroFL(), {}, per_round=4, rounds=1), engine=stacked())
    assert sizes==[4, 2, 2], 'all together was tried, then each kind'

def test_where_all_have_the_whole_width_it_is_fedavg():
    @away
    @dataclass(frozen=True)
    class Whole(HeteroFL):
        def width(self, n, i, now): return torch.arange(n)
    a,b = (run(double(m, {}))[0]['server']['w'] for m in (Whole(), FedAvg()))
    for k in a: torch.testing.assert_close(a[k], b[k], rtol=1e-12, atol=1e-12)
