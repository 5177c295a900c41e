"""The operators of one step of generation: the bits, or the exactness, of what they stand for."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from fmoe_ext import frozen, ops
from fmoe_ext.frozen import FORMATS, decode
from fmoe_ext.testing import assert_close
from tests.ops.test_quantized import packed

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_is_wanted_where_nothing_but_values_is_asked_for():
    x = torch.ones(1, 4)
    assert decode.is_wanted(x)
    assert not decode.is_wanted(torch.nn.Parameter(x)) and not decode.is_wanted(x.to("meta"))
    with torch.enable_grad():
        assert not decode.is_wanted(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert not decode.is_wanted(x)
    with ops.batch_invariant():
        assert not decode.is_wanted(x)
    with torch.autograd.forward_ad.dual_level():
        assert not decode.is_wanted(torch.autograd.forward_ad.make_dual(x, x))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gemm_has_the_bits_of_the_public_operator(name, dtype):
    weight, bias = packed(name, 1, 37, 256), normal(1, 37, dtype=dtype)
    for rows in (1, 5, 9, 14, 20):
        x = normal(rows, 256, dtype=dtype)
        with torch.enable_grad():
            expected = frozen.frozen_gemm(x, weight, None, bias)
        assert torch.equal(decode.gemm(x, weight, None, bias), expected)
        assert torch.equal(frozen.frozen_gemm(x, weight, None, bias), expected)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_experts_have_the_bits_of_sort_tokens_and_frozen_mlp(isa, name, interleaved):
    E, D, H = 4, 256, 256
    w1, w2 = packed(name, E, 2 * H, D), packed(name, E, D, H, seed=1)
    w1 = frozen.Quantized(name, w1.data, w1.scale, w1.zero, interleaved and name != "fp8_block")
    b1, b2 = normal(E, 2 * H, dtype=torch.bfloat16), normal(E, D, dtype=torch.bfloat16, seed=1)
    for T in (1, 3):
        x, weights = normal(T, D, dtype=torch.bfloat16), normal(T, 3).abs()
        chosen = torch.tensor([[2, 0, 3], [1, 2, 0], [3, 3, 1]])[:T]
        s = ops.sort_tokens(chosen, E)
        index = (s.row_idx, s.inverse, s.offs)
        with torch.enable_grad():
            expected = frozen.frozen_mlp(x, *index, w1, b1, w2, b2, weights, "swiglu")
        found = decode.experts(x, chosen, weights, w1, b1, w2, b2, "swiglu")
        assert torch.equal(found, expected)


def test_experts_drop_choices_of_no_expert():
    w1, w2 = packed("mxfp4", 2, 64, 64), packed("mxfp4", 2, 64, 32, seed=1)
    x, weights = normal(2, 64), torch.ones(2, 2)
    given = weights, w1, None, w2, None, "swiglu"
    found = decode.experts(x, torch.tensor([[1, 2], [-1, 7]]), *given)
    alone = decode.experts(x, torch.tensor([[1, -1], [-1, -1]]), *given)
    assert torch.equal(found, alone) and found[0].abs().max() > 0 and (found[1] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_is_as_exact_as_torch(isa, dtype):
    x, weight = normal(1, 1, 130, dtype=dtype), normal(37, 130, dtype=dtype, seed=1)
    truth = torch.nn.functional.linear(x.double(), weight.double())
    assert_close(decode.linear(x, weight), truth, torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("shape", [(2, 1, 130), (1, 1, 3, 48)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_as_exact_as_transformers(dtype, shape):
    norm = LlamaRMSNorm(shape[-1], eps=1e-3).to(dtype)
    norm.weight.copy_(normal(shape[-1], seed=1))
    x = normal(*shape, dtype=dtype)
    wide = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    assert_close(decode.rms_norm(x, norm.weight, 1e-3), norm.weight.double() * wide, norm(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotate_has_the_bits_of_transformers(dtype):
    cos, sin = normal(2, 1, 48, dtype=dtype, seed=1), normal(2, 1, 48, dtype=dtype, seed=2)
    q, k = normal(2, 1, 6, 48, dtype=dtype).transpose(1, 2), normal(2, 3, 1, 48, dtype=dtype, seed=3)
    expected = apply_rotary_pos_emb(q, k, cos, sin)
    assert torch.equal(decode.rotate(q, cos, sin), expected[0])
    assert torch.equal(decode.rotate(k, cos, sin), expected[1])


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", ["q4_k", "q8_0", "fp8_block", "int4", "nf4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_inputs_have_the_bits_of_their_steps(isa, name, dtype, int8):
    """Six heads of queries and two of keys, with norms or none."""
    weights = [packed(name, 1, heads * 48, 256, seed=heads) for heads in (6, 2, 3)]
    if int8:
        weights = [w.in_int8 for w in weights]
    for rows in (1, 3):
        x = normal(rows, 256, dtype=dtype)
        cos, sin = normal(rows, 1, 48, dtype=dtype, seed=1), normal(rows, 1, 48, dtype=dtype, seed=2)
        for norms in ([None, None], [normal(48, dtype=dtype, seed=3), normal(48, dtype=dtype, seed=4)]):
            found = decode.attention_inputs(x, weights, norms, cos, sin, 1e-3)
            expected = [decode.gemm(x, w, None, None).view(rows, -1, 1, 48) for w in weights]
            for i, norm in enumerate(norms):
                normed = expected[i] if norm is None else decode.rms_norm(expected[i], norm, 1e-3)
                expected[i] = decode.rotate(normed, cos, sin)
            assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"cos": normal(1, 1, 32)}, "sin must have shape .* with size 32"),
        (
            {"cos": normal(1, 1, 96), "sin": normal(1, 1, 96)},
            "k must have rows for heads of the even width 96",
        ),
        ({"x": normal(1, 128)}, "weight must have shape"),
        ({"norms": [normal(32), None]}, r"norm must have shape \[width\] with size 48"),
        ({"sin": normal(1, 1, 48, dtype=torch.bfloat16)}, "sin must have the dtype of x"),
    ],
)
def test_attention_inputs_refuse_other_shapes(change, message):
    weights = [packed("q8_0", 1, heads * 48, 256) for heads in (2, 1, 1)]
    given = {"x": normal(1, 256), "norms": [None, None], "cos": normal(1, 1, 48), "sin": normal(1, 1, 48)}
    given |= change
    with pytest.raises(RuntimeError, match=message):
        decode.attention_inputs(given["x"], weights, given["norms"], given["cos"], given["sin"], 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalize", [False, True])
def test_route_is_the_softmax_of_linear(isa, dtype, normalize):
    x, weight = normal(1, 64, dtype=dtype), normal(40, 64, dtype=dtype, seed=1)
    logits, weights, chosen = decode.route(x, weight, 5, normalize)
    assert torch.equal(logits, decode.linear(x, weight))
    shares, expected = logits.double().softmax(-1).topk(5)
    if normalize:
        shares /= shares.sum(-1, keepdim=True)
    assert torch.equal(chosen, expected) and weights.dtype == dtype
    torch.testing.assert_close(weights.double(), shares, rtol=2 * torch.finfo(dtype).eps, atol=0)


def attention_of_token(rows=2, room=9, **change):
    """Arguments of decode.TokenAttention(...)(...): four heads of queries, two of keys, width 64."""
    weights = [packed("q4_k", 1, 64 * heads, 256, seed=heads) for heads in (4, 2, 3)]
    weights[2] = packed("q8_0", 1, 128, 256, seed=7)
    weights.append(packed("q4_k", 1, 256, 256, seed=8))
    half = torch.bfloat16
    given = {
        "x": normal(rows, 256, dtype=half),
        "norm": normal(256, dtype=half, seed=1),
        "norms": [normal(64, dtype=half, seed=2), normal(64, dtype=half, seed=3)],
        "positions": (normal(rows, 1, 64, dtype=half, seed=4), normal(rows, 1, 64, dtype=half, seed=5)),
        "cache": tuple(normal(rows, 2, room, 64, dtype=half, seed=s) for s in (6, 7)),
        "length": 5,
        "mask": None,
        "constants": (1e-3, 1e-6, 0.2),
    }
    return weights, given | change


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_attention_of_a_token_has_the_bits_of_its_steps(isa, rows, has_norms, masked):
    weights, given = attention_of_token(rows)
    if not has_norms:
        given["norms"] = [None, None]
    if masked:
        given["mask"] = torch.tensor([[True, False, True, True, False, True]]).expand(rows, -1)
    (cos, sin), caches, x = given["positions"], given["cache"], given["x"]
    normed = decode.rms_norm(x, given["norm"], 1e-3)
    q, k, v = decode.attention_inputs(normed, weights[:3], given["norms"], cos, sin, 1e-6)
    kept = [c.clone() for c in caches]
    for cache, new in zip(kept, (k, v), strict=True):
        cache[:, :, 5:6] = new
    out = decode.attend(q, kept[0][:, :, :6], kept[1][:, :, :6], given["mask"], 0.2)
    expected = x + decode.gemm(out.view(rows, -1), weights[3], None, None)
    found = decode.TokenAttention(weights)(**given)
    assert torch.equal(found, expected)
    assert torch.equal(caches[0], kept[0]) and torch.equal(caches[1], kept[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 9}, "keys must have contiguous rows and room behind 9 tokens"),
        ({"cache": (normal(1, 2, 9, 64), normal(1, 2, 9, 64))}, "keys must have the dtype of x"),
        ({"cache": (normal(2, 1, 9, 64).bfloat16(),) * 2}, "keys must have shape .* with size 2"),
        ({"norm": normal(64).bfloat16()}, "weight must have as many elements"),
        ({"constants": (1e-6, 1e-6)}, "constants must have 3 entries"),
    ],
)
def test_attention_of_a_token_refuses_other_shapes(change, message):
    weights, given = attention_of_token(**change)
    with pytest.raises(RuntimeError, match=message):
        decode.TokenAttention(weights)(**given)


def test_attention_of_a_token_refuses_an_output_of_another_width():
    weights, given = attention_of_token()
    weights[3] = packed("q8_0", 1, 128, 256)
    with pytest.raises(RuntimeError, match="o must have 256 rows"):
        decode.TokenAttention(weights)(**given)


@pytest.mark.parametrize("name", ["q4_k", "mxfp4"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("tokens", [1, 3])
def test_experts_of_a_token_have_the_bits_of_their_steps(isa, name, normalize, tokens):
    x, norm = normal(tokens, 256, dtype=torch.bfloat16), normal(256, dtype=torch.bfloat16, seed=1)
    gate = normal(6, 256, dtype=torch.bfloat16, seed=2)
    w1, w2 = packed(name, 6, 512, 256), packed(name, 6, 256, 256, seed=1)
    normed = decode.rms_norm(x, norm, 1e-3)
    _, weights, chosen = decode.route(normed, gate, 2, normalize)
    expected = x + decode.experts(normed, chosen, weights, w1, None, w2, None, "swiglu")
    found = decode.TokenExperts(w1, w2, "swiglu")(x, norm, 1e-3, gate, 2, normalize)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", [1, 2, 33, 200])
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
def test_attend_is_as_exact_as_float32(isa, dtype, keys, mask):
    """Keys and values in a longer cache, values of another width than keys, six heads for two of them."""
    q = normal(2, 6, 1, 20, dtype=dtype)
    k, v = (
        normal(2, 2, keys + 5, 20, dtype=dtype, seed=1)[:, :, :keys],
        normal(2, 2, keys, 37, dtype=dtype, seed=2),
    )
    there = torch.rand(2, keys, generator=torch.Generator().manual_seed(3)) < 0.7
    there[:, -1] = True
    given = {"none": None, "bool": there, "float": torch.zeros(2, keys).masked_fill(~there, -torch.inf)}[mask]
    if mask == "none":
        there = torch.ones(2, keys, dtype=torch.bool)

    def reference(wide):
        rows = [t.to(wide).repeat_interleave(3, 1) for t in (k, v)]
        scores = (q.to(wide) @ rows[0].mT * 0.3).masked_fill(~there[:, None, None], -torch.inf)
        return (scores.softmax(-1) @ rows[1]).transpose(1, 2)

    found = decode.attend(q, k, v, given, 0.3)
    assert found.shape == (2, 1, 6, 37) and found.dtype == dtype
    assert_close(found, reference(torch.float64), reference(torch.float32).to(dtype))


def test_attend_does_not_depend_on_threads_nor_on_the_batch():
    q, k, v = (
        normal(*shape, dtype=torch.bfloat16) for shape in ((3, 4, 1, 32), (3, 2, 70, 32), (3, 2, 70, 32))
    )
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = decode.attend(q, k, v, None, 0.2)
        torch.set_num_threads(3)
        assert torch.equal(decode.attend(q, k, v, None, 0.2), expected)
        assert torch.equal(decode.attend(q[1:2], k[1:2], v[1:2], None, 0.2), expected[1:2])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: decode.linear(torch.ones(1, 4), torch.ones(3, 5)), r"weight must have shape \[N, D\]"),
        (lambda: decode.rms_norm(torch.ones(1, 4), torch.ones(3), 1e-6), "weight must have as many elements"),
        (
            lambda: decode.rotate(torch.ones(1, 2, 2, 4), *torch.ones(2, 1, 1, 4)),
            r"x must have shape \[B, H, 1, D\]",
        ),
        (
            lambda: decode.rotate(torch.ones(1, 2, 1, 4), *torch.ones(2, 1, 1, 6)),
            r"cos must have shape \[B, 1, D\]",
        ),
        (
            lambda: decode.rotate(torch.ones(1, 2, 1, 3), *torch.ones(2, 1, 1, 3)),
            "x must have an even last dimension",
        ),
        (lambda: attend((1, 3, 1, 4), (1, 2, 5, 4)), "q must have a multiple of the heads of k"),
        (lambda: attend((1, 2, 1, 4), (1, 2, 0, 4)), "q must have a multiple of the heads of k"),
        (lambda: attend((1, 2, 2, 4), (1, 2, 5, 4)), r"q must have shape \[B, H, 1, D\]"),
        (lambda: attend((1, 2, 1, 4), (2, 2, 5, 4)), r"k must have shape \[B, G, S, \*\]"),
        (lambda: attend((1, 2, 1, 4), (1, 2, 5, 4), torch.ones(1, 4)), r"mask must have shape \[B, S\]"),
    ],
)
def test_refuses(call, message):
    with pytest.raises(RuntimeError, match=message):
        call()


def attend(q, k, mask=None):
    return decode.attend(torch.ones(q), torch.ones(k), torch.ones(k), mask, 1.0)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (1, torch.zeros(1, 2, dtype=torch.int32), "topk_idx must be int64"),
        (1, torch.zeros(2, dtype=torch.int64), r"topk_idx must have shape \[T, K\]"),
        (2, torch.ones(1, 3), r"topk_weights must have shape \[T, K\]"),
    ],
)
def test_experts_refuse(place, value, message):
    w1, w2 = packed("mxfp4", 2, 64, 64), packed("mxfp4", 2, 64, 32)
    given = [normal(1, 64), torch.tensor([[0, 1]]), torch.ones(1, 2), w1, None, w2, None, "swiglu"]
    given[place] = value
    with pytest.raises(RuntimeError, match=message):
        decode.experts(*given)
