"Tables in the shape of a paper: where a cell stands, what it says, which value is the best."
import math, re
from html.parser import HTMLParser
from pathlib import Path
import pytest
from fedbook.papers import printed, printed_ids
from fedbook.results import sign_of
from fedbook.tables import best_of, grid_html, grid_markdown, grid_of, heading, html, in_order, in_words, legend_of, markdown, NAMES, Shape

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

# ---- what is committed

FIGURES = Path(__file__).resolve().parents[1]/'figures'
VALIDATION = {'000-table10'} # its picture is Figure 2 of the paper: scores on validation images, of which none is printed

def committed(figures=FIGURES): return sorted(p.parent for p in figures.glob('00?/*/*/table.md') if p.parent.name in ('laptop','overnight','paper'))
def called(folder): return f'{folder.parts[-3]}-{folder.parts[-2]}'
def text(folder): return (folder/'table.md').read_text(encoding='utf-8')
def rows_in(folder): return [[c.strip() for c in re.split(r'(?<!\\)\|', l)[1:-1]] for l in text(folder).splitlines() if l.startswith('|')]
def compared(cell): return '→' in cell
def compares(folder): return called(folder) in printed_ids() or any(compared(c) for r in rows_in(folder)[2:] for c in r)
def shows_printed(folder): return any(s.startswith('printed') for s in drawn(folder))
def prints(folder): return any(re.search(r'\d\S* →', c) for r in rows_in(folder)[2:] for c in r)
def drawn(folder): return re.findall(r'<!-- (.*?) -->', (folder/'figure.svg').read_text(encoding='utf-8')) if (folder/'figure.svg').exists() else []

def in_shape(folder):
    "Do the printed coordinates lead down, and does every other cell compare?"
    t,(header,_,*rows) = printed(called(folder)),rows_in(folder)
    down = ['' if k=='metric' else t.columns[k] for k in t.down or t.index]
    return header[:len(down)]==down and all(not c or compared(c) for r in rows for c in r[len(down):])

def with_directions(folder):
    "Does an arrow stand in the legend, above each column that compares, or before its rows; and none that is wrong?"
    header,_,*rows = rows_in(folder)
    columns = [j for j in range(len(header)) if any(compared(r[j]) for r in rows)]
    def arrow(s): return re.search('[↑↓]', s)
    said = re.search(r'^- [^:\n]*[↑↓]: each cell', text(folder), re.M) or columns and all(arrow(header[j]) for j in columns) or any(arrow(c) for c in rows[0] if not compared(c))
    wrong = [w for m,w in NAMES.items() if f'{w} {"↓" if sign_of(m) > 0 else "↑"}' in text(folder)]
    return bool(said) and not wrong

def raw_names(folder):
    "Headings and texts of the picture that are names of the code"
    known = '|'.join(m for m in NAMES if '_' in m or m in ('dice','hd95'))
    return [h for h in rows_in(folder)[0] if re.search(rf'\b([a-z0-9]+_[a-z0-9_]+|{known})\b', h)]+[s for s in drawn(folder) if re.search(rf'\b({known})\b', s)]

def test_committed_tables_have_the_papers_shape():
    made = [f for f in committed() if called(f) in printed_ids()]
    assert len(made) >= 36 and not [str(f) for f in made if not in_shape(f)]

def test_committed_comparisons_say_which_direction_is_better():
    made = list(filter(compares, committed()))
    assert len(made) >= 42 and not [str(f) for f in made if not with_directions(f)]

def test_committed_pictures_show_the_printed_numbers_of_their_tables():
    made = [f for f in committed() if prints(f) and drawn(f) and called(f) not in VALIDATION]
    assert len(made) >= 34 and not [str(f) for f in made if not shows_printed(f)]

def test_committed_tables_and_pictures_speak_in_words():
    assert not {str(f): found for f in committed() if (found := raw_names(f))}

RULES = dict(shape=in_shape, direction=with_directions, printed=shows_printed, words=lambda f: not raw_names(f))
GOOD = '| Test Case | Accuracy (%) ↑ | loss ↓ |\n| --- | --- | --- |\n| FedProx with FedAvg | 64.82 → 58.17 | → 1.5 |\n'

@pytest.mark.parametrize('broken,old,new', [(None, '', ''), ('shape', 'Test Case', 'Way'), ('shape', '64.82 → 58.17', '58.17'), ('direction', ' ↓', ''),
    ('direction', '↓', '↑'), ('words', 'loss', 'val_loss'), ('printed', 'printed', 'published'), ('words', 'printed', 'printed, hd95')])
def test_each_rule_finds_what_breaks_it(tmp_path, broken, old, new):
    folder = tmp_path/'000'/'table8'/'laptop'; folder.mkdir(parents=True)
    (folder/'table.md').write_text(GOOD.replace(old, new)); (folder/'figure.svg').write_text('<!-- printed -->'.replace(old, new))
    assert [name for name,holds in RULES.items() if not holds(folder)]==[broken]*(broken is not None)
