"The oracles of PFedEdit and its rivals against numbers worked out by hand, and against each other where methods coincide."
import copy
from math import log, sqrt
import pytest, torch
from torch import nn
import oracles as O, oracles_001 as P
from test_oracles_selfcheck import close, once, same, T, toy

LAYERS = [['body.weight','body.bias'], [], ['head.weight','head.bias']]
PROBE = {i: torch.tensor([0, 2, 3]) for i in range(4)}

def normed(seed=0):
    "The toy with a BatchNorm: nine entries, and statistics that are not at their start"
    w,clients,rounds = toy(seed=seed)
    gen = torch.Generator().manual_seed(seed+9)
    bn = {'bn.weight': 1+.1*torch.randn(5, generator=gen, dtype=torch.float64), 'bn.bias': .1*torch.randn(5, generator=gen, dtype=torch.float64), 'bn.running_mean': T(.1, 0, -.1, .2, 0), 'bn.running_var': T(1, 2, 1, .5, 1), 'bn.num_batches_tracked': torch.tensor(3)}
    rounds = [{i: [b for b in bs if len(b)>1] for i,bs in d.items()} for d in rounds]
    return {**dict(list(w.items())[:2]), **bn, **dict(list(w.items())[2:])},clients,rounds

def network(w):
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()
    net.load_state_dict(dict(zip(net.state_dict(), w.values())))
    return net

def scalar(b, h): return {'body.weight': T(b)[None], 'body.bias': T(0), 'head.weight': T(h)[None], 'head.bias': T(0)}

def planted(monkeypatch, models):
    "Local training that gives the planted model of a client, recognised by its number of samples, with the entries that it was started with where None is planted"
    monkeypatch.setattr(P, 'fit', lambda w, data, *a, **kw: {k: w[k] if v is None else v for k,v in models[len(data[1])].items()})

def blanks(*ns): return [(torch.zeros(n, 1), torch.zeros(n, dtype=torch.long)) for n in ns]

# ---- networks with BatchNorm

def test_training_with_batchnorm_is_torchs():
    w,clients,rounds = normed()
    net,(X,y) = network(w),clients[1]
    opt = torch.optim.SGD(net.parameters(), .1, .9, weight_decay=.01)
    for b in rounds[0][1]:
        opt.zero_grad(); nn.functional.cross_entropy(net(X[b]), y[b]).backward()
        nn.utils.clip_grad_norm_(net.parameters(), .2); opt.step()
    got = P.fit(w, clients[1], rounds[0][1], .1, None, .9, .01, .2)
    assert all(close(a, p) for a,p in zip(got.values(), net.state_dict().values()))
    assert close(P.classify(got, X), net.eval()(X).detach())

def test_frozen_entries_stand_still_and_statistics_move():
    w,clients,rounds = normed()
    got = P.fit(w, clients[1], rounds[0][1], .1, P.head_keys(w))
    assert [k for k in w if torch.equal(got[k], w[k])]==['body.weight','body.bias','bn.weight','bn.bias']

def test_blend_cuts_counters_off():
    a,b = (dict(w=T(x), n=torch.tensor(n)) for x,n in [(1, 3), (5, 4)])
    m = P.blend([a, b], [1, 3])
    assert close(m['w'], 4) and m['n'].item()==3 and not m['n'].is_floating_point() and close(P.blend([a, b])['w'], 3)

# ---- PFedEdit

@pytest.mark.parametrize('ratio,k', [(1, 1), (3, 2), (5, 3), (7, 4), (9, 5)])
def test_number_of_layers(ratio, k): assert P.count_of(ratio, 54)==k

def test_four_cases():
    "Class 0 right: P(edited) = ¾ against ½ counts as A, ¾ against ⁹⁄₁₀ as B; wrong: ¼ against ⅒ as C, ¼ against ½ as D; equal in none"
    z = lambda *ps: torch.stack([T(log(p), log(1-p)) for p in ps])
    counts,r = P.te_scores(z(.75, .75, .25, .25, .75), z(.5, .9, .1, .5, .75), torch.zeros(5, dtype=torch.long))
    assert counts==(1, 1, 1, 1) and close(r, (.5 + (.75/.9-1) + 1.5 - .5 + 0)/5)

def test_rank():
    "A first, whatever the rest; then B; then C; then the mean of r; then the shallower layer; D never"
    scores = [((3, 1, 1, 0), .1), ((3, 2, 0, 0), -1.), ((2, 9, 9, 9), 9.), ((3, 1, 1, 4), .2), ((3, 1, 0, 0), 5.), ((3, 1, 1, 9), .1)]
    assert P.rank(scores)==[1, 3, 0, 5, 4, 2]

def test_orders():
    scores = [(0, .1, 3, .5), (0, .3, 3, .4), (0, .3, 4, .4)]
    assert [P.ORDERS[m](scores) for m in ('te','accuracy','loss')]==[[1, 2, 0], [2, 0, 1], [1, 2, 0]]

def test_editing_all_is_the_local_model_and_nothing_the_global():
    w,clients,rounds = toy()
    for k,which in [(3, 'local'), (0, 'w')]:
        for o in P.oracle_pfededit(w, clients, rounds, .1, LAYERS, k, PROBE):
            assert all(same(o['personal'][i], o['local'][i] if which=='local' and i in o['local'] else o['w']) for i in range(4))

def test_none_personal_is_uniform_averaging():
    w,clients,rounds = toy()
    n = min(len(c[1]) for c in clients)
    out = P.oracle_pfededit(w, clients, rounds, .1, LAYERS, 0, PROBE)
    first = out[0]['messages']
    assert same(out[0]['w'], O.mean([m['w'] for m in first.values()], [1, 1])) and not same(out[0]['w'], O.mean([m['w'] for m in first.values()], [4, 6]), 1e-6)
    even = [(X[:n], y[:n]) for X,y in clients]
    cut = [{i: [b[b<n] for b in bs if (b<n).any()] for i,bs in d.items()} for d in rounds]
    assert all(same(a['w'], b['w']) for a,b in zip(P.oracle_pfededit(w, even, cut, .1, LAYERS, 0, PROBE), O.oracle_fedavg(w, even, cut, .1)))

