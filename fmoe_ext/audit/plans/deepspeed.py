"""DeepSpeed under the audit: parallelize() of a recipe returns an Engine.

It has ZeRO 0 to 2 and experts of deepspeed.moe over ranks, and runs on a CPU in float32.
"""

from __future__ import annotations

import re
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.utils import has_moe_layers, split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import safe_get_full_grad
from torch import nn

from fmoe_ext.audit.cases import AuditError
from fmoe_ext.audit.plan import Parallel, PlanRecipe, share_of
from fmoe_ext.audit.recipe import Batch

# DeepSpeed compiles an all-reduce in shared memory for minutes where its operators allow it; gloo does the same.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
_LOCAL_EXPERT = re.compile(r"(.*)\.deepspeed_experts\.(\d+)(.*)")


class Engine(Parallel):
    """model: built for this rank, with ep_size in its MoE layers.

    It gets the parameters of whole, the same model in one process (for a dense one, model itself).
    config: of deepspeed.initialize, with batch sizes and stage. Every rank gets its own part of each batch, in as many
    microbatches as DeepSpeed finds: train_batch_size / (train_micro_batch_size_per_gpu * ranks) where the config has
    no gradient_accumulation_steps.
    Raises AuditError for ZeRO 3, whose parameters are whole in no process, for offloading, and for float64, whose
    gradients DeepSpeed rounds to float32 or refuses.
    """

    def __init__(self, model: nn.Module, whole: nn.Module, config: dict[str, Any]) -> None:
        super().__init__(model, (dist.get_rank(), dist.get_world_size()))
        zero = config.get("zero_optimization", {})
        offloads = (value for key, value in zero.items() if "offload" in key and value)
        # {"device": "none"} is DeepSpeed's default, and means none
        to_devices = (v.get("device", "none") if isinstance(v, dict) else v for v in offloads)
        if zero.get("stage", 0) > 2 or any(device != "none" for device in to_devices):
            raise AuditError("ZeRO 3 and offloading are not audited: use stage 0, 1 or 2 on a CPU")
        if any(p.dtype == torch.float64 for p in model.parameters()):
            raise AuditError('DeepSpeed has no float64: say dtype = "float32" in the recipe')
        self.config = {"zero_allow_untested_optimizer": True, **config}
        self.first: dict[str, int] = {}  # {name of a list of experts: number of the first on this rank}
        for name, module in model.named_modules():
            if hasattr(module, "num_local_experts") and hasattr(module, "deepspeed_moe"):
                part = dist.get_rank() % module.ep_size
                self.first[f"{name}.deepspeed_moe.experts".lstrip(".")] = part * module.num_local_experts
        source = whole.state_dict()
        with torch.no_grad():
            for name, x in model.state_dict().items():
                x.copy_(source[self.plain_name(name)])

    def prepare(self, recipe: PlanRecipe) -> None:
        """Call deepspeed.initialize() with the recipe's optimizer, its experts in groups of their own."""
        optimizer = recipe.optimizer(self.model)
        if has_moe_layers(self.model)[0]:
            for group in optimizer.param_groups:
                group.setdefault("name", "dense")
            optimizer.param_groups = split_params_into_different_moe_groups_for_optimizer(
                optimizer.param_groups
            )
        self.engine = deepspeed.initialize(model=self.model, optimizer=optimizer, config=self.config)[0]

    def backward(self, recipe: PlanRecipe, batch: Batch) -> torch.Tensor:
        """Forward and backward of the engine, which reduces gradients, in gradient_accumulation_steps microbatches."""
        steps, losses = self.engine.gradient_accumulation_steps(), []
        for index in range(steps):
            loss = recipe.loss(self.engine, share_of(batch, (index, steps)))
            self.engine.backward(loss)
            losses.append(loss.detach())
            if index < steps - 1:
                self.engine.step()  # counts the microbatch
        return torch.stack(losses).mean()

    def step(self) -> None:
        """Update the parameters by the engine."""
        self.engine.step()

    def modules(self) -> dict[str, nn.Module]:
        """Return no modules under accumulation: theirs see microbatches, those of one process the batch."""
        return {} if self.engine.gradient_accumulation_steps() > 1 else super().modules()

    def gradient(self, name: str, p: nn.Parameter) -> torch.Tensor | None:
        """Return the reduced gradient, whole."""
        return safe_get_full_grad(p)

    def plain_name(self, name: str) -> str:
        """Return the name in the whole model, with the number that an expert has there."""
        match = _LOCAL_EXPERT.fullmatch(name)
        if match is None:
            return name
        return f"{match[1]}.deepspeed_experts.{self.first[match[1]] + int(match[2])}{match[3]}"
