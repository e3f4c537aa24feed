"What targets mean: losses by hand and by other code, metrics of parts, undefined against diverged, stacking and tracing."
import math
import numpy as np, pytest, torch, torch.nn.functional as F
from dataclasses import dataclass
from hypothesis import given, settings, strategies as st
from fedbook.errors import Refused
from fedbook.evaluate import score
from fedbook.models import Net
from fedbook.settings import make
from fedbook.tasks import (ASLSingleLabel, Asymmetric, auc, dice, distances, focal, hausdorff, log_other, macro_f1, main_of, Metric, METRICS, metric_of, MultiLabel, of_parts, outline,
    overlap_lost, Segmentation, Task, TASKS)
from fedbook.trace import trace

nan,inf = math.nan,math.inf
def gen(seed=0): return torch.Generator().manual_seed(seed)
def same(a, b): return a==b or math.isnan(a) and math.isnan(b)

# --- one class per sample ---

@pytest.mark.parametrize('smoothing', [0., .1])
@pytest.mark.parametrize('n', [1, 7, 1000])
def test_classification_is_to_the_bit_what_old_rows_hold(n, smoothing):
    net,task = Net(torch.nn.Linear(5, 3)),Task(label_smoothing=smoothing)
    x,y = torch.randn(n, 5, generator=gen()),torch.randint(3, (n,), generator=gen())
    z = net.logits(net.weights(), {}, x)
    right,loss = torch.where(z.isfinite().all(1), (z.argmax(1)==y).double(), nan),F.cross_entropy(z, y, reduction='none', label_smoothing=smoothing)
    found = task.metrics(score(net, net.weights(), {}, x, y, task=task))
    assert found=={'accuracy': 100*right.double().mean().item(), 'loss': loss.mean().item()}
    assert torch.equal(task.loss(z, y), F.cross_entropy(z, y, label_smoothing=smoothing)) and torch.equal(task.each(z, y), loss)

@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(0, 19), min_size=1, max_size=30), min_size=1, max_size=9), st.sampled_from([None, 3]))
def test_accuracies_of_parts_are_to_the_bit_what_old_rows_hold(parts, broken):
    def means(values, parts):
        sizes = torch.tensor([len(p) for p in parts])
        every,owner = torch.as_tensor(np.concatenate([np.asarray(p) for p in parts])),torch.arange(len(parts)).repeat_interleave(sizes)
        return (torch.zeros(len(parts), dtype=torch.float64).index_add_(0, owner, values[every].double())/sizes).tolist()
    z,y = torch.randn(20, 4, generator=gen()),torch.randint(4, (20,), generator=gen(1))
    if broken: z[broken,1] = nan
    task,values = Task(),Task().values(z, y)
    right = torch.where(z.isfinite().all(1), (z.argmax(1)==y).double(), nan)
    ours = of_parts(task, values, parts)
    assert all(same(p['accuracy'], 100*m) for p,m in zip(ours, means(right, parts)))
    for p,part in zip(ours, parts):
        alone = task.metrics({k: v[part] for k,v in values.items()})
        assert same(p['accuracy'], alone['accuracy']) and (math.isclose(p['loss'], alone['loss'], rel_tol=1e-5) or broken in part and math.isnan(p['loss']))

def test_parts_of_a_task_with_other_metrics_are_computed_one_by_one():
    z,y = torch.tensor([[0.],[1.],[2.],[3.]]),torch.tensor([[0.],[1.],[0.],[1.]])
    task = MultiLabel(); found = of_parts(task, task.values(z, y), [[0,1],[1,2],np.array([0,1,2,3]),[0]])
    assert [p['auc'] for p in found[:3]]==[100,0,75] and math.isnan(found[3]['auc']) and [p['undefined'] for p in found]==[0,0,0,1]

# --- undefined is not diverged ---

def answers(name, broken=False):
    "A task with answers and targets for which nothing but the network's answer can fail"
    shape = dict(segmentation=(4,2,6,6)).get(name, (4,3))
    z = torch.randn(shape, generator=gen(), dtype=torch.float64)
    y = dict(multilabel=torch.tensor([[1.,0.,1.],[0.,1.,0.],[1.,1.,0.],[0.,0.,1.]]), segmentation=torch.arange(36).view(1, 6, 6).repeat(4, 1, 1)%2).get(name, torch.tensor([0,1,2,0]))
    if broken: z[1] = z[1]*nan
    return make(TASKS, 'task', name, **dict(segmentation=dict(hd95=True)).get(name, {})),z,y

