"Baselines of the FedCSPACK paper: identities, closed forms, and first updates that differ from FedAvg's by the analytic amount."
from copy import deepcopy
from dataclasses import replace
import warnings
import numpy as np, pytest, torch, torch.nn.functional as F
from fedbook.errors import Refused
from fedbook.features import class_means
from fedbook.method import FedAvg, LocalTraining, method, batch_indices
from fedbook.methods.fedala import FedALA
from fedbook.methods.fedas import FedAS, misalignment
from fedbook.methods.feddbe import FedDBE
from fedbook.methods.fednova import accumulation, FedNova
from fedbook.methods.fedntd import FedNTD, not_true_distillation
from fedbook.methods.fedpac import FedPAC, head_weights
from fedbook.methods.fedspu import active, cut, FedSPU, masks
from fedbook.methods.localonly import LocalOnly
from fedbook.methods.moon import contrast, MOON
from fedbook.models import build, Classifier, Net, part
from fedbook.tasks import Task
from fedbook.optim import SGD
from fedbook.client import begin_client, one_by_one
from fedbook.federation import begin, client_view, Federation
from fedbook.rounds import one_round, run, taking_part
from fedbook.streams import seeded
from fedbook.tensors import gradient
from fedbook.wire import nbytes
from test_rounds import federation, mlp, same

def whole(m, **kw): return federation(m, module=mlp(blocks=True), **kw)
def close(a, b, **kw):
    for k in a: torch.testing.assert_close(a[k], b[k], **kw)

@pytest.mark.parametrize('m', [MOON(mu=0.), FedNTD(beta=0.), FedSPU(share=1.)])
def test_without_its_term_it_is_fedavg(m):
    fed = whole(m)
    a,b = (run(f)[0]['server']['w'] for f in (fed, replace(fed, method=FedAvg())))
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
    local,m = LocalTraining(1, 4, SGD(.1)),method(name, mu=3.)
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
    state = m.aggregate(m.server(zero, 1), [dict(w=dict(w=torch.tensor(change(n), dtype=torch.float64)), a=torch.tensor(a, dtype=torch.float64)) for n,a in zip(steps, norms)], [1,1,1])
    assert state['w']['w'].item()==pytest.approx(-lr*sum(norms)/3)

def test_fednova_with_equal_steps_is_fedavg():
    sizes = (8, 8, 8, 8)
    a,b = (run(whole(m, sizes=sizes))[0]['server']['w'] for m in (FedNova(), FedAvg()))
    close(a, b)

def test_fednova_divides_by_the_steps():
    "Unequal clients, one round: w + τ_eff Σ p_i (w_i − w)/n_i, from FedAvg's own replies"
    local = LocalTraining(1, 4, SGD(.1))
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

def first_step(m, steps=1):
    "The client's model after some steps of SGD on all its samples, and what went in"
    fed = whole(m, sizes=(20,), per_round=1, rounds=1, local=LocalTraining(steps, 100, SGD(.1)))
    state = begin(fed)
    return fed,one_by_one(fed, state, [0], 0)[0]['message']['w'],client_view(fed, state, 0, 0)

def test_moon_puts_a_projection_between_body_and_head_once():
    fed,bare = whole(MOON(width=5)),mlp(blocks=True)
    shapes = {k: list(t.shape) for k,t in fed.net.weights().items() if not k.startswith('body.body')}
    assert shapes=={'body.projection.0.weight': [8, 8], 'body.projection.0.bias': [8], 'body.projection.2.weight': [5, 8], 'body.projection.2.bias': [5], 'head.weight': [3, 5], 'head.bias': [3]}
    assert isinstance(fed.net.module.body.projection[1], torch.nn.ReLU) and replace(fed, seed=1).net is fed.net and MOON().width==256
    assert same({k: fed.net.weights()[f'body.{k}'] for k,_ in bare.named_parameters() if k.startswith('body')}, {k: t.detach() for k,t in bare.named_parameters() if k.startswith('body')})
    assert same(fed.net.weights(), whole(MOON(width=5)).net.weights()) and not same(fed.net.weights(), whole(MOON(width=5), seed=1).net.weights())
    assert set(one_by_one(fed, begin(fed), [0], 0)[0]['message']['w'])==set(fed.net.weights())

