"""Say of each MoE option of Megatron-core's TransformerConfig if it is honoured, without effect or refused: OPTIONS.

Nothing that a config asks for may be lost in silence. So each field that looks like one about MoE (MOE_FIELD) has a
row here, an Option:

    honoured    Option(name, default, "what honours it")
    no effect   Option(name, default, "no effect: why"); _no_effect() makes several rows for one reason
    refused     Option(name, default, refused="why"); _refused() makes several. With `refuses` some values are refused

A field that a newer Megatron adds has no row, and is refused unless it has its default. check_options() applies the
rows when a layer is built, docs/megatron.md shows them, and tests/megatron_lm/test_megatron_values.py sets each field
of the installed Megatron to each of its values.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F

from fmoe_ext.megatron.core.gate import BALANCE_LOSSES, is_quantile, is_sinkhorn, only

# Fields whose name contains one of these need a row in the table, or are refused unless they have their default.
MOE_FIELD = re.compile("moe|expert|router|fp8|fp4|quant_recipe|cuda_graph")


@dataclass(frozen=True)
class Option:
    """One field of TransformerConfig."""

    name: str
    default: Any  # Megatron's
    honoured: str = ""  # what honours it, or "no effect: " and why; empty if only the default is accepted
    refused: str = ""  # the refused values and the reason; completes "moe_...=value is refused: "
    refuses: Callable[[Any], bool] | None = None  # finds them in a config; None: all but the default
    # names that it accepts, alone or in a list; others are numbers, bools, None, functions
    values: tuple[str, ...] = ()
    describes_router: bool = False  # gate= replaces the router: beside it all but the default is refused

    def why_refused(self, config: Any) -> str | None:
        """Say why the value of this config is refused, None if it is accepted."""
        # getattr everywhere: an older Megatron lacks the field
        value = getattr(config, self.name, self.default)
        # a name that a newer Megatron has added to the field
        if self.honoured and self.is_set(config) and not _names(value) <= set(self.values):
            known = ", ".join(map(repr, self.values)) or "no name"
            return f"this version of fmoe_ext knows {known} here"
        if not self.refused:
            return None
        is_refused = self.is_set(config) if self.refuses is None else self.refuses(config)
        return self.refused if is_refused else None

    def is_set(self, config: Any) -> bool:
        """Return True if config has another value than the default."""
        return not is_default(getattr(config, self.name, self.default), self.default)

    @property
    def has_no_effect(self) -> bool:
        return self.honoured.startswith("no effect")


def is_default(value: Any, default: Any) -> bool:
    """Return True if value is the default; None, False and an empty list are the same."""
    nothing = [x is None or x is False or (isinstance(x, (list, tuple)) and not x) for x in (value, default)]
    return value == default or all(nothing)


def _names(value: Any) -> set[str]:
    """Collect the names in a field that holds a name, an enum member or a list of them."""
    values = value if isinstance(value, (list, tuple, set)) else (value,)
    return {v.name if isinstance(v, enum.Enum) else v for v in values if isinstance(v, (str, enum.Enum))}


def layers_with_experts(config: Any) -> list[bool]:
    """Read moe_layer_freq for each layer of the decoder; an integer N puts experts in every N-th, from the first."""
    frequency = config.moe_layer_freq
    if isinstance(frequency, (list, tuple)):
        return [bool(has_experts) for has_experts in frequency]
    return [number % frequency == 0 for number in range(config.num_layers)]


# ---------------------------------------------------------------- makers of rows


def _router(name: str, default: Any, honoured: str = "", refused: str = "", **rules: Any) -> Option:
    """Make a row that describes Megatron's router, which gate= replaces."""
    return Option(name, default, honoured, refused, describes_router=True, **rules)


