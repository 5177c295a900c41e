"""Arguments of the operators that have many of them, named as in csrc/ops.cpp."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor


class ExpertMlp(NamedTuple):
    """expert_mlp."""

    x: Tensor
    row_idx: Tensor
    inverse: Tensor
    offs: Tensor
    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None
    topk_weights: Tensor | None
    activation: int
    combine: bool
    save_h: bool


class ExpertMlpBackward(NamedTuple):
    """expert_mlp_backward, expert_mlp_backward_inputs and, with main gradients, expert_mlp_backward_accumulate."""

    grad_y: Tensor
    x: Tensor
    row_idx: Tensor
    inverse: Tensor
    offs: Tensor
    w1: Tensor
    w2: Tensor
    b2: Tensor | None
    topk_weights: Tensor | None
    h: Tensor
    activation: int
    combine: bool
    needs: list[bool]
    main_dw1: Tensor | None = None
    main_dw2: Tensor | None = None


class ExpertMlpBackwardWeights(NamedTuple):
    """expert_mlp_backward_weights."""

    grad_y: Tensor
    x: Tensor
    row_idx: Tensor
    inverse: Tensor
    offs: Tensor
    w1: Tensor
    w2: Tensor
    topk_weights: Tensor | None
    dh: Tensor
    scaled_a: Tensor
    activation: int
    combine: bool
    needs: list[bool]
    main_dw1: Tensor | None
    main_dw2: Tensor | None


class FrozenMlp(NamedTuple):
    """frozen_mlp."""

    x: Tensor
    routing: list[Tensor]
    weights: list[Tensor | None]
    packing: list[Tensor | None]
    lora_a1: Tensor | None
    lora_b1: Tensor | None
    lora_a2: Tensor | None
    lora_b2: Tensor | None
    lora_scales: list[float]
    topk_weights: Tensor | None
    options: list[int]


class FrozenMlpBackward(NamedTuple):
    """frozen_mlp_backward."""

    grad_y: Tensor
    x: Tensor
    routing: list[Tensor]
    weights: list[Tensor | None]
    packing: list[Tensor | None]
    lora_a1: Tensor | None
    lora_b1: Tensor | None
    lora_a2: Tensor | None
    lora_b2: Tensor | None
    lora_scales: list[float]
    topk_weights: Tensor | None
    kept: list[Tensor]
    options: list[int]
    needs: list[bool]


# Names of the entries of lists, as in csrc/ops.cpp.
ENTRIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "routing": ("row_idx", "inverse", "offs"),
        "weights": ("w1", "b1", "w2", "b2"),
        "packing": ("w1_scale", "w1_zero", "w2_scale", "w2_zero"),
        "lora_scales": ("scale1", "scale2"),
        "kept": ("h", "u1", "u2"),
        "options": ("activation", "combine", "save", "w1_format", "w1_interleaved", "w2_format"),
    }
)


def by_name(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operator, the entries of a list in the place of the list."""
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        found |= dict(zip(ENTRIES[name], value, strict=True)) if name in ENTRIES else {name: value}
    return found
