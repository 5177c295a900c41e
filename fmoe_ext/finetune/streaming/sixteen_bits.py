"""Linear layers of 16 bits outside of the experts, on processors where torch takes 5 to 40 times as long for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fmoe_ext.ops.grouped_gemm import grouped_gemm
from fmoe_ext.ops.processor import fast_bfloat16

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class Linear(nn.Linear):
    """A linear layer whose products of 16 bits on the CPU are ours, with sums in float32.

    like: the layer whose place it takes, and whose weight and bias it has.
    """

    def __init__(self, like: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = like.in_features, like.out_features
        self.weight, self.bias = like.weight, like.bias
        self.training = like.training

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype not in SIXTEEN_BITS or x.dtype != self.weight.dtype or x.device.type != "cpu":
            return super().forward(x)
        rows = x.reshape(-1, self.in_features)
        offs = torch.full((1,), rows.shape[0], dtype=torch.int32, device="cpu")  # one expert has all rows
        y = grouped_gemm(rows, self.weight[None], offs, None if self.bias is None else self.bias[None])
        return y.view(*x.shape[:-1], self.out_features)


def use_ours_where_torch_is_slow(model: nn.Module) -> None:
    """Puts a Linear in the place of each of torch's linear layers, if torch is slow at 16 bits on this processor."""
    if fast_bfloat16():
        return
    for path, layer in list(model.named_modules()):
        if type(layer) is nn.Linear:  # a class derived from it may compute something else
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, Linear(layer))
