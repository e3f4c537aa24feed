"FedFed: stage 2 against its oracle on the pool that stage 1 made, the losses of stage 1 against the oracle's formulas, what travels when, and what it is without a pool."
from dataclasses import replace
import warnings
import numpy as np, pytest, torch
from torch import nn
import oracles_001 as P
from fedbook.client import one_by_one
from fedbook.engines import FellBack, Processes, stacked, Traced
from fedbook.errors import Refused
from fedbook.federation import begin, client_view, Federation
from fedbook.method import FedAvg, LocalTraining, method
from fedbook.methods.fedfed import beta22, critic_loss, distilling_loss, divergence, drawn_evenly, FedFed, mosaics, shared, together_loss, vae_loss
from fedbook.models import build, Classifier, Net, part
from fedbook.optim import SGD
from fedbook.rounds import run, server_round, taking_part
from fedbook.streams import seeded, stream
from fedbook.tensors import flatten
from fedbook.wire import nbytes
from test_oracles import agree, DRAWN, federation, of_client, positions
from test_rounds import same

MODEL = 'body','head'

def opened(fed):
    "The state after stage 1"
    state = begin(fed)
    for r in range(-fed.method.opening, 0): state,_ = server_round(fed, state, taking_part(fed, r), one_by_one(fed, state, range(4), r), r)
    return state

def picks(fed, pool):
    "For each step of a round, which shared samples stand beside the own ones"
    def of(r, i):
        draw,n = stream(fed.seed, 'shared', r, i),len(fed.data.clients[i])
        at = [torch.from_numpy(drawn_evenly(pool['y'].numpy(), n, draw)) for _ in range(2)]
        return [tuple(a[b] for a in at) for b in positions(fed, i, r)]
    return {(r, i): of(r, i) for r,ids in enumerate(DRAWN) for i in ids}

@pytest.mark.parametrize('optimiser', [SGD(.1, .5), SGD(.1, .9, .05)], ids=['momentum','momentum and decay'])
def test_all_rounds_of_stage_2(optimiser):
    fed = federation(method('fedfed', distilling=2), optimiser)
    state = opened(fed)
    pool,clients = state['server']['pool'],[of_client(fed, i) for i in range(4)]
    assert pool['x'].shape==(43, 2, 6) and torch.equal(pool['y'], fed.data.y)
    batches = [{i: positions(fed, i, r) for i in ids} for r,ids in enumerate(DRAWN)]
    both = pool['x'][:,0],pool['y'],pool['x'][:,1],pool['y']
    expected = P.oracle_fedfed(part(state['server']['w'], *MODEL), clients, batches, optimiser.lr, both, picks(fed, pool), momentum=optimiser.momentum, decay=optimiser.weight_decay)
    had,size = set(),nbytes(dict(pool=pool))
    for r,want in enumerate(expected):
        replies = one_by_one(fed, state, DRAWN[r], r)
        for i,a in zip(DRAWN[r], replies): agree(a['message'], want['messages'][i], f'round {r}, message of {i}')
        state,rows = server_round(fed, state, dict.fromkeys(DRAWN[r], 1), replies, r)
        agree(part(state['server']['w'], *MODEL), want['w'], f'round {r}, server')
        for i,w in want['personal'].items(): agree(part(fed.method.personal(client_view(fed, state, i, r+1)), *MODEL), w, f'round {r}, model of {i}')
        found,numbers = {k: v for _,_,k,v in rows},sum(want['up_numbers'].values())
        new = set(DRAWN[r])-had; had |= new # the pool travels to a client once
        assert 8*numbers < found['bytes_up'] < 8*numbers+1000 and 8*numbers < found['bytes_down']-len(new)*size < 8*numbers+1000

def test_the_losses_of_stage_1_are_the_oracle_s():
    gen = torch.Generator().manual_seed(1)
    mu,logvar = (torch.randn(5, 4, generator=gen, dtype=torch.float64) for _ in range(2))
    assert torch.allclose(divergence(mu, logvar, 3), P.vae_kl(mu, logvar, 12))
    numbers = [.01, 1.3, 2.1, .4]
    assert distilling_loss(*numbers)==pytest.approx(P.distilling_loss(*numbers))

class Answers:
    "A network whose parts are functions, and a client that it asks"
    def __init__(self, lopsided):
        self.memory,self.local,self.scale = dict(lopsided=torch.tensor(lopsided)),LocalTraining(),torch.tensor(.5, requires_grad=True)
        self.critic = torch.tensor([[1.,-1.], [.5,.3]])
    def __call__(self, name, x): return x@self.critic if name=='critic' else (self.scale*x, self.scale*x.new_ones(len(x), 2), x.new_zeros(len(x), 2))

@pytest.mark.parametrize('lopsided', [False, True])
def test_a_lopsided_client_weighs_the_classes_five_times_and_leaves_the_autoencoder_alone(lopsided):
    net = Answers(lopsided)
    x,y = torch.tensor([[1.,2.], [0.,1.], [2.,-1.]]),torch.tensor([0,1,1])
    quiet = FedFed(noise1=0., noise2=0.)
    ce = nn.functional.cross_entropy
    kl = P.vae_kl(*net('vae', x)[1:], 2)
    want = P.distilling_loss((.25*x**2).mean(), ce(torch.cat([.5*x, .5*x])@net.critic, torch.cat([y, y])), ce(x@net.critic, y), kl, lopsided=lopsided)
    found = together_loss(quiet, net, x, y, net)
    assert torch.allclose(found, want)
    for loss in (found, vae_loss(quiet, net, x, y, net)):
        if loss.requires_grad: assert (torch.autograd.grad(loss, net.scale)[0]==0)==lopsided
        else: assert lopsided

