"""Turns the tensors of an MoE layer in a Hugging Face layout into ours, and back.

ours     gate.gate.weight [E, D], experts.htoh4.weight [E, 2H, D], experts.h4toh.weight [E, D, H]:
         FMoETransformerMLP with a gated activation, bias=False, gate_bias=False; without a gate htoh4 is [E, H, D]
theirs   families/: one file a family has its names and shapes; "fused" is gate.weight, experts.gate_up_proj [E, 2H, D],
         experts.down_proj [E, D, H], as modules of Transformers have them

A state dict does not say which layout it has, so find_layer() looks for the names of all of them, and the shapes tell
those apart that share names. Tensors are StoredTensors: nothing is read before the result is, an expert at a time.
"""

import re
from collections.abc import Callable, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.families import FAMILIES
from fmoe_ext.checkpoint.families.family import PROJECTIONS, UP_DOWN, Layout
from fmoe_ext.checkpoint.safetensors_file import StoredTensor

Tensors: TypeAlias = Mapping[str, StoredTensor]
W1, B1, W2, B2 = ("experts.htoh4.weight", "experts.htoh4.bias", "experts.h4toh.weight", "experts.h4toh.bias")
SHARED = "shared_experts.mlp."
SHARED_GATE = "shared_experts.gate.weight"
LATENT = ("latent.narrow.weight", "latent.widen.weight")
_GATE_SCALES = ("gate.input_scale", "gate.expert_scale")
EXPERT_BIAS = "gate.expert_bias"
TABLE = "gate.expert_of_id"
# Choices that SigmoidGate has not counted yet: of training, not of the model
PENDING_LOAD = "gate.pending_load"
# Every layout that is known, of files and of modules: a state dict does not say which it has.
_KNOWN = tuple(chain.from_iterable((family.files, family.in_modules) for family in FAMILIES.values()))
GATE_NAMES = tuple(sorted({layout.gate for layout in _KNOWN}))
# {gate: our layer in the decoder layer} of layouts whose tensors are a decoder layer's
PLACES = MappingProxyType({layout.gate: layout.place for layout in _KNOWN if layout.place})
BLOCKS = tuple(sorted({layout.block for layout in _KNOWN}))
STACKED = tuple(sorted({layout.experts for layout in _KNOWN if layout.gated}))
UNGATED = tuple(sorted({layout.experts for layout in _KNOWN if not layout.gated}))
PER_EXPERT = tuple(sorted({layout.per_expert for layout in _KNOWN if layout.per_expert}))
# Three weights first: two of them look like experts without a gate
_SHARED_NAMES = tuple(
    sorted({layout.shared_names for layout in _KNOWN}, key=lambda names: (-len(names), names))
)


def to_layout(prefix: str, layer: Tensors, layout: Layout) -> dict[str, StoredTensor]:
    """Convert a layer of ours, {name in the layer: tensor} -> {name: tensor} of a layout.

    prefix: where the layer is, for errors. CheckpointError for what the layout has no place for.
    """
    left = {name: tensor for name, tensor in layer.items() if name != PENDING_LOAD}  # what has no place yet
    w1, w2 = left.pop(W1), left.pop(W2, None)
    if w2 is None or len(w1.shape) != 3 or w1.shape[1] != (2 if layout.gated else 1) * w2.shape[2]:
        kind, rows = ("SwiGLU experts", "2H") if layout.gated else ("experts without a gate", "H")
        raise CheckpointError(
            f"{prefix}experts: htoh4.weight {list(w1.shape)} and h4toh.weight "
            f"{None if w2 is None else list(w2.shape)} are no {kind}: expected [E, {rows}, D] and [E, D, H]"
        )
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
    if layout.latent and LATENT[0] in left:
        out |= {f"{name}.weight": left.pop(ours) for name, ours in zip(layout.latent, LATENT, strict=True)}
    if layout.gate_scales:
        out |= {name: left.pop(ours) for name, ours in zip(layout.gate_scales, _GATE_SCALES, strict=True)}
    if layout.table and TABLE in left:
        out[layout.table] = left.pop(TABLE)
    elif layout.expert_bias:
        bias = left.pop(EXPERT_BIAS, None) or zeros((num_experts,), torch.float32)
        shape = (1, *bias.shape) if layout.bias_is_row else bias.shape
        out[layout.expert_bias] = by_rows(bias, shape, lambda b: b.view(shape))
    elif layout.no_bias and EXPERT_BIAS in left and not left[EXPERT_BIAS].read().any():
        del left[EXPERT_BIAS]
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
    # What is left may be dropped if it is a bias of zeros, which adds nothing
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


