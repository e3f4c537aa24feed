"Identities of the round loop: exact ones are tested to the last bit."
from collections import OrderedDict
from dataclasses import dataclass, replace
import warnings
import numpy as np, pytest, torch
from torch import nn
from fedbook.engines import Processes
from fedbook.errors import Refused
from fedbook.method import batches, Client, FedAvg, LocalTraining, method, METHODS, methods
from fedbook.methods.fedfa import FedFA
from fedbook.methods.fedprox import FedProx
from fedbook.models import Classifier, Net
from fedbook.tasks import Task
from fedbook.optim import AdamW, Cosine, SGD
from fedbook.client import one_by_one
from fedbook.federation import begin, client_view, FederatedData, Federation, Protocol
from fedbook.rounds import one_round, run, sample_clients
from fedbook.streams import seeded
from fedbook.tensors import flatten, gradient
from fedbook.wire import encode

def mlp(bn=False, dropout=0., blocks=False):
    with seeded(0, 'test model'):
        return with_blocks(blocks, nn.Linear(6, 8), *([nn.BatchNorm1d(8)] if bn else []), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else []), nn.Linear(8, 3))

def with_blocks(wanted, *layers):
    "Layers in a row; or a body that ends with two layers called blocks, and a head"
    if not wanted: return nn.Sequential(*layers)
    *first,last = layers
    return Classifier(nn.Sequential(OrderedDict({**{f'l{i}': l for i,l in enumerate(first)}, 'blocks': nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))})), last)

def with_maps(m):
    "The same layers behind a convolution of 2×3 pixels, for a method that looks at feature maps"
    body,like = getattr(m, 'body', m),next(m.parameters())
    with seeded(0, 'maps'): front = dict(image=nn.Unflatten(1, (2, 3, 1)), conv=nn.Conv2d(2, 2, 1, bias=False), flat=nn.Flatten())
    body = nn.Sequential(OrderedDict({**front, **dict(body.named_children())})).to(like)
    return Classifier(body, m.head) if isinstance(m, Classifier) else body

def network(m, module): return Net(with_maps(module) if isinstance(m, FedFA) else module)

def fitting(name):
    "A method with settings that fit small networks and few rounds"
    return method(name, **dict(cd2pfed=dict(rounds=2), ptalos=dict(k=1, deterministic_round=3, layer_batches=2, batches=1), fedcspack=dict(size=8), fedcspacktoall=dict(size=8), lpft=dict(probing=1), lssft=dict(first=1), soupft=dict(members=2), lora=dict(rank=2, targets=["blocks.0"]), adapter=dict(width=2, targets=["blocks.0"]), fedl2g=dict(warmup=1), fedfed=dict(distilling=1), pfededit=dict(k=2, p=.5)).get(name, {}))

def federation(m=FedAvg(), sizes=(7,12,20,5), rounds=3, per_round=3, seed=0, module=None, local=None, dtype=torch.float32, **protocol):
    gen = torch.Generator().manual_seed(5)
    n = sum(sizes)
    x,y = torch.randn(n, 6, generator=gen).to(dtype),torch.randint(0, 3, (n,), generator=gen)
    tx,ty = torch.randn(30, 6, generator=gen).to(dtype),torch.randint(0, 3, (30,), generator=gen)
    ends = np.cumsum(sizes)
    kept = 2 if 'held' in m.needs else 0
    data = FederatedData(x, y, [np.arange(e-s, e-kept) for e,s in zip(ends, sizes)], (tx,ty), held=[np.arange(e-kept, e) for e in ends] if kept else None, test_clients=[np.arange(i, i+20) for i in range(len(sizes))])
    return Federation(m, network(m, module or mlp()), data, local or LocalTraining(2, 4, SGD(.1, .9, 1e-3)), Protocol(rounds, per_round, **protocol), seed)

def same(a, b):
    a,b = flatten(a),flatten(b)
    return a.keys()==b.keys() and all(torch.equal(a[k], b[k]) for k in a)

def moved(fed): return not same(begin(fed)['server'], run(fed)[0]['server'])

def test_prox_without_pull_is_fedavg_to_the_bit():
    a,b = (run(federation(m, local=LocalTraining(2, 4, o))) for o in (SGD(.1, .9), ) for m in (FedAvg(), FedProx(mu=0.)))
    assert same(a[0], b[0]) and a[1]==b[1]
    assert not same(a[0]['server'], run(federation(FedProx(mu=1.), local=LocalTraining(2, 4, SGD(.1, .9))))[0]['server'])

