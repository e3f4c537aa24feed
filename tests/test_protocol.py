"What the protocol can say: parts of the local work, optimisers that live on, clients of different shapes; on every engine alike."
from dataclasses import dataclass, replace
import re, warnings
import numpy as np, pytest, torch
from torch import nn
from fedbook.engines import FellBack, Processes, stacked, Traced
from fedbook.errors import Refused
from fedbook.experiments import Case, federation as federation_of, run_cases, Setting, stage_after, stages_of
from fedbook.method import FedAvg, LocalTraining, method, METHODS
from fedbook.models import Net
from fedbook.optim import SGD
from fedbook.client import one_by_one
from fedbook.federation import begin, client_view, FederatedData, Federation, Protocol
from fedbook.rounds import run, run_in_lockstep
from fedbook.settings import make
from fedbook.streams import seeded
from fedbook.tasks import TASKS
from fedbook.tensors import flatten, leaves, tmap
from test_rounds import federation, mlp, same

ENGINES = dict(traced=Traced, stacked=stacked, processes=lambda: Processes(2))

def away(method):
    "A method of this file, out of the registry"
    METHODS.pop(method.__name__.lower())
    return method

@away
@dataclass(frozen=True)
class HeadFirst(FedAvg):
    "Trains the head for `epochs` local epochs and then everything: FedRep and LP-FT in two lines"
    epochs: int = 1
    def phases(self, epochs, round): return ('head',)*min(self.epochs, epochs) + (None,)*(epochs-self.epochs)
    def trains(self, phase): return ('head',) if phase=='head' else ()

@away
@dataclass(frozen=True)
class Momentum(FedAvg):
    "The optimiser's state lives on between rounds"
    def init(self, w, c): return c.memory.get('s') or super().init(w, c)
    def finish(self, w, c): return dict(w=w), dict(s=c.s)

@away
@dataclass(frozen=True)
class LastLoss(FedAvg):
    "Weighs clients by the loss of their last step"
    def finish(self, w, c): return dict(w=w, loss=c.losses[-1].double(), steps=torch.tensor(len(c.losses))), {}
    def aggregate(self, state, messages, weights): return super().aggregate(state, messages, [m['loss'].item() for m in messages])

