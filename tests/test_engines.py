"Every engine gives what the reference gives, for every method there is."
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
import json, os, subprocess, sys, warnings
from pathlib import Path
import numpy as np, pytest, torch
from torch import nn
from fedbook import engines
from fedbook.engines import ENGINES, FellBack, Processes, stacked, step_groups, Traced
from fedbook.errors import Refused
from fedbook.method import Client, FedAvg, LocalTraining, METHODS, methods
from fedbook.methods.localonly import LocalOnly
from fedbook.models import build, Classifier, Net
from fedbook.tasks import Task
from fedbook.optim import Adam, AdamW, Cosine, SGD
from fedbook.client import attempted
from fedbook.federation import begin, client_view, ready
from fedbook.rounds import run
from fedbook.streams import seeded
from fedbook.tensors import flatten
from fedbook.workers import Box, pack, unpack
from elsewhere import traced_elsewhere
from test_memory import convolutions
from test_rounds import federation, fitting, mlp, network, Remembers, same, with_blocks

@pytest.fixture(autouse=True)
def traced_at_once_and_never_fallen_back(monkeypatch):
    monkeypatch.setattr(engines, 'OFTEN', 0)
    with warnings.catch_warnings(): warnings.simplefilter('error', FellBack); yield

@pytest.fixture
def one_thread():
    n = torch.get_num_threads(); torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)

def distance(a, b):
    a,b = flatten(a),flatten(b)
    assert a.keys()==b.keys()
    return max(((a[k].double()-b[k].double()).abs().max()/(a[k].double().abs().max()+1e-30)).item() for k in a)

def models(state, name):
    "Without what is a difference of models, as all that clients keep of SCAFFOLD"
    return dict(state, server=dict(w=state['server']['w']), **(dict(memory={}) if name=='scaffold' else {}))

def precise(fed):
    "The same run in float64"
    fed.data.x,fed.data.test = fed.data.x.double(),(fed.data.test[0].double(),fed.data.test[1])
    return replace(fed, net=Net(fed.net.module.double(), fed.net.frozen))