@pytest.mark.parametrize('name', TASKS)
def test_a_network_that_diverges_shows_in_every_score(name):
    task,z,y = answers(name)
    fine = task.reported(task.metrics(task.values(z, y)))
    assert fine.keys()=={*task.scores} and all(map(math.isfinite, fine.values()))
    task,z,y = answers(name, broken=True)
    lost = task.reported(task.metrics(task.values(z, y)))
    assert lost.keys()==fine.keys() and not any(math.isfinite(v) for k,v in lost.items() if k!='undefined')

@pytest.mark.parametrize('bad', [nan, inf, -inf])
def test_one_answer_that_is_not_finite_spoils_its_part_and_no_other(bad):
    z,y = torch.eye(3),torch.arange(3)
    z[1,2] = bad
    found = of_parts(Task(), Task().values(z, y), [[0,2],[0,1]])
    assert found[0]['accuracy']==100 and math.isnan(found[1]['accuracy'])

def test_what_is_undefined_is_not_reported():
    m = MultiLabel(); found = m.metrics(m.values(torch.zeros(2, 2), torch.tensor([[1.,nan],[1.,nan]])))
    assert math.isnan(found['auc']) and m.reported(found).keys()=={'undefined','loss'} and found['undefined']==2
    s = Segmentation(hd95=True); z,y = torch.tensor([1.,0.]).view(1, 2, 1, 1).repeat(1, 1, 4, 4),torch.zeros(1, 4, 4).long()
    found = s.reported(s.metrics(s.values(z, y)))
    assert found.keys()=={'dice','accuracy','loss','one_empty','undefined'} and found['undefined']==1 and found['dice']==100 # nothing is there, and nothing was found
    wrong = s.metrics(s.values(z.flip(1), y))
    assert wrong['dice']==0 and wrong['one_empty']==1

def test_an_auc_that_is_undefined_stays_so_where_the_network_has_diverged():
    lost = torch.full((2,), inf)
    assert math.isnan(auc(lost, torch.ones(2))) and auc(lost, torch.tensor([0.,1.]))==inf

# --- several labels ---

@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(-3, 3), st.sampled_from([0., 1., nan])), min_size=1, max_size=25))
def test_auc_counts_pairs(entries):
    z,y = (torch.tensor(c, dtype=torch.float64) for c in zip(*entries))
    pos,neg = z[y==1],z[y==0]
    pairs = (pos[:,None]>neg).double()+.5*(pos[:,None]==neg)
    assert math.isnan(auc(z, y)) if not pairs.numel() else math.isclose(auc(z, y), pairs.mean())
    if pairs.numel(): assert math.isclose(auc(z.exp()*3-7, y), auc(z, y)) and math.isclose(auc(-z, y), 1-auc(z, y), abs_tol=1e-12)

def test_multilabel_loss_is_the_mean_over_known_entries_and_unknown_ones_teach_nothing():
    z,y = torch.randn(5, 3, generator=gen(), dtype=torch.float64),torch.randint(2, (5, 3), generator=gen()).double()
    assert torch.allclose(MultiLabel().loss(z, y), F.binary_cross_entropy_with_logits(z, y))
    known = torch.rand(5, 3, generator=gen(1)) < .6
    y = torch.where(known, y, nan)
    g,loss = torch.func.grad_and_value(MultiLabel().loss)(z, y)
    assert torch.allclose(loss, F.binary_cross_entropy_with_logits(z[known], y[known])) and not g[~known].any() and g[known].all()
    assert math.isclose(MultiLabel().metrics(MultiLabel().values(z, y))['loss'], loss.item())
    assert MultiLabel().loss(z, y*nan)==0 and not torch.func.grad(MultiLabel().loss)(z, y*nan).any()

# --- the asymmetric loss ---

def released(z, y, eps=1e-6):
    "What the FedRef paper writes, step by step"
    p,t = z.softmax(1).clamp(eps, 1-eps),F.one_hot(y, z.shape[1])
    return (-t*p.log()-(1-t)*p**4*(1-p).log()).sum(1).mean()

