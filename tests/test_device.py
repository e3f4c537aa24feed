"What runs on a GPU is tried on a make-believe device: no method mixes devices, and results are those of the processor."
from dataclasses import dataclass, replace
import warnings
import pytest, torch
from fedbook import engines, memory
from fedbook.data import augmenter
from fedbook.experiments import federation as experiment, Setting
from fedbook.method import FedAvg, LocalTraining, METHODS, methods
from fedbook.models import Net
from fedbook.optim import AdamW, SGD
from fedbook.rounds import run
from fedbook.tensors import flatten
from elsewhere import DEVICE, elsewhere, Elsewhere, held, put
from test_rounds import federation, fitting, Killed, mlp

def moved(fed):
    "A run on the other device"
    d = fed.data
    return replace(fed, data=replace(d, x=put(d.x), y=put(d.y), test=tuple(map(put, d.test))), net=Net(fed.net.module, fed.net.frozen, DEVICE))

def agrees(monkeypatch, fed, make=None, at=None, engine='one_by_one'):
    "Does a run there equal one here?"
    want,rows = run(fed, engine=engines.engine(engine))
    with elsewhere(monkeypatch), warnings.catch_warnings():
        warnings.simplefilter('error', engines.FellBack)
        state,rows_there = run(make() if make else moved(fed), at, engines.engine(engine, 'meta'))
        got = flatten(state)
    assert all(isinstance(t, Elsewhere) for t in got.values() if t.dim())
    return flatten(want).keys()==got.keys() and all(torch.equal(t, held(got[k])) for k,t in flatten(want).items()) and rows==rows_there

@pytest.mark.parametrize('name', sorted(methods()))
@pytest.mark.parametrize('in_files', [False, True])
def test_every_method_runs_on_another_device(monkeypatch, tmp_path, name, in_files):
    if in_files: monkeypatch.setattr(memory, 'IN_RAM', 0)
    fed = federation(fitting(name), sizes=(7,9,8), per_round=2, rounds=2, local=LocalTraining(1, 4, SGD(.1, .9, 1e-3)), module=mlp(bn=True, dropout=.5, blocks=True), buffers='local' if in_files else 'average')
    assert agrees(monkeypatch, fed, at=tmp_path/'run.part' if in_files else None)

def test_a_run_is_taken_up_again_there(monkeypatch, tmp_path):
    fed = federation(fitting('fedas'), rounds=3, module=mlp(bn=True, blocks=True), local=LocalTraining(1, 4, AdamW(.01)))
    def killed(r):
        if r==2: raise Killed
    with elsewhere(monkeypatch), pytest.raises(Killed): run(moved(fed), tmp_path/'run.part', on_round=killed)
    assert agrees(monkeypatch, fed, at=tmp_path/'run.part')

@pytest.mark.parametrize('engine,augment', [('stacked', None), ('one_by_one', augmenter('flip_crop', size=28, padding=2))])
def test_an_experiment_with_images_runs_there(monkeypatch, engine, augment):
    s = Setting('fashion_mnist_mini', partition=dict(name='iid', n_clients=20), model=dict(name='cnn'), protocol=dict(rounds=2, per_round=2), local=dict(batch_size=32))
    def make(device='cpu'):
        fed = experiment(s, device=device)
        return replace(fed, data=replace(fed.data, augment=augment, test=tuple(t[:100] for t in fed.data.test), validation=None))
    with elsewhere(monkeypatch): there = make('meta')
    assert agrees(monkeypatch, make(), lambda: there, engine=engine)

@dataclass(frozen=True)
class Careless(FedAvg):
    "Makes a tensor on the processor, wherever the batch is"
    def loss(self, w, batch, c): return super().loss(w, batch, c) + 0*torch.arange(len(batch['y'])).eq(batch['y']).sum()
METHODS.pop('careless')

def test_a_gpu_computes_float32_as_such_and_in_one_order(monkeypatch):
    for flag,usual in (('allow_tf32', True), ('deterministic', False)): monkeypatch.setattr(torch.backends.cudnn, flag, usual)
    fed = federation(FedAvg())
    assert torch.backends.cudnn.allow_tf32 and not torch.backends.cudnn.deterministic # what is on the processor changes nothing
    with elsewhere(monkeypatch): moved(fed)
    assert not torch.backends.cudnn.allow_tf32 and torch.backends.cudnn.deterministic

def test_a_method_that_mixes_devices_is_found(monkeypatch):
    with elsewhere(monkeypatch), pytest.raises(RuntimeError, match='two devices'): run(moved(federation(Careless())))

@pytest.mark.parametrize('name', ['fedavg', 'fedref'])
def test_losses_of_stacked_clients_stay_on_their_device(monkeypatch, name):
    "A method may send a loss: beside the weights it must be where they are"
    assert agrees(monkeypatch, federation(fitting(name), rounds=2, module=mlp()), engine='stacked')
