"""Products of 16 bits outside of the experts, on processors where torch takes 5 to 90 times as long for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fmoe_ext.ops.grouped_gemm import grouped_gemm
from fmoe_ext.ops.processor import fast_bfloat16

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def is_slow(x: Tensor) -> bool:
    """True for a tensor whose products torch should not compute: of 16 bits, on such a processor."""
    return x.dtype in SIXTEEN_BITS and x.device.type == "cpu" and not fast_bfloat16()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear of x [..., D] and weight [N, D] by our product, sums in float32."""
    rows = x.reshape(-1, x.shape[-1])
    offs = torch.full((1,), rows.shape[0], dtype=torch.int32, device="cpu")
    y = grouped_gemm(rows, weight[None], offs, None if bias is None else bias[None])
    return y.view(*x.shape[:-1], weight.shape[0])


class Linear(nn.Linear):
    """torch's linear layer, with our product where torch's is slow."""

    def forward(self, x: Tensor) -> Tensor:
        if is_slow(x) and x.dtype == self.weight.dtype:
            return linear(x, self.weight, self.bias)
        return super().forward(x)


def use(model: Any) -> None:
    """Gives the linear layers of a model this product, on a processor where torch is slow."""
    if fast_bfloat16():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
