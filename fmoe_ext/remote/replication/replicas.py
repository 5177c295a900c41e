"""ReplicatedExperts: the placement of a server whose experts have replicas on others."""

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fmoe_ext.remote import errors
from fmoe_ext.remote.client.caller import Caller
from fmoe_ext.remote.discovery import DiscoveryError, check_uid
from fmoe_ext.remote.etcd import keys
from fmoe_ext.remote.replication import messages
from fmoe_ext.remote.replication.leading import Leading
from fmoe_ext.remote.replication.messages import number, read_entry
from fmoe_ext.remote.replication.registry import Registry
from fmoe_ext.remote.replication.replica import Fenced, LogGap, Replica, Role
from fmoe_ext.remote.replication.service import ReplicaService
from fmoe_ext.remote.security import Credentials
from fmoe_ext.remote.server.server import Server
from fmoe_ext.remote.server.service import NotLeader
from fmoe_ext.remote.server.state import digest, read_state, write_state
from fmoe_ext.remote.server.uids import Pattern
from fmoe_ext.remote.wire import STATE, Message, WireError, encode

log = logging.getLogger("fmoe_ext.remote")
TICK = 0.5  # seconds between looks at everything, when nothing happens
COPY_SECONDS = 60.0
RECOVERY_LOOK = 1.0  # seconds for which candidates wait for each other


@dataclass(frozen=True)
class Replication:
    """registry: "host:port" of etcd, several with commas; replicas: servers an expert; ttl: seconds after which a
    silent server counts as dead; ack_timeout: seconds that a follower has for an update; recovery_wait: seconds to
    wait for a newer copy when all members are gone."""

    registry: str
    replicas: int = 2
    ttl: float = 5.0
    ack_timeout: float = 2.0
    recovery_wait: float = 30.0


