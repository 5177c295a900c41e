"""What becomes of each MoE option of Megatron-core's TransformerConfig: honoured, without effect here, or refused.

OPTIONS is the one table: docs/megatron.md shows it, check_options() applies it, and a test holds it against the fields
of the installed Megatron. An option that the table does not know is refused unless it has its default.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fmoe_ext.integrations.megatron.core.gate import BALANCE_LOSSES, is_sinkhorn, only

MOE_FIELD = re.compile("moe|expert|router")  # names of fields that the table has to know


@dataclass(frozen=True)
class Option:
    """One field of TransformerConfig.

    default: Megatron's. honoured: by what, or why it has no effect here; empty if only the default is taken.
    refused: which values are refused, and why, completing "moe_...=value is refused: "; refuses(config) finds them, by
    default whatever is not the default. describes_router: a gate of the user's own replaces it, so that another value
    than the default is refused beside gate=.
    """

    name: str
    default: Any
    honoured: str = ""
    refused: str = ""
    refuses: Callable[[Any], bool] | None = None
    describes_router: bool = False

    def is_refused(self, config: Any) -> bool:
        if not self.refused:
            return False
        return self.is_set(config) if self.refuses is None else self.refuses(config)

    def is_set(self, config: Any) -> bool:
        """Whether config has another value than the default."""
        return not is_default(getattr(config, self.name, self.default), self.default)


def is_default(value: Any, default: Any) -> bool:
    return value == default or (default in (None, False) and value in (None, False))


def _groups(config: Any) -> tuple[int, int] | None:
    """(groups, groups of a token) if they limit the choice, else None."""
    groups, kept = getattr(config, "moe_router_num_groups", None), config.moe_router_group_topk
    return (groups, kept) if kept and groups and kept < groups else None


def _ranks_groups_by_nothing(config: Any) -> bool:
    groups = _groups(config)
    return groups is not None and config.moe_router_topk < groups[1]


def _balancing_is_refused(config: Any) -> bool:
    return only(config.moe_router_load_balancing_type) not in (*BALANCE_LOSSES, "sinkhorn", "none")


def _is_no_one_factor(config: Any) -> bool:
    several = isinstance(only(config.moe_aux_loss_coeff), (list, tuple))
    return several or (is_sinkhorn(config) and only(config.moe_aux_loss_coeff) != 0)


def _leaves_layers_dense(config: Any) -> bool:
    frequency = config.moe_layer_freq
    return not all(frequency) if isinstance(frequency, (list, tuple)) else frequency != 1


def _is_wider_than_ours(config: Any) -> bool:
    return config.moe_router_dtype == "fp64" and config.params_dtype != torch.float64


def _recomputes_parts(config: Any) -> bool:
    selective = config.recompute_granularity == "selective"
    return selective and bool({"moe", "shared_experts"} & _modules(config, "recompute_modules"))


def _offloads_parts(config: Any) -> bool:
    offloads = getattr(config, "fine_grained_activation_offloading", False)
    return offloads and bool({"expert_fc1", "moe_act"} & _modules(config, "offload_modules"))


def _modules(config: Any, name: str) -> set[str]:
    return set(getattr(config, name, None) or ())


def _router(name: str, default: Any, honoured: str = "", refused: str = "", refuses: Any = None) -> Option:
    return Option(name, default, honoured, refused, refuses, describes_router=True)


def _not_with_sinkhorn(name: str, default: Any, honoured: str) -> Option:
    """Of the router; beside "sinkhorn", which Megatron's router has before it reads the option, it is refused."""

    def refuses(config: Any) -> bool:
        return is_sinkhorn(config) and not is_default(getattr(config, name, default), default)

    return _router(name, default, honoured, _SINKHORN, refuses)


_KERNELS = "no effect: one fused operator computes the experts"
_SINKHORN = 'beside moe_router_load_balancing_type="sinkhorn", whose scores know nothing of it'
_EXCHANGE = "no effect: rows are exchanged by our own all-to-all"

