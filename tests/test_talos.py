"TaLoS: masks hold to the bit after any optimiser, sensitivities equal a loop, and a full mask is FedAvg."
from dataclasses import replace
import numpy as np, pytest, torch, torch.nn.functional as F
from torch import nn
from hypothesis import given, settings, strategies as st
from fedbook.errors import Refused
from fedbook.method import FedAvg, LocalTraining, method
from fedbook.methods import talos
from fedbook.methods.fedprox import FedProx
from fedbook.methods.talos import calibrate, dense, lowest, Masked, per_sample, sensitivity, sparse, TaLoS, TaLoSProx
from fedbook.models import build, Net
from fedbook.optim import Adam, AdamW, SGD
from fedbook.client import begin_client
from fedbook.federation import begin, client_view
from fedbook.rounds import run
from fedbook.streams import seeded
from fedbook.tensors import gradient, tmap
from fedbook.wire import nbytes
from test_rounds import federation, mlp, same

NETS = dict(vit=lambda: Net(build('vit_tiny32', 5, 1, 28, patch=14, dim=8, depth=2)), cnn=lambda: Net(build('cnn', 5, 1, 28, channels=(3,4), hidden=(6,))), linear=lambda: Net(build('softmax', 5, 1, 28)))
OPTIMISERS = [SGD(.1, .9, .05), AdamW(.01, weight_decay=.1), Adam(.01, weight_decay=.1), SGD(.1)]

def data(n=6, size=28, classes=5):
    g = torch.Generator().manual_seed(1)
    return dict(x=torch.randn(n, 1, size, size, generator=g), y=torch.randint(0, classes, (n,), generator=g))

@pytest.mark.parametrize('opt', OPTIMISERS, ids=lambda o: type(o).__name__+str(o.weight_decay))
@pytest.mark.parametrize('net', NETS.values(), ids=NETS)
def test_no_masked_coordinate_changes_by_a_single_bit(net, opt):
    net,batch = net(),data()
    w = start = net.weights()
    mask = calibrate(lambda w,r: sensitivity(net, w, {}, [batch], 'gradient'), w, .7, 2, 'most')
    masked,s = Masked(opt, mask),opt.init(w)
    for t in range(7):
        g,_ = gradient(lambda w: F.cross_entropy(net.logits(w, {}, batch['x']), batch['y']), w)
        w,s = masked.update(w, g, s, 1/(1+t))
    for k in w:
        assert torch.equal(w[k][~mask[k]].view(torch.int32), start[k][~mask[k]].view(torch.int32)), k
        if mask[k].any(): assert not torch.equal(w[k][mask[k]], start[k][mask[k]]), k

@pytest.mark.parametrize('opt', OPTIMISERS, ids=lambda o: type(o).__name__+str(o.weight_decay))
def test_unmasked_coordinates_do_as_without_a_mask(opt):
    w,mask = dict(a=torch.randn(9)),dict(a=torch.arange(9) % 2==0)
    x,y,s,t = w,w,opt.init(w),opt.init(w)
    for i in range(5):
        g = dict(a=torch.randn(9))
        (x,s),(y,t) = opt.update(x, g, s),Masked(opt, mask).update(y, g, t)
    assert torch.equal(x['a'][mask['a']], y['a'][mask['a']])

def test_the_released_leak_is_the_weight_decay():
    "SGD and AdamW shrink masked weights by (1 − ηλ) a step; a tensor without any trained weight is not given to the optimiser"
    w = dict(a=torch.tensor([2.,3.]), b=torch.tensor([5.]))
    mask = dict(a=torch.tensor([True,False]), b=torch.tensor([False]))
    for opt in (SGD(.1, 0., .5), AdamW(.1, weight_decay=.5)):
        v,s = w,opt.init(w)
        for _ in range(3): v,s = Masked(opt, mask, 'released').update(v, tmap(torch.ones_like, v), s)
        assert torch.isclose(v['a'][1], torch.tensor(3*.95**3)) and v['b'][0]==5

@pytest.mark.parametrize('kind', ['fisher','logit'])
@pytest.mark.parametrize('net', NETS.values(), ids=NETS)
def test_fisher_is_a_loop_over_samples(net, kind, monkeypatch):
    net,b = net(),data(9)
    net = Net(net.module.double()); b = dict(b, x=b['x'].double()); w = net.weights()
    monkeypatch.setattr(talos, 'SAMPLES_AT_ONCE', 4)
    with seeded(3): f = per_sample(net, w, {}, b['x'], kind)
    with seeded(3): y = torch.multinomial(net.logits(w, {}, b['x']).softmax(1), 1)[:,0]
    def at(i, w): z = net.logits(w, {}, b['x'][i:i+1])[0]; return (z.log_softmax(0) if kind=='fisher' else z)[y[i]]
    loop = [gradient(lambda w: at(i, w), w)[0] for i in range(9)]
    for k in w: torch.testing.assert_close(f[k], sum(g[k]**2 for g in loop)/9, rtol=1e-6, atol=1e-12)

