"""torch.distributed.pipelining under the audit: parallelize() of a recipe returns a Staged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fmoe_ext.audit.cases import AuditError
from fmoe_ext.audit.plan import Parallel, PlanRecipe
from fmoe_ext.audit.recipe import Batch


class Staged(Parallel):
    """A schedule's stages on this rank.

    stages: the modules of this rank, with the names that their parameters have in the whole model (a copy of it whose
    other modules were deleted). schedule: made with loss_fn and, as by default, scale_grads. inputs(batch),
    target(batch): arguments of the first stage and target of the loss.
    """

    def __init__(
        self,
        stages: nn.Module | list[nn.Module],
        schedule: Any,
        inputs: Callable[[Batch], torch.Tensor],
        target: Callable[[Batch], torch.Tensor],
    ) -> None:
        parts = [stages] if isinstance(stages, nn.Module) else list(stages)
        if not parts:
            raise AuditError("a rank of a pipeline needs at least one stage")
        super().__init__(parts[0])
        self.parts, self.schedule = parts, schedule
        self.inputs, self.target = inputs, target

    def prepare(self, recipe: PlanRecipe) -> None:
        """Make one optimizer over all stages of this rank."""
        self.optimizer = recipe.optimizer(nn.ModuleList(self.parts))

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of all stages of this rank."""
        found: dict[str, nn.Parameter] = {}
        for part in self.parts:
            found |= dict(part.named_parameters())
        return found

    def modules(self) -> dict[str, nn.Module]:
        """Leave modules out: stages see microbatches, which the whole batch's outputs cannot be compared with."""
        return {}

    def backward(self, recipe: PlanRecipe, batch: Batch) -> torch.Tensor | None:
        """Run a step of the schedule -> mean loss on the rank of the last stage."""
        self.optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        inputs = self.inputs(batch).contiguous()  # torch 2.11 takes no other strides
        self.schedule.step(inputs, target=self.target(batch), losses=losses)
        return torch.stack([loss.detach() for loss in losses]).mean() if losses else None
