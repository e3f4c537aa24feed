"Strategies that follow federated training, and their scores, against oracles_posthoc.py epoch by epoch; what they are where their settings are nothing; stages on every engine."
from collections import OrderedDict
from dataclasses import dataclass, replace
import copy
import numpy as np, pytest, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import oracles_posthoc as P
from fedbook.client import one_by_one
from fedbook.engines import Processes, stacked, Traced
from fedbook.errors import Refused
from fedbook.evaluate import cross_client_metrics, cross_parts, distortions, feature_distortion
from fedbook.experiments import Case, run_cases, Setting, stage_after, federation as federation_of
from fedbook.federation import begin, client_view, FederatedData, Federation, Protocol
from fedbook.method import batch_indices, FedAvg, LocalTraining, method, METHODS
from fedbook.methods.posthoc import det, FT, LPFT, one_pass, renewed, simplex, snip_mask, volume
from fedbook.models import Classifier, Net, part
from fedbook.optim import Adam, AdamW, SGD
from fedbook.rounds import rounds_of, run, run_in_lockstep, server_round
from fedbook.streams import seeded, stream
from test_engines import distance, normed as unbiased, precise
from test_oracles import agree, federation as smaller, of_client
from test_rounds import federation, mlp, same

EPOCHS = 3
OPTIMISERS = dict(plain=SGD(.2), momentum=SGD(.1, .9, .05))

def stage_of(m, optimiser=OPTIMISERS['plain'], module=None, epochs=EPOCHS, **protocol):
    "The four clients of test_oracles.py, in a stage"
    fed = smaller(m, optimiser)
    net = Net(module) if module else fed.net
    return replace(fed, net=net, local=LocalTraining(1, 4, optimiser), protocol=Protocol(epochs, 4, personal_every=1, **protocol))

def view(fed, i, r): return client_view(fed, begin(fed), i, r)
def positions(c, epochs=None): return [torch.from_numpy(b) for b,_ in batch_indices(c, epochs)]
def batches_of(fed, of=positions): return [{i: of(view(fed, i, r)) for i in range(4)} for r in range(fed.protocol.rounds)]

def epochs_of(fed):
    "Each client's weights and statistics that are scored, epoch by epoch; nothing is sent and the server stands still"
    state,first = begin(fed),begin(fed)
    for r in range(fed.protocol.rounds):
        replies = one_by_one(fed, state, range(4), r)
        assert not any(a['message'] or a['up'] or a['down'] for a in replies)
        state,_ = server_round(fed, state, dict.fromkeys(range(4), 1), replies, r)
        assert same(state['server'], first['server'])
        yield {i: {**fed.method.personal(c), **{k: v for k,v in c.buffers.items() if not k.endswith('tracked')}} for i in range(4) for c in [client_view(fed, state, i, r+1)]}

def compare(fed, oracle, w0=None, batches=None, names=lambda w: w, **theirs):
    clients,o = [of_client(fed, i) for i in range(4)],fed.local.optimiser
    want = oracle(w0 or fed.net.weights(), *([] if 'statistics' not in theirs else [theirs.pop('statistics')]), clients, batches or batches_of(fed), o.lr, momentum=o.momentum, decay=o.weight_decay, carry=fed.method.carry, flood=fed.method.flood, **theirs)
    for r,(own,w) in enumerate(zip(epochs_of(fed), want, strict=True)):
        for i in own: agree(own[i], names(w[i]), f'epoch {r}, client {i}')
    return want

WAYS = [('plain', False, None), ('plain', False, .9), ('momentum', False, None), ('momentum', True, None), ('momentum', True, .9)]

def each(f): return pytest.mark.parametrize('optimiser,carry,flood', WAYS)(f)
def made(name, optimiser, carry, flood, **settings): return stage_of(method(name, carry=carry, flood=flood, **settings), OPTIMISERS[optimiser])

@each
def test_ft(optimiser, carry, flood): compare(made('ft', optimiser, carry, flood), P.oracle_ft)

