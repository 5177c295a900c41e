"""exchange="token": send a token once to each rank that has experts of it, and sum its results there.

DeepEP and its followers call it a deduplicated dispatch. The phases are those of schedule.Exchange; what a row is
differs. The numbers of the experts and the weights of all choices go with the token. With chunks a token goes once to
each chunk of a rank. Such a chunk is a way: the choices of a token that go one way share a row, which stands where the
first of them would. With 2 experts a rank, one chunk:

    token chose experts 0, 3, 1    ways 0, 1, 0    2 rows: to rank 0 for [0, -1, 1], to rank 1 for [-1, 1, -1]

Letters of shapes: T tokens, K choices of a token, E experts, R rows to send, one for each token and way it goes, N rows
that come.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from fmoe_ext import ops
from fmoe_ext.ep.placement import constant
from fmoe_ext.ep.schedule import Exchange
from fmoe_ext.ops.exchange_rows import experts_of_rows, token_ways
from fmoe_ext.routing import DispatchHandle, sort_choices


class TokenExchange(Exchange):
    """An Exchange with a row for each token and chunk of a rank that the token has chosen an expert of."""

    def _sort(self) -> tuple[DispatchHandle, tuple[int, ...] | None, Sequence[int]]:
        """Sort by way: one choice of a token stands for all that go the same way."""
        num_chunks = len(self._chunk_ends)
        num_ways = self._placement.size * num_chunks
        ways_E = constant(self._tables.ways, self._topk_idx.device)
        self._way_TK, first_TK = token_ways(self._topk_idx, ways_E)
        handle = sort_choices(first_TK, num_ways)
        num_tokens, top_k = first_TK.shape
        if top_k > num_ways:  # no token has more rows than ways
            handle = dataclasses.replace(handle, row_idx=handle.row_idx[: num_tokens * num_ways])
        return handle, self._tables.ways_by_rank, range(1, num_chunks + 1)

    def _pack_choices(self, weights: torch.Tensor) -> list[torch.Tensor]:
        """Make the local number of each choice's expert [R, K], -1 where it goes another way, and weights [R, K]."""
        row_idx, inverse = self._plan.row_idx, self._plan.inverse
        local_E = constant(self._tables.local_numbers, self._topk_idx.device)
        is_wide = self._placement.num_local_experts >= 2**15  # else int16, since they travel
        expert_RK = experts_of_rows(self._topk_idx, self._way_TK, local_E, row_idx, is_wide)
        return [expert_RK, ops.permute(weights, row_idx, inverse)]

    def _experts_of(self, number: int, first: int, *received: torch.Tensor) -> torch.Tensor:
        (expert_NK,) = received
        if first == 0:
            return expert_NK.to(torch.int32)
        return torch.where(expert_NK < 0, -1, expert_NK - first).to(torch.int32)