def test_edit_is_chosen_on_the_probe_and_starts_the_next_round():
    w,clients,rounds = toy()
    out = P.oracle_pfededit(w, clients, rounds, .3, LAYERS, 1, PROBE)
    for r,o in enumerate(out):
        for i,l in o['local'].items():
            lists = []
            for keys in LAYERS:
                v = {**o['w'], **{k: l[k] for k in keys}}
                p,q = (O.logits(m, clients[i][0][PROBE[i]]).softmax(1) for m in (v, l))
                counts,rs = [0]*4,[]
                for a,b,c in zip(p, q, clients[i][1][PROBE[i]].tolist()):
                    x = (a[c]/b[c]-1).item(); rs.append(x)
                    if x: counts[2*(a.argmax().item()!=c)+(x<0)] += 1
                lists.append((tuple(counts), sum(rs)/3))
            assert [s[0] for s in o['scores'][i]]==[c for c,_ in lists] and close(T(*(s[1] for s in o['scores'][i])), T(*(m for _,m in lists)))
            best = max(range(3), key=lambda t: (*lists[t][0][:3], lists[t][1], -t))
            assert o['choice'][i]==[best] and same(o['personal'][i], {**o['w'], **{k: l[k] for k in LAYERS[best]}})
        assert same(o['personal'][3], o['w']) and set(o['down_numbers'])==set(rounds[r]) and o['up_numbers'][1]==53
    for r in (1, 2):
        start = out[r-1]['personal'][1]
        assert same(out[r]['messages'][1]['w'], O.sgd(start, O.plain, clients[1], rounds[r][1], .3))
    assert same(out[2]['messages'][2]['w'], O.sgd(out[1]['w'], O.plain, clients[2], rounds[2][2], .3)), 'a late joiner begins with the unedited model'
    assert len({tuple(c) for o in out for c in o['choice'].values()}) > 1, 'choices that all agree would test little'

def test_scores_of_layers_differ():
    w,clients,rounds = toy()
    s = P.oracle_pfededit(w, clients, rounds, .3, LAYERS, 1, PROBE)[0]['scores'][0]
    assert s[0][1]!=s[2][1] and len(s)==3

def test_metrics_choose_by_their_own_score():
    w,clients,rounds = toy(seed=2)
    probe = {i: torch.arange(len(y)) for i,(_,y) in enumerate(clients)}
    best = {m: {} for m in P.ORDERS}
    for m in P.ORDERS:
        for r,o in enumerate(P.oracle_pfededit(w, clients, rounds, .5, LAYERS, 2, probe, m)):
            for i,s in o['scores'].items():
                key = dict(list=lambda t: (*s[t][0][:3], s[t][1]), te=lambda t: s[t][1], accuracy=lambda t: s[t][2], loss=lambda t: -s[t][3])[m]
                assert o['choice'][i]==sorted(range(3), key=lambda t: (*(-x for x in (key(t) if m=='list' else [key(t)])), t))[:2]
                best[m][r,i] = o['choice'][i]
    assert best['list']!=best['te']!=best['accuracy']!=best['list']!=best['loss']

def test_once_keeps_the_first_choice():
    w,clients,rounds = toy(seed=1)
    out = P.oracle_pfededit(w, clients, rounds, .5, LAYERS, 1, PROBE, once=True)
    assert all(o['choice'][1]==out[0]['choice'][1] for o in out) and 1 not in out[1]['scores'] and 2 in out[2]['scores']

def test_random_layers():
    w,clients,rounds = toy()
    picks = {(r, i): [2*((r+i)%2)] for r in range(3) for i in range(4)}
    for r,o in enumerate(P.oracle_pfededit(w, clients, rounds, .1, LAYERS, 1, {}, picks=picks)):
        for i,l in o['local'].items(): assert same(o['personal'][i], {**o['w'], **{k: l[k] for k in LAYERS[picks[r,i][0]]}})

def test_statistics_belong_to_their_layer_and_are_averaged():
    w,clients,rounds = normed()
    ks = list(w)
    picks = {(r, i): [1] for r in range(3) for i in range(4)}
    o = P.oracle_pfededit(w, clients, rounds[:1], .1, [ks[:2], ks[2:7], ks[7:]], 1, {}, picks=picks)[0]
    ms = [m['w'] for m in o['messages'].values()]
    assert close(o['w']['bn.running_mean'], (ms[0]['bn.running_mean']+ms[1]['bn.running_mean'])/2) and o['w']['bn.num_batches_tracked']==sum(int(m['bn.num_batches_tracked']) for m in ms)//2
    assert torch.equal(o['personal'][0]['bn.running_var'], o['local'][0]['bn.running_var']) and torch.equal(o['personal'][0]['body.bias'], o['w']['body.bias'])

def released(w, clients, rounds, picks, lr=.1): return P.oracle_pfededit(w, clients, rounds, lr, LAYERS, 1, {}, picks=picks, variant='released')

def test_released_picks_change_nothing_at_once():
    w,clients,rounds = toy()
    out = released(w, clients, rounds, {(r, i): [0] for r in range(3) for i in range(4)})
    none = released(w, clients, rounds, {(r, i): [1] for r in range(3) for i in range(4)})
    assert same(out[0]['w'], none[0]['w']) and all(same(p, out[0]['w']) for p in out[0]['personal'].values())
    assert all(same(p, o['w']) for o in none for p in o['personal'].values())

def test_released_by_hand(monkeypatch):
    "Each round adds 1 to the body of client A (one sample) and 3 to that of B, who picks nothing; A picks the body after round 0: own 2, then 3, 4, …; sent: 1 (as picked), then what it last received"
    step = {1: 1., 2: 3.}
    monkeypatch.setattr(P, 'fit', lambda w, data, *a, **kw: {k: v+step[len(data[1])]*(k=='body.weight') for k,v in w.items()})
    w,full = scalar(0, 0),{0: [], 1: []}
    out = released(w, blanks(1, 2), [full]*4, {**{(r, i): [] for r in range(4) for i in (0, 1)}, (0, 0): [0]})
    body = lambda w: w['body.weight'].item()
    W = [2., (1+5)/2, (3+6)/2, (4.5+7.5)/2]
    assert [body(o['messages'][0]['w']) for o in out]==[1, 1, 3, 4.5] and [body(o['w']) for o in out]==W
    assert [body(o['personal'][0]) for o in out]==[2, 3, 4, 5] and [body(o['personal'][1]) for o in out]==W
    twice = released(w, blanks(1, 2), [full]*3, {**{(r, i): [] for r in range(3) for i in (0, 1)}, (0, 0): [0], (1, 0): [0]})
    assert [body(o['messages'][0]['w']) for o in twice]==[1, 1, 3] and [body(o['personal'][0]) for o in twice]==[2, 3, 4], 'picked again: its own trained 3'
    away = released(w, blanks(1, 2), [full, {1: []}, full], {**{(r, i): [] for r in range(3) for i in (0, 1)}, (0, 0): [0]})
    assert body(away[1]['w'])==5 and body(away[2]['messages'][0]['w'])==5 and body(away[1]['personal'][0])==2

# ---- FedAvg and fine-tuning, FedPer, FedRep, FedBN

def test_finetuning_leaves_no_trace():
    w,clients,rounds = toy()
    tuning = {i: [torch.arange(3)] for i in (0, 1, 3)}
    out,plain = P.oracle_finetuned(w, clients, rounds, .1, tuning, .2),O.oracle_fedavg(w, clients, rounds, .1)
    for a,b in zip(out, plain):
        assert same(a['w'], b['w']) and same(a['personal'][2], b['w'])
        assert same(a['personal'][3], O.sgd(b['w'], O.plain, clients[3], tuning[3], .2)) and a['down_numbers']==b['down_numbers']
    head = P.oracle_finetuned(w, clients, rounds, .1, tuning, .2, True)[-1]['personal'][0]
    assert torch.equal(head['body.weight'], plain[-1]['w']['body.weight']) and not close(head['head.weight'], plain[-1]['w']['head.weight'], 1e-6)

