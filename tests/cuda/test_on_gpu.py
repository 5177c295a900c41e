"""Tests that need a GPU: captured graphs, streams, several devices, no synchronisation, the same bits again.

Values are the business of `pytest --device cuda` (operators, gates, layers); here they are compared with a plain call.
"""

import pytest
import torch

from fmoe_ext import FMoETransformerMLP, frozen, ops

REASON = ops.cuda_module_missing or (None if torch.cuda.is_available() else "there is no CUDA device")
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"needs a GPU: {REASON}")

E, D, H, K, T = 8, 64, 128, 2, 300
CASES = [
    (torch.bfloat16, "swiglu"),  # on compute capability 9.0 these two take the Hopper kernels
    (torch.bfloat16, "gelu"),
    (torch.float32, "swiglu"),
]
each_case = pytest.mark.parametrize(("dtype", "activation"), CASES)


def make_layer(dtype, activation, seed=0, device="cuda", **options):
    torch.manual_seed(seed)
    layer = FMoETransformerMLP(E, D, H, activation, top_k=K, **options)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(0, 0.1)
    return layer.to(device, dtype)


def make_x(dtype, seed, device="cuda", num_tokens=T):
    x = torch.randn(num_tokens, D, generator=torch.Generator().manual_seed(seed))
    return x.to(device, dtype).requires_grad_()


def step(layer, x):
    """[output, gradients of x and of every parameter]"""
    out = layer(x)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), [x, *layer.parameters()])]


def assert_same_bits(ours, expected):
    for i, (one, other) in enumerate(zip(ours, expected, strict=True)):
        assert torch.isfinite(one).all(), i
        assert torch.equal(one.cpu(), other.cpu()), i


def spoil_free_memory():
    """Leaves NaN where the next tensors will be made."""
    blocks = [torch.full((size,), torch.nan, device="cuda") for size in (1 << 10, 1 << 16, 1 << 20, 1 << 22)]
    del blocks


