"""ExpertChoiceGate: experts choose tokens, each the same number, so that no load has to be evened out."""

import torch

from fmoe_ext.gates.base_gate import Ranks
from fmoe_ext.gates.capacity import expert_capacity
from fmoe_ext.gates.naive_gate import GateOverRanks


class ExpertChoiceGate(GateOverRanks):
    """Experts choose tokens, so that every expert has the same load (Zhou et al. 2022, "Expert Choice Routing").

    Each expert takes the C = min(T, ceil(capacity_factor * T * top_k / E)) tokens that score it highest, with weight
    softmax(logits) over the experts; equal scores: the earlier token. top_k is the mean number of experts per token; a
    token may get none, or up to E, so the choices are [T, E], the ones given first and -1 behind.
    max_experts=m keeps only the m largest weights of a token and makes them [T, m], which saves memory where
    experts do not fuse the gather.

    Not for causal language models: whether an expert takes a token depends on later tokens of the batch, which training
    leaks and generation does not have. For encoders, vision and diffusion models.

    Example:

        >>> gate = ExpertChoiceGate(d_model=8, num_expert=4, world_size=1, top_k=2)
        >>> topk_idx, topk_weights = gate(torch.randn(10, 8))
        >>> fmoe_ext.ops.count_tokens(topk_idx, 4)  # 10 tokens, 2 experts each on average, over 4 experts
        tensor([5, 5, 5, 5])
    """

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int,
        top_k: int = 2,
        gate_bias: bool = True,
        *,
        capacity_factor: float = 1.0,
        max_experts: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(d_model, num_expert, world_size, top_k, gate_bias, ranks=ranks)
        if capacity_factor <= 0:
            raise ValueError(f"capacity_factor must be positive, but got {capacity_factor}")
        if max_experts is not None and not 1 <= max_experts <= self.num_experts:
            raise ValueError(
                f"max_experts must be between 1 and the {self.num_experts} experts, but got {max_experts}"
            )
        self.capacity_factor = capacity_factor
        self.max_experts = self.num_experts if max_experts is None else max_experts

    @property
    def weights_vary(self) -> str | None:
        return "its experts choose tokens, so a token may get any number of them"

    @property
    def depends_on_batch(self) -> str | None:
        return "its experts choose among the tokens of the batch; SoftmaxGate chooses by the token"

    def forward(self, inp: torch.Tensor, return_all_scores: bool = False) -> tuple[torch.Tensor, ...]:
        """inp [T, d_model] -> topk_idx [T, max_experts] int64, -1 behind, topk_weights likewise."""
        logits = self.logits(inp)
        scores = logits.softmax(-1)
        topk_idx = self.choose(lambda: self._pick(scores.detach()))
        topk_weights = scores.gather(1, topk_idx.clamp(min=0)).masked_fill(topk_idx < 0, 0)
        self.set_loss(logits.new_zeros(()), constant=True)  # balanced by construction
        return (topk_idx, topk_weights, logits) if return_all_scores else (topk_idx, topk_weights)

    def _pick(self, scores: torch.Tensor) -> torch.Tensor:
        parts = self.ranks.gather(scores)
        everyone = torch.cat(parts)  # [T of all ranks, E]
        capacity = expert_capacity(self.capacity_factor, everyone.shape[0], self.top_k, self.num_experts)
        tokens = everyone.sort(dim=0, descending=True, stable=True).indices[:capacity]  # [C, E]
        picked = torch.zeros_like(everyone, dtype=torch.bool).scatter_(0, tokens, True)
        # the rows of this rank's tokens: [T, E]
        begin = sum(part.shape[0] for part in parts[: self.ranks.rank])
        picked = picked.narrow(0, begin, scores.shape[0])
        # no probability is below 0, so -1 sorts what was not picked behind
        order = torch.where(picked, scores, -1).sort(dim=1, descending=True, stable=True)
        return torch.where(order.values < 0, -1, order.indices)[:, : self.max_experts].contiguous()