@each
def test_proximal(optimiser, carry, flood): compare(made('proximalft', optimiser, carry, flood, mu=.7), P.oracle_proxft, mu=.7)

@each
@pytest.mark.parametrize('members', [1, 3])
def test_soup(optimiser, carry, flood, members):
    fed = made('soupft', optimiser, carry, flood, members=members)
    compare(fed, P.oracle_soupft, batches=batches_of(fed, lambda c: [positions(c, [m]) for m in range(members)]))

@each
@pytest.mark.parametrize('sparsity', [.5, .9])
def test_sparse(optimiser, carry, flood, sparsity):
    fed = made('sparseft', optimiser, carry, flood, sparsity=sparsity)
    def scoring(i): order = torch.from_numpy(stream(fed.seed, 'snip', 0, i).permutation(len(fed.data.clients[i]))); return list(order.split(4))
    compare(fed, P.oracle_sparseft, sparsity=sparsity, scoring={i: scoring(i) for i in range(4)})

@each
@pytest.mark.parametrize('every', [1, 2])
def test_superior_soup(optimiser, carry, flood, every):
    "Five epochs: two of the first vertex, one of the second, two of the third"
    fed = made('lssft', optimiser, carry, flood, first=2, affinity=.3, diversity=.2, every=every)
    fed = replace(fed, protocol=replace(fed.protocol, rounds=5))
    which,batches,draws = [0, 0, 1, 2, 2],batches_of(fed),{}
    for e,v in enumerate(which):
        for i in range(4):
            with seeded(fed.seed, 'train', e, i): draws[e,i] = [torch.rand(2, v+1, dtype=torch.float64) for _ in batches[e][i]]
    compare(fed, P.oracle_lssft, which=which, draws=draws, affinity=.3, diversity=.2, every=every, **(dict(scale=.5) if every==1 else {}))

@each
@pytest.mark.parametrize('probing', [0, 1, 2, 3])
def test_lp_ft(optimiser, carry, flood, probing): compare(made('lpft', optimiser, carry, flood, probing=probing), P.oracle_lpft, lp=probing)

@each
def test_lp_only(optimiser, carry, flood):
    fed = made('lponly', optimiser, carry, flood)
    for own in epochs_of(fed): assert all(same(part(w, 'body'), part(fed.net.weights(), 'body')) and not same(w, fed.net.weights()) for w in own.values())
    compare(fed, P.oracle_lpft, lp=EPOCHS)

def normed():
    with seeded(4, 'test model'): m = Classifier(nn.Sequential(OrderedDict(fc=nn.Linear(6, 5), bn=nn.BatchNorm1d(5), relu=nn.ReLU())), nn.Linear(5, 3)).double()
    m.body.bn.running_mean += .3
    return m

@each
@pytest.mark.parametrize('probing', [0, 1, 3])
def test_statistics_stand_still_while_the_head_is_probed(optimiser, carry, flood, probing):
    fed = stage_of(LPFT(carry=carry, flood=flood, probing=probing), OPTIMISERS[optimiser], normed())
    statistics = {k: v for k,v in fed.net.buffers().items() if not k.endswith('tracked')}
    compare(fed, P.oracle_bn_lpft, statistics=statistics, lp=probing)
    if probing: assert all(same({k: w[k] for k in statistics}, statistics) for w in next(epochs_of(fed)).values())

# ---- settings that are nothing

@pytest.mark.parametrize('optimiser', [SGD(.1, .9, .01), AdamW(.01)])
@pytest.mark.parametrize('name,settings', [('lpft', dict(probing=0)), ('proximalft', dict(mu=0.)), ('sparseft', dict(sparsity=0.)), ('soupft', dict(members=1)), ('lssft', dict(affinity=0.)), ('ft', dict(flood=0.))])
@pytest.mark.parametrize('carry', [False, True])
def test_without_its_difference_it_is_ft_to_the_bit(name, settings, optimiser, carry):
    a,b = (list(epochs_of(stage_of(m, optimiser, normed()))) for m in (FT(carry=carry), method(name, carry=carry, **settings)))
    for x,y in zip(a, b):
        for i in x: assert all(torch.equal(x[i][k], y[i][k]) for k in x[i] if name!='soupft' or 'running' not in k)

