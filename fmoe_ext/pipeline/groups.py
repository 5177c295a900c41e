"""Make the process groups of pipeline x data x expert parallelism: init_groups(pp, ep) for Pipeline.

Ranks are numbered (pp, dp, ep), ep fastest. 8 ranks, pp = 2, dp = 2, ep = 2:

    stage 0   0 1 | 2 3        pp       0 4, 1 5, 2 6, 3 7         one rank of each stage
    stage 1   4 5 | 6 7        data     0 1 2 3, 4 5 6 7           the ranks of one stage
                               ep       0 1, 2 3, 4 5, 6 7         experts are spread over these
                               experts  0 2, 1 3, 4 6, 5 7         the same experts of one stage
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fmoe_ext.distributed.groups import group_among
from fmoe_ext.ep.process_groups import find_group
from fmoe_ext.ep.ranks import GroupRanks
from fmoe_ext.layers import FMoE

_MESH_DIMS = ("pp", "dp", "ep")


@dataclass(frozen=True)
class PipelineGroups:
    """The process groups of one rank; ranks are numbered (pp, dp, ep), ep fastest."""

    pp: dist.ProcessGroup  # one rank of each stage: microbatches travel through them
    data: dist.ProcessGroup  # the ranks of one stage: different batches, the same dense parameters
    ep: dist.ProcessGroup  # experts are spread over these: FMoE(world_size=ep size, moe_group=groups.ep)
    experts: dist.ProcessGroup  # the ranks of one stage that hold the same experts

    def data_parallel_kwargs(self) -> dict[str, Any]:
        """Arguments of DistributedGroupedDataParallel for one stage, whose experts are tagged "moe"."""
        return {
            "dp_group": self.data,
            "gate_group": self.data,
            "moe_group": self.experts,
            "world_group": self.data,
        }


def init_groups(pp: int | DeviceMesh, ep: int = 1) -> PipelineGroups:
    """Split the ranks of the job into pp x dp x ep and create the groups; all ranks call it.

    pp: the number of ranks that a model is cut over, or a DeviceMesh with dimensions of the names "pp", "dp", "ep" (any
    of them may lack) that holds all ranks. Raises ValueError if the ranks cannot be divided so.
    """
    world_size = dist.get_world_size()
    if isinstance(pp, DeviceMesh):
        names, numbers = pp.mesh_dim_names or (), pp.mesh
        if not names or not set(names) <= set(_MESH_DIMS):
            raise ValueError(f"a mesh needs dimensions of the names {', '.join(_MESH_DIMS)}, but has {names}")
        if numbers.numel() != world_size:
            raise ValueError(f"the mesh has {numbers.numel()} ranks, but the job {world_size}")
        # dimensions in the order pp, dp, ep, of size 1 where the mesh lacks one
        order = [names.index(name) for name in _MESH_DIMS if name in names]
        sizes = [numbers.shape[names.index(name)] if name in names else 1 for name in _MESH_DIMS]
        ranks = numbers.permute(order).reshape(sizes)
    else:
        if pp < 1 or ep < 1 or world_size % (pp * ep):
            raise ValueError(f"pp * ep must divide the number of ranks, {world_size}, but got {pp} * {ep}")
        ranks = torch.arange(world_size, device="cpu").reshape(pp, -1, ep)
    # All ranks make all groups in one order, as torch wants it, each from a matrix [groups, ranks of a group].
    pp_size, _, ep_size = ranks.shape
    return PipelineGroups(
        pp=group_among(ranks.permute(1, 2, 0).reshape(-1, pp_size)),
        data=group_among(ranks.reshape(pp_size, -1)),
        ep=group_among(ranks.reshape(-1, ep_size)),
        experts=group_among(ranks.transpose(1, 2).reshape(pp_size * ep_size, -1)),
    )


def sum_over(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Add x of all ranks of a group, in place; a group of one rank calls no collective."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(x, group=group)


def check_layers(part: nn.Module, groups: PipelineGroups) -> None:
    """Raise ValueError for an MoE layer of a stage that would wait for ranks of other stages, which never come."""
    members = set(dist.get_process_group_ranks(groups.data))
    for name, moe in part.named_modules():
        if not isinstance(moe, FMoE):
            continue
        # groups in which the layer's forward waits: for rows of experts, and for sums of the gate
        ranks = getattr(moe.gate, "ranks", None)
        used = [moe.moe_group, find_group(ranks.group) if isinstance(ranks, GroupRanks) else None]
        others = {rank for group in used if group is not None for rank in dist.get_process_group_ranks(group)}
        if not others <= members:
            raise ValueError(
                f"{name} spans ranks {sorted(others)}, but its stage is on ranks {sorted(members)}: make it with "
                "moe_group=groups.ep (gate_group=, if given, within groups.data), groups being init_groups(pp, ep)"
            )
