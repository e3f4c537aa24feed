"What a result depends on is found wherever it lies; what changes no result is left out."
import ast, importlib, inspect, shutil, subprocess, sys
from functools import lru_cache, partial
from pathlib import Path
import pytest
from fedbook import models, optim, partition, shifts, tasks
from fedbook.errors import Refused
from fedbook.experiments import Case, code_fingerprint, Setting
from fedbook.method import FedAvg, method, methods, METHODS
from fedbook.sources import bare, FStrings, Sources

ROOT = Path(__file__).resolve().parents[1]

@lru_cache(maxsize=None)
def codes(checkout, *names):
    "What the code of a checkout is recognised by"
    ask = f'from fedbook.experiments import code_fingerprint; print(*map(code_fingerprint, {names!r}))'
    p = subprocess.run([sys.executable, '-c', ask], cwd=checkout, env={'PYTHONPATH': str(checkout), 'PATH': ''}, capture_output=True, text=True, check=True)
    return dict(zip(names, p.stdout.split()))

NAMES = 'fedavg','fedprox','fedas','fedpac','talos','fedspu','moon'

MORE = 'def more(): pass'
WITHOUT_EFFECT = {'experiments.py': MORE, 'engines.py': MORE, 'cli.py': MORE, 'methods/moon.py': '# a comment'} # on a result

@pytest.mark.parametrize('changes,touched', [
    ({**WITHOUT_EFFECT, 'methods/fedas.py': MORE}, {'fedas'}), ({'methods/talos.py': MORE}, {'talos','fedspu'}), ({'methods/moon.py': MORE}, {'moon'}),
    *(({file: change}, {*NAMES}) for file,change in (('features.py', 'def class_means(*a): pass'), ('rounds.py', MORE), ('partition.py', 'SMALL = 1'), ('experiments.py', 'def resplit(*a): pass')))])
def test_a_change_makes_the_rows_of_those_methods_stale_that_use_it(tmp_path, changes, touched):
    shutil.copytree(ROOT/'fedbook', tmp_path/'fedbook', ignore=shutil.ignore_patterns('__pycache__'))
    for file,change in changes.items():
        with open(tmp_path/'fedbook'/file, 'a') as f: f.write(f'\n{change}\n')
    before,after = codes(ROOT, *NAMES),codes(tmp_path, *NAMES)
    assert {n for n in NAMES if before[n]!=after[n]}==touched

@pytest.fixture
def outside(tmp_path, monkeypatch):
    "Modules of the reader's own"
    monkeypatch.syspath_prepend(tmp_path)
    def write(name, text):
        (tmp_path/f'{name}.py').write_text(text); importlib.invalidate_caches()
        return importlib.reload(sys.modules[name]) if name in sys.modules else importlib.import_module(name)
    yield write
    for m in [m for m in sys.modules if (tmp_path/f'{m}.py').exists()]: del sys.modules[m]
    for n in list(METHODS):
        METHODS[n] = {m: c for m,c in METHODS[n].items() if m.startswith('fedbook.')}
        if not METHODS[n]: METHODS.pop(n)

OWN = 'from fedbook.method import FedAvg\nimport json, torch, equation_7\nclass Seventh(FedAvg):\n    def step(self, g, w, c): return equation_7.f(g)\n'

def test_a_method_outside_of_the_package_and_what_it_imports(outside):
    outside('equation_7', 'def f(g): return g')
    outside('seventh', OWN)
    code = code_fingerprint('seventh')
    assert code!=code_fingerprint('fedavg')
    outside('equation_7', 'def f(g): return -g'); assert code_fingerprint('seventh')!=code
    outside('equation_7', 'def f(g): return g # said in words'); assert code_fingerprint('seventh')==code
    outside('seventh', OWN.replace('return', 'return 2*')); assert code_fingerprint('seventh')!=code

def test_a_file_that_is_edited_while_a_run_goes_on_changes_nothing(outside, tmp_path):
    outside('equation_7', 'def f(g): return g'); outside('seventh', OWN)
    code = code_fingerprint('seventh')
    (tmp_path/'equation_7.py').write_text('def f(g): return -g')
    assert code_fingerprint('seventh')==code

