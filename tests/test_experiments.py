"From settings to rows: what a run sees, what it costs, and that a finished one is never run again."
from dataclasses import dataclass, replace
import json
import numpy as np, pytest, torch
from safetensors.torch import save_file
from fedbook import engines, experiments as E
from fedbook.data import Dataset
from fedbook.errors import Refused
from fedbook.experiments import Case, federation, run_cases, Setting
from fedbook.method import FedAvg, METHODS
from fedbook.models import build, Net
from fedbook.results import read
from fedbook.federation import begin, FederatedData
from fedbook.rounds import rounds_of, run
from fedbook.sources import bare
from fedbook.streams import stream

SMALL = dict(data='fashion_mnist_mini', partition=dict(name='dirichlet', n_clients=10, alpha=.5), protocol=dict(rounds=2, per_round=3))
ABOUT = dict(paper='000', table='a table', profile='smoke', stand_in={})

def marked(n_train=300, n_test=80, size=8):
    "A data set in which every image shows its own number in its first two pixels, test images from 10,000 on"
    def images(first, n):
        x = stream(0, 'images', first).integers(0, 255, (n, size, size)).astype(np.uint8)
        ids = np.arange(first, first+n)
        x[:,0,0],x[:,0,1] = ids//256,ids%256
        return x, (ids%4).astype(np.int64)
    return Dataset('marked', *images(0, n_train), *images(10_000, n_test))

def ids_of(x): return set((x[:,0,0,0].long()*256 + x[:,0,0,1].long()).tolist())

@pytest.mark.parametrize('scheme', [dict(name='iid', n_clients=6), dict(name='dirichlet', n_clients=6, alpha=.3), dict(name='shards_with_replacement', n_clients=6, classes=3),
    dict(name='classes_per_client', n_clients=6, classes=2), dict(name='quantity_skew', n_clients=6, alpha=1.)])
def test_no_test_or_validation_image_ever_reaches_training(monkeypatch, scheme):
    monkeypatch.setattr(E, 'dataset', lambda name, d=marked(): d)
    monkeypatch.setattr(E, 'preparation', lambda s: lambda x: x.float()/255)
    E.classifier.cache_clear()
    fed = federation(Setting('marked', partition=scheme, protocol=dict(rounds=4, per_round=6), local=dict(batch_size=16)), seed=3)
    seen = set()
    @dataclass(frozen=True)
    class Watched(FedAvg):
        def loss(self, w, batch, c): seen.update(ids_of((batch['x']*255).round())); return super().loss(w, batch, c)
    METHODS.pop('watched')
    run(replace(fed, method=Watched()))
    test,val = ids_of(fed.data.test[0]),ids_of(fed.data.validation[0])
    assert len(seen) > 50 and len(test)==80 and len(val)==30
    assert max(seen) < 300 and min(test) >= 10_000 and max(val) < 300 and not seen & val
    E.classifier.cache_clear()

@pytest.mark.parametrize('model', [dict(name='softmax'), dict(name='cnn_fedcspack_fmnist'), dict(name='vit_tiny32', patch=7, dim=16, depth=1, heads=2)])
def test_cached_features_are_the_uncached_path(model):
    "A frozen body: head training on the cache gives what passing the images through at every step gives"
    s = Setting(**SMALL, model=model, frozen=True, local=dict(epochs=2, optimiser=dict(name='sgd', lr=.1, momentum=.9)))
    cached = federation(s, seed=1)
    m = E.classifier(s.data, json.dumps(model, sort_keys=True), 1, 'cpu')
    m.body.load_state_dict(E.classifier(s.data, json.dumps(model, sort_keys=True), 0, 'cpu').body.state_dict())
    E.classifier.cache_clear()
    d = E.dataset(s.data)
    x,tx = d.images('train'),d.images('test')
    data = FederatedData(x, cached.data.y, cached.data.clients, (tx,cached.data.test[1]), (x[E.split(d, s.validation, 1)[1]],cached.data.validation[1]), prepare=E.preparation(s))
    (a,rows),(b,rows_b) = run(cached),run(replace(cached, net=Net(m, frozen='body'), data=data))
    assert a['server']['w'].keys()==b['server']['w'].keys()=={'head.weight','head.bias'}
    for k in a['server']['w']: torch.testing.assert_close(a['server']['w'][k], b['server']['w'][k], atol=1e-5, rtol=1e-5)
    assert rows[-1][3]==pytest.approx(rows_b[-1][3], abs=1e-4)