def test_fedper_by_hand(monkeypatch):
    "After training (b, h) = (2, 10) with n = 1 and (6, 20) with n = 3: the server's b is 5, the personal models (5, 10) and (5, 20), and (5, its first h) for a client never drawn"
    planted(monkeypatch, {1: scalar(2, 10), 3: scalar(6, 20)})
    o = P.oracle_fedper(scalar(0, 7), blanks(1, 3, 2), [{0: [], 1: []}], .1)[0]
    assert close(o['w']['body.weight'], 5) and all(same(o['personal'][i], scalar(5, h)) for i,h in enumerate((10, 20, 7))) and o['up_numbers']=={0: 2, 1: 2} and list(o['w'])==['body.weight','body.bias']

def test_fedper_trains_jointly():
    w,clients,rounds = toy()
    out = P.oracle_fedper(w, clients, rounds, .1, momentum=.9)
    for r in (1, 2):
        start = {**out[r-1]['own'][1], **out[r-1]['w']}
        assert same(start, out[r-1]['personal'][1]) and same(out[r]['own'][1], O.sgd(start, O.plain, clients[1], rounds[r][1], .1, .9))
    heads = {i: (torch.full((3, 5), .1*i), torch.zeros(3)) for i in range(4)}
    o = P.oracle_fedper(w, clients, rounds, .1, heads)[-1]
    assert close(o['personal'][3]['head.weight'], heads[3][0].double()) and same(O.double(dict(list(o['personal'][3].items())[:2])), o['w'])

def test_fedper_statistics():
    w,clients,rounds = normed()
    local,average = (P.oracle_fedper(w, clients, rounds, .1, buffers=b)[-1] for b in ('local','average'))
    assert list(local['w'])==list(w)[:4] and list(average['w'])==list(w)[:7] and torch.equal(local['personal'][3]['bn.running_mean'], w['bn.running_mean'])
    assert local['up_numbers'][1]==45 and average['up_numbers'][1]==55

def test_fedrep_is_not_joint():
    "f = h b x with x = 1 and target 0, ½f²: b = 2, h = 1, rate .1: head first gives h = .6 and then b = 1.928; jointly (FedPer) h = .6 and b = 1.8"
    w = dict(b=T(2), h=T(1))
    loss = lambda v,x,y: .5*(v['h']*v['b']).sum()**2
    step = lambda w,only: O.sgd(w, loss, (T(0), T(0)), [[0]], .1, only=only)
    assert same(step(step(w, ['h']), ['b']), dict(b=T(1.928), h=T(.6))) and same(step(w, ['b', 'h']), dict(b=T(1.8), h=T(.6)))

def test_fedrep_phases():
    w,clients,rounds = toy()
    heads = once(rounds, clients)
    o = P.oracle_fedrep(w, clients, rounds[:1], .1, heads, .2)[0]
    h = O.sgd(w, O.plain, clients[0], heads[0,0], .2, .5, only=['head.weight','head.bias'])
    assert same(o['own'][0], O.sgd(h, O.plain, clients[0], rounds[0][0], .1, .5, only=['body.weight','body.bias']))
    assert same(o['w'], O.mean([m['w'] for m in o['messages'].values()], [1, 1])) and same(o['personal'][3], {**w, **o['w']})
    n = P.oracle_fedrep(w, clients, rounds[:1], .1, heads, .2, uniform=False)[0]
    assert same(n['w'], O.mean([m['w'] for m in o['messages'].values()], [4, 6]))

def test_fedrep_tunes_heads_at_the_end():
    w,clients,rounds = toy()
    heads,tuning = once(rounds, clients),{i: [torch.arange(4)] for i in range(4)}
    a,b = P.oracle_fedrep(w, clients, rounds, .1, heads),P.oracle_fedrep(w, clients, rounds, .1, heads, tuning=tuning)
    assert same(a[-1]['w'], b[-1]['w']) and same(a[1]['personal'][0], b[1]['personal'][0])
    assert all(same(b[-1]['personal'][i], O.sgd(a[-1]['personal'][i], O.plain, clients[i], tuning[i], .1, .5, only=['head.weight','head.bias'])) for i in range(4))

def test_fedrep_statistics_move_in_both_phases():
    w,clients,rounds = normed()
    o = P.oracle_fedrep(w, clients, rounds[:1], .1, {(0, 0): [torch.arange(4)], (0, 1): [torch.arange(4)]*2})[0]
    assert o['messages'][0]['w']['bn.num_batches_tracked']==3+1+len(rounds[0][0]) and list(o['w'])==list(w)[:7]

def test_fedbn_by_hand(monkeypatch):
    "Clients (1, 5) and (3, 9) with n = 1 and 9: the shared entry becomes 2, not 2.8, and the others stay 5 and 9"
    planted(monkeypatch, {1: scalar(1, 5), 9: scalar(3, 9)})
    run = lambda **kw: P.oracle_fedbn(scalar(0, 7), blanks(1, 9, 2), [{0: [], 1: []}], .1, ['head.weight'], **kw)[0]
    o = run()
    assert [(o['personal'][i]['body.weight'].item(), o['personal'][i]['head.weight'].item()) for i in range(3)]==[(2, 5), (2, 9), (2, 7)] and close(run(uniform=False)['w']['body.weight'], 2.8)

def test_fedbn_against_torch():
    w,clients,rounds = normed()
    nets,shared = [network(w) for _ in clients],('0.weight','0.bias','3.weight','3.bias')
    for r,o in zip(rounds, P.oracle_fedbn(w, clients, rounds, .1)):
        for i,bs in r.items():
            opt = torch.optim.SGD(nets[i].parameters(), .1)
            for b in bs: opt.zero_grad(); nn.functional.cross_entropy(nets[i](clients[i][0][b]), clients[i][1][b]).backward(); opt.step()
        mean = {k: sum(nets[i].state_dict()[k] for i in r)/len(r) for k in shared}
        for net in nets: net.load_state_dict({**net.state_dict(), **mean})
        assert all(close(a, b) for i,net in enumerate(nets) for a,b in zip(o['personal'][i].values(), net.state_dict().values()))
        assert all(close(P.classify(o['personal'][i], X), copy.deepcopy(nets[i]).eval()(X).detach()) for i,(X,_) in enumerate(clients)) and set(o['up_numbers'].values())=={53}

# ---- DisTrans

def wide(seed=0):
    w,clients,rounds = toy(seed=seed)
    gen = torch.Generator().manual_seed(5)
    return {**w, 'head.weight': .5*torch.randn(3, 10, generator=gen, dtype=torch.float64)},clients,rounds,{i: torch.rand(6, generator=gen, dtype=torch.float64) for i in range(4)}

def test_distrans_inputs():
    "x = 1, t = .5, a = .2: .9 and 1.1; a = 0 gives x twice"
    w = {'body.weight': T(1)[None], 'body.bias': T(0), 'head.weight': torch.eye(2, dtype=torch.float64), 'head.bias': T(0, 0), 'offset': T(.5)}
    assert close(P.distrans_logits(w, T(1)[None]), T(.9, 1.1)[None]) and close(P.distrans_logits(w, T(1)[None], 0.), T(1, 1)[None])

