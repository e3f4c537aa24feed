"Baselines of paper 003: identities, closed forms, and first updates that differ from FedAvg's by the analytic amount."
from dataclasses import replace
import pytest, torch, torch.nn.functional as F
from fedbook.errors import Refused
from fedbook.method import FedAvg, Local, method
from fedbook.methods.fednova import accumulation, FedNova
from fedbook.methods.fedntd import FedNTD, not_true_distillation
from fedbook.methods.fedspu import active_rows, FedSPU
from fedbook.methods.moon import contrast, MOON
from fedbook.optim import Cosine, SGD
from fedbook.rounds import begin, begin_client, client_view, one_by_one, run
from fedbook.streams import stream
from fedbook.tensors import gradient
from test_rounds import federation, mlp, same

def whole(m, **kw): return federation(m, module=mlp(blocks=True), **kw)
def close(a, b, **kw):
    for k in a: torch.testing.assert_close(a[k], b[k], **kw)

@pytest.mark.parametrize('m', [MOON(mu=0.), FedNTD(beta=0.), FedSPU(share=1.)])
def test_without_its_term_it_is_fedavg(m):
    a,b = run(whole(m))[0]['server']['w'],run(whole(FedAvg()))[0]['server']['w']
    if isinstance(m, FedSPU): close(a, b, rtol=1e-5, atol=1e-6) # another order of sums
    else: assert same(a, b)

@pytest.mark.parametrize('momentum', [0., .5, .9])
def test_accumulation_is_the_formula(momentum):
    "‖a‖₁ = Σ (1−ρ^{n−k})/(1−ρ), with the schedule's factors"
    assert abs(accumulation(SGD(.3, momentum, .1), [1.]*7)-sum((1-momentum**k)/(1-momentum) for k in range(1, 8))) < 1e-9
    assert abs(accumulation(SGD(.3), [1., .5, .25])-1.75) < 1e-12

def test_fednova_with_equal_steps_is_fedavg():
    sizes = (8, 8, 8, 8)
    a,b = (run(whole(m, sizes=sizes))[0]['server']['w'] for m in (FedNova(), FedAvg()))
    close(a, b)

def test_fednova_divides_by_the_steps():
    "Unequal clients, one round: w + τ_eff Σ p_i (w_i − w)/n_i, from FedAvg's own replies"
    local = Local(1, 4, SGD(.1))
    fed = whole(FedNova(), rounds=1, per_round=4, local=local)
    w0 = begin(fed)['server']['w']
    replies = one_by_one(replace(fed, method=FedAvg()), begin(fed), [0,1,2,3], 0)
    sizes,steps = (7,12,20,5),(2,3,5,2)
    p = [n/sum(sizes) for n in sizes]
    tau = sum(q*n for q,n in zip(p, steps))
    want = {k: w0[k]+tau*sum(q*(r['message']['w'][k]-w0[k])/n for q,n,r in zip(p, steps, replies)) for k in w0}
    close(run(fed)[0]['server']['w'], want)
    assert not same(run(fed)[0]['server']['w'], run(whole(FedAvg(), rounds=1, per_round=4, local=local))[0]['server']['w'])

def test_the_contrast_is_the_printed_formula():
    z,g,p = (torch.randn(5, 7, dtype=torch.float64) for _ in range(3))
    a,b = (F.cosine_similarity(z, o)/.5 for o in (g, p))
    torch.testing.assert_close(contrast(z, g, p), -(a.exp()/(a.exp()+b.exp())).log().mean())

def first_step(m, memory=None, steps=1):
    "The client's model after some steps of SGD on all its samples, and what went in"
    fed = whole(m, sizes=(20,), per_round=1, rounds=1, local=Local(steps, 100, SGD(.1)))
    state = begin(fed)
    if memory: state['memory'] = {'0': memory}
    return fed,one_by_one(fed, state, [0], 0)[0]['message']['w'],client_view(fed, state, 0, 0)

