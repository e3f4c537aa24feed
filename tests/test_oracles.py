"Every method against its oracle in oracles.py, round by round and from the same random draws: weights, messages, traffic, and the model of every client."
from collections import OrderedDict
import numpy as np, pytest, torch
from torch import nn
import oracles as O
from fedbook.method import LocalTraining, method, batch_indices
from fedbook.models import Classifier, Net
from fedbook.optim import SGD
from fedbook.client import one_by_one
from fedbook.federation import begin, client_view, FederatedData, Federation, Protocol
from fedbook.rounds import run, server_round, taking_part
from fedbook.streams import seeded, stream
from fedbook.tensors import flatten
from fedbook.wire import nbytes

OPTIMISERS = {'plain': SGD(.2), 'momentum': SGD(.1, .5), 'momentum and decay': SGD(.1, .9, .05)}
DRAWN = [[0, 2], [0, 1], [0, 2], [1, 2]] # client 1 joins late, each of the three stays away for a round, 3 always; class 2 is 1's and 3's

def federation(m, optimiser):
    "Four unequal clients, each without a class but for the last, on the oracle's network"
    gen,classes = torch.Generator().manual_seed(3),[(0, 1), (1, 2), (0, 1), (0, 1, 2)]
    sizes = (11, 6, 17, 9)
    y = torch.cat([torch.tensor(c)[torch.randint(len(c), (n,), generator=gen)] for c,n in zip(classes, sizes)])
    x = torch.randn(len(y), 6, generator=gen, dtype=torch.float64) + y[:,None]
    with seeded(4, 'test model'): net = Classifier(nn.Sequential(OrderedDict(fc=nn.Linear(6, 5), relu=nn.ReLU())), nn.Linear(5, 3)).double()
    parts = np.split(np.arange(len(y)), np.cumsum(sizes)[:-1])
    data = FederatedData(x, y, parts, (x, y), test_clients=parts)
    return Federation(m, Net(net), data, LocalTraining(2, 4, optimiser), Protocol(len(DRAWN), 2), seed=4274)

def of_client(fed, i): return tuple(t[torch.from_numpy(fed.data.clients[i])] for t in (fed.data.x, fed.data.y))
def view(fed, i, r): return client_view(fed, begin(fed), i, r) # for what does not depend on the state
def positions(fed, i, r): return [torch.from_numpy(b) for b,_ in batch_indices(view(fed, i, r))]
def in_turn(fed, f): return {(r, i): f(view(fed, i, r)) for r,ids in enumerate(DRAWN) for i in ids}

def double(x): return torch.tensor(x, dtype=torch.float64)
def floats(message): return sum(t.numel() for t in flatten(message).values() if t.is_floating_point())
def others(message): return sum(t.numel() for t in flatten(message).values() if not t.is_floating_point())

def agree(got, want, where):
    "The same names, and numbers that differ by 1e-9 at most"
    got,want = flatten(got),flatten(want)
    assert got.keys()==want.keys(), where
    for k in want: torch.testing.assert_close(got[k], want[k], rtol=0, atol=1e-9, msg=lambda m: f'{where}, {k}: {m}')

def traffic(row, messages, numbers, indices=None):
    "Who sends or receives something, how many numbers (and indices, where the oracle has them), and the bytes with a header for each"
    assert {i: floats(m) for i,m in messages.items() if m}==numbers
    assert indices is None or {i: others(m) for i,m in messages.items()}==indices
    sizes = [nbytes(m) for m in messages.values() if m]
    assert sum(sizes)==row and all(0 < b-8*floats(m) < 8*others(m)+100+120*len(flatten(m)) for b,m in zip(sizes, messages.values()))

