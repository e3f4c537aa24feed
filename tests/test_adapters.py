"LoRA and bottlenecks: against the oracle, against a loop by hand on peft's own module, on every engine, and where peft is missing."
from collections import OrderedDict
from dataclasses import replace
import subprocess, sys
import numpy as np, pytest, torch
from torch import nn
import oracles_posthoc as P
from fedbook.methods.adapters import peft
from fedbook.engines import Processes, stacked, Traced
from fedbook.errors import Refused
from fedbook.evaluate import scored_view
from fedbook.experiments import federation as federation_of, Setting, stage_after
from fedbook.federation import begin, client_view, FederatedData, Federation, Protocol
from fedbook.method import LocalTraining, method, methods
from fedbook.methods.adapters import Adapter, LoRA
from fedbook.models import build, Net, part
from fedbook.optim import AdamW, SGD
from fedbook.rounds import run
from fedbook.streams import seeded
from test_engines import distance
from test_oracles import agree, of_client
from test_posthoc import batches_of, epochs_of, STAGED, stage_of, WAYS
from test_rounds import same

TOY = {'body.fc.weight': 'body.fc.base_layer.weight', 'body.fc.bias': 'body.fc.base_layer.bias'}

def fed_of(m, optimiser=SGD(.2, .9, .01)): return stage_of(m, optimiser)

@pytest.mark.parametrize('optimiser,carry,flood', WAYS)
def test_lora_is_the_oracles(optimiser, carry, flood):
    "The body's one layer of the network of test_oracles.py"
    o = dict(plain=SGD(.2), momentum=SGD(.1, .9, .05))[optimiser]
    fed,plain = fed_of(LoRA(rank=2, alpha=3., targets='fc', carry=carry, flood=flood), o),fed_of(method('ft'), o).net.weights()
    A = {'body.fc.weight': fed.net.weights()['body.fc.lora_A.default.weight']}
    want = P.oracle_lora(plain, [of_client(fed, i) for i in range(4)], batches_of(fed), o.lr, dict.fromkeys(range(4), A), 3., momentum=o.momentum, decay=o.weight_decay, carry=carry, flood=flood)
    for own,w in zip(epochs_of(fed), want, strict=True):
        for i in own: agree(own[i], {'body.fc.lora_A.default.weight': w[i]['body.fc.weight.A'], 'body.fc.lora_B.default.weight': w[i]['body.fc.weight.B'], **part(w[i], 'head')}, i)

@pytest.mark.parametrize('optimiser,carry,flood', WAYS)
def test_adapter_is_the_oracles(optimiser, carry, flood):
    o = dict(plain=SGD(.2), momentum=SGD(.1, .9, .05))[optimiser]
    fed,plain = fed_of(Adapter(width=3, targets='fc', carry=carry, flood=flood), o),fed_of(method('ft'), o).net.weights()
    first = {k: fed.net.weights()[f'body.fc.adapter_{k}'] for k in ('down.weight','down.bias','up.weight','up.bias')}
    want = P.oracle_adapter(plain, [of_client(fed, i) for i in range(4)], batches_of(fed), o.lr, dict.fromkeys(range(4), first), momentum=o.momentum, decay=o.weight_decay, carry=carry, flood=flood)
    for own,w in zip(epochs_of(fed), want, strict=True):
        for i in own: agree(own[i], {**{f'body.fc.adapter_{k}': w[i][k] for k in first}, **part(w[i], 'head')}, i)

def transformers(m, local=LocalTraining(1, 4, SGD(.05, .9)), precision=torch.float64):
    "Four clients of images of 28 pixels, on a transformer with one block"
    gen = torch.Generator().manual_seed(5)
    sizes = (7, 9, 6, 5); ends = np.cumsum(sizes)
    x,y = torch.randn(27, 1, 28, 28, generator=gen).to(precision),torch.randint(0, 3, (27,), generator=gen)
    parts = [np.arange(e-s, e) for e,s in zip(ends, sizes)]
    net = Net(build('vit_tiny32', 3, 1, 28, patch=14, dim=16, depth=1).to(precision))
    return Federation(m, net, FederatedData(x, y, parts, (x, y), test_clients=parts), local, Protocol(3, 4, personal_every=1), seed=3)

KINDS = dict(lora=LoRA(rank=4, carry=True), adapter=Adapter(width=5, carry=True))

@pytest.mark.parametrize('engine', [Traced, stacked, lambda: Processes(2), lambda: Processes(2, Traced())])
@pytest.mark.parametrize('name', KINDS)
def test_three_rounds_on_every_engine(name, engine, monkeypatch, recwarn):
    monkeypatch.setattr('fedbook.engines.OFTEN', 0)
    fed = transformers(KINDS[name])
    (a,rows),(b,more) = run(fed),run(fed, engine=engine())
    assert distance(a, b) < 1e-9 and [r[:3] for r in rows]==[r[:3] for r in more] and not [w for w in recwarn if 'one by one' in str(w.message)]

