"""Registry: a server's lease in etcd, its transactions there, and what it has seen; Site: a server and its ways out.

Four rules keep a server from acting on what is no longer true.
    lease   All that it claims (its entry, a leader's key, offers) lies under one lease and vanishes with it. It counts
            the lease from before it asked for the renewal, so it stops leading before etcd lets another server lead.
    guards  A write compares the revision on which it was decided: of the leader's key, or of the record. A write of a
            former leader that comes late changes nothing.
    lost    A transaction may have been done although no answer came. A leader whose write is not answered leads no
            more, and a server gives back a leader's key in its name that it knows nothing of (`abandon`).
    view    An older revision of a key never replaces a newer one, whether the watch or an answer brings it, and a
            transaction reads back what it has written. A store whose revision shrinks was restored from a backup or
            replaced: `num_returns` counts that, and everything is read anew.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fmoe_ext.remote.client.caller import Caller
from fmoe_ext.remote.discovery import DiscoveryError
from fmoe_ext.remote.etcd import client as etcd
from fmoe_ext.remote.etcd import keys
from fmoe_ext.remote.etcd.client import Answer, Entry, EtcdClient
from fmoe_ext.remote.server.options import Replication
from fmoe_ext.remote.server.server import Server

T = TypeVar("T")
log = logging.getLogger("fmoe_ext.remote")
RETRY_SECONDS = 0.5  # between two attempts to reach etcd


class _View:
    """etcd's keys as this server has seen them last. An older revision of a key never replaces a newer one."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self._uids: dict[str, set[str]] = {}  # uid: its keys

    def leader(self, uid: str) -> tuple[keys.Leader | None, int]:
        """Leader, and the create revision of its key; (None, 0) without one."""
        entry = self.entries.get(keys.leader_key(uid))
        return (None, 0) if entry is None else (keys.load(keys.Leader, entry.value), entry.create_revision)

    def members(self, uid: str) -> tuple[keys.Members | None, int]:
        """The record, and the revision of that key; (None, 0) if the expert has never been."""
        entry = self.entries.get(keys.members_key(uid))
        return (None, 0) if entry is None else (keys.load(keys.Members, entry.value), entry.mod_revision)

    def servers(self) -> dict[str, keys.ServerEntry]:
        """The servers that live."""
        found = (
            (k, keys.load(keys.ServerEntry, e.value))
            for k, e in self.entries.items()
            if k.startswith(keys.SERVERS)
        )
        return {key.removeprefix(keys.SERVERS): server for key, server in found if server is not None}

    def offers(self, uid: str) -> dict[str, keys.Offer]:
        """Offers of servers for an expert without a leader."""
        prefix = keys.candidate_key(uid, "")
        mine = (key for key in self._uids.get(uid, ()) if key.startswith(prefix))
        found = ((key, keys.load(keys.Offer, self.entries[key].value)) for key in mine)
        return {key.removeprefix(prefix): offer for key, offer in found if offer is not None}

    def uids(self) -> list[str]:
        """Every expert that has ever been."""
        return [uid for uid in self._uids if keys.members_key(uid) in self.entries]

    def clear(self) -> None:
        self.entries.clear()
        self._uids.clear()

    def replace(self, uid: str, entries: Sequence[Entry]) -> None:
        """All keys of an expert, as an answer has them."""
        for key in self._uids.get(uid, set()) - {entry.key for entry in entries}:
            self._drop(key)
        for entry in entries:
            self.take(entry)

    def take(self, entry: Entry, is_deletion: bool = False) -> None:
        known = self.entries.get(entry.key)
        if known is not None and known.mod_revision > entry.mod_revision:
            return
        if is_deletion:
            self._drop(entry.key)
            return
        self.entries[entry.key] = entry
        if uid := keys.uid_of(entry.key):
            self._uids.setdefault(uid, set()).add(entry.key)

    def _drop(self, key: str) -> None:
        self.entries.pop(key, None)
        if (uid := keys.uid_of(key)) in self._uids:
            self._uids[uid].discard(key)


