"Older code is as good as new only if both compute the same bytes."
import json, shutil
from pathlib import Path
import numpy as np, pytest, torch
import fedbook.experiments as E
from fedbook.data import CATALOGUE, load, OWN
from fedbook.errors import Refused
from fedbook.experiments import Case, code_fingerprint, run_cases, Setting
from fedbook.federation import FederatedData
from fedbook.segmentation import drawn_tumours
from fedbook.unchanged import answers, code_of, compare, cut, digest, in_turn, made_again, note, samples, shortened

ROOT = Path(__file__).resolve().parents[1]
ABOUT = dict(paper='000', table='a table', profile='laptop', stand_in={})
CASES = [Case(dict(m=m), Setting('fashion_mnist_mini', method=dict(name=m), protocol=dict(rounds=3, per_round=3))) for m in ('fedavg','fedprox')]

def older(folder):
    "A checkout of its own"
    shutil.copytree(ROOT/'fedbook', folder/'fedbook', ignore=shutil.ignore_patterns('__pycache__'))
    return folder

def rewritten(checkout, file, now, before):
    "One piece of code is different"
    path = checkout/'fedbook'/file
    text = path.read_text(); assert text.count(now)==1
    path.write_text(text.replace(now, before))
    return checkout

SEGMENTED = ('seen.append(x); x = f(self.halved(x))', 'seen.append(x); x = f(self.halved(x) + 0)')
SAME = ('rounds.py', "fed.method.aggregate(old, [{**a['message'], 'client': i} for i,a in replies.items()], weights)", "fed.method.aggregate(old, list({**a['message'], 'client': i} for i,a in replies.items()), weights)")
OTHER = ('methods/fedprox.py', 'self.mu/2', '1.001*self.mu/2')

def test_what_computes_the_same_is_not_run_again_and_what_does_not_is(tmp_path, monkeypatch):
    monkeypatch.setattr(E, 'UNCHANGED', tmp_path/'unchanged.json'); (tmp_path/'unchanged.json').write_text('{}')
    old = rewritten(older(tmp_path/'a'), *SAME); rewritten(old, *OTHER)
    codes = dict(zip(('fedavg','fedprox'), map(json.loads, answers(old, ['fedavg','fedprox']))))
    assert all(codes[m]!=code_fingerprint(m) for m in codes)
    figures = tmp_path/'figures'; monkeypatch.setenv('FEDBOOK_FIGURES', str(figures))
    with monkeypatch.context() as m:
        m.setattr(E, 'code_fingerprint', codes.get)
        first = run_cases(CASES, [0], figures/'000'/'x'/'laptop', **ABOUT)
    said = []
    assert note(old, said.append)=={codes['fedavg']: code_fingerprint('fedavg')}
    assert [s.split(maxsplit=1) for s in said]==[['fedavg', '1 of 1 settings equal'], ['fedprox', '0 of 1 settings equal']]
    ran = []
    monkeypatch.setattr(E, 'run_case', lambda case, *a, f=E.run_case, **k: ran.append(case.cell['m']) or f(case, *a, **k))
    again = run_cases(CASES, [0], figures/'000'/'x'/'laptop', **ABOUT)
    assert ran==['fedprox'] and again[0]==first[0] and again[1]['code']!=first[1]['code']

def test_a_change_of_nothing_but_the_state_or_the_partition_is_seen(tmp_path):
    ask = [shortened(CASES[0].setting.settings())]
    part,state,rows = json.loads(answers(ROOT, ask)[0])
    other = rewritten(older(tmp_path/'a'), *SAME[:2], "{**fed.method.aggregate(old, [{**a['message'], 'client': i} for i,a in replies.items()], weights), 'more': torch.zeros(1)}")
    (p,s,r), = map(json.loads, answers(other, ask))
    assert p==part and r==rows and s!=state
    fed = E.federation(Setting(**ask[0])); clients = fed.data.clients
    assert digest(clients)==part!=digest([*clients[:-1], clients[-1][::-1]])!=digest([clients[0][:-1], np.append(clients[0][-1:], clients[1]), *clients[2:]])

