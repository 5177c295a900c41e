"""Megatron-core under the audit: parallelize() of a recipe returns a DataAndExpertParallel.

It has DistributedDataParallel, and experts of MoELayer over ranks (SequentialMLP).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from torch import nn

from fmoe_ext.audit.cases import AuditError
from fmoe_ext.audit.plan import Parallel, PlanRecipe
from fmoe_ext.audit.recipe import Batch

_LOCAL_EXPERT = re.compile(r"(.*\.local_experts)\.(\d+)(.*)")
_REFUSED = MappingProxyType(  # sizes of parallel_state
    {
        "tensor": parallel_state.get_tensor_model_parallel_world_size,
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size,
        "context": parallel_state.get_context_parallel_world_size,
        "expert tensor": parallel_state.get_expert_tensor_parallel_world_size,
    }
)


class DataAndExpertParallel(Parallel):
    """model: built for this rank, after initialize_model_parallel().

    It gets the parameters of whole, the same model in one process.
    on_cpu: a context in which Megatron runs without a GPU. ddp: fields of DistributedDataParallelConfig. Every rank
    gets its own part of each batch. Raises AuditError for other kinds of parallelism, experts in one stacked weight and
    a distributed optimizer.
    """

    def __init__(
        self,
        model: Any,
        whole: nn.Module,
        on_cpu: Callable[[], AbstractContextManager[Any]] = nullcontext,
        **ddp: Any,
    ) -> None:
        super().__init__(model, (dist.get_rank(), dist.get_world_size()))
        if sizes := [f"{kind} parallel {size()}" for kind, size in _REFUSED.items() if size() > 1]:
            raise AuditError(
                f"{', '.join(sizes)}: Megatron is audited with data and expert parallel ranks alone"
            )
        if ddp.get("use_distributed_optimizer"):
            raise AuditError(
                "use_distributed_optimizer is not audited: its optimizer has no gradient in one place"
            )
        self.on_cpu = on_cpu
        source = dict(whole.named_parameters())
        local = {int(m[2]) for name, _ in model.named_parameters() if (m := _LOCAL_EXPERT.fullmatch(name))}
        self.first = parallel_state.get_expert_model_parallel_rank() * len(local)
        with torch.no_grad():
            for name, p in self.parameters().items():
                if name not in source or source[name].shape != p.shape:
                    raise AuditError(
                        f"{name} has no equal in one process: moe_grouped_gemm and the like are not audited"
                    )
                p.copy_(source[name])
        with on_cpu():
            self.ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(**ddp), model)

    def backward(self, recipe: PlanRecipe, batch: Batch) -> torch.Tensor:
        """Run forward, backward and finalize_model_grads()."""
        self.ddp.zero_grad_buffer()
        with self.on_cpu():
            loss = recipe.loss(self.ddp, batch)
            loss.backward()
            finalize_model_grads([self.ddp])
        return loss.detach()

    def step(self) -> None:
        """Step the recipe's optimizer on main_grad."""
        for p in self.model.parameters():
            p.grad = getattr(p, "main_grad")  # noqa: B009  # Megatron's attribute
        super().step()
        for p in self.model.parameters():
            p.grad = None

    def plain_name(self, name: str) -> str:
        """Return the name in the whole model, with the number that an expert has there."""
        match = _LOCAL_EXPERT.fullmatch(name)
        return name if match is None else f"{match[1]}.{self.first + int(match[2])}{match[3]}"
