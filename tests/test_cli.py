"The command line in a subprocess, as it is used."
import re, fcntl, json, os, pty, shutil, signal, statistics, struct, subprocess, sys, termios, threading, time, zipfile
from pathlib import Path
import nbformat, pytest
from nbformat.v4 import new_code_cell, new_notebook
from fedbook import runner
from fedbook.errors import Refused
from fedbook.manifest import experiment, figures, output_folder
from fedbook.runner import data_sets, Job, plan, run_job, state

ROOT = Path(__file__).resolve().parents[1]
FEDBOOK = [str(Path(sys.executable).with_name('fedbook'))]

def fedbook(*args, cwd=ROOT, **env):
    return subprocess.run([*FEDBOOK, *args], capture_output=True, text=True, cwd=cwd, env={**os.environ, **{k: str(v) for k,v in env.items()}})

def refused(p):
    assert p.returncode==2, p.stdout+p.stderr
    assert len(p.stderr.strip().splitlines())==1
    return p.stderr

@pytest.mark.parametrize('args,named', [(['reproduce','000-tabel7'], '000-table7'), (['reproduce','--profile','labtop'], 'laptop'), (['reproduce','-j','0'], '-j'),
    (['reproduce','000-table7','-p','sedes=[0]'], 'seeds'), (['reproduce','000-table7','-p','seeds=[0'], 'NAME=VALUE'), (['reproduce','000-table7','-p','data=mnits'], "'mnist'"), (['show','000-table77'], '000-table7'),
    (['reproduce','000-table7','-p','data="mnits"'], "'mnist'"), (['reproduce','000-table7','-p','model={name="sofmax"}'], "'softmax'"),
    (['reproduce','000-table7','--profile','laptop'], 'cifar100.npz'), (['reproduce','002-table4','--profile','laptop'], 'mnist.npz'), (['show','000-table6'], 'has not been made'), (['data','fetch','cifar1O'], 'cifar10'), (['data','fetch'], 'e.g. mnist'), (['data','install','nothing.npz'], 'no file nothing.npz'), (['shwo'], "did you mean 'show'?"), ([''], 'no command'), (['show','nonsense'], 'fedbook list'), (['show','table9'], '000-table9 or 001-table9'), (['data','fetch','cifar100'], 'cifar100.npz'), (['reproduce','000-table7','-p','profile=laptop'], '--profile laptop'), (['reproduce','--no-rerun','--no-resume'], '--no-rerun'),
    (['show','000-table6','--profile','laptop-changed-../../x'], 'no profile'), (['reproduce','000-table7','-p','stand_in=[1]'], 'stand_in'), (['unchanged','/nowhere'], 'no checkout')])
def test_bad_input_is_one_sentence_and_nothing_is_written(args, named, tmp_path):
    assert named in refused(fedbook(*args, FEDBOOK_FIGURES=tmp_path/'f'))
    assert not (tmp_path/'f').exists()

def test_an_archive_that_leads_out_of_its_folder(tmp_path):
    with zipfile.ZipFile(tmp_path/'a.zip', 'w') as z: z.writestr('../cifar10.npz', b'')
    assert '../cifar10.npz' in refused(fedbook('data', 'install', tmp_path/'a.zip', FEDBOOK_DATA=tmp_path/'data'))
    assert [p.name for p in tmp_path.iterdir()]==['a.zip']

def test_nowhere_to_write(tmp_path):
    (tmp_path/'file').write_text('')
    assert 'file' in refused(fedbook('reproduce', '000-table6', FEDBOOK_FIGURES=tmp_path/'file'))

def test_a_torn_cache_file(tmp_path):
    (tmp_path/'cifar10.npz').write_bytes(b'PK\x03\x04 torn')
    assert 'cifar10.npz' in refused(fedbook('data', 'fetch', 'cifar10', FEDBOOK_DATA=tmp_path))
    assert (tmp_path/'cifar10.npz').exists()

def test_outside_of_a_checkout_it_uses_its_own(tmp_path): assert fedbook('list', cwd=tmp_path).returncode==0

@pytest.mark.parametrize('command,says', [('list','000-table7'), ('data','fashion_mnist_mini'), ('doctor','profile smoke     has its data')])
def test_commands_that_tell(command, says):
    p = fedbook(command)
    assert p.returncode==0 and says in p.stdout and not p.stderr

