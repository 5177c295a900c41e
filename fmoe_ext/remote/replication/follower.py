"""Replica: one expert at one server, and what the server does with it while another one leads.

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

from fmoe_ext.remote import errors
from fmoe_ext.remote.etcd import keys
from fmoe_ext.remote.replication import messages
from fmoe_ext.remote.replication.leader import Leader
from fmoe_ext.remote.replication.messages import Append, Reply
from fmoe_ext.remote.replication.recovery import Loss
from fmoe_ext.remote.replication.registry import Site
from fmoe_ext.remote.server.ledger import Ledger, NotLeader, Term, Update
from fmoe_ext.remote.server.state import write_state
from fmoe_ext.remote.wire import Message, WireError, encode

log = logging.getLogger("fmoe_ext.remote")
COPY_SECONDS = 60.0  # for a copy to come whole, as long as the leader waits for it
PROBE_SECONDS = 3.0  # that a leader has to probe a member that is idle, before it takes a copy
AGAIN_SECONDS = 0.5  # until the next attempt to take a copy


class Role(enum.Enum):
    """The part of a server in an expert's replicas."""

    IDLE = "idle"  # has some state, which nobody counts on
    JOINING = "joining"  # takes a copy; updates wait
    FOLLOWER = "follower"
    LEADER = "leader"


