"""Operators of one step of generation on the CPU without gradients, in fewer calls than the public ones.

A call of an operator whose gradient is registered from Python takes twice the time of one without. These operators have
no gradient and no fake kernel: is_wanted() says where they may be called, and all of them give the bits of what they
stand for, but for the order of sums in linear(), rms_norm() and attend().
"""

from collections.abc import Sequence

import torch
from torch.autograd.forward_ad import unpack_dual

from fmoe_ext.frozen.quantized import Quantized, gates_first
from fmoe_ext.ops.activations import activation_number
from fmoe_ext.ops.batch_invariant import is_batch_invariant


def is_wanted(x: torch.Tensor) -> bool:
    """True for a plain tensor on the CPU outside of gradients, tangents, autocast, torch.compile, batch_invariant()."""
    return (
        type(x) is torch.Tensor
        and x.device.type == "cpu"
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not is_batch_invariant()
        and unpack_dual(x).tangent is None
    )


def gemm(
    x: torch.Tensor, weight: Quantized, offs: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """frozen_gemm, its bias with gates before ups."""
    y: torch.Tensor = torch.ops.fmoe_ext._frozen_gemm(x, weight.rows(), offs, bias, *weight.packing())
    return y


def experts(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    w1: Quantized,
    b1: torch.Tensor | None,
    w2: Quantized,
    b2: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    """sort_tokens and frozen_mlp without adapters; choices outside of [0, E) are dropped.

    x [T, D], topk_idx [T, K] int64, topk_weights [T, K] -> [T, D].
    """
    if b1 is not None and w1.interleaved:
        b1 = gates_first(b1)
    scale1, zero1, *format1 = w1.packing()
    scale2, zero2, format2, _ = w2.packing()
    weights, packing = [w1.rows(), b1, w2.rows(), b2], [scale1, zero1, scale2, zero2]
    options = [activation_number(activation), 1, 0, *format1, format2]
    y: torch.Tensor = torch.ops.fmoe_ext._frozen_experts(x, topk_idx, topk_weights, weights, packing, options)
    return y


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """torch.nn.functional.linear of x [..., D] and weight [N, D] of one dtype."""
    y: torch.Tensor = torch.ops.fmoe_ext._few_rows_linear(x.reshape(-1, x.shape[-1]), weight)
    return y.view(*x.shape[:-1], weight.shape[0])


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * (x / sqrt(mean(x^2) + eps)) over the last dimension, in float32 and rounded before weight multiplies."""
    y: torch.Tensor = torch.ops.fmoe_ext._rms_norm(x, weight, eps)
    return y


def attention_inputs(
    x: torch.Tensor,
    weights: Sequence[Quantized],
    norms: Sequence[torch.Tensor | None],
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gemm() with the weights of queries, keys and values; the first two then through rms_norm() and rotate().

    x [B, D], weights [1, heads * width, D], norms: of the heads of queries and of keys, [width] or None each,
    cos and sin [B, 1, width] -> [B, heads, 1, width] each.
    """
    q, k, v = torch.ops.fmoe_ext._attention_inputs(x, *_lists(weights), norms, cos, sin, eps)
    return q, k, v


def _lists(
    weights: Sequence[Quantized],
) -> tuple[list[torch.Tensor], list[torch.Tensor | None], list[int]]:
    """Bytes, packing and formats of weights as operators take them."""
    packing: list[torch.Tensor | None] = []
    options: list[int] = []
    for weight in weights:
        scale, zero, *format = weight.packing()
        packing += scale, zero
        options += format
    return [w.rows() for w in weights], packing, options


class TokenAttention:
    """rms_norm(), attention_inputs(), attend(), gemm() of the results, and the residual, in one operator.

    weights: of queries, keys, values [1, heads * width, D] and of the output [1, D, heads * width].
    """

    def __init__(self, weights: Sequence[Quantized]) -> None:
        self._lists = _lists(weights)

    def __call__(
        self,
        x: torch.Tensor,
        norm: torch.Tensor,
        norms: Sequence[torch.Tensor | None],
        positions: tuple[torch.Tensor, torch.Tensor],
        cache: tuple[torch.Tensor, torch.Tensor],
        length: int,
        mask: torch.Tensor | None,
        constants: Sequence[float],
    ) -> torch.Tensor:
        """x [B, D] of one new token a sequence -> [B, D].

        norms, positions: as of attention_inputs(); mask: as of attend(). cache: keys and values [B, G, room, width],
        whose row `length` is written; constants: eps of norm and of norms, scale of attend().
        """
        y: torch.Tensor = torch.ops.fmoe_ext._token_attention(
            x, norm, *self._lists, norms, *positions, *cache, length, _added(mask), constants
        )
        return y


class TokenExperts:
    """rms_norm(), route(), experts() without biases, and the residual, in one operator."""

    def __init__(self, w1: Quantized, w2: Quantized, activation: str) -> None:
        (rows1, rows2), packing, (*format1, format2, _) = _lists((w1, w2))
        self._lists = (
            [rows1, None, rows2, None],
            packing,
            [activation_number(activation), 1, 0, *format1, format2],
        )

    def __call__(
        self, x: torch.Tensor, norm: torch.Tensor, eps: float, gate: torch.Tensor, top_k: int, normalize: bool
    ) -> torch.Tensor:
        """x [T, D], gate [E, D] -> [T, D]."""
        y: torch.Tensor = torch.ops.fmoe_ext._token_experts(
            x, norm, eps, gate, top_k, normalize, *self._lists
        )
        return y


def route(
    x: torch.Tensor, weight: torch.Tensor, top_k: int, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """linear(), then the top_k largest of its softmax: logits [T, E], weights [T, K], numbers of experts [T, K].

    x [T, D], weight [E, D]. normalize: the weights of a token are divided by their sum.
    """
    logits, weights, chosen = torch.ops.fmoe_ext._route(x, weight, top_k, normalize)
    return logits, weights, chosen


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions: x [B, H, 1, D] times cos [B, 1, D], plus its halves turned, (-x2, x1), times sin."""
    y: torch.Tensor = torch.ops.fmoe_ext._rotate(x, cos, sin)
    return y


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Softmax attention of one query a head, in float32.

    q [B, H, 1, D], k [B, G, S, D], v [B, G, S, V], not float64 -> [B, 1, H, V].
    Heads share keys and values in groups of H / G. mask [B, S]: False for keys to leave out, or floats that are added.
    """
    y: torch.Tensor = torch.ops.fmoe_ext._attend(q, k, v, _added(mask), scale)
    return y


def _added(mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask as floats that are added to scores."""
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf)
    return None if mask is None else mask.float().contiguous()