def test_the_doctor_names_the_data_of_every_column_and_world(tmp_path, monkeypatch, capsys):
    from fedbook.cli import profiles
    monkeypatch.setenv('FEDBOOK_DATA', str(tmp_path))
    profiles()
    said = ' '.join(capsys.readouterr().out.split())
    assert 'profile smoke has its data' in said
    assert 'profile laptop needs brain_tumour_t1ce_359, cifar10, cifar100, fashion_mnist, femnist_digits_subset, mnist, mnist_m_regenerated, pneumoniamnist_balanced, usps;' in said

@pytest.mark.parametrize('id,given,reads', [('002-table2', {}, ['cifar10','cifar100','mnist','usps','mnist_m_regenerated','pacs64','nih_cxr_1000']), ('001-tuning', {}, ['cifar10']), ('004-figure4', {}, ['omniglot_small','cifar10','brain_tumour_t1ce_359']),
    ('002-table2', dict(worlds=dict(Digit5={}), digits=dict(sources=['usps'])), ['usps']), ('002-table2', dict(worlds=dict(Digit5={}), digits=dict(folder='x')), []), ('002-table2', dict(worlds=dict(Digit5=dict(world='DomainNet'))), ['pacs64'])])
def test_data_of_worlds_of_settings_and_of_tables_that_a_figure_shows(id, given, reads): assert data_sets(experiment(id).parameters('overnight') | given)==reads

def test_of_all_tables_those_that_cannot_be_made_here_are_left_out(tmp_path, monkeypatch):
    for k,v in dict(FEDBOOK_DATA=tmp_path/'data', FEDBOOK_FIGURES=tmp_path/'f', FEDBOOK_OFFLINE=1).items(): monkeypatch.setenv(k, str(v))
    monkeypatch.setattr(runner, 'having', lambda profile: [experiment(i) for i in asked])
    monkeypatch.setattr(runner, 'work', lambda watch, rerun, resume: how.append((rerun, resume)))
    how,asked,said = [],['003-figure3','002-figure6','003-tableA1','004-table4'],[]
    results = runner.reproduce(profile='laptop', resume=False, say=said.append)
    assert how==[(True, False)]
    assert [(r['id'], r['status']) for r in results]==[(i, 'left out') for i in ('003-figure3','003-tableA1','004-table4')]
    assert [p.name for p in (tmp_path/'f'/'002').iterdir()]==['figure6'] and not (tmp_path/'f'/'003').exists()
    assert said[0].startswith('Left out 003-figure3, 003-tableA1: There is no') and 'femnist_digits_subset.npz' in said[1]
    asked = ['003-figure3']
    with pytest.raises(Refused, match='fashion_mnist.npz'): runner.reproduce(profile='laptop')
    asked = []
    with pytest.raises(Refused, match='No table has the profile laptop'): runner.reproduce(profile='laptop')

def test_a_picture_without_provenance_is_done(tmp_path, monkeypatch):
    monkeypatch.setenv('FEDBOOK_FIGURES', str(tmp_path))
    (tmp_path/'000'/'figure1'/'smoke').mkdir(parents=True); (tmp_path/'000'/'figure1'/'smoke'/'run.json').write_text('{"seconds": 2}')
    assert state('000-figure1', 'smoke')==dict(state='done', seconds=2, device='') and state('000-figure1', 'laptop')==dict(state='not run')
    assert re.search(r'^000-figure1 .* ✓ 2 s +· +·$', fedbook('list', FEDBOOK_FIGURES=tmp_path).stdout, re.M)

def test_a_notebook_without_data_takes_other_parameters(): assert (job := plan(['002-figure6'], 'smoke', dict(draws=9))[0]).parameters==dict(profile=job.profile, draws=9)

def test_only_tables_and_figures_are_counted():
    "Not the checks of theorems, which have notebooks, too"
    from fedbook.manifest import experiments
    here = [i for i in experiments() if re.fullmatch(r'002-(table|figure)\w+', i)]
    said = ' '.join(fedbook('list').stdout.split())
    assert f'LP-FT (002): {len(here)} of 10 tables and figures are here; nothing to run in Table 1 (a comparison in words), Table 5' in said and len(here) < len([i for i in experiments() if i.startswith('002')])

def test_a_reader_who_has_seen_enough():
    p = subprocess.run(f'{FEDBOOK[0]} list | head -1', shell=True, capture_output=True, text=True, cwd=ROOT)
    assert len(p.stdout.splitlines())==1 and not p.stderr

