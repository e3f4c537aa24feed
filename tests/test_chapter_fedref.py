"The chapter on the FedRef paper: thresholds, costs, masks and what to say where something does not fit."
import math, subprocess, sys, tomllib, warnings
from dataclasses import replace
from pathlib import Path
import numpy as np, pytest, torch
from fedbook.chapters.fedref import ablation, ALGORITHMS, as_rounds, comparison_cases, comparison_setting, guesses, operations, relative_cost, round_costs, rounds_until, short_reference, thresholds, world_of
from fedbook.claims import claims, holds_in_print
from fedbook.data import Dataset, keep, OWN
from fedbook.engines import Processes, stacked, Traced
from fedbook.client import one_by_one
from fedbook.errors import Refused
from fedbook.experiments import federation
from fedbook.federation import begin, ready
from fedbook.manifest import experiment, experiments, PROFILES
from fedbook.method import method
from fedbook.methods.fedref import reference
from fedbook.models import build, MODELS
from fedbook.papers import printed
from fedbook.replies import SetAside
from fedbook.rounds import run
from fedbook.segmentation import drawn_tumours, drawn_volumes, keep_volumes, mask_scores, reduced, unet, Volumes
from fedbook.tasks import Segmentation
import test_rounds

ROOT = Path(__file__).resolve().parents[1]
MINI = dict(data='fashion_mnist_mini', model=dict(name='mlp', hidden=[8]), clients=[20, 3], rounds=3, epochs=1, batch_size=64)
DRAWN = dict(drawn=dict(n_train=24, n_test=8, size=16), model=dict(name='unet', channels=[4, 8]), input=dict(mean='half'), partition=dict(name='natural', group='hospital'), task='segmentation', optimiser='adam', lr=.01, clients=[6, 3], rounds=2, epochs=1, batch_size=4)
DEEP = dict(DRAWN, drawn=None, volumes=dict(n_train=12, n_test=4, depth=8, size=16), model=dict(name='unet', dims=3, in_channels=1, channels=[4, 8]), clients=[4, 3]); DEEP.pop('drawn')

# What is printed and claimed

def test_every_method_has_its_rounds_in_print():
    for t in ('004-table4','004-table5','004-table6'):
        cells = printed(t).cells
        assert len(cells)==8 and len({c['reached'] for c in cells})==2 and [c['algorithm'] for c in cells]==[*ALGORITHMS][:4]*2
    assert sum(c['rounds']==math.inf for t in (4, 5, 6) for c in printed(f'004-table{t}').cells)==3

def test_claims_are_about_cells_that_the_notebooks_have():
    shares = {f'{s:.0%} of FedAvg'.replace('%', ' %') for s in experiment('004-table4').parameters('laptop')['shares']}
    for c in claims():
        if c.table[:3]=='004' and c.metric=='rounds' and holds_in_print(c) is None: assert {x['reached'] for p in c.pairs for x in p} <= shares and {x['algorithm'] for p in c.pairs for x in p} <= {*ALGORITHMS}
        if c.table=='004-table3': assert {x['lam'] for p in c.pairs for x in p} <= {*experiment(c.table).parameters('paper')['lams']} and {x['p'] for p in c.pairs for x in p} <= {3, 5}

def test_every_table_and_figure_of_numbers_has_its_profiles():
    mine = {i: e for i,e in experiments().items() if i.startswith('004-')}
    assert {*mine}=={*(f'004-table{n}' for n in range(2, 7)), *(f'004-figure{n}' for n in (3, 4, 5)), '004-masks', '004-volumes'}
    for e in mine.values():
        for p in PROFILES[1:]: assert not p=='laptop' or 'seeds' not in e.parameters(p) or e.id=='004-figure3' or e.parameters(p)['seeds']==[0, 1, 2]