def _not_with_sinkhorn(
    name: str, default: Any, honoured: str, nor_quantiles: bool = False, **rules: Any
) -> Option:
    """Make a row of the router that Megatron ignores for the type "sinkhorn", so that it is refused there.

    nor_quantiles: Megatron refuses or ignores it for the type "quantile_balancing" too.
    """

    def refuses(config: Any) -> bool:
        is_ignored = is_sinkhorn(config) or (nor_quantiles and is_quantile(config))
        return is_ignored and not is_default(getattr(config, name, default), default)

    reason = _QUANTILES if nor_quantiles else _SINKHORN
    return _router(name, default, honoured, reason, refuses=refuses, **rules)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _no_effect(reason: str, names: str, *values: str) -> tuple[Option, ...]:
    return tuple(Option(name, None, f"no effect: {reason}", values=values) for name in names.split())


def _refused(reason: str, **defaults: Any) -> tuple[Option, ...]:
    return tuple(Option(name, default, refused=reason) for name, default in defaults.items())


# ---------------------------------------------------------------- `refuses` of rows: True for a config that is refused


def _never(config: Any) -> bool:
    """Refuse nothing: the layer itself checks these options, once it knows its groups and its number."""
    return False


def _has_other_shards(config: Any) -> bool:
    size = getattr(config, "expert_tensor_parallel_size", None) or config.tensor_model_parallel_size
    return getattr(config, "expert_tensor_parallel_num_weight_shards", None) not in (None, size)


def _topk_below_group_topk(config: Any) -> bool:
    groups, kept = getattr(config, "moe_router_num_groups", None), config.moe_router_group_topk
    return bool(kept and groups and kept < groups) and config.moe_router_topk < kept


def _refuses_balancing(config: Any) -> bool:
    kinds = config.moe_router_load_balancing_type  # a name, or a list of names
    if is_quantile(config):  # a Megatron without it takes the name and balances nothing
        return not hasattr(config, "moe_router_quantile_balancing_ema")
    if not isinstance(kinds, (list, tuple)):
        return False
    return "quantile_balancing" in kinds or ("sinkhorn" in kinds and len(kinds) > 1)


def _replays_in_parts(config: Any) -> bool:
    in_parts = config.tensor_model_parallel_size > 1 and not config.sequence_parallel
    replays = bool(getattr(config, "moe_enable_routing_replay", False))
    return replays and (in_parts or is_sinkhorn(config) or is_quantile(config))


def _offloads_experts(config: Any) -> bool:
    offloads = getattr(config, "fine_grained_activation_offloading", False)
    return offloads and bool(
        {"expert_fc1", "moe_act", "fused_group_mlp"} & _names(getattr(config, "offload_modules", None))
    )


def _captures_this_layer(config: Any) -> bool:
    """Return True if a CUDA graph captures more than attention and Mamba layers; no names stand for the whole layer."""
    # cuda_graph_impl has replaced the other two, which Megatron still takes
    graphs = getattr(config, "cuda_graph_impl", "none") not in (None, "none")
    graphs = (
        graphs or getattr(config, "enable_cuda_graph", False) or getattr(config, "external_cuda_graph", False)
    )
    captured = _names(getattr(config, "cuda_graph_modules", None)) | _names(
        getattr(config, "cuda_graph_scope", None)
    )
    return bool(graphs) and not (captured and captured <= {"attn", "mamba"})


def _captures(name: str, default: Any, *values: str) -> Option:
    reason = 'it captures this layer, which nobody has tried: capture cuda_graph_modules=["attn"]'
    honoured = 'no effect: graphs of "attn" and "mamba" leave this layer alone'

    def refuses(config: Any) -> bool:
        return not is_default(getattr(config, name, default), default) and _captures_this_layer(config)

    return Option(name, default, honoured, reason, refuses, values)


# ---------------------------------------------------------------- reasons and names that several rows share

