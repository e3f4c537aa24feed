"Nothing half-written, one writer at a time, and fingerprints that change when they should."
import multiprocessing as mp, os, signal, time
import pytest
from fedbook.errors import Refused
from fedbook.files import fingerprint, locked, writing

@pytest.fixture
def path(tmp_path): return tmp_path/'folder'/'rows.jsonl'

def test_a_failure_leaves_the_old_file(path):
    with writing(path) as part: part.write_text('old')
    with pytest.raises(RuntimeError):
        with writing(path) as part: part.write_text('half'); raise RuntimeError
    assert path.read_text()=='old' and os.listdir(path.parent)==['rows.jsonl']

def test_who_reads_while_it_is_written_reads_the_old_file(path):
    with writing(path) as part: part.write_text('old')
    with open(path) as reader:
        with writing(path) as part: part.write_text('new')
        assert reader.read()=='old' and path.read_text()=='new'

def test_nowhere_to_write(tmp_path):
    (tmp_path/'file').write_text('')
    for act in (writing, locked):
        with pytest.raises(Refused, match='Cannot write'):
            with act(tmp_path/'file'/'rows.jsonl') as part: part.write_text('')

@pytest.mark.parametrize('a,b', [(dict(x=1), dict(x=2)), (['ab'], ['a','b']), ('1', 1), (b'a', 'a'), (dict(x=None), dict(x=0))])
def test_fingerprints_differ(a, b): assert fingerprint(a)!=fingerprint(b)

def hold(path, told):
    with locked(path): told.set(); time.sleep(60)

def test_lock_names_its_holder_and_dies_with_it(path):
    fork = mp.get_context('fork')
    told = fork.Event()
    p = fork.Process(target=hold, args=(path, told)); p.start()
    assert told.wait(20)
    with pytest.raises(Refused, match=f'process {p.pid};'):
        with locked(path, timeout=.1): pass
    os.kill(p.pid, signal.SIGKILL); p.join()
    path.with_name('rows.jsonl.holder').write_text('1234567890123')
    with locked(path): assert str(os.getpid())==path.with_name('rows.jsonl.holder').read_text()

def test_lock_is_free_after_an_error(path):
    with pytest.raises(OSError, match='mine'):
        with locked(path): raise OSError('mine')
    with locked(path): pass

def test_lock_waits(path):
    fork = mp.get_context('fork')
    told = fork.Event()
    p = fork.Process(target=hold, args=(path, told)); p.start()
    assert told.wait(20)
    fork.Process(target=lambda: (time.sleep(.3), os.kill(p.pid, signal.SIGKILL))).start()
    with locked(path, timeout=60): pass
    p.join()

