"Every method against its oracle in oracles.py, round by round and from the same random draws: weights, messages, traffic, and the model of every client."
from collections import OrderedDict
import numpy as np, pytest, torch
from torch import nn
import oracles as O
from fedbook.method import Local, method, plan
from fedbook.models import Classifier, Net
from fedbook.optim import SGD
from fedbook.rounds import begin, client_view, Federation, FederatedData, merged, one_by_one, Protocol, run, taking_part
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
    return Federation(m, Net(net), data, Local(2, 4, optimiser), Protocol(len(DRAWN), 2), seed=4274)

def of_client(fed, i): return tuple(t[torch.from_numpy(fed.data.clients[i])] for t in (fed.data.x, fed.data.y))
def view(fed, i, r): return client_view(fed, begin(fed), i, r) # for what does not depend on the state
def positions(fed, i, r): return [torch.from_numpy(b) for b,_ in plan(view(fed, i, r))]
def in_turn(fed, f): return {(r, i): f(view(fed, i, r)) for r,ids in enumerate(DRAWN) for i in ids}

def floats(message): return sum(t.numel() for t in flatten(message).values() if t.is_floating_point())
def others(message): return sum(t.numel() for t in flatten(message).values() if not t.is_floating_point())

def agree(got, want, where):
    "The same names, and numbers that differ by 1e-9 at most"
    got,want = flatten(got),flatten(want)
    assert got.keys()==want.keys(), where
    for k in want: torch.testing.assert_close(got[k], torch.as_tensor(want[k], dtype=None if isinstance(want[k], torch.Tensor) else torch.float64), rtol=0, atol=1e-9, check_dtype=False, msg=lambda m: f'{where}, {k}: {m}')

def traffic(row, messages, numbers, indices=None):
    "Who sends or receives something, how many numbers (and indices, where the oracle has them), and the bytes with a header for each"
    assert {i: floats(m) for i,m in messages.items() if m}==numbers
    assert indices is None or {i: others(m) for i,m in messages.items()}==indices
    sizes = [nbytes(m) for m in messages.values() if m]
    assert sum(sizes)==row and all(0 < b-8*floats(m) < 8*others(m)+100+120*len(flatten(m)) for b,m in zip(sizes, messages.values()))

def drive(name, optimiser, oracle, settings={}, theirs={}, draws=lambda fed: {}, message=lambda m,i: dict(w=m['w']), personal=lambda w: w, logits=O.logits, numbers=lambda e,r: e):
    "All rounds of a method and of its oracle, compared after each"
    fed = federation(method(name, **settings), optimiser)
    state,clients = begin(fed),range(len(fed.data.clients))
    rounds = [{i: positions(fed, i, r) for i in ids} for r,ids in enumerate(DRAWN)]
    of_optimiser = {k: v for k,v in dict(momentum=optimiser.momentum, decay=optimiser.weight_decay).items() if v}
    for r,e in enumerate(oracle(state['server']['w'], [of_client(fed, i) for i in clients], rounds, optimiser.lr, **{**of_optimiser, **theirs, **draws(fed)}), -fed.method.opening):
        drawn,e = taking_part(fed, r),numbers(e, r)
        replies,received = one_by_one(fed, state, list(drawn), r),{i: client_view(fed, state, i, r).message for i in e['down_numbers']}
        state,rows = merged(fed, state, drawn, replies, r)
        sent,rows = {i: a['message'] for i,a in zip(drawn, replies)},{k: v for _,_,k,v in rows}
        assert r < 0 or list(drawn)==DRAWN[r]
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
    assert scored==pytest.approx({i: 100*(logits(w, x).argmax(1)==y).double().mean().item() for i,w in e['personal'].items() for x,y in [of_client(fed, i)]})

def nova(m, i): return dict(w=m['w'], a=m['norm'])

# FedSPU: merged by samples; a bit per neuron travels, of full clients too

def neurons(fed):
    "Which neurons each client trains in each round; the server's counter goes up by one a round"
    server = begin(fed)['server']
    def of(r, i):
        at = fed.method.send(dict(server, draw=server['draw']+r), i)['neurons']['body.fc.weight'].nonzero()[:,0]
        assert len(at)==O.spu_count(fed.method.share or (.2, .4, .6, .8)[i], 5)
        return at
    return dict(active={(r, i): of(r, i) for r,ids in enumerate(DRAWN) for i in ids}, batch=1)

def part(m, i): return dict(values={k: w[m['mask'][k]>0] for k,w in m['w'].items()}, neurons={'body.fc.weight': m['mask']['body.fc.bias'].bool()})
def bits(e, r): return dict(e, **dict.fromkeys(('down_indices','up_indices'), dict.fromkeys(e['messages'], 5)))

# FedAS: its loader goes through the samples in order and leaves out an incomplete batch, but for the only one

