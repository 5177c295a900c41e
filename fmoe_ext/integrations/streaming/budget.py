"""The memory of a streamed model: weights that stay, adapters and their state, and buffers for experts."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fmoe_ext.checkpoint.expert_files import Layer
from fmoe_ext.integrations.streaming.placeholder import StreamedWeight
from fmoe_ext.integrations.streaming.pool import Pool, Statistics

FREE_SHARE = 4  # a quarter of the memory is left to activations and the program
STATES = 4  # bytes of an adapter's weight, gradient and two moments of Adam, per byte of its weight


class ExpertStream:
    """The experts of a model in their files, and the buffers for some of them: model.expert_stream."""

    def __init__(self, model: nn.Module, layers: Sequence[Layer], memory: int) -> None:
        self.memory = memory
        self.activations: Any = None  # an ActivationFile, if stream() was given a folder for it
        self._model = weakref.ref(model)
        self._dense = sum(map(_bytes_of, self.resident_tensors()))
        self._added = 0
        for_experts = self._left(0)
        needed = max(layer.num_bytes(layer.num_experts) for layer in layers)
        if for_experts < needed:
            raise ValueError(self._arithmetic(0, needed))
        self.pool = Pool(layers, for_experts)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertStream:
        return self

    @property
    def statistics(self) -> Statistics:
        """Counts of reads since the last reset_statistics()."""
        return self.pool.statistics

    def reset_statistics(self) -> None:
        """Begins to count anew."""
        self.pool.statistics = Statistics()

    def resident_tensors(self) -> list[Tensor]:
        """Parameters and buffers of the model that are in memory, tied ones once."""
        model = self._model()
        return [] if model is None else [t for t in _unique(model) if not isinstance(t, StreamedWeight)]

    def before_step(self) -> None:
        """Makes room for the adapters, once there are some; ValueError, with the arithmetic, if there is none."""
        adapters = sum(map(_bytes_of, self.resident_tensors())) - self._dense
        added = adapters * (STATES if torch.is_grad_enabled() else 1)
        if added <= self._added:
            return
        left = self._left(added)
        if left < self.pool.layer_bytes:
            raise ValueError(self._arithmetic(adapters, self.pool.layer_bytes))
        self.pool.resize(left)
        self._added = added

    def _left(self, added: int) -> int:
        """Bytes for experts, beside weights that stay and adapters with gradients and moments."""
        return self.memory - self.memory // FREE_SHARE - self._dense - added

    def _arithmetic(self, adapters: int, layer: int) -> str:
        rows = [
            ("weights outside of the experts", self._dense),
            ("one layer of experts", layer),
            ("activations and the program, a quarter of memory", self.memory // FREE_SHARE),
        ]
        if adapters and torch.is_grad_enabled():
            num = f"{adapters:,} bytes of trained weights, with gradients and two moments"
            rows.append((num, STATES * adapters))
        elif adapters:
            rows.append(("adapters", adapters))
        text = " + ".join(f"{value:,} ({name})" for name, value in rows)
        total = sum(value for _, value in rows)
        more = "; take a smaller rank, or adapt fewer layers" if adapters else ""
        return f"memory={self.memory:,} bytes is too little: {text} = {total:,}{more}"


def _unique(model: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers, tied ones once."""
    seen = set()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            yield tensor


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
