"""The cases of an audit: layouts x accumulation x recomputation x padding x dtype.

audit() (run.py) makes them by make_cases(), and trains each on as many processes as its Layout has ranks.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fmoe_ext.distributed.groups import ParallelGroups

ACCUMULATION = ("1", "2", "uneven")  # microbatches of a step; uneven: one sample, then the rest
RECOMPUTATION = ("none", "reentrant", "non-reentrant")  # kinds of activation checkpointing
PADDING = ("none", "left", "right")  # the side that sequences are padded on
DTYPES = ("float64", "float32")  # of the model
SEED = 0  # of the model; its successors are those of the steps


class AuditError(ValueError):
    """An audit cannot be run: the text says what was given, what is expected and how to mend it."""


@dataclass(frozen=True)
class Layout:
    """dp copies of the model, each with its experts over ep ranks; each of the dp * ep has tokens of its own."""

    dp: int = 1
    ep: int = 1
    groups: ParallelGroups | None = None  # of a running rank; None in one process

    @property
    def num_ranks(self) -> int:
        """Processes that the layout needs."""
        return self.dp * self.ep

    def expert_arguments(self, num_experts: int) -> dict[str, Any]:
        """Keyword arguments of FMoETransformerMLP (FMoE: without expert_dp_comm) for num_experts in all."""
        if num_experts % self.ep:
            raise AuditError(f"{num_experts} experts cannot be spread over the ranks of {self} evenly")
        if self.groups is None:
            return {"num_experts": num_experts}
        return {
            "num_experts": num_experts,
            "world_size": self.ep,
            "moe_group": self.groups.ep if self.ep > 1 else None,
            "gate_group": self.groups.world,
            "expert_dp_comm": "moe",
        }

    def __str__(self) -> str:
        sizes = [f"{name} {size}" for name, size in (("dp", self.dp), ("ep", self.ep)) if size > 1]
        return " x ".join(sizes) or "1 process"


LAYOUTS = (Layout(), Layout(dp=2), Layout(ep=2), Layout(dp=2, ep=2))


def parse_layout(text: str) -> Layout:
    """Read a layout: "1", "dp2", "ep2", "dp2xep2", ..."""
    if text == "1":
        return Layout()
    match = re.fullmatch(r"dp([1-9]\d*)(?:x?ep([1-9]\d*))?|ep([1-9]\d*)", text)
    if match is None:
        raise AuditError(f"a layout is 1, dp2, ep2, dp2xep2 or the like, but got {text!r}")
    return Layout(int(match[1] or 1), int(match[2] or match[3] or 1))


@dataclass(frozen=True)
class Case:
    """One way to run the same training; the default is the one that all others are compared with."""

    layout: Layout = LAYOUTS[0]
    accumulation: str = "1"
    recomputation: str = "none"
    padding: str = "none"
    dtype: str = "float64"

    def __str__(self) -> str:
        settings = [f"{axis} {value}" for axis, value in self.unusual().items()]
        return ", ".join([str(self.layout), *settings, self.dtype])

    def unusual(self) -> dict[str, str]:
        """Return {axis: value} of what differs from one whole batch that is neither recomputed nor padded."""
        axes = {name: getattr(self, name) for name in ("accumulation", "recomputation", "padding")}
        return {name: value for name, value in axes.items() if value not in ("1", "none")}

    def names(self) -> set[str]:
        """Every word under which leave_out may name it."""
        layout = {name for name in ("dp", "ep") if getattr(self.layout, name) > 1}
        values = {str(self.layout), self.dtype, *self.unusual().values()}
        return {*layout, *self.unusual(), *values}


def make_cases(
    layouts: Sequence[Layout],
    accumulation: Sequence[str],
    recomputation: Sequence[str],
    padding: Sequence[str],
    dtypes: Sequence[str],
    leave_out: Mapping[str, str],
) -> list[Case]:
    """Make all combinations but those that leave_out names; few ranks and few unusual settings first."""
    axes = (
        ("accumulation", accumulation, ACCUMULATION),
        ("recomputation", recomputation, RECOMPUTATION),
        ("padding", padding, PADDING),
        ("dtypes", dtypes, DTYPES),
    )
    for name, values, known in axes:
        if unknown := [value for value in values if value not in known]:
            raise AuditError(f"{name} must be of {', '.join(known)}, but got {', '.join(map(repr, unknown))}")
    every = list(
        itertools.starmap(Case, itertools.product(layouts, accumulation, recomputation, padding, dtypes))
    )
    # Also names that this audit does not use: one recipe's leave_out serves every choice of axes.
    settings = itertools.product({*LAYOUTS, *layouts}, ACCUMULATION, RECOMPUTATION, PADDING, DTYPES)
    known_names = set().union(*(case.names() for case in itertools.starmap(Case, settings)))
    if unknown := [name for name in leave_out if name not in known_names]:
        raise AuditError(
            f"leave_out names {', '.join(map(repr, unknown))}, but what can be left out is "
            f"{', '.join(sorted(known_names))}"
        )
    kept = [case for case in every if not case.names() & leave_out.keys()]
    if not kept:
        raise AuditError("no case is left to run: leave_out, or empty lists of settings, exclude them all")
    order = {layout: (layout.num_ranks, i) for i, layout in enumerate(layouts)}
    return sorted(kept, key=lambda case: (order[case.layout], len(case.unusual()), case.dtype != "float64"))
