"""Plan the rows that a rank sends and receives in one forward, from the counts that the ranks exchange.

schedule.Exchange.plan() gives make_plan() the sorted choices and gets one of three plans.
ExactPlan sends each row once, in sizes that one copy to the host brings: its only wait. TracedPlan does so in a
compiled graph and waits twice, for the headers and for the sizes. StaticPlan sends every rank max_rows_per_rank rows,
some of them padding, so that nothing waits for sizes.

Ranks that are in different layers, or have tokens of another width, would read each other's rows as their own. So each
message of counts begins with a header, and every rank compares the headers of all: all raise, or none does. A message
to one rank:

    layer | dtype | width | chunks | has tokens || [most rows for a rank, in static mode] | rows of each kind: n
    _HEADER, must be equal          free           static.py

Letters of shapes: T tokens, K choices of a token, R rows to send, N rows that come, W ranks, n kinds of rows for one
rank, C columns of a message: header and counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from fmoe_ext.ep.exchange import check, exchange_counts
from fmoe_ext.ep.placement import ExpertPlacement, constant
from fmoe_ext.ep.process_groups import check_agreement, find_group
from fmoe_ext.ep.static import RowLimit
from fmoe_ext.ops.exchange_rows import columns_of_rows, counts_to_send, pad_routing
from fmoe_ext.routing import DispatchHandle
from fmoe_ext.step import Step

# What must be the same on all ranks, and how an error names it.
_HEADER = (
    "the layer",
    "the dtype of the tokens",
    "the elements of a token",
    "the chunks of experts, of which a compiled graph has one",
)
_LENGTH = len(_HEADER) + 1  # and 1 for a rank that has tokens, 0 for one that has none
# Of tokens; a header has the place of one.
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ChunkRows:
    """Rows that travel at once: those for the experts of one chunk, on every rank."""

    begin: int  # first row on the side of the tokens
    send_splits: list[int]  # rows to each rank
    recv_splits: list[int]  # rows from each rank

    @property
    def rows(self) -> slice:
        return slice(self.begin, self.begin + sum(self.send_splits))


class Plan:
    """Rows that a rank sends, and rows that come."""

    row_idx: torch.Tensor  # [R]: the choice that each row to send is for, as in DispatchHandle
    inverse: torch.Tensor  # [T, K]: the row of each choice

    def columns_of(self, number: int) -> torch.Tensor:
        """Return the kind of each row of a chunk that comes, [N, 1] int32, from the chunk's first; -1: padding."""
        raise NotImplementedError

    def mark_lost(self, topk_weights: torch.Tensor) -> torch.Tensor:
        """Return topk_weights, NaN if the plan had no room for all rows, so that gradients become NaN too."""
        return topk_weights


def make_plan(
    placement: ExpertPlacement,
    handle: DispatchHandle,
    order: tuple[int, ...] | None,
    ends: Sequence[int],
    leaves: Sequence[torch.Tensor],
    num_tokens: int,
    step: Step,
) -> Plan:
    """Exchange with the other ranks how many rows come -> the plan; TypeError for tokens of no expert's dtype.

    A kind of rows for a rank is one of its experts ("choice") or chunks ("token"). handle: rows in the order of
    sending. order [W * n]: place in handle.tokens_per_expert of each rank's counts, None if they lie by rank. ends:
    where chunks end among the n kinds. leaves: the tensors of the tokens. num_tokens: this rank's own.
    """
    dtype, device = leaves[0].dtype, handle.tokens_per_expert.device
    if dtype not in _DTYPES:
        raise TypeError(f"tokens must be float64, float32, bfloat16 or float16, but got {dtype}")
    width = sum(math.prod(leaf.shape[1:]) for leaf in leaves)
    facts = placement.layer_index, _DTYPES.index(dtype), width, len(ends), int(num_tokens > 0)
    limit, table = placement.row_limit, None if order is None else constant(order, device)
    counts, header = handle.tokens_per_expert, constant(facts, device)
    sent_WC = counts_to_send(counts, header, table, placement.size, limit is not None)
    if limit is not None:
        return StaticPlan(handle, sent_WC, placement, limit, step)
    if step.is_traced:
        return TracedPlan(handle, sent_WC, placement, step)
    return ExactPlan(handle, sent_WC, placement.group, ends, step)


class ExactPlan(Plan):
    """Rows in chunks, whose sizes a copy to the host brings. sent [W, C]: header and counts for each rank."""

    def __init__(
        self, handle: DispatchHandle, sent: torch.Tensor, group: str, ends: Sequence[int], step: Step
    ):
        self.row_idx, self.inverse = handle.row_idx, handle.inverse
        self._group, self._step = group, step
        self._columns = list(pairwise((_LENGTH, *(_LENGTH + end for end in ends))))
        self._received = step.exchange_counts(lambda: exchange_counts(sent, group), group)
        self._on_host: Sequence[torch.Tensor] = (sent, self._received)
        self._copied: torch.cuda.Event | None = None
        if sent.is_cuda:  # both in one copy, while the device goes on
            both = torch.stack((sent, self._received))
            copy = torch.empty_like(both, device="cpu", pin_memory=True).copy_(both, non_blocking=True)
            self._on_host, self._copied = copy.unbind(), torch.cuda.Event()
            self._copied.record()

    def chunks(self) -> list[ChunkRows]:
        """List the rows of each chunk; waits on a GPU for the sizes, which the collectives take from the host."""
        if self._copied is not None:
            self._copied.synchronize()
        check(self._group)  # the copy returns even after an abort
        sent, received = (counts.tolist() for counts in self._on_host)
        headers = [row[:_LENGTH] for row in received]
        self._step.note_empty_rank(not all(header[-1] for header in headers), self._group)
        _check_headers(headers, self._group)
        # rows to send lie by chunk, in each by rank
        self._chunks: list[ChunkRows] = []
        begin = 0
        for first, end in self._columns:
            to_rank, from_rank = ([sum(row[first:end]) for row in rows] for rows in (sent, received))
            self._chunks.append(ChunkRows(begin, to_rank, from_rank))
            begin = self._chunks[-1].rows.stop
        return self._chunks

    def columns_of(self, number: int) -> torch.Tensor:
        num_rows = sum(self._chunks[number].recv_splits)
        return columns_of_rows(self._received, num_rows, 0, *self._columns[number])


