"The oracles of the FedRef paper against numbers worked out by hand, exact fractions, and each other where methods coincide."
from fractions import Fraction as Q
from math import inf, isnan, log, nan, sqrt
import pytest, torch
from torch import nn
import oracles as O, oracles_004 as P
from test_oracles_selfcheck import close, same, T, toy

def closed(Hs, steps, W, lr, centres): return [c+(1-lr*h)**steps*(W-c) for h,c in zip(Hs, centres)]

H,C,N_I,LR,K,W0 = (Q(1), Q(3)),(Q(2), Q(-1)),(1, 3),Q(1, 4),2,Q(5)

def quad(w, x, y): return (x[:,0]/2*(w['w']-x[:,1])**2).mean()

def quadratic(R, drawn=None):
    "h/2 (w-c)² on two clients of one and three samples, K full-batch steps in each of R rounds"
    clients = [(T(float(h), float(c)).repeat(n, 1), torch.zeros(n)) for h,c,n in zip(H, C, N_I)]
    return dict(w=T(float(W0))),clients,[{i: [torch.arange(N_I[i])]*K for i in (drawn or [[0, 1]]*R)[r]} for r in range(R)]

def local(W): return closed(H, K, W, LR, C)
def merged(W): return sum(n*w for n,w in zip(N_I, local(W)))/sum(N_I)
def exact(out, want): assert [o['w']['w'].item() for o in out]==pytest.approx([float(x) for x in want], rel=0, abs=1e-12)

def norms(o): return set(o['down_numbers'].values()),set(o['up_numbers'].values())

# ---- FedRef

def test_quadratic_rounds_are_affine():
    "Two steps shrink w-c to 9/16 and 1/16: from 5 come 59/16 and -5/8, whose mean with weights 1 and 3 is 29/64"
    assert local(W0)==[Q(59, 16), Q(-5, 8)] and merged(W0)==Q(29, 64)

def test_printed_is_a_recurrence():
    "A = merged(W), W = A - 2ηλ (A - A_prev) with 2ηλ = 1/5"
    W,A,want = W0,None,[]
    for _ in range(4):
        before,A = A,merged(W)
        W = A if before is None else A-Q(1, 5)*(A-before)
        want.append(W)
    exact(P.oracle_fedref_printed(*quadratic(4), .25, .2, .5, loss=quad), want)

@pytest.mark.parametrize('history', ['aggregates','outputs'])
@pytest.mark.parametrize('current', [True, False])
def test_intended_is_a_recurrence(history, current):
    W,past,want = W0,[],[]
    for _ in range(6):
        A = merged(W)
        known = (past+[A]*current)[-3:] or [A]
        W = A-Q(1, 5)*(A-sum(known)/len(known))
        past.append(A if history=='aggregates' else W)
        want.append(W)
    exact(P.oracle_fedref_intended(*quadratic(6), .25, .2, .5, 3, history, current, loss=quad), want)

def test_released_is_a_recurrence():
    "p = 2: FedAvg for three rounds; one weight, so its norm is its size, and the sum over the first axis changes nothing. Slots 0 and 1 weigh 1/3 and 2/3; rounds 2 and 4 write slot 0."
    eta,l1,l2 = Q(1, 2),Q(1, 8),Q(1, 4)
    W,slots,seen,want = W0,{},[],[]
    for t in range(1, 7):
        cost = sum(h/2*((1-LR*h)*(W-c))**2 for h,c in zip(H, C))/2 # before the second step
        A = W = merged(W)
        slots[t%2] = A
        if t>2: seen.append((cost, A, slots[0]/3+2*slots[1]/3))
        if t>3:
            (f,a,r),(F,A,R) = seen[-2:]
            W = A-eta*(F-f+l1*abs(A-a)+l2*abs(R-r))
        want.append(W)
    exact(P.oracle_fedref_released(*quadratic(6), .25, .5, .125, .25, 2, loss=quad), want)

