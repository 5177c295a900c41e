"""The stages of one rank: joined to a module, wrapped for data parallelism."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fmoe_ext.distributed import DistributedGroupedDataParallel
from fmoe_ext.pipeline.groups import PipelineGroups
from fmoe_ext.pipeline.schedules import Kind
from fmoe_ext.pipeline.stage import Stage
from fmoe_ext.pipeline.tied import TiedParameters

DATA_PARALLEL = ("grouped", "ddp", "fsdp", "none")


def check_data_parallel(name: str, schedule: str, kind: Kind, groups: PipelineGroups) -> None:
    """Raises ValueError for an unknown name and for what would give other gradients."""
    if name not in DATA_PARALLEL:
        raise ValueError(
            f"data_parallel must be one of {', '.join(map(repr, DATA_PARALLEL))}, but got {name!r}"
        )
    if name != "grouped" and dist.get_world_size(groups.ep) > 1:
        raise ValueError(
            f'data_parallel={name!r} would average experts over ranks that hold different ones: use "grouped"'
        )
    if name == "ddp" and kind.takes_list:
        raise ValueError(
            f'schedule {schedule!r} runs backward in parts, which DistributedDataParallel does not see: use "grouped" '
            'or "fsdp"'
        )


def check_tied(name: str, tied: TiedParameters) -> None:
    """Raises ValueError for parameters that stages share, where they would be cut into shards."""
    if name == "fsdp" and tied:
        raise ValueError(
            'data_parallel="fsdp" cuts parameters that stages share into shards of their own: use "grouped", or '
            "untie them"
        )


def wrap(stage: Stage, name: str, groups: PipelineGroups, device: torch.device) -> nn.Module:
    """The stage, its gradients reduced over the ranks that have it."""
    if name == "grouped":
        return DistributedGroupedDataParallel(stage, **groups.data_parallel_kwargs())
    if name == "ddp":
        return DistributedDataParallel(stage, process_group=groups.data)
    if name == "fsdp":
        mesh = DeviceMesh.from_group(groups.data, device.type)
        fully_shard(stage, mesh=mesh, reshard_after_forward=False)
    return stage


def joined(parts: list[nn.Module]) -> nn.Module:
    """One module with the parts of several stages, names as in the model."""
    joined = nn.Module()
    for part in parts:
        _merge(joined, part)
    return joined


def _merge(into: nn.Module, part: nn.Module) -> None:
    for name, child in part.named_children():
        if name in into._modules and type(child) is nn.Module:
            _merge(into.get_submodule(name), child)
        else:
            into.add_module(name, child)


def num_copies(param: nn.Parameter, wrapped: list[nn.Module], name: str, groups: PipelineGroups) -> int:
    """Ranks of one stage that have the same copy, or shard, of a parameter."""
    for module in wrapped:
        if isinstance(module, DistributedGroupedDataParallel):
            for tag, params in module.tagged.items():
                if tag != "none" and any(p is param for p in params):
                    return dist.get_world_size(module.groups[tag])
    return dist.get_world_size(groups.data) if name in ("ddp", "fsdp") else 1
