"""BalancedGate: which balance losses a gate has, and over which tokens.

losses.py has the formulas. Here is what a gate remembers between forwards (running_load, until the optimizer steps) and
how one forward's losses are weighted and added up.
"""

import functools
from collections.abc import Mapping
from typing import Any, TypedDict

import torch

from fmoe_ext._sharded import is_dtensor
from fmoe_ext.gates.base_gate import OneRank, Ranks, probabilities_of
from fmoe_ext.gates.losses import (
    balance_loss,
    balance_loss_of_logits,
    balance_of_sums,
    sequence_balance_loss,
    sum_over_ranks,
    z_loss,
)
from fmoe_ext.gates.naive_gate import GateOverRanks
from fmoe_ext.optimizer_steps import AfterOptimizerStep, follow_optimizers
from fmoe_ext.step import add_counts, forward_of_layer, is_counted, run_or_replay
from fmoe_ext.tokens import current_batch

BALANCE_LOSSES = ("global", "running", "sequence")


def _weighted(balance_loss: str | Mapping[str, float] | None) -> dict[str, float]:
    """Read {kind: weight} from the argument balance_loss of ScoredGate."""
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


class BalanceOptions(TypedDict, total=False):
    """Keywords that ScoredGate passes to BalancedGate."""

    normalize: bool
    balance_loss: str | Mapping[str, float] | None
    balance_weight: float
    seq_len: int | None
    z_weight: float
    ranks: Ranks | None


class BalancedGate(GateOverRanks):
    """The losses of ScoredGate, over the tokens of all ranks.

    * balance_loss "global": E * sum_e f_e * p_e over the tokens of all ranks, the loss of the global batch;
      "running": the same with the f_e of all forwards since the optimizer's last step, this one included ("Demons in
      the Detail", 2025, section 3; Megatron's "global_aux_loss"): one pass, near the loss of the whole batch
      (gates.WholeBatch is exact, in two); "sequence": the mean of the loss of each sequence of seq_len tokens; None:
      none; {"global": 1.0, "sequence": 0.1}: several, each with its weight;
    * loss = balance_weight * balance loss + z_weight * z-loss, so that one factor outside serves all gates.
    """

    score = "softmax"

    running_load: torch.Tensor  # [E] int64: choices since the optimizer's last step, for "running"
    # if there are several, each loss of the last forward without its weight
    balance_values: dict[str, torch.Tensor]

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int,
        top_k: int = 2,
        gate_bias: bool = True,
        *,
        normalize: bool = True,
        balance_loss: str | Mapping[str, float] | None = "global",
        balance_weight: float = 1.0,
        seq_len: int | None = None,
        z_weight: float = 0.0,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(d_model, num_expert, world_size, top_k, gate_bias, normalize=normalize, ranks=ranks)
        self.seq_len = seq_len
        self.balance_loss = balance_loss
        if "sequence" not in self.balance_losses and seq_len is not None:
            raise ValueError(
                f'seq_len={seq_len} is for balance_loss="sequence", but balance_loss is {balance_loss!r}'
            )
        for name, weight in (("balance_weight", balance_weight), ("z_weight", z_weight)):
            if not weight >= 0:
                raise ValueError(f"{name} must not be negative, but got {weight}")
        self.balance_weight = balance_weight
        self.z_weight = z_weight
        self.sequence_ranks: Ranks = OneRank()  # those that have parts of the same sequences

    @property
    def balance_loss(self) -> str | Mapping[str, float] | None:
        """Return the argument; it may be changed between steps."""
        return self._balance_loss

    @balance_loss.setter
    def balance_loss(self, value: str | Mapping[str, float] | None) -> None:
        losses = _weighted(value)
        if "sequence" in losses and self.seq_len is None:
            raise ValueError('balance_loss="sequence" needs seq_len, the number of tokens of one sequence')
        if "running" in losses:
            load = torch.zeros(self.num_experts, dtype=torch.int64, device=self.gate.weight.device)
            self.register_buffer("running_load", load, persistent=False)
            self._follow_optimizers()
        self._balance_loss, self.balance_losses = value, losses

    def _follow_optimizers(self) -> None:
        follow_optimizers(self, AfterOptimizerStep(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "running" in self.balance_losses:
            self._follow_optimizers()

    def after_optimizer_step(self) -> None:
        """Update the gate at the step of a torch.optim optimizer that has its parameters."""
        for p in self.parameters():
            if is_dtensor(p):
                self.warn_of_copies(p.device_mesh.size(), "under fully_shard the copies of a bias part")
        if "running" in self.balance_losses:
            self.reset_running_load()

    def reset_parameters(self) -> None:
        """Give the gate's own buffers their first values; the linear layer is a module of its own."""
        if "running" in self.balance_losses:
            self.reset_running_load()

    def reset_running_load(self) -> None:
        """Begin the count of balance_loss="running" anew: for loops whose optimizer is none of torch.optim."""
        self.running_load.zero_()

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Compute the scores of all experts [T, E], divided by their sum: what the balance loss averages."""
        return probabilities_of(logits, self.score)

    def balance_choices(self, logits: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
        """Return the choices [T, K] that the balance losses count."""
        return topk_idx

    def set_balance_loss(self, logits: torch.Tensor, topk_idx: torch.Tensor) -> None:
        """Set the loss of logits [T, E] and the choices [T, K] before any is dropped."""
        constant = not self.balance_losses and self.z_weight == 0
        self.set_loss(self._loss(logits, topk_idx), constant=constant)

    def _loss(self, logits: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
        parts = []
        if self.balance_losses:
            choices = self.balance_choices(logits, topk_idx)
            values = {kind: self._balance(kind, logits, choices) for kind in self.balance_losses}
            if isinstance(self.balance_loss, Mapping):
                self.balance_values = {kind: value.detach() for kind, value in values.items()}
            weights = {kind: weight * self.balance_weight for kind, weight in self.balance_losses.items()}
            parts = [v if weights[kind] == 1 else v * weights[kind] for kind, v in values.items()]
        if self.z_weight != 0:
            parts.append(self.z_weight * z_loss(logits, self.ranks))
        return functools.reduce(torch.add, parts) if parts else logits.new_zeros(())

    def _balance(self, kind: str, logits: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        if kind == "global" and type(self).probabilities is BalancedGate.probabilities:
            return balance_loss_of_logits(logits, choices, self.score, self.ranks)
        probabilities = self.probabilities(logits)
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
        """Add to num_choices [E] those of earlier forwards of this step; a repeated forward has its first one's sum."""
        forward_of_layer(self)

        def add() -> torch.Tensor:
            if self.training and is_counted():
                add_counts(self.running_load, num_choices.long())
                return self.running_load.clone()
            return self.running_load + num_choices.long()

        return run_or_replay(add).to(num_choices.dtype)