def test_asymmetric_losses_by_hand():
    z,y = torch.tensor([[math.log(2),0.,0.]], dtype=torch.float64),torch.tensor([0])
    assert round(Asymmetric(eps=1e-6).loss(z, y).item(), 6)==round(Asymmetric().loss(z, y).item(), 6)==.695395
    assert round(ASLSingleLabel().loss(z, y).item(), 6)==.647298 and round(ASLSingleLabel(label_smoothing=0.).loss(z, y).item(), 6)==.693147
    for c,worth in ((10, 2.302680), (62, 4.127134)): assert round(Asymmetric().loss(torch.zeros(1, c).double(), y).item(), 6)==worth

@pytest.mark.parametrize('scale', [1, 5, 20])
def test_log_space_is_the_released_formula_in_value_and_gradient(scale):
    z,y = scale*torch.randn(40, 6, generator=gen(), dtype=torch.float64),torch.randint(6, (40,), generator=gen())
    for ours,theirs in zip(*(torch.func.grad_and_value(f)(z, y) for f in (Asymmetric(eps=1e-6).loss, released))): assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)

@pytest.mark.parametrize('n,classes', [(1, 2), (40, 3), (200, 62)])
def test_macro_f1_is_the_mean_over_classes_of_the_harmonic_mean_of_precision_and_recall(n, classes):
    answer,true = (torch.randint(classes, (n,), generator=gen(s)) for s in (1, 2))
    each = []
    for c in sorted({*answer.tolist(), *true.tolist()}):
        right = sum(a==t==c for a,t in zip(answer.tolist(), true.tolist()))
        precision,recall = (right/k if k else 0. for k in (answer.tolist().count(c), true.tolist().count(c)))
        each.append(2*precision*recall/(precision+recall) if right else 0.)
    assert macro_f1(answer, true)==pytest.approx(100*sum(each)/len(each), abs=1e-9)

def test_f1_is_reported_of_samples_of_several_classes_and_not_of_those_of_one():
    z,y = torch.eye(3).double(),torch.tensor([0, 1, 0])
    for task in (Asymmetric(), ASLSingleLabel()):
        whole,one,single = of_parts(task, task.values(z, y), [range(3), [0, 2], [1]])
        assert whole['f1']==pytest.approx(100*(2/3+1+0)/3) and 'f1' not in one and 'f1' not in single and 'f1' not in Task().metrics(Task().values(z, y))
        assert math.isnan(task.metrics(task.values(torch.where(z > 0, nan, z), y))['f1'])
        plain = of_parts(Task(), Task().values(z, y), [range(3), [0, 2], [1]])
        assert [m['accuracy'] for m in plain]==[m['accuracy'] for m in (whole, one, single)]

def test_asymmetric_loss_without_its_negatives_is_cross_entropy():
    z,y = torch.randn(9, 4, generator=gen(), dtype=torch.float64),torch.arange(9)%4
    assert torch.allclose(ASLSingleLabel(label_smoothing=0.).each(z, y), Task().each(z, y))
    assert torch.allclose(ASLSingleLabel(gamma_neg=0., label_smoothing=.2).loss(z, y), Task(label_smoothing=.2).loss(z, y))
    focal_ce = -(1-z.softmax(1).gather(1, y[:,None])[:,0])**2*z.log_softmax(1).gather(1, y[:,None])[:,0]
    assert torch.allclose(ASLSingleLabel(gamma_pos=2., label_smoothing=0.).each(z, y), focal_ce)

@pytest.mark.parametrize('gap', [0., 1., 10., 16., 20., 80.])
def test_log_space_keeps_its_digits_in_float32(gap):
    z = torch.tensor([[gap,0.,-1.],[0.,0.,0.],[0.,gap,0.]])
    logp,exact = z.log_softmax(1),z.double().log_softmax(1)
    other = torch.stack([torch.cat([exact[:,:c],exact[:,c+1:]], 1).logsumexp(1) for c in range(3)], 1)
    assert torch.allclose(log_other(logp).double(), other, rtol=3e-6, atol=1e-12)
    for y in range(3):
        g32,g64 = (torch.func.grad(Asymmetric().loss)(t, torch.full((3,), y)).double() for t in (z, z.double()))
        assert g32.isfinite().all() and torch.allclose(g32, g64, rtol=1e-4, atol=1e-6)

def test_without_the_clamp_a_confidently_wrong_network_learns():
    z,y = torch.tensor([[30.,0.]]),torch.tensor([1])
    assert not torch.func.grad(Asymmetric(eps=1e-6).loss)(z, y).any() and torch.func.grad(Asymmetric().loss)(z, y)[0,0] > 1

# --- a class per pixel ---