def test_released_scalar():
    "Costs 3 and 2; A-a = (3,4) is 5 long. R = ((1,1),(1,1)), r = ((1,0),(0,1)) whose rows sum to (1,1): as coded nothing is left, as meant √2"
    now,before = (3., T(3, 4), torch.ones(2, 2)),(2., T(0, 0), torch.eye(2))
    assert close(P.released_scalar(now, before, .1, 10.), 1.5) and close(P.released_scalar(now, before, .1, 10., rows=False), 1.5+10*sqrt(2), 1e-6)
    assert P.released_scalar((nan, *now[1:]), before, .1, 10.)==0 and torch.isfinite(P.released_scalar((inf, *now[1:]), before, .1, 10.))

def test_hidden_schedule(): assert [P.released_lambda2(t) for t in (1, 9, 10, 19, 20, 30, 39, 40, 100)]==pytest.approx([1e-6]*2+[1e-5]*2+[1e-4, 1e-3, 1e-3, .005, .005])

def test_schedule_reaches_the_step():
    "λ2 = t in round t is the same as the λ2 of the only round that moves"
    args = *quadratic(4),.25,.5,.125
    assert same(P.oracle_fedref_released(*args, lambda t: t/8, 2, loss=quad)[-1]['w'], P.oracle_fedref_released(*args, .5, 2, loss=quad)[-1]['w'])

def test_released_moves_every_weight_of_a_tensor_alike():
    w,clients,rounds = toy()
    rounds = [rounds[k%3] for k in range(4)]
    a,b = P.oracle_fedref_released(w, clients, rounds, .1, .5, p=2),O.oracle_fedavg(w, clients, rounds, .1)
    assert all(same(x['w'], y['w']) for x,y in zip(a[:3], b)) and not same(a[3]['w'], b[3]['w'])
    shift = O.minus(b[3]['w'], a[3]['w'])
    assert all(close(t, t.flatten()[0]) for t in shift.values()) and not close(shift['body.weight'][0,0], shift['head.bias'][0], 1e-9)
    cost = [sum(m['loss'] for m in o['messages'].values())/2 for o in a]
    A,slots = [o['w'] for o in b],lambda k,t: sum((s+1)/3*b[j]['w'][k] for s,j in t.items())
    for k in w: # rounds from 1: 2 is in slot 0 and 3 in slot 1, then 4 in slot 0
        want = cost[3]-cost[2]+1e-3*(A[3][k]-A[2][k]).norm()+1e-6*(slots(k, {0: 3, 1: 2})-slots(k, {0: 1, 1: 2}).sum(0)).norm()
        assert close(shift[k], .5*want)

def test_first_rounds_are_fedavg():
    w,clients,rounds = toy()
    avg = O.oracle_fedavg(w, clients, rounds, .1)
    printed,intended,released = P.oracle_fedref_printed(w, clients, rounds, .1, 1., .3),P.oracle_fedref_intended(w, clients, rounds, .1, 1., .3),P.oracle_fedref_released(w, clients, rounds, .1, 1.)
    assert same(printed[0]['w'], avg[0]['w']) and same(intended[0]['w'], avg[0]['w']) and all(same(a['w'], b['w']) for a,b in zip(released, avg))
    R = O.mean([avg[0]['w'], A := O.mean([o['w'] for o in intended[1]['messages'].values()], [6, 4])], [1, 1])
    assert same(intended[1]['w'], {k: A[k]-.6*(A[k]-R[k]) for k in A})
    assert same(printed[1]['w'], {k: .4*A[k]+.6*avg[0]['w'][k] for k in A}) # and 2ηλ = 1 would give the former aggregate
    assert same(P.oracle_fedref_printed(w, clients, rounds, .1, 1., .5)[1]['w'], avg[0]['w'], 1e-11)

