"Baselines of paper 003: identities, closed forms, and first updates that differ from FedAvg's by the analytic amount."
from dataclasses import replace
import pytest, torch, torch.nn.functional as F
from fedbook.errors import Refused
from fedbook.method import FedAvg, Local, method
from fedbook.methods.fedala import FedALA
from fedbook.methods.fedas import class_means, FedAS
from fedbook.methods.feddbe import FedDBE
from fedbook.methods.fednova import accumulation, FedNova
from fedbook.methods.fedntd import FedNTD, not_true_distillation
from fedbook.methods.fedpac import FedPAC, head_weights
from fedbook.methods.fedspu import active_rows, FedSPU
from fedbook.methods.localonly import LocalOnly
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

@pytest.mark.parametrize('momentum,mu', [(0., 0.), (0., 2.), (.5, 2.), (.9, .3)])
def test_accumulation_with_a_proximal_term_weighs_each_gradient(momentum, mu):
    "The sum of what single gradients of one become, step by step; without momentum (1−ημ)^(n−1−k)"
    lr,scales = .1,[1., .5, 1., .25, 1.]
    def single(k): # (w₀−w)/η after a gradient of one at step k and none else
        moved = v = 0.
        for t,s in enumerate(scales): v = momentum*v + (t==k) - mu*lr*moved; moved += s*v
        return moved
    assert abs(accumulation(SGD(lr, momentum, .7), scales, mu)-sum(single(k) for k in range(5))) < 1e-12
    if not momentum: assert abs(accumulation(SGD(lr), [1.]*4, mu)-sum((1-lr*mu)**k for k in range(4))) < 1e-12

@pytest.mark.parametrize('name', ['fednova+fedprox','fedprox+fednova','fednova+moon'])
def test_fednova_asks_for_the_proximal_term_of_the_method_it_is_combined_with(name):
    "‖a‖₁ on the way to the server; MOON's μ is no such term"
    local,m = Local(1, 4, SGD(.1)),method(name, mu=3.)
    fed = whole(m, rounds=1, per_round=4, local=local)
    a = [r['message']['a'].item() for r in one_by_one(fed, begin(fed), [0,1,2,3], 0)]
    q = .7 if 'prox' in name else 1.
    assert a==pytest.approx([sum(q**k for k in range(n)) for n in (2,3,5,2)])

def test_fednova_with_a_proximal_term_reaches_what_one_client_would_on_linear_losses():
    "A loss that is linear in one weight with slope 1 for all, unequal steps: normalised changes are equal, −η each, and the server moves by −η τ_eff"
    m,(lr,mu) = method('fednova+fedprox', mu=2.),(.1, 2.)
    def change(n): w = 0.; [w := w - lr*(1+mu*w) for _ in range(n)]; return w
    steps = (1,4,9)
    norms = [accumulation(SGD(lr), [1.]*n, mu) for n in steps]
    for n,a in zip(steps, norms): assert change(n)/a==pytest.approx(-lr)
    zero = dict(w=torch.zeros((), dtype=torch.float64))
    state = m.merge(m.server(zero), [dict(w=dict(w=torch.tensor(change(n), dtype=torch.float64)), a=torch.tensor(a, dtype=torch.float64)) for n,a in zip(steps, norms)], [1,1,1])
    assert state['w']['w'].item()==pytest.approx(-lr*sum(norms)/3)

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
    assert sum(v.numel() for v in r['message']['values'].values())==sum(m.sum() for m in mask.values()) and same(fed.method.personal(replace(c, memory=r['memory'])), r['memory']['own'])

def test_fedspu_gives_clients_unlike_shares_unless_told_one():
    fed = whole(FedSPU(), rounds=1, per_round=4)
    sent = [sum(v.numel() for v in r['message']['values'].values()) for r in one_by_one(fed, begin(fed), [0,1,2,3], 0)]
    assert sent==sorted(sent) and len(set(sent))==4
    alike = whole(FedSPU(share=.5), rounds=1, per_round=4)
    assert len({sum(v.numel() for v in r['message']['values'].values()) for r in one_by_one(alike, begin(alike), [0,1,2,3], 0)})==1

@pytest.mark.parametrize('bad,word', [(lambda: MOON(mu=-1), 'mu'), (lambda: MOON(tau=0), 'tau'), (lambda: FedNTD(beta=-1), 'beta'), (lambda: FedSPU(share=0), 'share'), (lambda: FedSPU(share=1.1), 'share'), (lambda: method('moon', nu=1), 'nu')])
def test_refusals(bad, word):
    with pytest.raises(Refused, match=word): bad()

