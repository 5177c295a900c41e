"""Collectives of a layer beside the exchange of its tokens, with their gradients.

    GroupRanks    a gate's losses, counts and capacities over the tokens of all ranks (gates.base_gate.Ranks)
    SliceGroup    ranks with one input, of which each computes a part of the rows (slice_group=)
    WidthGroup    ranks with a part of the hidden units of the same experts (megatron/core/expert_tensor.py)
    gather_rows   rows of every rank, of different numbers

Letters of shapes: T tokens, K choices of a token, E experts in all, W ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fmoe_ext import ops
from fmoe_ext.ep.process_groups import Group, find_group, host_device, register_group
from fmoe_ext.ops._autograd import custom_op, register_autograd, register_not_differentiable
from fmoe_ext.ops.balanced_shares import NO_GRADIENT, balanced_shares
from fmoe_ext.step import run_or_replay
from fmoe_ext.tokens import Nest, map_structure


class _Members:
    """The ranks of a group, found by its name."""

    def __init__(self, group: Group) -> None:
        self.group = register_group(group)
        self.size = dist.get_world_size(find_group(self.group))
        self.rank = dist.get_rank(find_group(self.group))


class GroupRanks(_Members):
    """The Ranks of a gate over a group: its losses and capacities span the tokens of all ranks.

    num_copies: ranks that compute the same loss because they share one input (the size of the slice group).
    """

    def __init__(self, group: Group, num_copies: int = 1) -> None:
        super().__init__(group)
        self.num_copies = num_copies
        self._device = host_device(find_group(self.group))

    def num_tokens(self, num_local_tokens: int) -> int:
        """Count the tokens of all ranks; a copy to the host."""
        mine = torch.full((1,), num_local_tokens, device=self._device)
        if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
            return int(_sum_over_ranks(mine, 1.0, self.group))
        return int(run_or_replay(lambda: _all_reduce(mine, self.group)))

    def first_token(self, num_local_tokens: int) -> int:
        """Count the tokens of the ranks before this one; a copy to the host."""
        mine = torch.full((1,), num_local_tokens, device=self._device)
        return int(torch.cat(self.gather(mine, same_size=True))[: self.rank].sum())

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over the ranks; the gradient assumes that every rank adds the same loss to its own."""
        if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
            total: torch.Tensor = _sum_over_ranks(x, self.size / self.num_copies, self.group)
            return total
        return _SumOverRanks.apply(x, self)

    def gather(self, x: torch.Tensor, same_size: bool = False) -> list[torch.Tensor]:
        """Gather x of every rank, in the order of their ranks, not differentiable; dimension 0 may differ.

        same_size: it does not, so that no sizes are exchanged.
        """
        x = x.detach()
        if same_size:
            return list(_gather_equal(x, self.size, self.group).unbind())
        if not (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()):
            return gather_rows(x, find_group(self.group))
        sizes = _gather_equal(torch.full((1,), x.shape[0], device=x.device), self.size, self.group)
        return _gather_sized(x, sizes.flatten().tolist(), self.group)

    def apply_capacity(
        self, topk_idx: torch.Tensor, num_experts: int, capacity: int | torch.Tensor
    ) -> torch.Tensor:
        """Drop as in one process whose batch is the ranks' batches one after the other: first choices first."""
        # choices of each column, [K, E]
        counts = torch.stack([ops.count_tokens(choice, num_experts) for choice in topk_idx.split(1, 1)])
        everyone = torch.stack(self.gather(counts, same_size=True), 1)  # [K, W, E]
        # places go to the first choices of all ranks, in the order of ranks, then to the second choices
        flat = everyone.flatten(0, 1)
        before = (flat.cumsum(0) - flat).view_as(everyone)[:, self.rank]  # [K, E]
        if isinstance(capacity, torch.Tensor):
            capacity = capacity.to(before.device)
        room = (capacity - before).clamp(min=0)  # [K, E]: what this rank may still take
        kept = [
            ops.apply_capacity(choice, num_experts, room[k]) for k, choice in enumerate(topk_idx.split(1, 1))
        ]
        return torch.cat(kept, 1)

    def balanced_shares(self, logits: torch.Tensor) -> torch.Tensor:
        """Compute ops.balanced_shares() over these ranks, as one operator of a compiled graph."""
        shares: torch.Tensor = _balanced_shares(logits, self.group)
        return shares


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: GroupRanks) -> torch.Tensor:
        ctx.factor = ranks.size / ranks.num_copies
        # a checkpoint's repetition takes the first forward's sum: other ranks may not repeat it
        x = x.detach()
        return run_or_replay(lambda: _all_reduce(x, ranks.group))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        # Every rank adds this loss to its own, so x has the gradient of as many losses; a data-parallel mean over the
        # ranks will divide by their number. num_copies ranks with one input count as one.
        return grad * ctx.factor, None


