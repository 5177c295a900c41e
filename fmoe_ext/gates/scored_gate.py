import functools
import math
from collections.abc import Mapping
from typing import Any

import torch

from fmoe_ext.gates.base_gate import OneRank, Ranks, probabilities_of, weights_of
from fmoe_ext.gates.capacity import DROP_POLICIES, drop_over_capacity, expert_capacity
from fmoe_ext.gates.groups import Groups
from fmoe_ext.gates.losses import balance_loss, balance_of_sums, sequence_balance_loss, sum_over_ranks, z_loss
from fmoe_ext.gates.naive_gate import NaiveGate
from fmoe_ext.optimizer_steps import AfterOptimizerStep, follow_optimizers
from fmoe_ext.step import forward_of_layer, is_counted, run_or_replay
from fmoe_ext.tokens import current_batch

BALANCE_LOSSES = ("global", "running", "sequence")


def _weighted(balance_loss: str | Mapping[str, float] | None) -> dict[str, float]:
    """{kind: weight} of the argument balance_loss of ScoredGate."""
    if balance_loss is None:
        return {}
    losses = dict(balance_loss) if isinstance(balance_loss, Mapping) else {str(balance_loss): 1.0}
    if not losses or not losses.keys() <= set(BALANCE_LOSSES):
        raise ValueError(
            f"balance_loss must be one of {(*BALANCE_LOSSES, None)}, or several with a weight for each, but got "
            f"{balance_loss!r}"
        )
    for kind, weight in losses.items():
        if not weight >= 0:
            raise ValueError(f"the weight of balance_loss {kind!r} must not be negative, but got {weight}")
    return losses


