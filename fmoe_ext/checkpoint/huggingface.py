"""Convert MoE layers between our names and shapes and those of Hugging Face's models, in state dicts of whole models.

ours     gate.gate.weight [E, D], experts.htoh4.weight [E, 2H, D], experts.h4toh.weight [E, D, H]:
         FMoETransformerMLP with a gated activation, bias=False, gate_bias=False (GPT-OSS: with biases); ungated
         experts have htoh4 [E, H, D]
theirs   a Layout of families/; "fused" is what most modules of Transformers have: gate.weight,
         experts.gate_up_proj [E, 2H, D], experts.down_proj [E, D, H]

A state dict does not say which layout it has, so find_layer() looks for the names of all layouts, and tells those that
share names apart by their shapes. _to_layout() is the way back. Both make StoredTensors: weights are read when
a result is read; asked for some rows, it reads those experts only. All other tensors of a model pass through under
their names.

load(), `fmoe checkpoint`, import_model() and export() use from_huggingface() and to_huggingface().

E experts, D width of the model, H width of an expert. "In turn" are rows gate, up, gate, up, ... (GPT-OSS).
"""

import re
from collections.abc import Container, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.families import (
    BLOCKS,
    GATE_NAMES,
    LAYOUTS,
    PER_EXPERT,
    PLACES,
    SHARED_NAMES,
    STACKED,
    UNGATED,
    names_of,
)
from fmoe_ext.checkpoint.families.family import PROJECTIONS, UP_DOWN, Layout
from fmoe_ext.checkpoint.model_folder import ModelFolder
from fmoe_ext.checkpoint.model_state import (
    B1,
    B2,
    EXPERT_BIAS,
    GATE_SCALES,
    LATENT,
    PENDING_LOAD,
    SHARED,
    SHARED_GATE,
    TABLE,
    W1,
    W2,
    ModelState,
)
from fmoe_ext.checkpoint.routing import check_writable, routing_of
from fmoe_ext.checkpoint.safetensors_file import (
    StoredTensor,
    as_given,
    as_stored,
    by_rows,
    joined,
    read_safetensors,
    zeros,
)

_Tensors: TypeAlias = Mapping[str, StoredTensor]
_StateDict: TypeAlias = Mapping[str, Any]  # values are tensors or StoredTensors

_BLOCK = re.compile(rf"(^|\.)({'|'.join(BLOCKS)})\.$")
_EXPERTS = re.compile(
    rf"(?:.*\.)?(?:experts\.\d+\.(?:{'|'.join(re.escape(leaf) for leaves in PER_EXPERT for leaf in leaves)})"
    rf"|experts\.\d+\.(?:{'|'.join(map(re.escape, UP_DOWN))})"
    rf"|{'|'.join(re.escape(first) for first, _ in (*STACKED, *UNGATED))})"
)
_ONE_LINEAR = "the layer with gate='softmax', or another gate whose router is one linear layer"
_OURS = re.compile(r"((?:.*\.)?)experts\.htoh4\.weight")  # not of shared_experts.mlp


