"""ReplicatedExperts: the placement of a server whose experts have replicas on others."""

import asyncio
import contextlib
import logging
import random
import secrets

from fmoe_ext.remote import errors, protocol
from fmoe_ext.remote.client.caller import Caller
from fmoe_ext.remote.discovery import DiscoveryError, Pattern, check_uid
from fmoe_ext.remote.etcd import keys
from fmoe_ext.remote.etcd.client import EtcdClient
from fmoe_ext.remote.replication import recovery
from fmoe_ext.remote.replication.follower import Following, Replica, Role
from fmoe_ext.remote.replication.leader import Leader
from fmoe_ext.remote.replication.messages import Append, Reply, replica_handlers
from fmoe_ext.remote.replication.recovery import Action, Vacancy
from fmoe_ext.remote.replication.registry import Hosting, Peers, Registry, Replication, Site, Store
from fmoe_ext.remote.security import Credentials
from fmoe_ext.remote.server.host import ExpertMissing, Fail, Finish
from fmoe_ext.remote.server.ledger import NotLeader, Term
from fmoe_ext.remote.server.server import Server
from fmoe_ext.remote.wire import PART_BYTES, Limits, Message

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
        self.registry = Registry(store or EtcdClient(replication.registry), self.name, replication.ttl)
        self.registry.changed = lambda: self._wake.set()
        self.peers: Peers = peers or Caller(credentials, Limits(max_message_bytes=MAX_UPDATE_BYTES))
        self.replicas: dict[str, Replica] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._confirming: set[asyncio.Task[None]] = set()
        self._hosting: set[str] = set()  # experts that are being added
        self._stopping = False
        self.server: Hosting
        self.site: Site
        self.following: Following

    # ---------------------------------------------------------------- the server's side

    async def start(self, server: Server) -> None:
        """Hosts the server's experts and begins to lead or follow."""
        await self.begin(server)
        part_bytes = min(PART_BYTES, server.options.max_message_bytes // 2)
        server.add_handlers(replica_handlers(self, server.service.guard, part_bytes))

    async def begin(self, server: Hosting) -> None:
        self.server = server
        self.site = Site(self.name, self.options, self.registry, self.peers, server)
        self.following = Following(self.site)
        loop = asyncio.get_running_loop()

        def when_committed(uid: str, version: int, finish: Finish, fail: Fail) -> None:
            loop.call_soon_threadsafe(self._await_commit, uid, version, finish, fail)

        server.host.is_replicated = True
        server.host.when_committed = when_committed
        server.host.may_step = server.service.may_step = self.may_step
        await self.registry.start(self._server_entry())
        uids = self._wanted()
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
            other, _ = self.registry.leader(uid)
            raise NotLeader(f"not the leader of {uid}: {other.endpoint if other else 'nobody'} is")

    def _await_commit(self, uid: str, version: int, finish: Finish, fail: Fail) -> None:
        replica = self.replicas.get(uid)
        if replica is None or replica.leader is None:
            fail(NotLeader(f"not the leader of {uid} any more"))
        else:
            replica.leader.await_commit(version, finish, fail)

    def _add(self, uid: str) -> None:
        ledger = self.server.host.find(uid).ledger
        returns = self.registry.num_returns
        self.replicas.setdefault(uid, Replica(uid, ledger, num_returns=returns))

    def _wanted(self) -> list[str]:
        """The uids to begin with: named ones, those with checkpoints, then free ones of the pattern."""
        named = [check_uid(uid) for uid in self.server.options.expert_uids]
        if named:
            return named
        kept = self.server.saved_uids()
        known = set(self.registry.uids())
        missing = self.server.options.num_experts - len(kept)
        if missing <= 0:
            return kept
        pattern = Pattern(self.server.options.expert_pattern)
        free = [u for u in pattern.sample(missing + len(known), random.Random()) if u not in known]
        return kept + [uid for uid in free if uid not in kept][:missing]

    def _server_entry(self) -> keys.ServerEntry:
        options = self.server.options
        return keys.ServerEntry(
            self.server.endpoint, options.expert_cls, options.hidden_dim, len(self.replicas)
        )

    def _count(self, role: Role) -> int:
        return sum(replica.role is role for replica in list(self.replicas.values()))

    # ---------------------------------------------------------------- calls of other servers

    def append(self, append: Append) -> Reply:
        return self.following.receive(self._find(append.uid), append)

    async def admit(self, uid: str, name: str, endpoint: str) -> Message:
        return await self._led(uid).admit(name, endpoint)

    async def promote(self, uid: str, name: str) -> None:
        await self._led(uid).promote(name)

    async def host_expert(self, uid: str) -> None:
        """A leader asks this server to be a replica of an expert."""
        if uid not in self.replicas and uid not in self._hosting and not self._stopping:
            self._hosting.add(check_uid(uid))
            try:
                await self.server.add_experts([uid])  # with what a checkpoint of an earlier process has
                self._add(uid)
            finally:
                self._hosting.discard(uid)
        self._wake.set()

    def _find(self, uid: str) -> Replica:
        if uid not in self.replicas:
            raise ExpertMissing(f"{uid} is not hosted here")
        return self.replicas[uid]

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
        record, revision = self.registry.members(replica.uid)
        leader, guard = self.registry.leader(replica.uid)
        if replica.needs_void(record, self.registry.num_returns):
            await self._void(replica, record, revision)
        elif leader is None:
            if replica.leader is not None:
                replica.leader.end("its key is gone")
            await self._fill(replica, record, revision)
        elif leader.server == self.name:
            if replica.leader is not None and replica.leader.guard == guard:
                await replica.leader.look_after()
            else:  # an answer of the registry was lost, on the way up or down
                if replica.leader is not None:
                    replica.leader.end("its key is another one")
                await self.registry.abandon(replica.uid, guard)
        else:
            replica.vacant, replica.loss = None, (0, 0)
            if replica.leader is not None:
                replica.leader.end(f"{leader.endpoint} leads")
            self.following.follow(replica, leader, record)

    async def _void(self, replica: Replica, record: keys.Members | None, revision: int) -> None:
        """The registry went back: it may name members that are none. Nobody leads until all have offered."""
        if replica.leader is not None:
            replica.leader.end("the registry went back")
        ledger = replica.ledger
        new = recovery.voided(record, ledger.end, ledger.seen, replica.epoch)
        if await self.registry.void(replica.uid, new, revision):
            log.error(
                "%s: the registry went back; epoch %d begins with term %d", replica.uid, new.epoch, new.term
            )
            self.server.metrics.add("registry_returns_total")
            replica.epoch, replica.num_returns = new.epoch, self.registry.num_returns

    async def _fill(self, replica: Replica, record: keys.Members | None, revision: int) -> None:
        """Nobody leads: this server does, or offers its state, or waits."""
        self.following.stop_copying(replica)
        now, alive = self.site.now(), self.registry.servers().keys()
        offers = self.registry.offers(replica.uid)
        members = set() if record is None else record.endpoints.keys() - {self.name}
        if replica.vacant is None or replica.vacant[0] != revision:
            replica.vacant = revision, now
            replica.hopeless_since = now
        if any(name in alive and name not in offers for name in members):
            replica.hopeless_since = now
        vacancy = Vacancy(
            server=self.name,
            end=replica.ledger.end,
            is_able=replica.is_able(),
            record=record,
            revision=revision,
            alive=alive,
            offers=offers,
            seconds=now - replica.vacant[1],
            hopeless_seconds=now - replica.hopeless_since,
            recovery_wait=self.options.recovery_wait,
            ttl=self.options.ttl,
            start=replica.ledger.start,
            requests=replica.ledger.num_requests,
            lacks=replica.ledger.lacks,
        )
        if replica.role is Role.JOINING:
            return
        action = recovery.decide(vacancy)
        if action is Action.OFFER:
            await self.registry.offer(replica.uid, recovery.make_offer(vacancy.end, revision))
        elif action in (Action.LEAD, Action.RECOVER):
            await self._lead(replica, vacancy, action)

    async def _lead(self, replica: Replica, vacancy: Vacancy, action: Action) -> None:
        known = 0 if vacancy.record is None else vacancy.record.term
        term = Term(max(known, replica.ledger.seen.number) + 1, self.name)
        record = recovery.next_record(vacancy, action, term, self.server.endpoint)
        if action is Action.RECOVER:
            replica.loss = recovery.count_lost(vacancy), recovery.count_lost_gradients(vacancy)
        me, lease = keys.Leader(self.name, self.server.endpoint), self.registry.lease
        guard = await self.registry.lead(replica.uid, me, record, vacancy.revision)
        if not guard or lease != self.registry.lease or replica.role is Role.JOINING:
            return
        replica.vacant = None

        def ended() -> None:
            replica.become_idle(self.site.now())
            self._wake.set()

        leader = Leader(self.site, replica.uid, replica.ledger, term, guard, record, ended)
        replica.role, replica.leader = Role.LEADER, leader
        self.server.metrics.add("leads_won_total")
        if any(replica.loss):
            for name, count in zip(("updates_lost_total", "gradients_lost_total"), replica.loss, strict=True):
                self.server.metrics.add(name, count)
            log.error(
                "%s lost at least %d updates, which were %d gradients or more: no replica had them",
                *(replica.uid, *replica.loss),
            )
            replica.loss = 0, 0
        replica.ledger.lacks = 0
        task = asyncio.create_task(leader.confirm())
        self._confirming.add(task)
        task.add_done_callback(self._confirming.discard)