def test_moon_s_first_update_differs_by_the_gradient_of_its_contrast():
    other = {k: v+.3*torch.randn(v.shape, generator=torch.Generator().manual_seed(1)) for k,v in mlp(blocks=True).named_parameters()}
    other = {k: v.detach() for k,v in other.items()}
    fed,a,c = first_step(MOON(mu=2.), dict(previous=other))
    _,b,_ = first_step(FedAvg())
    w0 = c.message['w']
    f = lambda w: c.net.features(w, {}, c.x)
    g,_ = gradient(lambda w: contrast(f(w), f(w0).detach(), f(other).detach()), w0)
    for k in b: torch.testing.assert_close(a[k], b[k]-.1*2*g[k], rtol=1e-4, atol=1e-6)
    assert not same(a, b)

def test_moon_remembers_its_last_model():
    fed = whole(MOON(), rounds=1, per_round=4)
    state,_ = run(fed)
    replies = one_by_one(fed, begin(fed), [0,1,2,3], 0)
    for i in range(4): assert same(state['memory'][str(i)]['previous'], replies[i]['message']['w'])

def test_not_true_distillation_is_the_definition_and_ignores_the_true_class():
    z,g,y = torch.randn(6, 5, dtype=torch.float64),torch.randn(6, 5, dtype=torch.float64),torch.tensor([0,1,2,3,4,0])
    def loop(tau): return tau**2*sum(F.kl_div(F.log_softmax(a[keep]/tau, 0), F.softmax(b[keep]/tau, 0), reduction='sum') for a,b,t in zip(z, g, y) for keep in [torch.arange(5)!=t])/6
    for tau in (1., 3.): torch.testing.assert_close(not_true_distillation(z, g, y, tau), loop(tau))
    moved = z.scatter_add(1, y[:,None], torch.full((6,1), 7., dtype=torch.float64))
    torch.testing.assert_close(not_true_distillation(moved, g, y), not_true_distillation(z, g, y))

def test_fedntd_pulls_from_the_second_step_on_by_its_gradient():
    assert close(first_step(FedNTD(beta=5.))[1], first_step(FedAvg())[1], rtol=1e-5, atol=1e-7) is None
    fed,a,c = first_step(FedNTD(beta=5.), steps=2); w1,w2 = first_step(FedAvg())[1],first_step(FedAvg(), steps=2)[1]
    f = lambda w: c.net.logits(w, {}, c.x)
    g,_ = gradient(lambda w: not_true_distillation(f(w), f(c.message['w']).detach(), c.y), w1)
    for k in a: torch.testing.assert_close(a[k], w2[k]-.1*5*g[k], rtol=1e-4, atol=1e-6)

def test_active_rows_are_whole_neurons_with_their_bias():
    import numpy as np
    w = {'a.weight': torch.zeros(10, 3, 2, 2), 'a.bias': torch.zeros(10), 'b.weight': torch.zeros(3)}
    m = active_rows(w, .4, np.random.default_rng(0))
    assert m['a.bias'].sum()==4 and (m['a.weight'].flatten(1).all(1)==m['a.bias']).all() and (m['a.weight'].flatten(1).any(1)==m['a.bias']).all() and m['b.weight'].sum()==1

def test_fedspu_trains_sends_and_merges_active_rows_only():
    fed = whole(FedSPU(share=.4), rounds=2, per_round=2)
    state = run(whole(FedSPU(share=.4), rounds=1, per_round=4))[0]
    c = client_view(fed, state, 0, 1)
    w = begin_client(fed, c)
    mask = active_rows(c.message['w'], .4, stream(0, 'neurons', 1, 0))
    for k in w:
        assert torch.equal(w[k][mask[k]], state['server']['w'][k][mask[k]]) and torch.equal(w[k][~mask[k]], state['memory']['0']['own'][k][~mask[k]])
    r = one_by_one(fed, state, [0], 1)[0]
    for k in w: assert torch.equal(r['memory']['own'][k][~mask[k]], state['memory']['0']['own'][k][~mask[k]])
    assert r['up'] < .6*r['down'] and same(fed.method.personal(state['server'], r['memory']), r['memory']['own'])

@pytest.mark.parametrize('bad,word', [(lambda: MOON(mu=-1), 'mu'), (lambda: MOON(tau=0), 'tau'), (lambda: FedNTD(beta=-1), 'beta'), (lambda: FedSPU(share=0), 'share'), (lambda: FedSPU(share=1.1), 'share'), (lambda: method('moon', nu=1), 'nu')])
def test_refusals(bad, word):
    with pytest.raises(Refused, match=word): bad()
