"""Cutting a batch into microbatches and putting their results together again."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

Tensors: TypeAlias = Tensor | tuple[Tensor, ...]


def as_tuple(values: Tensors) -> tuple[Tensor, ...]:
    return (values,) if isinstance(values, Tensor) else tuple(values)


def map_tensors(fn: Callable[[Tensor], Tensor], values: Any) -> Any:
    """fn of each tensor, in a tuple where values is one."""
    return tuple(fn(x) for x in values) if isinstance(values, tuple) else fn(values)


def check_tensors(value: object, what: str) -> None:
    """TypeError unless value is a tensor or a tuple of tensors."""
    for part in value if isinstance(value, tuple) else (value,):
        if not isinstance(part, Tensor):
            raise TypeError(f"{what} must be a tensor or a tuple of tensors, but got {type(part).__name__}")


def scatter(batch: Tensors, chunks: int) -> list[Tensors]:
    """batch [B, *] or a tuple of such tensors -> min(chunks, B) parts that differ by one row at most, in order.

    Raises ValueError for tensors that cannot be cut alike.
    Equivalent to: batch.tensor_split(min(chunks, B)).
    """
    if isinstance(batch, Tensor):
        return list(_cut(batch, chunks))
    parts = [_cut(x, chunks) for x in batch]
    if len({len(part) for part in parts}) > 1:
        sizes = [list(x.shape) for x in batch]
        raise ValueError(f"the tensors of a batch must have the same first dimension, but got shapes {sizes}")
    return list(zip(*parts, strict=True))


def _cut(x: Tensor, chunks: int) -> tuple[Tensor, ...]:
    return x.tensor_split(max(1, min(chunks, x.shape[0]))) if x.dim() else (x,)


def gather(outputs: list[Tensors]) -> Tensors:
    """The results of all microbatches as those of one batch.

    Equivalent to: torch.cat(outputs).
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(outputs)  # type: ignore[arg-type]
    return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))


def num_rows(batch: Tensors) -> int:
    """Rows of a batch or microbatch; 1 for what has no dimension."""
    first = as_tuple(batch)[0]
    return first.shape[0] if first.dim() else 1


def move(value: Tensors, device: torch.device) -> Tensors:
    """value on a device; gradients travel back."""
    return map_tensors(lambda x: x.to(device, non_blocking=True), value)