_SINKHORN = 'beside moe_router_load_balancing_type="sinkhorn", whose scores do not depend on it'
_QUANTILES = 'beside moe_router_load_balancing_type="sinkhorn" and "quantile_balancing", which do without it'
_FLEX = (
    "DeepEP, HybridEP and their like exchange the rows of Megatron's own experts, and ours go by all-to-all: set "
    'moe_token_dispatcher_type="alltoall"; with moe_layer_spec(exchange="token") a token goes once to a rank, as with '
    "DeepEP"
)
_DTYPE = "experts compute in the dtype of their parameters"
_WITHOUT_FP8 = "describes `fp8`, `fp4` or `quant_recipe`, which are refused"
_WHOLE = "experts are whole on one rank"
_BALANCING = (*BALANCE_LOSSES, "sinkhorn", "quantile_balancing", "none")
_CAPTURED = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba", "full", "full_iteration")

# ---------------------------------------------------------------- the rows, in the order of docs/megatron.md

# experts, ranks and layers
_LAYOUT = (
    Option("num_moe_experts", None, "`num_experts` of `moe_layer_spec`, unless given there"),
    Option("expert_model_parallel_size", 1, "experts are spread over Megatron's expert-parallel group"),
    Option(
        "expert_tensor_parallel_size",
        None,
        "1, or (in `moe_layer_spec`) the tensor parallel size, Megatron's default: each of its ranks has a part of the "
        "hidden units of every expert here",
        "any other size, when the layer is built; in `fmoefy` all but 1",
        _never,
    ),
    Option(
        "expert_tensor_parallel_num_weight_shards",
        None,
        "`expert_tensor_parallel_size`, to which Megatron's arguments set it",
        f"another number: {_WHOLE}",
        _has_other_shards,
    ),
    *_refused(_WHOLE, expert_gtp_weight_remat_size=1),
    *_refused("the gate's weights are whole on every rank", gtp_weight_remat_size=1),
    *_refused("experts are not split over tensor-parallel ranks", moe_extended_tp=False),
    *_refused(
        "Megatron's schedule calls the parts of its own MoELayer: pass overlap_degree= to moe_layer_spec",
        overlap_moe_expert_parallel_comm=False,
    ),
    *_refused(
        "it delays gradients of Megatron's own experts: pass overlap_degree= to moe_layer_spec",
        overlap_dispatch_backward_with_experts_wgrad=False,
        delay_wgrad_compute=False,
    ),
    Option("moe_ffn_hidden_size", None, "`d_hidden`, unless given to `moe_layer_spec`"),
    Option(
        "moe_layer_freq",
        1,
        "`with_experts(get_gpt_decoder_block_spec(config, ...))`: dense layers stay Megatron's",
        "in a specification that puts experts into a layer which it leaves dense; in `fmoefy` all but 1",
        _never,
    ),
    *_refused("the balance loss would count one chunk", mlp_chunks_for_training=1),
)

