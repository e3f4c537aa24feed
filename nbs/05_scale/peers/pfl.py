"pfl-research's simulated backend on a workload: `python pfl.py NAME ROUNDS`"
import sys, time
from pathlib import Path
sys.path[0] = str(Path(__file__).resolve().parents[1]) # this file is called like the package it imports
import torch, torch.nn.functional as F, workloads as W
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel

name,n = sys.argv[1],int(sys.argv[2])
w,(x,y),times = W.WORKLOADS[name],W.shards(name),[]
W.Model.loss = lambda self, x, y, eval=False: F.cross_entropy(self(x), y)
W.Model.metrics = lambda self, x, y, eval=False: dict(loss=Weighted(F.cross_entropy(self(x), y, reduction='sum').item(), len(y)))
net = W.model(name)
turns = iter([c for ids in W.rounds(name, n) for c in ids])
users = FederatedDataset(lambda u: Dataset((x[u], y[u]), user_id=str(u)), lambda: next(turns))

class Timed(TrainingProcessCallback):
    def on_train_begin(self, *, model): times.append(time.perf_counter()); return Metrics()
    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration): times.append(time.perf_counter()); return False,Metrics()

model = PyTorchModel(model=net, local_optimizer_create=torch.optim.SGD, central_optimizer=torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 1.))
FederatedAveraging().run(algorithm_params=NNAlgorithmParams(central_num_iterations=n, evaluation_frequency=10**9, train_cohort_size=w['per_round'], val_cohort_size=None),
    backend=SimulatedBackend(training_data=users, val_data=users, postprocessors=[WeightByDatapoints()]), model=model,
    model_train_params=NNTrainHyperParams(local_learning_rate=W.LR, local_num_epochs=w['epochs'], local_batch_size=w['batch']),
    model_eval_params=NNEvalHyperParams(local_batch_size=1000), callbacks=[Timed()], send_metrics_to_platform=False)
W.report('pfl-research', name, [b-a for a,b in zip(times, times[1:])])
