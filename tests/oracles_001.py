"""PFedEdit and the methods it is compared with, written a second time as in oracles.py, whose interface they share: oracle_name(w0, clients, rounds, lr, **settings).

Networks: that of oracles.py (four entries), or the same with a BatchNorm between its first layer and its relu: fc.weight, fc.bias, bn.weight, bn.bias, bn.running_mean, bn.running_var, bn.num_batches_tracked, head.weight, head.bias (nine entries, the order counts).
`classify` scores either. A method names its own networks where it needs others: DisTrans has `distrans_logits`, FedFA maps instead of vectors.
Where only a part of the weights is merged, `w` and the messages hold that part. Traffic counts floats, the statistics of a BatchNorm among them; its counter is not counted.
Merges are uniform over the clients drawn where a docstring says so, and weighted by n_i elsewhere. Absent clients appear in none of the authors' codes but FedRep's, HeteroFL's, FedFed's and Fed-LAMB's: a client keeps what it owns, gets the newest server model when it is drawn or scored, and owns w0 before its first round."""
from math import ceil
import torch
from oracles import ce, features, head, logits, mean, minus, numbers, plain, setup, sgd, whole

# ---- networks with BatchNorm

def take(w): return {k: v.detach().clone().double() if v.is_floating_point() else v.clone() for k,v in w.items()}
def begin(w0, clients): return take(w0),[(X.double(), y) for X,y in clients]
def floats(w): return sum(v.numel() for v in w.values() if v.is_floating_point())
def part(w, keys): return {k: w[k] for k in keys}
def normed(w): return len(w)==9
def statistics(w): return list(w)[4:7] if normed(w) else []
def trained(w): return [k for k in w if k not in statistics(w)]
def head_keys(w): return list(w)[-2:]
def body_keys(w): return list(w)[:-2]

def forward(w, x, training, scale=1., eps=1e-5, rate=.1):
    "Logits of `x`, and the statistics of the BatchNorm after it; what goes into the BatchNorm is divided by `scale`"
    if not normed(w): return logits(w, x),{}
    W,b,g,c,m,v,n,H,h = w.values()
    z = (x @ W.T + b)/scale
    mu,var = (z.mean(0),z.var(0, correction=0)) if training else (m,v)
    moved = dict(zip(statistics(w), [(1-rate)*m + rate*mu.detach(), (1-rate)*v + rate*z.detach().var(0), n+1])) if training else {}
    return ((z-mu)/(var+eps).sqrt()*g + c).clamp(min=0) @ H.T + h,moved

def classify(w, x): return forward(w, x, False)[0]

def blend(ws, ns=None):
    "Mean of the entries of `ws`, uniform without `ns`; integers are cut off"
    out = mean(ws, ns or [1]*len(ws))
    return {k: v if ws[0][k].is_floating_point() else v.trunc().to(ws[0][k].dtype) for k,v in out.items()}

def fit(w, data, batches, lr, only=None, momentum=0., decay=0., clip=None, loss=ce, scale=1.):
    "`w` after a step of SGD per batch on the entries `only`, in training mode; gradients are cut to the norm `clip` before decay and momentum"
    (X,y),buf,only = data,{},trained(w) if only is None else only
    for b in batches:
        v = {k: t.clone().requires_grad_() if k in only else t for k,t in w.items()}
        z,moved = forward(v, X[b], True, scale)
        g = dict(zip(only, torch.autograd.grad(loss(z, y[b]), [v[k] for k in only])))
        norm = sum((t**2).sum() for t in g.values()).sqrt()
        cut = 1. if clip is None else min(1., clip/(norm.item()+1e-6))
        for k in only:
            buf[k] = momentum*buf.get(k, 0) + cut*g[k] + decay*w[k]
            w = {**w, k: w[k] - lr*buf[k]}
        w = {**w, **moved}
    return w

def partly(w0, clients, rounds, shared, local, uniform, own=None, sends=None):
    """Rounds of a method whose clients replace the entries `shared` of their own model by the server's, train with local(r, i, w, batches), and send those entries (`sends`: these).
    Gives each client's model after its last training beside the shared rounds' results."""
    w0,clients = begin(w0, clients)
    own = own or dict.fromkeys(range(len(clients)), w0)
    W,out = part(w0, sends or shared),[]
    for r,drawn in enumerate(rounds):
        start = {i: {**own[i], **part(W, shared)} for i in drawn}
        own = {**own, **{i: local(r, i, start[i], bs) for i,bs in drawn.items()}}
        msgs = {i: part(own[i], W) for i in drawn}
        W = blend(list(msgs.values()), None if uniform else [len(clients[i][1]) for i in drawn])
        out.append(dict(w=W, messages={i: dict(w=m) for i,m in msgs.items()}, personal={i: {**own[i], **part(W, shared)} for i in own}, own=own,
                        down_numbers={i: floats(part(W, shared)) for i in drawn}, up_numbers={i: floats(W) for i in drawn}))
    return out

# ---- PFedEdit

