"""SwitchGate: one expert for each token, and none where that expert is full (Switch Transformer).

With one expert a token the weight is the probability among all experts, not 1, so that the router learns. The balance
loss counts the choices before any is dropped: it shall lower what overflows. On one rank's CPU, inside a layer that
trains, one operator chooses, counts and computes the loss (NaiveGate.choose_in_one_node says when), else the steps of
forward() do.
"""

from collections.abc import Sequence

import torch

from fmoe_ext import ops
from fmoe_ext.gates.base_gate import OneRank, Ranks
from fmoe_ext.gates.capacity import check_factors, expert_capacity, fits_drop_choices
from fmoe_ext.gates.losses import balance_loss_of_logits, sum_over_ranks
from fmoe_ext.gates.naive_gate import GateOverRanks, noise_like, with_noise
from fmoe_ext.step import count_choices


class SwitchGate(GateOverRanks):
    """The gate of the Switch Transformer: top-1 weighted by its probability, jitter, capacity, balance loss.

    * training multiplies the input by noise, uniform in [1 - switch_eps, 1 + switch_eps];
    * an expert takes ceil(capacity * T * K / E) choices, T the tokens of all ranks, with capacity[0] in
      training and capacity[1] in evaluation; the others become -1. capacity=None drops nothing;
    * loss = E * sum_e f_e * p_e: f_e the share of choices of expert e before any is dropped, p_e its mean
      probability over all tokens. 1 when balanced.
    additive_noise=True adds the noise to the logits, fastmoe_loss=True computes f_e from the choices that
    were kept and divides p_e by their number, both as FastMoE does.

    Example:

        >>> mlp = fmoe_ext.FMoETransformerMLP(num_expert=4, d_model=8, d_hidden=16, top_k=1, gate=SwitchGate)
        >>> mlp(torch.randn(10, 8)).shape
        torch.Size([10, 8])
    """

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int,
        topk: int = 1,
        switch_eps: float = 0.1,
        capacity: Sequence[float] | None = (1.2, 2.4),
        gate_bias: bool = True,
        *,
        additive_noise: bool = False,
        fastmoe_loss: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(d_model, num_expert, world_size, topk, gate_bias, normalize=False, ranks=ranks)
        if not switch_eps >= 0:
            raise ValueError(f"switch_eps must not be negative, but got {switch_eps}")
        if capacity is not None:
            check_factors(capacity)
        self.switch_eps = switch_eps
        self.capacity = capacity
        self.additive_noise = additive_noise
        self.fastmoe_loss = fastmoe_loss

    @property
    def depends_on_batch(self) -> str | None:
        if self.capacity is not None:
            return f"it drops choices over its capacity={self.capacity}; None drops none"
        if self.training and self.switch_eps > 0:
            return f"it draws noise of switch_eps={self.switch_eps}; 0 draws none"
        return None

    def forward(self, inp: torch.Tensor, return_all_scores: bool = False) -> tuple[torch.Tensor, ...]:
        """As NaiveGate.forward; the weights are probabilities among all experts."""
        # 1. All in one node, on one rank's CPU and without FastMoE's variants.
        adds_to_input = self.training and self.switch_eps > 0 and not self.additive_noise
        if adds_to_input and isinstance(inp, torch.Tensor):
            inp = with_noise(inp, self.switch_eps)
        is_usual = type(self) is SwitchGate and not (self.fastmoe_loss or self.additive_noise)
        is_usual = is_usual and type(self.ranks) is OneRank and not return_all_scores
        found = self.choose_in_one_node(inp, num_counted=self.top_k) if is_usual else None
        if found is not None:
            return self._drop_over_capacity(found[0]), found[1]
        # 2. The steps apart: choose, then drop and count at once or one after the other.
        logits = self.logits(inp)
        if self.training and self.switch_eps > 0 and self.additive_noise:
            logits = logits + noise_like(logits, self.switch_eps)
        chosen, topk_weights = self.topk(logits, self.top_k, normalize=False)
        if self.fastmoe_loss:
            topk_idx = self._drop_over_capacity(chosen)
            num_choices, prob_sum, _ = sum_over_ranks(logits.softmax(-1), topk_idx, self.ranks)
            total = num_choices.sum().clamp(min=1)
            self.set_loss(self.num_experts * torch.sum(num_choices / total * (prob_sum / total)))
        elif fits_drop_choices(chosen, self.ranks):
            if self.capacity is None:
                topk_idx, counts_E = chosen, count_choices(chosen, self.num_experts)
            else:  # dropping counts the choices of each column before it drops
                topk_idx, counts_KE = ops.drop_choices(chosen, self.num_experts, self._capacity_of(chosen))
                counts_E = counts_KE[0] if self.top_k == 1 else counts_KE.sum(0)
            self.set_loss(ops.balance_loss(logits, counts_E))
        else:
            topk_idx = self._drop_over_capacity(chosen)
            self.set_loss(balance_loss_of_logits(logits, chosen, ranks=self.ranks))
        return (topk_idx, topk_weights, logits) if return_all_scores else (topk_idx, topk_weights)

    def _drop_over_capacity(self, chosen: torch.Tensor) -> torch.Tensor:
        if self.capacity is None:
            return chosen
        if fits_drop_choices(chosen, self.ranks):
            return ops.drop_choices(chosen, self.num_experts, self._capacity_of(chosen))[0]
        return self.ranks.apply_capacity(chosen, self.num_experts, self._capacity_of(chosen))

    def _capacity_of(self, chosen: torch.Tensor) -> int:
        assert self.capacity is not None
        factor = self.capacity[0 if self.training else 1]
        num_tokens = self.ranks.num_tokens(chosen.shape[0])
        return expert_capacity(factor, num_tokens, self.top_k, self.num_experts)
