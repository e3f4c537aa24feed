"README.md is the front page notebook as Markdown: `python tests/readme.py` writes it, a test compares."
import json, re
from pathlib import Path

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
        code = re.sub(r'^#\|.*\n?', '', source, flags=re.M).strip()
        out += [source] if c['cell_type']=='markdown' else [f'```python\n{code}\n```', *map(shown, c['outputs'])]
    return '\n\n'.join(o for o in out if o)+'\n'

def fresh() -> str:
    "What README.md should be"
    return markdown(json.loads((ROOT/'nbs'/'index.ipynb').read_text()))

if __name__=='__main__': (ROOT/'README.md').write_text(fresh())
