"""Transformers under the audit: parallelize() of a recipe returns from_pretrained(model, ...).

These are Transformers' own plans: tensor parallelism, expert parallelism and FSDP2.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fmoe_ext.audit.cases import AuditError
from fmoe_ext.audit.plan import OF_EXPERTS, Parallel


def from_pretrained(model: Any, **options: Any) -> Parallel:
    """Save a model of Transformers and load it by type(model).from_pretrained(folder, **options) on every rank.

    options are those of your own call: tp_plan="auto", distributed_config=DistributedConfig(tp_size=2, ep_size=2), ...
    Raises AuditError for plans that leave the model whole on every rank.
    """
    rank = dist.get_rank()
    options.setdefault("dtype", next(model.parameters()).dtype)
    if implementation := getattr(model.config, OF_EXPERTS, None):
        options.setdefault("experts_implementation", implementation)
    options.setdefault("attn_implementation", model.config._attn_implementation)
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared, 0)  # every rank made a folder: all use the first rank's
        if rank == 0:
            model.save_pretrained(shared[0])
        dist.barrier()
        under_plan = type(model).from_pretrained(shared[0], **options)
        dist.barrier()
    config = getattr(under_plan.config, "distributed_config", None)
    if (getattr(config, "pp_size", None) or 1) > 1:
        raise AuditError("pipeline stages of Transformers run generate() alone: nothing to train")
    sizes = {name: p.shape for name, p in model.named_parameters()}
    divided = (
        isinstance(p, DTensor) or p.shape != sizes.get(name, p.shape)
        for name, p in under_plan.named_parameters()
    )
    if not any(divided):
        raise AuditError(
            f"{type(model).__name__}.from_pretrained(..., {', '.join(options)}) leaves every parameter whole: the "
            "model has no such plan, or the plan names none of its modules"
        )
    # Ranks of one tensor-parallel group see the same tokens; those of FSDP each see their own.
    size = getattr(under_plan, "_fsdp_size", None) or 1
    share = (under_plan._device_mesh.get_local_rank("fsdp"), size) if size > 1 else (0, 1)
    return _Divided(under_plan.train(), share)


class _Divided(Parallel):
    """A model whose parameters are DTensors, or in Transformers before 5.15 the parts of this rank."""

    def whole(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor; parts that are no DTensors are gathered as for saving."""
        if isinstance(x, DTensor):
            return x.full_tensor()
        size = getattr(self.model, "_tp_size", None)
        if not size or getattr(self.model, "_device_mesh", None) is None:
            return x
        try:
            from transformers.integrations.tensor_parallel import gather_state_dict_for_save
        except ImportError:
            return x
        plan: Any = self.model.tp_plan
        return gather_state_dict_for_save({name: x}, plan, self.model._device_mesh, size)[name]
