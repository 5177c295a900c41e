"""The exchange of a compiled graph, of operators that the compiler traces; sizes come as one copy to the host.

All experts of a rank are one chunk: nothing is under way while others compute. Their sums are the same.

A compiler may reorder operators that need nothing of each other; ranks whose exchanges come in different orders would
wait for each other forever. So each exchange takes a result of the one before it (agree_on_rows's after, in_turn).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fmoe_ext import ops
from fmoe_ext.ep.exchange import check, exchange_counts, start_exchange, wait
from fmoe_ext.ep.headers import LENGTH, check_headers
from fmoe_ext.ep.process_groups import check_agreement, find_group
from fmoe_ext.ep.static import RowLimit
from fmoe_ext.ops._autograd import custom_op, register_autograd
from fmoe_ext.ops.exchange_rows import columns_of_rows
from fmoe_ext.routing import DispatchHandle, per_row


@torch.library.custom_op("fmoe_ext::agree_on_rows", mutates_args=())
def agree_on_rows(
    sent: torch.Tensor, max_rows: int, layout: str, group: str, after: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Call exchange_counts() with sent [ranks, LENGTH + n], and check the headers on the host.

    max_rows: 0, or the limit of the first column after the header. layout: what must be the same on all ranks. after:
    results of exchanges that come first, on every rank in one order.
    """
    check_agreement(layout, group)
    received = exchange_counts(sent, group)
    headers = received[:, : LENGTH + 1].tolist()
    check(group)
    check_headers(headers, group)
    if max_rows:
        ranks = torch.distributed.get_process_group_ranks(find_group(group))
        RowLimit(max_rows, headers[0][0], ranks).raise_for([header[LENGTH] for header in headers])
    return received


@agree_on_rows.register_fake
def _(
    sent: torch.Tensor, max_rows: int, layout: str, group: str, after: Sequence[torch.Tensor]
) -> torch.Tensor:
    return torch.empty_like(sent, memory_format=torch.contiguous_format)


@custom_op("fmoe_ext::exchange_rows")
def _exchange_rows(
    xs: Sequence[torch.Tensor], sizes: torch.Tensor | None, max_rows: int, num_rows: int, group: str
) -> list[torch.Tensor]:
    """Send the first sizes[0][0] rows of each x to rank 0 of the group, the next to rank 1, ... -> what came.

    xs: [R, *] each, of any dtype; sizes [2, ranks] int64 on the CPU: rows to each rank, and from each; None: max_rows
    to and from each -> [num_rows, *] each, rows by source rank, zero behind. Differentiable: the gradient goes the way
    back. Equivalent to: torch.distributed.all_to_all_single of each.
    """
    if sizes is None:
        send = recv = [max_rows] * torch.distributed.get_world_size(find_group(group))
    else:
        send, recv = sizes.tolist()
    outs = [x.new_empty((num_rows, *x.shape[1:])) for x in xs]
    for out in outs:  # static mode has buffers of one size, of which the rows may fill less
        out[sum(recv) :] = 0
    targets, sources = [out[: sum(recv)] for out in outs], [x[: sum(send)].contiguous() for x in xs]
    wait([start_exchange(targets, sources, send, recv, group)], group)
    return outs


@torch.library.register_fake("fmoe_ext::exchange_rows")  # type: ignore[untyped-decorator]
def _(
    xs: Sequence[torch.Tensor], sizes: torch.Tensor | None, max_rows: int, num_rows: int, group: str
) -> list[torch.Tensor]:
    return [x.new_empty((num_rows, *x.shape[1:])) for x in xs]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    xs, sizes, ctx.max_rows, _, ctx.group = inputs
    ctx.num_rows = xs[0].shape[0]
    ctx.have_grad = [x.is_floating_point() for x in xs]
    ctx.has_sizes = sizes is not None
    ctx.save_for_backward(*([] if sizes is None else [sizes]))


