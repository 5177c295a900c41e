"""Findings of an audit, as a table and as an exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fmoe_ext.audit.cases import Case
from fmoe_ext.audit.training import Facts
from fmoe_ext.audit.values import QUANTITIES, Difference

HEADINGS = ("outputs", "loss", "gradients", "norm", "clipped", "parameters")


@dataclass(frozen=True)
class Result:
    """One case: its largest error in each quantity; the first tensor over the bound; or the error it raised."""

    case: Case
    bound: float
    worst: Mapping[str, float]
    first: Difference | None
    error: str | None
    seconds: float

    @property
    def ok(self) -> bool:
        """True if the case ran and nothing in it differs."""
        return self.first is None and self.error is None

    @property
    def label(self) -> str:
        """equal, DIFFERENT, or FAILED for a case that raised an error or took too long."""
        return "equal" if self.ok else "DIFFERENT" if self.error is None else "FAILED"

    def why(self) -> str:
        """The first difference, or the error, as text."""
        return str(self.first) if self.error is None else self.error.strip()


@dataclass(frozen=True)
class AuditReport:
    """Results of all cases, what one process alone shows, and what was left out with its reason; str() is a table."""

    results: Sequence[Result]
    facts: Facts
    losses: Sequence[float]  # of one process, float64
    left_out: Mapping[str, str]
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
        """The report as JSON's types."""
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
        losses = ", ".join(f"{loss:.12g}" for loss in self.losses)
        lines = [f"one process, whole batch, float64: losses {losses}"]
        groups: dict[tuple[str, str], list[Result]] = {}
        for result in self.results:
            groups.setdefault((str(result.case.layout), result.case.dtype), []).append(result)
        rows: list[Sequence[str]] = [("layout", "dtype", "cases", *HEADINGS, "verdict")]
        for key, results in groups.items():
            verdict = _count(results, "DIFFERENT", "FAILED") or "equal"
            rows.append((*key, str(len(results)), *_worst(results), verdict))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(cells).rstrip())

        lines += [f"left out: {name} ({reason})" for name, reason in self.left_out.items()]
        lines += [f"DIFFERENT  every layout: {remark}" for remark in self.remarks()]
        # Cases that first differ in the same tensor have one cause: one line for all of them.
        reasons: dict[str, list[Result]] = {}
        texts: dict[tuple[str, ...], str] = {}
        for result in self.failures:
            first = result.first
            where = (result.why(),) if first is None else (str(first.step), first.quantity, first.name)
            reasons.setdefault(texts.setdefault(where, result.why()), []).append(result)
        for text, failures in reasons.items():
            more = f", and {len(failures) - 1} more cases" if len(failures) > 1 else ""
            lines.append(f"{failures[0].label:9}  {failures[0].case}{more}: {text}")
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


def _worst(results: Sequence[Result]) -> list[str]:
    """The largest error in each quantity over the cases of one layout."""
    computed = [result.worst for result in results if result.worst]
    if not computed:
        return ["-"] * len(QUANTITIES)
    return [f"{max(worst[quantity] for worst in computed):.0e}" for quantity in QUANTITIES]


def _count(results: Sequence[Result], differ: str, failed: str) -> str:
    counts = {
        word: sum(r.label == label for r in results)
        for word, label in ((differ, "DIFFERENT"), (failed, "FAILED"))
    }
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count)
