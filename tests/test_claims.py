"Claims name cells that exist, and a verdict is what the pairs say."
import math
from dataclasses import replace
from pathlib import Path
import numpy as np, pytest
from scipy.stats import nct, t
from fedbook.claims import (against, at_equal, AtEqual, Claim, claims, common_level, Correlation, decided, examined, first_reached, gap_in_print, holds_in_print, made, rise, seeds_needed,
    spearman, verdicts)
from fedbook.errors import Refused
from fedbook.manifest import experiments
from fedbook.papers import printed, printed_ids
from fedbook.results import ALPHA, p_value

EVERY = claims()
NOT_PRINTED = {'002-table7-falls','002-table7-distortion', # of the global model, and of features: Table 7 prints neither
    '004-table2-operations','004-table2-seconds', *(f'004-table3-{d}-p' for d in ('femnist','cinic10','fets2022')), # words in Table II, dashes in Table III
    *(f'004-table{n}-{s}' for n in (4, 5, 6) for s in (50, 75, 90)), *(f'004-table{n}-forgetting{s}' for n in (4, 5) for s in ('','-fedavg'))} # other thresholds, and what nobody measured
ROOT = Path(__file__).resolve().parents[1]
def run(seed, accuracy, variant='intended', model='vit', **cell): return dict(model=model, data='x', stand_in=dict(model='a toy'), seed=seed, cell=cell, variant=variant, fingerprint=f'{seed}{cell}{variant}', rows=[[1, None, 'accuracy', accuracy]], paper='000', table='000-table6', profile='smoke')
def pairs(*epochs, **kw): return Claim('x', '000-table6', '', '', [[dict(epochs=a), dict(epochs=b)] for a,b in epochs], **kw)
def verdict(*better, c=pairs((8, 4))): # per seed, by how much 8 epochs beat 4
    records = [r for s,d in enumerate(better) for r in (run(s, 50., epochs=4), run(s, 50.+d, epochs=8))]
    return examined(c, records, 'intended')

def in_print(c, cell): # a printed value, or none
    there = [k for k in printed(c.table).cells if cell.items() <= {**printed(c.table).fixed, **k}.items()] if c.table in printed_ids() else []
    return there[0].get(c.metric) if there else None

@pytest.mark.parametrize('c', [c for c in EVERY if type(c) is Claim], ids=lambda c: c.id)
def test_a_pair_is_found_in_print_by_its_words(c):
    both = {against(a, b): (in_print(c, a), in_print(c, b)) for a,b in c.pairs}
    assert {w: gap_in_print(c, w) for w in both}=={w: None if None in v else v[0]-v[1] for w,v in both.items()}
    assert gap_in_print(c, 'something else') is gap_in_print(c, None) is None

def test_other_claims_have_no_pair_in_print():
    "Of a trend, and of pairs where another metric is equal"
    cell = dict(epochs=8),dict(epochs=4)
    assert gap_in_print(AtEqual('x', '000-table6', '', '', [cell]), against(*cell)) is gap_in_print(Correlation('x', '000-table6', '', '', 'epochs'), against(*cell)) is None
    assert round(gap_in_print(pairs((8, 4)), against(*cell)), 2)==3.99

@pytest.mark.parametrize('c', EVERY, ids=lambda c: c.id)
def test_a_claim_names_cells_of_its_table(c):
    assert c.id.startswith(c.table) and c.text and c.where.startswith(('Section','Appendix'))
    if c.table not in printed_ids() or c.id in NOT_PRINTED:
        assert c.table in experiments() and holds_in_print(c) is None
        return
    t = printed(c.table)
    if isinstance(c, Correlation): assert c.x in t.index and len([d for d in t.cells if c.cell.items() <= d.items()]) > 2; return
    assert c.pairs
    for a,b in c.pairs: assert isinstance(t.value(a, c.metric), float) and isinstance(t.value(b, c.metric), float) and a!=b

