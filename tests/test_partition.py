"Partitions: disjoint, complete, repeatable, honest about what they moved, dropped and shared"
from dataclasses import replace
import json
import numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st
from fedbook import partition as P
from fedbook.engines import stacked
from fedbook.errors import Refused
from fedbook.method import batches, LocalTraining
from fedbook.optim import SGD
from fedbook.federation import begin, client_view, FederatedData
from fedbook.rounds import run
from fedbook.streams import stream
from test_rounds import federation

Y = np.repeat(np.arange(10), 100)
CALLS = dict(iid={}, classes_per_client=dict(classes=2), shards_with_replacement=dict(classes=2), dirichlet=dict(alpha=.3),
             dh_level=dict(level=80), quantity_skew=dict(alpha=.5), by_group=dict(groups=np.arange(1000)%40),
             natural=dict(groups=dict(domain=np.arange(1000)%40)))
quick = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 2**40)
alphas = st.one_of(st.sampled_from([5e-324, 1e-310, 1e-300, 1e-5, 1e6, 1e300]), st.floats(1e-3, 1e3))
some_labels = st.lists(st.integers(0, 5), min_size=1, max_size=120).map(np.array)

def make(name, labels=Y, n_clients=20, **kw): return P.make(name, labels, **{'n_clients': n_clients, **CALLS[name], **kw})
def same(p, q): return len(p.clients) == len(q.clients) and all(np.array_equal(a, b) for a,b in zip(p.clients, q.clients))

def check(p, labels, disjoint=True, complete=True, once=True):
    "Everything a partition says about itself, counted again the slow way"
    n, owners = len(labels), [set() for _ in labels]
    for k,c in enumerate(p.clients):
        assert c.dtype == np.int64 and c.ndim == 1 and c.tolist() == sorted(set(c.tolist()) if once else c.tolist())
        assert not len(c) or 0 <= c[0] and c[-1] < n
        for i in c: owners[i].add(k)
        assert p.table[k].tolist() == [sum(labels[i]==j for i in c) for j in range(p.table.shape[1])]
    held = [len(o) for o in owners]
    assert p.n == n and p.dropped == pytest.approx(held.count(0)/n) and p.shared == pytest.approx(sum(h > 1 for h in held)/n)
    assert not disjoint or max(held) <= 1
    assert not complete or min(held) >= 1
    assert p.sizes.tolist() == [len(c) for c in p.clients] and p.table.shape == (len(p.clients), max(labels)+1)
    assert json.loads(json.dumps(p.settings, allow_nan=False)) == p.settings and 'seed' in p.settings
    assert p.table.tolist() == p.counts(labels).tolist()

# ---- every scheme
@pytest.mark.parametrize('name', CALLS)
def test_repeatable_and_seeded(name):
    p = make(name, seed=3)
    shards = name == 'shards_with_replacement'
    check(p, Y, disjoint=not shards, complete=not shards and name not in ('dh_level','natural'), once=not shards)
    assert same(p, make(name, seed=3)) and same(p, make(name, seed=np.int64(3)))
    assert p.scheme == name and not same(p, make(name, seed=4))

@pytest.mark.parametrize('name', CALLS)
def test_does_not_touch_its_input_nor_the_global_generator(name):
    y, before = Y.copy(), np.random.get_state()[1].copy()
    make(name, y)
    assert (y == Y).all() and (np.random.get_state()[1] == before).all()

@pytest.mark.parametrize('name', CALLS)
@pytest.mark.parametrize('given,names', [
    (dict(labels=[]), 'labels'), (dict(labels=[0,1,-1]), 'labels'), (dict(labels=[0.,float('nan')]), 'labels'), (dict(labels=[[0,1]]), 'labels'),
    (dict(labels=['a']), 'labels'), (dict(labels=[0,10**12]), 'labels'), (dict(n_clients=0), 'n_clients'), (dict(n_clients=-1), 'n_clients'),
    (dict(n_clients=1001), 'n_clients'), (dict(n_clients=2.), 'n_clients'), (dict(n_clients=True), 'n_clients'), (dict(seed='x'), 'seed'),
    (dict(seed=float('nan')), 'seed')])
