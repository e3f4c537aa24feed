"""Federated methods written a second time, from their papers and from how their authors' code behaves, and without fedbook: what the library computes is compared with these.

Network: f = relu(x W1ᵀ + b1), logits = f W2ᵀ + b2. Weights are a dict in the order body.weight [d,k], body.bias [d], head.weight [C,d], head.bias [C] (names may differ: only the order counts).
Every method: oracle_name(w0, clients, rounds, lr, **settings) with
  w0       the initial weights, which every client has too before its first round,
  clients  list of (X [n,k], y [n]), and n is a client's weight in a merge unless its docstring says otherwise,
  rounds   one dict per round, drawn client -> the index tensors of its mini-batches, in the order of its local steps,
  lr       rate of plain SGD (fresh every round; `momentum` and `decay` as in torch.optim.SGD where a method has them).
Further draws come as dicts with keys (round, client). A client draws its k-th batch from rounds[r][i][k] whatever the method does with it.
It gives one dict per round:
  w         the server's weights after the round,
  messages  drawn client -> what it sent,
  personal  every client -> the weights scored for it once the round is over (`logits` scores them; MOON has `moon_logits`, FedDBE `dbe_logits`),
  down_numbers, up_numbers   client -> how many floats it received and sent for this round (clients with no traffic are left out),
  down_indices, up_indices   client -> how many indices or mask entries went with them (only where a method needs them)."""
from itertools import combinations
from math import ceil
import torch

# ---- what all methods share

def double(w): return {k: v.detach().clone().double() for k,v in w.items()}
def setup(w0, clients): return double(w0),[(X.double(), y) for X,y in clients]
def numbers(w): return sum(v.numel() for v in w.values())
def minus(a, b): return {k: a[k]-b[k] for k in a}
def flat(w): return torch.cat([v.reshape(-1) for v in w.values()])

def features(w, x):
    W,b = list(w.values())[:2]
    return (x @ W.T + b).clamp(min=0)

def head(w, f):
    W,b = list(w.values())[2:4]
    return f @ W.T + b

def logits(w, x): return head(w, features(w, x))

def ce(z, y):
    "Mean cross-entropy of logits `z`"
    return -(z - z.logsumexp(1, keepdim=True))[torch.arange(len(y)), y].mean()

def mean(ws, ns):
    "Mean of the weights `ws`, weighted by `ns`"
    return {k: sum(n*w[k] for w,n in zip(ws, ns))/sum(ns) for k in ws[0]}

def grad(loss, w, only=None):
    "Gradient of loss(w) in the entries named `only` (all without it)"
    v = {k: t.detach().clone().requires_grad_(only is None or k in only) for k,t in w.items()}
    ks = [k for k in v if v[k].requires_grad]
    return dict(zip(ks, torch.autograd.grad(loss(v), [v[k] for k in ks])))

def sgd(w, loss, data, batches, lr, momentum=0., decay=0., only=None):
    "`w` after one step of SGD per batch on loss(w, x, y); entries that are not in `only` stand still"
    (X,y),buf = data,{}
    for b in batches:
        g = grad(lambda v: loss(v, X[b], y[b]), w, only)
        for k in g:
            buf[k] = momentum*buf.get(k, 0) + g[k] + decay*w[k]
            w = {**w, k: w[k] - lr*buf[k]}
    return w

def plain(w, x, y): return ce(logits(w, x), y)

def class_means(f, y, C):
    "Mean feature per class that occurs, and the number of samples per class"
    counts = torch.bincount(y, minlength=C)
    return {c: f[y==c].mean(0) for c in range(C) if counts[c]},counts

def whole(w, drawn):
    "Traffic of a method that sends a whole model each way to and from each drawn client"
    return dict(down_numbers={i: numbers(w) for i in drawn}, up_numbers={i: numbers(w) for i in drawn})

def averaging(w0, clients, rounds, lr, loss, momentum=0., decay=0., merge=None):
    "Rounds of any method that trains from the server's model W on loss(w, x, y, W, r, i), sends its weights and scores the server's model"
    W,clients = setup(w0, clients)
    out = []
    for r,drawn in enumerate(rounds):
        ws = {i: sgd(W, lambda w,x,y: loss(w, x, y, W, r, i), clients[i], bs, lr, momentum, decay) for i,bs in drawn.items()}
        ns = [len(clients[i][1]) for i in drawn]
        W = (merge or (lambda W,ws,ns,drawn: mean(ws, ns)))(W, list(ws.values()), ns, drawn)
        out.append(dict(w=W, messages={i: dict(w=w) for i,w in ws.items()}, personal={i: W for i in range(len(clients))}, **whole(W, drawn)))
    return out

# ---- FedAvg, local training, FedProx, FedNova, FedYogi, FedNTD

