"FedFA against its oracle, on feature maps: weights, running means, variances between clients and traffic; without moved batches it is FedAvg with equal weights and a momentum that goes on."
from collections import OrderedDict
from dataclasses import dataclass, replace
import numpy as np, pytest, torch
from torch import nn
import oracles_001 as P
from fedbook.client import one_by_one
from fedbook.engines import stacked, Traced
from fedbook.errors import Refused
from fedbook.federation import begin, client_view, FederatedData, Federation, Protocol
from fedbook.method import FedAvg, LocalTraining, method, METHODS
from fedbook.models import build, Classifier, Net
from fedbook.optim import SGD
from fedbook.rounds import run, server_round
from fedbook.streams import seeded
from fedbook.tensors import flatten
from test_oracles import agree, positions
from test_rounds import same

DRAWN = [[0, 2], [0, 1], [1], [1, 2]] # client 1 joins late; one round has a single client

def maps(m, optimiser=SGD(.1, .9, .05), drawn=DRAWN):
    "Three unequal clients with maps of two channels and 2×3 pixels, a 1×1 convolution of three, the mean over the map, a head"
    gen,sizes = torch.Generator().manual_seed(3),(11, 6, 17)
    y = torch.randint(3, (sum(sizes),), generator=gen)
    x = torch.randn(len(y), 2, 2, 3, generator=gen, dtype=torch.float64) + y[:,None,None,None]
    with seeded(4, 'maps'): body,head = nn.Sequential(OrderedDict(conv=nn.Conv2d(2, 3, 1), relu=nn.ReLU(), pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten())),nn.Linear(3, 3)
    parts = np.split(np.arange(len(y)), np.cumsum(sizes)[:-1])
    return Federation(m, Net(Classifier(body, head).double()), FederatedData(x, y, parts, (x, y), test_clients=parts), LocalTraining(1, 4, optimiser), Protocol(len(drawn), 2), seed=4274)

def noises(fed, p):
    "Per client and round, for each step ε and ε', or nothing where the batch is left as it is"
    def of(r, i):
        with seeded(fed.seed, 'train', r, i):
            for b in positions(fed, i, r):
                u,e,f = torch.rand((), dtype=torch.float64),*(torch.randn(len(b), 3, dtype=torch.float64) for _ in range(2))
                yield (e, f) if u < p else None
    return {(r, i): list(of(r, i)) for r,ids in enumerate(DRAWN) for i in ids}

def plain_names(w): return {k.replace('.stage', ''): v for k,v in w.items()}

@pytest.mark.parametrize('variant', ['released','paper'])
@pytest.mark.parametrize('optimiser', [SGD(.2), SGD(.1, .9, .05)], ids=['plain','momentum and decay'])
def test_all_rounds(variant, optimiser):
    p = .7
    fed = maps(method('fedfa', variant=variant, p=p), optimiser)
    state,noise = begin(fed),noises(fed, p)
    clients = [(fed.data.x[c], fed.data.y[c]) for c in map(torch.from_numpy, fed.data.clients)]
    w0 = {k: v.flatten(1) if v.dim()==4 else v for k,v in state['server']['w'].items()}
    batches = [{i: positions(fed, i, r) for i in ids} for r,ids in enumerate(DRAWN)]
    assert any(e is None for n in noise.values() for e in n) and any(e for n in noise.values() for e in n)
    for r,want in enumerate(P.oracle_fedfa(w0, clients, batches, optimiser.lr, noise, variant, momentum=optimiser.momentum, decay=optimiser.weight_decay)):
        replies = one_by_one(fed, state, DRAWN[r], r)
        for i,a in zip(DRAWN[r], replies):
            m,b = want['messages'][i],a['buffers']
            agree({k: v.flatten(1) if v.dim()==4 else v for k,v in a['message']['w'].items()}, m['w'], f'round {r}, message of {i}')
            agree(dict(mu=b['body.relu.ffa.mu'], sigma=b['body.relu.ffa.sigma']), {k: m[k] for k in ('mu','sigma')}, f'round {r}, running means of {i}')
        state,rows = server_round(fed, state, dict.fromkeys(DRAWN[r], 1), replies, r)
        agree({k: v.flatten(1) if v.dim()==4 else v for k,v in state['server']['w'].items()}, want['w'], f'round {r}, server')
        found = {k.split('.')[-1]: v for k,v in state['buffers'].items()}
        agree(found, {**want['S'], **{f'v_{k}': v for k,v in want['V'].items()}}, f'round {r}, buffers')
        down = {k: v for _,_,k,v in rows}['bytes_down']
        numbers = sum(want['down_numbers'].values())
        assert 8*numbers < down < 8*numbers+2000*len(DRAWN[r])
        assert sum(v.numel() for v in flatten(dict(w=state['server']['w'], b=state['buffers'])).values())==numbers//len(DRAWN[r])

@dataclass(frozen=True)
class Equal(FedAvg):
    "Equal weights, and an optimiser that lives on"
    buffers = 'average'
    def init(self, w, c): return c.memory.get('s') or super().init(w, c)
    def finish(self, w, c): return dict(w=w), dict(s=c.s)
    def aggregate(self, state, messages, weights): return super().aggregate(state, messages, [1]*len(messages))
METHODS.pop('equal')

def test_without_moved_batches_it_is_fedavg_with_equal_weights_and_living_momentum():
    "Batches of three, for a network with buffers leaves out a last batch of one"
    a,b = (run(replace(maps(m), local=LocalTraining(1, 3, SGD(.1, .9, .05))))[0]['server']['w'] for m in (method('fedfa', p=0.), Equal()))
    assert same(plain_names(a), b)

@pytest.mark.parametrize('engine', [Traced, stacked])
def test_engines_agree(engine):
    m = method('fedfa', p=.7)
    (a,_),(b,_) = run(maps(m), engine=engine()),run(maps(m))
    for k,v in flatten(dict(w=a['server']['w'], b=a['buffers'])).items(): torch.testing.assert_close(v, flatten(dict(w=b['server']['w'], b=b['buffers']))[k], rtol=1e-10, atol=1e-10)

def test_a_batch_of_one_and_a_map_of_one_pixel_have_no_variance():
    from fedbook.methods.fedfa import FFA
    layer = FFA(2, 1.).train()
    assert layer(torch.randn(1, 2, 3, 3)).isfinite().all() and layer(torch.randn(4, 2, 1, 1)).isfinite().all()

def test_its_layers_follow_the_stages_and_the_weights_stay():
    fed = Federation(method('fedfa'), Net(build('cnn', channels=[2, 3], hidden=[4])), maps(FedAvg()).data.__class__(torch.zeros(8, 1, 28, 28), torch.arange(8)%2, [range(4), range(4, 8)], (torch.zeros(2, 1, 28, 28), torch.arange(2))), protocol=Protocol(1, 2))
    assert [k for k in fed.net.buffers() if k.endswith('.mu')]==['body.pool1.ffa.mu','body.pool2.ffa.mu']
    assert fed.method.network(fed.net) is fed.net
    other = method('fedfa', p=.9).network(fed.net)
    assert other.module.body.pool1.ffa.p==.9 and fed.net.module.body.pool1.ffa.p==.5

def test_a_network_without_maps_is_refused():
    fed = maps(FedAvg())
    with pytest.raises(Refused, match='no convolutional stages; take a cnn or a resnet'): Federation(method('fedfa'), Net(Classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 4)), nn.Linear(4, 3)).double()), fed.data, fed.local, fed.protocol)
    with pytest.raises(Refused, match='variant'): method('fedfa', variant='papr')
