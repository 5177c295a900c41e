"""Wrappers of data parallelism that would take different experts for copies of each other: refused.

Experts differ between the ranks of their layer's moe_group. DistributedDataParallel and DeepSpeed overwrite them with
those of their first rank and average their gradients, fully_shard makes one parameter out of pieces of them, all
without a word, unless their ranks hold the same experts. Each is seen by public means of torch:

* DistributedDataParallel registers the model as its child, and torch has a hook for that: it is refused before it
  changes anything. Frozen experts are not averaged, and overwritten unless it was given init_sync=False, which it does
  not keep: its first forward compares them over the ranks.
* A module of fully_shard, or a DeepSpeedEngine, has no such moment, and a layer does not know what is around it. Once
  a program uses one, a forward pre-hook on all modules notes those that run, and the layer's forward asks which of them
  it is in. Other programs have no such hook, which takes a microsecond a call of any module.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from fmoe_ext._sharded import is_deepspeed_engine, is_dtensor, wrappers_in_use
from fmoe_ext.ep.process_groups import find_group, gather_values

# {module of fully_shard or DeepSpeedEngine that has run: the modules inside}
_around: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()
_hooks: list[RemovableHandle] = []  # at most one, which fills _around

# What a wrapper does with experts, and the way out.
_SHARDED = (
    "fully_shard would make one parameter out of pieces of them",
    "pass ignored_params=set(layer.experts.parameters()) to fully_shard and reduce those gradients over the ranks "
    "that hold the same experts, or give fully_shard a mesh of these ranks",
)
_GROUPED = "wrap the model in fmoe_ext.distributed.DistributedGroupedDataParallel instead"
_AVERAGED = "DistributedDataParallel would overwrite and average them", _GROUPED
_OVERWRITTEN = (
    "DistributedDataParallel copied the frozen experts of its first rank over those of the others",
    f"pass init_sync=False to it and load them again, or {_GROUPED}",
)
_BY_DEEPSPEED = "DeepSpeed copied the experts of its first rank over those of the others", _GROUPED


def check_wrappers(layer: nn.Module) -> None:
    """Raise ValueError if fully_shard or DeepSpeed joins experts of different ranks; cheap if they are as before.

    layer: an FMoE, or a module of experts that has an expert_parallel.
    """
    experts: Any = getattr(layer, "experts", layer)
    if torch.compiler.is_compiling() or getattr(layer, "expert_parallel", None) is None or experts is None:
        return
    is_checked = all(hasattr(p, "fmoe_checked") for p in experts.parameters())
    kinds = wrappers_in_use()
    if kinds and not _hooks:
        _hooks.append(register_module_forward_pre_hook(_note))
        # once a process: those whose forward has begun before there was a hook
        for found in gc.get_objects():
            if issubclass(type(found), kinds):
                _note(found)
    around: list[Any] = []
    if kinds:
        around = [wrapper for wrapper, inside in list(_around.items()) if layer in inside]
    # at every forward: the engine copies into the same parameters, which the mark of what is checked does not show
    for engine in filter(is_deepspeed_engine, around):
        # the ranks to which it copies; None is all
        ranks = dist.get_process_group_ranks(getattr(engine, "seq_data_parallel_group", None))
        _refuse_shared(_name_in(engine.module, layer), layer, ranks, _BY_DEEPSPEED)
    if is_checked:
        return
    sharding = [wrapper for wrapper in around if not is_deepspeed_engine(wrapper)]
    outermost = max(sharding, key=lambda wrapper: len(_around[wrapper]), default=None)
    # shows sharded parameters as DTensors, also while they are gathered
    for sharded in filter(is_dtensor, experts.state_dict().values()):
        name = type(layer).__name__ if outermost is None else _name_in(outermost, layer)
        _refuse_shared(name, layer, sharded.device_mesh.mesh.flatten().tolist(), _SHARDED)
    for wrapper in sharding:
        wrapper.unshard()  # as it was: a state dict lets go of what is gathered
    for p in experts.parameters():
        p.fmoe_checked = True  # a parameter that takes its place has no such mark


def _note(module: nn.Module, _: Any = None) -> None:
    """Note a wrapper, as the forward pre-hook of all modules."""
    if not torch.compiler.is_compiling() and isinstance(module, wrappers_in_use()) and module not in _around:
        _around[module] = weakref.WeakSet(module.modules())


def check_mesh(layer: nn.Module, ranks: list[int]) -> None:
    """Raise ValueError if fully_shard over these ranks would join different experts."""
    if getattr(layer, "expert_parallel", None) is not None:
        _refuse_shared(type(layer).__name__, layer, ranks, _SHARDED)


def warn_of_copies(module: nn.Module, num_copies: int, consequence: str) -> None:
    """Warn if a gate's bias is updated from fewer ranks than hold a copy of the gate."""
    for name, gate in module.named_modules():
        if hasattr(gate, "warn_of_copies"):
            gate.warn_of_copies(num_copies, consequence, name)


