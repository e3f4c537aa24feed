"The oracles of fine-tuning and of its rivals against numbers worked out by hand, against torch's modules, and against each other where methods coincide."
from itertools import product
from math import e, log
import pytest, torch
from torch import nn
import oracles as O, oracles_posthoc as P
from test_oracles_selfcheck import close, cut, once, same, T, toy

def fold(seed=0, E=3):
    "Weights, three clients and the batches of E epochs"
    w,clients,_ = toy(N=3, seed=seed)
    gen = torch.Generator().manual_seed(seed+1)
    return w,clients,[{i: cut(len(y), 3, 1, gen) for i,(_,y) in enumerate(clients)} for _ in range(E)]

def equal(a, b, tol=1e-12): return len(a)==len(b) and all(x.keys()==y.keys() and all(same(x[i], y[i], tol) for i in x) for x,y in zip(a, b))
def torch_grads(loss, w):
    v = {k: t.clone().requires_grad_() for k,t in w.items()}
    return dict(zip(v, torch.autograd.grad(loss(v), list(v.values()))))

# ---- FT, LP-FT

def bilinear(w, x, y): return .5*(w['v']*w['b']-1)**2
ONE = [(torch.zeros(1, 1), torch.tensor([0]))]
def run_toy(start, epochs, only=None): return [o[0] for o in P.stage({0: start}, ONE, [{0: [torch.tensor([0])]}]*epochs, .5, bilinear, only=only)]

def test_two_steps_of_ft():
    "½(vb-1)² from (b, v) = (1, ½) at rate ½"
    a,b = run_toy(dict(b=T(1), v=T(.5)), 2)
    assert close(T(a['b'], a['v']), T(1.125, .75)) and close(T(b['b'], b['v']), T(1.18359375, .837890625))

def test_one_step_of_lp_and_one_of_ft():
    "The body moves by .09375 instead of .18359375"
    a, = run_toy(dict(b=T(1), v=T(.5)), 1, ['v'])
    b, = run_toy(a, 1)
    assert close(T(a['b'], a['v']), T(1, .75)) and close(T(b['b'], b['v']), T(1.09375, .875))

def test_ft_is_local_training():
    w,clients,epochs = fold()
    for settings in ({}, dict(momentum=.9, decay=.01)):
        local = [o['personal'] for o in O.oracle_localonly(w, clients, epochs, .1, **settings)]
        assert equal(P.oracle_ft(w, clients, epochs, .1, **settings), local)

@pytest.mark.parametrize('carry,second', [(False, -.2), (True, -.25)])
def test_momentum_is_fresh_or_carried(carry, second):
    "Gradient 1, rate .1, momentum ½, one step in each of two epochs"
    a,b = P.stage({0: dict(w=T(0))}, ONE, [{0: [torch.tensor([0])]}]*2, .1, lambda w,x,y: w['w'].sum(), .5, carry=carry)
    assert close(a[0]['w'], -.1) and close(b[0]['w'], second)

def test_carried_epochs_are_one_long_epoch():
    w,clients,epochs = fold()
    long = [{i: [b for e in epochs for b in e[i]] for i in epochs[0]}]
    assert equal(P.oracle_ft(w, clients, epochs, .1, .9, carry=True)[-1:], P.oracle_ft(w, clients, long, .1, .9))

def test_lp_leaves_the_body_alone_and_ft_moves_all():
    w,clients,epochs = fold()
    out = P.oracle_lpft(w, clients, epochs, .1, 2, momentum=.9, decay=.1, carry=True)
    moved = lambda v: [not torch.equal(v[k], w[k]) for k in w]
    assert [moved(o[1]) for o in out]==[[False, False, True, True]]*2+[[True]*4]
    assert equal(out[:2], P.oracle_lpft(w, clients, epochs[:2], .1, 2, momentum=.9, decay=.1, carry=True))
    again = P.oracle_ft(out[1][1], clients, epochs[2:], .1, momentum=.9, decay=.1)
    assert same(out[2][1], again[0][1]), 'the second stage begins without momentum'
    assert equal(P.oracle_lpft(w, clients, epochs, .1, 0), P.oracle_ft(w, clients, epochs, .1))

def test_head_probing_is_logistic_regression():
    "One step: the gradient of the head is mean (softmax - onehot) fᵀ"
    w,clients,_ = fold()
    X,y = clients[0]
    out = P.oracle_lpft(w, clients, [{0: [torch.arange(4)]}], .1, 1)[0][0]
    err = O.logits(w, X).softmax(1)-nn.functional.one_hot(y, 3)
    assert close(out['head.weight'], w['head.weight']-.1*err.T @ O.features(w, X)/4) and close(out['head.bias'], w['head.bias']-.1*err.mean(0))

# ---- flooding

@pytest.mark.parametrize('L,want,slope', [(.8, .8, 1.), (.3, .7, -1.)])
def test_flood_of_a_half(L, want, slope):
    x = T(L).requires_grad_()
    v = P.flooded(x, .5); v.backward()
    assert close(v.item(), want) and x.grad==slope

def test_a_flood_above_every_loss_climbs_and_one_of_zero_does_nothing():
    w,clients,epochs = fold()
    assert equal(P.oracle_ft(w, clients, epochs, .1, flood=100.), P.oracle_ft(w, clients, epochs, -.1)) and equal(P.oracle_ft(w, clients, epochs, .1, flood=0.), P.oracle_ft(w, clients, epochs, .1))
    assert equal(P.oracle_lpft(w, clients, epochs, .1, 1, flood=100.), P.oracle_lpft(w, clients, epochs, -.1, 1))

def test_the_penalty_is_not_flooded():
    "A flood above every loss and a rate of -η turn the cross-entropy's sign twice, the penalty's once"
    w,clients,epochs = fold()
    assert equal(P.oracle_proxft(w, clients, epochs, -.1, .5, flood=100.), P.oracle_proxft(w, clients, epochs, .1, -.5))

# ---- Proximal FT

