"""Fill the experts of a new layer with copies or slices of the dense MLP, or with random values of its scale.

Copies (Komatsuzaki et al. 2022, "Sparse Upcycling: Training Mixture-of-Experts from Dense Checkpoints"): each expert is
the MLP, and its second matrix is divided by the sum of a token's weights, so that the layer gives the MLP's output.

Slices (He et al. 2024, "Upcycling Large Language Models into Mixture of Experts", "virtual groups"): with split = 2 the
experts 0, 2, 4, ... have the first half of the hidden units, 1, 3, 5, ... the second, with the second matrix twice as
large. The gate starts with equal scores for the experts 0 and 1, 2 and 3, ...: a token chooses both or neither, gets
both halves with one weight, and the layer gives the MLP's output again, at half the units for each choice.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fmoe_ext.gates import NaiveGate, ScoredGate
from fmoe_ext.transformer import FMoETransformerMLP


def check(layer: FMoETransformerMLP, dense: Any, split: int) -> None:
    """Raise ValueError unless the layer, filled from dense without noise, will give the output of dense."""
    _total_weight(layer.gate)  # raises for gates whose weights have no constant sum
    if layer.latent is not None:
        raise ValueError(
            'init="upcycle" copies the dense MLP into experts of its width, but latent_size= makes them narrower: '
            'leave latent_size out, or take init="random"'
        )
    if split == 1:  # copies: any choice of experts gives the same
        return
    for name, value in (("the number of experts of all ranks", layer.num_experts), ("top_k", layer.top_k)):
        if value % split != 0:
            raise ValueError(f"{name} must be a multiple of split={split}, but is {value}")
    if dense.d_hidden % split != 0:
        raise ValueError(f"split must divide the {dense.d_hidden} hidden units, but is {split}")
    gate = layer.gate
    if not isinstance(gate, ScoredGate) and type(gate) is not NaiveGate:
        raise ValueError(
            f"split={split} needs a gate that chooses by its scores alone: NaiveGate, SoftmaxGate, SigmoidGate or "
            f"UniformGate, but got {type(gate).__name__}"
        )
    # experts that are chosen together must be in one of the gate's groups
    num_groups = getattr(gate, "num_groups", 1)
    if layer.num_experts // num_groups % split != 0:
        raise ValueError(
            f"split={split} must divide the {layer.num_experts // num_groups} experts of each of the gate's "
            f"num_groups={num_groups} groups"
        )


def _total_weight(gate: nn.Module) -> float:
    """Return the sum of a token's topk_weights; ValueError for gates where it is not the same for every token.

    A gate of the user's declares it by an attribute total_weight.
    """
    declared = getattr(gate, "total_weight", None)
    if declared is not None:
        return declared
    why = gate.weights_vary if hasattr(gate, "weights_vary") else "it is no fmoe_ext.BaseGate"
    if why is None:
        return gate.weight_sum
    raise ValueError(
        'init="upcycle" needs a gate whose weights have the same sum for every token, so that the first output is the '
        f"dense model's, but {type(gate).__name__} has not: {why}"
    )


@torch.no_grad()
def fill_from_dense(
    layer: FMoETransformerMLP, dense: Any, first: int, split: int, noise: float, seed: int
) -> None:
    """Give every expert of this rank its part of the dense MLP; first: the number of the first one among all experts.

    Expert e gets part e % split of the hidden units, and a second matrix that is `split` times as large: K choices that
    hold every part equally often then sum to the dense output. The experts g split ... g split + split - 1 have all
    parts once and begin with equal scores. A gate breaks ties by number, so that it chooses all of them together.
    Training tells them apart. Shared experts begin with zero results.
    """
    if layer.shared_experts is not None:  # adds nothing at first
        layer.shared_experts.begin_with_zero()
    size = dense.d_hidden // split
    scale = split / _total_weight(layer.gate)
    w1, b1, w2, b2 = layer.experts.weights
    for i in range(layer.num_local_experts):
        part = slice((first + i) % split * size, ((first + i) % split + 1) * size)
        w1[i].copy_(torch.cat([w[part] for w in dense.w1_parts]))
        w2[i].copy_(dense.w2[:, part] * scale)  # a token gets a split-th of the units from each choice
        if dense.b1 is not None:
            b1[i].copy_(torch.cat([b[part] for b in dense.b1.split(dense.d_hidden)]))
        elif b1 is not None:
            b1[i].zero_()
        if dense.b2 is not None:
            b2[i].copy_(dense.b2 * (scale / split))  # whole in each expert: the weights' sum counts it once
        elif b2 is not None:
            b2[i].zero_()
        if noise:
            generator = _generator(w1, seed, first + i)  # of the expert, whatever rank holds it
            for w in (w1[i], w2[i]):
                w.add_(torch.empty_like(w).normal_(0, noise * w.float().std().item(), generator=generator))
    if split > 1:
        _tie(layer.gate.gate.weight, split)
        if layer.gate.gate.bias is not None:
            _tie(layer.gate.gate.bias, split)


def _tie(scores: Tensor, split: int) -> None:
    """Give each group of `split` neighbours along the first dimension the values of its first."""
    scores.copy_(scores[::split].repeat_interleave(split, 0))


@torch.no_grad()
def fill_randomly(layer: FMoETransformerMLP, dense: Any, first: int, seed: int) -> None:
    """Draw every expert's weights from N(0, s^2), s as in the dense MLP's weights; biases are 0.

    For an unreadable MLP s = 1 / sqrt(3 * inputs), as in nn.Linear. The draw depends on seed and the expert's number
    among all ranks; first is the number of the first one here.
    """
    w1, b1, w2, b2 = layer.experts.weights
    # w [experts, out, in]
    default = [1 / math.sqrt(3 * w.shape[2]) for w in (w1, w2)]
    stds = default if dense.w1 is None else [_std(*dense.w1_parts), _std(dense.w2)]
    for i in range(layer.num_local_experts):
        generator = _generator(w1, seed, first + i)
        for w, std in zip((w1, w2), stds, strict=True):
            w[i].normal_(0, std, generator=generator)
    for b in (b1, b2):
        if b is not None:
            b.zero_()


def _std(*parts: Tensor) -> float:
    return math.sqrt(sum(w.float().var(correction=0).item() for w in parts) / len(parts))


# the numbers follow from the seed and an expert's number, not from the ranks
def _generator(like: Tensor, seed: int, number: int) -> torch.Generator:
    return torch.Generator(like.device).manual_seed(seed + number)
