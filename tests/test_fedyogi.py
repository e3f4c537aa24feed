"FedYogi against Reddi et al. (2021), and combined with clients of other methods."
import pytest, torch
from fedbook.errors import Refused
from fedbook.method import combined, FedAvg, method, METHODS
from fedbook.methods.fedprox import FedProx
from fedbook.methods.fedyogi import FedYogi
from fedbook.federation import begin
from fedbook.rounds import run
from test_rounds import federation, same

def test_three_rounds_by_hand():
    "The recursion on one weight, with changes that grow, shrink and turn"
    m = FedYogi(eta=.3, tau=.05, beta1=.8, beta2=.9)
    state,(w,mom,v) = m.server(dict(a=torch.tensor(1., dtype=torch.float64)), 1),(1.,0.,0.)
    for goal in (2., 1.1, -3.):
        state = m.aggregate(state, [dict(w=dict(a=torch.tensor(goal, dtype=torch.float64)))], [1])
        d = goal-w
        mom,v = .8*mom+.2*d, v-.1*d*d*((v>d*d)-(v<d*d))
        w += .3*mom/(v**.5+.05)
        assert abs(state['w']['a'].item()-w) < 1e-12

def test_the_first_update_differs_from_fedavg_by_the_analytic_amount():
    fed = federation(rounds=1); yogi = federation(FedYogi(eta=.5), rounds=1)
    w0,a,b = begin(fed)['server']['w'],run(fed)[0]['server']['w'],run(yogi)[0]['server']['w']
    for k in w0:
        d = a[k]-w0[k]
        torch.testing.assert_close(b[k], w0[k] + .5*.1*d/((.001*d*d).sqrt()+.1))

def test_a_weight_that_nobody_changes_stays():
    m,w = FedYogi(eta=.5),dict(a=torch.tensor([1.,2.]))
    state = m.server(w, 1)
    for _ in range(5): state = m.aggregate(state, [dict(w=dict(a=torch.tensor([state['w']['a'][0]+1, 2.])))], [3])
    assert state['w']['a'][1]==2 and state['w']['a'][0] > 1

def test_without_a_memory_of_squares_tau_alone_divides():
    m,w = FedYogi(eta=.5, tau=.25, beta1=0., beta2=1.),dict(a=torch.tensor(1.))
    state = m.aggregate(m.server(w, 1), [dict(w=dict(a=torch.tensor(4.)))], [1])
    assert state['w']['a']==1+.5*3/.25 and state['v']['a']==0

def test_a_combination_is_both():
    m = method('fedyogi+fedprox', mu=0., eta=.5)
    assert same(run(federation(m))[0], run(federation(FedYogi(eta=.5)))[0])
    assert not same(run(federation(method('fedyogi+fedprox', mu=5., eta=.5)))[0]['server'], run(federation(m))[0]['server'])
    assert type(m).__mro__[1:3]==(FedYogi, FedProx) and type(m) is combined('fedyogi','fedprox') and not any('+' in k for k in METHODS)
    assert combined('fedavg') is FedAvg

@pytest.mark.parametrize('bad,word', [(lambda: method('fedyogi+fedporx'), 'fedprox'), (lambda: method('fedyogi+fedprox', nu=1), 'nu'), (lambda: method('fedyogi', tau=0), 'tau'),
    (lambda: method('fedyogi+', eta=1), 'method'), (lambda: method('fedyogi', beta1=2), 'beta1'), (lambda: method('fedyogi', beta1=1), 'below 1')])
def test_refusals(bad, word):
    with pytest.raises(Refused, match=word): bad()
