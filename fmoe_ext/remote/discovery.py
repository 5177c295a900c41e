"""Discovery: the directory of which server hosts which expert, as one small interface.

Servers claim uids for their endpoint and renew the claims (declare); clients look them up (get), and beam search asks
which coordinates are in use (successors). The DHT (dht/), etcd (etcd/) and StaticList implement it; Cached remembers
another's answers for some seconds.

A uid names an expert: a prefix and its coordinates in a grid, joined by dots ("expert.3", "ffn.1.7"). A prefix is any
printable text without dots, slashes and spaces ("my::experts2", "größe"). Pattern writes many uids as one text:
"ffn.[0:4].[0:8]" is ffn.0.0 to ffn.3.7.
"""

import abc
import math
import random
import re
import time
import unicodedata
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

from fmoe_ext.remote.errors import RemoteError

MAX_UID_LENGTH = 128  # bytes of UTF-8
MAX_COORDINATE = 2**31 - 1
# prefix, then ".number" without leading zeros: one expert must have one spelling
_UID = re.compile(r"[^.\s/\\]+(?:\.(?:0|[1-9][0-9]{0,9}))+")
_PREFIX = re.compile(r"[^.\s/\\]+(?:\.(?:0|[1-9][0-9]{0,9}))*")


class DiscoveryError(RemoteError):
    """The directory could not answer, or not in time; the message names what was asked and of whom."""


class Unanswered(DiscoveryError):
    """The directory answered for some keys only. found: their answers, by key; missing: the other keys."""

    def __init__(self, text: str, found: Mapping[Any, Any], missing: Sequence[Any]):
        super().__init__(text)
        self.found, self.missing = found, tuple(missing)


@dataclass(frozen=True)
class ExpertRecord:
    """The servers of an expert. endpoints[0] takes gradients; all of them answer forward calls."""

    uid: str
    endpoints: tuple[str, ...]  # "host:port", IPv6 as "[::1]:port"
    expires: float = float("inf")  # time.monotonic() after which the record must not be used
    # grows with every change of owner; of two records the one with the smaller fence is out of date
    fence: int = 0
    metadata: Mapping[str, str] = field(default_factory=dict)  # small facts, such as {"version": "12"}

    def is_live(self, now: float | None = None) -> bool:
        """True until the record expires; now: of time.monotonic(), this moment if None."""
        return (time.monotonic() if now is None else now) < self.expires


@dataclass(frozen=True)
class Claim:
    """A server's request to own experts, or to go on owning them: the checked arguments of declare()."""

    uids: tuple[str, ...]
    endpoint: str  # "host:port" at which the server answers
    ttl: float  # seconds for which no other server gets them
    metadata: Mapping[str, str]  # of their records
    timeout: float  # seconds for the answer


class Granted(frozenset[str]):
    """The uids that a server now owns. found_at: how many nodes show a uid to beam searches, if that is counted."""

    found_at: Mapping[str, int] = MappingProxyType({})


class Discovery(abc.ABC):
    """A directory that servers write and clients read. Every coroutine runs on the loop of fmoe_ext.remote.loop.

    Each call ends within about `timeout` seconds, with its result or with DiscoveryError; invalid arguments raise
    ValueError. If only some keys have no answer, get and successors of the DHT raise Unanswered, with the others'
    answers. Implementations return no record that has expired.
    """

    async def declare(
        self,
        uids: Sequence[str],
        endpoint: str,
        ttl: float,
        *,
        metadata: Mapping[str, str] | None = None,
        timeout: float = 5.0,
    ) -> frozenset[str]:
        """Claim or renew uids for endpoint for ttl seconds -> those that this server now owns.

        A uid that another live server owns stays that server's and is missing in the result, which may be Granted. A
        server that wants to keep a uid calls again before ttl has passed.
        """
        unique = tuple(dict.fromkeys(map(check_uid, uids)))
        return await self.claim(Claim(unique, endpoint, ttl, dict(metadata or {}), timeout))

    async def claim(self, claim: Claim) -> frozenset[str]:
        """Do what declare() says; its uids are valid and each is there once. Implementations override this."""
        raise NotImplementedError(f"{type(self).__name__} has no claim()")

    @abc.abstractmethod
    async def withdraw(self, uids: Sequence[str], endpoint: str, *, timeout: float = 5.0) -> None:
        """End the claims of an endpoint at once; uids that it does not own are left alone."""

    @abc.abstractmethod
    async def get(self, uids: Sequence[str], *, timeout: float = 5.0) -> list[ExpertRecord | None]:
        """Return the live record of each uid in their order, None where there is none."""

    @abc.abstractmethod
    async def successors(self, prefixes: Sequence[str], *, timeout: float = 5.0) -> dict[str, frozenset[int]]:
        """Return for each prefix the coordinates that follow it in uids of live experts.

        With "ffn.1.7" and "ffn.1.9" alive: {"ffn": {1}, "ffn.1": {7, 9}}; an unknown prefix has the empty set.
        """

    async def close(self) -> None:  # noqa: B027  (most have nothing to close)
        """Free sockets and tasks; records that were declared stay until they expire."""


