"""Arguments of the operators that have many of them, named as in csrc/ops.cpp."""

from typing import NamedTuple

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
    """expert_mlp_backward and, without main gradients, expert_mlp_backward_inputs."""

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
    save: bool
    w1_scale: Tensor | None
    w1_zero: Tensor | None
    w1_format: int
    w1_interleaved: bool
    w2_scale: Tensor | None
    w2_zero: Tensor | None
    w2_format: int
    lora_a1: Tensor | None
    lora_b1: Tensor | None
    lora_scale1: float
    lora_a2: Tensor | None
    lora_b2: Tensor | None
    lora_scale2: float


class FrozenMlpBackward(NamedTuple):
    """frozen_mlp_backward."""

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
    u1: Tensor
    u2: Tensor
    activation: int
    combine: bool
    needs: list[bool]
    w1_scale: Tensor | None
    w1_zero: Tensor | None
    w1_format: int
    w1_interleaved: bool
    w2_scale: Tensor | None
    w2_zero: Tensor | None
    w2_format: int
    lora_a1: Tensor | None
    lora_b1: Tensor | None
    lora_scale1: float
    lora_a2: Tensor | None
    lora_b2: Tensor | None
    lora_scale2: float