def test_prox_pulls_to_the_global_model():
    "w0 = 1; the first step has no pull, the second that of mu (w-1)"
    w,clients,_ = fold()
    one = [{0: [torch.arange(4)]}]*2
    ft,prox = P.oracle_ft(w, clients, one, .1),P.oracle_proxft(w, clients, one, .1, .5)
    assert same(ft[0][0], prox[0][0]) and equal(P.oracle_proxft(w, clients, one, .1, 0.), ft)
    assert same(prox[1][0], {k: ft[1][0][k]-.1*.5*(ft[0][0][k]-w[k]) for k in w})

# ---- Soup FT

def test_soup_is_the_mean_of_its_members():
    w,clients,epochs = fold()
    gen = torch.Generator().manual_seed(9)
    other = [{i: cut(len(clients[i][1]), 3, 1, gen) for i in ep} for ep in epochs]
    both = [{i: [a[i], b[i]] for i in a} for a,b in zip(epochs, other)]
    a,b = (P.oracle_ft(w, clients, ep, .1, .9) for ep in (epochs, other))
    soup = P.oracle_soupft(w, clients, both, .1, .9)
    assert equal(soup, [{i: {k: (x[i][k]+y[i][k])/2 for k in w} for i in x} for x,y in zip(a, b)]) and not equal(soup, a, 1e-6)
    assert equal(P.oracle_soupft(w, clients, [{i: [bs]*5 for i,bs in ep.items()} for ep in epochs], .1), P.oracle_ft(w, clients, epochs, .1))

def test_mean_of_three(): assert close(O.mean([dict(w=T(x)) for x in (1, 2, 6)], [1]*3)['w'], 3)

def test_greedy_soup():
    "A .80, B .79, C .78; A+B .80 is no gain, A+C .82 is"
    A,B,C = (dict(w=T(x)) for x in (0, 10, 2))
    score = lambda m: {0.: .80, 10.: .79, 2.: .78, 5.: .80, 1.: .82}[m['w'].item()]
    assert close(P.greedy_soup([C, B, A], score)['w'], 1)

# ---- Sparse FT

def test_snip_mask():
    "Scores (.5, .2, .5, .3), half of them: threshold .3"
    w,g = dict(a=T(.5, .1), b=T(-1, 3)),dict(a=T(1, -2), b=T(.5, .1))
    assert {k: t.tolist() for k,t in P.snip_mask(w, g, .5).items()}==dict(a=[1, 0], b=[1, 0])
    assert {k: t.tolist() for k,t in P.snip_mask(w, g, .5, ['a']).items()}==dict(a=[1, 0], b=[1, 1])
    assert all((t==1).all() for t in P.snip_mask(w, g, 0.).values()) and not any(t.any() for t in P.snip_mask(w, g, 1.).values())

def test_ties_with_the_threshold_are_masked():
    assert P.snip_mask(dict(a=T(1, 1, 1, 2)), dict(a=T(1, 1, 1, 1)), .25)['a'].tolist()==[0, 0, 0, 1]

def test_the_count_of_masked_entries_rounds_down(): assert P.snip_mask(dict(a=T(1, 2, 3)), dict(a=T(1, 1, 1)), .6)['a'].tolist()==[0, 1, 1]

@pytest.mark.parametrize('scoring', [[slice(3)], [slice(2), slice(2, 4)]])
def test_sparse_moves_only_what_its_mask_lets(scoring):
    w,clients,epochs = fold()
    out = P.oracle_sparseft(w, clients, epochs, .1, dict.fromkeys(range(3), scoring), .8, momentum=.9, decay=.1)
    for i,(X,y) in enumerate(clients):
        g = torch_grads(lambda v: sum(nn.functional.cross_entropy(O.logits(v, X[b]), y[b]) for b in scoring), w)
        s = torch.cat([(g[k]*w[k]).abs().flatten() for k in w])
        cut = s.sort().values[int(.8*len(s))-1]
        assert torch.equal(s > cut, torch.cat([(out[-1][i][k]!=w[k]).flatten() for k in w]))

def test_sparse_with_nothing_masked_is_ft():
    w,clients,epochs = fold()
    assert equal(P.oracle_sparseft(w, clients, epochs, .1, dict.fromkeys(range(3), [slice(3)]), 0., momentum=.9), P.oracle_ft(w, clients, epochs, .1, .9))

def test_signed_gradients_cancel():
    "One input with both labels and logits that are equal: ±½ over two batches is 0"
    w = {k: t.double() for k,t in dict(W=torch.zeros(1, 1), b=torch.ones(1), V=torch.ones(2, 1), c=torch.ones(2)).items()}
    data = torch.ones(2, 1).double(),torch.tensor([0, 1])
    one,two = (P.summed_gradient(w, data, bs) for bs in ([[0]], [[0], [1]]))
    assert close(one['c'], T(-.5, .5)) and close(two['c'], T(0, 0)) and close(two['V'], torch.zeros(2, 1))

# ---- Local Superior Soups

@pytest.mark.parametrize('points,V', [([(0, 0), (3, 4)], 25), ([(0, 0), (4, 0), (0, 3)], 36), ([(0, 0), (1, 1), (2, 2)], 0)])
def test_volume(points, V): assert close(P.volume([dict(w=T(*p)) for p in points]), V)

def test_simplex(): assert close(P.simplex(T(1/e, 1/e**3)), T(.25, .75)) # -log u = (1, 3)

def uniform(epochs, which, samples=2, seed=5):
    gen = torch.Generator().manual_seed(seed)
    return {(n, i): [torch.rand(samples, which[n]+1, generator=gen, dtype=torch.float64) for _ in bs] for n,ep in enumerate(epochs) for i,bs in ep.items()}

def test_lss_with_few_batches_is_proximal_ft():
    "Vertices 1 and 2 never step, so the mean is vertex 0, which has the penalty without ½"
    w,clients,epochs = fold(E=4)
    which = [0, 0, 1, 2]
    out = P.oracle_lssft(w, clients, epochs, .1, which, uniform(epochs, which), affinity=.3)
    prox = P.oracle_proxft(w, clients, epochs[:2], .1, .6)
    assert equal(out[:2], prox) and all(same(o[i], prox[1][i]) for o in out[2:] for i in o)