OPTIONS = (
    Option("num_moe_experts", None, "`num_experts` of `moe_layer_spec`, unless given there"),
    Option("expert_model_parallel_size", 1, "experts are spread over Megatron's expert-parallel group"),
    Option(
        "expert_tensor_parallel_size",
        None,
        "1, or (in `moe_layer_spec`) the tensor parallel size, Megatron's default: each of its ranks has a part of the "
        "hidden units of every expert here",
        "any other size, when the layer is built; in `fmoefy` all but 1",
        lambda _: False,
    ),
    Option("expert_tensor_parallel_num_weight_shards", None, refused="experts are whole on one rank"),
    Option("expert_gtp_weight_remat_size", 1, refused="experts are whole on one rank"),
    Option("moe_extended_tp", False, refused="experts are not split over tensor-parallel ranks"),
    Option(
        "overlap_moe_expert_parallel_comm",
        False,
        refused="Megatron's schedule calls the parts of its own MoELayer: pass overlap_degree= to moe_layer_spec",
    ),
    Option(
        "overlap_dispatch_backward_with_experts_wgrad",
        False,
        refused="it delays gradients of Megatron's own experts: pass overlap_degree= to moe_layer_spec",
    ),
    Option("moe_ffn_hidden_size", None, "`d_hidden`, unless given to `moe_layer_spec`"),
    Option(
        "moe_layer_freq",
        1,
        "1, or a list of ones",
        "a layer specification is that of every layer: call fmoefy(model, layers=...) on the dense model",
        _leaves_layers_dense,
    ),
    Option("moe_router_topk", 2, "`top_k`, unless given to `moe_layer_spec`"),
    _not_with_sinkhorn("moe_router_score_function", "softmax", "`SoftmaxGate` or `SigmoidGate`"),
    _not_with_sinkhorn(
        "moe_router_pre_softmax",
        False,
        "`normalize=False` of `SoftmaxGate`; no effect on sigmoid scores",
    ),
    _not_with_sinkhorn("moe_router_topk_scaling_factor", None, "`scale` of the gate"),
    _not_with_sinkhorn(
        "moe_router_num_groups", None, "`num_groups` of the gate, with `moe_router_group_topk`"
    ),
    _router(
        "moe_router_group_topk",
        None,
        "`topk_groups` of the gate",
        "more groups than moe_router_topk: a group ranks by its moe_router_topk // moe_router_group_topk best scores",
        _ranks_groups_by_nothing,
    ),
    _router(
        "moe_router_topk_limited_devices", None, "its successor `moe_router_group_topk`, which Megatron sets"
    ),
    _router(
        "moe_router_dtype",
        None,
        "gates compute in float32, or float64 for float64 parameters; Megatron's None is the dtype of the input",
        '"fp64" with narrower parameters: gates compute in float32 then',
        _is_wider_than_ours,
    ),
    _not_with_sinkhorn(
        "moe_router_enable_expert_bias",
        False,
        "`expert_bias` of `SigmoidGate`, moved by `finalize_model_grads`",
    ),
    _router(
        "moe_router_bias_update_rate", 1e-3, "`finalize_model_grads`, with `moe_router_enable_expert_bias`"
    ),
    _router(
        "moe_router_force_load_balancing",
        False,
        "`random_logits` of the gate, from Megatron's generator of the expert-parallel rank",
    ),
    _router(
        "moe_router_load_balancing_type",
        "aux_loss",
        '"aux_loss": the balance loss of all tokens of a microbatch, on all ranks (Megatron: on each data-parallel '
        'rank); "seq_aux_loss": of each sequence, whole on its rank; "global_aux_loss": `balance_loss="running"` '
        "(Megatron: each data-parallel rank's part of it, averaged, which is the loss divided by their number); "
        '"sinkhorn": `SinkhornGate`, over the tokens of all ranks (Megatron: of each rank); "none"',
        "several types",
        _balancing_is_refused,
    ),
    Option(
        "moe_aux_loss_coeff",
        0.0,
        "factor of the gate's loss, through `MoEAuxLossAutoScaler`",
        "a list of several: moe_router_load_balancing_type must be one; any beside "
        'moe_router_load_balancing_type="sinkhorn", which has no loss',
        _is_no_one_factor,
    ),
    Option(
        "moe_grad_scale_func",
        None,
        "Megatron's schedules give its value to `MoEAuxLossAutoScaler`, through which the gate's loss passes",
    ),
    _router("moe_router_quantile_balancing_ema", 0.0, 'of the type "quantile_balancing", which is refused'),
    _router(
        "moe_router_force_biased",
        None,
        refused="Megatron adds random numbers to the logits, for benchmarks; pass gate=fmoe_ext.gates.UniformGate",
    ),
    _router("moe_z_loss_coeff", None, "`z_weight` of the gate, over the tokens of all ranks"),
    _router("moe_input_jitter_eps", None, "`jitter` of the gate, in training (Megatron: in evaluation too)"),
    _router(
        "moe_expert_capacity_factor", None, "`capacity_factor` of the gate, over the tokens of all ranks"
    ),
    _router(
        "moe_expert_rank_capacity_factor",
        None,
        refused="tokens are dropped by expert, not by rank: set moe_expert_capacity_factor",
    ),
    _router(
        "moe_pad_experts_for_cuda_graph_inference",
        False,
        "no effect: Megatron drops no token by it; max_rows_per_rank= of moe_layer_spec is what a CUDA graph needs",
    ),
    _router(
        "moe_token_drop_policy",
        "probs",
        '"probs": `drop_policy="score"` of the gate; "position": `drop_policy="token"`, earlier tokens stay (Megatron: '
        "those that torch.topk finds among equals)",
    ),
    _router(
        "moe_pad_expert_input_to_capacity", False, "no effect: rows are not padded, the numbers are the same"
    ),
    Option(
        "moe_token_dropping",
        False,
        refused="Megatron does not have it either: set moe_expert_capacity_factor",
    ),
    _router(
        "moe_enable_routing_replay", False, refused="fmoe_ext.gates.RoutingReplay records and plays choices"
    ),
    Option(
        "moe_shared_expert_intermediate_size",
        None,
        "Megatron's SharedExpertMLP beside the layer; not in `fmoefy`",
    ),
    Option("moe_shared_expert_gate", False, "the same module's"),
    Option("use_grouped_gemm_for_shared_expert", False, "the same module's"),
    Option("moe_shared_expert_glu_interleave_size", None, "the same module's"),
    Option(
        "moe_mlp_glu_interleave_size",
        None,
        refused="gate and linear units lie one after the other in the experts' weights",
    ),
    Option(
        "moe_shared_expert_overlap", False, "no effect: the shared experts are computed before the others"
    ),
    Option("moe_apply_probs_on_input", False, refused="weights are applied to the outputs of the experts"),
    Option("moe_latent_size", None, refused="experts have the width of the model"),
    Option(
        "moe_router_padding_for_quantization",
        False,
        refused="experts compute in the dtype of their parameters",
    ),
    Option(
        "moe_router_padding_for_fp8",
        False,
        refused="experts compute in the dtype of their parameters",
    ),
    Option(
        "recompute_modules",
        ("core_attn",),
        '"moe_act": what the layer keeps for its backward is before the activation anyway',
        '"moe" and "shared_experts" (moe_layer_recompute): use recompute_granularity="full"',
        _recomputes_parts,
    ),
    Option(
        "moe_layer_recompute",
        False,
        refused='it is recompute_modules=["moe"]: use recompute_granularity="full"',
    ),
    Option("offload_modules", (), "other modules'", '"expert_fc1", "moe_act"', _offloads_parts),
    Option("moe_per_layer_logging", False, "`track_moe_metrics` has the gate's loss of each layer"),
    Option("moe_grouped_gemm", False, _KERNELS),
    Option("moe_use_legacy_grouped_gemm", False, _KERNELS),
    Option("moe_single_grouped_weight", False, _KERNELS),
    Option("moe_single_grouped_bias", False, _KERNELS),
    Option("moe_paged_stash", False, _KERNELS),
    Option("moe_paged_stash_page_size", 64, _KERNELS),
    Option("moe_paged_stash_buffer_size_factor_cuda", 1.1, _KERNELS),
    Option("moe_paged_stash_buffer_size_factor_cpu", 0.0, _KERNELS),
    Option("inference_moe_disable_fused_quant_kernels", False, _KERNELS),
    Option("moe_permute_fusion", False, _KERNELS),
    Option("moe_router_fusion", False, "no effect: one fused operator chooses the experts"),
    Option("moe_token_dispatcher_type", "allgather", _EXCHANGE),
    Option("moe_enable_deepep", False, _EXCHANGE),
    Option("moe_flex_dispatcher_backend", "deepep", _EXCHANGE),
    Option("moe_deepep_num_sms", 20, _EXCHANGE),
    Option("moe_hybridep_num_sms", 16, _EXCHANGE),
    Option("moe_flex_dispatcher_num_sms", None, _EXCHANGE),
    Option("moe_permute_fusion_into_hybridep", False, _EXCHANGE),
    Option("moe_hybridep_pad_uneven_dispatch_inputs", False, _EXCHANGE),
    Option("moe_hybridep_num_blocks_permute", None, _EXCHANGE),
    Option("moe_hybridep_num_blocks_unpermute", None, _EXCHANGE),
    Option("moe_hybridep_num_sms_preprocessing", 108, _EXCHANGE),
    Option("moe_ncclep_static_shape", False, _EXCHANGE),
    Option("moe_ncclep_zero_copy", False, _EXCHANGE),
    Option("inference_moe_token_dispatcher_type", "nvls", _EXCHANGE),
)


