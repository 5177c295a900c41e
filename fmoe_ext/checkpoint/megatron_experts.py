"""MoE layers under Megatron-core's own names, and the same in ours.

    ours        gate.gate.weight [E, D], experts.htoh4.weight [E, H1, D], experts.h4toh.weight [E, D, H], biases
    Megatron    router.weight [E, D], .bias, .expert_bias, .qb_beta, shared_experts.linear_fc{1,2}.*, .gate_weight,
                fc1_latent_proj.*, fc2_latent_proj.*, and one of
    "modules"   experts.local_experts.<e>.linear_fc{1,2}.{weight,bias}: SequentialMLP
    "te"        experts.linear_fc{1,2}.{weight,bias}<e>: TEGroupedMLP
    "stacked"   experts.experts.linear_fc{1,2}.{weight,bias} [E, *]: its checkpoints (torch_dist), of both
    "grouped"   experts.weight1 [D, E * H1], weight2 [E * H, D], which it reads as [E, D, H1] and [E, H, D]: GroupedMLP

Gated experts have gate before up in both. Tensors of one rank without tensor parallelism, or of a whole checkpoint.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.layouts import (
    EXPERT_BIAS,
    PENDING_LOAD,
    SHARED,
    SHARED_GATE,
    W1,
    W2,
    by_rows,
    joined,
    zeros,
)
from fmoe_ext.checkpoint.safetensors_file import StoredTensor, as_stored

LAYOUTS = ("modules", "te", "stacked", "grouped")
_ONE_EXPERT = MappingProxyType({"modules": "experts.local_experts.{e}.{leaf}", "te": "experts.{leaf}{e}"})
LEAVES = ("linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight", "linear_fc2.bias")
OURS = ("htoh4.weight", "htoh4.bias", "h4toh.weight", "h4toh.bias")
_AS_THEY_ARE = MappingProxyType(
    {
        "router.weight": "gate.gate.weight",
        "router.bias": "gate.gate.bias",
        "router.expert_bias": EXPERT_BIAS,
        "router.qb_beta": "gate.quantile_bias",
        "shared_experts.gate_weight": SHARED_GATE,
        "fc1_latent_proj.weight": "latent.narrow.weight",
        "fc1_latent_proj.bias": "latent.narrow.bias",
        "fc2_latent_proj.weight": "latent.widen.weight",
        "fc2_latent_proj.bias": "latent.widen.bias",
    }
)
ROUTER = re.compile(r"(?P<layer>(?:.*\.)?)router\.weight")
LAYER = re.compile(r"(?P<layer>(?:.*\.)?)experts\.htoh4\.weight")


def from_megatron_core(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a state dict with MoE layers under Megatron-core's names -> the same with ours; others keep their names.

    Values are tensors or StoredTensors; extra states, which are no weights, are left out. Raises CheckpointError where
    experts are missing or do not fit the router.

    Example:

        >>> mlp = fmoe_ext.FMoETransformerMLP(num_experts=2, d_model=8, d_hidden=16, gate="softmax",
        ...     bias=False, gate_bias=False)
        >>> theirs = fmoe_ext.checkpoint.to_megatron_core(mlp.state_dict())
        >>> theirs["experts.local_experts.1.linear_fc1.weight"].shape
        torch.Size([16, 8])
        >>> mlp.load_state_dict(from_megatron_core(theirs))
        <All keys matched successfully>
    """
    tensors, lazy = as_stored(_weights(state_dict))
    out: dict[str, StoredTensor] = {}
    used: set[str] = set()
    for key in tensors:
        match = ROUTER.fullmatch(key)
        if match is None:
            out[key] = tensors[key]
            continue
        prefix = match["layer"]
        inside = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        layer, taken = _layer_of_ours(prefix, inside)
        out |= {prefix + name: tensor for name, tensor in layer.items()}
        used |= {prefix + name for name in taken}
    out = {key: tensor for key, tensor in out.items() if key not in used}
    return out if lazy else {key: tensor.read().clone() for key, tensor in out.items()}


def to_megatron_core(state_dict: Mapping[str, Any], layout: str = "modules") -> dict[str, Any]:
    """Converts a state dict with MoE layers of ours -> the same under Megatron-core's names, one of LAYOUTS.

    A layer that stands in for Megatron's MLP, mlp.moe.*, becomes mlp.*. Extra states are left out.

    Raises CheckpointError for "grouped" with biases, which GroupedMLP has not, and for gates with more than a linear
    map and a bias for the selection.
    """
    if layout not in LAYOUTS:
        raise CheckpointError(f"layout must be one of {', '.join(LAYOUTS)}, but got {layout!r}")
    tensors, lazy = as_stored(_weights(state_dict))
    prefixes = {m["layer"] for key in tensors if (m := LAYER.fullmatch(key))}
    if not prefixes:
        raise CheckpointError("there is no FMoETransformerMLP (experts.htoh4.weight) to convert")
    out: dict[str, StoredTensor] = {}
    for key, tensor in tensors.items():
        own = ("gate.", "experts.", "shared_experts.mlp.", "shared_experts.gate.", "latent.")
        prefix = next((p for p in prefixes if key.startswith(tuple(p + part for part in own))), None)
        if prefix is None:
            out[key] = tensor
        elif key == prefix + W1:  # the layer, once
            layer = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            to = re.sub(r"(^|\.)moe\.$", r"\g<1>", prefix)
            converted = _layer_of_megatron(
                prefix, {n: t for n, t in layer.items() if n.startswith(own)}, layout
            )
            out |= {to + name: value for name, value in converted.items()}
    return out if lazy else {key: tensor.read().clone() for key, tensor in out.items()}