def test_it_is_a_loop_on_pefts_module():
    "torch's optimiser on the weights that peft and the head let train"
    fed = transformers(LoRA(rank=4, carry=True))
    own = list(epochs_of(fed))[-1]
    for i in range(4):
        module = build('vit_tiny32', 3, 1, 28, patch=14, dim=16, depth=1).double()
        module.body = peft().inject_adapter_in_model(peft().LoraConfig(r=4, lora_alpha=8, target_modules=['qkv']), module.body)
        module.load_state_dict(fed.net.weights(), strict=False)
        training = {k: p for k,p in module.named_parameters() if p.requires_grad}
        assert training.keys()==fed.net.weights().keys()
        o,(X,y) = torch.optim.SGD(training.values(), .05, .9),of_client(fed, i)
        for e in batches_of(fed):
            for b in e[i]: o.zero_grad(); nn.functional.cross_entropy(module(X[b]), y[b]).backward(); o.step()
        agree(own[i], {k: p.detach() for k,p in training.items()}, i)

@pytest.mark.parametrize('name', KINDS)
def test_what_was_there_stands_still_and_is_in_evaluation_mode(name):
    fed = transformers(KINDS[name], LocalTraining(2, 4, AdamW(.01, weight_decay=.5)))
    before = {k: v.clone() for k,v in fed.net.module.state_dict().items()}
    state,_ = run(fed)
    assert same(fed.net.module.state_dict(), before) and all(KINDS[name].mark in k or k.startswith('head.') for k in fed.net.weights())
    fed.net.logits(fed.net.weights(), {}, fed.data.x[:2], train=True)
    assert not any(m.training for k,m in fed.net.module.named_modules() if k.endswith(('norm1','patch_embed','base_layer','layer')))

@pytest.mark.parametrize('name', KINDS)
def test_it_follows_federated_training(name):
    s = Setting(**{**STAGED, 'model': dict(name='vit_tiny32', patch=14, dim=16, depth=1)}, protocol=dict(rounds=1, per_round=4), after=[dict(method=dict(name=name)), dict(method=dict(name='ft'))])
    fed = federation_of(s.stage(0)); state,_ = run(fed)
    then = stage_after(fed, state, s.stage(1), 1)
    x = then.data.prepare(then.data.x[:5])
    assert torch.equal(then.net.logits(then.net.weights(), {}, x), fed.net.logits(state['server']['w'], {}, x))
    after,rows = run(then)
    assert sum(k=='personal_accuracy' for *_,k,_ in rows)==4 and same(after['server'], begin(then)['server'])

@pytest.mark.parametrize('then', ['ft','lpft','soupft'])
@pytest.mark.parametrize('name', KINDS)
def test_it_can_be_fine_tuned_further(name, then):
    "The body that it left alone comes with each client's model"
    stages = [dict(method=dict(name=n), protocol=dict(rounds=1, per_round=4)) for n in (name, then)]
    s = Setting(**{**STAGED, 'model': dict(name='vit_tiny32', patch=14, dim=16, depth=1)}, protocol=dict(rounds=1, per_round=4), after=stages)
    fed = federation_of(s.stage(0))
    for i in (1, 2): before,state = fed,run(fed)[0]; fed = stage_after(fed, state, s.stage(i), i)
    x = fed.data.prepare(fed.data.x[:5])
    for i in range(4):
        scored = before.method.personal(scored_view(before, state, i, 1))
        w = fed.method.personal(client_view(fed, begin(fed), i, 0))
        torch.testing.assert_close(fed.net.logits(w, {}, x), before.net.logits(scored, {}, x), rtol=0, atol=1e-5) # a soup is a mean of equals
        assert w.keys() > state['server']['w'].keys()
    assert sum(k=='personal_accuracy' for *_,k,_ in run(fed)[1])==4

OWN = {**STAGED, 'model': dict(name='mlp', hidden=[8, 8]), 'held': .2}

def in_stages(*names, targets=('fc2','fc2')):
    "The federation of each stage, and the state after all but the last"
    stages = [dict(method=dict(name=n, **(dict(targets=t) if n in KINDS else {})), protocol=dict(rounds=1, per_round=4)) for n,t in zip(names[1:], targets)]
    s = Setting(**OWN, method=dict(name=names[0], **SETTINGS.get(names[0], {})), protocol=dict(rounds=2, per_round=4), after=stages)
    feds,states = [federation_of(s.stage(0))],[]
    for i in range(1, len(names)):
        states.append(run(feds[-1])[0])
        feds.append(stage_after(feds[-1], states[-1], s.stage(i), i))
    return feds, states

