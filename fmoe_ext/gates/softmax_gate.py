"""SoftmaxGate, the gate of most open models; NormedGate, the same behind a norm; UniformGate, for benchmarks."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fmoe_ext.gates.base_gate import OneRank
from fmoe_ext.gates.scored_gate import ScoredGate


class SoftmaxGate(ScoredGate):
    """Top-k of the softmax, the gate of most open models. Dropless; balance loss of the global batch.

    normalize=True (`norm_topk_prob`): the weights sum to 1, which is the same as a softmax after the top-k: Mixtral
    8x7B and 8x22B, Qwen3-MoE. normalize=False: the probabilities among all experts, softmax before the top-k: OLMoE,
    Qwen2-MoE, DeepSeekMoE 16B, DeepSeek-V2 (with num_groups, topk_groups and scale). Other arguments: ScoredGate.

    Example:

        >>> gate = SoftmaxGate(d_model=8, num_expert=4, world_size=1, top_k=2)
        >>> topk_idx, topk_weights = gate(torch.randn(10, 8))
        >>> topk_idx.shape, torch.allclose(topk_weights.sum(1), torch.ones(10))
        (torch.Size([10, 2]), True)
        >>> gate.get_loss().shape  # the balance loss
        torch.Size([])
    """

    score = "softmax"

    def forward(self, inp: torch.Tensor, return_all_scores: bool = False) -> tuple[torch.Tensor, ...]:
        """As NaiveGate.forward, with -1 for choices over the capacity."""
        if not return_all_scores and self._has_usual_options():
            chosen = self.choose_in_one_node(inp, num_counted=self.top_k)
            if chosen is not None:
                return chosen
        return super().forward(inp, return_all_scores)

    def _has_usual_options(self) -> bool:
        """Return whether this gate is a linear layer, a softmax and the balance loss of one rank, and no more.

        Then topk_gate_of_linear computes all of it (choose_in_one_node).
        """
        return (
            type(self) is SoftmaxGate
            and self.balance_losses == {"global": 1.0}
            and self.balance_loss == "global"
            and self.balance_weight == 1
            and self.z_weight == 0
            and self.scale == 1
            and (not self.normalize or self.norm_eps == 0)
            and self.topk_groups == self.num_groups
            and (self.jitter == 0 or not self.training)
            and not self.random_logits
            and self.capacity_factor is None
            and type(self.ranks) is OneRank
        )


class NormedGate(SoftmaxGate):
    """The gate of Gemma 4: SoftmaxGate behind an RMS norm, with a factor for each input and for each expert.

    logits = gate(rms_norm(x) * input_scale / sqrt(d_model)), with input_scale [d_model]; the weights of SoftmaxGate are
    multiplied by expert_scale [E]. Both begin as ones. rms_eps: of the norm. Other arguments: ScoredGate.

    Example:

        >>> gate = NormedGate(d_model=8, num_expert=4, world_size=1, top_k=2)
        >>> topk_idx, topk_weights = gate(torch.randn(10, 8))
        >>> torch.allclose(topk_weights.sum(1), torch.ones(10))
        True
    """

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int,
        top_k: int = 2,
        gate_bias: bool = True,
        *,
        rms_eps: float = 1e-6,
        **options: Any,
    ) -> None:
        super().__init__(d_model, num_expert, world_size, top_k, gate_bias, **options)
        self.rms_eps = rms_eps
        self.input_scale = nn.Parameter(torch.ones(d_model))
        self.expert_scale = nn.Parameter(torch.ones(self.num_experts))

    @property
    def weights_vary(self) -> str | None:
        return "it multiplies them by a factor for each expert; SoftmaxGate does not"

    def logits(self, inp: torch.Tensor) -> torch.Tensor:
        """As NaiveGate.logits, behind the norm."""
        if isinstance(inp, torch.Tensor):
            wide = inp.to(torch.promote_types(inp.dtype, torch.float32))
            inp = F.rms_norm(wide, wide.shape[-1:], eps=self.rms_eps) * self.input_scale * self.d_model**-0.5
        return super().logits(inp)

    def select(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        topk_idx, topk_weights = super().select(logits)
        return topk_idx, topk_weights * self.expert_scale[topk_idx.clamp(min=0).long()]


class UniformGate(ScoredGate):
    """Deals the tokens out to the experts in turn, for benchmarks of a perfectly balanced load.

    Choice k of token t, counted over the tokens of all ranks, is expert (t * K + k) % E; the weights are those of
    SoftmaxGate for these choices, so that the gate costs what a real one costs and learns. (Megatron's
    `--moe-router-force-load-balancing` draws at random.) Arguments: ScoredGate; groups have no effect.

    Example:

        >>> gate = UniformGate(d_model=8, num_expert=4, world_size=1, top_k=2)
        >>> topk_idx, topk_weights = gate(torch.randn(6, 8))
        >>> fmoe_ext.ops.count_tokens(topk_idx, 4)
        tensor([3, 3, 3, 3])
    """

    @property
    def depends_on_batch(self) -> str | None:
        return "an expert is chosen by a token's place in the batch; SoftmaxGate chooses by the token"

    def select(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def deal() -> torch.Tensor:
            turn = torch.arange(logits.shape[0] * self.top_k, device=logits.device)
            turn = turn + self.ranks.first_token(logits.shape[0]) * self.top_k
            return (turn % self.num_experts).view(-1, self.top_k)

        topk_idx = self.choose(deal)
        return topk_idx, self.weigh(logits, topk_idx)
