"""Each MoE field of the installed Megatron's TransformerConfig, set to each value that its own validation accepts.

Our layer then has the numbers of Megatron's, or those that it has without the option, or refuses it by name.
"""

import dataclasses
import types
import typing

import pytest
import torch

pytest.importorskip("megatron.core", reason="pip install megatron-core")
from megatron_pair import (
    SIGMOID,
    E,
    assert_equal_numbers,
    config_of,
    fill,
    ours_of,
    step,
    theirs_of,
)

from fmoe_ext.megatron.core import OPTIONS
from fmoe_ext.megatron.core.table import is_default

pytestmark = pytest.mark.usefixtures("one_megatron_rank")

ROWS = {option.name: option for option in OPTIONS}
SEVERAL = {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.1]}
# Values of fields whose type does not list them: (value, other fields that it needs).
VALUES = {
    "num_moe_experts": [(E, {})],
    "moe_router_topk": [(1, {"moe_router_pre_softmax": True}), (3, {}), (E, {})],
    "moe_router_num_groups": [(4, {"moe_router_group_topk": 2})],
    "moe_router_group_topk": [(2, {"moe_router_num_groups": 4}), (3, {"moe_router_num_groups": 4})],
    "moe_router_topk_limited_devices": [(1, {})],
    "moe_router_load_balancing_type": [
        *(
            (name, {"moe_aux_loss_coeff": 0.25})
            for name in ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
        ),
        *(("sinkhorn", {}), ("quantile_balancing", {}), (["aux_loss"], {"moe_aux_loss_coeff": [0.25]})),
        (SEVERAL["moe_router_load_balancing_type"], SEVERAL),
    ],
    "moe_aux_loss_coeff": [
        (0.25, {}),
        ([0.25], {"moe_router_load_balancing_type": ["aux_loss"]}),
        ([0.1] * 2, SEVERAL),
    ],
    "moe_router_enable_expert_bias": [(True, SIGMOID), (True, {"moe_router_score_function": "sqrtsoftplus"})],
    "moe_router_bias_update_rate": [(0.1, SIGMOID | {"moe_router_enable_expert_bias": True})],
    "moe_router_dtype": [
        ("fp32", {"dtype": torch.float32}),
        ("fp64", {}),
        ("fp64", {"dtype": torch.float32}),
    ],
    "moe_layer_freq": [([0, 1], {}), (2, {})],
    "moe_token_drop_policy": [
        ("probs", {"moe_expert_capacity_factor": 0.6}),
        ("position", {"moe_expert_capacity_factor": 0.6}),
    ],
    "moe_pad_expert_input_to_capacity": [
        (True, {"moe_expert_capacity_factor": 0.6, "moe_token_dispatcher_type": "alltoall"})
    ],
    "moe_shared_expert_gate": [(True, {"moe_shared_expert_intermediate_size": 12})],
    "moe_shared_expert_overlap": [
        (True, {"moe_shared_expert_intermediate_size": 12, "moe_token_dispatcher_type": "alltoall"})
    ],
    "recompute_modules": [
        (
            [name],
            {
                "recompute_granularity": "selective",
                "moe_shared_expert_intermediate_size": 12,
                "moe_grouped_gemm": True,
            },
        )
        for name in ("core_attn", "moe_act", "layernorm", "mlp", "moe", "shared_experts")
    ],
    "offload_modules": [
        ([name], {"fine_grained_activation_offloading": True, "transformer_impl": "local"})
        for name in ("attn_norm", "mlp_norm", "expert_fc1", "moe_act", "fused_group_mlp")
    ],
    "cuda_graph_modules": [
        (["attn"], {"cuda_graph_impl": "transformer_engine"}),
        (["moe"], {"cuda_graph_impl": "local"}),
    ],
    "cuda_graph_scope": [
        (["attn"], {"cuda_graph_impl": "transformer_engine"}),
        (["moe"], {"cuda_graph_impl": "local"}),
    ],
    "moe_router_padding_for_quantization": [
        (True, {"fp8": "hybrid", "moe_token_dispatcher_type": "alltoall"})
    ],
    "moe_router_padding_for_fp8": [(True, {"fp8": "hybrid", "moe_token_dispatcher_type": "alltoall"})],
    "moe_enable_deepep": [(True, {"moe_token_dispatcher_type": "flex"})],
    "moe_flex_dispatcher_backend": [
        (name, {"moe_token_dispatcher_type": "flex"}) for name in ("deepep", "hybridep", "ncclep")
    ],
    "moe_ffn_hidden_size": [(12, {})],
    "moe_shared_expert_intermediate_size": [(12, {}), (20, {"gated_linear_unit": True})],
}
# tests/distributed/test_megatron.py, and test_megatron_options.py, as Megatron's latent layer needs Transformer Engine
ELSEWHERE = ("expert_model_parallel_size", "expert_tensor_parallel_size", "moe_latent_size")
NUMBERS = {int: [2, 3], float: [0.25, 2.5]}


