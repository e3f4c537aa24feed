"FedRef, optimisers on the server, FedDyn and SCAFFOLD against the oracles of the FedRef paper and against Flower, and what classes forget."
import numpy as np, pytest, torch
import oracles_004 as P
from fedbook.chapters.fedref import ALGORITHMS, comparison_setting, relative_cost
from fedbook.errors import Refused
from fedbook.experiments import federation as experiment
from fedbook.method import LocalTraining, METHODS, method
from fedbook.methods.fedref import reference, released_bracket, server_step
from fedbook.optim import Cosine, SGD
from fedbook.results import forgetting
from fedbook.rounds import run
from test_oracles import agree, cases, double, drive
from test_rounds import federation, mlp, same

# FedRef: clients send a cost beside their model

def with_cost(m, i): return dict(w=m['w'], loss=double(m['loss']))

def fedref(variant, settings, theirs=None, **kw): return cases('fedref', getattr(P, f'oracle_fedref_{variant}'), dict(variant=variant, **settings), settings if theirs is None else theirs, message=with_cost, **kw)

PULL = dict(eta=.7, lam=.3)

# The oracles know Flower's way by v₀ = 0, and by a correction of Adam's rate

ADAPTIVE = dict(eta=.05, tau=.02, beta1=.8)

def adaptive(name, oracle, **more):
    def theirs(flower): return dict(**ADAPTIVE, **more, v0=0. if flower else None, **(dict(flower=flower) if name=='fedadam' else {}))
    return [c for flower in (False, True) for c in cases(name, oracle, dict(**ADAPTIVE, **more, flower=flower), theirs(flower))]

# SCAFFOLD sends the model where the oracle has its change

def scaffold(w0, *data, **settings):
    return [dict(o, messages={i: dict(w=o['trained'][i], dc=m['dc']) for i,m in o['messages'].items()}) for o in P.oracle_scaffold(w0, *data, **settings)]

CASES = [
    fedref('printed', PULL), fedref('intended', dict(PULL, p=2)),
    *(fedref('intended', dict(PULL, p=2, history=h, current=c), optimisers=('plain',)) for h,c in (('outputs', True), ('aggregates', False), ('outputs', False))),
    *(fedref('released', dict(eta=.2, lam=.3, p=p, lam2=.1, cap=.1), dict(eta=.2, lam1=.3, lam2=.1, p=p)) for p in (1, 2)),
    cases('fedavgm', P.oracle_fedavgm, dict(eta=.4, beta=.6)), adaptive('fedadagrad', P.oracle_fedadagrad), adaptive('fedadam', P.oracle_fedadam, beta2=.95),
    cases('feddyn', P.oracle_feddyn, dict(alpha=.3)),
    *(cases('scaffold', scaffold, dict(eta=.7, option=o), optimisers=('plain',), message=lambda m,i: m) for o in (1, 2))]

@pytest.mark.parametrize('name,optimiser,oracle,settings,theirs,hooks', [c for several in CASES for c in several])
def test_all_rounds(name, optimiser, oracle, settings, theirs, hooks): drive(name, optimiser, oracle, settings, theirs, **hooks)

@pytest.mark.parametrize('option', [1, 2])
def test_weight_decay_is_part_of_scaffold_s_slope(option):
    drive('scaffold', SGD(.1, 0., .05), scaffold, dict(option=option), dict(option=option), message=lambda m,i: m)

# ---- the server alone, over many rounds of made-up aggregates

