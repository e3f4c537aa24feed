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
