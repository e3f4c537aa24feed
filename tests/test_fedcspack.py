"FedCSPACK's steps by hand, its identities, and messages that do not fit."
from dataclasses import replace
import re
import pytest, torch
from hypothesis import given, strategies as st
from fedbook.chapters.fedcspack import comparison_setting
from fedbook.errors import Refused
from fedbook.manifest import experiment
from fedbook.method import FedAvg, LocalTraining
from fedbook.methods import fedcspack
from fedbook.methods.fedcspack import aggregate_packs, divergence, FedCSPACK, FedCSPACKToAll, flat, misfit, pack, select, similarities, unflat
from fedbook.optim import SGD
from fedbook.client import one_by_one
from fedbook.federation import begin, client_view
from fedbook.replies import SetAside
from fedbook.rounds import one_round, run, sample_clients
from fedbook.tensors import tmap
from fedbook.wire import decode, encode
from test_rounds import federation, mlp, same

@given(st.integers(1, 50), st.integers(1, 60))
def test_packing_is_undone(n, size):
    w = dict(a=torch.arange(float(n)), b=torch.ones(2, 3))
    p = pack(flat(w), size)
    assert p.shape==(-(-(n+6)//size), size) and same(unflat(p.flatten(), w), w) and p.flatten()[n+6:].abs().sum()==0

def test_packing_into_used_memory_leaves_nothing_of_it():
    w = dict(a=torch.arange(5.), b=torch.ones(2, 3))
    assert torch.equal(flat(w, 8, torch.full((16,), 7.)), torch.cat([torch.arange(5.), torch.ones(6), torch.zeros(5)]))

def test_the_protocol_says_how_samples_are_dealt_out_to_all_methods_alike():
    def leaky(**kw): return comparison_setting('FedAvg', .3, data='fashion_mnist_mini', **kw).leaky
    assert leaky(protocol='released') and not leaky() and not leaky(protocol='official')
    for p,cap in (('official', {}), ('released', dict(convention='by_class_capped', min_size=64))):
        for m,v in (('FedAvg','intended'), ('FedCSPACK','intended'), ('FedCSPACK','released')):
            assert comparison_setting(m, .3, v, data='fashion_mnist_mini', protocol=p).partition==dict(name='dirichlet', alpha=.3, n_clients=100, **cap)
    with pytest.raises(Refused, match="did you mean 'released'"): leaky(protocol='realeased')
    with pytest.raises(Refused, match="did you mean 'FedAvg'"): comparison_setting('FedAvgg', .3, data='fashion_mnist_mini')

def test_a_partition_is_pathological_where_there_is_no_alpha():
    assert comparison_setting('FedAvg', data='fashion_mnist_mini', classes=3).partition==dict(name='classes_per_client', classes=3, n_clients=100)

def test_similarities_are_cosines():
    l,g = torch.randn(7, 5, dtype=torch.float64),torch.randn(7, 5, dtype=torch.float64)
    theta,theta_a = similarities(l, g)
    for j in range(7): assert torch.isclose(theta[j], l[j]@g[j]/(l[j].norm()*g[j].norm()))
    assert torch.isclose(theta_a, (l*g).sum()/(l.norm()*g.norm())) and similarities(torch.zeros(1, 5), torch.ones(1, 5))[0]==0

def test_the_released_divergence_is_kl_of_softmaxed_packs_global_first():
    l,g = torch.randn(4, 6, dtype=torch.float64),torch.randn(4, 6, dtype=torch.float64)
    p,q = g.softmax(1),l.softmax(1)
    torch.testing.assert_close(divergence(l, g), (p*(p/q).log()).sum(1))
    small = g+1e-3*l
    torch.testing.assert_close(divergence(small, g), ((p*(small-g)**2).sum(1)-(p*(small-g)).sum(1)**2)/2, rtol=1e-2, atol=0)

def test_eq_7_on_raw_weights_does_not_exist_where_a_sign_changes():
    g,l = torch.tensor([[1.,2.],[1.,-2.]]),torch.tensor([[2.,2.],[1.,2.]])
    b = divergence(l, g, 'printed')
    assert torch.isclose(b[0], 2*torch.tensor(2.).log()) and b[1].isnan()

@given(st.lists(st.sampled_from([.1,.2,.5,.7,.9]), min_size=1, max_size=12), st.integers(1, 12))
def test_selection(theta, budget):
    t = torch.tensor(theta)
    every,some = select(t, torch.tensor(.7)),select(t, torch.tensor(.7), budget)
    assert every.tolist()==[j for j,v in enumerate(theta) if t[j] < torch.tensor(.7)] and len(some)==min(budget, len(every)) and set(some.tolist())<=set(every.tolist())
    left = [j for j in every.tolist() if j not in some.tolist()]
    assert not left or t[some].max() <= t[left].min()

def test_everybody_sending_everything_with_equal_weights_is_the_plain_mean():
    g = torch.randn(5, 4)
    ds = [torch.randn(5, 4) for _ in range(3)]
    new,valid = aggregate_packs(g, [(torch.arange(5), d, torch.ones(5)) for d in ds])
    torch.testing.assert_close(new, g+sum(ds)/3); assert valid.all()

def dyadic(kind):
    "A method whose models are multiples of 2⁻¹², so that sums and halves are exact and an order of sums cannot matter"
    def coarse(w): return tmap(lambda t: (4096*t).round()/4096, w)
    return type('Dyadic', (kind,), dict(server=lambda self, w, n: kind.server(self, coarse(w), n), finish=lambda self, w, c: kind.finish(self, coarse(w), c)))

def test_keep_all_with_equal_weights_is_fedavg_to_the_bit(monkeypatch):
    "All packs sent, weights one, four clients; released, for there a client keeps nothing"
    monkeypatch.setattr(fedcspack, 'select', lambda theta, theta_a, budget=None: torch.arange(len(theta)))
    monkeypatch.setattr(fedcspack, 'similarities', lambda l, g: (torch.ones(len(l)), torch.tensor(1.)))
    monkeypatch.setattr(fedcspack, 'divergence', lambda l, g, v: torch.zeros(len(l)))
    a,b = (run(federation(m, weighting='uniform', per_round=4))[0]['server']['w'] for m in (dyadic(FedCSPACK)(size=8, variant='released'), dyadic(FedAvg)()))
    assert same(a, b) and not same(a, begin(federation())['server']['w'])

@given(st.integers(1, 9), st.integers(1, 30))
def test_no_more_bytes_are_sent_than_allowed(packs, size):
    m = FedCSPACK(size=size, bytes=packs*(4*size+8)+3)
    assert m.most==packs and FedCSPACK(size=size, bytes=packs*(4*size+8)+3, budget=2).most==min(packs, 2) and FedCSPACK().most is None
    with pytest.raises(Refused, match='too few for a pack'): FedCSPACK(size=size, bytes=4*size+7)

def test_a_budget_of_bytes_holds_on_the_message():
    allowed = 3*(4*8+8)
    sent = one_by_one(f := federation(FedCSPACK(size=8, bytes=allowed), per_round=4), begin(f), [0,1,2,3], 0)
    for r in sent: assert len(r['message']['at'])<=3 and sum(t.numel()*t.element_size() for t in r['message'].values()) <= allowed
    assert max(len(r['message']['at']) for r in sent)==3

def test_a_client_keeps_what_the_server_did_not_move():
    "Intended: its start is the server's model where a pack was moved in the last round, and its own model elsewhere; released: all the server's"
    for variant in ('intended','released'):
        fed = federation(FedCSPACK(size=8, variant=variant), rounds=1, per_round=4)
        state,_ = one_round(fed, begin(fed), 0)
        c = client_view(fed, state, 0, 1)
        w,_ = fed.method.start(c)
        valid = (state['server']['when']==1).repeat_interleave(8)[:len(flat(w))]
        g = flat(state['server']['w'])
        assert valid.any() and not valid.all()
        if variant=='released': assert torch.equal(flat(w), g) and not state['memory']['0']
        else: assert torch.equal(flat(w)[valid], g[valid]) and torch.equal(flat(w)[~valid], flat(state['memory']['0']['own'])[~valid]) and not torch.equal(flat(w)[~valid], g[~valid])

def rounds(m, n=8, **kw):
    "Per round the server's weights before it, and per client its start and its model after training"
    fed = federation(m, rounds=n, per_round=1, **kw)
    state,seen = begin(fed),[]
    for r in range(n):
        ids = sample_clients(4, 1, fed.seed, r)[0].tolist()
        starts = {i: fed.method.start(client_view(fed, state, i, r))[0] for i in ids}
        w,(state,_) = state['server']['w'],one_round(fed, state, r)
        seen.append((w, starts, {i: state['memory'][str(i)]['own'] for i in ids}))
    return fed,state,seen

def test_a_client_that_was_away_takes_over_all_that_moved_meanwhile():
    "Start and personal model, pack by pack: the server's where any server model since its last round differs there, else its own; one that was never there has the server's"
    fed,state,seen = rounds(FedCSPACK(size=8))
    every = [pack(flat(w), 8) for w,_,_ in seen] + [pack(flat(state['server']['w']), 8)]
    def expected(i, r): # what client i should have after r rounds
        last = max((k for k in range(r) if i in seen[k][1]), default=None)
        if last is None: return every[r]
        moved = torch.stack([(every[k+1]!=every[k]).any(1) for k in range(last, r)]).any(0)
        return torch.where(moved[:,None], every[r], pack(flat(seen[last][2][i]), 8))
    for r,(_,starts,_) in enumerate(seen):
        for i,w in starts.items(): assert torch.equal(pack(flat(w), 8), expected(i, r))
    for i in range(4): assert torch.equal(pack(flat(fed.method.personal(client_view(fed, state, i, 8))), 8), expected(i, 8))
    away = [r-max(k for k in range(r) if i in seen[k][1]) for r,(_,s,_) in enumerate(seen) for i in s if any(i in seen[k][1] for k in range(r))]
    assert max(away) > 2 and {i for _,s,_ in seen for i in s} != set(range(4)) # somebody was away for long, somebody never there

def test_to_tell_all_clients_in_every_round_is_the_same_but_for_its_price():
    "Line 10 of Algorithm 1: models equal to the bit, uplinks too, and four downlinks a round in place of two"
    (a,rows),(b,to_all) = (run(federation(m, rounds=6, per_round=2)) for m in (FedCSPACK(size=8), FedCSPACKToAll(size=8)))
    assert same(a['server'], b['server'])
    for r,t in zip(rows, to_all): assert r[:3]==t[:3] and t[3]==(2*r[3] if r[2]=='bytes_down' else r[3])
    assert {r[2] for r in rows} >= {'bytes_down','bytes_up','personal_accuracy'}

def test_the_released_downlink_is_the_model_alone():
    "Its clients take over everything, so nothing has to say what moved"
    m = FedCSPACK(size=8, variant='released')
    assert m.send(m.server(w := dict(a=torch.ones(9)), 1), 0).keys()=={'w'} and FedCSPACK(size=8).send(m.server(w, 1), 0).keys()=={'w','when','now'}

@pytest.mark.parametrize('module', [mlp(), mlp(bn=True)])
def test_a_round_costs_the_buffers_that_a_transport_carries(module):
    "Every message is turned to bytes on its way and read again: the round is the same, and its price is what was carried"
    fed,carried = federation(FedCSPACK(size=8), rounds=1, per_round=4, module=module),dict(up=0, down=0)
    def carry(way, message): buffer = encode(message); carried[way] += len(buffer); return decode(buffer)
    class Carried(FedCSPACK):
        def start(self, c):
            travelled = carry('down', {**c.message, **(dict(buffers=c.buffers) if c.buffers else {})})
            assert same(travelled['w'], c.message['w'])
            return super().start(c)
    def transport(fed, state, ids, r):
        replies = one_by_one(replace(fed, method=Carried(size=8)), state, ids, r)
        for a in replies:
            a['message'] = carry('up', {**a['message'], **(dict(buffers=a['buffers']) if a['buffers'] else {})})
            a['buffers'] = a['message'].pop('buffers', {})
        return replies
    state,rows = one_round(fed, begin(fed), 0, transport)
    plain,_ = one_round(fed, begin(fed), 0)
    assert same(state['server'], plain['server']) and same(state['buffers'], plain['buffers'])
    assert {r[2]: r[3] for r in rows if r[2].startswith('bytes')}=={'bytes_up': carried['up'], 'bytes_down': carried['down']} and carried['up'] > 0

def test_the_divergence_is_too_small_to_matter():
    "Both weights against θ alone: the models differ by a thousandth of what the round changed; β alone is another method"
    def after(weights): return flat(run(federation(FedCSPACK(size=8, weights=weights, variant='released'), local=LocalTraining(1, 4, SGD(.02))))[0]['server']['w'])
    both,start = after('both'),flat(begin(federation())['server']['w'])
    moved = (both-start).norm()
    assert (after('cosine')-both).norm() < 2e-3*moved < (after('divergence')-both).norm()

def test_one_pack_and_no_pack_sent():
    "A pack larger than the model is the model: θ_j = θ_a, nothing is below, and the round says so"
    with pytest.warns(UserWarning, match='No pack was sent'): state = run(federation(FedCSPACK(size=10**6), rounds=1))[0]
    assert same(state['server']['w'], begin(federation())['server']['w'])

GOOD = dict(at=torch.tensor([0,2]), packs=torch.ones(2, 3), weight=torch.ones(2))
@pytest.mark.parametrize('change,word', [(dict(at=torch.tensor([0,3])), 'outside 0 … 2'), (dict(at=torch.tensor([-1,2])), 'outside'), (dict(at=torch.tensor([2,2])), 'twice'), (dict(packs=torch.ones(2, 4)), r'\[2, 4\]'),
    (dict(packs=torch.ones(3, 3)), r'\[3, 3\]'), (dict(packs=torch.ones(2, 3).double()), 'float64'), (dict(packs=torch.full((2,3), float('nan'))), 'finite'), (dict(weight=torch.tensor([1.,-1.])), 'negative'), (dict(weight=torch.ones(3)), 'packs are'),
    (dict(at=torch.tensor([0.,2.])), 'whole'), (dict(weight=None), 'lacks')])
def test_what_does_not_fit_in_a_message_is_named(change, word):
    g = torch.zeros(3, 3)
    assert not misfit(GOOD, g) and re.search(word, misfit({**GOOD, **change}, g))

def test_a_client_whose_packs_lie_outside_is_set_aside():
    "It does not count, its memory stays, and the others are merged as without it"
    class Outside(FedCSPACK):
        def finish(self, w, c):
            m,memory = super().finish(w, c)
            return (dict(m, at=m['at']+100) if c.id==2 else m),memory
    fed = federation(Outside(size=8), rounds=1, per_round=4)
    with pytest.warns(SetAside, match='Client 2 is set aside in round 1: it names packs outside 0 … 10'): state,rows = one_round(fed, begin(fed), 0)
    assert '2' not in state['memory'] and [1, 2, 'set_aside', 1.] in rows and state['server']['when'].any()

@pytest.mark.parametrize('bad,word', [(lambda: FedCSPACK(size=0), 'size'), (lambda: FedCSPACK(budget=0), 'budget'), (lambda: FedCSPACK(weights='cs'), 'weights'), (lambda: FedCSPACK(variant='x'), 'variant'), (lambda: pack(torch.ones(3), 0), 'pack')])
def test_refusals(bad, word):
    with pytest.raises(Refused, match=word): bad()

@pytest.mark.parametrize('profile', ['laptop','paper'])
def test_in_table_2_only_emnist_has_other_data(profile):
    p = experiment('003-table2').parameters(profile)
    assert 'data' not in p['stand_in'] and [c for c,how in p['columns'].items() if 'data' in how.get('stand_in', {})]==['EMNIST/CNN']

def test_the_chosen_hyper_parameters_are_those_of_the_sweep():
    "On the committed rows: the highest validation accuracy at the released code's rate"
    from pathlib import Path
    from fedbook.chapters.fedcspack import ALGORITHMS, CHOSEN, comparison_setting
    from fedbook.results import read, value_of
    rows = [r for r in read(Path(__file__).parents[1]/'figures'/'003'/'tuning'/'laptop'/'rows.jsonl') if r['cell']['lr']==.05 and r['cell']['dataset']=='FMNIST']
    newest = {repr(r['cell']): r for r in rows} # the last run of each cell, by the newest code
    for name,chosen in CHOSEN.items():
        mine = [r for r in newest.values() if r['cell']['algorithm']==name]
        assert len(mine)==4
        best = max(mine, key=lambda r: value_of(r, 'val_accuracy'))['setting']['method']
        assert chosen.items() <= best.items() and comparison_setting(name, .3, data='fashion_mnist').method.items() >= chosen.items()
    assert comparison_setting('FedDBE, own κ', .3, data='fashion_mnist').method['kappa']==50 and ALGORITHMS['MOON, own μ']['mu']==1

def test_no_two_contenders_look_alike():
    from fedbook.chapters.fedcspack import contenders, look
    looks = [(tuple(v['color']), v.get('ls'), v.get('lw')) for v in look(contenders(['intended','released'])).values()]
    assert len(looks)==len(set(looks))==15
