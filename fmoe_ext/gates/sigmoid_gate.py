"""SigmoidGate: balances loads by a bias instead of a loss. Two subclasses use other scores.

A balance loss pulls the router's weights away from what the model's own loss wants. Instead, each expert has a bias
that is added to its score for the selection alone, so that it has no gradient. Training counts the choices of each
expert (pending_load). After an optimizer's step, over the choices of all ranks,

    expert_bias[e] += bias_update_speed * sign(mean load - load[e])

Sums of whole numbers over the ranks are exact, so the biases of all copies stay equal to the bit.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fmoe_ext import ops
from fmoe_ext.gates.scored_gate import ScoredGate
from fmoe_ext.step import add_counts, count_choices, is_counted

FORWARDS_BEFORE_WARNING = 1000  # in training, without an update of a bias that should move


class SigmoidGate(ScoredGate):
    """The gate of DeepSeek-V3: sigmoid scores, balanced by a bias instead of an auxiliary loss.

    The bias is added to the scores for the selection only. At each step of a torch.optim optimizer that has a parameter
    of the gate, however many forwards came before it, update_bias() raises it by bias_update_speed for experts with
    less than the mean load of all ranks and lowers it for those with more (Wang et al. 2024, "Auxiliary-loss-free load
    balancing"). Every rank that counts must step. A step that torch.amp.GradScaler skips moves nothing; its choices
    count at the next. Where no such optimizer steps (a loop or library that writes parameters itself, or steps copies
    of them), call update_biases(model) after each step: a warning says so after 1000 forwards without an update.
    update_biases() after an optimizer's step does no harm: no choices are left to count. A gate without trainable
    parameters keeps its bias. Under Megatron's `--moe-router-enable-expert-bias`, Megatron moves it, at its own rate.

    DeepSeek-V3: top_k=8, num_groups=8, topk_groups=4, scale=2.5 (`routed_scaling_factor`), balance_loss="sequence",
    balance_weight=1e-4, gate_bias=False. Kimi K2 and GLM-4.5: one group, a scale of their own. bias_update_speed=0: the
    bias stays as it is, zero unless a checkpoint has another. biased="logits" adds the bias to the logits instead of
    the scores, without groups (Kolibri). A group ranks by the sum of its top_k // topk_groups best biased scores. The
    balance losses count the top_k of the scores without the bias and without groups, as equation 18 of the DeepSeek-V3
    report and Megatron do. Other arguments: ScoredGate.

    expert_bias [E] is a buffer (`e_score_correction_bias` of the published checkpoints), pending_load [E] the choices
    counted in training since the last update. Forwards that activation checkpointing repeats count once.

    Example:

        >>> gate = SigmoidGate(d_model=8, num_expert=4, world_size=1, top_k=1, bias_update_speed=0.5)
        >>> optimizer = torch.optim.SGD(gate.parameters(), lr=0.1)
        >>> topk_idx, topk_weights = gate(torch.ones(10, 8))  # all tokens choose one expert
        >>> topk_weights.sum().backward()
        >>> optimizer.step()
        >>> sorted(gate.expert_bias.tolist())
        [-0.5, 0.5, 0.5, 0.5]
    """

    score = "sigmoid"
    expert_bias: torch.Tensor  # [E] float32, added for the selection only
    pending_load: torch.Tensor  # [E] int64, choices since the last update

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int,
        top_k: int = 2,
        gate_bias: bool = True,
        *,
        bias_update_speed: float = 1e-3,
        biased: str = "scores",
        balance_loss: str | Mapping[str, float] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            d_model, num_expert, world_size, top_k, gate_bias, balance_loss=balance_loss, **options
        )
        if not bias_update_speed >= 0:
            raise ValueError(f"bias_update_speed must not be negative, but got {bias_update_speed}")
        if biased not in ("scores", "logits"):
            raise ValueError(f'biased must be "scores" or "logits", but got {biased!r}')
        if biased == "logits" and self.topk_groups < self.num_groups:
            raise ValueError(
                'biased="logits" cannot be limited to groups: leave num_groups and topk_groups out (got '
                f"{self.num_groups} and {self.topk_groups})"
            )
        self.bias_update_speed = bias_update_speed
        self.biased = biased
        self.register_buffer("expert_bias", torch.zeros(self.num_experts))
        self.register_buffer("pending_load", torch.zeros(self.num_experts, dtype=torch.int64))
        self._forwards_since_update = 0
        self._counted_since_update = 0
        self._follow_optimizers()

    def reset_parameters(self) -> None:
        """Begin without a bias and without counted choices; after .to_empty() of a gate made on the meta device."""
        super().reset_parameters()
        self.expert_bias.zero_()
        self.pending_load.zero_()

    def _default_group_best(self) -> int:
        return max(1, self.top_k // self.topk_groups)

    @property
    def moves_bias(self) -> bool:
        return self.bias_update_speed > 0

    def after_optimizer_step(self) -> None:
        """Call update_bias(); optimizer_steps.py calls this after an optimizer's step."""
        super().after_optimizer_step()
        if self.moves_bias:
            self.update_bias()

    @property
    def local_tokens_per_expert(self) -> torch.Tensor:
        """Return pending_load, under the name by which Megatron sums it over the ranks and empties it."""
        return self.pending_load

    def select(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bias = self.expert_bias.to(logits.dtype)
        if self.biased == "scores":
            topk_idx, topk_weights = self._select_with_bias(logits, bias)
        else:
            topk_idx = self.choose(lambda: ops.topk_gate(logits.detach() + bias, self.top_k)[0])
            topk_weights = self.weigh(logits, topk_idx)
        if self.training and is_counted():
            add_counts(self.pending_load, count_choices(topk_idx, self.num_experts))
            if not (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()):
                self._notice_missing_updates(topk_idx.numel())
        return topk_idx, topk_weights

    def _notice_missing_updates(self, num_choices: int) -> None:
        """Warn if the bias should move, and no optimizer has stepped the gate for a thousand forwards."""
        # numbers of the host: pending_load, on the device, is read once in a thousand forwards
        self._forwards_since_update += 1
        self._counted_since_update += num_choices
        moves = self.moves_bias and any(p.requires_grad for p in self.parameters())
        if self._forwards_since_update < FORWARDS_BEFORE_WARNING or not moves:
            return
        # where less is pending than was counted, Megatron has emptied pending_load, and moves the bias itself
        if int(self.pending_load.sum()) >= self._counted_since_update:
            warnings.warn(
                f"the expert_bias of a {type(self).__name__} has not moved for {self._forwards_since_update} training "
                "forwards: no torch.optim optimizer that has the gate's parameters has stepped since. Call "
                "fmoe_ext.gates.update_biases(model) after each step, or pass bias_update_speed=0",
                stacklevel=2,
            )
        self._forwards_since_update = self._counted_since_update = 0

    def balance_choices(self, logits: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
        """Return the top_k of the scores without bias and groups, as in equation 18 of the DeepSeek-V3 report."""
        return ops.topk_gate(logits.detach(), self.top_k, self.score)[0]

    @torch.no_grad()
    def update_bias(self) -> None:
        """Step the bias by the load of all ranks since the last step; no host synchronisation.

        All ranks of the gate's group call it. Without choices since the last one the bias stays as it is.
        """
        load = self.ranks.sum(self.pending_load)  # integers: float32 rounds those above 2^24
        self.expert_bias = self.expert_bias.float()  # where .half() or .bfloat16() had cast it
        # sign(mean load - own load), both multiplied by E: no division, so the numbers stay whole
        self.expert_bias += self.bias_update_speed * torch.sign(load.sum() - load * self.num_experts)
        self.pending_load.zero_()
        self._forwards_since_update = self._counted_since_update = 0


def update_biases(model: nn.Module) -> None:
    """Call update_bias() of every SigmoidGate of a model with a trainable parameter.

    Call it after each step where no torch.optim optimizer steps them.
    """
    for module in model.modules():
        if isinstance(module, SigmoidGate) and any(p.requires_grad for p in module.parameters()):
            module.update_bias()


class SqrtSoftplusGate(SigmoidGate):
    """The gate of DeepSeek-V4: scores sqrt(softplus(logit)), balanced by a bias that is added for the selection only.

    The weights are the scores of the chosen experts, divided by their sum. The bias moves as SigmoidGate's; arguments:
    SigmoidGate. Megatron's `--moe-router-score-function sqrtsoftplus`.

    Example:

        >>> gate = SqrtSoftplusGate(d_model=8, num_expert=4, world_size=1, top_k=2)
        >>> topk_idx, topk_weights = gate(torch.randn(10, 8))
        >>> topk_idx.shape, torch.allclose(topk_weights.sum(1), torch.ones(10))
        (torch.Size([10, 2]), True)
    """

    score = "sqrtsoftplus"

    @property
    def depends_on_batch(self) -> str | None:
        return "the last bits of PyTorch's softplus depend on a token's place; SigmoidGate's scores do not"

    def balance_choices(self, logits: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
        # by logits, whose order is that of the scores, which topk_gate does not have
        return ops.topk_gate(logits.detach(), self.top_k)[0]


class BiasedSoftmaxGate(SigmoidGate):
    """The gate of ERNIE 4.5: softmax scores, balanced by a bias that is added for the selection only.

    The weights are the softmax of the chosen logits. The bias moves as SigmoidGate's; arguments: SigmoidGate.

    Example:

        >>> gate = BiasedSoftmaxGate(d_model=8, num_expert=4, world_size=1, top_k=2)
        >>> gate.expert_bias[3] = 2.0  # more than any softmax: every token chooses expert 3
        >>> topk_idx, topk_weights = gate(torch.randn(10, 8))
        >>> (topk_idx == 3).any(1).all().item(), torch.allclose(topk_weights.sum(1), torch.ones(10))
        (True, True)
    """

    score = "softmax"
