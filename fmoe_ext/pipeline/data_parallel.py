"""Reduce the gradients of a Pipeline over ranks: of a stage's replicas (wrap), and of stages (TiedParameters).

A parameter that stages of different ranks share (an embedding that is also the head) has a copy on each. The copies
begin equal, and after each step get the sum of their gradients, so that they stay equal. Gradients of earlier steps
are such sums already: they are set aside meanwhile, or they would be summed again. Stages of one rank share the
parameter itself, and autograd sums.

joined() makes one module of the parts of a rank's stages (Pipeline.module, for checkpoints); num_copies() says how
often clipping would count a gradient.
"""

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fmoe_ext._sharded import is_dtensor
from fmoe_ext.distributed import DistributedGroupedDataParallel
from fmoe_ext.ep.process_groups import new_group_of
from fmoe_ext.pipeline.groups import PipelineGroups
from fmoe_ext.pipeline.schedules import Kind
from fmoe_ext.pipeline.stage import Stage


class TiedParameters:
    """The parameters that stages of different ranks share: one value, and the sum of the stages' gradients.

    places: for each rank of the pipeline the numbers of its stages.
    """

    def __init__(self, stages: Sequence[Stage], places: list[list[int]], pp_group: dist.ProcessGroup):
        # Which ranks of the pipeline have each parameter.
        rank_of = {index: rank for rank, indexes in enumerate(places) for index in indexes}
        holders: dict[nn.Parameter, set[int]] = {}
        for stage in stages:
            for p in stage.parameters():  # in one order on all ranks, as groups are made in it
                holders.setdefault(p, set()).add(rank_of[stage.index])
        # A group for each set of ranks that share something; all ranks of the pipeline call new_group_of().
        members = dist.get_process_group_ranks(pp_group)
        self._shared: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        self._num_ranks: dict[nn.Parameter, int] = {}
        self._kept: list[torch.Tensor | None] = []  # gradients of earlier steps
        groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}  # None: this rank is not in it
        for p, ranks in holders.items():
            if len(ranks) == 1:
                continue
            own = tuple(members[rank] for rank in sorted(ranks))
            if own not in groups:
                groups[own] = new_group_of(own, pp_group)
            if (group := groups[own]) is not None:
                self._shared.append((p, group))
                self._num_ranks[p] = len(ranks)
        # The copies begin equal, whatever each rank had drawn.
        for p, group in self._shared:
            dist.broadcast(p.detach(), dist.get_process_group_ranks(group)[0], group=group)

    def num_ranks(self, param: nn.Parameter) -> int:
        """Count the ranks of one pipeline that have a copy."""
        return self._num_ranks.get(param, 1)

    def set_aside(self) -> None:
        """Take the gradients of earlier steps away until sum_gradients(): they are sums already."""
        self._kept = [p.grad for p, _ in self._shared]
        for p, _ in self._shared:
            p.grad = None

    def put_back(self) -> None:
        """Give the parameters their gradients of earlier steps back, after a step that raised."""
        for (p, _), kept in zip(self._shared, self._kept, strict=True):
            p.grad = kept
        self._kept = []

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sum the gradients of each copy over the stages, and add those of earlier steps.

        Without one a copy counts as zero. One that requires no gradient, on all ranks alike, keeps what it had: a
        gradient of zeros would let an optimizer decay its weights.
        """
        for (p, group), kept in zip(self._shared, self._kept, strict=True):
            if not p.requires_grad:
                p.grad = kept
                continue
            if p.grad is None:  # the others of the group wait for this rank all the same
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=group)
            if kept is not None:
                p.grad += kept
        self._kept = []


_DATA_PARALLEL = ("grouped", "ddp", "fsdp", "none")  # Pipeline(data_parallel=), `name` in these functions


def check_data_parallel(
    name: str, schedule: str, kind: Kind, stages: Sequence[Stage], groups: PipelineGroups
) -> None:
    """Raise ValueError for an unknown name and for what would give other gradients; on all ranks alike."""
    if name not in _DATA_PARALLEL:
        raise ValueError(
            f"data_parallel must be one of {', '.join(map(repr, _DATA_PARALLEL))}, but got {name!r}"
        )
    if name != "grouped" and dist.get_world_size(groups.ep) > 1:
        raise ValueError(
            'data_parallel="none" leaves the mean of gradients to you, and experts need it over other ranks than the '
            'rest: use "grouped"'
            if name == "none"
            else f'data_parallel={name!r} would average experts over ranks that hold different ones: use "grouped"'
        )
    if name == "ddp" and kind.takes_list:
        raise ValueError(
            "data_parallel=\"ddp\" is for one stage a rank and backwards in one piece ('gpipe' and '1f1b'), not for "
            f'schedule {schedule!r}: use "grouped" or "fsdp"'
        )
    # Also of one rank: fully_shard() makes shards of each stage's parameters, which would be two where one was.
    holders = Counter(p for stage in stages for p in stage.parameters())
    if name == "fsdp" and any(count > 1 for count in holders.values()):
        raise ValueError(
            'data_parallel="fsdp" cuts parameters that stages share into shards of their own: use "grouped", or untie '
            "them"
        )


def wrap(stage: Stage, name: str, groups: PipelineGroups, device: torch.device) -> nn.Module:
    """Wrap a stage, so that its gradients are reduced over the ranks that have it."""
    if name == "grouped":
        return DistributedGroupedDataParallel(stage, **groups.data_parallel_kwargs())
    if name == "ddp":
        return DistributedDataParallel(stage, process_group=groups.data)
    if name == "fsdp":
        mesh = DeviceMesh.from_group(groups.data, device.type)
        # parameters stay gathered after a forward: the next microbatch's comes before this one's backward
        fully_shard(stage, mesh=mesh, reshard_after_forward=False)
    return stage


def joined(parts: list[nn.Module]) -> nn.Module:
    """Make one module of the parts of several stages (part_of), with the names that they have in the model."""
    joined = nn.Module()
    for part in parts:
        _merge(joined, part)
    return joined


def _merge(into: nn.Module, part: nn.Module) -> None:
    for name, child in part.named_children():
        # a bare one is a level of names that part_of() made
        if name in into._modules and type(child) is nn.Module:
            _merge(into.get_submodule(name), child)
        else:
            into.add_module(name, child)


def num_copies(param: nn.Parameter, wrapped: list[nn.Module], groups: PipelineGroups) -> int:
    """Count the ranks of one stage whose gradient of a parameter counts as the same one, once it is reduced."""
    replicas = dist.get_process_group_ranks(groups.data)
    if is_dtensor(param):  # each rank that has a shard counts the norm of the whole
        return len(set(replicas) & set(param.device_mesh.mesh.flatten().tolist()))
    for module in wrapped:
        if isinstance(module, DistributedGroupedDataParallel):
            for tag, params in module.tagged.items():
                if any(p is param for p in params):
                    return 1 if tag == "none" else dist.get_world_size(module.groups[tag])
    return len(replicas)  # DistributedDataParallel's mean, or the user's own
