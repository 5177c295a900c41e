"""Plan the rows that a rank sends and receives in one forward, from the counts that the ranks exchange.

ExactPlan sends each row once, in sizes that one copy to the host brings. StaticPlan sends every rank as many rows, so
that nothing waits for sizes.

Letters of shapes: T tokens, K choices of a token, R rows to send, N rows that come, W ranks, n counts for one rank with
its header.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from fmoe_ext.ep.exchange import check, exchange_counts
from fmoe_ext.ep.headers import HEADER, LENGTH, check_headers
from fmoe_ext.ep.static import RowLimit
from fmoe_ext.ep.traced import agree_on_rows
from fmoe_ext.ops.exchange_rows import columns_of_rows, pad_routing
from fmoe_ext.routing import DispatchHandle
from fmoe_ext.step import Step


@dataclass(frozen=True)
class ChunkRows:
    """Rows that travel at once: those for the experts of one chunk, on every rank."""

    begin: int  # first row on the side of the tokens
    send_splits: list[int]  # rows to each rank
    recv_splits: list[int]  # rows from each rank

    @property
    def rows(self) -> slice:
        return slice(self.begin, self.begin + sum(self.send_splits))


class Plan(Protocol):
    """Rows that a rank sends, and rows that come."""

    row_idx: torch.Tensor  # [R]: the choice that each row to send is for, as in DispatchHandle
    inverse: torch.Tensor  # [T, K]: the row of each choice

    def columns_of(self, number: int) -> torch.Tensor:
        """Return the column of counts of each row that comes, [N, 1] int32, from the chunk's first; -1: padding."""
        ...

    def mark_lost(self, topk_weights: torch.Tensor) -> torch.Tensor:
        """Return topk_weights, NaN if the plan had no room for all rows, so that gradients become NaN too."""
        ...


class ExactPlan:
    """counts [ranks, n]: rows for each rank, in the order of sending. header. ends: where chunks end among the n."""

    def __init__(
        self,
        handle: DispatchHandle,
        counts: torch.Tensor,
        header: torch.Tensor,
        group: str,
        ends: Sequence[int],
        step: Step,
    ):
        self._step = step
        self.row_idx, self.inverse = handle.row_idx, handle.inverse
        self._group, self._device = group, counts.device
        self._columns = list(pairwise((LENGTH, *(LENGTH + end for end in ends))))
        sent_Wn = torch.cat((header.expand(len(counts), -1), counts), 1)
        received_Wn = step.exchange_counts(lambda: exchange_counts(sent_Wn, group), group)
        self._sizes = _HostCopies(sent_Wn, received_Wn)

    def chunks(self) -> list[ChunkRows]:
        """List the rows of each chunk; it may wait for the sizes."""
        # waits for the device, once a layer: the exchange takes its sizes from the host
        sent_Wn, self._received_Wn = self._sizes.get()
        check(self._group)
        sent, received = sent_Wn.tolist(), self._received_Wn.tolist()
        headers = [row[:LENGTH] for row in received]
        self._step.note_empty_rank(not all(header[-1] for header in headers), self._group)
        check_headers(headers, self._group)
        self._chunks: list[ChunkRows] = []
        begin = 0
        for first, end in self._columns:
            to_rank, from_rank = ([sum(row[first:end]) for row in rows] for rows in (sent, received))
            self._chunks.append(ChunkRows(begin, to_rank, from_rank))
            begin = self._chunks[-1].rows.stop
        return self._chunks

    def columns_of(self, number: int) -> torch.Tensor:
        first, end = self._columns[number]
        num_rows = sum(self._chunks[number].recv_splits)
        received_Wn = self._received_Wn.narrow(1, first, end - first)
        return columns_of_rows(received_Wn.to(self._device, non_blocking=True), num_rows)

    def mark_lost(self, topk_weights: torch.Tensor) -> torch.Tensor:
        return topk_weights


class StaticPlan:
    """As ExactPlan, in one chunk of limit.max_rows for each rank."""

    sizes = None

    def __init__(
        self,
        handle: DispatchHandle,
        counts: torch.Tensor,
        header: torch.Tensor,
        group: str,
        limit: RowLimit,
        layout: str,
        step: Step,
    ):
        self._limit, self.max_rows = limit, limit.max_rows
        self.num_rows = len(counts) * limit.max_rows  # that come
        self.row_idx, self.inverse, most = pad_routing(
            handle.row_idx, handle.inverse, handle.tokens_per_expert, len(counts), limit.max_rows
        )
        most = most.expand(len(counts), 1)  # sent to all ranks, so that all raise or none
        sent = torch.cat((header.expand(len(counts), -1), most, counts), 1)
        if step.is_traced and limit.is_read_now(sent):
            received = agree_on_rows(sent, limit.max_rows, layout, group, step.before_exchange)
            self._received = received[:, LENGTH + 1 :]
            self._lost: torch.Tensor | None = None
            return
        received = step.exchange_counts(lambda: exchange_counts(sent, group), group)
        headers, most, self._received = received.split([LENGTH, 1, counts.shape[1]], 1)
        self._lost = None
        if limit.is_read_now(received):
            rows = headers.tolist()
            check(group)
            step.note_empty_rank(not all(header[-1] for header in rows), group)
            check_headers(rows, group)
            limit.raise_for(most.flatten().tolist())
        else:
            self._lost = limit.note(most.flatten(), headers[:, : len(HEADER)])

    def chunks(self) -> list[ChunkRows]:
        splits = [self._limit.max_rows] * len(self._received)
        return [ChunkRows(0, splits, splits)]

    def columns_of(self, number: int) -> torch.Tensor:
        return columns_of_rows(self._received, self.num_rows, self.max_rows)

    def mark_lost(self, topk_weights: torch.Tensor) -> torch.Tensor:
        return topk_weights if self._lost is None else topk_weights * torch.where(self._lost, torch.nan, 1.0)


class _HostCopies:
    """Copies of equally shaped tensors to the host that run while the device goes on."""

    def __init__(self, *tensors: torch.Tensor):
        self._event: torch.cuda.Event | None = None
        self._copies: tuple[torch.Tensor, ...] = tensors
        if tensors[0].is_cuda:
            x = torch.stack(tensors)  # one copy to wait for
            copy = torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
            self._copies = copy.unbind()
            self._event = torch.cuda.Event()
            self._event.record()

    def get(self) -> tuple[torch.Tensor, ...]:
        if self._event is not None:
            self._event.synchronize()
        return self._copies
