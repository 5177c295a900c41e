"""MoE layers of Hugging Face models in three layouts, and the same in ours.

    "fused"      gate.weight, experts.gate_up_proj [E, 2H, D], experts.down_proj [E, D, H]: modules of Transformers 5
    "qwen3_moe"  gate.weight, experts.<e>.{gate,up,down}_proj.weight: files of Qwen, OLMoE, DeepSeek, GLM, ...
    "mixtral"    the same as w1 (gate), w3 (up), w2 (down), the layer is called block_sparse_moe: files of Mixtral
    ours         gate.gate.weight, experts.htoh4.weight [E, 2H, D], experts.h4toh.weight [E, D, H]:
                 FMoETransformerMLP(activation="swiglu", bias=False, gate_bias=False)

All other tensors pass through under their names.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.files import inside, read_json
from fmoe_ext.checkpoint.model_state import ModelState
from fmoe_ext.checkpoint.routing import check_writable, routing_of
from fmoe_ext.checkpoint.safetensors_file import StoredTensor, read_safetensors

StateDict: TypeAlias = "Mapping[str, torch.Tensor | StoredTensor]"

LAYOUTS = ("fused", "qwen3_moe", "mixtral")
PER_EXPERT = (  # gate, up, down
    ("qwen3_moe", ("gate_proj.weight", "up_proj.weight", "down_proj.weight")),
    ("mixtral", ("w1.weight", "w3.weight", "w2.weight")),
)
OURS = re.compile(r"((?:.*\.)?)experts\.htoh4\.weight")


def from_huggingface(state_dict: StateDict) -> dict[str, Any]:
    """A state dict in any of the Hugging Face layouts -> the same in ours; values are tensors or StoredTensors.

    Of several layers each may have its own layout. A layer called block_sparse_moe becomes mlp.
    Raises CheckpointError where experts are missing or shapes do not fit.
    """
    tensors, lazy = _lazily(state_dict)
    gates = {
        key: key.removesuffix("gate.weight") for key in tensors if re.fullmatch(r"(.*\.)?gate\.weight", key)
    }
    layers = {key: found for key, prefix in gates.items() if (found := _experts_of(tensors, prefix))}
    used = {name for _, _, names in layers.values() for name in names}
    out = {}
    for key, tensor in tensors.items():
        if key in layers:
            w1, w2, _ = layers[key]
            num_experts, rows, d_model = w1.shape
            if tensor.shape != (num_experts, d_model) or w2.shape != (num_experts, d_model, rows // 2):
                raise CheckpointError(
                    f"{key} {list(tensor.shape)}, gate and up {list(w1.shape)} and down {list(w2.shape)} of experts do "
                    "not fit: expected [E, D], [E, 2H, D] and [E, D, H]"
                )
            layer = _renamed(gates[key], "block_sparse_moe", "mlp")
            out[f"{layer}gate.gate.weight"] = tensor
            out[f"{layer}experts.htoh4.weight"] = w1
            out[f"{layer}experts.h4toh.weight"] = w2
        elif key not in used:
            out[key] = tensor
    return _returned(out, lazy)


def to_huggingface(
    state_dict: "nn.Module | StateDict",
    layout: str = "fused",
    routing: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """A model or a state dict in our layout -> the same in a Hugging Face layout: "fused", "qwen3_moe" or "mixtral".

    routing: {layer: what its gate computes}, as Manifest.routing has it; taken from a model. A bare state dict does
    not say what its gates compute, so that nothing can be checked.
    Raises CheckpointError for biases that are not zero, since these models have none, and for gates that compute
    something else: another scale than 1, groups, a capacity, other scores than softmax.
    """
    if isinstance(state_dict, nn.Module):
        state = ModelState(state_dict)
        routing = {name: routing_of(layer) for name, layer in state.layers.items()}
        if any(state.local_rows(name) is not None for name in state.tensors):
            raise CheckpointError("this rank has a part of the experts only: use export_safetensors() first")
        tensors, lazy = _lazily(state.tensors)[0], False
    else:
        tensors, lazy = _lazily(state_dict)
    if layout not in LAYOUTS:
        raise CheckpointError(f"layout must be one of {', '.join(LAYOUTS)}, but got {layout!r}")
    prefixes = {match[1] for key in tensors if (match := OURS.fullmatch(key))}
    if not prefixes:
        raise CheckpointError("there is no FMoETransformerMLP (experts.htoh4.weight) to convert")
    out: dict[str, StoredTensor] = {}
    for key, tensor in tensors.items():
        prefix = next((p for p in prefixes if key.startswith((f"{p}experts.", f"{p}gate."))), None)
        if prefix is None:
            out[key] = tensor
            continue
        name = key.removeprefix(prefix)
        if name in ("experts.htoh4.bias", "experts.h4toh.bias", "gate.gate.bias"):
            if tensor.read().any():
                raise CheckpointError(
                    f"{key} is not zero, but Hugging Face's experts and gates have no bias: build the layer with "
                    "bias=False, gate_bias=False"
                )
            continue
        layer = _renamed(prefix, "mlp", "block_sparse_moe") if layout == "mixtral" else prefix
        if name == "gate.gate.weight":
            out[f"{layer}gate.weight"] = tensor
        elif name in ("experts.htoh4.weight", "experts.h4toh.weight"):
            if name == "experts.htoh4.weight":
                _check_swiglu(prefix, tensor, tensors.get(f"{prefix}experts.h4toh.weight"))
                check_writable(routing or {}, prefix, layout)
            out |= _split(layer, name, tensor, layout)
        else:
            raise CheckpointError(f"{key} has no place in a Hugging Face layer")
    return _returned(out, lazy)


def model_files(path: Path) -> list[Path]:
    """The safetensors files of a model: path itself, or those of a Hugging Face folder; [] if it is neither."""
    if path.suffix == ".safetensors":
        return [path]
    index = path / "model.safetensors.index.json"
    if index.exists():
        names = read_json(inside(path, index.name)).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise CheckpointError(f"{index} is damaged: it has no weight_map")
        return sorted({inside(path, name) for name in names.values()})
    return [inside(path, "model.safetensors")] if (path / "model.safetensors").exists() else []


def model_config(path: Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder; {} for anything else."""
    return read_json(inside(path, "config.json")) if (path / "config.json").exists() else {}


