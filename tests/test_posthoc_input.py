"Bad and poor input of a stage that fine-tunes: clients with too little, networks without a head, folders that are not there, global models of another kind."
from dataclasses import replace
import math, re
import numpy as np, pytest, torch
from torch import nn
from fedbook import published
from fedbook.data import load
from fedbook.errors import Refused
from fedbook.experiments import at_global_model
from fedbook.method import method
from fedbook.models import build, Classifier, Net
from fedbook.results import curve_of
from fedbook.rounds import run, taking_part
from fedbook.tasks import MultiLabel
from fedbook.tensors import save
from test_posthoc import EPOCHS, normed, stage_of

STRATEGIES = [dict(name='ft'), dict(name='proximalft'), dict(name='soupft', members=2), dict(name='sparseft', sparsity=.5), dict(name='lssft', first=1), dict(name='lpft', probing=1), dict(name='lponly')]
each = pytest.mark.parametrize('strategy', STRATEGIES, ids=lambda s: s['name'])

def with_data(fed, **new): return replace(fed, data=replace(fed.data, **new))
def few(fed, n): return with_data(fed, clients=[fed.data.clients[0][:n], *fed.data.clients[1:]]) # the first client has n samples
def scored(rows, metric='personal_accuracy'): return {i: v for r,i,m,v in rows if m==metric and i is not None and r==EPOCHS}
def mean_of(rows, metric='personal_accuracy'): return curve_of(dict(rows=rows), metric)[EPOCHS]

@each
def test_a_client_without_test_data_has_no_score_and_is_not_in_the_mean(strategy):
    fed = stage_of(method(**strategy))
    poor = with_data(fed, test_clients=[fed.data.test_clients[0], [], *fed.data.test_clients[2:]])
    (_,rows),(_,all_rows) = run(poor),run(fed)
    found,every = scored(rows),scored(all_rows)
    assert list(found)==[0, 2, 3] and found=={i: every[i] for i in found}
    assert math.isfinite(mean_of(rows)) and mean_of(rows)==pytest.approx(np.mean([*found.values()]))

def test_scores_across_clients_leave_out_the_column_of_one_without_test_data():
    fed = stage_of(method('ft'), cross=2)
    poor = with_data(fed, test_clients=[fed.data.test_clients[0], [], *fed.data.test_clients[2:]])
    rows = run(poor)[1]
    last = {k: v for r,i,k,v in rows if r==poor.protocol.rounds and i is None and k.startswith('cross_')}
    A = torch.tensor([[v for r,i,k,v in rows if i==j and k.startswith('on_')] for j in range(len(fed.data.clients))])
    other = [[v for c,v in zip([0, *range(2, len(A))], row) if c!=j] for j,row in enumerate(A.tolist())]
    assert last['cross_unscored']==1 and A.shape==(len(A), len(A)-1) and all(v==v for v in last.values())
    assert last['cross_global']==pytest.approx(A.mean().item()) and last['cross_worst']==pytest.approx(sum(map(min, other))/len(A))
    assert last['cross_local']==pytest.approx((A[0,0]+sum(A[j,j-1] for j in range(2, len(A)))).item()/(len(A)-1))
    with pytest.raises(Refused, match='at least two clients with some'): with_data(fed, test_clients=[fed.data.test_clients[0]]+[[]]*(len(A)-1))

@each
def test_a_client_of_one_class(strategy):
    fed = stage_of(method(**strategy))
    y = fed.data.y.clone(); y[fed.data.clients[0]] = 1
    (state,rows) = run(with_data(fed, y=y))
    assert len(scored(rows))==4 and all(map(math.isfinite, scored(rows).values()))
    assert all(t.isfinite().all() for t in state['memory']['0']['own'].values())

