"""Personalised fine-tuning written a second time, from its papers and from how their authors' code behaves, and without fedbook: strategies that follow federated training, their scores, and methods that personalise within it.

Fine-tuning begins from a global model and never aggregates; a round is an epoch, and every client takes part in each. oracle_name(w0, clients, epochs, lr, momentum, decay, carry, flood, **settings), on the network of oracles.py, with
  epochs   one dict per epoch, client -> the index tensors of its mini-batches (Soup FT: a list of them per member),
  carry    the momentum lives on from epoch to epoch of a stage; without it SGD is fresh every epoch (no matter for plain SGD),
  flood    b of loss flooding: |L-b|+b in place of L, the mean cross-entropy of a mini-batch, in every stage; penalties are added afterwards and are not flooded (the paper says neither).
It gives one dict per epoch, client -> the weights scored after it.

Methods that personalise within the rounds have the interface of oracles.py: one dict per round with w, messages, personal, down_numbers and up_numbers."""
from itertools import permutations
from math import factorial, prod
from scipy.optimize import minimize
import torch
from oracles import ce, class_means, features, flat, grad, logits, mean, numbers, plain, setup, sgd, squared_distance, whole

# ---- what the strategies share

def flooded(L, b): return L if b is None else abs(L-b)+b

def entropy(logits, flood):
    "Loss of weights on a batch: the flooded cross-entropy of `logits`"
    return lambda w,x,y: flooded(ce(logits(w, x), y), flood)

def steps(w, buf, loss, data, batches, lr, momentum=0., decay=0., only=None, mask=None):
    "`w` and the momentum `buf` after one step of SGD per batch; entries that are not in `only`, or where `mask` is 0, stand still"
    X,y = data
    for b in batches:
        g = grad(lambda v: loss(v, X[b], y[b]), w, only)
        buf = {**buf, **{k: momentum*buf.get(k, 0) + g[k] + decay*w[k] for k in g}}
        w = {**w, **{k: w[k] - lr*(1 if mask is None else mask[k])*buf[k] for k in g}}
    return w,buf

def stage(own, clients, epochs, lr, loss, momentum=0., decay=0., carry=False, only=None, masks=None):
    "Epoch by epoch the weights of every client that trains on loss(w, x, y) from `own`[client]"
    own,bufs,out = dict(own),{},[]
    for batches in epochs:
        for i,bs in batches.items():
            own[i],bufs[i] = steps(own[i], bufs.get(i, {}) if carry else {}, loss, clients[i], bs, lr, momentum, decay, only, masks and masks[i])
        out.append(dict(own))
    return out

def copies(w, clients): return dict.fromkeys(range(len(clients)), w)

# ---- FT, Proximal FT, Soup FT, Sparse FT

def oracle_ft(w0, clients, epochs, lr, momentum=0., decay=0., carry=False, flood=None):
    "All weights on the cross-entropy."
    w0,clients = setup(w0, clients)
    return stage(copies(w0, clients), clients, epochs, lr, entropy(logits, flood), momentum, decay, carry)

def oracle_proxft(w0, clients, epochs, lr, mu=.01, momentum=0., decay=0., carry=False, flood=None):
    "Cross-entropy + mu/2 ‖w-w0‖², w0 the global model. Read so: squared and with the factor ½ of FedProx (without it: twice the mu), over all weights, head included; not flooded."
    w0,clients = setup(w0, clients)
    loss = entropy(logits, flood)
    return stage(copies(w0, clients), clients, epochs, lr, lambda w,x,y: loss(w, x, y) + mu/2*squared_distance(w, w0), momentum, decay, carry)

def oracle_soupft(w0, clients, epochs, lr, momentum=0., decay=0., carry=False, flood=None):
    """The plain mean of members fine-tuned apart (LP-FT paper: five), each from w0: epochs[e][i] is a list with each member's batches.
    Read so: the members differ in the order of their batches only; after each epoch their mean is scored, and each goes on from its own weights, not from the mean; no selection."""
    w0,clients = setup(w0, clients)
    members = [[{i: bs[m] for i,bs in e.items()} for e in epochs] for m in range(len(next(iter(epochs[0].values()))))]
    tuned = [stage(copies(w0, clients), clients, e, lr, entropy(logits, flood), momentum, decay, carry) for e in members]
    return [{i: mean([t[e][i] for t in tuned], [1]*len(tuned)) for i in tuned[0][e]} for e in range(len(epochs))]

def greedy_soup(members, score):
    "Wortsman et al.'s greedy soup: from the best member down, one joins if the mean's score strictly rises"
    ranked = sorted(members, key=score, reverse=True)
    soup,best = ranked[:1],score(ranked[0])
    for m in ranked[1:]:
        s = score(mean(soup+[m], [1]*(len(soup)+1)))
        if s>best: soup,best = soup+[m],s
    return mean(soup, [1]*len(soup))

