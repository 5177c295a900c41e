"""ReplicatedExperts: the Placement of a server whose experts have replicas on other servers (--registry).

Each half second, and when its view of etcd changes, a server looks at each of its experts (_look_at): who leads, what
the record says, and what it does itself. From that alone follows its next step: end a term, fill a vacancy, join, or
look for members. Nothing is remembered as done, so a lost message costs one look and not the expert.

The server asks it at each call, by functions that begin() sets: may_read() before a forward, may_step() before a
gradient, and when_committed() before the gradient is answered. The updates themselves go from leader.py to follower.py.

A vacancy is filled without votes. recovery.decide() says at each look whether this server leads, offers its state or
waits. To lead is one transaction in etcd, which fails if another server leads or the record has changed since it was
read. So of several servers that decide to lead one wins, and the others see its record at their next look.
"""

import asyncio
import contextlib
import dataclasses
import logging
import random
import secrets
import time

from fmoe_ext.remote import errors, protocol
from fmoe_ext.remote.client.caller import Caller
from fmoe_ext.remote.discovery import DiscoveryError, Pattern, check_uid
from fmoe_ext.remote.etcd import keys
from fmoe_ext.remote.etcd.client import EtcdClient
from fmoe_ext.remote.flags import DATE_FORMAT
from fmoe_ext.remote.replication import messages, recovery
from fmoe_ext.remote.replication.follower import Replica, Role
from fmoe_ext.remote.replication.leader import Leader
from fmoe_ext.remote.replication.messages import replica_handlers
from fmoe_ext.remote.replication.recovery import Action, Vacancy
from fmoe_ext.remote.replication.registry import Registry, Site
from fmoe_ext.remote.security import Credentials
from fmoe_ext.remote.server.fair_queue import ByteBudget, QueueFull, share_of_memory
from fmoe_ext.remote.server.host import ExpertMissing, Fail, Finish
from fmoe_ext.remote.server.ledger import NotLeader, Term
from fmoe_ext.remote.server.options import Replication
from fmoe_ext.remote.server.server import Server
from fmoe_ext.remote.server.service import Intake
from fmoe_ext.remote.server.state import end_of_weights
from fmoe_ext.remote.wire import MAX_MESSAGE_BYTES, STATE, Limits, Message

log = logging.getLogger("fmoe_ext.remote")
_TICK = 0.5  # seconds between two looks at all experts while etcd shows no change


