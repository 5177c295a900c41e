"""Layers of experts cut into parts, and the order in which a step uses the parts.

The order is what makes reading ahead and Belady's rule possible (pool.py): a forward uses the layers 0, 1, 2, ...,
a backward uses them in reverse, and where layers are checkpointed it runs each one's forward again before its
backward. Where two layers fit into memory a part is a layer; otherwise a layer is cut into parts of so few experts
that PARTS of them fit, so that some are read while one computes.
"""

import enum
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fmoe_ext.checkpoint.expert_files import ALIGNED, Layer
from fmoe_ext.finetune.streaming.reader import BLOCK

PARTS = 4  # buffers, where a layer is cut: one computes while others are read


class Phase(enum.Enum):
    """The use of a layer: forward, the forward that a checkpoint repeats in the backward, backward."""

    FORWARD = enum.auto()
    REPEATED = enum.auto()
    BACKWARD = enum.auto()


class Part(NamedTuple):
    """Experts [begin, end) of a layer, which are read together."""

    layer: int
    begin: int
    end: int


class Parts:
    """The parts of all layers, by number. of_layer: numbers of the parts of each layer, one if it is not cut."""

    def __init__(self, layers: Sequence[Layer], size: int) -> None:
        self._parts: list[Part] = []
        self.of_layer: list[range] = []
        for index, layer in enumerate(layers):
            first, step = len(self._parts), size or layer.num_experts
            for begin in range(0, layer.num_experts, step):
                self._parts.append(Part(index, begin, min(begin + step, layer.num_experts)))
            self.of_layer.append(range(first, len(self._parts)))

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, number: int) -> Part:
        return self._parts[number]

    def after(self, number: int, phase: Phase, is_training: bool) -> Iterator[int]:
        """Yield the numbers of parts in the order of their next uses, after this use of one.

        A backward repeats the forward of a layer, as checkpoints do, and then goes backwards through its parts.
        """
        layer = self._parts[number].layer
        every = range(len(self._parts))
        if phase is Phase.FORWARD:
            yield from every[number + 1 :]
            yield from self._by_layer_backwards(len(self.of_layer)) if is_training else every
            return
        if phase is Phase.REPEATED:
            yield from range(number + 1, self.of_layer[layer].stop)
            yield from reversed(self.of_layer[layer])
        else:
            yield from range(number - 1, self.of_layer[layer].start - 1, -1)
        yield from self._by_layer_backwards(layer)
        yield from every

    def _by_layer_backwards(self, end: int) -> Iterator[int]:
        for parts in reversed(self.of_layer[:end]):
            yield from parts


def plan_buffers(layers: Sequence[Layer], num_bytes: int) -> tuple[int, int]:
    """Choose (experts of a part, 0 for all of a layer; number of buffers); ValueError if too few experts fit.

    Parts together take the memory of one layer at most: more hides no more reads, and activations need the rest.
    """
    whole = bytes_of_experts(layers)
    if num_bytes >= whole * min(2, len(layers)):
        return 0, min(num_bytes // whole, len(layers))
    num_bytes = min(num_bytes, whole)
    size = max(layer.num_experts for layer in layers)
    while size and num_bytes // bytes_of_experts(layers, size) < PARTS:
        size -= 1
    if not size:
        raise ValueError(f"{num_bytes:,} bytes do not hold {PARTS} experts")
    return size, num_bytes // bytes_of_experts(layers, size)


def bytes_of_experts(layers: Sequence[Layer], count: int = 0) -> int:
    """Compute the bytes of a buffer for some experts of any of the layers, by default for all of them."""
    step = ALIGNED if count else BLOCK
    sizes = (layer.num_bytes(min(count or layer.num_experts, layer.num_experts)) for layer in layers)
    return -(-max(sizes) // step) * step