def test_prox_differs_by_the_analytic_amount():
    "The first step is FedAvg's; the second differs by −ημ(w₁−w₀)"
    def after(m, steps): return one_client(m, LocalTraining(steps, 100, SGD(.1)))['server']['w']
    w0,w1,w2 = begin(federation())['server']['w'],after(FedAvg(), 1),after(FedAvg(), 2)
    assert same(after(FedProx(mu=.7), 1), w1)
    for k,v in after(FedProx(mu=.7), 2).items(): assert torch.allclose(v, w2[k]-.1*.7*(w1[k]-w0[k]), atol=1e-6)

def one_client(m, local, rounds=1): return run(federation(m, sizes=(20,), rounds=rounds, per_round=1, local=local))[0]

@pytest.mark.parametrize('local', [LocalTraining(2, 4, SGD(.1, .9, 1e-3)), LocalTraining(3, 8, AdamW(.01), Cosine(per='epoch', period=3)), LocalTraining(1, 100, SGD(.5), task=Task(label_smoothing=.1))])
def test_one_client_is_local_training(local):
    "To the bit against the same steps by hand, and closely against torch.optim"
    fed = federation(sizes=(20,), per_round=1, rounds=2, local=local)
    w,module,f = fed.net.weights(),mlp(),local.optimiser
    for r in range(2):
        c,s = client_view(fed, begin(fed), 0, r),f.init(w)
        module.load_state_dict(w)
        make = torch.optim.AdamW if isinstance(f, AdamW) else lambda p, lr: torch.optim.SGD(p, lr, f.momentum)
        opt = make(module.parameters(), lr=f.lr); [g.update(weight_decay=f.weight_decay) for g in opt.param_groups]
        for batch,scale in batches(c):
            def loss(z): return nn.functional.cross_entropy(z, batch['y'], label_smoothing=local.task.label_smoothing)
            g,_ = gradient(lambda w: loss(c.logits(w, batch['x'])), w)
            w,s = f.update(w, g, s, scale)
            opt.zero_grad(); loss(module(batch['x'])).backward()
            for group in opt.param_groups: group['lr'] = f.lr*scale
            opt.step()
    assert same(run(fed)[0]['server']['w'], w)
    for k,v in module.state_dict().items(): assert torch.allclose(v, w[k], atol=1e-5)

def backwards(fed, state, ids, *what): return one_by_one(fed, state, ids[::-1], *what)[::-1]

@pytest.mark.parametrize('engine', [backwards, Processes(1), Processes(3)], ids=['backwards','one worker','three workers'])
@pytest.mark.parametrize('module', [mlp(), mlp(bn=True), mlp(dropout=.5)], ids=['plain','batchnorm','dropout'])
def test_same_bytes_for_any_order_and_workers(engine, module):
    (a,rows),(b,rows_b) = run(federation(module=module)),run(federation(module=module), engine=engine)
    assert same(a, b) and rows==rows_b

def test_another_seed_is_another_run():
    assert not same(run(federation(seed=0))[0], run(federation(seed=1))[0])

def test_global_random_state_neither_matters_nor_changes():
    torch.manual_seed(3); before = torch.random.get_rng_state()
    a = run(federation(module=mlp(dropout=.5)))[0]
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(4)
    assert same(a, run(federation(module=mlp(dropout=.5)))[0])

@dataclass(frozen=True)
class Remembers(FedAvg):
    "Counts a client's rounds in its memory and the server's in its state, to test that both survive"
    def server(self, w, n): return dict(w=w, count=dict(n=torch.zeros(())))
    def client(self, w): return dict(seen=dict(n=torch.zeros(())))
    def finish(self, w, c): return dict(w=w), dict(seen=dict(n=c.memory['seen']['n']+1))
    def aggregate(self, state, messages, weights): return dict(super().aggregate(state, messages, weights), count=dict(n=state['count']['n']+1))
METHODS.pop('remembers')

class Killed(Exception): pass

@pytest.mark.parametrize('name,buffers', [*((n, b) for n in ('fedavg','remembers') for b in ('average','local','drop')), *((n, 'average') for n in sorted(methods()) if n!='fedavg')])
def test_a_resumed_run_equals_an_unbroken_one(tmp_path, name, buffers):
    fed = federation(Remembers() if name=='remembers' else fitting(name), rounds=5, module=mlp(bn=True, blocks=True), buffers=buffers)
    whole = run(fed)
    def killed_after_two(r):
        if r==2: raise Killed
    with pytest.raises(Killed): run(fed, tmp_path/'run.safetensors', on_round=killed_after_two)
    done = []
    again = run(fed, tmp_path/'run.safetensors', on_round=done.append)
    assert done==[3,4,5] and same(whole[0], again[0]) and whole[1]==again[1]

