"""One forward of an expert-parallel layer: tokens travel to their experts and back while other experts compute.

plan       which rows go where: choices sorted by rank and expert, counts exchanged
send       every chunk's rows start for the ranks of their experts
receive    a chunk's rows have come; experts compute them, and shadowed experts while the first are under way
give_back  a chunk's results start for the ranks of their tokens
collect    all results have come back, and are summed for each token

The local experts are cut into chunks. The exchange of the next chunk runs while one computes, in the forward and in the
backward, there and back. An expert's rows stay in one chunk, so its sums are the same for any number of chunks. The
experts weigh their results, so that these need not be kept here for the gradient of topk_weights.

Letters of shapes: T tokens, K choices of a token, R rows that travel, W ranks, n kinds of rows for one of them, * what
a token has (usually D, its width).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fmoe_ext import ops
from fmoe_ext.ep.exchange import start_exchange, wait
from fmoe_ext.ep.placement import ExpertPlacement, constant, lookup
from fmoe_ext.ep.plan import ExactPlan, StaticPlan, make_plan
from fmoe_ext.ep.traced import TracedRowExchange, in_turn
from fmoe_ext.ep.wire import is_packed, pack, unpack
from fmoe_ext.routing import DispatchHandle, ExpertInput, per_row, sort_choices, widen
from fmoe_ext.step import Step
from fmoe_ext.tokens import Nest, leaves_of, map_structure


class Exchange:
    """The phases of one forward: ExpertParallel.dispatch() calls plan() and send(), a layer the others by its chunks.

    placement: which rank holds each expert. chunk_ends: where the chunks of every rank's experts end. x [T, *] or a
    nest, topk_idx [T, K], topk_weights [T, K]. step: of the forward.
    Each choice has a row of its own, sorted by expert, so that the counts alone say which expert a row is for.
    Subclasses with fewer rows change _sort(), _pack_choices() and _experts_of().
    """

    def __init__(
        self,
        placement: ExpertPlacement,
        chunk_ends: Sequence[int],
        x: Nest,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        step: Step,
    ):
        self._placement = placement
        self._step = step
        self._chunk_ends, self._tables = chunk_ends, placement.tables(chunk_ends)
        self._x = x
        self._topk_weights = topk_weights
        self._topk_idx, self._shadow_idx = placement.split_shadows(topk_idx)
        self.num_tokens = topk_idx.shape[0]  # T of this rank; the header says whether it is 0
        self._shadowed: Nest = None
        self.watch: Any = None  # a tuning.Stopwatch, whose lap() ends each phase

    def lap(self, part: str) -> None:
        """Count the time since the last call for a part of the forward, if it is measured."""
        if self.watch is not None:
            self.watch.lap(part, self._topk_idx.device)

    def plan(self) -> None:
        handle, order, ends = self._sort()
        self.lap("sort")
        leaves, num_tokens = leaves_of(self._x), self.num_tokens
        self._plan = make_plan(self._placement, handle, order, ends, leaves, num_tokens, self._step)
        self.lap("counts")

    def send(self) -> None:
        # rows [R, *] of each tensor of x, then of labels (which experts, in a subclass), and last of the weights
        leaves, plan = leaves_of(self._x), self._plan
        weights = plan.mark_lost(widen(self._topk_weights, leaves[0].dtype))
        rows = [per_row(ops.permute, leaf, plan.row_idx, plan.inverse) for leaf in leaves]
        rows += self._pack_choices(weights)
        self.lap("permute")
        # of a compiled graph the compiler plans the backward; else the functions at the end of this file do
        self._rows: _RowExchange | TracedRowExchange
        if self._step.is_traced:
            if self._placement.wire != "full":
                raise RuntimeError(
                    "torch.compile sends rows in their own dtype: use "
                    f'wire="full" with it, not "{self._placement.wire}"'
                )
            self._rows = TracedRowExchange(self._placement.group, plan)
        else:
            assert isinstance(plan, (ExactPlan, StaticPlan))
            self._rows = _RowExchange(_Transit(self._placement.group, plan, self._placement.wire))
        self._rows.send(rows)

    @property
    def chunks(self) -> list[_Chunk]:
        """List the work of this rank's experts, after that of shadowed ones, whose tokens need not travel."""
        travelling = [_Chunk(self, number) for number in range(len(self._chunk_ends))]
        return [_Chunk(self, None), *travelling] if self._placement.shadows else travelling

    def receive(self, number: int) -> ExpertInput:
        *received, weights = self._rows.receive(number)
        rest = iter(received)
        x = map_structure(lambda _: next(rest), self._x)  # takes its leaves off rest: labels are left
        first, end = (0, *self._chunk_ends)[number : number + 2]
        return ExpertInput(x, self._experts_of(number, first, *rest), weights, first, end)

    def shadow_input(self) -> ExpertInput:
        """Return the tokens of this rank that chose shadowed experts."""
        assert self._shadow_idx is not None
        places, weights = self._placement.places_of_shadows, self._topk_weights
        # A compiler may reorder collectives: the broadcast of shadows must follow the exchange of rows on every rank.
        if self._step.is_traced:
            weights = in_turn([weights], self._rows.receive(0)[-1])[0]
        return ExpertInput(self._x, self._shadow_idx, weights, 0, len(places), shadows=places)

    def give_back(self, number: int, results: Nest) -> None:
        self._structure = map_structure(lambda _: None, results)
        leaves = leaves_of(results)
        if self._step.is_traced and self._placement.shadows:
            leaves = in_turn(leaves, leaves_of(self._shadowed)[0])
        self._rows.give_back(number, leaves)

    def keep_for_backward(self, number: int, results: list[torch.Tensor]) -> None:
        """Let a checkpoint repeat the forward in the backward while this chunk's gradients travel (_Computed)."""
        self._rows.keep_for_backward(number, results)

    def give_back_shadowed(self, results: Nest) -> None:
        self._shadowed = results

    def combine(self) -> Nest:
        out = iter(self._collect())
        self.lap("exchange")
        summed = map_structure(lambda _: next(out), self._structure)
        return map_structure(torch.add, summed, self._shadowed) if self._placement.shadows else summed

    def _sort(self) -> tuple[DispatchHandle, tuple[int, ...] | None, Sequence[int]]:
        """Sort the choices in the order of sending -> handle, order and ends of make_plan()."""
        slots, num_experts = self._tables.slots, self._placement.num_experts
        slot_TK = self._topk_idx
        if slots is not None:  # with chunks, or experts that have moved, another order than the experts'
            slot_TK = lookup(constant(slots, slot_TK.device), slot_TK)
        handle = sort_choices(slot_TK, num_experts)
        if slots is None:
            self._step.note_counts(slot_TK, handle.tokens_per_expert)  # the load counter need not count again
        return handle, self._tables.slots_by_rank, self._chunk_ends

    def _pack_choices(self, weights: torch.Tensor) -> list[torch.Tensor]:
        """Make the tensors that are sent beside the rows: labels, last the weights, [T, K] -> [R, 1]."""
        return [ops.permute(weights.reshape(-1, 1), self._plan.row_idx, self._plan.inverse.reshape(-1, 1))]

    def _experts_of(self, number: int, first: int, *received: torch.Tensor) -> torch.Tensor:
        """Return topk_idx [N, 1] of a chunk's N rows, counted from its expert `first`. received: the labels."""
        return self._plan.columns_of(number)

    def _collect(self) -> tuple[torch.Tensor, ...]:
        """Wait for all results and sum them for each token -> leaves [T, *]."""
        return self._rows.collect()