def by_rows(
    tensor: StoredTensor, shape: tuple[int, ...], function: Callable[[torch.Tensor], torch.Tensor]
) -> StoredTensor:
    """Apply a function that works on any rows of a tensor, so that one expert is read without the others."""
    return StoredTensor(
        shape,
        tensor.dtype,
        lambda: function(tensor.read()),
        lambda first, end: function(tensor.rows(first, end)),
    )


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> StoredTensor:
    """Make a tensor of zeros that takes no memory until it is read."""
    return StoredTensor(shape, dtype, lambda: torch.zeros(shape, dtype=dtype, device="cpu"))


def find_layer(tensors: Tensors, prefix: str, gate: str) -> tuple[dict[str, StoredTensor], set[str]] | None:
    """({name in our layer: tensor}, names used) of the layer at a prefix, in whatever layout; None if there is none.

    gate: its gate's name in the layout. Raises CheckpointError where experts are missing or differ.
    """
    layer: dict[str, StoredTensor] = {}
    used: set[str] = set()  # noted, so that nothing of the layer is left unseen

    def get(name: str) -> StoredTensor | None:
        tensor = tensors.get(prefix + name)
        if tensor is not None:
            used.add(prefix + name)
        return tensor

    def take(ours: str, theirs: str) -> None:
        if (tensor := get(theirs)) is not None:
            layer[ours] = tensor

    def stacked(first: str, second: str) -> bool:
        w1, w2 = get(first), get(second)
        if w1 is None or w2 is None:
            return False
        # [E, D, 2H] and [E, H, D], stored for x @ W; in [E, 2H, D] and [E, D, H] the last would be D == 2D
        is_turned = len(w1.shape) == len(w2.shape) == 3 and w1.shape[2] == 2 * w2.shape[1]
        b1, b2 = get(f"{first}_bias"), get(f"{second}_bias")
        if b1 is not None and b2 is not None:  # GPT-OSS
            if not is_turned:
                raise CheckpointError(
                    f"{prefix}experts: gate_up_proj {list(w1.shape)} and down_proj {list(w2.shape)} beside biases "
                    "must be [E, D, 2H] and [E, H, D], as those of GPT-OSS"
                )
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
            raise CheckpointError(f"missing: {', '.join(missing)}")
        *first, down = ([tensors[found[e, leaf]] for e in range(num_experts)] for leaf in leaves)
        layer.update({W1: joined(prefix, *first), W2: joined(prefix, down)})
        used.update(found.values())
        return True

    def ungated(up: str, down: str) -> bool:
        w1, w2 = get(up), get(down)
        if w1 is None or w2 is None:
            return False
        layer.update({W1: w1, W2: w2})
        return True

    # Experts without a gate come last: up and down of gated experts have these names too
    if not (
        any(stacked(*names) for names in STACKED)
        or any(numbered(leaves) for leaves in PER_EXPERT)
        or any(ungated(*names) for names in UNGATED)
        or numbered(UP_DOWN)
    ):
        return None
    take("gate.gate.weight", f"{gate}.weight")
    take("gate.gate.bias", f"{gate}.bias")
    for name in _names("table"):
        take(TABLE, name)
    for name in _names("expert_bias"):
        bias = get(name)
        if bias is not None:
            layer[EXPERT_BIAS] = by_rows(bias, bias.shape[-1:], torch.Tensor.flatten)
            layer[PENDING_LOAD] = zeros(bias.shape[-1:], torch.int64)
    for name in _names("shared"):
        for leaves in _SHARED_NAMES:
            *first, down = (tensors.get(prefix + name + leaf) for leaf in leaves)
            if down is None or None in first:
                continue
            used.update(prefix + name + leaf for leaf in leaves)
            columns = ([tensor] for tensor in first if tensor is not None)
            layer[SHARED + "htoh4.weight"] = joined(prefix, *columns)
            layer[SHARED + "h4toh.weight"] = joined(prefix, [down])
            break
    for name in _names("shared_gate"):
        take(SHARED_GATE, name)
    for names in _names("latent"):
        for ours, name in zip(LATENT, names, strict=True):
            take(ours, f"{name}.weight")
    for names in _names("gate_scales"):
        for ours, name in zip(_GATE_SCALES, names, strict=True):
            take(ours, name)
    return layer, used


def _names(field: str) -> list[Any]:
    """Return every value that a field has in a layout, "" and None aside."""
    return sorted({getattr(layout, field) for layout in _KNOWN} - {"", None})


def joined(prefix: str, *columns: list[StoredTensor]) -> StoredTensor:
    """Join lists of E tensors [rows, *] to one [E, sum of rows, *]; prefix: whose they are, for errors."""
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
