"""Registry: a server's lease in etcd, its transactions, and its view of the keys. Site: what Leader and Replica need.

Four rules keep a server from acting on what is no longer true.
    lease   All that it claims (its entry, leader's keys, offers) lies under one lease and vanishes with it. It counts
            the lease from before it asked for the renewal, so it stops leading before etcd lets another server lead.
    guards  A write to a leader's key or to a record succeeds only at the revision (of one of them) on which it was
            decided. So a late write of a former leader changes nothing.
    lost    A transaction may have been done although no answer came. So a leader whose write is not answered ends its
            term, and a server gives back any leader's key in its name that it knows nothing of (`abandon`).
    view    The watch and the answers of transactions both bring keys, in no order; an older revision of a key does not
            replace a newer one. A transaction reads back what it has written, so the view is never older than that. A
            store whose revision shrinks was restored from a backup or replaced: `num_returns` counts that, and
            everything is read anew.
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
from fmoe_ext.remote.server.fair_queue import ByteBudget
from fmoe_ext.remote.server.options import Replication
from fmoe_ext.remote.server.server import Server

T = TypeVar("T")
log = logging.getLogger("fmoe_ext.remote")
_RETRY_SECONDS = 0.5  # between two attempts to reach etcd


class _View:
    """etcd's keys as this server has last seen them."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self._uids: dict[str, set[str]] = {}  # uid: its keys; servers' keys are in entries alone

    def leader(self, uid: str) -> tuple[keys.Leader | None, int]:
        """Return the leader and the create revision of its key; (None, 0) without a key, (None, n) for a bad value."""
        entry = self.entries.get(keys.leader_key(uid))
        return (None, 0) if entry is None else (keys.load(keys.Leader, entry.value), entry.create_revision)

    def members(self, uid: str) -> tuple[keys.Members | None, int]:
        """Return the record and the revision of its key; (None, 0) if the expert has never been led."""
        entry = self.entries.get(keys.members_key(uid))
        return (None, 0) if entry is None else (keys.load(keys.Members, entry.value), entry.mod_revision)

    def servers(self) -> dict[str, keys.ServerEntry]:
        """Return the servers that live, by name."""
        found = (
            (k, keys.load(keys.ServerEntry, e.value))
            for k, e in self.entries.items()
            if k.startswith(keys.SERVERS)
        )
        return {key.removeprefix(keys.SERVERS): server for key, server in found if server is not None}

    def offers(self, uid: str) -> dict[str, keys.Offer]:
        """Return the offers of servers for an expert without a leader, by server."""
        prefix = keys.candidate_key(uid, "")
        mine = (key for key in self._uids.get(uid, ()) if key.startswith(prefix))
        found = ((key, keys.load(keys.Offer, self.entries[key].value)) for key in mine)
        return {key.removeprefix(prefix): offer for key, offer in found if offer is not None}

    def uids(self) -> list[str]:
        """Return every expert that has a record: that was ever led."""
        return [uid for uid in self._uids if keys.members_key(uid) in self.entries]

    def clear(self) -> None:
        self.entries.clear()
        self._uids.clear()

    def replace(self, uid: str, entries: Sequence[Entry]) -> None:
        """Replace all keys of an expert by those in an answer."""
        for key in self._uids.get(uid, set()) - {entry.key for entry in entries}:
            self._drop(key)
        for entry in entries:
            self.take(entry)

    def take(self, entry: Entry, is_deletion: bool = False) -> None:
        known = self.entries.get(entry.key)
        if known is not None and known.mod_revision > entry.mod_revision:
            return  # the watch is behind a transaction
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
    """A server's lease in etcd, its transactions, and its view.

    changed(): called when a reading or the watch has changed the view, and when the lease has ended or was not renewed.
    """

    def __init__(self, store: EtcdClient, server: str, ttl: float):
        self.store, self.server = store, server
        self.ttl = ttl  # seconds without contact to etcd after which everything under the lease is gone
        self.changed: Callable[[], None] = lambda: None
        self.view = _View()
        self.num_returns = 0  # how often etcd went back: it was restored from a backup, or replaced
        self._revision = 0  # the largest in an answer
        self._cluster = 0  # id of the etcd cluster in the last answer; 0: none yet
        self.lease = 0  # the present one; a Leader that began under an earlier one leads no more
        self._lease_ends = 0.0  # by _clock
        self._entry = b""  # of this server, as it was last written
        self._tasks: list[asyncio.Task[None]] = []
        self._stale = asyncio.Event()  # set: the view must be read anew
        self._clock: Callable[[], float] = lambda: 0.0

    async def start(self, entry: keys.ServerEntry) -> None:
        """Get a lease, register the server under it, read all keys, and begin to watch them."""
        # a monotonic clock: setting the wall clock must make no lease longer
        self._clock = asyncio.get_running_loop().time
        self._entry = keys.dump(entry)
        await self._new_lease()
        revision = await self._read_all()
        self._tasks = [asyncio.create_task(self._keep_lease()), asyncio.create_task(self._watch(revision))]

    async def stop(self) -> None:
        """Give the lease back, so that the other servers see at once that this one is gone."""
        for task in self._tasks:
            task.cancel()
        self._lease_ends = 0.0
        with contextlib.suppress(DiscoveryError):
            await self.store.revoke(self.lease, timeout=2.0)
        await self.store.close()

    def has_lease(self) -> bool:
        """True while the lease holds, by this server's count, which ends before etcd's."""
        return self._clock() < self._lease_ends

    # ---------------------------------------------------------------- transactions

    async def lead(self, uid: str, me: keys.Leader, members: keys.Members, revision: int) -> int:
        """Become the leader if none leads and the record is as at `revision` -> create revision of the key, else 0."""
        leader, record = keys.leader_key(uid), keys.members_key(uid)
        as_known = [etcd.created_at(leader, 0), etcd.changed_at(record, revision)]
        puts = [etcd.put(leader, keys.dump(me), self.lease), etcd.put(record, keys.dump(members))]
        answer = await self._transact(uid, as_known, puts)
        return answer.revision if answer.succeeded else 0

    async def set_members(self, uid: str, guard: int, members: keys.Members) -> bool:
        """Write the record; False if the leader's key is not the one with create revision `guard`."""
        own = etcd.created_at(keys.leader_key(uid), guard)
        put = etcd.put(keys.members_key(uid), keys.dump(members))
        return (await self._transact(uid, [own], [put])).succeeded

    async def resign(self, uid: str, guard: int, members: keys.Members) -> bool:
        """Delete this leader's key and write the record: who stays a member, and who should lead next."""
        return await self._leave_to(uid, etcd.created_at(keys.leader_key(uid), guard), members)

    async def void(self, uid: str, members: keys.Members, revision: int) -> bool:
        """Delete any leader's key and write another record, if the record is as at `revision`."""
        return await self._leave_to(uid, etcd.changed_at(keys.members_key(uid), revision), members)

    async def _leave_to(self, uid: str, condition: Any, members: keys.Members) -> bool:
        put = etcd.put(keys.members_key(uid), keys.dump(members))
        return (await self._transact(uid, [condition], [etcd.delete(keys.leader_key(uid)), put])).succeeded

    async def abandon(self, uid: str, guard: int) -> None:
        """Delete this leader's key and leave the record as it is."""
        leader = keys.leader_key(uid)
        await self._transact(uid, [etcd.created_at(leader, guard)], [etcd.delete(leader)])

    async def offer(self, uid: str, offer: keys.Offer) -> None:
        """Offer the state that this server has of an expert without a leader."""
        key = keys.candidate_key(uid, self.server)
        await self._transact(uid, [], [etcd.put(key, keys.dump(offer), self.lease)])

    async def announce(self, entry: keys.ServerEntry) -> None:
        """Write the entry of this server if it has changed, or if etcd has lost it."""
        value = keys.dump(entry)
        if value != self._entry or keys.SERVERS + self.server not in self.view.entries:
            self._entry = value
            await self._ask(success=[etcd.put(keys.SERVERS + self.server, value, self.lease)])

    async def _transact(self, uid: str, compare: Sequence[Any], success: Sequence[Any]) -> Answer:
        """Run a transaction on an expert's keys and read them all with it, so that the view shows what was written."""
        again = [etcd.read(f"{keys.EXPERTS}{uid}/", is_prefix=True)]
        answer = await self._ask(compare, [*success, *again], again)
        self.view.replace(uid, answer.ranges[-1])
        return answer

    async def _ask(
        self, compare: Sequence[Any] = (), success: Sequence[Any] = (), failure: Sequence[Any] = ()
    ) -> Answer:
        """Run a transaction, and notice if etcd has gone back to an earlier revision."""
        before = self._revision
        # half of a lease, so that a leader that waits for etcd in vain still steps down before its lease is over
        answer = await self.store.transact(compare, success, failure, timeout=self.ttl / 2)
        is_another = self._cluster not in (0, answer.cluster)
        # etcd's revision only grows; a smaller one is of a backup, and what was written since is gone. `before` is from
        # before the question, for answers may overtake each other.
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
        """Follow the changes of all keys; read everything anew when the stream ends, or when _stale is set."""
        while True:
            reading = asyncio.create_task(self._follow(revision))
            stale = asyncio.create_task(self._stale.wait())
            try:
                await asyncio.wait((reading, stale), return_when=asyncio.FIRST_COMPLETED)
            finally:
                reading.cancel()
                stale.cancel()
            if not self._stale.is_set():
                await asyncio.sleep(_RETRY_SECONDS)
            try:
                revision = await self._read_all()
            except DiscoveryError:
                await asyncio.sleep(_RETRY_SECONDS)

    async def _follow(self, revision: int) -> None:
        try:
            async for events in self.store.watch(keys.ROOT, revision + 1):
                for event in events:
                    self.view.take(event.entry, event.is_deletion)
                self.changed()
        except DiscoveryError as error:
            log.warning("%s; reading everything anew", error)

    async def _new_lease(self) -> None:
        # from before the request: this server's count must end before etcd's
        begin = self._clock()
        self.lease = await self.store.grant(self.ttl)
        await self._ask(success=[etcd.put(keys.SERVERS + self.server, self._entry, self.lease)])
        self._lease_ends = begin + self.ttl

    async def _keep_lease(self) -> None:
        """Renew the lease for ever, or get a new one when it has ended."""
        was_reached = True
        while True:
            # four times in a lease: one renewal may be lost and one late
            await asyncio.sleep(self.ttl / 4)
            begin = self._clock()
            try:
                returns = self.num_returns
                if await self.store.keep_alive(self.lease, timeout=self.ttl / 2):
                    # a transaction, because only its answer shows whether etcd went back: then the lease counts as over
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
    """The name, options and connections of a server, which its Leaders and Replicas share."""

    name: str  # new after every start
    options: Replication
    registry: Registry
    peers: Caller  # calls other servers
    server: Server
    early: ByteBudget  # of updates that wait for copies, by expert

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def on_thread(self, function: Callable[[], T]) -> "asyncio.Future[T]":
        """Run function() on the thread that computes, after everything that was given to it before."""
        return asyncio.wrap_future(self.server.compute.call(function))
