"""Which rows a rank sends and receives in one forward, from the counts that the ranks tell each other.

ExactPlan sends each row once, in sizes that one copy to the host brings. StaticPlan sends every rank as many rows, so
that nothing waits for sizes.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from fmoe_ext.ep.exchange import check, exchange_counts
from fmoe_ext.ep.header import HEADER, check_headers
from fmoe_ext.ep.static import RowLimit, experts_of_rows, pad_routing
from fmoe_ext.recompute import hear_once
from fmoe_ext.routing import DispatchHandle


@dataclass(frozen=True)
class ChunkRows:
    """Rows that travel at once: those of the local experts [first_expert, end_expert) of every rank."""

    first_expert: int
    end_expert: int
    begin: int  # first row on the side of the tokens
    send_splits: list[int]  # rows to each rank
    recv_splits: list[int]  # rows from each rank
    # [sum(recv_splits), 1] int32: the expert of each received row, counted from first_expert
    topk_idx: torch.Tensor

    @property
    def rows(self) -> slice:
        return slice(self.begin, self.begin + sum(self.send_splits))


class Plan(Protocol):
    """row_idx [R], inverse [T, K]: the place of every choice among the rows to send, as in DispatchHandle."""

    row_idx: torch.Tensor
    inverse: torch.Tensor

    def chunks(self) -> list[ChunkRows]:
        """The rows of each chunk; it may wait for the sizes."""
        ...

    def mark_lost(self, topk_weights: torch.Tensor) -> torch.Tensor:
        """topk_weights, NaN where the plan had no room for all rows, so that gradients become NaN too."""
        ...


class ExactPlan:
    """counts [ranks, e]: rows for every expert, by rank and place. header [n]. chunk_ends: where chunks end."""

    def __init__(
        self,
        handle: DispatchHandle,
        counts: torch.Tensor,
        header: torch.Tensor,
        group: str,
        chunk_ends: list[int],
    ):
        self.row_idx, self.inverse = handle.row_idx, handle.inverse
        self._group, self._chunk_ends, self._device = group, chunk_ends, counts.device
        sent = torch.cat((header.expand(len(counts), -1), counts), 1)
        received = hear_once(lambda: exchange_counts(sent, group))
        self._sizes = _HostCopy(torch.stack((sent, received)))

    def chunks(self) -> list[ChunkRows]:
        sent, received = self._sizes.get()
        check(self._group)
        check_headers(received[:, : len(HEADER)].tolist(), self._group)
        sent, received = sent[:, len(HEADER) :], received[:, len(HEADER) :]
        chunks: list[ChunkRows] = []
        first = begin = 0
        for end in self._chunk_ends:
            chunk = self._chunk(first, end, begin, sent[:, first:end], received[:, first:end])
            chunks.append(chunk)
            first, begin = end, chunk.rows.stop
        return chunks

    def _chunk(
        self, first: int, end: int, begin: int, sent: torch.Tensor, received: torch.Tensor
    ) -> ChunkRows:
        """sent, received [ranks, end - first]: rows of each expert of the chunk."""
        expert = torch.arange(end - first, dtype=torch.int32, device=self._device).repeat(len(received))
        repeats = received.flatten().to(self._device, non_blocking=True)
        topk_idx = expert.repeat_interleave(repeats, output_size=int(received.sum())).unsqueeze(1)
        return ChunkRows(first, end, begin, sent.sum(1).tolist(), received.sum(1).tolist(), topk_idx)

    def mark_lost(self, topk_weights: torch.Tensor) -> torch.Tensor:
        return topk_weights


class StaticPlan:
    """As ExactPlan, in one chunk of limit.max_rows for each rank."""

    def __init__(
        self,
        handle: DispatchHandle,
        counts: torch.Tensor,
        header: torch.Tensor,
        group: str,
        limit: RowLimit,
    ):
        self._limit = limit
        self.row_idx, self.inverse, needed = pad_routing(handle, len(counts), limit.max_rows)
        most = needed.max().expand(len(counts), 1)
        sent = torch.cat((header.expand(len(counts), -1), most, counts), 1)
        received = hear_once(lambda: exchange_counts(sent, group))
        headers, most, self._received = received.split([len(HEADER), 1, counts.shape[1]], 1)
        self._lost: torch.Tensor | None = None
        if limit.is_read_now(received):
            rows = headers.tolist()
            check(group)
            check_headers(rows, group)
            limit.raise_for(most.flatten().tolist())
        else:
            self._lost = limit.note(most.flatten(), headers)

    def chunks(self) -> list[ChunkRows]:
        num_ranks, num_local_experts = self._received.shape
        splits = [self._limit.max_rows] * num_ranks
        topk_idx = experts_of_rows(self._received, self._limit.max_rows)
        return [ChunkRows(0, num_local_experts, 0, splits, splits, topk_idx)]

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
