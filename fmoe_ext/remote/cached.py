"""Cached: what discovery said a moment ago, without asking again."""

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from fmoe_ext.remote.discovery import Discovery, ExpertRecord, Unanswered

MAX_ENTRIES = 100_000
T = TypeVar("T")


class Cached(Discovery):
    """Answers are believed for max_age seconds, a record never longer than itself says."""

    def __init__(self, inner: Discovery, max_age: float = 3.0):
        self.inner, self.max_age = inner, max_age
        self._records: dict[str, tuple[float, ExpertRecord | None]] = {}
        self._successors: dict[str, tuple[float, frozenset[int]]] = {}

    def forget(self, uids: Iterable[str] | None = None) -> None:
        """Drops what is known of some experts, of all if None."""
        if uids is None:
            self._records.clear()
            self._successors.clear()
        else:
            for uid in uids:
                self._records.pop(uid, None)

    async def declare(
        self,
        uids: Sequence[str],
        endpoint: str,
        ttl: float,
        *,
        metadata: Mapping[str, str] | None = None,
        timeout: float = 5.0,
    ) -> frozenset[str]:
        self.forget()
        return await self.inner.declare(uids, endpoint, ttl, metadata=metadata, timeout=timeout)

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
        async def ask(missing: list[str]) -> dict[str, frozenset[int]]:
            return await self.inner.successors(missing, timeout=timeout)

        return await self._answer(self._successors, prefixes, ask)

    async def _answer(
        self,
        known: dict[str, tuple[float, T]],
        keys: Sequence[str],
        ask: Callable[[list[str]], Awaitable[dict[str, T]]],
    ) -> dict[str, T]:
        """The answers for all keys, new ones fetched; Unanswered, with those that are known, if some do not come."""
        begin, missing = time.monotonic(), self._missing(known, keys)
        late: Unanswered | None = None
        new: Mapping[str, T] = {}
        if missing:
            try:
                new = await ask(missing)
            except Unanswered as error:
                late, new = error, error.found
        known.update((key, (begin, answer)) for key, answer in new.items())
        unanswered = set(late.missing if late else ())
        found = {key: known[key][1] for key in keys if key not in unanswered}
        if late is not None:
            raise Unanswered(str(late), found, late.missing)
        return found

    async def close(self) -> None:
        await self.inner.close()

    def _missing(self, known: dict[str, tuple[float, T]], keys: Sequence[str]) -> list[str]:
        if len(known) > MAX_ENTRIES:
            known.clear()
        oldest = time.monotonic() - self.max_age
        return [key for key in dict.fromkeys(keys) if key not in known or known[key][0] < oldest]
