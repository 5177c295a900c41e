"""The checker of histories: what trainers have seen against what the members of an expert hold."""

from dataclasses import dataclass, field


class Failed(AssertionError):
    """A promise that was not kept."""


@dataclass
class History:
    """The gradients of the trainers, and their answers."""

    begun: dict = field(default_factory=dict)  # request id: when
    acknowledged: dict = field(default_factory=dict)  # request id: version
    refused: set = field(default_factory=set)
    excused: set = field(default_factory=set)  # what may be lost: no member was left alive
    trace: list = field(default_factory=list)


@dataclass(frozen=True)
class Held:
    """The state of one member. applied: request id: version, of the last 1024 requests."""

    applied: dict
    num_requests: int
    version: int
    digest: str


def check(history, members):
    """Every acknowledged update exactly once, in one order, on every member; nothing that was refused."""
    first = members[0]
    if any(member != first for member in members):
        raise Failed("members differ")
    if first.num_requests > len(history.begun):
        raise Failed(f"{first.num_requests} requests were applied, {len(history.begun)} were made")
    is_whole = len(first.applied) < 1024
    if is_whole and first.num_requests != len(first.applied):
        raise Failed(f"{first.num_requests} requests were applied, but {len(first.applied)} ids")
    if is_whole and sorted(set(first.applied.values())) != list(range(1, first.version + 1)):
        raise Failed("versions are missing")
    if wrong := history.refused & set(first.applied):
        raise Failed(f"refused, but applied: {sorted(wrong)}")
    oldest = 0 if is_whole else min(first.applied.values())
    known = {i: v for i, v in history.acknowledged.items() if v > oldest and i not in history.excused}
    if lost := [i[:6] for i in known if i not in first.applied]:
        raise Failed(f"acknowledged, but lost: {sorted(lost)}")
    if moved := [i[:6] for i, v in known.items() if first.applied[i] != v]:
        raise Failed(f"acknowledged at another version: {sorted(moved)}")
    if not history.excused and first.num_requests < len(history.acknowledged):
        raise Failed(f"{first.num_requests} requests were applied, {len(history.acknowledged)} acknowledged")