def test_fedref_with_a_history_of_one_or_no_pull_is_fedavg():
    w,clients,rounds = toy()
    avg = O.oracle_fedavg(w, clients, rounds, .1, .9, .01)
    for out in [P.oracle_fedref_intended(w, clients, rounds, .1, 1., .3, 1, momentum=.9, decay=.01), P.oracle_fedref_printed(w, clients, rounds, .1, 1., 0., momentum=.9, decay=.01)]:
        assert all(same(a['w'], b['w']) for a,b in zip(out, avg))

def test_fedref_outside_and_late_clients_hold_the_server_model():
    w,clients,rounds = toy()
    o = P.oracle_fedref_intended(w, clients, rounds, .1, 1., .3)[2]
    assert all(same(o['personal'][i], o['w']) for i in range(4)) and set(o['messages'])=={1, 2} and o['down_numbers']=={1: 53, 2: 53} and o['up_numbers']=={1: 54, 2: 54}

def test_cost_is_of_the_last_batch_before_its_step():
    w,clients,rounds = toy()
    m = P.oracle_fedref_printed(w, clients, rounds, .1, 1., .3)[0]['messages'][1]
    short = P.oracle_fedref_printed(w, clients, [{1: rounds[0][1][:-1]}], .1, 1., .3)[0]['messages'][1]['w']
    b = rounds[0][1][-1]
    assert close(m['loss'], nn.functional.cross_entropy(O.logits(short, clients[1][0][b]), clients[1][1][b]))

def test_released_weighs_by_batches():
    "Four and nine samples in batches of three: weights 2 and 3"
    w,clients,rounds = toy()
    o = P.oracle_fedref_released(w, clients, [{0: rounds[0][0], 2: rounds[2][2]}], .1, batch=3)[0]
    assert same(o['w'], O.mean([o['messages'][i]['w'] for i in (0, 2)], [2, 3]))

def test_methods_take_the_released_loss():
    w,clients,rounds = toy()
    a,b = (P.oracle_fedref_released(w, clients, rounds[:1], .1, loss=f) for f in (P.plain, P.released_loss))
    assert not same(a[0]['w'], b[0]['w'], 1e-6) and b[0]['messages'][0]['loss'] > a[0]['messages'][0]['loss']/10

# ---- optimisers on the server

@pytest.mark.parametrize('kind,flower,v0,want', [
    ('adagrad', False, 0., [(.9090909, 1.9024390), (.8430500, 1.8329566)]), ('adam', True, 0., [(.9628770, 1.9406032), (.9127547, 1.8678444)]), ('yogi', True, 0., [(.95, 1.92), (.8712994, 1.8058320)]),
    ('adam', False, 0., [(.95, 1.92), (.8711839, 1.8055886)]), ('adagrad', False, 1e-4, [(.9095012, 1.9024688), (.8436140, 1.8329970)]),
    ('adam', False, 1e-4, [(.9585178, 1.9219039), (.8887520, 1.8089579)]), ('yogi', False, 1e-4, [(.9585786, 1.9219224), (.8890338, 1.8092390)])])
def test_two_recorded_rounds(kind, flower, v0, want):
    "Flower's numbers for v0 = 0, and Reddi's v0 = τ²"
    W,m,v = dict(w=T(1, 2)),dict(w=T(0, 0)),dict(w=T(v0, v0))
    for t in (1, 2):
        target = O.mean([dict(w=W['w']+T(.2, -1)), dict(w=W['w']+T(-.2, -.2))], [1, 3])
        W,m,v = P.adaptive_step(kind, W, target, m, v, t, .1, 0. if kind=='adagrad' else .9, .99, .01, flower)
        assert close(W['w'], T(*want[t-1]), 6e-8)

def test_two_recorded_rounds_of_momentum():
    W,v = dict(w=T(1, 2)),dict(w=T(0, 0))
    for want in [(.95, 1.8), (.855, 1.42)]:
        W,v = P.fedavgm_step(W, dict(w=W['w']+T(-.1, -.4)), v, .5, .9)
        assert close(W['w'], T(*want))