def test_lss_steps_at_every_second_batch():
    "Client 2 has three batches: one step of vertex 1, at its second batch, and ½ of the gradient of both samples' losses"
    w,clients,epochs = fold(E=2)
    draws = uniform(epochs, [0, 1])
    out = P.oracle_lssft(w, clients, epochs, .1, [0, 1], draws, affinity=.3, diversity=.2, every=2)
    v0,b,u = out[0][2],epochs[1][2][1],draws[1,2][1]
    X,y = clients[2][0][b],clients[2][1][b]
    def loss(v):
        c = -u.log()/(-u.log()).sum(1, keepdim=True)
        return sum(nn.functional.cross_entropy(O.logits({k: s*v0[k]+t*v[k] for k in v}, X), y) for s,t in c)/2 + .3*sum(((v[k]-w[k])**2).sum() for k in v)
    g = torch_grads(loss, v0) # both vertices are equal, so the volume is 0 and has no gradient
    assert same(out[1][2], {k: v0[k]-.1*g[k]/2 for k in w})

def test_lss_with_three_vertices():
    "A step per batch: the third vertex's second step has the area of a triangle by Gram's determinant, in parallelograms"
    w,clients,epochs = fold(E=3)
    epochs = [{2: ep[2][:2]} for ep in epochs]
    which,args = [0, 1, 2],dict(affinity=.3, diversity=.2, every=1, scale=.5)
    draws = uniform(epochs, which)
    out = [o[2] for o in P.oracle_lssft(w, clients, epochs, .1, which, draws, **args)]
    v0 = out[0]; v1 = {k: 2*out[1][k]-v0[k] for k in w}
    v2 = out[1]
    for b,u in zip(epochs[2][2], draws[2,2]):
        def loss(v):
            c = -u.log()/(-u.log()).sum(1, keepdim=True)
            fit = sum(nn.functional.cross_entropy(O.logits({k: r[0]*v0[k]+r[1]*v1[k]+r[2]*v[k] for k in v}, clients[2][0][b]), clients[2][1][b]) for r in c)/2
            D = torch.stack([torch.cat([(t[k]-v0[k]).flatten() for k in w]) for t in (v1, v)]); G = D @ D.T
            return fit - .2*(G[0,0]*G[1,1]-G[0,1]**2)/4 + .3*sum(((v[k]-w[k])**2).sum() for k in v)
        g = torch_grads(loss, v2)
        v2 = {k: v2[k]-.1*g[k] for k in w}
    assert same(out[2], {k: (v0[k]+v1[k]+v2[k])/3 for k in w}, 1e-10)

def test_lss_accumulates():
    "Two equal batches with equal draws: the sum is twice one batch's gradient"
    w,clients,epochs = fold(E=2)
    epochs[1] = {2: [torch.arange(9)]*2}
    draws = {(1, 2): [T(.3, .6)[None]]*2}
    run = lambda lr1,acc: [o[2] for o in P.oracle_lssft(w, clients, [epochs[0], epochs[1]], lr1, [0, 1], draws, every=2, accumulate=acc)]
    a,b = run(.1, True),run(.1, False)
    assert same({k: a[1][k]-a[0][k] for k in w}, {k: 2*(b[1][k]-b[0][k]) for k in w})

def test_lss_begins_a_new_sum_after_each_step():
    "Without momentum an epoch of four batches is two epochs of two"
    w,clients,epochs = fold(E=2)
    batches,us = list(torch.arange(8).split(2)),[u[None] for u in torch.rand(4, 2, generator=torch.Generator().manual_seed(1)).double()]
    one = P.oracle_lssft(w, clients, [epochs[0], {2: batches}], .1, [0, 1], {(1, 2): us}, every=2, accumulate=True)
    two = P.oracle_lssft(w, clients, [epochs[0], {2: batches[:2]}, {2: batches[2:]}], .1, [0, 1, 1], {(1, 2): us[:2], (2, 2): us[2:]}, every=2, accumulate=True)
    assert same(one[-1][2], two[-1][2]) and not same(two[1][2], two[2][2], 1e-6)

# ---- LoRA and Adapter

def low(w, clients, r=2, seed=7):
    gen = torch.Generator().manual_seed(seed)
    return {i: {'body.weight': torch.randn(r, 6, generator=gen, dtype=torch.float64)} for i in range(len(clients))}

def test_lora_first_step():
    "B = -lr (α/r) G Aᵀ and A stands still, for B is 0"
    w,clients,_ = fold()
    A = low(w, clients)
    X,y = clients[0]
    got = P.oracle_lora(w, clients, [{0: [torch.arange(4)]}], .1, A, 6., train=())[0][0]
    G = torch_grads(lambda v: nn.functional.cross_entropy(O.logits(v, X), y), w)['body.weight']
    a = A[0]['body.weight']
    assert close(got['body.weight.B'], -.1*3*G @ a.T) and torch.equal(got['body.weight.A'], a)
    assert close(got['body.weight'], w['body.weight']+3*got['body.weight.B'] @ a) and all(torch.equal(got[k], w[k]) for k in ('body.bias', 'head.weight', 'head.bias'))

def test_lora_trains_the_head_unless_told():
    w,clients,epochs = fold()
    none = P.oracle_lora(w, clients, epochs, .1, low(w, clients), 0.) # α = 0: LoRA changes nothing
    assert equal([{i: dict(list(v.items())[:4]) for i,v in o.items()} for o in none], P.oracle_lpft(w, clients, epochs, .1, 3))

def test_lora_of_full_rank_with_b_alone_is_ft_of_the_weight():
    "A = 1, α = r and one step: B moves as the weight would"
    w,clients,_ = fold()
    A = {i: {'body.weight': torch.eye(6, dtype=torch.float64)} for i in range(3)}
    one = [{i: [torch.arange(4)] for i in range(3)}]
    got,ft = P.oracle_lora(w, clients, one, .1, A, 6.)[0],P.oracle_ft(w, clients, one, .1)[0]
    assert all(close(got[i][k], ft[i][k]) for i in got for k in w if k!='body.bias')