def whole(n, size): return list(torch.arange(max(n//size*size, min(n, size))).split(size))

def loaders(size):
    def draws(fed):
        aligning,fisher = (in_turn(fed, lambda c: whole(len(c.own), s)) for s in (size, 4))
        return dict(aligning=aligning, fisher=fisher, samples={k: torch.cat(v) for k,v in aligning.items()})
    return draws

# FedDBE: the opening round as one of its own; the personal mean is a shift of the head's bias, and the consensus comes with every message

def dbe(w0, *data, **settings):
    out = O.oracle_feddbe(w0, *data, **settings)
    down,up = out[0]['prep']
    return [dict(w=w0, messages={i: dict(consensus=r) for i,r in out[0]['means'].items()}, personal={i: dict(w0, mean=torch.zeros(5, dtype=torch.float64)) for i in down}, down_numbers=down, up_numbers=up), *out]

def shifted(w):
    *model,mean = w
    return {k: w[k] + w[model[-2]] @ w[mean] if k==model[-1] else w[k] for k in model}

def consensus(e, r): return dict(e, down_numbers=dict.fromkeys(e['down_numbers'], 58)) if 'consensus' in e else e

# FedPAC: class means, prototypes and the server's first head travel for classes and clients that have none, too

def heads(fed):
    def order(c):
        with seeded(fed.seed, 'start', c.round, c.id): return list(torch.randperm(len(c.own)).split(4))
    return dict(heads=in_turn(fed, order))

def statistics(m, i):
    means = torch.stack([m['means'].get(c, torch.zeros(5, dtype=torch.float64)) for c in range(3)])
    return dict(w=m['w'], means=means, counts=m['counts'].double(), id=torch.tensor(i), v=m['v'], h=m['h'])

def dense(e, r):
    each = lambda n: dict.fromkeys(e['messages'], n)
    return dict(e, down_numbers=each(68 if r else 53), down_indices=each(3 if r else 0), up_numbers=each(53+1+15+15+3), up_indices=each(1))

# FedALA: where a client's slice begins, also for the mixture that is scored after the last round

def slices(fed):
    def first(r, n, i): return int(stream(fed.seed, 'mixing', r, i).integers(n-int(.8*n)+1))
    return dict(slices={(r, i): first(r, len(c), i) for r in range(len(DRAWN)+1) for i,c in enumerate(fed.data.clients)})

# FedCSPACK: packs of 8, the last with three zeros, which travel; places take the place of a mask; the whole model is received, and in which round each pack moved last

def packs(m, i):
    at = sorted(m['weights'])
    return dict(at=torch.tensor(at, dtype=torch.int32), packs=torch.stack([O.packs(m['changes'][j], 8)[0] for j in at]), weight=torch.tensor([m['weights'][j] for j in at], dtype=torch.float64))

def packed(released):
    def numbers(e, r):
        n = {i: len(m['weights']) for i,m in e['messages'].items()}
        return dict(e, up_numbers={i: 9*k for i,k in n.items()}, up_indices=n, down_numbers=dict.fromkeys(n, 53), down_indices=dict.fromkeys(n, 0 if released else 8))
    return numbers

def cspack(weights, weight, variant='intended'):
    return dict(settings=dict(size=8, weights=weights, variant=variant), theirs=dict(pack=8, weight=weight, variant=variant), message=packs, numbers=packed(variant=='released'))

def cases(name, oracle, settings={}, optimisers=('plain','momentum and decay'), what='', **seams):
    "One case per optimiser; the oracle has the settings of the method, unless `theirs` are given"
    return [pytest.param(name, OPTIMISERS[o], oracle, dict(dict(settings=settings, theirs=settings), **seams), id=' '.join([name, what, o])) for o in optimisers]

@pytest.mark.parametrize('name,optimiser,oracle,seams', [
    *cases('fedavg', O.oracle_fedavg),
    *cases('localonly', O.oracle_localonly),
    *cases('fedprox', O.oracle_fedprox, dict(mu=.7)),
    *cases('fedyogi', O.oracle_fedyogi, dict(eta=.05, tau=.02, beta1=.8, beta2=.95)),
    *cases('fedntd', O.oracle_fedntd, dict(beta=.6, tau=2.)),
    *cases('fednova', O.oracle_fednova, optimisers=('plain','momentum'), message=nova),
    *cases('fednova+fedprox', O.oracle_fednova, dict(mu=.7), optimisers=('plain','momentum'), message=nova),
    *[c for share in (None, .7, 1.) for c in cases('fedspu', O.oracle_fedspu, dict(share=share), ('plain',), str(share), theirs={}, draws=neurons, message=part, numbers=bits)],
    *[c for p in (2, 3) for c in cases('fedala', O.oracle_fedala, dict(p=p, eta=.8, batch_size=4), what=str(p), theirs=dict(top=p, eta=.8, batch=4), draws=slices)],
    *[c for size in (3, 7) for c in cases('fedas', O.oracle_fedas, dict(lr=.3, batch_size=size), what=str(size), theirs=dict(lr_align=.3), draws=loaders(size), message=lambda m,i: dict(w=m['w'], trace=m['score']))],
    *[c for mu in (1., .3) for c in cases('feddbe', dbe, dict(mu=mu, kappa=2.), ('plain',), what=str(mu), draws=lambda fed: dict(prep={i: positions(fed, i, -1) for i in range(4)}),
        message=lambda m,i: m if 'consensus' in m else dict(w=m['w']), personal=shifted, logits=O.dbe_logits, numbers=consensus)],
    *[c for o,b,d in (('plain', 0., 0.), ('momentum and decay', .9, .05)) for c in cases('fedpac', O.oracle_fedpac, dict(lam=2., head_lr=.3, head_momentum=b, head_decay=d), (o,),
        theirs=dict(lam=2., lr_head=.3, momentum=b, decay=d), draws=heads, message=statistics, numbers=dense)],
    *[c for what in (('both', 'both'), ('cosine', 'cs'), ('divergence', 'kd'), ('both', 'both', 'released')) for c in cases('fedcspack', O.oracle_fedcspack, what=what[-1], **cspack(*what))],
])
def test_all_rounds(name, optimiser, oracle, seams): drive(name, optimiser, oracle, **seams)
