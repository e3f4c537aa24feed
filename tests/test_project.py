"The files that describe the project agree with each other."
import ast, configparser, json, re, shlex, subprocess, sys, tomllib
from pathlib import Path
import nbformat, pytest, yaml
from readme import fresh, newest, opening, PAGES, PAPERS

ROOT = Path(__file__).resolve().parents[1]
INI = configparser.ConfigParser(); INI.read(ROOT/'settings.ini'); INI = INI['DEFAULT']
TOML = tomllib.loads((ROOT/'pyproject.toml').read_text())
PROJECT,NBDEV = TOML['project'],TOML['tool']['nbdev']
FLOORS = ['errors', 'files streams settings', 'sources tensors compat wire', 'corruptions', 'further_corruptions', 'data partition models optim tasks memory published segmentation', 'shifts', 'features', 'tokens', 'method', 'methods', 'federation', 'client replies evaluate', 'rounds', 'trace workers', 'engines', 'tables', 'results papers manifest claims pictures',
          'experiments', 'beside chapters theory tuning unchanged', 'page evidence recreate', 'ledger', 'runner', 'queue', 'cli']

def plain(x): return dict(true=True, false=False).get(x.lower(), x) if isinstance(x, str) else x

def test_settings_and_pyproject_agree():
    assert INI['lib_name']==PROJECT['name'] and INI['description']==PROJECT['description']
    assert PROJECT['requires-python']=='>='+INI['min_python']
    assert (ROOT/'fedbook'/'__init__.py').read_text()==f'__version__ = "{INI["version"]}"\n'

@pytest.mark.parametrize('name', NBDEV)
def test_nbdev_settings_agree(name):
    theirs = NBDEV[name]
    ours = INI[name].split() if isinstance(theirs, list) else plain(INI[name])
    assert ours==theirs, 'a list in TOML: nbdev 3 takes a string apart into letters'

def test_environment_has_the_same_pins():
    env = re.findall(r'^  - (\S+==\S+)$', (ROOT/'environment.yml').read_text(), re.M)
    assert env==PROJECT['optional-dependencies']['dev']
    pinned = {p.split('==')[0].lower() for p in env}
    assert {re.split('[<>=]', d)[0].lower() for d in PROJECT['dependencies']} <= pinned

def test_installed_versions_are_the_pins():
    from importlib.metadata import version
    pins = dict(p.split('==') for p in PROJECT['optional-dependencies']['dev'])
    assert {k: version(k).split('+')[0] for k in pins}==pins

@pytest.mark.parametrize('target', ['bench','device'])
def test_make_gives_a_notebook_parameters_that_it_has(target):
    recipe = subprocess.run(['make', '-n', target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    words = shlex.split(recipe[recipe.index('papermill '):])
    cells = json.loads((ROOT/words[1]).read_text())['cells']
    parameters = ast.parse(''.join(next(c['source'] for c in cells if 'parameters' in c['metadata'].get('tags', []))))
    given = yaml.safe_load(words[words.index('-y')+1])
    assert given and given.keys() <= {line.target.id for line in parameters.body}

def modules(): return sorted((ROOT/'fedbook').rglob('*.py'))

def imports(path):
    "Full names of what a module imports; nbdev writes imports of the package as relative ones"
    package = ['fedbook', *path.relative_to(ROOT/'fedbook').parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = '.'.join([*package[:len(package)+1-node.level], *filter(None, [node.module])]) if node.level else node.module
            yield from ([base] if base!='fedbook' else [f'fedbook.{a.name}' for a in node.names])
        elif isinstance(node, ast.Import): yield from (a.name for a in node.names)

@pytest.mark.parametrize('path', modules(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_package_needs_no_nbdev(path):
    assert not [m for m in imports(path) if m.split('.')[0] in ('nbdev','fastcore','execnb')]

def floor(name): return next((i for i,f in enumerate(FLOORS) if name in f.split()), None)

@pytest.mark.parametrize('path', [p for p in modules() if not p.stem.startswith('_')], ids=lambda p: p.relative_to(ROOT).as_posix())
def test_a_module_imports_only_from_lower_floors(path):
    here = floor(path.relative_to(ROOT/'fedbook').with_suffix('').parts[0])
    assert here is not None, 'give the module a floor'
    for m in imports(path):
        if m.startswith('fedbook.') and m!=f'fedbook.{path.stem}': assert floor(m.split('.')[1]) <= here, m

def test_importing_fedbook_is_light():
    code = 'import sys, fedbook; print(sorted({"torch","timm","pandas","matplotlib","numpy"} & set(sys.modules)))'
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.strip()=='[]'

@pytest.mark.parametrize('page', PAGES)
def test_a_page_is_its_notebook(page):
    text,nb = fresh(page)
    assert (ROOT/page).read_text()==text and nbformat.read(ROOT/'nbs'/PAGES[page], 4)==nb, 'run: make readme'

@pytest.mark.parametrize('notebook', PAPERS, ids=lambda p: f'{p.parent.name}-{p.stem}')
def test_a_paper_notebook_opens_on_the_newest_evidence(notebook):
    assert opening(notebook)[1], 'run: make readme'

def test_the_picture_of_all_verdicts_is_the_newest(tmp_path): assert newest(tmp_path), 'run: make readme'

def anchors(page):
    "The headings of a page or notebook, as links name them"
    text = page.read_text()
    if page.suffix=='.md': return {re.sub(r'[^\w -]', '', h).lower().replace(' ', '-') for h in re.findall(r'^#+ (.*)', text, re.M)}
    prose = ''.join(''.join(c['source'])+'\n' for c in json.loads(text)['cells'] if c['cell_type']=='markdown')
    return {h.replace(' ', '-') for h in re.findall(r'^#+ (.*)', prose, re.M)}

@pytest.mark.parametrize('page', [*PAGES, 'CONTRIBUTING.md'])
def test_links_of_a_page_lead_somewhere(page):
    links = re.findall(r'\]\((?!\w+:)([^)#]*)(?:#([^)]*))?\)', (ROOT/page).read_text())
    assert links
    for to,anchor in links:
        there = (ROOT/page).parent/to
        assert there.exists(), to
        assert not anchor or anchor in anchors(there), f'{to}#{anchor}'

def test_the_front_page_is_short(): assert len((ROOT/'README.md').read_text().splitlines()) <= 100
