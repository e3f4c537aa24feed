"The queue makes tables in a checkout of its own, and what it has finished arrives here."
import json, os, shutil, signal, subprocess, sys, threading, time
from pathlib import Path
import psutil, pytest
from fedbook import queue as Q
from fedbook.errors import Refused
from fedbook.results import read

ROOT = Path(__file__).parents[1]
CLI = 'import sys; from fedbook.cli import main; sys.exit(main(sys.argv[1:]))'

@pytest.fixture(scope='module')
def project(tmp_path_factory):
    "A repository with the notebooks and the library"
    to = tmp_path_factory.mktemp('project')
    for name in ('nbs','fedbook'): shutil.copytree(ROOT/name, to/name, ignore=shutil.ignore_patterns('__pycache__','.ipynb_checkpoints'))
    for name in ('settings.ini','pyproject.toml','.gitignore'): shutil.copy(ROOT/name, to)
    for words in (['init','-q'], ['add','.'], ['-c','user.name=x','-c','user.email=x@x','commit','-qm','x']): subprocess.run(['git',*words], cwd=to, check=True)
    return to

def queue(project, *words, **kw):
    env = {k: v for k,v in os.environ.items() if k!='FEDBOOK_FIGURES'} | dict(PYTHONPATH=str(project))
    return subprocess.Popen([sys.executable, '-c', CLI, 'queue', *words], cwd=project, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kw)

def said(*a): p = queue(*a); out,err = p.communicate(); return p.returncode,out,err

def until(ok, seconds=90):
    for _ in range(10*seconds):
        if ok(): return True
        time.sleep(.1)

def entries(project): return json.loads((project/'.queue'/'state.json').read_text())['entries'] if (project/'.queue'/'state.json').exists() else []

def test_it_works_rests_goes_on_and_brings_home_what_it_has_made(project):
    p = queue(project, 'start', '000-table6', '002-costs', '--profile', 'smoke')
    try:
        assert until(lambda: entries(project) and entries(project)[0]['state']=='running' and len(Q.family(p.pid)) > 2)
        code,_,err = said(project, 'start', '--profile', 'smoke')
        assert code==2 and f'process {p.pid}' in err, 'a second one is refused'
        assert said(project, 'pause')[0]==0
        table = [f for f in Q.family(p.pid) if 'reproduce' in ' '.join(f.cmdline())]
        assert table and all(f.status()==psutil.STATUS_STOPPED for f in table) and table[0].nice()==19
        sessions = Path(f'/proc/{table[0].pid}/autogroup') # Linux weighs sessions before processes
        assert not sessions.exists() or sessions.read_text().split()[-2:]==['nice','19']
        assert 'The queue rests' in said(project)[1]
        assert said(project, 'continue')[1].startswith('The queue goes on')
        (project/'fedbook'/'errors.py').write_text('broken =') # editing here does not disturb what runs there
        out,err = p.communicate(timeout=300)
    finally: Q.each(p.pid, 'kill'); subprocess.run(['git','checkout','-q','fedbook/errors.py'], cwd=project, check=True)
    assert p.returncode==0 and [e['state'] for e in entries(project)]==['done','done'], out+err
    made = project/'figures'/'000'/'table6'/'smoke'
    assert len(read(made/'rows.jsonl')) > 2 and (made/'table.md').exists() and (made/'run.json').exists()
    assert read(made/'rows.jsonl')==read(project/'.queue'/'checkout'/'figures'/'000'/'table6'/'smoke'/'rows.jsonl')
    assert 'The queue is not running' in said(project)[1] and '0 runs fetched' in said(project, 'collect')[1]

def test_what_cannot_be_run_is_said_and_the_rest_goes_on(project):
    "A data set that is not here"
    code,out,_ = said(project, 'start', '000-table7', '000-table6', '--profile', 'laptop')
    assert code==0 and [e['state'] for e in entries(project)]==['skipped','skipped'] and 'cifar100' in entries(project)[0]['why'], out

