"pFedFDA and FedL2G against oracles_posthoc.py, three rounds and more with clients that join late; what they are where their difference is nothing; first updates by hand."
from dataclasses import replace
import numpy as np, pytest, torch
from torch import nn
import oracles_posthoc as P
from fedbook.client import one_by_one
from fedbook.errors import Refused
from fedbook.federation import begin, client_view, Protocol
from fedbook.method import FedAvg, LocalTraining, method, probe
from fedbook.methods.fedl2g import FedL2G, guide_gradient, limited
from fedbook.methods import pfedfda
from fedbook.methods.pfedfda import best_beta, discriminant, feature_statistics, halves, PFedFDA, priors
from fedbook.models import Classifier, Net, part
from fedbook.optim import SGD
from fedbook.rounds import run, server_round, taking_part
from fedbook.tensors import tmap
from test_oracles import agree, double, DRAWN, drive, federation, of_client, OPTIMISERS, positions, traffic
from test_rounds import mlp, same

# ---- pFedFDA

def means_at_first(fed): return dict(mu0=begin(fed)['server']['mu'])
def statistics(m, i): return {k: m[k] for k in ('w','mu','sigma')}

@pytest.mark.parametrize('optimiser', OPTIMISERS)
@pytest.mark.parametrize('single', [False, True])
def test_pfedfda(optimiser, single):
    drive('pfedfda', OPTIMISERS[optimiser], P.oracle_pfedfda, dict(single=single), dict(single=single), draws=means_at_first, message=statistics)

@pytest.mark.parametrize('single', [False, True])
def test_its_statistics_at_the_server(single):
    fed = federation(PFedFDA(single=single), OPTIMISERS['plain'])
    state,clients,betas = begin(fed),[of_client(fed, i) for i in range(4)],[]
    rounds = [{i: positions(fed, i, r) for i in ids} for r,ids in enumerate(DRAWN)]
    for r,e in enumerate(P.oracle_pfedfda(state['server']['w'], clients, rounds, .2, state['server']['mu'], single=single)):
        drawn = taking_part(fed, r)
        state,_ = server_round(fed, state, drawn, one_by_one(fed, state, list(drawn), r), r)
        agree({k: state['server'][k] for k in ('mu','sigma')}, {k: e[k] for k in ('mu','sigma')}, f'round {r}')
        betas += [b for found in (e['betas'], e['scored_betas']) for b in found.values()]
        V,c = P.lda(e['mu'], e['sigma'], double([1/3]*3)) # of the model that the global scores see
        agree(part(state['server']['w'], 'head'), {'head.weight': V, 'head.bias': c}, f'round {r}, head')
    assert len({round(b[0], 6) for b in betas}) > 4 # the search has something to say

def features(n=30, C=3, d=4, seed=0):
    gen = torch.Generator().manual_seed(seed)
    y = torch.randint(0, C, (n,), generator=gen)
    return torch.randn(n, d, generator=gen, dtype=torch.float64) + y[:,None]*.7, y

@pytest.mark.parametrize('seed', range(4))
def test_parts_of_pfedfda(seed):
    z,y = features(seed=seed)
    y[y==2] = seed%2+1 # a class is missing for odd seeds
    mu,sigma = torch.randn(3, 4, dtype=torch.float64),P.fda_statistics(*features(40, seed=9), torch.zeros(3, 4).double())[1]
    pi = priors(y, 3)
    assert torch.allclose(pi, P.fda_priors(y, 3)) and halves(y).tolist()==P.alternate(y).tolist()
    for a,b in [(discriminant(mu, sigma, pi), P.lda(mu, sigma, pi)), (feature_statistics(z, y, mu), P.fda_statistics(z, y, mu))]:
        for s,t in zip(a, b): torch.testing.assert_close(s, t, rtol=0, atol=1e-12)
    for single in (False, True):
        beta = best_beta(z, y, (mu, sigma), pi, single=single)
        assert beta==pytest.approx(P.fda_beta(z, y, P.alternate(y), (mu, sigma), pi, single), abs=1e-9)
        assert not single or beta[0]==beta[1]