def test_a_broken_checkpoint_is_refused(tmp_path):
    (tmp_path/'run.safetensors').write_bytes(b'torn')
    with pytest.raises(Refused, match='run.safetensors'): run(federation(), tmp_path/'run.safetensors')

def replies(fed):
    seen = []
    def engine(*args): seen.extend(one_by_one(*args)); return seen
    state,_ = one_round(fed, begin(fed), 0, engine)
    return state,seen

def test_buffers_average():
    fed = federation(module=mlp(bn=True), per_round=4)
    state,rs = replies(fed)
    sizes = torch.tensor([7.,12.,20.,5.])
    means = torch.stack([r['buffers']['1.running_mean'] for r in rs])
    assert torch.allclose(state['buffers']['1.running_mean'], (sizes[:,None]*means).sum(0)/sizes.sum(), atol=1e-6)
    assert state['buffers']['1.num_batches_tracked'].dtype==torch.int64 and not state['client_buffers']

def test_buffers_drop_and_local():
    fed = federation(module=mlp(bn=True), per_round=4, buffers='drop')
    assert same(replies(fed)[0]['buffers'], begin(fed)['buffers'])
    fed = federation(module=mlp(bn=True), per_round=4, buffers='local')
    state,rs = replies(fed)
    assert same(state['buffers'], begin(fed)['buffers'])
    for i,r in enumerate(rs): assert same(state['client_buffers'][str(i)], r['buffers']) and same(client_view(fed, state, i, 1).buffers, r['buffers'])

@pytest.mark.parametrize('buffers', ['average','local','drop'])
def test_only_buffers_that_travel_are_counted(buffers):
    fed = federation(module=mlp(bn=True), per_round=4, buffers=buffers)
    message = dict(w=fed.net.weights(), **(dict(buffers=fed.net.buffers()) if buffers=='average' else {}))
    assert {(r['up'], r['down']) for r in replies(fed)[1]}=={(len(encode(message)),)*2}

def test_the_buffers_of_others_are_never_touched():
    fed = federation(module=mlp(bn=True))
    state = begin(fed); before = {k: v.clone() for k,v in state['buffers'].items()}
    one_round(fed, state, 0)
    assert same(state['buffers'], before)

def test_weighting():
    "Uniform is the plain mean of the clients, samples the mean by size"
    for weighting,weights in (('samples',[7,12,20,5]),('uniform',[1,1,1,1])):
        state,rs = replies(federation(per_round=4, weighting=weighting))
        k,p = '0.weight',torch.tensor(weights)/sum(weights)
        assert torch.allclose(state['server']['w'][k], sum(q*r['message']['w'][k] for q,r in zip(p, rs)), atol=1e-6)

def test_a_client_drawn_twice_counts_twice():
    fed = federation(per_round=9, replace=True)
    ids,times = sample_clients(4, 9, 0, 0, True)
    assert max(times) > 1 and sum(times)==9
    state,rs = replies(fed)
    weights = [t*[7,12,20,5][i] for i,t in zip(ids, times)]
    assert torch.allclose(state['server']['w']['0.bias'], sum(q/sum(weights)*r['message']['w']['0.bias'] for q,r in zip(weights, rs)), atol=1e-6)

def test_sampling_is_uniform_and_depends_on_the_round():
    counts = np.zeros(20)
    for r in range(400): counts[sample_clients(20, 5, 0, r)[0]] += 1
    assert counts.min() > 60 and counts.max() < 140

def test_rows():
    fed = federation(rounds=4, evaluate_every=3)
    fed.data.validation = (fed.data.x[:9], fed.data.y[:9])
    state,rows = run(fed)
    assert [r[0] for r in rows if r[2]=='accuracy']==[3,4] and [r[0] for r in rows if r[2]=='val_accuracy']==[1,2,3,4]
    x,y = fed.data.test
    z = fed.net.logits(state['server']['w'], {}, x)
    last = {r[2]: r[3] for r in rows if r[0]==4 and r[1] is None}
    assert last['accuracy']==pytest.approx(100*(z.argmax(1)==y).float().mean().item())
    assert last['loss']==pytest.approx(nn.functional.cross_entropy(z, y).item(), rel=1e-5)
    right = (fed.net.logits(state['server']['w'], {}, fed.data.x[:9]).argmax(1)==fed.data.y[:9]).float().mean().item()
    assert last['val_accuracy']==pytest.approx(100*right) and last['val_accuracy']!=last['accuracy']
    assert last['bytes_up']==last['bytes_down']==3*len(encode(dict(w=fed.net.weights())))
    personal,shared = ({r[1]: r[3] for r in rows if r[2]==m and r[0]==4} for m in ('personal_accuracy','client_accuracy'))
    assert personal==shared and len(personal)==4, 'FedAvg has no personal model, so each client is scored on the global one'

