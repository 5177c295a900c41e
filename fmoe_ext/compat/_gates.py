"""fmoe.gates and its modules: the gates of fmoe_ext, but topk_weights have the model's dtype, as FastMoE's have.

compat's FMoE and MegatronMLP take their gates from here. _ModelDtype casts the weights of every gate; NaiveGate and its
subclasses also weigh by torch's softmax of the chosen logits, to the last bit.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from fmoe_ext import _env, gates, ops
from fmoe_ext.compat import _ranks
from fmoe_ext.compat.functions import count_by_gate
from fmoe_ext.ep.ranks import GroupRanks
from fmoe_ext.gates.base_gate import BaseGate, OneRank
from fmoe_ext.gates.faster_gate import make_faster_gate

nw_per_node = _env.get("FMOE_TOPO_GPUS_PER_NODE")


class _ModelDtype:
    """Mixin of a gate: topk_weights have the dtype that F.linear would return, the input's or autocast's.

    fmoe_ext's gates return float32 or wider. Choices and losses are computed in float32 all the same.
    """

    def forward(self, inp: torch.Tensor, return_all_scores: bool = False) -> Any:
        # ZeroGate's forward has no such argument
        options = (return_all_scores,) if return_all_scores else ()
        topk_idx, topk_weights, *rest = super().forward(inp, *options)  # type: ignore[misc]
        device, dtype = inp.device.type, inp.dtype
        # torch.is_autocast_enabled("meta") raises, and autocast leaves float64 as it is
        if device != "meta" and dtype != torch.float64 and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        return topk_idx, topk_weights.to(dtype), *rest


class NaiveGate(_ModelDtype, gates.NaiveGate):
    """NaiveGate with topk_weights of the model's dtype, and to the last bit the softmax of the chosen scores."""

    @property
    def weighs_while_choosing(self) -> bool:
        return False  # the kernel's weights may differ from torch's softmax in the last bit

    def topk(
        self,
        logits: torch.Tensor,
        top_k: int,
        score: str = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose by ops.topk_gate, and weigh by torch's softmax of the chosen logits."""
        if score != "softmax" or not normalize:
            return super().topk(logits, top_k, score, normalize, scale, **options)
        topk_idx = self.choose(
            lambda: ops.topk_gate(logits.detach(), top_k, score, normalize, scale=scale, **options)[0]
        )
        dropped = topk_idx < 0
        chosen = logits.gather(1, topk_idx.clamp(min=0))
        # not -inf, whose softmax is NaN where all are dropped
        chosen = chosen.masked_fill(dropped, torch.finfo(chosen.dtype).min)
        return topk_idx, (chosen.softmax(-1) * scale).masked_fill(dropped, 0)


class NoisyGate(_ModelDtype, gates.NoisyGate):
    """NoisyGate with topk_weights of the dtype of the model."""


class ZeroGate(_ModelDtype, gates.ZeroGate):
    """ZeroGate with topk_weights of the dtype of the model."""


class GShardGate(NaiveGate, gates.GShardGate):
    """GShardGate with topk_weights of the dtype of the model."""


class SwitchGate(NaiveGate, gates.SwitchGate):
    """SwitchGate with topk_weights of the dtype of the model."""


class DCGate(GShardGate, gates.DCGate):
    """DCGate with topk_weights of the dtype of the model."""


class FasterGate(NaiveGate, gates.FasterGate):
    """FasterGate with topk_weights of the dtype of the model."""


def gen_faster_gate(rank: int) -> Callable[..., FasterGate]:
    """Make a gate for FMoE(gate=...): FasterGate on node number rank."""
    return functools.partial(make_faster_gate, FasterGate, rank)


class SwipeGate(NaiveGate, gates.SwipeGate):
    """SwipeGate with topk_weights of the dtype of the model; outside a layer its ranks are ensure_comm()'s."""

    def swipe_once(
        self, idx: torch.Tensor, capacity: torch.Tensor, bias: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._find_ranks()
        return super().swipe_once(idx, capacity, bias)

    def _swipe(self, topk_idx: torch.Tensor) -> torch.Tensor:
        self._find_ranks()
        return super()._swipe(topk_idx)

    def _find_ranks(self) -> None:
        # OneRank: no layer has given it the ranks of its group
        if self.world_size > 1 and type(self.ranks) is OneRank:
            self.ranks = GroupRanks(_ranks.get_group())


def limit_by_capacity(
    topk_idx: torch.Tensor, num_expert: int, world_size: int, capacity: int | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Drop choices over an expert's capacity, which earlier ranks use first, and in a rank first choices before second.

    topk_idx [T, K] or [T], capacity: a number or one for each of the num_expert experts here
    -> (new_lec, new_gec, topk_idx): the counts of count_by_gate without the dropped choices, which become -1.
    """
    _, _, global_expert_count = count_by_gate(topk_idx, num_expert, world_size, require_pos=False)
    count = global_expert_count.view(world_size, num_expert)
    # what earlier ranks leave of each expert's capacity [rank, expert]
    room = capacity - (count.cumsum(0) - count)
    new_gec = room.clamp(min=0).minimum(count).flatten()
    new_lec = _ranks.exchange_counts(new_gec, world_size)  # how many of this rank's choices each expert keeps
    choices = topk_idx if topk_idx.dim() == 2 else topk_idx.reshape(-1, 1)
    kept = ops.apply_capacity(choices, num_expert * world_size, new_lec)
    return new_lec, new_gec, kept.view(topk_idx.shape)


__all__ = ["BaseGate"]