def test_distrans_offset_moves_by_a_times_the_difference():
    w,clients,rounds,t = wide()
    b,(X,y) = torch.arange(4),clients[0]
    o = P.oracle_distrans(w, clients, [{0: [b]}], .1, t, .5)[0]
    x1,x2 = ((1-.2)*X[b]+.2*t[0]).requires_grad_(),((1+.2)*X[b]-.2*t[0]).requires_grad_()
    loss = nn.functional.cross_entropy(O.head(w, torch.cat([O.features(w, x1), O.features(w, x2)], 1)), y[b])
    g1,g2 = torch.autograd.grad(loss, (x1, x2))
    assert close(o['personal'][0]['offset'], t[0]-.5*.2*(g1-g2).sum(0)) and close(o['personal'][3]['offset'], t[3])

def test_distrans_without_offset_is_uniform_averaging():
    w,clients,rounds,t = wide()
    out = P.oracle_distrans(w, clients, rounds, .1, t, a=0.)
    narrow = {**w, 'head.weight': w['head.weight'][:,:5]+w['head.weight'][:,5:]}
    twice = lambda w,x,y: O.plain({**w, 'head.weight': w['head.weight'][:,:5]+w['head.weight'][:,5:]}, x, y)
    for i in (0, 1): assert same(out[0]['messages'][i]['w'], O.sgd(w, twice, clients[i], rounds[0][i], .1))
    assert same(out[0]['w'], O.mean([m['w'] for m in out[0]['messages'].values()], [1, 1])) and torch.equal(out[-1]['personal'][1]['offset'], t[1])
    assert close(P.distrans_logits({**w, 'offset': t[0]}, clients[0][0], 0.), O.logits(narrow, clients[0][0])) and out[0]['up_numbers'][0]==5*7+3*11

def test_distrans_heads_count_in_the_first_round_only():
    w,clients,rounds,t = wide()
    heads = {i: (torch.full((3, 10), .1*i), torch.zeros(3)) for i in range(4)}
    out = P.oracle_distrans(w, clients, [{i: [] for i in d} for d in rounds], .1, t, heads=heads)
    assert close(out[0]['w']['head.weight'], torch.full((3, 10), .05)) and all(same(o['w'], out[0]['w'], 1e-9) for o in out)

# ---- APFL

ONE = lambda w,x: torch.stack([w['w']*x, 0*x], 1)

@pytest.mark.parametrize('variant,v,alpha', [('released', 1.0107154, .2752361), ('paper', 1.0109456, None)])
def test_apfl_step(variant, v, alpha):
    "Logits (wx, 0), x = 1, y = 0, η = .1, α = ¼, w = 0, v = 1"
    w,got,a = P.apfl_step(dict(w=T(0)), dict(w=T(1)), .25, T(1), torch.tensor([0]), .1, True, variant, ONE)
    g = -1/(1+2.718281828459045**.25) # d CE / dz at z = αv + (1-α)w = ¼
    assert close(w['w'], .05) and close(got['w'], v, 5e-8) and close(a, alpha if alpha else .25-.1*(1-0)*g, 5e-8)

def test_apfl_alpha_is_clipped():
    for a,v,y in [(.99, 30., 0), (.01, -3., 0)]:
        out = P.apfl_step(dict(w=T(0)), dict(w=T(v)), a, T(1), torch.tensor([y]), 1. if v<0 else 1e12, True, 'paper', ONE)[2]
        assert out==(1. if v>0 else 0.)

def test_apfl_servers_model_is_uniform_averaging_and_late_joiners_own_w0():
    w,clients,rounds = toy()
    out = P.oracle_apfl(w, clients, rounds, .1, .25, True)
    assert same(out[0]['messages'][0]['w'], O.sgd(w, O.plain, clients[0], rounds[0][0], .1)) and same(out[0]['w'], O.mean([m['w'] for m in out[0]['messages'].values()], [1, 1]))
    assert same(out[2]['personal'][3], P.mixed(w, out[2]['w'], .25)) and out[2]['state'][3]['alpha']==.25 and out[2]['state'][1]['alpha']!=out[1]['state'][1]['alpha']!=out[0]['state'][1]['alpha']==.25, 'v = w at the very first step, so α has no slope there'
    assert out[2]['state'][0]['alpha']==out[1]['state'][0]['alpha'] and same(out[2]['state'][0]['v'], out[1]['state'][0]['v'])

@pytest.mark.parametrize('variant', ['paper','released'])
def test_apfl_extremes(variant):
    "α = 1: v is local training, α = 0: v stands still"
    w,clients,rounds = toy()
    for a,b in zip(P.oracle_apfl(w, clients, rounds, .1, 1., variant=variant), O.oracle_localonly(w, clients, rounds, .1)): assert all(same(a['personal'][i], b['personal'][i]) for i in range(4))
    o = P.oracle_apfl(w, clients, rounds, .1, 0., variant=variant)[-1]
    assert all(same(s['v'], w) and same(o['personal'][i], o['w']) for i,s in o['state'].items())

def test_apfl_two_steps_by_hand():
    "The second step takes the w and v of the first, and leaves α alone"
    w,clients,rounds = toy()
    (X,y),bs = clients[1],rounds[0][1][:2]
    o = P.oracle_apfl(w, clients, [{1: bs}], .1, .3, True)[0]['state'][1]
    a,u,v = .3,w,w
    for n,b in enumerate(bs):
        new = O.sgd(u, O.plain, clients[1], [b], .1)
        bar = {k: (a*v[k]+(1-a)*u[k]).requires_grad_() for k in w}
        g = dict(zip(bar, torch.autograd.grad(nn.functional.cross_entropy(O.logits(bar, X[b]), y[b]), list(bar.values()))))
        slope = sum(((v[k]-u[k])*g[k]).sum() for k in w)
        v,u = {k: v[k]-.1*a*g[k] for k in w},new
        if n==0: a -= .1*slope.item()
    assert same(o['v'], v) and same(o['w'], u) and close(o['alpha'], a)

# ---- HeteroFL, FedRolex

def test_owners_mean_by_hand():
    "Row (1, 2, 3, 4): the whole client returns (2, 2, 2, 2), the half one (4, 6): (3, 4, 2, 2); the half one alone: (4, 6, 3, 4)"
    whole,half = (dict(w=T(2, 2, 2, 2)), dict(w=T(1, 1, 1, 1))),(dict(w=T(4, 6, 0, 0)), dict(w=T(1, 1, 0, 0)))
    W = dict(w=T(1, 2, 3, 4))
    assert close(P.owners_mean(W, [whole, half])['w'], T(3, 4, 2, 2)) and close(P.owners_mean(W, [half])['w'], T(4, 6, 3, 4))

def test_masked_loss_by_hand():
    "Logits (2, -1, 5), own classes 0 and 1, y = 0: .169846, for the absent class counts with 0; (-2, -1, 5) is predicted as it"
    assert close(O.ce(P.masked(T(2, -1, 5)[None], [0, 1]), torch.tensor([0])), .169846, 5e-7) and P.masked(T(-2, -1, 5)[None], [0, 1]).argmax()==2

