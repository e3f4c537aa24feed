"The functional optimisers and schedules compute what PyTorch's do."
import pytest, torch
from hypothesis import given, settings, strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, CosineAnnealingWarmRestarts, LinearLR, SequentialLR
from fedbook.errors import Refused
from fedbook.optim import Adam, AdamW, Cosine, OPTIMISERS, Restarts, SCHEDULES, Schedule, SGD, Warmup
from fedbook.settings import make

THEIRS = dict(
    sgd=lambda o: lambda p: torch.optim.SGD(p, o.lr, o.momentum, weight_decay=o.weight_decay),
    adam=lambda o: lambda p: torch.optim.Adam(p, o.lr, (o.beta1, o.beta2), o.eps, o.weight_decay),
    adamw=lambda o: lambda p: torch.optim.AdamW(p, o.lr, (o.beta1, o.beta2), o.eps, o.weight_decay))

def far(ours, theirs, dtype, scales):
    "Largest relative distance after steps along random gradients, with a schedule"
    gen = torch.Generator().manual_seed(1)
    w = dict(a=torch.randn(5, 3, generator=gen, dtype=dtype), b=torch.randn(7, generator=gen, dtype=dtype))
    ps = {k: torch.nn.Parameter(v.clone()) for k,v in w.items()}
    opt,state = theirs(list(ps.values())),ours.init(w)
    for s in scales:
        g = {k: torch.randn(v.shape, generator=gen, dtype=dtype) for k,v in w.items()}
        for k,p in ps.items(): p.grad = g[k].clone()
        for group in opt.param_groups: group['lr'] = ours.lr*s
        opt.step(); w,state = ours.update(w, g, state, s)
    return max(((w[k]-ps[k]).abs()/(ps[k].abs()+1)).max().item() for k in w)

@pytest.mark.parametrize('dtype,tol', [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize('name,settings', [('sgd', {}), ('sgd', dict(momentum=.9)), ('sgd', dict(momentum=.9, weight_decay=.05)),
    ('adam', {}), ('adam', dict(weight_decay=.1, beta2=.99)), ('adamw', dict(weight_decay=.1)), ('adamw', dict(weight_decay=0.))])
def test_same_as_torch(name, settings, dtype, tol):
    ours = make(OPTIMISERS, 'optimiser', name, lr=.01, **settings)
    assert far(ours, THEIRS[name](ours), dtype, [1, .5, .25]*10) < tol

@pytest.mark.parametrize('opt', [SGD(.1, .9, .01), Adam(.1, weight_decay=.1), AdamW(.1)])
def test_stacks_over_clients(opt):
    w,g = dict(a=torch.randn(4, 3)),dict(a=torch.randn(4, 3))
    def two(w, g):
        w,s = opt.update(w, g, opt.init(w)); return opt.update(w, g, s, .5)[0]
    together = torch.vmap(two)(w, g)['a']
    alone = torch.stack([two(dict(a=w['a'][i]), dict(a=g['a'][i]))['a'] for i in range(4)])
    assert torch.allclose(together, alone, rtol=1e-6)

def torch_factors(make_scheduler, n):
    opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.)
    sched,out = make_scheduler(opt),[]
    for _ in range(n): out.append(opt.param_groups[0]['lr']); opt.step(); sched.step()
    return out

@settings(max_examples=15, deadline=None)
@given(st.integers(1, 20), st.floats(0, 1))
def test_cosine_is_torchs(period, floor):
    theirs = torch_factors(lambda o: CosineAnnealingLR(o, period, floor), 45)
    assert [Cosine(period=period, floor=floor).at(t) for t in range(45)]==pytest.approx(theirs, abs=1e-6)

@settings(max_examples=15, deadline=None)
@given(st.integers(1, 12), st.integers(1, 3), st.floats(0, 1))
def test_restarts_are_torchs(period, growth, floor):
    theirs = torch_factors(lambda o: CosineAnnealingWarmRestarts(o, period, growth, floor), 45)
    assert [Restarts(period=period, growth=growth, floor=floor).at(t) for t in range(45)]==pytest.approx(theirs, abs=1e-6)

@settings(max_examples=15, deadline=None)
@given(st.integers(1, 9), st.floats(.01, 1))
def test_warmup_is_torchs(ticks, start):
    theirs = torch_factors(lambda o: SequentialLR(o, [LinearLR(o, start, 1, ticks), CosineAnnealingLR(o, 7)], [ticks]), ticks+8)
    assert [Warmup(ticks=ticks, start=start, then=Cosine(period=7)).at(t) for t in range(ticks+8)]==pytest.approx(theirs, abs=1e-6)

def test_the_clock_is_named():
    clock = dict(batch=3, epoch=1, round=0)
    assert [Cosine(per=p, period=4)(**clock) for p in ('batch','epoch','round')]==[Cosine(period=4).at(t) for t in (3,1,0)]

@pytest.mark.parametrize('bad', [lambda: SGD(lr=0), lambda: SGD(lr=float('nan')), lambda: SGD(momentum=-.1), lambda: Adam(beta2=2), lambda: Adam(beta1=1), lambda: AdamW(beta2=1.), lambda: SGD(momentum=1), lambda: Restarts(growth=0), lambda: Cosine(period=0),
    lambda: Schedule(per='epok'), lambda: make(SCHEDULES, 'schedule', 'cosin'), lambda: make(OPTIMISERS, 'optimiser', 'sgd', learning_rate=.1)])
def test_refusals(bad):
    with pytest.raises(Refused) as e: bad()
    assert len(str(e.value).split('\n'))==1
