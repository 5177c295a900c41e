"""Convert MoE layers between Megatron-core's names and ours, and read its checkpoint folders (torch_dist).

    ours        gate.gate.weight [E, D], experts.htoh4.weight [E, H1, D], experts.h4toh.weight [E, D, H], biases
    Megatron    router.weight [E, D], .bias, .expert_bias, .qb_beta, shared_experts.linear_fc{1,2}.*, .gate_weight,
                fc1_latent_proj.*, fc2_latent_proj.*, and one of
    "modules"   experts.local_experts.<e>.linear_fc{1,2}.{weight,bias}: SequentialMLP
    "te"        experts.linear_fc{1,2}.{weight,bias}<e>: TEGroupedMLP
    "stacked"   experts.experts.linear_fc{1,2}.{weight,bias} [E, *]: its checkpoints (torch_dist), of both
    "grouped"   experts.weight1 [D, E * H1], weight2 [E * H, D], which it reads as [E, D, H1] and [E, H, D]: GroupedMLP

from_megatron_core() and to_megatron_core() convert state dicts, `fmoe checkpoint` reads folders by read_torch_dist().
Gated experts have gate before up in both (H1 = 2H). Tensors are those of one rank without tensor parallelism, or of a
whole checkpoint. A folder of torch.distributed.checkpoint, Megatron's or another program's:

    latest_checkpointed_iteration.txt
    iter_0000010/.metadata, __<rank>_<n>.distcp       tensors, in any layout
    iter_0000010/common.pt                            everything else: not read

Layers that are all alike may be one tensor there, with the layers as first dimension and no number in its name.
"""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.files import inside, read_text
from fmoe_ext.checkpoint.model_state import (
    EXPERT_BIAS,
    MEGATRON_EXPERTS,
    PENDING_LOAD,
    SHARED,
    SHARED_GATE,
    W1,
    W2,
)
from fmoe_ext.checkpoint.safetensors_file import StoredTensor, as_given, as_stored, by_rows, joined, zeros
from fmoe_ext.checkpoint.store import stored_tensors
from fmoe_ext.checkpoint.torch_metadata import read_metadata

TRACKER = "latest_checkpointed_iteration.txt"
_MAX_LAYERS = 10**5  # of one tensor: each becomes an entry in memory, and a damaged file may say any number
_OF_ALL_LAYERS = re.compile(r"(?P<layers>(?:.*\.)?layers)\.(?P<rest>(?!\d+\.).+)")
_LAYOUTS = ("modules", "te", "stacked", "grouped")
_ONE_EXPERT = MappingProxyType({"modules": "experts.local_experts.{e}.{leaf}", "te": "experts.{leaf}{e}"})
# Megatron's leaf of experts: ours
_LEAVES = MappingProxyType(
    {
        "linear_fc1.weight": "htoh4.weight",
        "linear_fc1.bias": "htoh4.bias",
        "linear_fc2.weight": "h4toh.weight",
        "linear_fc2.bias": "h4toh.bias",
    }
)
_FLAT = MappingProxyType({"linear_fc1.weight": "experts.weight1", "linear_fc2.weight": "experts.weight2"})
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
_ROUTER = re.compile(r"(?P<layer>(?:.*\.)?)router\.weight")
_OURS = re.compile(r"(?P<layer>(?:.*\.)?)experts\.htoh4\.weight")


