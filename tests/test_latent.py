"""Latent experts: narrower than the tokens, between projections of their own."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fmoe_ext import FMoETransformerMLP, fmoefy
from fmoe_ext import checkpoint as saved
from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.checkpoint.families import FAMILIES
from fmoe_ext.checkpoint.model_state import ModelState
from fmoe_ext.checkpoint.routing import facts_of_layers
from fmoe_ext.gates import SoftmaxGate, total_loss

D, H, E, LATENT = 6, 5, 4, 3


def layer_of(dtype=torch.float64, **options):
    torch.manual_seed(0)
    options = {"activation": "silu", "gate": SoftmaxGate, "latent_size": LATENT} | options
    return FMoETransformerMLP(E, D, H, **options).to(dtype)


def linear_of(linears, e, x):
    bias = None if linears.bias is None else linears.bias[e]
    return nn.functional.linear(x, linears.weight[e], bias)


def plain(layer, x):
    """The same in plain PyTorch: gate of the tokens, experts of their projections."""
    topk_idx, topk_weights = layer.gate(x)
    narrow = layer.latent.narrow(x)
    out = torch.zeros_like(narrow)
    for e in range(layer.num_experts):
        hidden = linear_of(layer.experts.htoh4, e, narrow)
        y = linear_of(layer.experts.h4toh, e, nn.functional.silu(hidden))
        out = out + y * (topk_weights * (topk_idx == e)).sum(1, keepdim=True)
    return layer.latent.widen(out)


def gradients(layer, y, x):
    loss = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum() + total_loss(layer)
    return torch.autograd.grad(loss, [x, *layer.parameters()])


def test_equals_plain_pytorch():
    layer = layer_of()
    x = torch.randn(9, D, dtype=torch.float64, requires_grad=True)
    ours, expected = layer(x), plain(layer, x)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)
    assert layer.experts.htoh4.weight.shape == (E, H, LATENT) and layer.latent.narrow.weight.shape == (
        LATENT,
        D,
    )
    for a, b in zip(gradients(layer, layer(x), x), gradients(layer, plain(layer, x), x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_padding_recomputation_and_shared_experts():
    layer = layer_of(shared_expert_hidden=7)
    x = torch.randn(3, 4, D, dtype=torch.float64, requires_grad=True)
    valid = torch.tensor([[1, 1, 0, 1]] * 3)
    alone = layer(x.detach()[valid.bool()])
    torch.testing.assert_close(layer(x, valid)[valid.bool()], alone, rtol=0, atol=0)
    assert not layer(x, valid)[~valid.bool()].any()
    expected = gradients(layer, layer(x), x)
    again = gradients(layer, checkpoint(layer, x, use_reentrant=False), x)
    for a, b in zip(expected, again, strict=True):
        assert torch.equal(a, b)


def test_half_precision_copies_and_files(tmp_path):
    layer = layer_of(torch.bfloat16)
    x = torch.randn(5, D)
    assert layer(x).dtype == torch.bfloat16
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))
    saved.save(tmp_path, layer, step=1)
    torch.manual_seed(1)
    other = FMoETransformerMLP(E, D, H, "silu", gate=SoftmaxGate, latent_size=LATENT).bfloat16()
    saved.load(tmp_path, other)
    assert torch.equal(other(x), layer(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.float()(x).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "options, error",
    [
        ({"latent_size": 0}, "latent_size must be at least 1"),
        ({"latent_size": "wide"}, "latent_size must be a whole number"),
        ({"mask": torch.zeros(4)}, "mask= and latent_size= exclude each other"),
    ],
)
def test_refused(options, error):
    with pytest.raises((ValueError, TypeError), match=error):
        layer_of(**options)


def test_fmoefy_builds_them_but_cannot_copy_a_dense_mlp_into_them():
    model = fmoefy(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), num_experts=4, latent_size=3)
    assert model.linear1.experts.htoh4.weight.shape == (4, 8, 3)
    assert model(torch.randn(2, 3, 8)).isfinite().all()
    with pytest.raises(ValueError, match="experts of its width, but latent_size= makes them narrower"):
        fmoefy(nn.TransformerEncoderLayer(8, 2, 16), num_experts=4, latent_size=3, init="upcycle")


def test_formats_without_a_place_for_projections_refuse_them(tmp_path):
    options = {"activation": "swiglu", "bias": False, "gate_bias": False}
    model = nn.ModuleDict({"layers": nn.ModuleList([layer_of(torch.float32, **options)])})
    with pytest.raises(CheckpointError, match=r"layers\.0\.latent has projections around the experts"):
        saved.to_huggingface(model.state_dict(), "qwen3_moe")
    with pytest.raises(CheckpointError, match=r"layers\.0 has latent_size=: no format has a place"):
        facts_of_layers(ModelState(model), FAMILIES["qwen3_moe"])