def test_code_that_is_the_same_is_not_run(monkeypatch):
    import fedbook.unchanged as U
    asked,said = [],[]
    monkeypatch.setattr(U, 'answers', lambda p, a, f=U.answers: asked.append(a) or f(p, a))
    row = dict(method='fedavg', code=code_fingerprint('fedavg'), setting=CASES[0].setting.settings())
    assert compare(ROOT, [row], said.append)=={} and asked==[['fedavg'], ['fedavg']] and said==['fedavg           the code is the same']

def test_partitions_count_by_name_and_rows_of_other_code_do_not():
    def row(code, alpha, **method): return dict(method='fedavg', code=code, setting=dict(data='mnist', method=dict(name='fedavg', **method), protocol=dict(rounds=9), local={}, partition=dict(name='dirichlet', alpha=alpha)))
    found = samples([row('a', .1), row('a', 1.), row('a', 1., x=2), row('b', .1, x=3)], dict(fedavg='a'))
    assert len(found)==2 and all(s['protocol']['rounds']==2 and s['protocol']['per_round']==2 and s['local']['epochs']==1 for s in found)

def test_rows_of_code_that_is_as_good_as_the_older_count(tmp_path, monkeypatch):
    monkeypatch.setattr(E, 'UNCHANGED', tmp_path/'unchanged.json'); E.UNCHANGED.write_text('{"a": "b", "x": "y"}')
    rows = [dict(method='fedavg', code=c, setting=dict(data=c, method=dict(name='fedavg'), protocol={}, local={}, partition=dict(name='iid'))) for c in 'abx']
    assert [s['data'] for s in samples(rows, dict(fedavg='b'))]==['a','b']

def test_a_change_in_a_later_stage_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(E, 'UNCHANGED', tmp_path/'unchanged.json'); E.UNCHANGED.write_text('{}')
    def trained(name, **values): return Setting('fashion_mnist_mini', method=dict(name='fedavg'), partition=dict(name='iid', n_clients=3), personal=True, protocol=dict(rounds=3, per_round=3), after=[dict(method=dict(name=name, **values), protocol=dict(rounds=2, per_round=3, personal_every=1))]).settings()
    settings = {'fedavg then ft': trained('ft'), 'fedavg then proximalft': trained('proximalft', mu=.5)}
    pull,said = 'g + self.mu*(w-w0)',[]
    old = rewritten(rewritten(older(tmp_path/'a'), *SAME), 'methods/posthoc.py', pull, pull.replace('self', '1.001*self'))
    codes = list(map(json.loads, answers(old, [*settings])))
    found = compare(old, [dict(method='fedavg', code=c, setting=s) for c,s in zip(codes, settings.values())], said.append)
    assert found=={codes[0]: E.Case({}, Setting(**settings['fedavg then ft'])).code()}
    assert [' '.join(s.split()) for s in said]==['fedavg then ft 1 of 1 settings equal', 'fedavg then proximalft 0 of 1 settings equal']

def test_what_is_as_good_is_found_through_several_changes():
    assert E.equivalent_codes('c', dict(a='b', b='c', x='y'))==['c','b','a'] and E.equivalent_codes('a', dict(a='b'))==['a'] and E.equivalent_codes('a', dict(a='b', b='a'))==['a','b']

def test_what_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(Refused, match='is no checkout of fedbook'): compare(tmp_path, [dict(method='fedavg')])
    broken = rewritten(older(tmp_path/'a'), 'rounds.py', 'import json\n', 'import jsom\n')
    with pytest.raises(Refused, match="cannot be run: ModuleNotFoundError: No module named 'jsom'"): answers(broken, ['fedavg'])