CELLS = '''
import sys; from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
def code(*cells):
    for c in cells: shell.run_cell(c).raise_error()
    return shell.run_cell('from fedbook.experiments import code_fingerprint, Setting; Setting("mnist", method=dict(name="mine")); code_fingerprint("mine")').result
mine = """
from dataclasses import dataclass
from fedbook.method import FedAvg
rate = 2
def equation(g): return rate*g
@dataclass(frozen=True)
class Mine(FedAvg):
    mu: float = 1.
    def step(self, g, w, c): return equation(g)
"""
a = code(mine)
assert a==code('unrelated = 5', mine.replace('rate = 2', 'rate = 2 # said in words'))
assert len({a, code('rate = 3'), code('def equation(g): return -rate*g'), code(mine.replace('equation(g)\\n', 'g\\n')), code(mine.replace('mu: float = 1.', 'mu: float = 2.'))})==5
print(code(mine)==a, shell.run_cell("from fedbook.method import method; type(method('mine')) is Mine").result)
'''

def test_a_class_that_is_defined_again_in_a_notebook_takes_effect(tmp_path):
    (tmp_path/'cells.py').write_text(CELLS)
    p = subprocess.run([sys.executable, 'cells.py'], cwd=tmp_path, env={'PYTHONPATH': str(ROOT), 'PATH': '', 'HOME': str(tmp_path)}, capture_output=True, text=True)
    assert p.stdout.split()[-2:]==['True','True'], p.stdout+p.stderr

@pytest.mark.parametrize('code,named', [('', 'source of Mine.step'), ('import torch\ndef f(x): return w*x\nw = torch.ones(2)\n', 'w is a Tensor')])
def test_what_cannot_be_told_apart_is_refused_with_the_way_out(tmp_path, code, named):
    script = f'from fedbook.method import FedAvg\n{code}class Mine(FedAvg):\n    def step(self, g, w, c): return {"f(g)" if code else "g"}\nfrom fedbook.experiments import code_fingerprint\ncode_fingerprint("mine")'
    (tmp_path/'a.py').write_text(script)
    p = subprocess.run([sys.executable, *(['a.py'] if code else ['-c', script])], cwd=tmp_path, env={'PYTHONPATH': str(ROOT), 'PATH': ''}, capture_output=True, text=True)
    assert p.returncode==1 and named in p.stderr.splitlines()[-1] and 'into a module' in p.stderr.splitlines()[-1]

def test_a_name_with_two_meanings_is_refused(outside):
    own = 'from fedbook.method import FedAvg\nclass MOON(FedAvg):\n    def step(self, g, w, c): return 2*g\n'
    import fedbook.methods.moon
    outside('theirs', own)
    with pytest.raises(Refused, match="two methods 'moon', MOON of theirs and MOON of fedbook.methods.moon; give one of them another name"): Setting('mnist', method=dict(name='moon'))
    assert method('fedprox', mu=1.).mu==1
    METHODS['moon'].pop('theirs'); assert type(method('moon')) is fedbook.methods.moon.MOON
    outside('one', own.replace('MOON', 'Same')); outside('two', own.replace('MOON', 'Same')); assert method('same')
    outside('two', own.replace('MOON', 'Same').replace('2*g', '3*g'))
    with pytest.raises(Refused, match='Same of one and Same of two'): method('same')

def test_what_a_setting_names_of_the_readers_own_counts(outside, monkeypatch):
    def codes(): return [Case({}, s).code() for s in (Setting('mnist'), Setting('mnist', model=dict(name='own')), Setting('mnist', partition=dict(name='own', n_clients=2)))]
    text = 'from functools import partial\nfrom fedbook.partition import iid\nfrom fedbook.models import softmax, mlp\ndef own(labels, n_clients, seed=0): return iid(labels, n_clients, seed)\ndef net(n_classes, in_channels, image_size): return softmax(n_classes, in_channels, image_size)\n'
    def register(m): monkeypatch.setitem(models.MODELS, 'own', m.net); monkeypatch.setitem(partition.SCHEMES, 'own', m.own)
    register(outside('mine', text)); a = codes()
    assert a[0]==code_fingerprint('fedavg') and a[0] not in a[1:]
    register(outside('mine', text.replace('seed)', 'seed+1)'))); b = codes()
    assert a[0]==b[0] and a[2]!=b[2] and a[1]!=b[1], 'one module holds both'
    monkeypatch.setitem(models.MODELS, 'own', partial(models.mlp, hidden=(3,))); c = codes()
    monkeypatch.setitem(models.MODELS, 'own', partial(models.mlp, hidden=(4,))); d = codes()
    assert len({a[0], c[1], d[1]})==3 and c[0]==d[0]==a[0]