class _Chunk:
    """Some experts of this rank, with the tokens of all ranks that chose them.

    number None: the shadowed experts, with the tokens of this rank that chose them.
    """

    def __init__(self, exchange: Exchange, number: int | None):
        self._exchange, self._number = exchange, number

    def receive(self) -> ExpertInput:
        if self._number is None:
            return self._exchange.shadow_input()
        received = self._exchange.receive(self._number)
        self._exchange.lap("exchange")
        return received

    def give_back(self, results: Nest) -> None:
        if self._number is None:
            self._exchange.give_back_shadowed(results)
            return
        self._exchange.lap("compute")
        self._exchange.give_back(self._number, results)


class _Transit:
    """The rows of one forward: its chunks, and what is under way in either direction.

    The forward and the backward both send rows to experts and results to tokens, so both use these two directions:
    the forward's results and the backward's gradients of rows come back to the tokens.
    """

    def __init__(self, group: str, plan: ExactPlan | StaticPlan, wire: str):
        self.group = group
        self.wire = wire  # one of wire.WIRES
        self.chunks = plan.chunks()
        self.row_idx, self.inverse = plan.row_idx, plan.inverse
        self.num_rows = 0  # R
        # By chunk (transfer, tensors to fill, buffers that arrive, buffers that leave). The buffers are the tensors,
        # unless rows travel packed. All are kept: nobody may reuse memory that an exchange reads or fills.
        self.under_way: list[Any] = [None] * len(self.chunks)
        self.returned: list[torch.Tensor] | None = None  # results on the side of the tokens, [R, *] each
        self.returned_grads: list[torch.Tensor] | None = None  # gradients there

    def to_experts(self, number: int, rows: Sequence[torch.Tensor]) -> None:
        """Start the exchange of a chunk's part of rows [R, *]."""
        chunk = self.chunks[number]
        sources = [_part(x, chunk.rows) for x in rows]
        targets = [x.new_empty((sum(chunk.recv_splits), *x.shape[1:])) for x in rows]
        self._start(number, targets, sources, chunk.send_splits, chunk.recv_splits)

    def to_tokens(self, number: int, results: Sequence[torch.Tensor], returned: list[torch.Tensor]) -> None:
        """Start the exchange of a chunk's results into its part of returned [R, *]."""
        chunk = self.chunks[number]
        targets = [_part(x, chunk.rows) for x in returned]
        self._start(number, targets, [x.contiguous() for x in results], chunk.recv_splits, chunk.send_splits)

    def _start(
        self,
        number: int,
        targets: list[torch.Tensor],
        sources: list[torch.Tensor],
        send_splits: list[int],
        recv_splits: list[int],
    ) -> None:
        travelling, arriving = [*sources], [*targets]
        for i, x in enumerate(sources):
            if is_packed(x, self.wire):  # [R, D] -> bytes [R, row_bytes]
                travelling[i] = pack(x, self.wire)
                arriving[i] = travelling[i].new_empty((len(targets[i]), travelling[i].shape[1]))
        transfer = start_exchange(arriving, travelling, send_splits, recv_splits, self.group)
        self.under_way[number] = transfer, targets, arriving, travelling

    def finish(self, numbers: Sequence[int]) -> list[tuple[torch.Tensor, ...]]:
        """Wait for the exchanges of these chunks -> what has come of each."""
        wait([self.under_way[number][0] for number in numbers], self.group)
        finished = []
        for number in numbers:
            _, targets, arriving, _ = self.under_way[number]
            for target, arrived in zip(targets, arriving, strict=True):
                if arrived is not target:
                    unpack(arrived, target, self.wire)
            finished.append(tuple(targets))
            self.under_way[number] = None
        return finished

    def new_returned(self, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Make buffers [R, *] for what comes back; rows of dropped choices, at the end, are zero."""
        returned = [x.new_empty((self.num_rows, *x.shape[1:])) for x in like]
        end = self.chunks[-1].rows.stop
        if end < self.num_rows:
            for x in returned:
                x[end:] = 0
        return returned


def _part(x: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return x[rows], without a view where these are all: an operator less."""
    return x if rows.start == 0 and rows.stop == len(x) else x[rows]


class _RowExchange:
    """Applies _Send, _Receive, _Computed, _Return and _Collect to one forward's rows.

    The nodes of these functions keep the _Transit, but not this object, whose tickets refer to the nodes: a cycle.
    """

    def __init__(self, transit: _Transit):
        self._transit = transit
        self._tickets: tuple[torch.Tensor, ...] = ()
        self._given_back: list[torch.Tensor] = []
        self._kept: dict[int, torch.Tensor] = {}

    def send(self, rows: Sequence[torch.Tensor]) -> None:
        self._tickets = _Send.apply(self._transit, *rows)

    def receive(self, number: int) -> tuple[torch.Tensor, ...]:
        received: tuple[torch.Tensor, ...] = _Receive.apply(self._transit, number, self._tickets[number])
        return received

    def keep_for_backward(self, number: int, results: Sequence[torch.Tensor]) -> None:
        self._kept[number] = _Computed.apply(self._tickets[number], *results)

    def give_back(self, number: int, results: Sequence[torch.Tensor]) -> None:
        if number not in self._kept:
            self.keep_for_backward(number, results)
        self._given_back.append(_Return.apply(self._transit, number, self._kept.pop(number), *results))

    def collect(self) -> tuple[torch.Tensor, ...]:
        collected: tuple[torch.Tensor, ...] = _Collect.apply(self._transit, *self._given_back)
        return collected


# The halves of the exchanges there (_Send, _Receive) and back (_Return, _Collect). Between two halves a ticket, a
# scalar, stands for a chunk's rows that are under way: nobody can read what has not come, and autograd knows the order.
# In the backward each starts or ends the gradients' exchange in the other direction:
#
#     forward    _Send start     _Receive wait     experts    _Return start    _Collect wait
#     backward   _Send wait      _Receive start    experts    _Return wait     _Collect start


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx, transit, *rows):
        ctx.transit, ctx.have_grad = transit, [x.is_floating_point() for x in rows]
        transit.num_rows = rows[0].shape[0]
        # all chunks at once: the later ones travel while the first computes
        for number in range(len(transit.chunks)):
            transit.to_experts(number, rows)
        return tuple(rows[-1].new_zeros(()) for _ in transit.chunks)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *_):
        transit = ctx.transit
        transit.finish(range(len(transit.chunks)))
        grads, transit.returned_grads = iter(transit.returned_grads), None
        return None, *(next(grads) if has_grad else None for has_grad in ctx.have_grad)


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, transit, number, ticket):
        ctx.transit, ctx.number = transit, number
        (received,) = transit.finish([number])
        ctx.have_grad = [x.is_floating_point() for x in received]
        ctx.mark_non_differentiable(*(x for x in received if not x.is_floating_point()))
        return received

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        transit = ctx.transit
        grads = [grad for grad, has_grad in zip(grads, ctx.have_grad, strict=True) if has_grad]
        if transit.returned_grads is None:
            transit.returned_grads = transit.new_returned(grads)
        transit.to_tokens(ctx.number, grads, transit.returned_grads)
        return None, None, grads[-1].new_zeros(())