def test_avgm_is_a_recurrence():
    W,v,want = W0,0,[]
    for _ in range(4):
        v = Q(1, 2)*v+W-merged(W)
        W -= Q(3, 4)*v
        want.append(W)
    exact(P.oracle_fedavgm(*quadratic(4), .25, .75, .5, loss=quad), want)

@pytest.mark.parametrize('name,settings,root,m', [('adagrad', {}, 1, 1), ('adam', dict(beta1=.5, beta2=.75), Q(1, 2), Q(1, 2)), ('yogi', dict(beta1=.5, beta2=.75), Q(1, 2), Q(1, 2))])
def test_first_adaptive_round_is_exact(name, settings, root, m):
    "From v = 0: √v is |Δ| or, at β2 = ¾, half of it"
    D = merged(W0)-W0
    exact(getattr(P, f'oracle_fed{name}')(*quadratic(1), .25, eta=.5, tau=.25, v0=0., loss=quad, **settings), [W0+Q(1, 2)*m*D/(root*abs(D)+Q(1, 4))])

def test_adam_of_flower_corrects_with_the_exponent_two():
    "√(1-.75²)/(1-.5²) = √7/3 times the step"
    args = dict(eta=.5, beta1=.5, beta2=.75, tau=.25, v0=0., loss=quad)
    a,b = (P.oracle_fedadam(*quadratic(1), .25, flower=f, **args)[0]['w']['w']-5 for f in (False, True))
    assert close(b/a, sqrt(7)/3)

def test_yogi_is_the_other_oracle():
    w,clients,rounds = toy()
    for v0 in (0., 1e-6):
        assert all(same(a['w'], b['w']) for a,b in zip(P.oracle_fedyogi(w, clients, rounds, .1, v0=v0), O.oracle_fedyogi(w, clients, rounds, .1, v0=v0)))

def test_v_begins_at_tau_squared():
    w,clients,rounds = toy()
    assert same(P.oracle_fedadam(w, clients, rounds, .1, tau=.1)[2]['w'], P.oracle_fedadam(w, clients, rounds, .1, tau=.1, v0=.1**2)[2]['w'])

def test_uniform_weights():
    w,clients,rounds = toy()
    o = P.oracle_fedavgm(w, clients, rounds, .1, beta=0., uniform=True)[0]
    assert same(o['w'], O.mean([m['w'] for m in o['messages'].values()], [1, 1])) and not same(o['w'], O.oracle_fedavg(w, clients, rounds, .1)[0]['w'])

def test_plain_momentum_is_fedavg():
    w,clients,rounds = toy()
    out = P.oracle_fedavgm(w, clients, rounds, .1, beta=0., momentum=.9)
    assert all(same(a['w'], b['w']) for a,b in zip(out, O.oracle_fedavg(w, clients, rounds, .1, .9)))
    assert same(out[2]['personal'][3], out[2]['w']) and out[2]['up_numbers']=={1: 53, 2: 53}

# ---- SCAFFOLD

@pytest.mark.parametrize('option,new', [(2, .75), (1, .6)])
def test_scaffold_client(option, new):
    "Gradients 1 and ½: w = 1 - .1(1-.3) - .1(.5-.3) = .91; option 2's variate is their mean, option 1's that of all three samples (1, ½, .3)"
    slope = lambda w,x,y: (w['w']*x).mean()
    w,c = P.scaffold_local(dict(w=T(1)), dict(w=T(.2)), dict(w=T(.5)), (T(1, .5, .3)[:,None], torch.zeros(3)), [torch.tensor([0]), torch.tensor([1])], .1, option, loss=slope)
    assert close(w['w'], .91) and close(c['w'], new)

def test_scaffold_server():
    "Two changes of .25 and four clients: .2 + .5/4"
    W,c = P.scaffold_merge(dict(w=T(1)), dict(w=T(.2)), [dict(w=T(-.09))]*2, [dict(w=T(.25))]*2, 4, 2.)
    assert close(c['w'], .325) and close(W['w'], .82)