def test_what_cannot_be_run_here_is_left_aside_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(E, 'UNCHANGED', tmp_path/'unchanged.json'); E.UNCHANGED.write_text('{}')
    old,said = rewritten(older(tmp_path/'a'), *SAME),[]
    codes = dict(zip(('fedavg','fedprox'), map(json.loads, answers(old, ['fedavg','fedprox']))))
    here,*missing = [CASES[0].setting.settings(), *(dict(c.setting.settings(), data='a set that nobody has') for c in CASES)]
    records = [dict(method=s['method']['name'], code=codes[s['method']['name']], setting=s) for s in (here, *missing)]
    assert compare(old, records, said.append)=={codes['fedavg']: code_fingerprint('fedavg')}
    assert said[0].startswith("fedavg           1 of 1 settings equal; not run: There is no data set 'a set that nobody has'")
    assert said[1].startswith("fedprox          no rows of that code; not run: There is no data set 'a set that nobody has'")

def test_a_process_that_dies_takes_one_setting_with_it(tmp_path, monkeypatch):
    "The older code ends in a crash where μ is .7; the other two settings are compared"
    monkeypatch.setattr(E, 'UNCHANGED', tmp_path/'unchanged.json'); E.UNCHANGED.write_text('{}')
    old = rewritten(older(tmp_path/'a'), 'methods/fedprox.py', 'self.mu/2', '(self.mu/2 if self.mu!=.7 else __import__("os").abort())')
    [code] = map(json.loads, answers(old, ['fedprox']))
    def row(mu): return dict(method='fedprox', code=code, setting=Setting('fashion_mnist_mini', method=dict(name='fedprox', mu=mu), protocol=dict(rounds=1, per_round=3)).settings())
    said = []
    assert compare(old, [row(mu) for mu in (.5, .7, .9)], said.append)=={code: code_fingerprint('fedprox')}
    assert said==['fedprox          2 of 2 settings equal; not run: its process died of SIGABRT']

def test_slices_that_were_made_smaller_are_made_again(monkeypatch):
    whole = drawn_tumours(6, 6, 16)
    monkeypatch.setitem(OWN, 'heads', whole), monkeypatch.setitem(CATALOGUE, 'heads', None)
    for name in ('heads','heads_small','tails_8','heads_8'): made_again(name)
    assert load(f'{whole.name}_8').train_x.shape==(6, 8, 8)

def test_a_model_that_is_not_among_the_models_is_part_of_the_code(tmp_path):
    "As in the run itself, where the U-Net counts as soon as `fedbook.segmentation` is there"
    setting = dict(data='fashion_mnist_mini', model=dict(name='unet'), method=dict(name='fedavg'), after=[dict(method=dict(name='ft'))])
    name = in_turn(dict(method='fedavg', setting=setting))
    assert name=='fedavg then ft with unet' and code_of(name)==Case({}, Setting(**setting)).code()!=code_of('fedavg then ft')
    other = rewritten(older(tmp_path/'a'), 'segmentation.py', *SEGMENTED)
    assert [json.loads(a)==code_of(n) for n,a in zip(('fedavg', name), answers(other, ['fedavg', name]))]==[True, False]

def test_what_is_noted_is_code_that_was():
    noted = json.loads((ROOT/'fedbook'/'assets'/'unchanged.json').read_text())
    assert all(len(k)==len(v)==16 and int(k, 16) and int(v, 16) and k!=v for k,v in noted.items())

def test_a_federation_is_cut_down_with_its_groups_and_its_clients_test_images():
    "Positions beyond the images that are kept would be refused; so would parts without any"
    x,y = torch.arange(800.)[:,None],torch.arange(800)%2
    d = cut(FederatedData(x, y, [range(400), range(400, 800)], (x, y), test_clients=[range(5), range(700, 800)], groups=dict(half=[range(250, 500), range(500, 800)])))
    assert [len(c) for c in d.clients]==[100, 100] and len(d.test[0])==300
    assert d.test_clients==[[0,1,2,3,4], [0]] and d.groups==dict(half=[list(range(250, 300)), [0]])
