"""exchange="node": send a token once to a node that has some of its experts, and from there to their ranks.

It arrives on the rank that has its own rank's place on the other node, so that each network card carries the tokens of
one rank; inside the node it goes on as with exchange="token". With 2 nodes of 2 ranks, a token of rank 0 for experts on
ranks 2 and 3:

    rank 0 --network--> rank 2 (its place on node 1) --inside--> ranks 2 and 3

Results are summed on the experts' ranks, then on that rank, then at home. Its phases are those of schedule.Exchange.
Both steps are TokenExchanges: the first takes a node for one rank with all experts of the node. It is not cut into
chunks, for each of which a token would travel once.
"""

from __future__ import annotations

from typing import Any

import torch

from fmoe_ext.ep.schedule import Exchange
from fmoe_ext.ep.token_exchange import TokenExchange
from fmoe_ext.routing import ExpertInput
from fmoe_ext.tokens import Nest, leaves_of


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
        self._across.watch = self.watch
        self._across.plan()

    def send(self) -> None:
        self._across.send()

    def receive(self, number: int) -> ExpertInput:
        if number == 0:
            # what has come to this node goes on to the ranks of its experts
            tokens = self._across.receive(0)
            self._inside = TokenExchange(
                self._inside_placement,
                self._chunk_ends,
                tokens.x,
                tokens.topk_idx,
                tokens.topk_weights,
                self._step,
            )
            # its header says whether this rank has tokens of its own, not whether some pass
            self._inside.num_tokens = self.num_tokens
            self._inside.plan()
            self._inside.send()
        return self._inside.receive(number)

    def give_back(self, number: int, results: Nest) -> None:
        # behind all experts: up to here a checkpoint repeats the forward
        if number == len(self._chunk_ends) - 1:
            self._across.keep_for_backward(0, leaves_of(results))
        self._inside.give_back(number, results)

    def _collect(self) -> tuple[torch.Tensor, ...]:
        summed = self._inside.combine()
        self._structure = self._inside._structure
        self._across.give_back(0, summed)
        return tuple(leaves_of(self._across.combine()))
