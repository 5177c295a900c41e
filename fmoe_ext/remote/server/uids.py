"""Patterns of uids that a server may take, such as "expert.[0:5]" or "grid.[0:32].[0:16]"."""

import itertools
import random
import re
from collections.abc import Iterator

from fmoe_ext.remote.discovery import MAX_COORDINATE, Discovery, check_uid, coordinates

_RANGE = re.compile(r"\[(\d{1,10}):(\d{1,10})\]")
MAX_TRIED = 1024  # candidates looked up at a time


class Pattern:
    """The uids that a pattern stands for. ValueError for one that is none."""

    def __init__(self, text: str):
        prefix, *parts = text.split(".")
        self.text, self._prefix = text, prefix
        self._axes = [_axis(part, text) for part in parts]
        self.size = 1
        for axis in self._axes:
            self.size *= len(axis)
        if self.size == 0 or not parts:
            raise ValueError(
                f"the pattern {text!r} holds no uid: write expert.[0:5] for expert.0 to expert.4"
            )
        check_uid(self._uid(0))

    def __iter__(self) -> Iterator[str]:
        return (".".join([self._prefix, *map(str, place)]) for place in itertools.product(*self._axes))

    def sample(self, count: int, rng: random.Random) -> list[str]:
        """Up to count different uids in random order."""
        if self.size <= 4 * count:
            uids = list(self)
            rng.shuffle(uids)
            return uids[:count]
        return [self._uid(place) for place in rng.sample(range(self.size), count)]

    def _uid(self, place: int) -> str:
        parts = []
        for axis in reversed(self._axes):
            place, index = divmod(place, len(axis))
            parts.append(str(axis[index]))
        return ".".join([self._prefix, *reversed(parts)])


def _axis(part: str, text: str) -> range:
    match = _RANGE.fullmatch(part)
    if match is None and not part.isdecimal():
        raise ValueError(f"{part!r} in the pattern {text!r} must be a number or a range such as [0:5]")
    begin, end = (int(match[1]), int(match[2])) if match else (int(part), int(part) + 1)
    if end > MAX_COORDINATE + 1:
        raise ValueError(f"coordinates must be at most {MAX_COORDINATE}, but the pattern is {text!r}")
    return range(begin, end)


async def claim_free_uids(
    discovery: Discovery, pattern: Pattern, count: int, endpoint: str, ttl: float, rng: random.Random
) -> list[str]:
    """Claims count random uids of a pattern that nobody hosts; fewer if there are not so many."""
    mine: list[str] = []
    tried: set[str] = set()
    while len(mine) < count and len(tried) < pattern.size:
        wanted = min(pattern.size, len(tried) + min(4 * count, MAX_TRIED))
        candidates = [uid for uid in pattern.sample(wanted, rng) if uid not in tried]
        tried.update(candidates)
        records = await discovery.get(candidates)
        free = [uid for uid, record in zip(candidates, records, strict=True) if record is None]
        while free and len(mine) < count:
            some, free = free[: count - len(mine)], free[count - len(mine) :]
            granted = await discovery.declare(some, endpoint, ttl)
            mine += [uid for uid in some if uid in granted]
    return sorted(mine, key=_by_place)


def _by_place(uid: str) -> tuple[int, ...]:
    return coordinates(uid)
