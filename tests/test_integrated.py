"Methods that personalise within the rounds, against oracles_posthoc.py."
import numpy as np, pytest, torch
import oracles as O, oracles_posthoc as P
from dataclasses import replace
from fedbook.client import one_by_one
from fedbook.evaluate import personal_scores
from fedbook.federation import begin, client_view
from fedbook.method import method
from fedbook.rounds import server_round, taking_part
from fedbook.streams import seeded
from test_oracles import agree, DRAWN, federation, of_client, OPTIMISERS, positions
from test_rounds import federation as small, mlp

def follow(fed, expected):
    "Weights, messages and personal models of every round"
    state = begin(fed)
    for r,e in enumerate(expected):
        drawn = taking_part(fed, r); assert list(drawn)==DRAWN[r]
        replies = one_by_one(fed, state, list(drawn), r)
        state,_ = server_round(fed, state, drawn, replies, r)
        agree(state['server']['w'], e['w'], f'round {r}')
        for i,a in zip(drawn, replies): agree(a['message'], e['messages'][i], f'round {r}, message of {i}')
        for i,w in e['personal'].items():
            c = client_view(fed, state, i, r+1)
            with seeded(fed.seed, 'personal', i): agree(fed.method.personal(c), w, f'round {r}, model of {i}')

@pytest.mark.parametrize('variant,parts', [('first-order', 2), ('hessian-free', 3)])
def test_perfedavg(variant, parts):
    fed = federation(method('perfedavg', alpha=.3, variant=variant, delta=1e-3), OPTIMISERS['plain'])
    fed = replace(fed, local=replace(fed.local, batch_size=7)) # some batches are cut, some are too small
    clients = [of_client(fed, i) for i in range(4)]
    def cut(b): n = len(b)//parts; return [b[a:a+n] for a in range(0, parts*n, n)] if len(b) >= 2*parts else [b]*parts
    rounds = [{i: [p for b in positions(fed, i, r) for p in cut(b)] for i in ids} for r,ids in enumerate(DRAWN)]
    theirs = P.oracle_perfedavg(begin(fed)['server']['w'], clients, rounds, .3, .2, dict([('first-order','fo'),('hessian-free','hf')])[variant])
    follow(fed, theirs)

@pytest.mark.parametrize('optimiser', ['plain','momentum and decay'])
def test_fedsoup(optimiser):
    fed = federation(method('fedavg'), OPTIMISERS[optimiser])
    held = [c[-3:] for c in fed.data.clients]
    fed = replace(fed, method=method('fedsoup', begin=1), data=replace(fed.data, clients=[c[:-3] for c in fed.data.clients], held=held))
    clients,o = [of_client(fed, i) for i in range(4)],OPTIMISERS[optimiser]
    rounds = [{i: positions(fed, i, r) for i in ids} for r,ids in enumerate(DRAWN)]
    selection = [tuple(t[torch.as_tensor(h)] for t in (fed.data.x, fed.data.y)) for h in held]
    theirs = P.oracle_fedsoup(begin(fed)['server']['w'], clients, rounds, o.lr, selection, share=1., R=1, momentum=o.momentum, decay=o.weight_decay)
    assert any(sum(e['accepted'].values()) for e in theirs) or optimiser!='plain'
    follow(fed, theirs)

def test_perfedavg_with_no_inner_step_is_fedavg_on_the_last_part():
    "α → 0: the direction is the plain gradient on the second half of each batch"
    from fedbook.methods.perfedavg import meta_gradient
    from fedbook.tensors import gradient
    def loss(w, b): return ((w['w']-b)**2).sum()
    w = dict(w=torch.randn(3, dtype=torch.float64))
    assert torch.allclose(meta_gradient(loss, w, [1., 2.], 1e-300, 1e-3)['w'], gradient(lambda v: loss(v, 2.), w)[0]['w'])