def oracle_fedavg(w0, clients, rounds, lr, momentum=0., decay=0.):
    "McMahan et al. 2017: W = Σ n_i/n w_i over the clients drawn."
    return averaging(w0, clients, rounds, lr, lambda w,x,y,W,r,i: plain(w, x, y), momentum, decay)

def oracle_localonly(w0, clients, rounds, lr, momentum=0., decay=0.):
    """Every client trains its own model, and nothing is sent. The server's model stays w0.
    Read so: a drawn client goes on from its own model, one that is not drawn stands still (it does not train in the background)."""
    w0,clients = setup(w0, clients)
    own,out = dict.fromkeys(range(len(clients)), w0),[]
    for drawn in rounds:
        own = {**own, **{i: sgd(own[i], plain, clients[i], bs, lr, momentum, decay) for i,bs in drawn.items()}}
        out.append(dict(w=w0, messages={}, personal=own, down_numbers={}, up_numbers={}))
    return out

def squared_distance(w, W): return sum(((w[k]-W[k])**2).sum() for k in W)

def oracle_fedprox(w0, clients, rounds, lr, mu, momentum=0., decay=0.):
    "Li et al. 2020: cross-entropy + mu/2 ‖w-W‖², W the weights received. Read so: the factor ½ of the paper, all weights, and the pull goes through the momentum like any gradient."
    return averaging(w0, clients, rounds, lr, lambda w,x,y,W,r,i: plain(w, x, y) + mu/2*squared_distance(w, W), momentum, decay)

def accumulation(steps, lr, momentum=0., mu=0., coupled=True):
    """FedNova's vector a: w_0 - w_τ = lr Σ_j a_j g_j, with g_j the gradient of the cross-entropy at step j; a_j is read off by a gradient of 1 at step j and 0 elsewhere.
    SGD: ones. Momentum ρ: a_j = (1-ρ^(τ-j))/(1-ρ). Proximal term: a_j = (1-lr mu)^(τ-1-j), which is Wang et al.'s α = lr mu.
    `coupled`: the pull is part of the gradient that the momentum averages, as where it is a term of the loss; else it is applied beside the momentum. Both agree unless momentum and mu are both there."""
    a = []
    for j in range(steps):
        moved = buf = 0. # moved = (w_0 - w)/lr, and the pull mu (w-w_0) is then -lr mu moved
        for t in range(steps):
            g,pull = float(t==j),-lr*mu*moved
            buf = momentum*buf + g + (pull if coupled else 0.)
            moved += buf + (0. if coupled else pull)
        a.append(moved)
    return torch.tensor(a, dtype=torch.float64)

def oracle_fednova(w0, clients, rounds, lr, momentum=0., mu=0., coupled=True):
    """Wang et al. 2020: W ← W - τ_eff Σ p_i (W-w_i)/‖a_i‖₁, p_i = n_i/n over the clients drawn, τ_eff = Σ p_i ‖a_i‖₁; with mu > 0 the local loss is FedProx's.
    Read so: τ_eff is Σ p_i ‖a_i‖₁ with a proximal term too (the authors' code then takes the number of steps); ‖a‖₁ sums absolute values; momentum starts at zero each round; no weight decay, for a leaves it out.
    The message is the weights and ‖a_i‖₁: one number more than FedAvg's (which a server that knows the number of steps would not need)."""
    def norm(bs): return accumulation(len(bs), lr, momentum, mu, coupled).abs().sum().item()
    def local(w, data, bs, W):
        (X,y),buf = data,dict.fromkeys(w, 0.)
        for b in bs:
            g = grad(lambda v: plain(v, X[b], y[b]), w)
            pull = {k: mu*(w[k]-W[k]) for k in w}
            buf = {k: momentum*buf[k] + g[k] + (pull[k] if coupled else 0.) for k in w}
            w = {k: w[k] - lr*(buf[k] + (0. if coupled else pull[k])) for k in w}
        return w
    W,clients = setup(w0, clients)
    out = []
    for drawn in rounds:
        ws,a = {i: local(W, clients[i], bs, W) for i,bs in drawn.items()},{i: norm(bs) for i,bs in drawn.items()}
        W = nova(W, list(ws.values()), [len(clients[i][1]) for i in drawn], list(a.values()))
        out.append(dict(w=W, messages={i: dict(w=ws[i], norm=a[i]) for i in drawn}, personal={i: W for i in range(len(clients))},
                        down_numbers={i: numbers(W) for i in drawn}, up_numbers={i: numbers(W)+1 for i in drawn}))
    return out

def nova(W, ws, ns, a):
    "FedNova's server step with the norms `a`"
    p = [n/sum(ns) for n in ns]
    tau = sum(q*s for q,s in zip(p, a))
    return {k: W[k] - tau*sum(q*(W[k]-w[k])/s for q,w,s in zip(p, ws, a)) for k in W}

