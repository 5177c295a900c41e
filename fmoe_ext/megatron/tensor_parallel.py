"""Megatron's MLPs that are split over tensor-parallel ranks, put together; all ranks of the group call it together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmoe_ext.models.target import DenseMLP


def whole(dense: DenseMLP, gated: bool, group: Any) -> DenseMLP:
    """The DenseMLP of all ranks of the group, from the rows of w1 and columns of w2 that are here."""
    if dist.get_world_size(group) == 1:
        return dense
    return replace(
        dense,
        w1=_join_rows(dense.w1, gated, group),
        b1=None if dense.b1 is None else _join_rows(dense.b1, gated, group),
        w2=torch.cat(_gather(dense.w2, group), 1),
    )


def _join_rows(part: Any, gated: bool, group: Any) -> Tensor:
    """The rows of all ranks, each of which has, gated, its gate rows and then its up rows."""
    parts = _gather(part, group)
    if not gated:
        return torch.cat(parts)
    gate, up = zip(*(part.chunk(2) for part in parts), strict=True)
    return torch.cat((*gate, *up))


def _gather(part: Any, group: Any) -> list[Tensor]:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return parts
