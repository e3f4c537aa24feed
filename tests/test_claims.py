"Claims name cells that exist, and a verdict is what the pairs say."
import pytest
from fedbook.claims import against, Claim, claims, holds_in_print, examined, verdicts
from fedbook.errors import Refused
from fedbook.papers import printed, printed_ids

EVERY = claims()
def run(seed, accuracy, variant='intended', model='vit', **cell): return dict(model=model, data='x', stand_in=dict(model='a toy'), seed=seed, cell=cell, variant=variant, fingerprint=f'{seed}{cell}{variant}', rows=[[1, None, 'accuracy', accuracy]], paper='000', table='000-table6', profile='smoke')
def verdict(*better, c=None): # per seed, by how much 8 epochs beat 4
    records = [r for s,d in enumerate(better) for r in (run(s, 50., epochs=4), run(s, 50.+d, epochs=8))]
    return examined(c or Claim('x', '000-table6', '', '', [[dict(epochs=8), dict(epochs=4)]]), records, 'intended')

@pytest.mark.parametrize('c', EVERY, ids=lambda c: c.id)
def test_a_claim_names_cells_of_its_table(c):
    t = printed(c.table)
    assert c.id.startswith(c.table) and c.text and c.pairs and c.where.startswith(('Section','Appendix'))
    for a,b in c.pairs: assert isinstance(t.value(a, c.metric), float) and isinstance(t.value(b, c.metric), float) and a!=b

def test_ids_are_unique(): assert len({c.id for c in EVERY})==len(EVERY)

def test_every_transcribed_table_has_claims(): assert {c.table for c in EVERY}==set(printed_ids())

def test_what_the_printed_numbers_say():
    "Two sentences of the paper are not true of its own tables"
    no = {c.id for c in EVERY if not holds_in_print(c)}
    assert no=={"000-table5-lowest","000-table10-mode"}

@pytest.mark.parametrize('better,word', [((1., 2., .1), 'holds'), ((1., 2., -.1), 'holds on average'), ((1., -2., .1), 'fails'), ((-1., -1., -1.), 'fails'), ((1.,), 'holds'), ((0.,), 'fails')])
def test_verdicts(better, word):
    t = verdict(*better)
    assert t['verdict']==word and abs(t['difference']-sum(better)/len(better)) < 1e-9 and t['share']==sum(b > 0 for b in better)/len(better)

def test_one_pair_that_goes_the_other_way_is_enough_to_fail():
    records = [run(s, v, epochs=e) for s in (0,1) for e,v in ((4,50.),(8,60.),(16,55.))]
    assert examined(Claim('x', '000-table6', '', '', [[dict(epochs=8), dict(epochs=4)], [dict(epochs=16), dict(epochs=8)]]), records, 'intended')['verdict']=='fails'

def test_lower_may_be_better():
    c = Claim('x', '000-table6', '', '', [[dict(epochs=8), dict(epochs=4)]], better='lower')
    assert verdict(-1., -2., c=c)['verdict']=='holds' and verdict(1., c=c)['verdict']=='fails'

def test_the_weakest_pair_is_named_and_missing_cells_are_counted():
    records = [run(s, v+s, epochs=e) for s in (0,1) for e,v in ((4,50.),(8,60.),(16,61.))]
    c = Claim('x', '000-table6', '', '', [[dict(epochs=8), dict(epochs=4)], [dict(epochs=16), dict(epochs=8)], [dict(epochs=32), dict(epochs=16)]])
    t = examined(c, records, 'intended')
    assert t['weakest']=='epochs 16 against epochs 8' and t['verdict']=='holds (2 of 3 pairs)' and t['difference']==1
    assert examined(c, records, 'released')==dict(verdict='not tested', pairs=0)

def test_cells_with_different_backbones_are_not_compared():
    records = [run(0, 50., epochs=4), run(0, 60., model='cnn', epochs=8)]
    t = examined(Claim('x', '000-table6', '', '', [[dict(epochs=8), dict(epochs=4)]]), records, 'intended')
    assert t==dict(verdict='not tested: its cells have different backbones or data', pairs=0)

def test_a_table_of_verdicts():
    t = verdicts('000-table6', [run(s, v, variant, epochs=e, rounds=20) for s in (0,1) for variant in ('intended','released') for e,v in ((4,50.),(8,60.),(16,61.))])
    assert t.frame.verdict.tolist()==['holds','holds'] and t.frame['in the printed numbers'].tolist()==['yes','yes'] and 'epochs 16 against epochs 8' in t.to_markdown() and 'a toy' in t.to_markdown()

def test_words(): assert against(dict(a=1, b=2), dict(a=1, b=3))=='b 2 against b 3 (a 1)'

def test_a_table_without_claims():
    with pytest.raises(Refused, match='did you mean .000-table7'): claims('000-tabel7')