def yogi(W, target, m, v, eta, beta1, beta2, tau):
    "One server step of FedYogi towards the mean `target`"
    D = minus(target, W)
    m = {k: beta1*m[k] + (1-beta1)*D[k] for k in W}
    v = {k: v[k] - (1-beta2)*D[k]**2*torch.sign(v[k]-D[k]**2) for k in W}
    return {k: W[k] + eta*m[k]/(v[k].sqrt()+tau) for k in W},m,v

def oracle_fedyogi(w0, clients, rounds, lr, eta=.01, beta1=.9, beta2=.99, tau=1e-3, v0=0., momentum=0., decay=0.):
    """Reddi et al. 2021, Algorithm 2: Δ = Σ n_i/n w_i - W, m = β1 m + (1-β1) Δ, v = v - (1-β2) Δ² sign(v-Δ²), W += η m/(√v+τ); no bias correction.
    Read so: Δ is weighted by n_i (Algorithm 1 of the paper averages uniformly; Flower weights), and v begins at `v0` = 0 as in Flower (the paper asks for v0 >= τ²: give tau**2)."""
    m = {k: torch.zeros_like(t, dtype=torch.float64) for k,t in w0.items()}
    state = [m,{k: t+v0 for k,t in m.items()}]
    def merge(W, ws, ns, drawn):
        W,*state[:] = yogi(W, mean(ws, ns), *state, eta, beta1, beta2, tau)
        return W
    return averaging(w0, clients, rounds, lr, lambda w,x,y,W,r,i: plain(w, x, y), momentum, decay, merge)

def not_true(z, y):
    "Logits without the one of the true class"
    return torch.stack([torch.cat([row[:c],row[c+1:]]) for row,c in zip(z, y.tolist())])

def ntd(z, received, y, tau):
    "τ² KL(softmax(received/τ) ‖ softmax(z/τ)) over the classes that are not the true one, mean over the batch"
    q,p = (not_true(t, y)/tau for t in (z, received))
    q,p = (t - t.logsumexp(1, keepdim=True) for t in (q, p))
    return tau**2*(p.exp()*(p-q)).sum(1).mean()

def oracle_fedntd(w0, clients, rounds, lr, beta=1., tau=1., momentum=0., decay=0.):
    "Lee et al. 2022: cross-entropy + β·ntd, no gradient through the received model. Read so: the divergence is summed over classes and averaged over the batch; the merge is weighted by n_i."
    def loss(w, x, y, W, r, i): return plain(w, x, y) + beta*ntd(logits(w, x), logits(W, x).detach(), y, tau)
    return averaging(w0, clients, rounds, lr, loss, momentum, decay)

# ---- MOON

def moon_features(w, x):
    "z of the network with a projection head: linear, relu, linear, relu, linear; weights in this order, then those of the classifier"
    A,a,B,b,P,p,*_ = w.values()
    f = (x @ A.T + a).clamp(min=0)
    return (f @ B.T + b).clamp(min=0) @ P.T + p

def moon_head(w, z):
    *_,W,b = w.values()
    return z @ W.T + b

def moon_logits(w, x): return moon_head(w, moon_features(w, x))

def cosine(a, b): return (a*b).sum(1)/(a.norm(dim=1)*b.norm(dim=1))

def contrast(z, old, new, tau):
    "mean log(1 + exp((cos(z, old) - cos(z, new))/τ)), with `old` from the client's previous model and `new` from the server's"
    return torch.log1p(torch.exp((cosine(z, old)-cosine(z, new))/tau)).mean()

def oracle_moon(w0, clients, rounds, lr, mu=1., tau=.5, momentum=0., decay=0.):
    """Li, He & Song 2021: cross-entropy + mu·contrast, both on z, the output of the projection head: features → Linear(d,d) → ReLU → Linear(d,P) → classifier Linear(P,C).
    `w0` has eight entries: weight and bias of the first layer, of the projection's two layers and of the classifier, in this order.
    Read so: the previous model is the client's own after its last local training, and w0 for a client never drawn (the authors' code: a random net of its own). In round 0, and whenever both models are equal, the contrast is ln 2 with no gradient,
    so a first round without the term is the same; a late joiner contrasts w0 with the newest server model. No ReLU after the projection's second layer. The server's model is scored."""
    W,clients = setup(w0, clients)
    prev,out = {},[]
    for drawn in rounds:
        def loss(old): return lambda w,x,y: ce(moon_logits(w, x), y) + mu*contrast(moon_features(w, x), moon_features(old, x), moon_features(W, x), tau)
        ws = {i: sgd(W, loss(prev.get(i, double(w0))), clients[i], bs, lr, momentum, decay) for i,bs in drawn.items()}
        prev = {**prev, **ws}
        W = mean(list(ws.values()), [len(clients[i][1]) for i in drawn])
        out.append(dict(w=W, messages={i: dict(w=w) for i,w in ws.items()}, personal={i: W for i in range(len(clients))}, **whole(W, drawn)))
    return out