def adapters(w, clients, m=2, up=.1, seed=8):
    gen = torch.Generator().manual_seed(seed)
    shapes = {'down.weight': (m, 5), 'down.bias': (m,), 'up.weight': (5, m), 'up.bias': (5,)}
    return {i: {k: torch.randn(s, generator=gen, dtype=torch.float64)*(up if 'up' in k else .5) for k,s in shapes.items()} for i in range(len(clients))}

def test_bottleneck_by_hand():
    "x = 2: Down 1, GELU(1) = .8413447, Up twice that"
    x = T(2)[None]
    assert close(P.bottleneck(x, T(.5)[None], T(0), T(2)[None], T(1)), 2+2*.841344746+1, 1e-8)

@pytest.mark.parametrize('after', ['linear', 'relu'])
def test_adapter_is_torchs(after):
    w,clients,epochs = fold(E=1)
    start = adapters(w, clients)
    class Residual(nn.Module):
        def __init__(self): super().__init__(); self.down,self.up = nn.Linear(5, 2),nn.Linear(2, 5)
        def forward(self, x): return x + self.up(nn.functional.gelu(self.down(x)))
    middle = [Residual(), nn.ReLU()] if after=='linear' else [nn.ReLU(), Residual()]
    net = nn.Sequential(nn.Linear(6, 5), *middle, nn.Linear(5, 3)).double()
    load = lambda module,ts: [p.data.copy_(t) for p,t in zip(module.parameters(), ts)]
    values = list(w.values())
    load(net[0], values[:2]); load(net[-1], values[2:]); load(next(m for m in net if isinstance(m, Residual)), start[1].values())
    trained = [p for n,p in net.named_parameters() if not n.startswith('0.')]
    opt = torch.optim.SGD(trained, .1, .9, weight_decay=.01)
    X,y = clients[1]
    for b in epochs[0][1]: opt.zero_grad(); nn.functional.cross_entropy(net(X[b]), y[b]).backward(); opt.step()
    got = P.oracle_adapter(w, clients, epochs, .1, start, after=after, momentum=.9, decay=.01)[0][1]
    assert close(P.adapter_logits(got, X, after), net(X).detach()) and all(torch.equal(got[k], w[k]) for k in ('body.weight', 'body.bias'))

def test_adapter_with_nothing_to_add_is_the_network():
    w,clients,_ = fold()
    v = {**w, **{k: t*('down' in k) for k,t in adapters(w, clients)[0].items()}}
    assert all(torch.equal(P.adapter_logits(v, clients[0][0], a), O.logits(w, clients[0][0])) for a in ('linear', 'relu'))

# ---- scores

A3 = [[90, 60, 30], [50, 80, 70], [40, 20, 70]]
METRICS = dict(local=80, c_std=19.1717, worst=33.3333, average=56.6667, global_text=45, average_text=62.5, worst_text=70, c_std_text=8.1650, **{'global': 56.6667})

def test_metrics():
    got = P.oracle_metrics(A3)
    assert got.keys()==METRICS.keys() and all(close(got[k], METRICS[k], 5e-5) for k in got)
    assert close(P.oracle_metrics(A3, correction=1)['c_std'], 23.4805, 5e-5)

def test_metrics_by_other_means():
    A = torch.tensor(A3, dtype=torch.float64)
    assert close(P.oracle_metrics(A)['c_std'], sum((sum((a-row.mean())**2 for a in row)/3)**.5 for row in A)/3)

def test_two_clients_have_global_between_local_and_worst():
    m = P.oracle_metrics([[76.5, 70.], [61., 80.]])
    assert close(m['global'], (m['local']+m['worst'])/2) and close(m['worst'], m['global_text'])

def test_matrix_has_the_model_in_its_row():
    "Model 0 always says class 0, model 1 class 1; client 0 has three samples of class 0 and one of class 1"
    says = lambda c: dict(W=torch.zeros(2, 1).double(), b=torch.zeros(2).double(), V=torch.zeros(2, 2).double(), c=torch.eye(2).double()[c])
    tests = [(torch.zeros(4, 1), torch.tensor([0, 0, 0, 1])), (torch.zeros(2, 1), torch.tensor([1, 1]))]
    assert P.oracle_matrix({1: says(1), 0: says(0)}, tests).tolist()==[[75, 0], [25, 100]]

def test_distortion():
    "Features move by (3, 4), or not at all for the second client: (5+0)/2"
    w = dict(W=torch.zeros(2, 1).double(), b=T(1, 1)); moved = dict(w, b=T(4, 5))
    assert P.oracle_distortion(w, {0: moved, 1: w}, [torch.zeros(3, 1).double()]*2)==2.5

# ---- Per-FedAvg

def square(b): return lambda v: ((v['w']-b)**2).sum()

def test_meta_step():
    "(w-b)² with b = 0, 1, 1 at w = 1: w̃ = .8, g = -.4, so 1.2; Hg = -.8, so 1.16"
    w = dict(w=T(1))
    assert close(P.meta_step(w, square(0), square(1), None, .1, .5)['w'], 1.2) and close(P.meta_step(w, square(0), square(1), square(1), .1, .5)['w'], 1.16)

def test_hessian_free_is_nearly_the_hessian():
    w,clients,_ = toy()
    X,y = clients[2]
    f = [lambda v, b=b: O.plain(v, X[b], y[b]) for b in torch.arange(9).split(3)]
    a = torch_grads(f[0], w); g = torch_grads(f[1], {k: w[k]-.1*a[k] for k in w})
    v = {k: t.clone().requires_grad_() for k,t in w.items()}
    first = torch.autograd.grad(f[2](v), list(v.values()), create_graph=True)
    H = dict(zip(w, torch.autograd.grad(sum((s*t).sum() for s,t in zip(first, g.values())), list(v.values()))))
    assert same(P.meta_step(w, *f, .1, .5), {k: w[k]-.5*(g[k]-.1*H[k]) for k in w}, 1e-6)