def test_a_seed_decides_validation_partition_and_weights():
    a,b,c = (federation(Setting(**SMALL), seed=s) for s in (0, 0, 1))
    assert all((x==y).all() for x,y in zip(a.data.clients, b.data.clients)) and len(a.data.clients[0])!=len(c.data.clients[0])
    assert torch.equal(begin(a)['server']['w']['head.weight'], begin(b)['server']['w']['head.weight'])
    assert not torch.equal(begin(a)['server']['w']['head.weight'], begin(c)['server']['w']['head.weight'])

def test_personal_models_are_scored_on_the_clients_own_classes():
    "FedAvg has no personal models: each client's score is the global model's on its part, and its part has its classes only"
    fed = federation(Setting(**SMALL | dict(partition=dict(name='classes_per_client', n_clients=10, classes=2)), personal=True))
    rows = run(fed)[1]
    last = {m: {r[1]: r[3] for r in rows if r[2]==m and r[0]==2} for m in ('client_accuracy','personal_accuracy')}
    assert last['client_accuracy']==last['personal_accuracy'] and len(last['personal_accuracy'])==10
    for held,tested in zip(fed.data.clients, fed.data.test_clients): assert set(fed.data.test[1][tested].tolist())==set(fed.data.y[held].tolist())

def test_a_leaky_split_trains_on_three_quarters_of_the_test_set_and_scores_clients_on_the_rest(monkeypatch):
    monkeypatch.setattr(E, 'dataset', lambda name, d=marked(): d)
    monkeypatch.setattr(E, 'preparation', lambda s: lambda x: x.float()/255)
    E.classifier.cache_clear()
    fed = federation(Setting('marked', partition=dict(name='iid', n_clients=12), validation=.1, leaky=True), seed=3)
    trained = [ids_of(fed.data.x[c]) for c in fed.data.clients]
    scored = [ids_of(fed.data.test[0][t]) for t in fed.data.test_clients]
    official,every = ids_of(fed.data.test[0]),set().union(*trained)
    assert len(every)==sum(map(len, trained)) and not every & set().union(*scored) and not every & ids_of(fed.data.validation[0])
    assert set().union(*scored) == official - every and sum(map(len, scored))==len(official - every)
    assert .6 < len(official & every)/len(official) < .9 and sum(map(len, trained)) in range(int(.75*350), int(.75*350)+13)
    assert not federation(Setting('marked', partition=dict(name='iid', n_clients=12))).data.test_clients and len(official)==80

def test_finished_runs_are_kept(tmp_path, monkeypatch):
    cases = [Case(dict(alpha=a), Setting(**SMALL | dict(partition=dict(name='dirichlet', n_clients=10, alpha=a)))) for a in (.1, 1.)]
    first = run_cases(cases[:1], [0, 1], tmp_path, **ABOUT)
    before = (tmp_path/'rows.jsonl').read_bytes()
    ran = []
    monkeypatch.setattr(E, 'run_case', lambda case, seeds, *a, f=E.run_case, **k: ran.append((case.cell['alpha'], seeds)) or f(case, seeds, *a, **k))
    both = run_cases(cases, [0, 1], tmp_path, **ABOUT)
    assert ran==[(1., [0]), (1., [1])] and (tmp_path/'rows.jsonl').read_bytes().startswith(before)
    assert [(r['cell']['alpha'], r['seed']) for r in both]==[(.1, 0), (1., 0), (.1, 1), (1., 1)] and both[0]==first[0]
    told = json.loads((tmp_path/'progress.json').read_text())
    assert told.pop('expected') > 0 and told==dict(done=4, total=4, left=0., todo=2, now='')

