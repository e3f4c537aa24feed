"What a reader does from outside: the tutorials run with the package as it is installed, in a folder of their own; `make test` runs them here only."
import json, os, shutil, subprocess, sys
from pathlib import Path
import pytest

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = sorted((ROOT/'nbs'/'00_tutorials').glob('*.ipynb'))

def pip(*args, cwd): return subprocess.run([sys.executable, '-m', 'pip', *map(str, args), '--quiet', '--disable-pip-version-check'], cwd=cwd, check=True, capture_output=True, text=True)

@pytest.fixture(scope='module')
def installed(tmp_path_factory):
    "The package from its wheel, in a folder"
    source,wheels,target = (tmp_path_factory.mktemp(n) for n in ('source','wheels','installed'))
    shutil.copytree(ROOT/'fedbook', source/'fedbook', ignore=shutil.ignore_patterns('__pycache__'))
    for f in ('pyproject.toml','README.md','LICENSE'): shutil.copy(ROOT/f, source/f)
    pip('wheel', '.', '--no-deps', '--no-build-isolation', '--wheel-dir', wheels, cwd=source)
    pip('install', '--no-deps', '--target', target, *wheels.glob('*.whl'), cwd=source)
    return target

@pytest.mark.parametrize('nb', TUTORIALS, ids=lambda p: p.stem)
def test_a_tutorial_runs_with_the_installed_package(nb, installed, tmp_path):
    "From another folder, as a notebook and not as part of the checkout"
    check = dict(cell_type='code', id='where', metadata={}, execution_count=None, outputs=[], source='import fedbook; print(fedbook.__file__)')
    page = json.loads(nb.read_text()); page['cells'].append(check)
    (tmp_path/nb.name).write_text(json.dumps(page))
    env = {**os.environ, 'PYTHONPATH': str(installed)}
    done = subprocess.run([sys.executable, '-m', 'jupyter', 'nbconvert', '--to', 'notebook', '--execute', '--inplace', nb.name], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode==0, done.stderr[-2000:]
    assert str(installed) in ''.join(json.loads((tmp_path/nb.name).read_text())['cells'][-1]['outputs'][0]['text'])
