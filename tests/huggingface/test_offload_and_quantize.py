"""accelerate's offloading and the quantization of torchao and torch.ao on FMoE layers: the libraries themselves."""

import copy

import pytest
import torch
from torch import nn

from fmoe_ext import FMoE, FMoETransformerMLP, gates
from fmoe_ext.linear import FMoELinear
from tests.huggingface.huggingface_models import experts_of, make_ids, make_model

T, D, H = 11, 32, 64
MODELS = {
    "fused": lambda: FMoETransformerMLP(4, D, H, "swiglu", gate=gates.SigmoidGate, shared_expert_hidden=16),
    "callable": lambda: FMoETransformerMLP(4, D, H, torch.tanh, gate=gates.NoisyGate),
    "separate": lambda: FMoE(4, D, expert=lambda d: nn.Linear(d, d), gate=gates.SoftmaxGate),
}


def make(kind="fused"):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, D), MODELS[kind](), nn.Linear(D, D)).eval()


def tokens(dtype=torch.float32):
    return torch.randn(T, D, generator=torch.Generator().manual_seed(1)).to(dtype)


def offload_to_cpu(accelerate, model, folder):
    return accelerate.cpu_offload(model, execution_device="cpu", offload_buffers=True)


def offload_to_disk(accelerate, model, folder):
    return accelerate.disk_offload(model, str(folder), execution_device="cpu", offload_buffers=True)


def offload_the_moe_layer(accelerate, model, folder):
    devices = {"0": "cpu", "1": "disk", "2": "cpu"}
    return accelerate.dispatch_model(
        model, devices, main_device="cpu", offload_dir=str(folder), force_hooks=True
    )


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("offload", [offload_to_cpu, offload_to_disk, offload_the_moe_layer])
def test_offloaded_by_accelerate(offload, kind, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    expected = make(kind).double()(tokens(torch.float64)).detach()
    model = offload(accelerate, make(kind).double(), tmp_path)
    assert all(p.is_meta for p in model[1].parameters())
    with torch.no_grad():
        for _ in range(2):  # the weights went away after the first
            out = model(tokens(torch.float64))
            torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-14)


def quantize(model, config, choose=None):
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(model, getattr(torchao, config)(), choose)
    return model


WEIGHT_ONLY = ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("config", WEIGHT_ONLY)
def test_torchao_around_the_experts(config, dtype):
    """quantize_ as it comes takes every nn.Linear, the router too, and leaves the experts as they are."""
    model = quantize(make().to(dtype), config)
    weights = [model[0].weight, model[1].gate.gate.weight, model[2].weight]
    assert all(type(w).dequantize is not torch.Tensor.dequantize for w in weights)
    plain = copy.deepcopy(model)
    plain[1].gate.gate.weight = nn.Parameter(plain[1].gate.gate.weight.dequantize())
    with torch.no_grad():
        torch.testing.assert_close(model(tokens(dtype)), plain(tokens(dtype)), rtol=0, atol=0)
        error = (model(tokens(dtype)) - make().to(dtype)(tokens(dtype))).norm()
    assert 0 < error < 0.2


@pytest.mark.parametrize("config", WEIGHT_ONLY)
def test_torchao_on_the_experts_is_refused(config):
    model = quantize(make().bfloat16(), config, lambda module, name: isinstance(module, FMoELinear))
    with pytest.raises(
        TypeError, match=r"weight is a (Int8|Float8)Tensor, and experts compute with plain tensors: leave"
    ):
        model(tokens(torch.bfloat16))
    for linear in (model[1].experts.htoh4, model[1].experts.h4toh):  # what the error says to do
        linear.weight = nn.Parameter(linear.weight.dequantize())
    shared = model[1].shared_experts.mlp
    for linear in (shared.htoh4, shared.h4toh):
        linear.weight = nn.Parameter(linear.weight.dequantize())
    with torch.no_grad():
        assert (model(tokens(torch.bfloat16)) - make().bfloat16()(tokens(torch.bfloat16))).norm() < 0.2


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_plain_weights_of_another_dtype_are_refused(dtype):
    for kind, linear in (("fused", "htoh4"), ("fused", "h4toh"), ("callable", "h4toh")):
        model = make(kind)
        experts = getattr(model[1].experts, linear)
        experts.weight = nn.Parameter(experts.weight.detach().to(dtype), requires_grad=False)
        with pytest.raises(
            TypeError, match=rf"an expert's weight is {dtype}, and experts compute with float64"
        ):
            model(tokens())


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "GptOssForCausalLM"])
@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("config", WEIGHT_ONLY)
def test_torchao_on_experts_of_transformers_is_refused(config, name, architecture):
    """Their tensors say that they are bfloat16."""
    pytest.importorskip("transformers")
    from fmoe_ext import huggingface

    huggingface.register()
    model = make_model(architecture, "fmoe", torch.bfloat16)
    experts = experts_of(model)[0]
    holder = nn.Linear(1, 1, bias=False)
    holder.weight = nn.Parameter(getattr(experts, name).detach())
    quantized = quantize(holder, config).weight
    setattr(experts, name, nn.Parameter(quantized.detach(), requires_grad=False))
    with pytest.raises(
        TypeError, match=r"Experts has (Int8|Float8)Tensor: leave the experts out of the quant"
    ):
        model(input_ids=make_ids())
    setattr(experts, name, nn.Parameter(quantized.dequantize()))  # what the error says to do
    assert model(input_ids=make_ids()).logits.isfinite().all()


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_quantize_dynamic_leaves_choices_and_experts():
    model = make()
    quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, torch.qint8)
    assert not isinstance(quantized[0], nn.Linear) and not isinstance(quantized[2], nn.Linear)
    x = tokens()
    moe, expected = quantized[1](x), model[1](x)
    assert torch.equal(moe, expected)
    assert 0 < (quantized(x) - model(x)).norm() < 0.2