def test_runs_of_other_tables_are_taken_over_where_they_are_asked_for(tmp_path, monkeypatch, capsys):
    def rows(t): return tmp_path/'000'/t/'rows.jsonl'
    def case(alpha, **cell): return Case(cell, Setting(**SMALL | dict(partition=dict(name='dirichlet', n_clients=10, alpha=alpha))), 'released' if cell else 'intended')
    theirs = run_cases([case(.1), case(1.)], [0, 1], rows('table1/smoke').parent, **ABOUT)
    ran = []
    monkeypatch.setattr(E, 'run_case', lambda case, seeds, *a, f=E.run_case, **k: ran.append((case.cell, seeds)) or f(case, seeds, *a, **k))
    mine = dict(ABOUT, table='table2', stand_in=dict(scale='less'))
    ours = run_cases([case(.1, at=.1)], [1, 2], rows('table2/laptop').parent, borrow=True, **mine)
    assert ran==[(dict(at=.1), [2])] and capsys.readouterr().out=='1 of the runs were made for other tables or profiles.\n'
    assert [(r['cell'], r['variant'], r['table'], r['stand_in']['scale'], r['seed']) for r in ours]==[(dict(at=.1), 'released', 'table2', 'less', s) for s in (1, 2)]
    same = ('fingerprint','setting','rows','seconds','when','code')
    assert [ours[0][k] for k in same]==[theirs[2][k] for k in same] and [r['fingerprint'] for r in read(rows('table2/laptop'))]==[r['fingerprint'] for r in ours]
    assert run_cases([case(.1, at=.1)], [1, 2], rows('table2/laptop').parent, borrow=True, **mine)==ours and not capsys.readouterr().out, 'once is enough'
    monkeypatch.setenv('FEDBOOK_RERUN', '0')     # without running, too
    assert [r['seed'] for r in run_cases([case(.1)], [0, 1, 2, 3], rows('table1/paper').parent, borrow=True, **ABOUT)]==[0, 1, 2]
    assert not run_cases([case(.1)], [0], rows('table3/smoke').parent, **ABOUT), 'unasked'
    monkeypatch.setenv('FEDBOOK_RESUME', '0')
    assert not run_cases([case(.1)], [0], rows('table3/smoke').parent, borrow=True, **ABOUT), 'after --no-resume'

def test_a_run_goes_by_the_name_that_its_cell_has_now(tmp_path):
    s = Setting(**SMALL)
    def made(**cell): return [(r['cell'], r['fingerprint']) for r in run_cases([Case(cell, s)], [0], tmp_path, **ABOUT)]
    [(_,before)],[(cell,after)] = made(reading='old'),made(reading='new')
    assert cell==dict(reading='new') and before==after and len(read(tmp_path/'rows.jsonl'))==1

def test_cases_that_share_a_run_keep_the_name_it_was_made_under(tmp_path):
    both = [Case(dict(reading=k), Setting(**SMALL)) for k in ('a','b')]
    def made(cases): return [r['cell'] for r in run_cases(cases, [0], tmp_path, **ABOUT)]
    assert made(both[:1])==made(both)==[dict(reading='a')]

def test_a_broken_file_lends_nothing(tmp_path, capsys):
    def rows(t): return tmp_path/'000'/t/'smoke'/'rows.jsonl'
    for s,t in enumerate(('table1','table2')): run_cases([Case({}, Setting(**SMALL))], [s], rows(t).parent, **ABOUT)
    rows('table1').write_bytes(b'broken\n'+rows('table1').read_bytes())
    assert [r['seed'] for r in run_cases([Case({}, Setting(**SMALL))], [0, 1], rows('table3').parent, rerun=False, borrow=True, **ABOUT)]==[1]
    told = capsys.readouterr().out
    assert f'{rows("table1")} line 1' in told and 'None of its runs is taken over.\n1 of the runs' in told

