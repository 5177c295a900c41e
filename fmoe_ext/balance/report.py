"""Summarise a run's logs of choices: summarize_logs() makes the Summary that page.py draws.

The logs are read three times, a record at a time, so that a run of any length fits the memory:

1. for its steps, which are put into at most _MAX_BINS bins of consecutive steps, about as many in each;
2. for the load of each expert in each bin, and how often two experts share a token;
3. for the tokens of the notable experts: the load has shown which are overloaded, busiest or dead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fmoe_ext import ops
from fmoe_ext.balance.choices import BadLog, Choice, Gate, read_log

_MAX_BINS = 120  # of steps, in a picture
LAST_SHARE = 4  # dead and overloaded are judged by about the last quarter of the steps
OVERLOAD = 2.0  # times the mean
_MAX_NOTABLE = 6  # dead experts, and overloaded ones, that are named for each gate
_NUM_BUSIEST = 3  # experts that are named for each gate even if its load is even
_MAX_FEEDERS = 8  # tokens that are named for an expert
_MAX_TOGETHER = 256  # experts of a gate, beyond which its pairs are not counted
MAX_PAIRS = 2**24  # pairs of all gates together, beyond which none are counted: an int64 each
_MAX_TOKEN_ID = 1 << 22  # ids from here on count as the one below it: a count for each id is kept


@dataclass
class GateSummary:
    """One gate over the run."""

    gate: Gate
    load: torch.Tensor  # [bins, E], choices of each expert
    dropped: torch.Tensor  # [bins], choices
    together: torch.Tensor | None  # [E, E], tokens that chose both; None for too many experts
    # {expert: [(token id, share of its load), ...]}
    feeders: dict[int, list[tuple[int, float]]] = field(default_factory=dict)

    @property
    def recent(self) -> torch.Tensor:
        """Sum the load of about the last quarter of the bins, at least one: [E]."""
        return self.load[-max(1, len(self.load) // LAST_SHARE) :].sum(0)

    @property
    def dead(self) -> list[int]:
        return (self.recent == 0).nonzero().flatten().tolist()

    @property
    def overloaded(self) -> list[int]:
        """Return the experts with more than OVERLOAD times the mean, the heaviest first."""
        recent = self.recent.double()
        heavy = (recent > OVERLOAD * recent.mean()).nonzero().flatten()
        return heavy[recent[heavy].argsort(descending=True)].tolist()

    @property
    def notable(self) -> list[int]:
        """Return the experts that the report names: overloaded ones, the busiest beside them, dead ones."""
        busiest = self.recent.argsort(descending=True, stable=True)[:_NUM_BUSIEST].tolist()
        heavy = self.overloaded[:_MAX_NOTABLE]
        alive = [e for e in busiest if e not in heavy and e not in self.dead]
        return [*heavy, *alive, *self.dead[:_MAX_NOTABLE]]


@dataclass
class Summary:
    """A run, from the logs of all its ranks."""

    paths: list[Path]  # its logs
    steps: list[int]  # those that were logged
    bins: list[int]  # the first step of each bin
    gates: list[GateSummary]
    num_bytes: int  # all logs together
    has_ids: bool  # the logs have the tokens' ids


def summarize_logs(paths: Sequence[str | Path], *, allow_truncated: bool = False) -> Summary:
    """Read logs of one run, one a rank, three times -> Summary.

    Raises BadLog for damaged logs, logs of different gates, and a file that is given twice.
    """
    files = [Path(path) for path in paths]
    for number, path in enumerate(files):
        for other in files[:number]:
            if path.exists() and other.exists() and path.samefile(other):
                raise BadLog(
                    f"{path} is {other} again: its choices would count twice. Give each rank's log once"
                )
    gates, *others = (read_log(path, allow_truncated=allow_truncated)[0] for path in files)
    for path, others_gates in zip(files[1:], others, strict=True):
        if others_gates != gates:
            raise BadLog(f"{path} is of other gates than {files[0]}: a report is of one run")
    # 1. the steps, and their bins
    steps = sorted({record.step for record in _records(files, allow_truncated)})
    if not steps:
        raise BadLog(f"{', '.join(map(str, files))}: no step was logged")
    num_bins = min(_MAX_BINS, len(steps))
    bin_of = {step: index * num_bins // len(steps) for index, step in enumerate(steps)}
    first = [next(step for step in steps if bin_of[step] == number) for number in range(num_bins)]

    # 2. load and pairs
    small = [gate.num_experts for gate in gates if gate.num_experts <= _MAX_TOGETHER]
    # pairs of a gate take E x E numbers: counted where all gates together have few of them
    widest = _MAX_TOGETHER if sum(n * n for n in small) <= MAX_PAIRS else 0
    summaries = {}
    for gate in gates:
        experts = gate.num_experts
        load = torch.zeros(num_bins, experts, dtype=torch.int64, device="cpu")
        dropped = torch.zeros(num_bins, dtype=torch.int64, device="cpu")
        pairs = torch.zeros(experts, experts, dtype=torch.int64, device="cpu") if experts <= widest else None
        summaries[gate.name] = GateSummary(gate, load, dropped, pairs)
    for record in _records(files, allow_truncated):
        if record.gate is None:
            continue
        summary, where, topk_idx = summaries[record.gate], bin_of[record.step], record.topk_idx
        experts = summary.gate.num_experts
        summary.load[where] += ops.count_tokens(topk_idx, experts)
        summary.dropped[where] += int((topk_idx < 0).sum())
        if (together := summary.together) is None:
            continue
        for k in range(topk_idx.shape[1]):
            for later in range(k + 1, topk_idx.shape[1]):
                # a pair (i, j) as the number i E + j; both orders are counted by adding the transpose
                pair = topk_idx[:, k] * experts + topk_idx[:, later]
                pair = pair[(topk_idx[:, k] >= 0) & (topk_idx[:, later] >= 0)]
                counts = torch.bincount(pair, minlength=experts * experts).view(experts, experts)
                together += counts + counts.t()
    # 3. tokens
    has_ids = _find_feeders(summaries, files, allow_truncated)
    size = sum(path.stat().st_size for path in files)
    return Summary(files, steps, first, list(summaries.values()), size, has_ids)


def _records(files: Sequence[Path], allow_truncated: bool) -> Iterator[Choice]:
    for path in files:
        yield from read_log(path, allow_truncated=allow_truncated)[1]


def _find_feeders(summaries: dict[str, GateSummary], files: Sequence[Path], allow_truncated: bool) -> bool:
    """Set the feeders of the notable experts, their most frequent tokens -> True if the logs have tokens."""
    counts: dict[tuple[str, int], torch.Tensor] = {}
    has_ids = False
    for path in files:
        pending: list[Choice] = []  # a step's records; its ids follow them
        for record in read_log(path, allow_truncated=allow_truncated)[1]:
            if pending and pending[0].step != record.step:  # a step without ids
                pending = []
            if record.gate is not None:
                pending.append(record)
                continue
            has_ids, ids = True, record.topk_idx.clamp(0, _MAX_TOKEN_ID - 1)
            for name, summary in summaries.items():
                parts = [each.topk_idx for each in pending if each.gate == name]
                if not parts:
                    continue
                topk_idx = torch.cat(parts)  # of several forwards of the step, in order, as the ids are
                if len(topk_idx) != len(ids):
                    raise BadLog(
                        f"{path}: step {record.step} has {len(ids)} token ids, but {name} chose for "
                        f"{len(topk_idx)} tokens"
                    )
                for expert in summary.notable:
                    mine = torch.bincount(ids[(topk_idx == expert).any(1)])
                    # a count for each id so far; the longer vector takes both
                    known = counts.get((name, expert), torch.zeros(0, dtype=torch.int64, device="cpu"))
                    longest = torch.zeros(max(len(mine), len(known)), dtype=torch.int64, device="cpu")
                    longest[: len(mine)] += mine
                    longest[: len(known)] += known
                    counts[name, expert] = longest
            pending = []
    for (name, expert), count in counts.items():
        best = count.topk(min(_MAX_FEEDERS, len(count)))
        total = max(int(count.sum()), 1)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        summaries[name].feeders[expert] = [(token, number / total) for token, number in pairs if number]
    return has_ids
