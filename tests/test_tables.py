"Tables in the shape of a paper: where a cell stands, what it says, which value is the best."
import math
from html.parser import HTMLParser
import pytest
from fedbook.tables import best_of, grid_html, grid_markdown, grid_of, heading, html, in_order, in_words, legend_of, markdown, Shape

def row(method='FedAvg', variant='intended', alpha=.3, metric='accuracy', ours=60., n=3, printed=61.5, verdict='lower by 1.5'):
    return dict(method=method, variant=variant, alpha=alpha, metric=metric, printed=printed, ours=ours, n=n, low=ours-1, high=ours+1, verdict=verdict)

def shown(r): return {k: '–' if isinstance(v, float) and math.isnan(v) else f'{v:.1f}' if isinstance(v, float) else str(v) for k,v in r.items()}

def grid(rows, **changes):
    shape = dict(down=['method'], across=['alpha'], names=dict(alpha='α', loss='Loss'), signs=dict(accuracy=1, loss=-1), block=['alpha']) | changes
    return grid_of(rows, list(map(shown, rows)), Shape(**shape), ['variant'])

def body(g): return [[c.strip() for c in l.split('|')[1:-1]] for l in grid_markdown(g).splitlines()]

def test_pipes_and_breaks_stay_in_their_cell():
    assert markdown(['a|b'], [['x\ny']]).splitlines()==[r'| a\|b |', '| --- |', '| x y |']

def test_text_is_escaped(): assert '<td>a&lt;b</td>' in html(['x'], [['a<b']])

def test_a_baseline_without_variants_stands_once_and_without_a_label():
    rows = [row(variant=v) for v in ('intended','released')]+[row('FedX', 'intended', ours=65.), row('FedX', 'released', ours=50., verdict='undecided')]
    assert body(grid(rows))==[['method','α = 0.3'], ['---']*2, ['FedAvg','61.5 → 60.0 [59.0, 61.0]'],
        ['FedX','61.5 → **65.0** [64.0, 66.0] intended<br>→ 50.0 [49.0, 51.0] ? released']]

def test_a_variant_that_was_not_run_leaves_the_other_with_its_name():
    rows = [row(variant=v) for v in ('intended','released')]+[row('FedX', 'intended', alpha=a) for a in (.3, .6)]+[row('FedX', 'released', n=0, ours=math.nan, verdict='not run'), row('FedX', 'released', alpha=.6, ours=55.)]
    assert body(grid(rows))[3][1]=='61.5 → 60.0 [59.0, 61.0] intended', 'elsewhere in this row and column both ran'

def test_what_was_run_without_a_number_says_why():
    rows = [row(variant=v) for v in ('intended','released')]+[row('FedX', v, n=0, ours=math.nan, verdict='not within 40 rounds') for v in ('intended','released')]
    assert body(grid(rows))[3][1]=='61.5 → not within 40 rounds'

def test_what_was_not_run_and_what_is_not_printed():
    rows = [row(n=0, ours=math.nan, verdict='not run'), row('FedX', printed=math.nan, verdict='not printed'), row('FedY', verdict='diverged', ours=math.nan)]
    assert [r[1] for r in body(grid(rows))[2:]]==['61.5 → –', '→ 60.0 [59.0, 61.0]', '61.5 → diverged']
    assert '– was not run' in legend_of(grid(rows))[0] and '?' not in legend_of(grid(rows))[0]

def test_the_best_of_a_block_follows_the_direction_of_the_metric():
    rows = [row(m, metric=k, ours=v) for m,a,l in (('A', 60., 2.), ('B', 61., 3.), ('C', 61., math.nan)) for k,v in (('accuracy', a), ('loss', l))]
    shape = Shape(['method'], ['metric'], signs=dict(accuracy=1, loss=-1), block=[])
    assert best_of(rows, shape)==[False, True, True, False, True, False]
    assert not any(best_of(rows, Shape(['method'], ['metric'], signs=shape.signs)))
    assert not any(best_of(rows[:2], shape)), 'one value is no contest'

def test_bold_in_print():
    g = grid([row('A'), row('B')], cell=['method'], bold=frozenset({('B','accuracy')}))
    assert [r[1].startswith('**61.5**') for r in body(g)[2:]]==[False, True]

def test_metrics_may_lead_down():
    rows = [row(m, metric=k) for m in 'AB' for k in ('accuracy','loss')]
    assert [r[:2] for r in body(grid(rows, down=['metric','method']))[2:]]==[['accuracy (%) ↑','A'], ['','B'], ['Loss ↓','A'], ['','B']]

def test_headings_over_several_columns():
    class Cells(HTMLParser):
        def __init__(self): super().__init__(); self.spans = []
        def handle_starttag(self, tag, attrs): self.spans += [attrs] if tag=='th' else []
    rows = [row(alpha=a, metric=k) for a in (.3, .6) for k in ('accuracy','loss')]
    seen = Cells(); seen.feed(grid_html(grid(rows, across=['alpha','metric'])))
    assert seen.spans==[[('rowspan','2')], *[[('colspan','2')]]*2, *[[('colspan','1')]]*4]

def test_undecided_is_grey_and_says_why():
    text = grid_html(grid([row(verdict='undecided (one seed)')]))
    assert text.count('color:gray')==1 and 'title="undecided (one seed)"' in text and 'gray' not in grid_html(grid([row()]))

@pytest.mark.parametrize('key,value,text', [('alpha',.3,'α = 0.3'), ('alpha',None,'–'), ('metric','loss','Loss ↓'), ('metric','accuracy','accuracy (%) ↑'), ('cpr',.3,'share of clients in a round = 0.3'), ('metric','bytes_up','bytes up ↑'), ('method','FedAvg','FedAvg')])
def test_heading(key, value, text): assert heading(Shape([], [], dict(alpha='α', loss='Loss'), dict(loss=-1)), key, value)==text

def test_order(): assert in_order([('b',1), ('a',2), ('b',2), ('b',1)])==[('b',1), ('b',2), ('a',2)]

@pytest.mark.parametrize('name,words', [('val_accuracy','validation accuracy (%)'), ('bytes_up','bytes up'), ('lam','λ')])
def test_words(name, words): assert in_words(name)==words
