"Closed forms against matrices, samples and exact fractions."
import json, re
from pathlib import Path
import numpy as np, pandas as pd, pytest, sympy as sp
from hypothesis import given, HealthCheck, settings, strategies as st
from fedbook import theory as T
from fedbook.errors import Refused
from fedbook.manifest import experiments
from fedbook.papers import asset
from fedbook.streams import stream

ROOT = Path(__file__).resolve().parents[1]

@st.composite
def instances(draw):
    "Settings: (generator, C, m, d, B, V_com, λ, η, ε, client); features and heads are drawn from a seed"
    C,m,more = draw(st.integers(1, 6)),draw(st.integers(1, 5)),draw(st.integers(0, 5))
    lam,eta,eps = (draw(st.floats(low, high)) for low,high in ((.05, 10), (.01, 1), (.1, 2)))
    rng = stream(0, 'instance', draw(st.integers(0, 2**32)))
    return rng, C, m, C+m+more, T.haar(rng, C+m, C+m+more), rng.standard_normal(m), lam, eta, eps, draw(st.integers(0, C-1))

def on_1000_instances(test): return settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])(given(instances())(test))

def close(a, b, scale=0.): # a loss that is far below its scale, λ² for instance, is a difference of larger numbers and rounded like them
    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12*np.max(np.abs(b), initial=1e-9) + 1e-13*scale)

@on_1000_instances
def test_concept_shift_is_what_the_matrices_give(instance):
    rng,C,m,d,B,V,lam,eta,eps,client = instance
    for steps in (None, int(rng.integers(0, 30))):
        r = T.concept_shift(C, V@V, lam, eta, steps)
        l = T.population_losses(B, T.client_heads(V, lam, C), T.common_head(V, C), eta, client=client, lp_steps=steps)
        close(r['ft'], l['ft'].mean(), lam**2); close(r['lpft'], l['lpft'].mean(), lam**2)
        close(r['lpft']-r['lpft_printed'], lam**2*(C-1)/(2*C), lam**2)
        if abs(r['ft']-r['lpft']) > 1e-9*r['ft'] + 1e-12*lam**2: assert r['lpft_wins']==(r['lpft'] < r['ft'])

@on_1000_instances
def test_covariate_forms_are_what_the_matrices_give(instance):
    rng,C,m,d,B,V,lam,eta,eps,client = instance
    f = T.covariate_forms(B, V, eta, eps, client)
    l = T.population_losses(B, T.client_heads(V, lam, C), T.common_head(V, C), eta, client=client, means=np.eye(C, d), eps=eps)
    close(f['c2']*lam**2 + f['c3']*lam**3 + f['c4']*lam**4, l['ft'].mean()); close(f['D']*lam**2/(2*C), l['lpft'].mean())
    close([f['N'], f['D'], f['disc']], [f['N_each'].sum(), f['D_each'].sum(), f['n1']**2-f['n2']*(f['n0']-f['D'])])
    x = B[:m,client]
    flat = V - x*(x@V)/(x@x) # w₀·g = 0: no terms but λ²
    l = T.population_losses(B, T.client_heads(flat, lam, C), T.common_head(flat, C), eta, client=client, means=np.eye(C, d), eps=eps)
    f = T.covariate_forms(B, flat, eta, eps, client)
    close(f['N_each']*lam**2/2, l['ft']); close(f['D_each']*lam**2/2, l['lpft'])

@on_1000_instances
def test_the_printed_loss_is_that_of_a_function_shifted_by_the_forgotten_sum(instance):
    rng,C,m,d,B,V,lam,eta,eps,_ = instance
    means,heads,V0 = np.eye(C, d),T.client_heads(V, lam, C),T.common_head(V, C)
    w = T.linear(*T.ft_step(V0, B, T.moment(B.T@(V0-heads[0]), means[0], eps), eta))
    off = w + B.T@V0 - heads@B
    close(T.printed_ft_loss(B, V, lam, eta, eps), np.mean([.5*o@T.moment(o, e, eps) for o,e in zip(off, means)]))

