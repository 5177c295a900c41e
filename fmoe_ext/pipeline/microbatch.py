"""Values of microbatches, for split(), Pipeline and compat's Pipe; the default loss_fn and count of Pipeline.

A layer takes and returns a tensor [B, *] or a tuple; all functions here take either. The loss is a sum over tokens, not
a mean: Pipeline divides the sum of all microbatches by the count of all of them.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors: TypeAlias = Tensor | tuple[Tensor, ...]
Values: TypeAlias = Tensor | tuple[Any, ...]  # with other values among the tensors


def as_tuple(values: Any) -> tuple[Any, ...]:
    return (values,) if isinstance(values, Tensor) else tuple(values)


def map_tensors(fn: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Call fn with each tensor, in a tuple where values is one; other values as they are."""
    if isinstance(values, tuple):
        return tuple(fn(x) if isinstance(x, Tensor) else x for x in values)
    return fn(values)


def check_tensors(value: object, what: str) -> None:
    """Raise TypeError unless value is a tensor or a tuple of tensors."""
    for part in value if isinstance(value, tuple) else (value,):
        if not isinstance(part, Tensor):
            raise TypeError(f"{what} must be a tensor or a tuple of tensors, but got {type(part).__name__}")


def num_rows(batch: Values) -> int:
    """Count the rows of the first tensor of a batch or microbatch; 1 if it has no dimension."""
    first = next(x for x in as_tuple(batch) if isinstance(x, Tensor))
    return first.shape[0] if first.dim() else 1


_IGNORED = -100  # a target that counts for nothing


def token_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Sum over the tokens the cross entropy of output [*, V] against target [*]; -100 counts for nothing.

    Equivalent to: F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum").
    """
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum", ignore_index=_IGNORED)


def count_targets(target: object) -> int:
    """Count what a sum of losses is divided by: the targets that are not -100; of floating targets, the rows."""
    if not isinstance(target, Tensor):
        raise TypeError(
            f"the target is a {type(target).__name__}, not a tensor: pass count=, a function target -> number of tokens"
        )
    if target.dtype in (torch.int64, torch.int32):  # numbers of classes or tokens
        return int((target != _IGNORED).sum())
    return len(target)