def test_fedala_mixes_only_the_head_and_learns_to_help():
    fed = whole(FedALA(eta=1.), rounds=1, per_round=4, local=Local(3, 4, SGD(.2)))
    state = run(fed)[0]
    c = client_view(fed, state, 1, 1)
    w = begin_client(fed, c)
    own,new,a = state['memory']['1']['own'],state['server']['w'],c.memory['a']
    assert set(a)=={'head.weight','head.bias'} and all(0 <= v.min() and v.max() <= 1 for v in a.values())
    for k in w: torch.testing.assert_close(w[k], own[k]+(new[k]-own[k])*a[k] if k in a else new[k])
    f = lambda w: F.cross_entropy(c.net.logits(w, {}, c.x), c.y)
    assert f(w) < f(new)

def test_fedala_is_fedavg_while_models_agree_and_learns_one_pass_later():
    assert same(run(whole(FedALA(), rounds=1))[0]['server'], run(whole(FedAvg(), rounds=1))[0]['server'])
    from unittest.mock import patch
    fed = whole(FedALA(), rounds=1, per_round=4); state = run(fed)[0]
    calls = []
    def learn(self, c, own, new, a, n): calls.append(n); return a,1.
    with patch.object(FedALA, 'learn', learn):
        c = client_view(fed, state, 0, 1); begin_client(fed, c)
        assert calls==list(range(11)) # ten equal losses are enough
        again = client_view(fed, dict(state, memory={'0': c.memory}), 0, 2); begin_client(fed, again)
    assert calls[11:]==[0]

def test_feddbe_without_pull_and_mean_is_fedavg_s_gradient():
    "The first step: FedAvg's, as the mean is zero and there is no consensus; the mean moves by the head's gradient"
    fed,a,c = first_step(FedDBE(kappa=9.)); _,b,_ = first_step(FedAvg())
    close(a, b, rtol=1e-5, atol=1e-7)

def test_feddbe_pulls_features_to_the_consensus():
    fed = whole(FedDBE(kappa=7.), sizes=(20,), per_round=1, rounds=1, local=Local(1, 100, SGD(.1)))
    state = begin(fed); state['server']['consensus'] = torch.linspace(-1, 1, 8)
    a = one_by_one(fed, state, [0], 0)[0]['message']['w']; _,b,c = first_step(FedAvg())
    g,_ = gradient(lambda w: ((c.net.features(w, {}, c.x).mean(0)-state['server']['consensus'])**2).mean()/2, c.message['w'])
    for k in a: torch.testing.assert_close(a[k], b[k]-.1*7*g[k], rtol=1e-4, atol=1e-6)

def test_feddbe_personal_model_is_the_shifted_one_and_the_mean_is_never_sent():
    fed = whole(FedDBE(), rounds=2, per_round=4)
    state = run(fed)[0]
    c = client_view(fed, state, 2, 2); w = fed.method.personal(c)
    z = c.net.features(state['server']['w'], {}, c.x)+state['memory']['2']['mean']
    torch.testing.assert_close(c.net.logits(w, {}, c.x), c.net.head(state['server']['w'], z))
    r = one_by_one(fed, state, [2], 2)[0]
    assert set(r['message'])=={'w','consensus'} and set(r['message']['w'])==set(state['server']['w']) and state['memory']['2']['mean'].abs().sum() > 0

def test_fedas_aligns_the_body_and_keeps_the_head():
    fed = whole(FedAS(lr=.1), rounds=2, per_round=4, local=Local(2, 4, SGD(.3)))
    state = run(fed)[0]
    c = client_view(fed, state, 1, 2); own,x = c.memory['own'],c.x
    w = begin_client(fed, c)
    goal = class_means(c.net.features(own, {}, x), c.y, 3)[0][c.y]
    def gap(w): return F.mse_loss(c.net.features(w, {}, x), goal)
    assert gap(w) < gap(state['server']['w']) and all(torch.equal(w[k], own[k]) for k in w if k.startswith('head'))
    personal = fed.method.personal(client_view(fed, state, 1, 2))
    assert all(torch.equal(v, (own if k.startswith('head') else state['server']['w'])[k]) for k,v in personal.items())

