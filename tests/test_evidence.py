"What a paper notebook shows at its head."
from functools import cache
import io, json, re
from pathlib import Path
import matplotlib.pyplot as plt, pytest
from PIL import Image
from fedbook.claims import verdicts
from fedbook.errors import Refused
from fedbook.evidence import committed, Evidence, small
from fedbook.experiments import code_fingerprint, equivalent_codes, Setting, user_code
from fedbook.manifest import experiments, looked, remark
from fedbook.partition import SCHEMES
from fedbook.results import notes_of, read
import fedbook.unchanged # models of which rows speak

NOTEBOOKS = Path(__file__).resolve().parents[1]/'nbs'

@pytest.fixture
def figures(tmp_path, monkeypatch):
    monkeypatch.setenv('FEDBOOK_FIGURES', str(tmp_path)); monkeypatch.delenv('FEDBOOK_REPRODUCES', raising=False)
    return tmp_path

def displayed(e, monkeypatch):
    found = []
    monkeypatch.setattr('IPython.display.display', lambda x: found.append((type(x).__name__, getattr(x, 'data', x))))
    e._ipython_display_()
    return found

def run(figures, profile):
    folder = figures/'000'/'table7'/profile
    folder.mkdir(parents=True)
    (folder/'claims.md').write_text('holds'); (folder/'table.html').write_text(f'<p>{profile}</p>')
    figure,ax = plt.subplots(); ax.plot([1, 2]); figure.savefig(folder/'figure.png'); plt.close(figure)
    return folder

def test_the_highest_profile_verdicts_first(figures, monkeypatch):
    for p in ('smoke','overnight','laptop'): run(figures, p)
    found = displayed(committed('000-table7'), monkeypatch)
    assert [k for k,_ in found]==['Markdown','Markdown','Image','HTML'] and found[1][1]=='holds' and found[3][1]=='<p>overnight</p>'

def test_a_smoke_run_is_no_evidence(figures, monkeypatch):
    run(figures, 'smoke')
    (_,text), = displayed(committed('000-table7'), monkeypatch)
    assert 'fedbook reproduce 000-table7 --profile laptop' in text

def test_a_picture_alone_is_evidence(figures, monkeypatch):
    (run(figures, 'laptop')/'table.html').unlink()
    assert [k for k,_ in displayed(committed('000-table7'), monkeypatch)][:3]==['Markdown','Markdown','Image']

def test_a_second_picture_follows_the_first(figures, monkeypatch):
    folder = run(figures, 'laptop'); (folder/'epochs').mkdir()
    Image.new('RGB', (70, 20), 'red').save(folder/'epochs'/'figure.png')
    found = [Image.open(io.BytesIO(d)).size for k,d in displayed(committed('000-table7'), monkeypatch) if k=='Image']
    assert len(found)==2 and found[1]==(70, 20)

def test_a_run_of_its_own_does_not_show_an_older_one(figures, monkeypatch):
    run(figures, 'laptop'); monkeypatch.setenv('FEDBOOK_REPRODUCES', '1')
    assert len(displayed(committed('000-table7'), monkeypatch))==1

def test_an_unknown_table():
    with pytest.raises(Refused, match='000-table7'): committed('000-tabel7')

def test_a_small_picture(figures):
    png = run(figures, 'laptop')/'figure.png'
    assert small(png)[:4]==b'\x89PNG' and len(small(png)) < png.stat().st_size

# ---- what somebody who has looked says

STORED = sorted((f'{p.parts[-4]}-{p.parts[-3]}', p.parts[-2]) for p in (NOTEBOOKS.parent/'figures').glob('*/*/*/claims.csv'))
HAVE_RUN = sorted({id for id,profile in STORED if profile in ('laptop','overnight')} & {
    i for i,e in experiments().items() if '04_papers' in e.notebook})

def notes_on_runs(table): return set(re.findall(r'^- (Profile \w+; \d+ runs.*|Device: .*)$', table.read_text(), re.M))
TABLES = [t for t in sorted((NOTEBOOKS.parent/'figures').glob('*/*/*/table.md')) if t.parent.name!='smoke' and notes_on_runs(t)]

def test_most_stored_tables_say_something_of_their_runs(): assert len(TABLES) > 50

@pytest.mark.parametrize('table', TABLES, ids=lambda t: '-'.join(t.parts[-4:-1]))
def test_a_stored_table_says_of_its_runs_what_the_code_says_now(table):
    assert notes_on_runs(table) <= set(notes_of(json.loads((table.parent/'provenance.json').read_text())))

