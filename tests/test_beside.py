"The picture at the end of every method notebook shows what its runs sent and scored."
import matplotlib
matplotlib.use('agg')
import matplotlib.pyplot as plt, numpy as np, pytest
from fedbook.beside import beside_fedavg, changed, EMBEDDED, experiment, label
from fedbook.experiments import federation, Setting
from fedbook.method import FedAvg
from fedbook.methods.fedprox import FedProx
from fedbook.methods.posthoc import FT
from fedbook.results import curve_of
from fedbook.rounds import run
from fedbook.wire import nbytes

SMALL = dict(protocol=dict(rounds=3), partition=dict(n_clients=6), local=dict(epochs=1, batch_size=200))

def lines(figure): return {l.get_label(): l for l in figure.axes[0].get_lines() if not l.get_label().startswith('_')}
def bars(figure): return np.array([[b.get_height() for b in group] for group in figure.axes[1].containers]) # [contenders, (up, down)]

def test_settings_are_changed_one_by_one_and_things_with_a_name_as_a_whole():
    new = changed(EMBEDDED, dict(local=dict(epochs=5), partition=dict(name='iid', n_clients=3), held=.2))
    assert new['local']=={**EMBEDDED['local'], 'epochs': 5} and new['partition']==dict(name='iid', n_clients=3) and new['held']==.2
    assert 'held' not in EMBEDDED and EMBEDDED['local']['epochs']==2

def test_curves_and_bytes_are_those_of_the_runs():
    figure = beside_fedavg(FedProx(mu=1.), seeds=[0, 1], **SMALL)
    s = Setting(**changed(EMBEDDED, SMALL), method=dict(name='fedprox', mu=1.))
    runs = [run(federation(s, k))[1] for k in (0, 1)]
    mean = np.mean([list(curve_of(dict(rows=r), 'accuracy').values()) for r in runs], axis=0)
    assert np.allclose(lines(figure)['FedProx, mu=1.0'].get_ydata(), mean)
    w = federation(s).net.weights()
    assert np.allclose(bars(figure), 3*5*nbytes(dict(w=w))/1e6)

def test_the_degenerate_case_lies_on_fedavg():
    found = lines(beside_fedavg(FedProx(mu=0.), seeds=[3], **SMALL))
    assert np.array_equal(found['FedProx, mu=0.0'].get_ydata(), found['FedAvg'].get_ydata())

def test_own_settings_are_the_methods_alone():
    found = lines(beside_fedavg(FedProx(mu=0.), seeds=[0], own=dict(local=dict(optimiser=dict(name='sgd', lr=1e-9))), **SMALL))
    still,moved = (np.ptp(found[k].get_ydata()) for k in ('FedProx, mu=0.0','FedAvg'))
    assert still==0 < moved

def test_a_stage_after_fedavg_shares_its_first_rounds_and_sends_half():
    small = {**SMALL, 'protocol': dict(rounds=10, evaluate_every=10)}
    figure = beside_fedavg(FT(), posthoc=True, seeds=[0], **small)
    ft,plain = (lines(figure)[k].get_ydata() for k in ('FedAvg, then FT','FedAvg'))
    assert len(ft)==len(plain)==10 and np.array_equal(ft[:5], plain[:5]) and not np.array_equal(ft[5:], plain[5:])
    assert np.allclose(bars(figure)[0]*2, bars(figure)[1])

def test_no_figure_stays_open():
    beside_fedavg(seeds=[0], **SMALL)
    assert not plt.get_fignums()

@pytest.mark.parametrize('m,name', [(FedAvg(), 'FedAvg'), (FedProx(), 'FedProx'), (FedProx(mu=2.), 'FedProx, mu=2.0'), (FT(flood=.1), 'FT, flood=0.1')])
def test_a_label_names_what_differs_from_the_defaults(m, name): assert label(m)==name

def test_a_combination_is_found_by_its_name():
    from fedbook.method import method
    assert experiment(method('fedyogi+fedprox', mu=.3), EMBEDDED).method==dict(name='fedyogi+fedprox', mu=.3)
