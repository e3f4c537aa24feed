"The notebooks are the source: clean, in step with the package, and ready for papermill. (nbdev_test executes them.)"
import ast, csv, filecmp, itertools, json, os, re, shutil, subprocess, sys
from pathlib import Path
import pytest
from fedbook.claims import claims as all_claims
from fedbook.evidence import committed
from fedbook.manifest import experiments, remark
from fedbook.runner import check_parameters

ROOT = Path(__file__).resolve().parents[1]
NBS = sorted(p for p in (ROOT/'nbs').rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts)
EXPERIMENTS = list(experiments().values())
EXECUTED = sorted(p for p in (ROOT/'figures').glob('*/*/*/notebook.ipynb') if p.parts[-2] in ('laptop','overnight','paper'))
def name(nb): return '-'.join(nb.parts[-4:-1]) if nb in EXECUTED else nb.stem

def cells(nb): return json.loads(nb.read_text())['cells']
def code(nb): return [''.join(c['source']) for c in cells(nb) if c['cell_type']=='code']

@pytest.mark.parametrize('nb', NBS, ids=lambda p: p.stem)
def test_notebook_is_clean(nb):
    for c in cells(nb):
        assert c.get('execution_count') is None and set(c['metadata']) <= {'tags'}
        assert not any(o['output_type']=='error' for o in c.get('outputs', []))
    assert 'site-packages' not in nb.read_text(), 'a warning with a path of the machine'

@pytest.mark.parametrize('nb', NBS+EXECUTED, ids=name)
def test_a_paper_is_named_by_its_method_and_not_by_a_number(nb):
    prose = ''.join(''.join(c['source'])+'\n' for c in cells(nb) if c['cell_type']=='markdown')
    assert prose.startswith('# ') and not re.search(r'\bpapers? 00\d', prose, re.I)

@pytest.mark.parametrize('nb', NBS+EXECUTED, ids=name)
def test_no_progress_bar_is_frozen_in_a_notebook(nb):
    outputs = [o for c in cells(nb) for o in c.get('outputs', [])]
    assert not any('widget-view' in json.dumps(o) or 'it/s]' in json.dumps(o) for o in outputs), 'delete the output'
    assert 'widgets' not in json.loads(nb.read_text(encoding='utf-8'))['metadata'], 'delete what the bar has left'

def length(cell):
    "Lines of code: neither blank, nor a comment, nor a parameter on a line of its own"
    return sum(bool(l.strip()) and not re.match(r' *#|    \S+.*, # |    \*{0,2}\w+:[^=]+(=\S+)?,$|\)( ->.*)?:( #.*)?$', l) for l in cell.splitlines())

@pytest.mark.parametrize('nb', NBS, ids=lambda p: p.stem)
def test_cells_are_short(nb):
    "Nine of ten cells have twelve lines or fewer"
    lines = sorted(map(length, code(nb)))
    assert not lines or lines[int(.9*(len(lines)-1))] <= 12