def squares():
    a,b = torch.zeros(2, 5, 5).long()
    a[1:3,1:3],b[1:3,2:5] = 1,1
    return a[None],b[None]

def test_dice_and_distance_by_hand():
    a,b = squares()
    assert dice(a, b, 2).tolist()==[[.4]] and hausdorff(*(t[0].numpy()==1 for t in (a, b)))==2
    row = np.arange(10)[None] < np.array([10,9])[:,None,None]
    for percent,far in ((100, 1), (95, .55), (50, 0)): assert math.isclose(hausdorff(*row, percent), far, abs_tol=1e-12)

def test_empty_masks():
    a,b = squares(); none = 0*a
    assert dice(none, none, 2).isnan().all() and dice(a, none, 2)==dice(none, a, 2)==0, 'an invented class counts'
    d = distances(torch.cat([none,a,none,a]), torch.cat([none,none,b,b]), 2)
    assert [*map(str, d['hd95'][:,0].tolist())]==['nan',str(math.hypot(5, 5)),str(math.hypot(5, 5)),'2.0'] and d['one_empty'][:,0].tolist()==[0,1,1,0]

@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from([(7,8), (4,5,6)]))
def test_distance_is_that_of_all_pairs(seed, shape):
    a,b = np.random.default_rng(seed).random((2, *shape)) < .3
    if not (a.any() and b.any()): return
    A,B = (np.argwhere(outline(m)) for m in (a, b))
    far = np.linalg.norm(A[:,None]-B[None], axis=-1)
    assert math.isclose(hausdorff(a, b), max(np.percentile(far.min(k), 95) for k in (0, 1)), abs_tol=1e-9)
    assert hausdorff(a, b)==hausdorff(b, a) and hausdorff(a, a)==0

def test_outlines_end_at_the_edge_of_the_image():
    full = np.ones((4,4), bool)
    assert outline(full).sum()==12 and not outline(full)[1:3,1:3].any()

def test_soft_dice_is_the_published_one():
    z = torch.tensor([[[2.,0.,0.,0.],[0.,0.,1.,-1.]]])
    t = F.one_hot(torch.tensor([[0,1,1,0]]), 2).movedim(-1, 1).float()
    lost = overlap_lost(z, t, 5e-6) # MONAI adds s where there are 2s here
    assert torch.allclose(lost, torch.tensor([.264126,.319706]), atol=1e-6) and math.isclose(lost.mean(), .291916, abs_tol=1e-6)

@pytest.mark.parametrize('gamma', [0., 2., 4.5])
def test_focal_term_of_equal_scores_does_not_depend_on_gamma(gamma):
    z,y = torch.zeros(1, 2, 1, 2, dtype=torch.float64),torch.tensor([[[0,1]]])
    both = [Segmentation(variant=v, gamma=gamma).loss(z, y).item()-.5 for v in ('released','intended')]
    assert math.isclose(both[0], 2*.173287, abs_tol=1e-5) and math.isclose(both[1], 4*.173287, abs_tol=1e-5)

def test_focal_term_is_a_weighted_mean_of_cross_entropies():
    z,t = torch.randn(2, 3, 50, generator=gen(), dtype=torch.float64),(torch.rand(2, 3, 50, generator=gen(1)) < .3).double()
    p = torch.where(t==1, z.sigmoid(), 1-z.sigmoid())
    f,weight = (1-p)**2,torch.where(t==1, .1, .9)
    assert torch.allclose(focal(z, t, 2., .1), -(weight*f*p.log()).sum(-1)/f.sum(-1))

def test_released_dice_is_of_the_batch_and_forgives_absent_classes():
    z,y = torch.randn(3, 3, 4, 4, generator=gen(), dtype=torch.float64),torch.randint(2, (3, 4, 4), generator=gen())
    def dice_part(task): return (task.loss(z, y)-torch.stack([task.units(z.movedim(1, 0).reshape(1, 3, -1), y.reshape(1, -1))]).mean()).abs()
    assert dice_part(Segmentation(variant='released')) < 1e-12 < dice_part(Segmentation())
    p,t = z.softmax(1),F.one_hot(y, 3).movedim(-1, 1).double()
    s,over = 1e-5,(0, 2, 3)
    lost = 1-((p*t).sum(over)+s)/((p.sum(over)+t.sum(over))/2+s)
    sharp = focal(z.movedim(1, 0).reshape(1, 3, -1), t.movedim(1, 0).reshape(1, 3, -1), 4.5, .1).sum()/y.numel()
    assert torch.allclose(Segmentation(variant='released').loss(z, y), lost[:2].sum()/3+sharp)
    assert torch.allclose(Segmentation().loss(z, y), Segmentation().each(z, y).mean())

