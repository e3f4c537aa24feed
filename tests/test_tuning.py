"Silent hyper-parameters are chosen from a grid, by the mean over seeds, and a run that diverged is never chosen."
import math
import pytest
from fedbook.errors import Refused
from fedbook.experiments import Setting
from fedbook.tuning import at, cases, chosen, groups, named, reached, tuned_table

GRID = dict(MOON=dict(mu=[1., .1], tau=[.5, 1.]), APFL=dict(adaptive=[False, True]))

def setting(m, given, lr): return Setting('fashion_mnist_mini', method=dict(name=m.lower(), **given), local=dict(optimiser=dict(name='sgd', lr=lr)))
def run(place, seed, value): return dict(seed=seed, cell=at(place), rows=[[1, None, 'val_accuracy', value]])

def test_every_place_is_one_run_and_every_run_has_its_place():
    every = groups(GRID, [.1, .03], ['MOON','FedAvg'])
    to_run = cases(every, setting)
    places = {tuple(at(p).values()) for g in every for p in g}
    assert len(to_run)==len(places)==len({c.fingerprint(0) for c in to_run})==8
    assert [len(g) for g in every]==[2]*5 and {tuple(c.cell.values()) for c in to_run}==places

def test_one_hyper_parameter_is_varied_at_a_time_and_rates_keep_the_first_values():
    mu,tau,adaptive,moon,fedavg = groups(GRID, [.1, .03], ['MOON','FedAvg'])
    assert [p[1] for p in mu]==[dict(mu=1., tau=.5), dict(mu=.1, tau=.5)] and [p[1] for p in tau]==[dict(mu=1., tau=.5), dict(mu=1., tau=1.)]
    assert moon==[('MOON', dict(mu=1., tau=.5), .1), ('MOON', dict(mu=1., tau=.5), .03)] and fedavg==[('FedAvg', {}, .1), ('FedAvg', {}, .03)]
    assert named(adaptive[1][1])=='adaptive = True' and named({})=='–'

def test_the_mean_over_seeds_decides_the_first_of_equals_wins_and_what_diverged_does_not():
    group = groups(GRID, [.1], [])[0]
    def by(first, second): return chosen([run(p, s, v) for p,vs in zip(group, (first, second)) for s,v in enumerate(vs)], group, 'val_accuracy')
    assert by((60., 60.), (90., 20.))==group[0] and by((60., 60.), (90., 31.))==group[1]
    assert by((50.,), (50.,))==group[0] and by((math.nan, 90.), (1., 1.))==group[1] and by((math.nan,), (math.nan,))==group[0]
    assert math.isnan(reached([run(group[0], 0, math.nan), run(group[0], 1, 5.)], group[0], 'val_accuracy'))

def test_a_group_of_one_is_refused_by_name():
    with pytest.raises(Refused, match='nothing to choose for APFL'): groups(dict(APFL=dict(alpha=[.5])), [.1], [])
    with pytest.raises(Refused, match='nothing to choose for FedAvg'): groups({}, [.1], ['FedAvg'])

def test_each_data_set_has_a_grid_and_a_choice_of_its_own():
    "Runs are found by their place, whatever other coordinates their cells have"
    about = dict(profile='smoke', data='x', model='y', method='z', variant='intended', stand_in={}, device='d', engine='e', seconds=1., version='0', code='c', setting={})
    def sweep(d, values):
        group = groups(dict(MOON=dict(mu=[float(k) for k in values])), [.1], [])[0]
        return [r | about | dict(cell=r['cell'] | dict(dataset=d), fingerprint=f'{d}{p}') for p,v in zip(group, values.values()) for r in [run(p, 0, v)]],[group]
    frame = tuned_table(dict(A=sweep('A', {1: 60., 5: 70.}), B=sweep('B', {1: 80., 5: 70., 10: 90.})), 'val_accuracy', 'T').frame
    assert frame.iloc[:, [0, 2, 4, 5]].values.tolist()==[['A','mu = 1',60.,''], ['A','mu = 5',70.,'chosen'], ['B','mu = 1',80.,''], ['B','mu = 5',70.,''], ['B','mu = 10',90.,'chosen']]