def find_layer(tensors: _Tensors, prefix: str, gate: str) -> tuple[dict[str, StoredTensor], set[str]] | None:
    """Find the layer at a prefix, in whatever layout -> ({name in our layer: tensor}, names used).

    None if there is no layer. gate: name of its gate in the layout. Raises CheckpointError if experts are missing or
    differ.
    """
    layer: dict[str, StoredTensor] = {}
    used: set[str] = set()  # the caller refuses, or passes on, what is not in it

    def get(name: str) -> StoredTensor | None:
        tensor = tensors.get(prefix + name)
        if tensor is not None:
            used.add(prefix + name)
        return tensor

    def take(ours: str, theirs: str) -> None:
        if (tensor := get(theirs)) is not None:
            layer[ours] = tensor

    def get_pair(first: str, second: str) -> tuple[StoredTensor, StoredTensor] | None:
        w1, w2 = tensors.get(prefix + first), tensors.get(prefix + second)
        if w1 is None or w2 is None:
            return None
        used.update((prefix + first, prefix + second))
        return w1, w2

    def stacked(first: str, second: str) -> bool:
        if (pair := get_pair(first, second)) is None:
            return False
        w1, w2 = pair
        # Two layouts share these names. Weights stored for x @ W have shapes [E, D, 2H] and [E, H, D]; for [E, 2H, D]
        # and [E, D, H] this compares D with 2D
        is_turned = len(w1.shape) == len(w2.shape) == 3 and w1.shape[2] == 2 * w2.shape[1]
        biases = get_pair(f"{first}_bias", f"{second}_bias")
        for name, other in ((first, second), (second, first)):
            if biases is None and f"{prefix}{name}_bias" in tensors:
                raise CheckpointError(f"{prefix}{name}_bias is there, but {prefix}{other}_bias is missing")
        if biases is not None:  # GPT-OSS
            if not is_turned:
                raise CheckpointError(
                    f"{prefix}{first} {list(w1.shape)} and {second} {list(w2.shape)} beside biases must be "
                    "[E, D, 2H] and [E, H, D], as those of GPT-OSS"
                )
            b1, b2 = biases
            w1 = by_rows(w1, _transposed(w1), lambda w: _one_after_the_other(w.transpose(1, 2)))
            w2 = by_rows(w2, _transposed(w2), lambda w: w.transpose(1, 2))
            layer.update({B1: by_rows(b1, b1.shape, _one_after_the_other), B2: b2})
        elif is_turned:
            w1, w2 = (by_rows(w, _transposed(w), lambda part: part.transpose(1, 2)) for w in (w1, w2))
        layer.update({W1: w1, W2: w2})
        return True

    def numbered(leaves: tuple[str, ...]) -> bool:
        pattern = re.compile(rf"{re.escape(prefix)}experts\.(\d+)\.({'|'.join(map(re.escape, leaves))})")
        found = {(int(m[1]), m[2]): key for key in tensors if (m := pattern.fullmatch(key))}
        if not any(leaf == leaves[0] for _, leaf in found):
            return False
        num_experts = 1 + max(e for e, _ in found)
        wanted = [(e, leaf) for e in range(num_experts) for leaf in leaves]
        missing = [f"{prefix}experts.{e}.{leaf}" for e, leaf in wanted if (e, leaf) not in found]
        if missing:
            raise CheckpointError(
                f"{prefix}experts: {len(missing)} tensors are missing, the first is {missing[0]}"
            )
        *first, down = ([tensors[found[e, leaf]] for e in range(num_experts)] for leaf in leaves)
        layer.update({W1: joined(prefix, *first), W2: joined(prefix, down)})
        used.update(found.values())
        return True

    def ungated(up: str, down: str) -> bool:
        if (pair := get_pair(up, down)) is None:
            return False
        layer.update(zip((W1, W2), pair, strict=True))
        return True

    # The experts. Those without a gate come last: up and down of gated experts have these names too
    if not (
        any(stacked(*names) for names in STACKED)
        or any(numbered(leaves) for leaves in PER_EXPERT)
        or any(ungated(*names) for names in UNGATED)
        or numbered(UP_DOWN)
    ):
        return None
    # The gate, and what some layouts have besides
    take("gate.gate.weight", f"{gate}.weight")
    take("gate.gate.bias", f"{gate}.bias")
    for name in names_of("table"):
        take(TABLE, name)
    for name in names_of("expert_bias"):
        bias = get(name)
        if bias is not None:
            # [1, E] in some layouts; their files have no count of choices since the bias moved last
            layer[EXPERT_BIAS] = by_rows(bias, bias.shape[-1:], torch.Tensor.flatten)
            layer[PENDING_LOAD] = zeros(bias.shape[-1:], torch.int64)
    for name in names_of("shared"):
        for leaves in SHARED_NAMES:
            *first, down = (tensors.get(prefix + name + leaf) for leaf in leaves)
            if down is None or None in first:
                continue
            used.update(prefix + name + leaf for leaf in leaves)
            columns = ([tensor] for tensor in first if tensor is not None)
            layer[SHARED + "htoh4.weight"] = joined(prefix, *columns)
            layer[SHARED + "h4toh.weight"] = joined(prefix, [down])
            break
    for name in names_of("shared_gate"):
        take(SHARED_GATE, name)
    for names in names_of("latent"):
        for ours, name in zip(LATENT, names, strict=True):
            take(ours, f"{name}.weight")
    for names in names_of("gate_scales"):
        for ours, name in zip(GATE_SCALES, names, strict=True):
            take(ours, name)
    return layer, used


