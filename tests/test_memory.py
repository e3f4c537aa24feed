"What clients remember survives wherever it is kept, and a kill at any moment."
from dataclasses import replace
import os
import pytest, torch
from fedbook import memory
from fedbook.engines import Processes, stacked, Traced
from fedbook.errors import Refused
from fedbook.experiments import federation as experiment, Setting
from fedbook.memory import mapped, Memory, read_back, written
from fedbook.rounds import run
from fedbook.tensors import flatten, in_order, load, save
import fedbook.rounds as R
from test_rounds import federation, fitting, Killed, mlp, Remembers, same

def tree(x, n=100): return dict(own=dict(w=torch.full((n,), float(x)), n=torch.tensor(x)), seen=dict(b=torch.full((2, 3), float(x), dtype=torch.bfloat16)))
def first(memory, c): return memory[c]['own']['w'][0].item()
def files(folder): return sorted(p for p in folder.rglob('*') if p.is_file())

@pytest.mark.parametrize('bound', [0, 2000, 2**26])
def test_a_memory_is_a_dict_that_does_not_change(tmp_path, monkeypatch, bound):
    monkeypatch.setattr(memory, 'IN_RAM', bound)
    rng,now,all_of_them = torch.Generator().manual_seed(0),Memory(tmp_path),[]
    plain = {}
    for r in range(30):
        some = torch.randperm(12, generator=rng)[:4].tolist()
        new = {str(i): tree(100*r+i, 100 if i%3 else 7) for i in some} | {'99': {}}
        now,plain = now.after(new),{**plain, **new}
        all_of_them.append((now, plain))
    for m,p in all_of_them: # the older ones are what they were
        assert list(m)==list(p) and '7777' not in m and m.of(['7777'])==[None]
        assert all(same(dict(m[c]), p[c]) and m[c].keys()==p[c].keys() for c in p)
        clients = list(p)[::-1]
        assert all(same(a, p[c]) for c,a in zip(clients, m.of(clients)))

def test_rows_are_used_again():
    now = Memory()
    for r in range(50): now = now.after({str(i): tree(r) for i in range(r%3, 9, 3)})
    assert [s.length for s in now.stacks.values()] <= [24] and len(now)==9

def test_what_was_picked_or_put_is_a_copy():
    given = tree(1)
    now = Memory().after({'0': given})
    given['own']['w'].zero_(); picked = now['0']; picked['own']['w'].fill_(9)
    assert first(now, '0')==1
    later = now.after({'0': tree(2)}); del now
    later = later.after({'1': tree(3)})
    assert picked['own']['w'][0]==9 and first(later, '0')==2 and first(later, '1')==3

@pytest.mark.parametrize('bound', [0, 2**26])
def test_a_memory_is_read_back_from_a_checkpoint(tmp_path, monkeypatch, bound):
    monkeypatch.setattr(memory, 'IN_RAM', bound)
    now = Memory(tmp_path/'m').after({str(i): tree(i) for i in range(5)}).after({'3': tree(33), '8': {}})
    save(dict(m=written(now)), tmp_path/'a.safetensors')
    later = now.after({'1': tree(11), '9': tree(9)}) # written before the run was killed, after the checkpoint
    again = read_back(load(tmp_path/'a.safetensors')[0]['m'], tmp_path/'m')
    assert set(again)==set(now) and all(same(again[c], now[c]) for c in now) and first(later, '1')==11
    new = again.after({'1': tree(12), '7': tree(7)})
    assert all(same(again[c], now[c]) for c in now) and (first(new, '1'), first(new, '7'), first(new, '3'))==(12, 7, 33)

