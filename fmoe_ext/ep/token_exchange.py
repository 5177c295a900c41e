"""Send a token once to each rank, or each node, that has experts of it: exchange="token" and exchange="node".

The phases of both are those of schedule.Exchange.

exchange="token", a deduplicated dispatch as DeepEP and its followers call it: a row is a token, with the expert numbers
and weights of all its choices, and its results are summed where it was sent. A way is one chunk of one rank, and a
token goes once each way. Its choices of one way share a row, at the place of the first. With 2 experts a rank, one
chunk:

    token chose experts 0, 3, 1    ways 0, 1, 0    2 rows: to rank 0 for [0, -1, 1], to rank 1 for [-1, 1, -1]

exchange="node": a token arrives on the rank with the same place in its node as the rank that it came from, so that each
network card carries the tokens of one rank; inside the node it goes on as with "token". With 2 nodes of 2 ranks, a
token of rank 0 for experts on ranks 2 and 3:

    rank 0 --network--> rank 2 (its place on node 1) --inside--> ranks 2 and 3

Results are summed on the experts' ranks, then on the rank where the token entered the node, then at home. Both steps
are TokenExchanges. The first treats a node as one rank that has all experts of the node, and sends everything in one
chunk: with more, a token would cross the network once for each. The second is cut into chunks as usual.

Letters of shapes: T tokens, K choices of a token, E experts, R rows to send, one for each token and way it goes, N rows
that come.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from fmoe_ext import ops
from fmoe_ext.ep.placement import constant
from fmoe_ext.ep.schedule import Exchange
from fmoe_ext.ep.traced import in_turn
from fmoe_ext.ops.exchange_rows import experts_of_rows, token_ways
from fmoe_ext.routing import DispatchHandle, ExpertInput, sort_choices
from fmoe_ext.tokens import Nest, leaves_of


class TokenExchange(Exchange):
    """An Exchange with a row for each token and each chunk of a rank in which the token has chosen an expert."""

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
        """Return for each row its token's local expert numbers [R, K], -1 for choices of another way, and weights."""
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


class NodeExchange(Exchange):
    """An Exchange of two TokenExchanges, one across nodes and one inside."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        nodes = self._placement.nodes
        assert nodes is not None
        nodes.place(self._placement.experts_in_place)
        self._inside_placement, ends = nodes.inside, [nodes.across.num_local_experts]
        self._across = TokenExchange(
            nodes.across, ends, self._x, self._topk_idx, self._topk_weights, self._step
        )

    def plan(self) -> None:
        self._across.plan()

    def send(self) -> None:
        self._across.send()
        self._rows = self._across._rows  # those under way while shadowed experts compute (shadow_input)
        self.lap("across")  # all of this step: more chunks hide none of it

    def receive(self, number: int) -> ExpertInput:
        if number == 0:
            # what has come to this node goes on to the ranks of its experts
            tokens = self._across.receive(0)
            self.lap("across")
            topk_idx, weights = tokens.topk_idx, tokens.topk_weights
            # on every rank the step inside follows the shadows' broadcast, and their reduction its backward
            if self._step.is_traced and self._placement.shadows:
                weights, topk_idx = in_turn([weights, topk_idx], leaves_of(self._shadowed)[0])
            self._inside = TokenExchange(
                self._inside_placement, self._chunk_ends, tokens.x, topk_idx, weights, self._step
            )
            # the header must say whether this rank's own batch is empty, not whether tokens of others pass through here
            self._inside.num_tokens = self.num_tokens
            self._inside.watch = self.watch
            self._inside.plan()
            self._inside.send()
        return self._inside.receive(number)

    def give_back(self, number: int, results: Nest) -> None:
        # After the last experts: a checkpoint repeats the forward up to here, while the gradients travel across nodes.
        if number == len(self._chunk_ends) - 1:
            self._across.keep_for_backward(0, leaves_of(results))
        self._inside.give_back(number, results)

    def _collect(self) -> tuple[torch.Tensor, ...]:
        summed = self._inside.combine()
        self._structure = self._inside._structure
        self._across.give_back(0, summed)
        results = tuple(leaves_of(self._across.combine()))
        self.lap("across")
        return results