@pytest.mark.parametrize('variant,rows', [('paper', [[0, 1], [1, 2], [2, 3], [3, 0], [0, 1]]), ('released', [[0, 1], [3, 0], [2, 3], [1, 2], [0, 1]])])
def test_rolling_windows(variant, rows): assert [P.rolling(.5, 4, r, variant) for r in range(5)]==rows
def test_widths(): assert [len(P.leading(r, 5, 0)) for r in (1, .5, .25, .125, .0625)]==[5, 3, 2, 1, 1]

def rates(rounds, *rs): return {(r, i): rs[i] for r,d in enumerate(rounds) for i in d}

def test_zero_rows_are_the_mask():
    w,clients,_ = toy()
    assert close(P.masked(O.logits(w, clients[0][0]), [0, 2]), O.logits(P.only_rows(w, [0, 2]), clients[0][0]))

def test_heterofl_at_full_width_is_uniform_averaging():
    "Every class at every client, no clipping"
    w,clients,rounds = toy()
    for _,y in clients: y[:3] = torch.arange(3)
    o,*more = P.oracle_heterofl(w, clients, rounds, .1, rates(rounds, 1, 1, 1, 1), clip=None)
    sent = [O.sgd(w, O.plain, clients[i], rounds[0][i], .1, .9, 5e-4) for i in (0, 1)]
    assert same(o['w'], O.mean(sent, [1, 1])) and all(same(p, o['w']) for p in o['personal'].values()) and o['up_numbers']=={0: 53, 1: 53}

def test_heterofl_cuts_and_merges():
    "Client 0 (⅖ wide, without class 2) and client 1 (whole): units 2 to 4 and row 2 of the head are client 1's alone"
    w,clients,rounds = toy()
    clients = [(X, y.clamp(max=1)) if i==0 else (X, torch.cat([torch.arange(3), y[3:]])) for i,(X,y) in enumerate(clients)]
    clients[0][1][:2] = torch.arange(2)
    o = P.oracle_heterofl(w, clients, rounds[:1], .1, rates(rounds, .4, 1, 1, 1))[0]
    a,b = (o['messages'][i]['w'] for i in (0, 1))
    assert list(a['head.weight'].shape)==[3, 2] and o['up_numbers']=={0: 2*6+2+3*2+3, 1: 53} and o['units'][0]==[0, 1] and o['classes'][0]==[0, 1]
    want = {k: t.clone() for k,t in b.items()}
    want['body.weight'][:2],want['body.bias'][:2] = (a['body.weight']+b['body.weight'][:2])/2,(a['body.bias']+b['body.bias'][:2])/2
    want['head.weight'][:2,:2],want['head.bias'][:2] = (a['head.weight'][:2]+b['head.weight'][:2,:2])/2,(a['head.bias'][:2]+b['head.bias'][:2])/2
    assert same(o['w'], want) and not o['personal'][0]['head.weight'][2].any() and same(o['personal'][1], o['w'])
    alone = P.oracle_heterofl(w, clients, [{0: rounds[0][0]}], .1, rates(rounds, .4, 1, 1, 1))[0]['w']
    assert torch.equal(alone['head.weight'][2], w['head.weight'][2]) and torch.equal(alone['body.weight'][2:], w['body.weight'][2:]) and not torch.equal(alone['body.weight'][:2], w['body.weight'][:2])

def test_heterofl_trains_on_masked_logits_and_clips():
    w,clients,rounds = toy()
    (X,y),bs = clients[0],rounds[0][0]
    y.clamp_(max=1)
    net = nn.Sequential(nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 3)).double()
    with torch.no_grad():
        for p,t in zip(net.parameters(), (w['body.weight'][:3], w['body.bias'][:3], w['head.weight'][:,:3], w['head.bias'])): p.copy_(t)
    opt = torch.optim.SGD(net.parameters(), .1, .9, weight_decay=5e-4)
    for b in bs:
        opt.zero_grad(); nn.functional.cross_entropy(net(X[b])*T(*(float(c in y) for c in range(3))), y[b]).backward()
        nn.utils.clip_grad_norm_(net.parameters(), .3); opt.step()
    o = P.oracle_heterofl(w, clients, [{0: bs}], .1, {(0, 0): .5}, clip=.3)[0]
    assert all(close(a, p.detach()) for a,p in zip(o['messages'][0]['w'].values(), net.parameters()))

def test_heterofl_static_batchnorm():
    "A scaler in front of a BatchNorm of batch statistics, and one pass over all data for those of the scored model"
    w,clients,rounds = normed()
    six = {k: w[k] for k in P.trained(w)}
    every = torch.arange(sum(len(y) for _,y in clients))
    o = P.oracle_heterofl(six, clients, rounds[:1], .1, rates(rounds, .4, 1, 1, 1), statistics={0: every.split(8)})[0]
    net,X = network(w),torch.cat([X for X,_ in clients])
    net.load_state_dict({**net.state_dict(), **dict(zip((k for k,_ in net.named_parameters()), o['w'].values()))})
    net[1].momentum = None; net[1].reset_running_stats()
    for b in every.split(8): net(X[b])
    assert all(close(a, b) for a,b in zip(o['personal'][1].values(), P.only_rows(dict(net.state_dict()), o['classes'][1]).values()))
    assert o['up_numbers'][0]==2*6+2+4+3*2+3
    plain = P.oracle_heterofl(six, clients, rounds[:1], .1, rates(rounds, .4, 1, 1, 1), scale=False)[0]
    assert not torch.equal(plain['w']['body.weight'][:2], o['w']['body.weight'][:2]) and close(plain['w']['body.weight'], o['w']['body.weight'], .1)
    (X,y),sub = clients[0],P.cut_out(six, [0, 1])
    F,f,g,c,H,h = sub.values()
    z = (X @ F.T + f)/.4
    by_hand = ((z-z.mean(0))/(z.var(0, correction=0)+1e-5).sqrt()*g+c).clamp(min=0) @ H.T + h
    full = {**P.part(sub, list(sub)[:4]), 'm': T(0, 0), 'v': T(1, 1), 'n': torch.tensor(0), **P.part(sub, list(sub)[4:])}
    assert close(P.forward(full, X, True, .4)[0], by_hand)

@pytest.mark.parametrize('variant', ['paper','released'])
def test_rolex_first_round_is_heterofl(variant):
    w,clients,rounds = toy()
    rs = rates(rounds, .4, .6, .2, 1)
    a,b = P.oracle_fedrolex(w, clients, rounds, .1, rs, variant),P.oracle_heterofl(w, clients, rounds, .1, rs, decay=1e-3)
    assert same(a[0]['w'], b[0]['w']) and not same(a[1]['w'], b[1]['w'], 1e-6)
    assert a[1]['units'][1]==([1, 2, 3] if variant=='paper' else [4, 0, 1]) and torch.equal(a[1]['messages'][1]['w']['body.weight'][0]!=a[0]['w']['body.weight'][a[1]['units'][1][0]], torch.ones(6, dtype=torch.bool))
    still = set(range(5))-set(a[1]['units'][1])-set(a[1]['units'][0])
    assert all(torch.equal(a[1]['w']['body.weight'][j], a[0]['w']['body.weight'][j]) for j in still) and still