@pytest.mark.parametrize('profile', ['laptop','overnight'])
def test_figures_and_masks_show_what_the_tables_run(profile):
    of = {i: experiment(f'004-{i}').parameters(profile) for i in ('table4','table5','table6','figure3','masks')}
    assert {**of['table6']['world'], 'own': None}=={**of['masks']['world'], 'own': None} and of['table6']['settings']==of['masks']['settings']
    for place,t in dict(zip(('FEMNIST','CINIC-10','FeTS2022'), ('table4','table5','table6'))).items():
        assert (w := of['figure3']['worlds'][place])['clients']==of[t]['settings']['clients']
        assert [w.get(k) for k in ('data','by','partition','alpha')]==[of[t]['world'].get(k) for k in ('data','by','partition','alpha')]
    for n in (4, 5): assert experiment(f'004-figure{n}').parameters(profile)['tables']==['004-table4','004-table5','004-table6']

# Settings

def test_a_table_has_each_variant_of_fedref_and_the_others_once():
    cases = comparison_cases(MINI, ['FedAvg','FedRef'], ['intended','printed','released'], {})
    assert [(c.cell['algorithm'], c.variant) for c in cases]==[('FedAvg','intended'), *(('FedRef', v) for v in ('intended','printed','released'))]
    assert [c.setting.method.get('eta') for c in cases[1:]]==[1., 1., 1e-6]
    own = dict(FedOpt=dict(method=dict(eta=.5), lr=.7))
    tuned = comparison_cases(dict(MINI, own=own), ['FedAvg','FedOpt'], [], dict(lr=.2))
    assert [c.setting.method for c in tuned]==[ALGORITHMS['FedAvg'], dict(ALGORITHMS['FedOpt'], eta=.5)]
    assert [c.setting.local['optimiser']['lr'] for c in tuned]==[.2, .7]

def test_a_strength_below_zero_is_refused():
    for lam in (-.1, -1):
        with pytest.raises(Refused, match='lam'): ablation(lam, 3, **MINI)
    with pytest.raises(Refused, match="did you mean 'FedRef'"): comparison_setting('FedReff', **MINI)

def test_a_reference_longer_than_the_run_is_what_there_is_and_says_so():
    a,b = ({m: v for *_,m,v in run(federation(ablation(.4, p, **MINI)))[1] if m=='loss'} for p in (3, 50))
    assert a==b, 'three rounds, three aggregates'
    assert reference([dict(w=torch.tensor(1.)), dict(w=torch.tensor(3.))], 50)['w']==2
    assert '50' in short_reference(50, 3) and short_reference(3, 3)=='' and short_reference(3, 50)==''

def test_as_released_it_waits_until_round_p_plus_2_and_a_shorter_run_is_told():
    assert short_reference(3, 5, 'released')=='' and 'round p+2 = 5; with 4 rounds it is FedAvg' in short_reference(3, 4, 'released')
    with pytest.warns(UserWarning, match='it is FedAvg'): short = ablation(.4, 2, 'released', **MINI)
    lost = [[v for *_,m,v in run(federation(s))[1] if m=='loss'] for s in (short, comparison_setting('FedAvg', **MINI))]
    assert MINI['rounds']==3 and lost[0]==lost[1]

def test_thresholds_of_a_metric_that_no_run_has_are_refused_with_those_it_has():
    with pytest.raises(Refused, match="FedAvg's dice, and a run of it has none; its rows have accuracy"): thresholds([record([.2, .4], 'accuracy')], metric='dice')

def test_whoever_asks_for_a_reference_longer_than_the_run_is_told_once():
    with pytest.warns(UserWarning) as told: ablation(.4, 50, **MINI)
    assert [str(w.message) for w in told]==[short_reference(50, MINI['rounds'])]
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        ablation(.4, 3, **MINI), ablation(.4, 50, 'printed', **MINI), comparison_setting('FedAvg', **{**MINI, 'rounds': 1})

def test_a_client_whose_loss_is_not_a_number_is_named_and_set_aside():
    fed = test_rounds.federation(method('fedref'), per_round=4)
    fed.data.x[fed.data.clients[2]] = math.nan
    with pytest.warns(SetAside, match='Client 2 is set aside in round 1: its training loss is nan'): state,rows = run(fed)
    assert {c for _,c,m,_ in rows if m=='set_aside'}=={2} and all(torch.isfinite(w).all() for w in state['server']['w'].values()) and math.isfinite(state['server']['loss'])

# Thresholds