@pytest.mark.parametrize('option', [1, 2])
def test_scaffold_is_a_recurrence(option):
    "A correction c_i-c moves the centre of h/2 (w-c)² by (c_i-c)/h; client 1 joins in round 2, and N = 2 all along"
    drawn = [[0], [0], [1, 0], [1], [0, 1]]
    W,c,ci,want = W0,Q(0),[Q(0), Q(0)],[]
    for S in drawn:
        y = closed(H, K, W, LR, [m+(u-c)/h for h,m,u in zip(H, C, ci)])
        new = [h*(W-m) if option==1 else u-c+(W-z)/(K*LR) for h,m,u,z in zip(H, C, ci, y)]
        step,dc = sum(y[i]-W for i in S)/len(S),sum(new[i]-ci[i] for i in S)/2
        for i in S: ci[i] = new[i]
        W,c = W+Q(3, 4)*step,c+dc
        want.append(W)
    out = P.oracle_scaffold(*quadratic(5, drawn), .25, .75, option, loss=quad)
    exact(out, want)
    assert close(out[-1]['c']['w'], float(c)) and close(out[-1]['ci'][1]['w'], float(ci[1])) and not out[1]['ci'][1]['w'].any()

def test_fixed_points():
    "The uniform optimum Σhc/Σh = -1/4 for both with control, and FedAvg's -Σ n(1-q²)c/… = (7/16·2 - 3·15/16)/(7/16 + 3·15/16) = -31/52"
    w,clients,rounds = quadratic(400)
    for option in (1, 2): assert close(P.oracle_scaffold(w, clients, rounds, .25, option=option, loss=quad)[-1]['w']['w'], -.25, 1e-9)
    assert close(P.oracle_feddyn(w, clients, rounds, .25, .5, loss=quad)[-1]['w']['w'], -.25, 1e-9)
    assert merged(Q(-31, 52))==Q(-31, 52) and close(P.oracle_fedavgm(w, clients, rounds, .25, 1., 0., loss=quad)[-1]['w']['w'], -31/52)

@pytest.mark.parametrize('option', [1, 2])
def test_scaffold_sums(option):
    "c is the mean of all c_i, a client never drawn keeps 0, and two models go each way"
    w,clients,rounds = toy()
    for o in P.oracle_scaffold(w, clients, rounds, .1, option=option, decay=.01):
        assert same(o['c'], O.mean(list(o['ci'].values()), [1]*4)) and not O.flat(o['ci'][3]).any() and norms(o)==({106}, {106})
    assert set(o['messages'])=={1, 2}

def test_scaffold_first_round_is_uniform_fedavg():
    w,clients,rounds = toy()
    a,b = P.oracle_scaffold(w, clients, rounds, .1, decay=.01)[0],O.oracle_fedavg(w, clients, rounds, .1, decay=.01)[0]
    assert all(same(a['trained'][i], m['w']) for i,m in b['messages'].items()) and same(a['w'], O.mean(list(a['trained'].values()), [1, 1]))

def test_scaffold_option_1_is_the_gradient_of_all_samples():
    w,clients,rounds = toy()
    o = P.oracle_scaffold(w, clients, rounds, .1, option=1, decay=.5)[0]
    v = {k: t.clone().requires_grad_() for k,t in w.items()}
    nn.functional.cross_entropy(O.logits(v, clients[0][0]), clients[0][1]).backward()
    assert same(o['ci'][0], {k: t.grad+.5*w[k] for k,t in v.items()})

# ---- FedDyn

def test_dyn_server():
    "N = 4, α = ½, W = 1, weights .8 and 1.4: h = -.025 and W = 1.1+.05"
    W,h = P.feddyn_merge(dict(w=T(1)), dict(w=T(0)), [dict(w=T(.8)), dict(w=T(1.4))], 4, .5)
    assert close(h['w'], -.025) and close(W['w'], 1.15)