def test_no_flood_is_ft_where_a_loss_is_zero():
    "The gradient of a probability that rounds to one is not zero, and Adam makes steps of it; that of |L| at 0 would be"
    sure = nn.Sequential(OrderedDict(body=nn.Identity(), head=nn.Linear(1, 2, bias=False)))
    sure.head.weight.data = torch.tensor([[20.], [0.]])
    data = FederatedData(torch.ones(4, 1), torch.zeros(4, dtype=torch.long), [np.arange(4)], (torch.ones(1, 1), torch.zeros(1, dtype=torch.long)))
    def tuned(m): return run(Federation(m, Net(copy.deepcopy(sure)), data, LocalTraining(1, 4, Adam(.01)), Protocol(3, 1)))[0]['memory']['0']['own']
    moved = tuned(FT())
    assert same(moved, tuned(FT(flood=0.))) and moved['head.weight'][1] < 0 and not same(moved, tuned(FT(flood=.5)))

def test_a_soup_has_the_statistics_of_one_pass():
    fed = stage_of(method('soupft', members=2), module=normed())
    own = list(epochs_of(fed))[-1]
    for i,w in own.items():
        module = normed().train(); module.load_state_dict(w, strict=False)
        torch.optim.swa_utils.update_bn([b['x'] for b in one_pass(view(fed, i, EPOCHS-1), 'statistics')], module)
        for k in ('body.bn.running_mean','body.bn.running_var'): torch.testing.assert_close(w[k], module.state_dict()[k], rtol=0, atol=1e-12)
    assert [m.momentum for m in fed.net.module.modules() if isinstance(m, nn.BatchNorm1d)]==[.1]

@pytest.mark.parametrize('optimiser', [SGD(.1, .9, .5), Adam(.01, weight_decay=.5), AdamW(.01, weight_decay=.5)])
def test_what_is_masked_never_moves(optimiser):
    fed = stage_of(method('sparseft', sparsity=.6, carry=True), optimiser)
    w0,n = fed.net.weights(),sum(v.numel() for v in fed.net.weights().values())
    masks = {i: fed.method.start(view(fed, i, 0))[1]['mask'] for i in range(4)}
    for own in epochs_of(fed):
        for i,w in own.items(): assert sum(m.sum().item() for m in masks[i].values())==n-int(.6*n) and all(torch.equal(w[k]!=w0[k], masks[i][k]) for k in w)

def test_adam_lives_on_only_with_carry():
    "Three carried epochs are one long run of torch's Adam"
    fed = stage_of(FT(carry=True), Adam(.01))
    own,fresh = list(epochs_of(fed))[-1],list(epochs_of(stage_of(FT(carry=False), Adam(.01))))[-1]
    for i in range(4):
        net,(X,y) = smaller(FedAvg(), SGD(.1)).net.module.requires_grad_(),of_client(fed, i)
        o = torch.optim.Adam(net.parameters(), .01)
        for e in batches_of(fed):
            for b in e[i]: o.zero_grad(); nn.functional.cross_entropy(net(X[b]), y[b]).backward(); o.step()
        agree(own[i], {k: p.detach() for k,p in net.named_parameters()}, i)
        assert not torch.allclose(own[i]['head.weight'], fresh[i]['head.weight'])

