"The page of results: what it shows, that it needs no network, and, where there is a Chromium, that a browser and a phone can read it."
import html, json, re, shutil, subprocess
from html.parser import HTMLParser
from pathlib import Path
import pytest
from fedbook.manifest import experiment
from fedbook.page import badge, card, inline, label, Made, notebook_page, page, ranked, TAGS
from fedbook.papers import papers
from fedbook.runner import cost, index

ROOT = Path(__file__).resolve().parents[1]
VOID = {'meta','img','br','input','hr','link'}

class Parsed(HTMLParser):
    "The tags of a page with their attributes; `left` are those that nobody closed"
    def __init__(self, text): super().__init__(); self.tags,self.left = [],[]; self.feed(text)
    def handle_starttag(self, tag, attrs): self.tags.append((tag, dict(attrs))); self.left += [tag]*(tag not in VOID)
    def handle_endtag(self, tag): assert tag in VOID or self.left.pop()==tag
    def of(self, tag): return [a for t,a in self.tags if t==tag]

@pytest.fixture(scope='module')
def made(tmp_path_factory):
    "The page of what is committed, in a copy of figures/"
    to = tmp_path_factory.mktemp('page')/'figures'
    for f in subprocess.run(['git', 'ls-files', 'figures'], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        (to.parent/f).parent.mkdir(parents=True, exist_ok=True); shutil.copy(ROOT/f, to.parent/f)
    with pytest.MonkeyPatch.context() as m: m.setenv('FEDBOOK_FIGURES', str(to)); path = index()
    return path

@pytest.fixture(scope='module')
def parsed(made): p = Parsed(made.read_text(encoding='utf-8')); assert not p.left; return p

def test_every_table_that_is_committed_has_a_card(made, parsed):
    there = {f'{p.parts[-4]}-{p.parts[-3]}' for p in made.parent.glob('*/*/*/run.json')}
    assert {a['id'] for a in parsed.of('article')}==there and len(there) > 20
    assert [a['id'] for a in parsed.of('section')]==[p.short for p in papers() if any(t.startswith(p.id) for t in there)] # in the papers' order

def test_links_and_pictures_lead_somewhere(made, parsed):
    ids = {a['id'] for _,a in parsed.tags if 'id' in a}
    for where in [a['href'] for a in parsed.of('a')]+[a['src'] for a in parsed.of('img')]:
        if where not in {p.link for p in papers()}: # those leave the page
            assert where[1:] in ids if where.startswith('#') else (made.parent/where).is_file(), where
    images = parsed.of('img')
    small,images = ([a for a in images if (a.get('class')=='thumb')==s] for s in (True, False))
    assert len(images) > 20 and all(a['alt'] and a['loading']=='lazy' and int(a['width']) > int(a['height'])/4 > 0 for a in images)
    assert {a['src'] for a in small} <= {a['src'] for a in images} and all(a['alt']=='' and a['loading']=='lazy' for a in small) # said once

def test_neither_the_page_nor_its_notebooks_need_a_network(made, parsed):
    notebooks = sorted(made.parent.rglob('notebook.html'))
    assert len(notebooks) > 20
    for p in (parsed, *(Parsed(n.read_text(encoding='utf-8')) for n in notebooks)):
        assert [a['content'] for a in p.of('meta') if a.get('name')=='viewport']==['width=device-width,initial-scale=1']
        assert not [a for t,a in p.tags if t in ('script','link','iframe') and {'src','href'} & a.keys()]
        assert not [a['src'] for a in p.of('img') if not a['src'].startswith('data:') and '//' in a['src']]
    text = made.read_text(encoding='utf-8')
    assert '$' not in re.sub(r'<script>.*?</script>', '', text, flags=re.S) and 'prefers-color-scheme:dark' in text

def test_code_with_tags_is_shown_and_not_run(tmp_path):
    from nbformat.v4 import new_code_cell, new_notebook, new_raw_cell
    (nb := tmp_path/'notebook.ipynb').write_text(json.dumps(new_notebook(cells=[new_code_cell("'<script>a</script>'"), new_raw_cell('<script>b</script>')])))
    notebook_page(nb)
    text = nb.with_suffix('.html').read_text(encoding='utf-8')
    assert '<script' not in text and '&lt;script&gt;a' in text

def test_the_same_results_give_the_same_page(made, monkeypatch):
    before = made.read_bytes()
    monkeypatch.setenv('FEDBOOK_FIGURES', str(made.parent))
    assert index().read_bytes()==before

def run(folder, **files):
    folder.mkdir(parents=True)
    for name,text in files.items(): (folder/name.replace('_', '.')).write_text(text)
    return folder

TABLE = '<p>T</p><table>\n<thead><tr><th>a</th></tr></thead>\n<tbody>\n<tr><td>{}</td></tr>\n</tbody>\n</table>'
def test_the_highest_profile_comes_first_and_smoke_last(tmp_path):
    def one(id, profile): return Made(experiment(id), profile, run(tmp_path/id/profile, table_html=TABLE.format(f'{id} {profile}')))
    both = [one('000-table7', 'smoke'), one('000-table7', 'laptop'), one('000-table7', 'paper'), one('000-table7', 'laptop-changed-abcdef')]
    assert [m.profile for m in ranked(both)[0]]==['paper', 'laptop', 'smoke', 'laptop-changed-abcdef']
    text = page([*both, one('000-table8', 'smoke'), one('003-leak', 'smoke')], tmp_path)
    order = [text.index(s) for s in ('id="pTaLoS"', '000-table7 paper', 'Profile laptop</summary>', '000-table7 smoke', 'id="smoke"', '000-table8 smoke', '003-leak smoke')]
    assert order==sorted(order) and 'id="FedCSPACK"' not in text

def test_claims_come_before_picture_and_table_and_nothing_is_markup_that_should_not_be(tmp_path):
    claims = 'claim,in the printed numbers,variant,verdict,seeds\nA < B & C,yes,intended,"undecided: leans to yes",3\nA < B & C,yes,released,fails,3\n'
    svg = '<svg xmlns="http://www.w3.org/2000/svg" width="432.1pt" height="216pt"></svg>'
    f = run(tmp_path/'f', claims_csv=claims, figure_svg=svg, table_html=TABLE.format('$N_c$'))
    text = card([Made(experiment('000-table7'), 'laptop', f, '3 s')], tmp_path)
    order = [text.index(s) for s in ('<details>', 'Table 7. ', 'class="thumb"', 'open">undecided 1</b> ', 'no">fails 1</b>', 'A &lt; B &amp; C', 'undecided</b> leans to yes', 'no">fails<', 'class=small', '<summary>Table, ', '<msub><mi>N</mi>', 'profile laptop · 3 s')]
    assert order==sorted(order) and text.count('A &lt; B')==1 and 'width="576" height="288"' in text

@pytest.mark.parametrize('text,shown', [('$N_c = 10$', 'inline Nc=10'), ('$$\\tfrac12\\alpha &lt; 1$$', 'block 12α<1'), ('3 $ or 4', '3 $ or 4'), ('<code>$A $B</code>', '<code>$A $B</code>'), ('<a title="$A$">', '<a title="$A$">')])
def test_a_formula(text, shown):
    made = inline(text)
    math = re.fullmatch('<math [^>]*display="(\\w+)">(.*)</math>', made)
    assert (f'{math[1]} {html.unescape(re.sub("<[^>]*>", "", math[2]))}' if math else made)==shown

def test_no_formula_of_a_notebook_is_left_as_tex(made):
    for n in made.parent.rglob('notebook.html'):
        words = ''.join(TAGS.split(n.read_text(encoding='utf-8'))[::2])
        assert not re.search(r'\\(frac|mathcal|lambda|alpha|eta)\b', words), n

@pytest.mark.parametrize('verdict,colour', [('holds', 'yes'), ('fails', 'no'), ('holds only under the condition', 'open'), ('not tested: other data', 'open'), ('of older code (8 of 30 pairs)', 'open')])
def test_a_badge(verdict, colour): assert f'badge {colour}">{re.split(" [(]|:", verdict)[0]}</b>' in badge(verdict)

@pytest.mark.parametrize('verdict,rest', [('undecided: leans to no, 3 seeds (6 of 12 pairs)', 'leans to no, 3 seeds (6 of 12 pairs)'), ('of older code (8 of 30 pairs)', '8 of 30 pairs'), ('holds', '')])
def test_a_badge_keeps_brackets_in_pairs(verdict, rest): assert badge(verdict).endswith(f'</b> {rest}')

def test_each_chapter_begins_with_links_to_its_cards(made):
    for section in re.findall(r'<section id="(?!smoke)[^"]+">.*?</section>', made.read_text(encoding='utf-8'), re.S):
        nav = re.search('<nav.*?</nav>', section)[0]
        assert re.findall('href="#([^"]+)"', nav)==re.findall('<article id="([^"]+)"', section)
        assert all(name and len(name) < 80 for name in re.findall('>([^<]*)</a>', nav))

@pytest.mark.parametrize('seconds,words', [(119, '119 s'), (600, '10 min'), (9845, '2.7 h')])
def test_a_time_is_easily_read(seconds, words, tmp_path, monkeypatch):
    monkeypatch.setenv('FEDBOOK_FIGURES', str(tmp_path))
    run(tmp_path/'000'/'table7'/'smoke', run_json=json.dumps(dict(seconds=seconds)))
    assert cost('000-table7', 'smoke')==words

def test_a_notebook_that_was_made_again_is_written_again(tmp_path):
    def nb(text): (tmp_path/'notebook.ipynb').write_text(json.dumps(dict(cells=[dict(cell_type='markdown', id='a', metadata={}, source=text)], metadata={}, nbformat=4, nbformat_minor=5)))
    for text in ('first','second'):
        nb(text); notebook_page(tmp_path/'notebook.ipynb')
        assert text in (tmp_path/'notebook.html').read_text()

@pytest.mark.parametrize('text,title', [('# pTaLoS, Table 7\n\n> More', 'pTaLoS, Table 7 (table7, laptop)'), ('no title', 'fedbook (table7, laptop)')])
def test_a_page_of_a_notebook_is_called_what_the_notebook_is(tmp_path, text, title):
    (nb := tmp_path/'table7'/'laptop'/'notebook.ipynb').parent.mkdir(parents=True)
    nb.write_text(json.dumps(dict(cells=[dict(cell_type='markdown', id='a', metadata={}, source=text)], metadata={}, nbformat=4, nbformat_minor=5)))
    notebook_page(nb); assert f'<title>{title}</title>' in nb.with_suffix('.html').read_text()

CHROMIUM = next(filter(None, map(shutil.which, ('chromium','chromium-browser','google-chrome','chrome'))), None)
PROBE = """<iframe src="{src}" width="{width}" height="900"></iframe><script>
window.onload = () => {{ const d = document.querySelector('iframe').contentDocument, shown = () => [...d.querySelectorAll('article')].filter(c => c.offsetHeight).length
  const opened = () => [...d.querySelectorAll('article>details[open]')].map(c => c.parentNode.id)
  const wide = () => d.documentElement.scrollWidth - d.documentElement.clientWidth, out = {{folded: wide(), all: shown(), height: d.documentElement.scrollHeight, first: opened()}}
  d.querySelectorAll('details').forEach(e => e.open = true); out.open = wide(); d.querySelectorAll('details').forEach(e => e.open = false)
  const box = d.querySelector('input')
  if (box) {{ box.value = 'FedCSPACK 003-leak'; box.dispatchEvent(new Event('input')); out.found = shown(); out.said = d.querySelector('output').textContent; out.unfolded = opened() }}
  document.title = JSON.stringify(out) }}</script>"""

def browse(src, width, folder, card=''):
    "What Chromium sees of a page in a frame of some width, and what it complains of"
    (folder/'probe.html').write_text(PROBE.format(src=f'{src.as_uri()}#{card}', width=width))
    p = subprocess.run([CHROMIUM, '--headless=new', '--no-sandbox', '--disable-gpu', '--allow-file-access-from-files', '--enable-logging=stderr', f'--user-data-dir={folder/"profile"}',
        '--window-size=1400,1000', '--virtual-time-budget=5000', '--dump-dom', (folder/'probe.html').as_uri()], capture_output=True, text=True, timeout=120)
    return json.loads(html.unescape(re.search('<title>(.*?)</title>', p.stdout, re.S)[1])), re.findall('.*CONSOLE.*', p.stderr)

@pytest.mark.skipif(not CHROMIUM, reason='There is no Chromium here; install chromium to test the page in a browser.')
@pytest.mark.parametrize('width,linked', [(390, []), (1280, ['002-table2'])])
def test_a_browser_shows_it_without_scrolling_sideways(made, tmp_path, width, linked):
    seen,complaints = browse(made, width, tmp_path, *linked)
    assert not complaints and seen['folded']==seen['open']==0 and seen['all'] > 20
    assert seen['found']==1 and seen['said']==f'1 of {seen["all"]} shown' and seen['unfolded']==['003-leak']
    assert seen['first']==linked and seen['height'] < 250*seen['all'] # all folded but what a link leads to: a few screens

@pytest.mark.skipif(not CHROMIUM, reason='There is no Chromium here; install chromium to test the page in a browser.')
def test_a_notebook_does_not_scroll_sideways_on_a_phone(made, tmp_path):
    seen,complaints = browse(made.parent/'002'/'theorem44'/'laptop'/'notebook.html', 390, tmp_path)
    assert not complaints and seen['open']==0