def test_refuses_bad_input_in_one_sentence(name, given, names):
    with pytest.raises(Refused) as e: make(name, **given)
    said = str(e.value)
    assert names in said and said.endswith('.') and '\n' not in said

@pytest.mark.parametrize('name,given,said', [
    ('dirichlet', dict(alpha=0), 'alpha'), ('dirichlet', dict(alpha=-1), 'alpha'), ('dirichlet', dict(alpha=float('nan')), 'alpha'),
    ('dirichlet', dict(alpha=float('inf')), 'alpha'), ('dirichlet', dict(alpha='1'), 'alpha'), ('quantity_skew', dict(alpha=0), 'alpha'),
    ('dirichlet', dict(min_size=-1), 'min_size'), ('quantity_skew', dict(min_size=1.5), 'min_size'),
    ('dirichlet', dict(min_size=51), 'min_size=50 or 19 clients'), ('quantity_skew', dict(n_clients=101), 'min_size=9 or 100 clients'),
    ('dirichlet', dict(convention='byclass'), "'by_class'"), ('classes_per_client', dict(classes=11), 'to 10'), ('classes_per_client', dict(classes=0), 'classes'),
    ('shards_with_replacement', dict(classes=11), 'to 10'), ('classes_per_client', dict(n_clients=600), 'at most 500'),
    ('dh_level', dict(level=70), '60'), ('dh_level', dict(level=99), '100'), ('dh_level', dict(level='80'), 'DH-level'), ('dh_level', dict(level=float('nan')), 'DH-level'),
    ('dh_level', dict(n_clients=7), 'multiple of 5, e.g. 5'), ('dh_level', dict(n_clients=1), 'e.g. 5'), ('dh_level', dict(n_clients=500), 'at least 150'),
    ('by_group', dict(n_clients=41), 'to 40'), ('by_group', dict(groups=[.5]*1000), 'groups'), ('by_group', dict(groups=[1,2]), '2 groups'),
    ('dirichlet', dict(alfa=1), "'alpha'"), ('iid', dict(classes=1), 'no setting')])
def test_refusals_name_the_nearest_choice(name, given, said):
    with pytest.raises(Refused) as e: make(name, **given)
    assert said in str(e.value)

def test_unknown_scheme_and_missing_setting():
    with pytest.raises(Refused, match='dirichlet'): P.make('dirichlett', Y, n_clients=2)
    with pytest.raises(Refused, match='needs n_clients, alpha'): P.make('dirichlet', Y)
    with pytest.raises(Refused, match='needs groups'): P.make('by_group', Y)

def test_accepts_lists_tensors_and_small_dtypes():
    import torch
    want = P.iid(Y, 7)
    for y in Y.tolist(), torch.tensor(Y), Y.astype(np.uint8): assert same(P.iid(y, 7), want)

# ---- the two steps
@quick
@given(st.lists(st.integers(-1, 4), min_size=1, max_size=40))
def test_split_is_the_inverse_of_ownership(owner):
    got = P.split(np.array(owner), 5)
    assert [c.tolist() for c in got] == [[i for i,o in enumerate(owner) if o==k] for k in range(5)]

