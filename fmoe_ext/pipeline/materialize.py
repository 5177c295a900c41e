"""Fill models that no rank has in memory as a whole: made on the meta device, filled a stage at a time.

A tensor that init() forgets would train as garbage. So each new one is filled with a number that no model has (NaN, or
the least integer; bool and uint8 have none), and one that still has it after init() is an error that names it.
"""

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy

import torch
from torch import Tensor, nn


def on_meta(modules: Iterable[nn.Module]) -> bool:
    """Return whether any parameter or buffer is on the meta device."""
    return any(t.is_meta for module in modules for t in _tensors(module))


def materialize(modules: Iterable[nn.Module], mine: Iterable[nn.Module], device: torch.device) -> None:
    """Allocate on a device what `mine` has on the meta device, and mark it as not filled.

    Tensors that several of all `modules` share stay one tensor. Tags of parameters, such as those that name their
    data-parallel group, are kept.
    """
    unset: dict[int, Tensor] = {}  # {id of a tensor on the meta device: what replaces it}
    for t in (t for module in mine for t in _tensors(module) if t.is_meta):
        new = torch.full_like(t, _mark(t), device=device, requires_grad=False)
        if isinstance(t, nn.Parameter):
            new = nn.Parameter(new, requires_grad=t.requires_grad)
            new.__dict__.update(t.__dict__)
        unset[id(t)] = new
    # in every module that has the tensor, also of other ranks' stages: it may be tied
    for module in {id(m): m for whole in modules for m in whole.modules()}.values():
        for name, t in list(_named(module, recurse=False)):
            if id(t) in unset:
                setattr(module, name, unset[id(t)])


def fill(module: nn.Module, init: Callable[[nn.Module], object] | None) -> None:
    """Call init(module). Raises ValueError for a parameter or buffer that materialize() made and init left unset."""
    if init is None:
        raise ValueError(
            "the model is on the meta device: pass Pipeline(init=), a function that gives every parameter and buffer "
            "of its argument, pipeline.module, a value, such as lambda module: checkpoint.load(path, module)"
        )
    with torch.no_grad():
        init(module)
    if left := [name for name, t in _named(module) if _is_unset(t)]:
        raise ValueError(
            f"init= gave {left[0]} no value, nor {len(left) - 1} others: it must fill all parameters and buffers of "
            "pipeline.module; buffers that a checkpoint does not have can be made outside the meta device"
        )


def trial_copy(layer: nn.Module, device: torch.device) -> nn.Module:
    """Copy a layer so that it can be run, with random numbers for what the layer has on the meta device."""
    copy = deepcopy(layer).train()
    if on_meta([copy]):
        materialize([copy], [copy], device)
        with torch.no_grad():
            for t in _tensors(copy):
                if _is_unset(t):
                    t.normal_(std=0.02) if t.is_floating_point() else t.zero_()
    return copy


def _named(module: nn.Module, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=recurse, remove_duplicate=False)
    yield from module.named_buffers(recurse=recurse, remove_duplicate=False)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from (t for _, t in _named(module))


def _mark(t: Tensor) -> float | int | bool:
    """Return the number that says that a tensor of this dtype is not filled."""
    if t.is_floating_point() or t.is_complex():
        return torch.nan
    return False if t.dtype == torch.bool else torch.iinfo(t.dtype).min


def _is_unset(t: Tensor) -> bool:
    if t.dtype in (torch.bool, torch.uint8):
        return False  # every value is one that a model may have
    mark = _mark(t)
    return bool(t.isnan().any() if mark != mark else (t == mark).any())  # NaN alone differs from itself