class ReplicatedExperts:
    """Leads, follows, copies and recovers the experts of a server, as docs/replication.md says."""

    def __init__(
        self,
        replication: Replication,
        credentials: Credentials | None = None,
        *,
        store: EtcdClient | None = None,
        peers: Caller | None = None,
    ):
        self.options = replication
        self.name = secrets.token_hex(8)  # of this process: new after a restart, which is another server
        self.registry = Registry(store or EtcdClient(replication.registry or ""), self.name, replication.ttl)
        self.registry.changed = lambda: self._wake.set()
        self.peers = peers or Caller(credentials, Limits(MAX_MESSAGE_BYTES))
        self.replicas: dict[str, Replica] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._confirming: set[asyncio.Task[None]] = set()  # Leader.confirm() of terms that have just begun
        self._hosting = asyncio.Lock()  # while host_expert() adds an expert
        self._stopping = False
        # of the states of all experts, half of the memory: host_expert() refuses more
        self.max_hosted_bytes = share_of_memory(2) or float("inf")

    # ---------------------------------------------------------------- the server's side

    async def start(self, server: Server) -> None:
        """Host the server's experts, begin to lead or follow, and add the methods that other servers call."""
        await self.begin(server)
        most = server.options.max_message_bytes
        updates = dataclasses.replace(STATE, max_message_bytes=most)
        # A budget apart from clients' calls (replica_handlers says why), with room for the largest update at least: a
        # follower must be able to take whatever a leader may send.
        intake = Intake(server.guard, ByteBudget(max(server.service.budget.limit, most)), updates)
        server.add_handlers(replica_handlers(self.answer, intake, server.compute))
        server.metrics.gauge("update_bytes_in_flight", lambda: intake.budget.num_bytes)

    async def begin(self, server: Server) -> None:
        """Do the part of start() that needs no network: the simulation of the tests has its own."""
        self.server = server
        early = ByteBudget(server.service.budget.limit)
        self._site = Site(self.name, self.options, self.registry, self.peers, server, early)
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
        server.host.may_step = self.may_step
        server.service.may_read = self.may_read
        await self.registry.start(self._server_entry())
        # --expert_uids; without it the experts with checkpoints, and random unknown uids up to --num_experts
        uids = [check_uid(uid) for uid in server.options.expert_uids]
        if not uids:
            uids, known = server.saved_uids(), set(self.registry.view.uids())
            if (missing := server.options.num_experts - len(uids)) > 0:
                pattern = Pattern(server.options.expert_pattern)
                # len(known) more than needed: that many at most are left out
                free = [u for u in pattern.sample(missing + len(known), random.Random()) if u not in known]
                uids = uids + [uid for uid in free if uid not in uids][:missing]
        await server.add_experts(uids)
        for uid in uids:
            self._add(uid)
        server.metrics.gauge("led_experts", lambda: self._count(Role.LEADER))
        server.metrics.gauge("followed_experts", lambda: self._count(Role.FOLLOWER))
        # Two looks, and the terms that they begin, before the first call can come: the second one decides on the offers
        # that the first one has made.
        await self._reconcile()
        await self._reconcile()
        await asyncio.gather(*self._confirming)
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Hand each expert that this server leads to a member with all updates, then give the lease back."""
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
        """Return role, term and committed version of this server's replica, for Info and the status page."""
        replica = self.replicas.get(uid)
        if replica is None:
            return {}
        ledger = replica.ledger
        is_confirming = replica.leader is not None and not replica.leader.takes_steps()
        role = "broken" if ledger.broken else "confirming" if is_confirming else replica.role.value
        term, committed = str(ledger.seen.number), str(ledger.committed)
        return {protocol.ROLE: role, protocol.TERM: term, protocol.COMMITTED: committed}

    def may_step(self, uid: str) -> None:
        """Raise NotLeader unless this server takes the gradients of an expert; from any thread."""
        replica = self.replicas.get(uid)
        leader = None if replica is None else replica.leader
        if leader is None or not leader.takes_steps():
            other, _ = self.registry.view.leader(uid)
            raise NotLeader(f"not the leader of {uid}: {other.endpoint if other else 'nobody'} is")

    def may_read(self, uid: str) -> None:
        """Raise NotLeader unless this server is a member of an expert, as it sees etcd: others may lack updates."""
        record, _ = self.registry.view.members(uid)
        if record is None or self.name not in record.endpoints:
            # begins with protocol.NOT_LEADER, by which clients know that they have to look the expert up again
            raise NotLeader(f"not the leader of {uid} (and not a member: it may lack acknowledged updates)")

    def _may_host(self, uid: str) -> bool:
        return uid not in self.replicas and not self._stopping

    def _add(self, uid: str) -> None:
        if uid not in self.replicas:
            self.replicas[uid] = Replica(self._site, uid, self.server.host.find(uid).ledger)

    def _count(self, role: Role) -> int:
        return sum(replica.role is role for replica in list(self.replicas.values()))

    def _server_entry(self) -> keys.ServerEntry:
        options = self.server.options
        kind = options.expert_cls, options.hidden_dim
        return keys.ServerEntry(self.server.endpoint, *kind, len(self.replicas))

    # ---------------------------------------------------------------- calls of other servers

    async def answer(self, path: str, message: Message) -> Message:
        """Answer a call of another server; path: one of messages.APPEND, JOIN, READY and HOST."""
        if path == messages.APPEND:
            append = messages.read_append(message)
            if append.uid not in self.replicas:
                raise ExpertMissing(f"{append.uid} is not hosted here")
            return messages.reply_message(self.replicas[append.uid].receive(append))
        uid = message.text(protocol.UID)
        if path == messages.HOST:
            await self.host_expert(uid)
            return Message()
        name = message.text("server")
        # read the whole message first: a malformed one must not reach the leader
        endpoint = message.text("endpoint") if path == messages.JOIN else ""
        self.may_step(uid)
        leader = self.replicas[uid].leader
        assert leader is not None
        if path == messages.JOIN:
            return await leader.admit(name, endpoint)
        await leader.promote(name)
        return Message()

    async def host_expert(self, uid: str) -> None:
        """Begin to host an expert whose leader asks this server to become a replica; it then joins by itself.

        Any admitted caller may ask, so this is refused unless etcd has the expert, it lacks replicas, and the states of
        all experts fit in half of the memory.
        """
        record = None
        if self._may_host(uid):
            check_uid(uid)
            for _ in range(20):  # a record that another server has just written shows within a second
                record, _ = self.registry.view.members(uid)
                if record is not None:
                    break
                await asyncio.sleep(0.05)
        # one at a time: each must count the experts that others have added, and see whether one of them is its own
        async with self._hosting:
            if self._may_host(uid):
                if record is None or len(record.endpoints) >= self.options.replicas:
                    why = "has its replicas" if record else "is no expert that the registry knows"
                    raise ValueError(f"{uid} {why}: this server does not host it")
                # all experts of a server are of one class and width: the new one is as large as the largest
                host = self.server.host
                sizes = [host.state_bytes(known) for known in host.experts]
                if sizes and sum(sizes) + max(sizes) > self.max_hosted_bytes:
                    raise QueueFull(
                        f"no room for {uid}: the {len(sizes)} experts here hold {sum(sizes)} bytes, of at most "
                        f"{self.max_hosted_bytes}, half of the memory"
                    )
                # from its checkpoint, if an earlier process left one here
                await self.server.add_experts([uid])
                self._add(uid)
        self._wake.set()

    # ---------------------------------------------------------------- one look at everything

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _TICK)
            self._wake.clear()
            try:
                await self._reconcile()
            except (DiscoveryError, errors.RemoteError) as error:
                log.warning("replication: %s", error)
            except Exception:
                # the next look may succeed; without this loop the experts would never be led again
                log.exception("replication: a look at the experts failed")

    async def _reconcile(self) -> None:
        if not self.registry.has_lease():  # another server may lead by now
            for replica in self.replicas.values():
                if replica.leader is not None:
                    replica.leader.end("its lease is over")
                    self.server.metrics.add("leads_lost_total")
            return
        await self.registry.announce(self._server_entry())
        # An error of one expert must not keep the others without a leader, so the first one is raised at the end.
        failures: list[Exception] = []
        for replica in list(self.replicas.values()):
            try:
                await self._look_at(replica)
            except Exception as error:
                if failures:
                    log.warning("replication of %s: %r", replica.uid, error)
                failures.append(error)
                # each look may wait for a silent etcd: without a lease the next round ends what this server leads
                if not self.registry.has_lease():
                    break
        if failures:
            raise failures[0]

    async def _look_at(self, replica: Replica) -> None:
        """Take the next step for one expert; which one follows from what etcd shows now, not from earlier steps."""
        record, revision = self.registry.view.members(replica.uid)
        leader, guard = self.registry.view.leader(replica.uid)
        own = replica.leader
        # 1. etcd went back: its record cannot be trusted
        if replica.needs_void(record, self.registry.num_returns):
            await self._void(replica, record, revision)
        # 2. no server leads
        elif leader is None:
            if own is not None:
                own.end("its key is gone")
            replica.stop_copying("nobody leads")
            await self._fill(replica, record, revision)
        # 3. another server leads: follow it, or take a copy
        elif leader.server != self.name:
            replica.vacant, replica.loss = None, None
            if own is not None:
                own.end(f"{leader.endpoint} leads")
            replica.follow(leader, record)
        # 4. the key has this server's name but is not of the term that it leads, because etcd's answer was lost when
        # the term began or ended: give the key back
        elif own is None or own.guard != guard:
            if own is not None:
                own.end("its key is another one")
            await self.registry.abandon(replica.uid, guard)
        # 5. this server leads
        elif not own.holds():
            own.end("its lease is over")
        # an update that it followed has failed after it began to lead: the other members have it
        elif replica.ledger.broken:
            own.end(f"its weights cannot be trusted: {replica.ledger.broken}")
        else:
            await own.look_after()

    # ---------------------------------------------------------------- nobody leads

    async def _void(self, replica: Replica, record: keys.Members | None, revision: int) -> None:
        """Void the record after etcd went back, for it may name wrong members; the best offer leads after a lease."""
        if replica.leader is not None:
            replica.leader.end("the registry went back")
        ledger = replica.ledger
        new = recovery.voided(record, ledger.end, ledger.seen, replica.epoch)
        if await self.registry.void(replica.uid, new, revision):
            text = "%s: the registry went back; epoch %d begins with term %d"
            log.error(text, replica.uid, new.epoch, new.term)
            self.server.metrics.add("registry_returns_total")
            replica.epoch, replica.num_returns = new.epoch, self.registry.num_returns

    async def _fill(self, replica: Replica, record: keys.Members | None, revision: int) -> None:
        """Lead, offer this server's state, or wait, as recovery.decide() says."""
        now, alive = self._site.now(), self.registry.view.servers().keys()
        offers = self.registry.view.offers(replica.uid)
        members = set() if record is None else record.endpoints.keys() - {self.name}
        # the waits of decide() begin anew when the record changes
        if replica.vacant is None or replica.vacant[0] != revision:
            replica.vacant = revision, now
            replica.hopeless_since = now
        # and while a member lives that has made no offer: such a one may lead at once
        if any(name in alive and name not in offers for name in members):
            replica.hopeless_since = now
        if replica.role is Role.JOINING:  # its state is about to be replaced by a copy
            return
        ledger = replica.ledger
        vacancy = Vacancy(
            server=self.name,
            end=end_of_weights(ledger) if ledger.broken else ledger.end,
            is_able=replica.is_able(),
            record=record,
            revision=revision,
            alive=alive,
            offers=offers,
            seconds=now - replica.vacant[1],
            hopeless_seconds=now - replica.hopeless_since,
            recovery_wait=self.options.recovery_wait,
            ttl=self.options.ttl,
            start=ledger.start,
            requests=ledger.num_requests,
            lacks=ledger.lacks,
        )
        action = recovery.decide(vacancy)
        if action is Action.OFFER:
            await self.registry.offer(replica.uid, keys.Offer.of(vacancy.end, revision))
        elif action in (Action.LEAD, Action.RECOVER):
            await self._lead(replica, vacancy, action)

    async def _lead(self, replica: Replica, vacancy: Vacancy, action: Action) -> None:
        """Begin a term if etcd grants it, count what a recovery loses, and confirm the log with all members."""
        # 1. a term above all known ones
        known = 0 if vacancy.record is None else vacancy.record.term
        term = Term(max(known, replica.ledger.seen.number) + 1, self.name)
        record = recovery.next_record(vacancy, action, term, self.server.endpoint)
        if action is Action.RECOVER:
            replica.loss = recovery.loss_of(vacancy)
        me, lease = keys.Leader(self.name, self.server.endpoint), self.registry.lease
        guard = await self.registry.lead(replica.uid, me, record, vacancy.revision)
        # the server may have got a new lease, or begun to copy, while etcd answered: the next look gives the key back
        if not guard or lease != self.registry.lease or replica.role is Role.JOINING:
            return
        replica.vacant = None
        if replica.ledger.broken:  # a broken member leads only if decide() knows of no better state
            text = "%s goes on with weights that cannot be trusted (%s): no other replica is left"
            log.error(text, replica.uid, replica.ledger.trust())

        # 2. the leadership itself

        def ended() -> None:
            replica.become_idle()
            self._wake.set()

        leader = Leader(self._site, replica.uid, replica.ledger, term, guard, record, ended)
        replica.role, replica.leader = Role.LEADER, leader
        # 3. say what is lost; replica.loss is kept from the decision on, in case etcd's answer is lost
        metrics = self.server.metrics
        metrics.add("leads_won_total")
        if (loss := replica.loss) is not None and loss.most:
            replica.loss = None
            metrics.add("updates_lost_total", loss.updates)
            metrics.add("gradients_lost_total", loss.gradients)
            metrics.add("updates_lost_at_most_total", loss.most)
            when = f" after {time.strftime(DATE_FORMAT, time.localtime(loss.since))}" if loss.since else ""
            log.error(
                "%s: at most %d acknowledged updates%s are lost: no replica has them; certainly lost: %d updates "
                "(%d gradients or more)",
                *(replica.uid, loss.most, when, loss.updates, loss.gradients),
            )
        replica.ledger.lacks = 0
        # 4. bring all members to this log, which opens the term
        task = asyncio.create_task(leader.confirm())
        self._confirming.add(task)
        task.add_done_callback(self._confirming.discard)