@pytest.mark.parametrize('first', [0, 1])
def test_a_stage_of_two_cases_runs_once_in_either_order(tmp_path, monkeypatch, first):
    "Fine-tuning goes on from where FedAvg ended, although FedAvg is a case of its own that has ended; nothing is left behind"
    s,rounds = Setting(**SMALL),[]
    cases = [Case(dict(tuned=t), replace(s, after=[dict(method=dict(name='ft'), protocol=dict(rounds=1, per_round=10))]*t)) for t in (0, 1)]
    alone = {t: run_cases([c], [0, 1], tmp_path/f'{t}', **ABOUT) for t,c in enumerate(cases)}
    monkeypatch.setattr(E, 'rounds_of', lambda fed, file, f=E.rounds_of: f(fed, file, lambda r: rounds.append((fed.method.__class__.__name__, r))))
    both = run_cases([cases[first], cases[1-first]], [0, 1], tmp_path, **ABOUT)
    assert sorted(rounds)==2*[('FT', 1)]+2*[('FedAvg', 1)]+2*[('FedAvg', 2)], rounds
    assert [r['rows'] for r in both]==[alone[i][s]['rows'] for s in (0, 1) for i in (first, 1-first)] and not list(tmp_path.glob('.*.part'))

def test_a_run_goes_on_at_the_round_where_it_was_killed(tmp_path, monkeypatch):
    case,rounds = Case({}, Setting(**SMALL | dict(protocol=dict(rounds=4, per_round=3), method=dict(name='moon')))),[]
    whole = run_cases([case], [0], tmp_path/'whole', **ABOUT)[0]
    class Killed(Exception): pass
    def watched(last, f=E.rounds_of):
        def on_round(r):
            rounds.append(r)
            if r==last: raise Killed
        return lambda fed, checkpoint: f(fed, checkpoint, on_round)
    monkeypatch.setattr(E, 'rounds_of', watched(3)); monkeypatch.setattr('fedbook.memory.IN_RAM', 0)
    with pytest.raises(Killed): run_cases([case], [0], tmp_path, **ABOUT)
    assert not (tmp_path/'rows.jsonl').exists() and list(tmp_path.glob('.*.memory/*'))
    monkeypatch.setattr(E, 'rounds_of', watched(None, rounds_of))
    assert run_cases([case], [0], tmp_path, **ABOUT)[0]['rows']==whole['rows']
    assert rounds==[1, 2, 3, 4] and not list(tmp_path.glob('.*.part')) and not list(tmp_path.glob('.*.memory'))

@pytest.mark.parametrize('engine,groups', [('stacked', [[0, 1, 2]]), ('traced', [[0], [1], [2]])])
def test_seeds_go_side_by_side_where_clients_are_stacked(tmp_path, monkeypatch, engine, groups):
    case,ran,sizes = Case({}, Setting(**SMALL)),[],[]
    apart = [run_cases([case], [s], tmp_path/f'{s}', engine='one_by_one', **ABOUT)[0] for s in range(3)]
    monkeypatch.setattr(E, 'run_case', lambda case, seeds, *a, f=E.run_case, **k: ran.append(seeds) or f(case, seeds, *a, **k))
    monkeypatch.setattr(engines, 'train', lambda pairs, record, f=engines.train: sizes.append(len(pairs)) or f(pairs, record))
    for a,b in zip(apart, run_cases([case], [0, 1, 2], tmp_path, engine=engine, **ABOUT), strict=True):
        assert a['seed']==b['seed'] and a['fingerprint']==b['fingerprint'] and [r[:3] for r in a['rows']]==[r[:3] for r in b['rows']]
        assert np.allclose([r[3] for r in a['rows'] if 'loss' in r[2]], [r[3] for r in b['rows'] if 'loss' in r[2]], rtol=1e-4)
    assert ran==groups and set(sizes)=={case.setting.protocol['per_round']*3 if engine=='stacked' else 1}