def test_gradient_sensitivity_is_the_released_formula():
    net,batches = NETS['cnn'](),[data(6), data(4)]
    s,w = sensitivity(net, net.weights(), {}, batches, 'gradient'),net.weights()
    parts = [(gradient(lambda w: F.cross_entropy(net.logits(w, {}, b['x']), b['y']), w)[0], len(b['y'])) for b in batches]
    for k in w: torch.testing.assert_close(s[k], sum(g[k]**2*n for g,n in parts)/2)

def test_sensitivity_changes_neither_weights_nor_buffers():
    fed = federation(module=mlp(bn=True)); w,b = fed.net.weights(),fed.net.buffers()
    for kind in ('gradient','fisher'): sensitivity(fed.net, w, b, [dict(x=fed.data.x[:5], y=fed.data.y[:5])], kind)
    assert same(w, fed.net.weights()) and same(b, fed.net.buffers())

@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.data())
def test_lowest_keeps_exactly_as_many_and_none_is_higher_than_one_left_out(values, d):
    n = d.draw(st.integers(0, len(values)))
    t = torch.tensor(values, dtype=torch.float)
    m = lowest(t, n)
    assert m.sum()==n and torch.equal(m, lowest(t, n))
    if 0 < n < len(values): assert t[m].max() <= t[~m].min()
    for v in set(values): # of equal ones the first
        tie = m[t==v]; assert torch.equal(tie, tie.sort(descending=True).values)

@settings(deadline=None)
@given(st.floats(0, .99), st.integers(1, 5), st.sampled_from(['least','most']), st.sampled_from(['tensor','global']), st.sampled_from(['exponential','overwrite']))
def test_calibration_keeps_its_share(sparsity, rounds, keep, scope, schedule):
    g = torch.Generator().manual_seed(0)
    w = dict(a=torch.rand(7, 9, generator=g), b=torch.rand(5, generator=g), c=torch.zeros(20))
    m = calibrate(lambda w,r: tmap(lambda t: t*t, w), w, sparsity, rounds, keep, scope, schedule)
    if scope=='tensor': assert all(abs(m[k].sum()-(1-sparsity)*w[k].numel()) <= 1 for k in w)
    assert abs(sum(v.sum() for v in m.values())-(1-sparsity)*88) <= (1 if scope=='global' else 3)

def test_least_and_most_are_opposite_and_scope_matters():
    w = dict(a=torch.arange(10.), b=torch.arange(10.)+100)
    def masks(**kw): return calibrate(lambda w,r: dict(a=torch.arange(10.), b=torch.arange(10.)+100), w, .5, 1, **kw)
    assert not (masks(keep='least')['a'] & masks(keep='most')['a']).any()
    assert masks(scope='global')['a'].all() and not masks(scope='global')['b'].any() and masks()['b'].sum()==5

def test_calibration_rounds_hold_back_softly_and_for_good():
    "Shares κ^(r/R); what is out counts a tenth in later rounds; it never comes back, however low its later score"
    w,seen = dict(a=torch.ones(16)),[]
    def scores(v, r): seen.append(v['a'].clone()); return dict(a=torch.arange(16.) if r==0 else -torch.arange(16.))
    m = calibrate(scores, w, .75, 2, 'least')
    assert [(s==1).sum().item() for s in seen]==[16, 8] and torch.isclose(seen[1][8:], torch.tensor(.1)).all()
    assert m['a'].nonzero()[:,0].tolist()==[4,5,6,7] # the lowest in round two among the eight of round one

def test_overwriting_rounds_are_the_last_alone():
    seen = []
    def scores(w, r): seen.append(r); return dict(a=torch.arange(10.) if r==3 else -torch.arange(10.))
    m = calibrate(scores, dict(a=torch.ones(10)), .5, 4, 'least', schedule='overwrite')
    assert seen==[3] and m['a'].tolist()==[True]*5+[False]*5

def test_scores_that_are_no_numbers_do_no_harm():
    m = calibrate(lambda w,r: dict(a=torch.tensor([float('nan'), 1., float('inf'), 0.])), dict(a=torch.ones(4)), .5, 3)
    assert m['a'].tolist()==[False, True, False, True]

