"A client that fails or sends something else does not count: the round goes on, to the bit, as if it had not taken part."
from dataclasses import dataclass
import warnings
import pytest, torch
from fedbook import rounds
from fedbook.engines import Processes, stacked, Traced
from fedbook.method import FedAvg, METHODS, methods
from fedbook.methods.localonly import LocalOnly
from fedbook.client import attempted, one_by_one
from fedbook.federation import begin
from fedbook.replies import difference, finite, form, outvoted, SetAside
from fedbook.rounds import run
from fedbook.tensors import flatten, nest
from test_rounds import federation, fitting, mlp, same

BAD = 1 # The client that goes wrong, always drawn

def first_float(message, change):
    "The message with its first floating-point tensor changed"
    flat = flatten(message)
    k = next(k for k,t in flat.items() if t.is_floating_point() and t.numel() > 1)
    return nest({**flat, k: change(flat[k])})

def without_first(message): flat = flatten(message); flat.pop(next(iter(flat))); return nest(flat)

def spoil(t, value): t = t.clone(); t.view(-1)[0] = value; return t

FAULTS = dict(nan=lambda m: first_float(m, lambda t: spoil(t, torch.nan)), inf=lambda m: first_float(m, lambda t: spoil(t, torch.inf)),
    shape=lambda m: first_float(m, lambda t: t[:1]), whole=lambda m: first_float(m, lambda t: t.round().long()),
    extra=lambda m: dict(m, extra=torch.zeros(2)), missing=without_first, text=lambda m: 'weights')

def faulty(fault, when=1):
    "An engine in which one client sends something else in one round"
    def engine(fed, state, ids, r, work=attempted):
        replies = one_by_one(fed, state, ids, r, work)
        return replies if work is not attempted else [dict(a, message=FAULTS[fault](a['message'])) if i==BAD and r==when else a for i,a in zip(ids, replies)]
    return engine

def without(monkeypatch, when=1):
    "Let the bad client be away in that round"
    usual = rounds.taking_part
    monkeypatch.setattr(rounds, 'taking_part', lambda fed, r: {i: n for i,n in usual(fed, r).items() if i!=BAD or r!=when})

def small(m): return federation(m, module=mlp(blocks=True), per_round=4)

def one_away(m, monkeypatch):
    "The run without the bad client"
    with monkeypatch.context() as patch: without(patch); return run(small(m))

def set_aside(m, engine):
    "The run in which its message is bad"
    fed = small(m)
    with warnings.catch_warnings(): warnings.simplefilter('ignore', SetAside); return fed,run(fed, engine=engine)

@pytest.fixture(scope='module')
def away(): return {} # Method to its run without the bad client, which no fault changes

@pytest.mark.parametrize('fault', FAULTS)
@pytest.mark.parametrize('name', sorted(n for n,m in methods().items() if not issubclass(m, LocalOnly)))
def test_a_bad_message_is_left_out_to_the_bit(name, fault, monkeypatch, away):
    if name not in away: away[name] = one_away(fitting(name), monkeypatch)
    (fed,(state,rows)),(want,wanted) = set_aside(fitting(name), faulty(fault)),away[name]
    assert same(state, want)
    assert [r for r in rows if r[2]=='set_aside']==[[2, BAD, 'set_aside', 1.]] and [r for r in rows if r[2]!='set_aside']==wanted
    assert [(s['client'], s['round']) for s in fed.set_aside]==[(BAD, 2)] and fed.set_aside[0]['reason']

@pytest.mark.parametrize('engine', [one_by_one, Traced(), stacked(), Processes(2)], ids=['one_by_one','traced','stacked','processes'])
def test_a_client_that_raises_is_left_out_with_its_traceback(engine, monkeypatch):
    @dataclass(frozen=True)
    class Fails(FedAvg):
        def finish(self, w, c):
            if c.id==BAD and c.round==1: raise ZeroDivisionError('no sample of class 7')
            return super().finish(w, c)
    METHODS.pop('fails')
    with warnings.catch_warnings(): warnings.simplefilter('ignore'); fed,(state,rows) = set_aside(Fails(), engine); want,_ = one_away(Fails(), monkeypatch)
    for k,v in state['server']['w'].items(): torch.testing.assert_close(v, want['server']['w'][k])
    assert fed.set_aside[0]['reason']=='ZeroDivisionError: no sample of class 7' and 'in finish' in fed.set_aside[0]['traceback']
    assert same(state, want) or engine not in (one_by_one,)

