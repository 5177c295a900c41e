"""Our layer and Megatron-core's own MoELayer of the same config, on one rank, with the same weights and in float64."""

import copy
import dataclasses
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.overrides import TorchFunctionMode

from fmoe_ext.megatron import moe_layer_spec

pytest.importorskip("megatron.core", reason="pip install megatron-core")
import megatron_layouts as layouts
from megatron.core.activations import quick_gelu, squared_relu

E, S, B = 8, 12, 3


class Float64Inside(TorchFunctionMode):
    """Megatron's router computes softmax and sigmoid in float32, whatever its dtype; in here in float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (torch.softmax, torch.Tensor.softmax) and kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        logits_to_float32 = func is torch.Tensor.to and args[1:] == (torch.float32,) and args[0].dim() == 2
        if func is torch.Tensor.float or logits_to_float32:  # biases stay in float32
            func, args = torch.Tensor.double, args[:1]
        if (
            func is torch.topk and kwargs.get("dim") == 0
        ):  # of equals, torch takes any: here the earlier tokens
            order = args[0].sort(dim=0, descending=True, stable=True)
            return torch.return_types.topk((order.values[: kwargs["k"]], order.indices[: kwargs["k"]]))
        return func(*args, **kwargs)


def config_of(**options):
    options = {
        "num_moe_experts": E,
        "moe_ffn_hidden_size": 20,
        "add_bias_linear": False,
        "num_layers": 2,
    } | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return layouts.config_of(**options)


def known_config_of(**options):
    missing = set(options) - {field.name for field in dataclasses.fields(config_of())}
    if missing:
        pytest.skip(f"not an option of this Megatron: {', '.join(missing)}")
    return config_of(**options)


def ours_of(config, **moe_kwargs):
    from megatron.core.transformer.spec_utils import build_module

    layer = build_module(moe_layer_spec(**moe_kwargs), config=config)
    layer.set_layer_number(1)
    return layer


def theirs_of(config):
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.spec_utils import build_module

    spec = get_moe_module_spec(use_te=False, num_experts=E)
    build = spec if isinstance(spec, partial) else partial(build_module, spec)  # a ModuleSpec until 0.16
    layer = build(config=copy.copy(config))
    layer.set_layer_number(1)
    return layer


@torch.no_grad()
def fill(ours, theirs):
    """The same weights in both, far enough from each other that no two scores are close."""
    generator = torch.Generator().manual_seed(5)
    for p in theirs.parameters():
        p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / 3)
    ours.moe.gate.gate.weight.copy_(theirs.router.weight)
    if theirs.router.bias is not None:
        ours.moe.gate.gate.bias.copy_(theirs.router.bias)
    if theirs.router.expert_bias is not None:
        theirs.router.expert_bias.copy_(torch.linspace(-0.2, 0.2, E))
        ours.moe.gate.expert_bias.copy_(theirs.router.expert_bias)
    if getattr(theirs.router, "qb_beta", None) is not None:
        for beta in (theirs.router.qb_beta, ours.moe.gate.quantile_bias):
            beta.copy_(torch.linspace(-0.5, 0.5, E).roll(3))
    for e, expert in enumerate(theirs.experts.local_experts):
        for linear, fused in ((expert.linear_fc1, "htoh4"), (expert.linear_fc2, "h4toh")):
            getattr(ours.moe.experts, fused).weight[e].copy_(linear.weight)
            if linear.bias is not None and linear.bias.numel():
                getattr(ours.moe.experts, fused).bias[e].copy_(linear.bias)
    if theirs.shared_experts is not None:
        ours.shared_experts.load_state_dict(theirs.shared_experts.state_dict())


def step(layer, padding=None, seed=1):
    """(output, gradient of the input, {name: gradient}) of a training step with a loss that reads the output."""
    torch.manual_seed(seed)
    dtype = layer.config.params_dtype
    x = torch.randn(S, B, layouts.D, dtype=dtype, requires_grad=True)
    inside = Float64Inside() if dtype is torch.float64 else nullcontext()
    # Megatron compiles its activations, which takes long.
    with inside, torch.compiler.set_stance("force_eager"):
        output, _ = layer(x) if padding is None else layer(x, padding_mask=padding)
        if padding is not None:  # Megatron computes those tokens
            output = output.masked_fill(padding.t()[..., None], 0)
        (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
    return output.detach(), x.grad, {n: p.grad for n, p in layer.named_parameters()}


def assert_equal_numbers(ours, theirs, padding=None, seed=1, bound=1e-12):
    output, grad, ours_grads = step(ours, padding, seed)
    expected, expected_grad, theirs_grads = step(theirs, padding, seed)
    assert_close({"output": (output, expected), "input": (grad, expected_grad)}, bound)
    assert_close(paired_gradients(ours_grads, theirs_grads), bound)


def paired_gradients(ours_grads, theirs_grads):
    """{name: (gradient of our layer, the same of Megatron's)} from those by name."""
    pairs = {"gate": (ours_grads["moe.gate.gate.weight"], theirs_grads["router.weight"])}
    for fused, linear in (("htoh4", "linear_fc1"), ("h4toh", "linear_fc2")):
        for kind in ("weight", "bias"):
            each = [theirs_grads.get(f"experts.local_experts.{e}.{linear}.{kind}") for e in range(E)]
            known = [grad for grad in each if grad is not None]
            if known:  # an expert without tokens has none when its forward is repeated
                stacked = torch.stack([torch.zeros_like(known[0]) if grad is None else grad for grad in each])
                pairs[f"{fused}.{kind}"] = ours_grads[f"moe.experts.{fused}.{kind}"], stacked
    for name, shared in theirs_grads.items():
        if name.startswith("shared_experts."):
            pairs[name] = ours_grads[name], shared
    return pairs


def assert_close(pairs, bound=1e-12):
    for name, (mine, truth) in pairs.items():
        mine = torch.zeros_like(truth) if mine is None else mine
        error = (mine - truth).abs().max() / truth.abs().max().clamp(min=1e-30)
        assert error <= bound, f"{name} is off by {error:.1e}"


def tracked(name):
    from megatron.core.transformer.moe.moe_utils import (
        clear_aux_losses_tracker,
        get_moe_layer_wise_logging_tracker,
    )

    value = get_moe_layer_wise_logging_tracker()[name]["values"][0].item()
    clear_aux_losses_tracker()
    return value


SIGMOID = {"moe_router_score_function": "sigmoid"}
SINKHORN = {"moe_router_load_balancing_type": "sinkhorn"}
QUANTILES = {
    "moe_router_load_balancing_type": "quantile_balancing",
    "moe_router_quantile_balancing_ema": 0.25,
}
FORCED = {"moe_router_force_load_balancing": True}
HONOURED = {
    "default": {},
    "top-1 pre-softmax": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "top-3": {"moe_router_topk": 3},
    "swiglu": {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu},
    "clamped swiglu": {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    | {"activation_func_clamp_value": 0.4},
    "GPT-OSS's activation": {"gated_linear_unit": True, "activation_func": quick_gelu}
    | {"activation_func_clamp_value": 0.4, "glu_linear_offset": 1.0},
    "squared relu": {"activation_func": squared_relu},
    "pre-softmax": {"moe_router_pre_softmax": True},
    "scaling factor": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    "scaled after": {"moe_router_topk_scaling_factor": 2.5},
    "sigmoid": SIGMOID,
    "sigmoid top-1": SIGMOID | {"moe_router_topk": 1},
    "expert bias": SIGMOID | {"moe_router_enable_expert_bias": True},
    "groups": {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 3},
    "groups pre-softmax": {
        "moe_router_topk": 3,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_pre_softmax": True,
    },
    "groups by two logits": {"moe_router_num_groups": 2, "moe_router_group_topk": 1},
    "groups by the best score": SIGMOID
    | {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_enable_expert_bias": True},
    "groups and aux loss": {
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_aux_loss_coeff": 0.3,
    },
    "groups and sequence loss": {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
    | {"moe_aux_loss_coeff": 0.3, "moe_router_load_balancing_type": "seq_aux_loss"},
    "expert bias and aux loss": SIGMOID | {"moe_router_enable_expert_bias": True, "moe_aux_loss_coeff": 0.3},
    "capacity by position": {"moe_expert_capacity_factor": 0.6, "moe_token_drop_policy": "position"},
    "capacity by position, sigmoid": SIGMOID
    | {"moe_expert_capacity_factor": 0.6, "moe_token_drop_policy": "position", "moe_router_topk": 3},
    "DeepSeek-V3": SIGMOID
    | {"moe_router_enable_expert_bias": True, "moe_router_topk": 4, "moe_router_topk_scaling_factor": 2.5}
    | {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_aux_loss_coeff": 0.3}
    | {"moe_router_load_balancing_type": "seq_aux_loss"},
    "aux loss": {"moe_aux_loss_coeff": 0.3},
    "aux loss in a list": {"moe_aux_loss_coeff": [0.3], "moe_router_load_balancing_type": ["aux_loss"]},
    "two losses": {"moe_aux_loss_coeff": [0.3, 0.2]}
    | {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]},
    "three losses, sigmoid and z-loss": SIGMOID
    | {"moe_aux_loss_coeff": [0.3, 0.2, 0.5], "moe_z_loss_coeff": 0.1, "moe_router_topk": 3}
    | {"moe_router_load_balancing_type": ["global_aux_loss", "aux_loss", "seq_aux_loss"]},
    "two losses, one without factor": {"moe_aux_loss_coeff": [0.0, 0.2]}
    | {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]},
    "aux loss sigmoid": SIGMOID | {"moe_aux_loss_coeff": 0.3},
    "sequence loss": {"moe_aux_loss_coeff": 0.3, "moe_router_load_balancing_type": "seq_aux_loss"},
    "global loss": {"moe_aux_loss_coeff": 0.3, "moe_router_load_balancing_type": "global_aux_loss"},
    "global loss, sigmoid and z-loss": SIGMOID
    | {"moe_aux_loss_coeff": 0.3, "moe_router_load_balancing_type": "global_aux_loss"}
    | {"moe_z_loss_coeff": 0.1, "moe_router_topk": 3},
    "sinkhorn": SINKHORN,
    "sinkhorn top-1": SINKHORN | {"moe_router_topk": 1},
    "sinkhorn with z-loss": SINKHORN | {"moe_router_topk": 3, "moe_z_loss_coeff": 0.1},
    "quantiles": QUANTILES,
    "quantiles, sigmoid": QUANTILES | SIGMOID,
    "quantiles, top-4 sqrtsoftplus, scaled": QUANTILES
    | {"moe_router_topk": 4, "moe_router_topk_scaling_factor": 2.5}
    | {"moe_router_score_function": "sqrtsoftplus"},
    "quantiles, pre-softmax and z-loss": QUANTILES
    | {"moe_router_pre_softmax": True, "moe_z_loss_coeff": 0.1},
    "force balancing": FORCED,
    "force balancing with losses": FORCED | {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.1},
    "force balancing, sigmoid": FORCED | SIGMOID | {"moe_router_topk": 3},
    "force balancing, sinkhorn": FORCED | SINKHORN,
    "no balancing": {"moe_aux_loss_coeff": 0.3, "moe_router_load_balancing_type": "none"},
    "z-loss": {"moe_z_loss_coeff": 0.1},
    "z-loss and aux loss": {"moe_z_loss_coeff": 0.1, "moe_aux_loss_coeff": 0.3},
    "z-loss and sequence loss, top-1": SIGMOID
    | {"moe_z_loss_coeff": 0.1, "moe_aux_loss_coeff": 0.3, "moe_router_topk": 1}
    | {"moe_router_load_balancing_type": "seq_aux_loss"},
    "per token": {"moe_z_loss_coeff": 0.1, "moe_aux_loss_coeff": 0.3, "calculate_per_token_loss": True},
    "jitter": {"moe_input_jitter_eps": 0.2},
    "capacity": {"moe_expert_capacity_factor": 0.6},
    "capacity and loss": {"moe_expert_capacity_factor": 0.6, "moe_aux_loss_coeff": 0.3},
    "router dtype": {"moe_router_dtype": "fp64"},
    "shared experts": {"moe_shared_expert_intermediate_size": 12},
    "shared experts with gate": {"moe_shared_expert_intermediate_size": 12, "moe_shared_expert_gate": True},
    "shared experts, swiglu": {"moe_shared_expert_intermediate_size": 12, "gated_linear_unit": True},
}