class Registry:
    """One server's lease in etcd, its transactions there, and its view. changed() is called when the view changes."""

    def __init__(self, store: EtcdClient, server: str, ttl: float):
        self.store, self.server = store, server
        self.ttl = ttl  # seconds without contact to etcd, and all that is under the lease is gone
        self.changed: Callable[[], None] = lambda: None
        self.view = _View()
        self.num_returns = 0  # how often the registry went back: it was restored from a backup, or replaced
        self._revision = 0  # the largest in an answer
        self._cluster = 0
        self.lease = 0  # the present one: who became leader under an earlier one leads no more
        self._lease_ends = 0.0
        self._entry = b""
        self._tasks: list[asyncio.Task[None]] = []
        self._stale = asyncio.Event()  # the view must be read anew
        self._clock: Callable[[], float] = lambda: 0.0

    async def start(self, entry: keys.ServerEntry) -> None:
        """Registers the server and begins to watch."""
        # it only counts: who sets the wall clock makes no lease longer
        self._clock = asyncio.get_running_loop().time
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
            await self.store.revoke(self.lease, timeout=2.0)
        await self.store.close()

    def has_lease(self) -> bool:
        """True if etcd has this server's lease, by its own, more careful count."""
        return self._clock() < self._lease_ends

    # ---------------------------------------------------------------- what is changed

    async def lead(self, uid: str, me: keys.Leader, members: keys.Members, revision: int) -> int:
        """Becomes the leader if nobody leads and the record is as at revision -> revision of the key, 0 if not."""
        leader, record = keys.leader_key(uid), keys.members_key(uid)
        as_known = [etcd.created_at(leader, 0), etcd.changed_at(record, revision)]
        puts = [etcd.put(leader, keys.dump(me), self.lease), etcd.put(record, keys.dump(members))]
        answer = await self._transact(uid, as_known, puts)
        return answer.revision if answer.succeeded else 0

    async def set_members(self, uid: str, guard: int, members: keys.Members) -> bool:
        """Writes the record; False if another server leads."""
        own = etcd.created_at(keys.leader_key(uid), guard)
        put = etcd.put(keys.members_key(uid), keys.dump(members))
        return (await self._transact(uid, [own], [put])).succeeded

    async def resign(self, uid: str, guard: int, members: keys.Members) -> bool:
        """Leads no more; the members that stay, and who of them should lead, are written with it."""
        return await self._leave_to(uid, etcd.created_at(keys.leader_key(uid), guard), members)

    async def void(self, uid: str, members: keys.Members, revision: int) -> bool:
        """Nobody leads, and the record is another one, if it is as at revision."""
        return await self._leave_to(uid, etcd.changed_at(keys.members_key(uid), revision), members)

    async def _leave_to(self, uid: str, condition: Any, members: keys.Members) -> bool:
        put = etcd.put(keys.members_key(uid), keys.dump(members))
        return (await self._transact(uid, [condition], [etcd.delete(keys.leader_key(uid)), put])).succeeded

    async def abandon(self, uid: str, guard: int) -> None:
        """Leads no more, and leaves the record as it is."""
        leader = keys.leader_key(uid)
        await self._transact(uid, [etcd.created_at(leader, guard)], [etcd.delete(leader)])

    async def offer(self, uid: str, offer: keys.Offer) -> None:
        """Says which state this server has."""
        key = keys.candidate_key(uid, self.server)
        await self._transact(uid, [], [etcd.put(key, keys.dump(offer), self.lease)])

    async def announce(self, entry: keys.ServerEntry) -> None:
        """Keeps the entry of this server in etcd, also when etcd has lost it."""
        value = keys.dump(entry)
        if value != self._entry or keys.SERVERS + self.server not in self.view.entries:
            self._entry = value
            await self._ask(success=[etcd.put(keys.SERVERS + self.server, value, self.lease)])

    async def _transact(self, uid: str, compare: Sequence[Any], success: Sequence[Any]) -> Answer:
        """A transaction; what it was about is read with it, so that the view is never older than one's own writing."""
        again = [etcd.read(f"{keys.EXPERTS}{uid}/", is_prefix=True)]
        answer = await self._ask(compare, [*success, *again], again)
        self.view.replace(uid, answer.ranges[-1])
        return answer

    async def _ask(
        self, compare: Sequence[Any] = (), success: Sequence[Any] = (), failure: Sequence[Any] = ()
    ) -> Answer:
        """A transaction that notices when the registry has gone back."""
        before = self._revision
        # half of a lease, so that a server that waits for etcd in vain can still step down in time
        answer = await self.store.transact(compare, success, failure, timeout=self.ttl / 2)
        is_another = self._cluster not in (0, answer.cluster)
        # etcd's revision only grows: one that shrinks comes from a backup, and what was written since is gone
        if answer.revision < before or is_another:
            if self._revision >= before:  # not noticed by another call meanwhile
                log.error(
                    "etcd went back from revision %d to %d: a new epoch begins", before, answer.revision
                )
                self._revision = answer.revision
                self.num_returns += 1
            self.view.clear()
            self._stale.set()
        self._revision, self._cluster = max(self._revision, answer.revision), answer.cluster
        return answer

    # ---------------------------------------------------------------- watching

    async def _read_all(self) -> int:
        answer = await self._ask(success=[etcd.read(keys.ROOT, is_prefix=True)])
        self._stale.clear()
        self.view.clear()
        for entry in answer.ranges[0]:
            self.view.take(entry)
        self.changed()
        return answer.revision

    async def _watch(self, revision: int) -> None:
        """Follows the changes; reads everything anew when the stream of them ends, or may have left some out."""
        while True:
            reading = asyncio.create_task(self._follow(revision))
            stale = asyncio.create_task(self._stale.wait())
            try:
                await asyncio.wait((reading, stale), return_when=asyncio.FIRST_COMPLETED)
            finally:
                reading.cancel()
                stale.cancel()
            if not self._stale.is_set():
                await asyncio.sleep(RETRY_SECONDS)
            try:
                revision = await self._read_all()
            except DiscoveryError:
                await asyncio.sleep(RETRY_SECONDS)

    async def _follow(self, revision: int) -> None:
        try:
            async for events in self.store.watch(keys.ROOT, revision + 1):
                for event in events:
                    self.view.take(event.entry, event.is_deletion)
                self.changed()
        except DiscoveryError as error:
            log.warning("%s; reading everything anew", error)

    async def _new_lease(self) -> None:
        # before the request: this server must not believe in its lease for longer than etcd does
        begin = self._clock()
        self.lease = await self.store.grant(self.ttl)
        await self._ask(success=[etcd.put(keys.SERVERS + self.server, self._entry, self.lease)])
        self._lease_ends = begin + self.ttl

    async def _keep_lease(self) -> None:
        """Renews; the transaction beside it is what notices a registry that went back."""
        was_reached = True
        while True:
            # four times a lease: one renewal may be lost and one late
            await asyncio.sleep(self.ttl / 4)
            begin = self._clock()
            try:
                returns = self.num_returns
                if await self.store.keep_alive(self.lease, timeout=self.ttl / 2):
                    await self._ask(success=[etcd.read(keys.SERVERS + self.server)])
                    if not was_reached:  # the stream of changes may have stopped as well
                        was_reached = True
                        self._stale.set()
                    if returns == self.num_returns:
                        self._lease_ends = max(self._lease_ends, begin + self.ttl)
                        continue
                log.warning("the lease of this server has ended; a new one begins")
                self._lease_ends = 0.0
                self.changed()
                await self._new_lease()
                await self._read_all()
            except DiscoveryError as error:
                log.warning("the lease could not be renewed: %s", error)
                was_reached = False
                self.changed()


@dataclass(frozen=True)
class Site:
    """This server, and its ways to the world."""

    name: str  # new after every start
    options: Replication
    registry: Registry
    peers: Caller  # of other servers
    server: Server

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def on_thread(self, function: Callable[[], T]) -> "asyncio.Future[T]":
        """function() on the thread that computes, after all that it was given before."""
        return asyncio.wrap_future(self.server.compute.call(function))
