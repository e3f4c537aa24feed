"CD²-pFed and PartialFed against oracles_001.py, round by round; and what they become at the ends of their settings."
from dataclasses import replace
import pytest, torch
import oracles_001 as O
import test_oracles as T
from test_rivals import BOTH, compare, federation, normed, plain
from fedbook.client import one_by_one
from fedbook.engines import Processes, stacked, Traced
from fedbook.errors import Refused
from fedbook.federation import begin, client_view, scored_view
from fedbook.method import FedAvg, method
from fedbook.methods.cd2pfed import CD2pFed, front, half, shared_rows
from fedbook.methods.partialfed import layer_of, PartialFed, PartialFedAdaptive
from fedbook.models import build, Net
from fedbook.rounds import run, taking_part
from fedbook.streams import stream
from fedbook.tensors import clone, flatten, gradient

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

# ---- PartialFed

def counted(fed, oracle):
    "The oracle, whose clients receive no statistics; the book counts averaged statistics in both directions"
    def rounds(*args, **settings):
        for e in oracle(*args, **settings): yield {**e, 'down_numbers': {i: n+T.floats(fed.net.buffers()) for i,n in e['down_numbers'].items()}}
    return rounds

@BOTH
@pytest.mark.parametrize('module', [plain, normed])
def test_partialfed(optimiser, module):
    fed = federation(PartialFed(), module(), optimiser)
    compare(fed, counted(fed, O.oracle_partialfed))

def own_models(fed):
    state = run(fed)[0]
    return [fed.method.personal(scored_view(fed, state, i, 4)) for i in range(4)]

def test_partialfed_answers_as_fedper_where_nothing_is_normalised():
    fed = federation(PartialFed(), plain(), 'momentum and decay')
    a,b = (own_models(replace(fed, method=m)) for m in (fed.method, method('fedper')))
    assert all(torch.equal(x[k], y[k]) for x,y in zip(a, b) for k in x)

def strategies(fed):
    "The batches and the noise of all passes"
    n,where = len(layer_of(fed.net.weights())),[(r, i) for r in range(4) for i in taking_part(fed, r)]
    batches = {(r, i): torch.from_numpy(stream(fed.seed, 'strategy', r, i).permutation(len(fed.data.clients[i]))).split(4) for r,i in where}
    return batches,{(r, i): torch.from_numpy(stream(fed.seed, 'gumbel', r, i).gumbel(size=(len(b), n, 2))) for (r, i),b in batches.items()}

@BOTH
@pytest.mark.parametrize('pi_lr,tau', [(.1, 1.), (5., .5), (.1, 3.)])
@pytest.mark.parametrize('all', [False, True])
def test_partialfed_adaptive(optimiser, pi_lr, tau, all):
    fed,seen = federation(PartialFedAdaptive(pi_lr, tau), plain(), optimiser, all=all),set()
    def check(state, e, r):
        for i,m in state['memory'].items(): T.agree(dict(pi=m['pi']), dict(pi=e['pi'][int(i)]), f'round {r}, π of {i}'); seen.update((m['pi'][:,0]>=m['pi'][:,1]).tolist())
    batches,noise = strategies(fed)
    compare(fed, O.oracle_partialfed_adaptive, check=check, layers=[['body.fc.weight','body.fc.bias'],['head.weight','head.bias']], strategy=batches, gumbels=noise, lr_pi=pi_lr, tau=tau)
    assert seen=={False, True}

def test_partialfed_adaptive_has_nothing_to_choose_in_its_first_round():
    for module in (plain, normed):
        fed = federation(FedAvg(), module(), 'momentum and decay')
        fed = replace(fed, protocol=replace(fed.protocol, rounds=1))
        (a,_),(b,_) = run(fed),run(replace(fed, method=PartialFedAdaptive()))
        assert all(torch.equal(t, b['server']['w'][k]) for k,t in a['server']['w'].items()) and all(torch.equal(t, b['buffers'][k]) for k,t in a['buffers'].items())
        assert all(not m['pi'].any() for m in b['memory'].values())

@pytest.mark.parametrize('name', ['partialfed','partialfedadaptive'])
def test_what_a_client_remembers_of_partialfed_does_not_move_while_it_trains(name):
    "BatchNorm updates statistics in place"
    fed = federation(method(name, **(dict(pi_lr=5.) if 'adaptive' in name else {})), normed(), 'plain', all=True)
    state = run(fed)[0]
    before = {i: clone(dict(m)) for i,m in state['memory'].items()}
    one_by_one(fed, state, [0, 1, 2, 3], 4)
    for i,m in state['memory'].items(): T.agree(dict(m), before[i], i); assert all(torch.equal(a, b) for a,b in zip(flatten(m).values(), flatten(before[i]).values()))

@pytest.mark.parametrize('name', ['partialfed','partialfedadaptive'])
@pytest.mark.parametrize('engine', [Traced, stacked, lambda: Processes(2)])
def test_partialfed_goes_with_every_engine(engine, name):
    fed = federation(method(name), normed(), 'momentum and decay')
    (a,_),(b,_) = run(fed),run(fed, engine=engine())
    T.agree(a['server'], b['server'], 'server'); T.agree(a['buffers'], b['buffers'], 'statistics')
