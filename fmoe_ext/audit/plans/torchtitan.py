"""torchtitan under the audit: a recipe's parallelize() returns a Decoder, with FSDP and experts over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.tools import utils

# set before other modules read it: torchtitan falls back to CUDA when it finds no device
utils.device_type = "cpu"

from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.utils import set_spmd_backend  # noqa: E402

from fmoe_ext.audit.cases import AuditError  # noqa: E402
from fmoe_ext.audit.plan import Parallel, PlanRecipe  # noqa: E402
from fmoe_ext.audit.recipe import Batch  # noqa: E402

_BACKEND = "partial_dtensor"  # FSDP of torch 2.13 does not know the others


class Decoder(Parallel):
    """model after parallelize(model, dims), every rank with its own part of each batch.

    parallelize: calls torchtitan's function, such as parallelize_deepseekv3 or apply_fsdp_to_decoder, with the
    ParallelDims of sizes (ep=2, dp_replicate=1, ...). It changes the model in place; its result is ignored. Losses are
    divided by the ranks, because torchtitan's FSDP sums gradients. Raises AuditError for tensor, context and pipeline
    parallelism, which torchtitan supports on CUDA only.
    """

    def __init__(
        self, model: nn.Module, parallelize: Callable[[nn.Module, ParallelDims], Any], **sizes: int
    ) -> None:
        world = dist.get_world_size()
        super().__init__(model, (dist.get_rank(), world))
        if given := [f"{name}={sizes[name]}" for name in ("tp", "cp", "pp") if sizes.get(name, 1) > 1]:
            raise AuditError(
                f"{', '.join(given)}: only data and expert parallelism of torchtitan can be audited on the CPU: "
                "set these to 1"
            )
        set_spmd_backend(_BACKEND)
        replicas = sizes.setdefault("dp_replicate", 1)
        dims = {"dp_shard": world // replicas, "tp": 1, "cp": 1, "pp": 1, "ep": 1} | sizes
        self.dims = ParallelDims(**dims, world_size=world, spmd_backend=_BACKEND)
        self.dims.build_mesh()
        parallelize(model, self.dims)

    def backward(self, recipe: PlanRecipe, batch: Batch) -> torch.Tensor:
        """Forward and backward of this rank's part of the mean over all ranks."""
        self.optimizer.zero_grad()
        loss = recipe.loss(self.model, batch)
        (loss / self.share[1]).backward()
        return loss.detach()