@pytest.mark.parametrize('harm', ['gone', 'short'])
def test_a_checkpoint_without_its_files_is_refused(tmp_path, monkeypatch, harm):
    monkeypatch.setattr(memory, 'IN_RAM', 0)
    fed = federation(fitting('fedas'), rounds=2, module=mlp(blocks=True))
    with pytest.raises(Killed): run(fed, tmp_path/'run.part', on_round=killed_at(1))
    path = files(tmp_path/'run.memory')[0]
    if harm=='gone': path.unlink()
    else: os.truncate(path, 3)
    with pytest.raises(Refused, match=f'cannot be read .*{path.name} is missing or shorter than .*delete it to start the run again'): run(fed, tmp_path/'run.part')

def killed_at(last):
    def on_round(r):
        if r==last: raise Killed
    return on_round

@pytest.mark.parametrize('share', [0, .5])
@pytest.mark.parametrize('name', ['fedala','moon','fedas','fedspu','remembers'])
def test_a_run_with_memories_in_files_equals_one_without(tmp_path, monkeypatch, name, share):
    fed = federation(Remembers() if name=='remembers' else fitting(name), rounds=5, module=mlp(blocks=True))
    whole,rows = run(fed)
    bound = share*sum(t.nbytes for t in flatten(whole['memory']).values())
    monkeypatch.setattr(memory, 'IN_RAM', bound)
    for at in (tmp_path/'run.part', None):
        state,rows_f = run(fed, at)
        assert same(whole, state) and rows==rows_f
        in_RAM = sum(s.length*s.row_bytes for s in state['memory'].stacks.values() if not s.in_files)
        assert in_RAM <= bound and any(s.in_files for s in state['memory'].stacks.values())

@pytest.mark.parametrize('moment', ['server_round','save','after'])
@pytest.mark.parametrize('last', [1, 2, 4])
def test_a_kill_at_any_moment_leaves_a_checkpoint_with_its_rows(tmp_path, monkeypatch, moment, last):
    fed = federation(fitting('fedas'), rounds=5, module=mlp(blocks=True))
    whole,rows = run(fed)
    monkeypatch.setattr(memory, 'IN_RAM', 0)
    calls,f = [],getattr(R, moment, None)
    def until(*a, **k):
        result = f(*a, **k) if moment=='server_round' else None # rows have been put, and nothing names them yet
        calls.append(0)
        if len(calls)==last: raise Killed
        return result or f(*a, **k)
    if f: monkeypatch.setattr(R, moment, until)
    with pytest.raises(Killed): run(fed, tmp_path/'run.part', on_round=killed_at(last if moment=='after' else None))
    if f: monkeypatch.setattr(R, moment, f)
    done = []
    again,rows_a = run(fed, tmp_path/'run.part', on_round=done.append)
    assert done==list(range(last+(moment=='after'), 6)) and same(whole, again) and rows==rows_a
    assert len(files(tmp_path/'run.memory'))==len(flatten(again['memory']['0']))

@pytest.mark.parametrize('engine', [stacked, Traced, lambda: Processes(2)])
def test_engines_find_what_is_in_files(tmp_path, monkeypatch, engine):
    fed = federation(Remembers(), rounds=4, module=mlp())
    whole = run(fed, engine=engine())[0]
    monkeypatch.setattr(memory, 'IN_RAM', 0)
    assert same(whole, run(fed, tmp_path/'run.part', engine())[0]) and files(tmp_path/'run.memory')

def test_a_checkpoint_holds_what_is_in_RAM_only(tmp_path, monkeypatch):
    fed = federation(fitting('fedas'), rounds=3, per_round=4, module=mlp(blocks=True))
    run(fed, tmp_path/'all.part')
    monkeypatch.setattr(memory, 'IN_RAM', 0)
    run(fed, tmp_path/'some.part')
    model = sum(t.nbytes for t in fed.net.weights().values())
    assert (tmp_path/'all.part').stat().st_size - (tmp_path/'some.part').stat().st_size > 3*model
    assert files(tmp_path/'some.memory') and not (tmp_path/'all.memory').exists()

def test_who_keeps_nothing_gets_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, 'IN_RAM', 0)
    now = Memory(tmp_path/'m').after({'0': {}, '1': dict(w=torch.ones(5))})
    assert now['0']=={} and len(files(tmp_path/'m'))==1
    assert len(Memory(tmp_path/'n').after({'0': {}, '1': {}}))==2 and not (tmp_path/'n').exists()