def from_megatron_core(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Convert MoE layers under Megatron-core's names in a state dict to ours; other tensors keep their names.

    Values are tensors or StoredTensors; extra states, which are no weights, are left out. Raises CheckpointError if
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
        match = _ROUTER.fullmatch(key)
        if match is None:
            out[key] = tensors[key]
            continue
        # A layer is where a router is: what it has without its prefix
        prefix = match["layer"]
        theirs = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        # Router, latent projections and the gate of shared experts are the same tensors in both
        taken = {name for name in _AS_THEY_ARE if name in theirs}
        layer = {_AS_THEY_ARE[name]: theirs[name] for name in _AS_THEY_ARE if name in taken}
        taken.add("router.local_tokens_per_expert")  # a count of training, which is dropped
        num_experts = theirs["router.weight"].shape[0]
        if EXPERT_BIAS in layer:
            layer[PENDING_LOAD] = zeros((num_experts,), torch.int64)
        for leaf, ours in _LEAVES.items():
            found = _experts(prefix, theirs, leaf, num_experts, taken)
            if found is not None:
                layer["experts." + ours] = found
            shared = theirs.get(f"shared_experts.{leaf}")
            if shared is not None:
                layer[SHARED + ours] = joined(prefix, [shared])
                taken.add(f"shared_experts.{leaf}")
        # Every router needs experts, as many as it has rows
        if W1 not in layer or W2 not in layer:
            raise CheckpointError(
                f"{prefix or '(root) '}has a router, but no experts of Megatron-core that are known"
            )
        for name in (W1, W2):
            if layer[name].shape[0] != num_experts:
                raise CheckpointError(
                    f"{prefix}router is for {num_experts} experts, but there are {layer[name].shape[0]}"
                )
        out |= {prefix + name: tensor for name, tensor in layer.items()}
        used |= {prefix + name for name in taken}
    return as_given({key: tensor for key, tensor in out.items() if key not in used}, lazy)


def _experts(
    prefix: str, layer: Mapping[str, StoredTensor], leaf: str, num_experts: int, taken: set[str]
) -> StoredTensor | None:
    """Make one tensor of all experts [E, *] from whichever layout is there; None if none is.

    Adds the names of its parts to `taken`.
    """
    stacked = f"experts.experts.{leaf}"
    if stacked in layer:
        taken.add(stacked)
        return layer[stacked]
    for pattern in _ONE_EXPERT.values():
        names = [pattern.format(e=e, leaf=leaf) for e in range(num_experts)]
        missing = [name for name in names if name not in layer]
        if len(missing) < num_experts:  # this layout: at least one of its names is there
            if missing:
                raise CheckpointError(f"missing: {', '.join(prefix + name for name in missing)}")
            taken |= set(names)
            return joined(prefix, [layer[name] for name in names])
    # GroupedMLP has all experts side by side, and no biases
    flat = _FLAT.get(leaf)
    if flat is None or flat not in layer:
        return None
    taken.add(flat)
    narrow = layer.get("fc1_latent_proj.weight")
    d_model = layer["router.weight"].shape[1] if narrow is None else narrow.shape[0]
    # GroupedMLP has the shapes [D, E * H] and [E * H, D] for memory that is [E, D, H] and [E, H, D], for x @ W
    tensor = layer[flat]
    size = num_experts * d_model
    if len(tensor.shape) != 2 or not size or math.prod(tensor.shape) % size:
        raise CheckpointError(
            f"{prefix}{flat} {list(tensor.shape)} does not fit the router: {num_experts} experts of width {d_model}"
        )
    width = math.prod(tensor.shape) // size
    shape = (num_experts, d_model, width) if flat == "experts.weight1" else (num_experts, width, d_model)
    return StoredTensor(
        (shape[0], shape[2], shape[1]), tensor.dtype, lambda: tensor.read().reshape(shape).transpose(1, 2)
    )


def to_megatron_core(state_dict: Mapping[str, Any], layout: str = "modules") -> dict[str, Any]:
    """Convert MoE layers of ours in a state dict to Megatron-core's names, in a layout from above.

    A layer that stands in for Megatron's MLP, mlp.moe.*, becomes mlp.*. Extra states are left out.

    Raises CheckpointError for "grouped" with biases, which GroupedMLP lacks, and for gates with more than a linear
    map and a bias for the selection.

    >>> layer = fmoe_ext.FMoETransformerMLP(1, d_model=8, d_hidden=16, top_k=1, activation="swiglu", bias=False)
    >>> theirs = to_megatron_core(torch.nn.ModuleDict({"mlp": layer}).state_dict())
    >>> for name, tensor in theirs.items():
    ...     print(name, tuple(tensor.shape))
    mlp.router.weight (1, 8)
    mlp.router.bias (1,)
    mlp.experts.local_experts.0.linear_fc1.weight (32, 8)
    mlp.experts.local_experts.0.linear_fc2.weight (8, 16)
    """
    if layout not in _LAYOUTS:
        raise CheckpointError(f"layout must be one of {', '.join(_LAYOUTS)}, but got {layout!r}")
    tensors, lazy = as_stored(_weights(state_dict))
    prefixes = {m["layer"] for key in tensors if (m := _OURS.fullmatch(key))}
    if not prefixes:
        raise CheckpointError("there is no FMoETransformerMLP (experts.htoh4.weight) to convert")
    own = ("gate.", "experts.", "shared_experts.mlp.", "shared_experts.gate.", "latent.")
    out: dict[str, StoredTensor] = {}
    for key, tensor in tensors.items():
        prefix = next((p for p in prefixes if key.startswith(tuple(p + part for part in own))), None)
        if prefix is None:
            out[key] = tensor
        elif key == prefix + W1:  # the layer, once
            layer = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            # Each step takes its tensors out of `left`; what remains has no place there
            left = {n: t for n, t in layer.items() if n.startswith(own) and n != PENDING_LOAD}
            theirs = {name: left.pop(ours) for name, ours in _AS_THEY_ARE.items() if ours in left}
            for leaf, ours in _LEAVES.items():
                if SHARED + ours in left:
                    theirs[f"shared_experts.{leaf}"] = _row(left.pop(SHARED + ours), 0)
                if "experts." + ours in left:
                    theirs |= _as_experts(prefix, left.pop("experts." + ours), leaf, layout)
            if left:
                raise CheckpointError(
                    f"{', '.join(prefix + name for name in sorted(left))} has no place in a layer of Megatron-core"
                )
            to = re.sub(r"(^|\.)moe\.$", r"\g<1>", prefix)
            out |= {to + name: value for name, value in theirs.items()}
    return as_given(out, lazy)


def _weights(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state_dict.items() if not key.endswith("_extra_state")}


def _as_experts(prefix: str, tensor: StoredTensor, leaf: str, layout: str) -> dict[str, StoredTensor]:
    """Split one tensor of all experts [E, *] into the tensors of a layout."""
    if layout == "stacked":
        return {f"experts.experts.{leaf}": tensor}
    if layout != "grouped":
        pattern = _ONE_EXPERT[layout]
        return {pattern.format(e=e, leaf=leaf): _row(tensor, e) for e in range(tensor.shape[0])}
    if leaf not in _FLAT:
        raise CheckpointError(
            f"{prefix}experts have biases, which GroupedMLP has not: layout='modules' has them"
        )
    num_experts, num_rows, width = tensor.shape
    name = _FLAT[leaf]
    is_first = name == "experts.weight1"
    shape = (width, num_experts * num_rows) if is_first else (num_experts * width, num_rows)
    turned = by_rows(tensor, (num_experts, width, num_rows), lambda w: w.transpose(1, 2))
    return {name: StoredTensor(shape, tensor.dtype, lambda: turned.read().reshape(shape))}


def _row(tensor: StoredTensor, i: int) -> StoredTensor:
    """Return entry i of the first dimension; only that is read."""
    return StoredTensor(tensor.shape[1:], tensor.dtype, lambda: tensor.rows(i, i + 1)[0])


def expert_layers(names: Iterable[str]) -> set[str]:
    """Return the names of the layers that have experts under Megatron-core's own names."""
    return {match["layer"] or "" for name in names if (match := MEGATRON_EXPERTS.fullmatch(name))}


def iteration_folder(path: Path) -> Path:
    """Find the folder of one iteration: path itself, or the one that the tracker file in it names."""
    if not (path / TRACKER).exists():
        return path
    # a number or "release", so that nothing outside of the folder can be named
    text = read_text(inside(path, TRACKER))
    if not re.fullmatch(r"release|\d{1,18}", text, re.ASCII):
        raise CheckpointError(f"{path / TRACKER} must hold a number or 'release', but holds {text[:80]!r}")
    folder = inside(path, "release" if text == "release" else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise CheckpointError(f"{path / TRACKER} says {text}, but there is no {folder.name}")
    return folder


def is_torch_dist(path: Path) -> bool:
    """True if a path is a folder of torch.distributed.checkpoint, or a Megatron folder with one."""
    return path.is_dir() and (iteration_folder(path) / ".metadata").exists()


def read_torch_dist(path: Path) -> tuple[dict[str, StoredTensor], list[Path], int, list[str]]:
    """Read a folder of torch.distributed.checkpoint -> (the model's {name: StoredTensor}, files, iteration, left out).

    Left out are the optimizer's state, and what is no tensor: reading it would run code of the file.
    """
    folder = iteration_folder(path)
    saved, others = read_metadata(inside(folder, ".metadata"))
    left_out = [*others, *(key for key in saved if key.startswith("optimizer."))]
    tensors: dict[str, StoredTensor] = {}
    of_model = {key: tensor for key, tensor in saved.items() if not key.startswith("optimizer.")}
    for key, tensor in stored_tensors(folder, of_model).items():
        match = _OF_ALL_LAYERS.fullmatch(key)
        if match is None or not tensor.shape:
            tensors[key] = tensor
            continue
        # layers.mlp.* [L, *] -> layers.<i>.mlp.* [*]
        if tensor.shape[0] > _MAX_LAYERS:
            raise CheckpointError(
                f"{key} is of {tensor.shape[0]} layers; more than {_MAX_LAYERS} are not read"
            )
        for i in range(tensor.shape[0]):
            tensors[f"{match['layers']}.{i}.{match['rest']}"] = _row(tensor, i)
    files = sorted({inside(folder, chunk.file) for t in saved.values() for chunk in t.chunks})
    iteration = re.fullmatch(r"iter_(\d{7,})", folder.name)
    return tensors, files, int(iteration[1]) if iteration else 0, left_out
