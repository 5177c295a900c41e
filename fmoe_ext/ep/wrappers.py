"""Refuse wrappers of data parallelism that would take different experts for copies of each other.

Experts differ between the ranks of their layer's moe_group. Without a word DistributedDataParallel and DeepSpeed would
overwrite them with those of the first rank and average their gradients, and fully_shard would make one parameter out of
pieces of them. That is right only over ranks that hold the same experts.

DistributedDataParallel is caught when it takes the model in, before it changes anything (_check_registration, a hook of
torch on every module that gets a submodule). The others are found at a layer's next forward (check_wrappers), on the
stack of Python, as no module knows its parent.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from fmoe_ext._sharded import is_deepspeed_engine, is_dtensor, is_fsdp_module
from fmoe_ext.ep.process_groups import find_group

if TYPE_CHECKING:
    from fmoe_ext.ep.expert_parallel import ExpertParallel


def check_wrappers(layer: nn.Module) -> None:
    """Raise ValueError if fully_shard or DeepSpeed joins experts of different ranks; cheap for parameters seen before.

    layer: an FMoE, or a module of experts that has an expert_parallel.
    """
    experts = _experts_of(layer)
    if (
        torch.compiler.is_dynamo_compiling()
        or torch.compiler.is_exporting()
        or _parallel_of(layer) is None
        or experts is None
    ):
        return
    if engine := running_deepspeed():
        # the ranks to which it copies; None is all
        ranks = dist.get_process_group_ranks(getattr(engine, "seq_data_parallel_group", None))
        _refuse_shared(_name_in(engine.module, layer), layer, ranks, _BY_DEEPSPEED)
    if all(hasattr(p, "fmoe_checked") for p in experts.parameters()):
        return
    running = [module for module in _running_modules() if is_fsdp_module(module)]
    kept = experts.state_dict()  # shows sharded parameters as DTensors, also while they are gathered
    for sharded in (value for value in kept.values() if is_dtensor(value)):
        name = next((_name_in(module, layer) for module in reversed(running)), type(layer).__name__)
        _refuse_shared(name, layer, sharded.device_mesh.mesh.flatten().tolist(), _SHARDED)
    for module in running:
        module.unshard()  # as it was: a state dict lets go of what is gathered
    for p in experts.parameters():
        p.fmoe_checked = True  # type: ignore[attr-defined]  # a parameter that takes its place has no such mark


def check_mesh(layer: nn.Module, ranks: list[int]) -> None:
    """Raise ValueError if fully_shard over these ranks would join different experts."""
    if _parallel_of(layer) is not None:
        _refuse_shared(type(layer).__name__, layer, ranks, _SHARDED)


def warn_of_copies(module: nn.Module, num_copies: int, consequence: str) -> None:
    """Warn if a gate's bias is updated from fewer ranks than hold a copy of the gate."""
    for name, gate in module.named_modules():
        if hasattr(gate, "warn_of_copies"):
            gate.warn_of_copies(num_copies, consequence, name)


def _parallel_of(layer: nn.Module) -> ExpertParallel | None:
    return getattr(layer, "expert_parallel", None)


def _experts_of(layer: nn.Module) -> nn.Module | None:
    """Find the module whose parameters differ between ranks."""
    return getattr(layer, "experts", layer)


# what the wrapper does to the experts, and the way out: for the error of _refuse_shared()
_SHARDED = (
    "fully_shard would make one parameter out of pieces of them",
    "pass ignored_params=set(layer.experts.parameters()) to fully_shard and reduce those gradients over the ranks "
    "that hold the same experts, or give fully_shard a mesh of these ranks",
)
_AVERAGED = (
    "DistributedDataParallel would overwrite and average them",
    "wrap the model in fmoe_ext.distributed.DistributedGroupedDataParallel instead",
)
_BY_DEEPSPEED = (
    "DeepSpeed copied the experts of its first rank over those of the others",
    "wrap the model in fmoe_ext.distributed.DistributedGroupedDataParallel instead",
)


def _refuse_shared(name: str, layer: nn.Module, ranks: list[int], texts: tuple[str, str]) -> None:
    parallel = _parallel_of(layer)
    assert parallel is not None
    owners = dist.get_process_group_ranks(find_group(parallel.group))
    if len(set(owners) & set(ranks)) > 1:
        what, way = texts
        raise ValueError(
            f"the experts of layer {name!r} differ between the ranks {owners} of its moe_group, and {what} (its ranks: "
            f"{sorted(ranks)}). Either {way}; or let every rank have all experts and wrap as you do: world_size=1 and "
            "no moe_group for the layer, distributed_experts=False for fmoefy"
        )


def running_deepspeed() -> Any:
    """Find the DeepSpeedEngine that is being built or is running; None without one."""
    if "deepspeed.runtime.engine" not in sys.modules:
        return None
    return next(filter(is_deepspeed_engine, _running_modules()), None)


def _running_modules() -> Iterator[nn.Module]:
    """Find the modules that have a method on the stack, innermost first, each once."""
    # torch's hooks for all modules would know them too, but slow every module of the process; this runs once a layer.
    seen: set[int] = set()
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) not in seen:
            seen.add(id(module))
            yield module
        frame = frame.f_back


def _name_in(module: nn.Module, layer: nn.Module) -> str:
    return (
        next((name for name, child in module.named_modules() if child is layer), "") or type(layer).__name__
    )


def _check_registration(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Refuse experts that DistributedDataParallel takes in; called for every submodule that any module gets."""
    if name != "module" or module is None or not isinstance(parent, DistributedDataParallel):
        return
    params = [(name, p) for name, p in module.named_parameters() if name not in parent.parameters_to_ignore]
    # init_sync=False overwrites nothing. It is an argument that DistributedDataParallel does not keep: its constructor,
    # which is running, has it.
    frame = inspect.currentframe()
    while frame is not None and not (frame.f_locals.get("self") is parent and "init_sync" in frame.f_locals):
        frame = frame.f_back
    overwrites = frame is None or bool(frame.f_locals["init_sync"])
    taken = {id(p) for _, p in params if overwrites or p.requires_grad}  # the frozen are never averaged
    for path, layer in module.named_modules():
        experts = _experts_of(layer)
        if _parallel_of(layer) is None or experts is None:
            continue
        if any(id(p) in taken for p in experts.parameters()):
            ranks = dist.get_process_group_ranks(parent.process_group)
            _refuse_shared(path or type(layer).__name__, layer, ranks, _AVERAGED)
    warn_of_copies(
        module,
        dist.get_world_size(parent.process_group),
        "DistributedDataParallel sends that of its first rank to the others, or leaves the copies to part",
    )


WATCH = register_module_module_registration_hook(_check_registration)
