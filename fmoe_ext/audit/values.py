"""Values of a training step, under names that do not depend on the layout, and how far two steps differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from fmoe_ext.audit.cases import AuditError
from fmoe_ext.checkpoint.model_state import ModelState

# In the order in which a step computes them: the first that differs is where things went wrong.
QUANTITIES = ("output", "loss", "gradient", "norm", "clipped", "parameter")


@dataclass(frozen=True)
class Value:
    """A tensor of one rank; rows: which of the whole tensor's rows it has, None for all."""

    tensor: torch.Tensor
    rows: tuple[int, int] | None = None


Values: TypeAlias = dict[str, Value]
Step: TypeAlias = dict[str, Values]  # by quantity


@dataclass(frozen=True)
class Difference:
    """A tensor that is not what one process computes: error is the largest absolute one over scale."""

    step: int
    quantity: str
    name: str
    error: float
    rank: int = 0
    note: str = ""

    def __str__(self) -> str:
        what = f"{self.quantity} of {self.name}" if self.name else self.quantity
        note = f" ({self.note})" if self.note else ""
        return f"step {self.step}, rank {self.rank}: {what} is off by {self.error:.1e}{note}"


class ModelView:
    """A rank's parameters and gradients by the names and rows that they have in the whole model."""

    def __init__(self, model: nn.Module) -> None:
        self.state = ModelState(model)
        self.names = [name for name, x in self.state.tensors.items() if isinstance(x, nn.Parameter)]

    @torch.no_grad()
    def load(self, whole: dict[str, torch.Tensor]) -> None:
        """Give every tensor its rows of the whole model's."""
        for name, x in self.state.tensors.items():
            if name not in whole:
                raise AuditError(
                    f"the model has {name!r} in this layout, but not in one process: build(layout) must make the "
                    "same model everywhere"
                )
            rows = self.state.local_rows(name)
            source = whole[name] if rows is None else whole[name][slice(*rows)]
            if source.shape != x.shape:
                raise AuditError(
                    f"{name!r} has shape {list(x.shape)} in this layout, but {list(source.shape)} of it would be "
                    f"expected here: experts of one rank are whole, in order, and known to an FMoE layer"
                )
            x.copy_(source)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: x.detach().clone() for name, x in self.state.tensors.items()}

    def parameters(self) -> Values:
        return {name: self._value(name, self.state.tensors[name].detach()) for name in self.names}

    def gradients(self) -> Values:
        """Copy the gradients: zero where there is none, main_grad where a framework accumulates into that."""
        values = {}
        for name in self.names:
            p = self.state.tensors[name]
            grad = p.grad if p.grad is not None else getattr(p, "main_grad", None)
            values[name] = self._value(name, torch.zeros_like(p) if grad is None else grad.detach())
        return values

    def _value(self, name: str, x: torch.Tensor) -> Value:
        return Value(self.state.in_order(name, x).clone(), self.state.local_rows(name))


def check_finite(steps: Sequence[Step]) -> None:
    """AuditError for the first tensor of one process with NaN or infinity: nothing can be compared with that."""
    for number, step in enumerate(steps, 1):
        for quantity in QUANTITIES:
            for name, value in step.get(quantity, {}).items():
                if not value.tensor.isfinite().all():
                    what = f"{quantity} of {name}" if name else quantity
                    raise AuditError(
                        f"step {number}: {what} has NaN or infinity in one process already, and with that no layout "
                        "can be compared: mend the training first"
                    )


def compare(step: int, ours: Step, truth: Step, rank: int) -> list[Difference]:
    """Every tensor's distance from the truth, in the order in which a step computes them.

    The scale is the largest number of the quantity in the whole model; gradients come in the order of the backward.
    """
    found = []
    for quantity in QUANTITIES:
        expected = truth.get(quantity, {})
        values = ours.get(quantity, {})
        scale = max((v.tensor.abs().max().item() for v in expected.values() if v.tensor.numel()), default=0.0)
        names = [name for name in expected if name in values]
        for name in reversed(names) if quantity in ("gradient", "clipped") else names:
            error = _error(values[name], expected[name].tensor) / (scale or 1.0)
            found.append(Difference(step, quantity, name, error, rank))
    return found


def _error(value: Value, whole: torch.Tensor) -> float:
    expected = whole if value.rows is None else whole[slice(*value.rows)]
    if value.tensor.shape != expected.shape:
        return float("inf")
    if not value.tensor.numel():
        return 0.0
    error = (value.tensor.double() - expected.double()).abs().max().item()
    return error if error == error else float("inf")  # a NaN compares with nothing
