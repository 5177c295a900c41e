"""SwipeGate: in training every rank gets as many choices as its own tokens make; what is over moves to ranks with room.

All ranks gather all choices once and fill the same queues, so that each knows where its own go. They are filled with
the first choices of all tokens, then with the second ones, and so on:

    place in the queue of a rank <= its capacity    stays
    the others, in order                            fill the room that is left on rank 0, then on rank 1, ...
"""

import torch

from fmoe_ext import ops
from fmoe_ext.gates.naive_gate import GateOverRanks
from fmoe_ext.gates.scores import weights_of


class SwipeGate(GateOverRanks):
    """NaiveGate that in training gives every rank as many choices as its own tokens make.

    A rank with T tokens takes T * top_k choices. For k = 0, 1, ... the k-th choices of all tokens are admitted in the
    order of ranks and tokens; then those whose rank was full go to the first rank with room, there to its expert
    k % num_expert. The weights are those of the experts that were taken, as NaiveGate's (normalize=). On one rank this
    is NaiveGate. Which rank has a token matters: one process does the same as several only if it gets the parts of its
    batch, through ranks=.

    Example:

        >>> mlp = fmoe_ext.FMoETransformerMLP(num_experts=4, d_model=8, d_hidden=16, gate=SwipeGate)
        >>> mlp(torch.randn(10, 8)).shape
        torch.Size([10, 8])
    """

    @property
    def depends_on_batch(self) -> str | None:
        if not self.training or self.world_size == 1:
            return None
        return "it moves choices to ranks that have room in training; NaiveGate moves none"

    def forward(self, inp: torch.Tensor, return_all_scores: bool = False) -> tuple[torch.Tensor, ...]:
        """As NaiveGate.forward; a token may have the same expert twice."""
        if not self.training or self.world_size == 1:
            return super().forward(inp, return_all_scores)
        logits = self.logits(inp)
        topk_idx = self.choose(lambda: self._swipe(ops.topk_gate(logits.detach(), self.top_k)[0]))
        topk_weights = weights_of(logits, topk_idx, normalize=self.normalize)
        self.set_loss(logits.new_zeros(1), constant=True)
        return (topk_idx, topk_weights, logits) if return_all_scores else (topk_idx, topk_weights)

    def _swipe(self, topk_idx: torch.Tensor) -> torch.Tensor:
        parts = self.ranks.gather(topk_idx)  # [T, K] of each rank
        sizes = [part.shape[0] for part in parts]
        if len(sizes) != self.world_size:
            raise RuntimeError(
                f"SwipeGate moves tokens between {self.world_size} ranks, but its ranks= knows {len(sizes)}"
            )
        # [ranks]: choices that each rank takes
        capacity = torch.tensor(sizes, device=topk_idx.device) * self.top_k
        everyone, columns = torch.cat(parts), []
        for k in range(self.top_k):
            column, capacity = self._admit(everyone[:, k], capacity, k % self.num_local_experts)
            columns.append(column)
        begin = sum(sizes[: self.ranks.rank])
        return torch.stack(columns, dim=1).narrow(0, begin, topk_idx.shape[0])

    def swipe_once(
        self, idx: torch.Tensor, capacity: torch.Tensor, bias: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Admit one choice of every token: idx [T], capacity [ranks] -> idx [T], the capacity that is left.

        FastMoE's function. capacity may be a scalar, the room of this rank; so is what is left then.
        bias: number of the expert, among those of a rank, that takes what is moved there.
        A choice without room anywhere goes to the last rank.
        """
        if capacity.dim() == 0:
            room = torch.cat(self.ranks.gather(capacity.to(idx.device).reshape(1), same_size=True))
            moved, left = self.swipe_once(idx, room, bias)
            return moved, left[self.ranks.rank]
        parts = self.ranks.gather(idx)
        moved, left = self._admit(torch.cat(parts), capacity, bias)
        begin = sum(part.shape[0] for part in parts[: self.ranks.rank])
        return moved.narrow(0, begin, idx.shape[0]), left

    def _admit(
        self, everyone: torch.Tensor, capacity: torch.Tensor, bias: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute swipe_once for the choices of all ranks [T of all ranks]."""
        # 1. Which rank each asks for.
        rank = everyone // self.num_local_experts
        to_rank = torch.nn.functional.one_hot(rank, self.world_size)  # [T of all ranks, ranks]
        # 2. The queue of each rank: the place of a choice in it, counted from 1, over the tokens of all ranks.
        place = to_rank.cumsum(0).gather(1, rank[:, None]).squeeze(1)
        admitted = place <= capacity[rank]
        capacity = capacity - torch.minimum(to_rank.sum(0), capacity)
        # 3. Choices that found no room fill the room of rank 0 first, then of rank 1, ...
        ends = capacity.cumsum(0)
        turn = (~admitted).long().cumsum(0) - 1
        target = torch.searchsorted(ends, turn, right=True).clamp(max=self.world_size - 1)
        moved = torch.where(admitted, everyone, target * self.num_local_experts + bias)
        # 4. What they used goes off the room of each rank, in the same order.
        used = (~admitted).sum().clamp(max=ends[-1])
        begins = ends - capacity
        capacity = capacity - (used - begins).clamp(min=0).minimum(capacity)
        return moved, capacity
