"Every method against its oracle in oracles.py, round by round and from the same random draws: weights, messages, traffic, and the model of every client."
from collections import OrderedDict
import numpy as np, pytest, torch
from torch import nn
import oracles as O
from fedbook.method import Local, method, plan
from fedbook.models import Classifier, Net
from fedbook.optim import SGD
from fedbook.rounds import begin, client_view, Federation, FederatedData, merged, one_by_one, Protocol, taking_part
from fedbook.streams import seeded
from fedbook.tensors import flatten
from fedbook.wire import nbytes

PLAIN,MOMENTUM,BOTH = SGD(.2),SGD(.1, .5),SGD(.1, .9, .05)
DRAWN = [[0, 2], [0, 1], [1, 2], [0, 1]] # client 1 joins late, 2 and 0 stay away for a round, 3 always

def federation(m, optimiser):
    "Four unequal clients, each without a class but for the last, on the oracle's network"
    gen,classes = torch.Generator().manual_seed(3),[(0, 1), (1, 2), (0, 1), (0, 1, 2)]
    sizes = (11, 6, 17, 9)
    y = torch.cat([torch.tensor(c)[torch.randint(len(c), (n,), generator=gen)] for c,n in zip(classes, sizes)])
    x = torch.randn(len(y), 6, generator=gen, dtype=torch.float64) + y[:,None]
    with seeded(4, 'test model'): net = Classifier(nn.Sequential(OrderedDict(fc=nn.Linear(6, 5), relu=nn.ReLU())), nn.Linear(5, 3)).double()
    data = FederatedData(x, y, np.split(np.arange(len(y)), np.cumsum(sizes)[:-1]), (x, y))
    return Federation(m, Net(net), data, Local(2, 4, optimiser), Protocol(len(DRAWN), 2), seed=2674)

def of_client(fed, i): return tuple(t[torch.from_numpy(fed.data.clients[i])] for t in (fed.data.x, fed.data.y))
def view(fed, i, r): return client_view(fed, begin(fed), i, r) # for what does not depend on the state
def positions(fed, i, r): return [torch.from_numpy(b) for b,_ in plan(view(fed, i, r))]
def in_turn(fed, f): return {(r, i): f(view(fed, i, r)) for r,ids in enumerate(DRAWN) for i in ids}

def floats(message): return sum(t.numel() for t in flatten(message).values() if t.is_floating_point())
def others(message): return sum(t.numel() for t in flatten(message).values() if not t.is_floating_point())

def agree(got, want, where):
    "The same names, and numbers that differ by 1e-9 at most"
    got,want = flatten(got),flatten(want)
    assert list(got)==list(want), where
    for k in want: torch.testing.assert_close(got[k], torch.as_tensor(want[k]), rtol=0, atol=1e-9, check_dtype=False, msg=lambda m: f'{where}, {k}: {m}')

def traffic(row, messages, numbers, indices=None):
    "Who sends or receives something, how many numbers (and indices, where the oracle has them), and the bytes with a header for each"
    assert {i: floats(m) for i,m in messages.items() if m}==numbers
    assert indices is None or {i: others(m) for i,m in messages.items()}==indices
    sizes = [nbytes(m) for m in messages.values() if m]
    assert sum(sizes)==row and all(0 < b-8*floats(m) < 8*others(m)+100+120*len(flatten(m)) for b,m in zip(sizes, messages.values()))

def drive(name, settings, optimiser, oracle, theirs, message, personal=lambda w: w, logits=O.logits):
    "All rounds of fedbook and of the oracle, compared after each"
    fed = federation(method(name, **settings), optimiser)
    state,clients = begin(fed),range(len(fed.data.clients))
    rounds = [{i: positions(fed, i, r) for i in ids} for r,ids in enumerate(DRAWN)]
    expected = oracle(state['server']['w'], [of_client(fed, i) for i in clients], rounds, optimiser.lr, **theirs(fed))
    for r,e in enumerate(expected, -fed.method.opening):
        drawn = taking_part(fed, r)
        assert r < 0 or list(drawn)==DRAWN[r]
        replies,received = one_by_one(fed, state, list(drawn), r),{i: client_view(fed, state, i, r).message for i in e['down_numbers']}
        state,rows = merged(fed, state, drawn, replies, r)
        sent,rows = {i: a['message'] for i,a in zip(drawn, replies)},{k: v for _,_,k,v in rows}
        for i,m in e['messages'].items(): agree(sent[i], message(m), f'round {r}, message of {i}')
        traffic(rows['bytes_down'], received, e['down_numbers'], e.get('down_indices'))
        traffic(rows['bytes_up'], sent, e['up_numbers'], e.get('up_indices'))
        agree({k: state['server']['w'][k] for k in e['w']}, e['w'], f'round {r}, server')
        for i,w in e['personal'].items():
            c = client_view(fed, state, i, r+1)
            with seeded(fed.seed, 'personal', i): own = fed.method.personal(c)
            agree(own, personal(w), f'round {r}, model of {i}')
            agree(dict(z=fed.net.logits(own, c.buffers, c.x)), dict(z=logits(w, c.x)), f'round {r}, logits of {i}')

def weights(m): return dict(w=m['w'])
def with_momentum(o): return dict(momentum=o.momentum, decay=o.weight_decay)

CASES = dict(
    fedavg = ({}, O.oracle_fedavg, {}, weights),
    localonly = ({}, O.oracle_localonly, {}, weights),
    fedprox = (dict(mu=.7), O.oracle_fedprox, dict(mu=.7), weights),
    fedyogi = (dict(eta=.05, tau=.02, beta1=.8, beta2=.95), O.oracle_fedyogi, dict(eta=.05, tau=.02, beta1=.8, beta2=.95), weights),
    fedntd = (dict(beta=.6, tau=2.), O.oracle_fedntd, dict(beta=.6, tau=2.), weights),
)

@pytest.mark.parametrize('optimiser', [PLAIN, BOTH], ids=['plain','momentum'])
@pytest.mark.parametrize('name', CASES)
def test_against_the_oracle(name, optimiser):
    settings,oracle,theirs,message = CASES[name]
    drive(name, settings, optimiser, oracle, lambda fed: {**theirs, **with_momentum(optimiser)}, message)
