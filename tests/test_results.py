"Records survive a kill at any byte; intervals, verdicts and tables say what they should and nothing else."
import json, math, multiprocessing as mp, os, re, signal, subprocess, sys, time, warnings
import numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st
from scipy.stats import t
from fedbook import results as R
from fedbook.tables import Table
from fedbook.errors import Refused

CELLS = [dict(classes=c, epochs=4, accuracy=a, loss=l) for c,a,l in [(1, 5.5, 22.5), (5, 35.06, 7.91), (50, 66.9, 5.85)]]
KEYS = ['classes','epochs']

def run(seed=0, classes=5, acc=35., loss=8., method='fedavg', **changes):
    "A record that ends at `acc` and `loss`"
    rows = [[1, None, 'accuracy', acc+9], [2, None, 'accuracy', acc], [2, None, 'loss', loss]]
    return dict(fingerprint=f'{method}{classes}-{seed}', setting=dict(lr=.03), seed=seed, paper='000', table='table7', profile='paper', method=method,
        variant='intended', cell=dict(classes=classes, epochs=4), rows=rows, bytes_up=1, bytes_down=2, seconds=1.5, device='cpu', engine='one_by_one', data='cifar100',
        model='vit', stand_in=dict(data=None, model=None), code='c0de', version='0.1.0', when='2026-01-01T00:00:00') | changes

@pytest.fixture
def path(tmp_path): return tmp_path/'deep'/'runs.jsonl'

# ---- the file

def test_round_trip_with_scalars(path):
    r = run(seed=np.int64(3), rows=[(1, None, 'accuracy', np.float32(.5)), (1, 2, 'loss', torch.tensor(2.)), (1, None, 'loss', math.inf)])
    R.append(path, r); R.append(path, run())
    a,b = R.read(path)
    assert a['seed']==3 and a['rows']==[[1,None,'accuracy',.5], [1,2,'loss',2.], [1,None,'loss',None]] and b==run()
    assert path.read_bytes().count(b'\n')==2 and b'NaN' not in path.read_bytes()

def test_truncated_at_every_byte(path, monkeypatch):
    monkeypatch.setattr(os, 'fsync', lambda f: None)
    for s in (0, 1): R.append(path, run(s, model='é'))
    whole = path.read_bytes()
    first = whole.index(b'\n')
    for n in range(len(whole)):
        path.write_bytes(whole[:n])
        kept = (n >= first) + (n >= len(whole)-1)
        assert [r['seed'] for r in R.read(path)] == [0,1][:kept]
        R.append(path, run(2))
        assert [r['seed'] for r in R.read(path)] == [0,1][:kept]+[2]
        for line in path.read_bytes().splitlines(): json.loads(line)

def test_broken_line_in_the_middle_is_named(path):
    for s in range(3): R.append(path, run(s))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0]+lines[1][:40]+b'\n'+lines[2])
    with pytest.raises(Refused, match=r'runs\.jsonl line 2'): R.read(path)
    path.write_bytes(lines[0]+b'{"a": 1}\n')
    with pytest.raises(Refused, match='line 2'): R.read(path)

def test_missing_file_is_no_records(path): assert R.read(path)==[]

@pytest.mark.parametrize('text', [b'Dear diary', b'[1, 2', b'{"other": 1', b'{"fingerprin!'])
def test_append_never_eats_another_file(tmp_path, text):
    p = tmp_path/'diary.txt'
    p.write_bytes(text)
    with pytest.raises(Refused, match='diary'): R.append(p, run())
    assert p.read_bytes()==text

def test_done_again_counts_once(path):
    for acc in (1., 2.): R.append(path, run(acc=acc))
    (r,) = R.read(path)
    assert R.value_of(r, 'accuracy')==2.

@pytest.mark.parametrize('change,word', [(dict(code=...), "'code'"), (dict(sead=1), "'seed'"), (dict(cell=dict(seed=1)), "'seed'"),
    (dict(cell=dict(value=1)), "'value'"), (dict(rows=[[1,'accuracy',2.]]), 'row is')])
def test_malformed_records(path, change, word):
    r = {k: v for k,v in (run()|change).items() if v is not ...}
    with pytest.raises(Refused, match=word): R.append(path, r)
    assert not path.exists()

def test_full_disk_leaves_the_file_as_it_was(path, monkeypatch):
    R.append(path, run())
    before,write = path.read_bytes(),os.write
    monkeypatch.setattr(os, 'write', lambda f,b: write(f, b[:50]))
    with pytest.raises(Refused, match='could not be stored'): R.append(path, run(1))
    assert path.read_bytes()==before

def test_unwritable_place(tmp_path):
    (tmp_path/'file').write_text('')
    with pytest.raises(Refused, match='Cannot write'): R.append(tmp_path/'file'/'runs.jsonl', run())