def test_moon_s_projection_trains_on_a_frozen_body():
    fed = whole(MOON())
    net = MOON().network(Net(mlp(blocks=True), 'body.blocks'))
    assert net.frozen==('body.body.blocks',) and MOON().network(net) is net
    fed = Federation(MOON(), Net(mlp(blocks=True), 'body'), fed.data, fed.local, fed.protocol)
    assert {k.split('.')[1] for k in fed.net.weights() if k.startswith('body')}=={'projection'} and not same(run(fed)[0]['server'], begin(fed)['server'])

@pytest.mark.parametrize('module', [mlp(), mlp(blocks=True).body, Classifier(torch.nn.Linear(6, 3), torch.nn.Identity())])
def test_moon_refuses_what_has_no_place_for_a_projection(module):
    with pytest.raises(Refused, match='MOON puts a projection between body and head; it needs a Classifier whose head has a linear layer'): federation(MOON(), module=module)

@pytest.mark.parametrize('local', [LocalTraining(2, 4, SGD(.1, .9, 1e-3)), LocalTraining(1, 4, SGD(.1), task=Task(label_smoothing=.1), precision='bf16')])
def test_moon_without_its_term_is_fedavg_to_the_bit_with_draws_and_buffers(local):
    "One pass: dropout is drawn once, and BatchNorm's statistics move once"
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', 'This processor does not compute in bfloat16')
        fed = federation(MOON(mu=0.), module=mlp(bn=True, dropout=.4, blocks=True), local=local)
        (a,rows),(b,rows_b) = run(fed),run(replace(fed, method=FedAvg()))
    assert same(a['server'], b['server']) and same(a['buffers'], b['buffers']) and rows==rows_b

def contrasted(net, w, buffers, previous, previous_buffers, x, y, mu, lr):
    "A step of MOON by modules: one network in training mode, two in evaluation mode"
    nets = [deepcopy(net.module) for _ in range(3)]
    for m,v,b in zip(nets, (w, w, previous), (buffers, buffers, previous_buffers)): m.load_state_dict({**v, **b})
    own,*others = nets
    own.train().requires_grad_(True)
    z,(z_glob,z_prev) = own.body(x),[m.eval().body(x).detach() for m in others]
    loss = F.cross_entropy(own.head(z), y) + mu*contrast(z, z_glob, z_prev)
    loss.backward()
    return {k: p.detach()-lr*p.grad for k,p in own.named_parameters()},dict(own.named_buffers())

def test_moon_compares_with_both_models_in_evaluation_mode_by_their_own_statistics():
    local = LocalTraining(1, 100, SGD(.1))
    fed = federation(MOON(mu=2.), module=mlp(bn=True, blocks=True), rounds=1, per_round=4, local=local)
    state,first = run(fed)[0],one_by_one(fed, begin(fed), [1], 0)[0]
    c = client_view(fed, state, 1, 1)
    assert same(c.memory['previous'], {**first['message']['w'], **first['buffers']}) and not same(c.buffers, first['buffers'])
    want,buffers = contrasted(fed.net, state['server']['w'], state['buffers'], first['message']['w'], first['buffers'], c.x, c.y, 2., .1)
    r = one_by_one(fed, state, [1], 1)[0]
    close(r['message']['w'], want, rtol=1e-4, atol=1e-6); close(r['buffers'], buffers, rtol=1e-5, atol=1e-6)
    swapped,_ = contrasted(fed.net, state['server']['w'], state['buffers'], first['message']['w'], state['buffers'], c.x, c.y, 2., .1)
    assert max((swapped[k]-want[k]).abs().max() for k in want) > 1e-4 # the statistics matter here

