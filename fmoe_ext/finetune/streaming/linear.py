"""Linear layers outside of the experts: packed ones stay packed as their file has them, 16-bit ones use our product.

A packed layer's product decodes the weight (frozen_gemm), so that attention and dense layers take the memory that
their file takes. On processors without instructions for bfloat16 torch takes 5 to 40 times as long for a product of
16 bits as ours does: there our grouped product computes it, with one expert that has all rows.
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
from fmoe_ext.ops.processor import fast_bfloat16

_GATES = ("gate", "router")  # ends of names: their few columns decide which experts are chosen
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class PackedLinear(nn.Linear):
    """A linear layer with a packed weight, which is frozen: the product decodes it.

    packed: Quantized of one expert, in the buffers `packed`, `scale` and `zero`, which a state_dict does not have.
    like: the layer that it replaces, whose bias it keeps. Copies share the buffers. `weight` has a shape and a dtype,
    and no values.
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


def packable(skeleton: Any) -> dict[str, nn.Linear]:
    """Find the linear layers that may stay packed, all but gates and tied ones -> {name of the weight: layer}."""
    names: dict[int, list[str]] = {}
    for name, parameter in skeleton.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    is_tied = getattr(skeleton.config.get_text_config(), "tie_word_embeddings", False)
    head = skeleton.get_output_embeddings() if is_tied else None
    return {
        f"{path}.weight": layer
        for path, layer in skeleton.named_modules()
        if type(layer) is nn.Linear
        and not path.endswith(_GATES)
        and layer is not head
        and len(names[id(layer.weight)]) == 1
    }


def keep_packed(model: nn.Module, stored: dict[str, PackedTensor], int8_activations: bool = False) -> None:
    """Replace each linear layer whose weight is a PackedWeight by a PackedLinear. stored: weights by name."""
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
        """Copy a tensor to the place beside the last one."""
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes > self._free.size:
            self._free = np.frombuffer(in_huge_pages(max(num_bytes, self.BLOCK)), dtype=np.uint8)
        mine, self._free = self._free[:num_bytes], self._free[-(-num_bytes // ALIGNED) * ALIGNED :]
        copied = torch.from_numpy(mine).view(tensor.dtype).view(tensor.shape)
        return copied.copy_(tensor)


class SixteenBitLinear(nn.Linear):
    """A linear layer whose products of 16 bits on the CPU are ours, with sums in float32.

    like: the layer that it replaces, and whose weight and bias it has.
    """

    def __init__(self, like: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = like.in_features, like.out_features
        self.weight, self.bias = like.weight, like.bias
        self.training = like.training

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype not in _SIXTEEN_BITS or x.dtype != self.weight.dtype or x.device.type != "cpu":
            return super().forward(x)
        rows = x.reshape(-1, self.in_features)
        offs = torch.full((1,), rows.shape[0], dtype=torch.int32, device="cpu")  # one expert has all rows
        y = grouped_gemm(rows, self.weight[None], offs, None if self.bias is None else self.bias[None])
        return y.view(*x.shape[:-1], self.out_features)


def use_ours_where_torch_is_slow(model: nn.Module) -> None:
    """Replace each of torch's linear layers, if torch is slow at 16 bits on this processor."""
    if fast_bfloat16():
        return
    for path, layer in list(model.named_modules()):
        if type(layer) is nn.Linear:  # a class derived from it may compute something else
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, SixteenBitLinear(layer))