@pytest.mark.parametrize('y', [[0, 1, 2], [0, 0, 1, 2], [1, 1, 1]])
def test_who_cannot_cross_validate_trusts_the_server(y):
    y,g = torch.tensor(y),(torch.zeros(3, 2).double(), torch.eye(2).double())
    assert best_beta(torch.randn(len(y), 2).double(), y, g, priors(y, 3))==(0., 0.)

def alike(m, optimiser):
    "Clients with the same shares of the classes, so that one head is right for all"
    fed = federation(m, optimiser)
    y = torch.arange(len(fed.data.y)) % 3
    parts = [np.arange(a, a+9) for a in (0, 9, 18, 27)]
    return replace(fed, method=m, data=replace(fed.data, y=y, test=(fed.data.x, y), clients=parts, test_clients=parts))

@pytest.mark.parametrize('optimiser', OPTIMISERS)
def test_with_the_servers_statistics_it_is_fedavg_under_a_frozen_head_to_the_bit(optimiser, monkeypatch):
    monkeypatch.setattr(pfedfda, 'best_beta', lambda *a: (0., 0.))
    fed = alike(PFedFDA(), OPTIMISERS[optimiser])
    first = begin(fed)['server']
    V,c = discriminant(first['mu'], first['sigma'], priors(torch.arange(9)%3, 3))
    frozen = Net(fed.net.module).at({**fed.net.weights(), 'head.weight': V, 'head.bias': c})
    other = replace(fed, method=method('fedavg'), net=frozen.freeze('head'))
    (a,_),(b,_) = run(fed),run(other)
    assert same(part(a['server']['w'], 'body'), part(b['server']['w'], 'body')) and not same(part(a['server']['w'], 'body'), part(first['w'], 'body'))
    assert all(torch.allclose(a['server'][k], first[k], rtol=0, atol=1e-15) for k in ('mu','sigma'))

def test_the_features_are_those_before_each_step():
    "Client 0 has 11 samples in batches of 4, 4 and 3, twice: three steps of two epochs, the last of each shorter"
    fed,seen = federation(PFedFDA(), OPTIMISERS['plain']),[]
    @torch.no_grad()
    def noted(z, y, mu): seen.append((z, y)); return feature_statistics(z, y, mu)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(pfedfda, 'feature_statistics', noted)
        state = begin(fed); one_by_one(fed, state, [0], 0)
    z,y = seen[0] # the first is of all features
    b,(x,own) = positions(fed, 0, 0),of_client(fed, 0)
    assert len(z)==22 and y.tolist()==own[torch.cat(b)].tolist()
    torch.testing.assert_close(z[:4], P.features(fed.net.weights(), x[b[0]]))
    assert not torch.allclose(z[4:8], P.features(fed.net.weights(), x[b[1]]))

def test_it_needs_a_linear_head():
    with pytest.raises(Refused, match='one linear layer with a bias'): begin(replace(federation(FedAvg(), SGD(.1)), method=PFedFDA(), net=Net(Classifier(nn.Linear(6, 5), nn.Linear(5, 3, bias=False)).double())))

# ---- FedL2G

HELD = 3
def guided(m, optimiser):
    "The four clients, each of whom holds out its last three samples"
    fed = federation(FedAvg(), optimiser)
    c = fed.data.clients
    return replace(fed, method=m, data=replace(fed.data, clients=[p[:-HELD] for p in c], held=[p[-HELD:] for p in c]))

def whole(fed, i): # as the oracle has them, those held out behind the others
    at = torch.from_numpy(np.concatenate([fed.data.clients[i], fed.data.held[i]]))
    return fed.data.x[at],fed.data.y[at]

def studied(fed, r, i):
    "Where the samples of the study batches are among the client's own"
    c = client_view(fed, begin(fed), i, r)
    return [torch.cat([(c.x==x).all(1).nonzero()[:,0] for x in b['x']]) for b in probe(c, fed.method.studies, 'study')]