def test_test_images_never_reach_training():
    "Every test and validation sample carries a mark that no batch may show"
    fed = federation()
    fed.data.test = (torch.full_like(fed.data.test[0], 77.),fed.data.test[1])
    fed.data.validation = fed.data.test
    seen = []
    @dataclass(frozen=True)
    class Spy(FedAvg):
        def loss(self, w, batch, c): seen.append(batch['x']); return super().loss(w, batch, c)
    METHODS.pop('spy')
    run(replace(fed, method=Spy()))
    assert len(seen) > 10 and not any((b==77).any() for b in seen)

def test_batches_cover_every_sample_once_an_epoch():
    fed = federation(local=LocalTraining(3, 4))
    c = client_view(fed, begin(fed), 1, 0)
    every = torch.cat([b['x'] for b,_ in batches(c)])
    xs = every.split(len(c.own))
    assert len(xs)==3
    assert all(torch.equal(x.sort(0).values, c.x.sort(0).values) for x in xs) and not torch.equal(xs[0], xs[1])

def test_clients_of_one_size_have_orders_of_their_own():
    fed = federation(sizes=(12,12), per_round=2)
    def order(i, r):
        c = client_view(fed, begin(fed), i, r)
        return [(c.x[:,None]==b['x']).all(2).float().argmax(0).tolist() for b,_ in batches(c)]
    assert order(0, 0)==order(0, 0) and order(0, 0)!=order(1, 0) and order(0, 0)!=order(0, 1)

def test_step_is_the_direction_of_the_optimiser():
    "Twice the gradient is the double learning rate"
    @dataclass(frozen=True)
    class Double(FedAvg):
        def step(self, g, w, c): return {k: 2*v for k,v in g.items()}
    METHODS.pop('double')
    a,b = run(federation(Double(), local=LocalTraining(2, 4, SGD(.1))))[0],run(federation(local=LocalTraining(2, 4, SGD(.2))))[0]
    for k,v in a['server']['w'].items(): torch.testing.assert_close(v, b['server']['w'][k])

def test_every_registered_method_runs_and_is_deterministic():
    for name in methods():
        a,b = (run(federation(fitting(name), module=mlp(blocks=True)))[0] for _ in range(2))
        assert same(a, b), name

@pytest.mark.parametrize('bad', [lambda: method('fedporx'), lambda: method('fedprox', nu=1), lambda: method('fedprox', mu=-1), lambda: method('fedprox', mu=float('nan')),
    lambda: Protocol(rounds=0), lambda: Protocol(buffers='averaged'), lambda: Protocol(weighting='size'), lambda: federation(per_round=5), lambda: LocalTraining(epochs=0),
    lambda: federation(sizes=(5,0,5), per_round=2)])
def test_refusals(bad):
    with pytest.raises(Refused) as e: bad()
    assert len(str(e.value).split('\n'))==1

@pytest.mark.parametrize('buffers', ['average','local'])
def test_clients_with_the_global_model_are_scored_together(buffers, monkeypatch):
    from fedbook import evaluate
    fed = federation(module=mlp(bn=True), buffers=buffers)
    rows = run(fed)[1]
    assert evaluate.shared(fed)==(buffers=='average')
    monkeypatch.setattr(evaluate, 'shared', lambda fed: False)
    assert run(fed)[1]==rows

def test_bf16_where_the_processor_has_none_of_it_is_said(monkeypatch):
    from fedbook import federation as federations
    fed = federation()
    for has,precision,said in ((False,'bf16',1), (True,'bf16',0), (False,'float32',0)):
        monkeypatch.setattr(federations, 'computes_bf16', lambda device: has)
        with warnings.catch_warnings(record=True) as w:
            warnings.simplefilter('always'); replace(fed, local=replace(fed.local, precision=precision))
        assert len(w)==said and all('float32' in str(x.message) for x in w)

def killed(fed, file, after=2):
    "A checkpoint of a run that was killed after some rounds"
    def stop(r):
        if r==after: raise Killed
    with pytest.raises(Killed): run(fed, file, on_round=stop)