class ReplicatedExperts:
    """Follows what the registry says: leads, follows, takes copies, asks others to."""

    def __init__(self, replication: Replication, credentials: Credentials | None = None):
        self.options = replication
        self.name = secrets.token_hex(
            8
        )  # of this process: after a restart, nobody takes it for the one before
        self.registry = Registry(replication.registry, self.name, replication.ttl)
        self.registry.changed = lambda uid: self._wake.set()
        self.caller = Caller(credentials, STATE)
        self.replicas: dict[str, Replica] = {}
        self.leading = Leading(self)
        self._wake = asyncio.Event()
        self._joins: dict[str, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self.server: Server

    # ---------------------------------------------------------------- the server's side

    async def start(self, server: Server) -> None:
        self.server = server
        server.host.commit = self.leading.commit_from_thread(asyncio.get_running_loop())
        server.host.may_step = server.service.may_step = self.may_step
        server.add_handlers(ReplicaService(self).handlers())
        await self.registry.start(self._server_entry())
        uids = self._wanted()
        await server.add_experts(uids)
        for uid in uids:
            self.replicas[uid] = Replica(uid, version=server.host.find(uid).version)
        server.metrics.gauge("led_experts", lambda: self._count(Role.LEADER))
        server.metrics.gauge("followed_experts", lambda: self._count(Role.FOLLOWER))
        await self._reconcile()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Hands every expert that is led to a follower that has all updates, then leaves."""
        self._stopping = True
        for task in (self._task, *self._joins.values()):
            if task is not None:
                task.cancel()
        led = [replica for replica in self.replicas.values() if replica.role is Role.LEADER]
        await asyncio.gather(*(self.leading.hand_over(replica) for replica in led), return_exceptions=True)
        for replica in self.replicas.values():
            replica.step_down()
        await self.registry.stop()
        await self.caller.close()

    def may_step(self, uid: str) -> None:
        """Raises NotLeader unless this server takes the gradients of an expert; from any thread."""
        replica = self.replicas.get(uid)
        if (
            replica is None
            or replica.is_closing
            or replica.role is not Role.LEADER
            or not self.registry.has_lease()
        ):
            leader, _ = self.registry.leader(uid)
            raise NotLeader(f"not the leader of {uid}: {leader.endpoint if leader else 'nobody'} is")

    def _wanted(self) -> list[str]:
        """The uids to begin with: named ones, those with checkpoints, then free ones of the pattern."""
        server = self.server
        named = [check_uid(uid) for uid in server.options.expert_uids]
        if named:
            return named
        kept = server.checkpoints.uids() if server.checkpoints else []
        known = set(self.registry.uids())
        missing = server.options.num_experts - len(kept)
        if missing <= 0:
            return kept
        pattern = Pattern(server.options.expert_pattern)
        free = [u for u in pattern.sample(missing + len(known), random.Random()) if u not in known]
        return kept + [uid for uid in free if uid not in kept][:missing]

    def _server_entry(self) -> keys.ServerEntry:
        options = self.server.options
        return keys.ServerEntry(
            self.server.endpoint, options.expert_cls, options.hidden_dim, len(self.replicas)
        )

    def _count(self, role: Role) -> int:
        return sum(replica.role is role for replica in list(self.replicas.values()))

    # ---------------------------------------------------------------- one look at everything

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), TICK)
            self._wake.clear()
            try:
                await self._reconcile()
            except (DiscoveryError, errors.RemoteError) as error:
                log.warning("replication: %s", error)

    async def _reconcile(self) -> None:
        if not self.registry.has_lease():
            for replica in self.replicas.values():
                if replica.role is Role.LEADER:
                    log.warning("no lease: %s is led from here no more", replica.uid)
                    self.server.metrics.add("leads_lost_total")
                    replica.step_down()
            return
        await self.registry.announce(self._server_entry())
        for replica in list(self.replicas.values()):
            await self._look_at(replica)

    async def _look_at(self, replica: Replica) -> None:
        leader, fence = self.registry.leader(replica.uid)
        if leader is None:
            await self._nobody_leads(replica)
        elif leader.server == self.name:
            if replica.role is Role.LEADER:
                await self.leading.look_after(replica)
            else:  # the registry's answer was lost, on the way up or down: whoever has all updates shall lead
                await self.registry.abandon(replica.uid, fence)
        else:
            if replica.role is Role.LEADER and fence > replica.fence:
                replica.step_down()
            self._follow(replica, leader)

    def _follow(self, replica: Replica, leader: keys.Leader) -> None:
        """A replica that nobody counts on takes a copy, if there is room for it."""
        members, _ = self.registry.members(replica.uid)
        is_member = members is not None and self.name in members.endpoints
        busy = replica.uid in self._joins and not self._joins[replica.uid].done()
        if replica.role is Role.FOLLOWER and not is_member and not busy:
            replica.role = Role.IDLE
        others = set() if members is None else members.endpoints.keys() - {self.name}
        full = len(others) >= self.options.replicas
        if replica.role is Role.IDLE and not busy and not full:
            self._joins[replica.uid] = asyncio.create_task(self._join(replica, leader))

    async def _nobody_leads(self, replica: Replica) -> None:
        members, revision = self.registry.members(replica.uid)
        if replica.role is Role.LEADER:
            replica.step_down()
        if members is None:
            await self._try_to_lead(replica, revision, [self.name])
        elif self.name in members.endpoints and replica.role is Role.FOLLOWER:
            if members.successor not in ("", self.name) and members.successor in self.registry.servers():
                return  # it will, or its own entry vanishes
            await self._try_to_lead(replica, revision, list(members.endpoints))
        elif not (set(members.endpoints) - {self.name}) & set(self.registry.servers()):
            await self._recover(replica, members, revision)

    async def _recover(self, replica: Replica, members: keys.Members, revision: int) -> None:
        """All who had every update are gone: the newest copy that is left takes over, and what it lacks is counted."""
        if replica.role is Role.JOINING:
            return
        now = time.monotonic()
        if not replica.offered:
            replica.offered = now
            replica.version = self.server.host.find(replica.uid).version
            await self.registry.offer(replica.uid, replica.version)
        patience = RECOVERY_LOOK if replica.version >= members.version else self.options.recovery_wait
        best = max(((v, name) for name, v in self.registry.candidates(replica.uid).items()), default=(0, ""))
        if now - replica.offered < patience or best[1] != self.name:
            return
        if await self._try_to_lead(replica, revision, [self.name]):
            lost = max(0, members.version - replica.version)
            self.server.metrics.add("updates_lost_total", lost)
            if lost:
                log.error("%s lost at least %d updates: all its replicas were gone", replica.uid, lost)

    async def _try_to_lead(self, replica: Replica, revision: int, members: Sequence[str]) -> bool:
        known, _ = self.registry.members(replica.uid)
        endpoints = {} if known is None else dict(known.endpoints)
        endpoints = {name: endpoints.get(name, self.server.endpoint) for name in members}
        me = keys.Leader(self.name, self.server.endpoint)
        written = keys.Members(endpoints, replica.version)
        fence = await self.registry.lead(replica.uid, me, written, revision)
        if fence:
            replica.offered = 0.0
            self.leading.begin(replica, fence, endpoints)
            self.server.metrics.add("leads_won_total")
        return bool(fence)

    # ---------------------------------------------------------------- following

    async def _join(self, replica: Replica, leader: keys.Leader) -> None:
        """Takes a copy from the leader, then everything since, then is a member."""
        uid, replica.role = replica.uid, Role.JOINING
        replica.early.clear()
        meta = {"uid": uid, "server": self.name, "endpoint": self.server.endpoint}
        request = encode(Message({}, meta))
        try:
            copy = await self.caller.call(leader.endpoint, messages.JOIN, request, COPY_SECONDS)
            await self.on_thread(lambda: write_state(self.server.host, copy))
            for entry in replica.begin_copy(number(copy, "version"), number(copy, "last_fence")):
                self.apply(replica, entry)
            replica.fence = max(replica.fence, number(copy, "fence"))
            await self.caller.call(leader.endpoint, messages.READY, request, COPY_SECONDS)
            self.server.metrics.add("copies_taken_total")
            log.info("%s is replicated here from version %s on", uid, copy.meta.get("version"))
        except (errors.RemoteError, WireError, Fenced) as error:
            log.warning("%s could not be copied: %s", uid, error)
            replica.role = Role.IDLE
            await asyncio.sleep(TICK)
        finally:
            if replica.role is Role.JOINING:
                replica.role = Role.IDLE

    def append(self, message: Message) -> None:
        """An entry from a leader: it counts as received when this returns."""
        entry = read_entry(message)
        replica = self.replicas.get(entry.uid)
        if replica is None:
            raise LogGap(f"{entry.uid} is not hosted here")
        if replica.role is Role.LEADER and entry.fence > replica.fence:
            replica.step_down()
        if replica.accept(entry):
            self.apply(replica, entry)

    def apply(self, replica: Replica, entry: messages.Entry) -> None:
        host, update = self.server.host, entry.update
        assert update is not None

        def work() -> None:
            host.apply(update)
            if entry.digest and digest(host, entry.uid) != entry.digest:
                raise ValueError(
                    f"the weights of {entry.uid} differ from the leader's at version {entry.version}"
                )

        def check(future: "asyncio.Future[object]") -> None:
            if not future.cancelled() and (error := future.exception()) is not None:
                log.error("%s takes a new copy: %s", entry.uid, error)
                self.server.metrics.add("divergences_total")
                replica.role = Role.IDLE
                self.leave_soon(replica)

        self.on_thread(work).add_done_callback(check)

    def leave_soon(self, replica: Replica) -> None:
        """Rejoins: the leader drops this member when it comes with a request for a copy."""
        leader, _ = self.registry.leader(replica.uid)
        if leader is not None and leader.server != self.name:
            self._joins[replica.uid] = asyncio.create_task(self._join(replica, leader))

    async def host_expert(self, uid: str) -> None:
        """A leader asks this server to be a replica of an expert."""
        if uid not in self.replicas and not self._stopping:
            await self.on_thread(lambda: self.server.host.add([check_uid(uid)]))
            self.replicas.setdefault(uid, Replica(uid))
        self._wake.set()

    def on_thread(self, function: Callable[[], object]) -> "asyncio.Future[object]":
        return asyncio.wrap_future(self.server.compute.call(function))

    async def copy_state(self, uid: str, at_copy: Callable[[int], None]) -> Message:
        """The state of an expert; at_copy(version) runs on the loop, between the updates before and after it."""
        loop = asyncio.get_running_loop()

        def take() -> Message:
            state = read_state(self.server.host, uid)
            loop.call_soon_threadsafe(at_copy, int(state.meta["version"]))
            return state

        return await asyncio.wrap_future(self.server.compute.call(take))