def snip_mask(w, g, sparsity, scored=None):
    """1 for the entries that train: |w·g| above the k-th smallest of all entries named in `scored` (all without it), k = ⌊sparsity·count⌋, so ties with it are masked; entries of other names train.
    The authors divide the scores by their sum first, which changes no order."""
    scored = list(w) if scored is None else scored
    s = {k: (w[k]*g[k]).abs() for k in scored}
    ranked = flat(s).sort().values
    k = int(sparsity*len(ranked))
    cut = ranked[k-1] if k else -1.
    return {n: (s[n]>cut).double() if n in s else torch.ones_like(t) for n,t in w.items()}

def summed_gradient(w, data, batches):
    "Sum of the gradients of the batches' cross-entropies, signs included"
    (X,y),g = data,dict.fromkeys(w, 0.)
    for b in batches: g = {k: g[k]+t for k,t in grad(lambda v: plain(v, X[b], y[b]), w).items()}
    return g

def oracle_sparseft(w0, clients, epochs, lr, scoring, sparsity=.9, scored=None, momentum=0., decay=0., carry=False, flood=None):
    """Only the weights with the greatest SNIP score |w·g| train, by one threshold for the whole model; the mask comes from w0 at the start of the stage and stays. `scoring`: client -> the batches of g, whose gradients are summed with their sign before the absolute value
    (one batch: Lee et al. 2018; a whole pass: FedSoup's code). `scored`: names with a score (Lee et al.: all; FedSoup: weights of convolutions and classifier), all others train.
    Read so: a masked entry keeps its global value (it is not pruned to zero); the update is masked, not the gradient, so decay and momentum do not move it either; the score is of the plain cross-entropy, not flooded; the paper's coefficient .001, of unknown meaning, plays no part."""
    w0,clients = setup(w0, clients)
    masks = {i: snip_mask(w0, summed_gradient(w0, c, scoring[i]), sparsity, scored) for i,c in enumerate(clients)}
    return stage(copies(w0, clients), clients, epochs, lr, entropy(logits, flood), momentum, decay, carry, masks=masks)

# ---- Local Superior Soups

def det(M):
    "Determinant as Leibniz' sum, which has a gradient where it is 0, too"
    n = len(M)
    sign = lambda p: (-1)**sum(p[a]>p[b] for a in range(n) for b in range(a+1, n))
    return sum(sign(p)*prod(M[i,p[i]] for i in range(n)) for p in permutations(range(n)))

def volume(vertices):
    "Squared volume of the simplex of `vertices`: |det CM|/((n-1)!² 2^(n-1)), CM the squared distances bordered by ones"
    n = len(vertices)
    rows = [[squared_distance(a, b) for b in vertices]+[1.] for a in vertices] + [[1.]*n+[0.]]
    CM = torch.stack([torch.stack([torch.as_tensor(x, dtype=torch.float64) for x in r]) for r in rows])
    return det(CM).abs()/(factorial(n-1)**2*2**(n-1))

def simplex(u):
    "Coefficients uniform on the simplex from `u`, uniform on (0, 1): -log u, divided by its sum"
    e = -u.double().log()
    return e/e.sum()

