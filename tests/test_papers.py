"The transcribed numbers against a second transcription, made column by column from the page."
import math
import pytest
from fedbook.errors import Refused
from fedbook.papers import papers, printed, printed_ids
from fedbook.results import comparison

SECOND = {
 '000-table6': dict(epochs='4 8 16', accuracy='68.65 72.64 73.43', loss='1.1019 0.9647 0.9901'),
 '000-table7': dict(classes='1 1 1 5 5 5 10 10 10 50 50 50', epochs='4 8 16 4 8 16 4 8 16 4 8 16', rounds='8 4 2 8 4 2 8 4 2 8 4 2',
    accuracy='5.52 4.91 4.32 35.06 24.02 11.21 47.03 35.80 19.64 66.91 61.87 39.36',
    loss='22.59 26.87 29.54 7.91 8.27 9.96 7.83 8.10 9.56 5.85 5.17 9.45')}
TABLES = [printed(i) for i in printed_ids()]
each = pytest.mark.parametrize('t', TABLES, ids=lambda t: t.id)

def test_five_papers():
    ps = papers()
    assert [p.id for p in ps]==['000','001','002','003','004'] and [p.short for p in ps]==['pTaLoS','PFedEdit','LP-FT','FedCSPACK','FedRef']
    assert [len(p.tables) for p in ps]==[10,9,8,4,6] and [len(p.figures) for p in ps]==[2,4,6,10,5]
    assert [len(p.authors) for p in ps]==[4,5,0,4,3]
    for p in ps: assert len(set(p.tables))==len(p.tables) and len(set(p.figures))==len(p.figures) and p.title==p.title.strip()

def test_the_ids(): assert printed_ids()==['000-table6','000-table7']

@pytest.mark.parametrize('table', SECOND)
def test_second_transcription(table):
    t = printed(table)
    for k,text in SECOND[table].items(): assert [c[k] for c in t.cells]==[float(v) for v in text.split()]

@each
def test_cells_are_whole(t):
    for c in t.cells:
        assert list(c)==[*t.index, *t.metrics]
        assert all(isinstance(v, (int,float)) and math.isfinite(v) for v in c.values())
        if t.unit.get('accuracy')=='percent': assert 0 <= c['accuracy'] <= 100
        if 'loss' in c: assert c['loss'] > 0
    places = [tuple(c[k] for k in t.index) for c in t.cells]
    assert len(set(places))==len(places) and len(t.bold)==len(t.cells)
    assert t.label in t.paper.tables and t.caption and t.where and t.silent
    assert set(t.columns)=={*t.index, *t.metrics} and set(t.best)<=set(t.metrics) and set(t.block)<=set(t.index)

@each
def test_bold_is_best_in_its_block(t):
    for m,direction in t.best.items():
        for place in {tuple(c[k] for k in t.block) for c in t.cells}:
            inside = [(c[m], m in b) for c,b in zip(t.cells, t.bold) if tuple(c[k] for k in t.block)==place]
            best = (max if direction=='highest' else min)(v for v,_ in inside)
            assert [v for v,b in inside if b]==[best]

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
    assert len(c.frame)==len(t.cells)*len(t.metrics) and set(c.frame.verdict)=={'not run'} and t.caption in c.to_markdown()
    assert c.wide('loss').frame['printed'].tolist()[0]==f'{t.cells[0]["loss"]:.{4 if t.label=="6" else 2}f}'