# ---- FedSPU

def spu_count(share, n): return n if share>=.99 else max(1, int(share*n))

def spu_mask(w, active):
    "1 where a client with the `active` hidden neurons trains: their rows and biases, their columns of the classifier and the whole bias of it; everything for None"
    if active is None: return {k: torch.ones_like(t) for k,t in w.items()}
    W1,b1,W2,b2 = w
    on = torch.zeros(len(w[b1]), dtype=torch.float64); on[active] = 1
    return {W1: on[:,None].expand_as(w[W1]), b1: on, W2: on[None].expand_as(w[W2]), b2: torch.ones_like(w[b2])}

def spu_merge(W, ws, masks, ns):
    "Entry by entry the mean over those who sent it, and the old value where nobody did"
    total = {k: sum(n*m[k] for n,m in zip(ns, masks)) for k in W}
    return {k: torch.where(total[k]>0, sum(n*m[k]*w[k] for n,m,w in zip(ns, masks, ws))/total[k].clamp(min=1), W[k]) for k in W}

def oracle_fedspu(w0, clients, rounds, lr, active, batch):
    """Niu et al. 2025, with the merge mended: a client keeps a whole personal model, overwrites its active entries with the server's, runs the whole net, moves only active entries by plain SGD, and sends them.
    `active`: (round, client) -> indices of the active hidden neurons, or None for a full client; spu_count gives how many. Weights of the merge: ⌈n_i/`batch`⌉ batches, as in the authors' code (batch=1: n_i).
    Mended: full and partial clients share one mean per entry (the authors' code keeps them apart for weight matrices). Active entries are rows × columns; columns of the first layer are all active; the classifier keeps all rows.
    Scored: the whole personal model after its last local training (w0 for a client never drawn); early stopping is left out. Down goes the same sub-model as up; indices are the active neurons."""
    W,clients = setup(w0, clients)
    own,out = dict.fromkeys(range(len(clients)), W),[]
    for r,drawn in enumerate(rounds):
        masks = {i: spu_mask(W, active[r,i]) for i in drawn}
        for i,bs in drawn.items():
            X,y = clients[i]
            w = {k: torch.where(masks[i][k]>0, W[k], own[i][k]) for k in W}
            for b in bs:
                g = grad(lambda v: plain(v, X[b], y[b]), w)
                w = {k: w[k] - lr*masks[i][k]*g[k] for k in w}
            own = {**own, i: w}
        W = spu_merge(W, [own[i] for i in drawn], list(masks.values()), [ceil(len(clients[i][1])/batch) for i in drawn])
        sent = {i: int(sum(m.sum() for m in masks[i].values())) for i in drawn}
        index = {i: 0 if active[r,i] is None else len(active[r,i]) for i in drawn}
        out.append(dict(w=W, messages={i: dict(w=own[i], mask=masks[i]) for i in drawn}, personal=own, down_numbers=sent, up_numbers=sent, down_indices=index, up_indices=index))
    return out

# ---- FedALA

def ala_step(A, g, own, new, eta):
    "One step of FedALA's weights `A`, and the mixture that they give"
    A = {k: (A[k] - eta*g[k]*(new[k]-own[k])).clamp(0, 1) for k in A}
    return A,{k: own[k] + (new[k]-own[k])*A[k] for k in A}

def ala_mix(own, new, A, first, data, start, share, batch, eta, top, threshold=.1, losses=10):
    "FedALA's mixture of a client's `own` and the `new` server model; also the weights A and whether the long first learning is still to come"
    names = list(own)
    if (new[names[0]]-own[names[0]]).sum()==0: return own,A,first
    n = int(share*len(data[1]))
    X,y = data[0][start:start+n],data[1][start:start+n]
    mixed = {**new, **{k: own[k] + (new[k]-own[k])*A[k] for k in names[-top:]}}
    seen = []
    while True:
        for s in range(0, n, batch):
            xb,yb = X[s:s+batch],y[s:s+batch]
            last = plain(mixed, xb, yb).item()
            A,upper = ala_step(A, grad(lambda v: plain(v, xb, yb), mixed, names[-top:]), own, new, eta)
            mixed = {**mixed, **upper}
        seen.append(last)
        if not first or len(seen)>losses and torch.tensor(seen[-losses:], dtype=torch.float64).std(correction=0)<threshold: return mixed,A,False
        assert len(seen)<10_000, 'the first learning of FedALA does not settle'