def test_a_table_of_a_queue_that_died_is_not_said_to_run(monkeypatch, tmp_path):
    monkeypatch.setattr(Q, 'home', lambda: tmp_path)
    Q.save(dict(pid=os.getpid(), commit='', entries=[Q.Entry('000-table9', 'overnight', 'running'), Q.Entry('000-table8', 'overnight', 'done')]))
    monkeypatch.setattr(Q, 'alive', lambda pid: True)
    assert [Q.place(i, 'overnight') for i in ('000-table9','000-table8','000-table7')]==['running','','']
    monkeypatch.setattr(Q, 'alive', lambda pid: False)
    assert Q.place('000-table9', 'overnight')==''

def test_a_full_disk(project, monkeypatch):
    (project/'.queue').mkdir(exist_ok=True); monkeypatch.chdir(project); monkeypatch.setattr(Q, 'FREE', 2**60)
    e = Q.Entry('000-table6', 'smoke'); Q.make(e, project/'.queue'/'checkout')
    assert e.state=='skipped' and 'MB left' in e.why

def test_stopped_in_the_middle_it_leaves_nobody_behind(project):
    p = queue(project, 'start', '000-table4', '--profile', 'smoke')
    assert until(lambda: [e['state'] for e in entries(project)]==['running'] and len(Q.family(p.pid)) > 2)
    some = [f.pid for f in Q.family(p.pid)]
    assert 'has ended' in said(project, 'stop')[1]
    p.communicate()
    assert until(lambda: not any(psutil.pid_exists(i) and psutil.Process(i).status()!=psutil.STATUS_ZOMBIE for i in some), 10)
    assert 'stopped' in said(project)[1] and 'No queue works; 0 runs' in said(project, 'stop')[1]

@pytest.mark.parametrize('ids,profile,word', [(['000-tabel7'], 'smoke', '000-table7'), ([], 'ovrnight', 'overnight'), (['002-lemma43'], 'overnight', 'smoke, laptop')])
def test_unknown_tables_and_profiles(ids, profile, word):
    with pytest.raises(Refused, match=word): Q.order(ids, profile)

def test_outside_of_git_it_says_what_it_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(Q, 'root', lambda: tmp_path); monkeypatch.setenv('GIT_CEILING_DIRECTORIES', str(tmp_path.parent))
    with pytest.raises(Refused, match='a checkout of its own'): Q.checkout()

def test_the_order_names_tables_that_exist():
    import tomllib
    from fedbook.manifest import experiments
    assert set(tomllib.loads((ROOT/'fedbook'/'assets'/'queue.toml').read_text())['first']) <= set(experiments())

@pytest.mark.skipif(not Path('/proc/self/autogroup').exists(), reason='sessions have no priority here')
def test_a_session_that_a_table_begins_gives_way_too(tmp_path):
    "A kernel begins one, and it would run beside the work at the machine as an equal"
    kernel = "import subprocess; subprocess.run(['sleep', '60'], start_new_session=True)"
    table = subprocess.Popen([sys.executable, '-c', kernel], preexec_fn=Q.give_way)
    told = threading.Thread(target=Q.follow, args=(table, tmp_path/'rests', .02))
    told.start()
    try:
        assert until(lambda: sum(os.getsid(p.pid)==p.pid for p in Q.family(table.pid))==2)
        lowest = lambda p: Path(f'/proc/{p.pid}/autogroup').read_text().split()[-2:]==['nice','19']
        assert until(lambda: all(map(lowest, Q.family(table.pid))), seconds=10)
    finally: Q.each(table.pid, 'kill'); told.join()

@pytest.mark.skipif(not Path('/proc/self/autogroup').exists(), reason='sessions have no priority here')
def test_the_session_of_the_caller_keeps_its_priority():
    "A process that follows another of its own session would run at the lowest priority from then on"
    code = ("from fedbook import queue as Q; import subprocess; from pathlib import Path;"
        "Q.follow(subprocess.Popen(['sleep', '.1']), Path('/nowhere'), .02); print(Path('/proc/self/autogroup').read_text())")
    p = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, start_new_session=True, check=True)
    assert p.stdout.split()[-1]=='0'
