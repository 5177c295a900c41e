"""Replica: one expert at one server; Following: it applies the updates of a leader, or takes a copy.

A follower accepts an update if its own log ends where the leader's did before it. It answers once the update is in its
log; the weights follow on the thread that computes, before any call that comes later. It repeats the gradients, not
their result, so replicas on equal processors are equal in every bit, and a digest shows those that are not.

An update that it refuses ends its membership: the leader removes it from the record, and it takes a copy. From the
moment of the copy on the leader sends it every update, and those that come before the copy does wait in `early`. Then
it says READY, and is a member if its log ends where the leader's does.
"""

import asyncio
import enum
import logging
from dataclasses import dataclass, field

from fmoe_ext.remote import errors
from fmoe_ext.remote.etcd import keys
from fmoe_ext.remote.replication import messages
from fmoe_ext.remote.replication.leader import Leader
from fmoe_ext.remote.replication.messages import Append, Reply
from fmoe_ext.remote.replication.registry import Site
from fmoe_ext.remote.server.ledger import Ledger, Logged, NotLeader, Term
from fmoe_ext.remote.server.state import write_state
from fmoe_ext.remote.wire import Message, WireError, encode


class Role(enum.Enum):
    IDLE = "idle"  # has some state, which nobody counts on
    JOINING = "joining"  # takes a copy; updates wait
    FOLLOWER = "follower"
    LEADER = "leader"


@dataclass(frozen=True)
class Loss:
    """Updates that a recovery under way would lose."""

    updates: int  # that etcd knows of
    gradients: int  # at least so many were in them
    most: int  # updates that may have been acknowledged
    since: float  # time.time() of the last leader at its last note


@dataclass
class Replica:
    """The history is the ledger's; here is what this server does with it."""

    uid: str
    ledger: Ledger
    role: Role = Role.IDLE
    leader: Leader | None = None  # while this server leads
    idle_since: float = 0.0
    early: list[Append] = field(default_factory=list)  # that came while it was joining
    copying: "asyncio.Task[object] | None" = None  # the call for a copy
    joins_from: str = ""  # the leader that copies
    joining: "asyncio.Task[None] | None" = None
    vacant: tuple[int, float] | None = None  # revision of the record, since when nobody leads
    hopeless_since: float = 0.0  # no member that could lead has been alive since then
    epoch: int = 0
    num_returns: int = 0  # of the registry, that were dealt with
    loss: Loss | None = None

    def become_idle(self, now: float) -> None:
        self.role, self.leader, self.idle_since = Role.IDLE, None, now

    def is_able(self) -> bool:
        """True if its state can be trusted to be that of a member, when the record has it as one."""
        return self.role is not Role.JOINING and not self.ledger.broken

    def needs_void(self, record: keys.Members | None, num_returns: int) -> bool:
        """True if the registry has gone back since this server learned of the expert's last term."""
        if self.ledger.seen.number > (0 if record is None else record.term):
            return True
        if record is not None and record.epoch > self.epoch:
            self.epoch, self.num_returns = record.epoch, num_returns
        return self.num_returns < num_returns and self.ledger.seen.number > 0


log = logging.getLogger("fmoe_ext.remote")
COPY_SECONDS = 60.0  # for a copy to come whole, as long as the leader waits for it
PROBE_SECONDS = 3.0  # that a leader has to probe a member that is idle, before it takes a copy
AGAIN_SECONDS = 0.5  # until the next attempt to take a copy