def checkout(to, change):
    "A checkout with one changed notebook"
    nb = Path('nbs/04_papers/000_ptalos/table06.ipynb')
    (to/nb).parent.mkdir(parents=True); shutil.copy(ROOT/'settings.ini', to)
    cells = json.loads((ROOT/nb).read_text()); change(cells); (to/nb).write_text(json.dumps(cells))
    return to

def lose_tag(nb):
    for c in nb['cells']: c['metadata'].pop('tags', None)

def rename_seeds(nb):
    for c in nb['cells']: c['source'] = [l.replace('seeds:list', 'seed:list') for l in c['source']]

@pytest.mark.parametrize('change,named', [(lose_tag, "tag 'parameters'"), (rename_seeds, "did you mean 'seed'")])
def test_a_notebook_that_papermill_would_run_wrongly(tmp_path, change, named):
    assert named in refused(fedbook('reproduce', '000-table6', cwd=checkout(tmp_path, change), FEDBOOK_FIGURES=tmp_path/'f'))
    assert not (tmp_path/'f').exists()

@pytest.mark.parametrize('code,why', [('1/0', 'ZeroDivisionError: division by zero'), ('import os; os._exit(3)', 'the kernel died'), ('import time; time.sleep(60)', 'longer than its timeout')])
def test_what_fails_is_never_done(tmp_path, code, why):
    parameters = new_code_cell('x = 1'); parameters.metadata['tags'] = ['parameters']
    nbformat.write(new_notebook(cells=[parameters, new_code_cell(code)]), tmp_path/'a.ipynb')
    (tmp_path/'out').mkdir(); (tmp_path/'out'/'run.json').write_text('{}') # an earlier run was done
    result = run_job(Job('a', 'smoke', tmp_path/'a.ipynb', dict(x=2), tmp_path/'out', 3))
    assert result['status']=='FAILED' and why in result['error']
    assert sorted(p.name for p in (tmp_path/'out').iterdir())==['failed.ipynb','progress.json']

def break_it(nb): next(c for c in nb['cells'] if c['cell_type']=='code')['source'] = ['raise RuntimeError("broken on purpose")']

def test_a_failed_table_is_said_and_the_exit_code_is_1(tmp_path):
    p = fedbook('reproduce', '000-table6', cwd=checkout(tmp_path, break_it), FEDBOOK_FIGURES=tmp_path/'f')
    assert p.returncode==1 and 'FAILED' in p.stdout and 'broken on purpose' in p.stdout
    assert re.search('^000-table6 .* failed ', fedbook('list', FEDBOOK_FIGURES=tmp_path/'f').stdout, re.M)

def numbers(folder):
    "The rows without what may differ between two runs"
    return {r['fingerprint']: (r['seed'], r['cell'], r['rows']) for r in map(json.loads, (folder/'rows.jsonl').read_text().splitlines())}

TABLE = ['reproduce', '000-table6', '-p', 'rounds=12', '-p', 'engine=one_by_one'] # long enough to be killed in the middle; another engine rounds otherwise, and which is fastest depends on the hour
FOLDER = plan(['000-table6'], 'smoke', dict(rounds=12))[0].folder.relative_to(figures())

def on_a_terminal(*args, **env):
    "The exit code, what was printed, what the bar showed with the time of each, and the time of the end"
    ours,theirs = pty.openpty(); seen = []
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack('HHHH', 40, 200, 0, 0))
    def watch():
        try:
            while read := os.read(ours, 2**16): seen.extend((time.time(), l.strip()) for l in re.split(r'[\r\n]+', read.decode()) if l.strip())
        except OSError: pass # its end
    env = {k: str(v) for k,v in {**os.environ, **env}.items() if k!='TQDM_DISABLE'}
    (watcher := threading.Thread(target=watch)).start()
    p = subprocess.Popen([*FEDBOOK, *args], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs); said = p.communicate()[0]; end = time.time(); watcher.join(); os.close(ours)
    return p.returncode, said, seen, end

@pytest.fixture(scope='module')
def terminal(tmp_path_factory):
    "Table 6 made without interruption, on a terminal"
    to = tmp_path_factory.mktemp('whole')
    begun = time.time(); code,said,seen,end = on_a_terminal(*TABLE, FEDBOOK_FIGURES=to)
    assert code==0, (said, seen)
    return to, said, [(t-begun, l) for t,l in seen], end-begun, begun