def test_perfedavg_without_adaptation_is_uniform_fedavg_on_the_second_batches():
    w,clients,rounds = toy()
    o = P.oracle_perfedavg(w, clients, rounds[:1], 0., .1)[0]
    avg = O.oracle_fedavg(w, clients, [{i: bs[1::2] for i,bs in rounds[0].items()}], .1)[0]
    assert all(same(o['messages'][i]['w'], avg['messages'][i]['w']) for i in (0, 1)) and same(o['personal'][3], o['w'])
    assert same(o['w'], O.mean([o['messages'][i]['w'] for i in (0, 1)], [1, 1])) and not same(o['w'], avg['w'], 1e-6)

def test_perfedavg_scores_one_step_after_the_newest_model():
    w,clients,rounds = toy()
    out = P.oracle_perfedavg(w, clients, rounds, .1, .05, 'hf')
    for o,(i,(X,y)) in product(out, enumerate(clients)):
        g = torch_grads(lambda v: nn.functional.cross_entropy(O.logits(v, X), y), o['w'])
        assert same(o['personal'][i], {k: o['w'][k]-.1*g[k] for k in w})

@pytest.mark.parametrize('variant,used', [('fo', 4), ('hf', 3)])
def test_perfedavg_leaves_a_last_single_batch_out(variant, used):
    w,clients,rounds = toy()
    five,less = ([{2: rounds[2][2][:n]}] for n in (5, used))
    assert same(*(P.oracle_perfedavg(w, clients, r, .1, .1, variant)[0]['w'] for r in (five, less)))

# ---- FedRep

def test_fedrep_phases():
    w,clients,rounds = toy()
    bs = rounds[0][0]
    moved = lambda v: [not torch.equal(v[k], w[k]) for k in w]
    a,b = (P.oracle_fedrep(w, clients, [{0: body}], .1, {(0, 0): head}, momentum=.5, decay=.1)[0]['personal'][0] for body,head in (([], bs), (bs, [])))
    assert moved(a)==[False, False, True, True] and moved(b)==[True, True, False, False]

def test_fedrep_body_is_weighted_and_heads_stay():
    "n = (1, 3) with 1 and 3: 2.5; heads of absent clients are their last ones"
    assert close(O.mean([dict(w=T(1)), dict(w=T(3))], [1, 3])['w'], 2.5)
    w,clients,rounds = toy()
    out = P.oracle_fedrep(w, clients, rounds, .1, once(rounds, clients))
    last = out[-1]
    assert same(last['w'], O.mean([last['messages'][i]['w'] for i in (2, 1)], [9, 6])) and set(last['w'])=={'body.weight', 'body.bias'}
    assert same(last['personal'][3], {**last['w'], 'head.weight': w['head.weight'], 'head.bias': w['head.bias']})
    assert torch.equal(last['personal'][0]['head.weight'], out[1]['personal'][0]['head.weight']) and last['up_numbers']=={2: 35, 1: 35}

def test_fedrep_client_takes_up_its_head_again():
    "By hand: client 0 in round 1, one step of the head from its own, then one of the body from the server's"
    w,clients,rounds = toy()
    b = rounds[0][0][0]; X,y = clients[0][0][b],clients[0][1][b]
    out = P.oracle_fedrep(w, clients, [rounds[0], {0: [b]}], .1, {**once(rounds[:1], clients), (1, 0): [b]}, .3)
    v = {**out[0]['w'], 'head.weight': out[0]['personal'][0]['head.weight'], 'head.bias': out[0]['personal'][0]['head.bias']}
    for ks,lr in [(('head.weight', 'head.bias'), .3), (('body.weight', 'body.bias'), .1)]:
        g = torch_grads(lambda v: nn.functional.cross_entropy(O.logits(v, X), y), v)
        v = {k: t-(lr*g[k] if k in ks else 0) for k,t in v.items()}
    assert same(out[1]['personal'][0], v)

# ---- FedBN

def bn_toy():
    w,clients,rounds = toy()
    items = list(w.items())
    w = dict([*items[:2], ('bn.weight', torch.linspace(.5, 1.5, 5).double()), ('bn.bias', torch.linspace(-.2, .3, 5).double()), *items[2:]])
    stats = {'bn.running_mean': torch.linspace(0, .4, 5).double(), 'bn.running_var': torch.linspace(.8, 1.2, 5).double()}
    rounds = [{i: [b for b in bs if len(b)>1] for i,bs in d.items()} for d in rounds]
    return w,stats,clients,rounds

def test_bn_training_is_torchs():
    w,stats,clients,rounds = bn_toy()
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for p,t in zip(net.parameters(), w.values()): p.copy_(t)
        net[1].running_mean.copy_(stats['bn.running_mean']); net[1].running_var.copy_(stats['bn.running_var'])
    opt = torch.optim.SGD(net.parameters(), .1, .9, weight_decay=.01)
    X,y = clients[1]
    for b in rounds[0][1]: opt.zero_grad(); nn.functional.cross_entropy(net(X[b]), y[b]).backward(); opt.step()
    got,s,_ = P.bn_train(w, stats, {}, clients[1], rounds[0][1], .1, .9, .01)
    assert all(close(a, p.detach()) for a,p in zip(got.values(), net.parameters())) and close(s['bn.running_mean'], net[1].running_mean) and close(s['bn.running_var'], net[1].running_var)
    assert close(P.bn_logits({**got, **s}, X), net.eval()(X).detach())