# ---- Fed-LAMB

@pytest.mark.parametrize('decay,want', [(0., (2.5, 3.999986)), (.01, (2.500039, 3.993721))])
def test_lamb_first_round(decay, want):
    "p = (3, 4), g = (1, 0), η = .1; m/d = (3.162261, 9.0e-5), and the step is as long as η‖p‖ = .5"
    tiny = torch.full((2,), 1e-8, dtype=torch.float64)
    p,m,v = P.lamb_step(T(3, 4), T(1, 0), tiny, tiny, .1, decay=decay)
    assert close(p, T(*want), 5e-7) and close(m/(v.sqrt()+1e-8), T(3.162261, 9.0e-5), 5e-7) and close((p-T(3, 4)).norm(), .5)

def test_lamb_later_round():
    tiny = torch.full((2,), 1e-8, dtype=torch.float64)
    assert close(P.lamb_step(T(3, 4), T(1, 0), tiny, tiny, .1, T(.25, .25), 0.)[0], T(2.5, 4), 5e-7)

def test_lamb_zero_tensor():
    tiny = torch.full((2,), 1e-8, dtype=torch.float64)
    assert not P.lamb_step(T(0, 0), T(3, 4), tiny, tiny, .1)[0].any() and close(P.lamb_step(T(0, 0), T(3, 4), tiny, tiny, .1, guarded=True)[0].norm(), .1)

def test_lamb_corrected_start():
    "The paper's first step: m/(1-.9) = g and v/(1-.999) = g², both from 0"
    _,m,v = P.lamb_step(T(3, 4), T(2, 1), T(0, 0), T(0, 0), .1, t=1)
    assert close(m, T(2, 1)) and close(v, T(4, 1))

def test_fedlamb_rounds():
    w,clients,rounds = toy()
    out = P.oracle_fedlamb(w, clients, rounds, .01)
    for r,o in enumerate(out):
        before = out[r-1]['top'] if r else {k: torch.full_like(t, 1e-8) for k,t in w.items()}
        v = O.mean([m['v'] for m in o['messages'].values()], [1, 1])
        assert all(torch.equal(o['top'][k], torch.maximum(before[k], v[k])) for k in w) and same(o['w'], O.mean([m['w'] for m in o['messages'].values()], [1, 1])) and o['up_numbers']==o['down_numbers']=={i: 106 for i in rounds[r]}
    assert all(close(t, 1e-8, 0) for m in out[-1]['moments'][3] for t in m.values()) and same(out[2]['moments'][0][0], out[1]['moments'][0][0])
    (X,y),b = clients[2],rounds[2][2][0]
    one = P.oracle_fedlamb(w, clients, [*rounds[:2], {2: [b]}], .01)[2]['w'] # a late joiner's only step, with the √v̂ received
    g = O.grad(lambda v: O.plain(v, X[b], y[b]), out[1]['w'])
    for k,p in out[1]['w'].items():
        u = (.9e-8+.1*g[k])/(out[1]['top'][k].sqrt()+1e-8) + .01*p
        assert close(one[k], p - .01*p.norm()*u/u.norm())

@pytest.mark.parametrize('variant', ['paper','released'])
def test_fedlamb_by_hand(variant):
    "One client, two rounds of two steps: moments go on, and t counts from 1 in each round"
    w,clients,_ = toy()
    (X,y),bs = clients[0],[torch.arange(3), torch.arange(1, 4)]
    out = P.oracle_fedlamb(w, clients, [{0: bs}]*2, .01, .1, variant)
    m,v,top = ({k: torch.full_like(t, 1e-8) for k,t in w.items()} for _ in range(3))
    for r in range(2):
        for n,b in enumerate(bs):
            g = O.grad(lambda u: O.plain(u, X[b], y[b]), w)
            for k in w:
                m[k],v[k] = .9*m[k]+.1*g[k],.999*v[k]+.001*g[k]**2
                if variant=='paper': m[k],v[k] = m[k]/(1-.9**(n+1)),v[k]/(1-.999**(n+1))
                u = m[k]/((v if variant=='released' and r==0 else top)[k].sqrt()+1e-8) + .1*w[k]
                w = {**w, k: w[k]-.01*w[k].norm()*u/u.norm()}
        top = {k: torch.maximum(top[k], v[k]) for k in w}
        assert same(out[r]['w'], w) and all(close(out[r]['top'][k]/top[k], torch.ones_like(w[k])) for k in w) # written back as printed, v grows without bound

# ---- PartialFed

def test_partialfed_by_hand(monkeypatch):
    "Uploads (5, 7, 9) and (7, 1, 1) of equal n: the server has (6, 4, 5), and the clients go on from (6, 7, 9) and (6, 1, 1)"
    three = lambda *x: {k: T(v) for k,v in zip(('conv','bn','fc'), x)}
    starts = []
    monkeypatch.setattr(P, 'fit', lambda w, data, *a, **kw: starts.append(w) or (three(5, 7, 9) if not data[0].any() else three(7, 1, 1)))
    clients = [(torch.zeros(2, 1), torch.zeros(2).long()),(torch.ones(2, 1), torch.zeros(2).long())]
    out = P.oracle_partialfed(three(0, 0, 0), clients, [{0: [], 1: []}]*2, .1, ['bn','fc'])
    assert same(out[0]['w'], three(6, 4, 5)) and same(out[0]['personal'][0], three(6, 7, 9)) and same(out[0]['personal'][1], three(6, 1, 1))
    assert same(starts[2], three(6, 7, 9)) and same(starts[3], three(6, 1, 1)) and out[0]['up_numbers']=={0: 3, 1: 3} and out[0]['down_numbers']=={0: 1, 1: 1}

def test_partialfed_without_batchnorm_is_fedper_with_more_bytes():
    w,clients,rounds = toy()
    for a,b in zip(P.oracle_partialfed(w, clients, rounds, .1), P.oracle_fedper(w, clients, rounds, .1)):
        assert all(same(a['personal'][i], b['personal'][i]) for i in range(4)) and a['down_numbers']==b['down_numbers'] and set(a['up_numbers'].values())=={53}

def test_partialfed_keeps_statistics():
    w,clients,rounds = normed()
    o = P.oracle_partialfed(w, clients, rounds, .1)[-1]
    assert torch.equal(o['personal'][1]['bn.running_mean'], o['own'][1]['bn.running_mean']) and o['down_numbers'][1]==35 and o['up_numbers'][1]==73

def adaptive(w, clients, rounds, layers, lr_pi=.1, seed=3):
    gen = torch.Generator().manual_seed(seed)
    strategy = once(rounds, clients)
    gumbels = {k: [-torch.log(-torch.log(torch.rand(len(layers), 2, generator=gen, dtype=torch.float64))) for _ in bs] for k,bs in strategy.items()}
    return P.oracle_partialfed_adaptive(w, clients, rounds, .2, layers, strategy, gumbels, lr_pi),strategy,gumbels

