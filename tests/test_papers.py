"The transcribed numbers against a second transcription, made column by column from the page."
import math, re
import pytest
from fedbook.errors import Refused
from fedbook.papers import labels, papers, printed, printed_ids, shown_by
from fedbook.results import comparison

SECOND = {
 '000-table4': dict(accuracy='74.19 88.15 77.57 74.90', loss='1.67 1.18 1.61 1.70'),
 '000-table5': dict(sparsity='.3 .3 .6 .6 .9 .9 .3 .3 .6 .6 .9 .9', accuracy='69.55 74.68 54.86 69.20 16.80 38.94 87.12 86.39 83.56 86.86 69.51 84.34',
    loss='1.91 1.70 2.41 1.85 3.94 3.03 1.24 1.26 1.40 1.26 1.84 1.31'),
 '000-table8': dict(accuracy='64.82 65.73 74.62', loss='2.3968 6.2961 2.3621'),
 '000-table9': dict(classes='5 5 5 5 5 5 10 10 10 10 10 10 20 20 20 20 20 20 50 50 50 50 50 50',
    accuracy='2.14 2.72 8.43 4.52 1.82 11.00 10.68 19.18 21.85 18.16 4.25 26.30 30.64 49.30 47.81 49.06 13.39 49.54 66.04 76.82 75.65 74.69 42.97 76.08',
    loss='5.27 5.41 4.92 5.20 7.13 4.59 4.56 4.10 3.65 3.88 5.50 3.54 3.05 2.13 2.14 2.14 4.27 2.15 1.24 .84 .91 .90 2.35 1.01'),
 '000-table10': dict(dr='– 25 50 25 50', accuracy='71.36 74.20 69.00 66.00 70.00', loss='1.19 .98 1.20 1.34 1.21'),
 '000-table6': dict(epochs='4 8 16', accuracy='68.65 72.64 73.43', loss='1.1019 0.9647 0.9901'),
 '000-table7': dict(classes='1 1 1 5 5 5 10 10 10 50 50 50', epochs='4 8 16 4 8 16 4 8 16 4 8 16', rounds='8 4 2 8 4 2 8 4 2 8 4 2',
    accuracy='5.52 4.91 4.32 35.06 24.02 11.21 47.03 35.80 19.64 66.91 61.87 39.36',
    loss='22.59 26.87 29.54 7.91 8.27 9.96 7.83 8.10 9.56 5.85 5.17 9.45'),
 '004-table2': dict(computed='1 2 2 1', sent='1 1 2 2', served='1 1 2 2'),
 '004-table3': dict(lam='.0001 .0005 .001', p='3 3 3', femnist_loss='13.95 13.95 14.09', cinic10_loss='9.245 8.860 8.392', fets2022_dice='14.09 14.09 13.98', fets2022_hd95='8.685 8.676 8.847'),
 '004-table4': dict(rounds='13 16 11 12 12 inf 12 12'), '004-table5': dict(rounds='20 19 18 17 22 22 22 22'), '004-table6': dict(rounds='27 inf inf 24 19 28 20 16')}
TABLES = [printed(i) for i in printed_ids()]
each = pytest.mark.parametrize('t', TABLES, ids=lambda t: t.id)

def test_five_papers():
    ps = papers()
    assert [p.id for p in ps]==['000','001','002','003','004'] and [p.short for p in ps]==['pTaLoS','PFedEdit','LP-FT','FedCSPACK','FedRef']
    assert [len(p.tables) for p in ps]==[10,9,8,4,6] and [len(p.figures) for p in ps]==[2,4,6,10,5]
    assert [len(p.authors) for p in ps]==[4,5,6,4,3]
    for p in ps: assert len(set(p.tables))==len(p.tables) and len(set(p.figures))==len(p.figures) and p.title==p.title.strip()

@pytest.mark.parametrize('p', papers(), ids=lambda p: p.short)
def test_every_table_and_figure_is_made_or_has_nothing_to_run(p):
    from fedbook.manifest import experiments
    shown = shown_by(p)
    assert set(shown.values()) <= set(experiments()) and set(shown) | set(p.nothing_to_run)==set(labels(p))
    assert set(p.shown_with) <= set(shown) and not set(p.shown_with.values()) & set(p.shown_with)
    assert {f'{p.id}-{i}' for i in p.shown_with}.isdisjoint(experiments()) # else it has an id of its own
    assert {i for i in experiments() if re.match(rf'{p.id}-(table|figure)', i)} <= set(shown.values())

def test_the_ids(): assert printed_ids()==[*(f'000-table{n}' for n in range(4, 11)), *(f'001-table{n}' for n in (1,2,'2-best',*range(3, 10))), *(f'002-table{n}' for n in (2, 3, 4, 7, 8)), *(f'003-table{n}' for n in ('1','2','3','A1')), *(f'004-table{n}' for n in range(2, 7))]

@pytest.mark.parametrize('table', SECOND)
def test_second_transcription(table):
    t = printed(table)
    for k,text in SECOND[table].items(): assert [str(c[k]) if k=='dr' else c[k] for c in t.cells]==[v if k=='dr' else float(v) for v in text.split()]

