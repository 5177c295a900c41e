"""_View: what a server has seen of etcd; Registry: its lease and transactions there; Site: a server and its ways out.

Three things keep a server from acting on what is so no longer.
    lease   All that it claims (its entry, a leader's key, offers) lies under one lease and vanishes with it. It counts
            the lease from before it asked for the renewal, so it stops leading before etcd lets another server lead.
    guards  A write compares the revision on which it was decided: of the leader's key, or of the record. A write of a
            former leader that comes late changes nothing.
    view    An older revision of a key never replaces a newer one, whether the watch or an answer brings it, and a
            transaction reads back what it has written. A store whose revision shrinks was restored from a backup or
            replaced: `num_returns` counts that, and everything is read anew.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fmoe_ext.remote.discovery import DiscoveryError
from fmoe_ext.remote.etcd import client as etcd
from fmoe_ext.remote.etcd import keys
from fmoe_ext.remote.etcd.client import Answer, Entry, Event
from fmoe_ext.remote.server.host import ExpertHost
from fmoe_ext.remote.server.options import Replication
from fmoe_ext.remote.server.pages import Metrics
from fmoe_ext.remote.wire import Message

T = TypeVar("T")


class Peers(Protocol):
    """Calls to other servers: the answer within timeout seconds, or a RemoteError."""

    async def call(self, endpoint: str, method: str, data: bytes, timeout: float) -> Message: ...
    async def download(self, endpoint: str, method: str, data: bytes, timeout: float) -> Message: ...
    async def close(self) -> None: ...


class Store(Protocol):
    """etcd; every call ends within its timeout, with a DiscoveryError if it fails."""

    async def transact(
        self,
        compare: Sequence[bytes] = (),
        success: Sequence[bytes] = (),
        failure: Sequence[bytes] = (),
        timeout: float = 5.0,
    ) -> Answer: ...
    async def grant(self, ttl: float, timeout: float = 5.0) -> int: ...
    async def keep_alive(self, lease: int, timeout: float = 5.0) -> bool: ...
    async def revoke(self, lease: int, timeout: float = 5.0) -> None: ...
    def watch(self, prefix: str, revision: int) -> AsyncIterator[list[Event]]: ...
    async def close(self) -> None: ...


class _Device(Protocol):
    """The thread that computes: functions run one after the other, in the order of the calls."""

    def call(self, function: Callable[[], T]) -> "concurrent.futures.Future[T]": ...


class Hosting(Protocol):
    """The server around the replicas."""

    options: Any  # expert_cls, hidden_dim, expert_uids, num_experts, expert_pattern
    metrics: Metrics
    service: Any  # may_step is set

    @property
    def host(self) -> ExpertHost: ...
    @property
    def compute(self) -> _Device: ...
    @property
    def endpoint(self) -> str: ...
    def saved_uids(self) -> list[str]: ...
    async def add_experts(self, uids: Sequence[str]) -> None: ...


log = logging.getLogger("fmoe_ext.remote")
RETRY_SECONDS = 0.5  # between two attempts to reach etcd


class _View:
    """etcd's keys as this server has seen them last. An older revision of a key never replaces a newer one."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._uids: dict[str, set[str]] = {}  # uid: its keys

    def leader(self, uid: str) -> tuple[keys.Leader | None, int]:
        """Leader, and the create revision of its key; (None, 0) without one."""
        entry = self._entries.get(keys.leader_key(uid))
        return (None, 0) if entry is None else (keys.load_leader(entry.value), entry.create_revision)

    def members(self, uid: str) -> tuple[keys.Members | None, int]:
        """The record, and the revision of that key; (None, 0) if the expert has never been."""
        entry = self._entries.get(keys.members_key(uid))
        return (None, 0) if entry is None else (keys.load_members(entry.value), entry.mod_revision)

    def servers(self) -> dict[str, keys.ServerEntry]:
        """The servers that live."""
        found = {
            key.removeprefix(keys.SERVERS): keys.load_server(entry.value)
            for key, entry in self._entries.items()
            if key.startswith(keys.SERVERS)
        }
        return {server: entry for server, entry in found.items() if entry is not None}

    def offers(self, uid: str) -> dict[str, keys.Offer]:
        """Offers of servers for an expert without a leader."""
        prefix = keys.candidate_key(uid, "")
        found = {
            key.removeprefix(prefix): keys.load_offer(self._entries[key].value)
            for key in self._uids.get(uid, ())
            if key.startswith(prefix)
        }
        return {server: offer for server, offer in found.items() if offer is not None}

    def uids(self) -> list[str]:
        """Every expert that has ever been."""
        return [uid for uid in self._uids if keys.members_key(uid) in self._entries]

    def has_entry(self, server: str) -> bool:
        return keys.SERVERS + server in self._entries

    # ---------------------------------------------------------------- changes

    def clear(self) -> None:
        self._entries.clear()
        self._uids.clear()

    def replace(self, uid: str, entries: Sequence[Entry]) -> None:
        """All keys of an expert, as an answer has them."""
        given = {entry.key for entry in entries}
        for key in list(self._uids.get(uid, ())):
            if key not in given:
                self._drop(key)
        for entry in entries:
            self.take(entry)

    def take(self, entry: Entry, is_deletion: bool = False) -> None:
        known = self._entries.get(entry.key)
        if known is not None and known.mod_revision > entry.mod_revision:
            return
        if is_deletion:
            self._drop(entry.key)
            return
        self._entries[entry.key] = entry
        if uid := keys.uid_of(entry.key):
            self._uids.setdefault(uid, set()).add(entry.key)

    def _drop(self, key: str) -> None:
        self._entries.pop(key, None)
        if (uid := keys.uid_of(key)) in self._uids:
            self._uids[uid].discard(key)