def test_partialfed_adaptive_undecided_is_fedavg():
    w,clients,rounds = toy()
    out,*_ = adaptive(w, clients, rounds, [LAYERS[0], LAYERS[2]], 0.)
    assert all(same(a['w'], b['w']) and all(same(p, a['w']) for p in a['personal'].values()) for a,b in zip(out, O.oracle_fedavg(w, clients, rounds, .2)))

def test_partialfed_adaptive_by_hand():
    "Client 1's second round: π after its first pass, the layers that it starts with, and its training"
    w,clients,rounds = toy()
    layers = [LAYERS[0], LAYERS[2]]
    out,strategy,gumbels = adaptive(w, clients, rounds, layers)
    assert not out[0]['pi'][0].any() and same(out[0]['personal'][0], out[0]['w'])
    W,own,(X,y) = out[0]['w'],out[0]['messages'][1]['w'],clients[1]
    pi = torch.zeros(2, 2, dtype=torch.float64)
    for b,n in zip(strategy[1,1], gumbels[1,1]):
        p = pi.clone().requires_grad_()
        s = (p+n).softmax(1)
        w2 = {k: s[t,0]*W[k]+s[t,1]*own[k] for t,ks in enumerate(layers) for k in ks}
        pi = pi - .1*torch.autograd.grad(nn.functional.cross_entropy(O.logits(w2, X[b]), y[b]), p)[0]
    assert close(out[1]['pi'][1], pi) and close(pi.sum(1), T(0, 0)) and pi.any()
    start = {k: (W if pi[t,0]>=pi[t,1] else own)[k] for t,ks in enumerate(layers) for k in ks}
    assert same(out[1]['messages'][1]['w'], O.sgd(start, O.plain, clients[1], rounds[1][1], .2)) and same(out[1]['w'], O.mean([m['w'] for m in out[1]['messages'].values()], [6, 4]))
    assert any((o['pi'][i][:,0]<o['pi'][i][:,1]).any() for o in out for i in range(4)), 'own layers should win somewhere'

# ---- CD²-pFed

def test_cyclic_divergence():
    "(.5, .5) and (.8, .2): ½ (.2231436 + .1927448)"
    assert close(P.cyclic(T(.5, .5).log()[None], T(.8, .2).log()[None]), .2079442, 5e-8)

def test_private_channels(): assert P.private(.5, 50, 101, 64)==16 and P.private(.5, 0, 101, 64)==0 and P.private(1., 100, 101, 64)==64 and P.private(.5, 0, 1, 64)==0

def test_cd2_without_private_units_is_fedavg():
    w,clients,rounds = toy()
    assert all(same(a['w'], b['w']) and same(a['personal'][3], a['w']) for a,b in zip(P.oracle_cd2pfed(w, clients, rounds, .1, 0.), O.oracle_fedavg(w, clients, rounds, .1)))

def test_cd2_all_private_shares_the_last_bias_only():
    w,clients,rounds = toy()
    out = P.oracle_cd2pfed(w, clients, rounds, .1, 1.)
    assert [o['private'] for o in out]==[0, 2, 5] and out[2]['up_numbers']=={1: 3, 2: 3} and out[1]['up_numbers']=={0: 3*6+3+3*3+3, 1: 3*6+3+3*3+3}
    assert torch.equal(out[2]['w']['body.weight'], out[1]['w']['body.weight']) and torch.equal(out[2]['personal'][3]['body.weight'], w['body.weight']) and torch.equal(out[2]['personal'][3]['head.bias'], out[2]['w']['head.bias'])

def test_cd2_round_by_hand():
    "Round 1 of 3 with p = 1 has the last two of five units private: client 1 begins with W's first three and its own trained last two"
    w,clients,rounds = toy()
    out = P.oracle_cd2pfed(w, clients, rounds, .1, 1., .7)
    W,own,(X,y) = out[0]['w'],O.sgd(w, O.plain, clients[1], rounds[0][1], .1),clients[1]
    v = {k: t.clone() for k,t in W.items()}
    v['body.weight'][3:],v['body.bias'][3:],v['head.weight'][:,3:] = own['body.weight'][3:],own['body.bias'][3:],own['head.weight'][:,3:]
    for b in rounds[1][1]:
        v = {k: t.detach().requires_grad_() for k,t in v.items()}
        f = O.features(v, X[b])
        s,l = f[:,:3] @ v['head.weight'][:,:3].T + v['head.bias'],f[:,3:] @ v['head.weight'][:,3:].T + v['head.bias']
        kl = lambda a,b: nn.functional.kl_div(b.log_softmax(1), a.log_softmax(1), reduction='batchmean', log_target=True)
        loss = nn.functional.cross_entropy(O.head(v, f), y[b]) + .7*(kl(s, l)+kl(l, s))/2
        v = {k: t.detach()-.1*g for (k,t),g in zip(v.items(), torch.autograd.grad(loss, list(v.values())))}
    m = out[1]['messages'][1]['w']
    assert close(m['body.weight'], v['body.weight'][:3]) and close(m['head.weight'], v['head.weight'][:,:3]) and close(m['head.bias'], v['head.bias'])
    p = out[1]['personal'][1]
    assert close(p['body.weight'], torch.cat([out[1]['w']['body.weight'][:3], v['body.weight'][3:]])) and torch.equal(out[1]['w']['body.weight'][3:], W['body.weight'][3:])
    other = out[1]['messages'][0]['w']
    assert close(out[1]['w']['body.bias'][:3], (6*m['body.bias']+4*other['body.bias'])/10)

# ---- FedFA

def test_ffa_by_hand():
    "One channel, x₁ = (1, 3), x₂ = (5, 9): μ = (2, 7), σ = (√2, √8), S_μ = 12.5, S_σ = 1; γ = 1, ε = (1, 0), ε' = 0: x₁ becomes (6, 8) but for the 1e-6, x₂ stays"
    x = torch.stack([T(1, 3), T(5, 9)])[:,None,None]
    out,m,s = P.ffa(x, T(1), T(1), T(1, 0)[:,None], T(0, 0)[:,None])
    shift = sqrt(2*(12.5+1e-6))
    assert close(out[:,0,0], torch.stack([T(1+shift, 3+shift), T(5, 9)])) and close(out[:,0,0], torch.stack([T(6, 8), T(5, 9)]), 1e-6) and close(m, 4.5) and close(s, (sqrt(2)+sqrt(8))/2, 1e-6)

