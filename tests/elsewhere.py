"""A second device without a GPU: tensors that say they are on `meta`, hold their values on the processor, and are refused beside tensors of the processor as a GPU's are."""
from contextlib import contextmanager, nullcontext
import torch
from fedbook import evaluate, rounds, tensors, trace
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import return_and_correct_aliasing, TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device('meta')
JOINS = torch.ops.aten.cat.default, torch.ops.aten.stack.default # take no scalar of another device, as most operations do

class Elsewhere(torch.Tensor):
    "A tensor of the other device"
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held):
        t = torch.Tensor._make_wrapper_subclass(cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=DEVICE)
        t.held = held
        return t

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None): return compute(op, args, kwargs or {})
    def tolist(self): return self.held.tolist()
    def data_ptr(self): return self.held.data_ptr()
    def numpy(self, *a, **k): raise TypeError("can't convert a tensor of another device to numpy")
    __array__ = numpy

class Watch(TorchDispatchMode):
    "Makes tensors on the other device where they are asked for there"
    def __torch_dispatch__(self, op, types, args=(), kwargs=None): return compute(op, args, kwargs or {})

def held(t): return t.held if isinstance(t, Elsewhere) else t

def put(t): return Elsewhere(t) if isinstance(t, torch.Tensor) and not isinstance(t, Elsewhere) else t

def compute(op, args, kwargs):
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    there,wanted = [t for t in tensors if isinstance(t, Elsewhere)],kwargs.get('device')
    moves = op in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
    here = [t for t in tensors if (t.dim() or op in JOINS) and not isinstance(t, Elsewhere)]
    if there and here and not moves and not (op is torch.ops.aten.index.Tensor and isinstance(args[0], Elsewhere)): # indices may be on the processor
        raise RuntimeError(f'{op} was given tensors of two devices: one of shape {tuple(there[0].shape)} there, one of shape {tuple(here[0].shape)} here')
    kwargs = {**tree_map(held, kwargs), **({'device': 'cpu'} if wanted else {}), **({'generator': None} if 'generator' in kwargs else {})}
    out = op(*tree_map(held, args), **kwargs)
    if op is torch.ops.aten.copy_.default: return args[0]
    if op is torch.ops.aten._local_scalar_dense.default or not (torch.device(wanted)==DEVICE if wanted else there): return out
    return return_and_correct_aliasing(op, args, kwargs, tree_map(put, out)) if there else tree_map(put, out)

def made_there(f):
    "`torch.tensor` and `torch.as_tensor`, which no mode sees"
    def g(data, *a, device=None, **k):
        if device is None or torch.device(device)!=DEVICE: return f(data, *a, **k, **({} if device is None else dict(device=device)))
        return data.to(device) if isinstance(data, torch.Tensor) else put(f(data, *a, **k))
    return g

@contextmanager
def elsewhere(monkeypatch):
    "In this block PyTorch has the other device"
    with monkeypatch.context() as m:
        for name in ('tensor','as_tensor'): m.setattr(torch, name, made_there(getattr(torch, name)))
        m.setattr(torch, 'inference_mode', lambda mode=True: torch.no_grad() if mode else nullcontext()) # wrappers need version counters
        m.setattr(evaluate, 'score', torch.no_grad()(evaluate.score.__wrapped__))
        m.setattr(torch.cuda, 'default_generators', (torch.Generator(),)); m.setattr(torch.cuda, 'current_device', lambda: 0)
        m.setattr(torch.__future__, 'get_overwrite_module_params_on_conversion', lambda: True)
        m.setattr(rounds, 'load', lambda path, device: loaded(path)) # safetensors knows real devices only
        with Watch(): yield DEVICE

@contextmanager
def traced_elsewhere(monkeypatch):
    "In this block each step that the engines trace is traced a second time for the other device, where nothing is computed; gives its code"
    there,finished,codes = FakeTensorMode(),trace.finished,[]
    def twice(step, n, spec, *flat, phase):
        with there: fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=DEVICE) for t in flat]
        with monkeypatch.context() as m:
            m.setattr(trace, 'compiled', lambda gm: codes.append(gm.code))
            finished(step, n, spec, *fakes, phase=phase)
        return finished(step, n, spec, *flat, phase=phase)
    with monkeypatch.context() as m:
        m.setattr(trace, 'finished', twice)
        yield codes

def loaded(path):
    tree,notes = tensors.load(path)
    return tensors.leaves(put, tree),notes
