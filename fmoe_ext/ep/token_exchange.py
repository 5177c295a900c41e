"""exchange="token": a token is sent once to a rank that has several of its experts, and its results are summed there.

DeepEP and its followers call it a deduplicated dispatch. The numbers of the experts and the weights of all choices go
with the token. With chunks it is once for each chunk of a rank that has an expert of it.

Letters of shapes: T tokens, K choices of a token, R rows that travel, one for each token and way it goes.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from fmoe_ext import ops
from fmoe_ext.ep.headers import constant, lookup
from fmoe_ext.ep.plan import Plan
from fmoe_ext.ep.schedule import Exchange
from fmoe_ext.routing import DispatchHandle, sort_choices
from fmoe_ext.tokens import leaves_of


class TokenExchange(Exchange):
    """An Exchange with a row for each token and chunk of a rank that the token has chosen an expert of."""

    def _sort(self) -> DispatchHandle:
        """One choice of a token stands for all that go the same way."""
        placement, num_chunks = self._placement, len(self._chunk_ends)
        ways = constant(placement.ways(self._chunk_ends), self._topk_idx.device)
        self._way = lookup(ways, self._topk_idx)  # [T, K]
        # -1 where an earlier choice of the token goes the same way, of [T, K, K] pairs
        repeats = (self._way.unsqueeze(2) == self._way.unsqueeze(1)).tril(-1).any(2)
        handle = sort_choices(torch.where(repeats, -1, self._way), placement.size * num_chunks)
        num_tokens, top_k = self._way.shape
        num_rows = num_tokens * min(top_k, placement.size * num_chunks)  # no token has more
        return dataclasses.replace(handle, row_idx=handle.row_idx[:num_rows])

    def _exchange_counts(self, handle: DispatchHandle) -> Plan:
        num_chunks = len(self._chunk_ends)
        counts = handle.tokens_per_expert.view(num_chunks, self._placement.size).T.contiguous()
        ends, leaves = range(1, num_chunks + 1), leaves_of(self._x)
        return self._placement.plan(handle, counts, ends, leaves, self.num_tokens, self._step)

    def _pack_choices(self, weights: torch.Tensor) -> list[torch.Tensor]:
        """The local number of each choice's expert [R, K], -1 where it goes another way, and all weights [R, K]."""
        row_idx, inverse = self._plan.row_idx, self._plan.inverse
        num_tokens, top_k = self._way.shape
        # [R]; padding is a token behind the last, which has chosen nothing
        token = torch.where(row_idx < 0, num_tokens, row_idx // top_k)
        way = F.pad(self._way, (0, 0, 0, 1), value=-1)[token]  # [R, K]
        # [T, K], counted on the experts' ranks, in a small dtype since it travels
        placement = self._placement
        local = [place % placement.num_local_experts for place in range(placement.num_experts)]
        of_expert = [
            local[placement.experts_in_place.index(expert)] for expert in range(placement.num_experts)
        ]
        dtype = torch.int16 if placement.num_local_experts < 2**15 else torch.int32
        expert = lookup(constant(tuple(of_expert), self._topk_idx.device), self._topk_idx).to(dtype)
        expert = F.pad(expert, (0, 0, 0, 1), value=-1)[token]  # [R, K]
        # the way that the row goes: the receiver must see only the choices that go it too
        own_way = way.gather(1, (row_idx.clamp(min=0) % top_k).long().unsqueeze(1))
        expert = torch.where(way == own_way, expert, -1)
        return [expert, ops.permute(weights, row_idx, inverse)]

    def _experts_of(self, number: int, first: int, *received: torch.Tensor) -> torch.Tensor:
        (expert,) = received
        return torch.where(expert < 0, -1, expert - first).to(torch.int32)