@away
@dataclass(frozen=True)
class HalfWide(FedAvg):
    "Every second client has the first half of the hidden neurons, as in HeteroFL"
    def width(self, n, i, now): return torch.arange(n if i%2 else n//2)
    def part(self, w, rows): return {'0.weight': w['0.weight'][rows], '0.bias': w['0.bias'][rows], '2.weight': w['2.weight'][:,rows], '2.bias': w['2.bias']}
    def server(self, w, n): return dict(w=w, round=dict(now=torch.zeros((), dtype=torch.int64)))
    def send(self, state, i): rows = self.width(len(state['w']['0.bias']), i, state['round']['now']); return dict(w=self.part(state['w'], rows), rows=dict(at=rows))
    def finish(self, w, c): return dict(w=w, rows=c.message['rows']), {}
    def aggregate(self, state, messages, weights):
        total,count = ({k: torch.zeros_like(v) for k,v in state['w'].items()} for _ in range(2))
        for m,n in zip(messages, weights):
            rows = m['rows']['at']
            for k,v in m['w'].items():
                at = (slice(None), rows) if k=='2.weight' else (slice(None),) if k=='2.bias' else (rows,)
                total[k][at] += n*v; count[k][at] += n
        return dict(w={k: torch.where(count[k] > 0, total[k]/count[k].clamp_min(1e-30), v) for k,v in state['w'].items()}, round=dict(now=state['round']['now']+1))

@away
@dataclass(frozen=True)
class RollingHalf(HalfWide):
    "The same with a window that rolls on in every round, as in FedRolex"
    def width(self, n, i, now): return torch.arange(n) if i%2 else (torch.arange(n//2)+now)%n

@away
@dataclass(frozen=True)
class BesideMirrored(FedAvg):
    "Each sample goes with its mirror image, and in the first epochs with a copy of itself: what FedFed does with shared samples, in little"
    def phases(self, epochs, round): return ('copy',) + ('mirrored',)*(epochs-1)
    def samples(self, c):
        x = c.prepare(c.x)
        return torch.stack([x, x if c.phase=='copy' else x.flip(-1)], 1), torch.stack([c.y, c.y], 1)
    def loss(self, w, batch, c): return super().loss(w, {k: t.flatten(0, 1) for k,t in batch.items()}, c)

CASES = dict(head_first=(HeadFirst(), dict(blocks=True)), momentum=(Momentum(), {}), last_loss=(LastLoss(), {}), half_wide=(HalfWide(), {}), rolling_half=(RollingHalf(), {}), beside_mirrored=(BesideMirrored(), {}))

def double(m, module, **kw):
    return federation(m, module=mlp(**module).double(), local=LocalTraining(3, 4, SGD(.1, .9)), dtype=torch.float64, **kw)

@pytest.mark.parametrize('engine', ENGINES)
@pytest.mark.parametrize('case', CASES)
def test_every_engine_agrees_and_none_falls_back(case, engine):
    fed = double(*CASES[case])
    with warnings.catch_warnings(): warnings.simplefilter('error', FellBack); state,_ = run(fed, engine=ENGINES[engine]())
    want,_ = run(fed)
    if engine=='processes': assert same(state, want)
    for k,v in flatten(state['server']).items(): torch.testing.assert_close(v, flatten(want['server'])[k], rtol=1e-10, atol=1e-10)

def test_a_method_with_one_phase_is_the_method_without():
    "Without epochs for the head it is FedAvg to the bit, and with all epochs for the head the body stays"
    a,b = run(double(HeadFirst(epochs=0), dict(blocks=True)))[0],run(double(FedAvg(), dict(blocks=True)))[0]
    assert same(a['server'], b['server'])
    fed = double(HeadFirst(epochs=3), dict(blocks=True))
    w,w0 = run(fed)[0]['server']['w'],fed.net.weights()
    assert all(torch.equal(w[k], w0[k])==(not k.startswith('head.')) for k in w)

def test_a_sample_beside_its_copy_is_the_sample():
    "Identity: the mean over two equal halves is the mean over one"
    def end(m): return run(federation(m, module=mlp().double(), local=LocalTraining(1, 4, SGD(.1, .9)), dtype=torch.float64))[0]['server']['w']
    a,b = end(FedAvg()),end(BesideMirrored())
    for k in a: torch.testing.assert_close(a[k], b[k], rtol=1e-12, atol=1e-12)

def test_a_phase_of_the_head_leaves_the_body_of_the_first_epoch():
    fed = double(HeadFirst(), dict(blocks=True), rounds=1, per_round=4)
    one = replace(fed, local=replace(fed.local, epochs=1))
    w,w0 = run(one)[0]['server']['w'],fed.net.weights()
    assert all(torch.equal(w[k], w0[k]) for k in w if k.startswith('body.')) and not same(run(fed)[0]['server']['w'], w)

def test_the_optimiser_lives_on():
    "One client with one batch: two rounds of one step each with persistent momentum are two steps of torch.optim.SGD"
    fed = federation(Momentum(), sizes=(20,), per_round=1, rounds=3, local=LocalTraining(1, 100, SGD(.1, .9)))
    module = mlp(); opt = torch.optim.SGD(module.parameters(), .1, .9)
    for _ in range(3): opt.zero_grad(); nn.functional.cross_entropy(module(fed.data.x), fed.data.y).backward(); opt.step()
    w = run(fed)[0]['server']['w']
    for k,v in module.state_dict().items(): torch.testing.assert_close(w[k], v)
    assert not same(w, run(replace(fed, method=FedAvg()))[0]['server']['w'])

def test_finish_sees_the_losses_of_all_steps():
    fed = federation(LastLoss(), sizes=(7,12,20,5), per_round=4, rounds=1)
    steps = [r['message']['steps'].item() for r in one_by_one(fed, begin(fed), range(4), 0)]
    assert steps==[4, 6, 10, 4]

def test_clients_of_all_widths_are_stacked_with_those_of_theirs(monkeypatch):
    from fedbook import engines
    sizes,plain = [],engines.train_stack
    monkeypatch.setattr(engines, 'train_stack', lambda pairs, *a: sizes.append(len(pairs)) or plain(pairs, *a))
    run(double(HalfWide(), {}, per_round=4, rounds=1), engine=stacked())
    assert sizes==[4, 2, 2], 'all together was tried, then each kind'

def test_where_all_have_the_whole_width_it_is_fedavg():
    @away
    @dataclass(frozen=True)
    class Whole(HalfWide):
        def width(self, n, i, now): return torch.arange(n)
    a,b = (run(double(m, {}))[0]['server']['w'] for m in (Whole(), FedAvg()))
    for k in a: torch.testing.assert_close(a[k], b[k], rtol=1e-12, atol=1e-12)

# Tasks: other targets, the same rounds

def of_task(name, local=LocalTraining(2, 4, SGD(.1, .9))):
    "Four clients whose targets are several labels, or masks"
    gen,n = torch.Generator().manual_seed(2),44
    if name=='multilabel':
        x,module = torch.randn(n, 6, generator=gen, dtype=torch.float64),nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        y = (x[:,:4] > 0).double().masked_fill(torch.rand(n, 4, generator=gen) < .2, torch.nan)
    else:
        x,module = torch.randn(n, 1, 6, 6, generator=gen, dtype=torch.float64),nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1))
        y = (x[:,0] > .5).long() + (x[:,0] > 1).long()
    parts = np.split(np.arange(n), [7, 19, 39])
    with seeded(0, name): module.apply(lambda m: m.reset_parameters() if hasattr(m, 'reset_parameters') else None)
    data = FederatedData(x, y, parts, (x, y), (x[:9], y[:9]), parts)
    return Federation(FedAvg(), Net(module.double()), data, replace(local, task=make(TASKS, 'task', name)), Protocol(3, 3))

@pytest.mark.parametrize('engine', ENGINES)
@pytest.mark.parametrize('name', ['multilabel','segmentation'])
def test_other_targets_train_and_are_scored_on_every_engine(name, engine):
    fed = of_task(name)
    with warnings.catch_warnings(): warnings.simplefilter('error', FellBack); state,rows = run(fed, engine=ENGINES[engine]())
    want,theirs = run(fed)
    if engine=='processes': assert same(state, want)
    for k,v in flatten(state['server']).items(): torch.testing.assert_close(v, flatten(want['server'])[k], rtol=1e-10, atol=1e-10)
    main = dict(multilabel='auc', segmentation='dice')[name]
    scores = {m: v for r,c,m,v in rows if r==3 and c is None}
    assert [r[:3] for r in rows]==[r[:3] for r in theirs] and {main, 'loss', f'val_{main}'} <= scores.keys() and scores[main] > {r[2]: r[3] for r in rows if r[0]==1}[main]-1
    assert {c for _,c,m,_ in rows if m==f'personal_{main}'}=={0, 1, 2, 3}

# Phases in which a part of the network trains

def probing(n, head='head', **module): return federation(HeadFirst(epochs=n), module=mlp(**module).double(), local=LocalTraining(3, 4, SGD(.1, .9)), dtype=torch.float64)

def test_a_head_that_trains_on_features_kept_is_the_head_that_trains_on_images():
    fed = probing(2, blocks=True)
    lazy = replace(fed, data=replace(fed.data, augment=lambda x, y: (x, y))) # what is augmented has no features to keep
    seen = []
    class Watched(HeadFirst):
        def update(self, w, g, s, scale, c): seen.append((c.phase, c.net is fed.net)); return super().update(w, g, s, scale, c)
    run(replace(fed, method=Watched(epochs=2))); METHODS.pop('watched')
    assert set(seen)=={('head', False), (None, True)}
    a,b = (run(f)[0]['server']['w'] for f in (fed, lazy))
    for k in a: torch.testing.assert_close(a[k], b[k], rtol=1e-12, atol=1e-12)

def test_what_does_not_train_is_in_evaluation_mode():
    "BatchNorm of a body that stands still takes no notice of the samples"
    def buffers(n): fed = probing(n, blocks=True, bn=True); return run(fed)[0]['buffers'],fed.net.buffers()
    (a,fresh),(b,_) = buffers(3),buffers(2)
    assert same(a, fresh) and not same(b, fresh)

# Stages

STAGED = dict(data='fashion_mnist_mini', model=dict(name='mlp', hidden=[8]), partition=dict(name='dirichlet', alpha=.5, n_clients=6), protocol=dict(rounds=2, per_round=3), local=dict(batch_size=64), personal=True)

def alone(**more): return dict(method=dict(name='localonly'), protocol=dict(rounds=3, per_round=6, personal_every=1), **more)

def test_a_stage_begins_where_the_run_before_it_ended(tmp_path):
    "Its first round is an epoch of each client from the last global model, in an order of its own"
    s = Setting(**STAGED, after=[alone()])
    first,before = run(federation_of(s.stage(0)))
    asked = stages_of(s); rows = run_in_lockstep([asked], lambda qs: [one_by_one(*q) for q in qs])[0][1]
    assert [r for r in rows if r[0] <= 2 and not (r[0]==2 and r[2].startswith('personal'))]==[r for r in before if not r[2].startswith('personal')]
    curves = {r: [v for q,_,m,v in rows if (q, m)==(r, 'personal_accuracy')] for r in range(1, 6)}
    assert [len(curves[r]) for r in range(1, 6)]==[0, 6, 6, 6, 6] and np.mean(curves[5]) > np.mean(curves[2])
    assert not any(m.startswith('bytes') and v for r,_,m,v in rows if r > 2)

def test_clients_with_models_of_their_own_go_on_from_these():
    s = Setting(**{**STAGED, 'method': dict(name='localonly')}, after=[alone()])
    fed = federation_of(s.stage(0)); state,_ = run(fed)
    then = stage_after(fed, state, s.stage(1), 1)
    for i in range(6):
        c = client_view(then, begin(then), i, 0)
        assert same(then.method.start(replace(c, memory={}))[0], then.net.weights()) and same(then.origins[str(i)]['w'], fed.method.personal(client_view(fed, state, i, 2)))

@pytest.mark.parametrize('engine', ['stacked','processes'])
def test_stages_run_on_every_engine_and_survive_a_kill(tmp_path, engine, monkeypatch):
    about = dict(paper='0', table='t', profile='smoke', stand_in={})
    case = Case({}, Setting(**STAGED, after=[alone()]))
    whole, = run_cases([case], [0], tmp_path/'a', engine=engine, **about)
    class Killed(Exception): pass
    import fedbook.experiments as E
    kill,rounds = [True],[]
    def watched(fed, file, f=E.rounds_of):
        def stop(r):
            rounds.append(r)
            if kill and fed.origins is None and type(fed.method).__name__=='LocalOnly' and r==2: raise Killed
        return f(fed, file, stop)
    monkeypatch.setattr(E, 'rounds_of', watched)
    with pytest.raises(Killed): run_cases([case], [0], tmp_path/'b', engine=engine, **about)
    kill.clear()
    again, = run_cases([case], [0], tmp_path/'b', engine=engine, **about)
    assert rounds==[1, 2, 1, 2, 3] and again['rows']==whole['rows'] and not list((tmp_path/'b').glob('.*.part'))

# Groups, held-out samples, shifts

def test_groups_are_parts_of_the_test_set():
    fed = federation()
    y = fed.data.test[1].numpy()
    fed = replace(fed, data=replace(fed.data, groups={'class': [np.flatnonzero(y==k) for k in range(3)]}))
    state,rows = run(fed)
    z = fed.net.logits(state['server']['w'], {}, fed.data.test[0]).argmax(1).numpy()
    assert {c: v for r,c,m,v in rows if (r, m)==(3, 'class_accuracy')}==pytest.approx({k: 100*(z[y==k]==k).mean() for k in range(3)})

def test_held_out_samples_are_scored_and_not_trained_on():
    s = Setting(**STAGED, held=.25)
    fed,whole = federation_of(s),federation_of(Setting(**STAGED))
    for c,h,w in zip(fed.data.clients, fed.data.held, whole.data.clients): assert sorted([*c, *h])==sorted(w) and abs(len(h)-len(w)/4) <= 1
    rows = run(fed)[1]
    assert len([1 for r in rows if r[2]=='held_accuracy'])==6
    c = client_view(fed, begin(fed), 2, 0)
    assert len(c.held_out()['y'])==len(fed.data.held[2]) and torch.equal(c.held_out()['y'], fed.data.y[fed.data.held[2]])

def test_a_shift_is_in_a_client_s_training_and_in_its_own_test_images_alone():
    plain,moved = (federation_of(Setting(**STAGED, shift=s)) for s in ([], ['negative','none']))
    changed = [not torch.equal(plain.data.x[c], moved.data.x[c]) for c in plain.data.clients]
    assert sum(changed)==3 and torch.equal(plain.data.test[0], moved.data.test[0])
    for i,(a,b) in enumerate(zip(plain.data.test_clients, moved.data.test_clients)):
        mine,theirs = moved.data.of_clients()[0][b],plain.data.test[0][a]
        assert torch.equal(mine, 255-theirs if changed[i] else theirs)

# Bad input gets a sentence before any work

@pytest.mark.parametrize('what,word', [
    (lambda: replace(of_task('multilabel'), net=Net(nn.Linear(6, 3).double())), '3 scores'),
    (lambda: replace(of_task('segmentation'), local=LocalTraining()), 'Classification'),
    (lambda: Setting('mnist', after=[dict(method=dict(name='fedporx'))]), 'fedprox'),
    (lambda: Setting('mnist', after=[dict(methods=dict(name='fedprox'))]), 'method'),
    (lambda: replace(federation(), method=HeadFirst()), 'nothing trains'),
    (lambda: replace(federation().data, groups={'class': [[0], []]}), 'Part 1'),
    (lambda: replace(federation().data, groups={'class': [[0], [99]]}), '99'),
    (lambda: replace(federation().data, names=['a','b','a','c']), "'a'"),
    (lambda: replace(federation(), method=Chooses()), 'client 0'),
    (lambda: replace(federation(), method=method('fedpac')), 'Classifier.of'),
    (lambda: Setting('mnist', frozen=True, shift=['negative']), 'frozen'),
    (lambda: federation_of(Setting('fashion_mnist_mini', groups=['domain'])), 'domain')])
def test_bad_input(what, word):
    with pytest.raises(Refused, match=re.escape(word)) as e: what()
    assert '\n' not in str(e.value)

@away
@dataclass(frozen=True)
class Chooses(FedAvg):
    "Selects on held-out samples"
    needs = ('held',)

def test_cases_that_begin_alike_train_the_common_part_once(tmp_path, monkeypatch):
    import fedbook.experiments as E
    cases = [Case(dict(mu=mu), Setting(**STAGED, after=[dict(method=dict(name='fedprox', mu=mu), protocol=dict(rounds=1))])) for mu in (0., 1.)]
    seen = []
    monkeypatch.setattr(E, 'rounds_of', lambda fed, file, f=E.rounds_of: f(fed, file, lambda r: seen.append(type(fed.method).__name__)))
    both = run_cases(cases, [0, 1], tmp_path, paper='0', table='t', profile='smoke', stand_in={})
    assert seen==['FedAvg','FedAvg','FedProx','FedProx']*2 and not list(tmp_path.glob('.*.part'))
    a,b = ([r for r in x['rows'] if r[0] <= 2] for x in both[:2])
    assert a==b and both[0]['rows']!=both[1]['rows']