def test_ids_are_unique(): assert len({c.id for c in EVERY})==len(EVERY)

def test_every_transcribed_table_has_claims(): assert {c.table for c in EVERY} >= set(printed_ids())

def test_the_five_claims_of_lpft_are_asked():
    "Highest global accuracy on each data set; overfitting in every sweep; distortion and drop; equal local loss; PEFT. Each table's notebook asks its own"
    ids = {c.id for c in EVERY}
    assert {f'002-table2-{d}-{k}' for d in ('cifar10-c','cifar100-c','digit5','domainnet','chexpert','celeba') for k in ('global','average')} <= ids
    assert {f'002-figure2{p}-{k}' for p in 'abc' for k in ('local','global')} | {'002-figure3a-correlation','002-figure3b-flood','002-figure3b-equal','002-table7-falls','002-table7-distortion'} <= ids
    for t in ('002-table2','002-table7','002-figure2','002-figure3'):
        assert f"verdicts('{t}'" in (ROOT/'nbs'/experiments()[t].notebook).read_text()

def test_overfitting_at_every_value_is_a_claim_about_all_of_them():
    "One value at which the global accuracy rises is enough"
    c, = (c for c in EVERY if c.id=='002-figure2a-global')
    def runs(drops): return [dict(run(s, 50.), cell=dict(panel='a', at=v, when=w), rows=[[9, None, 'cross_global', 50.-(d+s/9 if w=='fine-tuned' else 0)]]) for v,d in drops.items() for s in range(3) for w in ('global model','fine-tuned')]
    assert examined(c, runs({1e-3: 5., 5e-4: 4., 1e-4: 3.}), 'intended')['verdict']=='holds'
    assert examined(c, runs({1e-3: 5., 5e-4: 4., 1e-4: -3.}), 'intended')['verdict']=='fails'

def test_what_the_printed_numbers_say():
    "Five sentences of the papers are not true of their own tables"
    no = {c.id for c in EVERY if holds_in_print(c) is False}
    assert {i for i in no if i[:3]!='001'}=={"000-table5-lowest","000-table10-mode",'004-table3-femnist','004-table4-printed','004-table5-printed'} # those of PFedEdit stand in test_chapter_pfededit.py

@pytest.mark.parametrize('better,word', [((1., 1.2, 1.1), 'holds'), ((-1., -1.2, -1.1), 'fails'), ((1., 2., .1), 'undecided: leans to yes, 3 seeds, about 9 needed'),
    ((-1., -2., -.1), 'undecided: leans to no, 3 seeds, about 9 needed'), ((9.,), 'undecided: leans to yes, 1 seed, at least 2 needed'), ((-9.,), 'undecided: leans to no, 1 seed, at least 2 needed'),
    ((0.,), 'undecided: leans to neither side, 1 seed'), ((0., 0.), 'undecided: equal in every seed'), ((1., -1.01), 'undecided: leans to no, 2 seeds, over 1000 needed'), ((1., math.nan), 'diverged')])
def test_verdicts(better, word):
    found = verdict(*better)
    assert found['verdict']==word and found['seeds']==len(better)
    if word!='diverged': assert found['difference']==pytest.approx(sum(better)/len(better))

def fixed(m, values): return [run(s, v+noise, epochs=e) for s in range(m) for e,v in values.items() for noise in [.01*s*e]]

def test_one_pair_that_goes_the_other_way_is_enough_to_fail():
    assert examined(pairs((8, 4), (16, 8)), fixed(3, {4: 50., 8: 60., 16: 55.}), 'intended')['verdict']=='fails'

def test_one_pair_that_is_not_sure_leaves_the_claim_undecided():
    records = fixed(3, {4: 50., 8: 60.})+[run(s, v, epochs=16) for s,v in enumerate((60., 63., 61.))]
    found = examined(pairs((8, 4), (16, 8)), records, 'intended')
    assert found['verdict'].startswith('undecided: leans to yes, 3 seeds') and found['weakest']=='epochs 16 against epochs 8'

