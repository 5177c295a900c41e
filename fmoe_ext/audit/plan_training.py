"""The steps of a training under a plan, and of the same training in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fmoe_ext.audit.cases import AuditError
from fmoe_ext.audit.plan import Parallel, PlanRecipe, share_of
from fmoe_ext.audit.recipe import Batch, count_tokens
from fmoe_ext.audit.training import SEED

Tensors: TypeAlias = dict[str, torch.Tensor]
OF_EXPERTS = "_experts_implementation"  # in a configuration of Transformers


@dataclass
class Computed:
    """Tensors of one step."""

    outputs: Tensors = field(default_factory=dict)  # {module: its first output}, as the forward computed them
    loss: torch.Tensor | None = None
    gradient: Tensors = field(default_factory=dict)
    parameter: Tensors = field(default_factory=dict)


def make_model(recipe: PlanRecipe) -> nn.Module:
    """The recipe's model in its dtype, the same in every process."""
    torch.manual_seed(SEED)
    model: Any = recipe.model()
    if not isinstance(model, nn.Module):
        raise AuditError(f"model() must return an nn.Module, but returned {type(model).__name__}")
    model = model.to(getattr(torch, recipe.dtype)).train()
    if recipe.dtype == "float64" and getattr(getattr(model, "config", None), OF_EXPERTS, "") == "grouped_mm":
        model.set_experts_implementation("eager")  # torch's grouped_mm has no float64
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                # biases start at zero, where a fault in them would not show
                p.add_(recipe.noise * torch.randn(p.shape, dtype=p.dtype, device=p.device))
    return model


def whole_batch(recipe: PlanRecipe, model: nn.Module, number: int) -> Batch:
    """The batch of a step, floating-point tensors in the recipe's dtype."""
    batch = recipe.batch_of(model, number)
    dtype = getattr(torch, recipe.dtype)
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}


def train(
    recipe: PlanRecipe, parallel: Parallel, batches: list[Batch]
) -> Iterator[tuple[int, Computed, dict[str, Any]]]:
    """Yields (step, tensors as they are on this rank, parameters by name); step 0: parameters before the first."""
    parallel.prepare(recipe)
    parameters = parallel.parameters()
    yield 0, Computed(parameter=_copies(parameters)), parameters
    recorder = _OutputRecorder(parallel.modules())
    for number, batch in enumerate(batches, 1):
        torch.manual_seed(SEED + number)
        part = share_of(batch, parallel.share)
        if count_tokens(part) * parallel.share[1] != count_tokens(batch):
            # The mean of means is the mean only for parts with equally many tokens.
            raise AuditError(
                f"a part of the batch has {count_tokens(part)} of {count_tokens(batch)} tokens, and there are "
                f"{parallel.share[1]} parts: let batch(step) return samples with equally many"
            )
        with recorder:
            loss = parallel.backward(recipe, part)
        gradients = {name: parallel.gradient(name, p) for name, p in parallel.parameters().items()}
        computed = Computed(recorder.take(), loss)
        computed.gradient = {name: grad.clone() for name, grad in gradients.items() if grad is not None}
        parallel.step()
        computed.parameter = _copies(parallel.parameters())
        yield number, computed, parallel.parameters()


def mean_over_parts(loss: torch.Tensor | None, share: tuple[int, int]) -> torch.Tensor | None:
    """The job's loss: the mean over the parts of the batch, each counted once; None if no rank computes one."""
    if not dist.is_initialized():
        return loss
    every: list[Any] = [None] * dist.get_world_size()
    value = None if loss is None else (loss.full_tensor() if isinstance(loss, DTensor) else loss).double()
    dist.all_gather_object(every, (share[0], value))
    parts = {index: x for index, x in reversed(every) if x is not None}
    if not parts:
        return None
    if value is not None:
        parts[share[0]] = value  # ranks with the same tokens may differ: each is compared with its own
    return torch.stack(list(parts.values())).mean()


class _OutputRecorder:
    """The first output of every module's first call in a step, on this rank."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._outputs: Tensors = {}
        self._on = False
        for name, module in modules.items():
            module.register_forward_hook(lambda _, __, out, name=name: self._keep(name, out))

    def __enter__(self) -> _OutputRecorder:
        self._on = True
        return self

    def __exit__(self, *_: object) -> None:
        self._on = False

    def take(self) -> Tensors:
        """Outputs since the last call, {module's name: tensor}, "" for the model's."""
        outputs, self._outputs = self._outputs, {}
        return outputs

    def _keep(self, name: str, out: Any) -> None:
        x = _first_tensor(out)
        if self._on and x is not None and name not in self._outputs and x.is_floating_point():
            self._outputs[name] = x.detach().clone()


def _first_tensor(out: Any) -> torch.Tensor | None:
    """A tensor, the logits of a model's output, or the first tensor in it."""
    if isinstance(out, torch.Tensor):
        return out
    logits = getattr(out, "logits", None)
    if isinstance(logits, torch.Tensor):
        return logits
    values = out.values() if isinstance(out, Mapping) else out if isinstance(out, (tuple, list)) else ()
    return next((x for x in values if isinstance(x, torch.Tensor) and x.is_floating_point()), None)


def _copies(parameters: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: p.detach().clone() for name, p in parameters.items()}
