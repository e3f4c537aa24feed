"What the notebooks of the LP-FT paper share: distortion measured after a run, runs borrowed from another table, and a run beside the global model at which it began."
import pytest
from fedbook.chapters.lpft import before_and_after, borrow, personalised, with_distortion
from fedbook.experiments import Case, run_cases
from fedbook.results import value_of

SMALL = dict(world='corrupted clothes', model=dict(name='mlp', hidden=[8]), clients=3, rounds=1, epochs=2, test=20, cross=20)
ABOUT = dict(paper='002', table='x', profile='smoke', stand_in={})
def case(strategy, **more): return Case(dict(strategy=strategy), personalised(strategy, **SMALL, **more))

def test_distortion_is_added_to_the_last_round_and_changes_nothing_else(tmp_path):
    cases = [case('FT'), case('LP')]
    plain,more = run_cases(cases, [0], tmp_path/'a', engine='one_by_one', **ABOUT),run_cases(cases, [0], tmp_path/'b', engine='one_by_one', around=with_distortion, **ABOUT)
    for a,b in zip(plain, more):
        assert a['fingerprint']==b['fingerprint'] and a['rows']==[r for r in b['rows'] if not r[2].startswith('distortion')]
        assert [(r,i,m) for r,i,m,_ in b['rows'][-6:]]==[(3, i, f'distortion_{k}') for i in range(3) for k in ('own','all')]
    assert value_of(more[0], 'distortion_own') > 0 and value_of(more[1], 'distortion_own')==0

def test_borrowed_runs_are_not_run_again_and_have_new_coordinates(tmp_path, monkeypatch):
    first, = run_cases([case('Sparse FT')], [0], tmp_path/'table', **ABOUT)
    mine = [Case(dict(panel='b', at=.9), case('Sparse FT', method=dict(sparsity=.9)).setting), Case(dict(panel='b', at=.5), case('Sparse FT', method=dict(sparsity=.5)).setting)]
    assert borrow(mine, [0, 1], tmp_path/'figure', tmp_path/'table', **ABOUT)==1 and borrow(mine, [0, 1], tmp_path/'figure', tmp_path/'table', **ABOUT)==0
    monkeypatch.setenv('FEDBOOK_RERUN', '0')
    found = run_cases(mine, [0, 1], tmp_path/'figure', **ABOUT)
    assert [(r['cell'], r['rows'], r.get('older')) for r in found]==[(dict(panel='b', at=.9), first['rows'], None)]
    assert borrow(mine, [0], tmp_path/'other', tmp_path/'nowhere', **ABOUT)==0

def test_a_run_begins_with_local_and_global_equal(tmp_path):
    r, = run_cases([case('FT')], [0], tmp_path, **ABOUT)
    before,after = before_and_after(r)
    assert value_of(before, 'cross_local')==value_of(before, 'cross_global')==pytest.approx(sum(v for k,_,m,v in r['rows'] if k==1 and m=='client_accuracy')/3)
    assert after['rows']==r['rows'] and (before['cell']['when'], after['cell']['when'])==('global model','fine-tuned')
