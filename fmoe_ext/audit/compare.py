"""Compare the tensors of a step with one process, and say where the first difference comes from.

run.py calls compare() on every rank after each step. The first tensor over the bound, in the order in which a step
computes them, is where things went wrong; what follows is its consequence. So explain() examines only that one: a wrong
output is traced to the first block that differs, a wrong gradient to the factor by which it is off (the number of
ranks: a sum was taken for a mean). Built-in layouts go without it: their outputs are compared block by block.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from fmoe_ext.audit.cases import AuditError

# In the order in which a step computes them.
QUANTITIES = ("output", "loss", "gradient", "norm", "clipped", "parameter")
INSIDE = "inside"  # outputs of modules, which only say where a wrong output comes from
_BLOCK = re.compile(r"(.+\.)?\d+")  # the name of a module in an nn.ModuleList


@dataclass(frozen=True)
class Value:
    """A tensor of one rank."""

    tensor: torch.Tensor
    rows: tuple[int, int] | None = None  # (begin, end) of the whole tensor that this rank has; None: all


Step: TypeAlias = dict[str, dict[str, Value]]  # {quantity: {name: value}}; the name "" is the whole model's
Truth: TypeAlias = dict[str, dict[str, torch.Tensor]]  # the same of one process


@dataclass(frozen=True)
class Difference:
    """A tensor that is not what one process computes."""

    step: int
    quantity: str  # of QUANTITIES
    name: str  # of a parameter or module; "" for the whole model
    error: float  # the largest absolute one over the largest number of the quantity
    rank: int = 0
    note: str = ""  # where it comes from, by explain()

    def __str__(self) -> str:
        what = f"{self.quantity} of {self.name}" if self.name else self.quantity
        note = f" ({self.note})" if self.note else ""
        return f"step {self.step}, rank {self.rank}: {what} is off by {self.error:.1e}{note}"


def check_finite(history: Sequence[Truth]) -> None:
    """Raise AuditError for the first tensor of one process with NaN or infinity: nothing can be compared with that."""
    for number, step in enumerate(history):
        for quantity in QUANTITIES:
            for name, x in step.get(quantity, {}).items():
                if not x.isfinite().all():
                    what = f"{quantity} of {name}" if name else quantity
                    raise AuditError(
                        f"step {number}: {what} has NaN or infinity in one process already, and with that no layout "
                        "can be compared: mend the training first"
                    )


def compare(number: int, ours: Step, truth: Truth, rank: int, share: tuple[int, int]) -> list[Difference]:
    """Return the distance of every tensor of a step from the truth, in the order of the step.

    number: of the step. share: (index, number of parts): the part of the batch that this rank has, and its outputs with
    it. Gradients come in the order of the backward.
    """
    found = []
    for quantity in QUANTITIES:
        expected = truth.get(quantity, {})
        if quantity == "output":
            expected = {name: _rows(x, share) for name, x in expected.items()}
        values = ours.get(quantity, {})
        scale = max((x.abs().max().item() for x in expected.values() if x.numel()), default=0.0) or 1.0
        names = [name for name in expected if name in values]
        for name in reversed(names) if quantity in ("gradient", "clipped") else names:
            rows = values[name].rows
            whole = expected[name] if rows is None else expected[name][slice(*rows)]
            error = _largest_error(values[name].tensor, whole)
            error = float("inf") if error is None else error / scale
            found.append(Difference(number, quantity, name, error, rank))
    return found


def explain(
    found: list[Difference], ours: Step, truth: Truth, share: tuple[int, int], bound: float
) -> list[Difference]:
    """Say where the first difference over the bound comes from; return all, and perhaps one more.

    For a wrong output or loss an entry for the first block that differs is put in front; its note names the first
    module inside.
    A wrong gradient or parameter gets the factor by which it is off, which tells more than the place.
    """
    at = next((i for i, d in enumerate(found) if d.error > bound), None)
    if at is None:
        return found
    first = found[at]
    if first.quantity not in ("output", "loss") or not ours[INSIDE]:
        note = _factor(ours[first.quantity][first.name].tensor, truth[first.quantity][first.name])
        return [*found[:at], replace(first, note=note), *found[at + 1 :]]
    differing: dict[str, float] = {}  # {module: error}
    for name, whole in truth[INSIDE].items():
        if name and name in ours[INSIDE]:
            expected = _rows(whole, share)
            error = _largest_error(ours[INSIDE][name].tensor, expected)
            if not error or not expected.numel():
                continue  # equal, or a part of the whole, which says nothing
            error /= expected.abs().max().item() or 1.0
            if error > bound:
                differing[name] = error
    # Modules inside a block may keep partial values under a plan: they count only where the block differs too.
    block = next((name for name in differing if _BLOCK.fullmatch(name)), None)
    if block is not None:
        inside = [name for name in differing if name.startswith(block + ".")]
        note = f"first inside it: {inside[0].removeprefix(block + '.')}" if inside else ""
        first = replace(first, quantity="output", name=block, error=differing[block], note=note)
    elif differing:
        name, error = next(iter(differing.items()))
        first = replace(first, quantity="output", name=name, error=error)
    return [*found[:at], first, *found[at:]]


def _factor(x: torch.Tensor, expected: torch.Tensor) -> str:
    """Say by which factor a tensor differs, if by one factor everywhere."""
    if x.shape != expected.shape:
        return f"shape {list(x.shape)}, expected {list(expected.shape)}"
    if not x.isfinite().all():
        return "NaN or infinity"
    if not x.any():
        return "zero here"
    x, expected = x.double().flatten(), expected.double().flatten()
    # least squares: the factor c of x = c * expected
    factor = (x @ expected / (expected @ expected)).item() if expected.any() else 0.0
    if factor and abs(factor - 1) > 1e-3 and (x - factor * expected).abs().max() < 1e-4 * x.abs().max():
        return f"{factor:.3g} times that of one process"
    return ""


def _rows(whole: torch.Tensor, share: tuple[int, int]) -> torch.Tensor:
    """Return the rows of a share of the batch."""
    index, number = share
    if number == 1 or not whole.dim():
        return whole
    size = whole.shape[0] // number
    return whole[size * index : size * (index + 1)]


def _largest_error(x: torch.Tensor, expected: torch.Tensor) -> float | None:
    """Return the largest absolute difference, infinite for NaN; None for tensors of different shapes."""
    if x.shape != expected.shape:
        return None
    if not x.numel():
        return 0.0
    error = (x.double() - expected.double()).abs().max().item()
    return error if error == error else float("inf")  # a NaN compares with nothing