def drive(name, optimiser, oracle, settings, theirs, draws=lambda fed: {}, message=lambda m,i: dict(w=m['w']), personal=lambda w: w, logits=O.logits, counted=lambda e,r: e):
    "All rounds of a method and of its oracle, compared after each, and the scores of a whole run"
    fed = federation(method(name, **settings), optimiser)
    state,clients = begin(fed),[of_client(fed, i) for i in range(len(fed.data.clients))]
    batches = [{i: positions(fed, i, r) for i in ids} for r,ids in enumerate(DRAWN)]
    of_optimiser = {k: v for k,v in dict(momentum=optimiser.momentum, decay=optimiser.weight_decay).items() if v}
    expected = oracle(state['server']['w'], clients, batches, optimiser.lr, **{**of_optimiser, **theirs, **draws(fed)})
    for r,e in enumerate(expected, -fed.method.opening):
        drawn,e = taking_part(fed, r),counted(e, r)
        assert r < 0 or list(drawn)==DRAWN[r]
        replies,received = one_by_one(fed, state, list(drawn), r),{i: client_view(fed, state, i, r).message for i in e['down_numbers']}
        state,rows = server_round(fed, state, drawn, replies, r)
        sent,rows = {i: a['message'] for i,a in zip(drawn, replies)},{k: v for _,_,k,v in rows}
        for i,m in e['messages'].items(): agree(sent[i], message(m, i), f'round {r}, message of {i}')
        traffic(rows['bytes_down'], received, e['down_numbers'], e.get('down_indices'))
        traffic(rows['bytes_up'], sent, e['up_numbers'], e.get('up_indices'))
        agree({k: state['server']['w'][k] for k in e['w']}, e['w'], f'round {r}, server')
        for i,w in e['personal'].items():
            c = client_view(fed, state, i, r+1)
            with seeded(fed.seed, 'personal', i): own = fed.method.personal(c)
            agree(own, personal(w), f'round {r}, model of {i}')
            agree(dict(z=fed.net.logits(own, c.buffers, c.x)), dict(z=logits(w, c.x)), f'round {r}, logits of {i}')
    scored = {i: v for _,i,k,v in run(fed)[1] if k=='personal_accuracy'}
    assert scored==pytest.approx({i: 100*(logits(w, x).argmax(1)==y).double().mean().item() for i,w in e['personal'].items() for x,y in [clients[i]]})

# ---- how the library puts what the oracle says: messages, draws, and what it sends where there was a choice (as its notebooks say)

def nova(m, i): return dict(w=m['w'], a=double(m['norm']))

# FedSPU: the merge goes by samples; a bit per neuron travels, those of whole clients too

def neurons(fed):
    "Which neurons each client trains in each round; the server's counter goes up by one a round"
    server = begin(fed)['server']
    def of(r, i):
        at = fed.method.send(dict(server, draw=server['draw']+r), i)['neurons']['body.fc.weight'].nonzero()[:,0]
        assert len(at)==O.spu_count(fed.method.share or (.2, .4, .6, .8)[i], 5)
        return at
    return dict(active={(r, i): of(r, i) for r,ids in enumerate(DRAWN) for i in ids}, batch=1)

def between(m, i): return dict(values={k: w[m['mask'][k]>0] for k,w in m['w'].items()}, neurons={'body.fc.weight': m['mask']['body.fc.bias'].bool()})
def bits(e, r): return dict(e, **dict.fromkeys(('down_indices','up_indices'), dict.fromkeys(e['messages'], 5)))

# FedALA: where a client's slice begins, also for the mixture that is scored after the last round

def slices(fed):
    def first(r, n, i): return int(stream(fed.seed, 'mixing', r, i).integers(n-int(.8*n)+1))
    return dict(slices={(r, i): first(r, len(c), i) for r in range(len(DRAWN)+1) for i,c in enumerate(fed.data.clients)})

# FedAS: samples in order without an incomplete last batch, but for the only one