@pytest.mark.parametrize('module', [None, normed])
@pytest.mark.parametrize('flood', [None, .9])
def test_probing_on_features_is_probing(module, flood, monkeypatch):
    "An augmentation that changes nothing switches the features off"
    import fedbook.client as client
    made,usual = [],client.on_features
    monkeypatch.setattr(client, 'on_features', lambda c, w: made.append(c.id) or usual(c, w))
    fed = stage_of(LPFT(probing=2, flood=flood, carry=True), OPTIMISERS['momentum'], module and module())
    a = list(epochs_of(fed)); assert len(made)==2*4
    b = list(epochs_of(replace(fed, data=replace(fed.data, augment=lambda x,y: (x, y))))); assert len(made)==2*4
    for x,y in zip(a, b):
        for i in x: torch.testing.assert_close(x[i], y[i], rtol=0, atol=1e-6)

# ---- parts

@pytest.mark.parametrize('n', [2, 3, 4])
def test_volumes(n):
    gen = torch.Generator().manual_seed(n)
    vs = [dict(a=torch.randn(3, generator=gen, dtype=torch.float64), b=torch.randn(2, 2, generator=gen, dtype=torch.float64)) for _ in range(n)]
    torch.testing.assert_close(volume(vs), P.volume(vs), rtol=1e-9, atol=0)

def test_determinant():
    m = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(det([list(r) for r in m]), torch.linalg.det(m))

def test_simplex_of_zeros_is_finite(): assert simplex(torch.tensor([0., .5])).isfinite().all()

@pytest.mark.parametrize('sparsity', [0., .25, .5, .99, 1.])
def test_masks(sparsity):
    gen = torch.Generator().manual_seed(1)
    w,g = ({k: torch.randint(-2, 3, s, generator=gen).double() for k,s in dict(a=(5, 3), b=(4,)).items()} for _ in range(2))
    assert {k: m.double().tolist() for k,m in snip_mask(w, g, sparsity).items()}=={k: m.tolist() for k,m in P.snip_mask(w, g, sparsity).items()}

# ---- scores

@pytest.mark.parametrize('C', [2, 3, 7])
def test_metrics(C):
    A = 100*torch.rand(C, C, generator=torch.Generator().manual_seed(C), dtype=torch.float64)
    assert cross_client_metrics(A)==pytest.approx(P.oracle_metrics(A), abs=1e-9)==cross_client_metrics(A.tolist())

@pytest.mark.parametrize('A', [[[1.]], [[1., 2.]], [1., 2.], [[1., 2.], [3., 4.], [5., 6.]]])
def test_a_matrix_of_other_shape_is_refused(A):
    with pytest.raises(Refused, match='square matrix of at least two clients'): cross_client_metrics(A)

def rows_of(rows, *names): return {(r, i, k): v for r,i,k,v in rows if k.startswith(names)}

@pytest.mark.parametrize('engine', [lambda: one_by_one, Traced, stacked, lambda: Processes(2)])
@pytest.mark.parametrize('name', ['ft','soupft','lpft'])
def test_matrix_and_scores_of_a_stage(name, engine):
    "The first `cross` of each client's samples in an order of their own; every epoch has the five scores, the last the matrix"
    fed = stage_of(method(name), OPTIMISERS['momentum'], cross=5)
    found,want = rows_of(run(fed, engine=engine())[1], 'cross_', 'on_'),{}
    tests = [tuple(t[fed.data.clients[i][np.sort(stream(fed.seed, 'cross', i).permutation(len(fed.data.clients[i]))[:5])]] for t in (fed.data.x, fed.data.y)) for i in range(4)]
    for r,own in enumerate(epochs_of(fed), 1):
        A = P.oracle_matrix(own, tests)
        want.update({(r, None, f'cross_{k}'): v for k,v in P.oracle_metrics(A).items() if 'text' not in k})
    want.update({(EPOCHS, i, f'on_{j}_accuracy'): A[i,j].item() for i in range(4) for j in range(4)})
    assert found==pytest.approx(want, abs=1e-9)

