"""fmoe.gates.utils."""

import torch

from fmoe_ext import ops
from fmoe_ext.compat import _ranks
from fmoe_ext.compat.functions import count_by_gate


def limit_by_capacity(
    topk_idx: torch.Tensor, num_expert: int, world_size: int, capacity: int | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Drops the choices over an expert's capacity, which earlier ranks and, in each, first choices use first.

    topk_idx [T, K] or [T], capacity: a number or one for each of the num_expert experts here
    -> (new_lec, new_gec, topk_idx): the counts of count_by_gate without the dropped choices, which become -1.
    """
    _, _, global_expert_count = count_by_gate(topk_idx, num_expert, world_size, require_pos=False)
    count = global_expert_count.view(world_size, num_expert)
    room = capacity - (count.cumsum(0) - count)
    new_gec = room.clamp(min=0).minimum(count).flatten()
    new_lec = _ranks.exchange_counts(new_gec, world_size)
    choices = topk_idx if topk_idx.dim() == 2 else topk_idx.reshape(-1, 1)
    kept = ops.apply_capacity(choices, num_expert * world_size, new_lec)
    return new_lec, new_gec, kept.view(topk_idx.shape)
