"""Six workloads, and FedAvg on them as a bare loop: what every framework is compared on.

It needs PyTorch and NumPy only, so that it also runs in a framework's own environment. All train the same network from the same weights on the same clients, batches and rounds. Pixels are random numbers, for time does
not depend on what they show. `python workloads.py NAME ROUNDS` times the bare loop and prints a line of JSON.
"""
import json, sys, time
import numpy as np, torch
from torch import nn
import torch.nn.functional as F

# clients, clients per round, samples per client, batch size, local epochs, shape of a sample
WORKLOADS = dict(
    softmax=dict(clients=100, per_round=10, samples=60, batch=10, epochs=1, shape=(1,28,28)),
    mlp=dict(clients=100, per_round=10, samples=60, batch=10, epochs=1, shape=(1,28,28)),
    cnn64=dict(clients=100, per_round=10, samples=64, batch=32, epochs=1, shape=(1,28,28)),
    cnn512=dict(clients=100, per_round=10, samples=512, batch=32, epochs=1, shape=(1,28,28)),
    resnet18=dict(clients=10, per_round=4, samples=64, batch=32, epochs=1, shape=(3,32,32)),
    frozen=dict(clients=10, per_round=4, samples=64, batch=32, epochs=2, shape=(3,32,32)))
LR = .05

class Block(nn.Module):
    "Two 3×3 convolutions and a shortcut"
    def __init__(self, i, o, stride):
        super().__init__()
        self.conv1,self.norm1 = nn.Conv2d(i, o, 3, stride, 1, bias=False),nn.BatchNorm2d(o)
        self.conv2,self.norm2 = nn.Conv2d(o, o, 3, 1, 1, bias=False),nn.BatchNorm2d(o)
        self.short = nn.Sequential() if stride==1 and i==o else nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))

    def forward(self, x): return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.short(x))

def resnet18():
    "The residual network with a 3×3 stem"
    widths,layers,i = ((64,1),(128,2),(256,2),(512,2)),[nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()],64
    for o,stride in widths: layers += [Block(i, o, stride), Block(o, o, 1)]; i = o
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()),nn.Linear(512, 10)

def cnn():
    conv = [nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*conv, nn.Flatten(), nn.Linear(1024, 512), nn.ReLU()),nn.Linear(512, 10)

def mlp(): return nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU()),nn.Linear(200, 10)

def softmax(): return nn.Flatten(),nn.Linear(784, 10)

class Model(nn.Module):
    "A body and a head; a frozen body is always in evaluation mode"
    def __init__(self, body, head, frozen=False):
        super().__init__()
        self.body,self.head,self.frozen = body,head,frozen
        if frozen: body.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        if self.frozen: self.body.eval()
        return self

    def forward(self, x): return self.head(self.body(x))

def model(name):
    "The network of a workload, the same in every process"
    torch.manual_seed(0)
    make = dict(softmax=softmax, mlp=mlp, cnn64=cnn, cnn512=cnn, resnet18=resnet18, frozen=resnet18)[name]
    return Model(*make(), frozen=name=='frozen').train()

def pixels(name):
    "Bytes [clients·samples, …] and labels"
    w,draw = WORKLOADS[name],np.random.default_rng(1)
    n = w['clients']*w['samples']
    return torch.from_numpy(draw.integers(0, 256, (n, *w['shape']), dtype=np.uint8)),torch.from_numpy(draw.integers(0, 10, n))

def shards(name):
    "Prepared samples and labels of each client: [clients, samples, …]"
    w,(x,y) = WORKLOADS[name],pixels(name)
    return (x/127.5-1).unflatten(0, (w['clients'], w['samples'])),y.view(w['clients'], w['samples'])

def rounds(name, n):
    "The clients of n rounds"
    w,draw = WORKLOADS[name],np.random.default_rng(7)
    return [sorted(int(i) for i in draw.choice(w['clients'], w['per_round'], replace=False)) for _ in range(n)]

def bare(name, x, y):
    "A function that does one round: the plainest loop that keeps its tensors in memory"
    w,net = WORKLOADS[name],model(name)
    ps = [p for p in net.parameters() if p.requires_grad]
    opt = torch.optim.SGD(ps, lr=LR)
    def step(x, y): opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
    def one_round(ids):
        with torch.no_grad(): start,total = [p.clone() for p in ps],[torch.zeros_like(p) for p in ps]
        for c in ids:
            with torch.no_grad(): torch._foreach_copy_(ps, start)
            for _ in range(w['epochs']):
                for i in range(0, w['samples'], w['batch']): step(x[c,i:i+w['batch']], y[c,i:i+w['batch']])
            with torch.no_grad(): torch._foreach_add_(total, ps, alpha=1/len(ids))
        with torch.no_grad(): torch._foreach_copy_(ps, total)
    one_round.weights = ps
    return one_round

def report(framework, name, seconds):
    "The line that the benchmark reads: the median time of a round after the first"
    print(json.dumps(dict(framework=framework, workload=name, seconds=float(np.median(seconds[1:])))), flush=True)

if __name__=='__main__':
    name,n = sys.argv[1],int(sys.argv[2])
    one_round,seconds = bare(name, *shards(name)),[]
    for ids in rounds(name, n):
        start = time.perf_counter(); one_round(ids); seconds.append(time.perf_counter()-start)
    report('bare loop', name, seconds)
