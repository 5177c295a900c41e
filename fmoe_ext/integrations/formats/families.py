"""The model types of Transformers that export() writes: which models they can hold, and what config.json says."""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.checkpoint.routing import HIDDEN_ACT
from fmoe_ext.integrations.formats.layers import MoELayers

NOT_COPIED = ("architectures", "model_type", "transformers_version", "_name_or_path", "quantization_config")
Values: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """sources: model types whose layers, MLPs aside, compute the same from the same configuration.

    config: (values of the source's configuration, the MoE layers) -> what config.json says besides those values.
    """

    sources: tuple[str, ...]
    config: Callable[[Values, MoELayers], Values]


def _mixtral(values: Values, layers: MoELayers) -> Values:
    _all_are_moe("mixtral", layers)
    return {"num_local_experts": layers.num_experts, "intermediate_size": layers.d_hidden}


def _olmoe(values: Values, layers: MoELayers) -> Values:
    _all_are_moe("olmoe", layers)
    return {
        "num_experts": layers.num_experts,
        "intermediate_size": layers.d_hidden,
        "norm_topk_prob": layers.routing["normalize"],
    }


def _qwen(layers: MoELayers) -> Values:
    return {
        "num_experts": layers.num_experts,
        "moe_intermediate_size": layers.d_hidden,
        "norm_topk_prob": layers.routing["normalize"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(layers.dense),
    }


def _qwen3_moe(values: Values, layers: MoELayers) -> Values:
    kinds = set(values.get("layer_types") or ())
    if len(kinds) > 1:
        raise CheckpointError(
            "config.layer_types has sliding and full attention, but the layers of qwen3_moe all have one of them"
        )
    windows = {"use_sliding_window": kinds == {"sliding_attention"}} if kinds else {}
    return _qwen(layers) | windows


def _qwen2_moe(values: Values, layers: MoELayers) -> Values:
    bias = {"qkv_bias": values["model_type"] == "qwen2"} if values["model_type"] != "qwen2_moe" else {}
    return _qwen(layers) | {"shared_expert_intermediate_size": layers.shared} | bias


def _deepseek_v3(values: Values, layers: MoELayers) -> Values:
    num_dense = len(layers.dense)
    if layers.dense != tuple(range(num_dense)):
        raise CheckpointError(f"deepseek_v3 has its dense layers first, but here they are {layers.dense}")
    if layers.shared % layers.d_hidden or not layers.shared:
        raise CheckpointError(
            f"deepseek_v3 has shared experts, in all a multiple of an expert's width, {layers.d_hidden}, but here "
            f"shared_expert_hidden is {layers.shared or None}"
        )
    return {
        "n_routed_experts": layers.num_experts,
        "moe_intermediate_size": layers.d_hidden,
        "n_shared_experts": layers.shared // layers.d_hidden,
        "first_k_dense_replace": num_dense,
        "norm_topk_prob": layers.routing["normalize"],
        "routed_scaling_factor": layers.routing["scale"],
        "n_group": layers.routing["num_groups"],
        "topk_group": layers.routing["topk_groups"],
    }


def _gpt_oss(values: Values, layers: MoELayers) -> Values:
    _all_are_moe("gpt_oss", layers)
    return {
        "num_local_experts": layers.num_experts,
        "intermediate_size": layers.d_hidden,
        "swiglu_alpha": layers.routing["swiglu_alpha"],
        "swiglu_limit": layers.routing["swiglu_limit"],
    }


def _all_are_moe(format: str, layers: MoELayers) -> None:
    if layers.dense:
        raise CheckpointError(
            f"every layer of {format} is MoE, but here layers {', '.join(map(str, layers.dense))} are dense: fmoefy all"
        )


FAMILIES = MappingProxyType(
    {
        "mixtral": Family(("mixtral", "mistral", "llama"), _mixtral),
        "qwen3_moe": Family(("qwen3_moe", "qwen3"), _qwen3_moe),
        "qwen2_moe": Family(("qwen2_moe", "qwen2", "mistral", "llama"), _qwen2_moe),
        "olmoe": Family(("olmoe",), _olmoe),
        "deepseek_v3": Family(("deepseek_v3",), _deepseek_v3),
        "gpt_oss": Family(("gpt_oss",), _gpt_oss),
    }
)


def make_config(format: str, values: Values, layers: MoELayers) -> Any:
    """The configuration of a format for a model; values: those of the model's own, as its config.json has them.

    CheckpointError for models whose other parts the format does not compute.
    """
    from transformers import AutoConfig

    family, source = FAMILIES[format], values["model_type"]
    if source not in family.sources:
        fitting = [name for name, other in FAMILIES.items() if source in other.sources]
        raise CheckpointError(
            f"{format} holds models of {', '.join(family.sources)}, but this one is {source}: its attention, norms or "
            f"embeddings are others. For {source} there is {', '.join(fitting) or 'none of the formats'}"
        )
    known = values if source == format else {**AutoConfig.for_model(format).to_dict(), "head_dim": None}
    copied = {k: v for k, v in values.items() if k in known and k not in NOT_COPIED}
    moe = {"num_experts_per_tok": layers.routing["top_k"]} | family.config(values, layers)
    if layers.routing.get("activation") in HIDDEN_ACT:
        moe["hidden_act"] = HIDDEN_ACT[layers.routing["activation"]]
        _check_dense_activation(values, layers, moe["hidden_act"])
    return AutoConfig.for_model(format, **copied | moe)


def _check_dense_activation(values: Values, layers: MoELayers, hidden_act: str) -> None:
    if layers.dense and values.get("hidden_act") != hidden_act:
        raise CheckpointError(
            f"the dense MLPs of layers {layers.dense} have hidden_act={values.get('hidden_act')!r} and the experts "
            f"{hidden_act!r}, but config.json says one for both"
        )
