"""fmoe.gates.naive_gate."""

from typing import Any

import torch

from fmoe_ext import ops
from fmoe_ext.compat.gates.model_dtype import ModelDtype
from fmoe_ext.gates.naive_gate import NaiveGate as _NaiveGate


class NaiveGate(ModelDtype, _NaiveGate):
    """NaiveGate with topk_weights of the model's dtype, and to the last bit the softmax of the chosen scores."""

    @property
    def weighs_while_choosing(self) -> bool:
        return False

    def topk(
        self,
        logits: torch.Tensor,
        top_k: int,
        score: str = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choices of ops.topk_gate, weights of torch's softmax."""
        if score != "softmax" or not normalize:
            return super().topk(logits, top_k, score, normalize, scale, **options)
        topk_idx = self.choose(
            lambda: ops.topk_gate(logits.detach(), top_k, score, normalize, scale=scale, **options)[0]
        )
        dropped = topk_idx < 0
        chosen = logits.gather(1, topk_idx.clamp(min=0))
        chosen = chosen.masked_fill(dropped, torch.finfo(chosen.dtype).min)
        return topk_idx, (chosen.softmax(-1) * scale).masked_fill(dropped, 0)


__all__ = ["NaiveGate"]