def answers(fed, w, c): return fed.net.logits(w, c.buffers, fed.data.prepare(fed.data.x[:5]))

def own(fed, state, i):
    "What a client's own model answers when it is scored"
    c = scored_view(fed, state, i, fed.protocol.rounds)
    with seeded(fed.seed, 'personal', i): return answers(fed, fed.method.personal(c), c)

# FedFA needs feature maps, and pTaLoS the blocks of a transformer
FIRST = sorted(methods().keys() - {*KINDS, 'fedfa', 'ptalos'})
SETTINGS = dict(pfededit=dict(k=1), fedfed=dict(distilling=1))

@pytest.mark.parametrize('first,name', [*((m, 'lora') for m in FIRST), *((m, 'adapter') for m in ('fedper','ft','fedbn'))])
def test_it_begins_with_the_model_that_was_scored_last(first, name):
    "After every method: clients keep what it gave them, whatever of it is frozen now"
    (before,then),(state,) = in_stages(first, name)
    for i in range(4): torch.testing.assert_close(own(then, begin(then), i), own(before, state, i), rtol=0, atol=1e-6)
    after,rows = run(then)
    assert sum(k=='personal_accuracy' for *_,k,_ in rows)==4
    for i in range(4):
        w,was = (then.method.personal(scored_view(then, s, i, 1)) for s in (after, begin(then)))
        still = w.keys()-then.net.weights().keys()
        assert w.keys()==was.keys() and all(torch.equal(w[k], was[k]) for k in still) and not torch.equal(w['head.bias'], was['head.bias'])

@pytest.mark.parametrize('name', KINDS)
def test_own_bodies_train_as_a_network_that_has_them(name):
    "A client's stage is that of a federation whose global model is its own"
    def model(fed, state, i): return fed.method.personal(scored_view(fed, state, i, 1))
    then = in_stages('ft', name)[0][1]
    after,_ = run(then)
    for i in range(4):
        alone = replace(then, net=then.net.at(model(then, begin(then), i)), origins=None)
        agree(part(model(then, after, i), *then.net.weights()), model(alone, run(alone)[0], i), i)

@pytest.mark.parametrize('name', KINDS)
@pytest.mark.parametrize('last', ['ft','lora','adapter'])
def test_own_bodies_are_kept_by_the_stage_behind(name, last):
    feds,states = in_stages('fedper', name, last, targets=('fc2','fc1'))
    for i in range(4): torch.testing.assert_close(own(feds[2], begin(feds[2]), i), own(feds[1], states[1], i), rtol=0, atol=1e-6)
    run(feds[2])

@pytest.mark.parametrize('name', KINDS)
def test_twice_in_turn_it_still_trains_few(name):
    feds,_ = in_stages('fedavg', name, name)
    assert list(feds[1].net.weights())==list(feds[2].net.weights())

@pytest.mark.parametrize('engine', [Traced, stacked, lambda: Processes(2)])
@pytest.mark.parametrize('name', KINDS)
def test_own_bodies_on_every_engine(name, engine, monkeypatch, recwarn):
    monkeypatch.setattr('fedbook.engines.OFTEN', 0)
    fed = in_stages('fedper', name)[0][1]
    (a,rows),(b,more) = run(fed),run(fed, engine=engine())
    assert distance(a, b) < 1e-4 and [r[:3] for r in rows]==[r[:3] for r in more] and not [w for w in recwarn if 'one by one' in str(w.message)]

@pytest.mark.parametrize('cls', [LoRA, Adapter])
def test_layers_that_are_not_there_are_refused(cls):
    net = Net(build('vit_tiny32', 3, 1, 28, patch=14, dim=16, depth=1))
    with pytest.raises(Refused, match="no linear layer of the body 'qvk'; there are blocks.0.attn.qkv"): cls(targets=['qvk']).network(net)
    with pytest.raises(Refused, match='body and a head'): fed = transformers(cls()); replace(fed, net=Net(nn.Sequential(OrderedDict(a=nn.Flatten(), b=nn.Linear(784, 3)))))

def test_without_peft_it_says_what_to_install(tmp_path):
    (tmp_path/'peft.py').write_text('raise ModuleNotFoundError("No module named peft", name="peft")')
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom fedbook.methods.adapters import peft\ntry: peft()\nexcept Exception as e: print(type(e).__name__, e)"
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout
    assert out.startswith('Refused ') and out.strip().endswith('pip install fedbook[adapters]') and '(peft)' in out

def test_importing_the_method_imports_no_peft():
    code = "import sys, fedbook.methods.adapters; print('peft' in sys.modules, 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.strip()=='False False'
