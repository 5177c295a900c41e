"""Exchange rows in a compiled graph, by operators that the compiler traces; sizes are on the CPU, or None.

schedule.Exchange uses TracedRowExchange there and _RowExchange elsewhere. All experts of a rank are one chunk, so
nothing travels while others compute; each expert's sums are the same as in chunks.

A compiler may reorder operators that need nothing of each other; ranks whose exchanges come in different orders would
wait for each other forever. So each exchange takes a result of the one before it (plan.agree_on_rows, in_turn).
StaticPlan.mark_lost() multiplies the weights that are sent by a factor that depends on the exchange of counts: 1, or
nan where rows were lost.

Letters of shapes: R rows to send, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fmoe_ext import ops
from fmoe_ext.ep.exchange import start_exchange, wait
from fmoe_ext.ep.process_groups import find_group
from fmoe_ext.ops._autograd import custom_op, register_autograd
from fmoe_ext.routing import per_row


@custom_op("fmoe_ext::exchange_rows")
def _exchange_rows(
    xs: Sequence[torch.Tensor], sizes: torch.Tensor | None, max_rows: int, num_rows: int, group: str
) -> list[torch.Tensor]:
    """Send the first sizes[0][0] rows of each x to rank 0 of the group, the next to rank 1, ... -> what came.

    xs: [R, *] each, of any dtype. sizes [2, W] int64 on the CPU: rows to each rank, and from each; None: max_rows to
    and from each. -> [num_rows, *] each, rows by source rank, zeros behind them. Differentiable: the gradient goes the
    way back. Equivalent to: torch.distributed.all_to_all_single of each.
    """
    if sizes is None:
        send = recv = [max_rows] * torch.distributed.get_world_size(find_group(group))
    else:
        send, recv = sizes.tolist()
    outs = [x.new_empty((num_rows, *x.shape[1:])) for x in xs]
    for out in outs:  # num_rows may be more than what comes
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
    """Copy xs, but not before `after` (of a floating dtype) is computed: a dependency that no compiler can reorder.

    So exchanges that need nothing of each other come in one order on all ranks, and in the reverse in the backward.
    xs[0] is of a floating dtype too: its gradient is what the backward of `after` waits for.
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


class TracedRowExchange:
    """Sends one forward's rows to their experts and back in a compiled graph. plan: a TracedPlan or StaticPlan."""

    def __init__(self, group: str, plan: Any):
        self._group = group
        self._plan = plan
        self._num_sent = 0  # R, known when rows are sent

    def send(self, rows: Sequence[torch.Tensor]) -> None:
        self._num_sent = rows[0].shape[0]
        plan = self._plan
        self._received = _exchange_rows(list(rows), plan.sizes, plan.max_rows, plan.num_rows, self._group)

    def receive(self, number: int) -> tuple[torch.Tensor, ...]:
        return tuple(self._received)

    def keep_for_backward(self, number: int, results: Sequence[torch.Tensor]) -> None:
        """Do nothing: _RowExchange keeps a tensor here for checkpointing; a compiled graph plans its recomputation."""

    def give_back(self, number: int, results: Sequence[torch.Tensor]) -> None:
        back = None if self._plan.sizes is None else self._plan.sizes.flip(0)
        most, num_sent = self._plan.max_rows, self._num_sent
        self._returned = _exchange_rows(list(results), back, most, num_sent, self._group)

    def collect(self) -> tuple[torch.Tensor, ...]:
        row_idx, inverse = self._plan.row_idx, self._plan.inverse
        return tuple(per_row(ops.unpermute, y, row_idx, inverse) for y in self._returned)