def _to_layout(prefix: str, layer: _Tensors, layout: Layout) -> dict[str, StoredTensor]:
    """Convert a layer of ours, {name in the layer: tensor}, to {name: tensor} of a layout.

    prefix: where the layer is, for errors. Raises CheckpointError for tensors that the layout has no place for.
    """
    # Each step takes its tensors out of `left`; what remains in the end has no place
    left = {name: tensor for name, tensor in layer.items() if name != PENDING_LOAD}
    w1, w2 = left.pop(W1), left.pop(W2, None)
    if w2 is None or len(w1.shape) != 3 or w1.shape[1] != (2 if layout.gated else 1) * w2.shape[2]:
        kind, rows = ("SwiGLU experts", "2H") if layout.gated else ("experts without a gate", "H")
        raise CheckpointError(
            f"{prefix}experts: htoh4.weight {list(w1.shape)} and h4toh.weight "
            f"{None if w2 is None else list(w2.shape)} are no {kind}: expected [E, {rows}, D] and [E, D, H]"
        )
    # Gates of other kinds (NoisyGate) have other tensors than the router of a layout
    needed = ("gate.gate.weight", *(GATE_SCALES if layout.gate_scales else ()))
    if missing := [name for name in needed if name not in left]:
        found = ", ".join(sorted(name for name in left if name.startswith("gate."))) or "nothing"
        raise CheckpointError(
            f"{prefix}gate has {found}, but the router of this Hugging Face layout needs {', '.join(missing)}: build "
            + ("the layer with gate='normed'" if layout.gate_scales else _ONE_LINEAR)
        )
    # Gate and experts: interleaved with biases, one tensor for each expert, or stacks
    num_experts = w1.shape[0]
    out = {f"{layout.gate}.weight": left.pop("gate.gate.weight")}
    if layout.interleaved:  # GPT-OSS, whose gate and experts have biases in any case
        gate_bias = left.pop("gate.gate.bias", None) or zeros((num_experts,), w1.dtype)
        b1 = left.pop(B1, None) or zeros(w1.shape[:2], w1.dtype)
        b2 = left.pop(B2, None) or zeros((num_experts, w1.shape[2]), w1.dtype)
        out |= {
            f"{layout.gate}.bias": gate_bias,
            "experts.gate_up_proj": by_rows(w1, _transposed(w1), lambda w: _in_turn(w).transpose(1, 2)),
            "experts.gate_up_proj_bias": by_rows(b1, b1.shape, _in_turn),
            "experts.down_proj": by_rows(w2, _transposed(w2), lambda w: w.transpose(1, 2)),
            "experts.down_proj_bias": b2,
        }
    elif layout.per_expert is not None:
        for e in range(num_experts):
            out |= _one_expert(f"experts.{e}.", layout.per_expert, w1, w2, e)
    else:
        if layout.transposed:
            w1, w2 = (by_rows(w, _transposed(w), lambda part: part.transpose(1, 2)) for w in (w1, w2))
        out |= zip(layout.experts, (w1, w2), strict=True)
    # What some layouts have besides
    if layout.latent and LATENT[0] in left:
        out |= {f"{name}.weight": left.pop(ours) for name, ours in zip(layout.latent, LATENT, strict=True)}
    if layout.gate_scales:
        out |= {name: left.pop(ours) for name, ours in zip(layout.gate_scales, GATE_SCALES, strict=True)}
    if layout.table and TABLE in left:
        out[layout.table] = left.pop(TABLE)
    elif layout.expert_bias:
        bias = left.pop(EXPERT_BIAS, None) or zeros((num_experts,), torch.float32)
        shape = (1, *bias.shape) if layout.bias_is_row else bias.shape
        out[layout.expert_bias] = by_rows(bias, shape, lambda b: b.view(shape))
    # our SigmoidGate always has the bias: one of zeros chooses as none does
    elif layout.no_bias and EXPERT_BIAS in left and not left[EXPERT_BIAS].read().any():
        del left[EXPERT_BIAS]
    # Shared experts: [1, 2H, D] -> three matrices, or two where gate and up are one or there is no gate
    if layout.shared and SHARED + "htoh4.weight" in left:
        w1, w2 = left.pop(SHARED + "htoh4.weight"), left.pop(SHARED + "h4toh.weight")
        if len(layout.shared_names) == 3:
            out |= _one_expert(layout.shared, PROJECTIONS, w1, w2, 0)
        else:
            whole = zip(layout.shared_names, (w1, w2), strict=True)
            out |= {layout.shared + leaf: _part(w, 0, 0, w.shape[1]) for leaf, w in whole}
        if layout.shared_gate and SHARED_GATE in left:
            out[layout.shared_gate] = left.pop(SHARED_GATE)
    if layout.shared_gate and layout.shared_gate not in out:
        raise CheckpointError(
            f"{prefix or '(root) '}has no gated shared experts, which every layer of this format has: build it with "
            "shared_expert_hidden=..., shared_expert_gate=True"
        )
    # A bias of zeros adds nothing and may be dropped; anything else that is left is an error
    for name, tensor in left.items():
        if name.startswith(SHARED) or name == SHARED_GATE:
            if not name.endswith(".bias") or tensor.read().any():
                raise CheckpointError(
                    f"{prefix}{name} has no place in this format: it has no such shared experts"
                )
        elif name.startswith("latent."):
            raise CheckpointError(
                f"{prefix}latent has projections around the experts: this Hugging Face layout has no place for them"
            )
        elif name not in ("gate.gate.bias", B1, B2):
            raise CheckpointError(f"{prefix}{name} has no place in a Hugging Face layer")
        elif tensor.read().any():
            raise CheckpointError(
                f"{prefix}{name} is not zero, but Hugging Face's experts and gates have no bias: build the layer with "
                "bias=False, gate_bias=False"
            )
    return out