def test_where_nobody_is_left_the_model_stays():
    fed = federation(per_round=2, rounds=1)
    def engine(fed, state, ids, r, work=attempted): return one_by_one(fed, state, ids, r, work) if work is not attempted else [dict(a, message=FAULTS['nan'](a['message'])) for a in one_by_one(fed, state, ids, r)]
    with pytest.warns(SetAside, match='its message is not finite'): state,rows = run(fed, engine=engine)
    assert same(state['server'], begin(fed)['server']) and not state['memory']
    assert [r[2] for r in rows[:4]]==['bytes_down','bytes_up','set_aside','set_aside']

def test_what_fails_for_all_alike_is_raised():
    @dataclass(frozen=True)
    class Broken(FedAvg):
        def start(self, c): raise KeyError('heads')
    METHODS.pop('broken')
    with pytest.raises(RuntimeError, match="(?s)No client of round 1 .*KeyError: 'heads'"): run(federation(Broken()))

def test_one_client_alone_cannot_change_the_model_s_shape():
    fed = federation(per_round=1, rounds=1)
    def engine(fed, state, ids, r, work=attempted): return one_by_one(fed, state, ids, r, work) if work is not attempted else [dict(a, message=FAULTS['shape'](a['message'])) for a in one_by_one(fed, state, ids, r)]
    with pytest.warns(SetAside, match="'0.weight' is .1, 6. .* should be .8, 6."): state,_ = run(fed, engine=engine)
    assert same(state['server'], begin(fed)['server'])

def test_a_diverged_client_is_set_aside_by_its_loss():
    fed = federation(per_round=3, rounds=1)
    def engine(fed, state, ids, r, work=attempted): return one_by_one(fed, state, ids, r, work) if work is not attempted else [dict(a, loss=float('nan') if i==ids[0] else a['loss']) for i,a in zip(ids, one_by_one(fed, state, ids, r))]
    with pytest.warns(SetAside, match='its training loss is nan'): run(fed, engine=engine)

def test_of_two_forms_the_more_frequent_is_right_then_the_one_like_what_was_sent():
    sent = dict(w=dict(a=torch.zeros(2, 3)))
    good,short = form(sent, sent, ()),form(dict(w=dict(a=torch.zeros(1, 3))), sent, ())
    assert outvoted({0: good, 1: short})[0]==[1] and outvoted({0: good, 1: short, 2: short})[0]==[0] and outvoted({0: None})[1] is None
    assert form(dict(p=torch.zeros(4, 3)), sent, ('p',))==form(dict(p=torch.zeros(9, 3)), sent, ('p',))!=form(dict(p=torch.zeros(4, 2)), sent, ('p',))

def test_messages_may_have_another_type_if_all_have_it():
    @dataclass(frozen=True)
    class Half(FedAvg):
        def finish(self, w, c): return dict(w={k: v.half() for k,v in w.items()}), {}
        def aggregate(self, state, messages, weights): return super().aggregate(state, [dict(w={k: v.float() for k,v in m['w'].items()}) for m in messages], weights)
    METHODS.pop('half')
    fed = federation(Half())
    assert not same(run(fed)[0]['server'], begin(fed)['server']) and not fed.set_aside

def test_words_for_differences():
    a = dict(w=dict(a=torch.zeros(2)))
    assert difference(7, a)=='it sent a int instead of tensors by name' and difference(dict(w=dict(a=3)), a)=="its 'w/a' is 3 and should be [2] of torch.float32"
    assert difference({}, a)=="its message lacks 'w/a'" and 'which the others lack' in difference(dict(a, b=torch.ones(1)), a)

def test_finite():
    assert finite({}) and finite(dict(a=torch.tensor([1, 2]))) and not finite(dict(a=torch.ones(2)), dict(b=dict(c=torch.tensor([1., torch.nan]))))