def running_deepspeed() -> Any:
    """Find a DeepSpeedEngine that is there, if only half built; None without one."""
    # it puts the model into _modules itself, past every hook of torch
    if not any(kind.__name__ == "DeepSpeedEngine" for kind in wrappers_in_use()):
        return None
    return next((found for found in gc.get_objects() if is_deepspeed_engine(found)), None)


def _shared_ranks(layer: Any, ranks: list[int]) -> set[int]:
    """Return the ranks among these that hold different experts of a layer."""
    return set(dist.get_process_group_ranks(find_group(layer.expert_parallel.group))) & set(ranks)


def _refuse_shared(name: str, layer: Any, ranks: list[int], texts: tuple[str, str]) -> None:
    if len(_shared_ranks(layer, ranks)) > 1:
        owners, (what, way) = dist.get_process_group_ranks(find_group(layer.expert_parallel.group)), texts
        raise ValueError(
            f"the experts of layer {name!r} differ between the ranks {owners} of its moe_group, and {what} (its ranks: "
            f"{sorted(ranks)}). Either {way}; or let every rank have all experts and wrap as you do: world_size=1 and "
            "no moe_group for the layer, distributed_experts=False for fmoefy"
        )


def _name_in(module: nn.Module, layer: nn.Module) -> str:
    path = next((name for name, child in module.named_modules() if child is layer), "")
    return path or type(layer).__name__


def _check_registration(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Refuse experts that DistributedDataParallel takes in; called for every submodule that any module gets."""
    if name != "module" or module is None or not isinstance(parent, DistributedDataParallel):
        return
    ranks = dist.get_process_group_ranks(parent.process_group)
    taken = {id(p) for path, p in module.named_parameters() if path not in parent.parameters_to_ignore}
    frozen: list[tuple[str, nn.Module, list[nn.Parameter]]] = []
    for path, layer in module.named_modules():
        experts = getattr(layer, "experts", layer)
        if getattr(layer, "expert_parallel", None) is None or experts is None:
            continue
        own = [p for p in experts.parameters() if id(p) in taken]
        if any(p.requires_grad for p in own):
            _refuse_shared(path or type(layer).__name__, layer, ranks, _AVERAGED)
        elif own and len(_shared_ranks(layer, ranks)) > 1:
            frozen.append((path or type(layer).__name__, layer, own))
    warn_of_copies(
        module,
        len(ranks),
        "DistributedDataParallel sends that of its first rank to the others, or leaves the copies to part",
    )
    if not frozen:
        return

    def compare(wrapper: Any, _: Any) -> None:
        # Ranks draw different experts: equal first values mean that DDP has sent one rank's to the others.
        handle.remove()
        mine = [[p.detach().flatten()[:8].tolist() for p in own] for _, _, own in frozen]
        everyone = dict(zip(ranks, gather_values(mine, wrapper.process_group), strict=True))
        for number, (path, layer, _) in enumerate(frozen):
            first, *others = (everyone[rank][number] for rank in _shared_ranks(layer, ranks))
            if all(values == first for values in others):
                _refuse_shared(path, layer, ranks, _OVERWRITTEN)

    handle = parent.register_forward_pre_hook(compare)


WATCH = register_module_module_registration_hook(_check_registration)