def is_uid(uid: object) -> bool:
    """True for a prefix and one coordinate or more, joined by dots."""
    return isinstance(uid, str) and _is_name(uid, _UID) and max(coordinates(uid)) <= MAX_COORDINATE


def check_uid(uid: str) -> str:
    """Return uid if it is valid; ValueError otherwise."""
    if not is_uid(uid):
        raise ValueError(
            f"an expert's uid must look like expert.3 or grid.1.7 (at most {MAX_UID_LENGTH} bytes, coordinates at "
            f"most {MAX_COORDINATE}), but got {uid[:200] if isinstance(uid, str) else uid!r}"
        )
    return uid


def check_prefix(prefix: str) -> str:
    """Return prefix without a dot at its end if a uid can begin with it; ValueError otherwise."""
    bare = prefix.removesuffix(".")
    if not _is_name(bare, _PREFIX):
        raise ValueError(f"a prefix must look like expert or grid.1, but got {prefix[:200]!r}")
    return bare


def _is_name(text: str, grammar: re.Pattern[str]) -> bool:
    """True for printable text of the grammar in Unicode's composed form (NFC), so that equal names are equal bytes."""
    if len(text) > MAX_UID_LENGTH or not grammar.fullmatch(text) or not text.isprintable():
        return False
    # two spellings of one letter would be two keys with one name
    return unicodedata.is_normalized("NFC", text) and len(text.encode()) <= MAX_UID_LENGTH


def coordinates(uid: str) -> tuple[int, ...]:
    """Return (1, 7) for "grid.1.7"."""
    return tuple(int(part) for part in uid.split(".")[1:])


def prefixes_of(uid: str) -> list[tuple[str, int]]:
    """Return every prefix of a uid with the coordinate after it: [("grid", 1), ("grid.1", 7)] for "grid.1.7"."""
    parts = uid.split(".")
    return [(".".join(parts[:n]), int(parts[n])) for n in range(1, len(parts))]


def successors_among(uids: Sequence[str], prefixes: Sequence[str]) -> dict[str, frozenset[int]]:
    """Return the result of Discovery.successors, given all live uids."""
    found: dict[str, set[int]] = {check_prefix(prefix): set() for prefix in prefixes}
    for uid in uids:
        for prefix, coordinate in prefixes_of(uid):
            if prefix in found:
                found[prefix].add(coordinate)
    return {prefix: frozenset(found[check_prefix(prefix)]) for prefix in prefixes}


class StaticList(Discovery):
    """Experts at fixed addresses, {"expert.0": "host:port", ...}, or a directory within one process.

    declare() adds to this object alone; nothing is sent anywhere.
    """

    def __init__(self, endpoints: Mapping[str, str | Sequence[str]] | None = None):
        self._records: dict[str, ExpertRecord] = {}
        for uid, where in (endpoints or {}).items():
            several = (where,) if isinstance(where, str) else tuple(where)
            self._records[check_uid(uid)] = ExpertRecord(uid, several)

    def _live(self) -> dict[str, ExpertRecord]:
        self._records = {uid: record for uid, record in self._records.items() if record.is_live()}
        return self._records

    async def claim(self, claim: Claim) -> frozenset[str]:
        live, granted = self._live(), []
        for uid in claim.uids:
            owner = live.get(uid)
            if owner is None or owner.endpoints[0] == claim.endpoint:
                fence, expires = 1 if owner is None else owner.fence, time.monotonic() + claim.ttl
                live[uid] = ExpertRecord(uid, (claim.endpoint,), expires, fence, claim.metadata)
                granted.append(uid)
        return frozenset(granted)

    async def withdraw(self, uids: Sequence[str], endpoint: str, *, timeout: float = 5.0) -> None:
        for uid in uids:
            record = self._records.get(uid)
            if record is not None and record.endpoints[0] == endpoint:
                del self._records[uid]

    async def get(self, uids: Sequence[str], *, timeout: float = 5.0) -> list[ExpertRecord | None]:
        live = self._live()
        return [live.get(check_uid(uid)) for uid in uids]

    async def successors(self, prefixes: Sequence[str], *, timeout: float = 5.0) -> dict[str, frozenset[int]]:
        return successors_among(list(self._live()), prefixes)


_MAX_ENTRIES = 100_000  # of each of Cached's tables; with more, it starts anew
T = TypeVar("T")