def read_model(files: Iterable[Path]) -> tuple[dict[str, StoredTensor], bool]:
    """({name: StoredTensor} in our layout, whether it was in one of Hugging Face's) of all files together."""
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        tensors |= read_safetensors(file)[0]
    if not _is_huggingface(tensors):
        return tensors, False
    return from_huggingface(tensors), True


def _is_huggingface(names: Iterable[str]) -> bool:
    """Whether tensors of these names have an MoE layer in a Hugging Face layout."""
    leaves = tuple(f".{leaf}" for _, leaves in PER_EXPERT for leaf in leaves)
    return any(
        re.search(r"(^|\.)experts\.(gate_up_proj|\d+\..*)$", name)
        and name.endswith((".gate_up_proj", *leaves))
        for name in names
    )


def _experts_of(
    tensors: Mapping[str, StoredTensor], prefix: str
) -> tuple[StoredTensor, StoredTensor, tuple[str, ...]] | None:
    """(w1 [E, 2H, D], w2 [E, D, H], names used) of a layer; None if it has no experts."""
    fused = f"{prefix}experts.gate_up_proj", f"{prefix}experts.down_proj"
    if all(name in tensors for name in fused):
        return tensors[fused[0]], tensors[fused[1]], fused
    for _, leaves in PER_EXPERT:
        names = re.compile(rf"{re.escape(prefix)}experts\.(\d+)\.({'|'.join(map(re.escape, leaves))})")
        found = {(int(m[1]), m[2]): key for key in tensors if (m := names.fullmatch(key))}
        if not found:
            continue
        num_experts = 1 + max(e for e, _ in found)
        missing = [
            f"{prefix}experts.{e}.{leaf}"
            for e in range(num_experts)
            for leaf in leaves
            if (e, leaf) not in found
        ]
        if missing:
            raise CheckpointError(f"missing: {', '.join(missing)}")
        gate, up, down = ([tensors[found[e, leaf]] for e in range(num_experts)] for leaf in leaves)
        return _joined(prefix, gate, up), _joined(prefix, down), tuple(found.values())
    return None


def _joined(prefix: str, *columns: list[StoredTensor]) -> StoredTensor:
    """One tensor [E, sum of rows, *] of lists of E tensors [rows, *]."""
    for column in columns:
        if any(t.shape != column[0].shape or t.dtype != column[0].dtype for t in column):
            raise CheckpointError(
                f"the experts of {prefix} differ in shape: {[list(t.shape) for t in column]}"
            )
    num_rows = sum(column[0].shape[0] for column in columns)
    shape = (len(columns[0]), num_rows, *columns[0][0].shape[1:])

    def rows(first: int, end: int) -> torch.Tensor:
        experts = zip(*(column[first:end] for column in columns), strict=True)
        return torch.stack([torch.cat([t.read() for t in parts]) for parts in experts])

    return StoredTensor(shape, columns[0][0].dtype, lambda: rows(0, shape[0]), rows)


def _split(layer: str, name: str, tensor: StoredTensor, layout: str) -> dict[str, StoredTensor]:
    if layout == "fused":
        return {f"{layer}experts.{'gate_up_proj' if name == 'experts.htoh4.weight' else 'down_proj'}": tensor}
    gate, up, down = dict(PER_EXPERT)[layout]
    num_experts, num_rows, width = tensor.shape
    parts = [(gate, 0, num_rows // 2), (up, num_rows // 2, num_rows)]
    if name == "experts.h4toh.weight":
        parts = [(down, 0, num_rows)]
    return {
        f"{layer}experts.{e}.{leaf}": _part(tensor, e, first, end)
        for e in range(num_experts)
        for leaf, first, end in parts
    }


def _part(tensor: StoredTensor, e: int, first: int, end: int) -> StoredTensor:
    return StoredTensor(
        (end - first, tensor.shape[2]), tensor.dtype, lambda: tensor.rows(e, e + 1)[0, first:end]
    )


def _check_swiglu(prefix: str, w1: StoredTensor, w2: StoredTensor | None) -> None:
    if w2 is None or len(w1.shape) != 3 or w1.shape[1] != 2 * w2.shape[2]:
        second = None if w2 is None else list(w2.shape)
        raise CheckpointError(
            f"{prefix}experts: htoh4.weight {list(w1.shape)} and h4toh.weight {second} are no SwiGLU experts: "
            "expected [E, 2H, D] and [E, D, H]"
        )


def _renamed(prefix: str, old: str, new: str) -> str:
    return re.sub(rf"(^|\.){old}\.$", rf"\g<1>{new}.", prefix)


def _lazily(state_dict: StateDict) -> tuple[dict[str, StoredTensor], bool]:
    """({name: StoredTensor}, whether they were so already)."""
    lazy = any(isinstance(value, StoredTensor) for value in state_dict.values())
    return {name: StoredTensor.of(value) for name, value in state_dict.items()}, lazy


def _returned(tensors: dict[str, StoredTensor], lazy: bool) -> dict[str, Any]:
    return tensors if lazy else {key: tensor.read().clone() for key, tensor in tensors.items()}
