"""Registry: what etcd says about servers, leaders and members, watched; and the transactions that change it."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from fmoe_ext.remote.discovery import DiscoveryError
from fmoe_ext.remote.etcd import client as etcd
from fmoe_ext.remote.etcd import keys
from fmoe_ext.remote.etcd.client import Entry, EtcdClient, Event

log = logging.getLogger("fmoe_ext.remote")
RETRY_SECONDS = 0.5


class Registry:
    """One server's view. changed(uid) is called when a key of an expert changes, changed(None) for servers.

    The lease: `ttl` seconds without contact to etcd and all that is under it is gone. has_lease() is this server's
    own, earlier, opinion: it counts from before the last renewal was asked for.
    """

    def __init__(self, endpoints: str, server: str, ttl: float):
        self.client = EtcdClient(endpoints)
        self.server, self.ttl = server, ttl
        self.changed: Callable[[str | None], None] = lambda uid: None
        self.entries: dict[str, Entry] = {}
        self._uids: dict[str, set[str]] = {}  # uid: its keys
        self._lease = 0
        self._lease_ends = 0.0
        self._entry = b""
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, entry: keys.ServerEntry) -> None:
        """Registers the server and begins to watch."""
        self._entry = keys.dump(entry)
        await self._new_lease()
        revision = await self._read_all()
        self._tasks = [asyncio.create_task(self._keep_lease()), asyncio.create_task(self._watch(revision))]

    async def stop(self) -> None:
        """Gives the lease back: the world sees at once that this server is gone."""
        for task in self._tasks:
            task.cancel()
        self._lease_ends = 0.0
        with contextlib.suppress(DiscoveryError):
            await self.client.revoke(self._lease, timeout=2.0)
        await self.client.close()

    def has_lease(self) -> bool:
        return time.monotonic() < self._lease_ends

    # ---------------------------------------------------------------- what is known

    def leader(self, uid: str) -> tuple[keys.Leader | None, int]:
        """Who leads, and the fencing token; (None, 0) if nobody does."""
        entry = self.entries.get(keys.leader_key(uid))
        return (None, 0) if entry is None else (keys.load_leader(entry.value), entry.create_revision)

    def members(self, uid: str) -> tuple[keys.Members | None, int]:
        """The members, and the revision of that key; (None, 0) if the expert has never been."""
        entry = self.entries.get(keys.members_key(uid))
        return (None, 0) if entry is None else (keys.load_members(entry.value), entry.mod_revision)

    def servers(self) -> dict[str, keys.ServerEntry]:
        """The servers that live."""
        found = {
            key.removeprefix(keys.SERVERS): keys.load_server(entry.value)
            for key, entry in list(self.entries.items())
            if key.startswith(keys.SERVERS)
        }
        return {server: entry for server, entry in found.items() if entry is not None}

    def candidates(self, uid: str) -> dict[str, int]:
        """Versions that servers offer of an expert without members."""
        prefix = keys.candidate_key(uid, "")
        return {
            key.removeprefix(prefix): int(self.entries[key].value)
            for key in self._uids.get(uid, ())
            if key.startswith(prefix) and self.entries[key].value.isdigit()
        }

    def uids(self) -> list[str]:
        """Every expert that has ever been."""
        return [uid for uid in self._uids if keys.members_key(uid) in self.entries]

    # ---------------------------------------------------------------- what is changed

    async def lead(self, uid: str, me: keys.Leader, members: keys.Members, revision: int) -> int:
        """Becomes the leader if nobody leads and the members are as at revision -> the fencing token, 0 if not."""
        answer = await self._transact(
            uid,
            [
                etcd.created_at(keys.leader_key(uid), 0),
                etcd.changed_at(keys.members_key(uid), revision),
            ],
            [
                etcd.put(keys.leader_key(uid), keys.dump(me), self._lease),
                etcd.put(keys.members_key(uid), keys.dump(members)),
            ],
        )
        return answer.revision if answer.succeeded else 0

    async def set_members(self, uid: str, fence: int, members: keys.Members) -> bool:
        """Whether the members are these now; False if somebody else leads."""
        answer = await self._transact(
            uid,
            [etcd.created_at(keys.leader_key(uid), fence)],
            [etcd.put(keys.members_key(uid), keys.dump(members))],
        )
        return answer.succeeded

    async def resign(self, uid: str, fence: int, members: keys.Members) -> bool:
        """Leads no more; the members that stay, and who of them should lead, are written with it."""
        answer = await self._transact(
            uid,
            [etcd.created_at(keys.leader_key(uid), fence)],
            [
                etcd.delete(keys.leader_key(uid)),
                etcd.put(keys.members_key(uid), keys.dump(members)),
            ],
        )
        return answer.succeeded

    async def abandon(self, uid: str, fence: int) -> None:
        """Leads no more, and leaves the members as they are."""
        await self._transact(
            uid, [etcd.created_at(keys.leader_key(uid), fence)], [etcd.delete(keys.leader_key(uid))]
        )

    async def offer(self, uid: str, version: int) -> None:
        """Says that this server has some version of an expert."""
        key = keys.candidate_key(uid, self.server)
        await self._transact(uid, [], [etcd.put(key, str(version).encode(), self._lease)])

    async def announce(self, entry: keys.ServerEntry) -> None:
        """Tells how many experts this server has."""
        value = keys.dump(entry)
        if value != self._entry:
            self._entry = value
            await self._transact(None, [], [etcd.put(keys.SERVERS + self.server, value, self._lease)])

    async def _transact(
        self, uid: str | None, compare: Sequence[bytes], success: Sequence[bytes]
    ) -> etcd.Answer:
        """A transaction; what it was about is read with it, so that the view is never older than one's own writing."""
        again = [etcd.read(f"{keys.EXPERTS}{uid}/", is_prefix=True)] if uid else []
        answer = await self.client.transact(compare, [*success, *again], again, timeout=self.ttl / 2)
        if uid:
            self._replace(uid, answer.ranges[-1])
        return answer

    # ---------------------------------------------------------------- the view

    def _replace(self, uid: str, entries: Sequence[Entry]) -> None:
        given = {entry.key for entry in entries}
        for key in list(self._uids.get(uid, ())):
            if key not in given:
                self._drop(key)
        for entry in entries:
            self._take(entry)

    def _take(self, entry: Entry) -> None:
        known = self.entries.get(entry.key)
        if known is None or known.mod_revision <= entry.mod_revision:
            self.entries[entry.key] = entry
            if uid := keys.uid_of(entry.key):
                self._uids.setdefault(uid, set()).add(entry.key)

    def _drop(self, key: str) -> None:
        self.entries.pop(key, None)
        if (uid := keys.uid_of(key)) in self._uids:
            self._uids[uid].discard(key)

    async def _read_all(self) -> int:
        entries, revision = await self.client.read(keys.ROOT, is_prefix=True)
        self.entries.clear()
        self._uids.clear()
        for entry in entries:
            self._take(entry)
        self.changed(None)
        return revision

    async def _watch(self, revision: int) -> None:
        while True:
            try:
                async for events in self.client.watch(keys.ROOT, revision + 1):
                    self._take_events(events)
            except DiscoveryError as error:
                log.warning("%s; reading everything anew", error)
            await asyncio.sleep(RETRY_SECONDS)
            with contextlib.suppress(DiscoveryError):
                revision = await self._read_all()

    def _take_events(self, events: Sequence[Event]) -> None:
        for event in events:
            key, known = event.entry.key, self.entries.get(event.entry.key)
            if not event.is_deletion:
                self._take(event.entry)
            elif known is not None and known.mod_revision <= event.entry.mod_revision:
                self._drop(key)
        for uid in {keys.uid_of(event.entry.key) for event in events}:
            self.changed(uid)

    async def _new_lease(self) -> None:
        begin = time.monotonic()
        self._lease = await self.client.grant(self.ttl)
        await self.client.transact(success=[etcd.put(keys.SERVERS + self.server, self._entry, self._lease)])
        self._lease_ends = begin + self.ttl

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(self.ttl / 4)
            begin = time.monotonic()
            try:
                if await self.client.keep_alive(self._lease, timeout=self.ttl / 2):
                    self._lease_ends = begin + self.ttl
                    continue
                log.warning("the lease of this server has ended; a new one begins")
                self._lease_ends = 0.0
                self.changed(None)
                await self._new_lease()
                await self._read_all()
            except DiscoveryError as error:
                log.warning("the lease could not be renewed: %s", error)
                self.changed(None)