def oracle_lssft(w0, clients, epochs, lr, which, draws, affinity=1e-3, diversity=1e-3, every=15, scale=None, accumulate=False, momentum=0., decay=0., carry=False, flood=None):
    """Chen et al. 2024 (local superior soups), by their code. `which`: the vertex that each epoch trains, 0…0 1…1 2…2 (theirs: E epochs for vertex 0, E//8 for each other; the paper has three vertices). Vertex 0 begins at w0 and trains on CE + λ_a ‖v-w0‖²; a further one
    begins at the mean of the vertices before it, which stand still from then on, and trains on scale·Σ_s CE(Σ_j c_sj v_j) - λ_d volume + λ_a ‖v-w0‖². SGD is fresh for each vertex. After each epoch the plain mean of the vertices so far is scored.
    `draws`: (epoch, client) -> per batch a tensor [samples, vertices so far] of numbers uniform on (0, 1), from which `simplex` makes the coefficients; the newest vertex is the last column.
    As in the code, vertices after the first step at batches `every`, 2·every, … of an epoch, with the gradient of that batch alone and scale 1/every (every=15: an epoch with fewer batches changes nothing). every=1: a step per batch, and `scale` ½ is then the mean over two samples.
    `accumulate`: the gradients of all `every` batches are summed, penalties included; what an epoch leaves over is dropped.
    Read so: squared distances without ½; the raw volume, not its logarithm; no importance of weights."""
    w0,clients = setup(w0, clients)
    scale = 1/every if scale is None else scale
    vertices,bufs,out = {i: [w0] for i in range(len(clients))},{},[]
    def first(v, x, y): return flooded(plain(v, x, y), flood) + affinity*squared_distance(v, w0)
    def further(v, x, y, old, u):
        mixes = [{k: sum(c*t[k] for c,t in zip(simplex(row), [*old, v])) for k in v} for row in u]
        return scale*sum(flooded(plain(m, x, y), flood) for m in mixes) - diversity*volume([*old, v]) + affinity*squared_distance(v, w0)
    for e,batches in enumerate(epochs):
        for i,bs in batches.items():
            if which[e]==len(vertices[i]): vertices[i],bufs[i] = [*vertices[i], mean(vertices[i], [1]*len(vertices[i]))],{}
            *old,v = vertices[i]
            buf = bufs.get(i, {}) if carry else {}
            if not old: v,buf = steps(v, buf, first, clients[i], bs, lr, momentum, decay)
            else:
                (X,y),total = clients[i],{}
                for n,(b,u) in enumerate(zip(bs, draws[e,i], strict=True), 1):
                    g = grad(lambda t: further(t, X[b], y[b], old, u), v)
                    total = {k: g[k] + (total.get(k, 0) if accumulate else 0) for k in g}
                    if n%every==0:
                        buf = {k: momentum*buf.get(k, 0) + total[k] + decay*v[k] for k in v}
                        v,total = {k: v[k]-lr*buf[k] for k in v},{}
            vertices[i],bufs[i] = [*old, v],buf
        out.append({i: mean(vs, [1]*len(vs)) for i,vs in vertices.items()})
    return out

# ---- LP and LP-FT

def oracle_lpft(w0, clients, epochs, lr, lp, momentum=0., decay=0., carry=False, flood=None):
    """Kumar et al. 2022: `lp` epochs train the head alone, the others all weights. lp = len(epochs): linear probing only.
    Read so: the head is the global model's, no new one; SGD is fresh at the start of the second stage even with `carry`; no decay on the body while it is frozen; both stages are flooded and have the same rate."""
    w0,clients = setup(w0, clients)
    loss = entropy(logits, flood)
    probed = stage(copies(w0, clients), clients, epochs[:lp], lr, loss, momentum, decay, carry, only=list(w0)[2:])
    return probed + stage(probed[-1] if probed else copies(w0, clients), clients, epochs[lp:], lr, loss, momentum, decay, carry)

# ---- LoRA and Adapter

def low_rank(w, alpha, names):
    "The weights with W + (alpha/r) B A in place of each W in `names`, where A [r, in] and B [out, r] are the entries W.A and W.B"
    return {k: t + alpha/len(w[f'{k}.A'])*w[f'{k}.B'] @ w[f'{k}.A'] if k in names else t for k,t in w.items() if k[-2:] not in ('.A', '.B')}

def oracle_lora(w0, clients, epochs, lr, A, alpha, train=None, momentum=0., decay=0., carry=False, flood=None):
    """Hu et al. 2022: W + (alpha/r) B A in place of W; A and B train and B begins at 0. `A`: client -> {name of a weight: its A [r, in]}. `train`: entries of w0 that train as well (the head without it; () for none).
    Scored: the merged weights, and behind them the entries W.A and W.B. Read so: W and its bias stand still unless in `train`; no dropout; decay pulls A and B, not their product."""
    w0,clients = setup(w0, clients)
    train = list(w0)[2:] if train is None else list(train)
    names = list(A[0])
    def begin(i):
        a = {k: A[i][k].double() for k in names}
        return {**w0, **{f'{k}.A': a[k] for k in names}, **{f'{k}.B': torch.zeros(len(w0[k]), len(a[k]), dtype=torch.float64) for k in names}}
    loss = entropy(lambda w,x: logits(low_rank(w, alpha, names), x), flood)
    out = stage({i: begin(i) for i in range(len(clients))}, clients, epochs, lr, loss, momentum, decay, carry, only=[f'{k}.{n}' for k in names for n in 'AB']+train)
    return [{i: {**w, **low_rank(w, alpha, names)} for i,w in o.items()} for o in out]

def gelu(x): return x*(1+torch.erf(x/2**.5))/2

def bottleneck(x, D, d, U, u):
    "x + Up(GELU(Down(x)))"
    return x + gelu(x @ D.T + d) @ U.T + u

def adapter_logits(w, x, after='linear'):
    "Logits of weights with an adapter's four entries behind the network's: on the first layer's output before its relu, or after it"
    W,b,V,c,*adapter = w.values()
    f = x @ W.T + b
    f = bottleneck(f, *adapter).clamp(min=0) if after=='linear' else bottleneck(f.clamp(min=0), *adapter)
    return f @ V.T + c