@pytest.mark.parametrize('name', ['ft','fedavg'])
def test_cross_scores_leave_other_rows_as_they_are(name):
    fed = stage_of(method(name)); crossed = replace(fed, protocol=replace(fed.protocol, cross=100))
    (a,rows),(b,more) = run(fed),run(crossed)
    assert same(a, b) and [x for x in more if not x[2].startswith(('cross_','on_'))]==rows
    own = {i: v for r,i,k,v in rows if r==EPOCHS and k=='personal_accuracy'}
    assert {i: v for r,i,k,v in more if k==f'on_{i}_accuracy'}==pytest.approx(own)
    assert sum(k.startswith('on_') for *_,k,_ in more)==16 and sum(k.startswith('cross_') for *_,k,_ in more)==5*EPOCHS

def test_a_shared_model_is_scored_once():
    fed = stage_of(FedAvg(), cross=3); asked = []
    def answer(qs): asked.extend(q[2] for q in qs if q[-1].__name__=='cross_scores'); return [one_by_one(*q) for q in qs]
    rows = run_in_lockstep([rounds_of(fed)], answer)[0][1]
    assert asked==[[0]]*EPOCHS and len(rows_of(rows, 'on_'))==16

@pytest.mark.parametrize('tests', [None, [[0], [], [], []]])
def test_cross_scores_need_samples_of_two(tests):
    fed = stage_of(FT())
    with pytest.raises(Refused, match='personal=True'): replace(fed, data=replace(fed.data, test_clients=tests), protocol=Protocol(1, 4, cross=5))

def test_parts_are_some_of_each_clients_own():
    fed = stage_of(FT(), cross=7)
    assert [len(p) for p in cross_parts(fed)]==[7, 6, 7, 7] and all(set(p) <= set(c) for p,c in zip(cross_parts(fed), fed.data.test_clients))

def test_distortion():
    fed = stage_of(FT(), OPTIMISERS['momentum'])
    state,rows = run(fed)
    own,w0 = list(epochs_of(fed))[-1],fed.net.weights()
    found = {k: v for i in range(4) for _,j,k,v in [(0, i, f'{k}{i}', v) for _,_,k,v in distortions(fed, state, i, EPOCHS)]}
    xs = [of_client(fed, i)[0] for i in range(4)]
    assert sum(found[f'distortion_own{i}'] for i in range(4))/4==pytest.approx(P.oracle_distortion(w0, own, xs), abs=1e-9)
    for i in range(4): assert found[f'distortion_all{i}']==pytest.approx(sum(P.oracle_distortion(w0, {j: own[i]}, xs) for j in range(4))/4, abs=1e-9)
    assert not any(v for _,_,_,v in distortions(fed, begin(fed), 0, 0))

def test_distortion_has_the_statistics_of_each_model():
    torch.manual_seed(0) # a fresh network may have features so small that the shift hardly moves them
    net = Net(normed()); w,b,x = net.weights(),net.buffers(),torch.randn(9, 6, dtype=torch.float64)
    other = {**w, **b, 'body.bn.running_mean': b['body.bn.running_mean']+1}
    gone = (net.features(w, b, x)-net.features(w, {k: other[k] for k in b}, x)).norm(dim=1).mean().item()
    assert feature_distortion(net, w, other, x, b)==pytest.approx(gone) and gone > .1

# ---- stages

STAGED = dict(data='fashion_mnist_mini', model=dict(name='mlp', hidden=[8]), partition=dict(name='dirichlet', alpha=.5, n_clients=4), local=dict(batch_size=64), personal=True)
ABOUT = dict(paper='2', table='t', profile='smoke', stand_in={})

def after(first, *stages, rounds=2):
    "A setting with stages, the federation of the last and the state before it"
    s = Setting(**STAGED, method=first, protocol=dict(rounds=rounds, per_round=4), after=[dict(method=m, protocol=dict(rounds=1, per_round=4)) for m in stages])
    fed = federation_of(s.stage(0))
    for i in range(1, len(stages)+1):
        state,_ = run(fed)
        before,fed = fed,stage_after(fed, state, s.stage(i), i)
    return before,state,fed

