"""SinkhornGate: no loss; in training tokens choose by shares that Sinkhorn's iteration evened out over the experts.

ops/balanced_shares.py is the iteration. In evaluation tokens choose by their logits.
"""

from collections.abc import Mapping
from typing import Any

import torch

from fmoe_ext import ops
from fmoe_ext.gates.scored_gate import ScoredGate
from fmoe_ext.ops.balanced_shares import balanced_shares, balanced_shares_traced


class SinkhornGate(ScoredGate):
    """Balanced choices instead of a balance loss: top-k of the logits after Sinkhorn's iteration.

    In training exp(logits) is scaled until every token and every expert has its even share, over the tokens of all
    ranks, and each token takes the top_k of that (S-BASE of "Unified Scaling Laws for Routed Language Models", 2022;
    Megatron's `--moe-router-load-balancing-type sinkhorn`, over the tokens of each rank). In evaluation it takes the
    top_k of the logits. The weights are those of the unscaled logits: the sigmoid for top_k=1, else the softmax over
    all experts, neither divided by its sum. A round of the iteration waits for the device, and for the other ranks; in
    a compiled graph all rounds are one operator.
    Arguments: ScoredGate without normalize, norm_eps and groups.

    Example:

        >>> gate = SinkhornGate(d_model=4, num_expert=4, world_size=1, top_k=1, gate_bias=False)
        >>> gate.gate.weight.data.copy_(torch.eye(4)).shape
        torch.Size([4, 4])
        >>> x = torch.eye(4) + 5 * torch.eye(4)[0]  # each token is best at expert 0, and then at its own
        >>> gate.eval()(x)[0].flatten().tolist()
        [0, 0, 0, 0]
        >>> sorted(gate.train()(x)[0].flatten().tolist())
        [0, 1, 2, 3]
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
        for name in ("normalize", "norm_eps", "num_groups", "topk_groups", "group_best"):
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

        def pick() -> torch.Tensor:
            # a graph cannot end rounds by the numbers: there they are one operator
            if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
                over_ranks = getattr(self.ranks, "balanced_shares", balanced_shares_traced)
                shares = over_ranks(logits.detach())  # [T, E]
            else:
                shares = balanced_shares(logits.detach(), self.ranks.gather)
            return ops.topk_gate(shares, self.top_k)[0]

        topk_idx = self.choose(pick)
        return topk_idx, self.weigh(logits, topk_idx)

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.softmax(-1)
