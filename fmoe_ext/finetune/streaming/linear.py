"""Replace linear layers outside of the experts of a streamed model: replace_linear(), which stream() calls.

PackedLinear      A weight that a kernel can multiply as it lies stays packed, so that a model of 4 bits takes 4 bits in
                  memory as it does on the disk.
SixteenBitLinear  The others are in bfloat16 or float16, for which torch takes 5 to 40 times as long on processors
                  without instructions for them: there our kernels compute.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fmoe_ext import frozen
from fmoe_ext.checkpoint.expert_files import ALIGNED
from fmoe_ext.checkpoint.methods import PackedTensor
from fmoe_ext.finetune.streaming.placeholder import PackedWeight
from fmoe_ext.finetune.streaming.pool import in_huge_pages
from fmoe_ext.ops.grouped_gemm import grouped_gemm
from fmoe_ext.ops.processor import fast_bfloat16, fast_float16

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class PackedLinear(nn.Linear):
    """A linear layer with a packed weight, which is frozen: the product decodes it.

    packed: Quantized of one expert, in the buffers `packed`, `scale` and `zero`; copies of the layer share them.
    like: the layer whose place it takes, with a bias that stays. Its `weight` has a shape and a dtype and no values
    (PackedWeight). A state_dict has neither weight nor buffers: PEFT saves a head's with its adapter, and would want
    values.
    """

    def __init__(self, packed: frozen.Quantized, like: nn.Linear) -> None:
        nn.Module.__init__(self)  # not nn.Linear's, which makes a weight
        self.in_features, self.out_features = like.in_features, like.out_features
        self.weight, self.bias = like.weight, like.bias
        self._packed = packed
        for name, tensor in (("packed", packed.rows()), ("scale", packed.scale), ("zero", packed.zero)):
            self.register_buffer(name, tensor, persistent=False)
        self.register_state_dict_post_hook(_without_weight)
        self.training = like.training

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias[None].to(x.dtype)
        y = frozen.frozen_gemm(x.reshape(-1, self.in_features), self._packed, None, bias)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self._packed.format}"

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedLinear:
        # entries of memo are not copied: buffers are shared, adapters that others hang in are copied
        memo[id(self._packed)] = self._packed
        memo |= {id(t): t for t in self.buffers(recurse=False)}
        memo[id(self)] = copied = PackedLinear.__new__(PackedLinear)
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


def _without_weight(layer: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    state_dict.pop(f"{prefix}weight", None)


class SixteenBitLinear(nn.Linear):
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


def replace_linear(model: nn.Module, stored: dict[str, PackedTensor], int8_activations: bool = False) -> None:
    """Replace linear layers whose weight is a PackedWeight, and others of 16 bits where torch is slow at theirs.

    stored: packed weights by name. int8_activations: as in Quantized.
    """
    is_slow = {torch.bfloat16: not fast_bfloat16(), torch.float16: not fast_float16()}
    memory = _HugePages()
    # a list, since modules are replaced under way
    for path, layer in list(model.named_modules()):
        if type(layer) is not nn.Linear:  # a class derived from it may compute something else
            continue
        parent, _, name = path.rpartition(".")
        if isinstance(layer.weight, PackedWeight):
            packed = stored[f"{path}.weight"].packed().map(memory.copy)
            used = packed.in_int8 if int8_activations else packed
            setattr(model.get_submodule(parent), name, PackedLinear(used, layer))
        elif is_slow.get(layer.weight.dtype):
            setattr(model.get_submodule(parent), name, SixteenBitLinear(layer))


class _HugePages:
    """Copies of tensors side by side in huge pages: most weights are smaller than the 2 MiB of one page."""

    BLOCK = 32 << 20  # bytes that are asked for at once; a page of them is 2 MiB

    def __init__(self) -> None:
        self._free: np.ndarray[Any, Any] = np.empty(0, np.uint8)

    def copy(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the place after the last copy."""
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes > self._free.size:
            self._free = np.frombuffer(in_huge_pages(max(num_bytes, self.BLOCK)), dtype=np.uint8)
        mine, self._free = self._free[:num_bytes], self._free[-(-num_bytes // ALIGNED) * ALIGNED :]
        copied = torch.from_numpy(mine).view(tensor.dtype).view(tensor.shape)
        return copied.copy_(tensor)