def test_a_changed_formula_is_another_run():
    source = 'def f(x):\n    "Twice"\n    return 2*x # a comment'
    assert bare(source)==bare(source.replace('Twice', 'Two times').replace('# a comment', ''))!=bare(source.replace('2*x', '3*x'))

def test_fingerprints():
    s = Setting(**SMALL)
    case = Case({}, s)
    assert case.fingerprint(0)==Case({'x': 1}, replace(s)).fingerprint(0)!=case.fingerprint(1)
    assert case.fingerprint(0)!=Case({}, replace(s, method=dict(name='fedprox', mu=.1))).fingerprint(0)

def test_a_new_field_at_its_default_changes_no_old_run():
    @dataclass(frozen=True)
    class Longer(Setting):
        more: bool = False
    assert Case({}, Longer(**SMALL)).fingerprint(0)==Case({}, Setting(**SMALL)).fingerprint(0)!=Case({}, Longer(**SMALL, more=True)).fingerprint(0)

def test_defaults_of_a_setting_stay_as_they_are():
    "A run's fingerprint leaves out what is at its default: give a new behaviour a new field instead"
    assert Setting('mnist').settings()==dict(data='mnist', model=dict(name='softmax'), input={}, frozen=False, partition=dict(name='iid', n_clients=10), method=dict(name='fedavg'), local={}, protocol={},
        validation=.1, personal=False, leaky=False, held=0., groups=[], shift=[], augment={}, after=[])

@pytest.fixture
def published(tmp_path, monkeypatch):
    "A function that puts other weights where published ones are looked for"
    monkeypatch.setenv('FEDBOOK_DATA', str(tmp_path))
    def put(scale):
        weights = {k: scale*v for k,v in build('vit_tiny32', 10, 1, 28, patch=14, dim=16, depth=1).body.state_dict().items()}
        (tmp_path/'weights').mkdir(exist_ok=True); save_file(weights, tmp_path/'weights'/'vit_tiny32.safetensors')
        for f in (E.weights, E.classifier, E.frozen_features): f.cache_clear()
    yield put
    for f in (E.weights, E.classifier, E.frozen_features): f.cache_clear()

VIT = dict(name='vit_tiny32', patch=14, dim=16, depth=1)

@pytest.mark.parametrize('frozen', [False, True])
def test_other_published_weights_are_another_run(tmp_path, published, monkeypatch, frozen):
    case,hashed = Case({}, Setting(**SMALL, model=dict(VIT, pretrained=True), frozen=frozen)),[]
    monkeypatch.setattr(E, 'weights_fingerprint', lambda m, f=E.weights_fingerprint: hashed.append(m) or f(m))
    published(1.); first = run_cases([case], [0], tmp_path, **ABOUT)[0]
    published(.5); hashed.clear(); second = run_cases([case], [0], tmp_path, **ABOUT)[0]
    assert second['fingerprint']!=first['fingerprint'] and second['rows']!=first['rows']
    assert len(hashed)==1+frozen, 'once for all runs, and once for the cache of features'
    published(1.); assert run_cases([case], [0], tmp_path, **ABOUT)[0]==first

def test_fresh_weights_are_given_by_the_seed(published):
    case = Case({}, Setting(**SMALL, model=VIT))
    published(1.); first = case.fingerprint(0)
    published(.5); assert case.fingerprint(0)==first and E.weights('fashion_mnist_mini', json.dumps(VIT))==[]