def test_dyn_gradient():
    "∇_0 = -½(.8-1) = .1; at 1.2 with a slope of 1: 1 - .1 + ½(1.2-1.15)"
    g = O.grad(lambda v: v['w'].sum()+P.feddyn_term(v, dict(w=T(1.15)), dict(w=T(.1)), .5), dict(w=T(1.2)))
    assert close(g['w'], .925)

def test_dyn_is_a_recurrence():
    "The term makes h/2 (w-c)² one of curvature h+α around (hc+∇+αW)/(h+α)"
    drawn,alpha = [[0], [0], [1, 0], [1], [0, 1]],Q(1, 2)
    W,s,lin,want = W0,Q(0),[Q(0), Q(0)],[]
    for S in drawn:
        hs = [h+alpha for h in H]
        y = closed(hs, K, W, LR, [(h*m+u+alpha*W)/k for h,m,u,k in zip(H, C, lin, hs)])
        for i in S: lin[i] -= alpha*(y[i]-W)
        s -= alpha/2*sum(y[i]-W for i in S)
        W = sum(y[i] for i in S)/len(S)-s/alpha
        want.append(W)
    out = P.oracle_feddyn(*quadratic(5, drawn), .25, .5, loss=quad)
    exact(out, want)
    assert close(out[-1]['h']['w'], float(s)) and close(out[-1]['linear'][1]['w'], float(lin[1]))

def test_dyn_keeps_its_sums():
    "h is the mean of all ∇_i, zeros for a client never drawn, and traffic is FedAvg's"
    w,clients,rounds = toy()
    for o in P.oracle_feddyn(w, clients, rounds, .1, .3, momentum=.5):
        assert same(o['h'], O.mean(list(o['linear'].values()), [1]*4)) and not O.flat(o['linear'][3]).any() and norms(o)==({53}, {53})
        assert same(o['personal'][3], o['w'])

# ---- losses

def test_asl():
    "σ(0) = ½ and σ(-3) is below the margin: ½ ln 2 + .45⁴·(-ln .55) + 0"
    assert close(P.asl(T(0, 0, -3)[None], T(1, 0, 0)[None]), .371089, 5e-7) and close(.371089, .5*log(2)-.45**4*log(.55), 5e-7)

def test_asl_weights_carry_no_gradient():
    "At z = 0 and y = 1: -½ ln σ has the slope -½·½"
    z = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    P.asl(z, torch.ones(1, 1)).backward()
    assert close(z.grad.item(), -.25)

def test_asl_single():
    z,y = T(log(2), 0, 0)[None],torch.tensor([0])
    assert close(P.asl_single(z, y), .647298, 5e-7) and close(P.asl_single(z, y, eps=0.), .693147, 5e-7)
    assert close(P.asl_single(z, y), (.9+.1/3)*log(2)+2*.1/3*.25**4*log(4)) # by hand

def test_asl_released():
    z,y = T(log(2), 0, 0)[None],torch.tensor([0])
    assert close(P.asl_released(z, y), .695395, 5e-7) and close(P.asl_released(z, y), log(2)-2*.25**4*log(.75))
    for C,want in [(10, 2.302680), (62, 4.127134)]: assert close(P.asl_released(torch.zeros(5, C, dtype=torch.float64), torch.arange(5)), want, 5e-7)
    sure = T(60, 0)[None]
    assert close(P.asl_released(sure, torch.tensor([1])), -log(1e-6)*(1+(1-1e-6)**4), 1e-4) and close(P.asl_released(sure, torch.tensor([1])), 27.6, .05)

def image(): return torch.stack([T(2, 0, 0, 0), T(0, 0, 1, -1)]).reshape(1, 2, 2, 2),torch.tensor([[[0, 1], [1, 0]]])