def test_ffa_shares_between_clients():
    "m̄ = (1, 3) and (3, 7): one variance 19/3 for both channels, or 2 and 8, whose γ are 6/7 and 8/7"
    assert close(P.between([T(1, 3), T(3, 7)], 'released'), T(19/3, 19/3)) and close(P.between([T(1, 3), T(3, 7)], 'paper'), T(2, 8))
    x = torch.randn(3, 2, 2, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out,m,_ = P.ffa(x, T(2, 8), T(1, 1), torch.ones(3, 2, dtype=torch.float64), torch.zeros(3, 2, dtype=torch.float64))
    moved = (out-x).mean((2, 3)) # √((1+γ) S) for ε = 1, σ unchanged
    S = x.mean((2, 3)).var(0)+1e-6
    assert close(moved, ((1+T(6/7, 8/7))*S).sqrt().expand(3, 2), 1e-6)

def fa_toy():
    w,clients,rounds = toy()
    gen = torch.Generator().manual_seed(11)
    clients = [(torch.randn(len(y), 6, 2, 2, generator=gen, dtype=torch.float64), y) for _,y in clients]
    rounds = [{i: [torch.arange(4), torch.arange(4).flip(0)] for i in d} for d in rounds]
    noise = {(r, i): [None, tuple(torch.randn(4, 5, generator=gen, dtype=torch.float64) for _ in range(2))] for r,d in enumerate(rounds) for i in d}
    return w,clients,rounds,noise

def test_fedfa_without_noise_is_uniform_averaging():
    w,clients,rounds,noise = fa_toy()
    out = P.oracle_fedfa(w, clients, rounds, .1, {k: [None]*2 for k in noise})
    net = lambda v,x,y: O.ce(P.fedfa_logits(v, x), y)
    assert same(out[0]['messages'][0]['w'], O.sgd(w, net, clients[0], rounds[0][0], .1)) and same(out[0]['w'], O.mean([m['w'] for m in out[0]['messages'].values()], [1, 1]))
    assert not out[-1]['S']['mu'].any() and out[-1]['up_numbers'][1]==73 and not out[-1]['V']['mu'].any()

def test_fedfa_variants():
    w,clients,rounds,noise = fa_toy()
    a,b = (P.oracle_fedfa(w, clients, rounds, .1, noise, v) for v in ('released','paper'))
    assert same(a[0]['w'], b[0]['w']) and not same(a[1]['w'], b[1]['w'], 1e-9)
    m = [o['mu'] for o in a[0]['messages'].values()]
    X = clients[0][0]
    step = O.sgd(w, lambda v,x,y: O.ce(P.fedfa_logits(v, x), y), clients[0], rounds[0][0][:1], .1)
    assert close(m[0], .01*P.maps(step, X[:4]).mean((2, 3)).mean(0)) and close(a[0]['V']['mu'], torch.stack(m).var().expand(5)) and close(b[0]['V']['mu'], torch.stack(m).var(0))
    assert close(a[1]['messages'][1]['mu'], .99*a[0]['S']['mu']+.01*P.maps(O.sgd(a[0]['w'], lambda v,x,y: O.ce(P.fedfa_logits(v, x), y), clients[1], rounds[1][1][:1], .1), clients[1][0][:4]).mean((2, 3)).mean(0))

def test_fedfa_momentum_goes_on():
    w,clients,rounds,_ = fa_toy()
    net,data = lambda v,x,y: O.ce(P.fedfa_logits(v, x), y),clients[0]
    alone = [{0: rounds[0][0]}]*2
    out = P.oracle_fedfa(w, clients, alone, .1, {(r, 0): [None]*2 for r in (0, 1)}, momentum=.9)
    assert same(out[1]['w'], O.sgd(w, net, data, rounds[0][0]*2, .1, .9)) and close(out[1]['V']['mu'], 1), 'one client has no variance'

# ---- FedFed

def test_fedfed_loss():
    "One sample, z = 2, μ = (1, 0), ℓ = 0, an image of 6 numbers: KL .0833333; with MSE .01, CE 1 and 2: 3.3004167"
    kl = P.vae_kl(T(1, 0)[None], T(0, 0)[None], 3*2)
    assert close(kl, 1/12) and close(P.distilling_loss(.01, 1., 2., kl), 3.3004167, 5e-8)
    assert close(P.distilling_loss(.01, 1., 2., kl, scarce=True), 2.5+2+.8+.0025/12) and close(P.distilling_loss(.01, 1., 2., kl, lopsided=True), .5+10+4+.025/12)

def test_fedfed_shares_a_difference(): assert close(P.shared_part(T(.5, .2), T(.4, .4), T(.1, 0)), T(.2, -.2))

def test_fedfed_trains_on_all_three():
    w,clients,rounds = toy()
    gen = torch.Generator().manual_seed(2)
    pool = (torch.randn(9, 6, generator=gen, dtype=torch.float64), torch.randint(3, (9,), generator=gen), torch.randn(9, 6, generator=gen, dtype=torch.float64), torch.randint(3, (9,), generator=gen))
    picks = {(r, i): [(torch.arange(n%5, n%5+3), torch.arange(3)) for n in range(len(bs))] for r,d in enumerate(rounds) for i,bs in d.items()}
    o = P.oracle_fedfed(w, clients, rounds, .1, pool, picks)[0]
    X,y = torch.cat([clients[0][0], pool[0], pool[2]]),torch.cat([clients[0][1], pool[1], pool[3]])
    bs = [torch.cat([b, 4+j, 13+k]) for b,(j,k) in zip(rounds[0][0], picks[0,0])]
    twice = P.oracle_fedfed(w, clients, [{0: rounds[0][0]}]*2, .1, pool, {(r, 0): picks[0,0] for r in (0, 1)})[1]
    assert same(twice['w'], O.sgd(w, O.plain, (X, y), bs*2, .1, .9, 1e-4))
    assert same(o['messages'][0]['w'], O.sgd(w, O.plain, (X, y), bs, .1, .9, 1e-4)) and same(o['w'], O.mean([m['w'] for m in o['messages'].values()], [1, 1]))

# ---- all

def test_nobody_moves_who_is_away():
    "The server's model of a round depends on nothing that was drawn for later ones, and no oracle touches what it is given"
    w,clients,rounds = toy()
    before,data = copy.deepcopy(w),copy.deepcopy(clients)
    ones = {(r, i): 1. for r in range(3) for i in range(4)}
    runs = [lambda n: P.oracle_pfededit(w, clients, rounds[:n], .1, LAYERS, 1, PROBE), lambda n: P.oracle_fedper(w, clients, rounds[:n], .1), lambda n: P.oracle_fedrep(w, clients, rounds[:n], .1, once(rounds, clients)),
            lambda n: P.oracle_apfl(w, clients, rounds[:n], .1, adaptive=True), lambda n: P.oracle_heterofl(w, clients, rounds[:n], .1, ones), lambda n: P.oracle_fedlamb(w, clients, rounds[:n], .1), lambda n: P.oracle_partialfed(w, clients, rounds[:n], .1)]
    for f in runs:
        a,b = f(3),f(2)
        assert all(same(x['w'], y['w']) and all(same(x['personal'][i], y['personal'][i]) for i in range(4)) for x,y in zip(a, b))
        assert all(set(o['messages'])==set(o['down_numbers'])==set(o['up_numbers'])==set(d) and set(o['personal'])=={0, 1, 2, 3} for o,d in zip(a, rounds))
    assert same(w, before, 0) and all(torch.equal(a, b) for x,y in zip(clients, data) for a,b in zip(x, y))
