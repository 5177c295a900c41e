"""wire="fp8" and "mxfp8": rows and gradients travel in 8 bits; how far results and gradients are from full ones."""

import copy

import pytest
import torch
import torch.distributed as dist

from fmoe_ext import FMoETransformerMLP, ParallelLayout
from fmoe_ext.ep.wire import is_packed, pack, row_bytes, unpack

D, H, E, K = 64, 32, 4, 2


def travelled(x, wire):
    packed, out = pack(x, wire), torch.empty_like(x)
    assert packed.dtype == torch.uint8 and packed.shape == (len(x), row_bytes(x.shape[1], wire))
    unpack(packed, out, wire)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wire", ["fp8", "mxfp8"])
def test_rows(wire, dtype):
    """Half of the last of 3 bits, or of the smallest step of a row or block; the largest of a row is kept by fp8."""
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 7)[:, None]
    x[2] = 0
    x = x.to(dtype)
    out = travelled(x, wire)
    wide, largest = x.float(), x.float().abs().amax(1, keepdim=True)
    assert ((out.float() - wide).abs() <= wide.abs() / 15 + largest / 448 / 500).all()
    assert not out[2].any() and (out[0] != 0).any()
    if wire == "fp8":
        torch.testing.assert_close(out.float().abs().amax(1, keepdim=True), largest, rtol=1e-2, atol=0)
    assert travelled(x[:0], wire).shape == (0, 96)


@pytest.mark.parametrize("wire", ["fp8", "mxfp8"])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_rows_that_are_not_finite_arrive_as_nan(bad, wire):
    x = torch.ones(3, 64)
    x[1, 5] = bad
    out = travelled(x, wire)
    assert out[[0, 2]].eq(1).all() and out[1, :32].isnan().all()
    assert wire == "fp8" or out[1, 32:].eq(1).all()  # another block


@pytest.mark.parametrize("largest", [1e-45, 1e-38, 3e38])
@pytest.mark.parametrize("wire", ["fp8", "mxfp8"])
def test_rows_at_the_ends_of_float32(wire, largest):
    x = torch.full((1, 32), largest)
    x[0, 1:] = 0
    out = travelled(x, wire)
    assert out.isfinite().all() and not out[0, 1:].any()
    assert abs(out[0, 0].item() - x[0, 0].item()) <= x[0, 0].item() / 15 + 1e-38


def test_weights_labels_and_float64_travel_as_they_are():
    rows = torch.zeros(2, 64)
    assert is_packed(rows, "fp8") and is_packed(rows.bfloat16(), "mxfp8") and not is_packed(rows, "full")
    for other in (rows.double(), rows.long(), rows[:, :1], rows[:, :16], torch.zeros(2, 4, 64)):
        assert not is_packed(other, "fp8")
    assert is_packed(rows[:, :40], "fp8") and not is_packed(rows[:, :40], "mxfp8")


def gradients(layer, x):
    x = x.requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.experts.parameters()), layer.gate.gate.weight.grad]


def close_but_not_equal(wire, exchange, dtype):
    """Relative errors (norm) of the result and of all gradients beside the same exchange in full."""
    found = {}
    for name in ("full", wire):
        layout = ParallelLayout(moe_group=dist.group.WORLD, exchange=exchange, wire=name)
        layer = FMoETransformerMLP(E // 2, D, H, top_k=K, activation="swiglu", parallel=layout).to(dtype)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for p in layer.parameters():
            p.data.copy_(torch.randn(p.shape, generator=generator) * 0.2)
        dist.broadcast(layer.gate.gate.weight.data, 0)
        found[name] = gradients(layer, torch.randn(24, D, generator=generator).to(dtype))
    found_errors = [
        ((short.float() - full.float()).norm() / full.float().norm()).item()
        for full, short in zip(found["full"], found[wire], strict=True)
    ]
    assert all(1e-3 < error < 0.08 for error in found_errors), (wire, exchange, found_errors)


def spread_layer_is_near_one_process(wire, exchange):
    """spread(wire=) of a whole layer: output and gradients of both ranks' tokens beside one process in full."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = FMoETransformerMLP(E, D, H, top_k=K, activation="swiglu")
    for p in whole.parameters():
        p.data.normal_(0, 0.2)
    layer = copy.deepcopy(whole)
    layer.spread(exchange=exchange, wire=wire)
    assert layer.expert_parallel.wire == wire
    x = torch.randn(size * 24, D)
    truth = gradients(whole, x.clone())
    y, dx, *dexperts, dgate = gradients(layer, x.chunk(size)[rank].clone())
    dist.all_reduce(dgate)
    found = [*(part.contiguous() for part in (y, dx, *dexperts)), dgate]
    expected = [*(t.chunk(size)[rank] for t in truth[:-1]), truth[-1]]
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]
    assert all((error < 1e-5) if wire == "full" else (1e-3 < error < 0.08) for error in errors), errors
    dist.barrier()
    return errors


def refuse():
    for wrong, text in (
        ({"wire": "fp4"}, "wire must be one of full, fp8, mxfp8"),
        ({"exchange": "node"}, "exchange='node'"),
    ):
        with pytest.raises(ValueError, match=text):
            FMoETransformerMLP(
                2, D, H, parallel=ParallelLayout(moe_group=dist.group.WORLD, **{"wire": "fp8", **wrong})
            )


def test_gradients_of_two_ranks(pool):
    for wire, exchange, dtype in (
        ("fp8", "choice", torch.float32),
        ("mxfp8", "token", torch.float32),
        ("fp8", "token", torch.bfloat16),
    ):
        pool.run(close_but_not_equal, wire, exchange, dtype, world_size=2)
    pool.run(refuse, world_size=2)


@pytest.mark.parametrize(
    ("wire", "exchange"), [("full", "choice"), ("fp8", "choice"), ("mxfp8", "token"), ("fp8", "token")]
)
def test_spread_layer_of_two_ranks(pool, wire, exchange):
    pool.run(spread_layer_is_near_one_process, wire, exchange, world_size=2)
