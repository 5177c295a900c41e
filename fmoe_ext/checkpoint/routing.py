"""What a gate computes beside its weights: kept with a checkpoint, compared with Hugging Face's config.json.

Two models with the same tensors give different numbers if one divides the weights of the chosen experts by their sum
and the other does not; config.json says which for Hugging Face's, and nothing in a state dict does for ours.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.layers import FMoE

OPTIONS = ("top_k", "normalize", "scale", "num_groups", "topk_groups", "capacity_factor")
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
SOFTMAX = ("NaiveGate", "SoftmaxGate")  # what the layers of these models compute
PLAIN = MappingProxyType({"scale": 1, "num_groups": 1, "topk_groups": 1, "capacity_factor": None})


def routing_of(layer: FMoE) -> dict[str, Any]:
    """{"gate": its class, and those of OPTIONS that it has} of a layer."""
    gate: nn.Module = layer.gate
    options = {name: getattr(gate, name) for name in OPTIONS if hasattr(gate, name)}
    plain = {k: v for k, v in options.items() if v is None or isinstance(v, (bool, int, float))}
    return {"gate": type(gate).__name__, **plain}


def check_writable(routing: Mapping[str, Mapping[str, Any]], prefix: str, layout: str) -> None:
    """CheckpointError where a layer of Hugging Face's would compute other numbers with the same tensors."""
    options = routing.get(prefix.removesuffix("."))
    if options is None:
        return
    what = None
    if options.get("gate") not in SOFTMAX:
        what = f"{options.get('gate')}, expected one of {', '.join(SOFTMAX)}"
    elif layout == "mixtral" and not options.get("normalize", True):
        what = "normalize=False, but Mixtral divides the weights by their sum"
    for name, expected in PLAIN.items():
        if what is None and options.get(name, expected) != expected:
            what = f"{name}={options[name]}, expected {expected}"
    if what is not None:
        raise CheckpointError(
            f"the gate of {prefix.removesuffix('.') or '(root)'} has {what}: a Hugging Face {layout} layer would "
            "compute other numbers from the same tensors"
        )


def needed_config(routing: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What config.json has to say for the layers of a checkpoint."""
    config = {}
    for options in routing.values():
        for key, name, _ in OF_CONFIG[:2]:
            if name in options:
                config[key] = options[name]
    return config


def check_config(config: Mapping[str, Any], layers: Iterable[tuple[str, FMoE]]) -> None:
    """CheckpointError where a model's gates compute other numbers than config.json says."""
    inner = config.get("text_config", config)
    said = dict(inner) if isinstance(inner, Mapping) else {}
    said.setdefault("norm_topk_prob", NORMALIZES.get(str(said.get("model_type"))))
    for name, layer in layers:
        options = routing_of(layer)
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