def oracle_fedala(w0, clients, rounds, lr, slices, share=.8, batch=10, eta=1., top=2, threshold=.1, momentum=0., decay=0.):
    """Zhang et al. 2023: at the start of every round every client, drawn or not, mixes its own model with the server's: own + (W-own)∘A in the last `top` tensors, W below; the drawn ones then train from the mixture.
    A begins at 1, persists, and is learnt on ⌊share·n⌋ consecutive samples, in order, in batches of `batch` with the last one kept: A ← clip(A - η g∘(W-own), 0, 1). First time: whole passes until more than ten losses (each of a pass's last batch,
    taken before its step) are seen and the last ten have a population deviation below `threshold`, without a cap; later one pass. Nothing happens if Σ(W-own) of the first tensor is exactly 0 (round 0; the only client of the last round), and that does not use up the first time.
    `slices`: (r, client) -> first sample of the slice, for the mixing at the start of round r; the mixing that is scored after round r IS the one that starts round r+1, so keys run up to r = len(rounds); a key is asked for only where something is learnt.
    Read so: the mixture becomes the client's own model even if it is not drawn (the authors' code mixes in place), all clients receive W each round, a client's threshold counts passes and not batches."""
    W,clients = setup(w0, clients)
    N = range(len(clients))
    own,A,first,out = dict.fromkeys(N, W),{i: {k: torch.ones_like(W[k]) for k in list(W)[-top:]} for i in N},dict.fromkeys(N, True),[]
    def everybody(r):
        for i in N: own[i],A[i],first[i] = ala_mix(own[i], W, A[i], first[i], clients[i], slices.get((r, i)), share, batch, eta, top, threshold)
    everybody(0)
    for r,drawn in enumerate(rounds):
        for i,bs in drawn.items(): own[i] = sgd(own[i], plain, clients[i], bs, lr, momentum, decay)
        sent = {i: own[i] for i in drawn}
        W = mean(list(sent.values()), [len(clients[i][1]) for i in drawn])
        everybody(r+1)
        out.append(dict(w=W, messages={i: dict(w=w) for i,w in sent.items()}, personal=dict(own), A=dict(A),
                        down_numbers={i: numbers(W) for i in N}, up_numbers={i: numbers(W) for i in drawn}))
    return out

# ---- FedDBE

def dbe_logits(w, x):
    "Logits of weights with a personal mean as fifth entry"
    return head(w, features(w, x) + list(w.values())[4])

def running(r, f, mu): return (1-mu)*r.detach() + mu*f.mean(0)
def dbe_term(r, g, kappa): return kappa*(.5*(r-g)**2).mean()

def oracle_feddbe(w0, clients, rounds, lr, prep, mu=1., kappa=50.):
    """Zhang et al. 2023 (domain bias eliminator). Before round 0 all clients train once from w0 on the cross-entropy (`prep`: client -> batches); their running means r_i of the features make the consensus g = Σ n_i/n r_i, and the weights are thrown away.
    Round: from the newest W, loss = CE(head(f + m_i)) + κ mean_d ½(r-g)², r ← (1-μ) r + μ mean_b f with no gradient through the former r; r begins at 0 at each local training; features are those before the step. m_i (zeros at first) is trained with the
    weights by the same plain SGD, never leaves the client, and is the entry 'mean' of a personal model: newest W and own m_i.
    Read so: m_i is in the logits only, not in r; g is never renewed. Traffic: the first round's dict has prep = (down, up) of the preparation, W and d numbers; the d numbers of g are counted as received in the client's first round."""
    W,clients = setup(w0, clients)
    d = len(list(W.values())[1])
    zero = torch.zeros(d, dtype=torch.float64)
    def means(w, data, bs):
        r = zero
        for b in bs:
            r = running(r, features(w, data[0][b]), mu)
            w = sgd(w, plain, data, [b], lr)
        return r
    ns = [len(y) for _,y in clients]
    rs = {i: means(W, clients[i], bs) for i,bs in prep.items()}
    g = sum(ns[i]*rs[i] for i in rs)/sum(ns[i] for i in rs)
    m,met,out = dict.fromkeys(range(len(clients)), zero),set(),[]
    for n,drawn in enumerate(rounds):
        ws = {}
        for i,bs in drawn.items():
            X,y = clients[i]
            w,r = {**W, 'mean': m[i]},zero
            for b in bs:
                def loss(v):
                    f = features(v, X[b])
                    return ce(head(v, f + v['mean']), y[b]) + dbe_term(running(r, f, mu), g, kappa)
                step = grad(loss, w)
                r = running(r, features(w, X[b]), mu)
                w = {k: w[k] - lr*step[k] for k in w}
            m = {**m, i: w['mean']}
            ws[i] = {k: w[k] for k in W}
        down = {i: numbers(W) + (0 if i in met else d) for i in drawn}
        met |= set(drawn)
        W = mean(list(ws.values()), [ns[i] for i in drawn])
        out.append(dict(w=W, messages={i: dict(w=w) for i,w in ws.items()}, personal={i: {**W, 'mean': m[i]} for i in m}, down_numbers=down, up_numbers={i: numbers(W) for i in drawn},
                        consensus=g, means=rs, **(dict(prep=(dict.fromkeys(prep, numbers(W)), dict.fromkeys(prep, d))) if n==0 else {})))
    return out

