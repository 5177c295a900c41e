"""Wrappers of data parallelism that would take different experts for copies of each other: refused.

Experts differ between the ranks of their layer's moe_group. DistributedDataParallel overwrites them with those of its
first rank and averages their gradients, fully_shard makes one parameter out of pieces of them, both without a word,
unless their ranks hold the same experts. The former is seen when it takes the model in, before it changes anything,
the latter at the next forward.
"""

import inspect
from collections.abc import Iterator
from types import FrameType
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel


class ExpertLayer(Protocol):
    """What this file knows of an FMoE."""

    experts: nn.Module

    @property
    def moe_group(self) -> dist.ProcessGroup | None: ...


def check_wrappers(layer: ExpertLayer) -> None:
    """Raises ValueError if fully_shard joins experts of different ranks; cheap where they are as at the last call."""
    if torch.compiler.is_compiling() or layer.moe_group is None or layer.experts is None:
        return
    if all(hasattr(p, "fmoe_checked") for p in layer.experts.parameters()):
        return
    running = [module for module in _running_modules() if isinstance(module, FSDPModule)]
    kept = layer.experts.state_dict()  # shows sharded parameters as DTensors, also while they are gathered
    for sharded in (value for value in kept.values() if isinstance(value, DTensor)):
        name = next((_name_in(module, layer) for module in reversed(running)), type(layer).__name__)
        _refuse_shared(name, layer, sharded.device_mesh.mesh.flatten().tolist(), _SHARDED)
    for module in running:
        module.unshard()  # as it was: a state dict lets go of what is gathered
    for p in layer.experts.parameters():
        p.fmoe_checked = True  # type: ignore[attr-defined]  # a parameter that takes its place has no such mark


_SHARDED = (
    "fully_shard would make one parameter out of pieces of them",
    "pass ignored_params=set(layer.experts.parameters()) to fully_shard and reduce those gradients over the ranks "
    "that hold the same experts, or give fully_shard a mesh of these ranks",
)
_AVERAGED = (
    "DistributedDataParallel would overwrite and average them",
    "wrap the model in fmoe_ext.distributed.DistributedGroupedDataParallel instead",
)


def _refuse_shared(name: str, layer: ExpertLayer, ranks: list[int], texts: tuple[str, str]) -> None:
    assert layer.moe_group is not None
    owners = dist.get_process_group_ranks(layer.moe_group)
    if len(set(owners) & set(ranks)) > 1:
        what, way = texts
        raise ValueError(
            f"the experts of layer {name!r} differ between the ranks {owners} of its moe_group, and {what} (its ranks: "
            f"{sorted(ranks)}). Either {way}; or let every rank have all experts and wrap as you do: world_size=1 and "
            "no moe_group for the layer, distributed_experts=False for fmoefy"
        )


def _running_modules() -> Iterator[nn.Module]:
    """The modules whose forward is running, innermost first, each once."""
    seen: set[int] = set()
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) not in seen:
            seen.add(id(module))
            yield module
        frame = frame.f_back


def _argument_of_constructor(module: nn.Module, name: str, default: bool) -> bool:
    """What the constructor of module, which is running, was given for an argument that the module does not keep."""
    frame = inspect.currentframe()
    while frame is not None and not (frame.f_locals.get("self") is module and name in frame.f_locals):
        frame = frame.f_back
    return default if frame is None else bool(frame.f_locals[name])


def _name_in(module: nn.Module, layer: ExpertLayer) -> str:
    return (
        next((name for name, child in module.named_modules() if child is layer), "") or type(layer).__name__
    )


def _check_registration(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Called by nn.Module for every submodule that any module gets."""
    if name != "module" or module is None or not isinstance(parent, DistributedDataParallel):
        return
    params = [(name, p) for name, p in module.named_parameters() if name not in parent.parameters_to_ignore]
    overwrites = _argument_of_constructor(parent, "init_sync", True)
    taken = {id(p) for _, p in params if overwrites or p.requires_grad}  # the frozen are never averaged
    for path, layer in module.named_modules():
        group = getattr(layer, "moe_group", None)
        experts = getattr(layer, "experts", None)
        if not isinstance(group, dist.ProcessGroup) or not isinstance(experts, nn.Module):
            continue
        if any(id(p) in taken for p in experts.parameters()):
            ranks = dist.get_process_group_ranks(parent.process_group)
            _refuse_shared(path or type(layer).__name__, layer, ranks, _AVERAGED)


WATCH = register_module_module_registration_hook(_check_registration)