def fill(path, first):
    for i in range(20): R.append(path, run(first+i))

def test_appending_at_the_same_time(path):
    fork = mp.get_context('fork')
    ps = [fork.Process(target=fill, args=(path, 20*i)) for i in range(4)]
    for p in ps: p.start()
    for p in ps: p.join()
    assert sorted(r['seed'] for r in R.read(path)) == list(range(80))
    assert len(path.read_bytes().splitlines()) == 80

# ---- tidy

def test_tidy_rows():
    f = R.tidy([run(rows=[[1,None,'loss',None],[1,4,'accuracy',50.]]), run(1, profile='smoke', cell=dict(dr=25))])
    assert len(f)==2+3 and math.isnan(f['value'][0]) and f['client'].tolist()[1]==4 and f['client'].isna().sum()==4 and f['client'].dtype=='Int64'
    assert f['classes'].tolist()[0]==5 and f['classes'].isna().sum()==3 and f['dr'].isna().sum()==2
    assert f['stand_in'].tolist()[0]=='' and 'smoke' in f['stand_in'].tolist()[-1] and f['bytes_down'].eq(2).all()
    assert {'value','round','metric','fingerprint'} <= set(R.tidy([]).columns)

# ---- intervals and verdicts

numbers = st.lists(st.floats(-100, 100, allow_subnormal=False), min_size=1, max_size=6)

@settings(max_examples=60, deadline=None)
@given(numbers, st.randoms())
def test_interval_properties(xs, rnd):
    mean,low,high = R.interval(xs)
    ys = xs[:]; rnd.shuffle(ys)
    assert R.interval(ys)==(mean, low, high)
    assert mean==pytest.approx(np.mean(xs), abs=1e-9)
    if len(xs)==1: assert low is high is None
    else: assert low <= mean <= high and mean-low==pytest.approx(high-mean, abs=1e-9)

