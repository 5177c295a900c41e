"""Name the arguments of expert_mlp, frozen_mlp and their backwards, in the order of csrc/ops.cpp (a test compares).

Fake kernels and the stand-ins of gpu/torch_path.py take one of these instead of 12 to 30 arguments. T tokens, K choices
of each, R = T * K rows in the experts' order, E experts, D and H the widths of a token and of an expert, F = H, or 2 H
for a gated activation. A comment stands where a name comes first.
"""

from typing import NamedTuple

from torch import Tensor


class ExpertMlp(NamedTuple):
    """expert_mlp."""

    x: Tensor  # [T, D]
    row_idx: Tensor  # [R] int32, as sort_tokens has it
    inverse: Tensor  # [T, K] int32
    offs: Tensor  # [E] int32
    w1: Tensor  # [E, F, D]
    b1: Tensor | None  # [E, F]
    w2: Tensor  # [E, D, H]
    b2: Tensor | None  # [E, D]
    topk_weights: Tensor | None  # [T, K]
    activation: int  # a place in activations.KINDS
    combine: bool  # sum each token's rows
    save_h: bool  # return h, for a backward


class ExpertMlpBackward(NamedTuple):
    """expert_mlp_backward and, without main gradients, expert_mlp_backward_inputs."""

    grad_y: Tensor  # [T, D], or [R, D] unless combine
    x: Tensor
    row_idx: Tensor
    inverse: Tensor
    offs: Tensor
    w1: Tensor
    w2: Tensor
    b2: Tensor | None
    topk_weights: Tensor | None
    h: Tensor  # [R, F], the pre-activation
    activation: int
    combine: bool
    needs: list[bool]  # dx, dw1, db1, dw2, db2, dtopk_weights
    main_dw1: Tensor | None = None  # to which dw1 is added instead of being returned
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
    dh: Tensor  # [R, F], the gradient of h
    scaled_a: Tensor  # [R, H], activated rows times their weights
    activation: int
    combine: bool
    needs: list[bool]  # of the whole backward, as above
    main_dw1: Tensor | None
    main_dw2: Tensor | None


class FrozenMlp(NamedTuple):
    """frozen_mlp."""

    x: Tensor
    row_idx: Tensor
    inverse: Tensor
    offs: Tensor
    w1: Tensor  # [E, F, D], or packed: the bytes of its rows
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None
    topk_weights: Tensor | None
    activation: int
    combine: bool
    save: bool  # h, for a backward
    w1_scale: Tensor | None  # this and the next three: Quantized.packing()
    w1_zero: Tensor | None
    w1_format: int  # 0: not packed
    w1_interleaved: bool
    w2_scale: Tensor | None
    w2_zero: Tensor | None
    w2_format: int
    lora_a1: Tensor | None  # [E, rank, D]
    lora_b1: Tensor | None  # [E, F, rank]
    lora_scale1: float
    lora_a2: Tensor | None  # [E, rank, H]
    lora_b2: Tensor | None  # [E, D, rank]
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
    u1: Tensor  # [R, rank]: lora_scale1 x lora_a1^T
    u2: Tensor  # [R, rank]: lora_scale2 a lora_a2^T, a the activated rows
    activation: int
    combine: bool
    needs: list[bool]  # dx, dlora_a1, dlora_b1, dlora_a2, dlora_b2, dtopk_weights
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