def oracle_adapter(w0, clients, epochs, lr, adapter, train=None, after='linear', momentum=0., decay=0., carry=False, flood=None):
    """Houlsby et al. 2019: a bottleneck with a residual, x + Up(GELU(Down(x))), behind the first layer. `adapter`: client -> its first weights, in the order Down's weight [m, d] and bias [m], Up's weight [d, m] and bias [d].
    `train`: entries of w0 that train as well (the head without it; () for none). Scored with adapter_logits. Read so: GELU with the error function, not its tanh approximation; a linear layer's output is what the adapter sees (`after`='relu': the features)."""
    w0,clients = setup(w0, clients)
    own = {i: {**w0, **{k: t.double() for k,t in adapter[i].items()}} for i in range(len(clients))}
    only = list(adapter[0]) + (list(w0)[2:] if train is None else list(train))
    return stage(own, clients, epochs, lr, entropy(lambda w,x: adapter_logits(w, x, after), flood), momentum, decay, carry, only=only)

# ---- scores of personal models on all clients' test sets

def oracle_metrics(A, correction=0):
    """Scores of the LP-FT paper from A [C, C], where A[i][j] is the accuracy of client i's model on client j's test set; c_std, worst, average, global as solved from its tables, *_text as it defines them.
    Read so: deviations are the population's (`correction`=1: the sample's), and clients weigh the same whatever the size of their test sets."""
    A = torch.as_tensor(A, dtype=torch.float64)
    C = len(A)
    own = A.diagonal()
    others = A[~torch.eye(C, dtype=torch.bool)].reshape(C, C-1)
    local,glob,worst,text = own.mean(),A.mean(),others.min(1).values.mean(),others.mean()
    scores = {'local': local, 'global': glob, 'c_std': A.std(1, correction=correction).mean(), 'worst': worst, 'average': (local+glob+worst)/3,
              'global_text': text, 'c_std_text': own.std(correction=correction), 'worst_text': own.min(), 'average_text': (local+text)/2}
    return {k: v.item() for k,v in scores.items()}

def oracle_matrix(personal, tests, logits=logits):
    "A [C, C] in percent: client i's model on client j's test set (X, y)"
    return torch.tensor([[100*(logits(w, X.double()).argmax(1)==y).double().mean().item() for X,y in tests] for _,w in sorted(personal.items())], dtype=torch.float64)

def oracle_distortion(w0, personal, xs, features=features):
    "Mean over clients of the mean distance ‖f(w0; x) - f(w_c; x)‖₂ on the client's own samples `xs`[c]"
    return sum((features(w0, xs[c])-features(w, xs[c])).norm(dim=1).mean().item() for c,w in personal.items())/len(personal)

# ---- Per-FedAvg

def meta_step(w, f1, f2, f3, alpha, beta, delta=1e-3):
    "One step of Per-FedAvg: w - β (I - α ∇²f3) ∇f2(w - α ∇f1), the product with the Hessian by central differences; first order without f3"
    move = lambda w,c,g: {k: w[k]+c*g[k] for k in w}
    g = grad(f2, move(w, -alpha, grad(f1, w)))
    if f3 is None: return move(w, -beta, g)
    a,b = grad(f3, move(w, delta, g)),grad(f3, move(w, -delta, g))
    return {k: w[k] - beta*(g[k] - alpha*(a[k]-b[k])/(2*delta)) for k in w}

def oracle_perfedavg(w0, clients, rounds, lr, beta, variant='fo', delta=1e-3, adapting=None):
    """Fallah, Mokhtari & Ozdaglar 2020: local steps take consecutive batches D1, D2 ('fo', first order) or D1, D2, D3 ('hf', Hessian-free), w̃ = w - lr ∇f(w; D1), then meta_step with rate `beta`; batches left over at the end of a round's list are not used. Server: uniform mean.
    Scored: a client's model one step of SGD with rate `lr` per batch of `adapting`[round, client] after the newest W, drawn or not (without `adapting`: one step on all of its samples).
    Read so: the list of a round is cut into pairs or triples across epochs; D2 is the outer gradient's batch and D3 the Hessian's, as in the paper; plain SGD."""
    W,clients = setup(w0, clients)
    size,out = dict(fo=2, hf=3)[variant],[]
    for r,drawn in enumerate(rounds):
        ws = {}
        for i,bs in drawn.items():
            (X,y),w = clients[i],W
            f = lambda b: lambda v: plain(v, X[b], y[b])
            for s in range(0, len(bs)-size+1, size):
                f1,f2,*f3 = map(f, bs[s:s+size])
                w = meta_step(w, f1, f2, f3[0] if f3 else None, lr, beta, delta)
            ws[i] = w
        W = mean(list(ws.values()), [1]*len(ws))
        after = {i: sgd(W, plain, c, [slice(None)] if adapting is None else adapting[r,i], lr) for i,c in enumerate(clients)}
        out.append(dict(w=W, messages={i: dict(w=w) for i,w in ws.items()}, personal=after, **whole(W, drawn)))
    return out