# the gate: choices, scores, losses, capacities
_ROUTER = (
    Option("moe_router_topk", 2, "`top_k`, unless given to `moe_layer_spec`"),
    _not_with_sinkhorn(
        "moe_router_score_function",
        "softmax",
        "`SoftmaxGate`, `SigmoidGate` or `SqrtSoftplusGate`",
        values=("softmax", "sigmoid", "sqrtsoftplus"),
    ),
    _not_with_sinkhorn(
        "moe_router_pre_softmax", False, "`normalize=False` of `SoftmaxGate`; no effect on sigmoid scores"
    ),
    _not_with_sinkhorn("moe_router_topk_scaling_factor", None, "`scale` of the gate"),
    _not_with_sinkhorn(
        "moe_router_num_groups",
        None,
        "`num_groups` of the gate, with `moe_router_group_topk`",
        nor_quantiles=True,
    ),
    _router(
        "moe_router_group_topk",
        None,
        "`topk_groups` of the gate",
        "more groups than moe_router_topk: a group ranks by its moe_router_topk // moe_router_group_topk best scores",
        refuses=_topk_below_group_topk,
    ),
    _router(
        "moe_router_topk_limited_devices", None, "its successor `moe_router_group_topk`, which Megatron sets"
    ),
    _router(
        "moe_router_dtype",
        None,
        '"fp64": logits, scores and losses in float64; "fp32" and None: in float32, or float64 for float64 parameters '
        "(Megatron's None is the dtype of the input)",
        values=("fp32", "fp64"),
    ),
    _not_with_sinkhorn(
        "moe_router_enable_expert_bias",
        False,
        "`expert_bias` of `SigmoidGate`, moved by `finalize_model_grads`",
        nor_quantiles=True,
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
        'rank); "seq_aux_loss": of each sequence, whatever ranks have parts of it; "global_aux_loss": '
        '`balance_loss="running"` '
        "(Megatron: each data-parallel rank's part of it, averaged, which is the loss divided by their number); "
        '"sinkhorn": `SinkhornGate`, over the tokens of all ranks (Megatron: of each rank); "quantile_balancing": '
        "`QuantileGate`, over the tokens of all ranks (Megatron: the mean over data-parallel ranks), moved by "
        '`finalize_model_grads`; "none"; several losses',
        '"sinkhorn" in a list of several, "quantile_balancing" in any list and in a Megatron without it (before 0.19)',
        refuses=_refuses_balancing,
        values=_BALANCING,
    ),
    Option(
        "moe_aux_loss_coeff",
        0.0,
        "factor of the gate's loss, or of each of several, through `MoEAuxLossAutoScaler`",
        'any beside moe_router_load_balancing_type="sinkhorn" and "quantile_balancing", which have no loss',
        lambda config: (is_sinkhorn(config) or is_quantile(config)) and only(config.moe_aux_loss_coeff) != 0,
    ),
    Option(
        "moe_grad_scale_func",
        None,
        "Megatron's schedules give its value to `MoEAuxLossAutoScaler`, through which the gate's loss passes",
    ),
    _router("moe_router_quantile_balancing_ema", 0.0, "`ema` of `QuantileGate`"),
    _router(
        "moe_router_force_biased",
        None,
        refused="Megatron adds random numbers to the logits, for benchmarks; pass gate=fmoe_ext.gates.UniformGate",
    ),
    _router("moe_z_loss_coeff", None, "`z_weight` of the gate, over the tokens of all ranks"),
    _router(
        "moe_input_jitter_eps",
        None,
        "`jitter` of the gate, in training (Megatron: in evaluation too)",
        "1 and more, which would change signs",
        refuses=lambda config: (config.moe_input_jitter_eps or 0) >= 1,
    ),
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
        values=("probs", "position"),
    ),
    _router(
        "moe_pad_expert_input_to_capacity", False, "no effect: rows are not padded, the numbers are the same"
    ),
    *_refused("Megatron does not have it either: set moe_expert_capacity_factor", moe_token_dropping=False),
    _router(
        "moe_enable_routing_replay",
        False,
        "Megatron's `RouterReplay` records and gives the choices, in its order of tokens",
        "beside sinkhorn and quantile_balancing, and with tensor parallelism without sequence parallelism, where a "
        "rank chooses for a part of its tokens",
        refuses=_replays_in_parts,
    ),
)