class Replica:
    """The history is the ledger's; here is what this server does with it."""

    def __init__(self, site: Site, uid: str, ledger: Ledger):
        self.site, self.uid, self.ledger = site, uid, ledger
        self.role = Role.IDLE
        self.leader: Leader | None = None  # while this server leads
        self.vacant: tuple[int, float] | None = None  # revision of the record, since when nobody leads
        self.hopeless_since = 0.0  # no member that could lead has been alive since then
        self.epoch = 0
        self.num_returns = site.registry.num_returns  # of the registry, that were dealt with
        self.loss: Loss | None = None
        self.joining: asyncio.Task[None] | None = None
        self._joins_from = ""  # the leader that copies
        self._copying: asyncio.Task[Message] | None = None  # the call for a copy
        self._early: list[Append] = []  # that came while it was joining
        self._idle_since = 0.0

    def become_idle(self) -> None:
        self.role, self.leader, self._idle_since = Role.IDLE, None, self.site.now()

    def is_able(self) -> bool:
        """True if its state can be trusted, when the record has it as a member."""
        return self.role is not Role.JOINING and not self.ledger.broken

    def needs_void(self, record: keys.Members | None, num_returns: int) -> bool:
        """True if the registry has gone back since this server learned of the expert's last term."""
        if self.ledger.seen.number > (0 if record is None else record.term):
            return True
        if record is not None and record.epoch > self.epoch:  # another server has dealt with it
            self.epoch, self.num_returns = record.epoch, num_returns
        return self.num_returns < num_returns and self.ledger.seen.number > 0

    # ---------------------------------------------------------------- updates

    def receive(self, append: Append) -> Reply:
        """An update or a probe: an update that is accepted counts as received."""
        ledger = self.ledger
        if append.term < ledger.seen or append.term.leader == self.site.name:
            return self._reply(f"term {append.term.number} is over")
        if self.leader is not None:
            self.leader.end(f"term {append.term.number} has begun")
        ledger.see(append.term)
        if self.role is Role.JOINING:
            if append.update is None:
                return self._reply("it takes a copy")
            self._early.append(append)
            return self._reply()
        if append.update is None:
            if ledger.broken or append.end != ledger.end:
                return Reply(False, ledger.end, ledger.seen, ledger.broken)
        else:
            try:
                is_new = ledger.receive(append.update, append.committed)
            except ValueError:
                return self._reply(ledger.broken or f"its log ends at version {ledger.end.version}")
            if is_new:
                self._apply(append.update)
        self.role = Role.FOLLOWER
        ledger.commit(append.committed)
        return self._reply()

    def _reply(self, refusal: str = "") -> Reply:
        return Reply(not refusal, self.ledger.end, self.ledger.seen, refusal)

    def _apply(self, update: Update) -> None:
        """Has the device repeat an update; one that does not give the leader's weights breaks this replica."""
        host, ledger = self.site.server.host, self.ledger

        def work() -> None:
            try:
                host.apply(update)
                if update.digest and host.digest(self.uid) != update.digest:
                    raise ValueError(f"the weights differ from the leader's at version {update.end.version}")
            except Exception as error:
                ledger.broken = ledger.broken or f"{error}"
                raise

        def check(future: "asyncio.Future[None]") -> None:
            if not future.cancelled() and (error := future.exception()) is not None:
                log.error("%s takes a new copy: %s", self.uid, error)
                self.site.server.metrics.add("divergences_total")

        self.site.on_thread(work).add_done_callback(check)

    # ---------------------------------------------------------------- copies

    def follow(self, leader: keys.Leader, record: keys.Members | None) -> None:
        """Takes a copy if this server is no member, or cannot be one, and there is room."""
        if self.joining is not None and not self.joining.done():
            if self._joins_from != leader.server:
                self.stop_copying()
            return
        endpoints = {} if record is None else record.endpoints
        is_member = self.site.name in endpoints
        if self.role is Role.FOLLOWER and not is_member:
            self.become_idle()
        if self.role is Role.FOLLOWER and not self.ledger.broken:
            return
        if is_member and not self.ledger.broken and self.site.now() - self._idle_since < PROBE_SECONDS:
            return  # the leader is about to confirm its log
        if len(endpoints.keys() - {self.site.name}) < self.site.options.replicas:
            self._joins_from = leader.server
            self.joining = asyncio.create_task(self._join(leader))

    def stop_copying(self) -> None:
        """The leader that copies is gone; a copy that has come already is installed to its end."""
        if self._copying is not None:
            self._copying.cancel()

    async def _join(self, leader: keys.Leader) -> None:
        """Takes a copy from the leader, then everything since, then is a member."""
        site, ledger = self.site, self.ledger
        self.role = Role.JOINING
        self._early.clear()
        meta = {"uid": self.uid, "server": site.name, "endpoint": site.server.endpoint}
        request = encode(Message({}, meta))
        download = site.peers.download(leader.endpoint, messages.JOIN, request, COPY_SECONDS)
        self._copying = copying = asyncio.create_task(download)
        try:
            copy = await copying
            term = Term.read(copy, "seen")
            if term < ledger.seen:
                raise NotLeader(f"the copy of {self.uid} is of a term that is over")
            if copy.meta.get("uid") != self.uid:
                raise WireError(f"the copy is not of {self.uid}")
            await site.on_thread(lambda: write_state(site.server.host, copy))
            ledger.see(term)
            self.role = Role.FOLLOWER
            early, self._early = self._early, []
            for append in early:  # the copy has some of these already
                if append.end > ledger.end and append.term == term:
                    self.receive(append)
            await site.peers.call(leader.endpoint, messages.READY, request, COPY_SECONDS)
            site.server.metrics.add("copies_taken_total")
            # the leader has written the record: the next look shall find this server in it
            for _ in range(20):
                record, _ = site.registry.view.members(self.uid)
                if record is not None and site.name in record.endpoints:
                    break
                await asyncio.sleep(0.05)
            log.info("%s is replicated here from version %s on", self.uid, copy.meta.get("version"))
        except (Exception, asyncio.CancelledError) as error:
            if self.role is Role.JOINING:
                self.become_idle()
            if isinstance(error, asyncio.CancelledError) and not copying.cancelled():
                raise  # the server stops
            known = isinstance(error, (errors.RemoteError, WireError, NotLeader, asyncio.CancelledError))
            log.warning("%s could not be copied: %r", self.uid, error, exc_info=not known)
            await asyncio.sleep(AGAIN_SECONDS)
        finally:
            self._copying = None
