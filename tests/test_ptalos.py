"pTaLoS: the schedule, the choice of blocks, and what trains."
from dataclasses import replace
import pytest, torch, torch.nn.functional as F
from hypothesis import given, strategies as st
from fedbook.errors import Refused
from fedbook.method import method
from fedbook.methods.ptalos import blocks, CRITERIA, loss_on, lowest_losses, PTaLoS, skipping, threshold
from fedbook.methods.talos import TaLoSProx
from fedbook.models import build, lies_in, Net
from fedbook.optim import AdamW
from fedbook.method import LocalTraining
from fedbook.client import begin_client
from fedbook.federation import begin, client_view
from fedbook.rounds import run
from fedbook.streams import stream
from test_rounds import federation, mlp, same

def net(depth=4): return Net(build('vit_tiny32', 5, 1, 28, patch=14, dim=8, depth=depth))
def batch(n=6):
    g = torch.Generator().manual_seed(2)
    return dict(x=torch.randn(n, 1, 28, 28, generator=g), y=torch.randint(0, 5, (n,), generator=g))

@given(st.integers(1, 60), st.integers(1, 50), st.sampled_from(['printed','released','intended']))
def test_the_threshold_falls_or_rises_between_0_and_1(t, t_max, variant):
    down,up = threshold(t, t_max, False, variant),threshold(t, t_max, True, variant)
    assert 0 <= down <= 1 and abs(down+up-1) < 1e-12 and threshold(t+1, t_max, False, variant) <= down
    if t >= t_max and (t_max > 1 or variant!='released'): assert (down, up)==(0, 1)

def test_the_printed_threshold_and_the_released_one_differ_by_a_step():
    assert [threshold(t, 4) for t in (1,2,3,4,5)]==[.75,.5,.25,0,0] and [threshold(t, 5, variant='released') for t in (1,2,3,4,5)]==[1,.75,.5,.25,0]

def test_skipping_a_block_is_the_network_without_it():
    full,short = net(4),build('vit_tiny32', 5, 1, 28, patch=14, dim=8, depth=3)
    w = full.weights()
    kept = {k.replace('blocks.2.', 'blocks.1.').replace('blocks.3.', 'blocks.2.'): v for k,v in w.items() if not k.startswith('body.blocks.1.')}
    with skipping(full, 'body.blocks.1'): z = full.logits(w, {}, batch()['x'])
    torch.testing.assert_close(z, Net(short).logits(kept, {}, batch()['x']))
    assert not torch.allclose(z, full.logits(w, {}, batch()['x']))

def test_an_error_inside_leaves_the_network_whole():
    n = net(); z = n.logits(n.weights(), {}, batch()['x'])
    with pytest.raises(ZeroDivisionError):
        with skipping(n, 'body.blocks.0'): 1/0
    assert torch.equal(z, n.logits(n.weights(), {}, batch()['x']))

def test_step_scores_are_losses_after_a_step_of_one_block():
    n = net(); w = n.weights(); new = {k: v+.1 for k,v in w.items()}
    s = CRITERIA['step'](n, w, {}, lambda i: batch(), lambda b: new)
    for b in blocks(w):
        mixed = {k: new[k] if k.startswith(b+'.') else v for k,v in w.items()}
        assert s[b]==F.cross_entropy(n.logits(mixed, {}, batch()['x']), batch()['y']).item()
    assert len(set(s.values()))==len(s)

def test_block_1_is_not_block_10():
    n = net(11); w = n.weights(); new = {k: v+.1 if k.startswith('body.blocks.10.') else v for k,v in w.items()}
    s = CRITERIA['step'](n, w, {}, lambda i: batch(), lambda b: new)
    assert s['body.blocks.1']==s['body.blocks.0']!=s['body.blocks.10']

def test_the_released_criterion_sees_batches_and_no_blocks():
    n = net(); w = n.weights()
    assert len(set(CRITERIA['released'](n, w, {}, lambda i: batch(), None).values()))==1
    b = lambda i: {k: v[i:i+2] for k,v in batch(8).items()}
    assert CRITERIA['released'](n, w, {}, b, None)=={k: loss_on(n, w, {}, b(i)) for i,k in enumerate(blocks(w))}

def masks(m, r, depth=4):
    from fedbook.experiments import federation as of, Setting
    s = Setting('fashion_mnist_mini', model=dict(name='vit_tiny32', patch=14, dim=8, depth=depth), partition=dict(name='iid', n_clients=20), protocol=dict(per_round=4), local=dict(optimiser=dict(name='adamw')))
    fed = replace(of(s), method=m)
    for i in range(4):
        c = client_view(fed, begin(fed), i, r); begin_client(fed, c)
        yield fed,c,c.memory['mask']

QUICK = dict(kind='gradient', batches=1, layer_batches=1)

@pytest.mark.parametrize('criterion', CRITERIA)
def test_a_layer_client_trains_k_blocks_masked_and_the_end_whole(criterion):
    for fed,c,mask in masks(PTaLoS(k=2, deterministic_round=1, criterion=criterion, **QUICK), 0):
        active = [b for b in blocks(mask) if any(mask[k].any() for k in mask if lies_in(k, (b,)))]
        assert len(active)==2
        for k,m in mask.items():
            if lies_in(k, active): assert abs(m.sum()-.4*m.numel()) <= 1
            else: assert m.all()==m.any()==(k.startswith(('body.norm','head')))