def cases():
    """(name, value, other fields) for each field of this Megatron that the table has."""
    found = []
    for field in dataclasses.fields(config_of_type()):
        if field.name in ROWS and field.name not in ELSEWHERE:
            values = VALUES.get(field.name) or [(value, {}) for value in values_of(field.type)]
            found += [pytest.param(field.name, v, other, id=f"{field.name}={v}") for v, other in values]
    return found


def config_of_type():
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig


def values_of(annotation):
    """Values of a type: of each member of a union, all of a Literal and of bool, a few numbers."""
    if typing.get_origin(annotation) is typing.Literal:
        return typing.get_args(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [value for member in typing.get_args(annotation) for value in values_of(member)]
    if annotation is bool:
        return [True, False]
    return NUMBERS.get(annotation, ["some_name"] if annotation is str else [])


def accepted_config(**values):
    """The config, None if Megatron's own validation refuses it; fields of other versions are left out."""
    names = {field.name for field in dataclasses.fields(config_of_type())} | {"dtype"}
    try:
        return config_of(**{name: value for name, value in values.items() if name in names})
    except (ValueError, AssertionError, ImportError, RuntimeError, TypeError, NameError):
        return None


def outcome(name, value, other):
    """Outcome of a field with this value: "megatron refuses", "refused", "equal" or "no effect"."""
    config = accepted_config(**other | {name: value})
    if config is None:
        return "megatron refuses"
    try:
        ours = ours_of(config)
    except ValueError as error:
        assert str(error).split("=")[0] in {name, *other, *ALIASES.get(name, ())}, error
        return "refused"
    try:
        theirs = theirs_of(config)
        fill(ours, theirs)
        step(theirs)
    except Exception as error:  # it needs a GPU or Transformer Engine
        assert is_without_effect(ours, accepted_config(**other)), (
            f"Megatron's layer does not run here: {error}"
        )
        return "no effect"
    theirs.zero_grad()
    assert_equal_numbers(ours, theirs, bound=BOUNDS.get(name, 1e-12))
    return "equal"


# Megatron computes softmax in float32, here where the test cannot have it in float64.
BOUNDS = {"recompute_modules": 1e-5, "moe_layer_recompute": 1e-5, "moe_router_dtype": 1e-5}
# Megatron's validation turns the first into the second.
ALIASES = {
    "moe_flex_dispatcher_backend": ("moe_token_dispatcher_type",),
    "moe_enable_deepep": ("moe_token_dispatcher_type",),
    "enable_cuda_graph": ("cuda_graph_impl",),
    "external_cuda_graph": ("cuda_graph_impl",),
    "moe_router_padding_for_fp8": ("moe_router_padding_for_quantization", "fp8"),
    "moe_router_topk_limited_devices": ("moe_router_group_topk",),
}


def is_without_effect(ours, config):
    """True if the layer has the numbers of one of this config, which lacks the option."""
    plain = ours_of(config_of() if config is None else config)
    plain.load_state_dict(ours.state_dict())
    return all(torch.equal(a, b) for a, b in zip(step(ours)[:2], step(plain)[:2], strict=True))


@pytest.mark.parametrize(("name", "value", "other"), cases())
def test_value_of_a_field_is_honoured_or_refused_by_name(name, value, other):
    ended = outcome(name, value, other)
    row = ROWS[name]
    if ended == "megatron refuses":
        return
    if not row.honoured and not is_default(value, row.default):
        assert ended == "refused"
    if value == "some_name":
        assert ended == "refused"
    elif row.has_no_effect and not row.refused:
        assert ended in ("equal", "no effect") or other