# ---- FedAS

def align(f, y, prototypes):
    "FedAS' alignment: over the classes of a batch, the sum of the mean squared distance (over samples and features) to the prototype"
    return sum(((f[y==c]-prototypes[c])**2).mean() for c in y.unique().tolist())

def oracle_fedas(w0, clients, rounds, lr, aligning, fisher, lr_align=.01, samples=None, momentum=0., decay=0.):
    """Yang, Huang & Ye 2024: a drawn client aligns the received body with its own: class means of its OWN body's features are the prototypes, and SGD with rate `lr_align` on `align` moves the received body over the batches of `aligning`[round, client].
    That body replaces its own, its head stays, all weights train on the cross-entropy, and the whole model goes to the server with the score Σ_batches ‖∇ mean NLL‖² of all weights after training (batches of `fisher`[round, client]). W = Σ score_i/Σscore w_i.
    Scored: the client's whole model after its last participation, w0 for a client never drawn.
    Read so: every client aligns a copy of the server's body (the authors' code aligns one shared object, client after client); aligning in the first round too, where both bodies are equal but features are not at their class means; plain SGD in the alignment;
    prototypes of all own samples (`samples`[round, client] picks some, for a loader that drops its last batch); n_i plays no part. No key in `aligning`: no alignment. Down is the body only: the head of W is never used. Up is the model and one score."""
    W,clients = setup(w0, clients)
    own,out = dict.fromkeys(range(len(clients)), W),[]
    body = list(W)[:2]
    for r,drawn in enumerate(rounds):
        scores = {}
        for i,bs in drawn.items():
            X,y = clients[i]
            s = slice(None) if samples is None else samples[r,i]
            prototypes = {c: features(own[i], X[s][y[s]==c]).mean(0) for c in y[s].unique().tolist()}
            new = sgd(W, lambda w,x,t: align(features(w, x), t, prototypes), clients[i], aligning.get((r, i), []), lr_align, only=body)
            w = sgd({**own[i], **{k: new[k] for k in body}}, plain, clients[i], bs, lr, momentum, decay)
            own,scores[i] = {**own, i: w},sum((flat(grad(lambda v: plain(v, X[b], y[b]), w))**2).sum().item() for b in fisher[r,i])
        W = mean([own[i] for i in drawn], [scores[i] for i in drawn])
        out.append(dict(w=W, messages={i: dict(w=own[i], score=scores[i]) for i in drawn}, personal=own,
                        down_numbers={i: sum(W[k].numel() for k in body) for i in drawn}, up_numbers={i: numbers(W)+1 for i in drawn}))
    return out

# ---- FedPAC

def pac_statistics(f, y, C):
    "v = (1/n) [Σ p_c mean‖z‖² - Σ p_c² ‖μ_c‖²] and h_c = p_c μ_c, zero for a class that is not there"
    means,counts = class_means(f, y, C)
    p = counts.double()/len(y)
    h = torch.stack([p[c]*means[c] if c in means else torch.zeros_like(f[0]) for c in range(C)])
    return ((f**2).sum(1).mean() - (h**2).sum())/len(y),h

def simplex_qp(P):
    "The point of the simplex with the least αᵀPα, for P positive semi-definite: the best of the stationary points of all faces"
    m,best,P = len(P),None,P/P.abs().max()
    for k in range(1, m+1):
        for face in map(list, combinations(range(m), k)):
            K = torch.ones(k+1, k+1, dtype=torch.float64)
            K[:k,:k],K[k,k] = 2*P[face][:,face],0
            rhs = torch.zeros(k+1, dtype=torch.float64); rhs[k] = 1
            a = torch.zeros(m, dtype=torch.float64)
            a[face] = (torch.linalg.pinv(K) @ rhs)[:k]
            if a.min() > -1e-12 and abs(a.sum()-1) < 1e-9 and (best is None or a @ P @ a < best @ P @ best - 1e-15): best = a
    return best