def test_a_reversed_pair_among_many_needs_more():
    "Holm: p = 1.3 % fails alone, but not among three"
    back = [run(s, 50.-d, epochs=16) for s,d in enumerate((1., 1.4, 1.7))]+[run(s, 50., epochs=8) for s in range(3)]
    assert examined(pairs((16, 8)), back, 'intended')['verdict']=='fails'
    many = back+[run(s, 50.-d, epochs=e) for e in (4, 2) for s,d in enumerate((3., 9., 5.))]
    assert examined(pairs((16, 8), (8, 4), (8, 2)), many, 'intended')['verdict'].startswith('undecided: leans to no, 3 seeds, about')

def test_lower_may_be_better():
    c = pairs((8, 4), better='lower')
    assert verdict(-1., -1.1, -1.2, c=c)['verdict']=='holds' and verdict(1., 1.1, 1.2, c=c)['verdict']=='fails' and 'leans to yes' in verdict(-1., c=c)['verdict']

def gaps(n, m, lead):
    "Between one A and m methods whose spreads differ by a factor of ten; the most variable one is as good as A, the others are `lead` worse"
    rng = np.random.default_rng([n, m, lead])
    return rng.normal(size=(120000//m, 1, n)) - rng.normal(size=(120000//m, m, n))*np.geomspace(10, 1, m)[:,None] + lead*(np.arange(m) > 0)[:,None]

@pytest.mark.parametrize('lead', [0, 1000])
@pytest.mark.parametrize('m', [1, 10, 30])
@pytest.mark.parametrize('n', [2, 3, 5, 10])
def test_equal_methods_are_seldom_told_apart(n, m, lead):
    "At most 2.5 % hold and 5 % fail, but for what the number of draws leaves to chance"
    found,allowed = decided(p_value(gaps(n, m, lead))),3.3*(.025*m/120000)**.5
    assert np.mean(found==1) <= .025+allowed and np.mean(found==-1) <= .05

def test_pooled_spreads_would_not_keep_the_rates():
    d = gaps(3, 10, 1000)
    error = (d.var(-1, ddof=1)/3).mean(-1, keepdims=True)**.5
    assert np.mean(decided(t.sf(d.mean(-1)/error, 20))==1) > .1

def test_decided_by_hand():
    assert [int(decided(np.array(p))) for p in ([.025], [.026], [.976], [.974], [.01, .02], [.01, .98], [.01, .988], [.5, .5])]==[1, 0, -1, 0, 1, 0, -1, 0]

def test_one_seed_decides_nothing():
    assert not decided(p_value(np.random.default_rng(0).normal(size=(100, 3, 1)))).any() and verdict(40.)['verdict'].startswith('undecided')

@pytest.mark.parametrize('d', [.5, 1., 3.])
def test_the_seeds_needed_decide_in_four_of_five_cases(d):
    n = seeds_needed([d-.5**.5, d+.5**.5]) # standard deviation 1
    power = lambda k: nct.sf(t.isf(ALPHA, k-1), k-1, d*k**.5)
    assert power(n) > .77 and power(n-2) < .8

@pytest.mark.parametrize('cifar,word', [(((1., 1.1), (1., 1.1), (1., 1.1)), 'undecided: near chance'), (((1., 1.5), (1., 1.4), (1., 1.6)), 'holds'), (((.2, 1.), (.3, 1.1), (.2, 1.)), 'undecided: near chance')])
def test_near_chance_nothing_is_decided(cifar, word):
    records = [dict(run(s, v, epochs=e), data='cifar100') for s,both in enumerate(cifar) for e,v in zip((4, 8), both)]
    claim = replace(pairs((8, 4)), table='003-figure3') # a figure, where nothing is printed
    assert examined(claim, records, 'intended')['verdict']==word
    assert examined(claim, [dict(r, data='unheard of') for r in records], 'intended')['verdict']=='holds'

def test_near_chance_a_loss_is_not_compared_but_bytes_are():
    records = [dict(run(s, 1., epochs=e), data='cifar100') for s in range(3) for e in (4, 8)]
    for r in records: r['rows'] += [[1, None, m, r['cell']['epochs']+.01*r['seed']*r['cell']['epochs']] for m in ('loss','bytes','personal_accuracy')]
    words = {m: examined(replace(pairs((8, 4), metric=m, better='higher'), table='003-figure3'), records, 'intended')['verdict'] for m in ('accuracy','loss','bytes','personal_accuracy')}
    assert words==dict(accuracy='undecided: near chance', loss='undecided: near chance', bytes='holds', personal_accuracy='holds')

def test_pairs_near_chance_are_counted_and_named():
    records = [dict(run(s, v+.01*s*e, epochs=e), data='cifar100') for s in range(3) for e,v in ((2, .8), (4, .9), (8, 20.))]
    found = examined(replace(pairs((8, 4), (4, 2)), table='003-figure3'), records, 'intended')
    assert found['verdict']=='undecided: leans to yes, 3 seeds, 1 of 2 pairs near chance' and found['weakest']=='epochs 4 against epochs 2'

def test_a_pair_counts_where_one_cell_reaches_half_of_its_printed_accuracy():
    half = {e: printed('000-table6').value(dict(epochs=e), 'accuracy')/2 for e in (4, 8, 16)}
    def found(*which, **accuracy): return examined(pairs(*which), [run(s, a+.01*s, epochs=int(e[1:])) for e,a in accuracy.items() for s in range(3)], 'intended')['verdict']
    assert found((8, 4), e4=half[4]-5, e8=half[8]-1)=='not tested: too little learnt'
    assert found((8, 4), e4=half[4]-5, e8=half[8])=='holds'
    assert found((16, 8), (8, 4), e4=half[4]-9, e8=half[8]-5, e16=half[16]+1)=='undecided: holds in part (1 of 2 pairs; else too little learnt)'
    assert found((8, 16), (8, 4), e4=half[4]-9, e8=half[8]-5, e16=half[16]+1).startswith('fails (1 of 2 pairs')
    mean = made('margin', **vars(pairs((16, 8), (8, 4))))
    records = [run(s, a+.01*s, epochs=e) for e,a in ((4, half[4]-9), (8, half[8]-5), (16, half[16]+1)) for s in range(3)]
    assert examined(mean, records, 'intended')['verdict']=='undecided: holds in part'

def test_a_run_that_has_diverged_or_lacks_the_metric_is_called_so():
    diverged = [run(s, a, epochs=e) for e,a in ((4, 1.), (8, math.nan)) for s in range(3)]
    assert examined(pairs((8, 4)), diverged, 'intended')['verdict']=='diverged'
    with pytest.raises(Refused, match='share no seed with a accuracy'): examined(pairs((8, 4)), [dict(r, rows=[]) for r in diverged], 'intended')

def test_a_diverged_run_is_named():
    records = fixed(3, {4: 50., 8: 60., 16: 70.})
    records[-1]['rows'].append([1, None, 'loss', None]) # its accuracy is finite
    found = examined(pairs((8, 4), (16, 8)), records, 'intended')
    assert found['verdict']=='diverged' and found['weakest']=='epochs 16 against epochs 8' and math.isnan(found['difference'])
    table = verdicts('000-table6', [r|dict(cell=r['cell']|dict(rounds=20)) for r in records]).to_markdown()
    assert '| diverged | epochs 16 against epochs 8 | – | 3 |' in table and 'nan' not in table

def test_claims_about_older_code_have_no_verdict():
    records = fixed(3, {4: 50., 8: 60., 16: 70.})
    records[0]['older'] = True
    assert examined(pairs((8, 4)), records, 'intended')['verdict']=='of older code' and examined(pairs((16, 8)), records, 'intended')['verdict']=='holds'
    t = verdicts('000-table6', records)
    assert t.frame.verdict.tolist()==['of older code'] and t.frame['difference [95 %]'][0]!='–' and '1 of 9 runs are of older code' in t.to_markdown()

def test_the_weakest_pair_is_named_and_missing_cells_are_counted():
    records = [run(s, v+s, epochs=e) for s in (0,1) for e,v in ((4,50.),(8,60.),(16,61.))]
    c = pairs((8, 4), (16, 8), (32, 16))
    found = examined(c, records, 'intended')
    assert found['weakest']=='epochs 16 against epochs 8' and found['verdict']=='undecided: holds in part (2 of 3 pairs)' and found['difference']==1
    assert examined(c, records, 'released')==dict(verdict='not tested: not run', pairs=0)

def test_cells_with_different_backbones_are_not_compared():
    records = [run(0, 50., epochs=4), run(0, 60., model='cnn', epochs=8)]
    assert examined(pairs((8, 4)), records, 'intended')==dict(verdict='not tested: its cells have different backbones or data', pairs=0)

def test_a_table_of_verdicts():
    t = verdicts('000-table6', [run(s, v, variant, epochs=e, rounds=20) for s in (0,1) for variant in ('intended','released') for e,v in ((4,50.),(8,60.),(16,61.))])
    assert list(t.frame)==['claim','in the printed numbers','variant','verdict','weakest pair','difference [95 %]','seeds']
    assert t.frame.verdict.tolist()==['holds','holds'] and t.frame.seeds.tolist()==['2','2'] and t.frame['in the printed numbers'].tolist()==['yes','yes'] and 'epochs 16 against epochs 8' in t.to_markdown() and 'a toy' in t.to_markdown()

def test_claims_without_a_verdict_come_last():
    def digits(s, strategy, v): return dict(run(s, v, dataset='Digit5', strategy=strategy), rows=[[15, None, m, v] for m in ('cross_global','cross_average')])
    t = verdicts('002-table2', [digits(s, m, v+s) for s in (0,1) for m,v in (('FT',50.),('LP-FT',60.))])
    tested = ['not tested' not in v for v in t.frame.verdict]
    assert any(tested) and not all(tested) and tested==sorted(tested, reverse=True) and 'Digit5' in t.frame.claim[0]

def test_words(): assert against(dict(a=1, b=2), dict(a=1, b=3))=='b 2 against b 3 (a 1)'

def test_a_table_without_claims():
    with pytest.raises(Refused, match='did you mean .000-table7'): claims('000-tabel7')

# ---- the larger X, the larger Y

def over(values, **kw):
    "Cells over α, per seed a list of accuracies"
    records = [run(s, v, alpha=a) for s,vs in enumerate(values) for a,v in zip((.1, .5, 1.), vs)]
    return examined(Correlation('x', '000-table6', '', '', 'alpha', **kw), records, 'intended')

def test_rise_by_hand():
    "Ranks 1, 3, 2: the slope is (20-10)/2; of tied x the ranks are 1½, 1½, 3; of two points it is the difference"
    assert rise([1, 10, 100], [10., 30., 20.])==5 and rise([5, 5, 9], [1., 3., 5.])==pytest.approx(2.) and rise([7, 3], [1., 4.])==-3
    assert rise([0, 1], np.array([[1., 4.], [4., 1.]])).tolist()==[3., -3.]
    assert spearman([1, 10, 100], [10., 30., 20.])==.5 and spearman([1, 2], [3., 3.]) is not None and math.isnan(spearman([1, 2], [3., 3.]))
    with pytest.raises(Refused, match='two different values'): rise([1, 1], [1., 2.])

@pytest.mark.parametrize('values,kw,word', [([(50, 56, 60), (50, 56, 61), (50, 55, 60)], {}, 'holds'), ([(50, 56, 60), (50, 56, 61), (50, 55, 60)], dict(trend='falls'), 'fails'),
    ([(50, 56, 60)], {}, 'undecided: leans to yes, 1 seed, at least 2 needed'), ([(50, 56, 60), (50, 40, 30)], {}, 'undecided: leans to no'), ([(50, 56, 60), (50, 40, math.nan)], {}, 'diverged'), ([], {}, 'not tested: not run'), ([(50,)], {}, 'not tested: not run')])
def test_correlations(values, kw, word): assert over(values, **kw)['verdict'].startswith(word)

def test_a_correlation_says_what_it_saw():
    found = over([(50, 56, 60), (50, 57, 62)])
    assert found['difference']==5.5 and found['seeds']==2 and found['weakest']=='accuracy over alpha, 3 cells, ρ = 1.00'

def test_a_seed_that_lacks_a_cell_is_left_out():
    records = [run(s, v, alpha=a) for s in (0, 1) for a,v in ((.1, 50.), (.5, 55.+s), (1., 60.)) if (s, a)!=(1, .5)]
    assert examined(Correlation('x', '000-table6', '', '', 'alpha'), records, 'intended')['seeds']==1

def test_cells_of_different_backbones_are_not_correlated():
    records = [run(0, 50., alpha=.1), run(0, 60., model='cnn', alpha=.5)]
    assert examined(Correlation('x', '000-table6', '', '', 'alpha'), records, 'intended')==dict(verdict='not tested: its cells have different backbones or data', pairs=0)

def test_a_correlation_over_clients():
    "In the last round that has the metric, of the clients that have both"
    rows = [[r, c, m, v+s] for r in (1, 2) for s in [0.] for c in range(4) for m,v in (('samples', 10.*c), ('gain', (8.-2*c)*(-1)**r*-1)) if (c, m)!=(3, 'samples')]
    c = Correlation('x', '000-table6', '', '', 'samples', 'gain', 'rises', 'clients', dict(epochs=4))
    records = [dict(run(s, 0., epochs=4), rows=rows) for s in range(3)]
    found = examined(c, records, 'intended')
    assert found['difference']==2 and found['weakest'].endswith('3 clients, ρ = 1.00')
    with pytest.raises(Refused, match='one cell'): examined(replace(c, cell={}), records+[dict(run(0, 0., epochs=8), rows=rows)], 'intended')

def test_near_chance_no_trend_is_decided():
    records = [dict(run(s, v, alpha=a), data='cifar100') for s in range(3) for a,v in ((.1, .8), (.5, .9), (1., 1.))]
    assert examined(Correlation('x', '000-table6', '', '', 'alpha'), records, 'intended')['verdict']=='undecided: near chance'

def test_a_correlation_in_print():
    t = printed('000-table6') # accuracy rises with the local epochs
    assert holds_in_print(Correlation('x', t.id, '', '', 'epochs')) and not holds_in_print(Correlation('x', t.id, '', '', 'epochs', trend='falls'))
    assert holds_in_print(Correlation('x', t.id, '', '', 'epochs', over='clients')) is None

@pytest.mark.parametrize('wrong', [dict(trend='up'), dict(over='rounds')])
def test_correlations_that_mean_nothing(wrong):
    with pytest.raises(Refused): Correlation('x', 't', '', '', 'alpha', **wrong)

@pytest.mark.parametrize('own', [0, 100])
@pytest.mark.parametrize('m', [3, 20])
@pytest.mark.parametrize('n', [2, 3, 5])
def test_trends_are_seldom_seen_where_there_are_none(n, m, own):
    rng = np.random.default_rng([n, m, own])
    y = rng.normal(size=(20000, n, m))*np.geomspace(1, 10, m) + own*rng.normal(size=(20000, n, 1))*np.arange(m)
    assert np.mean(p_value(rise(range(m), y)) <= ALPHA) <= .025+3.3*(.025/20000)**.5

# ---- at equal A

FAST,SLOW = {1: 50., 2: 70., 3: 90.},{1: 40., 2: 60., 3: 80.}
def two(seed, gain=0., equal=(FAST, SLOW), method=('FT', 'LP-FT')):
    ends = {1: 52., 2: 48., 3: 40.},{1: 52., 2: 50., 3: 46.+gain}
    return [dict(run(seed, 0., method=m), rows=[[r, None, k, v] for k,c in (('local_accuracy', a), ('accuracy', b)) for r,v in c.items()]) for m,a,b in zip(method, equal, ends)]
LATER = AtEqual('x', '000-table6', '', '', [[dict(method='LP-FT'), dict(method='FT')]], equal='local_accuracy')

def test_at_equal_by_hand():
    "80 % is reached after 2½ and after 3 rounds: global accuracies 44 and 46, though the ends are 40 and 46"
    ft,lpft = two(0)
    assert common_level(FAST, SLOW)==80 and first_reached(FAST, 80.)==2.5 and first_reached(SLOW, 80.)==3
    assert at_equal(lpft, ft, 'accuracy', 'local_accuracy')==(46., 44.)
    assert first_reached({1: 5., 2: 3., 3: 1.}, 2., -1)==2.5 and common_level({1: 5., 2: 1.}, {1: 4., 2: 2.}, -1)==2

def test_the_first_crossing_counts(): assert first_reached({1: 0., 2: 10., 3: 0., 4: 20.}, 5.)==1.5 and first_reached({1: 5., 2: 9.}, 5.)==1

def test_without_a_common_level_nothing_is_compared():
    above = {1: 85., 2: 90., 3: 95.}
    assert first_reached(above, 80.) is None and first_reached(SLOW, 81.) is None
    a,b = two(0, equal=(above, SLOW))
    assert at_equal(a, b, 'accuracy', 'local_accuracy') is None and at_equal(a, run(0, 1.), 'accuracy', 'local_accuracy') is None
    assert examined(LATER, [a, b], 'intended')==dict(verdict='not tested', pairs=0)

def test_claims_at_equal_local_accuracy():
    records = [r for s in range(3) for r in two(s, .1*s)]
    found = examined(LATER, records, 'intended')
    assert found['verdict']=='holds' and found['difference']==pytest.approx(2.1) and found['seeds']==3 and holds_in_print(LATER) is None
    assert examined(LATER, records[:2], 'intended')['verdict']=='undecided: leans to yes, 1 seed, at least 2 needed'
    back = [r|dict(cell=dict(method=dict(FT='LP-FT').get(r['cell']['method'], 'FT'))) for r in records]
    assert examined(LATER, back, 'intended')['verdict']=='fails'

def test_a_run_that_diverged_is_named_at_equal_accuracy():
    records = [r for s in range(2) for r in two(s)]
    records[0]['rows'] += [[3, None, 'loss', None]]
    assert examined(LATER, records, 'intended')['verdict']=='diverged'

def test_kinds_of_claims_in_files():
    common = dict(id='x', table='t', text='', where='')
    assert isinstance(made('correlation', **common, x='alpha'), Correlation) and isinstance(made(**common, pairs=[]), Claim) and made('equal', **common, pairs=[]).equal=='personal_accuracy'
    with pytest.raises(Refused, match="'correlation'"): made('corelation', **common)

def test_a_table_says_where_print_cannot_tell(monkeypatch):
    monkeypatch.setattr('fedbook.claims.claims', lambda table: [LATER])
    t = verdicts('000-table6', [r for s in range(3) for r in two(s, .1*s)])
    assert t.frame['in the printed numbers'].tolist()==['–'] and t.frame.verdict.tolist()==['holds']