def _one_expert(
    name: str, leaves: tuple[str, str, str], w1: StoredTensor, w2: StoredTensor, e: int
) -> dict[str, StoredTensor]:
    gate, up, down = leaves
    half, num_rows = w1.shape[1] // 2, w2.shape[1]
    parts = ((gate, w1, 0, half), (up, w1, half, 2 * half), (down, w2, 0, num_rows))
    return {name + leaf: _part(tensor, e, first, end) for leaf, tensor, first, end in parts}


def _part(tensor: StoredTensor, e: int, first: int, end: int) -> StoredTensor:
    return StoredTensor(
        (end - first, tensor.shape[2]), tensor.dtype, lambda: tensor.rows(e, e + 1)[0, first:end]
    )


def _in_turn(x: torch.Tensor) -> torch.Tensor:
    """Rearrange [E, 2H, *], gate before up -> gate and up in turn."""
    gate, up = x.chunk(2, dim=1)
    return torch.stack([gate, up], dim=2).flatten(1, 2)


def _one_after_the_other(x: torch.Tensor) -> torch.Tensor:
    """Rearrange [E, 2H, *], gate and up in turn -> gate before up."""
    return torch.cat([x[:, ::2], x[:, 1::2]], dim=1)


def _transposed(tensor: StoredTensor) -> tuple[int, ...]:
    num_experts, num_rows, width = tensor.shape
    return num_experts, width, num_rows