def pac_alpha(i, vs, hs, cut=1e-3):
    "Weights of participant i's mixed head: min αᵀ(diag v + D_i)α on the simplex, entries up to `cut` dropped"
    D = torch.tensor([[((hs[i]-a)*(hs[i]-b)).sum() for b in hs] for a in hs], dtype=torch.float64)
    a = simplex_qp(torch.diag(torch.tensor(vs, dtype=torch.float64)) + D)
    a = torch.where(a>cut, a, torch.zeros_like(a))
    return a/a.sum()

def oracle_fedpac(w0, clients, rounds, lr, heads, lr_head=.1, lam=1., momentum=.5, decay=5e-4, keep=False):
    """Xu, Tong & Huang 2023. A drawn client has the newest body and its mixed head (w0's head before its first round), takes from them v, h and its own class means, trains the HEAD alone over the batches of `heads`[round, client] (rate `lr_head`), then the BODY alone
    over rounds[r][i] (rate lr) on CE + λ·MSE(features, prototype of the sample's class), the MSE a mean over B·d and without the term in round 0; both with fresh `momentum` and `decay`. It sends weights, v, h, the new class means and class counts.
    Server: body Σ n_i/n; prototype of a class weighted by class counts; participant i's mixed head Σ α_ij head_j with pac_alpha. Body and prototypes are everybody's, mixed heads only the participants'.
    A class that has no prototype: the client's own class mean from before training. Scored: newest body and own mixed head (a client never drawn: w0's head).
    `w` holds the body only; 'prototypes' and 'heads' (client -> mixed head) are beside it.
    Read so: prototypes are renewed each round from that round's senders alone (`keep`: an old one stays until somebody sends its class); 'round 0' is the server's first round, so a late joiner has the term at once; the own class means are taken with the newest body, over all own samples,
    before the head's epoch (which does not change features); decay only on the part in training; h, v come from before training, the heads from after it.
    Down, counted at the start of a round: body, prototypes of last round and the mixed head of a client that has one. Up: weights, v, h (C·d), class means of the classes there, C counts."""
    W,clients = setup(w0, clients)
    names = list(W); C,d = W[names[2]].shape
    body,mixed = {k: W[k] for k in names[:2]},{}
    first = {k: W[k] for k in names[2:]}
    prototypes,out = {},[]
    for r,drawn in enumerate(rounds):
        msgs,down = {},{}
        for i,bs in drawn.items():
            X,y = clients[i]
            down[i] = numbers(body) + len(prototypes)*d + (numbers(mixed[i]) if i in mixed else 0)
            w = {**body, **mixed.get(i, first)}
            f = features(w, X)
            v,h = pac_statistics(f, y, C)
            goal = {**class_means(f, y, C)[0], **prototypes}
            def loss(w, x, t):
                f = features(w, x)
                return ce(head(w, f), t) + (lam*((f-torch.stack([goal[c] for c in t.tolist()]))**2).mean() if r else 0)
            w = sgd(w, plain, clients[i], heads[r,i], lr_head, momentum, decay, names[2:])
            w = sgd(w, loss, clients[i], bs, lr, momentum, decay, names[:2])
            means,counts = class_means(features(w, X), y, C)
            msgs[i] = dict(w=w, v=v.item(), h=h, means=means, counts=counts)
        sent = list(msgs.values())
        full = mean([o['w'] for o in sent], [len(clients[i][1]) for i in msgs])
        body = {k: full[k] for k in names[:2]}
        prototypes = {**(prototypes if keep else {}), **{c: sum(o['counts'][c]*o['means'][c] for o in sent if c in o['means'])/sum(o['counts'][c] for o in sent if c in o['means'])
                                                         for c in range(C) if any(c in o['means'] for o in sent)}}
        alphas = {i: pac_alpha(j, [o['v'] for o in sent], [o['h'] for o in sent]) for j,i in enumerate(msgs)}
        mixed = {**mixed, **{i: {k: sum(a*o['w'][k] for a,o in zip(alpha, sent)) for k in names[2:]} for i,alpha in alphas.items()}}
        out.append(dict(w=body, prototypes=prototypes, heads=mixed, alphas=alphas, messages=msgs, personal={i: {**body, **mixed.get(i, first)} for i in range(len(clients))},
                        down_numbers=down, up_numbers={i: numbers(o['w']) + 1 + C*d + len(o['means'])*d + C for i,o in msgs.items()}))
    return out

# ---- FedCSPACK

def packs(x, size):
    "Rows of `size` entries, the last one filled up with zeros"
    return torch.cat([x, x.new_zeros(-len(x)%size)]).reshape(-1, size)

def cos(a, b):
    "Cosine of two vectors, 0 if one of them is zero"
    n = a.norm()*b.norm()
    return (a @ b/n).item() if n>0 else 0.

def pack_kl(l, g):
    "KL(softmax(g) ‖ softmax(l)) of one pack: server's ‖ client's"
    p,q = g.log_softmax(0),l.log_softmax(0)
    return (p.exp()*(p-q)).sum().item()

