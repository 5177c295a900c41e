"""State dicts of Hugging Face models, their MoE layers in any layout of families/, and the same in ours.

All other tensors pass through under their names.
"""

import re
from collections.abc import Container, Iterable, Mapping
from typing import Any, TypeAlias

from torch import nn

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.families import LAYOUTS
from fmoe_ext.checkpoint.families.family import UP_DOWN, Layout
from fmoe_ext.checkpoint.layouts import (
    BLOCKS,
    GATE_NAMES,
    LATENT,
    PER_EXPERT,
    PLACES,
    STACKED,
    UNGATED,
    W1,
    W2,
    find_layer,
    to_layout,
)
from fmoe_ext.checkpoint.model_folder import ModelFolder
from fmoe_ext.checkpoint.model_state import ModelState
from fmoe_ext.checkpoint.routing import check_writable, routing_of
from fmoe_ext.checkpoint.safetensors_file import StoredTensor, as_given, as_stored, read_safetensors

_StateDict: TypeAlias = Mapping[str, Any]  # values are tensors or StoredTensors

_BLOCK = re.compile(rf"(^|\.)({'|'.join(BLOCKS)})\.$")
_EXPERTS = re.compile(
    rf"(?:.*\.)?(?:experts\.\d+\.(?:{'|'.join(re.escape(leaf) for leaves in PER_EXPERT for leaf in leaves)})"
    rf"|experts\.\d+\.(?:{'|'.join(map(re.escape, UP_DOWN))})"
    rf"|{'|'.join(re.escape(first) for first, _ in (*STACKED, *UNGATED))})"
)
_OURS = re.compile(r"((?:.*\.)?)experts\.htoh4\.weight")  # not of shared_experts.mlp


def from_huggingface(state_dict: _StateDict, names: Container[str] = ()) -> dict[str, Any]:
    """Convert a state dict in any of the Hugging Face layouts -> the same in ours; values are tensors or StoredTensors.

    Of several layers each may have its own layout. A layer called block_sparse_moe becomes mlp, unless names, those of
    the model's tensors, have it under its own name.
    Raises CheckpointError where experts are missing or shapes do not fit.

    Example:

        >>> mlp = fmoe_ext.FMoETransformerMLP(num_experts=2, d_model=8, d_hidden=16, activation="swiglu",
        ...     gate="softmax", bias=False, gate_bias=False)
        >>> theirs = fmoe_ext.checkpoint.to_huggingface(mlp, "mixtral")
        >>> mlp.load_state_dict(from_huggingface(theirs))
        <All keys matched successfully>
    """
    tensors, lazy = as_stored(state_dict)
    out: dict[str, StoredTensor] = {}
    used: set[str] = set()
    for key in tensors:
        found = None
        for gate in GATE_NAMES:  # a layer is where its gate is
            prefix = key.removesuffix(f"{gate}.weight")
            if prefix != key and (not prefix or prefix.endswith(".")):
                found = find_layer(tensors, prefix, gate)
                if found:
                    break
        if not found:
            out[key] = tensors[key]
            continue
        layer, names_used = found
        w1, w2 = layer[W1], layer[W2]
        num_experts, rows, width = w1.shape
        narrow, shape = layer.get(LATENT[0]), layer["gate.gate.weight"].shape
        expected = (num_experts, width) if narrow is None else (num_experts, narrow.shape[1])
        fits = len(w2.shape) == 3 and w2.shape[:2] == (num_experts, width)
        fits = fits and rows in (w2.shape[2], 2 * w2.shape[2])
        if shape != expected or not fits or (narrow is not None and narrow.shape[0] != width):
            raise CheckpointError(
                f"{key} {list(shape)}, gate and up {list(w1.shape)} and down {list(w2.shape)} of experts do "
                "not fit: expected [E, D], [E, 2H, D] and [E, D, H]"
            )
        if place := PLACES.get(gate):
            prefix = f"{prefix}{place}."
        elif f"{prefix}{W1}" not in names:
            prefix = _renamed(prefix, "mlp")
        out |= {prefix + name: tensor for name, tensor in layer.items()}
        used |= names_used
    return as_given({key: tensor for key, tensor in out.items() if key not in used}, lazy)


def to_huggingface(
    state_dict: nn.Module | _StateDict,
    layout: str | Layout = "fused",
    routing: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Convert a model or a state dict in our layout -> the same in a Hugging Face layout, one of LAYOUTS.

    routing: {layer: what its gate computes}, as Manifest.routing has it; taken from a model. A bare state dict does
    not say what its gates compute, so that nothing can be checked.
    Raises CheckpointError for what the layout has no place for (biases that are not zero, shared experts), and for
    gates that compute something else than a layer of that format.

    Example:

        >>> mlp = fmoe_ext.FMoETransformerMLP(num_experts=2, d_model=8, d_hidden=16, activation="swiglu",
        ...     gate="softmax", bias=False, gate_bias=False)
        >>> tensors = to_huggingface(mlp, "mixtral")
        >>> tensors["experts.0.w1.weight"].shape
        torch.Size([16, 8])
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
    matches = (_OURS.fullmatch(key) for key in tensors)
    layers: dict[str, dict[str, StoredTensor]] = {match[1]: {} for match in matches if match}
    out: dict[str, StoredTensor] = {}
    for key, tensor in tensors.items():
        parts = ((p, (f"{p}experts.", f"{p}gate.", f"{p}shared_experts.", f"{p}latent.")) for p in layers)
        prefix = next((p for p, begins in parts if key.startswith(begins)), None)
        if prefix is None:
            out[key] = tensor
        else:
            layers[prefix][key.removeprefix(prefix)] = tensor
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
        renamed = prefix.removesuffix(f"{into.place}.") if into.place else _renamed(prefix, into.block)
        out |= {renamed + name: tensor for name, tensor in converted.items()}
    return as_given(out, lazy)


def read_model(folder: ModelFolder, names: Container[str] = ()) -> tuple[dict[str, StoredTensor], bool]:
    """Return ({name: StoredTensor} in our layout, whether it was in one of Hugging Face's) of all files together."""
    tensors: dict[str, StoredTensor] = {}
    for found in folder.without_replaced({file: read_safetensors(file)[0] for file in folder.paths}).values():
        tensors |= found
    if not is_huggingface(tensors):
        return tensors, False
    return from_huggingface(tensors, names), True


def is_huggingface(names: Iterable[str]) -> bool:
    """True if tensors of these names have an MoE layer in a Hugging Face layout."""
    return any(_EXPERTS.fullmatch(name) for name in names)


def _renamed(prefix: str, block: str) -> str:
    """Rename the prefix of a layer that is called as in one of the layouts."""
    return _BLOCK.sub(rf"\g<1>{block}.", prefix)