def test_moon_s_contrast_begins_when_models_differ():
    "Nothing in the run's first round; who comes later is compared with the model that all began with"
    local = LocalTraining(1, 100, SGD(.1))
    fed = federation(MOON(mu=2.), module=mlp(bn=True, blocks=True), rounds=1, per_round=3, local=local)
    plain,state = replace(fed, method=FedAvg()),begin(fed)
    close(*(one_by_one(f, begin(f), [0], 0)[0]['message']['w'] for f in (fed, plain)), rtol=1e-5, atol=1e-7)
    after = run(fed)[0]
    late = next(i for i in range(4) if str(i) not in after['memory'])
    c = client_view(fed, after, late, 1)
    want,_ = contrasted(fed.net, after['server']['w'], after['buffers'], state['server']['w'], state['buffers'], c.x, c.y, 2., .1)
    r = one_by_one(fed, after, [late], 1)[0]['message']['w']
    close(r, want, rtol=1e-4, atol=1e-6)
    assert not same(r, one_by_one(plain, after, [late], 1)[0]['message']['w'])

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

def test_a_layer_has_at_least_one_active_neuron_and_no_more_than_its_share():
    "⌊share·n⌋, not rounded; nothing is drawn for the classifier"
    w = {'a.weight': torch.zeros(16, 3, 2, 2), 'a.bias': torch.zeros(16), 'n.weight': torch.zeros(16), 'b.weight': torch.zeros(3, 16), 'head.weight': torch.zeros(10, 3)}
    def counts(share): return [m.sum().item() for m in active(w, share, np.random.default_rng(0)).values()]
    assert counts(.6)==[9, 1] and counts(.1)==[1, 1] and counts(1.)==[16, 3] and list(active(w, .6, np.random.default_rng(0)))==['a.weight','b.weight']