def choose_packs(l, g, size, weight='both'):
    "Packs that a client with flat weights `l` sends when the server's are `g`: pack -> (weight, change); also θ_a and all θ, β"
    L,G = packs(l, size),packs(g, size)
    whole,theta,beta = cos(l, g),[cos(a, b) for a,b in zip(L, G)],[pack_kl(a, b) for a,b in zip(L, G)]
    M = dict(both=[abs(t+b) for t,b in zip(theta, beta)], cs=[abs(t) for t in theta], kd=[abs(b) for b in beta])[weight]
    return {j: (M[j], (L-G)[j]) for j in range(len(L)) if theta[j]<whole},dict(theta_a=whole, theta=theta, beta=beta)

def merge_packs(g, sent, size):
    "The server's flat weights after the messages `sent`, and which packs moved"
    G,total = packs(g, size).clone(),{}
    for o in sent:
        for j,(m,_) in o.items(): total[j] = total.get(j, 0) + m
    moved = {j for j in total if total[j]>0}
    for o in sent:
        for j,(m,change) in o.items():
            if j in moved: G[j] += m/total[j]*change
    return G.reshape(-1)[:len(g)],moved

def unflat(x, like):
    out,at = {},0
    for k,t in like.items(): out[k],at = x[at:at+t.numel()].reshape(t.shape),at+t.numel()
    return out

def oracle_fedcspack(w0, clients, rounds, lr, pack, variant='intended', weight='both', momentum=0., decay=0.):
    """FedCSPACK (Algorithm 1, Eq. 3-9), with what only its code settles: the client compares its trained weights l with the server's g, pack by pack in the order of the weights, and sends the CHANGE l-g of the packs with θ_j < θ_a (strictly; cosine 0 for a zero pack), weighted by
    M_j = |θ_j+β_j|, β_j = KL(softmax g_j ‖ softmax l_j), zeros of the last pack included; server: W_j += Σ_i M_ij/Σ_i M_ij (l-g)_ij over the senders; packs that nobody sent stay; n_i plays no part. `weight`: 'both', 'cs' (|θ|) or 'kd' (|β|).
    intended: line 10 sends W and M to ALL clients after each round, and step 2 has each take over PW[j] where M[j] is valid, so a client that returns has taken over every pack that moved since it was last there (also in its own last round), and keeps its own values of all others, from which
    it trains. Before its first round its values are w0's. released: the whole model is overwritten by W.
    Read so: l-g of a kept pack holds the changes of former rounds too, for g is the server's newest and not where training began; θ, β compare with that g; Top-K has no K, the threshold alone decides; a pack counts as moved if its summed weight is > 0, not if its value differs.
    Scored (`personal`): what the client would begin the next round with, so for 'released' the server's model; 'trained' holds each drawn client's model right after training, before anything is taken over.
    Down: intended, entries (without padding) of the packs that it takes over when drawn, with one mask entry per pack; released, the whole model. Up: entries of the packs sent and as many weights, with one mask entry per pack.
    Beware: where nothing trained or one pack holds everything, θ_j and θ_a are equal but for round-off, and the choice is noise."""
    w0,clients = setup(w0, clients)
    g = flat(w0)
    P,width = len(g),len(packs(g, pack))
    length = [min(pack, P-j*pack) for j in range(width)]
    own,stale,out = dict.fromkeys(range(len(clients)), g),{i: set() for i in range(len(clients))},[]
    for drawn in rounds:
        sent,why,trained,down = {},{},{},{}
        for i,bs in drawn.items():
            start = g if variant=='released' else own[i]
            down[i] = P if variant=='released' else sum(length[j] for j in stale[i])
            stale[i] = set()
            trained[i] = sgd(unflat(start, w0), plain, clients[i], bs, lr, momentum, decay)
            own[i] = flat(trained[i])
            sent[i],why[i] = choose_packs(own[i], g, pack, weight)
        g,moved = merge_packs(g, list(sent.values()), pack)
        for i in own:
            at = torch.tensor([j in moved for j in range(width)]).repeat_interleave(pack)[:P]
            own[i] = g if variant=='released' else torch.where(at, g, own[i])
            stale[i] |= moved
        out.append(dict(w=unflat(g, w0), moved=moved, trained=trained, personal={i: unflat(own[i], w0) for i in own},
                        messages={i: dict(weights={j: m for j,(m,_) in o.items()}, changes={j: c[:length[j]] for j,(_,c) in o.items()}, **why[i]) for i,o in sent.items()},
                        down_numbers=down, up_numbers={i: sum(length[j] for j in o)+len(o) for i,o in sent.items()},
                        down_indices={i: 0 if variant=='released' else width for i in drawn}, up_indices={i: width for i in drawn}))
    return out
