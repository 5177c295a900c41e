"""Capacity: how many choices an expert takes, and which ones it drops; ScoredGate, GShardGate and SwitchGate ask.

An even share is T * K / E choices for each expert; a capacity is a factor of that, so that buffers and the slowest
expert are bounded. What is over it is dropped: its entry of topk_idx becomes -1, no expert computes it, and the token
keeps what its other experts give. T counts the tokens of all ranks, and a choice waits for its place behind those of
earlier ranks: whether it is dropped depends on the order of the tokens, but not on the ranks that have them.
"""

import math
from collections.abc import Sequence

import torch

from fmoe_ext import ops
from fmoe_ext.gates.base_gate import OneRank, Ranks
from fmoe_ext.ops.outside_graphs import is_exporting

DROP_POLICIES = ("position", "token", "score")


def expert_capacity(factor: float, num_tokens: int, top_k: int = 1, num_experts: int = 1) -> int:
    """Compute how many choices each expert takes: ceil(factor * T * K / E), an even share times factor."""
    if not is_exporting():
        return math.ceil(factor * num_tokens * top_k / num_experts)
    # a graph cannot save the ceil() of a number; a tensor of one has the same bits
    share = factor * torch.full((), num_tokens, dtype=torch.float64, device="cpu") * top_k / num_experts
    capacity: int = share.ceil().long()  # type: ignore[assignment]
    return capacity


def check_factors(capacity: object) -> None:
    """Raise ValueError unless capacity is FastMoE's two positive factors, one for training and one for evaluation."""
    if not isinstance(capacity, Sequence) or len(capacity) != 2 or not min(capacity) > 0:
        raise ValueError(f"capacity must be two positive factors (training, evaluation), but got {capacity}")


def fits_drop_choices(topk_idx: torch.Tensor, ranks: Ranks) -> bool:
    """Return whether ops.drop_choices should drop and count at once: on one rank on the CPU, outside of a graph.

    A compiler fuses more than this operator does, and a GPU has no kernel for it.
    """
    is_alone = type(ranks) is OneRank and topk_idx.device.type == "cpu"
    return is_alone and not (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting())


def drop_over_capacity(
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    capacity: int,
    policy: str,
    ranks: Ranks,
) -> torch.Tensor:
    """Drop choices of experts that have more than `capacity` of them: topk_idx [T, K] with -1 for these.

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
