"""The FedRef paper, its rivals, losses and scores, written a second time from the papers and from how their authors' code behaves, and without fedbook. The interface is that of oracles.py.
All methods here merge into one server's model, which `personal` gives to every client, drawn or not; and `loss`(w, x, y) may replace the mean cross-entropy of oracles.py's network, then weights and data may be any."""
from itertools import count
from math import ceil, sqrt
import torch
from oracles import averaging, grad, logits, mean, minus, numbers, plain, setup, sgd, squared_distance

def zeros(w): return {k: torch.zeros_like(t, dtype=torch.float64) for k,t in w.items()}

# ---- FedRef

def fedref(w0, clients, rounds, lr, step, loss, momentum, decay, batch):
    "FedAvg's rounds whose clients also send a cost, and whose server goes on to step(A, costs) from the aggregate A"
    cost,turn = {},count()
    def local(w, x, y, W, r, i):
        value = loss(w, x, y); cost[r,i] = value.item()
        return value
    def merge(W, ws, ns, drawn):
        r = next(turn)
        return step(mean(ws, [ceil(n/batch) for n in ns]), [cost[r,i] for i in drawn])
    out = averaging(w0, clients, rounds, lr, local, momentum, decay, merge)
    for r,o in enumerate(out):
        o['messages'] = {i: dict(**m, loss=cost[r,i]) for i,m in o['messages'].items()}
        o['up_numbers'] = {i: n+1 for i,n in o['up_numbers'].items()}
    return out

def towards(A, goal, rate):
    "One step of gradient descent on ‖A-goal‖², the goal a constant"
    return {k: A[k] - 2*rate*(A[k]-goal[k]) for k in A}

def oracle_fedref_printed(w0, clients, rounds, lr, eta, lam, loss=plain, momentum=0., decay=0., batch=1):
    """Eq. 14 as printed: the costs are constants and (θ²_r-θ²_{r-1})² does not hold θ¹, so one step gives W = A - 2ηλ (A-A_prev); the reference does nothing.
    Clients train plainly (Algorithm 5, lines 1-7: no proximal term) and send weights and one cost, that of their last batch before its step.
    Read so: A_prev is the last round's aggregate, not what the server made of it; W = A in round 0, where there is none (w0 is not an aggregate); the 1/p that Eq. 15 would let through is left out;
    the cost is sent, and counted, though nothing depends on it (Table II); weights of the merge are ⌈n_i/`batch`⌉ (the authors' code counts batches; batch=1: n_i, as in Eq. 1)."""
    past = []
    def step(A, costs):
        past.append(A)
        return towards(A, past[-2:][0], eta*lam)
    return fedref(w0, clients, rounds, lr, step, loss, momentum, decay, batch)

def oracle_fedref_intended(w0, clients, rounds, lr, eta, lam, p=3, history='aggregates', current=True, loss=plain, momentum=0., decay=0., batch=1):
    """Proximal to the reference, as the text means it: W = A - 2ηλ (A-R), R the uniform mean of the last p models (Eq. 16). Clients, costs and weights as in oracle_fedref_printed.
    Read so: R holds aggregates (Algorithm 5, line 13) and the newest, A, is one of the p (Eq. 16: i = 1 … p; line 13 would take p+1); while there are fewer than p, it is the mean of those there are, so W = A in round 0; w0 is never one; R is a constant of the step.
    `history`: 'aggregates', or 'outputs' for the models that the server sent; `current`: whether A itself is one of the p, else round 0 has no reference and W = A."""
    past = []
    def step(A, costs):
        known = (past + [A] if current else past)[-p:]
        W = towards(A, mean(known, [1]*len(known)) if known else A, eta*lam)
        past.append(dict(aggregates=A, outputs=W)[history])
        return W
    return fedref(w0, clients, rounds, lr, step, loss, momentum, decay, batch)

def released_scalar(now, before, lam1, lam2, rows=True):
    "The number that the released step takes from every weight of a tensor; `now` and `before` are (mean cost, A, R) of one tensor, `rows`: with the sum over the first axis of the former R, as coded"
    (F,A,R),(f,a,r) = now,before
    return torch.nan_to_num(F-f + lam1*(A-a).norm() + lam2*(R-(r.sum(0) if rows else r)).norm())