def test_fedas_weighs_by_the_squared_gradients_of_its_batches():
    fed = whole(FedAS(), sizes=(20,), per_round=1, rounds=1, local=Local(1, 100, SGD(.1)))
    m = one_by_one(fed, begin(fed), [0], 0)[0]['message']; c = client_view(fed, begin(fed), 0, 0)
    g,_ = gradient(lambda w: F.cross_entropy(c.net.logits(w, {}, c.x), c.y), m['w'])
    torch.testing.assert_close(m['trace'], sum(v.square().sum() for v in g.values()))

def test_fedas_aligns_a_copy_and_not_the_server_s_model():
    fed = whole(FedAS(lr=.5)); state = begin(fed); before = {k: v.clone() for k,v in state['server']['w'].items()}
    one_by_one(fed, state, [0,1,2], 0)
    assert same(before, state['server']['w'])

def test_head_weights_are_the_optimum_on_the_simplex():
    import numpy as np
    g = torch.Generator().manual_seed(0)
    hs,vs = [torch.randn(3, 4, generator=g) for _ in range(6)],[.5,1.,2.,.1,3.,1.]
    for i in range(6):
        d = torch.stack([hs[i]-h for h in hs]).flatten(1).double().numpy(); p = np.diag(vs)+d@d.T
        a = head_weights(i, vs, hs)
        assert a.min() >= 0 and abs(a.sum()-1) < 1e-9
        for b in np.random.default_rng(i).dirichlet(np.ones(6), 200): assert a@p@a <= b@p@b+1e-4

def test_clients_that_are_alike_share_heads_by_their_samples():
    h = torch.ones(2, 3)
    assert abs(head_weights(0, [.1, .2], [h, h])[0]-2/3) < 1e-4 and head_weights(1, [1., 1.], [h, 1e3*h]).tolist()==[0, 1]

def test_fedpac_trains_the_head_first_and_then_only_the_body():
    fed = whole(FedPAC(), rounds=1, per_round=4, local=Local(1, 4, SGD(.1, .9, .01)))
    state = begin(fed); c = client_view(fed, state, 2, 0)
    w = begin_client(fed, c); w0 = state['server']['w']
    assert all(torch.equal(w[k], w0[k])==(not k.startswith('head')) for k in w)
    m = one_by_one(fed, state, [2], 0)[0]['message']
    assert all(torch.equal(m['w'][k], w[k])==k.startswith('head') for k in w)

def test_fedpac_pulls_known_classes_to_their_prototypes():
    fed = whole(FedPAC(lam=3.), sizes=(20,), per_round=1, rounds=1, local=Local(1, 100, SGD(.1)))
    def after(**extra): state = begin(fed); state['server'].update(extra); return one_by_one(fed, state, [0], 0)[0]['message']['w'],client_view(fed, state, 0, 0)
    p,known = torch.linspace(-1, 1, 24).view(3, 8),torch.tensor([True,False,True])
    (a,c),(b,_) = after(prototypes=p, known=known),after()
    w = begin_client(fed, c)
    def pull(w): z = c.net.features(w, {}, c.x); return (known[c.y][:,None]*(z-p[c.y])).square().mean()
    g,_ = gradient(pull, w)
    for k in a: torch.testing.assert_close(a[k], b[k]-.1*3*g[k]*(not k.startswith('head')), rtol=1e-4, atol=1e-6)

def test_fedpac_gives_each_client_its_own_head():
    fed = whole(FedPAC(), rounds=1, per_round=3)
    state = run(fed)[0]
    heads = state['server']['heads']
    assert len(heads)==3
    for i in range(4):
        sent = fed.method.send(state['server'], i)['w']
        assert same({k: v for k,v in sent.items() if k.startswith('head')}, heads[str(i)] if str(i) in heads else {k: v for k,v in state['server']['w'].items() if k.startswith('head')})
    resumed = whole(FedPAC(), rounds=2, per_round=3)
    assert run(resumed)[0]['server']['known'].any()

def test_local_training_is_fedavg_with_one_client_and_sends_nothing():
    fed = whole(LocalOnly(), per_round=4)
    state,rows = run(fed)
    assert same(state['server'], begin(fed)['server']) and sum(r[3] for r in rows if r[2].startswith('bytes'))==0
    alone = replace(fed, method=FedAvg(), protocol=replace(fed.protocol, per_round=1))
    w = begin(alone)
    for r in range(3): reply = one_by_one(alone, w, [2], r)[0]; w = dict(w, server=dict(w=reply['message']['w']))
    assert same(fed.method.personal(client_view(fed, state, 2, 3)), w['server']['w'])