def test_the_lowest_losses_are_chosen():
    from unittest.mock import patch
    losses = lambda net, w, *rest: {b: float((7*i) % 4) for i,b in enumerate(blocks(w))} # 0, 3, 2, 1
    with patch.dict(CRITERIA, step=losses):
        for fed,c,mask in masks(PTaLoS(k=2, deterministic_round=1, **QUICK), 0): assert fed.method.layers(c, c.message['w'], mask)==('body.blocks.0','body.blocks.3')

@given(st.lists(st.sampled_from([2.1, 2.3, 2.5, float('nan')]), min_size=1, max_size=9), st.data())
def test_level_blocks_are_taken_in_their_order_whatever_the_rounding(values, data):
    "The choice is that of the exact losses, first come first served, with any noise of rounding; what is no number comes last"
    k = data.draw(st.integers(1, len(values)))
    noise = data.draw(st.lists(st.floats(-2e-6, 2e-6), min_size=len(values), max_size=len(values)))
    exact = sorted(range(len(values)), key=lambda i: (values[i]!=values[i], values[i] if values[i]==values[i] else 0))[:k]
    assert lowest_losses({i: v+e for i,(v,e) in enumerate(zip(values, noise))}, k)==tuple(exact)

@pytest.mark.parametrize('criterion', ['step','released'])
def test_rounding_does_not_choose_blocks(criterion):
    "Level losses: by step every client takes the first blocks, by released its own, and neither depends on the last bits"
    from unittest.mock import patch
    def choices(signs):
        level = lambda net, w, *rest: {b: 2.3+s*4e-7 for b,s in zip(blocks(w), signs)}
        with patch.dict(CRITERIA, {criterion: level}): return [fed.method.layers(c, c.message['w'], mask) for fed,c,mask in masks(PTaLoS(k=2, deterministic_round=1, criterion=criterion, **QUICK), 0)]
    here = choices((1,-1,1,-1))
    assert here==choices((-1,1,-1,1))==choices((0,0,0,0))
    assert set(here)=={('body.blocks.0','body.blocks.1')} if criterion=='step' else len(set(here)) > 1

def test_table_5_as_released_restarts_and_as_intended_warms_up():
    from fedbook.chapters.ptalos import central_editing
    from fedbook.experiments import local
    def rates(variant, epochs): f = local(**central_editing(variant, 'full', .3, 'most', epochs, data='fashion_mnist_mini').local).schedule; return [f(epoch=e) for e in range(epochs)]
    opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.)
    theirs,s = [],torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, 10, 2)
    for _ in range(15): theirs.append(opt.param_groups[0]['lr']); opt.step(); s.step()
    assert rates('released', 15)==pytest.approx(theirs) and rates('released', 15)[-1] > .9
    assert rates('intended', 15)[0]==.02 and rates('intended', 15)[-1] < .1 and all(rates('released', n)[0]==1 for n in (1,2,3))

def test_the_printed_layer_client_trains_blocks_alone_and_whole():
    for fed,c,mask in masks(PTaLoS(k=1, deterministic_round=1, variant='printed', **QUICK), 0):
        trains = {k for k,m in mask.items() if m.any()}
        assert all(mask[k].all() for k in trains) and len({k.rsplit('.', 1)[0].split('.')[2] for k in trains})==1 and all('blocks' in k for k in trains)

def test_the_released_whole_client_trains_tokens_too():
    for variant,trained in (('released', True), ('intended', False)):
        for fed,c,mask in masks(PTaLoS(deterministic_round=9, reverse=True, variant=variant, **QUICK), 20): assert mask['body.cls_token'].all()==trained

def test_before_the_deterministic_round_chance_decides_by_the_client_s_own_stream():
    m = PTaLoS(k=1, deterministic_round=4, **QUICK)
    for fed,c,mask in masks(m, 1):
        layers = sum(any(mask[k].any() for k in mask if lies_in(k, (b,))) for b in blocks(mask))==1
        assert layers==(stream(0, 'strategy', 1, c.id).random() > .5)

def test_all_reverse_rounds_after_the_deterministic_one_are_talosprox():
    a,b = (run(federation(m, module=mlp(blocks=True), local=LocalTraining(1, 4, AdamW(.01))))[0] for m in (PTaLoS(deterministic_round=1, reverse=True, k=1), TaLoSProx()))
    assert same(a, b)

@pytest.mark.parametrize('bad,word', [(lambda: PTaLoS(k=0), 'k'), (lambda: PTaLoS(layer_batches=0), 'layer_batches'), (lambda: PTaLoS(criterion='steps'), "'step'"), (lambda: PTaLoS(deterministic_round=0), 'deterministic'),
    (lambda: begin(federation(PTaLoS(k=3), module=mlp(blocks=True))), 'k = 3 .* 2'), (lambda: begin(federation(PTaLoS())), 'no blocks'), (lambda: PTaLoS(sparsity=1), 'sparsity')])
def test_refusals(bad, word):
    with pytest.raises(Refused, match=word): bad()