class ScoredGate(NaiveGate):
    """Base class of SoftmaxGate, SigmoidGate, SinkhornGate and UniformGate; subclasses name their score.

    * normalize divides the K weights by their sum, scale multiplies them afterwards;
    * num_groups, topk_groups: only the experts of each token's topk_groups best groups can be chosen; a group ranks
      by the sum of its group_best best scores, whose default each gate takes from its model (gates/groups.py);
    * balance_loss "global": E * sum_e f_e * p_e over the tokens of all ranks, the loss of the global batch;
      "running": the same with the f_e of all forwards since the optimizer's last step, this one included ("Demons in
      the Detail", 2025, section 3; Megatron's "global_aux_loss"): one pass, near the loss of the whole batch
      (gates.WholeBatch is exact, in two); "sequence": the mean of the loss of each sequence of seq_len tokens; None:
      none; {"global": 1.0, "sequence": 0.1}: several, each with its weight;
    * loss = balance_weight * balance loss + z_weight * z-loss, so that one factor outside serves all gates;
    * jitter: training multiplies the input by noise, uniform in [1 - jitter, 1 + jitter];
    * random_logits: every forward draws its logits from N(0, 1), and the gate's own get their gradient unchanged: a
      random, nearly even load, for benchmarks only (Megatron's `--moe-router-force-load-balancing`);
    * capacity_factor: an expert takes ceil(capacity_factor * T * K / E) choices and the others become -1, by
      drop_policy "position" (first choices, then earlier tokens stay), "token" (earlier tokens stay, Megatron's
      "position") or "score" (larger weights stay); None, the default, drops nothing.
    """

    score = "softmax"

    running_load: torch.Tensor
    balance_values: dict[
        str, torch.Tensor
    ]  # of the last forward, without weights, where there are several losses

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
        num_groups: int = 1,
        topk_groups: int = 1,
        group_best: int | None = None,
        balance_loss: str | Mapping[str, float] | None = "global",
        balance_weight: float = 1.0,
        seq_len: int | None = None,
        z_weight: float = 0.0,
        jitter: float = 0.0,
        random_logits: bool = False,
        capacity_factor: float | None = None,
        drop_policy: str = "position",
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(d_model, num_expert, world_size, top_k, gate_bias, normalize=normalize)
        self.balance_losses = _weighted(balance_loss)
        if "sequence" in self.balance_losses and seq_len is None:
            raise ValueError('balance_loss="sequence" needs seq_len, the number of tokens of one sequence')
        if "sequence" not in self.balance_losses and seq_len is not None:
            raise ValueError(
                f'seq_len={seq_len} is for balance_loss="sequence", but balance_loss is {balance_loss!r}'
            )
        if drop_policy not in DROP_POLICIES:
            raise ValueError(f"drop_policy must be one of {DROP_POLICIES}, but got {drop_policy!r}")
        if capacity_factor is not None and capacity_factor <= 0:
            raise ValueError(
                f"capacity_factor must be positive, or None for no limit, but got {capacity_factor}"
            )
        for name, weight in (("balance_weight", balance_weight), ("z_weight", z_weight)):
            if not weight >= 0:
                raise ValueError(f"{name} must not be negative, but got {weight}")
        if not 0 < scale < math.inf:
            raise ValueError(f"scale must be a positive number, but got {scale}")
        if not 0 <= jitter < 1:
            raise ValueError(f"jitter must be in [0, 1), but got {jitter}")
        self._check_groups(num_groups, topk_groups)
        self.scale = scale
        self.num_groups = num_groups
        self.topk_groups = topk_groups
        self.group_best = self._default_group_best() if group_best is None else group_best
        if not 1 <= self.group_best <= self.tot_expert // num_groups:
            raise ValueError(
                f"group_best must be between 1 and the {self.tot_expert // num_groups} experts of a group, "
                f"but got {group_best}"
            )
        self.balance_loss = balance_loss
        self.balance_weight = balance_weight
        self.seq_len = seq_len
        self.z_weight = z_weight
        self.jitter = jitter
        self.random_logits = random_logits
        self.capacity_factor = capacity_factor
        self.drop_policy = drop_policy
        self.ranks: Ranks = OneRank() if ranks is None else ranks
        self.sequence_ranks: Ranks = OneRank()  # those that have parts of the same sequences
        if "running" in self.balance_losses:
            self.register_buffer(
                "running_load", torch.zeros(self.tot_expert, dtype=torch.int64), persistent=False
            )
            self._follow_optimizers()

    def _follow_optimizers(self) -> None:
        follow_optimizers(self, AfterOptimizerStep(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "running" in self.balance_losses:
            self._follow_optimizers()

    def after_optimizer_step(self) -> None:
        """Update the gate at the step of a torch.optim optimizer that has its parameters."""
        if "running" in self.balance_losses:
            self.reset_running_load()

    def reset_parameters(self) -> None:
        """Gives the gate's own buffers their first values; the linear layer is a module of its own."""
        if "running" in self.balance_losses:
            self.reset_running_load()

    def reset_running_load(self) -> None:
        """Begins the count of balance_loss="running" anew: for loops whose optimizer is none of torch.optim."""
        self.running_load.zero_()

    def _check_groups(self, num_groups: int, topk_groups: int) -> None:
        if num_groups < 1 or self.tot_expert % num_groups != 0:
            raise ValueError(f"num_groups must divide the {self.tot_expert} experts, but got {num_groups}")
        if not 1 <= topk_groups <= num_groups:
            raise ValueError(
                f"topk_groups must be between 1 and the {num_groups} groups, but got {topk_groups}"
            )
        eligible = self.tot_expert // num_groups * topk_groups
        if self.top_k > eligible:
            raise ValueError(
                f"top_k must be at most the {eligible} experts of {topk_groups} of {num_groups} groups, "
                f"but got {self.top_k}"
            )

    def forward(self, inp: torch.Tensor, return_all_scores: bool = False) -> tuple[torch.Tensor, ...]:
        """As NaiveGate.forward, with -1 for choices over the capacity."""
        logits = self.logits(self._jittered(inp))
        if self.random_logits:
            logits = self.draw_logits(logits) + (logits - logits.detach())  # + 0, which has the gradient
        chosen, topk_weights = self.select(logits)
        constant = not self.balance_losses and self.z_weight == 0
        self.set_loss(self._loss(logits, chosen), constant=constant)
        topk_idx = self._drop_over_capacity(chosen, topk_weights)
        if return_all_scores:
            return topk_idx, topk_weights, logits
        return topk_idx, topk_weights

    def _default_group_best(self) -> int:
        return 1

    @property
    def weight_sum(self) -> float:
        return self.scale

    @property
    def weights_vary(self) -> str | None:
        if self.capacity_factor is not None:
            return f"it drops choices over its capacity_factor={self.capacity_factor}; None drops none"
        return super().weights_vary

    @property
    def depends_on_batch(self) -> str | None:
        if self.capacity_factor is not None:
            return f"it drops choices over its capacity_factor={self.capacity_factor}; None drops none"
        if self.training and self.jitter > 0:
            return f"it draws noise of jitter={self.jitter}; 0 draws none"
        if self.random_logits:
            return "it chooses at random; random_logits=False chooses by the token"
        return None

    def select(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [T, E] -> topk_idx, topk_weights [T, K], before any choice is dropped."""
        return self._select(logits, None)

    def _select(self, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        options = (self.score, self.normalize, self.scale)
        groups = Groups(self.num_groups, self.topk_groups, self.group_best)
        if groups.fit_topk_gate(self.score, biased=bias is not None):
            counts: dict[str, Any] = {"num_groups": self.num_groups, "topk_groups": self.topk_groups}
            return self.topk(logits, self.top_k, *options, bias=bias, **counts)
        topk_idx = self.choose(
            lambda: groups.choose(logits.detach(), self.top_k, self.score, self.normalize, bias)
        )
        return topk_idx, weights_of(logits, topk_idx, *options)

    def draw_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Random numbers in the place of logits [T, E], with random_logits=True."""
        return torch.randn_like(logits)

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """The scores of all experts [T, E], divided by their sum: what the balance loss averages."""
        return probabilities_of(logits, self.score)

    def balance_choices(self, logits: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
        """The choices [T, K] that the balance losses count."""
        return topk_idx

    def _jittered(self, inp: torch.Tensor) -> torch.Tensor:
        if not self.training or self.jitter == 0 or not isinstance(inp, torch.Tensor):
            return inp
        wide = inp.to(torch.promote_types(inp.dtype, torch.float32))
        return wide * (torch.rand_like(wide) * (2 * self.jitter) + (1 - self.jitter))

    def _loss(self, logits: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
        parts = []
        if self.balance_losses:
            probabilities, choices = self.probabilities(logits), self.balance_choices(logits, topk_idx)
            values = {kind: self._balance(kind, probabilities, choices) for kind in self.balance_losses}
            if isinstance(self.balance_loss, Mapping):
                self.balance_values = {kind: value.detach() for kind, value in values.items()}
            parts = [v * (self.balance_losses[kind] * self.balance_weight) for kind, v in values.items()]
        if self.z_weight != 0:
            parts.append(self.z_weight * z_loss(logits, self.ranks))
        return functools.reduce(torch.add, parts) if parts else logits.new_zeros(())

    def _balance(self, kind: str, probabilities: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        if kind == "global":
            return balance_loss(probabilities, choices, self.ranks)
        if kind == "running":
            num_choices, score_sum, num_tokens = sum_over_ranks(probabilities, choices, self.ranks)
            num_choices = self._with_earlier(num_choices.detach())
            return balance_of_sums(num_choices, score_sum, num_tokens)
        sequences = current_batch().sequences_of(self.seq_len)
        return sequence_balance_loss(
            probabilities, choices, self.seq_len, self.ranks, sequences=sequences, parts=self.sequence_ranks
        )

    def _with_earlier(self, num_choices: torch.Tensor) -> torch.Tensor:
        """num_choices [E] and those of earlier forwards of this step; a repeated forward has what its first one had."""

        forward_of_layer(self)

        def add() -> torch.Tensor:
            load = self.running_load + num_choices.long()
            if self.training and is_counted():
                self.running_load.copy_(load)
            return load

        return run_or_replay(add).to(num_choices.dtype)

    def _drop_over_capacity(self, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        if self.capacity_factor is None:
            return topk_idx
        num_tokens = self.ranks.num_tokens(topk_idx.shape[0])
        capacity = expert_capacity(self.capacity_factor, num_tokens, self.top_k, self.tot_expert)
        return drop_over_capacity(
            topk_idx, topk_weights, self.tot_expert, capacity, self.drop_policy, self.ranks
        )
