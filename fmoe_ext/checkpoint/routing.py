"""What a gate computes beside its weights: kept with a checkpoint, compared with Hugging Face's config.json.

Two models with the same tensors give different numbers if one divides the weights of the chosen experts by their sum
and the other does not; config.json says which for Hugging Face's, and nothing in a state dict does for ours.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.experts import GATED_ACTIVATIONS, ClampedSwiGLU, activation_name
from fmoe_ext.layers import FMoE

OPTIONS = ("top_k", "normalize", "scale", "num_groups", "topk_groups", "group_best", "capacity_factor")
OF_CONFIG = (  # key of config.json, option of our gates, their argument
    ("num_experts_per_tok", "top_k", "top_k"),
    ("norm_topk_prob", "normalize", "normalize"),
    ("routed_scaling_factor", "scale", "scale"),
)
NORMALIZES = (
    MappingProxyType(  # norm_topk_prob where config.json does not say it: the default of the model's config
        {"mixtral": True, "qwen3_moe": False, "qwen2_moe": False, "olmoe": False}
    )
)
HIDDEN_ACT = MappingProxyType({"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_pytorch_tanh"})
CLAMPED = "clamped_swiglu"


@dataclass(frozen=True)
class Computes:
    """What the layers of a Hugging Face format compute, by our names: gates and their options, activations."""

    gates: tuple[str, ...] = ("NaiveGate", "SoftmaxGate")
    always_normalizes: bool = False
    has_scale_and_groups: bool = False
    activations: tuple[str, ...] = GATED_ACTIVATIONS


FORMATS = MappingProxyType(
    {
        "mixtral": Computes(always_normalizes=True),
        "deepseek_v3": Computes(gates=("SigmoidGate",), has_scale_and_groups=True),
        "gpt_oss": Computes(always_normalizes=True, activations=(CLAMPED,)),
    }
)
GROUP_BEST = 2  # scores by which Transformers' DeepseekV3 ranks a group


def routing_of(layer: FMoE) -> dict[str, Any]:
    """{"gate": its class, those of OPTIONS that it has, "activation" of the experts} of a layer."""
    gate: nn.Module = layer.gate
    options = {name: getattr(gate, name) for name in OPTIONS if hasattr(gate, name)}
    plain = {k: v for k, v in options.items() if v is None or isinstance(v, (bool, int, float))}
    return {"gate": type(gate).__name__, **plain, **_activation_of(layer)}


def _activation_of(layer: FMoE) -> dict[str, Any]:
    activation = getattr(layer.experts, "activation", None)
    if isinstance(activation, ClampedSwiGLU):
        return {"activation": CLAMPED, "swiglu_alpha": activation.alpha, "swiglu_limit": activation.limit}
    if activation is None:
        return {}
    return {
        "activation": activation_name(activation)
        or getattr(activation, "__name__", type(activation).__name__)
    }


def check_writable(routing: Mapping[str, Mapping[str, Any]], prefix: str, layout: str) -> None:
    """CheckpointError where a layer of Hugging Face's would compute other numbers with the same tensors."""
    options = routing.get(prefix.removesuffix("."))
    if options is None:
        return
    computes = FORMATS.get(layout, Computes())
    what = _wrong_gate(options, computes, layout) or _wrong_option(options, computes)
    if what is not None:
        raise CheckpointError(
            f"the gate of {prefix.removesuffix('.') or '(root)'} has {what}: a Hugging Face {layout} layer would "
            "compute other numbers from the same tensors"
        )
    activation = options.get("activation")
    if activation is not None and activation not in computes.activations:
        raise CheckpointError(
            f"the experts of {prefix.removesuffix('.') or '(root)'} have the activation {activation}, but those of "
            f"Hugging Face's {layout} have {' or '.join(computes.activations)}"
        )


