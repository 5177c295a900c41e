"""Linear layers outside of the experts that stay packed as their file has them."""

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


class PackedLinear(nn.Linear):
    """A linear layer with a packed weight, which is frozen: the product decodes it.

    packed: Quantized of one expert, in the buffers `packed`, `scale` and `zero`, which a state_dict does not have.
    like: the layer whose place it takes, with a bias that stays. Copies share the buffers. `weight` has a shape and a
    dtype and no values.
    """

    def __init__(self, packed: frozen.Quantized, like: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = like.in_features, like.out_features
        self.weight, self.bias = like.weight, like.bias
        self._packed = packed
        for name, tensor in (("packed", packed.rows()), ("scale", packed.scale), ("zero", packed.zero)):
            self.register_buffer(name, tensor, persistent=False)
        self.training = like.training

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias[None].to(x.dtype)
        y = frozen.frozen_gemm(x.reshape(-1, self.in_features), self._packed, None, bias)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self._packed.format}"

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedLinear:
        memo[id(self._packed)] = self._packed
        memo |= {id(t): t for t in self.buffers(recurse=False)}
        memo[id(self)] = copied = PackedLinear.__new__(PackedLinear)
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


def keep_packed(model: nn.Module, stored: dict[str, PackedTensor], int8_activations: bool = False) -> None:
    """Puts a PackedLinear in the place of each linear layer whose weight is a PackedWeight. stored: by its name."""
    memory = _HugePages()
    for path, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and isinstance(layer.weight, PackedWeight):
            parent, _, name = path.rpartition(".")
            packed = stored[f"{path}.weight"].packed().map(memory.copy)
            used = packed.in_int8 if int8_activations else packed
            setattr(model.get_submodule(parent), name, PackedLinear(used, layer))


class _HugePages:
    """Copies of tensors side by side in huge pages."""

    BLOCK = 32 << 20  # bytes that are asked for at once; a page of them is 2 MiB

    def __init__(self) -> None:
        self._free: np.ndarray[Any, Any] = np.empty(0, np.uint8)

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy that lies beside the last one."""
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes > self._free.size:
            self._free = np.frombuffer(in_huge_pages(max(num_bytes, self.BLOCK)), dtype=np.uint8)
        mine, self._free = self._free[:num_bytes], self._free[-(-num_bytes // ALIGNED) * ALIGNED :]
        copied = torch.from_numpy(mine).view(tensor.dtype).view(tensor.shape)
        return copied.copy_(tensor)