def test_interval_by_hand():
    "The quantile of t is 12.706 for one degree of freedom, and 4.303 for two"
    assert R.interval([1., 3.])==pytest.approx((2., 2-12.706, 2+12.706), abs=1e-3) and R.interval([1., 2., 6.])==pytest.approx((3., 3-4.303*(7/3)**.5, 3+4.303*(7/3)**.5), abs=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert R.interval([.1]*3)==(.1,)*3

@pytest.mark.parametrize('n', range(2, 11))
def test_an_interval_covers_what_it_promises(n):
    _,low,high = R.interval(np.random.default_rng(n).normal(size=(20000, n)))
    assert abs(100*np.mean((np.array(low) <= 0) & (np.array(high) >= 0))-95) < 1

def test_an_array_is_many_intervals():
    xs = np.random.default_rng(0).normal(size=(2, 4))
    assert np.transpose(R.interval(xs)).tolist()==[list(R.interval(x)) for x in xs]

def test_wider_level_is_wider():
    xs = [1., 2., 4., 8., 16., 32.]
    (_,a,b),(_,c,d) = R.interval(xs, .5),R.interval(xs, .99)
    assert c < a < b < d

@pytest.mark.parametrize('ours,printed,stand_in,tol,word', [
    ([], 40, False, 1, 'not run'), ([], None, True, 0, 'not run'), ([1., math.nan], 40, True, 1, 'diverged'), ([math.inf], None, False, 0, 'diverged'), ([1.], None, False, 0, 'not printed'),
    ([40.], 40, False, 1, 'undecided (one seed)'), ([90.], 40, True, 1, 'undecided (one seed, stand-in)'), ([35., 45.], 40, False, 1, 'undecided'),
    ([39.9, 40., 40.1], 40, False, 1, 'agrees'), ([39.9, 40., 40.1], 40, False, .2, 'undecided'), ([41., 41.2], 40, False, 1, 'undecided'), ([41.1, 41.12], 40, False, .9, 'higher by 1.11'),
    ([38., 38.1, 38.2], 40, True, 1, 'lower by 1.9 (stand-in)'), ([50., 50.], 40, False, 1, 'higher by 10'), ([40., 40.], 40, True, 0, 'agrees (stand-in)')])
def test_verdict(ours, printed, stand_in, tol, word): assert R.verdict(ours, printed, stand_in, tol)==word

def test_on_other_data_there_is_no_level():
    for ours in ([40., 40.], [90., 90.], [40.]): assert R.verdict(ours, 40., True, 1., other_data=True)=='other data'
    assert R.verdict([], 40., other_data=True)=='not run' and R.verdict([math.nan], 40., other_data=True)=='diverged' and R.verdict([1.], None, other_data=True)=='not printed'

@settings(max_examples=40, deadline=None)
@given(numbers, st.floats(-200, 200), st.floats(0, 5))
def test_verdict_is_where_the_interval_lies(xs, printed, tol):
    word,(mean,low,high) = R.verdict(xs, printed, False, tol).split()[0],R.interval(xs)
    if low is None: assert word=='undecided'
    elif low > printed+tol+1e-6: assert word=='higher'
    elif high < printed-tol-1e-6: assert word=='lower'
    elif printed-tol+1e-6 < low and high < printed+tol-1e-6: assert word=='agrees'
    elif low < printed-tol-1e-6 or high > printed+tol+1e-6: assert word=='undecided'

def test_agreement_has_to_be_shown():
    "Two equal numbers with a large spread, which the old rule called 'agrees', and one at the edge of the margin: at most 2.5 % of draws agree"
    rng = np.random.default_rng(0)
    assert np.mean([R.verdict(x, 0., False, 1.)=='agrees' for x in rng.normal(0, 20, (500, 3))]) < .02
    assert np.mean([R.verdict(x, 0., False, 1.)=='agrees' for x in rng.normal(1, .3, (1000, 3))]) < .025+3*(.025/1000)**.5

@pytest.mark.parametrize('gaps,p', [([5.], .5), ([0., 0.], .5), ([1., 1.], 0.), ([-1., -1.], 1.), ([1., 3.], .5-math.atan(2)/math.pi), ([-3., -1.], .5+math.atan(2)/math.pi)])
def test_p_value_by_hand(gaps, p): assert R.p_value(gaps)==pytest.approx(p, abs=1e-12)

def test_p_value_of_a_diverged_seed(): assert np.isnan(R.p_value([1., math.nan])) and np.isnan(R.p_value([math.nan]))

@settings(max_examples=40, deadline=None)
@given(numbers.filter(lambda xs: len(set(xs)) > 1))
def test_p_value_and_interval_say_the_same(xs):
    p,(_,low,high) = R.p_value(xs),R.interval(xs)
    if abs(p-R.ALPHA) > 1e-6: assert (p < R.ALPHA)==(low > 0)
    if abs(1-p-R.ALPHA) > 1e-6: assert (1-p < R.ALPHA)==(high < 0)

# ---- near chance

def test_chance_level_by_hand():
    "10 % and 1.96 standard deviations of 0.3 points, rounded to whole images; a coin's AUC is ½, and a Dice has no chance"
    assert [R.chance_level([run(data=d)]) for d in ('cifar10','cifar100','unheard of')]==[pytest.approx(10.59), pytest.approx(1.2), -math.inf]
    assert R.chance_level([scored(dict(auc=50., undefined=0., loss=1.))])==50. and R.chance_level([scored(dict(dice=1., loss=1.))])==-math.inf

def scored(*values, **changes):
    "A run with these metrics, a round each"
    return run(rows=[[r, None, k, v] for r,d in enumerate(values, 1) for k,v in d.items()], **changes)

def test_each_task_has_its_own_margin_and_chance():
    cells = [dict(classes=5, epochs=4, auc=a, dice=d) for a,d in [(50.4, 50.4)]]
    def word(metric, value, **more): return R.comparison([scored({metric: value, **more}) | dict(seed=s, fingerprint=str(s)) for s in range(3)], cells, KEYS, [metric]).frame.verdict[0]
    assert word('dice', 49.5)=='agrees' and word('dice', 49.3)=='lower by 1.1' and word('auc', 51.)=='agrees', 'a point'
    assert R.at_chance([scored(dict(auc=49., undefined=0.))]) and not R.at_chance([scored(dict(auc=51., undefined=0.))]) and not R.at_chance([scored(dict(dice=0.))])

def test_at_chance():
    assert R.at_chance([run(acc=1.), run(1, acc=1.3)]) and R.at_chance([run(acc=.2)]) and not R.at_chance([run(acc=1.), run(1, acc=2.)]) and R.at_chance([run(acc=2.)], above=1.)
    assert not R.at_chance([]) and not R.at_chance([run(rows=[[1,None,'loss',2.]])]) and not R.at_chance([run(acc=1., data='unheard of')]) and not R.at_chance([run(rows=[[1,None,'accuracy',None]])])

@pytest.mark.parametrize('acc,printed,words', [(1., 1., ('undecided (near chance)','undecided (near chance)')), (1.5, 1., ('undecided (near chance)','undecided (near chance)')),
    (1., 5., ('lower by 4','lower by 14.5')), (5., 1., ('higher by 4','lower by 14.5'))])
def test_agreement_near_chance_says_nothing(acc, printed, words):
    c = R.comparison([run(s, 5, acc) for s in range(3)], [dict(classes=5, epochs=4, accuracy=printed, loss=22.5)], KEYS)
    assert tuple(c.frame.verdict)==words

@pytest.mark.parametrize('blank', [{}, dict(accuracy=None)])
def test_a_guess_beside_a_cell_that_is_not_printed(blank):
    c = R.comparison([run(s, 5, 1.) for s in range(3)], [dict(classes=5, epochs=4, **blank)], KEYS, ['accuracy'])
    assert c.frame.verdict.tolist()==['not printed'] and c.frame.ours.tolist()==[1.]

def test_personal_accuracy_has_no_known_chance():
    rs = [run(s, rows=[[1,None,'accuracy',1.],[1,None,'personal_accuracy',1.]]) for s in range(3)]
    assert R.comparison(rs, [dict(classes=5, epochs=4, accuracy=1., personal_accuracy=1.)], KEYS, ['accuracy','personal_accuracy']).frame.verdict.tolist()==['undecided (near chance)','agrees']

# ---- other data, diverged, of older code

def test_other_data_in_a_comparison():
    c = R.comparison([run(s, stand_in=dict(data='Fashion-MNIST for CIFAR-100')) for s in range(3)], CELLS, KEYS)
    assert c.frame.verdict.tolist()==['not run']*2+['other data']*2+['not run']*2 and c.frame.ours[2]==35.

@pytest.mark.parametrize('lost', [dict(loss=None), dict(acc=math.nan), dict(rows=[[2,None,'accuracy',None]])])
def test_a_diverged_seed_is_said(lost):
    "The accuracy of weights that are NaN is a number, so the loss decides as well"
    c = R.comparison([run(0), run(1), run(2, **lost)], CELLS, KEYS, ['accuracy'])
    assert c.frame.verdict[1]=='diverged' and math.isnan(c.frame.ours[1]) and '| 5 | 4 | 35.06 → diverged |' in c.to_markdown()

def test_score_of():
    assert math.isnan(R.score_of(run(loss=None), 'accuracy')) and R.score_of(run(), 'accuracy')==35. and R.score_of(run(), 'bytes') is None and R.score_of(run(rows=[[1,None,'traffic',3.]]), 'traffic')==3.
    rows = [[r,None,m,v] for m,vs in dict(accuracy=[5.,6.], val_accuracy=[9.,8.], loss=[1.,None]).items() for r,v in enumerate(vs, 1)]
    assert R.score_of(run(rows=rows), 'accuracy', 'validation')==5. and math.isnan(R.score_of(run(rows=rows), 'accuracy'))

def test_older_code_has_numbers_and_no_verdict():
    rs = [run(0, older=True), run(1), run(0, 50), run(1, 50)]
    c = R.comparison(rs, CELLS, KEYS, ['accuracy'])
    assert c.frame.verdict.tolist()==['not run','of older code','lower by 31.9'] and c.frame.ours.tolist()[1:]==[35., 35.]
    assert c.provenance['older']==1 and '1 of 4 runs are of older code' in c.to_markdown() and 'older code' not in R.comparison(rs[1:], CELLS, KEYS).to_markdown()
    assert R.comparison([run(classes=7, older=True)], CELLS, KEYS, ['accuracy']).frame.verdict.tolist()[-1]=='of older code'

def test_a_run_in_several_cells_counts_once_in_the_seconds():
    a,b = run(0),run(1)
    again = dict(a, cell={**a['cell'], 'reached': '50 %'}, older=True)
    assert R.provenance([a, b, again])['seconds']==a['seconds']+b['seconds'] > 0
    assert R.provenance([dict(a, older=True), again])['older']==1

# ---- which round

def test_round_is_never_chosen_on_test_data():
    rows = [[r,None,m,v] for m,vs in dict(accuracy=[90.,50.,60.], val_accuracy=[20.,30.,30.]).items() for r,v in enumerate(vs, 1)]
    r = run(rows=rows)
    assert R.value_of(r, 'accuracy')==60. and R.value_of(r, 'accuracy', 'validation')==50.
    for at in ('best', 'test', 'max', None):
        with pytest.raises(Refused, match='choice of round'): R.value_of(r, 'accuracy', at)
    with pytest.raises(Refused, match='val_accuracy'): R.value_of(run(), 'accuracy', 'validation')
    with pytest.raises(Refused, match='round 2'): R.value_of(run(rows=[*rows, [3,None,'loss',1.]]), 'loss', 'validation')

def test_the_round_is_chosen_by_the_main_metric_of_the_task():
    rows = [dict(dice=d, val_dice=v, val_accuracy=a) for d,v,a in ((1., 9., 5.), (2., 8., 6.))]
    assert R.main_metric([scored(*rows)])=='dice' and R.value_of(scored(*rows), 'dice', 'validation')==1.
    c = R.comparison([scored(*rows)], [dict(classes=5, epochs=4, dice=1.)], KEYS, at='validation', metrics=['dice'])
    assert c.frame.ours.tolist()==[1.] and 'best validation dice' in c.to_markdown()

def test_the_best_round_of_a_metric_that_is_better_lower(monkeypatch):
    monkeypatch.setattr(R, 'main_of', lambda names: 'hd95')
    assert R.best_round(scored(dict(val_hd95=3.), dict(val_hd95=2.), dict(val_hd95=2.)))==2

def test_the_direction_of_a_metric_is_known():
    rs = [run(s, method=m, loss=l) for s in range(3) for m,l in (('a', 1.+s*.01), ('b', 2.))]
    assert R.paired(rs, dict(method='a'), dict(method='b'), 'loss').p < .01 and R.paired(rs, dict(method='a'), dict(method='b'), 'loss', better='higher').p > .99
    with pytest.raises(Refused, match='direction'): R.sign_of('loss', 'up')

def test_order_of_rows_does_not_matter():
    r = run()
    assert R.value_of(r|dict(rows=r['rows'][::-1]), 'accuracy')==35.

def test_diverged_and_per_client():
    assert math.isnan(R.value_of(run(loss=None), 'loss')) and R.value_of(run(), 'train_loss') is None
    rows = [[2,0,'accuracy',10.],[2,1,'accuracy',30.]]
    assert R.value_of(run(rows=rows), 'accuracy')==20. and R.value_of(run(rows=[*rows,[2,None,'accuracy',11.]]), 'accuracy')==11.
    nan_first = [[1,None,'val_accuracy',None],[2,None,'val_accuracy',1.],[1,None,'accuracy',5.],[2,None,'accuracy',6.]]
    assert R.value_of(run(rows=nan_first), 'accuracy', 'validation')==6.

# ---- the comparison

def test_comparison_by_hand():
    rs = [run(s, 5, a, 8.) for s,a in enumerate([30., 31., 35.])]+[run(0, 1, 5., None)]
    c = R.comparison(rs, CELLS, KEYS)
    f = c.frame.set_index(['classes','metric'])
    assert list(c.frame.columns)==[*KEYS,'metric','printed','ours','n','low','high','difference','verdict'] and len(f)==6
    a = f.loc[(5,'accuracy')]
    assert (a.printed, a.ours, a.n, a.verdict)==(35.06, 32., 3, 'undecided') and (a.low, a.high)==pytest.approx((32-4.3027*(7/3)**.5, 32+4.3027*(7/3)**.5), abs=1e-3) and a.difference==pytest.approx(-3.06)
    assert f.loc[(5,'loss')].verdict=='agrees' and f.loc[(1,'loss')].verdict==f.loc[(1,'accuracy')].verdict=='diverged'
    assert f.loc[(50,'accuracy')].verdict=='not run' and math.isnan(f.loc[(50,'accuracy')].ours) and f.loc[(50,'loss')].n==0
    md = c.to_markdown()
    assert '| 5 | 4 | 35.06 → 32.00 [25.43, 38.57] ? | 7.91 → ' in md
    assert '| 50 | 4 | 66.90 → – | 5.85 → – |' in md and 'nan' not in md+c.to_html()
    assert 'No stand-ins' in md and 'seeds 0, 1, 2' in md and 'last round' in md

@pytest.mark.parametrize('change,word', [(dict(profile='laptop'), 'scale: reduced, profile laptop'), (dict(stand_in=dict(data=None, model='CNN|<b>')), 'model: CNN'),
    (dict(stand_in=dict(data=None, model='linear head')), 'model: linear head'), (dict(profile='smoke', stand_in=dict(scale='3 of 8 rounds')), 'scale: 3 of 8 rounds')])
def test_stand_ins_are_on_the_face(change, word):
    c = R.comparison([run(**change)], CELLS, KEYS)
    for text in (c.to_markdown(), c.to_html()): assert word in text
    assert 'undecided (one seed, stand-in)' in c.to_html() and '<b>' not in c.to_html() and c.to_markdown().count('scale:') == ('scale:' in word)

def test_nothing_run():
    c = R.comparison([], CELLS, KEYS)
    assert set(c.frame.verdict)=={'not run'} and 'Nothing has been run yet' in c.to_markdown()

def test_methods_and_variants_become_columns():
    c = R.comparison([run(), run(method='fedprox', acc=40.)], CELLS, KEYS, ['accuracy'])
    assert list(c.frame.columns)[:3]==[*KEYS,'method'] and len(c.frame)==2*3
    c = R.comparison([run(), run(variant='printed', fingerprint='x')], CELLS, KEYS, ['accuracy'])
    assert list(c.frame.columns)[:3]==[*KEYS,'variant'] and sorted(c.frame.variant.unique())==['intended','printed']

def test_unprinted_runs_are_shown():
    c = R.comparison([run(classes=7)], CELLS, KEYS, ['accuracy'])
    last = c.frame.iloc[-1]
    assert last.classes==7 and last.verdict=='not printed' and len(c.frame)==4 and '| 7 | 4 | → 35.00 |' in c.to_markdown()

def test_what_a_comparison_refuses():
    for rs,kw,word in [([run(), run(fingerprint='other')], {}, 'fedavg5-0, other'), ([run(), run(1, table='table6')], {}, 'several tables'),
                       ([run(), run(1, profile='smoke')], {}, 'several tables or profiles'), ([run()], dict(metrics=['acuracy']), "'accuracy'"),
                       ([run()], dict(index=['clases']), "'classes'"), ([run()], dict(index=None), 'index'), ([run()], dict(at='best'), 'choice of round'), ([], dict(at='best'), 'choice of round')]:
        with pytest.raises(Refused, match=word): R.comparison(rs, CELLS, **(dict(index=KEYS)|kw))

def test_validation_round_reaches_the_table():
    r = run(rows=[[1,None,'accuracy',1.],[2,None,'accuracy',2.],[1,None,'val_accuracy',9.],[2,None,'val_accuracy',8.]])
    c = R.comparison([r], CELLS, KEYS, ['accuracy'], at='validation')
    assert 1. in c.frame.ours.tolist() and 'best validation accuracy' in c.to_markdown() and c.provenance['at']=='validation'

# ---- pairs

def test_paired_by_hand():
    rs = [run(s, acc=a) for s,a in enumerate([10., 20., 30.])]+[run(s, acc=a, method='fedprox') for s,a in enumerate([9., 21., 28., 50.])]
    p = R.paired(rs, dict(method='fedavg'), dict(method='fedprox'), 'accuracy')
    half,p_ours = 4.3027*(7/9)**.5,t.sf((2/3)/(7/9)**.5, 2) # the variance of 1, -1, 2 is 7/3
    assert p.differences=={0: 1., 1: -1., 2: 2.} and (p.mean, p.low, p.high, p.p)==pytest.approx((2/3, 2/3-half, 2/3+half, p_ours), abs=1e-3)
    assert R.paired(rs, dict(method='fedavg'), dict(method='fedprox'), 'accuracy', better='lower').p==pytest.approx(1-p_ours, abs=1e-9)
    q = R.paired(rs, dict(method='fedprox'), dict(method='fedavg'), 'accuracy')
    assert q.differences=={s: -d for s,d in p.differences.items()} and q.p==pytest.approx(1-p.p)

def test_paired_refusals():
    rs = [run(), run(1, method='fedprox'), run(1, 50)]
    for a,b,word in [(dict(clases=5), {}, "'classes'"), (dict(classes=9), {}, 'No run has'), (dict(method='fedavg', classes=5), dict(method='fedprox'), 'share no seed'),
                     (dict(seed=1), dict(seed=0), 'give those of one')]:
        with pytest.raises(Refused, match=word): R.paired(rs, a, b, 'accuracy')
    with pytest.raises(Refused, match='direction'): R.paired(rs, dict(classes=5, method='fedavg'), dict(classes=5, method='fedavg'), 'accuracy', better='up')

def test_paired_diverged():
    rs = [run(loss=None), run(1), run(method='fedprox'), run(1, method='fedprox', loss=9.)]
    p = R.paired(rs, dict(method='fedavg'), dict(method='fedprox'), 'loss', better='lower')
    assert math.isnan(p.mean) and p.low is None and math.isnan(p.p)
    assert math.isnan(R.paired(rs, dict(method='fedavg'), dict(method='fedprox'), 'accuracy').p)

# ---- files

def figure():
    import matplotlib.pyplot as plt
    with R.style():
        f,ax = plt.subplots()
        ax.fill_between([1,2,3], [1,2,3], [2,3,4], alpha=.3); ax.plot([1,2,3], clip_on=True, label='a'); ax.legend()
    plt.close(f)
    return f

def test_outputs_have_the_same_bytes(tmp_path):
    c = R.comparison([run()], CELLS, KEYS)
    a,b = (R.save_outputs(tmp_path/d, c, figure(), dict(why='test')) for d in 'ab')
    assert [f.name for f in a]==['table.md','table.html','numbers.csv','provenance.json','figure.svg','figure.png']
    for x,y in zip(a, b): assert x.read_bytes()==y.read_bytes()
    assert sorted(os.listdir(tmp_path/'a'))==sorted(f.name for f in a)
    assert b'<dc:date>' not in a[4].read_bytes() and b'Software' not in a[5].read_bytes()
    p = json.loads(a[3].read_text())
    assert p['why']=='test' and p['runs']==['fedavg5-0'] and p['seeds']==[0] and p['at']=='last'
    assert [f.name for f in R.save_outputs(tmp_path/'c', c)]==['table.md','table.html','numbers.csv','provenance.json']

def words_in(svg): return ' '.join(re.findall('<!-- (.*?) -->', svg.read_text(encoding='utf-8')))

@pytest.mark.parametrize('stand_in,words', [(['data: 4,000 images for 60,000', 'scale: $2 for $3, 10 % for 20 %'], 'Stand-ins: data: 4,000 images for 60,000; scale: $2 for $3, 10 % for 20 %.'),
    ([], 'No stand-ins')])
def test_a_saved_picture_says_what_stands_in_for_the_papers_set_up(tmp_path, stand_in, words):
    f = figure(); before = [t.get_text() for t in f.texts]
    R.save_outputs(tmp_path, R.comparison([run()], CELLS, KEYS), f, dict(stand_in=stand_in))
    assert words in words_in(tmp_path/'figure.svg') and [t.get_text() for t in f.texts]==before

def test_a_note_stands_below_all_that_a_picture_shows():
    import matplotlib.pyplot as plt
    f,ax = plt.subplots(figsize=(3,2)); ax.set_xlabel('a label of\n\n\n\n\nmany lines'); label = ax.xaxis.label
    with R.footnote(f, 'many words '*30) as note: assert note.get_window_extent().y1 < label.get_window_extent().y0 and '\n' in note.get_text()
    plt.close(f)

def test_a_note_stands_below_a_legend_in_the_file_too():
    import matplotlib.pyplot as plt
    from io import BytesIO
    with R.style():
        f,ax = plt.subplots(figsize=(3,2), layout='constrained'); ax.plot([1,2], color='black', label='a'); f.legend(loc='outside lower center')
    f.legends[0].get_lines()[0].set_color('red')
    with R.footnote(f, 'many words '*30) as note: note.set_color('blue'); f.savefig(file := BytesIO(), bbox_inches='tight')
    file.seek(0)
    red,green,blue = np.moveaxis(plt.imread(file)[...,:3], -1, 0)
    legend,words = (np.flatnonzero((a > .9) & (b < .1) & (green < .1)) // red.shape[1] for a,b in ((red, blue), (blue, red)))
    assert legend.size and words.size and legend.max() < words.min()
    plt.close(f)

def test_a_table_that_compares_nothing_is_saved_as_well(tmp_path):
    import pandas as pd
    t = Table(pd.DataFrame(dict(a=[1])), 'Title.', provenance=dict(profile='smoke'))
    assert [f.name for f in R.save_outputs(tmp_path, t)]==['table.md','table.html','numbers.csv','provenance.json'] and json.loads((tmp_path/'provenance.json').read_text())==dict(profile='smoke')

def test_a_colour_by_name_is_the_palettes_where_it_is_drawn():
    import matplotlib.pyplot as plt, seaborn as sns
    from matplotlib.colors import to_hex
    outside,ax = plt.subplots(); ax.plot([1,2], color='C1')
    with R.style():
        figure,axes = plt.subplots(); axes.plot([1,2], 'o-', color='C1', markeredgecolor='C2', label='a'); key = axes.legend()
    wanted = [to_hex(c) for c in sns.color_palette('colorblind')]
    line = axes.lines[0]
    assert (line.get_color(), line.get_markerfacecolor(), line.get_markeredgecolor())==(wanted[1], wanted[1], wanted[2]) and key.get_lines()[0].get_color()==wanted[1]
    assert ax.lines[0].get_color()=='C1', 'a figure of somebody else stays as it is'
    plt.close('all')

def test_a_layout_is_found_once_and_rounded():
    import matplotlib.pyplot as plt
    with R.style():
        figure,axes = plt.subplots(1, 2, layout='constrained')
        for ax in axes: ax.set(xlabel='round', title='a')
        figure.colorbar(axes[0].pcolormesh([[1,2]]), ax=axes)
    places = [ax.get_position(original=True).bounds for ax in figure.axes]
    assert len(places)==3 and np.allclose(places, np.round(places, 6), rtol=0, atol=1e-12) and not axes[0].get_window_extent().overlaps(axes[1].get_window_extent())
    figure.draw_without_rendering()
    assert [ax.get_position(original=True).bounds for ax in figure.axes]==places
    plt.close('all')

def test_a_notebook_shows_every_figure():
    "Not only the first one, during which the backend is loaded"
    from nbclient import NotebookClient
    from nbformat.v4 import new_code_cell, new_notebook
    draw = 'import matplotlib.pyplot as plt\nfrom fedbook.results import style\nwith style(): plt.subplots()[1].plot([1,2])'
    nb = NotebookClient(new_notebook(cells=[new_code_cell(draw), new_code_cell(draw)]), kernel_name='python3').execute()
    assert ['image/png' in c.outputs[-1].get('data', {}) for c in nb.cells]==[True, True]

def test_one_legend_that_hides_nothing():
    import matplotlib.pyplot as plt
    with R.style():
        figure,axes = plt.subplots(1, 2, layout='constrained')
        for ax in axes:
            for name in ('A','B'): ax.plot([1,2], label=name)
            ax.legend()
        key = R.legend_beside(figure, 'method', printed=':')
    figure.draw_without_rendering()
    assert [t.get_text() for t in key.get_texts()]==['A','B','printed'] and [l.get_linestyle() for l in key.get_lines()]==['-','-',':'] and key.get_title().get_text()=='method'
    assert not any(ax.get_legend() for ax in axes) and not any(key.get_window_extent().overlaps(ax.get_window_extent()) for ax in axes)
    plt.close('all')

def test_dots_and_their_arms():
    import matplotlib.pyplot as plt
    figure,ax = plt.subplots()
    points,caps,(arms,) = R.dots(ax, [0,1,2], [[40., 41., 45.], [7.], []], label='ours')
    mean,low,high = R.interval([40., 41., 45.])
    assert points.get_xdata()[:2].tolist()==[mean, 7.] and math.isnan(points.get_xdata()[2])
    ends = [s[:,0].tolist() for s in arms.get_segments()[:2]]
    assert ends[0]==pytest.approx([low, high]) and ends[1]==[7., 7.]
    plt.close('all')

def test_style_leaves_no_trace():
    import matplotlib as mpl
    before,blue = dict(mpl.rcParams),mpl.colors.to_rgb('b')
    with R.style(): assert mpl.rcParams['svg.hashsalt']=='fedbook' and dict(mpl.rcParams)!=before
    assert dict(mpl.rcParams)==before and mpl.colors.to_rgb('b')==blue

def test_import_is_light():
    code = 'import fedbook.results, fedbook.papers, sys; print([m for m in ("pandas","scipy","matplotlib","seaborn") if m in sys.modules])'
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout.strip()=='[]'

def test_a_table_says_how_often_clients_were_set_aside():
    r = run(0); r['rows'] = [*r['rows'], [1, 3, 'set_aside', 1.], [2, 3, 'set_aside', 1.]]
    about = R.comparison([r], CELLS, KEYS)
    assert about.provenance['set_aside']==2 and '2 times a client was set aside' in about.to_markdown() and 'set aside' not in R.comparison([run(0)], CELLS, KEYS).to_markdown()

@pytest.mark.parametrize('printed,used,said', [('CIFAR-10', 'cifar10', 'CIFAR-10'), ('CIFAR-10', 'fashion_mnist_mini', 'mini Fashion-MNIST for CIFAR-10'), ('CIFAR10', 'cifar_10', 'CIFAR10')])
def test_a_picture_names_what_stands_in(printed, used, said):
    from fedbook.results import on_data
    assert on_data(printed, [dict(data=used)]*2)==said

@pytest.mark.parametrize('setting,n', [(dict(lr=.03), None), (dict(protocol=dict(cross=20)), 20), (dict(protocol=dict(rounds=5), after=[dict(protocol=dict(cross=100))]), 100), (dict(protocol=dict(cross=20), after=[dict(method={})]), 20)])
def test_a_table_says_on_how_many_images_models_were_scored_across_clients(setting, n):
    c = R.comparison([run(0, setting=setting), run(1, setting=setting)], CELLS, KEYS)
    assert c.provenance.get('across')==(n and [n]) and (f'on at most {n} test images of each client' in c.to_markdown())==bool(n)

def test_a_coordinate_that_some_cells_lack_keeps_their_line_in_one():
    "NaN is no key: each of its metrics had a line of its own"
    flood = run(0, cell=dict(classes=5, epochs=4, flood=.5), fingerprint='b')
    c = R.comparison([run(0), flood], [dict(classes=5, epochs=4, flood=None), dict(classes=5, epochs=4, flood=.5)], [*KEYS, 'flood'], ['accuracy','loss'])
    assert c.frame.flood.tolist()==['–']*2+[.5]*2 and [len(r) for r in c.grid().rows]==[3, 3] and c.to_markdown().count('35.00')==2
    assert re.search(r'\| – \|[^|]*35\.00[^|]*\|[^|]*8\.00', c.to_markdown())

def test_what_several_runs_share_is_named_once():
    "A run of two stages names two engines, one of three data sets three"
    some = [run(s, engine=e, data=d) for s,(e,d) in enumerate([('traced, processes', 'a'), ('processes, traced', 'a, b'), ('traced', 'b')])]
    made = R.provenance(some)
    assert made['engine']==['traced','processes'] and made['data']==['a','b']

def test_a_small_difference_keeps_two_digits():
    from fedbook.results import signed
    assert signed(0., 0., 0.)=='+0.00 [+0.00, +0.00]' and signed(12., 9.5, 14.5)=='+12.00 [+9.50, +14.50]' and signed(.004, -.002, .012)=='+0.004 [-0.002, +0.012]'
