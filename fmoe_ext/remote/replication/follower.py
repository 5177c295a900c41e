"""Replica: one expert at one server, and what the server does with it while another server leads.

ReplicatedExperts (replicas.py) has one for each expert, and gives it the leader's messages. A follower accepts an
update if its own log ends where the leader's did before it (receive). It answers once the update is in its log; the
weights follow on the thread that computes, before any call that comes later (_apply). It repeats the gradients, not
their result, so replicas on equal processors are equal in every bit; digests find those that are not. Where nobody
leads, recovery.py decides who will, by is_able() and the time since vacant and hopeless_since.

A follower that refuses an update is removed from the record, and takes a copy (_join):
    1. JOIN: the leader copies the expert, and sends every later update from that moment on
    2. updates that arrive before the copy does wait in _early, and the answer says so: no update counts as
       acknowledged by a member that has it only there. They hold memory of site.early; without room for one the copy
       is given up, and another one begins.
    3. the copy is installed, then what the early updates add to it
    4. READY: the leader probes, and makes this server a member if its log ends where the leader's does
"""

import asyncio
import enum
import logging

from fmoe_ext.remote import errors
from fmoe_ext.remote.etcd import keys
from fmoe_ext.remote.replication import messages
from fmoe_ext.remote.replication.leader import TAKES_COPY, Leader
from fmoe_ext.remote.replication.messages import Append, Reply
from fmoe_ext.remote.replication.recovery import Loss
from fmoe_ext.remote.replication.registry import Site
from fmoe_ext.remote.server.ledger import Ledger, NotLeader, Term, Update
from fmoe_ext.remote.server.state import write_state
from fmoe_ext.remote.wire import Message, WireError, encode

log = logging.getLogger("fmoe_ext.remote")
# for a copy to come whole: leader.LEARN_SECONDS, for which the leader keeps updates for it
COPY_SECONDS = 60.0
_PROBE_SECONDS = 3.0  # from become_idle() on, in which a member waits for a leader's probe and takes no copy
AGAIN_SECONDS = 0.5  # after a copy that failed, until the next attempt


class Role(enum.Enum):
    """The part of a server in an expert's replicas."""

    IDLE = "idle"  # has some state, which no leader counts on
    JOINING = "joining"  # takes a copy; updates wait for it
    FOLLOWER = "follower"  # accepts the leader's updates
    LEADER = "leader"  # orders updates: Replica.leader