def _backward(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    sizes = ctx.saved_tensors[0].flip(0) if ctx.has_sizes else None
    floats = [grad for grad, has_grad in zip(grads, ctx.have_grad, strict=True) if has_grad]
    back = iter(_exchange_rows(floats, sizes, ctx.max_rows, ctx.num_rows, ctx.group))
    return [next(back) if has_grad else None for has_grad in ctx.have_grad], None, None, None, None


register_autograd("fmoe_ext::exchange_rows", _backward, _setup_context, places=(0,))


@custom_op("fmoe_ext::in_turn")
def in_turn(xs: Sequence[torch.Tensor], after: torch.Tensor) -> list[torch.Tensor]:
    """Copy xs where no compiler does so before it has `after`, of a floating dtype.

    So exchanges that need nothing of each other come in one order on all ranks. In the backward that order is reversed.
    """
    return [x.clone() for x in xs]


@torch.library.register_fake("fmoe_ext::in_turn")  # type: ignore[untyped-decorator]
def _(xs: Sequence[torch.Tensor], after: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty_like(x) for x in xs]


def _setup_turn(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    ctx.save_for_backward(inputs[1])


def _backward_in_turn(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    (after,) = ctx.saved_tensors
    # the gradient of after, of zeros, makes its backward wait for these gradients
    return list(grads), in_turn([torch.zeros_like(after)], grads[0])[0]


register_autograd("fmoe_ext::in_turn", _backward_in_turn, _setup_turn, places=(0,))


class TracedPlan:
    """As ExactPlan, of a compiled graph. counts [ranks, n]: rows for each rank. num_rows: those that come."""

    max_rows = 0

    def __init__(
        self,
        handle: DispatchHandle,
        counts: torch.Tensor,
        header: torch.Tensor,
        group: str,
        layout: str,
        after: Sequence[torch.Tensor],
    ):
        self.row_idx, self.inverse = handle.row_idx, handle.inverse
        sent = torch.cat((header.expand(len(counts), -1), counts), 1)
        self._received = agree_on_rows(sent, 0, layout, group, after)[:, LENGTH:]
        self.sizes = torch.stack((counts.sum(1), self._received.sum(1))).cpu()
        self.num_rows = int(self.sizes[1].sum())

    def columns_of(self, number: int) -> torch.Tensor:
        return columns_of_rows(self._received, self.num_rows)

    def mark_lost(self, topk_weights: torch.Tensor) -> torch.Tensor:
        return topk_weights


class TracedRowExchange:
    """Sends one forward's rows to their experts and back in a compiled graph. plan: a TracedPlan or StaticPlan."""

    def __init__(self, group: str, plan: Any):
        self._group = group
        self._plan = plan

    def send(self, rows: Sequence[torch.Tensor]) -> None:
        self._num_sent = rows[0].shape[0]
        self._received = self._travel(rows, self._plan.sizes, self._plan.num_rows)

    def receive(self, number: int) -> tuple[torch.Tensor, ...]:
        return tuple(self._received)

    def keep_for_backward(self, number: int, results: Sequence[torch.Tensor]) -> None:
        """Nothing to do: the graph says when a forward is repeated."""

    def give_back(self, number: int, results: Sequence[torch.Tensor]) -> None:
        sizes = None if self._plan.sizes is None else self._plan.sizes.flip(0)
        self._returned = self._travel(results, sizes, self._num_sent)

    def collect(self) -> tuple[torch.Tensor, ...]:
        row_idx, inverse = self._plan.row_idx, self._plan.inverse
        return tuple(per_row(ops.unpermute, y, row_idx, inverse) for y in self._returned)

    def _travel(
        self, rows: Sequence[torch.Tensor], sizes: torch.Tensor | None, num_rows: int
    ) -> list[torch.Tensor]:
        return _exchange_rows(list(rows), sizes, self._plan.max_rows, num_rows, self._group)
