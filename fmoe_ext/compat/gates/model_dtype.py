"""What FastMoE's gates do differently from those of fmoe_ext in half precision."""

from typing import Any

import torch


class ModelDtype:
    """A gate whose topk_weights have the dtype of the model, where fmoe_ext's have float32 or wider.

    The dtype is that of the input, or of autocast, as F.linear would return it. Choices and losses are computed in
    float32 all the same.
    """

    def forward(self, inp: torch.Tensor, return_all_scores: bool = False) -> Any:
        options = (return_all_scores,) if return_all_scores else ()
        topk_idx, topk_weights, *rest = super().forward(inp, *options)  # type: ignore[misc]
        return topk_idx, topk_weights.to(_model_dtype(inp)), *rest


def _model_dtype(inp: torch.Tensor) -> torch.dtype:
    device = inp.device.type
    if device != "meta" and inp.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return inp.dtype