def record(values, metric='accuracy', **more): return dict(rows=[[r, None, metric, v] for r,v in enumerate(values, 1)], setting=dict(protocol=dict(rounds=len(values))), cell=dict(algorithm='FedAvg'), **more)

def test_thresholds_in_the_paper_s_words():
    r = record([10., 60., 30., 70.])
    assert [rounds_until(r, t) for t in ('accuracy > 9 %', 'Accuracy > 65', 'accuracy < 35 %', 'accuracy > 71')]==[1, 4, 1, None]
    assert rounds_until(record([.2, .4], 'dice'), 'Dice > 0.3 %')==2 and thresholds([record([.2, .4], 'dice')], [.5], 1, 'dice')=={.5: .2}
    with pytest.raises(Refused, match='comparison'): rounds_until(r, 'accuracy = 9 %')
    with pytest.raises(Refused, match='FedAvg'): thresholds([])

def test_a_threshold_out_of_reach_counts_one_round_more():
    r = record([10., 20., 30.])
    r['rows'] += [[n, c, 'class_accuracy', v] for n,vs in ((1, (50., 50.)), (2, (40., 70.)), (3, (10., 70.))) for c,v in enumerate(vs)]
    found = as_rounds(r, {'50 %': 'accuracy > 15', '90 %': 'accuracy > 99'})
    assert [x['cell'] for x in found]==[dict(algorithm='FedAvg', reached=k) for k in ('50 %', '90 %', 'the last round')]
    assert [x['rows'] for x in found]==[[[3, None, 'rounds', 2]], [[3, None, 'rounds', 4]], [[3, None, 'forgotten', 20.]]]
    assert [x['rows'] for x in as_rounds(record([1., 2.], 'dice'), {'x': 'dice > 3'})]==[[[2, None, 'rounds', 3]]], 'masks have no classes to forget'

def test_guesses_are_chance():
    g = guesses(comparison_setting('FedAvg', **MINI))
    assert abs(g['accuracy']-10) < 4 and g['loss']==pytest.approx(2.302680, abs=1e-3)
    w = world_of(DRAWN); masks = guesses(comparison_setting('FedAvg', **w))
    y = OWN[w['data']].test_y > 0
    assert masks['dice']==pytest.approx(100*np.mean([2*m.sum()/(m.sum()+m.size) for m in y]))

# Costs

def counted(name, **kw):
    fed = ready(federation(comparison_setting(name, **{**MINI, **kw})))
    return round_costs(fed, begin(fed)),fed