@pytest.mark.parametrize('without', [1, 2])
def test_where_fewer_than_two_clients_have_a_score_there_is_none_across_clients(without):
    "Two clients, of which one or none has positives: the run ends, and counts them"
    fed = stage_of(method('ft'))
    y,ty = nn.functional.one_hot(fed.data.y, 3)[:,:1].double(),torch.zeros(len(fed.data.test[1]), 1).double()
    if without==1: ty[fed.data.test_clients[1][:1]] = 1
    net = Net(Classifier(fed.net.module.body, nn.Linear(fed.net.module.head.in_features, 1).double()))
    data = replace(fed.data, y=y, test=(fed.data.test[0], ty), clients=fed.data.clients[:2], test_clients=fed.data.test_clients[:2], validation=None, groups={})
    rows = run(replace(fed, net=net, data=data, local=replace(fed.local, task=MultiLabel()), protocol=replace(fed.protocol, per_round=2, cross=9)))[1]
    assert {m: v for r,i,m,v in rows if i is None and m.startswith('cross') and r==EPOCHS}=={'cross_unscored': without}

def test_what_one_class_leaves_undefined_is_counted_and_not_in_the_mean():
    "The AUC of a client whose test samples have no positive"
    fed = stage_of(method('ft'))
    y = nn.functional.one_hot(fed.data.y, 3).double()
    ty = nn.functional.one_hot(fed.data.test[1], 3).double(); ty[fed.data.test_clients[0]] = 0
    data = replace(fed.data, y=y, test=(fed.data.test[0], ty), validation=None, groups={})
    _,rows = run(replace(fed, data=data, local=replace(fed.local, task=MultiLabel())))
    auc,undefined = scored(rows, 'personal_auc'),scored(rows, 'personal_undefined')
    assert 0 not in auc and undefined[0]==3 and list(undefined)==[0, 1, 2, 3]
    assert math.isfinite(mean_of(rows, 'personal_auc')) and mean_of(rows, 'personal_auc')==pytest.approx(np.mean([*auc.values()]))

@each
def test_a_client_of_one_sample(strategy):
    state,rows = run(few(stage_of(method(**strategy)), 1))
    assert len(scored(rows))==4 and all(map(math.isfinite, scored(rows).values()))
    assert all(t.isfinite().all() for t in state['memory']['0']['own'].values())

@each
def test_with_batchnorm_a_client_of_one_sample_keeps_the_global_model_and_the_others_do_not_notice(strategy):
    fed = stage_of(method(**strategy), module=normed())
    with pytest.warns(UserWarning, match=r'client 0 holds one \(1 of 4 clients do\), takes no part'): poor = few(fed, 1)
    (state,rows),(whole,all_rows) = run(poor),run(fed)
    assert '0' not in state['memory'] and sorted(state['memory'])==['1', '2', '3']
    found,every = scored(rows),scored(all_rows)
    x,y = (t[torch.as_tensor(fed.data.test_clients[0])] for t in fed.data.of_clients())
    z = fed.net.logits(fed.net.weights(), fed.net.buffers(), fed.data.prepare(x))
    assert found[0]==pytest.approx(100*(z.argmax(1)==y).double().mean().item())
    assert {i: found[i] for i in (1, 2, 3)}=={i: every[i] for i in (1, 2, 3)}
    assert all(torch.equal(a, b) for i in '123' for a,b in zip(state['memory'][i]['own'].values(), whole['memory'][i]['own'].values()))

def test_batchnorm_refuses_batches_of_one_and_clients_of_which_none_can_train():
    fed = stage_of(method('ft'), module=normed())
    with pytest.raises(Refused, match='batch_size is 1'): replace(fed, local=replace(fed.local, batch_size=1))
    with pytest.raises(Refused, match='no client holds more'): with_data(fed, clients=[c[:1] for c in fed.data.clients])

@pytest.mark.parametrize('per_round', [1, 2, 4])
def test_with_batchnorm_rounds_draw_among_the_clients_that_can_train(per_round):
    fed = stage_of(method('ft'), module=normed())
    with pytest.warns(UserWarning): poor = few(replace(fed, method=method('fedavg')), 1)
    poor = replace(poor, protocol=replace(poor.protocol, per_round=per_round))
    drawn = [set(taking_part(poor, r)) for r in range(20)]
    assert set.union(*drawn)=={1, 2, 3} and {*map(len, drawn)}=={min(per_round, 3)}

