"""Static mode: every message has max_rows_per_rank rows for each peer, so that no size comes from the device.

What is not filled is padding, rows of zeros for no expert. A step then needs no copy to the host and can be captured in
a CUDA graph.

Letters of shapes: T tokens, K choices of a token, W ranks, M = max_rows_per_rank.
"""

import torch
import torch.nn.functional as F
from torch import nn

from fmoe_ext.ep import expert_parallel_layers
from fmoe_ext.ep.exchange import check
from fmoe_ext.routing import DispatchHandle


def pad_routing(
    handle: DispatchHandle, num_ranks: int, max_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Places in a send buffer in which the rows for rank p begin at p * max_rows.

    handle: of rows sorted by rank -> row_idx [W * M], inverse [T, K], and the rows that each rank needs [W], which may
    be more than M: such rows are left out.
    """
    needed = handle.tokens_per_expert.view(num_ranks, -1).sum(1)  # [W]
    ends = needed.cumsum(0)
    begins = ends - needed
    place = torch.arange(max_rows, device=ends.device)
    num_rows = handle.row_idx.shape[0]
    source = torch.where(place < needed[:, None], begins[:, None] + place, num_rows)  # [W, M]
    # padding reads the entry behind the last, -1, for which permute() writes zeros
    row_idx = F.pad(handle.row_idx, (0, 1), value=-1)[source.flatten()]
    rank = torch.bucketize(handle.inverse, ends, right=True).clamp(max=num_ranks - 1)  # [T, K]
    place = handle.inverse - begins[rank]
    fits = (handle.inverse >= 0) & (place < max_rows)
    inverse = torch.where(fits, rank * max_rows + place, -1).to(torch.int32)
    return row_idx, inverse, needed


def columns_of_rows(counts: torch.Tensor, max_rows: int) -> torch.Tensor:
    """counts [W, n], what each rank sent -> the rows' columns [W * M, 1] int32, -1 for padding."""
    place = torch.arange(max_rows, device=counts.device).expand(counts.shape[0], -1).contiguous()
    column = torch.searchsorted(counts.cumsum(1), place, right=True)
    return torch.where(column < counts.shape[1], column, -1).to(torch.int32).view(-1, 1)


class RowLimit:
    """max_rows_per_rank of one layer, and what the ranks of its group have needed.

    On the CPU a step that needs more raises. On CUDA, where asking would wait for the device, what it computes is NaN
    on every rank, and raise_if_passed() raises when check_max_rows() is called.
    """

    def __init__(self, max_rows: int, layer_index: int, ranks: list[int]):
        self.max_rows = max_rows
        self.layer_index = layer_index
        self.ranks = ranks
        self.raises_at_once: bool | None = None  # None: where the tensors are on the CPU
        # [W + 1]: the most rows since the last look; 1 if the ranks were in different layers
        self._seen: torch.Tensor | None = None

    def is_read_now(self, x: torch.Tensor) -> bool:
        """True if too many rows raise in this forward, which reads their number on the host."""
        return not x.is_cuda if self.raises_at_once is None else self.raises_at_once

    def note(self, needed: torch.Tensor, headers: torch.Tensor) -> torch.Tensor:
        """Keeps for raise_if_passed() what would be an error now -> whether all is lost, a bool on the device.

        needed [ranks]: the most rows that each rank has for one peer. headers [ranks, n]: to be equal.
        """
        differ = (headers != headers[:1]).any().long().view(1)
        seen = torch.cat((needed, differ))
        if self._seen is None:
            self._seen = torch.zeros_like(seen)
        # in place: a CUDA graph goes on writing to the tensor that it was captured with
        self._seen.copy_(torch.maximum(self._seen, seen))
        return (needed > self.max_rows).any() | (differ > 0).any()

    def raise_if_passed(self, group: str) -> None:
        """Raise what note() has kept, and start anew; waits for the device. group: the layer's."""
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
        """RuntimeError if one of the needed rows, a list by rank, is more than max_rows."""
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
    """Raises RuntimeError if a layer of a module has passed its max_rows_per_rank since the last call.

    It waits for the device. Every rank of the layer's group gets the same error, which names layer, rank, rows and
    bound. On the CPU the forward itself raises it.
    """
    for _, layer in expert_parallel_layers(module):
        experts = layer.expert_parallel
        if experts.row_limit is not None:
            experts.row_limit.raise_if_passed(experts.group)