def normed():
    "No bias before BatchNorm: its gradient is zero but for rounding, and Adam would step along the rounding"
    with seeded(0, 'test model'): return with_blocks(True, nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

LOCALS = dict(sgd=LocalTraining(2, 4, SGD(.1, .9, 1e-3)), plain=LocalTraining(3, 4, SGD(.1), Cosine(per='epoch', period=3)), adamw=LocalTraining(2, 5, AdamW(.01), Cosine(per='batch', period=5)),
              adam=LocalTraining(1, 4, Adam(.01)), whole=LocalTraining(1, 100, SGD(.1), task=Task(label_smoothing=.1)))
MODULES = dict(plain=lambda: mlp(blocks=True), batchnorm=normed, dropout=lambda: mlp(dropout=.4, blocks=True))
def imitation(run):
    "Stands in for a recording: what `run` works on stays where it is, and its result is overwritten"
    out = run()
    return lambda: out.copy_(run()), out

HERE = [e for e in ENGINES if e!='graphs' or torch.cuda.is_available()]
ROUNDING = dict(traced=Traced, stacked=stacked, two=lambda: Traced(2), recorded=lambda: Traced(10**9, imitation))

# Every pair of how clients train and engine; every other method is stacked and recorded below, where seeds are stacked
PAIRS = [(m, l, e) for i,l in enumerate(LOCALS) for j,e in enumerate(ROUNDING) for m in [[*MODULES][(i+j)%3]]]

@pytest.mark.parametrize('module,local,engine', PAIRS)
def test_traced_steps_are_one_by_one(module, local, engine):
    "Unequal clients, unequal numbers of steps, statistics of BatchNorm, draws of dropout: 1e-4 in float32, where Adam multiplies rounding, 1e-10 in float64"
    single,double = (lambda f: f, 1e-4),(precise, 1e-10)
    for precision,bound in [single, double] if engine=='stacked' else [double]:
        fed = precision(federation(module=MODULES[module](), local=LOCALS[local]))
        (a,rows),(b,rows_b) = run(fed),run(fed, engine=ROUNDING[engine]())
        assert distance(a, b) < bound and not same(a['server'], begin(fed)['server'])
        assert [r[:3] for r in rows]==[r[:3] for r in rows_b]
        assert np.allclose([r[3] for r in rows if 'loss' in r[2]], [r[3] for r in rows_b if 'loss' in r[2]], rtol=1e-4)

@pytest.mark.parametrize('often', [0, 9, 10**6])
def test_it_does_not_matter_when_a_shape_is_traced(often, monkeypatch):
    monkeypatch.setattr(engines, 'OFTEN', often)
    fed = precise(federation(sizes=(9,9,14,3,9), per_round=5, module=mlp(bn=True, dropout=.2)))
    assert distance(run(fed)[0], run(fed, engine=stacked())[0]) < 1e-10

@pytest.mark.parametrize('name,workers', [('fedavg', 1), ('fedavg', 3), *((n, 2) for n in sorted(methods()))])
def test_processes_are_one_by_one_to_the_bit(name, workers, one_thread):
    fed = federation(fitting(name), module=mlp(bn=True, dropout=.3, blocks=True))
    (a,rows),(b,rows_b) = run(fed),run(fed, engine=Processes(workers))
    assert same(a, b) and rows==rows_b

@pytest.mark.parametrize('often', [0, 12])
@pytest.mark.parametrize('workers', [1, 2, 3])
def test_traced_processes_are_traced_to_the_bit(workers, often, one_thread, monkeypatch):
    "Which shapes are traced does not depend on who has had which client before"
    monkeypatch.setattr(engines, 'OFTEN', often)
    fed = federation(Remembers(), sizes=(9,9,14,3,9), rounds=4, module=mlp(bn=True, dropout=.3), buffers='local')
    assert len(engines.worth_a_trace(fed, [])) == (2 if often else 4)
    assert same(run(fed, engine=Traced())[0], run(fed, engine=Processes(workers, Traced()))[0])

class Killed(Exception): pass

@pytest.mark.parametrize('engine', [Traced, stacked, lambda: Processes(2, Traced())])
@pytest.mark.parametrize('often', [0, 12])
def test_a_resumed_run_ends_in_the_same_bytes_in_every_engine(engine, often, tmp_path, one_thread, monkeypatch):
    monkeypatch.setattr(engines, 'OFTEN', often)
    whole = run(federation(sizes=(9,9,14,3,9), rounds=6, module=mlp(bn=True)), engine=engine())[0]
    def after_three(r):
        if r==3: raise Killed
    with pytest.raises(Killed): run(federation(sizes=(9,9,14,3,9), rounds=6, module=mlp(bn=True)), tmp_path/'x.part', engine(), after_three)
    assert same(whole, run(federation(sizes=(9,9,14,3,9), rounds=6, module=mlp(bn=True)), tmp_path/'x.part', engine())[0])

UNDER_ADAPTERS = 'lora','adapter' # stands a network that is not among the tensors of a step
ROUNDS_MORE = dict(fedlamb=1e-8, fedfed=1e-9) # Fed-LAMB divides by roots of numbers that begin at 1e-8; FedFed's generator is deep
UNEQUAL = 'fedavg','scaffold','fedcspack','pfededit' # every number of clients and size of batch is traced, which takes a second each; of the others, steps of all clients

@pytest.mark.parametrize('name', sorted(methods()))
def test_seeds_stacked_together_are_seeds_apart(name, monkeypatch):
    """Each with weights, draws and clients of its own, their steps recorded; one client has more batches than the others; of some methods one has a batch left over,
    and one seed ends a round before the other. Steps that are traced for another device stay there"""
    from fedbook.rounds import rounds_of, run_in_lockstep
    sizes,rounds = ((8,7,12), (1,2)) if name in UNEQUAL else ((8,12,8), (2,2))
    feds = [federation(fitting(name), sizes=sizes, per_round=2, rounds=rounds[s], seed=s, module=mlp(bn=True, dropout=.3, blocks=True)) for s in range(2)]
    feds = [precise(replace(f, net=network(f.method, mlp(bn=True, dropout=.3, blocks=True)))) for f in feds]
    for s,f in enumerate(feds):
        f.data.x = feds[0].data.x
        for p in f.net.module.parameters(): p.data.mul_(1-.2*s)
    if name not in UNEQUAL: monkeypatch.setattr(engines, 'worth_a_trace', lambda fed, groups: {groups[0].samples.shape})
    seen,engine = [],ROUNDING['recorded']()
    def answer(asked): seen.extend([len(asked)]*(asked[0][-1] is attempted)); return engine.together(asked)
    with nullcontext(['']) if name in UNDER_ADAPTERS else traced_elsewhere(monkeypatch) as codes: ends = run_in_lockstep([rounds_of(f) for f in feds], answer)
    assert codes and not any("device(type='cpu')" in c for c in codes)
    for f,(state,rows) in zip(feds, ends):
        alone,rows_a = run(f)
        bound = ROUNDS_MORE.get(name, 1e-10)
        assert distance(models(state, name), models(alone, name)) < bound and distance(state, alone) < 100*bound
        assert [r[:3] for r in rows]==[r[:3] for r in rows_a]
        assert np.allclose([r[3] for r in rows if 'loss' in r[2]], [r[3] for r in rows_a if 'loss' in r[2]], rtol=1e-6)
        assert issubclass(methods()[name], LocalOnly) == same(alone['server'], begin(f)['server'])
    assert seen==[2]*feds[0].method.opening+[sum(r >= n for r in rounds) for n in (1, 2)]

def test_runs_on_different_samples_are_not_stacked():
    from fedbook.rounds import rounds_of, run_in_lockstep
    feds = [precise(federation(seed=s)) for s in range(2)]
    feds[1].data.x = -feds[1].data.x
    ends = run_in_lockstep([rounds_of(f) for f in feds], stacked().together)
    assert all(distance(end, run(f)[0]) < 1e-10 for f,(end,_) in zip(feds, ends))


@pytest.mark.parametrize('engine', [Traced, stacked, lambda: Processes(2)])
@pytest.mark.parametrize('buffers', ['average','local','drop'])
def test_memory_and_buffers_come_back(buffers, engine):
    fed = precise(federation(Remembers(), rounds=4, module=mlp(bn=True), buffers=buffers))
    assert distance(run(fed)[0], run(fed, engine=engine())[0]) < 1e-10

@dataclass(frozen=True)
class Drifts(FedAvg):
    "Uses every hook: memory and message in the loss and in the step, and sends less than it has"
    def client(self, w): return dict(past=dict(w))
    def start(self, c): return {k: v + .1*c.memory['past'][k] + .1*torch.rand_like(v) for k,v in c.message['w'].items()},c.memory
    def loss(self, w, batch, c): return super().loss(w, batch, c) + sum(((w[k]-c.memory['past'][k])**2).sum() for k in w)
    def step(self, g, w, c): return {k: g[k] + .01*(w[k]-c.message['w'][k]) for k in g}
    def finish(self, w, c): return dict(w={k: .5*v*torch.bernoulli(torch.full_like(v, .9)) for k,v in w.items()}), dict(past=w)
METHODS.pop('drifts')

@pytest.mark.parametrize('engine', [Traced, stacked, lambda: Processes(2)])
def test_every_hook_can_be_run(engine):
    fed = precise(federation(Drifts(), rounds=4))
    assert distance(run(fed)[0], run(fed, engine=engine())[0]) < 1e-10

@dataclass(frozen=True)
class Peeks(FedAvg):
    "Looks at what a traced step cannot see"
    def loss(self, w, batch, c): return super().loss(w, batch, c)*len(c.own)
@dataclass(frozen=True)
class Branches(FedAvg):
    "Decides by a number that a trace does not know"
    def loss(self, w, batch, c): l = super().loss(w, batch, c); return l if l > 1. else 2*l
METHODS.pop('peeks'); METHODS.pop('branches')

@pytest.mark.parametrize('m', [Peeks(), Branches()])
@pytest.mark.parametrize('engine', [Traced, stacked])
def test_what_cannot_be_traced_is_said_once_and_run_all_the_same(m, engine):
    fed = federation(m)
    with pytest.warns(FellBack, match=f'{type(m).__name__} goes one by one') as said: b = run(fed, engine=engine())[0]
    assert same(run(fed)[0], b) and len(said)==1 and len(str(said[0].message).splitlines())==1

def test_a_wrong_method_fails_in_every_engine():
    @dataclass(frozen=True)
    class Wrong(FedAvg):
        def loss(self, w, batch, c): return w['nothing'].sum()
    METHODS.pop('wrong')
    with pytest.warns(FellBack), pytest.raises(RuntimeError, match="(?s)all failed alike.*KeyError: 'nothing'"): run(federation(Wrong()), engine=stacked())
    with pytest.raises(RuntimeError, match="KeyError: 'nothing'"): run(federation(Wrong()), engine=Processes(2))

CONVOLUTIONS = [('cnn', dict(channels=(3,4), hidden=(5,))), ('cnn', dict(channels=(3,), hidden=(5,), dropout=.3, dropout_maps=.5)), ('resnet18', dict(stem='cifar')), ('vit_tiny32', dict(patch=4, dim=8, depth=1, heads=2))]

@pytest.mark.parametrize('engine', [Traced, stacked])
@pytest.mark.parametrize('name,settings', CONVOLUTIONS)
def test_convolutions_and_attention(name, settings, engine):
    fed = federation(sizes=(8,4), rounds=1, per_round=2, local=LocalTraining(1, 4, SGD(.01)))
    with seeded(0, 'images'): fed.data.x = torch.randn(12, 1, 16, 16).double()
    fed.data.test = (fed.data.x, fed.data.y); fed.data.test_clients = None
    fed = replace(fed, net=Net(build(name, 3, 1, 16, **settings).double()))
    assert distance(run(fed)[0], run(fed, engine=engine())[0]) < 1e-9

@pytest.mark.parametrize('name', ['fedntd','moon'])
def test_clients_picked_out_of_a_stack_lie_otherwise_than_neighbours(name):
    "Full batches are of the first and third client in the second step, of the first and second in the third; what was sent to all lies in one place until it is picked"
    fed = convolutions(name)
    fed = replace(fed, local=LocalTraining(2, 4, SGD(.01)), protocol=replace(fed.protocol, rounds=2, per_round=3),
        data=replace(fed.data, clients=[c[:n] for c,n in zip(fed.data.clients, (8,6,4))]))
    (a,_),(b,_) = run(fed),run(fed, engine=stacked())
    assert distance(a, b) < 1e-3 # in float32

def test_a_stack_whose_steps_are_recorded_lies_otherwise_than_another():
    "As where both engines are tried on one network: recordings work on copies, in which what was sent to all stands once for each"
    fed = convolutions('moon')
    fed = replace(fed, protocol=replace(fed.protocol, rounds=1, per_round=3), data=replace(fed.data, clients=[c[:8] for c in fed.data.clients[:3]]))
    a,b = (run(fed, engine=e())[0] for e in (ROUNDING['recorded'], stacked))
    assert distance(a, b) < 1e-3 # in float32

@pytest.mark.parametrize('engine', [Traced, stacked, lambda: Processes(2)])
def test_augmentation_draws_from_each_client_s_own_stream(engine):
    fed = precise(federation(module=mlp(dropout=.4))); fed.data.augment = lambda x, y: (x + torch.randn_like(x), y)
    assert distance(run(fed)[0], run(fed, engine=engine())[0]) < 1e-10

def test_bf16_is_near_float32_and_the_same_in_every_engine():
    fed = federation(local=LocalTraining(1, 4, SGD(.1)))
    half = replace(fed, local=replace(fed.local, precision='bf16'))
    a,b,c = run(fed)[0],run(half)[0],run(half, engine=stacked())[0]
    assert 1e-6 < distance(a['server'], b['server']) < .05 and distance(b['server'], c['server']) < .01
    assert all(v.dtype==torch.float32 for v in b['server']['w'].values())
    with pytest.raises(Refused, match='bf16'): LocalTraining(precision='bf61')

def test_groups_of_a_timetable():
    fed = federation(sizes=(7,12,20,5), local=LocalTraining(2, 4))
    cs = [client_view(fed, begin(fed), i, 0) for i in (2, 1, 0, 3)]
    groups = step_groups(cs, [0, 1])
    for j,c in enumerate(cs):
        own = np.concatenate([g.samples[g.rows.index(j)] for g in groups if j in g.rows])
        assert sorted(own)==sorted(2*list(c.own.numpy()))
    assert all(g.rows==sorted(g.rows) and len(g.rows)==len(g.samples) for g in groups) and len(groups) < 20

def test_memory_that_runs_out_halves_the_stack(monkeypatch):
    train,sizes = engines.train,[]
    def small(pairs, record):
        sizes.append(len(pairs))
        if len(pairs) > 2: raise torch.OutOfMemoryError('CUDA out of memory')
        return train(pairs)
    monkeypatch.setattr(engines, 'train', small)
    fed = precise(federation(sizes=(5,6,7,8,9), per_round=5))
    with pytest.warns(FellBack, match='going on with 2') as said: b = run(fed, engine=stacked())[0]
    assert distance(run(fed)[0], b) < 1e-10 and sizes==[5] + [2,2,1]*3 and len(said)==1
    monkeypatch.setattr(engines, 'train', lambda pairs, record: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError): run(fed, engine=Traced())

@dataclass(frozen=True)
class Dies(FedAvg):
    "Ends its process, in one round of one client, until a file is there"
    marker: str = ''
    def finish(self, w, c):
        if c.round==1 and c.id==2 and not os.path.exists(self.marker):
            if self.marker: open(self.marker, 'w').close()
            os._exit(1)
        return super().finish(w, c)
METHODS.pop('dies')

def test_a_worker_that_dies_is_replaced_and_its_client_run_again(tmp_path, one_thread):
    fed = federation(Dies(str(tmp_path/'died')), per_round=4)
    with pytest.warns(UserWarning, match='A worker process died'): b = run(fed, engine=Processes(2))[0]
    assert same(run(fed)[0], b)

def test_a_client_that_ends_every_worker_is_an_error_and_not_an_endless_run():
    with pytest.warns(UserWarning, match='died'), pytest.raises(RuntimeError, match='ended three worker processes'): run(federation(Dies(), per_round=4), engine=Processes(2))
    assert all(not t.workers for t in engines.TEAMS.values())

def test_no_worker_outlives_its_run(one_thread):
    fed = federation(); run(fed, engine=Processes(2))
    pids = [w.process.pid for t in engines.TEAMS.values() for w in t.workers]
    assert len(pids) >= 2
    del fed
    assert not any(os.path.exists(f'/proc/{p}') for p in pids) and not engines.TEAMS

def test_workers_share_what_tracing_imports():
    code = """import sys; sys.path.insert(0, sys.argv[1])
from test_rounds import federation, run
from fedbook.engines import engine
had = 'sympy' in sys.modules
run(federation(rounds=1), engine=engine(sys.argv[2]))
print(had, 'sympy' in sys.modules)"""
    said = [subprocess.run([sys.executable, '-c', code, str(Path(__file__).parent), e], capture_output=True, text=True).stdout for e in ('traced_processes','processes')]
    assert said==['False True\n', 'False False\n']

def test_an_unknown_engine_names_the_nearest():
    with pytest.raises(Refused, match='stacked'): engines.engine('staked')

def images(frozen=(), **settings):
    "A federation of byte images"
    fed = federation(sizes=(8,6), per_round=2, rounds=2, local=LocalTraining(2, 4, SGD(.1)))
    draw = torch.Generator().manual_seed(1)
    fed.data.x = torch.randint(0, 256, (14, 1, 8, 8), generator=draw).to(torch.uint8); fed.data.test = (fed.data.x, fed.data.y)
    fed.data.test_clients = [np.arange(8), np.arange(8, 14)]; fed.data.prepare = lambda x: x/255.
    return replace(fed, net=Net(build('cnn', 3, 1, 8, channels=(4,), hidden=(6,), **settings), frozen=frozen))

@pytest.mark.parametrize('engine', HERE)
def test_a_frozen_body_computes_its_features_once(engine, monkeypatch):
    calls,fed = [],images('body')
    features = Net.features
    lazy = replace(fed, data=replace(fed.data, augment=lambda x, y: (x, y))) # what is augmented is not made ready
    assert ready(lazy) is lazy
    a,b = run(lazy),run(fed, engine=engines.engine(engine))
    assert distance(a[0], b[0]) < 1e-5 and [r[:3] for r in a[1]]==[r[:3] for r in b[1]]
    assert ready(fed).data.x.shape==(14, 6) and list(ready(fed).net.weights())==['head.weight','head.bias']
    assert ready(fed).data.x is ready(fed).data.x

def test_what_is_prepared_once_is_what_is_prepared_every_time(monkeypatch):
    fed = images()
    assert ready(fed).data.x.dtype==torch.float32
    a = run(fed)
    monkeypatch.setattr('fedbook.federation.PREPARED_BYTES', 100)
    assert ready(fed) is fed
    b = run(fed)
    assert same(a[0], b[0]) and a[1]==b[1]
    monkeypatch.setattr(engines, 'PREPARED_BYTES', 1000) # a few samples at a time
    assert distance(a[0], run(fed, engine=stacked())[0]) < 1e-5

def long(fed): return replace(fed, protocol=replace(fed.protocol, rounds=10**7))

@pytest.fixture
def machine(monkeypatch, tmp_path):
    monkeypatch.setenv('FEDBOOK_DATA', str(tmp_path)); monkeypatch.setattr(engines, 'CHOICES', {})
    monkeypatch.setattr(engines.os, 'getloadavg', lambda: (0.,)*3)
    return tmp_path

def test_a_short_run_is_not_worth_a_trial_and_a_slow_step_neither(machine, monkeypatch):
    assert list(engines.measure(federation()))==['one_by_one']
    assert {'one_by_one','stacked'} <= set(engines.measure(long(federation())))
    monkeypatch.setattr(engines, 'LONG', 0.)
    assert list(engines.measure(long(federation())))==['one_by_one']

def test_the_fastest_is_chosen_once_and_remembered(machine, monkeypatch):
    calls,times = [],dict(one_by_one=2., stacked=1., traced=3.)
    monkeypatch.setattr(engines, 'measure', lambda fed: calls.append(1) or times)
    fed = long(federation())
    assert engines.choice(fed)==engines.choice(replace(fed))==('stacked', 1.) and len(calls)==1
    monkeypatch.setattr(engines, 'CHOICES', {})
    assert engines.choice(fed)==('stacked', 1.) and len(calls)==1
    assert engines.choice(replace(fed, local=LocalTraining(1, 3)))[0]=='stacked' and len(calls)==2
    for text in ('{"a": 1}', '[', '[1]', '{"%s": ["gone", 1]}' % engines.kind(fed)):
        (machine/'engines.json').write_text(text); engines.CHOICES.clear()
        assert engines.choice(fed)[0]=='stacked'

def test_a_choice_of_a_busy_machine_is_not_kept(machine, monkeypatch):
    times = iter([dict(one_by_one=2.), dict(stacked=1.), dict(traced=3.)])
    monkeypatch.setattr(engines, 'measure', lambda fed: next(times))
    fed,other = long(federation()),replace(long(federation()), local=LocalTraining(1, 3))
    monkeypatch.setattr(engines.os, 'getloadavg', lambda: (2.*engines.os.cpu_count(),)*3)
    assert engines.choice(fed)==engines.choice(fed)==('one_by_one', 2.) and not (machine/'engines.json').exists()
    monkeypatch.setattr(engines.os, 'getloadavg', lambda: (0.,)*3)
    assert engines.choice(other)==('stacked', 1.) and list(json.loads((machine/'engines.json').read_text()))==[engines.kind(other)]
    engines.CHOICES.clear()
    assert engines.choice(fed)==('traced', 3.)

def test_one_disturbed_round_does_not_decide(monkeypatch):
    clock = iter(np.cumsum([t for d in (.05, .01, .01, .01, .01) for t in (0, d)]))
    with monkeypatch.context() as m:
        m.setattr(engines.time, 'perf_counter', lambda: next(clock))
        seconds = engines.round_seconds(lambda *a: None, federation())
    assert abs(seconds-.01) < 1e-9 and not list(clock)

def test_a_folder_without_permission_does_not_matter(monkeypatch):
    monkeypatch.setenv('FEDBOOK_DATA', '/proc/nothing'); monkeypatch.setattr(engines, 'CHOICES', {})
    assert engines.choice(federation())[0]=='one_by_one'

def test_one_thread_is_not_divided_among_processes(one_thread):
    assert engines.possible(federation())==['one_by_one','stacked','traced']

def test_convolutions_are_tried_in_processes_first():
    if torch.get_num_threads() > 1: assert engines.possible(images())[:3]==['one_by_one','processes','traced_processes']

@pytest.mark.parametrize('name', ENGINES)
def test_what_ran_is_named(name):
    e = engines.engine(name, 'cuda' if name=='graphs' else 'cpu')
    assert engines.used(e)==name
    if isinstance(e, Traced): e.obstacle = 'x'; assert engines.used(e)=='one_by_one'

@pytest.mark.skipif(not torch.cuda.is_available(), reason='CUDA graphs need a GPU')
@pytest.mark.parametrize('model', ['mlp','cnn'])
def test_recorded_steps_are_stacked_steps_on_a_gpu(model):
    from fedbook.experiments import federation, Setting
    fed = federation(Setting('fashion_mnist_mini', model=dict(name=model), protocol=dict(rounds=3)), 0, 'cuda')
    assert distance(run(fed, engine=stacked())[0], run(fed, engine=engines.graphs())[0]) < 1e-5

def test_a_recording_works_on_memory_that_stays_and_leaves_none_of_it_behind():
    "Warming up takes steps back; all rounds of both stacks share the memory of their kind; what is sent is not in it; each rate has a recording"
    fed,places = federation(sizes=(8,8,8,8), per_round=4, rounds=3, local=LocalTraining(2, 4, SGD(.1, .9), Cosine(per='epoch', period=2))),[]
    def record(run): places.append([t.data_ptr() for t in run.__closure__[0].cell_contents.flat]); [run() for _ in range(3)]; return imitation(run)
    a,b = run(fed, engine=Traced(2))[0],run(fed, engine=Traced(2, record))[0]
    assert same(a, b) and len(places)==2 and places[0]==places[1], 'one recording for each rate, in the same memory'

def test_a_falling_rate_does_not_pile_up_recordings(monkeypatch):
    monkeypatch.setattr('fedbook.trace.RECORDINGS', 2)
    fed = federation(sizes=(8,8), per_round=2, rounds=5, local=LocalTraining(2, 4, SGD(.1), Cosine(per='round', period=5)))
    made = []
    a,b = run(fed, engine=stacked())[0],run(fed, engine=Traced(2, lambda go: made.append(1) or imitation(go)))[0]
    assert same(a, b) and len(made)==5 and [len(s.recordings) for s in fed.net.steps.values()]==[2]

def test_processes_are_refused_on_a_gpu_before_any_work(tmp_path):
    from fedbook.experiments import Case, run_cases, Setting
    with pytest.raises(Refused, match='cannot share a GPU'): engines.engine('traced_processes', 'cuda')
    case = Case({}, Setting('fashion_mnist_mini'))
    with pytest.raises(Refused, match='CUDA graphs need a GPU; take the engine stacked'): engines.engine('graphs')
    for name,device,words in (('processes','cuda','cannot share a GPU'), ('graphs','cpu','need a GPU'), ('staked','cpu',"'stacked'")):
        with pytest.raises(Refused, match=words): run_cases([case], [0], tmp_path, device, name)
    assert not list(tmp_path.iterdir())

KILLED = """
import sys, time
sys.path.insert(0, sys.argv[1])
from test_rounds import federation
from fedbook import engines, rounds
fed = federation(rounds=10**6)
def told(r):
    if r==2: print(*[w.process.pid for t in engines.TEAMS.values() for w in t.workers], flush=True)
rounds.run(fed, engine=engines.Processes(2), on_round=told)
"""

def test_workers_end_when_their_parent_is_killed():
    import time
    parent = subprocess.Popen([sys.executable, '-c', KILLED, str(Path(__file__).parent)], stdout=subprocess.PIPE, text=True)
    pids = parent.stdout.readline().split()
    assert len(pids)==2 and all(os.path.exists(f'/proc/{p}') for p in pids)
    parent.kill(); parent.wait()
    def alive(): return [p for p in pids if os.path.exists(f'/proc/{p}') and open(f'/proc/{p}/stat').read().split()[2]!='Z']
    for _ in range(100):
        if not alive(): break
        time.sleep(.1)
    assert not alive()

def test_a_stack_is_no_larger_than_the_cache(monkeypatch):
    train,sizes = engines.train,[]
    monkeypatch.setattr(engines, 'train', lambda pairs, record: sizes.append(len(pairs)) or train(pairs))
    fed = precise(federation(sizes=(5,6,7,8,9), per_round=5, rounds=1))
    bytes_ = 8*sum(w.numel() for w in fed.net.weights().values())
    for cache,expected in ((2*bytes_, [2,2,1]), (bytes_//2, [1]*5), (9*bytes_, [5])):
        monkeypatch.setattr(engines, 'CACHE', cache); sizes.clear()
        assert distance(run(fed)[0], run(fed, engine=stacked())[0]) < 1e-10 and sizes==expected

def test_seeds_with_large_weights_go_apart_on_a_processor(monkeypatch):
    from fedbook.rounds import rounds_of, run_in_lockstep
    feds,sizes = [replace(federation(), seed=s) for s in range(2)],[]
    for f in feds: f.data = feds[0].data
    monkeypatch.setattr(engines, 'train', lambda pairs, record, f=engines.train: sizes.append(len(pairs)) or f(pairs, record))
    run_in_lockstep([rounds_of(f) for f in feds], stacked().together)
    monkeypatch.setattr(engines, 'SEVERAL', 0)
    run_in_lockstep([rounds_of(f) for f in feds], stacked().together)
    assert sizes==[6]*3 + [3]*6

@pytest.mark.parametrize('name', ['fedas','fedntd','fedpac','fedspu'])
def test_processes_round_convolutions_as_one_by_one(name):
    "Kernels lie in a worker's memory as they lie here: sums depend on it"
    (a,rows),(b,rows_b) = run(convolutions(name)),run(convolutions(name), engine=Processes(2))
    assert same(a, b) and rows==rows_b

@pytest.mark.parametrize('t', [torch.arange(6.).view(2, 3).T, torch.arange(48.).view(2, 3, 2, 4).to(memory_format=torch.channels_last), torch.arange(10)[::3], torch.ones(1).expand(5), torch.zeros(0, 3), torch.ones(2, 1, 3, 3, dtype=torch.bool)])
def test_what_travels_to_a_worker_lies_there_as_here(t):
    box = Box()
    there = unpack(pack(dict(a=t, again=t), box), box)
    assert torch.equal(there['a'], t) and there['a'].dtype==t.dtype and there['again'].data_ptr()==there['a'].data_ptr()
    assert there['a'].stride()==(t.stride() if t.untyped_storage().nbytes()==t.nbytes else torch.empty_like(t).stride())

@pytest.mark.parametrize('make', [Traced, stacked])
@pytest.mark.parametrize('name', sorted({f.name for f in fields(Client)}-{'net','local','message','memory','buffers','phase','trains'}))
def test_a_step_that_looks_at_what_differs_between_clients_or_rounds_is_not_shared(name, make):
    @dataclass(frozen=True)
    class Looks(FedAvg):
        def step(self, g, w, c): return {k: v*(2. if getattr(c, name)==0 else 1.) for k,v in g.items()} if name in ('round','id','seed') else (getattr(c, name), g)[1]
    METHODS.pop('looks')
    fed = federation(Looks(), rounds=2)
    with pytest.warns(FellBack, match=rf'looks at c\.{name}, which differs between clients or rounds; let start put what it needs into the memory'): state,rows = run(fed, engine=make())
    want,wanted = run(fed)
    assert same(state, want) and rows==wanted

def test_a_trial_holds_out_samples_of_its_clients_only():
    fed = federation(fitting('fedsoup'), sizes=(9, 12, 20, 7))
    small = engines.trial(fed, 2)
    assert [len(h) for h in small.data.held]==[2, 2]==[len(h) for h in fed.data.held[:2]] and len(small.data.clients)==2
    assert engines.measure(fed)['one_by_one'] > 0

@pytest.mark.parametrize('once,each', [(6., 1.), (0., 1.), (6., 0.)])
def test_what_a_client_does_once_a_round_counts_once_a_round(machine, monkeypatch, once, each):
    fed = long(federation(sizes=(64,)*3))
    fed = ready(replace(fed, local=replace(fed.local, epochs=1, batch_size=4)))
    monkeypatch.setattr(engines, 'possible', lambda fed: ['one_by_one','stacked'])
    monkeypatch.setattr(engines, 'round_seconds', lambda engine, some: len(some.data.clients)*(once+each*engines.steps_each(some)))
    monkeypatch.setattr(engines, 'LONG', 100.)
    times = engines.measure(fed)
    assert times==pytest.approx(dict(one_by_one=each+once/16, stacked=each+once/16)) # 64 samples in batches of 4

def test_a_disturbed_trial_gives_no_negative_time_and_none_longer_than_its_own(machine, monkeypatch):
    fed = ready(replace((f := federation(sizes=(64,)*3)), local=replace(f.local, epochs=1, batch_size=4)))
    for seconds in (.001, 1000.):
        monkeypatch.setattr(engines, 'round_seconds', lambda *a: seconds)
        assert 0 < engines.spread(fed, 1, .5) <= 1

def test_a_trial_grows_until_the_method_accepts_it_and_a_refused_client_is_refused():
    from fedbook.methods.pfededit import PFedEdit
    fed = federation(PFedEdit(p=.1, k=1, variant='intended'), sizes=(40, 40, 40))
    fed = replace(fed, local=replace(fed.local, batch_size=2))
    assert engines.smallest(ready(fed))[0]==4 and engines.measure(long(fed))['one_by_one'] > 0
    with pytest.raises(Refused, match='at least 0.025'):
        engines.measure(replace(fed, method=replace(fed.method, p=.005)))