# what the experts and those beside them compute, and in which dtype
_EXPERTS = (
    Option(
        "moe_shared_expert_intermediate_size",
        None,
        "Megatron's SharedExpertMLP beside the layer; not in `fmoefy`",
    ),
    Option("moe_shared_expert_gate", False, "the same module's"),
    Option("use_grouped_gemm_for_shared_expert", False, "the same module's"),
    Option("moe_shared_expert_glu_interleave_size", None, "the same module's"),
    *_refused(
        "gate and linear units lie one after the other in the experts' weights",
        moe_mlp_glu_interleave_size=None,
    ),
    *_no_effect("the shared experts are computed before the others", "moe_shared_expert_overlap"),
    *_refused("weights are applied to the outputs of the experts", moe_apply_probs_on_input=False),
    Option(
        "moe_latent_size",
        None,
        "`latent_size` of the layer, whose projections are whole on every rank; not in `fmoefy`",
    ),
    *_refused("the projections' weights are whole on every rank", gtp_remat_opt_in_modules=()),
    Option(
        "use_te_activation_func",
        False,
        "no effect: the same function, but for gelu",
        "with gelu: Transformer Engine computes its tanh approximation; pass activation=",
        lambda config: getattr(config, "use_te_activation_func", False) and config.activation_func is F.gelu,
    ),
    *_refused(
        f"{_DTYPE}: leave Megatron's low precision out, or keep Megatron's own experts",
        fp8=None,
        fp4=None,
        quant_recipe=None,
        use_kitchen=False,
        activation_func_fp8_input_store=False,
        moe_router_padding_for_quantization=False,
        moe_router_padding_for_fp8=False,
    ),
    *_refused(
        "rows are exchanged in their own dtype", moe_dispatch_fwd_dtype="bf16", moe_combine_bwd_dtype="bf16"
    ),
    *_no_effect(
        _WITHOUT_FP8,
        "fp8_recipe fp8_param fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad "
        "fp8_output_proj fp8_dot_product_attention fp8_multi_head_attention fp4_recipe fp4_param",
        *("tensorwise", "delayed", "mxfp8", "blockwise", "custom", "nvfp4", "most_recent", "max"),
    ),
    *_refused(
        "it describes fp8 or fp4, which are refused", fp8_quantizer_factory=None, fp4_quantizer_factory=None
    ),
)

# what is kept for the backward, and captured by CUDA graphs
_MEMORY = (
    Option(
        "recompute_modules",
        ("core_attn",),
        '"moe": the layer is computed again in the backward pass; "shared_experts": these alone; "moe_act": no effect, '
        "what the layer keeps for its backward is before the activation anyway; other modules are Megatron's",
        values=_words(
            "moe shared_experts moe_act mlp layernorm core_attn mla_up_proj gdn_norm_out gdp_in_proj gdp_qkv mhc"
        ),
    ),
    Option(
        "moe_layer_recompute", False, 'the same as `recompute_modules=["moe"]`, to which Megatron sets it'
    ),
    Option(
        "offload_modules",
        (),
        "other modules'",
        '"expert_fc1", "moe_act" and "fused_group_mlp" are parts of Megatron\'s experts',
        _offloads_experts,
        values=_words(
            "core_attn attn_proj attn_norm mlp_norm qkv_linear gdp_qkv expert_fc1 moe_act fused_group_mlp"
        ),
    ),
    _captures("cuda_graph_impl", "none", "none", "local", "transformer_engine", "full_iteration"),
    _captures("enable_cuda_graph", False),
    _captures("external_cuda_graph", False),
    _captures("cuda_graph_modules", "full", *_CAPTURED),
    _captures("cuda_graph_scope", "full", *_CAPTURED, "full_iteration_inference"),
    *_no_effect(
        "describes CUDA graphs, which leave this layer alone",
        "inference_cuda_graph_scope cuda_graph_use_single_mempool cuda_graph_retain_backward_graph "
        "cuda_graph_warmup_steps delay_offload_until_cuda_graph",
        *("none", "layer", "block"),
    ),
)

# how Megatron's own layer computes, exchanges and logs
_KERNEL_OPTIONS = (
    Option("moe_per_layer_logging", False, "`track_moe_metrics` has the gate's loss of each layer"),
    *_no_effect(
        "one fused operator computes the experts",
        "moe_grouped_gemm moe_use_legacy_grouped_gemm moe_use_grouped_tensor moe_single_grouped_weight "
        "moe_single_grouped_bias moe_paged_stash moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda "
        "moe_paged_stash_buffer_size_factor_cpu inference_moe_disable_fused_quant_kernels moe_permute_fusion",
    ),
    *_no_effect("one fused operator chooses the experts", "moe_router_fusion"),
    Option(
        "moe_token_dispatcher_type",
        "allgather",
        "no effect: rows are exchanged by our own all-to-all",
        f'"flex": {_FLEX}',
        refuses=lambda config: config.moe_token_dispatcher_type == "flex",
        values=("allgather", "alltoall", "alltoall_seq", "flex"),
    ),
    *_refused(_FLEX, moe_enable_deepep=False),
    *_no_effect(
        "describes the dispatchers `flex`, which is refused, and the one of inference",
        "moe_flex_dispatcher_backend moe_deepep_num_sms "
        "moe_hybridep_num_sms moe_flex_dispatcher_num_sms moe_permute_fusion_into_hybridep "
        "moe_hybridep_pad_uneven_dispatch_inputs moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute "
        "moe_hybridep_num_sms_preprocessing moe_ncclep_static_shape moe_ncclep_zero_copy "
        "inference_moe_token_dispatcher_type",
        *("deepep", "hybridep", "ncclep", "nccl", "nvls"),
    ),
)

