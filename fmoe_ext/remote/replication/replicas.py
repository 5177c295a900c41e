"""ReplicatedExperts: the placement of a server whose experts have replicas on others.

Every TICK, and whenever its view of etcd changes, a server looks at each of its experts: who leads, what the record
says, and what it does itself. From that alone follows one step: end a term, fill a vacancy, join, or find members.
Nothing is remembered as done, so a message that was lost costs a look and not the expert.
"""

import asyncio
import contextlib
import dataclasses
import logging
import random
import secrets
from collections.abc import Set

from fmoe_ext.memory import limits
from fmoe_ext.remote import errors, protocol
from fmoe_ext.remote.client.caller import Caller
from fmoe_ext.remote.discovery import DiscoveryError, Pattern, check_uid
from fmoe_ext.remote.etcd import keys
from fmoe_ext.remote.etcd.client import EtcdClient
from fmoe_ext.remote.replication.follower import Following, Replica, Role
from fmoe_ext.remote.replication.leader import Leader
from fmoe_ext.remote.replication.messages import Append, Reply, replica_handlers
from fmoe_ext.remote.replication.registry import Hosting, Peers, Registry, Site, Store
from fmoe_ext.remote.replication.succession import Succession
from fmoe_ext.remote.security import Credentials
from fmoe_ext.remote.server.fair_queue import ByteBudget, QueueFull
from fmoe_ext.remote.server.host import ExpertMissing, Fail, Finish
from fmoe_ext.remote.server.ledger import NotLeader
from fmoe_ext.remote.server.options import Replication
from fmoe_ext.remote.server.server import Server
from fmoe_ext.remote.server.service import Intake
from fmoe_ext.remote.wire import STATE, Limits, Message

log = logging.getLogger("fmoe_ext.remote")
MAX_UPDATE_BYTES = 2**31 - 1  # grpc's largest limit; --max_message_bytes is below it
TICK = 0.5  # seconds between looks at everything, when nothing happens