@quick
@given(st.data(), some_labels, seeds)
def test_deal_follows_the_table(data, y, seed):
    counts = np.bincount(y)
    table = np.array([data.draw(st.integers(0, c//2)) for _ in range(2) for c in counts]).reshape(2, -1)
    clients = P.deal(y, table, stream(seed))
    assert (P.class_counts(clients, y) == table).all() and len(np.unique(np.concatenate(clients))) == table.sum()

# ---- schemes one by one
@quick
@given(some_labels, st.integers(1, 30), seeds)
def test_iid(y, k, seed):
    k = min(k, len(y))
    p = P.iid(y, k, seed)
    check(p, y)
    assert np.ptp(p.sizes) <= 1 and p.moved == 0

def test_iid_is_not_stratified_nor_ordered():
    p = P.iid(Y, 10)
    assert len(np.unique(p.table)) > 3 and np.abs(p.shares() - .1).max() < .12

@quick
@given(st.integers(1, 12), st.integers(1, 12), st.data(), seeds)
def test_classes_per_client(n_classes, k, data, seed):
    m = data.draw(st.integers(1, n_classes))
    y = np.repeat(np.arange(n_classes)*2, [data.draw(st.integers(12, 20)) for _ in range(n_classes)])  # odd classes do not occur
    k = min(k, 12*n_classes//m)
    p = P.classes_per_client(y, k, m, seed)
    check(p, y, complete=k*m >= n_classes)
    owners = (p.table > 0).sum(0)[::2]
    assert ((p.table > 0).sum(1) == m).all() and np.ptp(owners) <= 1
    assert p.dropped == pytest.approx(np.bincount(y)[::2][owners == 0].sum()/len(y))
    for col in p.table.T: assert not col.any() or np.ptp(col[col > 0]) <= 1

@pytest.mark.parametrize('k,m', [(15,2), (20,2), (7,3), (30,1), (10,10)])
def test_classes_per_client_sizes_are_as_equal_as_owners_allow(k, m):
    p = P.classes_per_client(Y, k, m)
    each = 100/np.array([k*m//10, -(-k*m//10)])   # a class's share with few and with many owners
    assert p.sizes.max() <= np.ceil(m*each[0]) and p.sizes.min() >= np.floor(m*each[1])
    if k*m % 10 == 0: assert np.ptp(p.sizes) <= 1

@quick
@given(some_labels, st.integers(1, 8), st.data(), seeds)
def test_shards(y, k, data, seed):
    k, there = min(k, len(y)), np.unique(y)
    m = data.draw(st.integers(1, len(there)))
    p = P.shards_with_replacement(y, k, m, seed)
    check(p, y, disjoint=False, complete=False, once=False)
    shards = [s for c in there for s in np.array_split(np.flatnonzero(y==c), max(1, (y==c).sum()//k))]
    for client in p.clients:
        times = np.bincount(client, minlength=len(y))
        assert all(len(set(times[s])) == 1 for s in shards) and sum(times[s[0]] for s in shards) == m  # whole shards, as many as were drawn

def test_shards_of_the_paper():
    "Every client has 50 shards of 112 or 113 samples, some of them twice"
    p = P.shards_with_replacement(np.repeat(np.arange(100), 450), 100, 50)
    times = np.rint(p.table/112.5)
    assert (abs(p.table-112.5*times) <= .5*times).all() and (times.sum(1) == 50).all() and p.shared > .5
    assert any(len(np.unique(c)) < len(c) for c in p.clients)

def test_shards_drawn_twice_train_twice():
    "Weights, steps and epochs count a sample as often as the client holds it; what clients share is counted by clients"
    p,y = P.shards_with_replacement(np.repeat([0,1,2,3], 3), 3, 2, seed=2),torch.arange(12) % 3
    held = np.bincount(np.concatenate(p.clients), minlength=12)
    assert p.shared == np.mean([sum(i in c for c in p.clients) > 1 for i in range(12)]) < (held > 1).mean() and {len(np.unique(c)) for c in p.clients} == {3,6} and all(p.sizes == 6)
    data = FederatedData(torch.randn(12, 6), y, p.clients, (torch.randn(8, 6), y[:8]), test_clients=P.matched_test(p, np.repeat([0,1,2,3], 2)))
    fed = replace(federation(per_round=3, rounds=2, local=LocalTraining(2, 2, SGD(.1))), data=data)
    assert [len(b['y']) for b,_ in batches(client_view(fed, begin(fed), 0, 0))] == [2]*6
    (state,rows),(again,same_rows) = run(fed),run(fed, engine=stacked())
    for k,v in state['server']['w'].items(): torch.testing.assert_close(again['server']['w'][k], v)
    assert [r[2] for r in rows] == [r[2] for r in same_rows] and sum(r[2] == 'personal_accuracy' for r in rows) == 3

@quick
@given(some_labels, st.integers(1, 40), alphas, st.integers(0, 10), st.sampled_from(list(P.CONVENTIONS)), seeds)
def test_dirichlet_ends_complete_and_keeps_the_minimum(y, k, alpha, least, convention, seed):
    k = min(k, len(y))
    least = min(least, len(y)//k)
    p = P.dirichlet(y, k, alpha, seed, least, convention)
    check(p, y)
    assert p.sizes.min() >= least and 0 <= p.moved <= 1 and p.moved*len(y) <= k*least + 1e-9
    if convention == 'by_client': assert np.ptp(p.sizes) <= 1 and p.moved == 0

@quick
@given(some_labels, st.integers(1, 40), alphas, st.integers(0, 10), seeds)
def test_quantity_skew(y, k, alpha, least, seed):
    k = min(k, len(y))
    least = min(least, len(y)//k)
    p = P.quantity_skew(y, k, alpha, seed, least)
    check(p, y)
    assert p.sizes.min() >= least and p.moved*len(y) <= k*least + 1e-9

@pytest.mark.parametrize('convention', P.CONVENTIONS)
def test_dirichlet_ends_of_the_scale(convention):
    flat = P.dirichlet(np.repeat(np.arange(10), 1000), 10, 1e7, convention=convention)
    off = np.abs(flat.shares() - .1).max(1)
    assert off[:-1].max() < .05 and off[-1] < .12                         # by client, the last one takes what is left
    steep = P.dirichlet(Y, 10, 1e-9, min_size=0, convention=convention)
    full = steep.table.sum(1) > 0
    if convention == 'by_class': assert ((steep.table == 100).sum(0) == 1).all()                # each class with one client
    else: assert np.median(steep.shares()[full].max(1)) > .99

def test_dirichlet_shares_have_the_right_mean_and_spread():
    alpha, k = .5, 20
    x = np.concatenate([P.softmax(P.log_dirichlet(stream(s), alpha, np.ones(k), 200)) for s in range(10)])
    assert np.abs(x.mean(0) - 1/k).max() < .01
    assert x.var() == pytest.approx((1/k)*(1-1/k)/(k*alpha+1), rel=.05)
    base = np.array([.7,.2,.1])
    x = P.softmax(P.log_dirichlet(stream(1), 3., base, 4000))
    assert np.abs(x.mean(0) - base).max() < .02 and x[:,0].var() == pytest.approx(.7*.3/4, rel=.1)

def test_more_clients_than_samples_of_a_class_leave_no_mark():
    p = P.dirichlet(np.repeat(np.arange(100), 600), 1000, 1e6)
    assert p.moved == 0 and p.sizes.min() > 45 and p.sizes.max() < 75

def test_thousand_clients_with_tiny_alpha():
    y = np.repeat(np.arange(10), 6000)
    for convention in P.CONVENTIONS:
        p = P.dirichlet(y, 1000, .01, convention=convention)
        assert p.sizes.min() >= 10 and p.sizes.sum() == 60000 and p.dropped == p.shared == 0
        assert np.median((p.table > 0).sum(1)) <= 2   # topped-up clients stay one-sided

def test_capped_client_gets_no_further_class():
    for seed in range(20):
        t = P.table_by_class(np.full(10, 100), 5, .3, stream(seed), capped=True)
        assert (t.sum(0) == 100).all()
        held = np.cumsum(t, 1)
        for c in range(1, 10): assert not t[held[:,c-1] >= 200, c].any()

@quick
@given(st.lists(st.lists(st.integers(0, 20), min_size=3, max_size=3), min_size=1, max_size=8), st.integers(0, 12), seeds)
def test_top_up_moves_just_what_is_lacking(table, least, seed):
    table = np.array(table)
    least = min(least, table.sum()//len(table))
    new,moved = P.top_up(table, least, stream(seed))
    before,after = table.sum(1), new.sum(1)
    assert (new >= 0).all() and (new.sum(0) == table.sum(0)).all() and after.min() >= least
    assert moved == np.maximum(after-before, 0).sum() == np.maximum(before-after, 0).sum() == sum(max(0, least-b) for b in before)
    poor = before < least
    assert (after[poor] == least).all() and (new[poor] >= table[poor]).all()
    gave = before > after
    if gave.any(): assert max(after[gave].max(), before[~gave & ~poor].max(initial=0)) <= after[gave].min()+1   # only the largest give, down to one level

def test_moved_is_what_top_up_moved():
    p = P.dirichlet(Y, 50, 1e-9, 0, 5)
    lack = [np.maximum(5 - P.table_by_class(np.full(10, 100), 50, 1e-9, stream(0, 'dirichlet', i)).sum(1), 0).sum() for i in range(10)]
    assert p.moved == min(lack)/1000 > .15
    assert P.dirichlet(Y, 5, 100.).moved == 0

def test_by_client_is_a_mixture_of_what_is_left():
    p = P.dirichlet(np.repeat([0,1], [90,10]), 10, 1e-9, convention='by_client', min_size=0)
    assert (p.sizes == 10).all() and p.table.sum(0).tolist() == [90,10]
    mixed = P.dirichlet(np.repeat([0,1], [9000,1000]), 10, 1e6, convention='by_client')
    assert np.abs(mixed.shares()[:-1,0] - .9).max() < .04

@pytest.mark.parametrize('n_classes,per_level', [(10, {0:10,40:6,60:4,80:2,100:1}), (100, {0:100,40:60,60:40,80:20,100:10}), (4, {0:4,50:2,100:1})])
def test_dh_levels_as_printed(n_classes, per_level):
    for level,m in per_level.items():
        p = P.dh_level(np.repeat(np.arange(n_classes), 60), n_classes if n_classes < 100 else 10, level)
        assert ((p.table > 0).sum(1) == m).all()

@quick
@given(st.sampled_from(P.LEVELS), st.integers(1, 4), st.integers(31, 200), seeds)
def test_dh_level(level, times, each, seed):
    y = np.repeat(np.arange(10), each)
    m = P.dh_classes(level, 10)
    k = times*(10//np.gcd(10, m))
    owners = k*m//10
    if each < 3*owners//2: each = 3*owners//2; y = np.repeat(np.arange(10), each)
    p = P.dh_level(y, int(k), level, seed)
    check(p, y, complete=False)
    assert ((p.table > 0).sum(1) == m).all() and ((p.table > 0).sum(0) == owners).all()
    assert (each - p.table.sum(0) <= owners).all()                         # floors lose less than one sample per owner
    if owners > 1:
        held = p.table[p.table > 0]
        assert held.min() > .4/(.4+.6*(owners-1))*each - 1 and held.max() < .6/(.6+.4*(owners-1))*each

def test_dh_level_of_test_labels_matches_by_seed():
    train,test = P.dh_level(np.repeat(np.arange(10), 1000), 10, 60, 5), P.dh_level(np.repeat(np.arange(10), 200), 10, 60, 5)
    assert ((train.table > 0) == (test.table > 0)).all() and np.abs(train.table/1000 - test.table/200).max() <= .01

@quick
@given(st.lists(st.sampled_from('abcdefg'), min_size=1, max_size=60), st.data(), seeds)
def test_by_group(groups, data, seed):
    names = sorted(set(groups))
    p = P.by_group(groups)
    assert [sorted({groups[i] for i in c}) for c in p.clients] == [[n] for n in names]
    check(p, np.zeros(len(groups), int))
    k = data.draw(st.integers(1, len(names)))
    q = P.by_group(np.array(groups, object), k, seed=seed)
    check(q, np.zeros(len(groups), int))
    owner = {}
    for j,c in enumerate(q.clients):
        for i in c: assert owner.setdefault(groups[i], j) == j              # groups stay whole
    largest = max(groups.count(n) for n in names)
    assert q.sizes.min() >= 1 and q.sizes.max() <= len(groups)/k + largest*(1-1/k) + 1e-9   # Graham's bound

def test_by_group_table_shows_labels():
    assert P.by_group(['b','a','b'], labels=[1,0,1]).table.tolist() == [[1,0],[0,2]]

# ---- clients as the data was collected
def test_old_schemes_make_the_partitions_they_always_made():
    from fedbook.data import load
    from fedbook.files import fingerprint
    y = load('fashion_mnist_mini').train_y
    made = {n: fingerprint(*(c.tobytes() for c in make(n, y, seed=3, **(dict(groups=np.arange(4000)%40) if n=='by_group' else {})).clients)) for n in CALLS if n != 'natural'}
    assert made == dict(iid='a13b6008ae03786a', classes_per_client='bcb1c5ccc146f35f', shards_with_replacement='15e32299c9645025', dirichlet='505548f18d11ba92',
                        dh_level='fde4280e28d35678', quantity_skew='0e4916725b6c56f4', by_group='263fd4ef5d208dcf')

@quick
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=80).map(np.array), st.integers(1, 3), st.integers(1, 4), st.booleans(), seeds)
def test_natural(rows, per_group, min_size, pairs, seed):
    groups,n = dict(a=rows[:,0], b=rows[:,1]),len(rows)
    group = ['a','b'] if pairs else 'a'
    key = [tuple(r) if pairs else (r[0],) for r in rows.tolist()]
    large = {k for k in key if key.count(k) >= per_group*min_size}
    call = lambda **kw: P.natural(np.arange(n)%3, groups, group, per_group=per_group, min_size=min_size, **{'seed': seed, **kw})
    if not large:
        with pytest.raises(Refused, match='needed'): call()
        return
    p = call()
    check(p, np.arange(n)%3, complete=len(large)==len(set(key)))
    assert same(p, call()) and p.sizes.min() >= min_size and len(p.clients) == per_group*len(large)
    whose = [{key[i] for i in c} for c in p.clients]
    assert all(len(w)==1 for w in whose) and [w for w in whose[::per_group]] == [{k} for k in sorted(large)]
    for j in range(0, len(whose), per_group): assert np.ptp(p.sizes[j:j+per_group]) <= 1 and whose[j] == whose[j+per_group-1]
    few = call(n_clients=per_group*((len(large)+1)//2))
    sizes = sorted((key.count(k) for k in large), reverse=True)
    assert sorted((key.count(key[c[0]]) for c in few.clients[::per_group]), reverse=True) == sizes[:(len(large)+1)//2]   # the largest groups
    for c,t in zip(p.clients, P.natural_test(p, groups, groups)): assert t.tolist() == [i for i in range(n) if key[i]==key[c[0]]]

def test_natural_takes_its_samples_by_seed():
    g = dict(who=np.arange(1000)%50)
    pick = lambda seed: {tuple(sorted(set(g['who'][c]))) for c in P.natural(Y, g, 'who', 5, seed=seed).clients}
    assert pick(0) == pick(0) and len({tuple(sorted(pick(s))) for s in range(20)}) > 15   # groups of one size: the seed decides
    assert not same(P.natural(Y, g, 'who', per_group=2), P.natural(Y, g, 'who', per_group=2, seed=1))

@pytest.mark.parametrize('given,said', [
    (dict(group='wirter'), "'writer'"), (dict(group=[]), 'group'), (dict(n_clients=5, per_group=2), 'multiple of 2'), (dict(n_clients=9), 'to 4'), (dict(min_size=300), '300 samples'),
    (dict(per_group=0), 'per_group'), (dict(groups={}), 'none'), (dict(groups=np.zeros(1000)), 'dict'), (dict(groups=dict(writer=[1,2])), '2 groups'), (dict(min_sise=1), "'min_size'")])
def test_natural_refuses(given, said):
    with pytest.raises(Refused) as e: P.make('natural', Y, **{**dict(groups=dict(writer=np.arange(1000)%4), group='writer'), **given})
    assert said in str(e.value) and str(e.value)[-1] in '.?' and '\n' not in str(e.value)

def test_groups_reach_only_the_schemes_that_want_them():
    g = dict(writer=np.arange(1000)%4)
    assert same(P.make('iid', Y, groups=g, n_clients=3), P.iid(Y, 3)) and len(P.make('natural', Y, groups=g, group='writer').clients) == 4
    with pytest.raises(Refused, match='needs groups'): P.make('natural', Y, group='writer')
    with pytest.raises(Refused, match="'natural'"): P.natural_test(P.iid(Y, 3), g, g)
    p = P.natural(Y, g, 'writer')
    assert [len(t) for t in P.natural_test(p, g, dict(writer=np.array([0,0,1,3])))] == [2,1,0,1]
    with pytest.raises(Refused, match='1000 samples'): P.natural_test(p, dict(writer=[1]), g)

# ---- matched test sets
@quick
@given(some_labels, st.integers(1, 10), st.floats(.01, 100), seeds)
def test_matched_test_has_the_clients_shares(y, k, alpha, seed):
    k = min(k, len(y))
    p, test = P.dirichlet(y, k, alpha, seed, 0), np.repeat(np.arange(6), 50)
    got = P.matched_test(p, test, seed=seed)
    for row,idx in zip(p.shares(), got):
        assert idx.dtype == np.int64 and idx.tolist() == sorted(set(idx.tolist()))
        if not row.any(): assert not len(idx); continue
        full = 50/row.max()
        have = np.bincount(test[idx], minlength=6)[:len(row)]
        assert np.abs(have - row*full).max() <= 1 and have.max() == 50      # the commonest class is used up: as many as possible
    size = int(min(50/r.max() for r in p.shares() if r.any()) + 1e-9)
    for row,idx in zip(p.shares(), P.matched_test(p, test, size, seed)):
        assert len(idx) == (size if row.any() else 0)
        assert np.abs(np.bincount(test[idx], minlength=6)[:len(row)] - row*size).max() < 1
    with pytest.raises(Refused, match=f'to {size}'): P.matched_test(p, test, size+1)

def test_matched_test_is_seeded_per_client():
    shares, test = np.array([[.5,.5],[.5,.5]]), np.repeat([0,1], 50)
    a,b = P.matched_test(shares, test, 20), P.matched_test(shares, test, 20)
    assert all((x == y).all() for x,y in zip(a, b)) and not (a[0] == a[1]).all()
    assert not (a[0] == P.matched_test(shares, test, 20, seed=1)[0]).all()
    assert (P.matched_test(shares[:1], test, 20)[0] == a[0]).all()          # whoever else is there

@pytest.mark.parametrize('shares,test,size,said', [
    ([[.5,.5]], [0,0], None, 'Client 0'), ([[1,0],[0,1]], [0,0], None, 'Client 1'), ([[float('nan'),1]], [0,1], None, 'shares'), ([[-1,1]], [0,1], None, 'shares'),
    ([1,0], [0,1], None, 'shares'), ([[1,0]], [], None, 'labels'), ([[1,0]], [0,1], 0, 'size'), ([[1,0]], [0,1], 2, 'to 1')])
def test_matched_test_refuses(shares, test, size, said):
    with pytest.raises(Refused, match=said): P.matched_test(np.array(shares), test, size)

# ---- showing itself
def test_partition_shows_itself_and_leaves_no_figure_open():
    import matplotlib.pyplot as plt
    before = plt.get_fignums()
    for k in 1, 1000:
        p = P.iid(Y, k)
        png = p._repr_png_()
        assert png[:8] == b'\x89PNG\r\n\x1a\n' and png == p._repr_png_()
    assert plt.get_fignums() == before
    assert 'seed=0' in repr(p) and 'sizes 1 / 1 / 1' in repr(p) and 'moved 0.0%, dropped 0.0%, shared 0.0%' in repr(p)
    fig,ax = plt.subplots()
    assert p.heatmap(ax) is ax and ax.get_title() == repr(p)
    plt.close(fig)

def test_shares_and_counts_for_other_labels():
    p = P.partition('by hand', [np.array([0]), np.array([], int)], np.array([0,1]), seed=0)
    assert p.shares().tolist() == [[1,0],[0,0]] and p.counts([2,0]).tolist() == [[0,0,1],[0,0,0]] and p.dropped == .5
    with pytest.raises(Refused, match='2 samples'): p.counts([0])

def test_smallest_alpha_is_one_hot():
    for alpha in 5e-324, 1e-310, 1e-300:
        x = P.softmax(P.log_dirichlet(stream(0), alpha, np.ones(5), 200))
        assert (x.max(1) == 1).all() and len(set(x.argmax(1))) == 5

def test_enough_keeps_the_draw_that_lacks_fewest():
    draws = [np.array([[n],[1]]) for n in (0,4,2)]
    assert P.enough(lambda i: draws[i], 5, 3) is draws[1]