class Replica:
    """One expert at this server: its role, and its part in elections and copies. Its history is the Ledger."""

    def __init__(self, site: Site, uid: str, ledger: Ledger):
        self.site, self.uid, self.ledger = site, uid, ledger
        self.role = Role.IDLE
        self.leader: Leader | None = None  # while this server leads
        # while nobody leads: revision of the record, and site.now() since when that is so under this record
        self.vacant: tuple[int, float] | None = None
        self.hopeless_since = 0.0  # site.now() since when no member that could lead is alive
        self.epoch = 0  # the largest in a record
        self.num_returns = site.registry.num_returns  # returns of etcd that were dealt with for this expert
        self.loss: Loss | None = None  # of a recovery under way, until it is counted
        self.joining: asyncio.Task[None] | None = None  # _join()
        self._joins_from = ""  # the leader whose copy is taken
        self._copying: asyncio.Task[Message] | None = None  # the call for a copy
        self._copying_stopped = ""  # why that call was cancelled
        self._early: list[Append] = []  # updates that came before the copy
        self._idle_since = 0.0  # site.now()

    def become_idle(self) -> None:
        self.role, self.leader, self._idle_since = Role.IDLE, None, self.site.now()

    def is_able(self) -> bool:
        """True if its state can be trusted, so that it may lead if the record names it as a member."""
        return self.role is not Role.JOINING and not self.ledger.broken

    def needs_void(self, record: keys.Members | None, num_returns: int) -> bool:
        """True if etcd went back after this server learned of the expert's last term, and nobody has dealt with it.

        Another server has if the record is of a later epoch, which is noted here.
        """
        # a larger term than the record's: etcd has lost the record, or the view is behind and voiding it will fail
        if self.ledger.seen.number > (0 if record is None else record.term):
            return True
        if record is not None and record.epoch > self.epoch:
            self.epoch, self.num_returns = record.epoch, num_returns
        return self.num_returns < num_returns and self.ledger.seen.number > 0

    # ---------------------------------------------------------------- updates

    def receive(self, append: Append) -> Reply:
        """Answer an update or a probe of a leader; an accepted update is in the log by then, or waits for the copy."""
        # 1. of a term that is over, or of a larger one than any before
        ledger = self.ledger
        if append.term < ledger.seen or append.term.leader == self.site.name:
            return self._reply(f"term {append.term.number} is over")
        if self.leader is not None:
            self.leader.end(f"term {append.term.number} has begun")
        ledger.see(append.term)
        # 2. before the copy: updates wait
        if self.role is Role.JOINING:
            if append.update is None:
                return self._reply(TAKES_COPY)
            size = append.update.num_bytes
            if not self.site.early.has_room(self.uid, size):
                text = f"no room for an update of {size} bytes that came before its copy: {self.site.early}"
                self.stop_copying(text)
                return self._reply(text)
            self.site.early.add(self.uid, size)
            self._early.append(append)
            return Reply(True, ledger.end, ledger.seen, is_early=True)
        # 3. a probe is accepted if the logs end alike, an update if it follows this log
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
        """Have the computing thread repeat an update; if that fails or the digests differ, this replica is broken."""
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
        """Begin to take a copy from the leader, if this server is no sound member and replicas are missing."""
        if self.joining is not None and not self.joining.done():
            if self._joins_from != leader.server:
                self.stop_copying(f"{self._joins_from} leads no longer")
            return
        endpoints = {} if record is None else record.endpoints
        is_member = self.site.name in endpoints
        if self.role is Role.FOLLOWER and not is_member:
            self.become_idle()
        if self.role is Role.FOLLOWER and not self.ledger.broken:
            return
        if is_member and not self.ledger.broken and self.site.now() - self._idle_since < _PROBE_SECONDS:
            return  # the leader is about to confirm its log
        if len(endpoints.keys() - {self.site.name}) < self.site.options.replicas:
            self._joins_from = leader.server
            self.joining = asyncio.create_task(self._join(leader))

    def stop_copying(self, reason: str) -> None:
        """Cancel the call for a copy; a copy that has come whole is still installed."""
        if self._copying is not None:
            self._copying_stopped = reason
            self._copying.cancel()

    def _take_early(self) -> list[Append]:
        early, self._early = self._early, []
        self.site.early.add(self.uid, -sum(append.update.num_bytes for append in early if append.update))
        return early

    async def _join(self, leader: keys.Leader) -> None:
        """Take a copy from the leader, add the updates since, and become a member; see the top of this file."""
        site, ledger = self.site, self.ledger
        self.role = Role.JOINING
        meta = {"uid": self.uid, "server": site.name, "endpoint": site.server.endpoint}
        request = encode(Message({}, meta))
        download = site.peers.download(leader.endpoint, messages.JOIN, request, COPY_SECONDS)
        self._copying = copying = asyncio.create_task(download)
        try:
            # 1., 2. The copy, while receive() collects updates. wait() keeps the end of the call (stop_copying) and the
            # end of this task apart: neither is cancelled with the other.
            await asyncio.wait((copying,))
            if copying.cancelled():
                raise NotLeader(self._copying_stopped)
            copy = copying.result()
            term = Term.read(copy, "seen")
            if term < ledger.seen:
                raise NotLeader(f"the copy of {self.uid} is of a term that is over")
            if copy.meta.get("uid") != self.uid:
                raise WireError(f"the copy is not of {self.uid}")
            # 3. install it, then the updates that it lacks
            await site.on_thread(lambda: write_state(site.server.host, copy))
            ledger.see(term)
            self.role = Role.FOLLOWER
            for append in self._take_early():  # the copy has some of these already
                if append.end > ledger.end and append.term == term:
                    self.receive(append)
            # 4. become a member
            await site.peers.call(leader.endpoint, messages.READY, request, COPY_SECONDS)
            site.server.metrics.add("copies_taken_total")
            # The leader has written the record by now. Wait until the watch shows it, or the next look would find this
            # server no member and take another copy.
            for _ in range(20):
                record, _ = site.registry.view.members(self.uid)
                if record is not None and site.name in record.endpoints:
                    break
                await asyncio.sleep(0.05)
            log.info("%s is replicated here from version %s on", self.uid, copy.meta.get("version"))
        except (Exception, asyncio.CancelledError) as error:
            if self.role is Role.JOINING:
                self.become_idle()
                self._take_early()  # their tensors are no longer needed
            if isinstance(error, asyncio.CancelledError):
                raise  # the server stops
            known = isinstance(error, (errors.RemoteError, WireError, NotLeader))
            log.warning("%s could not be copied: %r", self.uid, error, exc_info=not known)
            await asyncio.sleep(AGAIN_SECONDS)
        finally:
            copying.cancel()
            self._copying = None
