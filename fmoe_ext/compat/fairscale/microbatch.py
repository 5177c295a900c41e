"""Cut a batch into microbatches and put their results together again, with other values among the tensors.

Pipe calls scatter() once a batch, move() for each microbatch and partition, and gather() at the end. Values are a
tensor [B, *], or a tuple of such tensors and of anything else (None, lists, numbers), which is not cut.
"""

from typing import Any

import torch
from torch import Tensor

from fmoe_ext.pipeline.microbatch import Values, map_tensors


class NoChunk:
    """A tensor of the input that every microbatch gets whole."""

    def __init__(self, tensor: Tensor):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"NoChunk is for a tensor, but got {type(tensor).__name__}")
        self.tensor = tensor


def check_values(value: object, what: str) -> None:
    """Raise TypeError unless value is a tensor or a tuple with a tensor among its values."""
    if isinstance(value, Tensor) or (isinstance(value, tuple) and any(isinstance(x, Tensor) for x in value)):
        return
    kind = "a tuple without one" if isinstance(value, tuple) else type(value).__name__
    raise TypeError(f"{what} must be a tensor, or a tuple with a tensor among its values, but got {kind}")


def scatter(batch: Values, chunks: int) -> list[Values]:
    """Cut batch [B, *], or a tuple of such tensors and of other values, into min(chunks, B) parts, in order, that
    differ by one row at most. Other values, and the tensors of NoChunk, go into every part.

    Tensors with different B are cut as by torch.chunk(). Raises ValueError if that gives different numbers of parts.
    Equivalent to: batch.tensor_split(min(chunks, B)).
    """
    if isinstance(batch, Tensor):
        return list(_cut(batch, chunks))
    tensors = [x for x in batch if isinstance(x, Tensor)]
    parts = [_cut(x, chunks) for x in tensors]
    if len({len(part) for part in parts}) > 1:  # chunk() may give equally many parts of unequal tensors
        parts = [x.chunk(chunks) if x.dim() else (x,) for x in tensors]
    counts = [len(part) for part in parts]
    if len(set(counts)) > 1:
        sizes = [list(x.shape) for x in tensors]
        raise ValueError(
            f"the tensors of a batch, of shapes {sizes}, are cut into {counts} microbatches: give them the same first "
            "dimension, or wrap in NoChunk what each microbatch needs whole"
        )
    # a column for each value of the tuple, an entry for each microbatch; then transposed
    cut_tensors = iter(parts)
    columns: list[tuple[Any, ...]] = []
    for x in batch:
        whole = x.tensor if isinstance(x, NoChunk) else x
        columns.append(next(cut_tensors) if isinstance(x, Tensor) else (whole,) * counts[0])
    return list(zip(*columns, strict=True))


# tensor_split, not chunk: parts differ by one row at most, and there are as many as were asked for
def _cut(x: Tensor, chunks: int) -> tuple[Tensor, ...]:
    return x.tensor_split(max(1, min(chunks, x.shape[0]))) if x.dim() else (x,)


def gather(outputs: list[Values]) -> Values:
    """Join the results of all microbatches into the result of the batch; values that are no tensors become a list.

    Raises TypeError if only some microbatches have a tensor in a place.
    Equivalent to: torch.cat(outputs).
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        return first if len(outputs) == 1 else torch.cat(outputs)  # type: ignore[arg-type]
    # a tuple: each of its places by itself
    joined: list[Any] = []
    for parts in zip(*outputs, strict=True):
        are_tensors = {isinstance(part, Tensor) for part in parts}
        if len(are_tensors) > 1:
            kinds = ", ".join(sorted({type(part).__name__ for part in parts}))
            raise TypeError(
                f"the results of the microbatches must be tensors in all or in none, but are {kinds}"
            )
        if are_tensors == {False}:
            joined.append(list(parts))
        else:
            joined.append(parts[0] if len(parts) == 1 else torch.cat(parts))
    return tuple(joined)


def move(value: Values, device: torch.device) -> Values:
    """Copy the tensors of a value to a device; gradients travel back."""
    return map_tensors(lambda x: x.to(device, non_blocking=True), value)