@pytest.mark.parametrize('variant,theirs', [('logits', 'logit'), ('features', 'feat')])
@pytest.mark.parametrize('settings', [{}, dict(warmup=1), dict(studies=2, server_lr=3.), dict(most=.05, server_lr=10.)], ids=str)
def test_fedl2g(variant, theirs, settings):
    m = FedL2G(**{'variant': variant, 'warmup': 0, 'server_lr': 2., **settings})
    fed = guided(m, OPTIMISERS['plain'])
    state,clients = begin(fed),[whole(fed, i) for i in range(4)]
    rounds,keys = [{i: positions(fed, i, r) for i in ids} for r,ids in enumerate(DRAWN)],[(r, i) for r,ids in enumerate(DRAWN) for i in ids]
    study,quiz = {k: studied(fed, *k) for k in keys},{(r, i): [torch.arange(len(fed.data.clients[i]), len(clients[i][1]))] for r,i in keys}
    want = P.oracle_fedl2g(fed.net.weights(), clients, rounds, .2, state['server']['guides'], study, quiz, m.server_lr, theirs, m.warmup, m.most)
    for r,e in enumerate(want):
        drawn = taking_part(fed, r); assert list(drawn)==DRAWN[r]
        replies,received = one_by_one(fed, state, list(drawn), r),{i: client_view(fed, state, i, r).message for i in drawn}
        state,rows = server_round(fed, state, drawn, replies, r)
        sent,rows = {i: a['message'] for i,a in zip(drawn, replies)},{k: v for _,_,k,v in rows}
        for i,o in sent.items(): agree({str(k): v for k,v in zip(o['classes'].tolist(), o['rows'])}, {str(k): v for k,v in e['messages'][i].items()}, f'round {r}, message of {i}')
        traffic(rows['bytes_down'], received, e['down_numbers'], e['down_indices'])
        traffic(rows['bytes_up'], sent, e['up_numbers'], e['up_indices'])
        agree(dict(guides=state['server']['guides']), e['w'], f'round {r}, guides')
        for i,w in e['personal'].items(): agree(fed.method.personal(client_view(fed, state, i, r+1)), w, f'round {r}, model of {i}')
    assert any(len(o) < 3 for e in want for o in e['messages'].values()) # not everybody has sent every class
    assert same(state['server']['w'], fed.net.weights())

@pytest.mark.parametrize('optimiser', OPTIMISERS)
def test_without_a_pull_it_is_local_training_to_the_bit(optimiser):
    def models(m):
        fed = guided(m, OPTIMISERS[optimiser])
        state,_ = run(fed)
        return {i: fed.method.personal(client_view(fed, state, i, 9)) for i in range(4)},state
    (a,state),(b,_),(c,_) = (models(m) for m in (FedL2G(lam=0., warmup=0), method('localonly'), FedL2G(warmup=0)))
    assert all(same(a[i], b[i]) for i in a) and not any(same(c[i], b[i]) for i in (0, 1, 2))
    assert torch.equal(state['server']['guides'], begin(guided(FedL2G(), SGD(.1)))['server']['guides'])

def test_in_warm_up_the_guides_learn_and_the_clients_do_not():
    fed = guided(FedL2G(warmup=9), OPTIMISERS['momentum'])
    state,_ = run(fed)
    assert all(same(fed.method.personal(client_view(fed, state, i, 9)), fed.net.weights()) for i in range(4))
    assert not torch.equal(state['server']['guides'], begin(fed)['server']['guides'])

def test_the_first_round_by_hand():
    "Two logits that are the bias of a head whose weight is zero; one step of the client, then the gradient in the guide as the difference of the quiz"
    net = Net(Classifier(nn.Linear(1, 1), nn.Linear(1, 2)).double()).at({'head.weight': torch.zeros(2, 1).double(), 'head.bias': torch.zeros(2).double()})
    fed = guided(FedL2G(warmup=0), SGD(.1))
    x,y = torch.zeros(2, 1).double(),torch.tensor([0, 0])
    fed = replace(fed, net=net, local=LocalTraining(1, 4, SGD(.1)), protocol=Protocol(1, 1), data=replace(fed.data, x=x, y=y, clients=[[0]], held=[[1]], test=(x, y), test_clients=[[0]]))
    state = begin(fed)
    state['server']['guides'] = torch.tensor([[1., 0.], [0., 0.]]).double()
    own = one_by_one(fed, state, [0], 0)[0]['memory']['own']
    assert own['head.bias'].tolist()==pytest.approx([.15, -.05])