@pytest.mark.parametrize('first', ['fedavg','fedbn','fedper','moon','fedpac'])
def test_fine_tuning_begins_with_the_model_that_was_scored_last(first):
    before,state,fed = after(dict(name=first), dict(name='ft'))
    for i in range(4):
        c = client_view(before, state, i, 2); c.message = before.method.shown(state['server'], i)
        assert same(fed.method.start(client_view(fed, begin(fed), i, 0))[0], before.method.personal(c))
    assert {r[1] for r in run(fed)[1] if r[2]=='personal_accuracy'}=={0, 1, 2, 3}

def test_what_a_stage_has_frozen_is_kept_by_the_next():
    before,state,fed = after(dict(name='fedavg'), dict(name='talos', mode='head', batches=1, calibrations=1), dict(name='ft'))
    w = fed.net.weights()
    assert before.net.frozen==('body',) and same(part(w, 'head'), state['server']['w']) and len(w)==4
    assert same(part(w, 'body'), {k: v for k,v in before.net.module.named_parameters() if k in part(w, 'body')}) and not same(part(w, 'body'), part(federation_of(Setting(**STAGED, protocol=dict(per_round=4))).net.weights(), 'body'))

STRATEGIES = dict(ft=dict(flood=.1), proximalft=dict(mu=1.), soupft=dict(members=2), sparseft=dict(sparsity=.5), lssft=dict(first=1), lpft=dict(probing=1), lponly={})

def case_of(name):
    "Three epochs of Adam, whose state lives on, after two rounds of FedAvg"
    stage = dict(method=dict(name=name, carry=True, **STRATEGIES[name]), local=dict(optimiser=dict(name='adam', lr=.01)), protocol=dict(rounds=3, personal_every=1, cross=20))
    return Case({}, Setting(**STAGED, protocol=dict(rounds=2, per_round=4), after=[stage]))

class Killed(Exception): pass

@pytest.mark.parametrize('name', STRATEGIES)
def test_a_killed_stage_goes_on_to_the_same_rows(tmp_path, name, monkeypatch):
    import fedbook.experiments as E
    case = case_of(name)
    whole, = run_cases([case], [0], tmp_path/'a', engine='one_by_one', **ABOUT)
    kill,rounds = [True],[]
    def watched(fed, file, f=E.rounds_of):
        def stop(r):
            rounds.append(r)
            if kill and isinstance(fed.method, FT) and r==2: raise Killed
        return f(fed, file, stop)
    monkeypatch.setattr(E, 'rounds_of', watched)
    with pytest.raises(Killed): run_cases([case], [0], tmp_path/'b', engine='one_by_one', **ABOUT)
    kill.clear(); again, = run_cases([case], [0], tmp_path/'b', engine='one_by_one', **ABOUT)
    assert rounds==[1, 2, 1, 2, 3] and again['rows']==whole['rows']
    epochs = {r for r,_,k,_ in whole['rows'] if k=='cross_average'}
    assert epochs=={3, 4, 5} and sum(k=='personal_accuracy' for *_,k,_ in whole['rows'])==4*4 and sum(k.startswith('on_') for *_,k,_ in whole['rows'])==16

@pytest.mark.parametrize('engine', [Traced, stacked, lambda: Processes(2, Traced())])
@pytest.mark.parametrize('name', STRATEGIES)
def test_every_engine_fine_tunes_alike(name, engine, monkeypatch):
    "In float64, with BatchNorm and an optimiser that lives on"
    monkeypatch.setattr('fedbook.engines.OFTEN', 0)
    module = unbiased()
    fed = precise(federation(method(name, carry=True, **STRATEGIES[name]), sizes=(7,12), per_round=2, module=module, local=LocalTraining(1, 4, SGD(.05, .9)), personal_every=1, cross=6))
    (a,rows),(b,more) = run(fed),run(fed, engine=engine())
    assert distance(a, b) < 1e-9 and [r[:3] for r in rows]==[r[:3] for r in more]
    assert np.allclose([r[3] for r in rows if r[2]!='train_loss'], [r[3] for r in more if r[2]!='train_loss'])
