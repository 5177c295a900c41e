"""FSDP2 for experts: each rank of those that hold the same experts keeps a part of them."""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from fmoe_ext.ep.process_groups import find_group, gather_values
from fmoe_ext.ep.wrappers import check_mesh
from fmoe_ext.layers import FMoE


def fully_shard_experts(layer: FMoE, mesh: DeviceMesh, **options: Any) -> None:
    """torch's fully_shard over the experts of a layer, whose gradient is then that of one process on the whole batch.

    mesh: one-dimensional, the ranks that hold the same experts: DeviceMesh.from_group(init_groups(...).experts, "cpu").
    options: of fully_shard. All ranks of the layer call it, before DistributedGroupedDataParallel, which then leaves
    these parameters alone and takes the gate and all else. fully_shard alone divides gradients by the size of mesh, but
    the rows of these experts come from the whole job, whose loss is the mean over all of its ranks. checkpoint.save()
    and load() take experts that are sharded so, into and from any layout.
    Raises ValueError for a mesh of more dimensions, or of ranks that hold different experts.
    Equivalent to: fully_shard(layer.experts, mesh=mesh).set_gradient_divide_factor(ranks with different tokens).
    """
    from torch.distributed.fsdp import fully_shard  # which takes a second

    if mesh.ndim != 1:
        raise ValueError(
            f"mesh must have one dimension, the ranks with the same experts, but has {mesh.ndim}"
        )
    check_mesh(layer, mesh.mesh.tolist())
    sharded = fully_shard(layer.experts, mesh=mesh, **options)
    ep_size, parallel = 1, layer.expert_parallel
    if parallel is not None:
        ep_size = parallel.size
        parallel.sharing_ranks = gather_values(mesh.mesh.tolist(), find_group(parallel.group))
    sharded.set_gradient_divide_factor(mesh.size() * ep_size / layer.slice_size)