def test_bn_probing_changes_the_head_alone():
    "Not even statistics, unless in train mode; the logits while probing are those of eval mode; a bias before a batch norm in train mode never has a gradient"
    w,stats,clients,_ = bn_toy()
    one = [{0: [torch.arange(4)]}]
    run = lambda *a,**kw: P.oracle_bn_lpft(w, stats, clients, *a, momentum=.9, **kw)
    moved = lambda v: [k for k,t in {**w, **stats}.items() if not torch.equal(v[k], t)]
    a,b,c = run(one, .1, 1)[0][0],run(one, .1, 1, probe_in_train_mode=True)[0][0],run(one, .1, 0)[0][0]
    assert moved(a)==['head.weight', 'head.bias'] and moved(b)==['head.weight', 'head.bias', *stats] and set(moved(c))|{'body.bias'}=={*w, *stats}
    X,y = clients[0]
    g = torch_grads(lambda v: nn.functional.cross_entropy(P.bn_logits({**v, **stats}, X), y), w)
    assert close(a['head.bias'], w['head.bias']-.1*g['head.bias']) and not close(b['head.bias'], a['head.bias'], 1e-6)
    got = run(one*3, .1, 1, carry=True)[2][0]
    two = bn_train_twice({k: a[k] for k in w}, stats, clients[0])
    assert same(got, two)

def bn_train_twice(w, stats, data):
    w,s,_ = P.bn_train(w, stats, {}, data, [torch.arange(4)]*2, .1, .9)
    return {**w, **s}

def test_fedbn_keeps_batch_norm_at_home():
    w,stats,clients,rounds = bn_toy()
    out = P.oracle_fedbn(w, stats, clients, rounds, .1)
    home = ['bn.weight', 'bn.bias', *stats]
    last = out[-1]
    assert list(last['w'])==['body.weight', 'body.bias', 'head.weight', 'head.bias'] and list(last['personal'][0])==[*w, *stats]
    assert all(torch.equal(last['personal'][3][k], {**w, **stats}[k]) and torch.equal(last['personal'][0][k], out[1]['personal'][0][k]) for k in home)
    assert not any(close(last['personal'][1][k], last['personal'][2][k], 1e-6) for k in home) and all(torch.equal(p[k], last['w'][k]) for p in last['personal'].values() for k in last['w'])
    assert same(last['w'], O.mean([last['messages'][i]['w'] for i in (1, 2)], [1, 1])) and last['down_numbers']=={2: 53, 1: 53}

def test_fedbn_starts_from_the_servers_body_and_its_own_norm():
    w,stats,clients,rounds = bn_toy()
    out = P.oracle_fedbn(w, stats, clients, rounds, .1)
    p = out[0]['personal'][0]
    got,s,_ = P.bn_train({k: p[k] for k in w}, {k: p[k] for k in stats}, {}, clients[0], rounds[1][0], .1)
    assert same({**got, **out[1]['w']}, {k: out[1]['personal'][0][k] for k in w}) and same(s, {k: out[1]['personal'][0][k] for k in stats}) and same({k: got[k] for k in out[1]['w']}, out[1]['messages'][0]['w'])

# ---- FedSoup

@pytest.mark.parametrize('w,G,n,r,better,want', [(2, 1, 1, 0, True, (1, .5, 2)), (2, 1, 1, 0, False, (1.5, 1, 1)), (2, 7, 0, 0, True, (1, 0, 1)), (2, 7, 0, 0, False, (2, 0, 0))])
def test_soup_step(w, G, n, r, better, want):
    "w = 2, G = 1, n = 1, r = 0: A = 1.5, B = 1, new G = ½; n = 0: A = 2, B = 1, G = 0; a tie is no gain"
    B = want[0] if better else None
    m,G,n = P.soup_step(dict(w=T(w)), dict(w=T(G)), n, dict(w=T(r)), lambda v: float(v['w'].item()==B))
    assert (m['w'].item(), G['w'].item(), n)==want

def test_fedsoup_before_its_share_is_fedavg():
    w,clients,rounds = toy()
    out = P.oracle_fedsoup(w, clients, rounds, .1, clients)
    assert all(same(a['w'], b['w']) for a,b in zip(out, O.oracle_fedavg(w, clients, rounds, .1))) and same(out[-1]['personal'][3], w) and not any(out[-1]['accepted'].values())

def test_fedsoup_counts_participations_and_sends_the_soup(monkeypatch):
    "A share of ½ of three rounds: the second participation is the first that selects; clients that always accept send (w+r)/2"
    w,clients,rounds = toy()
    real = P.soup_step
    monkeypatch.setattr(P, 'soup_step', lambda w,G,n,r,acc: real(w, G, n, r, lambda v, c=iter((1, 0)): next(c)))
    out,plain = (P.oracle_fedsoup(w, clients, rounds, .1, clients, share=s) for s in (.5, 1.))
    assert same(out[0]['w'], plain[0]['w'])
    for i in (0, 1):
        r,local = out[0]['w'],plain[1]['personal'][i]
        assert same(out[1]['messages'][i]['w'], {k: (local[k]+r[k])/2 for k in w})
    assert out[-1]['accepted']=={0: 1, 1: 2, 2: 0, 3: 0} and same(out[2]['w'], O.mean([out[2]['personal'][i] for i in (2, 1)], [9, 6]))

# ---- pFedFDA

def test_lda():
    mu,S,p = torch.stack([T(1, 0), T(-1, 0)]),torch.diag(T(2, 1)),T(.75, .25)
    V,b = P.lda(mu, S, p, 0.)
    assert close(V, torch.stack([T(.5, 0), T(-.5, 0)])) and close(b, T(-.537682, -1.636294), 5e-7)
    V,b = P.lda(mu, S, p)
    assert close(V[0], T(.500013, 0), 5e-7) and close(b, T(-.537688, -1.636301), 5e-7)

def test_fda_statistics():
    mu = torch.full((3, 2), 9.).double()
    m,S = P.fda_statistics(torch.stack([T(2, 0), T(0, 0), T(-2, 0), T(0, 0)]), torch.tensor([0, 0, 1, 1]), mu)
    assert close(m, torch.stack([T(1, 0), T(-1, 0), T(9, 9)])) and close(S, torch.stack([T(4/3+1.0001, 1e-4), T(1e-4, 1.0001)])) and close(S[0,0], 2.33343, 5e-6)