def released_lambda2(t, lam2=1e-6, cap=.005):
    "λ2 in round t = 1, 2, …: ten times as much from every tenth round on, and never above `cap`"
    return min(lam2*10**(t//10), cap)

def oracle_fedref_released(w0, clients, rounds, lr, eta=1e-6, lam1=1e-3, lam2=1e-6, p=3, rows=True, loss=plain, momentum=0., decay=0., batch=1):
    """The released code: round t (from 1) puts A_t into slot t mod p; R_t = Σ_s (s+1) A_s/Σ(s+1) over the slots s = 0 … p-1, whatever their age. Rounds 1 … p+1 are FedAvg's; from p+2 on every weight of a tensor loses
    η [mean F(t) - mean F(t-1) + λ1 ‖A(t)-A(t-1)‖ + λ2 ‖R(t)-R(t-1)‖], one number per tensor, with aggregates from before the step, F the uniform mean of the clients' costs, R(t-1) summed over its first axis before it is subtracted (`rows`), NaN and inf of the bracket as in nan_to_num.
    Clients: plain SGD; the cost is that of the last batch of the last epoch, before its step.
    Read so: A_t is in its slot before R_t is taken; slot s weighs s+1 (not its age); `lam2` may be a function of t (released_lambda2 is the hidden schedule); the paper's loss is asl_released, given as `loss`; weights ⌈n_i/`batch`⌉ as the code has (batch=1: n_i)."""
    slots,seen,turn = [None]*p,[],count(1)
    def step(A, costs):
        t = next(turn)
        slots[t%p] = A
        if t<=p: return A
        seen.append((sum(costs)/len(costs), A, mean(slots, range(1, p+1))))
        if len(seen)==1: return A
        of = lambda k: [(F, A[k], R[k]) for F,A,R in seen[:-3:-1]]
        return {k: A[k] - eta*released_scalar(*of(k), lam1, lam2(t) if callable(lam2) else lam2, rows) for k in A}
    return fedref(w0, clients, rounds, lr, step, loss, momentum, decay, batch)

# ---- optimisers on the server

def fedavgm_step(W, target, v, eta, beta):
    "v ← βv + (W-target), W ← W - ηv"
    v = {k: beta*v[k] + W[k]-target[k] for k in W}
    return {k: W[k] - eta*v[k] for k in W},v

def adaptive_step(kind, W, target, m, v, t, eta, beta1, beta2, tau, flower=False):
    "Algorithm 2 of Reddi et al. in round t = 1, 2, …; `flower`: its FedAdam multiplies η by √(1-β2^(t+1))/(1-β1^(t+1)), the others have nothing of the kind"
    D = minus(target, W)
    m = {k: beta1*m[k] + (1-beta1)*D[k] for k in W}
    v = {k: dict(adagrad=v[k]+D[k]**2, adam=beta2*v[k]+(1-beta2)*D[k]**2, yogi=v[k]-(1-beta2)*D[k]**2*torch.sign(v[k]-D[k]**2))[kind] for k in W}
    if kind=='adam' and flower: eta *= sqrt(1-beta2**(t+1))/(1-beta1**(t+1))
    return {k: W[k] + eta*m[k]/(v[k].sqrt()+tau) for k in W},m,v

def on_server(w0, clients, rounds, lr, step, uniform, loss, momentum, decay):
    "FedAvg's rounds with W ← step(W, mean of the weights); `uniform`: every client drawn counts alike"
    return averaging(w0, clients, rounds, lr, lambda w,x,y,W,r,i: loss(w, x, y), momentum, decay,
                     lambda W,ws,ns,drawn: step(W, mean(ws, [1]*len(ws) if uniform else ns)))

def oracle_fedavgm(w0, clients, rounds, lr, eta=1., beta=.9, uniform=False, loss=plain, momentum=0., decay=0.):
    "Hsu et al. 2019: v ← βv + (W-W̄) from v = 0, W ← W - ηv, W̄ weighted by n_i. Read so: no Nesterov step; the first v is W-W̄ undamped (no factor 1-β)."
    v = zeros(w0)
    def step(W, target):
        nonlocal v
        W,v = fedavgm_step(W, target, v, eta, beta)
        return W
    return on_server(w0, clients, rounds, lr, step, uniform, loss, momentum, decay)

def fedopt(kind, w0, clients, rounds, lr, eta, beta1, beta2, tau, v0, flower, uniform, loss, momentum, decay):
    m,turn = zeros(w0),count(1)
    state = [m,{k: t + (tau**2 if v0 is None else v0) for k,t in m.items()}]
    def step(W, target):
        W,*state[:] = adaptive_step(kind, W, target, *state, next(turn), eta, beta1, beta2, tau, flower)
        return W
    return on_server(w0, clients, rounds, lr, step, uniform, loss, momentum, decay)

def oracle_fedadagrad(w0, clients, rounds, lr, eta=.1, tau=1e-3, beta1=0., v0=None, uniform=False, loss=plain, momentum=0., decay=0.):
    """Reddi et al. 2021, Algorithm 2: m = β1 m + (1-β1) Δ, v = v + Δ², W += η m/(√v+τ), Δ = W̄-W. Flower: v0=0 (and β1 is 0 there).
    Read so, for all three: v begins at `v0` = τ² (the paper asks for at least that); Δ is weighted by n_i as in Flower (`uniform`: Algorithm 1's plain mean); no bias correction; the divisions √(v+τ) and the corrections of 004's own Eq. 4-6 are misprints of this."""
    return fedopt('adagrad', w0, clients, rounds, lr, eta, beta1, 0., tau, v0, False, uniform, loss, momentum, decay)

def oracle_fedadam(w0, clients, rounds, lr, eta=.1, beta1=.9, beta2=.99, tau=1e-3, v0=None, flower=False, uniform=False, loss=plain, momentum=0., decay=0.):
    "As oracle_fedadagrad with v = β2 v + (1-β2) Δ². Flower: v0=0 and flower=True, whose correction has the exponent 2 in the first round."
    return fedopt('adam', w0, clients, rounds, lr, eta, beta1, beta2, tau, v0, flower, uniform, loss, momentum, decay)

def oracle_fedyogi(w0, clients, rounds, lr, eta=.01, beta1=.9, beta2=.99, tau=1e-3, v0=None, uniform=False, loss=plain, momentum=0., decay=0.):
    "As oracle_fedadagrad with v = v - (1-β2) Δ² sign(v-Δ²). Flower: v0=0."
    return fedopt('yogi', w0, clients, rounds, lr, eta, beta1, beta2, tau, v0, False, uniform, loss, momentum, decay)

# ---- SCAFFOLD, FedDyn

def scaffold_local(W, c, ci, data, batches, lr, option=2, decay=0., loss=plain):
    "A client's weights after its steps w -= lr (g - ci + c), and its next control variate"
    full = lambda w,b: {k: t + decay*w[k] for k,t in grad(lambda v: loss(v, data[0][b], data[1][b]), w).items()}
    w = W
    for b in batches:
        g = full(w, b)
        w = {k: w[k] - lr*(g[k]-ci[k]+c[k]) for k in w}
    return w,(full(W, slice(None)) if option==1 else {k: ci[k] - c[k] + (W[k]-w[k])/(len(batches)*lr) for k in w})

def scaffold_merge(W, c, dws, dcs, N, eta=1.):
    "W += η mean of the changes of weights, c += Σ changes of control variates/N"
    return {k: W[k] + eta*sum(d[k] for d in dws)/len(dws) for k in W},{k: c[k] + sum(d[k] for d in dcs)/N for k in c}

def oracle_scaffold(w0, clients, rounds, lr, eta=1., option=2, decay=0., loss=plain):
    """Karimireddy et al. 2020: steps w -= lr (g - c_i + c) from W; option 1: c_i⁺ is the mean gradient of all local samples at W; option 2: c_i - c + (W-w)/(K lr). A client sends w-W and c_i⁺-c_i; W += (η/|S|) Σ, c += (1/N) Σ.
    N counts all clients, those never drawn too; the n_i play no part; c = c_i = 0 at first, also for a client that joins late, which receives the c of that time. Each round's clients all see the c of its beginning.
    Read so: no momentum, which option 2 cannot undo; weight decay belongs to g, in option 1 too; option 1's extra pass is over all local samples at once. Down: W and c. Up: both changes.
    Beside `w`: 'c', the server's control variate, 'ci' every client's, and 'trained' the weights of those drawn."""
    W,clients = setup(w0, clients)
    c,N = zeros(W),len(clients)
    ci,out = dict.fromkeys(range(N), c),[]
    for drawn in rounds:
        got = {i: scaffold_local(W, c, ci[i], clients[i], bs, lr, option, decay, loss) for i,bs in drawn.items()}
        messages = {i: dict(dw=minus(w, W), dc=minus(new, ci[i])) for i,(w,new) in got.items()}
        W,c = scaffold_merge(W, c, [o['dw'] for o in messages.values()], [o['dc'] for o in messages.values()], N, eta)
        ci = {**ci, **{i: new for i,(_,new) in got.items()}}
        twice = dict.fromkeys(drawn, 2*numbers(W))
        out.append(dict(w=W, c=c, ci=ci, trained={i: w for i,(w,_) in got.items()}, messages=messages, personal=dict.fromkeys(range(N), W), down_numbers=twice, up_numbers=dict(twice)))
    return out

def feddyn_term(w, W, linear, alpha):
    "α/2 ‖w-W‖² - ⟨∇_i, w⟩"
    return alpha/2*squared_distance(w, W) - sum((linear[k]*w[k]).sum() for k in W)

def feddyn_merge(W, h, ws, N, alpha):
    "h -= (α/N) Σ (w_i-W), W = mean w_i - h/α"
    h = {k: h[k] - alpha/N*sum(w[k]-W[k] for w in ws) for k in W}
    return {k: sum(w[k] for w in ws)/len(ws) - h[k]/alpha for k in W},h

def oracle_feddyn(w0, clients, rounds, lr, alpha, loss=plain, momentum=0., decay=0.):
    """Acar et al. 2021: a client minimises F(w) - ⟨∇_i, w⟩ + α/2 ‖w-W‖² from W, then ∇_i -= α (w_i-W); h -= (α/N) Σ_S (w_i-W), W = mean_S w_i - h/α. Both begin at 0, for a late joiner too; a client that is not drawn keeps its ∇_i.
    N counts all clients; plain means (n_i plays no part), and one α for all (the authors' code has α n/(n_i N)).
    Read so: 'minimises' is the steps of SGD given; the norm is squared; no clipping; the model sent on, W with the -h/α, is the one scored (the authors report three). Appendix B of 004 prints other signs and ‖w‖², which do not agree with this.
    Traffic is FedAvg's: ∇_i stays with the client and h with the server. Beside `w`: 'h', and 'linear' every client's ∇_i."""
    W,clients = setup(w0, clients)
    h,N = zeros(W),len(clients)
    linear,out = dict.fromkeys(range(N), h),[]
    for drawn in rounds:
        ws = {i: sgd(W, lambda w,x,y: loss(w, x, y) + feddyn_term(w, W, linear[i], alpha), clients[i], bs, lr, momentum, decay) for i,bs in drawn.items()}
        linear = {**linear, **{i: {k: linear[i][k] - alpha*(w[k]-W[k]) for k in W} for i,w in ws.items()}}
        W,h = feddyn_merge(W, h, list(ws.values()), N, alpha)
        once = dict.fromkeys(drawn, numbers(W))
        out.append(dict(w=W, h=h, linear=linear, messages={i: dict(w=w) for i,w in ws.items()}, personal=dict.fromkeys(range(N), W), down_numbers=once, up_numbers=dict(once)))
    return out

# ---- losses: logits `z` are [B, C] or [B, C, ...], labels `y` [B] or [B, ...]

def one_hot(y, C): return torch.stack([(y==c).double() for c in range(C)], 1)

def asl(z, y, gamma_pos=1., gamma_neg=4., margin=.05):
    "Asymmetric loss for several labels at once: `y` holds 0 and 1 like `z`; summed over batch and classes, and the focusing weights carry no gradient"
    p = z.sigmoid()
    pm = (p-margin).clamp(min=0)
    return -(y*(1-p.detach())**gamma_pos*p.clamp(min=1e-8).log() + (1-y)*pm.detach()**gamma_neg*(1-pm).clamp(min=1e-8).log()).sum()

def asl_single(z, y, gamma_pos=0., gamma_neg=4., eps=.1):
    "ASLSingleLabel: targets (1-ε)·onehot + ε/C times log p_c, weighted (1-p)^γ+ for the true class and p^γ- for others; mean over the batch. Read so: the weights carry a gradient."
    logp,t = z.log_softmax(1),one_hot(y, z.shape[1])
    p = logp.exp()
    weight = torch.where(t>0, (1-p)**gamma_pos, p**gamma_neg)
    return -(((1-eps)*t + eps/z.shape[1])*weight*logp).sum(1).mean()

def asl_released(z, y):
    "The loss of 004's code: softmax clamped to [1e-6, 1-1e-6], mean over the batch of Σ_c [-y ln p - (1-y) p⁴ ln(1-p)]. Read so: p⁴ carries a gradient, a clamped p none."
    p,t = z.softmax(1).clamp(1e-6, 1-1e-6),one_hot(y, z.shape[1])
    return -(t*p.log() + (1-t)*p**4*(1-p).log()).sum(1).mean()

def released_loss(w, x, y):
    "asl_released of oracles.py's network, as `loss` for the methods above"
    return asl_released(logits(w, x), y)

def spatial(t): return tuple(range(2, t.dim()))

def monai_dice(p, t, include_background=True, batch=False, smooth=1e-5):
    "MONAI's DiceLoss of probabilities `p` and one-hot `t`: 1 - (2Σpt+s)/(Σp+Σt+s) per sample and class (per class with `batch`), then the mean"
    if not include_background: p,t = p[:,1:],t[:,1:]
    dims = (0, *spatial(p)) if batch else spatial(p)
    return (1 - (2*(p*t).sum(dims)+smooth)/(p.sum(dims)+t.sum(dims)+smooth)).mean()

def monai_focal(z, t, gamma=2., alpha=None, softmax=False):
    "MONAI's FocalLoss of logits and one-hot `t`, averaged over samples, classes and voxels: one sigmoid per class, or -(1-p)^γ t ln p with `softmax`, where α weighs 1-α for channel 0 and α for others"
    if softmax:
        logp = z.log_softmax(1)
        value = -(1-logp.exp())**gamma*logp*t
        if alpha is None: return value.mean()
        a = torch.full((z.shape[1],), alpha, dtype=z.dtype); a[0] = 1-alpha
        return (value*a.reshape(-1, *[1]*(z.dim()-2))).mean()
    p = torch.where(t>0, z, -z).sigmoid()
    return (-(1-p)**gamma*p.log()*(1 if alpha is None else alpha*t + (1-alpha)*(1-t))).mean()

def monai_dice_focal(z, t, gamma=2., lambda_dice=1., lambda_focal=1.):
    "DiceFocalLoss(softmax=True): Dice with softmax, but focal with the sigmoid, for the flag is not passed on"
    return lambda_dice*monai_dice(z.softmax(1), t) + lambda_focal*monai_focal(z, t, gamma)

def released_dice(z, y, smooth=1e-5, eps=1e-7):
    "Dice loss of 004's code: softmax, TP, FP and FN per class over batch and voxels, (TP+s)/(TP+½FP+½FN+s); a class that no label has adds 0 and counts in the mean"
    p,t = z.softmax(1),one_hot(y, z.shape[1])
    dims = (0, *spatial(p))
    TP,FP,FN = (p*t).sum(dims),(p*(1-t)).sum(dims),((1-p)*t).sum(dims)
    return ((1 - (TP+smooth)/(TP+FP/2+FN/2+smooth).clamp(min=eps))*(t.sum(dims)>0)).mean()

def released_focal(z, y, alpha=.1, gamma=4.5, eps=1e-7):
    "Focal loss of 004's code: per class one sigmoid against the rest, weights α and 1-α, divided by the sum of the focal terms and once more by the number of voxels; summed over classes. Read so: the divisor carries a gradient."
    total = 0.
    for c in range(z.shape[1]):
        t,x = (y==c).double(),z[:,c]
        p = torch.where(t>0, x, -x).sigmoid()
        focal = (1-p)**gamma
        total = total + (-focal*p.log()*(alpha*t + (1-alpha)*(1-t))/focal.sum().clamp(min=eps)).mean()
    return total

# ---- scores: masks are of bools

def dice(pred, true, ignore_empty=True):
    "MONAI's DiceMetric of two masks: NaN where nothing is to be found, and without `ignore_empty` 1 if nothing was found then, else 0"
    if not true.any(): return float('nan') if ignore_empty else float(not pred.any())
    return 2*(pred&true).sum().item()/(pred.sum()+true.sum()).item()

def dice_mean(scores):
    "MONAI's mean of scores [samples][classes]: over classes that have one, then over samples that have one; 0 if none has"
    per = [sum(s)/len(s) for s in ([x for x in row if x==x] for row in scores) if s]
    return sum(per)/len(per) if per else 0.

def edge(mask):
    "Voxels of a mask with a neighbour along an axis outside of the mask or of the image, as rows of coordinates"
    inner = mask.clone()
    for d in range(mask.dim()):
        for shift in (1, -1):
            near = mask.roll(shift, d)
            near.select(d, 0 if shift==1 else -1).fill_(False)
            inner &= near
    return (mask & ~inner).nonzero().double()

def percentile(x, q):
    "Between the two nearest of the sorted values, linearly"
    x = x.sort().values
    at = q/100*(len(x)-1); low = int(at)
    return (x[low] + (at-low)*(x[min(low+1, len(x)-1)]-x[low])).item()

def hausdorff(pred, true, q=None, spacing=None, directed=False, penalty=None):
    """MONAI's Hausdorff distance of edges: the `q`-th percentile (the largest without it) of the distances of pred's edge to true's and, unless `directed`, the larger of that and of the way back. hd95 is q=95.
    Two empty masks: NaN. One empty mask: inf, but NaN with a percentile, which the mean then drops; `penalty` stands for it instead."""
    if not pred.any() and not true.any(): return float('nan')
    if not (pred.any() and true.any()): return penalty if penalty is not None else float('inf' if q is None else 'nan')
    a,b = (edge(m)*torch.tensor(spacing or [1.]*m.dim(), dtype=torch.float64) for m in (pred, true))
    far = torch.cdist(a, b, compute_mode='donot_use_mm_for_euclid_dist')
    ways = [far.min(1).values] if directed else [far.min(1).values,far.min(0).values]
    return max(percentile(d, 100 if q is None else q) for d in ways)

# ---- forgetting

def class_accuracy(z, y, C):
    "Accuracy per class, NaN for a class without samples"
    hit = z.argmax(1)==y
    return [hit[y==c].double().mean().item() for c in range(C)]

def forgetting(acc):
    """Of accuracies [rounds][classes]: per round from the second on, the mean over classes of what each lost since the round before, and the area under it.
    Read so: a class that gained lost 0 (gains do not make up for losses); a class without an accuracy in one of the two rounds is left out (NaN if all are); the area counts a round as 1 wide and a loss as standing for the round it took, so it is the sum."""
    lost = []
    for a,b in zip(acc, acc[1:]):
        drops = [max(x-y, 0.) for x,y in zip(a, b) if x==x and y==y]
        lost.append(sum(drops)/len(drops) if drops else float('nan'))
    return lost,sum(lost)