@pytest.mark.parametrize('nb', [p for p in NBS if p.parent.name in ('01_foundations','appendix','02_methods')], ids=lambda p: p.stem)
def test_half_of_a_library_notebooks_cells_are_a_glance_long(nb):
    "Half of them have five lines or fewer"
    lines = sorted(n for n in map(length, code(nb)) if n)
    assert not lines or lines[(len(lines)-1)//2] <= 5

LIBRARY = [p for p in NBS if p.parent.name in ('00_tutorials','01_foundations','appendix','02_methods','03_theory')]

def test_cells_of_the_library_are_short_even_with_their_documentation():
    "Lines with parameters and comments count too; blank lines and directives do not"
    lines = sorted(sum(bool(l.strip()) and not l.startswith('#|') for l in c.splitlines()) for nb in LIBRARY for c in code(nb))
    assert lines[len(lines)//2] <= 5 and lines[int(.9*(len(lines)-1))] <= 12

@pytest.mark.parametrize('nb', LIBRARY, ids=lambda p: p.stem)
def test_no_line_of_code_scrolls_sideways(nb):
    assert not [l for c in code(nb) for l in c.splitlines() if len(l) > 110]

@pytest.mark.parametrize('nb', LIBRARY, ids=lambda p: p.stem)
def test_half_of_the_cells_show_something(nb):
    shows = [bool(c['outputs']) for c in cells(nb) if c['cell_type']=='code' and length(''.join(c['source']))]
    assert 2*sum(shows) >= len(shows), f'{sum(shows)} of {len(shows)}: show what a definition does right after it'

@pytest.mark.parametrize('nb', [p for p in NBS if p.parent.name=='02_methods' and '_chapter_' not in p.stem], ids=lambda p: p.stem)
def test_a_method_ends_with_a_picture_beside_fedavg(nb):
    last = [c for c in cells(nb) if c['cell_type']=='code'][-1]
    assert re.search(r'^beside_fedavg\(', ''.join(last['source']), re.M), 'its last code cell calls beside_fedavg'
    assert any('image/png' in o.get('data', {}) for o in last['outputs']), 'the picture is not stored: execute the notebook'

@pytest.mark.parametrize('nb', [p for p in NBS if p.parent.name=='02_methods'], ids=lambda p: p.stem)
def test_a_long_class_grows_in_view(nb):
    "Right above an exported class of more than twenty lines, prose says 'All of it together', for its parts were shown before"
    above = ''
    for c in cells(nb):
        s = ''.join(c['source'])
        exported = ast.parse(s).body if c['cell_type']=='code' and re.search(r'^#\| *export$', s, re.M) else []
        long = [n.name for n in exported if isinstance(n, ast.ClassDef) and n.end_lineno-n.lineno+1 > 20]
        assert not long or 'All of it together' in above, f'{long} appears finished: show how it grows'
        above = s if c['cell_type']=='markdown' else ''

def kind(output):
    "What an output of evidence is"
    data = output.get('data', {})
    if 'text/html' in data: return 'numbers'
    if 'image/png' in data: return 'picture'
    words = ''.join(data.get('text/markdown', ''))
    return 'after looking' if words.startswith('**After looking.**') else 'verdicts' if '| verdict |' in words else 'where from'

ORDER = ['where from','verdicts','picture','numbers','after looking']

@pytest.mark.parametrize('e', EXPERIMENTS, ids=lambda e: e.id)
def test_a_paper_or_theorem_opens_on_its_evidence_verdicts_before_numbers(e):
    "Before anything is run; a table whose claims were tested shows verdicts, and one that somebody has looked at says why"
    shown = {}
    for c in cells(ROOT/'nbs'/e.notebook):
        asked = re.search(r"^committed\('([^']+)'\)$", ''.join(c['source']), re.M)
        if c['cell_type']=='code' and not asked: break
        if asked: shown[asked[1]] = [kind(o) for o in c['outputs']]
    assert shown.get(e.id, [])[:1]==['where from'], 'its first code cells show what committed() finds'
    kinds,folder = shown[e.id],committed(e.id).folder
    assert kinds==sorted(kinds, key=ORDER.index) and all(kinds.count(k)==1 for k in {*kinds}-{'picture'})
    assert ('verdicts' in kinds)==bool(folder and (folder/'claims.md').exists()) and ('after looking' in kinds)==bool(folder and remark(e.id, folder.name))

WHY = {'weakest pair','difference [95 %]','its difference [95 %]','condition','cases against it','smallest counterexample'}

@pytest.mark.parametrize('claims', sorted(p for p in (ROOT/'figures').glob('*/*/*/claims.csv') if p.parts[-2] in ('laptop','overnight','paper')), ids=lambda p: '-'.join(p.parts[-4:-1]))
def test_a_verdict_says_what_it_rests_on(claims):
    with claims.open(encoding='utf-8', newline='') as f: rows = list(csv.DictReader(f))
    assert rows
    for r in rows: assert r['verdict'].startswith('not tested') or any(r.get(k) not in (None, '', '–') for k in WHY), r

def verdicts_shown(nb):
    "The lines of the stored tables of verdicts"
    for c in cells(nb):
        for o in c.get('outputs', []):
            lines = ''.join(o.get('data', {}).get('text/markdown', '')).splitlines()
            for i,line in enumerate(lines):
                if line.startswith('| claim | in the printed numbers | variant | verdict |'):
                    yield from itertools.takewhile(lambda l: l.startswith('|'), lines[i+2:])

@pytest.mark.parametrize('nb', [nb for nb in NBS+EXECUTED if '04_papers' in nb.parts or nb in EXECUTED], ids=name)
def test_a_stored_verdict_is_about_a_claim_in_its_present_words(nb):
    "Else the outputs are older than the claims: execute the notebook again"
    known = {c.text for c in all_claims()}
    for line in verdicts_shown(nb):
        claim,_,_,verdict = [w.strip() for w in line.strip('|').split(' | ')[:4]]
        assert claim in known, claim
        assert verdict!='not tested', f'{claim}: not tested, but why?'

@pytest.mark.parametrize('nb', NBS, ids=lambda p: p.stem)
def test_links_to_notebooks_lead_to_one(nb):
    prose = '\n'.join(''.join(c['source']) for c in cells(nb) if c['cell_type']=='markdown')
    for link in re.findall(r'\]\(([^)#:]+\.ipynb)', prose): assert (nb.parent/link).exists(), link

def test_package_matches_notebooks(tmp_path):
    for d in ('nbs','fedbook'): shutil.copytree(ROOT/d, tmp_path/d, ignore=shutil.ignore_patterns('__pycache__'))
    for f in ('settings.ini','pyproject.toml'): shutil.copy(ROOT/f, tmp_path/f)
    env = {k: v for k,v in os.environ.items() if k!='IN_TEST'}
    subprocess.run([Path(sys.executable).with_name('nbdev_export')], cwd=tmp_path, env=env, check=True)
    names = [str(p.relative_to(ROOT)) for p in (ROOT/'fedbook').rglob('*.py')]
    _,mismatch,errors = filecmp.cmpfiles(ROOT, tmp_path, names, shallow=False)
    assert not mismatch and not errors
    assert sorted(names)==sorted(str(p.relative_to(tmp_path)) for p in (tmp_path/'fedbook').rglob('*.py'))

@pytest.mark.parametrize('e', EXPERIMENTS, ids=lambda e: e.id)
def test_table_takes_what_the_manifest_gives(e):
    for p in e.profiles: check_parameters(ROOT/'nbs'/e.notebook, e.parameters(p))

@pytest.mark.parametrize('e', {e.notebook: e for e in reversed(EXPERIMENTS)}.values(), ids=lambda e: e.id)
def test_defaults_of_a_notebook_are_the_smoke_run_of_its_first_table(e):
    given,names = next(c for c in cells(ROOT/'nbs'/e.notebook) if 'parameters' in c['metadata'].get('tags', [])),{}
    exec(''.join(given['source']), names)
    assert {k: names[k] for k in e.parameters('smoke')}==e.parameters('smoke')

@pytest.mark.parametrize('e', EXPERIMENTS, ids=lambda e: e.id)
def test_table_uses_no_directive_that_papermill_ignores(e):
    assert not any(re.search(r'^#\| *(eval: *false|export)', s, re.M) for s in code(ROOT/'nbs'/e.notebook))

def test_notebooks_that_one_process_runs_keep_the_same_digit5():
    "`load('digit5')` stands for one data set in a process, and nbdev_test runs many notebooks in one"
    asked = [c for nb in NBS for c in code(nb) if re.search(r"^digit5\(", c, re.M)]
    smoke = [e.parameters('smoke') for e in EXPERIMENTS if 'smoke' in e.profiles]
    drawn = [p['digits'] for p in smoke if any('Digit5'==w.get('world') for w in p.get('worlds', {}).values())]
    assert len(asked)==1 and len(drawn)==1
    assert 'digit5({sources}, {n_train}, {n_test})'.format(**drawn[0])==asked[0]

def test_a_name_of_a_network_means_one_thing_in_all_notebooks_that_one_process_runs():
    made = [(name, nb.stem) for nb in NBS for c in code(nb) for name in re.findall(r"^MODELS\['(\w+)'\] =", c, re.M)]
    assert made and len({name for name,_ in made})==len(made), made
