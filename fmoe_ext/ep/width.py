"""Ranks that each hold some hidden units of every expert: all compute the rows of all, and sum the results."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmoe_ext.ep.process_groups import Group, find_group, register_group


class WidthGroup:
    """A group whose ranks have a part of the hidden units of the same experts, and tokens of their own.

    gather() and sum() are each other's gradient. A rank's rows are padded to the most that one has, since all_gather
    and reduce_scatter take equal parts.
    """

    def __init__(self, group: Group) -> None:
        self.group = register_group(group)
        self.size = dist.get_world_size(find_group(self.group))
        self.rank = dist.get_rank(find_group(self.group))

    def most_rows(self, x: Tensor) -> int:
        """Find the largest number of rows that a rank has; a copy to the host."""
        most = torch.tensor([x.shape[0]], device=x.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=find_group(self.group))
        return int(most)

    def gather(self, x: Tensor, num_rows: int, padding: float = 0) -> Tensor:
        """Gather x [n, *] of every rank, padded to num_rows -> [size * num_rows, *]; the gradient is the ranks' sum."""
        gathered: Tensor = _Gather.apply(x, self, num_rows, padding)
        return gathered

    def sum(self, x: Tensor, num_rows: int) -> Tensor:
        """Sum x [size * n, *] over the ranks -> this rank's first num_rows of its n rows."""
        total: Tensor = _Sum.apply(x, self, num_rows)
        return total

    def add_once(self, x: Tensor) -> Tensor:
        """Return x on the first rank and zeros on the others; every rank passes its gradient on to x."""
        once: Tensor = _Once.apply(x, self.rank == 0)
        return once

    def gather_padded(self, x: Tensor, num_rows: int, padding: float) -> Tensor:
        padded = x.new_full((num_rows, *x.shape[1:]), padding)
        padded[: x.shape[0]] = x
        gathered = x.new_empty((self.size * num_rows, *x.shape[1:]))
        dist.all_gather_into_tensor(gathered, padded, group=find_group(self.group))
        return gathered

    def sum_padded(self, x: Tensor, num_rows: int) -> Tensor:
        total = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        dist.reduce_scatter_tensor(total, x.contiguous(), group=find_group(self.group))
        return total[:num_rows]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, width: WidthGroup, num_rows: int, padding: float) -> Tensor:
        ctx.width, ctx.num_rows = width, x.shape[0]
        return width.gather_padded(x, num_rows, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.width.sum_padded(grad, ctx.num_rows), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, width: WidthGroup, num_rows: int) -> Tensor:
        ctx.width, ctx.num_rows = width, x.shape[0] // width.size
        return width.sum_padded(x, num_rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.width.gather_padded(grad, ctx.num_rows, 0), None, None


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, is_mine: bool) -> Tensor:
        return x.clone() if is_mine else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None