def loaders(fed):
    def batches(size): return in_turn(fed, lambda c: list(torch.arange(max(len(c.own)//size*size, min(len(c.own), size))).split(size)))
    aligning = batches(fed.method.batch_size)
    return dict(aligning=aligning, fisher=batches(fed.local.batch_size), samples={k: torch.cat(v) for k,v in aligning.items()})

def traced(m, i): return dict(w=m['w'], trace=double(m['score']))

# FedDBE: the preparation is a round of its own; the consensus comes with every model; the personal mean is a shift of the head's bias

def dbe(w0, *data, **settings):
    out = O.oracle_feddbe(w0, *data, **settings)
    (down,up),means = out[0]['prep'],out[0]['means']
    return [dict(w=w0, messages={i: dict(consensus=r) for i,r in means.items()}, personal={i: dict(w0, mean=0*r) for i,r in means.items()}, down_numbers=down, up_numbers=up), *out]

def opening(fed): return dict(prep={i: positions(fed, i, -1) for i in range(len(fed.data.clients))})
def model_or_mean(m, i): return m if 'consensus' in m else dict(w=m['w'])
def with_consensus(e, r): return e if r < 0 else dict(e, down_numbers=dict.fromkeys(e['messages'], 53+5))

def shifted(w):
    *names,mean = w
    return {k: w[k] + w[names[-2]] @ w[mean] if k==names[-1] else w[k] for k in names}

# FedPAC: a whole model is sent to everybody; class means and prototypes have rows for all classes; the first of three local epochs is the head's

def pac(w0, clients, rounds, lr, **settings):
    first = {(r, i): len(bs)//3 for r,drawn in enumerate(rounds) for i,bs in drawn.items()}
    heads = {(r, i): rounds[r][i][:n] for (r,i),n in first.items()}
    return O.oracle_fedpac(w0, clients, [{i: bs[first[r,i]:] for i,bs in drawn.items()} for r,drawn in enumerate(rounds)], lr, heads, **settings)

def statistics(m, i):
    means = torch.stack([m['means'].get(c, double([0.]*5)) for c in range(3)])
    return dict(w=m['w'], means=means, counts=m['counts'].double(), v=double(m['v']), h=m['h'])

def all_classes(e, r):
    def each(n): return dict.fromkeys(e['messages'], n)
    return dict(e, down_numbers=each(53+15 if r else 53), down_indices=each(3 if r else 0), up_numbers=each(53+1+15+15+3), up_indices=each(0))

# FedCSPACK: packs of 8, and the three zeros of the last one travel; places take the place of a mask; down goes the whole model, and when each pack moved last

def packs(m, i):
    at = sorted(m['weights'])
    return dict(at=torch.tensor(at, dtype=torch.int32), packs=torch.stack([O.packs(m['changes'][j], 8)[0] for j in at]), weight=double([m['weights'][j] for j in at]))

def cspack(weights, weight, variant='intended', name='fedcspack', to=None):
    "`to`: who receives; `None`: the clients drawn"
    def counted(e, r):
        n,received = {i: len(m['weights']) for i,m in e['messages'].items()},to or e['messages']
        return dict(e, up_numbers={i: 9*k for i,k in n.items()}, up_indices=n, down_numbers=dict.fromkeys(received, 53), down_indices=dict.fromkeys(received, 0 if variant=='released' else 8))
    return cases(name, O.oracle_fedcspack, dict(size=8, weights=weights, variant=variant), dict(pack=8, weight=weight, variant=variant), message=packs, counted=counted)

# ---- all of them

def cases(name, oracle, settings={}, theirs=None, optimisers=('plain','momentum and decay'), **hooks):
    "One case per optimiser; the oracle has the settings of the method where it has none of its own"
    what = ' '.join(str(v) for v in settings.values())
    return [pytest.param(name, OPTIMISERS[o], oracle, settings, settings if theirs is None else theirs, hooks, id=f'{name} {what}, {o}') for o in optimisers]

CASES = [
    cases('fedavg', O.oracle_fedavg),
    cases('localonly', O.oracle_localonly),
    cases('fedprox', O.oracle_fedprox, dict(mu=.7)),
    cases('fedyogi', O.oracle_fedyogi, dict(eta=.05, tau=.02, beta1=.8, beta2=.95)),
    cases('fedntd', O.oracle_fedntd, dict(beta=.6, tau=2.)),
    cases('moon', O.oracle_moon, dict(mu=2., tau=.3, width=4), dict(mu=2., tau=.3), logits=O.moon_logits),
    cases('fednova', O.oracle_fednova, optimisers=('plain','momentum'), message=nova),
    cases('fednova+fedprox', O.oracle_fednova, dict(mu=.7), optimisers=('plain','momentum'), message=nova),
    *(cases('fedspu', O.oracle_fedspu, dict(share=share), {}, ('plain',), draws=neurons, message=between, counted=bits) for share in (None, .7, 1.)),
    *(cases('fedala', O.oracle_fedala, dict(p=p, eta=.8, batch_size=4), dict(top=p, eta=.8, batch=4), draws=slices) for p in (2, 3)),
    *(cases('fedas', O.oracle_fedas, dict(lr=.3, batch_size=size), dict(lr_align=.3), draws=loaders, message=traced) for size in (3, 7)),
    *(cases('feddbe', dbe, dict(mu=mu, kappa=2.), optimisers=('plain',), draws=opening, message=model_or_mean, personal=shifted, logits=O.dbe_logits, counted=with_consensus) for mu in (1., .3)),
    *(cases('fedpac', pac, dict(lam=2., head_lr=.3, head_momentum=m, head_decay=d), dict(lam=2., lr_head=.3, momentum=m, decay=d), (o,), message=statistics, counted=all_classes)
      for o,m,d in (('plain', 0., 0.), ('momentum and decay', .9, .05))),
    cspack('both', 'both'), cspack('cosine', 'cs'), cspack('divergence', 'kd'), cspack('both', 'both', 'released'), cspack('both', 'both', name='fedcspacktoall', to=range(4))]

@pytest.mark.parametrize('name,optimiser,oracle,settings,theirs,hooks', [c for several in CASES for c in several])
def test_all_rounds(name, optimiser, oracle, settings, theirs, hooks): drive(name, optimiser, oracle, settings, theirs, **hooks)
