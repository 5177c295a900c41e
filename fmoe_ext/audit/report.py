"""Findings of an audit: a table of cases, or the verdict on one plan, and what an exit code comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fmoe_ext.audit.cases import Case
from fmoe_ext.audit.compare import QUANTITIES, Difference
from fmoe_ext.audit.training import Facts

# of the columns, in the order of QUANTITIES
_HEADINGS = ("outputs", "loss", "gradients", "norm", "clipped", "parameters")


@dataclass(frozen=True)
class Outcome:
    """Findings of all ranks of a plan."""

    worst: Mapping[str, float]  # the largest error in each quantity
    # over the bound, in the order of the computation, on the lowest of the ranks that have it
    first: Difference | None
    error: str | None  # what a rank raised, or the parameters that no rank has

    @property
    def ok(self) -> bool:
        """True if all ranks ran and nothing differs."""
        return self.first is None and self.error is None


@dataclass(frozen=True)
class Result(Outcome):
    """One case of an audit."""

    case: Case
    bound: float  # the largest error that counts as equal
    seconds: float

    @property
    def label(self) -> str:
        """equal, DIFFERENT, or FAILED for a case that raised an error or took too long."""
        return "equal" if self.ok else "DIFFERENT" if self.error is None else "FAILED"

    def why(self) -> str:
        """Return the first difference, or the error, as text."""
        return str(self.first) if self.error is None else self.error.strip()


@dataclass(frozen=True)
class PlanReport(Outcome):
    """Findings about a plan; str() says whether it trains what one process trains, or the first tensor that differs."""

    losses: Sequence[float]  # of one process
    steps: int  # of the optimizer
    world: int  # ranks
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON's types."""
        return {
            "ok": self.ok,
            "world": self.world,
            "steps": self.steps,
            "seconds": self.seconds,
            "losses": list(self.losses),
            "worst": dict(self.worst),
            "first": None if self.first is None else vars(self.first),
            "error": self.error,
        }

    def __str__(self) -> str:
        lines = [f"one process: losses {', '.join(f'{loss:.12g}' for loss in self.losses)}"]
        worst = ", ".join(f"{quantity} {error:.0e}" for quantity, error in self.worst.items() if error)
        lines.append(f"largest errors on {self.world} ranks: {worst or '0'}")
        if self.error is not None:
            lines.append(f"FAILED     {self.error.strip()}")
        elif self.first is not None:
            lines.append(f"DIFFERENT  {self.first}")
        verdict = "equal" if self.ok else "failed" if self.error is not None else "different"
        lines.append(f"{self.steps} steps on {self.world} ranks in {self.seconds:.0f} s: {verdict}")
        return "\n".join(lines)


@dataclass(frozen=True)
class AuditReport:
    """Findings about a training in all cases; str() is a table."""

    results: Sequence[Result]
    facts: Facts  # what one process alone shows
    losses: Sequence[float]  # of one process, float64
    left_out: Mapping[str, str]  # {setting: reason}
    steps: int
    seconds: float

    @property
    def ok(self) -> bool:
        """True if every case is equal and no remark is left."""
        return not self.failures and not self.remarks()

    @property
    def failures(self) -> list[Result]:
        """The cases that differ or could not run."""
        return [result for result in self.results if not result.ok]

    def remarks(self) -> list[str]:
        """Faults that every layout has alike, so that no comparison shows them."""
        found = []
        if apart := self.facts.clipped_apart:
            found.append(
                f"clipping leaves out {_some(list(apart))}: other gradients were scaled by "
                f"{self.facts.usual_factor:.3g}, {next(iter(apart))} by {next(iter(apart.values())):.3g}"
            )
        if still := self.facts.not_updated:
            found.append(
                f"the optimizer misses {_some(still)}: a gradient came, but the first step did not move it"
            )
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON's types."""
        return {
            "ok": self.ok,
            "steps": self.steps,
            "seconds": self.seconds,
            "losses": list(self.losses),
            "left_out": dict(self.left_out),
            "remarks": self.remarks(),
            "cases": [
                {
                    "layout": str(result.case.layout),
                    "dtype": result.case.dtype,
                    **result.case.unusual(),
                    "verdict": result.label,
                    "worst": dict(result.worst),
                    "why": "" if result.ok else result.why(),
                    "seconds": result.seconds,
                }
                for result in self.results
            ],
        }

    def __str__(self) -> str:
        lines = [f"one process, whole batch, float64: losses {', '.join(f'{x:.12g}' for x in self.losses)}"]
        groups: dict[tuple[str, str], list[Result]] = {}
        for result in self.results:
            groups.setdefault((str(result.case.layout), result.case.dtype), []).append(result)
        rows: list[Sequence[str]] = [("layout", "dtype", "cases", *_HEADINGS, "verdict")]
        for key, results in groups.items():
            computed = [result.worst for result in results if result.worst]
            errors = [f"{max(w[q] for w in computed):.0e}" if computed else "-" for q in QUANTITIES]
            verdict = _count(results, "DIFFERENT", "FAILED") or "equal"
            rows.append((*key, str(len(results)), *errors, verdict))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(cells).rstrip())

        lines += [f"left out: {name} ({reason})" for name, reason in self.left_out.items()]
        lines += [f"DIFFERENT  every layout: {remark}" for remark in self.remarks()]
        # Cases that first differ in the same tensor have one cause: one line for all of them.
        causes: dict[tuple[str, ...], list[Result]] = {}
        for result in self.failures:
            first = result.first
            where = (result.why(),) if first is None else (str(first.step), first.quantity, first.name)
            causes.setdefault(where, []).append(result)
        for failures in causes.values():
            more = f", and {len(failures) - 1} more cases" if len(failures) > 1 else ""
            lines.append(f"{failures[0].label:9}  {failures[0].case}{more}: {failures[0].why()}")
        if self.failures and self.facts.drawing:
            lines.append(
                f"random numbers are drawn by {_some(self.facts.drawing)}: no two layouts draw the same, which is a "
                "difference by itself; build(layout) must turn it off (dropout, jitter, noise, random choices)"
            )
        if self.failures:
            verdict = _count(self.failures, "differ", "failed")
        else:
            verdict = "equal to one process, which is wrong itself" if self.remarks() else "all equal"
        lines.append(f"{len(self.results)} cases of {self.steps} steps in {self.seconds:.0f} s: {verdict}")
        return "\n".join(lines)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _count(results: Sequence[Result], differ: str, failed: str) -> str:
    counts = {
        word: sum(r.label == label for r in results)
        for word, label in ((differ, "DIFFERENT"), (failed, "FAILED"))
    }
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count)