def count_of(ratio, layers):
    "How many of `layers` layers a percentage `ratio` (whole number) is, rounded up"
    return -(-ratio*layers//100)

def edit(g, l, keys): return {k: l[k] if k in keys else t for k,t in g.items()}

def gains(edited, local, y):
    "r(x) = P_y(edited)/P_y(local) - 1 per sample, from logits"
    at = torch.arange(len(y))
    return edited.softmax(1)[at,y]/local.softmax(1)[at,y] - 1

def te_scores(edited, local, y):
    "Four counts (right and r > 0, right and r < 0, wrong and r > 0, wrong and r < 0), and the mean of r (Eq. 2); r = 0 counts in none of the four"
    r,right = gains(edited, local, y),edited.argmax(1)==y
    return tuple(int((c & s).sum()) for c in (right, ~right) for s in (r>0, r<0)),r.mean().item()

def rank(scores):
    "Indices of the layers, best first: more of A, then of B, then of C, then a larger mean of r, then the shallower layer; D takes no part, for A, B and C leave it no choice"
    return sorted(range(len(scores)), key=lambda t: (*(-c for c in scores[t][0][:3]), -scores[t][1], t))

def judged(g, l, keys, x, y):
    "Scores of the edit that takes the entries `keys` from l: prediction list, mean of r, number right, mean cross-entropy"
    z = classify(edit(g, l, keys), x)
    return *te_scores(z, classify(l, x), y),int((z.argmax(1)==y).sum()),ce(z, y).item()

ORDERS = dict(list=rank, te=lambda s: sorted(range(len(s)), key=lambda t: (-s[t][1], t)), accuracy=lambda s: sorted(range(len(s)), key=lambda t: (-s[t][2], t)),
              loss=lambda s: sorted(range(len(s)), key=lambda t: (s[t][3], t)))

def oracle_pfededit(w0, clients, rounds, lr, layers, k, probe, metric='list', picks=None, once=False, variant='intended', momentum=0., decay=0.):
    """Yuan et al. 2024, Algorithm 1. Train; W = uniform mean of all entries (statistics too, the counter cut off); each client has W and its own just-trained l, judges every edit of ONE layer (W with that layer from l) on D_p against l, and takes the best `k` layers from l at once;
    the edited model is scored and is where the next round's training starts. Everything is sent, personal layers too.
    `layers`: entries of each candidate, shallow first; a candidate may have none, and two may overlap. `probe`: client -> indices of D_p in its own data (the caller's batches leave them out). One traversal per round, and no edit depends on another.
    `metric`: 'list', or 'te' (mean of r), 'accuracy', 'loss' (Table 5), ties to the shallower layer. `once`: the layers of a client's first choice stay (Table 7). `picks`: (round, client) -> indices, instead of a choice (Figure 2: random).
    Read so: the clean run is the LOCAL model; both models run in evaluation mode on the same samples in the same order; r = 0 counts in no case; the fourth key is the mean of r; parameter-free candidates count among the k.
    A client that stays away edits the newest W with its l of the last training; one never drawn, or before its first training, has W unedited.
    released: the swap never reaches the forward pass. `picks`[round, client]: the layers drawn at random after that round's merge, for the clients drawn in it. From then on the client's layer is never overwritten: it stays what W was
    at the pick and is trained from there. What is SENT for it is a shadow: l's layer at the last pick, and the W it last received from then on. Scored: W with the client's own values of all layers ever picked (a fresh pick changes nothing yet).
    Read so (released): drawn clients pick, after they loaded the merge; a load writes W into the shadows, so the first upload after a pick is l's layer and later ones are W's; one that stays away loads the newest W when it is drawn again; a layer picked twice takes its own trained layer as shadow again.
    `choice` is client -> layers of the newest edit, in the order of their rank, and `scores` what they were ranked by."""
    W,clients = begin(w0, clients)
    if variant=='released': return ghosts(W, clients, rounds, lr, layers, picks, momentum, decay)
    l,choice,out = {},{},[]
    now = dict.fromkeys(range(len(clients)), W)
    for r,drawn in enumerate(rounds):
        for i,bs in drawn.items(): l[i] = fit(now[i], clients[i], bs, lr, momentum=momentum, decay=decay)
        W,scores = blend([l[i] for i in drawn]),{}
        for i in l:
            if picks is not None: choice[i] = picks[r,i]
            elif not (once and i in choice):
                X,y = (t[probe[i]] for t in clients[i])
                scores[i] = [judged(W, l[i], keys, X, y) for keys in layers]
                choice[i] = ORDERS[metric](scores[i])[:k]
        now = {i: edit(W, l[i], {n for t in choice[i] for n in layers[t]}) if i in l else W for i in now}
        out.append(dict(w=W, messages={i: dict(w=l[i]) for i in drawn}, personal=now, choice=dict(choice), scores=scores, local=dict(l),
                        down_numbers={i: floats(W) for i in drawn}, up_numbers={i: floats(W) for i in drawn}))
    return out

def ghosts(W, clients, rounds, lr, layers, picks, momentum, decay):
    "PFedEdit as released: `own` is what a client computes with, `shadow` what it sends for the entries that were ever picked"
    N = range(len(clients))
    own,shadow,loaded,out = dict.fromkeys(N, W),{i: {} for i in N},dict.fromkeys(N, -1),[]
    def load(i, r): own[i],shadow[i],loaded[i] = {**W, **part(own[i], shadow[i])},part(W, shadow[i]),r
    for r,drawn in enumerate(rounds):
        sent = {}
        for i,bs in drawn.items():
            if loaded[i]<r-1: load(i, r-1)
            own[i] = fit(own[i], clients[i], bs, lr, momentum=momentum, decay=decay)
            sent[i] = {**own[i], **shadow[i]}
        W = blend(list(sent.values()))
        for i in drawn:
            l = own[i]
            load(i, r)
            shadow[i] |= {n: l[n] for t in picks[r,i] for n in layers[t]}
        out.append(dict(w=W, messages={i: dict(w=w) for i,w in sent.items()}, personal={i: {**W, **part(own[i], shadow[i])} for i in N}, kept={i: set(shadow[i]) for i in N},
                        down_numbers={i: floats(W) for i in drawn}, up_numbers={i: floats(W) for i in drawn}))
    return out

# ---- FedAvg and fine-tuning, FedPer, FedRep, FedBN

def oracle_finetuned(w0, clients, rounds, lr, tuning, lr_tuning=None, head_only=False, momentum=0., decay=0.):
    """FedAvg (merge by n_i), whose server model every client trains on for itself before it is scored: over the batches of `tuning`[client], with rate `lr_tuning` (lr without it).
    Read so: tuning starts from the newest W at each scoring and leaves no trace in later rounds; a client without batches is scored with W; fresh momentum; all entries of FedAvg's merge, the statistics too, are n_i-weighted."""
    w0,clients = begin(w0, clients)
    def local(r, i, w, bs): return fit(w, clients[i], bs, lr, momentum=momentum, decay=decay)
    def tune(i, w): return fit(w, clients[i], tuning.get(i, []), lr if lr_tuning is None else lr_tuning, head_keys(w) if head_only else None, momentum, decay)
    out = partly(w0, clients, rounds, list(w0), local, False)
    return [{**o, 'personal': {i: tune(i, o['w']) for i in range(len(clients))}} for o in out]

def body_of(w, buffers): return [k for k in body_keys(w) if buffers=='average' or k not in statistics(w)]

def oracle_fedper(w0, clients, rounds, lr, heads=None, buffers='local', momentum=0., decay=0.):
    """Arivazhagan et al. 2019: body from the server, own head, all trained together, the body sent; W = Σ n_i/n over the clients drawn. Scored: newest body and own head, before training.
    `heads`: client -> its first (weight, bias), for heads drawn one by one as in the paper; copies of w0's without it, as in PFLlib. `buffers`: 'local' (statistics of a BatchNorm stay with the client, as in PFLlib) or 'average'."""
    w0,clients = begin(w0, clients)
    own = None if heads is None else {i: {**w0, **dict(zip(head_keys(w0), (t.double() for t in heads[i])))} for i in range(len(clients))}
    return partly(w0, clients, rounds, body_of(w0, buffers), lambda r,i,w,bs: fit(w, clients[i], bs, lr, momentum=momentum, decay=decay), False, own)

def oracle_fedrep(w0, clients, rounds, lr, heads, lr_head=None, uniform=True, tuning=None, buffers='average', momentum=.5, decay=0.):
    """Collins et al. 2021: the head alone over the batches of `heads`[round, client], then the body alone over rounds[r][i]; the body is sent. Scored: newest body and own head.
    Momentum is .5 in the authors' code whatever is asked for, each half with a buffer of its own (one optimiser for both, and an entry that is frozen stands still, as with PyTorch 2). Merge: `uniform` (the paper, and the code for CIFAR) or by n_i (the code for LEAF).
    `tuning`: client -> batches: after the last round all clients train their heads on them, and nothing is sent; that is what the last round's `personal` then holds.
    Read so: a client never drawn has w0's head (in the code its head is an alias of the mean of all heads); decay reaches weights and biases alike; statistics move in the head's phase too, and are averaged with the body."""
    w0,clients = begin(w0, clients)
    rate = lr if lr_head is None else lr_head
    def local(r, i, w, bs):
        w = fit(w, clients[i], heads[r,i], rate, head_keys(w), momentum, decay)
        return fit(w, clients[i], bs, lr, [k for k in trained(w) if k not in head_keys(w)], momentum, decay)
    out = partly(w0, clients, rounds, body_of(w0, buffers), local, uniform)
    if tuning: out[-1]['personal'] = {i: fit(w, clients[i], tuning.get(i, []), rate, head_keys(w), momentum, decay) for i,w in out[-1]['personal'].items()}
    return out

def oracle_fedbn(w0, clients, rounds, lr, own=None, uniform=True, momentum=0., decay=0.):
    """Li et al. 2021: everything of a BatchNorm, statistics and counter too, stays with the client, the rest is sent and averaged, uniformly as in the authors' code (`uniform`=False: by n_i). Scored: newest shared entries and own BatchNorm, after the merge.
    `own`: the entries that stay (five of the nine; for a LayerNorm network, its weights and biases). Read so: clients begin with w0's; one that stays away keeps its own."""
    w0,clients = begin(w0, clients)
    own = list(w0)[2:7] if own is None else own
    return partly(w0, clients, rounds, [k for k in w0 if k not in own], lambda r,i,w,bs: fit(w, clients[i], bs, lr, momentum=momentum, decay=decay), uniform)

# ---- DisTrans

def distrans_logits(w, x, a=.2):
    "Logits of weights with the offset t as fifth entry: the features of (1-a)x+at and of (1+a)x-at side by side, and one linear layer [C, 2d]"
    t = list(w.values())[4]
    return head(w, torch.cat([features(w, (1-a)*x + a*t), features(w, (1+a)*x - a*t)], 1))

def oracle_distrans(w0, clients, rounds, lr, offsets, lr_offset=1e-3, a=.2, heads=None, uniform=True):
    """Yuan et al. 2022: each client has an offset t (`offsets`: client -> its first t, as long as x); each step moves the model with rate lr and t with rate `lr_offset`, both by the gradient of one backward pass; the model is averaged, t never leaves. Plain SGD.
    Scored: newest model and own t, as entry 'offset'. `heads`: client -> its own (weight, bias) in round 0, which the authors' code draws client by client; w0's without it.
    Read so: the merge is uniform as in the code; a late joiner starts from W and not from its own head; t is not clipped and nothing is renewed between rounds."""
    W,clients = setup(w0, clients)
    t,out = {i: offsets[i].double() for i in range(len(clients))},[]
    for r,drawn in enumerate(rounds):
        ws = {}
        for i,bs in drawn.items():
            (X,y),w = clients[i],{**W, 'offset': t[i]}
            if heads and r==0: w.update(zip(head_keys(W), (h.double() for h in heads[i])))
            for b in bs:
                v = {k: p.detach().requires_grad_() for k,p in w.items()}
                g = dict(zip(v, torch.autograd.grad(ce(distrans_logits(v, X[b], a), y[b]), list(v.values()))))
                w = {k: w[k] - (lr_offset if k=='offset' else lr)*g[k] for k in w}
            t[i],ws[i] = w['offset'],part(w, W)
        W = mean(list(ws.values()), [1 if uniform else len(clients[i][1]) for i in drawn])
        out.append(dict(w=W, messages={i: dict(w=w) for i,w in ws.items()}, personal={i: {**W, 'offset': t[i]} for i in t}, **whole(W, drawn)))
    return out

# ---- APFL

def mixed(v, w, alpha): return {k: alpha*v[k] + (1-alpha)*w[k] for k in w}
def inner(a, b): return sum((a[k]*b[k]).sum() for k in a).item()

def slopes(loss, *ws):
    "Gradients of loss(*ws) in each of the dicts `ws`"
    vs = [{k: t.detach().clone().requires_grad_() for k,t in w.items()} for w in ws]
    g = iter(torch.autograd.grad(loss(*vs), [t for v in vs for t in v.values()]))
    return [{k: next(g) for k in v} for v in vs]

def apfl_step(w, v, alpha, x, y, lr, adapt=False, variant='paper', net=logits):
    "One step on a batch: the new w, v and α"
    [g] = slopes(lambda w: ce(net(w, x), y), w)
    new = {k: w[k] - lr*g[k] for k in w}
    if variant=='released':
        gv,gw = slopes(lambda v,w: ce(alpha*net(v, x) + (1-alpha)*net(w, x), y), v, new)
        v = {k: v[k] - lr*gv[k] for k in v}
        slope = inner(minus(v, new), mixed(gv, gw, alpha)) + .02*alpha
    else:
        [gbar] = slopes(lambda u: ce(net(u, x), y), mixed(v, w, alpha))
        slope = inner(minus(v, w), gbar)
        v = {k: v[k] - lr*alpha*gbar[k] for k in v}
    return new,v,min(1., max(0., alpha - lr*slope)) if adapt else alpha

def oracle_apfl(w0, clients, rounds, lr, alpha=.5, adaptive=False, variant='paper', uniform=True):
    """Deng et al. 2020: w (received) and the client's own v take one step each per batch, plain SGD, the same rate; v's on the mixture αv + (1-α)w; only w is sent.
    paper: the mixture is of weights, with w from before its step: v ← v - η α ∇f(v̄), and α ← α - η⟨v-w, ∇f(v̄)⟩. released: w is stepped first, LOGITS are mixed, and α ← α - η(⟨v-w, α g_v + (1-α) g_w⟩ + .02α) with v, w after their steps, g_v and g_w the gradients of the mixed loss.
    Scored: αv + (1-α)W in weights, W the newest (`state`: client -> v, its own just-trained w and α, for the score of the code, which mixes logits of these).
    Read so: α, clipped to [0, 1], moves in the first step of a round only (the code's choice; not by default), with v and w from before that step in the paper's variant (so not at all in a client's round 0, where v = w), and its rate is lr; v begins as w0; v and α persist; the merge is uniform as in the code; no decay."""
    W,clients = setup(w0, clients)
    state,out = {i: dict(v=W, w=W, alpha=alpha) for i in range(len(clients))},[]
    for drawn in rounds:
        for i,bs in drawn.items():
            (X,y),w,v,a = clients[i],W,state[i]['v'],state[i]['alpha']
            for n,b in enumerate(bs): w,v,a = apfl_step(w, v, a, X[b], y[b], lr, adaptive and n==0, variant)
            state = {**state, i: dict(v=v, w=w, alpha=a)}
        sent = {i: state[i]['w'] for i in drawn}
        W = mean(list(sent.values()), [1 if uniform else len(clients[i][1]) for i in drawn])
        out.append(dict(w=W, messages={i: dict(w=w) for i,w in sent.items()}, personal={i: mixed(s['v'], W, s['alpha']) for i,s in state.items()}, state=state, **whole(W, drawn)))
    return out

# ---- HeteroFL, FedRolex

def leading(rate, d, r): return list(range(ceil(rate*d)))

def rolling(rate, d, r, variant='paper'):
    "The window of round r: from index r on (paper), or from -r on (released), around the end"
    return [((r if variant=='paper' else -r) + j)%d for j in range(ceil(rate*d))]

def cut_out(w, at):
    "The sub-model with the hidden units `at`: their rows of the first layer and of the BatchNorm, their columns of the head, the whole bias of it"
    *hidden,H,h = w
    return {**{k: w[k][at] for k in hidden}, H: w[H][:,at], h: w[h]}

def put_back(W, at, w, C):
    "A sub-model at its places in the whole, and 1 where it counts: head rows of the classes `C` only"
    values,owned = ({k: torch.zeros_like(t) for k,t in W.items()} for _ in range(2))
    *hidden,H,h = W
    for k in hidden: values[k][at],owned[k][at] = w[k],1.
    for c in C:
        values[H][c,at],owned[H][c,at] = w[H][c],1.
        values[h][c],owned[h][c] = w[h][c],1.
    return values,owned

def owners_mean(W, sent):
    "Entry by entry the uniform mean over those who own it, and the old value where nobody does"
    n = {k: sum(o[k] for _,o in sent) for k in W}
    return {k: torch.where(n[k]>0, sum(v[k] for v,_ in sent)/n[k].clamp(min=1), W[k]) for k in W}

def masked(z, C):
    "Logits, 0 for the classes that are not among `C`"
    keep = torch.zeros(z.shape[1], dtype=z.dtype); keep[list(C)] = 1
    return z*keep

def only_rows(w, C):
    "Weights whose head has zeros for the classes that are not among `C`"
    H,h = head_keys(w)
    keep = torch.zeros_like(w[h]); keep[list(C)] = 1
    return {**w, H: w[H]*keep[:,None], h: w[h]*keep}

def with_statistics(w):
    "Six entries made nine, with the statistics of a fresh BatchNorm, which training does not use; four stay four"
    ks,n = list(w),len(list(w.values())[1])
    return {**part(w, ks[:4]), 'mean': torch.zeros(n), 'var': torch.ones(n), 'count': torch.tensor(0), **part(w, ks[4:])} if len(w)==6 else w

def static(W, data, batches):
    "The nine entries with statistics from one pass over `batches` of all data: cumulative means of batch means and unbiased batch variances"
    X = torch.cat([x for x,_ in data])
    F,f,*_ = W.values()
    zs = [X[b] @ F.T + f for b in batches]
    m,v = (sum(s)/len(zs) for s in ([z.mean(0) for z in zs], [z.var(0) for z in zs]))
    ks = list(W)
    return {**part(W, ks[:4]), 'bn.running_mean': m, 'bn.running_var': v, 'bn.num_batches_tracked': torch.tensor(len(zs)), **part(W, ks[4:])}

def oracle_heterofl(w0, clients, rounds, lr, rates, pick=leading, scale=True, clip=1., statistics=None, momentum=.9, decay=5e-4):
    """Diao et al. 2021: client i trains the sub-model of ⌈`rates`[round, i]·d⌉ hidden units, the leading ones, with the logits of classes that it lacks set to 0 (not -∞), its gradient cut to the norm `clip` (None: not), then fresh momentum and decay.
    Merge: per entry the uniform mean over its owners; a head row counts only for clients that hold the class; an entry without an owner keeps its value. Scored: the whole server model with the client's class mask (zero rows and biases of the head are the same, and so `personal` holds).
    `w0` has four entries, or six (a BatchNorm's weight and bias after the first two) for a network whose BatchNorm has no running statistics; `statistics`: round -> batches of all clients' data, one after the other, for the statistics of the scored model (nine entries) then.
    Read so: `scale` divides what goes into the BatchNorm by the rate, in training only; without a BatchNorm nothing is divided; classes of a client are those in its data; down and up go the whole sub-model, with the rows of classes that it lacks.
    `pick`(rate, d, round) gives the hidden units, so that FedRolex is another pick."""
    W,clients = setup(w0, clients)
    d,own,out = len(list(W.values())[1]),{i: sorted(set(y.tolist())) for i,(_,y) in enumerate(clients)},[]
    for r,drawn in enumerate(rounds):
        msgs,sent,units = {},[],{}
        for i,bs in drawn.items():
            at = units[i] = pick(rates[r,i], d, r)
            w = fit(with_statistics(cut_out(W, at)), clients[i], bs, lr, momentum=momentum, decay=decay, clip=clip, loss=lambda z,y: ce(masked(z, own[i]), y), scale=rates[r,i] if scale else 1.)
            msgs[i] = part(w, W)
            sent.append(put_back(W, at, msgs[i], own[i]))
        W = owners_mean(W, sent)
        whole_model = static(W, clients, statistics[r]) if statistics else W
        size = {i: numbers(m) for i,m in msgs.items()}
        out.append(dict(w=W, messages={i: dict(w=m) for i,m in msgs.items()}, units=units, classes=own, personal={i: only_rows(whole_model, own[i]) for i in own}, down_numbers=size, up_numbers=size))
    return out

def oracle_fedrolex(w0, clients, rounds, lr, rates, variant='paper', scale=True, clip=1., statistics=None, momentum=.9, decay=1e-3):
    """Alam et al. 2022: HeteroFL with a window of hidden units that moves by one each round, the same for all clients of a round; forwards from `r` (paper), or backwards from -r (released), around the end.
    Read so: the merge is HeteroFL's uniform one (the code's depends on the order of the clients, for all but convolutions); statistics as in HeteroFL (the code takes those of each test batch); rates down and milestones are left out."""
    return oracle_heterofl(w0, clients, rounds, lr, rates, lambda rate,d,r: rolling(rate, d, r, variant), scale, clip, statistics, momentum, decay)

# ---- Fed-LAMB

def lamb_step(p, g, m, v, lr, top=None, decay=.01, t=None, guarded=False, betas=(.9, .999), eps=1e-8):
    "New p, m and v of one tensor: d = √v + ε, or √top + ε; u = m/d + λp; p - η φ(‖p‖)/‖u‖ u with φ the identity, and φ(0) = 1 if `guarded`; with t = 1, 2, … m and v are corrected for their start"
    m,v = betas[0]*m + (1-betas[0])*g,betas[1]*v + (1-betas[1])*g**2
    if t is not None: m,v = m/(1-betas[0]**t),v/(1-betas[1]**t)
    u = m/((v if top is None else top).sqrt() + eps) + decay*p
    size = p.norm() if p.norm()>0 or not guarded else torch.ones_like(p.norm())
    return (p - lr*size/u.norm()*u if u.norm()>0 else p),m,v

def oracle_fedlamb(w0, clients, rounds, lr, decay=.01, variant='released', guarded=False):
    """Karimi, Li & Li 2023 (the author's earlier code and paper source): per tensor a LAMB step, w = uniform mean, v̂ ← max(v̂, uniform mean of v); m and v stay with the client from round to round; m, v and v̂ begin at 1e-8. Down: w and v̂; up: w and v. The server's model is scored.
    released: no correction; the denominator is the client's own √v in the server's round 0 (for a late joiner no longer), and √v̂ fixed for the round afterwards. paper: √v̂ in every round, m/(1-β₁^t) and v/(1-β₂^t) written back at every step (read word for word: v then grows a thousandfold with every round).
    Read so: t counts steps of the round; a zero tensor never moves unless `guarded`, and none moves where u = 0; every client has m and v of its own (the code has them share one by mistake)."""
    W,clients = setup(w0, clients)
    tiny = {k: torch.full_like(t, 1e-8) for k,t in W.items()}
    top,mv,out = tiny,dict.fromkeys(range(len(clients)), (tiny, tiny)),[]
    for r,drawn in enumerate(rounds):
        ws = {}
        for i,bs in drawn.items():
            (X,y),w,(m,v) = clients[i],W,mv[i]
            for n,b in enumerate(bs):
                [g] = slopes(lambda u: plain(u, X[b], y[b]), w)
                step = {k: lamb_step(w[k], g[k], m[k], v[k], lr, None if variant=='released' and r==0 else top[k], decay, n+1 if variant=='paper' else None, guarded) for k in w}
                w,m,v = ({k: s[j] for k,s in step.items()} for j in range(3))
            ws[i],mv = w,{**mv, i: (m, v)}
        W,v = mean(list(ws.values()), [1]*len(drawn)),mean([mv[i][1] for i in drawn], [1]*len(drawn))
        top = {k: torch.maximum(top[k], v[k]) for k in W}
        traffic = {i: 2*numbers(W) for i in drawn}
        out.append(dict(w=W, top=top, messages={i: dict(w=w, v=mv[i][1]) for i,w in ws.items()}, personal={i: W for i in mv}, moments=mv, down_numbers=traffic, up_numbers=traffic))
    return out

# ---- PartialFed

def oracle_partialfed(w0, clients, rounds, lr, own=None, momentum=0., decay=0.):
    """Sun et al. 2021, Fix: the entries `own` are never loaded, all are sent, and FedAvg by n_i merges all. Scored: newest server model and own entries.
    Read so: BatchNorm (with statistics) and head are the own entries; only the others are counted as received, all as sent."""
    w0,clients = begin(w0, clients)
    own = (list(w0)[2:7] if normed(w0) else []) + head_keys(w0) if own is None else own
    return partly(w0, clients, rounds, [k for k in w0 if k not in own], lambda r,i,w,bs: fit(w, clients[i], bs, lr, momentum=momentum, decay=decay), False, sends=list(w0))

def choose(pi, G, own, layers):
    "Layer by layer the server's entries or the client's, whichever has the larger logit (the server's if equal)"
    return {k: (G if pi[t,0]>=pi[t,1] else own)[k] for t,keys in enumerate(layers) for k in keys}

def oracle_partialfed_adaptive(w0, clients, rounds, lr, layers, strategy, gumbels, lr_pi=.1, tau=1., momentum=0., decay=0.):
    """Sun et al. 2021, Adaptive, in the reading of this book: per client and layer two logits π (0 at first; server, own). A drawn client first learns π: per batch of `strategy`[round, client], with noise `gumbels`[round, client][n] of shape [layers, 2], weights = own + s (server - own),
    s the first of softmax((π + noise)/τ), plain SGD on π; then it begins with the server's layers where π says so and its own elsewhere, trains, sends all; merge by n_i. π persists.
    `layers`: the entries of each (all entries, each once). Scored: the newest server model where π of the last pass says so, own layers elsewhere; equal logits take the server's.
    Read so: where both models are equal (a client's first round 0) π gets no gradient at all; another way to write the mixture may leave round-off there, and then the choice is noise. Down and up: the whole model."""
    W,clients = setup(w0, clients)
    N = range(len(clients))
    own,pi,out = dict.fromkeys(N, W),dict.fromkeys(N, torch.zeros(len(layers), 2, dtype=torch.float64)),[]
    for r,drawn in enumerate(rounds):
        for i,bs in drawn.items():
            (X,y) = clients[i]
            for b,noise in zip(strategy[r,i], gumbels[r,i]):
                p = pi[i].clone().requires_grad_()
                s = ((p+noise)/tau).softmax(1)[:,0]
                w = {k: own[i][k] + s[t]*(W[k]-own[i][k]) for t,keys in enumerate(layers) for k in keys}
                pi = {**pi, i: pi[i] - lr_pi*torch.autograd.grad(plain(part(w, W), X[b], y[b]), p)[0]}
            own = {**own, i: sgd(part(choose(pi[i], W, own[i], layers), W), plain, clients[i], bs, lr, momentum, decay)}
        W = mean([own[i] for i in drawn], [len(clients[i][1]) for i in drawn])
        out.append(dict(w=W, messages={i: dict(w=own[i]) for i in drawn}, pi=pi, personal={i: part(choose(pi[i], W, own[i], layers), W) for i in N}, **whole(W, drawn)))
    return out

# ---- CD²-pFed

def cyclic(a, b):
    "½ [KL(a ‖ b) + KL(b ‖ a)] of two logits, mean over samples"
    p,q = a.log_softmax(1),b.log_softmax(1)
    return .5*((p.exp()*(p-q)).sum(1) + (q.exp()*(q-p)).sum(1)).mean()

def private(p, r, R, d):
    "How many of d channels are private in round r of R: ⌊p r/(R-1) d⌋"
    return int(p*r*d/(R-1)) if R>1 else 0

def oracle_cd2pfed(w0, clients, rounds, lr, p=.5, weight=1., momentum=0., decay=0.):
    """Shen et al. 2022, in the reading of this book: the last m = ⌊p r/(R-1) d⌋ hidden units are private in round r of R (their rows and bias of the first layer, their columns of the head); the others and the head's bias come from the server, are sent, and are averaged by n_i.
    Loss = CE(ŷ) + `weight`·½[KL(ŷˢ‖ŷˡ)+KL(ŷˡ‖ŷˢ)], ŷˢ and ŷˡ with the private and the shared units set to 0, the head's bias in both, temperature 1, gradients through both. Scored: newest shared part and own private one, split as in the round just over.
    Read so: without private (or without shared) units there is no second prediction and no such term, so p = 0 is FedAvg; a unit that turns private goes on from what the client had after its last training (w0's before); one round alone has r/(R-1) = 0; no averaging in time (β = 1); w keeps the value of a unit from its last merge.
    Messages hold the shared entries: rows, bias and columns of the first d-m units, and the head's bias."""
    W,clients = setup(w0, clients)
    A,a,H,h = W
    d,N = len(W[a]),range(len(clients))
    own,out = dict.fromkeys(N, W),[]
    def shared(w, n): return {A: w[A][:n], a: w[a][:n], H: w[H][:,:n], h: w[h]}
    def joined(s, w, n): return {A: torch.cat([s[A], w[A][n:]]), a: torch.cat([s[a], w[a][n:]]), H: torch.cat([s[H], w[H][:,n:]], 1), h: s[h]}
    for r,drawn in enumerate(rounds):
        n = d-private(p, r, len(rounds), d)
        first = (torch.arange(d)<n).double()
        def loss(w, x, y):
            f = features(w, x)
            return ce(head(w, f), y) + (weight*cyclic(head(w, f*first), head(w, f*(1-first))) if 0 < n < d else 0)
        own = {**own, **{i: sgd(joined(shared(W, n), own[i], n), loss, clients[i], bs, lr, momentum, decay) for i,bs in drawn.items()}}
        msgs = {i: shared(own[i], n) for i in drawn}
        W = joined(mean(list(msgs.values()), [len(clients[i][1]) for i in drawn]), W, n)
        size = {i: numbers(m) for i,m in msgs.items()}
        out.append(dict(w=W, private=d-n, messages={i: dict(w=m) for i,m in msgs.items()}, personal={i: joined(shared(W, n), own[i], n) for i in N}, down_numbers=size, up_numbers=size))
    return out

# ---- FedFA

def ffa(x, V_mu, V_sigma, eps_mu, eps_sigma):
    "The layer on maps x [B,d,H,W] with the noises [B,d]; also the batch's mean of μ and of σ per channel"
    mu,sigma = x.mean((2, 3)),(x.var((2, 3)) + 1e-6).sqrt()
    def spread(s, V):
        r = 1/(1+1/(V+1e-6))
        return ((1 + len(r)*r/r.sum())*(s.var(0)+1e-6)).sqrt()
    new_mu,new_sigma = mu + eps_mu*spread(mu, V_mu),sigma + eps_sigma*spread(sigma, V_sigma)
    def at(t): return t[:,:,None,None]
    return (x-at(mu))/at(sigma)*at(new_sigma) + at(new_mu),mu.detach().mean(0),sigma.detach().mean(0)

def between(ms, variant):
    "Variance of the clients' running means: one over clients and channels together (released), or one per channel (paper); unbiased"
    ms = torch.stack(ms)
    return torch.full_like(ms[0], ms.var()) if variant=='released' else ms.var(0)

def maps(w, x):
    "A 1×1 convolution (weight [d,k]) and a relu on x [B,k,H,W]"
    W,b = list(w.values())[:2]
    return (torch.einsum('dk,bkhw->bdhw', W, x) + b[:,None,None]).clamp(min=0)

def fedfa_logits(w, x): return head(w, maps(w, x).mean((2, 3)))

def oracle_fedfa(w0, clients, rounds, lr, noise, variant='released', uniform=True, momentum=0., decay=0.):
    """Zhou & Konukoglu 2023 on the network maps → FFA (in training) → mean over the map → head; clients have maps X [n,k,H,W], the four entries are [d,k], [d], [C,d], [C]. `noise`[round, client]: per batch (ε_μ, ε_σ) of shape [B,d], or None where the layer passes x on (u > p).
    Running means of μ and σ (from 0 and 1; factor .99, applied passes only) are averaged like weights; the server gives V_μ, V_σ (1 at first), the variances between the clients' running means; the received running means are where a client's go on. The server's model is scored, with no layer.
    released: V is one number, so γ = 1 always; paper: one per channel. Read so: a round with one client leaves V (its variance is undefined); a client's momentum goes on from round to round, as in the code; the merge is uniform; V goes down and up with the running means (4d numbers beside the model)."""
    W,clients = setup(w0, clients)
    d = len(list(W.values())[1])
    ones = torch.ones(d, dtype=torch.float64)
    S,V,bufs,out = dict(mu=0*ones, sigma=ones),dict(mu=ones, sigma=ones),{},[]
    for r,drawn in enumerate(rounds):
        msgs = {}
        for i,bs in drawn.items():
            (X,y),w,s,buf = clients[i],W,dict(S),bufs.setdefault(i, {})
            for b,e in zip(bs, noise[r,i]):
                def loss(v):
                    f = maps(v, X[b])
                    if e is not None:
                        f,m,t = ffa(f, V['mu'], V['sigma'], *e)
                        s.update(mu=.99*s['mu']+.01*m, sigma=.99*s['sigma']+.01*t)
                    return ce(head(v, f.mean((2, 3))), y[b])
                [g] = slopes(loss, w)
                for k in w: buf[k] = momentum*buf.get(k, 0) + g[k] + decay*w[k]
                w = {k: w[k] - lr*buf[k] for k in w}
            msgs[i] = dict(w=w, **s)
        ns = [1 if uniform else len(clients[i][1]) for i in drawn]
        W = mean([m['w'] for m in msgs.values()], ns)
        S = mean([part(m, S) for m in msgs.values()], ns)
        if len(drawn)>1: V = {k: between([m[k] for m in msgs.values()], variant) for k in V}
        size = {i: numbers(W)+4*d for i in drawn}
        out.append(dict(w=W, S=S, V=V, messages=msgs, personal={i: W for i in range(len(clients))}, down_numbers=size, up_numbers=size))
    return out

# ---- FedFed

def vae_kl(mu, logvar, values):
    "-½ Σ(1+ℓ-μ²-e^ℓ) per sample and per number of the image"
    return -.5*(1+logvar-mu**2-logvar.exp()).sum()/len(mu)/values

def distilling_loss(mse, ce_shared, ce_plain, kl, scarce=False, lopsided=False):
    "Step (c) of a client's turn in stage 1: 50·MSE + 2·CE(shared) + .005·KL + .4·CE(x); a client with little data has 5·MSE and ½·KL, else one with mostly one class 5·CE, 5·KL"
    re,c,k = (5, 1, .5) if scarce else (1, 5, 5) if lopsided else (1, 1, 1)
    return 50*re*mse + 2*c*ce_shared + .005*k*kl + .4*c*ce_plain

def shared_part(x, rebuilt, noise): return x - rebuilt + noise

def oracle_fedfed(w0, clients, rounds, lr, pool, picks, momentum=.9, decay=1e-4, uniform=True):
    """Yang et al. 2023, stage 2 only: FedAvg of a fresh classifier, each step on the cross-entropy over a client's own batch and one from each of the two noisy copies of the shared part (`pool`: (X1, y1, X2, y2); `picks`[round, client]: per step the indices into the first and into the second), mean over all samples together.
    The merge is uniform (the code weighs by test sizes, all equal), the client's momentum goes on from round to round, and the server's model is scored. Read so: decay on all entries; traffic is the classifier's (the pool goes once, before: every client sends two copies, and gets all of them)."""
    W,clients = setup(w0, clients)
    X1,y1,X2,y2 = (t.double() if t.is_floating_point() else t for t in pool)
    bufs,out = {},[]
    for r,drawn in enumerate(rounds):
        ws = {}
        for i,bs in drawn.items():
            (X,y),w,buf = clients[i],W,bufs.setdefault(i, {})
            for b,(j,k) in zip(bs, picks[r,i]):
                [g] = slopes(lambda v: plain(v, torch.cat([X[b], X1[j], X2[k]]), torch.cat([y[b], y1[j], y2[k]])), w)
                for n in w: buf[n] = momentum*buf.get(n, 0) + g[n] + decay*w[n]
                w = {n: w[n] - lr*buf[n] for n in w}
            ws[i] = w
        W = mean(list(ws.values()), [1 if uniform else len(clients[i][1]) for i in drawn])
        out.append(dict(w=W, messages={i: dict(w=w) for i,w in ws.items()}, personal={i: W for i in range(len(clients))}, **whole(W, drawn)))
    return out