@on_1000_instances
def test_P2_and_P3_are_what_the_matrices_give(instance):
    rng,C,m,d,B,V,lam,eta,eps,_ = instance
    c,heads = rng.standard_normal(m),lambda V: T.client_heads(V, lam, C)
    s,star = T.misfit_threshold(V, c, eta, C)
    l = {k: v.mean() for k,v in T.population_losses(B, heads(V+c), T.common_head(V, C), eta).items()}
    close((1-s)**2*(c@c)/2 + lam**2/(2*C)*((s-1)**2 + (C-1)*(s**2+1)), l['ft'])
    if abs(lam-star) > 1e-6*lam: assert (l['lpft'] <= l['ft']*(1+1e-12))==(lam < star)
    kappa = rng.uniform(0, 3)
    r = T.aligned_shift(kappa, eps, eta, V@V, lam, C)
    l = {k: v.mean() for k,v in T.population_losses(B, heads(V), T.common_head(V, C), eta, means=kappa*B[m:], eps=eps).items()}
    close(r['ft'], l['ft']); close(r['lpft'], l['lpft'])
    if abs(r['ft']-r['lpft']) > 1e-9*r['ft']: assert r['lpft_wins']==(r['lpft'] < r['ft'])==(r['a'] >= 1 or r['a'] <= r['a_minus'])

@on_1000_instances
def test_P6_is_the_loss_under_the_best_head_of_every_client(instance):
    rng,C,m,d,B,V,lam,eta,eps,client = instance
    heads,V0,X = T.client_heads(V, lam, C),T.common_head(V, C),rng.standard_normal((8, d))
    for sigma in (None, T.of_sample(X)):
        product = sigma or (lambda x: T.moment(x, np.eye(d)[client], eps))
        _,B1 = T.ft_step(V0, B, product(B.T@(V0-heads[client])), eta)
        best = [.5*np.sum((B1.T@np.linalg.lstsq(B1.T, w)[0] - w)**2) for w in heads@B]
        np.testing.assert_allclose(T.reprobe_loss(B, V0, eta, lam, eps, C, client, sigma), best, rtol=1e-9, atol=1e-11*(1+V@V+lam**2))

def test_the_counterexample_is_exact():
    r = T.concept_shift(2, 1., 1., 1/4)
    assert (r['ft'], r['lpft'], r['lpft_printed'], bool(r['lpft_wins']))==(3/8, 1/2, 1/4, False)
    l = T.exact_losses(sp.eye(3), [[1,1,0],[1,0,1]], [1,0,0], sp.Rational(1, 4))
    assert l==dict(ft=[sp.Rational(1, 8), sp.Rational(5, 8)], lpft=[0, 1])
    x = T.population_losses(np.eye(3), T.client_heads([1.], 1., 2), T.common_head([1.], 2), 1/4)
    assert x['ft'].mean()==3/8 and abs(x['lpft'].mean()-1/2) < 1e-15

def test_the_counterexample_under_covariate_shift_is_exact():
    lam = sp.symbols('lam')
    l = T.exact_losses(sp.eye(3), [[1,lam,0],[1,0,lam]], [1,0,0], sp.Rational(1, 4), [sp.diag(2,1,1), sp.diag(1,2,1)])
    assert sum(l['ft'])/2==7*lam**2/16 and sum(l['lpft'])/2==3*lam**2/4

@pytest.mark.parametrize('steps', [None, 0, 1, 3])
def test_exact_losses_are_the_same_in_floating_point(steps):
    B = sp.Matrix([[2,-1,2],[2,2,-1],[-1,2,2]])/3
    moments = [sp.diag(*[int(i==j) for j in range(3)]) + sp.eye(3)/4 for i in range(2)]
    exact = T.exact_losses(B, [[1,2,0],[1,0,2]], [1,0,0], sp.Rational(1, 3), moments, client=1, lp_steps=steps)
    direct = T.population_losses(np.array(B, float), T.client_heads([1.], 2., 2), T.common_head([1.], 2), 1/3, client=1, means=np.eye(2, 3), eps=1/2, lp_steps=steps)
    for k in exact: close(direct[k], np.array(exact[k], float))
    if steps==0: assert exact['ft']==exact['lpft'] and (direct['ft']==direct['lpft']).all()

