"A stored cell, run again."
import json
import pytest
from fedbook.errors import Refused
from fedbook.experiments import Case, run_case, Setting
from fedbook.manifest import output_folder
from fedbook.recreate import again, cells_of, chosen, compared, recreate
from fedbook.results import append, read
from test_cli import fedbook, refused

def stored(seed, **cell):
    s = Setting('fashion_mnist_mini', protocol=dict(rounds=cell['rounds'], per_round=2))
    return run_case(Case(cell, s), [seed], paper='000', table='000-table6', profile='smoke', stand_in={})[0]

@pytest.fixture
def rows(tmp_path, monkeypatch):
    monkeypatch.setenv('FEDBOOK_FIGURES', str(tmp_path))
    path = output_folder('000-table6', 'smoke')/'rows.jsonl'
    for rounds in (1, 2):
        for seed in (0, 1): append(path, stored(seed, rounds=rounds, algorithm='FedAvg'))
    return path

def rewrite(path, change):
    records = read(path)
    path.unlink()
    for r in records: append(path, change(r))

def test_the_command_line_says_the_same_and_writes_nothing(rows):
    before = {p: p.read_bytes() for p in rows.parents[3].rglob('*') if p.is_file()}
    p = fedbook('recreate', '000-table6', '--cell', 'rounds=2')
    assert p.returncode==0, p.stderr
    assert 'rounds 2, algorithm FedAvg (intended), seeds 0, 1' in p.stdout and p.stdout.count('the same')==2
    assert {p: p.read_bytes() for p in rows.parents[3].rglob('*') if p.is_file()}==before

def test_the_first_seeds_alone(rows):
    p = fedbook('recreate', '000-table6', '--cell', 'rounds=2', '--seeds', '1')
    assert p.returncode==0 and 'seeds 0;' in p.stdout and p.stdout.count('the same')==2

def test_few_seeds_are_set_beside_the_same_seeds_and_the_interval_keeps_its_width():
    "Means of 1 and 3 have the interval 2 ± 12.7; about the first alone it is 1 ± 12.7"
    def run(v): return dict(rows=[[1, None, 'accuracy', v]], setting={})
    old = [run(1.), run(3.)]
    assert compared(old, [run(13.)])[1:]==[['accuracy', '1 [-11.71, 13.71]', '13', 'inside']]
    assert compared(old, [run(14.)])[1:]==[['accuracy', '1 [-11.71, 13.71]', '14', 'outside']]
    assert compared(old, old)[1:]==[['accuracy', '2 [-10.71, 14.71]', '2', 'the same']]

def test_other_numbers_are_found_out(rows):
    rewrite(rows, lambda r: {**r, 'rows': [[*v[:3], v[3]+1000*(v[2]=='accuracy')] for v in r['rows']]})
    p = fedbook('recreate', '000-table6')
    assert p.returncode==1 and 'outside' in p.stdout

@pytest.mark.parametrize('args,named', [(['--cell', 'round=2'], "'rounds'"), (['--cell', 'rounds=3'], '2'), (['--cell', 'rounds'], 'NAME=VALUE'), (['--profile', 'laptop'], 'no stored runs of profile laptop'),
    (['--profile', 'labtop'], 'laptop'), (['--seeds', '3'], 'at most 2'), (['--seeds', '0'], 'at least 1')])
def test_bad_input_is_one_sentence(rows, args, named): assert named in refused(fedbook('recreate', '000-table6', *args))

def test_coordinates_that_no_cell_has_together(rows):
    append(rows, stored(0, rounds=3, algorithm='FedProx'))
    with pytest.raises(Refused, match='FedAvg'): chosen(cells_of(read(rows)), dict(rounds='2', algorithm='FedProx'))

def test_older_code_does_not_count(rows):
    rewrite(rows, lambda r: {**r, 'code': '0'*16})
    with pytest.raises(Refused, match='older code'): recreate('000-table6')

def test_a_setting_stored_before_it_had_later_stages_counts(rows):
    rewrite(rows, lambda r: {**r, 'setting': {k: v for k,v in r['setting'].items() if k!='after'}})
    assert [f[3] for f in recreate('000-table6')[1:]]==['the same']*2

def test_other_data_are_refused(rows):
    record = read(rows)[0]
    with pytest.raises(Refused, match='fashion_mnist_mini'): again({**record, 'fingerprint': '0'*16})

def test_of_several_runs_of_a_seed_the_newest_counts(rows):
    old = read(rows)[0]
    append(rows, {**old, 'fingerprint': 'f'*16, 'when': '2000-01-01T00:00:00Z'})
    assert [[r['fingerprint'] for r in runs] for runs in cells_of(read(rows)).values()][0][0]==old['fingerprint']

def test_the_quickest_cell_is_taken(rows):
    rewrite(rows, lambda r: {**r, 'seconds': 1 if r['cell']['rounds']==2 else 2})
    assert chosen(cells_of(read(rows)), {})[0]['cell']['rounds']==2