class Following:
    """Follower side of a server: experts that others lead."""

    def __init__(self, site: Site):
        self.site = site

    # ---------------------------------------------------------------- updates

    def receive(self, replica: Replica, append: Append) -> Reply:
        """An update or a probe: an update that is accepted counts as received."""
        ledger = replica.ledger
        if append.term < ledger.seen or append.term.leader == self.site.name:
            return self._refuse(replica, f"term {append.term.number} is over")
        if replica.leader is not None:
            replica.leader.end(f"term {append.term.number} has begun")
        ledger.see(append.term)
        if replica.role is Role.JOINING:
            if append.logged is None:
                return self._refuse(replica, "it takes a copy")
            replica.early.append(append)
            return self._accept(replica)
        if append.logged is None:
            if ledger.broken or append.end != ledger.end:
                return self._refuse(replica, ledger.broken)
        else:
            try:
                is_new = ledger.receive(append.logged, append.committed)
            except ValueError:
                return self._refuse(replica, ledger.broken or f"its log ends at version {ledger.end.version}")
            if is_new:
                self._apply(replica, append.logged)
        replica.role = Role.FOLLOWER
        ledger.commit(append.committed)
        return self._accept(replica)

    def _accept(self, replica: Replica) -> Reply:
        return Reply(True, replica.ledger.end, replica.ledger.seen)

    def _refuse(self, replica: Replica, reason: str) -> Reply:
        return Reply(False, replica.ledger.end, replica.ledger.seen, reason)

    def _apply(self, replica: Replica, logged: Logged) -> None:
        host, ledger = self.site.server.host, replica.ledger

        def work() -> None:
            try:
                host.apply(logged.update)
                if logged.digest and host.digest(replica.uid) != logged.digest:
                    raise ValueError(f"the weights differ from the leader's at version {logged.end.version}")
            except Exception as error:
                ledger.broken = ledger.broken or f"{error}"
                raise

        def check(future: "asyncio.Future[None]") -> None:
            if not future.cancelled() and (error := future.exception()) is not None:
                log.error("%s takes a new copy: %s", replica.uid, error)
                self.site.server.metrics.add("divergences_total")

        self.site.on_thread(work).add_done_callback(check)

    # ---------------------------------------------------------------- copies

    def follow(self, replica: Replica, leader: keys.Leader, record: keys.Members | None) -> None:
        """Takes a copy if this server is no member, or cannot be one, and there is room."""
        if replica.joining is not None and not replica.joining.done():
            if replica.joins_from != leader.server:
                self.stop_copying(replica)
            return
        endpoints = {} if record is None else record.endpoints
        is_member = self.site.name in endpoints
        if replica.role is Role.FOLLOWER and not is_member:
            replica.become_idle(self.site.now())
        if replica.role is Role.FOLLOWER and not replica.ledger.broken:
            return
        if is_member and not replica.ledger.broken and self.site.now() - replica.idle_since < PROBE_SECONDS:
            return
        if len(endpoints.keys() - {self.site.name}) < self.site.options.replicas:
            replica.joins_from = leader.server
            replica.joining = asyncio.create_task(self._join(replica, leader))

    def stop_copying(self, replica: Replica) -> None:
        """The leader that copies is gone; a copy that has come already is installed to its end."""
        if replica.copying is not None:
            replica.copying.cancel()

    async def _join(self, replica: Replica, leader: keys.Leader) -> None:
        """Takes a copy from the leader, then everything since, then is a member."""
        replica.role = Role.JOINING
        replica.early.clear()
        meta = {"uid": replica.uid, "server": self.site.name, "endpoint": self.site.server.endpoint}
        request = encode(Message({}, meta))
        copying = asyncio.create_task(
            self.site.peers.download(leader.endpoint, messages.JOIN, request, COPY_SECONDS)
        )
        replica.copying = copying
        try:
            copy = await copying
            await self._install(replica, copy)
            await self.site.peers.call(leader.endpoint, messages.READY, request, COPY_SECONDS)
            self.site.server.metrics.add("copies_taken_total")
            # the leader has written the record: the next look shall find this server in it
            for _ in range(20):
                record, _ = self.site.registry.view.members(replica.uid)
                if record is not None and self.site.name in record.endpoints:
                    break
                await asyncio.sleep(0.05)
            log.info("%s is replicated here from version %s on", replica.uid, copy.meta.get("version"))
        except (Exception, asyncio.CancelledError) as error:
            if replica.role is Role.JOINING:
                replica.become_idle(self.site.now())
            if isinstance(error, asyncio.CancelledError) and not copying.cancelled():
                raise  # the server stops
            known = isinstance(error, (errors.RemoteError, WireError, NotLeader, asyncio.CancelledError))
            log.warning("%s could not be copied: %r", replica.uid, error, exc_info=not known)
            await asyncio.sleep(AGAIN_SECONDS)
        finally:
            replica.copying = None

    async def _install(self, replica: Replica, copy: Message) -> None:
        term = Term(copy.number("seen"), copy.meta.get("seen_leader", ""))
        if term < replica.ledger.seen:
            raise NotLeader(f"the copy of {replica.uid} is of a term that is over")
        if copy.meta.get("uid") != replica.uid:
            raise WireError(f"the copy is not of {replica.uid}")
        await self.site.on_thread(lambda: write_state(self.site.server.host, copy))
        replica.ledger.see(term)
        replica.role = Role.FOLLOWER
        early, replica.early = replica.early, []
        for append in early:  # the copy has some of these already
            if append.end > replica.ledger.end and append.term == term:
                self.receive(replica, append)
