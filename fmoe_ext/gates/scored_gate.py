"""ScoredGate: the base of gates that rank experts by a score, and even out their loads by a loss, a bias or a rule.

A forward has four parts, and a subclass changes some of them:

    logits(x) [T, E] -> select(logits): topk_idx, topk_weights [T, K] -> set_balance_loss() -> drop over the capacity

select() has the choice and weigh() its weights; balance_choices() says which choices the loss counts, for gates whose
bias or groups change them. The loss sees all choices, before any is dropped: it shall lower what overflows.

Groups. With E experts over many ranks, a token may go to K ranks. Group-limited choices bound that: each token takes
its topk_groups best of num_groups groups of neighbouring experts, and then the best experts of these. A group ranks by
the sum of its group_best best scores:
* 1, SoftmaxGate's default: DeepSeek-V2, section 2.2.2, "device-limited routing"; its `group_limited_greedy`;
* top_k // topk_groups, SigmoidGate's default: DeepSeek-V3, section 2.1.2, "node-limited routing", the sum of the
  highest K / M affinities; Megatron's `--moe-router-num-groups` for every score. Transformers' DeepseekV3 takes 2
  always, which is the same for the published K = 8 of 4 groups.
The scores are those that order the experts, the bias included; where the softmax comes after the top-k
(normalize=True), they are the logits, as in Megatron.
"""

import functools
import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from fmoe_ext import ops
from fmoe_ext._sharded import is_dtensor
from fmoe_ext.gates.base_gate import OneRank, Ranks
from fmoe_ext.gates.capacity import DROP_POLICIES, drop_over_capacity, expert_capacity
from fmoe_ext.gates.losses import balance_loss as balance_loss_of_scores
from fmoe_ext.gates.losses import (
    balance_loss_of_logits,
    balance_of_sums,
    sequence_balance_loss,
    sum_over_ranks,
    z_loss,
)
from fmoe_ext.gates.naive_gate import GateOverRanks, with_noise
from fmoe_ext.gates.scores import probabilities_of, scores_of, weights_of
from fmoe_ext.optimizer_steps import AfterOptimizerStep, follow_optimizers
from fmoe_ext.step import add_counts, forward_of_layer, is_counted, run_or_replay
from fmoe_ext.tokens import current_batch

BALANCE_LOSSES = ("global", "running", "sequence")


