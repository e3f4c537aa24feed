"FedRef, optimisers on the server, FedDyn and SCAFFOLD against the oracles of paper 004 and against Flower; what classes forget; the settings of its tables."
import pytest, torch
import oracles_004 as P
from fedbook.method import method
from test_oracles import cases, double, drive

# FedRef: clients send a cost beside their model

def with_cost(m, i): return dict(w=m['w'], loss=double(m['loss']))

def fedref(variant, oracle, settings, theirs=None, **kw): return cases('fedref', oracle, dict(variant=variant, **settings), settings if theirs is None else theirs, message=with_cost, **kw)

PULL = dict(eta=.7, lam=.3)

# FedYogi's siblings: Flower's way is v0 = 0, and a correction of Adam's rate

ADAPTIVE = dict(eta=.05, tau=.02, beta1=.8)

def adaptive(name, oracle, settings, theirs): return [c for flower in (False, True) for c in cases(name, oracle, dict(settings, flower=flower), dict(settings, v0=0. if flower else None, **(theirs if flower else {})))]

# SCAFFOLD sends the model where the oracle has its change

def scaffold(w0, *data, **settings):
    return [dict(o, messages={i: dict(w=o['trained'][i], dc=m['dc']) for i,m in o['messages'].items()}) for o in P.oracle_scaffold(w0, *data, **settings)]

CASES = [
    fedref('intended', P.oracle_fedref_intended, dict(PULL, p=2)), fedref('printed', P.oracle_fedref_printed, PULL),
    *(fedref('intended', P.oracle_fedref_intended, dict(PULL, p=2, history=h, current=c), optimisers=('plain',)) for h,c in (('outputs', True), ('aggregates', False), ('outputs', False))),
    fedref('released', P.oracle_fedref_released, dict(eta=.2, lam=.3, p=1, lam2=.1, cap=.1), dict(eta=.2, lam1=.3, lam2=.1, p=1)),
    fedref('released', P.oracle_fedref_released, dict(eta=.2, lam=.3, p=2, lam2=.1, cap=.1), dict(eta=.2, lam1=.3, lam2=.1, p=2)),
    cases('fedavgm', P.oracle_fedavgm, dict(eta=.4, beta=.6)),
    adaptive('fedadagrad', P.oracle_fedadagrad, ADAPTIVE, {}), adaptive('fedadam', P.oracle_fedadam, dict(ADAPTIVE, beta2=.95), dict(flower=True)),
    cases('feddyn', P.oracle_feddyn, dict(alpha=.3)), 
    *(cases('scaffold', scaffold, dict(eta=.7, option=o), optimisers=('plain',), message=lambda m,i: m) for o in (1, 2)),
]

@pytest.mark.parametrize('name,optimiser,oracle,settings,theirs,hooks', [c for several in CASES for c in several])
def test_all_rounds(name, optimiser, oracle, settings, theirs, hooks): drive(name, optimiser, oracle, settings, theirs, **hooks)
