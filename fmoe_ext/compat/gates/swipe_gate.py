"""fmoe.gates.swipe_gate."""

import torch

from fmoe_ext.compat import _ranks
from fmoe_ext.compat.gates.naive_gate import NaiveGate
from fmoe_ext.ep.ranks import GroupRanks
from fmoe_ext.gates.base_gate import OneRank
from fmoe_ext.gates.swipe_gate import SwipeGate as _SwipeGate


class SwipeGate(NaiveGate, _SwipeGate):
    """SwipeGate with topk_weights of the model's dtype; outside a layer its ranks are those of ensure_comm()."""

    def swipe_once(
        self, idx: torch.Tensor, capacity: torch.Tensor, bias: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._find_ranks()
        return super().swipe_once(idx, capacity, bias)

    def _swipe(self, topk_idx: torch.Tensor) -> torch.Tensor:
        self._find_ranks()
        return super()._swipe(topk_idx)

    def _find_ranks(self) -> None:
        if self.world_size > 1 and type(self.ranks) is OneRank:
            self.ranks = GroupRanks(_ranks.get_group())


__all__ = ["SwipeGate"]
