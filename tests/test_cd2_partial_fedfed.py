"CD²-pFed, PartialFed and FedFed against oracles_001.py, round by round; and what they become at the ends of their settings."
from dataclasses import replace
import pytest, torch
from torch import nn
import oracles_001 as O
import test_oracles as T
from test_rivals import BOTH, compare, every, federation, fit, normed, plain
from fedbook.engines import Processes, stacked, Traced
from fedbook.errors import Refused
from fedbook.federation import begin, client_view
from fedbook.method import FedAvg, method
from fedbook.methods.cd2pfed import CD2pFed, front, half, shared_rows
from fedbook.methods.localonly import LocalOnly
from fedbook.models import build, Net
from fedbook.rounds import run
from fedbook.tensors import gradient

# ---- CD²-pFed

@BOTH
@pytest.mark.parametrize('p,weight', [(.5, 1.), (.9, .3), (1., 1.), (0., 1.)])
def test_cd2pfed(optimiser, p, weight):
    compare(federation(CD2pFed(p=p, rounds=4, weight=weight), plain(), optimiser), O.oracle_cd2pfed, p=p, weight=weight)

def test_cd2pfed_without_private_channels_is_fedavg_to_the_bit_and_with_all_of_them_only_a_bias_is_sent():
    fed = federation(CD2pFed(p=0.), normed(), 'momentum and decay')
    (a,rows),(b,rows_b) = run(fed),run(replace(fed, method=FedAvg()))
    T.agree(a['server']['w'], b['server']['w'], 'server')
    assert rows==rows_b and all(torch.equal(t, b['buffers'][k]) for k,t in a['buffers'].items()) and all(torch.equal(t, b['server']['w'][k]) for k,t in a['server']['w'].items())
    private = front(fed.net.weights(), 1.)
    assert {k: t.numel() for k,t in private.items()}=={k: 3*(k=='head.bias') for k in private}

def test_halves_of_cd2pfed_pull_at_each_other_from_both_sides():
    "One step: the gradient of the whole network's loss, and λ times that of the distillation"
    fed = federation(CD2pFed(p=.4, rounds=2, weight=2.), plain(), 'plain', all=True)
    state = begin(fed)
    state['server'] = dict(state['server'], round=torch.tensor(1))
    c = client_view(fed, state, 0, 1)
    w,c.memory = fed.method.start(c)
    batch = c.batch(torch.arange(4))
    got,_ = gradient(lambda w: fed.method.loss(w, batch, c), w)
    first = torch.tensor([1.,1.,1.,0.,0.], dtype=torch.float64) # ⌊0.4·5⌋ = 2 are private
    def by_hand(w):
        f = O.features(w, batch['x'])
        a,b = (O.head(w, f*m).log_softmax(1) for m in (first, 1-first))
        kl = (a.exp()*(a-b)).sum(1).mean() + (b.exp()*(b-a)).sum(1).mean()
        return O.ce(O.head(w, f), batch['y']) + 2*kl/2
    T.agree(got, gradient(by_hand, w)[0], 'gradient')
    assert not torch.allclose(got['head.weight'], gradient(lambda w: O.plain(w, batch['x'], batch['y']), w)[0]['head.weight'])

@pytest.mark.parametrize('name,settings', [('resnet18', {}), ('cnn', dict(in_channels=3, image_size=32)), ('mlp', dict(in_channels=3, image_size=32))])
def test_private_halves_are_blind_to_shared_channels(name, settings):
    "Whatever a shared row holds, the private half answers alike; and whatever a private one holds, the shared half does"
    net = Net(build(name, **settings).double())
    w,x = net.weights(),torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)).double()
    first = shared_rows(front(w, .3), w)
    def noisy(sign): return {k: t+torch.randn_like(t)*(first[k]==(sign==1)) if k in first else t for k,t in w.items()}
    for sign in (1, -1):
        a,b,whole = (net.logits(v, net.buffers(), x, train=True) for v in (half(w, first, sign), half(noisy(-sign), first, sign), w))
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        assert not torch.allclose(a, whole)

def test_statistics_of_private_channels_stay_with_the_client():
    fed = federation(CD2pFed(p=.4, rounds=2), normed(), 'plain', all=True)
    state,_ = run(fed)
    assert state['memory']['0']['own']['body.bn.running_mean'].shape==(5,)
    views = [client_view(fed, state, i, 4) for i in range(2)]
    for c in views: c.message = fed.method.shown(state['server'], c.id); fed.method.personal(c)
    a,b = (c.buffers['body.bn.running_mean'] for c in views)
    assert torch.equal(a[:3], b[:3]) and (a[3:]!=b[3:]).all() and torch.equal(a[3:], state['memory']['0']['own']['body.bn.running_mean'][3:])

@pytest.mark.parametrize('engine', [Traced, stacked, lambda: Processes(2)])
def test_cd2pfed_goes_with_every_engine(engine):
    fed = federation(CD2pFed(p=.8, rounds=4), normed(), 'momentum and decay')
    (a,_),(b,_) = run(fed),run(fed, engine=engine())
    T.agree(a['server'], b['server'], 'server'); T.agree(a['buffers'], b['buffers'], 'statistics')

def test_cd2pfed_refuses_layers_without_channels():
    with pytest.raises(Refused, match='take mlp, cnn or resnet18'): federation(CD2pFed(), build('vit_tiny32').double(), 'plain')