def test_monai_losses():
    z,y = image(); t = P.one_hot(y, 2); p = z.softmax(1)
    assert close(P.monai_dice(p, t), .291916, 5e-7) and close(P.monai_dice(p, t, include_background=False), .319706, 5e-7)
    assert close(P.monai_dice(p[:,:1], t[:,:1]), .264126, 5e-7)
    assert close(P.monai_focal(z, t, softmax=True), .027551, 5e-7) and close(P.monai_focal(z, t), .114194, 5e-7) and close(P.monai_dice_focal(z, t), .406110, 1e-6)

def test_monai_losses_by_hand():
    z,y = image(); t = P.one_hot(y, 2)
    assert close(P.monai_focal(z, t, 0., softmax=True), nn.functional.cross_entropy(z, y)/2), 'twice smaller: averaged over two classes as well'
    assert close(P.monai_focal(z, t, 0.), nn.functional.binary_cross_entropy_with_logits(z, t))
    zero = torch.zeros_like(z) # ½ for both classes of every voxel: α weighs half of the voxels by ¼ and half by ¾
    assert close(P.monai_focal(zero, t, 2., .25, softmax=True), (.75*2+.25*2)*.25*log(2)/8) and close(P.monai_focal(zero[:,:1], torch.ones(1, 1, 2, 2), 2., .25), .25*.25*log(2))
    first = P.one_hot(torch.zeros_like(y), 2) # class 0 alone is weighted by 1-α
    assert close(P.monai_focal(zero, first, 2., .25, softmax=True), .75*.25*log(2)/2)

def test_monai_dice_of_nothing():
    none,full = torch.zeros(1, 1, 4, dtype=torch.float64),torch.ones(1, 1, 4, dtype=torch.float64)
    assert close(P.monai_dice(none, none), 0) and close(P.monai_dice(full, none), 1, 1e-5) and close(P.monai_dice(full, full), 0)

def test_monai_batch_pools():
    "A sample found wholly and one not at all, of 1 and 3 voxels: ½ apart, and 1 - 2/(1+4) together"
    p,t = T(1, 0, 0, 0, 0, 0).reshape(2, 1, 3),T(1, 0, 0, 1, 1, 1).reshape(2, 1, 3)
    assert close(P.monai_dice(p, t), .5, 1e-5) and close(P.monai_dice(p, t, batch=True), .6, 1e-5)

@pytest.mark.parametrize('gamma', [0., 2., 4.5])
def test_released_losses_of_zero_logits(gamma):
    "Two voxels of two classes: Dice ½, and the focal loss of a class ln 2/4 whatever γ"
    z,y = torch.zeros(1, 2, 2, dtype=torch.float64),torch.tensor([[0, 1]])
    assert close(P.released_dice(z, y), .5, 1e-5) and close(P.released_focal(z, y, gamma=gamma), 2*.173287, 1e-6)

def test_released_dice_counts_absent_classes():
    "Three classes, two of them there: as above, but over three and with thirds. TP = ⅓, FP = ⅓, FN = ⅔"
    z,y = torch.zeros(1, 3, 2, dtype=torch.float64),torch.tensor([[0, 1]])
    assert close(P.released_dice(z, y), 2/3*(1-1/3/(1/3+1/6+1/3)), 1e-5)

def test_released_focal_weighs_what_is_there_by_alpha():
    "Labels 0 and 1 of three classes: .1+.9 for each of them, and .9+.9 for the third, over two voxels twice"
    assert close(P.released_focal(torch.zeros(1, 3, 2, dtype=torch.float64), torch.tensor([[0, 1]])), (1+1+1.8)*log(2)/4)

def test_released_focal_fades_with_size():
    "Averaging what is already a mean: a thousand times the voxels, a thousandth of the loss"
    z,y = torch.zeros(1, 2, 2, dtype=torch.float64),torch.tensor([[0, 1]])
    assert close(P.released_focal(z.repeat(1, 1, 1000), y.repeat(1, 1000))*1000, P.released_focal(z, y))

