"""fmoe.linear."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from fmoe_ext import ops
from fmoe_ext.linear import FMoELinear as _FMoELinear
from fmoe_ext.linear import cast_to_weight, cumulative_ends


def draw_as_fastmoe(linear: _FMoELinear) -> None:
    """FastMoE's initial values: kaiming_uniform with in_feat * out_feat for the fan-in, zero bias."""
    nn.init.kaiming_uniform_(linear.weight, a=math.sqrt(5))
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


class FMoELinear(_FMoELinear):
    """FMoELinear with FastMoE's initial values; rank is accepted and ignored."""

    def reset_parameters(self) -> None:
        draw_as_fastmoe(self)


class MOELinear:
    """The linear map of each expert on rows sorted by expert; called as MOELinear.apply(...), differentiable."""

    @staticmethod
    def apply(
        global_input_buf: torch.Tensor,
        fwd_expert_count: torch.Tensor | Sequence[int],
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """global_input_buf [R, in], fwd_expert_count [E], weight [E, out, in], bias [E, out] -> [R, out]."""
        offs = cumulative_ends(fwd_expert_count, weight.shape[0], global_input_buf.device)
        return ops.grouped_gemm(cast_to_weight(global_input_buf, weight), weight, offs, bias)


__all__ = ["FMoELinear", "MOELinear"]