# ---- FedRep

def oracle_fedrep(w0, clients, rounds, lr, heads, lr_head=None, momentum=0., decay=0.):
    """Collins et al. 2021: from the newest body and its own head (w0's before its first round) a drawn client trains the HEAD alone over `heads`[round, client] (rate `lr_head`, lr without it), then the BODY alone over rounds[r][i], and sends the body; W's body = Σ n_i/n.
    `w` holds the body only. Scored: newest body and own head (w0's for a client never drawn).
    Read so: the head stands still in the body's phase (with old versions of torch its momentum went on); decay pulls what is in training, biases too (the authors' code: weights only); no last round for all heads."""
    W,clients = setup(w0, clients)
    body,first = list(W)[:2],{k: W[k] for k in list(W)[2:]}
    W,own,out = {k: W[k] for k in body},copies(first, clients),[]
    for r,drawn in enumerate(rounds):
        sent = {}
        for i,bs in drawn.items():
            w = sgd({**W, **own[i]}, plain, clients[i], heads[r,i], lr if lr_head is None else lr_head, momentum, decay, list(first))
            w = sgd(w, plain, clients[i], bs, lr, momentum, decay, body)
            sent[i],own = {k: w[k] for k in body},{**own, i: {k: w[k] for k in first}}
        W = mean(list(sent.values()), [len(clients[i][1]) for i in drawn])
        out.append(dict(w=W, messages={i: dict(w=w) for i,w in sent.items()}, personal={i: {**W, **h} for i,h in own.items()}, **whole(W, drawn)))
    return out

# ---- FedBN

def bn_forward(w, statistics, x, train):
    """Logits of linear, batch norm, relu, linear; weights in this order, weight before bias. `statistics` (running mean and variance) are used, or with `train` the batch's are, and the running ones move by a tenth towards them (the variance then over n-1). Also the new statistics."""
    W,b,scale,shift,V,c = list(w.values())[:6]
    z,(m,v) = x @ W.T + b,statistics.values()
    if train:
        new = .9*m + .1*z.detach().mean(0),.9*v + .1*z.detach().var(0, correction=1)
        m,v = z.mean(0),z.var(0, correction=0)
    else: new = m,v
    f = ((z-m)/(v+1e-5).sqrt()*scale + shift).clamp(min=0)
    return f @ V.T + c,dict(zip(statistics, new))

def bn_logits(w, x):
    "Logits of a personal model: six weights, then running mean and variance, which are used"
    names = list(w)
    return bn_forward(w, {k: w[k] for k in names[6:8]}, x, False)[0]

def bn_train(w, statistics, buf, data, batches, lr, momentum=0., decay=0., flood=None, only=None, train=True):
    "Weights, running statistics and momentum after SGD, in train mode unless told"
    for b in batches:
        new = bn_forward(w, statistics, data[0][b], train)[1]
        w,buf = steps(w, buf, entropy(lambda v,x: bn_forward(v, statistics, x, train)[0], flood), data, [b], lr, momentum, decay, only)
        statistics = new
    return w,statistics,buf

def oracle_bn_lpft(w0, statistics, clients, epochs, lr, lp, momentum=0., decay=0., carry=False, flood=None, probe_in_train_mode=False):
    """LP-FT (lp = 0: FT) of the network with batch norm, with oracle_fedbn's `w0` and `statistics`, those of the global model; scored with bn_logits, statistics behind the weights.
    Read so: probing is in eval mode, so neither body, scale, shift nor statistics change (`probe_in_train_mode`: the statistics move); FT is in train mode and goes on from the global statistics."""
    w0,clients = setup(w0, clients)
    stats = {k: t.double() for k,t in statistics.items()}
    own,out = copies((w0, stats, {}), clients),[]
    for e,batches in enumerate(epochs):
        for i,bs in batches.items():
            w,s,buf = own[i]
            probing = e<lp
            own[i] = bn_train(w, s, buf if carry and e!=lp else {}, clients[i], bs, lr, momentum, decay, flood, list(w0)[4:] if probing else None, not probing or probe_in_train_mode)
        out.append({i: {**w, **s} for i,(w,s,_) in own.items()})
    return out

