"README.md is the front page notebook as Markdown: `python tests/readme.py` writes it, a test compares."
import re
from pathlib import Path
import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]

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

def fresh() -> str:
    "What README.md should be: tables made now from the files they show, other outputs as stored in the front page"
    nb = nbformat.read(ROOT/'nbs'/'index.ipynb', 4)
    tables = nbformat.v4.new_notebook(cells=[c for c in nb.cells if c.cell_type=='code' and 'echo: false' in c.source])
    NotebookClient(tables, kernel_name='python3', resources=dict(metadata=dict(path=ROOT/'nbs'))).execute()
    return markdown(nb)

if __name__=='__main__': (ROOT/'README.md').write_text(fresh())
