"The ledger counts what the tables' files say, once per claim."
import json
import pytest
from fedbook.claims import claims
from fedbook.ledger import behind, evidence, grounds, HEADER, home, in_reach, ledger, scoreboard, tally, theorems, to_come, word
from fedbook.manifest import experiments, root

COMMITTED = ledger(root()/'figures')

def put(folder, where, *rows, head='claim,variant,verdict'):
    (folder/where).mkdir(parents=True)
    (folder/where/'claims.csv').write_text('\n'.join([head, *rows])+'\n')

def test_the_highest_profile_counts_and_smoke_never(tmp_path):
    e = experiments()['000-table7']
    put(tmp_path, '000/table7/smoke', 'a,intended,holds'); assert evidence(e, tmp_path)==[]
    put(tmp_path, '000/table7/laptop-changed-1a2b3c', 'a,intended,holds'); assert ledger(tmp_path)==[]
    for p in ('laptop','overnight','paper'):
        put(tmp_path, f'000/table7/{p}', 'a,intended,holds')
        assert evidence(e, tmp_path)[0].name==p and {l.folder.name for l in ledger(tmp_path)}=={p}

def test_a_claim_is_judged_by_the_highest_profile_that_tests_it(tmp_path):
    "In one variant at least; where none tests it the highest one says why"
    put(tmp_path, '000/table7/laptop', 'a,intended,holds', 'a,released,fails', 'b,intended,holds', 'b,released,holds', 'c,intended,not tested: x')
    put(tmp_path, '000/table7/overnight', 'a,intended,not tested', 'b,intended,not tested', 'b,released,fails', 'c,intended,not tested: y')
    found = [(l.folder.name, l.claim, l.variant, l.verdict) for l in ledger(tmp_path)]
    assert found==[('overnight', 'b', 'intended', 'not tested'), ('overnight', 'b', 'released', 'fails'), ('overnight', 'c', 'intended', 'not tested: y'),
        ('laptop', 'a', 'intended', 'holds'), ('laptop', 'a', 'released', 'fails')]

@pytest.mark.parametrize('rows,found', [
    (['a,intended,holds', 'a,released,holds'], dict(holds=1)), (['a,intended,holds', 'a,released,fails'], dict(undecided=1)),
    (['a,intended,holds', 'b,intended,holds'], dict(holds=2)), (['a,intended,holds', 'a,released,not tested'], dict(holds=1)),
    (['a,intended,not tested: its cells have different backbones or data'], {}), (['"M, intended: a",,holds', '"M, released: a",,fails'], dict(undecided=1)),
    (['a,intended,fails', 'a,released,of older code (2 of 3 pairs)'], {'of older code': 1}), (['a,intended,undecided (1 of 2 pairs)', 'a,released,diverged'], dict(undecided=1))])
def test_a_claim_is_counted_once(rows, found, tmp_path):
    put(tmp_path, '000/table7/laptop', *rows)
    assert tally(ledger(tmp_path))==found

def test_the_same_words_in_two_tables_are_two_claims(tmp_path):
    for t in ('table6','table7'): put(tmp_path, f'000/{t}/laptop', 'a,intended,holds')
    assert tally(ledger(tmp_path))==dict(holds=2)

def lean(to, n, seeds=3, rest=''): return f'undecided: leans to {to}, {seeds} seeds, about {n} needed{rest}'

@pytest.mark.parametrize('verdicts,seeds', [
    ([lean('no', 6)], (3, 6)), ([lean('no', 6), lean('no', 9, 4)], (3, 9)), ([lean('yes', 6), 'holds'], (3, 6)), ([lean('no', 6, rest=' (2 of 3 pairs)'), 'fails'], (3, 6)),
    (['undecided: leans to yes, 1 seed, about 6 needed'], (1, 6)),
    ([lean('yes', 6, rest=' (2 of 3 pairs)')], None), ([lean('yes', 6), 'fails'], None), ([lean('yes', 6), lean('no', 6)], None), ([lean('yes', 6), 'diverged'], None),
    (['holds'], None), (['fails', 'holds'], None), (['undecided: holds in part'], None), (['undecided: leans to neither side, 3 seeds'], None), ([lean('no', 6), 'undecided: leans to no, 3 seeds, over 1000 needed'], None)])
def test_seeds_help_only_where_they_can_decide(verdicts, seeds): assert to_come(verdicts)==seeds

def test_what_seeds_cost_is_estimated_from_those_that_are_there(tmp_path):
    for t,n,seconds in (('table6', 7, 3600), ('table7', 5, 900), ('table8', 11, 9)):
        put(tmp_path, f'000/{t}/laptop', f'a,intended,"{lean("no", n)}"', f'a,released,"{lean("no", n-1)}"', 'b,intended,not tested')
        (tmp_path/f'000/{t}/laptop/rows.jsonl').write_text('\n'.join(json.dumps(dict(fingerprint=str(i), seed=i//2, seconds=seconds)) for i in range(6)))
    assert in_reach(ledger(tmp_path))==[['000-table7', 'a', 3, 5, 1.], ['000-table6', 'a', 3, 7, 8.]]
    assert len(in_reach(ledger(tmp_path), 11))==3 and {t for t,*_ in in_reach(COMMITTED)} <= {*experiments()}

def test_runs_are_counted_once_and_cells_by_their_seeds(tmp_path):
    def store(where, *runs): # (fingerprint, cell, variant, seed)
        (tmp_path/where).mkdir(parents=True)
        (tmp_path/where/'rows.jsonl').write_text('\n'.join(json.dumps(dict(zip(('fingerprint','cell','variant','seed'), r), seconds=900)) for r in runs))
    each = [(f'{v}{s}', {}, v, s) for v in 'ab' for s in range(4)]
    store('000/table7/smoke', ('x', {}, 'a', 0)), store('000/table7/laptop-changed-1a2b3c', ('y', {}, 'a', 0))
    assert behind(tmp_path)==dict(runs=0, hours=0, cells=0, three=0, five=0)
    store('000/table7/laptop', *each, ('c', {}, 'b', 4)), store('001/table7/overnight', *each[:2])
    assert behind(tmp_path)==dict(runs=9, hours=2.25, cells=3, three=2, five=1)

def test_theorems_are_no_claims(tmp_path):
    put(tmp_path, '002/lemma43/laptop', 'Lemma 4.3,a,holds only under the condition', head='where,claim,verdict')
    assert not tally(ledger(tmp_path)) and theorems(ledger(tmp_path))=={'holds only under the condition': 1}

def test_the_scoreboard_adds_up():
    *rows,total = scoreboard(COMMITTED)
    for r in [*rows, total]: assert len(r)==len(HEADER) and r[1]==sum(r[2:5])
    assert total[1:]==[sum(c) for c in zip(*(r[1:] for r in rows))] and total[1]+total[5]==tally(COMMITTED).total()

def test_verdicts_are_on_claims_that_are_written_down():
    "Else a claim would be counted as tested and as not tested"
    known = {(home(c), c.text) for c in claims()}
    assert {(l.experiment.id, l.claim) for l in COMMITTED if not l.theory and '-table' in l.experiment.id} <= known

def test_a_verdict_says_what_it_rests_on():
    assert all(grounds(l)!='–' for l in COMMITTED if l.tested and not l.theory)
    assert sum(grounds(l).endswith(' in print') for l in COMMITTED if not l.theory) > 50
