"What clients remember survives wherever it is kept, and a kill at any moment."
import pytest, torch
from fedbook import memory
from fedbook.engines import Processes, stacked
from fedbook.memory import ELSEWHERE, put_away, recalled, sweep
from fedbook.method import methods
from fedbook.rounds import client_view, run
from fedbook.tensors import flatten
import fedbook.rounds as R
from test_rounds import federation, fitting, Killed, mlp, Remembers, same

def everything(state): return dict(state, memory={i: recalled(m) for i,m in state['memory'].items()})

@pytest.mark.parametrize('share', [0, .5])
@pytest.mark.parametrize('name', ['fedala','moon','fedas','fedspu','remembers'])
def test_a_run_with_memories_in_files_equals_one_without(tmp_path, monkeypatch, name, share):
    fed = federation(Remembers() if name=='remembers' else fitting(name), rounds=5, module=mlp(blocks=True))
    whole,rows = run(fed)
    bound = share*sum(t.nbytes for t in flatten(whole['memory']).values())
    monkeypatch.setattr(memory, 'IN_RAM', bound)
    state,rows_f = run(fed, tmp_path/'run.part')
    assert same(whole, everything(state)) and rows==rows_f
    away = [m for m in state['memory'].values() if ELSEWHERE in m]
    assert len(away)==len(state['memory']) if not share else away
    assert sum(t.nbytes for k,t in flatten(state['memory']).items() if ELSEWHERE not in k) <= bound

@pytest.mark.parametrize('moment', ['put_away','save','sweep'])
@pytest.mark.parametrize('last', [1, 2, 4])
def test_a_kill_at_any_moment_leaves_a_checkpoint_with_its_files(tmp_path, monkeypatch, moment, last):
    fed = federation(fitting('fedas'), rounds=5, module=mlp(blocks=True))
    whole,rows = run(fed)
    monkeypatch.setattr(memory, 'IN_RAM', 0)
    calls,f = [],getattr(R, moment)
    def until(*a, **k):
        calls.append(0)
        if len(calls)==last: raise Killed
        return f(*a, **k)
    monkeypatch.setattr(R, moment, until)
    with pytest.raises(Killed): run(fed, tmp_path/'run.part')
    monkeypatch.setattr(R, moment, f)
    done = []
    again,rows_a = run(fed, tmp_path/'run.part', on_round=done.append)
    assert done==list(range(last+(moment=='sweep'), 6)) and same(whole, everything(again)) and rows==rows_a
    assert {p.name for p in (tmp_path/'run.memory').iterdir()}=={memory.file_of(m).name for m in again['memory'].values() if m}

@pytest.mark.parametrize('engine', [stacked, lambda: Processes(2)])
def test_engines_find_what_is_in_files(tmp_path, monkeypatch, engine):
    fed = federation(Remembers(), rounds=4, module=mlp())
    whole = run(fed)[0]
    monkeypatch.setattr(memory, 'IN_RAM', 0)
    assert same(whole['memory'], everything(run(fed, tmp_path/'run.part', engine())[0])['memory'])

def test_a_checkpoint_holds_what_is_in_RAM_only(tmp_path, monkeypatch):
    fed = federation(fitting('fedas'), rounds=3, per_round=4, module=mlp(blocks=True))
    run(fed, tmp_path/'all.part')
    monkeypatch.setattr(memory, 'IN_RAM', 0)
    run(fed, tmp_path/'some.part')
    model = sum(t.nbytes for t in fed.net.weights().values())
    assert (tmp_path/'all.part').stat().st_size - (tmp_path/'some.part').stat().st_size > 3*model
    assert len(list((tmp_path/'some.memory').iterdir()))==4 and not (tmp_path/'all.memory').exists()

def test_who_keeps_nothing_gets_no_file(tmp_path):
    kept = put_away({'0': {}, '1': dict(w=torch.ones(5))}, {}, tmp_path/'m', 1, bound=0)
    assert kept['0']=={} and [p.name for p in (tmp_path/'m').iterdir()]==['1.1.safetensors'] and recalled({})=={} and recalled(None) is None
