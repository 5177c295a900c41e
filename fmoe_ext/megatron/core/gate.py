"""Build the gate that a TransformerConfig describes, in place of Megatron's TopKRouter: gate_arguments().

The gates are those of fmoe_ext.gates, each with FromConfig in front, and answer to the names by which Megatron's
training loop knows its router:

    finalize_model_grads   moves biases (expert_bias) and quantiles (qb_beta, ...) and resets running loads
                           (reset_global_aux_loss_tracker)
    RouterReplay           records and gives choices (router_replay), in Megatron's order of tokens [s, b] with padding;
                           ours see [b, s] where a loss is of each sequence, and no padding: select() turns one order
                           into the other

s: positions of a sequence, b: sequences.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fmoe_ext import ops
from fmoe_ext.gates import (
    QuantileGate,
    ScoredGate,
    SigmoidGate,
    SinkhornGate,
    SoftmaxGate,
    SqrtSoftplusGate,
)
from fmoe_ext.recompute import Repeat
from fmoe_ext.tokens import current_batch

# balance_loss of the gate for moe_router_load_balancing_type; the others have none
BALANCE_LOSSES = MappingProxyType(
    {"aux_loss": "global", "seq_aux_loss": "sequence", "global_aux_loss": "running"}
)


class FromConfig(ScoredGate):
    """Base of the gates that gate_arguments() makes; the layer sets seq_len for each microbatch.

    wide: compute logits, scores and losses in float64, whatever the dtype of the parameters (moe_router_dtype="fp64").
    """

    def __init__(self, *size: Any, wide: bool = False, **options: Any) -> None:
        super().__init__(*size, **options)
        self.wide = wide
        self.router_replay: Any = None  # Megatron's, of this layer

    def logits(self, inp: Tensor) -> Tensor:
        """As ScoredGate.logits; in float64 if wide."""
        return super().logits(inp.double() if self.wide else inp)

    def forward(self, inp: Tensor, return_all_scores: bool = False) -> tuple[Tensor, ...]:
        """As ScoredGate.forward; the weights have the dtype that they have without wide."""
        topk_idx, topk_weights, *logits = super().forward(inp, return_all_scores)
        dtype = torch.promote_types(inp.dtype, torch.float32)
        return topk_idx, topk_weights.to(dtype), *logits

    def select(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Choose as the gate does; with moe_enable_routing_replay, RouterReplay records or gives the choices."""
        action, replay = self._replay_action, self.router_replay
        by_sequence = "sequence" in self.balance_losses
        # Take the entry off the list also where the tape decides: a repeated forward chooses what its original chose,
        # but set_replay_data has put an entry there for it.
        if action == "replay_backward":
            played = replay.replay_backward_list.pop(0)
        if action is None or self.tape is not None:
            return super().select(logits)
        # Record: of every token, padding too, in Megatron's order [s, b].
        if action == "record":
            topk_idx, topk_weights = super().select(logits)
            every: Tensor = current_batch().put_back(topk_idx)
            replay.record_indices(_swapped(every, (-1, self.seq_len)) if by_sequence else every)
            return topk_idx, topk_weights
        # Replay: the choices of our tokens in our order, given to the gate as those of a forward that is repeated.
        if action == "replay_forward":
            played = replay.target_topk_idx
        if played is None:
            raise ValueError(
                "RouterReplay has no choices for this layer: call RouterReplay.set_replay_data before"
            )
        played = played.to(logits.device)
        if by_sequence:
            played = _swapped(played, (self.seq_len, -1))
        self.tape = Repeat(current_batch().take(played.long()), is_fused=True)
        try:
            return super().select(logits)
        finally:
            self.tape = None

    @property
    def _replay_action(self) -> str | None:
        """Return "record", "replay_forward" or "replay_backward"; None without a RouterReplay that acts."""
        action = getattr(self.router_replay, "router_replay_action", None)
        return None if action is None else action.value

    def draw_logits(self, logits: Tensor) -> Tensor:
        """Draw from the generator of Megatron that differs on every expert-parallel rank, as its RandomSTE does."""
        from megatron.core.tensor_parallel import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name

        with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
            return super().draw_logits(logits)

    def reset_global_aux_loss_tracker(self) -> None:
        """Reset running loads; finalize_model_grads calls it by its name in TopKRouter."""
        if "running" in self.balance_losses:
            self.reset_running_load()


class MegatronSinkhornGate(FromConfig, SinkhornGate):
    """SinkhornGate by the options of a TransformerConfig."""


class MegatronQuantileGate(FromConfig, QuantileGate):
    """QuantileGate by the options of a TransformerConfig.

    finalize_model_grads moves the bias by the names in TopKRouter; nothing is then left to do at the optimizer's step.
    """

    @property
    def qb_beta(self) -> Tensor:
        """Return quantile_bias, which Megatron writes."""
        return self.quantile_bias

    @property
    def qb_beta_accum(self) -> Tensor:
        """Return quantile_sum, which Megatron averages and empties."""
        return self.quantile_sum

    @property
    def qb_beta_count(self) -> Tensor:
        """Return num_quantiles, which Megatron empties."""
        return self.num_quantiles


class MegatronSoftmaxGate(FromConfig, SoftmaxGate):
    """SoftmaxGate by the options of a TransformerConfig.

    The balance losses count the top-k without groups, also where RouterReplay gives other choices.
    """

    def balance_choices(self, logits: Tensor, topk_idx: Tensor) -> Tensor:
        if self.num_groups == 1 and self._replay_action in (None, "record"):
            return topk_idx
        return ops.topk_gate(logits.detach(), self.top_k)[0]