def test_fda_priors(): assert close(P.fda_priors(torch.tensor([0, 0, 0, 1]), 3), T(.7501, .2501, .0001)/1.0003)

def test_alternate():
    "Three and three samples: two and one of the first class, one and two of the second"
    f,y = P.alternate(torch.tensor([0, 0, 1, 0, 1, 1])),torch.tensor([0, 0, 1, 0, 1, 1])
    assert f.tolist()==[0, 1, 1, 0, 0, 1] and f.bincount().tolist()==[3, 3] and f[y==0].tolist()==[0, 1, 0]

def scattered(n=24, seed=3, shift=0.):
    gen = torch.Generator().manual_seed(seed)
    y = torch.arange(n)%3
    mu = torch.stack([T(2, 0), T(0, 2), T(-1, -1)])
    return mu[y]+shift+torch.randn(n, 2, generator=gen, dtype=torch.float64),y,(mu, 2*torch.eye(2, dtype=torch.float64))

def test_fda_beta_beats_a_grid():
    f,y,glob = scattered(shift=.7)
    p,folds = P.fda_priors(y, 3),P.alternate(y)
    for single in (True, False):
        beta = P.fda_beta(f, y, folds, glob, p, single, iterations=100, gtol=1e-9)
        grid = [(a/10, (a if single else b)/10) for a in range(11) for b in range(11)]
        assert all(P.fda_objective(beta, f, y, folds, glob, p) <= P.fda_objective(g, f, y, folds, glob, p)+1e-9 for g in grid)
        assert all(0<=b<=1 for b in beta) and (not single or beta[0]==beta[1])

def test_fda_objective():
    "β = 0: two cross-entropies of the global discriminant; β = 1: each fold is judged by the other one's statistics"
    f,y,glob = scattered()
    p,folds = P.fda_priors(y, 3),P.alternate(y)
    a,b = folds==0,folds==1
    judge = lambda stats,at: nn.functional.cross_entropy(f[at] @ P.lda(*stats, p)[0].T + P.lda(*stats, p)[1], y[at])
    assert close(P.fda_objective((0., 0.), f, y, folds, glob, p), judge(glob, a)+judge(glob, b))
    stats = lambda at: P.fda_statistics(f[at], y[at], glob[0])
    assert close(P.fda_objective((1., 1.), f, y, folds, glob, p), judge(stats(b), a)+judge(stats(a), b))
    assert close(P.fda_objective((1., 0.), f, y, folds, glob, p), judge((stats(b)[0], glob[1]), a)+judge((stats(a)[0], glob[1]), b))

def test_fda_beta_of_wrong_global_means_is_local():
    f,y,(mu,S) = scattered()
    p,folds = P.fda_priors(y, 3),P.alternate(y)
    assert P.fda_beta(f, y, folds, (mu.roll(1, 0)*5, S), p)[0]>.9

def test_fda_beta_without_cross_validation_is_global():
    f,y,glob = scattered(3)
    assert P.fda_beta(f, y, torch.tensor([0, 1, 0]), glob, P.fda_priors(y, 3))==(0., 0.)

