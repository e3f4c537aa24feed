"""The pages that are notebooks as Markdown, README.md first, and the evidence on which the notebooks of papers and theorems open: `python tests/readme.py` writes them, tests compare."""
from base64 import b64decode
from io import BytesIO
import os, re
from pathlib import Path
from tempfile import TemporaryDirectory
from PIL import Image
import nbformat, numpy as np
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
PAGES = {'README.md': 'index.ipynb', 'USING.md': '00_tutorials/using.ipynb', 'figures/claims.md': '06_ledgers/claims.ipynb',
    'figures/theorems.md': '06_ledgers/theorems.ipynb', 'figures/speed.md': '06_ledgers/speed.ipynb'}

def shown(output:dict) -> str:
    "One stored output as Markdown"
    data = output.get('data', {})
    text = ''.join(data.get('text/markdown') or data.get('text/plain') or output.get('text', ''))
    return text if 'text/markdown' in data or not text else f'```\n{text.rstrip()}\n```'

def markdown(nb:dict) -> str:
    "The visible cells of a notebook"
    out = []
    for c in nb['cells']:
        source = ''.join(c['source'])
        if re.search(r'^#\| *hide', source, re.M): continue
        code = '' if 'echo: false' in source else f'```python\n{source}\n```'
        out += [source] if c['cell_type']=='markdown' else [code, *map(shown, c['outputs'])]
    return '\n\n'.join(o for o in out if o)+'\n'

def made(notebook:Path) -> dict:
    "A notebook whose hidden cells, the tables, are run now; other outputs as stored"
    nb = nbformat.read(notebook, 4)
    tables = nbformat.v4.new_notebook(cells=[c for c in nb.cells if c.cell_type=='code' and 'echo: false' in c.source])
    if tables.cells: NotebookClient(tables, kernel_name='python3', resources=dict(metadata=dict(path=notebook.parent))).execute()
    for c in tables.cells:
        c.execution_count,c.metadata = None,{}
        for o in c.outputs: o.execution_count = None
    return nb

def moved(text:str, folder:Path, page:str) -> str:
    "Links from a notebook's folder as links from its page; to a notebook that is a page, to that page"
    pages = {ROOT/'nbs'/n: ROOT/p for p,n in PAGES.items()}
    def link(m):
        to = Path(os.path.normpath(folder/m[1]))
        anchor = m[2].lower() if to in pages else m[2] # of a heading, as GitHub names it
        return f']({os.path.relpath(pages.get(to, to), (ROOT/page).parent)}{anchor})'
    return re.sub(r'\]\((?!\w+:)([^)#]+)(#[^)]*|)\)', link, text)

def fresh(page:str) -> tuple: # The page and its notebook
    "What a page should be"
    notebook = ROOT/'nbs'/PAGES[page]
    nb = made(notebook)
    return moved(markdown(nb), notebook.parent, page),nb

PAPERS = sorted(p for d in ('03_theory','04_papers') for p in (ROOT/'nbs'/d).rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts)

def evidence(id:str) -> list: # Outputs of a cell
    "What `committed(id)` displays now"
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output
    from fedbook.evidence import committed
    InteractiveShell.instance()
    with capture_output() as seen: committed(id)._ipython_display_()
    return [nbformat.v4.new_output('display_data', data=o.data) for o in seen.outputs]

def same_picture(a:bytes, b:bytes) -> bool: # Both PNG
    "Up to the palette, which another version of Pillow may choose otherwise"
    x,y = (np.asarray(Image.open(BytesIO(p)).convert('RGB'), int) for p in (a, b))
    return x.shape==y.shape and (abs(x-y).max(-1) > 60).sum() < 20

def alike(a, b) -> bool: # Outputs of a cell
    "The same text or picture"
    def text(o): return o.data.get('text/markdown') or o.data.get('text/html')
    if 'image/png' not in a.data or 'image/png' not in b.data: return text(a)==text(b) and a.data.keys()==b.data.keys()
    return same_picture(*(b64decode(o.data['image/png']) for o in (a, b)))

def opening(notebook:Path) -> tuple: # A notebook, and whether its stored evidence was the newest
    "A notebook that opens on what the highest profile has found by now"
    nb,newest = nbformat.read(notebook, 4),True
    for c in nb.cells:
        asked = re.search(r"^committed\('([^']+)'\)", c.source, re.M) if c.cell_type=='code' else None
        if not asked: continue
        now = evidence(asked[1])
        newest &= len(c.outputs)==len(now) and all(map(alike, c.outputs, now))
        c.outputs = now
    return nb,newest

OVERVIEW = ROOT/'figures'/'claims'

def drawn(folder:Path) -> Path: # The picture
    "The verdicts of `figures/claims.md` in one picture"
    from fedbook.ledger import ledger, overview
    from fedbook.results import save_figure
    save_figure(folder, overview([l for l in ledger(ROOT/'figures') if not l.theory]),
        'One mark for each variant of a claim in which it was tested: the weakest of its pairs, which falls below the dashed line now and then by luck alone. '
        'Runs of the profiles laptop and overnight, with stand-ins for backbone, data or scale; 95 % intervals by Student\'s t over paired seeds. '
        'Linear up to one point, logarithmic beyond.')
    return folder/'figure.png'

def newest(folder:Path) -> bool:
    "Shows the committed picture the verdicts as they are? `folder` takes a new one"
    return (OVERVIEW/'figure.png').exists() and same_picture((OVERVIEW/'figure.png').read_bytes(), drawn(folder).read_bytes())

if __name__=='__main__':
    with TemporaryDirectory() as folder:
        if not newest(Path(folder)): drawn(OVERVIEW)
    for notebook in PAPERS:
        nb,newest = opening(notebook)
        if not newest: nbformat.write(nb, notebook)
    for page in PAGES:
        text,nb = fresh(page)
        (ROOT/page).write_text(text)
        nbformat.write(nb, ROOT/'nbs'/PAGES[page])
