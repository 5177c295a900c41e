"""Make the process groups of data parallelism beside expert parallelism.

The ranks of a job are numbered (dp, ep, slice), slice fastest, and each group is a line of that box, or a plane. With
dp 2, ep 2 and slice 2:
                 ep 0        ep 1
    dp 0       r0   r1     r2   r3       ep: {0, 2}, ...         the experts of a layer
    dp 1       r4   r5     r6   r7       slice: {0, 1}, ...      the same input
       slice    0    1      0    1       data: {0, 2, 4, 6}, ... different inputs, copies of dense parameters
                                         experts: {0, 1, 4, 5}, ... the same experts

torch wants all ranks to make all groups, in one order.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fmoe_ext.ep.process_groups import check_same, new_group_of

# {group of the user: our own group of the same ranks, for reductions}; both end with the job or destroy_process_group()
_of_reductions: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class ParallelGroups:
    """The process groups of one rank; ranks are numbered (dp, ep, slice), slice fastest."""

    world: dist.ProcessGroup  # all ranks
    ep: dist.ProcessGroup  # experts are spread over these: FMoE(world_size=ep size, moe_group=groups.ep)
    slice: dist.ProcessGroup  # these ranks have the same input: FMoE(slice_group=groups.slice)
    data: dist.ProcessGroup  # these ranks have different inputs and the same dense parameters
    experts: dist.ProcessGroup  # these ranks hold the same experts

    def data_parallel_kwargs(self) -> dict[str, Any]:
        """Arguments of DistributedGroupedDataParallel, for experts that are tagged "moe"."""
        return {
            "dp_group": self.data,
            "gate_group": self.world,
            "moe_group": self.experts,
            "world_group": self.world,
        }


def init_groups(ep: int | None = None, dp: int | None = None, slice: int = 1) -> ParallelGroups:
    """Split the ranks of the job into dp x ep x slice and create the groups of this layout; all ranks call it.

    ep ranks share the experts of a layer, slice ranks work on the same input, and dp x slice sets of ep ranks hold the
    same experts. ep or dp may be left out; without both, dp is 1. Raises ValueError if the product is not the number of
    ranks, or on every rank if ranks disagree, which it names.

    Example:

        >>> store = torch.distributed.HashStore()  # torchrun makes one; then init_process_group() needs no arguments
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> groups = init_groups(ep=1)  # a rank has all experts of a layer; every other rank is a copy
        >>> groups.ep.size(), groups.data.size()
        (1, 1)
    """
    # first: ranks that disagree would wait for each other in groups that the others do not make
    world_size = dist.get_world_size()
    check_same("init_groups(ep, dp, slice)", (ep, dp, slice), dist.group.WORLD)
    if ep is None:
        ep = world_size // max((dp or 1) * slice, 1)
    if dp is None:
        dp = world_size // max(ep * slice, 1)
    if min(ep, dp, slice) < 1 or dp * ep * slice != world_size:
        raise ValueError(
            f"dp * ep * slice must be the number of ranks, {world_size}, but got {dp} * {ep} * {slice}"
        )
    # each row of what group_among() gets is a group
    ranks = torch.arange(world_size, device="cpu").reshape(dp, ep, slice)
    return ParallelGroups(
        world=_default_group(),
        ep=group_among(ranks.transpose(1, 2).reshape(-1, ep)),
        slice=group_among(ranks.reshape(-1, slice)),
        data=group_among(ranks.reshape(-1, slice).t()),
        experts=group_among(ranks.transpose(0, 1).reshape(ep, -1)),
    )


def group_among(rank_lists: torch.Tensor) -> dist.ProcessGroup:
    """Create a group of each row of rank_lists [groups, ranks] -> this rank's; all ranks of the job call it."""
    for members in rank_lists.tolist():  # new_group() is a collective call of the job, also for ranks outside
        group = dist.new_group(members)
        if dist.get_rank() in members:
            mine = group
    return mine


def own_groups(groups: dict[str, dist.ProcessGroup | None]) -> dict[str, dist.ProcessGroup]:
    """Make {tag: group}, each a group of our own: reductions must not queue with other users' collectives.

    All wrappers share the own group of a group: gloo starts three threads for each.
    """
    named = dict.fromkeys(("dp", "gate", "moe", "world"), _default_group())
    for key, group in groups.items():
        if not key.endswith("_group"):
            raise TypeError(f"unexpected argument {key!r}: groups are passed as <tag>_group=")
        named[key.removesuffix("_group")] = group or _default_group()
    # made once for each group, which all wrappers then find: making one is a collective call
    for group in named.values():
        if group not in _of_reductions:
            made = new_group_of(dist.get_process_group_ranks(group), group)
            assert made is not None  # this rank is a member
            _of_reductions[group] = made
    return {tag: _of_reductions[group] for tag, group in named.items()}


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "torch.distributed.init_process_group() comes first"
    return group


def tag_of(param: torch.Tensor) -> str:
    """Return the tag that says which group reduces a parameter's gradient."""
    return getattr(param, "dp_comm", "dp")


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's first parameter; the CPU without any."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))
