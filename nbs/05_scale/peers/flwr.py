"Flower's simulation engine on a workload: `python flwr.py NAME ROUNDS`"
import os, sys, time
from pathlib import Path
HERE = str(Path(__file__).resolve().parents[1])
sys.path[0] = HERE # this file is called like the package it imports
os.environ.update(FLWR_TELEMETRY_ENABLED='0', RAY_USAGE_STATS_ENABLED='0', RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO='0', PYTHONPATH=HERE)
import logging, torch, torch.nn.functional as F, workloads as W
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

logging.getLogger('flwr').setLevel(logging.ERROR)
name,n = sys.argv[1],int(sys.argv[2])
w,client,server,times,chosen = W.WORKLOADS[name],ClientApp(),ServerApp(),[],iter(W.rounds(name, n))

@client.train()
def train(message, context):
    import builtins, torch, torch.nn.functional as F, workloads as W
    if not hasattr(builtins, 'kept'): torch.set_num_threads(1); builtins.kept = W.shards(name),W.model(name) # once per worker, as a careful user would
    (x,y),net = builtins.kept
    c = int(message.content['config']['client'])
    net.load_state_dict(message.content['arrays'].to_torch_state_dict()); net.train()
    opt = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=W.LR)
    for _ in range(w['epochs']):
        for i in range(0, w['samples'], w['batch']):
            opt.zero_grad(); F.cross_entropy(net(x[c,i:i+w['batch']]), y[c,i:i+w['batch']]).backward(); opt.step()
    return Message(content=RecordDict(dict(arrays=ArrayRecord(net.state_dict()), metrics=MetricRecord({'num-examples': w['samples']}))), reply_to=message)

class Fixed(FedAvg):
    "FedAvg with given clients"
    def configure_train(self, server_round, arrays, config, grid):
        while len(list(grid.get_node_ids())) < w['clients']: time.sleep(.05)
        if not times: times.append(time.perf_counter())
        for node,c in zip(grid.get_node_ids(), next(chosen)):
            yield Message(RecordDict(dict(arrays=arrays, config=ConfigRecord(dict(client=c)))), dst_node_id=node, message_type='train')

    def aggregate_train(self, server_round, replies):
        merged = super().aggregate_train(server_round, list(replies)); times.append(time.perf_counter())
        return merged

    def configure_evaluate(self, *a, **k): return []

@server.main()
def main(grid, context):
    strategy = Fixed(fraction_train=w['per_round']/w['clients'], fraction_evaluate=0., min_train_nodes=w['per_round'], min_evaluate_nodes=0, min_available_nodes=w['clients'])
    strategy.start(grid=grid, initial_arrays=ArrayRecord(W.model(name).state_dict()), num_rounds=n)

run_simulation(server, client, num_supernodes=w['clients'], backend_config=dict(client_resources=dict(num_cpus=1, num_gpus=0.), init_args=dict(num_cpus=2, logging_level='ERROR', log_to_driver=False)))
W.report('Flower', name, [b-a for a,b in zip(times, times[1:])])
