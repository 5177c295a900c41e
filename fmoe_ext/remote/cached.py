"""Cached: what discovery said a moment ago, without asking again."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from fmoe_ext.remote.discovery import Discovery, ExpertRecord

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
        missing = self._missing(self._records, uids)
        if missing:
            for uid, record in zip(missing, await self.inner.get(missing, timeout=timeout), strict=True):
                self._records[uid] = time.monotonic(), record
        found = [self._records[uid][1] for uid in uids]
        return [record if record is not None and record.is_live() else None for record in found]

    async def successors(self, prefixes: Sequence[str], *, timeout: float = 5.0) -> dict[str, frozenset[int]]:
        missing = self._missing(self._successors, prefixes)
        if missing:
            now = time.monotonic()
            for prefix, places in (await self.inner.successors(missing, timeout=timeout)).items():
                self._successors[prefix] = now, places
        return {prefix: self._successors[prefix][1] for prefix in prefixes}

    async def close(self) -> None:
        await self.inner.close()

    def _missing(self, known: dict[str, tuple[float, T]], keys: Sequence[str]) -> list[str]:
        if len(known) > MAX_ENTRIES:
            known.clear()
        oldest = time.monotonic() - self.max_age
        return [key for key in dict.fromkeys(keys) if key not in known or known[key][0] < oldest]
