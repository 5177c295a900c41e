"""Limits to the choices that one expert takes."""

import math

import torch

from fmoe_ext import ops

DROP_POLICIES = ("position", "score")


def expert_capacity(factor, num_tokens, top_k, num_experts):
    """Choices that each expert takes: ceil(factor * T * K / E), an even share times factor."""
    return math.ceil(factor * num_tokens * top_k / num_experts)


def drop_over_capacity(topk_idx, topk_weights, num_experts, capacity, policy, workers):
    """topk_idx with -1 for the choices that an expert with more than `capacity` of them does not take.

    policy "position": first choices go before second ones, then tokens in order (GShard, Switch Transformer);
    "score": the larger weight goes first, ties as in "position" (V-MoE's batch prioritised routing, Megatron's
    "probs"). Either counts the choices of all workers; "score" gathers them, T * K numbers of every worker.
    """
    if policy == "position":
        return workers.apply_capacity(topk_idx, num_experts, capacity)
    parts = workers.gather(topk_idx)
    begin = sum(part.shape[0] for part in parts[: workers.rank])
    by_position = torch.cat(parts).t().flatten()
    weights = torch.cat(workers.gather(topk_weights.detach())).t().flatten()
    order = weights.argsort(descending=True, stable=True)
    kept = torch.empty_like(by_position)
    kept[order] = ops.apply_capacity(by_position[order, None], num_experts, capacity).squeeze(1)
    kept = kept.view(topk_idx.shape[1], -1).t()  # [T of all workers, K]
    return kept[begin : begin + topk_idx.shape[0]].contiguous()