def test_the_difference_has_the_factors_that_the_condition_needs():
    l,e,v = sp.symbols('l e v')
    x = T.exact_losses(sp.eye(4), [[v,l,0,0],[v,0,l,0],[v,0,0,l]], [v,0,0,0], e)
    a = e*(1+v**2)
    assert sp.expand(sum(x['ft'])/3 - sum(x['lpft'])/3 - l**2/6*(a-1)*(3*a+1))==0

def test_draws_and_values_of_lambda_broadcast():
    B,V,lam = T.haar(stream(1, 'B'), 6, 5, 9),stream(1, 'V').standard_normal((6, 2)),np.linspace(0, 3, 4)
    l = T.population_losses(B[:,None], T.client_heads(V[:,None], lam, 3), T.common_head(V, 3)[:,None], .2, means=np.eye(3, 9), eps=.5)
    p = T.printed_ft_loss(B[:,None], V[:,None], lam, .2, .5)
    assert l['ft'].shape==(6,4,3) and p.shape==(6,4)
    one = T.population_losses(B[2], T.client_heads(V[2], lam[3], 3), T.common_head(V[2], 3), .2, means=np.eye(3, 9), eps=.5)
    close(l['ft'][2,3], one['ft']); close(l['lpft'][2,3], one['lpft']); close(p[2,3], T.printed_ft_loss(B[2], V[2], lam[3], .2, .5))
    assert (l['ft'][:,0] < 1e-25).all() and (p[:,0] > .01).all(), 'at λ = 0 only the printed loss is positive'

def test_haar():
    B = T.haar(stream(2, 'B'), 4000, 2, 3)
    T.check(B)
    assert abs((B**2).mean(0)-1/3).max() < .03 and abs(B.mean(0)).max() < .05, 'no direction is preferred'

# ---- samples

@pytest.mark.parametrize('n,d,m,C,lam,eta,draws', [(7,12,3,4,1.,.25,4000), (10,10,2,3,2.,.4,4000), (40,20,4,2,.5,.1,4000), (5,6,3,2,3.,.3,4000), (6,8,1,1,1.,.5,4000), (6,9,1,2,50.,.3,40000)]) # in the last the term in λ⁴ weighs most
def test_expected_loss_within_four_standard_errors(n, d, m, C, lam, eta, draws):
    rng = stream(3, n, d)
    B,V = T.haar(rng, m+C, d),rng.standard_normal(m)
    l = T.sampled_losses(rng.standard_normal((draws, n, d)), B, T.client_heads(V, lam, C), T.common_head(V, C), eta)
    ft = l['ft'].mean(-1)
    assert abs(ft.mean() - T.expected_ft_loss(n, d, m+C, C, V@V, lam, eta)) < 4*ft.std()/draws**.5
    assert np.median(abs(l['lpft'].mean(-1) - lam**2*(C-1)/C)) < 1e-9*lam**2, 'exact probing has no variance'

def test_lemma_4_3_on_samples():
    rng = stream(4)
    B,V0 = T.haar(rng, 4, 6),np.array([1.,2.,0.,0.])
    _,B1 = T.ft_step(V0, B, T.of_sample(rng.standard_normal((4000, 5, 6)))(-3*B[2]), .2)
    error = B1.std(0)/4000**.5
    assert (abs(B1.mean(0) - B - .2*3*np.outer(V0, B[2]))[:2] < 4*error[:2]).all() and (B1[:,2:]==B[2:]).all()

# ---- thresholds