@pytest.fixture(scope='module')
def whole(terminal): return terminal[:2]

def test_the_terminal_says_what_runs_from_the_first_second_to_the_last(terminal):
    to,said,seen,end,begun = terminal
    words = [l for _,l in seen]
    order = ['checking data and models', '1 to begin', '000-table6: starting its kernel', '000-table6 cell', 'drawing', 'writing the page: notebook 1 of 1', 'writing the page: index.html', '100%']
    found = {w: next((i for i,l in enumerate(words) if w in l), None) for w in order}
    if found[order[2]] is None: del found[order[2]] # a fast kernel has started between two looks, a second apart
    assert None not in found.values() and [*found.values()]==sorted(found.values()), found
    assert seen[found[order[0]]][0] < 5 and not any('begun' in l for l in words)
    assert all(re.search(r'(at least|about) \d+ \w+ left', l) for l in words[found[order[1]]:found[order[-1]]]), 'always what is left'
    assert said.splitlines()[1].startswith('1 table to make, at least'), said

def test_the_terminal_shows_100_percent_only_when_all_is_done(terminal):
    to,said,seen,end,begun = terminal
    full = next(t for t,l in seen if l.startswith('100%'))
    assert (to/'index.html').stat().st_mtime <= begun+full and end-full < .25*end+2 and not any('left' in l for t,l in seen if t > full)

def test_the_terminals_estimates_are_of_the_whole(terminal):
    "Within a factor of two on a machine that does nothing else; here others may compute, and three seconds are as good as none"
    to,said,seen,end,begun = terminal
    told = [(end-t, float(m[1])) for t,l in seen if (m := re.search(r'(?:about|at least) (\d+) s left', l))]
    assert 1/3 < statistics.median((true+3)/(left+3) for true,left in told) < 3, told

def test_pages_of_notebooks_that_were_never_written_are_counted(tmp_path, monkeypatch):
    "As in a fresh checkout, where each committed table has a notebook and no page"
    monkeypatch.setenv('FEDBOOK_FIGURES', str(tmp_path)); told = []
    for i in ('000-figure1','002-figure6'):
        (f := output_folder(i, 'smoke')).mkdir(parents=True); (f/'run.json').write_text('{"seconds": 2}'); nbformat.write(new_notebook(), f/'notebook.ipynb')
    assert [p.parent for p in runner.unwritten()]==[output_folder(i, 'smoke') for i in ('000-figure1','002-figure6')]
    runner.index(lambda *at: told.append(at)); assert told==[(0, 2), (1, 2), (2, 2)] and not runner.unwritten()
    runner.index(lambda *at: told.append(at)); assert told[3:]==[(0, 0)]

def test_a_second_seed_costs_one_seed(whole, tmp_path):
    shutil.copytree(whole[0]/FOLDER, tmp_path/FOLDER)
    def rows(folder): return [json.loads(l) for l in (folder/'rows.jsonl').read_text().splitlines()]
    first = rows(tmp_path/FOLDER)
    p = fedbook(*TABLE, '-p', 'seeds=[0,1]', FEDBOOK_FIGURES=tmp_path); assert p.returncode==0, p.stdout+p.stderr
    job, = plan(['000-table6'], 'smoke', dict(rounds=12, seeds=[0, 1])); both = rows(tmp_path/job.folder.relative_to(figures()))
    ran = {r['fingerprint']: (r['when'], r['seconds'], r['rows']) for r in both if r['seed']==0}
    assert ran=={r['fingerprint']: (r['when'], r['seconds'], r['rows']) for r in first} and len(both)==2*len(first)
    assert {r['profile'] for r in both}=={job.profile}!={first[0]['profile']}

def test_a_table_through_papermill(whole):
    to,said = whole
    made = {p.name for p in (to/FOLDER).iterdir()}
    assert {'table.md','table.html','figure.svg','figure.png','rows.jsonl','provenance.json','notebook.ipynb','run.json'} <= made and 'failed.ipynb' not in made
    table = (to/FOLDER/'table.md').read_text()
    assert '68.65' in table and 'Stand-ins: data: Fashion-MNIST' in table and f'Profile {FOLDER.name};' in table
    assert 'changed: rounds = 12' in table, 'a profile with other parameters says so'
    assert '6 of 6 runs to do, about' in said and 'index.html' in said and 'figure.svg' in (to/'index.html').read_text()
    listed = fedbook('list', FEDBOOK_FIGURES=to).stdout
    assert re.search(f'^  {FOLDER.name} +✓', listed, re.M) and not re.search('^000-table6 .*✓', listed, re.M)
    assert re.search(r'^4 +68\.65 → \d+\.\d\d', fedbook('show', '000-table6', FEDBOOK_FIGURES=to).stdout, re.M)