def check_options(config: Any, own_gate: bool = False, fills_dense: bool = False) -> None:
    """ValueError, naming the option, for one that a layer of this config would not heed.

    own_gate: the user gives a gate, so that options that describe Megatron's router have nobody to heed them.
    fills_dense: the layer takes the place of a dense MLP (fmoefy).
    """
    for option in OPTIONS:
        value = getattr(config, option.name, option.default)
        if own_gate and option.describes_router:
            if option.is_set(config) and not option.honoured.startswith("no effect"):
                raise ValueError(
                    f"{option.name}={value!r} describes Megatron's router, but gate= is given: say it in the gate's "
                    f"own arguments and leave {option.name} at {option.default!r}, or leave gate= out"
                )
        elif option.is_refused(config):
            raise ValueError(f"{option.name}={value!r} is refused: {option.refused} (docs/megatron.md)")
    if fills_dense and config.moe_shared_expert_intermediate_size is not None:
        raise ValueError(
            f"moe_shared_expert_intermediate_size={config.moe_shared_expert_intermediate_size} is refused: the dense "
            "MLP that fmoefy replaces has no shared experts; moe_layer_spec builds them"
        )
    for name, value, default in _unknown(config):
        raise ValueError(
            f"{name}={value!r} is refused: this version of fmoe_ext does not know the option; leave it at {default!r}"
        )


def _unknown(config: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, value, default) of the MoE options that are set and not in the table."""
    known = {option.name for option in OPTIONS}
    for field in dataclasses.fields(config):
        if MOE_FIELD.search(field.name) and field.name not in known:
            factory = field.default_factory
            default = field.default if factory is dataclasses.MISSING else factory()
            value = getattr(config, field.name)
            if not is_default(value, default):
                yield field.name, value, default


def table() -> str:
    """OPTIONS as docs/megatron.md shows them."""
    rows = ["| option | default | honoured by | refused |", "|---|---|---|---|"]
    for option in OPTIONS:
        whole = option.refused if option.honoured else f"any other value: {option.refused}"
        cells = (
            f"`{option.name}`",
            f"`{option.default}`",
            option.honoured or "-",
            whole if option.refused else "-",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)
