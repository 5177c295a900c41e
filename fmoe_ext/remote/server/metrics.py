"""Counters, gauges and times in Prometheus' text format."""

import bisect
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TypeAlias

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
PREFIX = "fmoe_remote_"
Labels: TypeAlias = "tuple[tuple[str, str], ...]"


class Metrics:
    """Counts of a server. Names without prefix; labels have few values each, never one a client."""

    def __init__(self) -> None:
        self._counts: defaultdict[tuple[str, Labels], float] = defaultdict(float)
        self._times: dict[tuple[str, Labels], _Times] = {}
        self._gauges: dict[str, Callable[[], float]] = {}

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        self._counts[name, tuple(sorted(labels.items()))] += amount

    def time(self, name: str, seconds: float, **labels: str) -> None:
        self._times.setdefault((name, tuple(sorted(labels.items()))), _Times()).add(seconds)

    def gauge(self, name: str, read: Callable[[], float]) -> None:
        """Add a number that is read when the metrics are."""
        self._gauges[name] = read

    def count(self, name: str, **labels: str) -> float:
        """The sum of all counts with these labels, whatever their others."""
        wanted = labels.items()
        return sum(v for (n, given), v in self._counts.items() if n == name and wanted <= dict(given).items())

    def values(self) -> Mapping[str, float]:
        return {name: read() for name, read in self._gauges.items()}

    def to_text(self) -> str:
        lines = []
        for kind, names in (
            ("counter", sorted({name for name, _ in self._counts})),
            ("gauge", sorted(self._gauges)),
            ("histogram", sorted({name for name, _ in self._times})),
        ):
            for name in names:
                lines += [f"# TYPE {PREFIX}{name} {kind}", *self._lines(kind, name)]
        return "\n".join(lines) + "\n"

    def _lines(self, kind: str, name: str) -> list[str]:
        if kind == "gauge":
            return [f"{PREFIX}{name} {self._gauges[name]():g}"]
        if kind == "counter":
            chosen = sorted((labels, v) for (n, labels), v in self._counts.items() if n == name)
            return [f"{PREFIX}{name}{_text(labels)} {value:.17g}" for labels, value in chosen]
        times = sorted((labels, t) for (n, labels), t in self._times.items() if n == name)
        return [line for labels, t in times for line in t.lines(PREFIX + name, labels)]


class _Times:
    def __init__(self) -> None:
        self.buckets = [0] * (len(SECONDS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self.buckets[bisect.bisect_left(SECONDS, seconds)] += 1
        self.total += seconds

    def lines(self, name: str, labels: Labels) -> list[str]:
        lines, count = [], 0
        for bound, number in zip((*SECONDS, "+Inf"), self.buckets, strict=True):
            count += number
            lines.append(f"{name}_bucket{_text((*labels, ('le', str(bound))))} {count}")
        return [*lines, f"{name}_sum{_text(labels)} {self.total:g}", f"{name}_count{_text(labels)} {count}"]


def _text(labels: Labels) -> str:
    pairs = (f'{key}="{_escape(value)}"' for key, value in labels)
    return "{" + ",".join(pairs) + "}" if labels else ""


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