def test_thresholds_are_where_the_losses_are_equal():
    B,v0,c = T.haar(stream(5), 5, 8),np.array([.5,-1.]),np.array([1.,.3])
    s,star = T.misfit_threshold(v0, c, .2, 3)
    def gap(lam): l = T.population_losses(B, T.client_heads(v0+c, lam, 3), T.common_head(v0, 3), .2); return (l['ft']-l['lpft']).mean()
    assert 0 < s < 1 and abs(gap(star)) < 1e-12 and gap(.99*star) > 0 > gap(1.01*star)
    assert T.misfit_threshold(v0, 0*c, .2, 3)[1]==0 and T.misfit_threshold(v0, c, 2., 3)[1]==np.inf==T.misfit_threshold(v0, c, .2, 1)[1]
    r = T.aligned_shift(2., 1., np.array([.2, 2/3, .9, 1., 1.1])/5, 0., 1., 2) # a' from 0.2 to 1.1, a'₋ = 2/3
    assert r['lpft_wins'].tolist()==[True,True,False,True,True] and abs(r['ft'][[1,3]]-r['lpft']).max() < 1e-12

def test_a_tie_goes_to_lpft():
    for C in (1, 2, 9): assert T.concept_shift(C, 3., 2., 1/4)['lpft_wins'] and not T.concept_shift(max(C, 2), 3., 2., .2499)['lpft_wins']
    assert T.concept_shift(1, 3., 2., [.01, .5])['lpft_wins'].all()

def test_probing_is_on_the_frontier_and_flow_is_not_below():
    C,lam,B,V = 3,2.,T.haar(stream(6), 5, 7),np.array([1.,-.5])
    heads,V0 = T.client_heads(V, lam, C),T.common_head(V, C)
    for alpha in (0., .3, 1.):
        w = B.T@((1-alpha)*V0 + alpha*heads[0])
        each = .5*((w-heads@B)**2).sum(-1)
        close(T.frontier(each[0], lam, C), each.mean())
    Vs,Bs = T.gradient_flow(V0, B, heads[0]@B, 3., 300)
    each = .5*((T.linear(Vs, Bs)[:,None]-heads@B)**2).sum(-1)
    above = each.mean(-1) - T.frontier(each[:,0], lam, C)
    assert above.min() > -1e-12 and above.max() > .01 and (np.diff(each[:,0]) < 0).all() and each[-1,0] < 1e-3

def test_flow_by_hand():
    "One feature without a common part: the features move by √((1+√(1+4λ²))/2) − 1, and VVᵀ − BBᵀ stays"
    Vs,Bs = T.gradient_flow([0.,0.], np.eye(2), np.array([0.,2.]), 20., 2000)
    assert abs(np.linalg.norm(Bs[-1]-np.eye(2)) - (((1+17**.5)/2)**.5-1)) < 1e-8
    X = stream(7).standard_normal((4, 3))
    Vs,Bs = T.gradient_flow([1.,.5], np.eye(2, 3), np.ones(3), 2., 400, T.of_sample(X))
    kept = Vs[:,:,None]*Vs[:,None,:] - Bs@Bs.swapaxes(1, 2)
    assert abs(kept-kept[0]).max() < 1e-8

# ---- bad input

