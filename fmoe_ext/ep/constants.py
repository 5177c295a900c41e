"""Small tensors of known integers, kept on their device so that no step copies them there."""

import functools

import torch


def constant(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """An int64 tensor of these values, the same one at every call; not to be changed."""
    return torch.tensor(values, device=device) if torch.compiler.is_compiling() else _kept(values, device)


@functools.lru_cache(maxsize=256)
def _kept(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, device=device)


def lookup(table: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
    """table[topk_idx], and -1 for dropped choices."""
    return torch.where(topk_idx < 0, -1, table[topk_idx.clamp(min=0).long()])