@pytest.mark.parametrize('id,given,named', [('001-table1', dict(worlds=dict(Lyme=dict(data='pneumoniamnits'))), "'pneumoniamnist_balanced'"),
    ('001-table1', dict(worlds=dict(Lyme=dict(tokens=dict(stme='x')))), "'stem'"), ('000-table9', dict(tokens=dict(n_trian=1)), "'n_train'")])
def test_data_and_tokens_of_every_world_are_looked_at_before_any_work(id, given, named):
    with pytest.raises(Refused, match=f'did you mean {named}'): plan([id], 'smoke', given)

@pytest.mark.parametrize('id,name', [('001-table1','worlds'), ('003-table1','columns'), ('000-table9','tokens')])
def test_what_must_be_a_table_is_one(id, name):
    with pytest.raises(Refused, match=f'{name} must be a table, not 5'): plan([id], 'smoke', {name: 5})
    if name!='tokens':
        with pytest.raises(Refused, match='FMNIST must be a table, not 5'): plan([id], 'smoke', {name: dict(FMNIST=5)})

def test_a_second_run_computes_nothing(whole):
    rows = whole[0]/FOLDER/'rows.jsonl'
    before = rows.read_bytes()
    assert fedbook(*TABLE, FEDBOOK_FIGURES=whole[0]).returncode==0
    assert rows.read_bytes()==before