def test_a_proximal_term_costs_a_few_operations_for_each_weight_and_step_whatever_the_batch():
    def extra(batch):
        (a,fed),(b,_) = (counted(m, batch_size=batch) for m in ('FedAvg','FedProx'))
        return (b['operations']-a['operations'])/(-(-len(fed.data.clients[0])//batch)*sum(w.numel() for w in fed.net.weights().values()))
    assert 3 <= extra(8) < 8 and extra(8)==pytest.approx(extra(64), abs=.01)

@pytest.mark.parametrize('name', ['FedRef','FedOpt','FedAdagrad','FedYogi','FedAvgM'])
def test_clients_of_methods_that_change_the_server_do_what_those_of_fedavg_do(name):
    assert counted(name)[0]['operations']==counted('FedAvg')[0]['operations']

def test_operations_by_hand():
    x,w = torch.rand(5, 7),torch.rand(7, 2)
    assert operations(lambda: x@w)==2*5*7*2 and operations(lambda: (x@w).relu())==150 and operations(lambda: x.t())==0
    assert operations(lambda: torch.nn.functional.conv2d(torch.rand(1, 1, 4, 4), torch.rand(1, 1, 3, 3)))==2*9*4 + 16 + 9, 'random numbers count, too'

def test_a_message_of_fedref_is_one_number_and_its_name_longer():
    up = {m: next(v for *_,k,v in run(federation(comparison_setting(m, **MINI)))[1] if k=='bytes_up') for m in ('FedAvg','FedRef','SCAFFOLD')}
    assert 3*4 <= up['FedRef']-up['FedAvg'] < 3*100 and up['SCAFFOLD'] > 1.9*up['FedAvg']

# Masks

@pytest.mark.parametrize('engine', [Traced(), stacked(), Processes(2)], ids=['traced','stacked','processes'])
@pytest.mark.parametrize('world', [DRAWN, DEEP], ids=['slices','volumes'])
def test_a_u_net_trains_alike_on_every_engine(engine, world):
    fed = federation(comparison_setting('FedRef', **{**world_of(world), 'optimiser': 'sgd', 'lr': .05})) # Adam divides by tiny numbers, in another order of sums others
    with warnings.catch_warnings(): warnings.simplefilter('ignore'); a,b = (run(fed, engine=e)[0]['server']['w'] for e in (one_by_one, engine))
    for k in a: torch.testing.assert_close(a[k], b[k], rtol=0, atol=0 if isinstance(engine, Processes) else 1e-4)

def test_a_u_net_answers_each_pixel_and_refuses_sizes_that_it_cannot_halve():
    m = build('unet', n_classes=3, in_channels=3, image_size=24, channels=(4, 8, 8))
    z = m(torch.rand(2, 3, 24, 24)); z.sum().backward()
    assert z.shape==(2, 3, 24, 24) and all(p.grad is not None for p in m.parameters()) and MODELS['unet'] is unet
    with pytest.raises(Refused, match='30 pixels'): build('unet', image_size=30)

def test_monai_missing_is_one_sentence_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, 'monai', None)
    with pytest.raises(Refused, match=r"fedbook\[monai\]") as e: build('monai_unet', image_size=32)
    assert '\n' not in str(e.value) and 'monai' in tomllib.loads((ROOT/'pyproject.toml').read_text())['project']['optional-dependencies']
    for size in (40, 16):
        with pytest.raises(Refused, match='multiple of 16, at least 32'): build('monai_unet', image_size=size)

@pytest.mark.parametrize('line,last', [("Setting('fashion_mnist_mini', model=dict(name='unet')); build('unet')", ''), ("federation(Setting('fashion_mnist_mini', model=dict(name='monai_unet', image_size=32)))", 'Refused: The model monai_unet needs MONAI')])
def test_a_fresh_process_knows_the_u_nets_by_name(line, last):
    code = f'''import sys
sys.modules['monai'] = None
from fedbook.experiments import build, federation, Setting
{line}'''
    told = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stderr
    assert told==last or last and last in told

def test_drawn_tumours_are_the_same_each_time_and_hospitals_differ():
    d = drawn_tumours(24, 8, 16)
    OWN.pop(d.name); again = drawn_tumours(24, 8, 16)
    assert all((getattr(d, k)==getattr(again, k)).all() for k in ('train_x','train_y','test_x','test_y')) and again is not d
    shade = [np.median(d.train_x[d.group('hospital')[0]==h][:,6:10,6:10]) for h in (0, 5)]
    assert shade[1] > shade[0]+40
    assert (drawn_tumours(24, 8, 16, seed=1).train_x!=d.train_x).any()

# Volumes

def test_a_u_net_answers_each_voxel():
    m = build('unet', n_classes=3, in_channels=1, image_size=16, channels=(4, 8), dims=3)
    z = m(torch.rand(2, 1, 8, 16, 16)); z.sum().backward()
    assert z.shape==(2, 3, 8, 16, 16) and all(p.grad is not None for p in m.parameters())
    for name in ('unet','monai_unet'):
        with pytest.raises(Refused, match='dims=4'): build(name, image_size=32, dims=4)

def test_drawn_volumes_are_the_same_each_time_and_go_through_a_run():
    w = world_of(DEEP); d = OWN.pop(w['data']); again = drawn_volumes(**DEEP['volumes'])
    assert again is not d and again.fingerprint==d.fingerprint!=drawn_volumes(**DEEP['volumes'], seed=1).fingerprint
    assert d.kind=='masks' and d.images('train').shape==(12, 1, 8, 16, 16) and d.labels('test').shape==(4, 8, 16, 16) and len(set(d.group('hospital')[0]))==4
    rows = run(federation(comparison_setting('FedAvg', **w)))[1]
    assert {'dice','hd95'} <= {m for *_,m,_ in rows} and guesses(comparison_setting('FedAvg', **w))['dice'] > 0

def test_volumes_that_fit_nothing_are_refused():
    x = np.zeros((3, 4, 6, 6), np.uint8); y = x+1
    for bad,word in (((x[:,1:], y, x, y), '3, 3, 6, 6'), ((x, y, x[:,:,1:], y), '3, 4, 5, 6'), ((x, y+1, x, y), 'below 2'), ((x*1., y, x, y), 'bytes'), ((x[:0], y[:0], x, y), 'train_x')):
        with pytest.raises(Refused, match=word): keep_volumes(Volumes('askew volumes', *bad, ['a','b']))
    try:
        keep_volumes(Volumes('three volumes', x, y, x, y, ['a','b']))
        with pytest.raises(Refused, match='other content'): keep_volumes(Volumes('three volumes', x, x, x, y, ['a','b']))
    finally: OWN.pop('three volumes', None)

def test_monai_s_u_net_takes_slices_and_volumes():
    pytest.importorskip('monai')
    few = dict(image_size=32, n_classes=3, features=(4, 4, 8, 8, 16, 4))
    assert build('monai_unet', **few)(torch.rand(2, 1, 32, 32)).shape==(2, 3, 32, 32)
    assert build('monai_unet', **few, dims=3)(torch.rand(2, 1, 16, 32, 32)).shape==(2, 3, 16, 32, 32)

def test_tables_of_volumes_say_that_they_are_synthetic():
    e = experiment('004-volumes')
    assert all('synthetic volumes' in e.parameters(p)['stand_in']['data'] for p in e.profiles)
    sizes = {p: [e.parameters(p)['world']['volumes'].get(k, usual) for k,usual in (('depth', 16), ('size', 32))] for p in e.profiles}
    assert all(f'of {d} × {s} × {s} for' in e.parameters(p)['stand_in']['data'] for p,(d,s) in sizes.items())

def test_reduced_slices_by_hand():
    x = np.arange(16, dtype=np.uint8).reshape(1, 4, 4); y = np.zeros((1, 4, 4), np.uint8); y[0,1,1] = y[0,3,2] = 1
    d = keep(Dataset('four', x, y, x, y, ['a','b']))
    try:
        r = reduced(d, 2)
        assert r.name=='four_2' and r.train_x[0].tolist()==[[2, 4], [10, 12]] and r.train_y[0].tolist()==[[1, 0], [0, 0]]
        with pytest.raises(Refused, match='multiple of 3'): reduced(d, 3)
    finally: OWN.pop('four'), OWN.pop('four_2', None)

def test_a_mask_of_another_shape_than_its_image_is_refused():
    x,y = np.zeros((4, 8, 8), np.uint8),np.zeros((4, 8, 6), np.uint8)
    with pytest.raises(Refused, match='8, 6'): keep(Dataset('askew', x, y, x, y, ['a','b']))
    with pytest.raises(Refused, match=r'\[1, 8, 6\]'): mask_scores(torch.zeros(1, 8, 8).long(), torch.zeros(1, 8, 6).long(), 2)
    with pytest.raises(Refused, match='8, 6'): Segmentation().check(torch.zeros(1, 2, 8, 8), torch.zeros(1, 8, 6).long())

def test_a_class_that_never_occurs_has_a_dice_and_no_distance():
    true = torch.zeros(3, 6, 6).long(); true[0,1:3,1:3] = 1
    got = true.clone(); got[1,0,0] = 2
    one,two = mask_scores(got, true, 3)
    assert one=={'class': 1, 'dice': 100., 'hd95': 0., 'undefined': 2, 'one_empty': 0}
    assert two['dice']==pytest.approx(200/3) and two['hd95']==pytest.approx(math.hypot(6, 6)) and (two['undefined'], two['one_empty'])==(2, 1)
    assert mask_scores(true, true, 3)[1]=={'class': 2, 'dice': 100., 'hd95': None, 'undefined': 3, 'one_empty': 0}

def test_equal_costs_have_no_relative_cost():
    with pytest.raises(Refused, match='compare the costs'): relative_cost(dict(a=1., b=1.))