def _weights(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state_dict.items() if not key.endswith("_extra_state")}


def _layer_of_ours(
    prefix: str, layer: Mapping[str, StoredTensor]
) -> tuple[dict[str, StoredTensor], set[str]]:
    """({name in our layer: tensor}, names of Megatron's that it took)."""
    out = {ours: layer[theirs] for theirs, ours in _AS_THEY_ARE.items() if theirs in layer}
    taken = {theirs for theirs in _AS_THEY_ARE if theirs in layer} | {"router.local_tokens_per_expert"}
    num_experts = layer["router.weight"].shape[0]
    if EXPERT_BIAS in out:
        out[PENDING_LOAD] = zeros((num_experts,), torch.int64)
    for leaf, ours in zip(LEAVES, OURS, strict=True):
        found = _experts(prefix, layer, leaf, num_experts, taken)
        if found is not None:
            out["experts." + ours] = found
        if f"shared_experts.{leaf}" in layer:
            out[SHARED + ours] = joined(prefix, [layer[f"shared_experts.{leaf}"]])
            taken.add(f"shared_experts.{leaf}")
    if W1 not in out or W2 not in out:
        raise CheckpointError(
            f"{prefix or '(root) '}has a router, but no experts of Megatron-core that are known"
        )
    for name in (W1, W2):
        if out[name].shape[0] != num_experts:
            raise CheckpointError(
                f"{prefix}router is for {num_experts} experts, but there are {out[name].shape[0]}"
            )
    return out, taken


def _experts(
    prefix: str, layer: Mapping[str, StoredTensor], leaf: str, num_experts: int, taken: set[str]
) -> StoredTensor | None:
    """Makes one tensor of all experts [E, *], from whichever layout has it."""
    stacked = f"experts.experts.{leaf}"
    if stacked in layer:
        taken.add(stacked)
        return layer[stacked]
    for pattern in _ONE_EXPERT.values():
        names = [pattern.format(e=e, leaf=leaf) for e in range(num_experts)]
        missing = [name for name in names if name not in layer]
        if len(missing) < num_experts:
            if missing:
                raise CheckpointError(f"missing: {', '.join(prefix + name for name in missing)}")
            taken |= set(names)
            return joined(prefix, [layer[name] for name in names])
    flat = {"linear_fc1.weight": "experts.weight1", "linear_fc2.weight": "experts.weight2"}.get(leaf)
    if flat is None or flat not in layer:
        return None
    taken.add(flat)
    narrow = layer.get("fc1_latent_proj.weight")
    d_model = layer["router.weight"].shape[1] if narrow is None else narrow.shape[0]
    # GroupedMLP has the shapes [D, E * H] and [E * H, D] for memory that is [E, D, H] and [E, H, D], for x @ W
    tensor = layer[flat]
    width = tensor.shape[0] * tensor.shape[1] // (num_experts * d_model)
    shape = (num_experts, d_model, width) if leaf == LEAVES[0] else (num_experts, width, d_model)
    return StoredTensor(
        (shape[0], shape[2], shape[1]), tensor.dtype, lambda: tensor.read().reshape(shape).transpose(1, 2)
    )


def _layer_of_megatron(prefix: str, layer: dict[str, StoredTensor], layout: str) -> dict[str, StoredTensor]:
    left = {name: tensor for name, tensor in layer.items() if name != PENDING_LOAD}
    out = {theirs: left.pop(ours) for theirs, ours in _AS_THEY_ARE.items() if ours in left}
    for leaf, ours in zip(LEAVES, OURS, strict=True):
        if SHARED + ours in left:
            tensor = left.pop(SHARED + ours)
            out[f"shared_experts.{leaf}"] = _row(tensor, 0)
        if "experts." + ours in left:
            out |= _as_experts(prefix, left.pop("experts." + ours), leaf, layout)
    if left:
        raise CheckpointError(
            f"{', '.join(prefix + name for name in sorted(left))} has no place in a layer of Megatron-core"
        )
    return out


def _as_experts(prefix: str, tensor: StoredTensor, leaf: str, layout: str) -> dict[str, StoredTensor]:
    if layout == "stacked":
        return {f"experts.experts.{leaf}": tensor}
    if layout != "grouped":
        pattern = _ONE_EXPERT[layout]
        return {pattern.format(e=e, leaf=leaf): _row(tensor, e) for e in range(tensor.shape[0])}
    if leaf.endswith("bias"):
        raise CheckpointError(
            f"{prefix}experts have biases, which GroupedMLP has not: layout='modules' has them"
        )
    num_experts, num_rows, width = tensor.shape
    is_first = leaf == LEAVES[0]
    shape = (width, num_experts * num_rows) if is_first else (num_experts * width, num_rows)
    turned = by_rows(tensor, (num_experts, width, num_rows), lambda w: w.transpose(1, 2))
    name = "experts.weight1" if is_first else "experts.weight2"
    return {name: StoredTensor(shape, tensor.dtype, lambda: turned.read().reshape(shape))}


def _row(tensor: StoredTensor, e: int) -> StoredTensor:
    return StoredTensor(tensor.shape[1:], tensor.dtype, lambda: tensor.rows(e, e + 1)[0])
