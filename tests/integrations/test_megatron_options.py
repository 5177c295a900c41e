"""Every MoE option of Megatron's TransformerConfig: heeded, with the numbers of its MoELayer, or refused by name."""

import copy
import dataclasses
import inspect
import re
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from fmoe_ext import RoutingReplay, balance
from fmoe_ext.gates import Choices, SigmoidGate, SoftmaxGate, UniformGate
from fmoe_ext.megatron import fmoefy, moe_layer_spec

pytest.importorskip("megatron.core", reason="pip install megatron-core")
import megatron_layouts as layouts
from gpt import make_chunks
from on_cpu import megatron_on_cpu

from fmoe_ext.integrations.megatron.core import OPTIONS, check_options
from fmoe_ext.integrations.megatron.core.options import table

E, S, B = 8, 12, 3


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    from megatron.core import parallel_state

    store = tmp_path_factory.mktemp("megatron") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    from megatron.core.transformer.moe import moe_utils

    with megatron_on_cpu(), pytest.MonkeyPatch.context() as patch:
        # Megatron's router reads the name, which 0.16 defines with Transformer Engine only.
        patch.setattr(
            moe_utils, "te_general_gemm", getattr(moe_utils, "te_general_gemm", None), raising=False
        )
        layouts.initialize()
        yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


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
    options = {"num_moe_experts": E, "moe_ffn_hidden_size": 20, "add_bias_linear": False} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return layouts.config_of(num_layers=2, **options)


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
    x = torch.randn(S, B, layouts.D, dtype=torch.float64, requires_grad=True)
    with Float64Inside():
        output, _ = layer(x) if padding is None else layer(x, padding_mask=padding)
        if padding is not None:  # Megatron computes those tokens
            output = output.masked_fill(padding.t()[..., None], 0)
        (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
    return output.detach(), x.grad, {n: p.grad for n, p in layer.named_parameters()}


def assert_equal_numbers(ours, theirs, padding=None, seed=1):
    output, grad, ours_grads = step(ours, padding, seed)
    expected, expected_grad, theirs_grads = step(theirs, padding, seed)
    pairs = {"output": (output, expected), "input": (grad, expected_grad)}
    pairs["gate"] = ours_grads["moe.gate.gate.weight"], theirs_grads["router.weight"]
    for fused, linear in (("htoh4", "linear_fc1"), ("h4toh", "linear_fc2")):
        for kind in ("weight", "bias"):
            stacked = [theirs_grads.get(f"experts.local_experts.{e}.{linear}.{kind}") for e in range(E)]
            if stacked[0] is not None:
                pairs[f"{fused}.{kind}"] = ours_grads[f"moe.experts.{fused}.{kind}"], torch.stack(stacked)
    for name, shared in theirs_grads.items():
        if name.startswith("shared_experts."):
            pairs[name] = ours_grads[name], shared
    for name, (mine, truth) in pairs.items():
        mine = torch.zeros_like(truth) if mine is None else mine
        error = (mine - truth).abs().max() / truth.abs().max().clamp(min=1e-30)
        assert error <= 1e-12, f"{name} is off by {error:.1e}"


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
FORCED = {"moe_router_force_load_balancing": True}
HONOURED = {
    "default": {},
    "top-1 pre-softmax": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "top-3": {"moe_router_topk": 3},
    "swiglu": {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu},
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
    "aux loss sigmoid": SIGMOID | {"moe_aux_loss_coeff": 0.3},
    "sequence loss": {"moe_aux_loss_coeff": 0.3, "moe_router_load_balancing_type": "seq_aux_loss"},
    "global loss": {"moe_aux_loss_coeff": 0.3, "moe_router_load_balancing_type": "global_aux_loss"},
    "global loss, sigmoid and z-loss": SIGMOID
    | {"moe_aux_loss_coeff": 0.3, "moe_router_load_balancing_type": "global_aux_loss"}
    | {"moe_z_loss_coeff": 0.1, "moe_router_topk": 3},
    "sinkhorn": SINKHORN,
    "sinkhorn top-1": SINKHORN | {"moe_router_topk": 1},
    "sinkhorn with z-loss": SINKHORN | {"moe_router_topk": 3, "moe_z_loss_coeff": 0.1},
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


@pytest.mark.parametrize("case", HONOURED)
def test_equals_megatrons_layer(case):
    config = known_config_of(**HONOURED[case])
    ours, theirs = ours_of(config), theirs_of(config)
    fill(ours, theirs)
    assert_equal_numbers(ours, theirs)
    ours.eval(), theirs.eval()
    if config.moe_input_jitter_eps is None:  # theirs goes on to jitter
        assert_equal_numbers(ours, theirs)


def test_biases():
    """Of the router and the experts; Megatron's backward of experts with biases fails on the CPU."""
    config = config_of(add_bias_linear=True, activation_func=torch.nn.functional.silu)
    ours, theirs = ours_of(config), theirs_of(config)
    fill(ours, theirs)
    assert ours.moe.gate.gate.bias.abs().min() > 0 and ours.moe.experts.htoh4.bias.abs().max() > 0
    x = torch.randn(S, B, layouts.D, dtype=torch.float64)
    with torch.no_grad(), Float64Inside():
        torch.testing.assert_close(ours(x)[0], theirs(x)[0], rtol=1e-12, atol=1e-14)


WITHOUT_NUMBERS = ("default", "router dtype", "no balancing")


@pytest.mark.parametrize("case", [case for case in HONOURED if case not in WITHOUT_NUMBERS])
def test_no_honoured_option_is_without_effect(case):
    """Each case above gives other numbers than without its options, so that it tests them."""
    layers = [ours_of(known_config_of(**options)) for options in (HONOURED[case], {})]
    changed = []
    for layer in layers:
        with torch.no_grad():
            fill_same(layer)
        output, grad, grads = step(layer)
        changed.append((output, grad, grads["moe.gate.gate.weight"]))
    assert any(not torch.allclose(a, b, rtol=1e-6, atol=0) for a, b in zip(*changed, strict=True))


def fill_same(layer):
    generator = torch.Generator().manual_seed(6)
    for p in (*layer.moe.gate.parameters(), *layer.moe.experts.parameters()):
        p.copy_(torch.randn(p.numel(), generator=generator, dtype=p.dtype).view(p.shape) / 3)


LOGGED_AS = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


@pytest.mark.parametrize("kind", LOGGED_AS)
def test_logged_loss_is_megatrons(kind):
    from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker

    config = config_of(moe_aux_loss_coeff=0.3, moe_router_load_balancing_type=kind)
    ours, theirs = ours_of(config), theirs_of(config)
    fill(ours, theirs)
    clear_aux_losses_tracker()
    values = []
    for layer in (theirs, ours):
        step(layer)
        values.append(tracked(LOGGED_AS[kind]))
    assert values[1] == pytest.approx(values[0], rel=1e-6)  # the tracker is float32
    assert values[1] == pytest.approx(ours.gate_loss.item(), rel=1e-6)


def test_global_loss_counts_the_microbatches_of_a_step():
    """f_e of all microbatches since finalize_model_grads emptied the count, gradients and logged values."""
    from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors
    from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker

    config = config_of(moe_aux_loss_coeff=0.25, moe_router_load_balancing_type="global_aux_loss")
    ours, theirs = ours_of(config), theirs_of(config)
    fill(ours, theirs)
    theirs.router.double()  # its counts are float32, also where it divides them by 3 microbatches
    clear_aux_losses_tracker()
    generator, losses = torch.Generator().manual_seed(4), []
    for number in range(5):
        if number == 3:
            reset_model_temporary_tensors(config, [ours]), reset_model_temporary_tensors(config, [theirs])
        x = torch.randn(S, B, layouts.D, dtype=torch.float64, generator=generator)
        grads = []
        for layer, gate in ((ours, ours.moe.gate.gate), (theirs, theirs.router)):
            layer.zero_grad()
            with Float64Inside():
                layer(x)[0].sum().backward()
            losses.append(tracked("global_load_balancing_loss"))
            grads.append(gate.weight.grad)
        assert (grads[0] - grads[1]).abs().max() <= 1e-12 * grads[1].abs().max()
        assert losses[-2] == pytest.approx(losses[-1], rel=1e-6)  # the tracker is float32
        with torch.no_grad():  # neither evaluation nor a forward without gradients counts in the next one
            ours.eval()(x), ours.train()
    assert len(set(losses[1::2])) == 5


def test_expert_bias_moves_as_megatrons():
    """finalize_model_grads reads local_tokens_per_expert and writes expert_bias, once a step."""
    from megatron.core.distributed.finalize_model_grads import (
        _update_router_expert_bias,
        reset_model_temporary_tensors,
    )

    config = config_of(**SIGMOID, moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.01)
    ours, theirs = ours_of(config), theirs_of(config)
    fill(ours, theirs)
    before = theirs.router.expert_bias.clone()
    for _ in range(3):
        for layer in (ours, theirs):
            step(layer)
            step(layer)  # two microbatches
            _update_router_expert_bias([layer], config)
            reset_model_temporary_tensors(config, [layer])
    assert torch.equal(ours.moe.gate.expert_bias, theirs.router.expert_bias)
    assert (theirs.router.expert_bias - before).abs().max() >= 0.01
    ours.bfloat16()
    ours(torch.zeros(S, B, layouts.D, dtype=torch.bfloat16))
    assert ours.moe.gate.expert_bias.dtype == torch.float32


PADDED = (
    *("default", "sigmoid", "groups", "aux loss", "aux loss sigmoid", "z-loss", "z-loss and aux loss"),
    *("per token", "sequence loss", "shared experts"),
)  # not "expert bias", where Megatron 0.16.1 fails: it broadcasts [T] against [T, E]


@pytest.mark.parametrize("case", PADDED)
def test_padding_mask(case):
    options = HONOURED[case]
    if "moe_aux_loss_coeff" in options:  # Megatron's factor of the loss is float32 then: one that is exact
        options = options | {"moe_aux_loss_coeff": 0.25}
    config = known_config_of(**options)
    ours, theirs = ours_of(config), theirs_of(config)
    if "padding_mask" not in inspect.signature(theirs.forward).parameters:
        pytest.skip("this Megatron has no padding_mask")
    fill(ours, theirs)
    # Megatron divides every sequence by the mean length: only with equal ones that is each sequence's own loss
    lengths = [8, 8, 8] if case == "sequence loss" else [8, S, S]
    padding = torch.arange(S) >= torch.tensor(lengths)[:, None]  # [b, s]
    assert_equal_numbers(ours, theirs, padding)


def test_sequence_loss_takes_tokens_as_megatron_has_them():
    """[s, b, h]: tokens of a sequence do not follow each other; any gate with such a loss, and the output stays."""
    config = config_of(moe_aux_loss_coeff=0.5)
    by_sequence = partial(SoftmaxGate, balance_loss="sequence", seq_len=S)
    layers = [ours_of(config, gate=gate) for gate in (by_sequence, SoftmaxGate)]
    layers[0].load_state_dict(layers[1].state_dict())
    x = torch.randn(S, B, layouts.D, dtype=torch.float64)
    outputs = [layer(x)[0] for layer in layers]
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-15)
    alone = []
    for sequence in x.split(1, 1):
        layers[1](sequence)
        alone.append(layers[1].gate_loss)
    assert layers[0].gate_loss.item() == pytest.approx(torch.stack(alone).mean().item(), rel=1e-12)


REFUSED = {
    "moe_extended_tp": ({"moe_extended_tp": True}, ValueError),
    "moe_layer_freq": ({"moe_layer_freq": 2}, ValueError),
    "moe_layer_freq list": ({"moe_layer_freq": [1, 0]}, ValueError),
    "moe_aux_loss_coeff sinkhorn": (SINKHORN | {"moe_aux_loss_coeff": 0.1}, ValueError),
    "moe_router_score_function sinkhorn": (SINKHORN | SIGMOID, ValueError),
    "moe_router_pre_softmax sinkhorn": (SINKHORN | {"moe_router_pre_softmax": True}, ValueError),
    "moe_router_topk_scaling_factor sinkhorn": (
        SINKHORN | {"moe_router_topk_scaling_factor": 2.0},
        ValueError,
    ),
    "moe_router_num_groups sinkhorn": (
        SINKHORN | {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
        ValueError,
    ),
    "moe_router_load_balancing_type several": (
        {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.1]},
        ValueError,
    ),
    "moe_token_dropping": ({"moe_token_dropping": True}, ValueError),
    "moe_enable_routing_replay": ({"moe_enable_routing_replay": True}, ValueError),
    "moe_apply_probs_on_input": ({"moe_apply_probs_on_input": True}, ValueError),
    "moe_latent_size": ({"moe_latent_size": 8}, ValueError),
    "recompute_modules": ({"recompute_granularity": "selective", "recompute_modules": ["moe"]}, ValueError),
    "moe_shared_expert_intermediate_size": (
        {"moe_shared_expert_intermediate_size": 8, "add_bias_linear": True},
        ValueError,
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    options, error = REFUSED[case]
    config = known_config_of(**options)
    with pytest.raises(error, match=rf"^{case.split(' ')[0]}="):
        ours_of(config)


# Megatron refuses them itself here, without fp8, a GPU or 16-bit parameters: the config is changed afterwards.
REFUSED_LATER = {
    "moe_router_padding_for_quantization": True,
    "moe_router_padding_for_fp8": True,
    "moe_layer_recompute": True,
    "overlap_moe_expert_parallel_comm": True,
}


@pytest.mark.parametrize("name", REFUSED_LATER)
def test_refused_whatever_megatron_says(name):
    config = config_of()
    setattr(config, name, REFUSED_LATER[name])
    with pytest.raises(ValueError, match=f"^{name}=True is refused: "):
        check_options(config)


def test_offloading_and_router_dtype():
    config = config_of()
    config.fine_grained_activation_offloading, config.offload_modules = True, ["attn_norm", "moe_act"]
    with pytest.raises(ValueError, match=r"^offload_modules="):
        check_options(config)
    config = config_of(dtype=torch.float32, moe_router_dtype="fp64")
    with pytest.raises(ValueError, match=r"^moe_router_dtype='fp64' is refused: .*narrower"):
        ours_of(config)


def test_every_moe_field_is_in_the_table():
    fields = {field.name: field for field in dataclasses.fields(config_of())}
    known = {option.name: option for option in OPTIONS}
    assert len(known) == len(OPTIONS)
    missing = [name for name in fields if re.search("moe|expert|router", name) and name not in known]
    assert not missing
    for name, option in known.items():
        assert option.honoured or option.refused, name
        if name in fields and fields[name].default is not dataclasses.MISSING and name != "recompute_modules":
            assert option.default == (fields[name].default or option.default), name


def test_the_docs_show_the_table():
    text = (Path(__file__).resolve().parents[2] / "docs/megatron.md").read_text()
    assert table() in text, (
        "docs/megatron.md: paste what fmoe_ext.integrations.megatron.core.options.table() returns"
    )


def test_unknown_option_is_refused():
    config = config_of()

    @dataclasses.dataclass
    class Newer(type(config)):
        moe_of_tomorrow: int = 3

    newer = copy.copy(config)
    newer.__class__ = Newer
    newer.moe_of_tomorrow = 3
    check_options(newer)
    newer.moe_of_tomorrow = 4
    with pytest.raises(ValueError, match=r"^moe_of_tomorrow=4 is refused: .*does not know.* leave it at 3"):
        check_options(newer)


@pytest.mark.parametrize("name", [option.name for option in OPTIONS if option.describes_router])
def test_options_of_the_router_go_without_a_gate_of_ones_own(name):
    option = next(option for option in OPTIONS if option.name == name)
    config = config_of()
    if not hasattr(config, name):
        pytest.skip("not an option of this Megatron")
    setattr(config, name, 0.123)
    if option.honoured.startswith("no effect"):
        check_options(config, own_gate=True)
        return
    with pytest.raises(ValueError, match=f"^{name}=0.123 describes Megatron's router, but gate= is given"):
        ours_of(config, gate=SoftmaxGate)


def test_fmoefy_heeds_the_options_too():
    (model,) = make_chunks(
        layouts.config_of(
            num_layers=2, moe_router_score_function="sigmoid", moe_router_topk_scaling_factor=1.5
        ),
        layouts.VOCAB,
        layouts.SEQ_LEN,
    )
    fmoefy(model, num_experts=4, top_k=2)
    gate = model.decoder.layers[0].mlp.moe.gate
    assert isinstance(gate, SigmoidGate) and gate.scale == 1.5 and gate.normalize
    (model,) = make_chunks(layouts.config_of(num_layers=1), layouts.VOCAB, layouts.SEQ_LEN)
    model.config.moe_shared_expert_intermediate_size = 8
    with pytest.raises(
        ValueError, match=r"^moe_shared_expert_intermediate_size=8 is refused: .*moe_layer_spec"
    ):
        fmoefy(model, num_experts=4)
    model.config.moe_shared_expert_intermediate_size = None
    model.config.moe_router_pre_softmax = True
    with pytest.raises(ValueError, match=r"^moe_router_pre_softmax=True describes"):
        fmoefy(model, num_experts=4, gate=UniformGate)


def test_says_that_megatrons_default_trains_no_balance():
    with pytest.warns(UserWarning, match="moe_aux_loss_coeff is 0, Megatron's default"):
        ours_of(config_of())
    silent = [{"moe_aux_loss_coeff": 0.1}, {"moe_router_load_balancing_type": "none"}]
    silent.append(SIGMOID | {"moe_router_enable_expert_bias": True})
    for options in silent:
        config = config_of(**options)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="moe_aux_loss_coeff is 0")
            ours_of(config)


def test_their_router_is_watched_logged_and_replayed(tmp_path):
    """Telemetry and replay see Megatron's own TopKRouter as they see ours: the same choices, the same gradients."""
    config = config_of()  # without a balance loss, for which Megatron's router chooses once more
    ours, theirs = ours_of(config), theirs_of(config)
    fill(ours, theirs)
    monitors = [balance.watch(layer) for layer in (ours, theirs)]
    replay, chosen = RoutingReplay(theirs), RoutingReplay(ours)
    plain = step(theirs)
    with replay.record(), balance.log_choices(theirs, tmp_path / "log") as log:
        recorded = step(theirs)
        log.end_step()
    with chosen.record():
        step(ours)
    loads = [next(iter(monitor.collect()["layers"].values()))["tokens_per_expert"] for monitor in monitors]
    assert loads == [[n // 2 for n in loads[1]], loads[1]]
    expected = next(iter(chosen.choices.values()))[0].kept
    (record,) = balance.read_log(tmp_path / "log")[1]
    for topk_idx in (replay.choices["router"][0].kept, record.topk_idx):
        assert torch.equal(topk_idx.sort().values, expected.sort().values)
    other = (expected + 1) % E
    replay.choices["router"] = chosen.choices["moe.gate"] = [Choices(other, other)]
    ours.zero_grad(), theirs.zero_grad()
    with replay.play(), chosen.play():
        assert_equal_numbers(ours, theirs)
    for a, b in ((recorded, plain), (step(theirs), plain)):
        assert torch.equal(a[0], b[0])
    replay.remove()


def test_replay_in_groups_of_their_router_is_refused():
    config = config_of(moe_router_num_groups=4, moe_router_group_topk=2)
    with pytest.raises(ValueError, match="moe_router_group_topk"), RoutingReplay(theirs_of(config)).record():
        pass