class _Computed(torch.autograd.Function):
    """Keeps a tensor for the backward between a chunk's experts and the way back of their results.

    Activation checkpointing repeats a forward when the first kept tensor is asked for, up to the last one that was
    kept. With a tensor of ours here, both are in one place on all ranks, also on a rank whose experts had no rows and
    kept nothing. Results, which nobody asks for, do not travel again.
    """

    @staticmethod
    def forward(ctx, ticket, *results):
        ctx.save_for_backward(ticket)
        ctx.num_results = len(results)
        return ticket.new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad, *[None] * ctx.num_results


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx, transit, number, computed, *results):
        ctx.transit, ctx.number = transit, number
        if transit.returned is None:
            transit.returned = transit.new_returned(results)
        transit.to_tokens(number, results, transit.returned)
        return results[0].new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, _):
        ctx.next_functions[0][0].saved_tensors  # noqa: B018  # repeats the forward while the gradients travel
        (grads,) = ctx.transit.finish([ctx.number])
        return None, None, grads[0].new_zeros(()), *grads


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, transit, *tickets):
        ctx.transit = transit
        transit.finish(range(len(transit.chunks)))
        returned, transit.returned = transit.returned, None
        return tuple(per_row(ops.unpermute, y, transit.row_idx, transit.inverse) for y in returned)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        transit = ctx.transit
        rows = [per_row(ops.permute, grad, transit.row_idx, transit.inverse) for grad in grads]
        for number in reversed(range(len(transit.chunks))):  # the order in which autograd asks for them
            transit.to_experts(number, rows)
        return None, *(grads[0].new_zeros(()) for _ in transit.chunks)