def runs_in(id, profile): return set(json.loads((NOTEBOOKS.parent/'figures'/id.replace('-', '/')/profile/'provenance.json').read_text())['runs'])

@pytest.mark.parametrize('profile', ['laptop','overnight'])
@pytest.mark.parametrize('figure', ['004-figure4','004-figure5'])
def test_a_figure_of_other_tables_has_all_their_runs(figure, profile):
    assert runs_in(figure, profile)==set().union(*(runs_in(f'004-table{i}', profile) for i in (4,5,6)))

@pytest.mark.parametrize('id', HAVE_RUN)
def test_each_tested_table_has_been_looked_at(id):
    found = committed(id).folder.name
    assert remark(id, found), f'look at the rows of {found} and say what to believe, in assets/looked.toml'
    assert not remark(id, 'smoke') and len(remark(id, found).split()) >= 30

@pytest.mark.parametrize('id', looked())
def test_a_remark_is_about_a_table_and_repeats_no_number(id):
    experiments()[id].parameters(looked()[id]['profile'])
    assert not re.search(r'[+-]?\d+\.\d|\d %|[`*]', looked()[id]['text'].replace('0.4 million', '')), 'numbers stand in the table; this text would not change with them'

def test_a_remark_stands_below_the_table_of_its_profile_only(figures, monkeypatch):
    monkeypatch.setitem(looked(), '000-table7', dict(profile='laptop', text='Believe\nit.'))
    run(figures, 'laptop')
    assert displayed(committed('000-table7'), monkeypatch)[-1]==('Markdown', '**After looking.** Believe it.')
    run(figures, 'overnight')
    assert displayed(committed('000-table7'), monkeypatch)[-1][0]=='HTML'

def test_what_makes_missing_evidence_is_a_profile_that_the_table_has():
    for id,e in experiments().items():
        profile = Evidence(id, None).words().split('--profile ')[1].rstrip('`.')
        assert profile!='smoke' and profile in e.profiles, f'{id}: {profile}'

# ---- rows and the present code

WITH_ROWS = [p for p in sorted((NOTEBOOKS.parent/'figures').glob('*/*/*/rows.jsonl')) if p.parent.name!='smoke' and p.with_name('provenance.json').exists()]

@cache
def present(name, *user_code): return set(equivalent_codes(code_fingerprint(name, *user_code)))

def is_older(row):
    s = Setting(**row['setting'])
    if s.partition['name'] not in SCHEMES: return False # of its notebook, which alone can tell
    return row['code'] not in present(s.method['name'], *user_code(s))

@pytest.mark.parametrize('rows', WITH_ROWS, ids=lambda p: '-'.join(p.parts[-4:-1]))
def test_a_stored_table_knows_which_of_its_runs_are_of_older_code(rows):
    "Code that changes asks for `fedbook unchanged`, or for its tables to be made again"
    about = json.loads(rows.with_name('provenance.json').read_text())
    assert sum(map(is_older, (r for r in read(rows) if r['fingerprint'] in about['runs'])))==about.get('older', 0)

# ---- verdicts and the present rules

OF_ALL_RUNS = re.compile(r"= verdicts\((?:table|'[^']+'), (?:records|list\(filter\(known\.counts, records\)\))\)")
REPEATS = '001-table9' # repeats a measurement of time under one seed
WHOLE = [(id, profile) for id,profile in STORED if id!=REPEATS and OF_ALL_RUNS.search((NOTEBOOKS/experiments()[id].notebook).read_text())]

def test_verdicts_that_follow_from_rows_alone():
    assert {id for id,_ in WHOLE} == {*(f'000-table{n}' for n in range(4, 11)),'001-figure2','002-table2','002-table3','002-table4','002-table8'}

@pytest.mark.parametrize('id,profile', WHOLE)
def test_stored_verdicts_follow_the_present_rules(id, profile):
    "A rule that changes asks for its tables to be made again"
    folder = NOTEBOOKS.parent/'figures'/Path(*id.split('-'))/profile
    seeds = experiments()[id].parameters(profile)['seeds']
    runs = {(r['variant'], json.dumps(r['cell']), r['seed']): r for r in map(json.loads, (folder/'rows.jsonl').read_text().splitlines()) if r['seed'] in seeds} # the last of a cell counts
    assert verdicts(id, list(runs.values())).frame.to_csv(index=False)==(folder/'claims.csv').read_text()