class StaticPlan(Plan):
    """As ExactPlan, in one chunk of limit.max_rows for each rank; sent has the most rows for one behind the header."""

    sizes = None  # for traced.py: every rank sends max_rows

    def __init__(
        self,
        handle: DispatchHandle,
        sent: torch.Tensor,
        placement: ExpertPlacement,
        limit: RowLimit,
        step: Step,
    ):
        group, num_ranks, self.max_rows = placement.group, placement.size, limit.max_rows
        self.num_rows = num_ranks * limit.max_rows  # N
        self.row_idx, self.inverse = pad_routing(
            handle.row_idx, handle.inverse, handle.tokens_per_expert, num_ranks, limit.max_rows
        )
        self._lost: torch.Tensor | None = None
        if step.is_traced and limit.is_read_now(sent):
            layout = placement.layout
            self._received = agree_on_rows(sent, limit.max_rows, layout, group, step.before_exchange)
            # It has raised, or this is False. The rows that are sent need it (mark_lost): otherwise a compiler could
            # send them first, or, if nobody else reads what was received, take agree_on_rows() out of the graph.
            self._lost = (self._received[:, _LENGTH] > limit.max_rows).any()
            return
        self._received = step.exchange_counts(lambda: exchange_counts(sent, group), group)
        if limit.is_read_now(sent):
            rows = self._received.tolist()
            check(group)
            step.note_empty_rank(not all(row[_LENGTH - 1] for row in rows), group)
            _check_headers(rows, group)
            limit.raise_for([row[_LENGTH] for row in rows])  # of all ranks, so that all raise or none
        else:
            self._lost = limit.note(self._received[:, _LENGTH], self._received[:, : len(_HEADER)])

    def chunks(self) -> list[ChunkRows]:
        splits = [self.max_rows] * len(self._received)
        return [ChunkRows(0, splits, splits)]

    def columns_of(self, number: int) -> torch.Tensor:
        return columns_of_rows(self._received, self.num_rows, self.max_rows, _LENGTH + 1)

    def mark_lost(self, topk_weights: torch.Tensor) -> torch.Tensor:
        return topk_weights if self._lost is None else topk_weights * torch.where(self._lost, torch.nan, 1.0)


class TracedPlan(Plan):
    """As ExactPlan, in one chunk, of a compiled graph."""

    max_rows = 0  # for traced.py: sizes has the rows

    def __init__(self, handle: DispatchHandle, sent: torch.Tensor, placement: ExpertPlacement, step: Step):
        self.row_idx, self.inverse = handle.row_idx, handle.inverse
        self._received = agree_on_rows(sent, 0, placement.layout, placement.group, step.before_exchange)
        sizes = (counts[:, _LENGTH:].sum(1) for counts in (sent, self._received))
        self.sizes = torch.stack(tuple(sizes)).cpu()  # [2, W]: rows to each rank, and from each
        self.num_rows = int(self.sizes[1].sum())  # N

    def columns_of(self, number: int) -> torch.Tensor:
        return columns_of_rows(self._received, self.num_rows, 0, _LENGTH)


@torch.library.custom_op("fmoe_ext::agree_on_rows", mutates_args=())
def agree_on_rows(
    sent: torch.Tensor, max_rows: int, layout: str, group: str, after: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Call exchange_counts() with sent [W, C], and check the headers on the host.

    max_rows: 0, or the limit of the first column after the header. layout: what must be the same on all ranks. after:
    results of exchanges that come first, on every rank in one order.
    """
    check_agreement(layout, group)
    received = exchange_counts(sent, group)
    rows = received[:, : _LENGTH + 1].tolist()
    check(group)
    _check_headers(rows, group)
    if max_rows:
        ranks = dist.get_process_group_ranks(find_group(group))
        RowLimit(max_rows, rows[0][0], ranks).raise_for([row[_LENGTH] for row in rows])
    return received


@agree_on_rows.register_fake
def _(
    sent: torch.Tensor, max_rows: int, layout: str, group: str, after: Sequence[torch.Tensor]
) -> torch.Tensor:
    return torch.empty_like(sent, memory_format=torch.contiguous_format)


def _check_headers(rows: list[list[int]], group_name: str) -> None:
    """Raise RuntimeError if the rows of all ranks begin with different headers; every rank sees all, so all raise."""
    headers = [row[: len(_HEADER)] for row in rows]
    if all(header == headers[0] for header in headers):
        return
    ranks = dist.get_process_group_ranks(find_group(group_name))
    texts = []
    for name, values in zip(_HEADER, zip(*headers, strict=True), strict=True):
        if len(set(values)) > 1:
            shown = [_DTYPES[v] if "dtype" in name else v for v in values]
            texts.append(f"{name} ({', '.join(f'rank {r}: {v}' for r, v in zip(ranks, shown, strict=True))})")
    raise RuntimeError(f"ranks {ranks} do not exchange the same tokens; they differ in {'; '.join(texts)}")