# ---- scores

def mask(rows, cols, shape=(5, 5)):
    m = torch.zeros(shape, dtype=torch.bool); m[rows,cols] = True
    return m

NONE,A,B = mask(slice(0, 0), slice(0, 0)),mask(slice(1, 3), slice(1, 3)),mask(slice(1, 3), slice(2, 5))

def test_dice_and_hausdorff_of_rectangles():
    assert P.dice(A, B)==.4 and P.hausdorff(A, B)==P.hausdorff(A, B, 95)==2 and P.hausdorff(A, B, directed=True)==1 and P.hausdorff(B, A, directed=True)==2
    assert P.hausdorff(A, A, 95)==0 and P.hausdorff(A, B, spacing=(1, 2))==4

def test_hausdorff_of_rows():
    row = [torch.arange(10)[None]<n for n in (10, 9)]
    assert P.hausdorff(*row)==1 and P.hausdorff(*row, 95)==pytest.approx(.55) and P.hausdorff(*row, 50)==0 and P.hausdorff(*row, spacing=(1, 2))==2
    assert P.hausdorff(*row[::-1], 95, directed=True)==0

def test_percentile_is_numpys():
    x = T(3, 0, 0, 9, 4, 1, 7)
    assert all(P.percentile(x, q)==pytest.approx(torch.quantile(x, q/100).item()) for q in (0, 30, 50, 95, 100))

def test_edges():
    "The middle of a 3×3 square is not at its edge, and a mask that fills the image has one too; a corner contact does not count"
    assert P.edge(mask(slice(0, 3), slice(0, 3))).tolist()==[[i, j] for i in range(3) for j in range(3) if (i, j)!=(1, 1)]
    assert len(P.edge(torch.ones(4, 4, 4, dtype=torch.bool)))==64-8
    plus = mask(slice(1, 4), 2) | mask(2, slice(1, 4))
    assert len(P.edge(plus))==4

def test_empty_masks():
    assert isnan(P.dice(NONE, NONE)) and isnan(P.dice(A, NONE)) and P.dice(NONE, A)==0
    assert P.dice(NONE, NONE, ignore_empty=False)==1 and P.dice(A, NONE, ignore_empty=False)==0
    assert isnan(P.hausdorff(NONE, NONE)) and isnan(P.hausdorff(NONE, NONE, 95, penalty=9.))
    for a,b in [(A, NONE), (NONE, A)]: assert P.hausdorff(a, b)==inf and isnan(P.hausdorff(a, b, 95)) and P.hausdorff(a, b, 95, penalty=373.13)==373.13

def test_mean_of_scores():
    "Over classes first: (½ + 1)/2, not (0 + 1 + 1)/3; a sample without any score is left out"
    assert P.dice_mean([[0., 1.], [nan, 1.], [nan, nan]])==.75 and P.dice_mean([[nan, nan]])==0
    assert P.dice_mean([[P.hausdorff(A, B, 95)], [P.hausdorff(NONE, A, 95)]])==2, 'a tumour that was missed improves the mean'

# ---- forgetting

def test_forgetting():
    "Class 0 loses .2, gains .1; class 1 loses .4 and .1: (.2+.4)/2 and (0+.1)/2"
    lost,area = P.forgetting([[.9, .8], [.7, .4], [.8, .3]])
    assert lost==pytest.approx([.3, .05]) and area==pytest.approx(.35)

def test_forgetting_leaves_out_what_was_not_scored():
    z,y = torch.eye(3)[[0, 1, 1]],torch.tensor([0, 0, 1])
    acc = P.class_accuracy(z, y, 3)
    assert acc[:2]==[.5, 1.] and isnan(acc[2]) and P.forgetting([[1., 1., 1.], acc])[0]==[.25]
    assert P.forgetting([[.1, .2]])==([], 0) and P.forgetting([[.1, .2], [.3, .2]])[1]==0