def fda(betas=None, **kw):
    w,clients,rounds = toy()
    mu = torch.rand(3, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    if betas is not None: betas = {(r, i): (betas, betas) for r in range(3) for i in range(4)}
    return w,clients,rounds,mu,P.oracle_pfedfda(w, clients, rounds, .1, mu, betas=betas, **kw)

def test_fda_with_beta_zero_never_leaves_the_global_statistics():
    w,clients,rounds,mu,out = fda((0., 0.))
    assert all(close(o['mu'], mu) and close(o['sigma'], torch.eye(5)) for o in out)
    V,b = P.lda(mu, torch.eye(5).double(), P.fda_priors(clients[3][1], 3))
    assert same(out[-1]['personal'][3], {**out[-1]['w'], 'head.weight': V, 'head.bias': b})

def test_fda_round_with_beta_one():
    "By hand: client 0's head stands still, its body takes two steps, and its statistics are those of the features before each step"
    w,clients,rounds,mu,_ = fda((1., 1.))
    bs = rounds[0][0][:2]
    o = P.oracle_pfedfda(w, clients, [{0: bs}], .1, mu, betas={(0, i): ((1., 1.), (1., 1.)) for i in range(4)}, momentum=.5, decay=.1)[0]
    X,y = clients[0]
    V,c = P.lda(mu, torch.eye(5).double(), P.fda_priors(y, 3))
    body = {k: w[k] for k in ('body.weight', 'body.bias')}
    net = nn.Linear(6, 5).double()
    with torch.no_grad(): net.weight.copy_(w['body.weight']); net.bias.copy_(w['body.bias'])
    opt,seen = torch.optim.SGD(net.parameters(), .1, .5, weight_decay=.1),[]
    for b in bs:
        f = net(X[b]).relu(); seen.append(f.detach())
        opt.zero_grad(); nn.functional.cross_entropy(f @ V.T + c, y[b]).backward(); opt.step()
    m,S = P.fda_statistics(torch.cat(seen), torch.cat([y[b] for b in bs]), mu)
    assert close(o['w']['body.weight'], net.weight.detach()) and close(o['mu'], m) and close(o['sigma'], S) and set(o['w'])==set(body)
    m,S = P.fda_statistics(O.features(o['w'], X), y, m)
    V,c = P.lda(m, S, P.fda_priors(y, 3))
    assert close(o['personal'][0]['head.weight'], V) and close(o['personal'][0]['head.bias'], c) and o['up_numbers']=={0: 35+15+25}

def test_fda_second_round_has_a_head_of_the_newest_statistics():
    w,clients,rounds,mu,_ = fda((1., 1.))
    b = rounds[0][1][0]; X,y = clients[1][0][b],clients[1][1][b]
    a,o = P.oracle_pfedfda(w, clients, [{0: rounds[0][0]}, {1: [b]}], .1, mu, betas={(r, i): ((1., .5), (1., 1.)) for r in (0, 1) for i in range(4)})
    V,c = P.lda(a['mu'], a['sigma'], P.fda_priors(clients[1][1], 3))
    g = torch_grads(lambda v: nn.functional.cross_entropy(O.features(v, X) @ V.T + c, y), a['w'])
    m,S = P.fda_statistics(O.features(a['w'], X), y, a['mu'])
    assert same(o['w'], {k: a['w'][k]-.1*g[k] for k in g}) and close(o['mu'], m) and close(o['sigma'], (S+a['sigma'])/2)

def test_fda_server_takes_weighted_means():
    out = fda()[-1]
    last = out[-1]
    assert all(close(last[k], .6*last['messages'][2][k]+.4*last['messages'][1][k]) for k in ('mu', 'sigma')) and set(last['betas'])=={1, 2} and set(last['scored_betas'])=={0, 1, 2, 3}

def test_fda_takes_folds():
    "The default's folds given as arguments change nothing; others do, in training and in scoring apart"
    w,clients,rounds,mu,out = fda()
    def default(y):
        keep,f = P.repeated(y),torch.zeros(len(y), dtype=torch.long)
        f[keep] = P.alternate(y[keep])
        return f
    gathered = {(r, i): torch.cat([clients[i][1][b] for b in bs]) for r,d in enumerate(rounds) for i,bs in d.items()}
    folds,scored = {k: default(y) for k,y in gathered.items()},{(r, i): default(y) for r in range(3) for i,(_,y) in enumerate(clients)}
    halves = lambda d: {k: (torch.arange(len(f))>len(f)//2).long() for k,f in d.items()}
    betas = lambda o: [(x['betas'], x['scored_betas']) for x in o]
    assert betas(fda(folds=folds, scored=scored)[-1])==betas(out)
    a,b = fda(folds=halves(folds))[-1],fda(scored=halves(scored))[-1]
    assert a[0]['betas']!=out[0]['betas'] and b[0]['betas']==out[0]['betas'] and [x['scored_betas'] for x in b]!=[x['scored_betas'] for x in out]

# ---- FedL2G

def test_guide_gradient():
    "Two logits (0, 0) as weights, class 0, guide (1, 0), rate .1: z' = (.15, -.05) and ∂/∂g = (-.0450166, .0450166)"
    z,g,y = dict(z=T(0, 0)[None]),torch.stack([T(1, 0), T(5, 5)]),torch.tensor([0])
    pseudo = lambda v,g: O.ce(v['z'], y)+P.guided(v['z'], y, g)
    assert close(pseudo(z, g), log(2)+.5)
    G = P.guide_gradient(z, g, pseudo, lambda v: O.ce(v['z'], y), .1)
    assert close(G[0], T(-.0450166, .0450166), 5e-8) and not G[1].any() and close(g[0]-.1*G[0], T(1.0045017, -.0045017), 5e-8)

def test_clipping():
    g = dict(a=T(30, 0), b=T(0, 40))
    assert close(P.clipped(g, 10.)['b'], T(0, 8), 1e-5) and same(P.clipped(g, 100.), g)

def l2g(variant, warmup=0, **kw):
    w,clients,rounds = toy()
    guides = torch.randn(3, 3 if variant=='logit' else 5, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    parts = once(rounds, clients, 2)
    args = guides,{k: bs[1:] for k,bs in parts.items()},{k: bs[:1] for k,bs in parts.items()}
    return w,clients,rounds,*args,P.oracle_fedl2g(w, clients, rounds, .1, *args, 1., variant, warmup, **kw)

@pytest.mark.parametrize('variant', ['logit', 'feat'])
def test_l2g_round(variant):
    "By hand: one client's training from the guides, then the derivative of its quiz by differences"
    w,clients,rounds,guides,study,quiz,out = l2g(variant)
    output = O.logits if variant=='logit' else O.features
    X,y = clients[0]
    def loss(v, b, g): return nn.functional.cross_entropy(O.logits(v, X[b]), y[b])+nn.functional.mse_loss(output(v, X[b]), g[y[b]])
    v = w
    for b in rounds[0][0]:
        g = torch_grads(lambda v: loss(v, b, guides), v)
        v = {k: v[k]-.1*g[k] for k in w}
    assert same(out[0]['personal'][0], v) and same(out[0]['personal'][3], w)
    def after(g):
        s = torch_grads(lambda v: sum(loss(v, b, g) for b in study[0,0])/len(study[0,0]), v)
        b = quiz[0,0][0]
        return nn.functional.cross_entropy(O.logits({k: v[k]-.1*s[k] for k in v}, X[b]), y[b]).item()
    m = out[0]['messages'][0]
    assert set(m)==set(y[torch.cat(study[0,0])].tolist())
    for c,j in product(m, range(guides.shape[1])):
        d = torch.zeros_like(guides); d[c,j] = 1e-5
        assert close(m[c][j], (after(guides+d)-after(guides-d))/2e-5, 1e-8)

def test_l2g_server_takes_the_mean_over_the_senders_of_a_class():
    *_,guides,_,_,out = l2g('logit')
    before,o = guides,out[0]
    for c in range(3):
        rows = [m[c] for m in o['messages'].values() if c in m]
        assert close(o['w']['guides'][c], before[c]-(sum(rows)/len(rows) if rows else 0))
    assert o['up_numbers']=={i: 3*len(m) for i,m in o['messages'].items()} and o['down_numbers']=={0: 9, 1: 9}

def test_l2g_does_not_train_in_warm_up():
    w,_,_,_,_,_,out = l2g('logit', warmup=2)
    assert all(same(p, w) for o in out[:2] for p in o['personal'].values()) and not same(out[2]['personal'][2], w, 1e-6) and not close(out[0]['w']['guides'], out[1]['w']['guides'], 1e-6)

def test_l2g_server_clips():
    *_,guides,_,_,out = l2g('logit', most=1e-3)
    assert close((out[0]['w']['guides']-guides).norm(), 1e-3, 1e-5)
