"""gradient_accumulation_fusion of the layers: weight gradients in main_grad instead of grad."""

import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fmoe_ext import FMoELinear, FMoETransformerMLP
from fmoe_ext.distributed import DistributedGroupedDataParallel

E, D, H = 4, 16, 24
ACTIVATIONS = {"gelu": "gelu", "swiglu": "swiglu", "callable": lambda x: F.relu(x).square()}


def make(fused, activation="gelu", dtype=torch.bfloat16):
    torch.manual_seed(0)
    activation = ACTIVATIONS[activation]
    layer = FMoETransformerMLP(E, D, H, activation, top_k=2, gradient_accumulation_fusion=fused).to(dtype)
    for linear in (layer.experts.htoh4, layer.experts.h4toh):
        linear.weight.main_grad = torch.zeros_like(linear.weight, dtype=torch.float32)
    return layer


def batch(step, dtype=torch.bfloat16):
    return torch.randn(40, D, generator=torch.Generator().manual_seed(step)).to(dtype).requires_grad_()


def main_grads(layer):
    return {name: p.main_grad for name, p in layer.named_parameters() if hasattr(p, "main_grad")}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_layer(activation, recompute):
    """Each step adds what would have been the gradient; everything else has its gradient as ever."""
    fused, plain = make(True, activation), make(False, activation)
    for step in range(3):
        x, y = batch(step), batch(step)
        before = {name: g.clone() for name, g in main_grads(fused).items()}
        out = checkpoint(fused, x, use_reentrant=False) if recompute else fused(x)
        expected = plain(y)
        assert torch.equal(out, expected)
        out.square().sum().backward()
        plain.zero_grad()
        expected.square().sum().backward()
        assert torch.equal(x.grad, y.grad)
        for (name, p), q in zip(fused.named_parameters(), plain.parameters(), strict=True):
            if name in before:
                assert p.grad is None
                torch.testing.assert_close(p.main_grad - before[name], q.grad.float(), rtol=2**-7, atol=1e-3)
                assert p.main_grad.abs().max() > 0
            else:
                assert torch.equal(p.grad, q.grad), name
        fused.zero_grad()
    with torch.no_grad():
        assert torch.equal(fused(x), out)


@pytest.mark.parametrize("is_pipelined", [False, True])
@pytest.mark.parametrize("saved", ["expert_mlp", "grouped_gemm", "topk_gate"])
def test_selective_checkpoint_adds_each_gradient_once(saved, is_pipelined, monkeypatch):
    """Also where it keeps the experts' results."""
    monkeypatch.delitem(sys.modules, "torch.distributed.pipelining", raising=False)
    if is_pipelined:
        monkeypatch.setitem(sys.modules, "torch.distributed.pipelining", torch)
    kept = getattr(torch.ops.fmoe_ext, saved).default
    num_kept = []

    def policy(ctx, op, *args, **kwargs):
        num_kept.append(op is kept)
        return CheckpointPolicy.MUST_SAVE if op is kept else CheckpointPolicy.PREFER_RECOMPUTE

    # an activation of the user's own takes two products, of grouped_gemm
    activation = "callable" if saved == "grouped_gemm" else "gelu"
    layer, plain, x, y = make(True, activation), make(True, activation), batch(0), batch(0)
    context = partial(create_selective_checkpoint_contexts, policy)
    checkpoint(layer, x, use_reentrant=False, context_fn=context).square().sum().backward()
    plain(y).square().sum().backward()
    assert any(num_kept)
    assert torch.equal(x.grad, y.grad)
    expected = main_grads(plain)
    for name, main_grad in main_grads(layer).items():
        assert torch.equal(main_grad, expected[name]), name


def test_linear():
    linear = FMoELinear(E, D, H, gradient_accumulation_fusion=True)
    x, counts = torch.randn(9, D), torch.tensor([4, 0, 3, 2])
    with pytest.raises(RuntimeError, match="this weight has none"):
        linear(x, counts).sum().backward()
    linear.weight.main_grad = torch.ones_like(linear.weight)
    linear.zero_grad()
    linear(x, counts).sum().backward()
    expected = torch.stack([rows.sum(0).expand(H, D) for rows in x.split(counts.tolist())])
    torch.testing.assert_close(linear.weight.main_grad, 1 + expected)
    assert linear.weight.grad is None
    assert torch.equal(linear.bias.grad, counts[:, None].expand(E, H).float())


def test_our_data_parallelism_refuses_it():
    with pytest.raises(
        ValueError, match=r"experts.htoh4 has gradient_accumulation_fusion=True.*not weight.main_grad"
    ):
        DistributedGroupedDataParallel(make(True))
