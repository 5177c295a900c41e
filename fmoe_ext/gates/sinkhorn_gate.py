from collections.abc import Mapping
from typing import Any

import torch

from fmoe_ext import ops
from fmoe_ext.gates.base_gate import OneRank, Ranks, weights_of
from fmoe_ext.gates.scored_gate import ScoredGate

TOLERANCE = 1e-4
EPSILON = 1e-8
MAX_ROUNDS = 1000


class SinkhornGate(ScoredGate):
    """Balanced choices instead of a balance loss: top-k of the logits after Sinkhorn's iteration.

    In training exp(logits) is scaled until every token and every expert has its even share, over the tokens of all
    ranks, and each token takes the top_k of that (S-BASE of "Unified Scaling Laws for Routed Language Models", 2022;
    Megatron's `--moe-router-load-balancing-type sinkhorn`, over the tokens of each rank). In evaluation it takes the
    top_k of the logits. The weights are those of the unscaled logits: the sigmoid for top_k=1, else the softmax over
    all experts, neither divided by its sum. A round of the iteration waits for the device, and for the other ranks; in
    a compiled graph all rounds are one operator.
    Arguments: ScoredGate without normalize and groups.
    """

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int,
        top_k: int = 2,
        gate_bias: bool = True,
        *,
        balance_loss: str | Mapping[str, float] | None = None,
        **options: Any,
    ) -> None:
        for name in ("normalize", "num_groups", "topk_groups", "group_best"):
            if name in options:
                raise ValueError(f"SinkhornGate has no {name}, but got {name}={options[name]!r}")
        options |= {"balance_loss": balance_loss, "normalize": False}
        super().__init__(d_model, num_expert, world_size, top_k, gate_bias, **options)
        self.score = "sigmoid" if top_k == 1 else "softmax"

    @property
    def depends_on_batch(self) -> str | None:
        if self.training:
            return "in training it balances the choices of a batch; eval() chooses by the token"
        return super().depends_on_batch

    def select(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.training:
            return self.topk(logits, self.top_k, self.score, self.normalize, self.scale)
        topk_idx = self.choose(lambda: ops.topk_gate(self._shares(logits.detach()), self.top_k)[0])
        return topk_idx, weights_of(logits, topk_idx, self.score, self.normalize, self.scale)

    def _shares(self, logits: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            return balanced_shares(logits, self.ranks)
        # A graph cannot end rounds by the numbers: there they are one operator.
        over_ranks = getattr(self.ranks, "balanced_shares", _balanced_shares)
        shares: torch.Tensor = over_ranks(logits)
        return shares

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.softmax(-1)


def balanced_shares(logits: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """exp(logits) [T, E], rows and columns scaled in turn until those of all ranks have even sums, to about 1e-4.

    The scores that SinkhornGate ranks; rows sum to 1 / T and columns to 1 / E, T the tokens of all ranks.
    """
    num_experts = logits.shape[1]
    # A factor of a row changes its own scale alone; a token that is not a number weighs nothing.
    cost = (logits - logits.amax(1, keepdim=True)).exp().nan_to_num(0.0)
    num_tokens = _sum_over_ranks(cost.new_ones(len(cost), 1), ranks).clamp(min=1)
    of_expert = cost.new_ones(1, num_experts)
    for _ in range(MAX_ROUNDS):
        before = of_expert
        of_token = 1 / (num_tokens * ((before * cost).sum(1, keepdim=True) + EPSILON))  # [T, 1]
        of_expert = 1 / (num_experts * (_sum_over_ranks(of_token * cost, ranks) + EPSILON))
        if not (before - of_expert).abs().mean() > TOLERANCE:
            break
    return of_expert * cost * of_token


@torch.library.custom_op("fmoe_ext::balanced_shares", mutates_args=())
def _balanced_shares(logits: torch.Tensor) -> torch.Tensor:
    return balanced_shares(logits, OneRank())


@_balanced_shares.register_fake
def _(logits: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(logits)


def _sum_over_ranks(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """x [T, N] -> [1, N], the same bits on every rank, of this microbatch alone; a repeated forward does not come here.

    ranks.sum() would add other microbatches (accumulation.py), and tell a repeated forward what it did not ask.
    """
    return torch.cat(ranks.gather(x.sum(0, keepdim=True), same_size=True)).sum(0, keepdim=True)