def from_huggingface(state_dict: _StateDict, names: Container[str] = ()) -> dict[str, Any]:
    """Convert a state dict in any of the Hugging Face layouts to ours; values are tensors or StoredTensors.

    Each layer may have its own layout. A layer that its layout calls otherwise (block_sparse_moe, mixer) becomes mlp,
    unless `names`, the names of the model's tensors, have it under that name.
    Raises CheckpointError if experts are missing or shapes do not fit.

    Example:

        >>> mlp = fmoe_ext.FMoETransformerMLP(num_experts=2, d_model=8, d_hidden=16, activation="swiglu",
        ...     gate="softmax", bias=False, gate_bias=False)
        >>> theirs = fmoe_ext.checkpoint.to_huggingface(mlp, "mixtral")
        >>> mlp.load_state_dict(from_huggingface(theirs))
        <All keys matched successfully>
    """
    tensors, lazy = as_stored(state_dict)
    out: dict[str, StoredTensor] = {}
    used: set[str] = set()  # names that are parts of a layer; all others are passed on
    for key in tensors:
        found = None
        for gate in GATE_NAMES:  # every layer has a gate: its name ends the layer's prefix
            prefix = key.removesuffix(f"{gate}.weight")
            if prefix != key and (not prefix or prefix.endswith(".")):
                found = find_layer(tensors, prefix, gate)
                if found:
                    break
        if not found:
            out[key] = tensors[key]
            continue
        # Gate and experts must fit each other, around projections to a narrower width if there are any
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
        # Where our layer is in the model
        if place := PLACES.get(gate):
            prefix = f"{prefix}{place}."
        elif f"{prefix}{W1}" not in names:  # the model may call the layer as its files do
            prefix = _renamed(prefix, "mlp")
        out |= {prefix + name: tensor for name, tensor in layer.items()}
        used |= names_used
    return as_given({key: tensor for key, tensor in out.items() if key not in used}, lazy)


def to_huggingface(
    state_dict: nn.Module | _StateDict,
    layout: str | Layout = "fused",
    routing: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Convert a model or a state dict in our layout to a Hugging Face layout.

    layout: a name in LAYOUTS, or a Layout, for which gates are not checked.
    routing: {layer: what its gate computes}, as in Manifest.routing; a model brings its own. Without it gates are not
    checked, because a bare state dict does not say what they compute.
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
    # Sort the tensors by layer: {prefix: {name in the layer: tensor}}
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
    # Convert each, under the layer's name in the layout
    for prefix, layer in layers.items():
        converted = _to_layout(prefix, layer, into)
        if isinstance(layout, str):
            check_writable(routing or {}, prefix, layout)
        renamed = prefix.removesuffix(f"{into.place}.") if into.place else _renamed(prefix, into.block)
        out |= {renamed + name: tensor for name, tensor in converted.items()}
    return as_given(out, lazy)


def read_model(folder: ModelFolder, names: Container[str] = ()) -> tuple[dict[str, StoredTensor], bool]:
    """Read all files of a folder -> ({name: StoredTensor} in our layout, whether they were in another)."""
    tensors: dict[str, StoredTensor] = {}
    for found in folder.without_replaced({file: read_safetensors(file)[0] for file in folder.paths}).values():
        tensors |= found
    if not is_huggingface(tensors):
        return tensors, False
    return from_huggingface(tensors, names), True


def is_huggingface(names: Iterable[str]) -> bool:
    """True if one of these is the name of an expert's weight in a Hugging Face layout."""
    return any(_EXPERTS.fullmatch(name) for name in names)


def _renamed(prefix: str, block: str) -> str:
    """Replace the last part of a layer's prefix by `block`, if it is the layer's name in some layout."""
    return _BLOCK.sub(rf"\g<1>{block}.", prefix)