@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_a_message_comes_back_and_costs_its_bits(bits):
    m = torch.tensor(bits)
    base,w = dict(a=torch.zeros(len(bits)), b=torch.zeros(3)),dict(a=torch.arange(1., len(bits)+1), b=torch.ones(3))
    message = sparse(w, dict(a=m, b=torch.zeros(3).bool()))
    assert torch.equal(dense(message, base)['a'], torch.where(m, w['a'], 0.)) and not dense(message, base)['b'].any()
    n = int(m.sum())
    assert list(message['mask'])==['a']*(0 < n < len(bits)) and list(message['values'])==['a']*(n > 0)
    numbers = 4*n + (0 if n in (0, len(bits)) else -(-len(bits)//8))
    assert 0 <= nbytes(message) - numbers <= 250 # the header

@pytest.mark.parametrize('local', [LocalTraining(2, 4, SGD(.1, .9, 1e-3)), LocalTraining(2, 5, AdamW(.01))])
@pytest.mark.parametrize('m,plain', [(TaLoS(sparsity=0.), FedAvg()), (TaLoSProx(sparsity=0., mu=.3), FedProx(mu=.3)), (TaLoS(variant='printed'), FedAvg())])
def test_a_mask_of_ones_is_fedavg_to_the_bit(m, plain, local):
    assert same(run(federation(m, local=local, module=mlp(bn=True)))[0], run(federation(plain, local=local, module=mlp(bn=True)))[0])

def test_no_pull_is_talos():
    assert same(run(federation(TaLoSProx(mu=0.)))[0], run(federation(TaLoS()))[0])

def test_the_server_changes_only_what_somebody_sent():
    fed = federation(TaLoS(sparsity=.9), rounds=1, per_round=2)
    before,after = begin(fed)['server']['w'],run(fed)[0]['server']['w']
    masks = []
    for c in (client_view(fed, begin(fed), i, 0) for i in range(4)): begin_client(fed, c); masks.append(c.memory['mask'])
    for k in before:
        still = ~torch.stack([m[k] for m in masks]).any(0)
        assert torch.equal(before[k][still], after[k][still])
    assert any(not torch.equal(before[k], after[k]) for k in before)

def test_the_uplink_is_smaller_by_the_mask_and_the_released_one_is_not():
    wide = nn.Sequential(nn.Linear(6, 500), nn.ReLU(), nn.Linear(500, 3)) # a header is nothing beside it
    def up(m): _,rows = run(federation(m, rounds=1, module=wide)); return [r[3] for r in rows if r[2]=='bytes_up'][0]
    full,half = up(FedAvg()),up(TaLoS(sparsity=.5))
    assert .5*full < half < .6*full and up(TaLoS(sparsity=.5, variant='released'))==full

def test_the_released_mask_ignores_the_received_model_and_the_intended_one_does_not():
    def mask(m, round, state):
        fed = federation(m); c = client_view(fed, state or begin(fed), 0, 0)
        with seeded(0): return m.start(c)[1]['mask']
    trained = run(federation(rounds=5))[0]
    for kind in ('gradient',):
        assert same(mask(TaLoS(variant='released', kind=kind), 0, None), mask(TaLoS(variant='released', kind=kind), 0, trained))
        assert not same(mask(TaLoS(kind=kind), 0, None), mask(TaLoS(kind=kind), 0, trained))

def test_head_mode_trains_the_head_on_features_computed_once():
    from fedbook.experiments import federation as of, Setting
    from fedbook.federation import ready
    s = Setting('fashion_mnist_mini', model=dict(name='cnn_fedcspack_fmnist'), partition=dict(name='iid', n_clients=40), method=dict(name='talos', mode='head', kind='gradient'), protocol=dict(rounds=1, per_round=3))
    fed = of(s)
    assert set(fed.net.weights())=={'head.weight','head.bias'} and ready(fed).data.x.shape==(3600 + 400, 50)
    assert set(run(fed)[0]['server']['w'])=={'head.weight','head.bias'}

def test_a_client_smaller_than_a_batch_calibrates_on_what_it_has():
    fed = federation(TaLoS(), sizes=(2,12,20,5), per_round=4)
    assert np.isfinite([r[3] for r in run(fed)[1]]).all()

@pytest.mark.parametrize('bad,word', [(lambda: TaLoS(sparsity=1.), 'sparsity'), (lambda: TaLoS(sparsity=-.1), 'sparsity'), (lambda: TaLoS(sparsity=float('nan')), 'sparsity'), (lambda: TaLoS(batches=0), 'batches'),
    (lambda: TaLoS(calibrations=0), 'calibrations'), (lambda: TaLoS(keep='lest'), "'least'"), (lambda: TaLoS(mode='heads'), "'head'"), (lambda: TaLoS(kind='fischer'), "'fisher'"),
    (lambda: TaLoS(scope='gobal'), "'global'"), (lambda: TaLoS(variant='relased'), "'released'"), (lambda: TaLoS(schedule='x'), 'schedule'),
    (lambda: sensitivity(NETS['linear'](), {}, {}, []), 'at least one batch'), (lambda: method('talosprox', mu=-1), 'mu'), (lambda: calibrate(None, {}, sparsity='a'), 'sparsity')])
def test_refusals(bad, word):
    with pytest.raises(Refused, match=word): bad()
