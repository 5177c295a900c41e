"""Bound the rows of a message (max_rows_per_rank), and notice where the bound was passed.

In static mode every message has max_rows_per_rank rows for each peer, so that no size comes from the device; what is
not filled is padding, rows of zeros for no expert. A step then needs no copy to the host and can be captured in a CUDA
graph. plan.StaticPlan makes such messages.

Letters of shapes: W ranks.
"""

import torch
from torch import nn

from fmoe_ext.ep import expert_parallel_layers
from fmoe_ext.ep.exchange import check


class RowLimit:
    """max_rows_per_rank of one layer, and how many rows the ranks of its group have needed.

    On the CPU a step that needs more raises. On CUDA, where to read the number would wait for the device, all that the
    step computes is NaN on every rank, and check_max_rows() raises when it is called.
    """

    def __init__(self, max_rows: int, layer_index: int, ranks: list[int]):
        self.max_rows = max_rows
        self.layer_index = layer_index
        self.ranks = ranks
        self.raises_at_once: bool | None = None  # None: where the tensors are on the CPU
        # [W + 1]: the most rows since the last look; 1 if the ranks were in different layers
        self._seen: torch.Tensor | None = None

    def is_read_now(self, x: torch.Tensor) -> bool:
        """Return whether too many rows raise in this forward, which reads their number on the host."""
        return not x.is_cuda if self.raises_at_once is None else self.raises_at_once

    def note(self, needed: torch.Tensor, headers: torch.Tensor) -> torch.Tensor:
        """Keep the numbers for raise_if_passed() -> whether this step's results are lost, a bool on the device.

        needed [W]: the most rows that each rank has for one peer. headers [W, n]: equal if nothing is wrong.
        """
        differ = (headers != headers[:1]).any().long().view(1)
        seen = torch.cat((needed, differ))
        if self._seen is None:
            # forwards that train will write to it, which an inference tensor refuses
            with torch.inference_mode(False):
                self._seen = torch.zeros_like(seen)
        # in place: a CUDA graph goes on writing to the tensor that it was captured with
        self._seen.copy_(torch.maximum(self._seen, seen))
        return (needed > self.max_rows).any() | (differ > 0).any()

    def raise_if_passed(self, group: str) -> None:
        """Raise RuntimeError if note() has kept an error, and start anew; waits for the device. group: the layer's."""
        if self._seen is None:
            return
        *needed, differ = self._seen.tolist()
        check(group)
        self._seen.zero_()
        self.raise_for(needed)
        if differ:
            raise RuntimeError(
                f"{self._name()}: ranks did not exchange the same tokens in an earlier step; they differed in the "
                "layer, the dtype of the tokens or the elements of a token"
            )

    def raise_for(self, needed: list[int]) -> None:
        """Raise RuntimeError if one of the needed rows, a list by rank, is more than max_rows."""
        passed = [
            f"rank {rank} has {rows} rows for another rank"
            for rank, rows in zip(self.ranks, needed, strict=True)
            if rows > self.max_rows
        ]
        if passed:
            raise RuntimeError(
                f"{self._name()}: max_rows_per_rank is {self.max_rows}, but {'; '.join(passed)}"
            )

    def _name(self) -> str:
        return f"layer {self.layer_index} of the group of ranks {self.ranks}"


def check_max_rows(module: nn.Module) -> None:
    """Raise RuntimeError if a layer of a module has passed its max_rows_per_rank since the last call.

    It waits for the device. Every rank of the layer's group gets the same error, which names layer, rank, rows and
    bound. On the CPU the forward itself raises it.
    """
    for _, layer in expert_parallel_layers(module):
        experts = layer.expert_parallel
        if experts.row_limit is not None:
            experts.row_limit.raise_if_passed(experts.group)
