"What is encoded comes back, what is damaged is refused, and a price is a length."
import json, struct
import numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st
from fedbook.errors import Refused
from fedbook.tensors import flatten
from fedbook.wire import decode, encode, nbytes, restored, written

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool]

@st.composite
def tensors(draw):
    shape,dtype = draw(st.lists(st.integers(0, 5), max_size=3)),draw(st.sampled_from(DTYPES))
    g = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    return torch.randint(0, 2, shape, generator=g).bool() if dtype==torch.bool else (100*torch.randn(shape, generator=g)).to(dtype)

NAMES = st.text('abcß.-_ 0', min_size=1, max_size=5)
MESSAGES = st.recursive(tensors() | st.integers() | st.text(max_size=5) | st.booleans() | st.none() | st.floats(allow_nan=False, allow_infinity=False), lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=4), max_leaves=8)

@settings(deadline=None, max_examples=150)
@given(st.dictionaries(NAMES, MESSAGES, max_size=4))
def test_decode_is_the_inverse(message):
    buffer = encode(message)
    a,b = flatten(message),flatten(decode(buffer))
    assert a.keys()==b.keys() and nbytes(message)==len(buffer)
    for k,v in a.items():
        assert type(v) is type(b[k])
        if isinstance(v, torch.Tensor): assert v.dtype==b[k].dtype and v.shape==b[k].shape and v.reshape(-1).view(torch.uint8).tolist()==b[k].reshape(-1).view(torch.uint8).tolist()
        else: assert v==b[k]

@pytest.mark.parametrize('t', [torch.randn(4, 6).t(), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.randn(10)[::3], torch.ones(1).expand(5)])
def test_views_travel_as_values(t): assert torch.equal(decode(encode(dict(t=t, u=t)))['u'], t)

@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=30))
def test_casts_are_as_close_as_they_can_be(values):
    t = torch.tensor(values)
    for cast,bound in (('float16', t.abs()*2**-11+1e-7), ('int8', t.abs().max()/254*1.001+1e-30)):
        back = decode(encode(dict(t=t), cast))['t']
        assert back.dtype==t.dtype and ((back-t).abs() <= bound).all()
    assert torch.equal(decode(encode(dict(i=torch.arange(300)), 'int8'))['i'], torch.arange(300))
    assert t.abs().max() < 1e-30 or written(t, 'int8')[0].abs().max()==127 # the whole range is used

def test_a_remembered_price_is_that_of_the_same_form():
    "Scalars that compare equal are written with different lengths"
    for k in ('a'*n for n in range(1, 9)): # headers are filled up to eight bytes
        for v in (1, True, 1., '1', None, 10, 'x'*50): assert nbytes({k: v})==len(encode({k: v}))
    for cast in ('', 'float16', 'int8'):
        for t in (torch.ones(3), torch.ones(3, 1), torch.full((3,), 7), torch.ones(3).bool(), torch.ones(9).bool(), torch.tensor([1., .1, 3.])): assert nbytes(dict(a=t), cast)==len(encode(dict(a=t), cast))

def test_the_price_is_what_travels():
    n = 10_000
    w,mask = torch.randn(n),torch.rand(n) < .5
    header = nbytes(dict(w=torch.zeros(0)))
    assert 4*n <= nbytes(dict(w=w)) <= 4*n+header+16 and nbytes(dict(w=w), 'float16') <= 2*n+200 and nbytes(dict(w=w), 'int8') <= n+200 and nbytes(dict(m=mask)) <= n//8+200

@settings(deadline=None, max_examples=200)
@given(st.data())
def test_a_damaged_buffer_is_refused_or_well_formed_never_an_error(data):
    b = bytearray(encode(dict(w=torch.arange(6.), m=torch.tensor([True,False,True]), n=3)))
    kind = data.draw(st.sampled_from(['cut','flip','grow']))
    if kind=='cut': b = b[:data.draw(st.integers(0, len(b)-1))]
    elif kind=='grow': b += bytes(data.draw(st.integers(1, 9)))
    else: i = data.draw(st.integers(0, len(b)-1)); b[i] ^= data.draw(st.integers(1, 255))
    try: decode(bytes(b))
    except Refused as e: assert 'cannot be read' in str(e)
    else: assert kind=='flip'

@pytest.mark.parametrize('buffer', [b'', b'x', b'\0'*8, b'\xff'*40, struct.pack('<Q', 2)+b'[]', struct.pack('<Q', 4)+b'null', struct.pack('<Q', 10**12)+b'{}',
    struct.pack('<Q', 60)+json.dumps(dict(__metadata__=dict(how='{"w": ["bits", [9]]}'))).ljust(60).encode(), struct.pack('<Q', 40)+json.dumps(dict(__metadata__=dict(scalars='[1]'))).ljust(40).encode()])
def test_malformed_buffers(buffer):
    try: out = decode(buffer)
    except Refused as e: assert 'cannot be read' in str(e)
    else: assert out=={}

@pytest.mark.parametrize('bad,word', [(lambda: encode(dict(a=[1])), "'a' is list"), (lambda: encode(dict(a=dict(b=object()))), "'a/b' is object"), (lambda: encode({}, 'float8'), "'float16'"), (lambda: encode(dict(a=torch.tensor([float('nan')])), 'int8'), 'finite')])
def test_refusals(bad, word):
    with pytest.raises(Refused, match=word): bad()
