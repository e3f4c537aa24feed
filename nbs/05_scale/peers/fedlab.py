"FedLab's serial trainer and synchronous server on a workload: `python fedlab.py NAME ROUNDS`"
import sys, time
from pathlib import Path
sys.path[0] = str(Path(__file__).resolve().parents[1]) # this file is called like the package it imports
import torch, workloads as W
operators = torch.library.Library('torchvision', 'DEF') # torchvision cannot be imported beside a PyTorch of another build unless its operators are declared
for op in ('nms','qnms'): operators.define(op + '(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')
from torch.utils.data import DataLoader, TensorDataset
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline

name,n = sys.argv[1],int(sys.argv[2])
w,(x,y),net,times = W.WORKLOADS[name],W.shards(name),W.model(name),[time.perf_counter()]
chosen = iter(W.rounds(name, n))

class Data:
    def get_dataloader(self, id, batch_size=None, type='train'): return DataLoader(TensorDataset(x[id], y[id]), batch_size=batch_size)

class Server(SyncServerHandler):
    def sample_clients(self): return next(chosen)

class Timed(StandalonePipeline):
    def evaluate(self): times.append(time.perf_counter())

trainer = SGDSerialClientTrainer(net, w['clients'], cuda=False)
trainer.setup_dataset(Data()); trainer.setup_optim(w['epochs'], w['batch'], W.LR)
pipeline = Timed(Server(net, n, w['per_round']/w['clients'], cuda=False), trainer)
times[0] = time.perf_counter(); pipeline.main()
W.report('FedLab', name, [b-a for a,b in zip(times, times[1:])])