def oracle_fedbn(w0, statistics, clients, rounds, lr, momentum=0., decay=0., uniform=True):
    """Li et al. 2021: FedAvg of all but the batch norm, whose scale, shift and running statistics stay with each client. `w0` has six entries: weight and bias of the first layer, of the batch norm and of the classifier; `statistics`: running mean and variance that all begin with.
    `w` holds the four shared entries. Scored with bn_logits: newest shared entries, own scale and shift, and behind them own statistics (a client never drawn: those it began with).
    Read so: equal weights as in the authors' code (`uniform`=False: n_i); a batch of one sample has no place here."""
    W,clients = setup(w0, clients)
    names,begin = list(W),{k: t.double() for k,t in statistics.items()}
    shared,out = names[:2]+names[4:],[]
    own = copies(({k: W[k] for k in names[2:4]},begin), clients)
    W = {k: W[k] for k in shared}
    whole_model = lambda i: {k: {**W, **own[i][0]}[k] for k in names}
    for drawn in rounds:
        sent = {}
        for i,bs in drawn.items():
            w,stats,_ = bn_train(whole_model(i), own[i][1], {}, clients[i], bs, lr, momentum, decay)
            sent[i],own = {k: w[k] for k in shared},{**own, i: ({k: w[k] for k in names[2:4]}, stats)}
        W = mean(list(sent.values()), [1 if uniform else len(clients[i][1]) for i in drawn])
        out.append(dict(w=W, messages={i: dict(w=w) for i,w in sent.items()}, personal={i: {**whole_model(i), **own[i][1]} for i in own}, **whole(W, drawn)))
    return out

# ---- FedSoup

def soup_step(w, G, n, received, accuracy):
    "FedSoup's model, its mean G of accepted global models and their number n, after one selection"
    G = received if n==0 else G
    A = {k: (w[k]+n*G[k])/(n+1) for k in w}
    B = {k: (w[k]+n*G[k]+received[k])/(n+2) for k in w}
    return (B,{k: (n*G[k]+received[k])/(n+1) for k in w},n+1) if accuracy(B)>accuracy(A) else (A,G,n)

def oracle_fedsoup(w0, clients, rounds, lr, selection, share=.75, R=None, momentum=0., decay=0., carry=False):
    """Chen et al. 2023: a client trains from W, and from its participation number > `share`·R on it mixes its weights with the mean of accepted global models, and with the W received if that is strictly more accurate on `selection`[client] = (X, y). The mixture is sent and scored.
    Read so: the count includes the round that is under way, R is the number of rounds (the authors run one more); `selection` should be held out (the authors take the client's test set); merge by n_i. `carry`: momentum lives on from round to round.
    Scored: a client's own model after its last participation, w0 for a client never drawn. 'accepted' holds every client's n."""
    W,clients = setup(w0, clients)
    R = len(rounds) if R is None else R
    own,souped,count,bufs,out = copies(W, clients),copies((None, 0), clients),dict.fromkeys(range(len(clients)), 0),{},[]
    for drawn in rounds:
        for i,bs in drawn.items():
            w,bufs[i] = steps(W, bufs.get(i, {}) if carry else {}, plain, clients[i], bs, lr, momentum, decay)
            count[i] += 1
            X,y = selection[i]
            if count[i]>share*R: w,*s = soup_step(w, *souped[i], W, lambda v: (logits(v, X.double()).argmax(1)==y).sum().item()); souped[i] = tuple(s)
            own = {**own, i: w}
        W = mean([own[i] for i in drawn], [len(clients[i][1]) for i in drawn])
        out.append(dict(w=W, messages={i: dict(w=own[i]) for i in drawn}, personal=own, accepted={i: n for i,(_,n) in souped.items()}, **whole(W, drawn)))
    return out

# ---- pFedFDA

def fda_priors(y, C):
    p = torch.bincount(y, minlength=C).double()/len(y) + 1e-4
    return p/p.sum()

def lda(mu, sigma, priors, eps=1e-4):
    "Weight and bias of the linear discriminant of classes with means `mu` [C, d] and one covariance, shrunk by eps towards its mean variance"
    d = len(sigma)
    S = (1-eps)*sigma + eps*sigma.trace()/d*torch.eye(d, dtype=torch.float64)
    V = torch.linalg.solve(S, mu.T).T
    return V,priors.log() - (mu*V).sum(1)/2

def fda_statistics(f, y, mu):
    "Class means (the global `mu` for a class that is not there) and the pooled covariance with the authors' +1e-4 on every entry and +I"
    means,_ = class_means(f, y, len(mu))
    centred = f - torch.stack([means[c] for c in y.tolist()])
    return torch.stack([means.get(c, m) for c,m in enumerate(mu)]),centred.T @ centred/(len(y)-1) + 1e-4 + torch.eye(f.shape[1], dtype=torch.float64)

