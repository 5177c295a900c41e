"""A language model over the ranks of a job: its experts spread, the rest copied (ddp) or sharded (fsdp2)."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from job import Job
from model import LanguageModel, ModelConfig
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fmoe_ext.distributed import DistributedGroupedDataParallel, ParallelGroups, clip_grad_norm_


class SpreadModel:
    """One model on all ranks of a job, each of which computes its own windows of a batch.

    module: the LanguageModel with this rank's experts; calling the object runs it so that backward reduces gradients.
    The weights do not depend on the layout: they are those of one process, cut.
    """

    def __init__(
        self, config: ModelConfig, job: Job, dtype: torch.dtype, data_parallel: str, **layer_options: Any
    ):
        self.module = LanguageModel(config).to(job.device, dtype)
        self.wrapped: nn.Module = self.module
        if job.groups is None:
            return
        self.module = part_of(self.module, job.groups, layer_options).to(job.device, dtype)
        if data_parallel == "fsdp2":
            shard(self.module, job)
        self.wrapped = DistributedGroupedDataParallel(
            self.module, auto_allreduce=True, **job.groups.data_parallel_kwargs()
        )

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.wrapped(tokens)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clips the gradients of the whole job -> their norm before."""
        if isinstance(self.wrapped, DistributedGroupedDataParallel):
            return clip_grad_norm_(self.wrapped, max_norm)
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def param_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Parameters for an optimizer: weight decay on matrices only; fused steps take DTensors apart from tensors."""
        groups: dict[tuple[type, bool], list[nn.Parameter]] = {}
        for p in self.module.parameters():
            groups.setdefault((type(p.data), p.dim() >= 2), []).append(p)
        return [
            {"params": params, "weight_decay": weight_decay if is_matrix else 0.0}
            for (_, is_matrix), params in groups.items()
        ]


def part_of(whole: LanguageModel, groups: ParallelGroups, layer_options: dict[str, Any]) -> LanguageModel:
    """The model with, of each layer's experts, those of this rank."""
    ep_size, rank = dist.get_world_size(groups.ep), dist.get_rank(groups.ep)
    options = {
        "moe_group": groups.ep if ep_size > 1 else None,
        "gate_group": groups.world,  # balance losses and capacities are those of the whole batch
        "expert_dp_comm": "moe",
        **layer_options,
    }
    part = LanguageModel(replace(whole.config, ep_size=ep_size, layer_options=options))
    state = whole.state_dict()
    for name, value in part.state_dict().items():
        if value.shape != state[name].shape:
            num_local = value.shape[0]
            state[name] = state[name][rank * num_local : (rank + 1) * num_local]
    part.load_state_dict(state)
    return part


def shard(model: LanguageModel, job: Job) -> None:
    """FSDP2 over all ranks; experts that are spread over ranks stay as they are."""
    mesh = init_device_mesh(job.device.type, (job.size,))
    spread = set() if job.ep_size == 1 else model.expert_parameters()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, ignored_params=spread)
