import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from typing_extensions import Unpack

from fmoe_ext.gates.balanced_gate import BalancedGate, BalanceOptions
from fmoe_ext.gates.base_gate import OneRank, weights_of
from fmoe_ext.gates.capacity import check_capacity, drop_over_capacity, expert_capacity
from fmoe_ext.gates.groups import Groups
from fmoe_ext.gates.naive_gate import with_noise


class ScoredGate(BalancedGate):
    """Base class of SoftmaxGate, SigmoidGate, SinkhornGate and UniformGate; subclasses name their score.

    * normalize divides the K weights by their sum (and norm_eps more), scale multiplies them afterwards;
    * balance_loss, balance_weight, seq_len, z_weight, ranks: BalancedGate;
    * num_groups, topk_groups: only the experts of each token's topk_groups best groups can be chosen; a group ranks
      by the sum of its group_best best scores, whose default each gate takes from its model (gates/groups.py);
    * jitter: training multiplies the input by noise, uniform in [1 - jitter, 1 + jitter];
    * random_logits: every forward draws its logits from N(0, 1), and the gate's own get their gradient unchanged: a
      random, nearly even load, for benchmarks only (Megatron's `--moe-router-force-load-balancing`);
    * capacity_factor: an expert takes ceil(capacity_factor * T * K / E) choices and the others become -1, by
      drop_policy "position" (first choices, then earlier tokens stay), "token" (earlier tokens stay, Megatron's
      "position") or "score" (larger weights stay); None, the default, drops nothing.
    """

    score = "softmax"

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int,
        top_k: int = 2,
        gate_bias: bool = True,
        *,
        scale: float = 1.0,
        norm_eps: float = 0.0,
        num_groups: int = 1,
        topk_groups: int = 1,
        group_best: int | None = None,
        jitter: float = 0.0,
        random_logits: bool = False,
        capacity_factor: float | None = None,
        drop_policy: str = "position",
        **options: Unpack[BalanceOptions],
    ) -> None:
        super().__init__(d_model, num_expert, world_size, top_k, gate_bias, **options)
        if not 0 < scale < math.inf:
            raise ValueError(f"scale must be a positive number, but got {scale}")
        if not 0 <= norm_eps < math.inf:
            raise ValueError(f"norm_eps must not be negative, but got {norm_eps}")
        if not 0 <= jitter < 1:
            raise ValueError(f"jitter must be in [0, 1), but got {jitter}")
        check_capacity(capacity_factor, drop_policy)
        if num_groups < 1 or self.num_experts % num_groups != 0:
            raise ValueError(f"num_groups must divide the {self.num_experts} experts, but got {num_groups}")
        if not 1 <= topk_groups <= num_groups:
            raise ValueError(
                f"topk_groups must be between 1 and the {num_groups} groups, but got {topk_groups}"
            )
        eligible = self.num_experts // num_groups * topk_groups
        if self.top_k > eligible:
            raise ValueError(
                f"top_k must be at most the {eligible} experts of {topk_groups} of {num_groups} groups, "
                f"but got {self.top_k}"
            )
        self.scale = scale
        self.norm_eps = norm_eps
        self.num_groups = num_groups
        self.topk_groups = topk_groups
        self.group_best = self._default_group_best() if group_best is None else group_best
        if not 1 <= self.group_best <= self.num_experts // num_groups:
            raise ValueError(
                f"group_best must be between 1 and the {self.num_experts // num_groups} experts of a group, "
                f"but got {group_best}"
            )
        self.jitter = jitter
        self.random_logits = random_logits
        self.capacity_factor = capacity_factor
        self.drop_policy = drop_policy

    def forward(self, inp: torch.Tensor, return_all_scores: bool = False) -> tuple[torch.Tensor, ...]:
        """As NaiveGate.forward, with -1 for choices over the capacity."""
        if self.training and self.jitter > 0 and isinstance(inp, torch.Tensor):
            inp = with_noise(inp, self.jitter)
        logits = self.logits(inp)
        if self.random_logits:
            logits = self.draw_logits(logits) + (logits - logits.detach())  # + 0, which has the gradient
        topk_idx, topk_weights = self.select(logits)
        self.set_balance_loss(logits, topk_idx)
        if self.capacity_factor is not None:
            num_tokens = self.ranks.num_tokens(topk_idx.shape[0])
            capacity = expert_capacity(self.capacity_factor, num_tokens, self.top_k, self.num_experts)
            limits = self.num_experts, capacity, self.drop_policy
            topk_idx = drop_over_capacity(topk_idx, topk_weights, *limits, self.ranks)
        return (topk_idx, topk_weights, logits) if return_all_scores else (topk_idx, topk_weights)

    def _default_group_best(self) -> int:
        return 1

    @property
    def weight_sum(self) -> float:
        return self.scale

    @property
    def weights_vary(self) -> str | None:
        if self.normalize and self.norm_eps > 0:
            return f"it divides them by their sum and norm_eps={self.norm_eps} more; 0 adds nothing"
        return self._why_it_drops() or super().weights_vary

    @property
    def depends_on_batch(self) -> str | None:
        if self.capacity_factor is not None:
            return self._why_it_drops()
        if self.training and self.jitter > 0:
            return f"it draws noise of jitter={self.jitter}; 0 draws none"
        return (
            "it chooses at random; random_logits=False chooses by the token" if self.random_logits else None
        )

    def _why_it_drops(self) -> str | None:
        if self.capacity_factor is None:
            return None
        return f"it drops choices over its capacity_factor={self.capacity_factor}; None drops none"

    def select(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose by logits [T, E] -> topk_idx, topk_weights [T, K], before any choice is dropped."""
        return self._select(logits, None)

    def _select(self, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        groups = Groups(self.num_groups, self.topk_groups, self.group_best)
        if self.norm_eps == 0 and groups.fit_topk_gate(self.score, biased=bias is not None):
            counts: dict[str, Any] = {"num_groups": self.num_groups, "topk_groups": self.topk_groups}
            options = (self.score, self.normalize, self.scale)
            return self.topk(logits, self.top_k, *options, bias=bias, **counts)
        topk_idx = self.choose(
            lambda: groups.choose(logits.detach(), self.top_k, self.score, self.normalize, bias)
        )
        return topk_idx, self.weigh(logits, topk_idx)

    def weigh(self, logits: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
        """Weigh choices [T, K] -> [T, K], by the score, normalize, norm_eps and scale of this gate."""
        if not self.normalize or self.norm_eps == 0:
            return weights_of(logits, topk_idx, self.score, self.normalize, self.scale)
        scores = weights_of(logits, topk_idx, self.score, normalize=False)
        return scores / (scores.sum(-1, keepdim=True) + self.norm_eps) * self.scale

    def draw_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Draw random numbers instead of logits [T, E], with random_logits=True."""
        return torch.randn_like(logits)


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
        """Return whether this gate is a linear layer, a softmax and the balance loss of one rank, and no more."""
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