def test_without_rerun_older_code_is_taken_and_marked(tmp_path, monkeypatch, capsys):
    cases = [Case(dict(alpha=a), Setting(**SMALL | dict(partition=dict(name='dirichlet', n_clients=10, alpha=a)))) for a in (.1, 1., 10.)]
    new = run_cases(cases[:1], [0], tmp_path, **ABOUT)[0]
    def older(code, when, **other): return dict(new, cell=cases[1].cell, setting=cases[1].setting.settings(), code=code, when=when, fingerprint=cases[1].fingerprint(0, code)) | other
    for r in (older('a', '2026-01-02'), older('b', '2026-01-03'), older('c', '2026-01-01'), older('d', '2026-01-04', seed=1), older('e', '2026-01-05', variant='released'), older('f', '2026-01-06', fingerprint='of other data')): E.append(tmp_path/'rows.jsonl', r)
    before = (tmp_path/'rows.jsonl').read_bytes()
    monkeypatch.setattr(E, 'run_case', lambda *a, **k: pytest.fail('a run'))
    a,b = run_cases(cases, [0], tmp_path, rerun=False, **ABOUT)
    assert a==new and b==dict(older('b', '2026-01-03'), older=True) and (tmp_path/'rows.jsonl').read_bytes()==before
    assert 'Nothing is run: 1 of 3 runs are of present code, 1 of older code, 1 are missing.' in capsys.readouterr().out
    monkeypatch.setenv('FEDBOOK_RERUN', '0'); assert run_cases(cases, [0], tmp_path, **ABOUT)==[a, b]
    monkeypatch.setenv('FEDBOOK_RERUN', '1'); ran = []
    monkeypatch.setattr(E, 'run_case', lambda case, seeds, *_, **k: ran.append(case.cell['alpha']) or [dict(new, cell=case.cell, fingerprint=case.fingerprint(s)) for s in seeds])
    run_cases(cases, [0], tmp_path, **ABOUT); assert ran==[1., 10.], 'older code is never taken unasked'

def test_steps_are_counted_exactly():
    "What the estimate multiplies is what is done, when every client takes part"
    s = Setting(**SMALL | dict(protocol=dict(rounds=2, per_round=10)), local=dict(epochs=3, batch_size=7))
    steps = []
    @dataclass(frozen=True)
    class Counted(FedAvg):
        def step(self, g, w, c): steps.append(1); return g
    METHODS.pop('counted')
    fed = replace(federation(s), method=Counted())
    run(fed)
    assert len(steps)==E.local_steps(fed)

def test_the_estimate_asks_each_method_for_its_step_and_counts_what_is_scored(monkeypatch):
    seconds = dict(FedAvg=1., FedALA=10.)
    monkeypatch.setattr(E, 'choice', lambda fed: ('one_by_one', seconds[type(fed.method).__name__])); monkeypatch.setattr(E, 'timed', lambda f: 0.)
    avg,ala = (Case({}, Setting(**SMALL | dict(method=dict(name=m), personal=True))) for m in ('fedavg','fedala'))
    n = E.local_steps(federation(avg.setting))
    def cost(*todo): return sum(seconds for _,seconds in E.expected_costs(todo))
    assert cost((avg, 0), (avg, 1), (ala, 0))==pytest.approx(n*12)
    monkeypatch.setattr(E, 'timed', lambda f: 1.); monkeypatch.setattr(E, 'local_steps', lambda fed: 0)
    p,d = federation(avg.setting).protocol,federation(avg.setting).data
    scored = p.rounds + p.rounds//p.evaluate_every
    assert cost((avg, 0))==pytest.approx(scored) and cost((ala, 0))==pytest.approx(scored + sum(map(len, d.test_clients))/len(d.test[1]))

def test_the_estimate_counts_a_shared_stage_once_and_times_scoring_on_each_data_set(monkeypatch):
    monkeypatch.setattr(E, 'choice', lambda fed: ('one_by_one', 1.)); monkeypatch.setattr(E, 'timed', lambda f: 0.)
    def tuned(name): return Case({}, Setting(**SMALL, after=[dict(method=dict(name=name), protocol=dict(rounds=1))]))
    ft,lp = tuned('ft'),tuned('proximalft')
    def costs(*todo): return [seconds for _,seconds in E.expected_costs(todo)]
    (first,second),(alone,) = costs((ft, 0), (lp, 0)),costs((lp, 0))
    assert first==alone and second==pytest.approx(alone - E.local_steps(federation(ft.setting.stage(0)))) and second > 0
    assert costs((ft, 0), (lp, 1))==[first, *costs((lp, 1))]
    timed = []
    monkeypatch.setattr(E, 'timed', lambda f: timed.append(f) or 0.)
    costs((ft, 0), (lp, 0)); assert len(timed)==2
    costs((ft, 0), (replace(lp, setting=replace(lp.setting, model=dict(name='mlp'))), 0)); assert len(timed)==6