@pytest.mark.parametrize('other', [dict(local=LocalTraining(2, 4, SGD(.2, .9, 1e-3))), dict(m=FedProx(mu=.5)), dict(seed=1), dict(module=mlp(dropout=.5)), dict(sizes=(7,12,19,6)), dict(per_round=2), dict(module=nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3)))],
    ids=['rate','method','seed','network','partition','participation','width'])
def test_a_checkpoint_of_another_run_is_refused(tmp_path, other):
    killed(federation(), tmp_path/'run.safetensors')
    with pytest.raises(Refused, match='is of another run'): run(federation(**other), tmp_path/'run.safetensors')

def test_a_checkpoint_of_other_images_is_refused(tmp_path):
    killed(federation(), tmp_path/'run.safetensors')
    fed = federation(); fed.data.x = fed.data.x.clone(); fed.data.x[3,2] += 1
    with pytest.raises(Refused, match='is of another run'): run(fed, tmp_path/'run.safetensors')

def test_a_run_can_go_on_for_more_rounds(tmp_path):
    killed(federation(), tmp_path/'run.safetensors')
    assert same(run(federation(rounds=6), tmp_path/'run.safetensors')[0], run(federation(rounds=6))[0])

def test_no_flipped_bit_of_a_checkpoint_changes_a_run(tmp_path):
    fed,file = federation(Remembers(), module=mlp(bn=True)),tmp_path/'run.safetensors'
    whole = run(fed)
    killed(fed, file)
    good,refused = file.read_bytes(),0
    for at in np.random.default_rng(0).integers(8*len(good), size=120):
        bad = bytearray(good); bad[at//8] ^= 1 << (at%8); file.write_bytes(bad)
        try: again = run(fed, file)
        except Refused: refused += 1
        else: assert same(whole[0], again[0]) and whole[1]==again[1]
        file.write_bytes(good)
    assert refused > 100

def test_a_late_client_remembers_the_fresh_weights():
    @dataclass(frozen=True)
    class First(FedAvg):
        def client(self, w): return dict(first=w)
    METHODS.pop('first')
    fed = federation(First())
    assert same(client_view(fed, run(replace(fed, protocol=Protocol(1, 1)))[0], 0, 1).memory['first'], fed.net.weights())

@dataclass(frozen=True)
class Hears(FedAvg):
    "Clients remember the newest model, drawn or not"
    def start(self, c): return c.message['w'], self.receive(c)
    def receive(self, c): return dict(heard=c.message['w'], n=dict(n=c.memory.get('n', dict(n=torch.zeros(())))['n']+1))
METHODS.pop('hears')

def test_a_method_may_tell_everybody_and_pays_for_it():
    fed = federation(Hears(), per_round=1)
    state,rows = run(fed)
    last = run(replace(fed, protocol=replace(fed.protocol, rounds=2)))[0]['server']['w']
    assert all(same(m['heard'], last) and m['n']['n']==3 for m in state['memory'].values()) and len(state['memory'])==4
    down,up = ([r[3] for r in rows if r[2]==k] for k in ('bytes_down','bytes_up'))
    assert down==[4*u for u in up]

@dataclass(frozen=True)
class Opens(FedAvg):
    "Counts who takes part in the opening round, which leaves the model as it is"
    opening = 1
    def aggregate(self, state, messages, weights): return super().aggregate(state, messages, weights) if 'n' in state else dict(state, n=dict(n=torch.tensor(float(len(messages)))))
METHODS.pop('opens')

def test_an_opening_round_is_everybody_s_and_comes_before_the_first(tmp_path):
    fed = federation(Opens())
    state,rows = run(fed)
    want,wanted = run(federation())
    assert state['server']['n']['n']==4 and same(state['server']['w'], want['server']['w']) and [r for r in rows if r[0] > 0]==wanted
    assert [r[2] for r in rows if r[0]==0]==['train_loss','bytes_down','bytes_up']
    killed(fed, tmp_path/'run.safetensors', 0)
    assert run(fed, tmp_path/'run.safetensors')[1]==rows

def test_what_is_not_finite_has_no_accuracy():
    fed = federation(rounds=1)
    state = run(fed)[0]
    state['server']['w'] = {k: torch.full_like(v, torch.nan) for k,v in state['server']['w'].items()}
    from fedbook.evaluate import evaluate, personal_scores
    for r in evaluate(fed, state, 1) + [row for i in range(4) for row in personal_scores(fed, state, i, 1)]: assert np.isnan(r[3]), r
