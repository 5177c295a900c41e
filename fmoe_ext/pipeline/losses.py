"""Losses as sums, which microbatches of any size add up to one mean."""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100


def token_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Sum over the tokens of the cross entropy of output [*, V] against target [*]; -100 counts for nothing.

    Equivalent to: F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum").
    """
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum", ignore_index=IGNORED)


def count_targets(target: object) -> int:
    """Divisor of a sum of losses: the targets that are not -100; of floating targets, the rows."""
    if not isinstance(target, Tensor):
        raise TypeError(
            f"the target is a {type(target).__name__}, not a tensor: pass count=, a function target -> number of tokens"
        )
    if target.dtype in (torch.int64, torch.int32):
        return int((target != IGNORED).sum())
    return len(target)
