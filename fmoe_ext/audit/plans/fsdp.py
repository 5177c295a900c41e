"""torch's FSDP2 under the audit: parallelize() of a recipe returns shard_blocks(model)."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from fmoe_ext.audit.cases import AuditError
from fmoe_ext.audit.plan import Parallel
from fmoe_ext.audit.recipe import blocks_of


def shard_blocks(model: nn.Module, mesh: DeviceMesh | None = None, **options: Any) -> Parallel:
    """Apply fully_shard(block, mesh=mesh, **options) to each layer of the model, then to the model.

    Layers are the modules in an outermost nn.ModuleList. mesh: of one dimension, or (replicate, shard); all ranks by
    default. Each of its ranks gets its part of the batch. Raises AuditError for a mesh that leaves ranks out.
    """
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks_of(model).values():
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return sharded(model, mesh)


def sharded(model: nn.Module, mesh: DeviceMesh | None = None) -> Parallel:
    """Take a model to which fully_shard() was applied; mesh: the ranks that have parts of the batch, all by default."""
    size = dist.get_world_size()
    if mesh is not None and mesh.size() != size:
        raise AuditError(f"the mesh has {mesh.size()} ranks of {size}: some would train nothing")
    return Parallel(model, (dist.get_rank(), size))