@each
def test_cells_are_whole(t):
    for c in t.cells:
        assert list(c)==[*t.index, *t.metrics]
        assert all(isinstance(v, str) or math.isfinite(v) or (k, v)==('rounds', math.inf) for k,v in c.items()) and all(isinstance(c[m], float) for m in t.metrics)
        if 'accuracy' in c: assert 0 <= c['accuracy'] <= (100 if t.unit['accuracy']=='percent' else 1)
        for m in ('loss','traffic','time'): assert c.get(m, 1) > 0
    places = [tuple(c[k] for k in t.index) for c in t.cells]
    assert len(set(places))==len(places) and len(t.bold)==len(t.cells)
    assert t.label in t.paper.tables and t.caption and t.where and t.silent
    assert set(t.columns)=={*t.index, *t.metrics} and set(t.best)<=set(t.metrics) and set(t.block)<=set(t.index)

MISPRINTED = {('002-table2','CIFAR100-C','cross_c_std'): 5.37} # marked, though 5.32 is printed below it

@each
def test_bold_is_best_in_its_block(t):
    for m,direction in t.best.items():
        for place in {tuple(c[k] for k in t.block) for c in t.cells}:
            inside = [(c[m], m in b) for c,b in zip(t.cells, t.bold) if tuple(c[k] for k in t.block)==place]
            best = (max if direction=='highest' else min)(v for v,_ in inside)
            marked = [v for v,b in inside if b]
            if {v for v,_ in inside}!={best}: assert marked==[MISPRINTED.get((t.id, *place, m), best)] # where all are equal, none is marked

def test_sizes_and_budget():
    assert len(printed('000-table6').cells)==3 and len(printed('000-table7').cells)==12
    assert all(c['epochs']*c['rounds']==32 for c in printed('000-table7').cells)

def test_value():
    t = printed('000-table7')
    for c in t.cells: assert t.value({k: c[k] for k in t.index}, 'loss')==c['loss']
    assert printed('000-table6').value(dict(epochs=8, rounds=20), 'loss')==.9647
    for cell,metric,word in [(dict(classes=5), 'accuracy', '3 cells'), (dict(clases=5), 'accuracy', "'classes'"), (dict(classes=5, epochs=4, rounds=8), 'los', "'loss'"),
                             (dict(classes=6, epochs=4, rounds=8), 'loss', '0 cells'), ({}, 'loss', '12 cells')]:
        with pytest.raises(Refused, match=word): t.value(cell, metric)
    with pytest.raises(Refused, match='0 cells'): printed('000-table6').value(dict(epochs=8, rounds=8), 'loss')

def test_unknown_table():
    with pytest.raises(Refused, match='did you mean .000-table7'): printed('000-tabel7')
    for bad in ('', None, '../papers'):
        with pytest.raises(Refused): printed(bad)

@each
def test_shown_as_printed(t):
    md,html = t._repr_markdown_(), t._repr_html_()
    for text in (md, html): assert t.caption in text and t.paper.short in text and all(s in text for s in t.silent)
    assert md.count('\n| ')==len(t.cells)+2

def test_shown_with_the_printed_digits():
    assert '| 10 | 8 | 4 | 35.80 | 8.10 |' in printed('000-table7')._repr_markdown_()
    assert '| 16 | 73.43* | 0.9901 |' in printed('000-table6')._repr_markdown_() and 'rounds = 20' in printed('000-table6')._repr_markdown_()

@each
def test_a_comparison_takes_it(t):
    c = comparison([], t)
    assert len(c.frame)==len(t.cells)*len(t.metrics) and set(c.frame.verdict)=={'not run'} and t.shows in c.to_markdown() and t.caption not in c.to_markdown()
    assert all(f'{t.cells[0][m]:g}' in c.to_markdown() for m in t.metrics)

@each
def test_it_is_shown_in_the_papers_shape(t):
    grid = comparison([], t).grid()
    assert len(grid.cells)==len(t.cells)*len(t.metrics) and len(grid.rows)*len(grid.columns) >= len(grid.cells)
    assert sum(c.bold for c in grid.cells.values())==sum(map(len, t.bold))

def test_a_part_of_a_table():
    t = printed('002-table4')
    some = t.only(lambda c: c['ratio'] in (.2, .5))
    assert [c['ratio'] for c in some.cells]==[.2, .5]*2 and len(some.bold)==4 and len(t.cells)==8

def test_a_table_names_the_cells_and_the_metrics_that_are_not_compared():
    t = printed('000-table6'); few = t.only(lambda c: c['epochs']==4)
    assert t.absent(t.metrics)==[] and few.absent(t.metrics)==[f'{len(few.cells)} of {len(t.cells)} printed cells are compared; not run: '
        f'{t.columns["epochs"]} {", ".join(str(c["epochs"]) for c in t.cells if c["epochs"]!=4)}.']
    assert t.absent(['accuracy'])==[f'Printed and not compared: {t.columns["loss"]}.']

def test_a_table_names_pairs_of_coordinates_that_are_not_compared():
    "With all values of each in other cells; a pair with a value that no cell has goes unsaid"
    t = printed('003-table1'); some = {('FMNIST', .3), ('CIFAR-10', .3), ('CIFAR-10', .6), ('CIFAR-10', 1.), ('CIFAR-100', .3)}
    few = t.only(lambda c: (c['dataset'], c['alpha']) in some)
    assert few.absent(['accuracy'])==['55 of 132 printed cells are compared; not run: DataSet EMNIST; DataSet FMNIST with Dirichlet(α) 0.6, 1.0; '
        'DataSet CIFAR-100 with Dirichlet(α) 0.6, 1.0.']