class Registry:
    """One server's lease in etcd, its transactions there, and its view. changed() is called when the view changes.

    The lease: `ttl` seconds without contact to etcd and all that is under it is gone. has_lease() is this server's
    own, earlier, opinion: it counts from before the last renewal was asked for. num_returns counts how often the
    registry was seen to go back: restored from a backup, or replaced.
    """

    def __init__(self, store: Store, server: str, ttl: float):
        self.store = store
        self.server, self.ttl = server, ttl
        self.changed: Callable[[], None] = lambda: None
        self.view = _View()
        self.num_returns = 0
        self._revision = 0  # the largest in an answer
        self._cluster = 0
        self._lease = 0
        self._lease_ends = 0.0
        self._entry = b""
        self._tasks: list[asyncio.Task[None]] = []
        self._stale = asyncio.Event()  # the view must be read anew
        self._clock: Callable[[], float] = lambda: 0.0

    async def start(self, entry: keys.ServerEntry) -> None:
        """Registers the server and begins to watch."""
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
            await self.store.revoke(self._lease, timeout=2.0)
        await self.store.close()

    def has_lease(self) -> bool:
        return self._clock() < self._lease_ends

    @property
    def lease(self) -> int:
        """The present lease: who became leader under an earlier one leads no more."""
        return self._lease

    async def members_soon(self, uid: str) -> keys.Members | None:
        """The record of an expert; one that another server has just written shows within a second."""
        for _ in range(20):
            record, _ = self.view.members(uid)
            if record is not None:
                break
            await asyncio.sleep(0.05)
        return record

    # ---------------------------------------------------------------- what is changed

    async def lead(self, uid: str, me: keys.Leader, members: keys.Members, revision: int) -> int:
        """Becomes the leader if nobody leads and the record is as at revision -> revision of the key, 0 if not."""
        leader, record = keys.leader_key(uid), keys.members_key(uid)
        as_known = [etcd.created_at(leader, 0), etcd.changed_at(record, revision)]
        puts = [etcd.put(leader, keys.dump(me), self._lease), etcd.put(record, keys.dump(members))]
        answer = await self._transact(uid, as_known, puts)
        return answer.revision if answer.succeeded else 0

    async def set_members(self, uid: str, guard: int, members: keys.Members) -> bool:
        """Writes the record; False if another server leads."""
        own = etcd.created_at(keys.leader_key(uid), guard)
        put = etcd.put(keys.members_key(uid), keys.dump(members))
        return (await self._transact(uid, [own], [put])).succeeded

    async def resign(self, uid: str, guard: int, members: keys.Members) -> bool:
        """Leads no more; the members that stay, and who of them should lead, are written with it."""
        own = etcd.created_at(keys.leader_key(uid), guard)
        return await self._leave_to(uid, own, members)

    async def abandon(self, uid: str, guard: int) -> None:
        """Leads no more, and leaves the record as it is."""
        leader = keys.leader_key(uid)
        await self._transact(uid, [etcd.created_at(leader, guard)], [etcd.delete(leader)])

    async def void(self, uid: str, members: keys.Members, revision: int) -> bool:
        """Nobody leads, and the record is another one, if it is as at revision."""
        return await self._leave_to(uid, etcd.changed_at(keys.members_key(uid), revision), members)

    async def _leave_to(self, uid: str, condition: bytes, members: keys.Members) -> bool:
        put = etcd.put(keys.members_key(uid), keys.dump(members))
        changes = [etcd.delete(keys.leader_key(uid)), put]
        return (await self._transact(uid, [condition], changes)).succeeded

    async def offer(self, uid: str, offer: keys.Offer) -> None:
        """Says which state this server has."""
        key = keys.candidate_key(uid, self.server)
        await self._transact(uid, [], [etcd.put(key, keys.dump(offer), self._lease)])

    async def announce(self, entry: keys.ServerEntry) -> None:
        """Keeps the entry of this server in etcd, also when etcd has lost it."""
        value = keys.dump(entry)
        if value != self._entry or not self.view.has_entry(self.server):
            self._entry = value
            await self._ask(success=[etcd.put(keys.SERVERS + self.server, value, self._lease)])

    async def _transact(self, uid: str, compare: Sequence[bytes], success: Sequence[bytes]) -> etcd.Answer:
        """A transaction; what it was about is read with it, so that the view is never older than one's own writing."""
        again = [etcd.read(f"{keys.EXPERTS}{uid}/", is_prefix=True)]
        answer = await self._ask(compare, [*success, *again], again)
        self.view.replace(uid, answer.ranges[-1])
        return answer

    async def _ask(
        self, compare: Sequence[bytes] = (), success: Sequence[bytes] = (), failure: Sequence[bytes] = ()
    ) -> etcd.Answer:
        """A transaction that notices when the registry has gone back."""
        before = self._revision
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
        self._lease = await self.store.grant(self.ttl)
        await self._ask(success=[etcd.put(keys.SERVERS + self.server, self._entry, self._lease)])
        self._lease_ends = begin + self.ttl

    async def _keep_lease(self) -> None:
        """Renews; the transaction beside it is what notices a registry that went back."""
        was_reached = True
        while True:
            await asyncio.sleep(self.ttl / 4)
            begin = self._clock()
            try:
                returns = self.num_returns
                if await self.store.keep_alive(self._lease, timeout=self.ttl / 2):
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
    """This server: its name, which is new after every start, and its ways to the world."""

    name: str
    options: Replication
    registry: Registry
    peers: Peers
    server: Hosting

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def on_thread(self, function: Callable[[], T]) -> "asyncio.Future[T]":
        """function() on the thread that computes."""
        return asyncio.wrap_future(self.server.compute.call(function))
