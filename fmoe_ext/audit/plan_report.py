"""Findings of an audit of a parallel plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fmoe_ext.audit.values import QUANTITIES, Difference


@dataclass
class Rank:
    """Errors of one rank."""

    worst: dict[str, float] = field(default_factory=dict)  # largest error in each quantity
    first: Difference | None = None  # first one over the bound
    names: set[str] = field(default_factory=set)  # parameters of this rank
    error: str | None = None  # what it raised

    def add(self, found: Sequence[Difference], bound: float) -> None:
        """Join the errors of a step."""
        for difference in found:
            self.worst[difference.quantity] = max(self.worst.get(difference.quantity, 0.0), difference.error)
            if self.first is None and not difference.error <= bound:  # not >: a NaN is over every bound
                self.first = difference


@dataclass(frozen=True)
class PlanReport:
    """Findings about a plan: str() says whether it trains what one process trains, or the first tensor that differs."""

    ranks: Sequence[Rank]
    names: Sequence[str]  # of the model's parameters
    losses: Sequence[float]  # of one process
    steps: int
    world: int
    seconds: float

    @property
    def error(self) -> str | None:
        """The error that a rank raised, or the parameters that no rank has."""
        for rank in self.ranks:
            if rank.error is not None:
                return rank.error
        there = set().union(*(rank.names for rank in self.ranks))
        absent = [name for name in self.names if name not in there]
        return f"no rank has {', '.join(absent[:3])}" if absent else None

    @property
    def first(self) -> Difference | None:
        """The first difference in the order of the computation, on the lowest of the ranks that have it."""
        found = [rank.first for rank in self.ranks if rank.first is not None]
        return min(found, key=lambda d: (d.step, QUANTITIES.index(d.quantity)), default=None)

    @property
    def ok(self) -> bool:
        """True if all ranks ran and nothing differs."""
        return self.first is None and self.error is None

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON's types."""
        first = self.first
        return {
            "ok": self.ok,
            "world": self.world,
            "steps": self.steps,
            "seconds": self.seconds,
            "losses": list(self.losses),
            "worst": self._worst(),
            "first": None if first is None else vars(first),
            "error": self.error,
        }

    def _worst(self) -> dict[str, float]:
        return {q: max((rank.worst.get(q, 0.0) for rank in self.ranks), default=0.0) for q in QUANTITIES}

    def __str__(self) -> str:
        lines = [f"one process: losses {', '.join(f'{loss:.12g}' for loss in self.losses)}"]
        worst = ", ".join(f"{quantity} {error:.0e}" for quantity, error in self._worst().items() if error)
        lines.append(f"largest errors on {self.world} ranks: {worst or '0'}")
        if self.error is not None:
            lines.append(f"FAILED     {self.error.strip()}")
        elif self.first is not None:
            lines.append(f"DIFFERENT  {self.first}")
        verdict = "equal" if self.ok else "failed" if self.error is not None else "different"
        lines.append(f"{self.steps} steps on {self.world} ranks in {self.seconds:.0f} s: {verdict}")
        return "\n".join(lines)