def blend(beta, local, glob): return tuple(b*l+(1-b)*g for b,l,g in zip(beta, local, glob))

def fda_objective(beta, f, y, folds, glob, priors):
    "Sum over both folds of the mean cross-entropy of the blended discriminant on the fold that its local statistics did not see; `beta` = (of the means, of the covariance)"
    total = 0
    for k in (0, 1):
        V,b = lda(*blend(beta, fda_statistics(f[folds!=k], y[folds!=k], glob[0]), glob), priors)
        total = total + ce(f[folds==k] @ V.T + b, y[folds==k])
    return total

def alternate(y):
    "Two folds that hold each class in equal parts: its samples alternate, and classes of odd size give their extra sample to either fold in turn"
    folds,turn = torch.zeros(len(y), dtype=torch.long),0
    for c in y.unique().tolist():
        at = (y==c).nonzero().flatten()
        folds[at] = (torch.arange(len(at))+turn)%2
        turn = (turn+len(at))%2
    return folds

def repeated(y):
    "Which samples are of a class with at least two"
    return torch.bincount(y)[y]>1

def fda_beta(f, y, folds, glob, priors, single=False, iterations=10, gtol=1e-3):
    "β of the means and of the covariance from (½, ½) by bounded L-BFGS; (0, 0) where the cross-validation fails"
    keep = repeated(y)
    f,y,folds = f[keep],y[keep],folds[keep]
    if min((folds==0).sum(), (folds==1).sum())<2: return 0.,0.
    def value(x):
        t = torch.tensor(x, dtype=torch.float64, requires_grad=True)
        L = fda_objective(t.expand(2), f, y, folds, glob, priors)
        return L.item(),torch.autograd.grad(L, t)[0].numpy()
    x = minimize(value, [.5]*(1 if single else 2), jac=True, method='L-BFGS-B', bounds=[(0, 1)]*(1 if single else 2), options=dict(maxiter=iterations, gtol=gtol)).x
    return (float(x[0]),float(x[-1])) if torch.tensor(x).isfinite().all() else (0.,0.)

def oracle_pfedfda(w0, clients, rounds, lr, mu0, folds=None, scored=None, betas=None, single=False, momentum=0., decay=0.):
    """McLaughlin & Su 2024. The server has the body, class means μ (`mu0` [C, d] at first) and one covariance Σ (I at first). A drawn client makes its head of them and its own priors, trains the BODY under that head, gathers the features of all its batches as they pass (before each step), finds β
    by two-fold cross-validation on them, and sends the body and βμ_loc+(1-β)μ, βΣ_loc+(1-β)Σ, one β for each; the server takes means by n_i. Scored: newest body, and the head of statistics blended anew, with a β from all own samples' features under that body.
    `folds`: (round, client) -> 0 or 1 for each gathered feature, in their order; `scored`: (round, client) -> the same for each sample (`alternate` of the classes with at least two samples, without them). `betas`: (round, client) -> (in training, in scoring), pairs that replace the search.
    'mu', 'sigma' are the server's after the round, 'betas' those in training of who was drawn, 'scored_betas' those of all clients.
    Read so: priors are of all own samples, in the folds too; a class with one sample is left out of the search only; 'clipped' means bounds of the search, which begins at (½, ½); search fails -> (0, 0), the global statistics; the guard on samples per class is void and the step towards
    a positive semi-definite covariance changes nothing, so both are left out; the head of w0 is never used. Down and up: body, μ and Σ (all of it)."""
    W,clients = setup(w0, clients)
    names = list(W); body = names[:2]
    C,d = mu0.shape
    W,glob,out = {k: W[k] for k in body},(mu0.double(), torch.eye(d, dtype=torch.float64)),[]
    priors = [fda_priors(y, C) for _,y in clients]
    def search(f, y, i, given, fixed):
        if fixed is not None: return fixed
        keep = repeated(y)
        if given is None: given = torch.zeros(len(y), dtype=torch.long); given[keep] = alternate(y[keep])
        return fda_beta(f, y, given, glob, priors[i], single)
    def adapted(f, y, i, given, fixed):
        beta = search(f, y, i, given, fixed)
        return blend(beta, fda_statistics(f, y, glob[0]), glob),beta
    for r,drawn in enumerate(rounds):
        sent,found = {},{}
        for i,bs in drawn.items():
            (X,y),w,buf,seen = clients[i],W,{},[]
            V,c = lda(*glob, priors[i])
            for b in bs:
                seen.append(features(w, X[b]))
                w,buf = steps(w, buf, lambda v,x,t: ce(features(v, x) @ V.T + c, t), clients[i], [b], lr, momentum, decay)
            (mu,sigma),found[i] = adapted(torch.cat(seen), torch.cat([y[b] for b in bs]), i, folds and folds[r,i], betas and betas[r,i][0])
            sent[i] = dict(w=w, mu=mu, sigma=sigma)
        ns = [len(clients[i][1]) for i in drawn]
        W = mean([o['w'] for o in sent.values()], ns)
        new = mean([dict(mu=o['mu'], sigma=o['sigma']) for o in sent.values()], ns)
        glob,personal,after = (new['mu'], new['sigma']),{},{}
        for i,(X,y) in enumerate(clients):
            stats,after[i] = adapted(features(W, X), y, i, scored and scored[r,i], betas and betas[r,i][1])
            personal[i] = {**W, **dict(zip(names[2:], lda(*stats, priors[i])))}
        traffic = dict.fromkeys(drawn, numbers(W)+C*d+d*d)
        out.append(dict(w=W, mu=glob[0], sigma=glob[1], messages=sent, personal=personal, betas=found, scored_betas=after, down_numbers=traffic, up_numbers=traffic))
    return out