def tensors(seed): return {k: torch.randn(s, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for k,s in dict(weight=(3, 4), bias=(3,), scale=()).items()}

def trajectory(m, rounds, costs):
    "What the server makes of the same replies that `theirs` sees"
    state,out = m.server(tensors(0), 2),[]
    for r in range(rounds):
        state = m.aggregate(state, [dict(w=tensors(10*r+k), loss=double(costs[r][k]), client=k) for k in (1, 2)], [1, 3])
        out.append(state)
    return out

COSTS = [[0., 3/(r+1), 2-.1*r] for r in range(24)]

@pytest.mark.parametrize('p', [1, 3, 5])
@pytest.mark.parametrize('first,cap', [(1e-2, .3), (.2, .2)])
def test_the_released_queue_over_many_rounds(p, first, cap):
    "The oracle's step on the same aggregates: slots, the late begin, the row sum, the hidden schedule"
    past,seen,slots = [],[],[None]*p
    for t,state in enumerate(trajectory(method('fedref', variant='released', eta=.1, lam=.2, p=p, lam2=first, cap=cap), 24, COSTS), 1):
        A = P.mean([tensors(10*(t-1)+k) for k in (1, 2)], [1, 3])
        slots[t%p] = A
        expected = A
        if t > p:
            seen.append((sum(COSTS[t-1][1:])/2, A, P.mean(slots, range(1, p+1))))
            if t > p+1: expected = {k: A[k] - .1*P.released_scalar(*[(F, A[k], R[k]) for F,A,R in seen[:-3:-1]], .2, P.released_lambda2(t, first, cap)) for k in A}
        agree(state['w'], expected, f'round {t}')

def test_the_reference_is_no_longer_than_it_is_old():
    history = [tensors(s) for s in range(4)]
    for n,p in ((1, 3), (2, 3), (4, 3), (4, 1)): agree(reference(history[:n], p), P.mean(history[:n][-p:], [1]*min(n, p)), f'{n} of {p}')

def test_a_bracket_that_is_no_number_is_none():
    "NaN counts as 0, and the tensor stays as it is"
    endless,zeros = (dict(w=torch.full((2,), x)) for x in (torch.inf, 0.))
    assert released_bracket((endless, endless), (zeros, zeros), torch.zeros(2), 1., 1.)['w']==0

@pytest.mark.parametrize('settings', [dict(lam=0.), dict(eta=0.), dict(lam=0., variant='printed'), dict(p=1), dict(variant='released', eta=0.)])
def test_without_a_pull_it_is_fedavg_to_the_bit(settings):
    a,b = run(federation(rounds=6))[0]['server']['w'],run(federation(method('fedref', **settings), rounds=6))[0]['server']['w']
    assert same(a, b)

def test_without_norms_the_released_step_is_fedavg_only_while_the_mean_cost_stays():
    "W = A − η (F(t) − F(t−1)) in every weight, from round p + 2 on"
    m = method('fedref', variant='released', eta=.5, lam=0., lam2=0., p=1)
    averages = trajectory(method('fedavg'), 6, COSTS)
    assert all(same(a['w'], b['w']) for a,b in zip(trajectory(m, 6, [[0., 3., 1.]]*6), averages))
    for t,(a,b) in enumerate(zip(trajectory(m, 6, COSTS), averages)):
        change = sum(COSTS[t][1:])/2 - sum(COSTS[t-1][1:])/2 if t > 1 else 0.
        agree(a['w'], {k: w - .5*change for k,w in b['w'].items()}, f'round {t+1}')

def test_the_printed_step_is_the_intended_one_with_only_the_aggregate_before():
    a,b = (run(federation(method('fedref', **s), rounds=5))[0]['server']['w'] for s in (dict(variant='printed'), dict(p=1, current=False)))
    assert same(a, b)

def test_the_history_is_kept_no_longer_than_it_is_read():
    for p in (1, 4):
        state = run(federation(method('fedref', p=p), rounds=6))[0]['server']
        assert len(state['history'])==p and int(state['round'])==6

@pytest.mark.parametrize('settings,word', [(dict(variant='printd'), 'printed'), (dict(variant='printed', current=False), 'history'), (dict(variant='released', history='outputs'), 'history'), (dict(history='output'), 'outputs'), (dict(p=0), 'p'), (dict(lam=-1.), 'lam'), (dict(p=2.5), 'whole number')])
def test_refusals(settings, word):
    with pytest.raises(Refused, match=word): method('fedref', **settings)

@pytest.mark.parametrize('history,p,word', [([], 3, 'none'), ([tensors(0)], 0, '0 is no whole'), ([tensors(0)], -1, '-1 is no whole'), ([tensors(0)], 2.5, '2.5 is no whole')])
def test_a_reference_to_nothing_is_refused(history, p, word):
    with pytest.raises(Refused, match=word): reference(history, p)

@pytest.mark.parametrize('settings,word', [(dict(variant='printd'), "did you mean 'printed'"), (dict(lam=-1.), 'λ = -1'), (dict(eta=-1.), 'η = -1'), (dict(lam2=-1.), 'λ₂ = -1'), (dict(lam=float('nan')), 'nan')])
def test_a_step_of_no_variant_or_away_from_its_goal_is_refused(settings, word):
    with pytest.raises(Refused, match=word): server_step(tensors(0), tensors(2), tensors(1), (0., 0.), **{**dict(eta=1., lam=.1), **settings})

# ---- optimisers on the server beside Flower 1.41.0, two rounds of made-up replies
# pip install flwr==1.41.0, then for t = 1, 2 and likewise for the others:
#   s = FedAdam(initial_parameters=ndarrays_to_parameters([W]), eta=.1, beta_1=.9, beta_2=.99, tau=1e-2)
#   s.aggregate_fit(t, [(None, FitRes(Status(Code.OK, ''), ndarrays_to_parameters([w]), n, {})) for w,n in replies], [])

RATES = dict(eta=.1, tau=.01)
FLOWER = {
    'fedavgm': (dict(beta=.9, eta=.5), [[.95, 1.8], [.855, 1.42]]), 'fedadagrad': (dict(RATES, flower=True), [[.9090909, 1.9024390], [.8430500, 1.8329566]]),
    'fedadam': (dict(RATES, flower=True), [[.9628770, 1.9406032], [.9127547, 1.8678444]]), 'fedyogi': (dict(RATES, beta2=.99), [[.95, 1.92], [.8712994, 1.8058320]])}
REDDI = {'fedadagrad': (RATES, [[.9095012, 1.9024688], [.8436140, 1.8329970]]), 'fedadam': (RATES, [[.9585178, 1.9219039], [.8887520, 1.8089579]]),
    'fedyogi': (dict(RATES, beta2=.99, flower=False), [[.9585786, 1.9219224], [.8890338, 1.8092390]])} # v₀ = τ², by NumPy

@pytest.mark.parametrize('name,settings,expected', [(n, *v) for table in (FLOWER, REDDI) for n,v in table.items()])
def test_two_rounds_are_those_of_flower_and_of_the_paper(name, settings, expected):
    m,W = method(name, **settings),double([1., 2.])
    state = m.server(dict(w=W), 2)
    for want in expected:
        W = state['w']['w']
        state = m.aggregate(state, [dict(w=dict(w=W+double(d))) for d in ([.2, -1.], [-.2, -.2])], [1, 3])
        assert state['w']['w'].tolist()==pytest.approx(want, abs=5.1e-8)

def test_momentum_of_nothing_is_fedavg():
    a,b = run(federation())[0]['server']['w'],run(federation(method('fedavgm', beta=0.)))[0]['server']['w']
    assert all(torch.allclose(a[k], b[k], atol=1e-6) for k in a)

def test_adam_in_flower_s_way_does_not_run_out_of_rounds():
    m = method('fedadam', flower=True)
    assert m.rate(10**6)==pytest.approx(m.eta)

# ---- FedDyn, SCAFFOLD: state of server and clients

def states(name, **settings):
    fed = federation(method(name, **settings), rounds=3, local=LocalTraining(2, 4, SGD(.1)), dtype=torch.float64, module=mlp().double())
    return fed,run(fed)[0]

def test_the_mean_of_all_control_variates_is_the_server_s():
    for option in (1, 2):
        fed,state = states('scaffold', option=option)
        own = [state['memory'][str(i)]['own'] if str(i) in state['memory'] else None for i in range(4)]
        for k,c in state['server']['c'].items(): torch.testing.assert_close(c, sum(o[k] for o in own if o)/4)
        assert all(set(state['memory'][str(i)])=={'own'} for i in range(4) if own[i])

def test_feddyn_s_h_is_the_mean_of_what_clients_remember():
    fed,state = states('feddyn', alpha=.3)
    kept = [state['memory'][str(i)]['linear'] for i in range(4) if str(i) in state['memory']]
    for k,h in state['server']['h'].items(): torch.testing.assert_close(h, sum(l[k] for l in kept)/4)

def test_a_control_variate_is_a_mean_of_slopes_under_momentum_and_schedule():
    "A loss with slope 1 everywhere: whatever the optimiser does, the mean slope is 1"
    class Slope(type(method('scaffold'))):
        def loss(self, w, batch, c): return sum(t.sum() for t in w.values())
    METHODS.pop('slope')
    for local in (LocalTraining(2, 4, SGD(.1, .9)), LocalTraining(3, 4, SGD(.1), Cosine(per='epoch', period=3))):
        state = run(federation(Slope(), rounds=2, local=local, dtype=torch.float64, module=mlp().double()))[0]
        for m in (state['memory'][k] for k in state['memory']):
            for t in m['own'].values(): torch.testing.assert_close(t, torch.ones_like(t))

def test_the_extra_pass_leaves_batchnorm_s_statistics_alone():
    a,b = (run(federation(method('scaffold', option=o, eta=1.), rounds=1, module=mlp(bn=True)))[0]['buffers'] for o in (1, 2))
    assert same(a, b)

# ---- forgetting

@pytest.mark.parametrize('seed', range(3))
def test_forgetting_is_the_oracle_s(seed):
    rng = np.random.default_rng(seed)
    acc = rng.random((7, 5))
    acc[rng.random(acc.shape) < .3] = np.nan
    acc[3] = np.nan
    rows = [[2*r, c, 'class_accuracy', None if np.isnan(v) and c%2 else v] for r,row in enumerate(acc) for c,v in enumerate(row)] + [[2, None, 'accuracy', 50.]]
    lost,area = P.forgetting(acc.tolist())
    curve,total = forgetting(dict(rows=rows))
    assert list(curve)==[2, 4, 6, 8, 10, 12] and list(curve.values())==pytest.approx(lost, nan_ok=True) and total==pytest.approx(area, nan_ok=True)

def test_forgetting_of_a_run_and_of_none():
    fed = federation(rounds=4); fed.data.groups = {'class': [np.flatnonzero(fed.data.test[1].numpy()==k) for k in range(3)]}
    rows = run(fed)[1]
    acc = [[v for r,_,m,v in rows if m=='class_accuracy' and r==q] for q in range(1, 5)]
    lost,area = P.forgetting(acc)
    assert list(forgetting(dict(rows=rows))[0].values())==pytest.approx(lost) and area > 0
    assert forgetting(dict(rows=[]))==({}, 0)

# ---- the settings of the paper's tables

@pytest.mark.parametrize('algorithm', ALGORITHMS)
def test_every_method_of_the_tables_learns(algorithm):
    s = comparison_setting(algorithm, data='fashion_mnist_mini', rounds=3, epochs=1, batch_size=32, clients=[10, 5])
    state,rows = run(experiment(s))
    curve = [v for _,_,m,v in rows if m=='accuracy']
    assert len(curve)==3 and curve[-1] > 20 and len(forgetting(dict(rows=rows))[0])==2

def test_the_released_rate_is_fedavg_for_all_one_can_see():
    a,b = (run(experiment(comparison_setting(k, v, data='fashion_mnist_mini', rounds=6, epochs=1, batch_size=64, clients=[4, 4]))) for k,v in (('FedAvg','intended'), ('FedRef','released')))
    assert all((a[0]['server']['w'][k]-b[0]['server']['w'][k]).abs().max() < 1e-4 for k in a[0]['server']['w']) and not same(a[0]['server']['w'], b[0]['server']['w'])

def test_eq_17_refuses_equal_costs():
    with pytest.raises(Refused, match='Eq. 17'): relative_cost(dict(a=3., b=3.))