def test_the_code_of_later_stages_counts(outside):
    "Of a stage's method and of what it alone names; a setting without stages is recognised as before"
    own = 'from fedbook.method import FedAvg\nclass Later(FedAvg):\n    def step(self, g, w, c): return g\n'
    first,then = Setting('mnist'),Setting('mnist', after=[dict(method=dict(name='fedprox'))])
    def code(*stages): return Case({}, Setting('mnist', after=[dict(method=dict(name=m), **more) for m,more in stages])).code()
    outside('mine', own); a = code(('later', {}))
    outside('mine', own.replace('return g', 'return 2*g')); b = code(('later', {}))
    assert a!=b and Case({}, first).code()==code_fingerprint('fedavg')!=Case({}, then).code()

def test_a_task_a_shift_and_an_optimiser_of_ones_own_count_where_they_are_named(outside, monkeypatch):
    text = '''from dataclasses import dataclass
from fedbook.optim import SGD
from fedbook.tasks import Task
@dataclass(frozen=True)
class Twice(Task):
    def loss(self, z, y): return 2*super().loss(z, y)
@dataclass(frozen=True)
class Slow(SGD):
    def update(self, w, g, s, scale=1.): return super().update(w, g, s, scale/2)
def dark(): return lambda x, y, rng: (x//2, y)
'''
    usual = Case({}, Setting('mnist')).code()
    def codes(m):
        for registry,name,o in ((tasks.TASKS, 'twice', m.Twice), (optim.OPTIMISERS, 'slow', m.Slow), (shifts.SHIFTS, 'dark', m.dark), (shifts.SHIFTS, 'none', shifts.SHIFTS['none'])): monkeypatch.setitem(registry, name, o)
        return [Case({}, s).code() for s in (Setting('mnist'), Setting('mnist', local=dict(task=dict(name='twice'))), Setting('mnist', shift=['none', 'dark']),
            Setting('mnist', after=[dict(method=dict(name='fedavg'), local=dict(optimiser=dict(name='slow')))]), Setting('mnist', shift=['none']))]
    a,b = codes(outside('mine', text)),codes(outside('mine', text.replace('2*super', '3*super').replace('scale/2', 'scale/3').replace('x//2', 'x//3')))
    assert a[0]==b[0]==a[4]==b[4]==usual and [x!=y for x,y in zip(a, b)]==[False,True,True,True,False]

def test_a_method_can_be_compared_also_where_its_notebook_defined_it():
    "A notebook's own class takes the place of the exported one in its process, and is taken piece by piece"
    for c in methods().values(): Sources(apart=(c.__module__,)).add(c, c.__name__)

# ---- other Pythons

@pytest.mark.parametrize('parts,text', [
    ([ast.Constant('a'), ast.Constant('')], "f_string('a')"), ([], 'f_string()'),
    ([ast.FormattedValue(ast.Name('x'), -1, ast.JoinedStr([ast.Constant('.3'), ast.Constant('')]))], "f_string(value(x, -1, f_string('.3')))")])
def test_a_text_with_values_is_known_by_its_parts(parts, text):
    "Python 3.12 ends some with an empty part, and 3.11 does not"
    assert ast.unparse(FStrings().visit(ast.JoinedStr(parts)))==text

def test_no_module_is_known_by_how_python_writes_quotes():
    for path in (ROOT/'fedbook').rglob('*.py'):
        assert not any(isinstance(n, ast.JoinedStr) for n in ast.walk(ast.parse(bare(path.read_text())))), path

@pytest.mark.parametrize('python', ['python3.12', 'python3.13', 'python3.14'])
def test_another_python_reads_the_same_source(python):
    if not shutil.which(python) or subprocess.run([python, '--version'], capture_output=True).returncode:
        pytest.skip(f'{python} does not run here')
    program = f"import ast\n{inspect.getsource(FStrings)}\n{inspect.getsource(bare)}\nimport sys; print(bare(sys.stdin.read()))"
    for path in (ROOT/'fedbook').rglob('*.py'):
        there = subprocess.run([python, '-c', program], input=path.read_text(), capture_output=True, text=True, check=True).stdout
        assert there==bare(path.read_text())+'\n', path
