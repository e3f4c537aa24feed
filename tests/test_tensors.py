"Trees laid side by side are what they would be if every tensor were copied."
import pytest, torch
from fedbook.tensors import unstack, stack_tensors, channels_last, in_order, stack, Unlike

whole = torch.arange(48.).view(4, 3, 4)
flat = torch.arange(20.)

@pytest.mark.parametrize('ts', [whole.unbind(), whole.unbind()[::-1], whole.unbind()[::2], whole.unbind()[1:3], whole.unbind()[:1], [whole[0]]*3, [whole[0], whole[1], whole[3]], [whole[0], whole[0], whole[1]],
    whole.mT.unbind(), whole.unbind(1), whole.unbind(2), [whole[0], whole[1].clone()], [whole[0].clone(), whole[1].clone()], [whole[0], whole.clone()[1]], [whole[0], whole[1].mT.contiguous().mT],
    channels_last(torch.randn(6, 2, 3, 3)).view(2, 3, 2, 3, 3).unbind(), torch.zeros(3, 0).unbind(), torch.zeros(3).unbind(), [flat[:5], flat[3:8], flat[6:11]], [flat[0], flat[3], flat[6]]])
def test_rows_are_one_tensor_with_or_without_a_copy(ts):
    assert torch.equal(stack_tensors(ts), torch.stack(list(ts)))

@pytest.mark.parametrize('ts', [[flat[:3], flat[5:9]], [flat[:4], flat[4:8].view(2, 2)]])
def test_tensors_of_different_shapes_are_no_rows(ts):
    with pytest.raises(Unlike, match='different shapes'): stack_tensors(ts)

def test_types_are_not_taken_for_each_other():
    ints = flat.view(torch.int32)
    with pytest.raises(Unlike): stack_tensors([flat[:5], ints[5:10]])

def test_rows_that_have_not_moved_are_not_copied():
    tree = dict(a=whole, b=dict(c=channels_last(torch.randn(6, 2, 3, 3)).view(2, 3, 2, 3, 3).repeat(2, 1, 1, 1, 1)))
    again = stack(unstack(tree, 4))
    assert again['a'].data_ptr()==whole.data_ptr() and again['b']['c'].data_ptr()==tree['b']['c'].data_ptr() and torch.equal(again['b']['c'], tree['b']['c'])

def test_trees_of_different_names_are_refused():
    with pytest.raises(ValueError, match='different things'): stack([dict(a=whole), dict(b=whole)])

@pytest.mark.parametrize('shape', [(4, 3, 5, 5), (4, 1, 5, 5), (4, 3, 1, 1), (3, 4), (6,), ()])
def test_order_does_not_depend_on_the_past(shape):
    t = torch.randn(shape)
    pasts = [t, t.clone(), *([channels_last(t), t.to(memory_format=torch.channels_last), t.mT.contiguous().mT] if t.dim()==4 else [t.T.contiguous().T] if t.dim()==2 else [])]
    assert len({in_order(p).stride() for p in pasts})==1 and all(torch.equal(in_order(p), t) for p in pasts)
