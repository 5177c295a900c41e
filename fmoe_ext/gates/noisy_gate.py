"""NoisyGate: top-k of logits with noise whose size is learned, and two losses that even out the load.

Counts of choices have no gradient. The noise gives the load one: the probability, over the noise of one expert alone,
that it is chosen is smooth in the logits (_prob_in_top_k), and its sum over tokens is the expected load.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from fmoe_ext.gates.base_gate import BaseGate, OneRank, Ranks
from fmoe_ext.gates.losses import cv_squared
from fmoe_ext.linear import wide_linear

_NOISE_FLOOR = 1e-2  # smallest standard deviation of the noise, so that the load is differentiable


class NoisyGate(BaseGate):
    """The gate of "Outrageously Large Neural Networks" (Shazeer et al. 2017): top-k of logits with learned noise.

    In training H(x) = x @ w_gate + N(0, 1) * (softplus(x @ w_noise) + 0.01), in evaluation without the noise; the
    weights are the softmax over the K chosen. loss = cv^2(importance) + cv^2(load) over all tokens of all ranks:
    importance the sum of the weights of each expert, load the expected number of its tokens when the noise is drawn
    again (in evaluation, and when every expert is chosen, the number of its tokens). float32 or wider throughout.

    Example:

        >>> gate = NoisyGate(d_model=8, num_expert=4, world_size=1, top_k=2)
        >>> topk_idx, topk_weights = gate(torch.randn(6, 8))
        >>> topk_idx.shape, torch.allclose(topk_weights.sum(1), torch.ones(6))
        (torch.Size([6, 2]), True)
    """

    def __init__(
        self, d_model: int, num_expert: int, world_size: int, top_k: int = 2, *, ranks: Ranks | None = None
    ) -> None:
        super().__init__(num_expert, world_size)
        self.check_top_k(top_k)
        self.top_k = top_k
        self.w_gate = nn.Parameter(torch.empty(d_model, self.num_experts))
        self.w_noise = nn.Parameter(torch.empty(d_model, self.num_experts))
        self.ranks: Ranks = OneRank() if ranks is None else ranks
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw both weights anew, as nn.Linear does."""
        nn.init.kaiming_uniform_(self.w_gate, a=math.sqrt(5))
        nn.init.kaiming_uniform_(self.w_noise, a=math.sqrt(5))

    @property
    def weights_vary(self) -> str | None:
        return None

    @property
    def depends_on_batch(self) -> str | None:
        return "it draws noise in training; model.eval() draws none" if self.training else None

    def forward(self, inp: torch.Tensor, return_all_scores: bool = False) -> tuple[torch.Tensor, ...]:
        """inp [T, d_model] -> topk_idx [T, K] int64, best first, topk_weights [T, K] float32 or float64.

        With return_all_scores also the logits [T, E] that were compared. Raises ValueError for another shape.
        """
        if inp.dim() != 2 or inp.shape[1] != self.w_gate.shape[0]:
            raise ValueError(
                f"inp must have shape [T, d_model={self.w_gate.shape[0]}], but got {list(inp.shape)}"
            )
        clean = wide_linear(inp, self.w_gate.t())  # [T, E]
        stddev = F.softplus(wide_linear(inp, self.w_noise.t())) + _NOISE_FLOOR
        noisy = clean + torch.randn_like(clean) * stddev if self.training else clean
        topk_idx, topk_weights = self.topk(noisy, self.top_k)
        gates = torch.zeros_like(noisy).scatter(1, topk_idx, topk_weights)  # [T, E]
        # counts of choices have no gradient; the probability of being chosen again, with other noise, has one
        if self.training and self.top_k < self.num_experts:
            load = self._prob_in_top_k(clean, noisy, stddev, noisy.topk(self.top_k + 1, dim=1).values).sum(0)
        else:
            load = self._gates_to_load(gates).to(clean.dtype)
        importance, load = self.ranks.sum(torch.stack((gates.sum(0), load))).unbind()
        self.set_loss(self.cv_squared(importance) + self.cv_squared(load))
        return (topk_idx, topk_weights, noisy) if return_all_scores else (topk_idx, topk_weights)

    # these two and cv_squared have FastMoE's names, by which its users call and override them
    def _gates_to_load(self, gates: torch.Tensor) -> torch.Tensor:
        """Count tokens with a weight above zero for each expert: gates [T, E] -> [E]."""
        return (gates > 0).sum(0)

    def _prob_in_top_k(
        self,
        clean_values: torch.Tensor,
        noisy_values: torch.Tensor,
        noise_stddev: torch.Tensor,
        noisy_top_values: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the probability [T, E] that an expert is chosen when its noise alone is drawn again.

        noisy_top_values [T, K + 1] are the largest noisy values: an expert among the K is compared with the value
        behind them, any other with the last of them.
        """
        kth, next_one = noisy_top_values[:, -2:].split(1, dim=1)
        # an expert whose own value is among the K leaves that place free: the next one is what it must beat
        others = torch.where(noisy_values > next_one, next_one, kth)  # best value that must be beaten
        lead = clean_values - others
        decided = ~lead.isfinite()  # an expert or the value to beat is -inf: no noise changes that
        drawn = torch.special.ndtr(lead.masked_fill(decided, 0) / noise_stddev)
        return torch.where(decided, (clean_values > others).to(drawn.dtype), drawn)

    def cv_squared(self, x: torch.Tensor) -> torch.Tensor:
        """Compute losses.cv_squared, under FastMoE's name."""
        return cv_squared(x)