OPTIONS = (*_LAYOUT, *_ROUTER, *_EXPERTS, *_MEMORY, *_KERNEL_OPTIONS)


def check_options(config: Any, own_gate: bool = False, fills_dense: bool = False) -> None:
    """Raise ValueError for an option that a layer of this config would ignore; the message begins with its name.

    own_gate: the user passes gate=, which replaces the options of Megatron's router.
    fills_dense: the layer replaces a dense MLP (fmoefy).
    """
    # The rows.
    for option in OPTIONS:
        value = getattr(config, option.name, option.default)
        if own_gate and option.describes_router:
            if option.is_set(config) and not option.has_no_effect:
                raise ValueError(
                    f"{option.name}={value!r} describes Megatron's router, but gate= is given: say it in the gate's "
                    f"own arguments and leave {option.name} at {option.default!r}, or leave gate= out"
                )
        elif (reason := option.why_refused(config)) is not None:
            raise ValueError(f"{option.name}={value!r} is refused: {reason} (docs/megatron.md)")
    # Fields without a row that look like MoE options: refused unless they have their default.
    known = {option.name for option in OPTIONS}
    for field in dataclasses.fields(config):
        if MOE_FIELD.search(field.name) and field.name not in known:
            factory = field.default_factory
            default = field.default if factory is dataclasses.MISSING else factory()
            if not is_default(value := getattr(config, field.name), default):
                raise ValueError(
                    f"{field.name}={value!r} is refused: this version of fmoe_ext does not know the option; leave it "
                    f"at {default!r}"
                )
    # What only a layer that is built with the model can have.
    if not fills_dense:
        return
    shared, latent = config.moe_shared_expert_intermediate_size, getattr(config, "moe_latent_size", None)
    if shared is not None:
        raise ValueError(
            f"moe_shared_expert_intermediate_size={shared} is refused: the dense MLP that fmoefy replaces has no "
            "shared experts; moe_layer_spec builds them"
        )
    if latent is not None:
        raise ValueError(
            f"moe_latent_size={latent} is refused: experts in place of a dense MLP have the model's width; "
            "moe_layer_spec builds latent ones"
        )
    if not all(layers_with_experts(config)):
        raise ValueError(
            f"moe_layer_freq={config.moe_layer_freq!r} is refused: name the layers in fmoefy(model, layers=...)"
        )


def table() -> str:
    """Write OPTIONS as docs/megatron.md shows them: options without effect share a row with their reason."""
    rows, reasons = ["| option | default | honoured by | refused |", "|---|---|---|---|"], []
    for option in OPTIONS:
        if option.has_no_effect and not option.refused:
            if option.honoured not in reasons:
                reasons.append(option.honoured)
            continue
        refused = option.refused if option.honoured else f"any other value: {option.refused}"
        cells = (f"`{option.name}`", f"`{option.default}`", option.honoured or "-", refused or "-")
        rows.append(f"| {' | '.join(cells)} |")
    for reason in reasons:
        names = ", ".join(f"`{option.name}`" for option in OPTIONS if option.honoured == reason)
        rows.append(f"| {names} | | {reason} | - |")
    return "\n".join(rows)
