"""HashGate: a table has the experts of each token of the vocabulary; nothing is chosen, only weighed.

Tokens are vectors by the time they reach a gate, so fmoe_ext.token_ids() around the model's call says which they were.
"""

from typing import Any

import torch

from fmoe_ext.gates.scored_gate import ScoredGate
from fmoe_ext.tokens import current_batch

SCORES = ("sqrtsoftplus", "sigmoid", "softmax")


class HashGate(ScoredGate):
    """The gate of DeepSeek-V4's first layers: a fixed table has the experts of each token, its scores weigh them.

    expert_of_id [vocab_size, K] int64 is a buffer (`tid2eid` of the published checkpoints), saved with the model. It
    begins with a random expert for each token of the vocabulary and K - 1 others at equal distances; copy another table
    into it with load_table(). `fmoe_ext.token_ids(input_ids)` around the model's call says which token is where:
    without it the forward raises ValueError. The weights are those of SqrtSoftplusGate for these choices: divided by
    their sum, times scale. score: one of "sqrtsoftplus", "sigmoid", "softmax". Other arguments: ScoredGate, without
    groups and balance losses, which could not change the choices.

    Hash layers: Roller et al., 2021, https://arxiv.org/abs/2106.04426

    Example:

        >>> gate = HashGate(d_model=8, num_expert=4, world_size=1, top_k=2, vocab_size=100)
        >>> with fmoe_ext.token_ids(torch.tensor([7, 3, 7])):
        ...     topk_idx, topk_weights = gate(torch.randn(3, 8))
        >>> torch.equal(topk_idx[0], topk_idx[2])
        True
    """

    expert_of_id: torch.Tensor  # [vocab_size, K] int64

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int,
        top_k: int = 2,
        gate_bias: bool = True,
        *,
        vocab_size: int,
        score: str = "sqrtsoftplus",
        balance_loss: None = None,
        **options: Any,
    ) -> None:
        if score not in SCORES:
            raise ValueError(f"score must be one of {', '.join(SCORES)}, but got {score!r}")
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, but got {vocab_size}")
        if balance_loss is not None or options.get("num_groups", 1) != 1:
            raise ValueError(
                "the choices of HashGate are fixed: it takes neither a balance_loss nor num_groups"
            )
        super().__init__(d_model, num_expert, world_size, top_k, gate_bias, balance_loss=None, **options)
        self.score = score
        self.register_buffer("expert_of_id", torch.empty(vocab_size, top_k, dtype=torch.int64))
        self._draw_table()

    def reset_parameters(self) -> None:
        """Draw a table; after .to_empty() of a gate made on the meta device."""
        super().reset_parameters()
        self._draw_table()

    @torch.no_grad()
    def _draw_table(self) -> None:
        # K different experts: the distance is E // K, so the last is less than E away from the first
        first = torch.randint(
            self.num_experts, (self.expert_of_id.shape[0], 1), device=self.expert_of_id.device
        )
        others = torch.arange(self.top_k, device=first.device) * (self.num_experts // self.top_k)
        self.expert_of_id.copy_((first + others) % self.num_experts)

    @torch.no_grad()
    def load_table(self, table: torch.Tensor) -> None:
        """Take the choices of a table [vocab_size, K] of integers; ValueError for other shapes and experts."""
        if table.shape != self.expert_of_id.shape:
            raise ValueError(f"the table must be {list(self.expert_of_id.shape)}, but is {list(table.shape)}")
        if table.is_floating_point() or int(table.min()) < 0 or int(table.max()) >= self.num_experts:
            raise ValueError(f"the table must hold numbers of experts, 0 to {self.num_experts - 1}")
        self.expert_of_id.copy_(table)

    def select(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def look_up() -> torch.Tensor:
            batch = current_batch()
            if batch.ids is None:
                raise ValueError(
                    "HashGate chooses by token: call the model inside fmoe_ext.token_ids(input_ids)"
                )
            ids: torch.Tensor = batch.take(batch.ids)  # [T]
            if ids.shape[0] != logits.shape[0]:
                raise ValueError(
                    f"token_ids has {ids.shape[0]} tokens, but the gate gets {logits.shape[0]}: give the tokens of "
                    "this rank, in the order in which the layer gets them"
                )
            return self.expert_of_id.index_select(0, ids.to(self.expert_of_id.device, torch.int64))

        topk_idx = self.choose(look_up)
        return topk_idx, self.weigh(logits, topk_idx)