class Cached(Discovery):
    """Remember another discovery's answers for max_age seconds, a record never beyond its own expiry.

    That an expert has no record is remembered too.
    """

    def __init__(self, inner: Discovery, max_age: float = 3.0):
        self.inner, self.max_age = inner, max_age
        self._records: dict[str, tuple[float, ExpertRecord | None]] = {}
        self._successors: dict[str, tuple[float, frozenset[int]]] = {}

    def forget(self, uids: Iterable[str] | None = None) -> None:
        """Drop what is known of some experts; of all, prefixes included, if uids is None."""
        if uids is None:
            self._records.clear()
            self._successors.clear()
        else:
            for uid in uids:
                self._records.pop(uid, None)

    async def claim(self, claim: Claim) -> frozenset[str]:
        self.forget()
        return await self.inner.declare(
            claim.uids, claim.endpoint, claim.ttl, metadata=claim.metadata, timeout=claim.timeout
        )

    async def withdraw(self, uids: Sequence[str], endpoint: str, *, timeout: float = 5.0) -> None:
        self.forget()
        await self.inner.withdraw(uids, endpoint, timeout=timeout)

    async def get(self, uids: Sequence[str], *, timeout: float = 5.0) -> list[ExpertRecord | None]:
        async def ask(missing: list[str]) -> dict[str, ExpertRecord | None]:
            return dict(zip(missing, await self.inner.get(missing, timeout=timeout), strict=True))

        found = await self._answer(self._records, uids, ask)
        records = [found[uid] for uid in uids]
        return [record if record is not None and record.is_live() else None for record in records]

    async def successors(self, prefixes: Sequence[str], *, timeout: float = 5.0) -> dict[str, frozenset[int]]:
        return await self._answer(
            self._successors, prefixes, lambda missing: self.inner.successors(missing, timeout=timeout)
        )

    async def _answer(
        self,
        known: dict[str, tuple[float, T]],
        keys: Sequence[str],
        ask: Callable[[list[str]], Awaitable[dict[str, T]]],
    ) -> dict[str, T]:
        """Return the answers for all keys; ask for missing and old ones. Unanswered, with the others, if some fail."""
        begin = time.monotonic()
        if len(known) > _MAX_ENTRIES:
            known.clear()
        oldest = begin - self.max_age
        # found first: while ask() waits, forget() may drop answers that were known here
        found = {key: known[key][1] for key in keys if key in known and known[key][0] >= oldest}
        missing = [key for key in dict.fromkeys(keys) if key not in found]
        late: Unanswered | None = None
        new: Mapping[str, T] = {}
        if missing:
            try:
                new = await ask(missing)
            except Unanswered as error:
                late, new = error, error.found
        # dated from before the question: an answer may be as old as that
        known.update((key, (begin, answer)) for key, answer in new.items())
        found |= new
        if late is not None:
            raise Unanswered(str(late), found, late.missing)
        return found

    async def close(self) -> None:
        await self.inner.close()


_RANGE = re.compile(r"\[(\d{1,10}):(\d{1,10})\]")


class Pattern:
    """The uids that a pattern stands for: "grid.[0:4].7" is grid.0.7 to grid.3.7. ValueError for an invalid one.

    The uids are numbered from 0, with their coordinates as digits, so a sample of a huge grid needs no list of it.
    """

    def __init__(self, text: str):
        prefix, *parts = text.split(".")
        self.text, self._prefix = text, prefix
        self._axes = []
        for part in parts:
            match = _RANGE.fullmatch(part)
            if match is None and not part.isdecimal():
                raise ValueError(
                    f"{part!r} in the pattern {text!r} must be a number or a range such as [0:5]"
                )
            begin, end = (int(match[1]), int(match[2])) if match else (int(part), int(part) + 1)
            if end > MAX_COORDINATE + 1:
                raise ValueError(f"coordinates must be at most {MAX_COORDINATE}, but the pattern is {text!r}")
            self._axes.append(range(begin, end))
        self.size = math.prod(map(len, self._axes))
        if self.size == 0 or not parts:
            raise ValueError(
                f"the pattern {text!r} holds no uid: write expert.[0:5] for expert.0 to expert.4"
            )
        check_uid(self._uid(0))

    def __iter__(self) -> Iterator[str]:
        return map(self._uid, range(self.size))

    def sample(self, count: int, rng: random.Random) -> list[str]:
        """Return `count` different uids in random order, or all if there are fewer."""
        if self.size <= 4 * count:
            uids = list(self)
            rng.shuffle(uids)
            return uids[:count]
        return [self._uid(place) for place in rng.sample(range(self.size), count)]

    def _uid(self, place: int) -> str:
        parts = []
        for axis in reversed(self._axes):  # the last coordinate is the lowest digit
            place, index = divmod(place, len(axis))
            parts.append(str(axis[index]))
        return ".".join([self._prefix, *reversed(parts)])