class _WithBias(FromConfig, SigmoidGate):
    """A gate with a bias by the options of a TransformerConfig; finalize_model_grads moves it, as in TopKRouter."""

    def select(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self.expert_bias.dtype != torch.float32:  # Float16Module casts every buffer
            self.expert_bias = self.expert_bias.to(torch.float32)
        return super().select(logits)


class MegatronSigmoidGate(_WithBias):
    """SigmoidGate by the options of a TransformerConfig."""


class MegatronSqrtSoftplusGate(_WithBias, SqrtSoftplusGate):
    """SqrtSoftplusGate by the options of a TransformerConfig."""


def gate_arguments(config: Any) -> dict[str, Any]:
    """Make gate= and gate_bias= of FMoETransformerMLP: the router of this config, as check_options() allows it."""

    def gate(
        d_model: int, num_expert: int, world_size: int, top_k: int = 2, gate_bias: bool = True
    ) -> ScoredGate:
        # What all gates have.
        size = (d_model, num_expert, world_size, top_k, gate_bias)
        _, balance_weight, z_weight = loss_weights(config)
        balance_loss = _balance_of(config)
        common: dict[str, Any] = {
            "balance_loss": balance_loss,
            "balance_weight": balance_weight,
            # of each microbatch, set by the layer
            "seq_len": 1 if "sequence" in (balance_loss or ()) else None,
            "z_weight": z_weight,
            "jitter": config.moe_input_jitter_eps or 0.0,
            "random_logits": bool(getattr(config, "moe_router_force_load_balancing", False)),
            "capacity_factor": config.moe_expert_capacity_factor,
            "drop_policy": "score" if config.moe_token_drop_policy == "probs" else "token",
            "wide": config.moe_router_dtype == "fp64",
        }
        # The gate for the kind of balancing, then for the score function.
        if is_sinkhorn(config):
            return MegatronSinkhornGate(*size, **common)
        score = config.moe_router_score_function
        # softmax of the chosen logits, or of all before the choice; other scores are divided by their sum if several
        common["normalize"] = top_k > 1 if score != "softmax" else not config.moe_router_pre_softmax
        common["scale"] = config.moe_router_topk_scaling_factor or 1.0
        if is_quantile(config):
            ema = config.moe_router_quantile_balancing_ema
            return MegatronQuantileGate(*size, **common, score=score, ema=ema)
        common |= {"num_groups": 1, "topk_groups": 1, "group_best": 1}
        if topk_groups := config.moe_router_group_topk:
            # Megatron ranks a group by as many of its scores as are chosen in each group
            common |= {"num_groups": config.moe_router_num_groups, "topk_groups": topk_groups}
            common["group_best"] = top_k // topk_groups
        if score == "softmax":
            made: FromConfig = MegatronSoftmaxGate(*size, **common)
        else:
            speed = config.moe_router_bias_update_rate if config.moe_router_enable_expert_bias else 0.0
            biased = MegatronSigmoidGate if score == "sigmoid" else MegatronSqrtSoftplusGate
            made = biased(*size, **common, bias_update_speed=speed)
        if getattr(config, "moe_enable_routing_replay", False):
            from megatron.core.transformer.moe.router_replay import RouterReplay

            made.router_replay = RouterReplay()
        return made

    return {"gate": gate, "gate_bias": config.add_bias_linear}


def _swapped(rows: Tensor, shape: tuple[Any, Any]) -> Tensor:
    """Put rows of tokens into the order of the transposed shape."""
    return rows.unflatten(0, shape).transpose(0, 1).flatten(0, 1)


def _balance_of(config: Any) -> str | dict[str, float] | None:
    """balance_loss of the gate for moe_router_load_balancing_type; several with their moe_aux_loss_coeff."""
    kinds = only(config.moe_router_load_balancing_type)
    if not isinstance(kinds, (list, tuple)):
        return BALANCE_LOSSES.get(kinds)
    losses: dict[str, float] = {}
    for kind, factor in zip(kinds, config.moe_aux_loss_coeff, strict=True):
        if kind in BALANCE_LOSSES and factor:
            # of a kind that comes twice Megatron takes the first
            losses.setdefault(BALANCE_LOSSES[kind], factor)
    return losses or None


def is_sinkhorn(config: Any) -> bool:
    return only(config.moe_router_load_balancing_type) == "sinkhorn"


def is_quantile(config: Any) -> bool:
    return bool(config.moe_router_load_balancing_type == "quantile_balancing")


def loss_weights(config: Any) -> tuple[float, float, float]:
    """Return (factor of the gate's loss, balance_weight, z_weight).

    A single balance loss has the weight 1 in the gate, since Megatron logs it unscaled; its coefficient is the factor,
    by which z_weight is divided. Without moe_aux_loss_coeff the balance loss is still computed, with the factor 0,
    unless there is a z-loss in its place.
    """
    losses, z = _balance_of(config), config.moe_z_loss_coeff or 0.0
    if isinstance(losses, dict):
        return 1.0, 1.0, z
    balance = 0.0 if losses is None else only(config.moe_aux_loss_coeff)
    if balance:
        return balance, 1.0, z / balance
    return (z, 0.0, 1.0) if z else (0.0, 1.0, 0.0)


def only(value: Any) -> Any:
    """Return the entry of a list of one, which Megatron takes as well as the entry."""
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