# ---- FedL2G

def clipped(g, most):
    "Gradients scaled to a common norm of `most` if it is greater, as torch does it"
    c = min(1., most/(flat(g).norm().item()+1e-6))
    return {k: c*t for k,t in g.items()}

def average(xs): return sum(xs)/len(xs)
def guided(output, y, g): return ((output-g[y])**2).mean()

def guide_gradient(w, g, pseudo, quiz, lr):
    "Gradient in the guides `g` of quiz(w - lr ∇_w pseudo(w, g)), through the step"
    v,g = {k: t.detach().clone().requires_grad_() for k,t in w.items()},g.detach().clone().requires_grad_()
    step = torch.autograd.grad(pseudo(v, g), list(v.values()), create_graph=True)
    return torch.autograd.grad(quiz({k: t-lr*s for (k,t),s in zip(v.items(), step)}), g)[0]

def oracle_fedl2g(w0, clients, rounds, lr, guides, study, quiz, server_lr, variant='logit', warmup=50, most=100.):
    """Zhang et al. 2024: the server has a guide per class (`guides` [C, C] for 'logit', [C, d] for 'feat'), and each client its own model. A drawn client trains it on CE + MSE(logits or features, guide of the class) over rounds[r][i], from round `warmup` on, and then, in every round,
    finds the gradient in the guides of the cross-entropy on its batches `quiz`[round, client] after one step of rate lr, which is not kept, on CE + MSE over the batches `study`[round, client]. It sends the rows that are not zero; the server takes per class the mean over the senders,
    clips the whole to the norm `most`, and makes a step of rate `server_lr` (theirs: .1 for 'logit', 100 for 'feat').
    `w` holds the guides as entry 'guides'; a message is {class: row}. Scored: own model, w0 for a client never drawn; nothing else of a model is ever sent.
    Read so: the MSE is a mean over batch and width; means over batches, not over samples; plain SGD with its gradient clipped to `most` in training and not in the step of the study; rounds are counted from 0 by the server, so a late joiner needs no warm-up of its own; senders weigh the same."""
    W,clients = setup(w0, clients)
    g,own,out = guides.double(),copies(W, clients),[]
    output = dict(logit=logits, feat=features)[variant]
    for r,drawn in enumerate(rounds):
        rows = {}
        for i,bs in drawn.items():
            X,y = clients[i]
            loss = lambda w,b,g: plain(w, X[b], y[b]) + guided(output(w, X[b]), y[b], g)
            for b in bs if r>=warmup else []:
                step = clipped(grad(lambda v: loss(v, b, g), own[i]), most)
                own = {**own, i: {k: t-lr*step[k] for k,t in own[i].items()}}
            G = guide_gradient(own[i], g, lambda v,t: average([loss(v, b, t) for b in study[r,i]]), lambda v: average([plain(v, X[b], y[b]) for b in quiz[r,i]]), lr)
            rows[i] = {c: G[c] for c in range(len(g)) if G[c].any()}
        down = dict.fromkeys(drawn, g.numel())
        total = torch.stack([average([m[c] for m in rows.values() if c in m] or [torch.zeros_like(g[c])]) for c in range(len(g))])
        g = g - server_lr*clipped(dict(g=total), most)['g']
        out.append(dict(w=dict(guides=g), messages=rows, personal=own, down_numbers=down, up_numbers={i: sum(t.numel() for t in m.values()) for i,m in rows.items()},
                        down_indices=dict.fromkeys(drawn, 0), up_indices={i: len(m) for i,m in rows.items()}))
    return out
