"""MoE layers of Hugging Face models, in any of the layouts of layouts.py, and the same in ours.

All other tensors pass through under their names.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.files import inside, read_json
from fmoe_ext.checkpoint.layouts import LAYOUTS, W1, W2, Layout, find_layer, to_layout
from fmoe_ext.checkpoint.model_state import ModelState
from fmoe_ext.checkpoint.routing import check_writable, routing_of
from fmoe_ext.checkpoint.safetensors_file import StoredTensor, as_stored, read_safetensors

StateDict: TypeAlias = "Mapping[str, Any]"  # values are tensors or StoredTensors

GATE = re.compile(r"(?P<layer>(?:.*\.)?)(?P<gate>gate|router)\.weight")
OURS = re.compile(r"((?:.*\.)?)experts\.htoh4\.weight")  # not of shared_experts.mlp


def from_huggingface(state_dict: StateDict) -> dict[str, Any]:
    """A state dict in any of the Hugging Face layouts -> the same in ours; values are tensors or StoredTensors.

    Of several layers each may have its own layout. A layer called block_sparse_moe becomes mlp.
    Raises CheckpointError where experts are missing or shapes do not fit.
    """
    tensors, lazy = as_stored(state_dict)
    out: dict[str, StoredTensor] = {}
    used: set[str] = set()
    for key in tensors:
        match = GATE.fullmatch(key)
        found = find_layer(tensors, match["layer"], match["gate"]) if match else None
        if match and found:
            _check_shapes(key, found[0])
            layer = _renamed(match["layer"], "block_sparse_moe", "mlp")
            out |= {layer + name: tensor for name, tensor in found[0].items()}
            used |= found[1]
        else:
            out[key] = tensors[key]
    return _returned({key: tensor for key, tensor in out.items() if key not in used}, lazy)


def _check_shapes(gate: str, layer: Mapping[str, StoredTensor]) -> None:
    w1, w2 = layer[W1], layer[W2]
    num_experts, rows, d_model = w1.shape
    shape = layer["gate.gate.weight"].shape
    if shape != (num_experts, d_model) or w2.shape != (num_experts, d_model, rows // 2):
        raise CheckpointError(
            f"{gate} {list(shape)}, gate and up {list(w1.shape)} and down {list(w2.shape)} of experts do "
            "not fit: expected [E, D], [E, 2H, D] and [E, D, H]"
        )


def to_huggingface(
    state_dict: "nn.Module | StateDict",
    layout: str | Layout = "fused",
    routing: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """A model or a state dict in our layout -> the same in a Hugging Face layout, one of LAYOUTS.

    routing: {layer: what its gate computes}, as Manifest.routing has it; taken from a model. A bare state dict does
    not say what its gates compute, so that nothing can be checked.
    Raises CheckpointError for what the layout has no place for (biases that are not zero, shared experts), and for
    gates that compute something else than a layer of that format.
    """
    if isinstance(state_dict, nn.Module):
        state = ModelState(state_dict)
        routing = {name: routing_of(layer) for name, layer in state.layers.items()}
        if any(state.local_rows(name) is not None for name in state.tensors):
            raise CheckpointError("this rank has a part of the experts only: use export_safetensors() first")
        tensors, lazy = as_stored(state.tensors)[0], False
    else:
        tensors, lazy = as_stored(state_dict)
    if isinstance(layout, str) and layout not in LAYOUTS:
        raise CheckpointError(f"layout must be one of {', '.join(LAYOUTS)}, but got {layout!r}")
    into = LAYOUTS[layout] if isinstance(layout, str) else layout
    layers, out = _by_layer(tensors)
    if not layers:
        adapters = ": merge the adapters first, by model.merge_and_unload()"
        raise CheckpointError(
            "there is no FMoETransformerMLP (experts.htoh4.weight) to convert"
            f"{adapters if any('.lora_' in name for name in tensors) else ''}"
        )
    for prefix, layer in layers.items():
        converted = to_layout(prefix, layer, into)
        if isinstance(layout, str):
            check_writable(routing or {}, prefix, layout)
        renamed = _renamed(prefix, "mlp", into.block)
        out |= {renamed + name: tensor for name, tensor in converted.items()}
    return _returned(out, lazy)


def _by_layer(
    tensors: Mapping[str, StoredTensor],
) -> tuple[dict[str, dict[str, StoredTensor]], dict[str, StoredTensor]]:
    """({prefix of an MoE layer: {name in it: tensor}}, the other tensors)."""
    names = (match for key in tensors if (match := OURS.fullmatch(key)))
    layers: dict[str, dict[str, StoredTensor]] = {match[1]: {} for match in names}
    others = {}
    for key, tensor in tensors.items():
        parts = ((p, (f"{p}experts.", f"{p}gate.", f"{p}shared_experts.")) for p in layers)
        prefix = next((p for p, begins in parts if key.startswith(begins)), None)
        if prefix is None:
            others[key] = tensor
        else:
            layers[prefix][key.removeprefix(prefix)] = tensor
    return layers, others


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
    if not is_huggingface(tensors):
        return tensors, False
    return from_huggingface(tensors), True


def is_huggingface(names: Iterable[str]) -> bool:
    """Whether tensors of these names have an MoE layer in a Hugging Face layout."""
    leaves = tuple(
        f".{leaf}" for layout in LAYOUTS.values() if layout.per_expert for leaf in layout.per_expert
    )
    return any(
        re.search(r"(^|\.)experts\.(gate_up_proj|\d+\..*)$", name)
        and name.endswith((".gate_up_proj", *leaves))
        for name in names
    )


def _renamed(prefix: str, old: str, new: str) -> str:
    return re.sub(rf"(^|\.){old}\.$", rf"\g<1>{new}.", prefix)


def _returned(tensors: dict[str, StoredTensor], lazy: bool) -> dict[str, Any]:
    return tensors if lazy else {key: tensor.read().clone() for key, tensor in tensors.items()}
