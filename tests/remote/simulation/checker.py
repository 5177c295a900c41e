"""The checker of histories: what trainers have seen against what the members of an expert hold."""

import hashlib
import struct
from dataclasses import dataclass, field

PRIME = 1009.0


class Failed(AssertionError):
    """A promise that was not kept."""


@dataclass
class History:
    """The gradients of the trainers, and their answers."""

    begun: dict = field(default_factory=dict)  # request id: when
    acknowledged: dict = field(default_factory=dict)  # request id: version
    refused: set = field(default_factory=set)
    lost: set = field(default_factory=set)  # what a leader lacked when it began, as all members had died
    trace: list = field(default_factory=list)
    sums: dict = field(default_factory=dict)  # request id: sum of the gradient


@dataclass(frozen=True)
class Held:
    """The state of one member. applied: request id: version, of the last 1024 requests."""

    applied: dict
    num_requests: int
    version: int
    digest: str


def check(history, members):
    """Every acknowledged update exactly once, in one order, on every member; nothing that was refused.

    -> how many acknowledged updates were lost; each of them must be in history.lost.
    """
    first = members[0]
    if any(member != first for member in members):
        raise Failed("members differ")
    _check_log(history, first)
    if history.sums and _is_whole(first) and first.digest != digest_of(history, first):
        raise Failed("the weights are not those that the updates make")
    oldest = 0 if _is_whole(first) else min(first.applied.values())
    known = {i: v for i, v in history.acknowledged.items() if v > oldest}
    missing = known.keys() - first.applied.keys()
    if lost := missing - history.lost:
        raise Failed(f"acknowledged, but lost: {sorted(i[:6] for i in lost)}")
    kept = known.keys() - missing - history.lost  # a lost one may come again, as a late message
    if moved := [i[:6] for i in kept if first.applied[i] != known[i]]:
        raise Failed(f"acknowledged at another version: {sorted(moved)}")
    if first.num_requests < len(history.acknowledged.keys() - history.lost):
        raise Failed(f"{first.num_requests} requests were applied, {len(history.acknowledged)} acknowledged")
    return len(missing)


def digest_of(history, held):
    """The digest of the weights of a number, after the updates of a log."""
    by_version = {}
    for request_id, version in held.applied.items():
        by_version[version] = by_version.get(version, 0.0) + history.sums[request_id]
    w = 0.0
    for version in sorted(by_version):
        w = (3 * w + by_version[version]) % PRIME
    return hashlib.blake2b(struct.pack("<f", w), digest_size=8).hexdigest()


def _is_whole(held):
    return len(held.applied) < 1024


def _check_log(history, held):
    """A log without gaps, of requests that were made and not refused, each once."""
    if held.num_requests > len(history.begun):
        raise Failed(f"{held.num_requests} requests were applied, {len(history.begun)} were made")
    if _is_whole(held) and held.num_requests != len(held.applied):
        raise Failed(f"{held.num_requests} requests were applied, but {len(held.applied)} ids")
    if _is_whole(held) and sorted(set(held.applied.values())) != list(range(1, held.version + 1)):
        raise Failed("versions are missing")
    if wrong := history.refused & set(held.applied):
        raise Failed(f"refused, but applied: {sorted(wrong)}")
