"""GShardGate: two experts for each token, the second at random, and a capacity (GShard); DCGate, with another capacity.

A second expert of small weight adds little, so it is kept with a probability that grows with its weight. On one rank's
CPU, inside a layer that trains, one operator chooses, counts first choices and computes the loss
(NaiveGate.choose_in_one_node says when), and drop_choices then drops. A GPU, several ranks, a user's subclass and a
compiled graph take the steps in forward().
"""

from collections.abc import Sequence

import torch

from fmoe_ext import ops
from fmoe_ext.gates.base_gate import OneRank, Ranks
from fmoe_ext.gates.capacity import check_factors, expert_capacity, fits_drop_choices
from fmoe_ext.gates.losses import balance_loss_of_logits
from fmoe_ext.gates.naive_gate import GateOverRanks


class GShardGate(GateOverRanks):
    """The gate of GShard: top-2 with normalised weights, capacity, random second choice and balance loss.

    * loss = E^2 * mean_e(c_e * m_e): c_e the share of tokens whose first choice is expert e, m_e its mean
      probability, over the tokens and the E experts of all ranks. 1 when balanced;
    * an expert takes ceil(capacity * T) * 2 // E choices, T the tokens of all ranks, with capacity[0] in
      training and capacity[1] in evaluation; first choices go before second ones, the rest becomes -1.
      Few tokens have a capacity of 0: of one token and 8 experts all choices are dropped, as in FastMoE;
    * random_routing: in training a second choice of weight w is kept with probability min(1, 2 * w). Those
      that are given up have taken their place in the capacity, as in the paper.
    FastMoE counts capacity over local tokens, scales the loss by the square of its local experts, and drops
    second choices in evaluation too.

    Example:

        >>> gate = partial(GShardGate, capacity=(1.25, 2.0))
        >>> mlp = fmoe_ext.FMoETransformerMLP(num_expert=4, d_model=8, d_hidden=16, gate=gate)
        >>> mlp(torch.randn(10, 8)).shape
        torch.Size([10, 8])
    """

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int,
        topk: int = 2,
        capacity: Sequence[float] = (1.2, 2.4),
        random_routing: bool = True,
        gate_bias: bool = True,
        *,
        ranks: Ranks | None = None,
    ) -> None:
        if topk != 2:
            raise ValueError(f"{type(self).__name__} chooses two experts: topk must be 2, but got {topk}")
        super().__init__(d_model, num_expert, world_size, topk, gate_bias, ranks=ranks)
        check_factors(capacity)
        self.capacity = capacity
        self.random_routing = random_routing

    @property
    def weights_vary(self) -> str | None:
        # one answer for both modes, though evaluation drops no second choice at random
        if self.random_routing:
            return "it drops second choices at random; random_routing=False keeps them"
        return self._why_it_drops(min(self.capacity)) or super().weights_vary

    @property
    def depends_on_batch(self) -> str | None:
        if self.training and self.random_routing:
            return "it drops second choices at random; random_routing=False keeps them"
        return self._why_it_drops(self.capacity[0 if self.training else 1])

    def _why_it_drops(self, factor: float) -> str | None:
        # Nothing is dropped if an expert has room for all tokens. Asked of many, as rounding up may make room for few
        many = 2**20 * self.num_experts
        if self.expert_capacity(factor, many) >= many:
            return None
        return f"it drops choices over its capacity {self.capacity}; a large enough one drops none"

    def forward(self, inp: torch.Tensor, return_all_scores: bool = False) -> tuple[torch.Tensor, ...]:
        """As NaiveGate.forward, with -1 for dropped choices."""
        # a subclass may have logits, choices or a loss of its own
        is_usual = type(self) in (GShardGate, DCGate) and type(self.ranks) is OneRank
        found = self.choose_in_one_node(inp, num_counted=1) if is_usual and not return_all_scores else None
        if found is not None:
            chosen, topk_weights = found
            return self._drop(chosen, topk_weights.detach())[0], topk_weights
        logits = self.logits(inp)  # [T, E]
        chosen, topk_weights = self.topk(logits, self.top_k)  # [T, 2]
        if fits_drop_choices(chosen, self.ranks):
            topk_idx, counts_2E = self._drop(chosen, topk_weights.detach())
            self.set_loss(ops.balance_loss(logits, counts_2E[0]))
        else:
            self.set_loss(balance_loss_of_logits(logits, chosen[:, :1], ranks=self.ranks))
            topk_idx = self.ranks.apply_capacity(chosen, self.num_experts, self._capacity_of(chosen))
            if self.random_routing and self.training:
                weight_T = topk_weights[:, 1].detach()
                # in place, as apply_capacity has made topk_idx
                topk_idx[:, 1].masked_fill_(2 * weight_T < torch.rand_like(weight_T), -1)
        return (topk_idx, topk_weights, logits) if return_all_scores else (topk_idx, topk_weights)

    def expert_capacity(self, factor: float, num_tokens: int) -> int:
        """Compute how many choices an expert takes of num_tokens tokens of all ranks."""
        return expert_capacity(factor, num_tokens) * self.top_k // self.num_experts

    def _capacity_of(self, chosen: torch.Tensor) -> int:
        factor = self.capacity[0 if self.training else 1]
        return self.expert_capacity(factor, self.ranks.num_tokens(chosen.shape[0]))

    def _drop(self, chosen: torch.Tensor, topk_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Drop chosen [T, 2] -> topk_idx [T, 2], -1 where dropped, and counts [2, E] by rank of choice before that."""
        random: tuple[torch.Tensor, ...] = ()
        if self.random_routing and self.training:
            noise = torch.rand(len(chosen), dtype=topk_weights.dtype, device=topk_weights.device)
            random = topk_weights, noise
        return ops.drop_choices(chosen, self.num_experts, self._capacity_of(chosen), *random)


class DCGate(GShardGate):
    """GShardGate with FastMoE's earlier capacity, which is not divided by the number of experts.

    An expert takes ceil(capacity * T / world_size) choices, T the tokens of all ranks; FastMoE counts the tokens of
    each rank instead, which is the same for equal batches. On one rank no expert is over a capacity >= 1.

    Example:

        >>> gate = DCGate(d_model=8, num_expert=4, world_size=1, random_routing=False)
        >>> topk_idx, topk_weights = gate(torch.ones(10, 8))  # all tokens choose the same two experts
        >>> (topk_idx == -1).sum().item()
        0
    """

    def expert_capacity(self, factor: float, num_tokens: int) -> int:
        return expert_capacity(factor, num_tokens, num_experts=self.world_size)
