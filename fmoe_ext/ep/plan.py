"""Plan the rows that a rank sends and receives in one forward, from the counts that the ranks exchange.

ExactPlan sends each row once, in sizes that one copy to the host brings. StaticPlan sends every rank as many rows, so
that nothing waits for sizes.

Letters of shapes: T tokens, K choices of a token, R rows to send, N rows that come.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from fmoe_ext.ep.exchange import check, exchange_counts
from fmoe_ext.ep.headers import HEADER, LENGTH, check_headers
from fmoe_ext.ep.static import RowLimit, columns_of_rows, pad_routing
from fmoe_ext.ep.traced import agree_on_rows
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
    """row_idx [R], inverse [T, K]: which choice each row to send is for, as in DispatchHandle."""

    row_idx: torch.Tensor
    inverse: torch.Tensor

    def columns_of(self, number: int) -> torch.Tensor:
        """The column of counts of each row of a chunk that comes, [N, 1] int32, from its first; -1 for padding."""
        ...

    def mark_lost(self, topk_weights: torch.Tensor) -> torch.Tensor:
        """topk_weights, NaN where the plan had no room for all rows, so that gradients become NaN too."""
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
        self._columns = [slice(first, end) for first, end in pairwise((0, *ends))]
        sent = torch.cat((header.expand(len(counts), -1), counts), 1)
        received = step.exchange_counts(lambda: exchange_counts(sent, group), group)
        self._sizes = _HostCopy(torch.stack((sent, received)))

    def chunks(self) -> list[ChunkRows]:
        """The rows of each chunk; it may wait for the sizes."""
        # waits for the device: the exchange takes its sizes from the host
        sent, received = self._sizes.get()
        check(self._group)
        headers = received[:, :LENGTH].tolist()
        self._step.note_empty_rank(not all(header[-1] for header in headers), self._group)
        check_headers(headers, self._group)
        sent, self._received = sent[:, LENGTH:], received[:, LENGTH:]
        chunks: list[ChunkRows] = []
        begin = 0
        for columns in self._columns:
            to_rank, from_rank = sent[:, columns].sum(1), self._received[:, columns].sum(1)
            chunks.append(ChunkRows(begin, to_rank.tolist(), from_rank.tolist()))
            begin = chunks[-1].rows.stop
        return chunks

    def columns_of(self, number: int) -> torch.Tensor:
        received = self._received[:, self._columns[number]]
        column = torch.arange(received.shape[1], dtype=torch.int32, device=self._device).repeat(len(received))
        repeats = received.flatten().to(self._device, non_blocking=True)
        return column.repeat_interleave(repeats, output_size=int(received.sum())).unsqueeze(1)

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
        self.row_idx, self.inverse, needed = pad_routing(handle, len(counts), limit.max_rows)
        most = needed.max().expand(len(counts), 1)  # sent to all ranks, so that all raise or none
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
        return columns_of_rows(self._received, self._limit.max_rows)

    def mark_lost(self, topk_weights: torch.Tensor) -> torch.Tensor:
        return topk_weights if self._lost is None else topk_weights * torch.where(self._lost, torch.nan, 1.0)


class _HostCopy:
    """A copy of a tensor to the host that runs while the device goes on."""

    def __init__(self, x: torch.Tensor):
        self._event: torch.cuda.Event | None = None
        self._copy = x
        if x.is_cuda:
            self._copy = torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def get(self) -> torch.Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._copy