@pytest.mark.parametrize('scale', [.01, 1., 1e3])
def test_limits_are_torchs(scale):
    g = dict(a=scale*torch.randn(4, 3, dtype=torch.float64), b=scale*torch.randn(5, dtype=torch.float64))
    ps = [nn.Parameter(torch.zeros_like(t)) for t in g.values()]
    for p,t in zip(ps, g.values()): p.grad = t.clone()
    nn.utils.clip_grad_norm_(ps, 2.)
    for p,t in zip(ps, limited(g, 2.).values()): torch.testing.assert_close(t, p.grad, rtol=1e-12, atol=0)

def test_guide_gradients_are_differences():
    A,B = torch.randn(3, 4, dtype=torch.float64),torch.randn(2, 3, dtype=torch.float64)
    study,quiz = lambda w,g: (w['w']@A).tanh().square().sum() + ((w['w']@A - g)**2).mean(), lambda w: (B@(w['w'].T@w['w'])@B.T).exp().sum()
    w,g = dict(w=.1*torch.randn(2, 3, dtype=torch.float64)),torch.randn(2, 4, dtype=torch.float64)
    got,h = guide_gradient(study, quiz, w, g, .3),1e-6
    def after(g): v = w['w'].clone().requires_grad_(); return quiz(dict(w=v - .3*torch.autograd.grad(study(dict(w=v), g), v)[0])).item()
    for i in np.ndindex(2, 4):
        e = torch.zeros_like(g); e[i] = h
        assert got[i].item()==pytest.approx((after(g+e)-after(g-e))/(2*h), rel=1e-5, abs=1e-7)

# ---- Table 8 of the LP-FT paper

def test_rows_of_table_8():
    from fedbook.chapters.lpft import INTEGRATED, integrated, personalised
    from fedbook.papers import printed
    assert [c['algorithm'] for c in printed('002-table8').cells]==list(INTEGRATED)
    given = dict(world='corrupted clothes', rounds=8, epochs=4, batch_size=32, test=60, cross=30, lr=.003, probing=2, model=dict(name='mlp', hidden=[8]))
    rows = {a.split(' ')[0]: integrated(a, **given) for a in INTEGRATED}
    assert rows.pop('LP-FT')==personalised('LP-FT', **given)
    for k,s in rows.items(): assert s.held==(.2 if k in ('FedSoup','FedL2G') else 0.) and s.protocol['rounds']==8 and (s.after or [dict(protocol=s.protocol)])[-1]['protocol']['cross']==30
    assert (rows['FedSoup'].method['begin'], rows['FedL2G'].method['warmup'])==(6, 4)
    assert rows['FedBN'].model==dict(name='normed', of=given['model']) and all(s.model==given['model'] for k,s in rows.items() if k!='FedBN')
    assert integrated('FedBN (Li et al., 2021)', **{**given, 'model': dict(name='resnet18')}).model==dict(name='resnet18')

@pytest.mark.parametrize('of,norms', [(dict(name='cnn', channels=[2, 3], hidden=[4]), ['conv1','conv2']), (dict(name='mlp', hidden=[5, 4]), ['fc1','fc2'])])
def test_a_network_with_norms_is_the_network_but_for_them(of, norms):
    from fedbook.chapters import lpft
    from fedbook.models import build
    a,b = build('normed', of=of, seed=3),build(**of, seed=3)
    names = [k for k,m in a.body.named_children() if 'Norm' in type(m).__name__]
    assert names==[f'bn_{n}' for n in norms] and [k for k,_ in a.body.named_children() if k not in names]==[k for k,_ in b.body.named_children()]
    assert [tuple(w.shape) for w in b.parameters()]==[tuple(w.shape) for k,w in a.named_parameters() if 'bn_' not in k]
    assert not torch.equal(a.head.weight, build('normed', of=of, seed=4).head.weight)
