"""The Case that examine.py hands to every check: the model in float64, one training forward of it, and shared steps.

Each check runs on copies of its own, so that none sees what another has left; run() and stepped() seed all runs alike.
Below are the small functions on batches and outputs that several checks use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from fmoe_ext.doctor.report import OK, UNDECIDED, WRONG, Finding
from fmoe_ext.doctor.structure import Layer, Watch, layers_of
from fmoe_ext.doctor.subject import Batch, Loss, Subject, copied, double

ChangeScores: TypeAlias = Callable[[Layer, torch.Tensor], torch.Tensor]
TINY = 1e-9  # relative difference that counts as none: float64 rounds by 1e-16, a used router has 1e-4


@dataclass
class Case:
    """One model under examination; gradients and choices of one training forward are computed once.

    layers: what layers_of() finds. task, choices, grads: loss, choices by layer and gradients by parameter of the task
    loss. over_tokens: names of layers whose experts choose tokens. reached: by layer, tokens on which the loss depends.
    """

    subject: Subject
    probes: dict[str, Any] = field(default_factory=dict)  # layer: its Probe

    def __post_init__(self) -> None:
        s = self.subject
        self.subject = replace(s, batch=double(s.batch), padded=double(s.padded))
        self.model = double(s.model).train()
        self.layers = layers_of(self.model)
        if not all(layer.named for layer in self.layers):
            # No router has a usual name: of the matrices of the right shape those that multiply in a forward are
            # routers, and of the layers those that rank scores are MoE layers.
            model = self.copy()
            torch.manual_seed(0)
            with torch.no_grad(), Watch(layers_of(model)).forward() as watch:
                self.subject.task(model, self.subject.batch)
            for layer in self.layers:
                used = {n: p for n, p in layer.routers.items() if n in watch.multiplied}
                layer.routers = used or layer.routers
            self.layers = [layer for layer in self.layers if layer.name in watch.choices]
        model = self.copy()
        outputs: dict[str, torch.Tensor] = {}

        # the output of each layer keeps its gradient: 0 in a row means that the loss does not depend on this token
        def keep(name: str, module: nn.Module, args: Any, output: Any) -> None:
            while isinstance(output, tuple | list) and output:
                output = output[0]
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.retain_grad()
                outputs[name] = output

        for layer in layers_of(model):
            layer.module.register_forward_hook(partial(keep, layer.name))
        self.task, self.choices, self.grads, self.over_tokens = self.backward(model, self.subject.task)
        self.reached = {  # tokens whose row of a layer's output has a gradient
            name: (out.grad != 0).any(-1).flatten() for name, out in outputs.items() if out.grad is not None
        }

    def copy(self) -> nn.Module:
        """Copy the model in its state before any step."""
        return copied(self.model)

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Make another model, on the device of the examined one unless make() names a device, in float64."""
        with next(self.model.parameters()).device:
            built: nn.Module = double(make())
            return built

    def run(
        self, model: nn.Module, batch: Batch, loss: Loss, change: ChangeScores | None = None
    ) -> tuple[torch.Tensor, Watch]:
        """Run a forward with fixed random numbers -> (loss, its Watch). change: of scores, as Watch takes it."""
        torch.manual_seed(0)  # noise and dropout are the same in every run
        with Watch(layers_of(model), change).forward() as watch:
            value = loss(model, batch)
        return value, watch

    def backward(
        self, model: nn.Module, loss: Loss
    ) -> tuple[torch.Tensor, Any, dict[str, torch.Tensor], set[str]]:
        """Run forward and backward -> (loss, choices, gradients, layers whose experts choose tokens)."""
        model.zero_grad()
        value, watch = self.run(model, self.subject.batch, loss)
        if value.requires_grad:
            value.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return value.detach(), watch.choices, grads, watch.over_tokens

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make the subject's optimizer, AdamW if it names none."""
        if self.subject.optimizer is not None:
            return self.subject.optimizer(model)
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)

    def stepped(self, batches: list[Batch], prepare: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Train a copy of the model for a step of these microbatches, after prepare(copy) -> (copy, its optimizer)."""
        model = self.copy()
        if prepare is not None:
            prepare(model)
        optimizer = self.optimizer(model)
        torch.manual_seed(0)
        self.subject.step(model, optimizer, batches, self.subject.loss)
        return model, optimizer

    def chosen(self, layer: Layer) -> list[int] | None:
        """Return the experts that were chosen for tokens on which the loss depends; None if choices are not visible."""
        choices = self.choices.get(layer.name)
        if choices is None:
            return None
        reached = self.reached.get(layer.name)
        # choices have a row for each token, unless the router chose for groups of them
        if reached is not None and len(reached) == len(choices):
            choices = choices[reached]
        return [i for i in choices.unique().tolist() if 0 <= i < layer.num_experts]


def parts_of(batch: Batch) -> list[Batch] | None:
    """Cut a batch in two along its first dimension, the first part not the larger one; None for one sample."""
    size = samples_of(batch)
    if size is None or size < 2:
        return None
    return [
        mapped(batch, lambda v: v[: size // 2] if len(v) == size else v),
        mapped(batch, lambda v: v[size // 2 :] if len(v) == size else v),
    ]


def samples_of(batch: Batch) -> int | None:
    """Return the size of the first dimension that most tensors of a batch have; None without tensors."""
    sizes = [len(v) for v in tensors(batch)]
    return max(sizes, key=sizes.count) if sizes else None


def tensors(batch: Batch) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch that have dimensions."""
    values = batch.values() if isinstance(batch, Mapping) else [batch]
    yield from (v for v in values if isinstance(v, torch.Tensor) and v.ndim)


def mapped(batch: Batch, change: Any) -> Batch:
    """Apply change to the tensors of a batch that have dimensions."""
    if isinstance(batch, Mapping):
        return {n: change(v) if isinstance(v, torch.Tensor) and v.ndim else v for n, v in batch.items()}
    return change(batch)


def verdict(invariant: str, module: str, bad: bool | None, numbers: str) -> Finding:
    """Make a finding; bad=None is undecided."""
    return Finding(invariant, module or "model", UNDECIDED if bad is None else WRONG if bad else OK, numbers)


def rows_of(output: Any) -> torch.Tensor:
    """Return the first tensor of a layer's output, as rows [T, D]."""
    while isinstance(output, tuple | list):
        output = output[0]
    return output.detach().reshape(-1, output.shape[-1])


def off(a: torch.Tensor | float, b: torch.Tensor | float) -> float:
    """Return the difference of two numbers relative to the larger one; infinity if one of them is not finite."""
    a, b = float(a), float(b)
    # NaN would be within every bound: a comparison with it is False
    return abs(a - b) / max(abs(a), abs(b), 1e-300) if math.isfinite(a) and math.isfinite(b) else math.inf


def distance(a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> float:
    """Return the largest difference of two tensors' numbers over scale; infinity where one alone is not finite."""
    is_same = (a == b) | (a.isnan() & b.isnan())  # rows of padding may be NaN in both
    largest = float((a - b).abs().masked_fill(is_same, 0).max()) / scale
    return largest if math.isfinite(largest) else math.inf
