"""fmoe.fastermoe.expert_utils: the parameters of expert number idx of a list e, as one flat tensor."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn


def get_expert_param_size(e: Sequence[nn.Module], idx: int) -> int:
    """Number of elements of all parameters of an expert."""
    return sum(parameter.numel() for parameter in e[idx].parameters())


@torch.no_grad()
def get_expert_params(e: Sequence[nn.Module], out: torch.Tensor, idx: int) -> None:
    """Copies the parameters of an expert to out."""
    for parameter, part in _parts(e[idx], out):
        part.copy_(parameter.flatten())


@torch.no_grad()
def stash_expert_params(e: Sequence[nn.Module], params: torch.Tensor, idx: int) -> None:
    """Puts aside parameters and gradients of an expert, until pop_expert_params, and gives it those in params."""
    expert: Any = e[idx]
    if not hasattr(expert, "expert_param_stash"):
        expert.expert_param_stash = [
            (parameter.clone(), None if parameter.grad is None else parameter.grad.clone())
            for parameter in expert.parameters()
        ]
    for parameter, part in _parts(expert, params):
        parameter.copy_(part.view_as(parameter))
        parameter.grad = None


@torch.no_grad()
def pop_expert_params(e: Sequence[nn.Module], idx: int) -> None:
    """Gives an expert back what stash_expert_params put aside; does nothing if that is nothing."""
    expert = e[idx]
    if not hasattr(expert, "expert_param_stash"):
        return
    stash: Any = expert.expert_param_stash
    for parameter, (value, grad) in zip(expert.parameters(), stash, strict=True):
        parameter.copy_(value)
        parameter.grad = grad
    del expert.expert_param_stash


@torch.no_grad()
def collect_expert_grads(e: Sequence[nn.Module], grads: torch.Tensor, idx: int) -> None:
    """Moves the gradients of an expert to grads, zeros where there are none."""
    for parameter, part in _parts(e[idx], grads):
        if parameter.grad is None:
            part.zero_()
        else:
            part.copy_(parameter.grad.flatten())
        parameter.grad = None


@torch.no_grad()
def set_grads(e: Sequence[nn.Module], grads: torch.Tensor, idx: int) -> None:
    """Adds grads to the gradients of an expert."""
    for parameter, part in _parts(e[idx], grads):
        part = part.view_as(parameter)
        parameter.grad = part.clone() if parameter.grad is None else parameter.grad + part


def _parts(expert: nn.Module, flat: torch.Tensor) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Each parameter with its part of a flat tensor."""
    begin = 0
    for parameter in expert.parameters():
        yield parameter, flat[begin : begin + parameter.numel()]
        begin += parameter.numel()