def _wrong_gate(options: Mapping[str, Any], computes: Computes, layout: str) -> str | None:
    if options.get("gate") not in computes.gates:
        return f"{options.get('gate')}, expected one of {', '.join(computes.gates)}"
    if computes.always_normalizes and not options.get("normalize", True):
        return f"normalize=False, but {layout} divides the weights by their sum"
    return None


def _wrong_option(options: Mapping[str, Any], computes: Computes) -> str | None:
    expected: dict[str, Any] = {"capacity_factor": None}
    if not computes.has_scale_and_groups:
        expected |= {"scale": 1, "num_groups": 1, "topk_groups": 1}
    elif options.get("topk_groups") != options.get("num_groups"):
        expected["group_best"] = GROUP_BEST
    for name, value in expected.items():
        if options.get(name, value) != value:
            return f"{name}={options[name]}, expected {value}"
    return None


def needed_config(routing: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What config.json has to say for the layers of a checkpoint."""
    config: dict[str, Any] = {}
    for options in routing.values():
        of_sigmoid = (*OF_CONFIG, ("n_group", "num_groups", ""), ("topk_group", "topk_groups", ""))
        keys = of_sigmoid if options.get("gate") == "SigmoidGate" else OF_CONFIG[:2]
        config |= {key: options[name] for key, name, _ in keys if name in options}
        if options.get("activation") in ("geglu", "geglu_tanh"):
            config["hidden_act"] = HIDDEN_ACT[options["activation"]]
    return config


def routing_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says that the MoE layers of its model compute, as routing_of(); {} for other model types."""
    said = _said(config)
    kind = said.get("model_type")
    if kind not in (*NORMALIZES, *FORMATS):
        return {}
    computes = FORMATS.get(kind, Computes())
    options = {option: said[key] for key, option, _ in OF_CONFIG if said.get(key) is not None}
    if computes.always_normalizes:
        options["normalize"] = True
    if computes.has_scale_and_groups:
        groups = ("num_groups", said.get("n_group")), ("topk_groups", said.get("topk_group"))
        options |= {"group_best": GROUP_BEST, **{name: value for name, value in groups if value is not None}}
    return {"gate": computes.gates[-1], **options, "activation": _activation_of_config(said)}


def _said(config: Mapping[str, Any]) -> dict[str, Any]:
    inner = config.get("text_config", config)
    said = dict(inner) if isinstance(inner, Mapping) else {}
    said.setdefault("norm_topk_prob", NORMALIZES.get(str(said.get("model_type"))))
    return said


def _activation_of_config(said: Mapping[str, Any]) -> str:
    if said.get("model_type") == "gpt_oss":
        return CLAMPED
    ours = {theirs: name for name, theirs in HIDDEN_ACT.items()}
    return ours.get(said.get("hidden_act", "silu"), str(said.get("hidden_act")))


def check_config(config: Mapping[str, Any], layers: Iterable[tuple[str, FMoE]]) -> None:
    """CheckpointError where a model's gates or experts compute other numbers than config.json says."""
    said = _said(config)
    activation = routing_of_config(config).get("activation")
    for name, layer in layers:
        options = routing_of(layer)
        if activation is not None and options.get("activation", activation) != activation:
            raise CheckpointError(
                f"the experts of {name or '(root)'} have the activation {options['activation']}, but by config.json of "
                f"the model they have {activation}: the outputs would differ. Build the layer with that activation, or "
                "change config.json"
            )
        for key, option, argument in OF_CONFIG:
            if said.get(key) is not None and option in options and options[option] != said[key]:
                raise CheckpointError(
                    f"the gate of {name or '(root)'} has {argument}={options[option]}, but config.json of the model "
                    f"says {key}={said[key]}: the outputs would differ. Build the gate with "
                    f"functools.partial({options['gate']}, {argument}={said[key]}), or change config.json"
                    if option != "top_k"
                    else f"layer {name or '(root)'} has top_k={options[option]}, but config.json of the model says "
                    f"{key}={said[key]}: the outputs would differ. Build the layer with top_k={said[key]}, or change "
                    "config.json"
                )