def test_a_mixture_with_all_of_one_is_that_one(monkeypatch):
    import fedbook.methods.fedfed as F
    net,x,y = Answers(False),torch.tensor([[1.,2.], [0.,1.]]),torch.tensor([0,1])
    ce = nn.functional.cross_entropy(x@net.critic, y)
    for share in (1., 0.):
        monkeypatch.setattr(F, 'beta22', lambda like: torch.tensor(share))
        assert torch.allclose(critic_loss(FedFed(), net, x, y, net), ce) # of the batch, or of the batch turned round with its labels

def test_what_is_drawn_is_even_and_never_twice():
    y = np.repeat([0, 1, 2], [30, 4, 50])
    for n in (1, 7, 40, 84):
        at = drawn_evenly(y, n, stream(0, n))
        assert len(set(at))==n and all(c >= min(n//3, k) for c,k in zip(np.bincount(y[at], minlength=3), (30, 4, 50)))

def test_stage_1_leaves_the_scored_model_fresh_and_stage_2_leaves_the_autoencoder():
    fed = federation(method('fedfed', distilling=2), SGD(.1, .9, .05))
    state,w0 = opened(fed),begin(fed)['server']['w']
    assert same(part(state['server']['w'], *MODEL), part(w0, *MODEL)) and not same(part(state['server']['w'], 'vae'), part(w0, 'vae'))
    end = run(fed)[0]['server']['w']
    assert same(part(end, 'vae', 'critic'), part(state['server']['w'], 'vae', 'critic')) and not same(part(end, *MODEL), part(w0, *MODEL))

def test_what_is_shared_is_what_the_autoencoder_leaves_out():
    fed = federation(method('fedfed', distilling=1, noise1=0., noise2=1.), SGD(.1))
    state = begin(fed); state['server']['next']['round'] += 1
    c = client_view(fed, state, 2, -1)
    torch.manual_seed(0); found = shared(fed.method, c)
    x = c.prepare(c.x); rest = x-fed.net.logits(state['server']['w'], {}, ('vae', x))[0]
    assert torch.allclose(found['x'][:,0], rest) and torch.equal(found['y'], c.y) and .8 < (found['x'][:,1]-rest).std() < 1.2

@pytest.mark.parametrize('engine', [Traced, stacked, lambda: Processes(2)], ids=['traced','stacked','processes'])
def test_images_on_every_engine(engine):
    net = Classifier(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten()), nn.Linear(2*36, 3))
    fed = federation(method('fedfed', distilling=1), SGD(.1, .9))
    images = torch.from_numpy(np.random.default_rng(0).normal(size=(43, 1, 6, 6))).float()
    fed = Federation(fed.method, Net(net), replace(fed.data, x=images, test=(images, fed.data.y)), fed.local, fed.protocol, seed=1)
    with warnings.catch_warnings(): warnings.simplefilter('error', FellBack); a,_ = run(fed, engine=engine())
    b,_ = run(fed)
    for k,v in flatten(a['server']).items(): torch.testing.assert_close(v, flatten(b['server'])[k], rtol=1e-4, atol=1e-4)

def test_statistics_travel_with_the_part_that_they_belong_to():
    "Of BatchNorm: the autoencoder's and the critic's in stage 1 and the scored model's in stage 2, merged uniformly there"
    net = Classifier(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), nn.Linear(4, 3)).double()
    fed = federation(method('fedfed', distilling=1), SGD(.1)); fed = Federation(fed.method, Net(net), fed.data, fed.local, fed.protocol, seed=1)
    state,ids = begin(fed),range(4)
    for r,names in ((-2, ('vae','critic')), (-1, ('vae','critic')), (0, MODEL)):
        replies = one_by_one(fed, state, ids, r)
        assert all(a['buffers'].keys()==part(fed.net.buffers(), *names).keys() for a in replies)
        old,(state,_) = state['buffers'],server_round(fed, state, dict.fromkeys(ids, 1), replies, r)
        assert state['buffers'].keys()==old.keys() and same(part(state['buffers'], *(MODEL if r < 0 else ('vae','critic'))), part(old, *(MODEL if r < 0 else ('vae','critic'))))
    k = 'body.1.running_mean'
    torch.testing.assert_close(state['buffers'][k], torch.stack([a['buffers'][k] for a in replies]).mean(0))

def test_mosaics_keep_single_images_apart_and_samples_that_are_none():
    x = torch.arange(5.)[:,None,None,None].expand(5, 1, 4, 4)
    assert mosaics(x)[0,0].tolist()==[[0,0,4,4], [0,0,4,4], [3,3,2,2], [3,3,2,2]]
    flat = torch.randn(3, 6); assert mosaics(flat) is flat

def test_bad_input():
    with pytest.raises(Refused, match='distilling'): method('fedfed', distilling=0)
    with pytest.raises(Refused, match='head'): replace(federation(FedAvg(), SGD(.1)), method=method('fedfed'), net=Net(nn.Sequential(nn.Linear(6, 3)).double()))
