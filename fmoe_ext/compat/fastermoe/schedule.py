"""fmoe.fastermoe.schedule: the same result as FasterMoE's schedule; stored_models changes only where it is computed."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from fmoe_ext.compat.functions import MOEGather, MOEScatter
from fmoe_ext.compat.layers import _fmoe_general_global_forward as _general_forward

ExpertFn: TypeAlias = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]

policy_fn = None


class MoEForward:
    """Scatter, experts one after the other, gather; called as MoEForward.apply(...), differentiable."""

    @staticmethod
    def apply(
        expert_fn: ExpertFn,
        experts: Any,
        inp: torch.Tensor,
        pos_s: torch.Tensor,
        pos_g: torch.Tensor,
        local_expert_count: torch.Tensor,
        global_expert_count: torch.Tensor,
        stored_models: Any,
        fwd_batch_size: int,
        out_batch_size: int,
        num_expert: int,
        world_size: int,
    ) -> torch.Tensor:
        """expert_fn(rows, number of rows [1], expert) for each expert here -> [out_batch_size, *]."""
        x = MOEScatter.apply(inp, pos_s, local_expert_count, global_expert_count, fwd_batch_size, world_size)
        count = global_expert_count.view(world_size, num_expert).sum(0)
        y = _each_expert(expert_fn, x, count)
        return MOEGather.apply(y, pos_g, local_expert_count, global_expert_count, out_batch_size, world_size)


def _fmoe_general_global_forward(
    inp: torch.Tensor,
    gate: torch.Tensor,
    expert_fn: ExpertFn,
    n_expert: int,
    world_size: int,
    experts: Any = None,
    stored_models: Any = None,
) -> torch.Tensor:
    """As fmoe.layers._fmoe_general_global_forward, with expert_fn(rows, number of rows [1], expert)."""

    def all_experts(x: torch.Tensor, fwd_expert_count) -> torch.Tensor:
        return _each_expert(expert_fn, x, fwd_expert_count)

    return _general_forward(inp, gate, all_experts, n_expert, world_size)


def _each_expert(expert_fn: ExpertFn, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    parts = x.split(count.tolist())
    return torch.cat([expert_fn(rows, count[idx : idx + 1], idx) for idx, rows in enumerate(parts)])