def test_buffers_that_stay_local_are_kept_in_the_same_way(tmp_path, monkeypatch):
    fed = federation(module=mlp(bn=True), rounds=3, buffers='local')
    whole = run(fed)[0]
    monkeypatch.setattr(memory, 'IN_RAM', 0)
    with pytest.raises(Killed): run(fed, tmp_path/'run.part', on_round=killed_at(2))
    assert same(whole, run(fed, tmp_path/'run.part')[0]) and files(tmp_path/'run.memory'/'client_buffers') and not (tmp_path/'run.memory'/'memory').exists()

def test_a_full_disk_is_said_before_anything_is_put(tmp_path, monkeypatch):
    def full(f, n): raise OSError(28, 'No space left on device')
    monkeypatch.setattr(memory, 'reserve', full)
    with pytest.raises(Refused, match=f'Cannot write {tmp_path}.*No space left on device'): mapped(tmp_path/'a', (4,), torch.float32)

def test_files_grow_where_the_system_cannot_reserve(tmp_path, monkeypatch):
    monkeypatch.delattr(os, 'posix_fallocate', raising=False)
    mapped(tmp_path/'a', (3,), torch.float32).fill_(1)
    assert mapped(tmp_path/'a', (5,), torch.float32).tolist()==[1, 1, 1, 0, 0] and mapped(tmp_path/'a', (2,), torch.float32).tolist()==[1, 1]
    assert (tmp_path/'a').stat().st_size==20 # never shortened

def test_clients_of_a_stack_are_read_without_a_copy_of_each():
    fed = federation(Remembers(), rounds=1, per_round=4, module=mlp())
    state = run(fed)[0]
    trees = state['memory'].of(['0', '1', '2', '3'])
    leaf = [next(iter(flatten(t).values())) for t in trees]
    assert len({t._base.data_ptr() for t in leaf})==1 and leaf[0]._base.shape[0]==4

def convolutions(name):
    "A small run of the network of the FedCSPACK paper"
    fed = experiment(Setting('fashion_mnist_mini', partition=dict(name='dirichlet', n_clients=10, alpha=.5, min_size=8), model=dict(name='cnn_fedcspack_fmnist'), method=dict(name=name),
        protocol=dict(rounds=3, per_round=9), local=dict(batch_size=32)))
    return replace(fed, data=replace(fed.data, clients=[c[:64] for c in fed.data.clients], test=tuple(t[:100] for t in fed.data.test), validation=None))

@pytest.mark.parametrize('name', ['fedas','fedala','moon','fedspu','fedcspack'])
def test_a_resumed_run_of_convolutions_rounds_as_an_unbroken_one(tmp_path, name):
    "Sums depend on how kernels lie in memory, which a file does not keep"
    fed = convolutions(name)
    whole = run(fed)
    with pytest.raises(Killed): run(fed, tmp_path/'run.part', on_round=killed_at(2))
    again = run(fed, tmp_path/'run.part')
    assert same(whole[0], again[0]) and whole[1]==again[1]
    for state in (whole[0], again[0]): assert all(t.stride()==in_order(t).stride() for t in flatten(state).values())

def test_a_kind_of_tree_that_nobody_keeps_any_more_takes_no_memory(monkeypatch):
    now = Memory()
    for n in range(1, 40): now = now.after({'0': tree(1, n), '1': tree(2, n)})
    assert len(now.stacks) <= 2 and first(now, '1')==2
    monkeypatch.setattr(memory, 'IN_RAM', 10_000)
    now = now.after({'2': tree(3, 10_000)}).after({'3': tree(4, 5)}) # what is in files leaves the RAM to others
    assert sorted((s.row_bytes > 10_000, s.in_files) for s in now.stacks.values())==[(False, False), (False, False), (True, True)]