class ReplicatedExperts:
    """Does what docs/replication.md says: leads, follows, takes copies, recovers, and looks again on a timer."""

    def __init__(
        self,
        replication: Replication,
        credentials: Credentials | None = None,
        *,
        store: Store | None = None,
        peers: Peers | None = None,
    ):
        self.options = replication
        self.name = secrets.token_hex(8)  # of this process: new after a restart, which is another server
        self.registry = Registry(store or EtcdClient(replication.registry or ""), self.name, replication.ttl)
        self.registry.changed = lambda: self._wake.set()
        self.peers: Peers = peers or Caller(credentials, Limits(max_message_bytes=MAX_UPDATE_BYTES))
        self.replicas: dict[str, Replica] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._confirming: set[asyncio.Task[None]] = set()
        self._hosting: set[str] = set()  # experts that are being added
        self._stopping = False
        sizes = [limit.num_bytes for limit in limits()]
        self.max_hosted_bytes = min(sizes) // 2 if sizes else float("inf")  # of experts that leaders ask for

    # ---------------------------------------------------------------- the server's side

    async def start(self, server: Server) -> None:
        """Hosts the server's experts and begins to lead or follow."""
        await self.begin(server)
        most = server.options.max_message_bytes
        updates = dataclasses.replace(STATE, max_message_bytes=most)
        # a follower must take what a leader may make, so there is room for one update at least
        intake = Intake(server.guard, ByteBudget(max(server.service.budget.limit, most)), updates)
        server.add_handlers(replica_handlers(self, intake, server.compute))
        server.metrics.gauge("update_bytes_in_flight", lambda: intake.budget.num_bytes)

    async def begin(self, server: Hosting) -> None:
        self.server = server
        site = Site(self.name, self.options, self.registry, self.peers, server)
        self.following = Following(site)
        self.succession = Succession(site, self._confirming, self._wake.set)
        loop = asyncio.get_running_loop()

        def await_commit(uid: str, version: int, finish: Finish, fail: Fail) -> None:
            replica = self.replicas.get(uid)
            if replica is None or replica.leader is None:
                fail(NotLeader(f"not the leader of {uid} any more"))
            else:
                replica.leader.await_commit(version, finish, fail)

        def when_committed(uid: str, version: int, finish: Finish, fail: Fail) -> None:
            # called on the thread that computes; replication lives on the loop
            loop.call_soon_threadsafe(await_commit, uid, version, finish, fail)

        server.host.is_replicated = True
        server.host.when_committed = when_committed
        server.host.may_step = server.service.may_step = self.may_step
        await self.registry.start(self._server_entry())
        uids = _wanted(server, set(self.registry.view.uids()))
        await server.add_experts(uids)
        for uid in uids:
            self._add(uid)
        server.metrics.gauge("led_experts", lambda: self._count(Role.LEADER))
        server.metrics.gauge("followed_experts", lambda: self._count(Role.FOLLOWER))
        await self._reconcile()  # a second one decides on the offers of the first
        await self._reconcile()
        await asyncio.gather(*self._confirming)
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Hands every expert that is led to a follower that has all updates, then leaves."""
        self._stopping = True
        joins = [replica.joining for replica in self.replicas.values()]
        for task in (self._task, *self._confirming, *joins):
            if task is not None:
                task.cancel()
        led = [replica.leader for replica in self.replicas.values() if replica.leader is not None]
        await asyncio.gather(*(leader.hand_over() for leader in led), return_exceptions=True)
        for leader in led:
            leader.end("this server stops")
        await self.registry.stop()
        await self.peers.close()

    def describe(self, uid: str) -> dict[str, str]:
        """Role, term and committed version of this server's replica."""
        replica = self.replicas.get(uid)
        if replica is None:
            return {}
        ledger = replica.ledger
        is_confirming = replica.leader is not None and not replica.leader.takes_steps()
        role = "broken" if ledger.broken else "confirming" if is_confirming else replica.role.value
        return {
            protocol.ROLE: role,
            protocol.TERM: str(ledger.seen.number),
            protocol.COMMITTED: str(ledger.committed),
        }

    def may_step(self, uid: str) -> None:
        """Raises NotLeader unless this server takes the gradients of an expert; from any thread."""
        replica = self.replicas.get(uid)
        leader = None if replica is None else replica.leader
        if leader is None or not leader.takes_steps():
            other, _ = self.registry.view.leader(uid)
            raise NotLeader(f"not the leader of {uid}: {other.endpoint if other else 'nobody'} is")

    def _add(self, uid: str) -> None:
        if uid not in self.replicas:
            ledger = self.server.host.find(uid).ledger
            self.replicas[uid] = Replica(uid, ledger, num_returns=self.registry.num_returns)

    def _server_entry(self) -> keys.ServerEntry:
        options = self.server.options
        kind = options.expert_cls, options.hidden_dim
        return keys.ServerEntry(self.server.endpoint, *kind, len(self.replicas))

    def _count(self, role: Role) -> int:
        return sum(replica.role is role for replica in list(self.replicas.values()))

    # ---------------------------------------------------------------- calls of other servers

    def append(self, append: Append) -> Reply:
        if append.uid not in self.replicas:
            raise ExpertMissing(f"{append.uid} is not hosted here")
        return self.following.receive(self.replicas[append.uid], append)

    async def admit(self, uid: str, name: str, endpoint: str) -> Message:
        return await self._led(uid).members.admit(name, endpoint)

    async def promote(self, uid: str, name: str) -> None:
        await self._led(uid).members.promote(name)

    async def host_expert(self, uid: str) -> None:
        """A leader asks this server to be a replica of an expert.

        Every caller may ask, so only an expert is hosted that the registry has and that lacks replicas, while the
        state of all experts fits in half of the memory.
        """
        if uid not in self.replicas and uid not in self._hosting and not self._stopping:
            record = await self.registry.members_soon(check_uid(uid))
            if record is None or len(record.endpoints) >= self.options.replicas:
                why = "has its replicas" if record else "is no expert that the registry knows"
                raise ValueError(f"{uid} {why}: this server does not host it")
            host = self.server.host
            sizes = [host.state_bytes(known) for known in host.experts]
            if sizes and sum(sizes) + max(sizes) > self.max_hosted_bytes:
                raise QueueFull(
                    f"no room for {uid}: the {len(sizes)} experts here hold {sum(sizes)} bytes, of at most "
                    f"{self.max_hosted_bytes}, half of the memory"
                )
            self._hosting.add(uid)
            try:
                await self.server.add_experts([uid])  # with what a checkpoint of an earlier process has
                self._add(uid)
            finally:
                self._hosting.discard(uid)
        self._wake.set()

    def _led(self, uid: str) -> Leader:
        self.may_step(uid)
        leader = self.replicas[uid].leader
        assert leader is not None
        return leader

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
            except Exception:  # the next look may do better; none at all would be the end
                log.exception("replication: a look at the experts failed")

    async def _reconcile(self) -> None:
        if not self.registry.has_lease():
            for replica in self.replicas.values():
                if replica.leader is not None:
                    replica.leader.end("its lease is over")
                    self.server.metrics.add("leads_lost_total")
            return
        await self.registry.announce(self._server_entry())
        for replica in list(self.replicas.values()):
            await self._look_at(replica)

    async def _look_at(self, replica: Replica) -> None:
        record, revision = self.registry.view.members(replica.uid)
        leader, guard = self.registry.view.leader(replica.uid)
        if replica.needs_void(record, self.registry.num_returns):
            await self.succession.void(replica, record, revision)
        elif leader is None:
            if replica.leader is not None:
                replica.leader.end("its key is gone")
            self.following.stop_copying(replica)
            await self.succession.fill(replica, record, revision)
        elif leader.server == self.name:
            await self._look_after(replica, guard)
        else:
            replica.vacant, replica.loss = None, None
            if replica.leader is not None:
                replica.leader.end(f"{leader.endpoint} leads")
            self.following.follow(replica, leader, record)

    async def _look_after(self, replica: Replica, guard: int) -> None:
        leader = replica.leader
        # the key is not this leader's: an answer of the registry was lost, on the way up or down
        if leader is None or leader.guard != guard:
            if leader is not None:
                leader.end("its key is another one")
            await self.registry.abandon(replica.uid, guard)
        elif leader.holds():
            await leader.members.look_after()
        else:
            leader.end("its lease is over")


def _wanted(server: Hosting, known: Set[str]) -> list[str]:
    """The uids to begin with: named ones, those with checkpoints, then those of the pattern that are not known."""
    named = [check_uid(uid) for uid in server.options.expert_uids]
    if named:
        return named
    kept = server.saved_uids()
    missing = server.options.num_experts - len(kept)
    if missing <= 0:
        return kept
    pattern = Pattern(server.options.expert_pattern)
    free = [u for u in pattern.sample(missing + len(known), random.Random()) if u not in known]
    return kept + [uid for uid in free if uid not in kept][:missing]