def test_scores_of_segmentation_are_means_over_classes_and_then_samples():
    y = torch.zeros(2, 2, 2).long(); y[0,0],y[1,0,0],y[1,1,1] = 1,1,2
    got = y.clone(); got[1,1,1] = 0
    z = F.one_hot(got, 3).movedim(-1, 1).float()
    task = Segmentation(); values = task.values(z, y)
    assert torch.allclose(values['dice'], torch.tensor([[1.,nan],[1.,0.]]).double(), equal_nan=True)
    assert task.metrics(values)['dice']==75 and task.metrics(values)['accuracy']==87.5 and 'hd95' not in values

# --- what is refused ---

@pytest.mark.parametrize('name,z,y,words', [
    ('classification', (2,3), torch.tensor([0,3]), 'class 3, but the network gives 3 scores'), ('classification', (2,3), torch.tensor([-100,0]), 'class -100'),
    ('classification', (2,3), torch.tensor([0.,1.]), 'int64, not float32'), ('classification', (2,3), torch.zeros(2, 3), 'targets [n]'),
    ('classification', (2,3,4,4), torch.zeros(2).long(), 'scores [n, classes]'), ('classification', (2,1), torch.zeros(2).long(), 'at least 2'),
    ('asymmetric', (2,3), torch.tensor([0,3]), 'class 3'), ('asl', (2,3), torch.tensor([3]), 'class 3'),
    ('multilabel', (2,3), torch.zeros(2, 4), '4 labels, but the network gives 3'), ('multilabel', (2,3), torch.zeros(2, 3).long(), 'not int64'),
    ('multilabel', (2,3), torch.full((2, 3), 2.), '0, 1, or NaN'), ('multilabel', (2,3), torch.zeros(2), '[n, labels]'),
    ('segmentation', (2,3,4,4), torch.zeros(2, 4, 5).long(), '[4, 5] do not fit'), ('segmentation', (2,3), torch.zeros(2).long(), '[n, h, w]'),
    ('segmentation', (2,3,4,4), torch.full((2, 4, 4), 3), 'class 3'), ('segmentation', (2,3,4,4), torch.zeros(2, 4, 4), 'int64')])
def test_targets_that_do_not_fit_are_refused(name, z, y, words):
    with pytest.raises(Refused) as e: TASKS[name]().check(torch.zeros(z), y)
    assert words in str(e.value)

@pytest.mark.parametrize('name', TASKS)
def test_answers_of_a_few_samples_are_enough_to_check_all_targets(name):
    task,z,y = answers(name)
    task.check(z[:1], y)
    if name=='multilabel': task.check(z, torch.full_like(y, nan))

@pytest.mark.parametrize('name,wrong', [('classification', dict(label_smoothing=2.)), ('multilabel', dict(label_smoothing=.1)), ('segmentation', dict(label_smoothing=.1)),
    ('segmentation', dict(variant='intend')), ('asymmetric', dict(gamma_neg=-1.)), ('asymmetric', dict(eps=.5)), ('asymmetric', dict(gama=1.))])
def test_settings_that_mean_nothing_are_refused(name, wrong):
    with pytest.raises(Refused): make(TASKS, 'task', name, **wrong)

# --- what is known of metrics ---

@pytest.mark.parametrize('printed', [0., 37.3, -2.])
def test_margins(printed):
    "A point of accuracy, AUC and Dice, 5 % of everything else"
    assert {metric_of(m).margin(printed) for m in ('accuracy','val_accuracy','personal_accuracy','auc','dice')}=={1.}
    assert {metric_of(m).margin(printed) for m in ('loss','traffic','bytes_up')}=={.05*abs(printed)}

@pytest.mark.parametrize('n,classes,level', [(10000, 100, 1.2), (10000, 10, 10.59), (1000, 10, 11.9)])
def test_chance(n, classes, level): assert METRICS['accuracy'].chance(n, classes)==pytest.approx(level)