def test_killed_in_the_middle_and_run_again(whole, tmp_path):
    "kill -9: finished cells are not computed again, and the result is the same"
    folder = tmp_path/FOLDER
    env = {**os.environ, 'FEDBOOK_FIGURES': str(tmp_path)}
    p = subprocess.Popen([*FEDBOOK, *TABLE], cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    def finished(): return (folder/'rows.jsonl').read_text().splitlines() if (folder/'rows.jsonl').exists() else []
    while len(finished()) < 1 and p.poll() is None: time.sleep(.05)
    p.send_signal(signal.SIGKILL); p.wait()
    time.sleep(3)
    kept = finished()
    assert 1 <= len(kept) < 6 and not (folder/'run.json').exists(), 'its kernel ends with it, and the table is not done'
    assert 'stopped' in fedbook('list', FEDBOOK_FIGURES=tmp_path).stdout
    assert fedbook(*TABLE, FEDBOOK_FIGURES=tmp_path).returncode==0
    assert finished()[:len(kept)]==kept and len(finished())==6
    assert numbers(folder)==numbers(whole[0]/FOLDER)

def test_the_engine_is_no_change_of_the_experiment():
    from fedbook.runner import changed
    asked = dict(profile='laptop', engine='auto', seeds=[0], stand_in={})
    assert changed(asked, dict(engine='stacked'))==dict(asked, engine='stacked')
    assert changed(asked, dict(engine='stacked', seeds=[1]))['stand_in']==dict(changed='seeds = [1]')

def test_what_is_not_the_profiles_never_goes_into_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv('FEDBOOK_FIGURES', str(tmp_path))
    def job(**given): return plan(['000-table6'], 'smoke', given)[0]
    plain = output_folder('000-table6', 'smoke')
    assert job().folder==job(engine='stacked').folder==job(seeds=[0]).folder==plain and job(seeds=[0]).profile=='smoke'
    others = [job(**g) for g in (dict(seeds=[1]), dict(seeds=[2]), dict(rounds=3), dict(rounds=3, seeds=[1]), dict(stand_in={'data': 'none'}))]
    assert len({j.folder for j in (job(), *others)})==6 and all(j.folder.parent==plain.parent and j.parameters['profile']==j.profile==j.folder.name for j in others)
    assert others[-1].parameters['stand_in']['data']=='none'

@pytest.mark.parametrize('change,named', [(dict(rounds=3), "With rounds = 3 this is no run of profile smoke; name it with profile = 'smoke-changed-"), ({}, '')])
def test_a_notebook_that_papermill_runs_without_the_runner(tmp_path, change, named):
    given = [a for k,v in change.items() for a in ('-p', k, str(v))]
    p = subprocess.run([sys.executable, '-m', 'papermill', 'nbs/04_papers/000_ptalos/table06.ipynb', str(tmp_path/'out.ipynb'), *given], cwd=ROOT, capture_output=True, text=True, env={**os.environ, 'FEDBOOK_FIGURES': str(tmp_path/'f')})
    assert (p.returncode!=0 and named in p.stderr and not (tmp_path/'f').exists()) if change else (tmp_path/'f'/'000'/'table6'/'smoke'/'table.md').exists()

@pytest.mark.parametrize('table,fewer', [('001-table1', "values=['FedAvg','FedPer']"), ('002-table4', "strategies=['LP-FT']"), ('004-table4', "algorithms=['FedAvg','FedDyn']"),
    ('000-table9', "skip={released=[5]}")])
def test_fewer_methods_make_a_table_and_its_pictures(tmp_path, table, fewer):
    p = fedbook('reproduce', table, '-p', fewer, FEDBOOK_FIGURES=tmp_path)
    assert p.returncode==0 and len([*tmp_path.glob('*/*/*/figure.png')])==1, p.stdout+p.stderr

def test_classes_of_an_unknown_variant_are_not_left_out_in_silence(tmp_path):
    p = fedbook('reproduce', '000-table9', '-p', "skip={relased=[5]}", FEDBOOK_FIGURES=tmp_path)
    assert p.returncode and "There is no variant 'relased'; did you mean 'released'?" in p.stdout and not [*tmp_path.glob('**/rows.jsonl')], p.stdout+p.stderr

def test_without_rerun_older_code_fills_a_table_and_nothing_is_run(whole, tmp_path):
    from fedbook.experiments import Case, Setting
    folder = tmp_path/FOLDER; folder.mkdir(parents=True)
    def older(r): return dict(r, code='0'*16, fingerprint=Case(r['cell'], Setting(**r['setting']), r['variant']).fingerprint(r['seed'], '0'*16))
    rows = [json.dumps(older(json.loads(l))) for l in (whole[0]/FOLDER/'rows.jsonl').read_text().splitlines()]
    (folder/'rows.jsonl').write_text('\n'.join(rows)+'\n'); before = (folder/'rows.jsonl').read_bytes()
    p = fedbook(*TABLE, '--no-rerun', FEDBOOK_FIGURES=tmp_path)
    assert p.returncode==0 and (folder/'rows.jsonl').read_bytes()==before, p.stdout+p.stderr
    assert 'Nothing is run: 0 of 6 runs are of present code, 6 of older code, 0 are missing.' in (folder/'notebook.ipynb').read_text()
    assert '6 of 6 runs to do' not in p.stdout

def test_a_finished_notebook_does_not_say_where_it_was_made(tmp_path):
    from fedbook.manifest import root
    from fedbook.runner import forget_paths
    nb = tmp_path/'n.ipynb'
    nb.write_text(json.dumps(dict(cells=[dict(outputs=[dict(text=f'{root()}/fedbook/rounds.py:1: SetAside')])], metadata=dict(papermill=dict(input_path='/a/b.ipynb', output_path='/c/.d.ipynb')))))
    forget_paths(nb)
    made = json.loads(nb.read_text())
    assert made['cells'][0]['outputs'][0]['text']=='fedbook/rounds.py:1: SetAside' and made['metadata']['papermill']==dict(input_path='b.ipynb', output_path='d.ipynb')

def test_a_made_notebook_keeps_no_progress_bar(whole):
    text = (whole[0]/FOLDER/'notebook.ipynb').read_text()
    assert 'widget' not in text and '68.65' in text, 'its other outputs are there'

def test_fedbook_alone_says_in_three_lines_where_to_start():
    p = fedbook()
    lines = p.stdout.splitlines()
    assert p.returncode==0 and len(lines)==3 and not p.stderr
    assert [l.split()[1] for l in lines]==['quickstart','list','show']

@pytest.mark.parametrize('columns', [80, 100, 200])
def test_the_list_has_one_row_a_table_and_fits_the_terminal(columns):
    from fedbook.manifest import experiments, PROFILES
    head,*lines = fedbook('list', COLUMNS=columns).stdout.splitlines()
    assert head.split()[-len(PROFILES):]==[*PROFILES]
    assert [l.split()[0] for l in lines if re.match(r'00\d-', l)]==[*experiments()]
    assert max(map(len, [head, *lines])) <= columns

def test_the_list_gives_the_time_of_what_is_done():
    row = next(l for l in fedbook('list', COLUMNS=100, FEDBOOK_FIGURES=ROOT/'figures').stdout.splitlines() if l.startswith('000-table7 '))
    seconds = json.loads((ROOT/'figures'/'000'/'table7'/'laptop'/'provenance.json').read_text())['seconds']
    assert f'✓ {seconds/60:.0f} min' in row

def shown(id, columns, *more): return fedbook('show', id, *more, COLUMNS=columns, FEDBOOK_FIGURES=ROOT/'figures').stdout

def test_a_table_is_shown_with_its_claims_first():
    said = shown('000-table7', 100)
    claim,verdict,table = (said.index(w) for w in ('More classes per client are better', 'released  holds', '35.06'))
    assert said.startswith('Claims') and claim < verdict < table

@pytest.mark.parametrize('id', ['000-table7','002-costs','002-theorem44','003-figure2'])
@pytest.mark.parametrize('columns', [80, 120])
def test_a_table_is_aligned_to_the_terminal(id, columns):
    long = [l for l in shown(id, columns).splitlines() if len(l) > columns and str(ROOT) not in l]
    assert not long and '| --- |' not in shown(id, columns)

def test_a_long_table_is_cut_and_says_how_to_see_all():
    some,all_ = shown('000-table9', 120),shown('000-table9', 120, '--all')
    assert re.search(r'\d+ of \d+ rows are left out. To see all:\n    fedbook show 000-table9 --profile overnight --all', some) and '76.08' not in some
    assert 'left out' not in all_ and '76.08' in all_

def test_a_wide_table_is_shown_in_panels_that_name_their_rows():
    from fedbook.cli import panels
    rows = [['method','level','A','B','C'], *([m, '0', *['61.00 → 60.00 [59.00, 61.00]']*3] for m in ('FedAvg','FedProx'))]
    assert [p[0] for p in panels(rows, 80)]==[['method','level','A','B'], ['method','level','C']]
    assert [p[0] for p in panels(rows, 30)]==[['method','level',k] for k in 'ABC'], 'one column at least'
    assert panels([['a','b'], ['c'*99, 'd'*99]], 80)==[[['a','b'], ['c'*99, 'd'*99]]], 'words are wrapped instead'

def test_nothing_of_a_cell_is_lost_in_a_narrow_terminal():
    from fedbook.cli import aligned
    rows = [['computed twice', '83.7%'], ['a', '100.0%']]
    lines = aligned([['what it is', 'share'], *rows], 15).splitlines()
    assert max(map(len, lines)) <= 15 and {w for r in rows for c in r for w in c.split()} <= set(' '.join(lines).split())

def test_the_quickstart_says_first_how_long_it_takes(monkeypatch, capsys):
    from fedbook import cli, runner
    monkeypatch.setattr(runner, 'reproduce', lambda *a, **kw: print('begun') or [dict(status='FAILED')])
    assert cli.main(['quickstart'])==1
    said,begun = capsys.readouterr().out.splitlines()
    assert re.search(r'about \d+ seconds', said) and begun=='begun'

SLOW = """
k = get_ipython().kernel; answer = k.shell_handlers['kernel_info_request']
async def slow(*a):
    import time
    await answer(*a); time.sleep(1)
k.shell_handlers['kernel_info_request'] = slow
"""

def test_a_kernel_that_still_ends_its_last_message_is_not_interrupted(tmp_path, capfd):
    "The notebook is done; an interrupt would only be reported as an error"
    parameters = new_code_cell('x = 1'); parameters.metadata['tags'] = ['parameters']
    nbformat.write(new_notebook(cells=[parameters, new_code_cell(SLOW)]), tmp_path/'a.ipynb')
    result = run_job(Job('a', 'smoke', tmp_path/'a.ipynb', dict(x=2), tmp_path/'out', 30))
    assert result['status']=='ok' and 'KeyboardInterrupt' not in ''.join(capfd.readouterr())

def test_progress_says_what_runs_and_is_complete_only_when_all_is_done(tmp_path):
    from types import SimpleNamespace
    from fedbook.runner import mark, Watch
    nbformat.write(new_notebook(cells=[new_code_cell('1') for _ in range(10)]), tmp_path/'a.ipynb')
    jobs,said = [Job(i, 'smoke', tmp_path/'a.ipynb', {}, tmp_path/i, 60) for i in ('000-table7','003-table1')],[]
    bar = SimpleNamespace(clear=lambda: None, set_postfix_str=lambda s: setattr(bar, 'words', s))
    watch = Watch(bar, jobs, 1, said.append, pages=5)
    def shown(): watch.show(); return bar.n, bar.total, bar.words
    def tell(job, **p): (job.folder/'progress.json').write_text(json.dumps(p))
    def execute(job, n): nbformat.write(new_notebook(cells=[new_code_cell('1', metadata=dict(papermill=dict(status='completed' if i < n else 'pending'))) for i in range(10)]), job.folder/'.1.running.ipynb')
    for j in jobs: j.folder.mkdir(); mark(j, 'waiting')
    watch.begins(); assert said==['2 tables to make, at least 25 s left'] # ten for each, and five for the pages
    assert shown()==(0, 26, 'at least 25 s left; 2 to begin')
    mark(jobs[0], 'starting its kernel'); assert shown()[2]=='at least 25 s left; 000-table7: starting its kernel; 1 to begin'
    execute(jobs[0], 4); assert shown()==(4, 26, 'at least 21 s left; 000-table7 cell 5 of 10; 1 to begin')
    (jobs[0].folder/'.1.running.ipynb').write_text('{'); assert shown()[0]==4, 'papermill is writing'
    tell(jobs[0], done=2, total=24, left=0, todo=22, expected=0, now='timing a step of each method'); execute(jobs[0], 5)
    assert shown()[2]=='at least 20 s left; 000-table7 cell 6 of 10: timing a step of each method; 1 to begin' and len(said)==1, 'what it costs is not known yet'
    tell(jobs[0], done=3, total=24, left=790, todo=22, expected=900, now='FedProx, 5')
    assert shown()==(8, 50, 'at least 13 min left; 000-table7 run 4 of 24: FedProx, 5; 1 to begin') and said[1:]==['000-table7   22 of 24 runs to do, about 15 min; at least 13 min left in all']
    os.utime(jobs[0].folder/'progress.json', (time.time()-750,)*2); assert 'at least 60 s left' in shown()[2]
    tell(jobs[0], done=24, total=24, left=0, todo=22, expected=900, now=''); execute(jobs[0], 8)
    assert shown()==(32, 50, 'at least 17 s left; 000-table7 cell 9 of 10: drawing; 1 to begin')
    (jobs[0].folder/'.1.running.ipynb').unlink(); watch.ends(dict(id='000-table7', status='ok', seconds=30., error=''))
    assert shown()==(34, 50, 'about 35 s left; 1 to begin') and len(said)==3, 'the other will take as long'
    tell(jobs[1], done=1, total=9, left=0, todo=8, expected=0, now='') # made without running
    shown(); assert said[3:]==['003-table1   8 of 9 runs are missing; about 15 s left in all']
    watch.ends(dict(id='003-table1', status='FAILED', seconds=9., error='no')); assert shown()==(53, 59, 'about 5 s left')
    watch.writes(0, 5); assert bar.n==53 and bar.words.endswith('writing the page: notebook 1 of 5')
    watch.began -= 40; watch.writes(2, 5); assert bar.words.startswith('about 61 s left'), 'at the pace of the first two'
    watch.writes(5, 5); assert bar.n==58 < bar.total; watch.finish(); assert bar.n==bar.total and not bar.words

def test_a_notebook_without_runs_is_expected_to_take_as_long_again(tmp_path):
    from fedbook.runner import Stand
    unknown = dict(done=0, total=0, left=0, todo=0, expected=0, now='starting its kernel')
    assert [Stand(None, unknown, age, (done, 10)).left() for age,done in ((0, 0), (5, 5), (80, 5))]==[10, 5, 40]

def test_a_table_whose_runs_are_there_says_so():
    from fedbook.runner import to_do
    assert to_do(dict(todo=0, total=9, expected=0))=='all 9 runs are there'

def test_a_table_of_hours_is_not_ended_by_the_timeout_of_a_table_of_minutes(monkeypatch):
    monkeypatch.setattr(runner, 'check_values', lambda given: None)
    night,day = (plan(['002-table2'], p)[0].timeout for p in ('overnight','laptop'))
    assert night==24*3600 > day

@pytest.mark.parametrize('words', ['list', 'queue', 'show 000-table6'])
def test_what_only_tells_needs_no_torch(words):
    code = f"import sys; from fedbook.cli import main; main({words.split()}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, '-c', code], capture_output=True).returncode==0