def check_graph(step, x, others):
    """step(x) captured once and replayed on other values gives the bits of plain calls."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(x)
    for other in others:
        with torch.no_grad():
            x.copy_(other)
        graph.replay()
        assert_same_bits(captured, step(other))


@each_case
def test_cuda_graph(dtype, activation):
    """Forward and backward, replayed on other tokens, with another choice of experts."""
    layer, (x, *others) = make_layer(dtype, activation), (make_x(dtype, seed) for seed in range(3))
    check_graph(lambda x: step(layer, x), x, others)


@pytest.mark.parametrize("name", frozen.FORMATS)
def test_cuda_graph_of_a_packed_weight(name):
    """frozen_gemm and its gradient of x, by the kernels that are on or by decoding in memory."""
    weight = torch.randn(1, 72, 256, generator=torch.Generator().manual_seed(1))
    packed = frozen.quantize(weight, name).map(lambda t: t.cuda())

    def multiply(x):
        y = frozen.frozen_gemm(x, packed)
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), x)]

    x, *others = (
        torch.randn(T, 256, generator=torch.Generator().manual_seed(seed)).cuda().bfloat16().requires_grad_()
        for seed in range(3)
    )
    check_graph(multiply, x, others)


@each_case
def test_no_synchronisation(dtype, activation):
    layer, x = make_layer(dtype, activation), make_x(dtype, 0)
    step(layer, x)  # modules are loaded
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = step(layer, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same_bits(results, step(layer, x))


@each_case
def test_same_bits_five_times(dtype, activation):
    layer, x = make_layer(dtype, activation), make_x(dtype, 0)
    first = step(layer, x)
    for _ in range(4):
        spoil_free_memory()
        assert_same_bits(step(layer, x), first)


@each_case
def test_streams(dtype, activation):
    """Four layers at the same time, each on a stream of its own."""
    layers = [make_layer(dtype, activation, seed) for seed in range(4)]
    inputs = [make_x(dtype, seed) for seed in range(4)]
    expected = [step(layer, x) for layer, x in zip(layers, inputs, strict=True)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in layers]
    for _ in range(3):
        results = []
        for stream, layer, x in zip(streams, layers, inputs, strict=True):
            with torch.cuda.stream(stream):
                results.append(step(layer, x))
        torch.cuda.synchronize()
        for ours, one in zip(results, expected, strict=True):
            assert_same_bits(ours, one)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@each_case
def test_second_device(dtype, activation):
    """Tensors on cuda:1 while cuda:0 is current, alone and with work on both at the same time."""
    expected = step(make_layer(dtype, activation), make_x(dtype, 0))
    layers = [make_layer(dtype, activation, device=f"cuda:{i}") for i in (1, 0)]
    for layer in layers:
        device = next(layer.parameters()).device
        results = step(layer, make_x(dtype, 0, device))
        assert all(t.device == device for t in results)
        assert_same_bits(results, expected)
    assert torch.cuda.current_device() == 0


def test_devices_may_not_be_mixed():
    layer, x = make_layer(torch.bfloat16, "swiglu"), make_x(torch.bfloat16, 0)
    w1, w2 = layer.experts.htoh4.weight, layer.experts.h4toh.weight
    routed = ops.sort_tokens(torch.zeros(T, K, dtype=torch.int64, device="cuda"), E)
    index = (routed.row_idx, routed.inverse, routed.offs)
    with pytest.raises(RuntimeError, match="w1 must be on cuda:0 like x, but it is on cpu"):
        ops.expert_mlp(x, *index, w1.cpu(), None, w2, None, None, "swiglu")


@pytest.mark.parametrize("num_tokens", [0, 1, 127])
@each_case
def test_few_tokens(dtype, activation, num_tokens):
    """Without tokens all gradients are zero; the results of few are those of the same tokens among many."""
    layer, many = make_layer(dtype, activation), make_x(dtype, 0)
    results = step(layer, many.detach()[:num_tokens].requires_grad_())
    if num_tokens == 0:
        assert all(not t.any() for t in results)
        return
    torch.testing.assert_close(results[0], layer(many)[:num_tokens].detach())


def test_saved_bytes():
    """2 D + 4 K H bytes a token for SwiGLU in bfloat16, besides indices and gate."""
    layer, x = make_layer(torch.bfloat16, "swiglu", bias=False), make_x(torch.bfloat16, 0)
    parameters = {p.data_ptr() for p in layer.parameters()}
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t):
        layer(x)
    kept = sum(t.nbytes for pointer, t in saved.items() if pointer not in parameters)
    gate = T * (E * 4 + K * 32)  # scores, choices, weights, row_idx and inverse
    assert kept <= T * (2 * D + 4 * K * H) + gate + 1024


def test_compiled():
    layer, x = make_layer(torch.bfloat16, "swiglu"), make_x(torch.bfloat16, 0)
    ours, expected = step(torch.compile(layer, fullgraph=True), x), step(layer, x)
    for one, other in zip(ours, expected, strict=True):
        difference = (one.float() - other.float()).norm() / other.float().norm()
        assert difference < 1e-2, difference


@each_case
def test_index_out_of_range_is_a_dropped_choice(dtype, activation):
    layer, x = make_layer(dtype, activation, bias=False), make_x(dtype, 0).detach()
    w1, w2 = layer.experts.htoh4.weight.detach(), layer.experts.h4toh.weight.detach()
    topk_idx = torch.randint(0, E, (T, K), generator=torch.Generator().manual_seed(3)).cuda()
    weights = torch.ones(T, K, device="cuda")
    bad = topk_idx.clone()
    bad[::7, 0] = torch.tensor([E, -2, 2**62, -(2**62)], device="cuda").repeat(T)[: len(bad[::7])]
    dropped = torch.where((bad < 0) | (bad >= E), -1, bad)

    def run(choices):
        routed = ops.sort_tokens(choices, E)
        index = (routed.row_idx, routed.inverse, routed.offs)
        return ops.expert_mlp(x, *index, w1, None, w2, None, weights, activation)

    assert torch.equal(run(bad), run(dropped))