def by_hand(neurons, w):
    "Masks by loops over a chain of layers: a weight is active where the neurons at both its ends are"
    out,before,names = {},None,[k for k in w if k.endswith('weight') and w[k].dim() > 1]
    for k in names:
        rows = [True]*len(w[k]) if k==names[-1] else neurons[k].tolist()
        block = w[k].shape[1]//len(before) if before else 0
        out[k] = torch.zeros(w[k].shape, dtype=torch.bool)
        for i,j in np.ndindex(*w[k].shape[:2]): out[k][i,j] = rows[i] and (before is None or before[j//block])
        if (bias := k.replace('weight', 'bias')) in w: out[bias] = torch.tensor(rows)
        before = rows
    return out

@pytest.mark.parametrize('name', ['cnn_fedcspack_fmnist','mlp','softmax'])
def test_active_weights_lie_between_active_neurons(name):
    "Also behind the convolutions, where every map is a block of columns"
    w = Net(build(name, **dict(mlp=dict(image_size=4, hidden=(9, 7)), softmax=dict(image_size=4)).get(name, {}))).weights()
    neurons = active(w, .4, np.random.default_rng(1))
    got,want = masks(neurons, w),by_hand(neurons, w)
    assert got.keys()==want.keys() and all(torch.equal(got[k], want[k]) for k in want)

def test_norms_follow_their_layer_and_what_does_not_fit_is_active():
    w = {'pos': torch.zeros(1, 4, 2), 'a.weight': torch.zeros(2, 3), 'n.weight': torch.zeros(2), 'b.weight': torch.zeros(4, 5), 'm.weight': torch.zeros(3), 'head.weight': torch.zeros(3, 4)}
    m = masks({'a.weight': torch.tensor([True, False]), 'b.weight': torch.tensor([True, False, False, True])}, w)
    assert m['pos'].all() and m['n.weight'].tolist()==[1,0] and m['b.weight'].tolist()==[[1]*5, [0]*5, [0]*5, [1]*5] and m['m.weight'].all() and m['head.weight'].tolist()==[[1,0,0,1]]*3

def test_fedspu_trains_sends_and_merges_active_weights_only():
    fed = whole(FedSPU(share=.4), rounds=2, per_round=2)
    state = run(whole(FedSPU(share=.4), rounds=1, per_round=4))[0]
    c = client_view(fed, state, 0, 1)
    w = begin_client(fed, c)
    mask = masks(c.message['neurons'], c.memory['own'])
    for k in w:
        assert torch.equal(w[k][mask[k]], state['server']['w'][k][mask[k]]) and torch.equal(w[k][~mask[k]], state['memory']['0']['own'][k][~mask[k]])
    r = one_by_one(fed, state, [0], 1)[0]
    for k in w: assert torch.equal(r['memory']['own'][k][~mask[k]], state['memory']['0']['own'][k][~mask[k]])
    for m in (c.message, r['message']): assert sum(v.numel() for v in m['values'].values())==sum(m.sum() for m in mask.values())
    assert same(fed.method.personal(replace(c, memory=r['memory'])), r['memory']['own']) and not same(w, r['memory']['own'])

def test_fedspu_draws_anew_for_each_client_round_and_seed():
    def drawn(seed, rounds, i):
        fed = whole(FedSPU(share=.5), rounds=max(1, rounds), per_round=4, seed=seed)
        return fed.method.send((run(fed)[0] if rounds else begin(fed))['server'], i)['neurons']
    first = drawn(0, 0, 0)
    assert same(first, drawn(0, 0, 0)) and not any(same(first, drawn(*other)) for other in ((1, 0, 0), (0, 1, 0), (0, 0, 1)))

def test_fedspu_sends_the_same_number_of_bytes_both_ways():
    fed = whole(FedSPU(), rounds=1, per_round=4)
    replies,plain = (one_by_one(f, begin(f), [0,1,2,3], 0) for f in (fed, replace(fed, method=FedAvg())))
    assert all(r['up']==r['down'] for r in replies) and sum(a['down'] for a in replies) < sum(b['down'] for b in plain)

def test_fedspu_means_all_who_sent_a_weight_whatever_their_order():
    m,w = FedSPU(),{'a.weight': torch.zeros(2, 1), 'head.weight': torch.zeros(1, 2)}
    def sent(v, *on): return cut({k: torch.full_like(t, v) for k,t in w.items()}, {'a.weight': torch.tensor([j in on for j in range(2)])})
    for part in ([0, 1], [1, 0]):
        got = m.aggregate(m.server(w, 1), [(sent(1., 0, 1), sent(3., 0))[j] for j in part], [(3, 1)[j] for j in part])
        assert got['w']['a.weight'].tolist()==[[1.5],[1.]] and got['w']['head.weight'].tolist()==[[1.5, 1.]]
    assert m.aggregate(state := m.server(w, 1), [sent(3., 0)], [1])['w']['a.weight'].tolist()==[[3.],[0.]] and state['w']['a.weight'].tolist()==[[0.],[0.]]

def test_fedspu_does_not_merge_neurons_that_the_network_has_not():
    m,w = FedSPU(),{'a.weight': torch.zeros(2, 1), 'head.weight': torch.zeros(1, 2)}
    state,good = m.server(w, 1),cut(w, {'a.weight': torch.tensor([True, False])})
    assert not m.flaw(state, good)
    for bad in ({}, {'a.weight': torch.tensor([True])}, {'b.weight': torch.tensor([True, False])}): assert m.flaw(state, dict(good, neurons=bad))=='its neurons are not those of the network'
    assert m.flaw(state, dict(good, neurons={'a.weight': torch.tensor([True, True])}))=="it holds [1] values of 'a.weight' for 2"

def test_fedspu_gives_clients_unlike_shares_unless_told_one():
    fed = whole(FedSPU(), rounds=1, per_round=4)
    sent = [sum(v.numel() for v in r['message']['values'].values()) for r in one_by_one(fed, begin(fed), [0,1,2,3], 0)]
    assert sent==sorted(sent) and len(set(sent))==4
    alike = whole(FedSPU(share=.5), rounds=1, per_round=4)
    assert len({sum(v.numel() for v in r['message']['values'].values()) for r in one_by_one(alike, begin(alike), [0,1,2,3], 0)})==1

@pytest.mark.parametrize('bad,word', [(lambda: MOON(mu=-1), 'mu'), (lambda: MOON(tau=0), 'tau'), (lambda: MOON(width=0), 'width'), (lambda: FedNTD(beta=-1), 'beta'), (lambda: FedSPU(share=0), 'share'), (lambda: FedSPU(share=1.1), 'share'), (lambda: method('moon', nu=1), 'nu')])
def test_refusals(bad, word):
    with pytest.raises(Refused, match=word): bad()

def test_fedala_mixes_only_the_head_and_learns_to_help():
    fed = whole(FedALA(eta=1.), rounds=1, per_round=4, local=LocalTraining(3, 4, SGD(.2)))
    state = run(fed)[0]
    c = client_view(fed, state, 1, 1)
    w = begin_client(fed, c)
    own,new,a = state['memory']['1']['own'],state['server']['w'],c.memory['a']
    assert set(a)=={'head.weight','head.bias'} and all(0 <= v.min() and v.max() <= 1 for v in a.values())
    for k in w: torch.testing.assert_close(w[k], own[k]+(new[k]-own[k])*a[k] if k in a else new[k])
    f = lambda w: F.cross_entropy(c.net.logits(w, {}, c.x), c.y)
    assert f(w) < f(new)

def test_fedala_changes_nothing_while_models_agree_and_learns_one_pass_later(monkeypatch):
    from fedbook.methods import fedala
    assert same(run(whole(FedALA(), rounds=1))[0]['server'], run(whole(FedAvg(), rounds=1))[0]['server'])
    fed,calls = whole(FedALA(), rounds=1, per_round=4),[]
    c = client_view(fed, begin(fed), 0, 0); begin_client(fed, c)
    assert not c.memory['learnt'] and all((a==1).all() for a in c.memory['a'].values()) # which does not use up the first time
    state = run(fed)[0]
    monkeypatch.setattr(fedala, 'one_pass', lambda loss, own, new, a, batches, eta: (a, calls.append(len(batches)) or 1.))
    c = client_view(fed, state, 2, 1); kept = fed.method.receive(c)
    assert calls==[2]*11 # ten equal losses are enough; 16 of 20 samples in batches of 10
    fed.method.receive(replace(c, memory=dict(kept, own=c.memory['own']))); assert len(calls)==12

def test_fedala_mixes_for_all_clients_in_every_round_and_scores_the_mixture():
    fed = whole(FedALA(), rounds=2, per_round=2)
    first,_ = one_round(fed, begin(fed), 0); second,rows = one_round(fed, first, 1)
    for i in set(range(4))-set(taking_part(fed, 1)):
        own,new = (first['memory'].get(str(i)) or fed.method.client(fed.net.weights()))['own'],first['server']['w']
        kept = second['memory'][str(i)]
        for k,v in kept['own'].items(): torch.testing.assert_close(v, own[k]+(new[k]-own[k])*kept['a'][k] if k.startswith('head') else new[k])
        assert kept['learnt'] and any((a<1).any() for a in kept['a'].values())
    size = nbytes(dict(w=first['server']['w']))
    assert [r[3] for r in rows if r[2].startswith('bytes')]==[4*size, 2*size]
    c = client_view(fed, second, 0, 2); before = c.memory['a']['head.weight'].clone()
    w = fed.method.personal(c)
    assert same({k: w[k] for k in list(w)[:-2]}, {k: second['server']['w'][k] for k in list(w)[:-2]}) and not same(w, second['server']['w'])
    assert torch.equal(second['memory']['0']['a']['head.weight'], before)

def test_fedala_learns_on_two_samples_with_batchnorm():
    fed = whole(FedALA(), sizes=(2,3), per_round=1, rounds=3); fed = replace(fed, net=type(fed.net)(mlp(bn=True, blocks=True)))
    state,_ = run(fed)
    assert all(torch.isfinite(v).all() for v in state['memory']['0']['own'].values())

def test_feddbe_s_opening_gives_a_consensus_and_throws_weights_away():
    "Plain training of all clients; r is the mean feature of the last batch, before its step"
    fed = whole(FedDBE(kappa=9.), rounds=1, per_round=2, local=LocalTraining(1, 100, SGD(.1, .9, .01)))
    first = begin(fed); after,rows = one_round(fed, first, -1)
    assert same(after['server']['w'], first['server']['w']) and all(m['mean'].abs().sum()==0 for m in after['memory'].values())
    means = [client_view(fed, first, i, -1) for i in range(4)]
    means = [c.net.features(c.message['w'], {}, c.x).mean(0) for c in means]
    torch.testing.assert_close(after['server']['consensus'], sum(n*m for n,m in zip((7,12,20,5), means))/44)
    assert [r[:3] for r in rows]==[[0, None, k] for k in ('train_loss','bytes_down','bytes_up')] and rows[2][3]==4*nbytes(dict(consensus=torch.zeros(8)))
    mean_loss = sum(F.cross_entropy(c.net.logits(c.message['w'], {}, c.x), c.y).item() for c in (client_view(fed, first, i, -1) for i in range(4)))/4
    assert abs(rows[0][3]-mean_loss) < 1e-6

@pytest.mark.parametrize('mu', [1., .3])
def test_feddbe_s_running_mean_is_of_batches_and_no_optimiser_touches_it(mu):
    fed = whole(FedDBE(mu=mu), sizes=(20,), per_round=1, local=LocalTraining(2, 6, SGD(.1, .9, .1)))
    state = begin(fed); r = one_by_one(fed, state, [0], -1)[0]['message']['consensus']
    c,want = client_view(fed, state, 0, -1),torch.zeros(8)
    w,s = c.message['w'],fed.local.optimiser.init(c.message['w'])
    for i,_ in batch_indices(c):
        want = (1-mu)*want + mu*c.net.features(w, {}, c.x[i]).mean(0)
        w,s = fed.local.optimiser.update(w, gradient(lambda w: F.cross_entropy(c.net.logits(w, {}, c.x[i]), c.y[i]), w)[0], s)
    torch.testing.assert_close(r, want)

def test_feddbe_pulls_features_to_the_consensus():
    fed = whole(FedDBE(kappa=7.), sizes=(20,), per_round=1, rounds=1, local=LocalTraining(1, 100, SGD(.1)))
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
    assert set(r['message'])=={'w'} and set(r['message']['w'])==set(state['server']['w']) and state['memory']['2']['mean'].abs().sum() > 0

def test_fedas_aligns_the_body_keeps_the_head_and_scores_its_own_model():
    fed = whole(FedAS(lr=.1), rounds=2, per_round=3, local=LocalTraining(2, 4, SGD(.3)))
    state = run(fed)[0]
    c = client_view(fed, state, 1, 2); own,x = c.memory['own'],c.x
    w = begin_client(fed, c)
    goal = class_means(c.net.features(own, {}, x), c.y, 3)[0]
    def gap(w): return misalignment(c.net.features(w, {}, x), c.y, goal)
    assert gap(w) < gap(state['server']['w']) and all(torch.equal(w[k], own[k]) for k in w if k.startswith('head'))
    assert all(k.startswith('body') for k in c.message['w'])
    for i in range(4): assert same(fed.method.personal(client_view(fed, state, i, 2)), state['memory'][str(i)]['own'] if str(i) in state['memory'] else fed.net.weights())

def test_fedas_aligns_over_whole_batches_in_stored_order_class_by_class():
    "20 samples: one step over the first 16, and the prototypes are theirs; 5 samples: one step over all"
    for n,used in ((20, 16), (5, 5)):
        fed = whole(FedAS(lr=.1), sizes=(n,), per_round=1)
        state = begin(fed); state['server']['w'] = {k: v+.3 for k,v in state['server']['w'].items()}
        c = client_view(fed, state, 0, 0); own,x,y = c.memory['own'],c.x[:used],c.y[:used]
        def loss(w): z,p = c.net.features(w, {}, x),c.net.features(own, {}, x); return sum(((z[y==k]-p[y==k].mean(0).detach())**2).mean() for k in y.unique())
        w,body = begin_client(fed, c),c.message['w']
        g,_ = gradient(loss, body)
        for k in body: torch.testing.assert_close(w[k], body[k]-.1*g[k])

@pytest.mark.parametrize('size', [100, 8])
def test_fedas_weighs_by_the_squared_gradients_of_its_whole_batches(size):
    fed = whole(FedAS(), sizes=(20,), per_round=1, rounds=1, local=LocalTraining(1, size, SGD(.1)))
    m = one_by_one(fed, begin(fed), [0], 0)[0]['message']; c = client_view(fed, begin(fed), 0, 0)
    def squares(i): return sum(v.square().sum() for v in gradient(lambda w: F.cross_entropy(c.net.logits(w, {}, c.x[i]), c.y[i]), m['w'])[0].values())
    torch.testing.assert_close(m['trace'], sum(squares(i) for i in ([slice(20)] if size==100 else [slice(8), slice(8, 16)])))

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
    fed = whole(FedPAC(), rounds=1, per_round=4, local=LocalTraining(1, 4, SGD(.1, .9, .01)))
    state = begin(fed); w0 = state['server']['w']
    def after(phases): m = replace(fed, method=type('Some', (FedPAC,), dict(phases=lambda self, epochs, round: phases))()); return one_by_one(m, state, [2], 0)[0]['message']['w']
    head,both = after(('head',)),after(('head','body'))
    assert all(torch.equal(head[k], w0[k])==(not k.startswith('head')) and torch.equal(head[k], both[k])==k.startswith('head') for k in w0)

def test_fedpac_pulls_classes_to_their_prototypes_or_to_the_client_s_own():
    fed = whole(FedPAC(lam=3.), sizes=(20,), per_round=1, rounds=1, local=LocalTraining(1, 100, SGD(.1)))
    def after(**extra): state = begin(fed); state['server'].update(extra); return one_by_one(fed, state, [0], 0)[0]['message']['w'],client_view(fed, state, 0, 0)
    p,known = torch.linspace(-1, 1, 24).view(3, 8),torch.tensor([True,False,True])
    (a,c),(b,_) = after(prototypes=p, known=known),after()
    w = {k: b[k] if k.startswith('head') else v for k,v in begin_client(fed, c).items()} # after the head's epoch
    goal = torch.where(known[:,None], p, class_means(c.net.features(c.message['w'], {}, c.x), c.y, 3)[0])
    def pull(w): return F.mse_loss(c.net.features(w, {}, c.x), goal[c.y])
    g,_ = gradient(pull, w)
    for k in a: torch.testing.assert_close(a[k], b[k]-.1*3*g[k]*(not k.startswith('head')), rtol=1e-4, atol=1e-6)

def test_fedpac_gives_each_client_its_own_head_and_scores_it():
    fed = whole(FedPAC(), rounds=1, per_round=3)
    state = run(fed)[0]
    heads,fresh = state['server']['heads'],fed.net.weights()
    assert len(heads)==3
    for i in range(4):
        w = fed.method.personal(client_view(fed, state, i, 1))
        assert same(w, {**state['server']['w'], **heads.get(str(i), {k: v for k,v in fresh.items() if k.startswith('head')})})
    assert run(whole(FedPAC(), rounds=2, per_round=3))[0]['server']['known'].any()

def test_fedpac_trains_the_head_with_momentum_and_decay_of_its_own():
    fed = whole(FedPAC(), sizes=(20,), per_round=1, local=LocalTraining(1, 8, SGD(.3)))
    c = client_view(fed, begin(fed), 0, 0); w = one_by_one(fed, begin(fed), [0], 0)[0]['message']['w']
    head = torch.nn.Linear(8, 3); head.load_state_dict({k[5:]: v for k,v in c.message['w'].items() if k.startswith('head')})
    opt = torch.optim.SGD(head.parameters(), .1, .5, weight_decay=5e-4)
    for i,_ in batch_indices(c, [0]): opt.zero_grad(); F.cross_entropy(head(c.net.features(c.message['w'], {}, c.x[i])), c.y[i]).backward(); opt.step()
    torch.testing.assert_close(w['head.weight'], head.weight.detach())

def test_local_training_is_fedavg_with_one_client_and_sends_nothing():
    fed = whole(LocalOnly(), per_round=4)
    state,rows = run(fed)
    assert same(state['server'], begin(fed)['server']) and sum(r[3] for r in rows if r[2].startswith('bytes'))==0
    alone = replace(fed, method=FedAvg(), protocol=replace(fed.protocol, per_round=1))
    w = begin(alone)
    for r in range(3): reply = one_by_one(alone, w, [2], r)[0]; w = dict(w, server=dict(w=reply['message']['w']))
    assert same(fed.method.personal(client_view(fed, state, 2, 3)), w['server']['w'])