I3,H,V0 = np.eye(3),T.client_heads([1.], 1., 2),T.common_head([1.], 2)
@pytest.mark.parametrize('call,says', [
    (lambda: T.population_losses(2*I3, H, V0, .1), 'not orthonormal: B Bᵀ differs from the identity by 3'),
    (lambda: T.population_losses(I3+1e-7, H, V0, .1), '1e-8'), (lambda: T.covariate_forms(I3[:,:2], [1.], .1, 1.), 'k = 3 rows of length d = 2'),
    (lambda: T.population_losses(I3, H, V0, 0.), 'not 0.0'), (lambda: T.population_losses(I3, H, V0, .1, client=2), 'no client 2; they are 0 to 1'),
    (lambda: T.population_losses(I3, H, V0, .1, client=-1), 'no client -1'), (lambda: T.population_losses(I3, H, V0, .1, lp_steps=-1), '-1'),
    (lambda: T.population_losses(I3, H, V0, .1, means=I3[:2]), 'standard deviation'), (lambda: T.client_heads([1.], -.5, 2), '-0.5'), (lambda: T.client_heads([1.], 1., 0), 'C = 0'),
    (lambda: T.concept_shift(0, 1., 1., .1), 'C = 0'), (lambda: T.concept_shift(2, 1., -1., .1), '-1.0'), (lambda: T.concept_shift(2, 1., 1., [-.1, .1]), '-0.1'), (lambda: T.concept_shift(2, 1., 1., np.nan), 'nan'),
    (lambda: T.printed_ft_loss(I3, [1.], -2., .1, 1.), '-2.0'), (lambda: T.printed_ft_loss(I3, [1.], 1., -.1, 1.), '-0.1'), (lambda: T.misfit_threshold([1.], [1.], 0., 2), 'positive'), (lambda: T.misfit_threshold([1.], [1.], .1, 0), 'C = 0'),
    (lambda: T.aligned_shift(0., 0., .1, 1., 1., 2), 'kappa and eps'), (lambda: T.aligned_shift(1., 1., .1, 1., -1., 2), '-1.0'), (lambda: T.frontier(-1., 1., 2), '-1.0'), (lambda: T.frontier(1., -1., 2), '-1.0'),
    (lambda: T.reprobe_loss(I3, V0, .1, 1., 1., 2, client=2), 'no client 2'), (lambda: T.reprobe_loss(I3+1, V0, .1, 1., 1., 2), 'orthonormal'),
    (lambda: T.expected_ft_loss(6, 5, 7, 2, 1., 1., .1), 'k = 7 features of length d = 5'), (lambda: T.expected_ft_loss(2, 5, 3, 2, 1., 1., .1), 'n = 2 and k = 3'), (lambda: T.expected_ft_loss(9, 5, 3, 2, 1., 1., -.1), '-0.1'),
    (lambda: T.sampled_losses(np.ones((4, 2, 3)), I3, H, V0, .1), 'n = 2 and k = 3'), (lambda: T.haar(stream(0), 3, 2), 'k = 3 rows of length d = 2'), (lambda: T.gradient_flow(V0, I3, V0, 0., 10), 'positive time')])
def test_bad_input_is_one_sentence(call, says):
    with pytest.raises(ValueError) as e: call()
    assert isinstance(e.value, Refused) and says in str(e.value) and len(re.findall(r'\.(?:\s|$)', str(e.value)))==1

# ---- the ledger

STATEMENTS = asset('theory.toml')['statement']

def test_a_verdict_follows_from_its_cases():
    assert T.judged([True, True])=='holds' and T.judged([True, False])=='fails' and T.judged([[True, False]], [[True, False]])=='holds only under the condition'
    assert T.judged([True, False], [False, False])=='fails'
    row = T.ledger(dict(theorem44=dict(ok=[True, False, False], when=[True, False, False], counterexample='x'))).frame.iloc[0]
    assert row['verdict']=='holds only under the condition' and row['cases against it']=='2 of 3' and row['smallest counterexample']=='x'

@pytest.mark.parametrize('found', [dict(ok=[True], counterexample='x'), dict(ok=[False])])
def test_verdict_and_counterexample_belong_together(found):
    with pytest.raises(Refused, match='theorem44'): T.ledger(dict(theorem44=found))

@pytest.mark.parametrize('s', STATEMENTS, ids=lambda s: s['id'])
def test_a_statement_names_a_section_that_exists(s):
    assert set(s)=={'id','where','text','condition','notebook','section'} and all(s.values())
    assert s['notebook'] in {e.notebook for e in experiments().values()}
    cells = json.loads((ROOT/'nbs'/s['notebook']).read_text())['cells']
    assert any(re.search(rf'^## {re.escape(s["section"])}$', ''.join(c['source']), re.M) for c in cells if c['cell_type']=='markdown')

def test_every_statement_has_a_committed_verdict():
    made = pd.concat(pd.read_csv(f) for f in (ROOT/'figures'/'002').glob('*/laptop/claims.csv'))
    made = made[made['where'].notna()] # the other claims are about tables
    assert sorted(made['where'])==sorted(s['where'] for s in STATEMENTS) and sorted(made['claim'])==sorted(s['text'] for s in STATEMENTS)