class ScoredGate(GateOverRanks):
    """Base of SoftmaxGate, SigmoidGate, QuantileGate, SinkhornGate, HashGate and UniformGate, which name their score.

    * normalize divides the K weights by their sum (and norm_eps more), scale multiplies them afterwards;
    * num_groups, topk_groups: only the experts of each token's topk_groups best groups can be chosen; a group ranks
      by the sum of its group_best best scores, whose default each gate takes from its model;
    * jitter: training multiplies the input by noise, uniform in [1 - jitter, 1 + jitter];
    * random_logits: every forward draws its logits from N(0, 1), and the gate's own get their gradient unchanged: a
      random, nearly even load, for benchmarks only (Megatron's `--moe-router-force-load-balancing`);
    * capacity_factor: an expert takes ceil(capacity_factor * T * K / E) choices and the others become -1, by
      drop_policy "position" (first choices, then earlier tokens stay), "token" (earlier tokens stay, Megatron's
      "position") or "score" (larger weights stay); None, the default, drops nothing.
    * balance_loss "global": E * sum_e f_e * p_e over the tokens of all ranks, the loss of the global batch;
      "running": the same with the f_e of all forwards since the optimizer's last step, this one included ("Demons in
      the Detail", 2025, section 3; Megatron's "global_aux_loss"): one pass, near the loss of the whole batch
      (gates.WholeBatch is exact, in two); "sequence": the mean of the loss of each sequence of seq_len tokens; None:
      none; {"global": 1.0, "sequence": 0.1}: several, each with its weight;
    * loss = balance_weight * balance loss + z_weight * z-loss, so that one factor outside serves all gates;
    * ranks: those whose tokens count together.
    """

    score = "softmax"

    running_load: torch.Tensor  # [E] int64: choices since the optimizer's last step, for "running"
    balance_losses: dict[str, float]  # {kind: its weight}, what balance_loss says
    balance_values: dict[str, torch.Tensor]  # of several: each loss of the last forward without its weight

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int,
        top_k: int = 2,
        gate_bias: bool = True,
        *,
        normalize: bool = True,
        scale: float = 1.0,
        norm_eps: float = 0.0,
        num_groups: int = 1,
        topk_groups: int = 1,
        group_best: int | None = None,
        jitter: float = 0.0,
        random_logits: bool = False,
        capacity_factor: float | None = None,
        drop_policy: str = "position",
        balance_loss: str | Mapping[str, float] | None = "global",
        balance_weight: float = 1.0,
        seq_len: int | None = None,
        z_weight: float = 0.0,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(d_model, num_expert, world_size, top_k, gate_bias, normalize=normalize, ranks=ranks)
        # the setter of balance_loss checks it, and needs seq_len
        self.seq_len = seq_len
        self.balance_loss = balance_loss
        if "sequence" not in self.balance_losses and seq_len is not None:
            raise ValueError(
                f'seq_len={seq_len} is for balance_loss="sequence", but balance_loss is {balance_loss!r}'
            )
        for name, weight in (("balance_weight", balance_weight), ("z_weight", z_weight)):
            if not weight >= 0:
                raise ValueError(f"{name} must not be negative, but got {weight}")
        if not 0 < scale < math.inf:
            raise ValueError(f"scale must be a positive number, but got {scale}")
        if not 0 <= norm_eps < math.inf:
            raise ValueError(f"norm_eps must not be negative, but got {norm_eps}")
        if not 0 <= jitter < 1:
            raise ValueError(f"jitter must be in [0, 1), but got {jitter}")
        if drop_policy not in DROP_POLICIES:
            raise ValueError(f"drop_policy must be one of {DROP_POLICIES}, but got {drop_policy!r}")
        if capacity_factor is not None and capacity_factor <= 0:
            raise ValueError(
                f"capacity_factor must be positive, or None for no limit, but got {capacity_factor}"
            )
        if num_groups < 1 or self.num_experts % num_groups != 0:
            raise ValueError(f"num_groups must divide the {self.num_experts} experts, but got {num_groups}")
        if not 1 <= topk_groups <= num_groups:
            raise ValueError(
                f"topk_groups must be between 1 and the {num_groups} groups, but got {topk_groups}"
            )
        # a token must find its top_k experts in the groups that it takes
        group_size = self.num_experts // num_groups
        if self.top_k > group_size * topk_groups:
            raise ValueError(
                f"top_k must be at most the {group_size * topk_groups} experts of {topk_groups} of {num_groups} "
                f"groups, but got {self.top_k}"
            )
        self.balance_weight = balance_weight
        self.z_weight = z_weight
        self.scale = scale
        self.norm_eps = norm_eps
        self.num_groups = num_groups
        self.topk_groups = topk_groups
        self.group_best = self._default_group_best() if group_best is None else group_best
        if not 1 <= self.group_best <= group_size:
            raise ValueError(
                f"group_best must be between 1 and the {group_size} experts of a group, but got {group_best}"
            )
        self.jitter = jitter
        self.random_logits = random_logits
        self.capacity_factor = capacity_factor
        self.drop_policy = drop_policy
        self.sequence_ranks: Ranks = OneRank()  # those that have parts of the same sequences

    def _default_group_best(self) -> int:
        return 1

    @property
    def balance_loss(self) -> str | Mapping[str, float] | None:
        """Return the argument; it may be changed between steps."""
        return self._balance_loss

    @balance_loss.setter
    def balance_loss(self, value: str | Mapping[str, float] | None) -> None:
        # {kind: weight}, whichever of the three forms it was given in
        losses = dict(value) if isinstance(value, Mapping) else {} if value is None else {str(value): 1.0}
        if (value is not None and not losses) or not losses.keys() <= set(BALANCE_LOSSES):
            raise ValueError(
                f"balance_loss must be one of {(*BALANCE_LOSSES, None)}, or several with a weight for each, but got "
                f"{value!r}"
            )
        for kind, weight in losses.items():
            if not weight >= 0:
                raise ValueError(
                    f"the weight of balance_loss {kind!r} must not be negative, but got {weight}"
                )
        if "sequence" in losses and self.seq_len is None:
            raise ValueError('balance_loss="sequence" needs seq_len, the number of tokens of one sequence')
        self._balance_loss, self.balance_losses = value, losses
        # not in the state dict: it begins anew at each step of the optimizer
        if "running" in losses:
            load = torch.zeros(self.num_experts, dtype=torch.int64, device=self.gate.weight.device)
            self.register_buffer("running_load", load, persistent=False)
            self._follow_optimizers()

    def _follow_optimizers(self) -> None:
        """Have after_optimizer_step() called by torch.optim optimizers, where it has something to do."""
        if "running" in self.balance_losses or self.moves_bias:
            follow_optimizers(self, AfterOptimizerStep(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._follow_optimizers()  # a copy is another module

    def after_optimizer_step(self) -> None:
        """Update the gate at the step of a torch.optim optimizer that has its parameters."""
        for p in self.parameters():
            if is_dtensor(p):
                self.warn_of_copies(p.device_mesh.size(), "under fully_shard the copies of a bias part")
        # The bias is a buffer, and PEFT's files have none
        is_adapted = any(
            hasattr(m, "get_base_layer") or hasattr(m, "modules_to_save") for m in self.modules()
        )
        if self.moves_bias and is_adapted and "adapters" not in self.warned:
            self.warned.add("adapters")
            warnings.warn(
                f"the bias of a {type(self).__name__} moves while PEFT's adapters train its router, but an adapter's "
                "files do not hold it, and disable_adapter() does not put it back. Name the whole gate in "
                'modules_to_save (["mlp.gate"]) instead of its linear layer in target_modules, or set '
                "bias_update_speed = 0 of the gate",
                stacklevel=4,
            )
        if "running" in self.balance_losses:
            self.reset_running_load()

    def reset_parameters(self) -> None:
        """Give the gate's own buffers their first values; the linear layer is a module of its own."""
        if "running" in self.balance_losses:
            self.reset_running_load()

    def reset_running_load(self) -> None:
        """Begin the count of balance_loss="running" anew: for loops whose optimizer is none of torch.optim."""
        self.running_load.zero_()

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
        if self.random_logits:
            return "it chooses at random; random_logits=False chooses by the token"
        return None

    def _why_it_drops(self) -> str | None:  # for weights_vary and depends_on_batch
        if self.capacity_factor is None:
            return None
        return f"it drops choices over its capacity_factor={self.capacity_factor}; None drops none"

    def forward(self, inp: torch.Tensor, return_all_scores: bool = False) -> tuple[torch.Tensor, ...]:
        """As NaiveGate.forward, with -1 for choices over the capacity."""
        if self.training and self.jitter > 0 and isinstance(inp, torch.Tensor):
            inp = with_noise(inp, self.jitter)
        logits = self.logits(inp)  # [T, E]
        if self.random_logits:
            logits = self.draw_logits(logits) + (logits - logits.detach())  # + 0, which has the gradient
        topk_idx, topk_weights = self.select(logits)  # [T, K]
        self.set_balance_loss(logits, topk_idx)
        if self.capacity_factor is not None:
            num_tokens = self.ranks.num_tokens(topk_idx.shape[0])
            capacity = expert_capacity(self.capacity_factor, num_tokens, self.top_k, self.num_experts)
            limits = self.num_experts, capacity, self.drop_policy
            topk_idx = drop_over_capacity(topk_idx, topk_weights, *limits, self.ranks)
        return (topk_idx, topk_weights, logits) if return_all_scores else (topk_idx, topk_weights)

    def draw_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Draw random numbers instead of logits [T, E], with random_logits=True."""
        return torch.randn_like(logits)

    def select(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose by logits [T, E] -> topk_idx, topk_weights [T, K], before any choice is dropped."""
        return self._select_with_bias(logits, None)

    def _select_with_bias(
        self, logits: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose by the scores of logits [T, E] plus bias [E]; the weights are the scores without it."""
        # what ops.topk_gate ranks a group by; other sums, and its lack of sqrtsoftplus, take several operators
        ranks_by = 2 if bias is not None or self.score == "sigmoid" else 1
        in_one_operator = (
            self.norm_eps == 0
            and self.score != "sqrtsoftplus"
            and (self.topk_groups == self.num_groups or self.group_best == ranks_by)
        )
        if in_one_operator:
            groups: dict[str, Any] = {"num_groups": self.num_groups, "topk_groups": self.topk_groups}
            options = self.score, self.normalize, self.scale
            return self.topk(logits, self.top_k, *options, bias=bias, **groups)
        topk_idx = self.choose(lambda: self._choose_in_groups(logits.detach(), bias))
        return topk_idx, self.weigh(logits, topk_idx)

    def _choose_in_groups(self, logits: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Choose by logits [T, E] and bias [E] -> topk_idx [T, K] int64, best first; of equals the lower index."""
        scores = logits
        if self.score != "softmax" or bias is not None or not self.normalize:
            scores = scores_of(logits, self.score)
        if bias is not None:
            scores = scores + bias
        best = scores.unflatten(1, (self.num_groups, -1)).topk(self.group_best, dim=-1).values
        topk_groups = ops.topk_gate(best.sum(-1), self.topk_groups)[0]  # [T, topk_groups]
        kept = scores.new_zeros((len(scores), self.num_groups), dtype=torch.bool).scatter_(
            1, topk_groups, True
        )
        kept = kept.repeat_interleave(self.num_experts // self.num_groups, dim=1)  # [T, E]
        # by logits, which differ where scores round to one value
        order = logits if bias is None else scores
        return ops.topk_gate(order.masked_fill(~kept, -torch.inf), self.top_k)[0]

    def weigh(self, logits: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
        """Weigh choices [T, K] -> [T, K], by the score, normalize, norm_eps and scale of this gate."""
        if not self.normalize or self.norm_eps == 0:
            return weights_of(logits, topk_idx, self.score, self.normalize, self.scale)
        scores = weights_of(logits, topk_idx, self.score, normalize=False)
        return scores / (scores.sum(-1, keepdim=True) + self.norm_eps) * self.scale

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Compute the scores of all experts [T, E], divided by their sum: what the balance loss averages."""
        return probabilities_of(logits, self.score)

    def balance_choices(self, logits: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
        """Return the choices [T, K] that the balance losses count."""
        return topk_idx

    def set_balance_loss(self, logits: torch.Tensor, topk_idx: torch.Tensor) -> None:
        """Set the loss of logits [T, E] and the choices [T, K] before any is dropped."""
        parts = []
        if self.balance_losses:
            choices = self.balance_choices(logits, topk_idx)
            values = {kind: self._balance_value(kind, logits, choices) for kind in self.balance_losses}
            if isinstance(self.balance_loss, Mapping):
                self.balance_values = {kind: value.detach() for kind, value in values.items()}
            weights = {kind: weight * self.balance_weight for kind, weight in self.balance_losses.items()}
            # without a product by 1: an operator less
            parts = [v if weights[kind] == 1 else v * weights[kind] for kind, v in values.items()]
        if self.z_weight != 0:
            parts.append(self.z_weight * z_loss(logits, self.ranks))
        loss = functools.reduce(torch.add, parts) if parts else logits.new_zeros(())
        self.set_loss(loss, constant=not parts)

    def _balance_value(self, kind: str, logits: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        """Compute one of BALANCE_LOSSES of the logits [T, E] and choices [T, K]."""
        # a subclass's own probabilities are no function of the operator
        if kind == "global" and type(self).probabilities is ScoredGate.probabilities:
            return balance_loss_of_logits(logits, choices, self.score, self.ranks)
        probabilities = self.probabilities(logits)  # [T, E]
        if kind == "global":
            return balance_loss_of_scores(probabilities, choices, self.ranks)
        if kind == "sequence":
            sequences = current_batch().sequences_of(self.seq_len)
            return sequence_balance_loss(
                probabilities,
                choices,
                self.seq_len,
                self.ranks,
                sequences=sequences,
                parts=self.sequence_ranks,
            )
        # "running": the choices since the optimizer's step, this forward's included, times this forward's scores
        num_choices, score_sum, num_tokens = sum_over_ranks(probabilities, choices, self.ranks)
        mine = num_choices.detach().long()  # [E]
        forward_of_layer(self)  # refuses a repetition that is not known as one, which would count twice

        def add() -> torch.Tensor:
            if self.training and is_counted():
                add_counts(self.running_load, mine)
                return self.running_load.clone()
            return self.running_load + mine

        load = run_or_replay(add).to(num_choices.dtype)  # a repeated forward has its first one's sum
        return balance_of_sums(load, score_sum, num_tokens)
