"""Limits to the choices that one expert takes."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from fmoe_ext import ops
from fmoe_ext.gates.base_gate import OneRank, Ranks
from fmoe_ext.ops.outside_graphs import is_exporting

_DROP_POLICIES = ("position", "token", "score")


def expert_capacity(factor: float, num_tokens: int, top_k: int, num_experts: int) -> int:
    """Compute how many choices each expert takes: ceil(factor * T * K / E), an even share times factor."""
    return ceil(factor * as_number(num_tokens) * top_k / num_experts)


def as_number(num_tokens: int) -> Any:
    """Return num_tokens, in torch.export as a tensor: a graph cannot save the ceil() of a number. The same bits."""
    return torch.full((), num_tokens, dtype=torch.float64, device="cpu") if is_exporting() else num_tokens


def ceil(x: Any) -> Any:
    """Round up a number, or a tensor of one."""
    return x.ceil().long() if isinstance(x, torch.Tensor) else math.ceil(x)


def check_factors(capacity: object) -> None:
    """Raise ValueError unless capacity is FastMoE's two positive factors, one for training and one for evaluation."""
    if not isinstance(capacity, Sequence) or len(capacity) != 2 or not min(capacity) > 0:
        raise ValueError(f"capacity must be two positive factors (training, evaluation), but got {capacity}")


def check_capacity(factor: float | None, policy: str) -> None:
    """Raise ValueError unless factor is positive, or None for no limit, and policy is one of _DROP_POLICIES."""
    if policy not in _DROP_POLICIES:
        raise ValueError(f"drop_policy must be one of {_DROP_POLICIES}, but got {policy!r}")
    if factor is not None and factor <= 0:
        raise ValueError(f"capacity_factor must be positive, or None for no limit, but got {factor}")


def fits_drop_choices(topk_idx: torch.Tensor, ranks: Ranks) -> bool:
    """Return whether ops.drop_choices is to drop and count at once: a graph fuses more, and a GPU has no kernel."""
    is_alone = type(ranks) is OneRank and topk_idx.device.type == "cpu"
    return is_alone and not torch.compiler.is_compiling()


def drop_over_capacity(
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    capacity: int,
    policy: str,
    ranks: Ranks,
) -> torch.Tensor:
    """Drop choices of experts that have more than `capacity` of them: topk_idx with -1 for these.

    policy "position": first choices go before second ones, then tokens in order (GShard, Switch Transformer);
    "token": the earlier token goes first, whichever of its choices it is (Megatron's "position", which however takes
    equals as torch.topk leaves them); "score": the larger weight goes first, ties as in "position" (V-MoE's batch
    prioritised routing, Megatron's "probs"). Each counts the choices of all ranks; "score" gathers them, T * K numbers
    of every rank.
    """
    if policy == "position":
        return ranks.apply_capacity(topk_idx, num_experts, capacity)
    if policy == "token":
        one_by_one = ranks.apply_capacity(topk_idx.reshape(-1, 1), num_experts, capacity)
        return one_by_one.view_as(topk_idx)
    parts = ranks.gather(topk_idx)
    begin = sum(part.shape[0] for part in parts[: ranks.rank])
    # a column after the other, so that equal weights go in the order of "position"; all ranks sort the same numbers
    by_position = torch.cat(parts).t().flatten()
    weights = torch.cat(ranks.gather(topk_weights.detach())).t().flatten()
    order = weights.argsort(descending=True, stable=True)
    kept = torch.empty_like(by_position)
    kept[order] = ops.apply_capacity(by_position[order, None], num_experts, capacity).squeeze(1)
    kept = kept.view(topk_idx.shape[1], -1).t()  # [T of all ranks, K]
    return kept.narrow(0, begin, topk_idx.shape[0]).contiguous()