@each
@pytest.mark.parametrize('n', [2, 5]) # batches of four
def test_batchnorm_never_sees_a_batch_of_one(strategy, n):
    state,rows = run(few(stage_of(method(**strategy), module=normed()), n))
    assert len(scored(rows))==4 and all(t.isfinite().all() for i in range(4) for t in state['memory'][str(i)]['own'].values())

@pytest.mark.parametrize('name', ['lpft','lponly','lora','adapter'])
def test_a_network_without_a_head_is_told_how_to_name_it(name):
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with pytest.raises(Refused, match=re.escape('Classifier.of(module, head="name of the last layer")')): replace(stage_of(method('ft'), module=module), method=method(name))

def test_the_named_head_is_probed():
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    fed = stage_of(method('lponly'), module=Classifier.of(module, head='2'))
    state,_ = run(fed)
    assert {k for k,v in state['memory']['0']['own'].items() if not torch.equal(v, fed.net.weights()[k])}=={'head.weight','head.bias'}
    with pytest.raises(Refused, match='no part of the model'): Classifier.of(module, head='fc')

def domainnet(folder): return published.from_lists(folder, 'domainnet')

LAYOUTS = [(published.from_lists, ['splits','art_painting_train_kfold.txt','art_painting/CLASS/PICTURE']), (domainnet, ['splits','clipart_train.txt','clipart_test.txt','clipart/CLASS/PICTURE']),
    (published.from_digit5, ['mnist_data.mat','mnistm_with_label.mat','svhn_train_32x32.mat','synth_test_32x32.mat','usps_28x28.mat']), (published.from_leaf, ['data/all_data','train','test']), (published.from_cinic10, ['train','valid','test']),
    (published.from_cifar_c, ['labels.npy','fog.npy']), (published.from_celeba, ['img_align_celeba','list_attr_celeba.txt','list_eval_partition.txt']), (published.from_chexpert, ['train.csv','train'])]

@pytest.mark.parametrize('reader,names', LAYOUTS, ids=lambda x: getattr(x, '__name__', ''))
def test_a_missing_folder_says_what_should_be_in_it(reader, names, tmp_path):
    with pytest.raises(Refused) as e: reader(tmp_path/'nowhere')
    assert 'nowhere' in str(e.value) and all(n in str(e.value) for n in names)

def test_missing_data_say_which_file_and_what_is_in_it(tmp_path, monkeypatch):
    monkeypatch.setenv('FEDBOOK_DATA', str(tmp_path/'nowhere')); monkeypatch.setenv('FEDBOOK_OFFLINE', '1')
    with pytest.raises(Refused, match=r'nowhere.cifar10\.npz.*train_x, test_x.*train_y, test_y'): load('cifar10')

def mlp(**given): return Net(build('mlp', image_size=4, **given))

@pytest.mark.parametrize('other', [dict(hidden=[5]), dict(hidden=[4, 4]), dict(hidden=[4], n_classes=3)])
def test_a_global_model_of_another_architecture_is_refused_with_both_fingerprints(other, tmp_path):
    here,there = mlp(hidden=[4]),mlp(**other)
    save(there.weights(), tmp_path/'g.safetensors')
    with pytest.raises(Refused) as e: at_global_model(here, tmp_path/'g.safetensors')
    named = re.findall(r'\b[0-9a-f]{16}\b', str(e.value))
    assert len(set(named))==2
    save(here.weights(), tmp_path/'h.safetensors')
    with pytest.raises(Refused) as back: at_global_model(there, tmp_path/'h.safetensors')
    assert re.findall(r'\b[0-9a-f]{16}\b', str(back.value))==named[::-1]

def test_a_saved_global_model_is_where_the_stage_begins(tmp_path):
    trained = Net(normed())
    buffers = {k: v+1 for k,v in trained.buffers().items()}
    save({**trained.weights(), **buffers}, tmp_path/'g.safetensors')
    net = at_global_model(Net(normed()), tmp_path/'g.safetensors')
    assert all(torch.equal(net.buffers()[k], buffers[k]) for k in buffers) and all(torch.equal(v, trained.weights()[k]) for k,v in net.weights().items())