def _all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=find_group(group))
    return total


@custom_op("fmoe_ext::sum_over_ranks")
def _sum_over_ranks(x: torch.Tensor, factor: float, group: str) -> torch.Tensor:
    """Compute GroupRanks.sum() in a compiled graph. factor: of the gradient."""
    return _all_reduce(x, group)


@torch.library.register_fake("fmoe_ext::sum_over_ranks")  # type: ignore[untyped-decorator]
def _(x: torch.Tensor, factor: float, group: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep_factor(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.factor = inputs[1]


register_autograd(
    "fmoe_ext::sum_over_ranks", lambda ctx, grad: (grad * ctx.factor, None, None), _keep_factor, places=(0,)
)


@custom_op("fmoe_ext::gather_equal")
def _gather_equal(x: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
    """Gather x of every rank, of one shape -> [num_ranks, *]."""
    out = x.new_empty((num_ranks, *x.shape))
    dist.all_gather(list(out.unbind()), x.contiguous(), group=find_group(group))
    return out


@torch.library.register_fake("fmoe_ext::gather_equal")  # type: ignore[untyped-decorator]
def _(x: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
    return x.new_empty((num_ranks, *x.shape))


@custom_op("fmoe_ext::gather_sized")
def _gather_sized(x: torch.Tensor, sizes: Sequence[int], group: str) -> list[torch.Tensor]:
    """Gather x [n, *] of every rank -> [sizes[rank], *] each."""
    # an operator must not return views of one buffer
    return [part.clone() for part in _gather_padded(x, list(sizes), find_group(group))]


@torch.library.register_fake("fmoe_ext::gather_sized")  # type: ignore[untyped-decorator]
def _(x: torch.Tensor, sizes: Sequence[int], group: str) -> list[torch.Tensor]:
    return [x.new_empty((size, *x.shape[1:])) for size in sizes]


@custom_op("fmoe_ext::balanced_shares_over_ranks")
def _balanced_shares(logits: torch.Tensor, group: str) -> torch.Tensor:
    return balanced_shares(logits, GroupRanks(find_group(group)).gather)


@torch.library.register_fake("fmoe_ext::balanced_shares_over_ranks")  # type: ignore[untyped-decorator]
def _(logits: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(logits)


for _name in ("gather_equal", "gather_sized"):
    register_not_differentiable(f"fmoe_ext::{_name}", "what other ranks have counts as a constant")
register_not_differentiable("fmoe_ext::balanced_shares_over_ranks", NO_GRADIENT)


class SliceGroup(_Members):
    """Ranks with the same input: each computes a slice of its rows, and the results are put together again.

    cut() and join() are each other's gradient.
    """

    def bounds(self, num_rows: int) -> tuple[int, int]:
        """Return first and end row of this rank's slice; slices differ by at most one row."""
        return num_rows * self.rank // self.size, num_rows * (self.rank + 1) // self.size

    def cut(self, x: Nest) -> Nest:
        """Take this rank's rows of x [N, *] or a nest; the gradient covers all rows."""
        return map_structure(lambda leaf: _Cut.apply(leaf, self), x)

    def join(self, x: Nest) -> Nest:
        """Join the rows of all slices; every rank must go on with the same computation."""
        return map_structure(lambda leaf: _Join.apply(leaf, self), x)


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slices: SliceGroup) -> torch.Tensor:
        ctx.slices = slices
        begin, end = slices.bounds(x.shape[0])
        return x[begin:end].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return torch.cat(gather_rows(grad, find_group(ctx.slices.group))), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slices: SliceGroup) -> torch.Tensor:
        parts = gather_rows(x, find_group(slices.group))
        ctx.begin = sum(part.shape[0] for part in parts[: slices.rank])
        ctx.end = ctx.begin + x.shape[0]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return grad[ctx.begin : ctx.end], None


class WidthGroup(_Members):
    """A group whose ranks have a part of the hidden units of the same experts, and tokens of their own.

    gather() and sum() are each other's gradient. A rank's rows are padded to the largest number that a rank has, since
    all_gather and reduce_scatter take equal parts.
    """

    def most_rows(self, x: torch.Tensor) -> int:
        """Find the largest number of rows that a rank has; a copy to the host."""
        most = torch.tensor([x.shape[0]], device=x.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=find_group(self.group))
        return int(most)

    def gather(self, x: torch.Tensor, num_rows: int, padding: float = 0) -> torch.Tensor:
        """Gather x [n, *] of every rank, padded to num_rows -> [size * num_rows, *]; the gradient is the ranks' sum."""
        gathered: torch.Tensor = _GatherWidth.apply(x, self, num_rows, padding)
        return gathered

    def sum(self, x: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Sum x [size * n, *] over the ranks -> this rank's first num_rows of its n rows."""
        total: torch.Tensor = _SumWidth.apply(x, self, num_rows)
        return total

    def add_once(self, x: torch.Tensor) -> torch.Tensor:
        """Return x on the first rank and zeros on the others; every rank passes its gradient on to x."""
        once: torch.Tensor = _Once.apply(x, self.rank == 0)
        return once

    def gather_padded(self, x: torch.Tensor, num_rows: int, padding: float) -> torch.Tensor:
        padded = x.new_full((num_rows, *x.shape[1:]), padding)
        padded[: x.shape[0]] = x
        gathered = x.new_empty((self.size * num_rows, *x.shape[1:]))
        dist.all_gather_into_tensor(gathered, padded, group=find_group(self.group))
        return gathered

    def sum_padded(self, x: torch.Tensor, num_rows: int) -> torch.Tensor:
        total = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        dist.reduce_scatter_tensor(total, x.contiguous(), group=find_group(self.group))
        return total[:num_rows]


class _GatherWidth(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, width: WidthGroup, num_rows: int, padding: float) -> torch.Tensor:
        ctx.width, ctx.num_rows = width, x.shape[0]
        return width.gather_padded(x, num_rows, padding)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return ctx.width.sum_padded(grad, ctx.num_rows), None, None, None


class _SumWidth(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, width: WidthGroup, num_rows: int) -> torch.Tensor:
        ctx.width, ctx.num_rows = width, x.shape[0] // width.size
        return width.sum_padded(x, num_rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return ctx.width.gather_padded(grad, ctx.num_rows, 0), None, None


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, is_mine: bool) -> torch.Tensor:
        return x.clone() if is_mine else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return grad, None


def gather_rows(x: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Gather x [n, *] of every rank of the group (None: the default one), n its own; not differentiable.

    Rows are padded to the largest n on the way; one copy of the sizes to the host.
    """
    size = torch.tensor([x.shape[0]], device=x.device)
    each = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(each, size, group=group)
    return _gather_padded(x, torch.cat(each).tolist(), group)


def _gather_padded(x: torch.Tensor, sizes: list[int], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    if max(sizes) == 0:  # nothing to send, which all ranks know
        return [torch.empty_like(x) for _ in sizes]
    padded = x.new_zeros((max(sizes), *x.shape[1:]))
    padded[: x.shape[0]] = x
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [part[:n] for part, n in zip(parts, sizes, strict=True)]