def test_what_is_left_follows_the_finished_runs(tmp_path, monkeypatch):
    clock = iter([0., 30., 90.])
    monkeypatch.setattr(E.time, 'time', lambda: next(clock))
    a,b = (Case(dict(strategy=s, seed=3), Setting(**SMALL)) for s in ('FT','LP-FT'))
    told = []
    for _ in E.told([(a, [0]), (b, [0]), (b, [1])], {(id(a), 0): 10., (id(b), 0): 20., (id(b), 1): 20.}, tmp_path, 5):
        told.append(json.loads((tmp_path/'progress.json').read_text()))
    assert [(t['done'], t['left'], t['now']) for t in told]==[(2, 50., 'FT, 3'), (3, 120., 'LP-FT, 3'), (4, 60., 'LP-FT, 3')]
    assert json.loads((tmp_path/'progress.json').read_text())==dict(done=5, total=5, left=0, todo=3, expected=50., now='')

@pytest.mark.parametrize('bad', [dict(data='fashion_mini'), dict(model=dict(name='sofmax')), dict(partition=dict(name='dirichlet', n_clients=10, alpha=0)),
    dict(partition=dict(name='dirichlet', n_clients=10, alfa=1)), dict(partition=dict(name='iid', n_clients=10**6)), dict(method=dict(name='fedprox', mu=-1)),
    dict(local=dict(epoch=1)), dict(local=dict(schedule=dict(name='cosine', period=0))), dict(protocol=dict(round=3)), dict(protocol=dict(per_round=11)), dict(input=dict(sise=3))])
def test_refusals_come_before_any_work(bad, monkeypatch, tmp_path):
    monkeypatch.setattr(E, 'rounds_of', lambda *a, **k: pytest.fail('work was begun'))
    with pytest.raises(Refused) as e: run_cases([Case({}, Setting(**SMALL)), Case({}, Setting(**SMALL | bad))], [0], tmp_path, **ABOUT)
    assert len(str(e.value).splitlines())==1 and not (tmp_path/'rows.jsonl').exists()

def test_what_was_measured_is_kept_and_what_is_missing_measured_for_all_cases(tmp_path, monkeypatch):
    cases = [Case(dict(alpha=a), Setting(**SMALL | dict(partition=dict(name='dirichlet', n_clients=10, alpha=a)))) for a in (.1, 1.)]
    asked = []
    def measure(seed): asked.append(seed); return [[[1, None, 'time', float(i+seed)]] for i in range(2)]
    first = E.measured(cases, [0, 1], tmp_path, measure, **ABOUT)
    assert [(r['seed'], r['cell']['alpha'], r['rows']) for r in first]==[(s, c.cell['alpha'], [[1, None, 'time', float(i+s)]]) for s in (0, 1) for i,c in enumerate(cases)]
    assert E.measured(cases, [0, 1], tmp_path, measure, **ABOUT)==first==E.read(tmp_path/'rows.jsonl') and asked==[0, 1]
    E.measured(cases, [1, 2], tmp_path, measure, **ABOUT); assert asked==[0, 1, 2]
    with pytest.raises(ValueError): E.measured(cases, [3], tmp_path, lambda s: [[]], **ABOUT)
    assert len(E.read(tmp_path/'rows.jsonl'))==6, 'a repetition is kept whole or not at all'
    monkeypatch.setenv('FEDBOOK_RERUN', '0'); monkeypatch.setattr(Case, 'code', lambda self: '0'*16)
    old = E.measured(cases, [0, 7], tmp_path, lambda s: pytest.fail('a measurement'), **ABOUT)
    assert [r['older'] for r in old]==[True]*2 and [r['rows'] for r in old]==[r['rows'] for r in first[:2]]
