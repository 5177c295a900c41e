"""Make the arguments of FMoETransformerMLP from a TransformerConfig and Megatron's process groups.

Those of ranks, experts and the activation; gate.py makes the gate's, specs.py and dense.py read the sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fmoe_ext.experts import ClampedSwiGLU, GatedActivation
from fmoe_ext.models.recognize import GATED, simplify

_QUICK_GELU = 1.702  # quick_gelu(x) = x * sigmoid(1.702 * x)
# tp: tensor, cp: context, ep: expert, dp: data parallel; expt_*: of the experts; joined names: the ranks of all
GROUPS = ("tp", "cp", "ep", "expt_tp", "expt_dp", "dp_cp", "tp_cp", "tp_dp_cp")


def process_groups(pg_collection: Any = None) -> Any:
    """Return a ProcessGroupCollection with GROUPS: the given one if it has them all, else parallel_state's.

    Raises RuntimeError if parallel_state is not initialised, ValueError if a given collection lacks some and is not
    of parallel_state's groups.
    """
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    given = {name: getattr(pg_collection, name, None) for name in GROUPS}
    missing = [name for name, group in given.items() if group is None]
    if not missing:
        return pg_collection
    is_initialized = parallel_state.model_parallel_is_initialized()
    if len(missing) == len(GROUPS) and not is_initialized:
        raise RuntimeError(
            "Megatron's process groups do not exist yet: call "
            "megatron.core.parallel_state.initialize_model_parallel(...) before"
        )
    groups = ProcessGroupCollection.use_mpu_process_groups(list(GROUPS)) if is_initialized else None
    # Megatron's T5 hands on a collection of some of parallel_state's groups; a grid of the user's own is another
    if any(group not in (None, getattr(groups, name, None)) for name, group in given.items()):
        raise ValueError(
            f"pg_collection lacks {', '.join(missing)}, and its other groups are not those of parallel_state: give it "
            f"all of {', '.join(GROUPS)}"
        )
    return groups


def layer_arguments(config: Any, groups: Any, num_experts: int | None = None) -> dict[str, Any]:
    """Make the arguments of FMoETransformerMLP for a layer in this layout of ranks, with config's experts and top_k.

    Raises ValueError for experts that cannot be spread evenly.
    """
    ep_size = groups.ep.size()
    arguments = {
        "world_size": ep_size,
        "moe_group": groups.ep if ep_size > 1 else None,
        "expert_dp_comm": "moe",
        "bias": config.add_bias_linear,
        "gradient_accumulation_fusion": config.gradient_accumulation_fusion,
    }
    # With sequence parallelism each tensor-parallel rank has tokens of its own, otherwise all have the same.
    if groups.tp.size() > 1 and not config.sequence_parallel:
        arguments["slice_group"] = groups.tp
    num_experts = config.num_moe_experts if num_experts is None else num_experts
    if num_experts is not None:
        if num_experts % ep_size:
            raise ValueError(
                f"num_experts must be a multiple of the expert parallel size {ep_size}, but is {num_experts}"
            )
        arguments["num_expert"] = num_experts // ep_size
        arguments["top_k"] = config.moe_router_topk
    return arguments


def activation_of(config: Any) -> str | Callable[..., Any]:
    """Name or build the activation of this config's dense MLP, as FMoETransformerMLP takes it.

    Raises ValueError for a clamp that Megatron's fused kernels leave out.
    """
    activation = simplify(config.activation_func)
    if activation == "gelu" and config.bias_activation_fusion:
        activation = "gelu_tanh"  # Megatron's fused kernels compute this one
    if not config.gated_linear_unit:
        return activation
    # gated: one of our fused activations where it is the same, else Megatron's function between the products
    limit, offset = config.activation_func_clamp_value, config.glu_linear_offset
    if isinstance(activation, str) and activation in GATED and limit is None and offset == 0:
        return GATED[activation]
    from megatron.core.activations import quick_gelu

    is_quick = config.activation_func is quick_gelu
    if config.bias_activation_fusion and limit is not None and not is_quick:
        raise ValueError(
            f"activation_func_clamp_value={limit} is refused beside bias_activation_fusion=True: Megatron's fused "
            "kernels clamp quick_gelu alone. Set bias_activation_fusion=False, which clamps, or no clamp"
        )
    if is_quick and limit is not None and offset == 1:
        return ClampedSwiGLU(_QUICK_GELU, limit)  # GPT-OSS's
    return GatedActivation(config.activation_func, limit, offset)
