"torchvision is cured where its operators are missing, and left alone where it is healthy"
import os, subprocess, sys

def python(code, *paths):
    "Run `code` in a fresh interpreter that looks in `paths` first"
    env = dict(os.environ, OMP_NUM_THREADS='1', PYTHONPATH=os.pathsep.join(map(str, paths)))
    r = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True)
    return r.returncode, r.stdout.strip(), r.stderr.strip()

def fake(folder, code):
    "A package `torchvision` whose import runs `code`"
    (folder/'torchvision').mkdir()
    (folder/'torchvision'/'__init__.py').write_text(code)
    (folder/'torchvision'/'part.py').write_text('')
    return folder

BROKEN = '''
import torch, torchvision.part
with open(__file__+'.log', 'a') as f: f.write('imported\\n')
def declared(op):
    try: torch._C._dispatch_find_schema_or_throw('torchvision::'+op, '')
    except RuntimeError: return False
    return True
if not declared('nms'): raise RuntimeError('operator torchvision::nms does not exist')
'''

def test_importing_compat_is_cheap_and_silent():
    code = "import fedbook.compat, sys; print([m for m in ('torchvision','timm') if m in sys.modules], fedbook.compat.library)"
    assert python(code) == (0, '[] None', '')

def test_real_torchvision_and_timm_work_silently_even_after_a_failed_import():
    code = '''
try: import torchvision
except RuntimeError: pass
from fedbook.compat import vision, timm
assert timm().create_model('resnet18', num_classes=3).num_classes == 3
tv = vision()
from torchvision.transforms import v2
import torch
assert v2.Resize((4,4), antialias=True)(torch.zeros(2,3,8,8, dtype=torch.uint8)).shape == (2,3,4,4)
assert tv.models.resnet18().fc.out_features == 1000 and vision() is tv
print('fine')'''
    assert python(code) == (0, 'fine', '')

def test_missing_operator_is_declared_and_half_imported_modules_are_dropped(tmp_path):
    code = '''
import fedbook.compat as c, gc, sys, torch
try: import torchvision
except RuntimeError: pass
old = sys.modules['torchvision.part']
tv = c.vision(); gc.collect()
print(tv.__file__, c.library is not None, tv.part is not old, tv.declared('nms'), tv.declared('qnms'))'''
    rc,out,err = python(code, fake(tmp_path, BROKEN))
    assert (rc,err) == (0,'') and out == f'{tmp_path}/torchvision/__init__.py True True True True'
    assert len((tmp_path/'torchvision'/'__init__.py.log').read_text().split()) == 3

def test_healthy_torchvision_is_left_alone(tmp_path):
    healthy = '''
import torch
own = torch.library.Library('torchvision', 'DEF')
own.define('nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')
'''
    code = "import fedbook.compat as c; tv = c.vision(); print(tv.__file__, c.library, c.vision() is tv)"
    assert python(code, fake(tmp_path, healthy)) == (0, f'{tmp_path}/torchvision/__init__.py None True', '')

def test_other_errors_pass(tmp_path):
    errors = ["RuntimeError('operator torchvision::roi_align does not exist')", "ImportError('libcudart')",
              "RuntimeError('operator torchvision::nms does not exist, or so')"]
    code = f'''
import builtins, fedbook.compat as c
for builtins.error in {errors}:
    try: c.vision()
    except Exception as e: assert repr(e) == error and c.library is None
    else: assert False
print('fine')'''
    assert python(code, fake(tmp_path, 'import builtins; raise eval(builtins.error)')) == (0, 'fine', '')