def test_directions_and_prefixes():
    assert {k: metric_of(k).better for k in ('client_dice','val_auc','young_hd95','train_loss','seconds','one_empty')}==dict(
        client_dice='higher', val_auc='higher', young_hd95='lower', train_loss='lower', seconds='lower', one_empty='lower')
    assert metric_of('hd95') is METRICS['hd95'] and metric_of('inaccuracy').better=='lower', 'an ending is a word'

def test_the_longest_known_ending_decides(monkeypatch):
    monkeypatch.setitem(METRICS, 'balanced_accuracy', mine := Metric(tolerance=2.))
    assert metric_of('val_balanced_accuracy') is mine and metric_of('val_accuracy') is METRICS['accuracy']

@pytest.mark.parametrize('name', TASKS)
def test_the_main_metric_is_told_from_the_rows(name):
    task,z,y = answers(name)
    names = {*task.scores} | {f'val_{k}' for k in task.scores}
    assert main_of(names)==task.main and {*task.scores} <= METRICS.keys() and main_of(['bytes'])=='accuracy'

def test_a_task_of_your_own_is_its_difference():
    @dataclass(frozen=True)
    class Hinge(Task):
        "Multi-class hinge loss"
        def each(self, z, y): return F.multi_margin_loss(z, y, reduction='none')
        def loss(self, z, y): return self.each(z, y).mean()
    z,y = torch.randn(6, 3, generator=gen()),torch.arange(6)%3
    assert of_parts(Hinge(), Hinge().values(z, y), [range(6)])[0]['loss']==pytest.approx(Hinge().loss(z, y).item(), rel=1e-6)

# --- stacking and tracing ---

WORLD = dict(classification=Task(label_smoothing=.1), multilabel=MultiLabel(), asymmetric=Asymmetric(), clamped=Asymmetric(gamma_pos=1., eps=1e-6), asl=ASLSingleLabel(),
    segmentation=Segmentation(), segmentation_released=Segmentation(variant='released'))

def clients(name, n=3, b=5):
    "Stacked weights, samples and targets of some clients, and the network that they share"
    g,double = gen(),dict(dtype=torch.float64)
    if name.startswith('segmentation'):
        return torch.randn(n, 3, 2, 3, 3, generator=g, **double),torch.randn(n, b, 2, 6, 6, generator=g, **double),torch.randint(3, (n, b, 6, 6), generator=g),lambda w,x: F.conv2d(x, w, padding=1)
    w,x = torch.randn(n, 4, 3, generator=g, **double),torch.randn(n, b, 4, generator=g, **double)
    y = torch.randint(3, (n, b), generator=g) if name!='multilabel' else torch.where(torch.rand(n, b, 3, generator=g) < .3, nan, torch.randint(2, (n, b, 3), generator=g).double())
    return w,x,y,lambda w,x: x@w

@pytest.mark.parametrize('name', WORLD)
def test_gradients_of_stacked_clients_are_those_of_each(name):
    w,x,y,net = clients(name)
    g = torch.func.grad_and_value(lambda w, x, y: WORLD[name].loss(net(w, x), y))
    for together,alone in zip(torch.vmap(g)(w, x, y), zip(*(g(*a) for a in zip(w, x, y)))):
        assert together.isfinite().all() and torch.allclose(together, torch.stack(alone), rtol=0, atol=1e-10)

@pytest.mark.parametrize('name', WORLD)
def test_traced_gradients_are_the_same_for_one_and_for_many(name):
    w,x,y,net = clients(name)
    def step(w, x, y): return list(torch.func.grad_and_value(lambda w: WORLD[name].loss(net(w, x), y))(w))
    one = trace(step, w[0], x[0], y[0])
    many = trace(torch.vmap(one), w, x, y)
    apart = [[one(*a), step(*a)] for a in zip(w, x, y)]
    for ours,eager in apart: assert all(torch.allclose(s, t, rtol=0, atol=1e-10) for s,t in zip(ours, eager))
    for s,t in zip(many(w, x, y), zip(*(e for _,e in apart))): assert torch.allclose(s, torch.stack(t), rtol=0, atol=1e-10)
    for s,t in zip(one(w[1], x[2], y[0]), step(w[1], x[2], y[0])): assert torch.allclose(s, t, rtol=0, atol=1e-10), 'a trace holds for other data'

@pytest.mark.parametrize('name', WORLD)
def test_gradients_are_those_of_finite_differences(name):
    w,x,y,net = clients(name, n=1, b=2)
    assert torch.autograd.gradcheck(lambda w: WORLD[name].loss(net(w, x[0]), y[0]), w[0].requires_grad_())
