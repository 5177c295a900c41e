"""Leader: one term of one expert. It orders the expert's updates and answers each when all members have it.

ReplicatedExperts (replicas.py) makes one when etcd grants the term, and gives it each step that ExpertHost has made. A
term goes through three phases; the numbers are those of the invariants of docs/replication.md.
    confirming  Bring every member to this log, or remove it from the record (3).
    open        Give each update the next version and send it to all members at once. Answer it when they all have it;
                a member that does not confirm is first removed from the record in etcd (2, 6). No version is answered
                before the record reserves it (`reserved`), so a server that finds all members dead knows how many
                updates may be missing (7).
    ended       The lease is over, a larger term was seen, or etcd refused a write (5). Updates that were not answered
                fail, and their clients ask the next leader again under the same request ids (4).
Everything here runs on the event loop, except takes_steps() and holds(). Steps run on the thread that computes; the
Ledger's lock keeps both in one order.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from fmoe_ext.remote.discovery import DiscoveryError
from fmoe_ext.remote.errors import RemoteError
from fmoe_ext.remote.etcd import keys
from fmoe_ext.remote.replication import messages, recovery
from fmoe_ext.remote.replication.messages import Append, Reply, Sender
from fmoe_ext.remote.replication.registry import Site
from fmoe_ext.remote.server.host import Fail, Finish
from fmoe_ext.remote.server.ledger import End, Ledger, NotLeader, Term
from fmoe_ext.remote.server.state import read_state
from fmoe_ext.remote.wire import Message, encode

log = logging.getLogger("fmoe_ext.remote")
# that hand_over() waits for updates under way; clients repeat later ones at the next leader
HAND_OVER_SECONDS = 5.0
LEARN_SECONDS = 60.0  # that a server may take a copy: all updates are queued for it meanwhile
_HOST_AGAIN = 3.0  # seconds between two requests to other servers to become a replica
_NOTE_EVERY = 5.0  # seconds between two notes of the log's end in the record
_LEAST_RESERVED = 64  # updates that a note reserves at least, for an expert that is being trained
TAKES_COPY = "it takes a copy"  # why a member is removed, or refuses a probe


class Leader:
    """A server's leadership of an expert, for one term. ended() is called once, when it is over."""

    def __init__(
        self,
        site: Site,
        uid: str,
        ledger: Ledger,
        term: Term,
        guard: int,
        record: keys.Members,
        ended: Callable[[], None],
    ):
        self.site, self.uid, self.ledger, self.term = site, uid, ledger, term
        # create revision of the leader key: etcd refuses a write if the key is another one by then
        self.guard = guard
        self.is_open = self.is_closing = self.has_ended = False
        self._ended, self._lease = ended, site.registry.lease
        self.shipped = ledger.lead(term)  # end up to which the log was given to the senders
        self.committed = self.shipped  # end up to which every member has the log
        self.start = self.shipped.version  # version at which this term began
        # updates without an answer yet: (version, finish, fail)
        self._waiting: list[tuple[int, Finish, Fail]] = []
        self._commits: set[asyncio.Task[None]] = set()  # asyncio keeps only weak references to tasks
        self.record = record  # as it is in etcd
        # last version that may be acknowledged; at most what the record in etcd says
        self.reserved = record.reserved
        # Servers that must confirm an update, this one too. A server is in here before the record names it, and until
        # a record without it is written: so each member that anyone reads in the record has every acknowledged update.
        self.needed = set(record.endpoints)
        self.senders: dict[str, Sender] = {}  # by server, to members and to servers that take a copy
        self._changing = asyncio.Lock()  # held by every change of the record
        self._host_asked = self._noted_at = 0.0

    def holds(self) -> bool:
        """True while no other server can lead, by this server's clock; from any thread."""
        registry = self.site.registry
        return not self.has_ended and registry.lease == self._lease and registry.has_lease()

    def takes_steps(self) -> bool:
        return self.is_open and not self.is_closing and self.holds()

    def end(self, reason: str) -> None:
        """End this term; updates that were not acknowledged fail with NotLeader."""
        if self.has_ended:
            return
        self.has_ended, self.is_open = True, False
        self.ledger.step_down()
        log.warning("%s is led from here no more: %s", self.uid, reason)
        for sender in self.senders.values():
            sender.stop()
        waiting, self._waiting = self._waiting, []
        for _, _, fail in waiting:
            fail(NotLeader(f"not the leader of {self.uid} any more: {reason}"))
        self._ended()

    def check_open(self) -> None:
        if not self.takes_steps():
            raise NotLeader(f"not the leader of {self.uid}, or not yet")

    # ---------------------------------------------------------------- beginning

    async def confirm(self) -> None:
        """Bring every member to this log or remove it; then open the term for gradients."""
        endpoints = self.record.endpoints.items()
        senders = [self._add_sender(name, at) for name, at in endpoints if name != self.site.name]
        try:
            await asyncio.gather(*(self._confirm(sender) for sender in senders))
        except NotLeader:
            return
        # each member that is still needed has confirmed: _remove() takes the others out of `needed`
        if not self.has_ended and self.needed <= {self.site.name, *self.senders}:
            self.ledger.open(self.term)
            self.is_open = True
            version, term = self.shipped.version, self.term.number
            log.info("%s is led from here, version %d, term %d", self.uid, version, term)

    async def _confirm(self, sender: Sender) -> None:
        # A probe asks whether the member's log ends where this one does. If not, there are four cases:
        reply = await sender.put(self.probe())
        if reply is not None and not reply.is_accepted:
            missing = self.ledger.tail_after(reply.end)
            is_longer = reply.end > self.shipped and not reply.reason
            # 1. it knows a larger term: this one is over
            if reply.seen > self.term:
                self.ledger.see(reply.seen)
                self.end(f"{sender.endpoint} knows of term {reply.seen.number}")
                raise NotLeader
            # 2. its log is shorter: it gets the rest
            if missing:
                appends = [Append(self.uid, self.term, 0, entry.end, entry) for entry in missing]
                replies = await asyncio.gather(*(sender.put(append) for append in appends))
                reply = replies[-1]
            # 3. its log is longer and it lives: it leads, so that nothing has to be rolled back
            elif is_longer and sender.server in self.site.registry.view.servers():
                record = replace(self.record, successor=sender.server)
                try:
                    await self.site.registry.resign(self.uid, self.guard, record)
                except DiscoveryError as error:
                    log.warning("%s: %s", self.uid, error)
                self.end(f"{sender.server} has a longer log")
                raise NotLeader
        # 4. its log branches off, or it did not answer: it is no member any more, and may take a copy
        if reply is None or not reply.is_accepted or reply.is_early:
            is_early = reply is not None and reply.is_early
            await self._remove(
                sender, sender.failure or (TAKES_COPY if is_early else "its log is another one")
            )

    def probe(self) -> Append:
        return Append(self.uid, self.term, self.ledger.committed, self.shipped)

    # ---------------------------------------------------------------- updates

    def await_commit(self, version: int, finish: Finish, fail: Fail) -> None:
        """Send the updates up to a version to all members; finish() once they have them, fail(error) if that fails."""
        if not self.is_open:
            fail(NotLeader(f"not the leader of {self.uid}, or not yet"))
            return
        self._waiting.append((version, finish, fail))
        # Only up to this version: the thread that computes may have added later ones, which wait for their own call.
        for update in self.ledger.tail_after(self.shipped) or ():
            if update.end.version > version:
                break
            self.shipped = update.end
            append = Append(self.uid, self.term, self.ledger.committed, update.end, update)
            # to all at once, joining servers too; each sender keeps the order
            acks = [(s, s.put(append), s.server in self.needed) for s in self.senders.values()]
            if acks or update.end.version > self.reserved:
                task = asyncio.create_task(self._commit(update.end, acks))
                self._commits.add(task)
                task.add_done_callback(self._commits.discard)
            else:
                self._advance(update.end)
        if version <= self.committed.version:  # a repeated request, whose update every member has
            self._advance(self.committed)

    async def _commit(
        self, end: End, acks: list[tuple[Sender, "asyncio.Future[Reply | None]", bool]]
    ) -> None:
        try:
            for sender, ack, was_needed in acks:
                reply = await ack
                # A member that takes a copy may lose what waits for it. One that was no member when this was sent may
                # be by now: promote() has asked whether it has everything.
                if reply is None or not reply.is_accepted or (reply.is_early and was_needed):
                    await self._remove(sender, sender.failure or TAKES_COPY)
            await self.reserve(end.version)
        except NotLeader:
            return
        self._advance(end)

    def _advance(self, end: End) -> None:
        """Commit the log up to `end`, which every member has, and answer its updates; only while the lease holds."""
        if not self.holds():
            self.end("its lease is over")
            return
        # a later update may have been confirmed by all members first
        self.committed = max(self.committed, end)
        self.ledger.commit(self.committed.version)
        done = [one for one in self._waiting if one[0] <= self.committed.version]
        self._waiting = [one for one in self._waiting if one[0] > self.committed.version]
        for _, finish, _ in done:
            finish()

    # ---------------------------------------------------------------- members

    def _add_sender(self, name: str, endpoint: str) -> Sender:
        if (old := self.senders.pop(name, None)) is not None:
            old.stop()
        sender = Sender(self.site.peers, name, endpoint, self.site.options.ack_timeout)
        self.senders[name] = sender
        return sender

    async def _remove(self, sender: Sender, reason: str) -> None:
        """Take a member out of the record, or stop sending to a server that joins; NotLeader if etcd refuses."""
        async with self._changing:
            if self.has_ended:
                raise NotLeader(f"not the leader of {self.uid} any more")
            if self.senders.get(sender.server) is not sender:
                return  # removed already, or replaced
            if sender.server in self.needed:
                log.warning("%s: %s is removed from the members (%s)", self.uid, sender.endpoint, reason)
                left = {n: e for n, e in self.record.endpoints.items() if n != sender.server}
                await self._write(left)
                self.needed.discard(sender.server)
                self.site.server.metrics.add("members_removed_total")
            sender.stop()
            self.senders.pop(sender.server, None)

    async def _write(self, endpoints: dict[str, str], version: int = 0) -> None:
        """Write the record to etcd; NotLeader, and the end of this term, if it refuses or is silent.

        version: one that is about to be acknowledged, and has to be reserved.
        """
        record = self._noted(endpoints, version)
        # the smaller of both, until the answer says which record etcd has
        self.reserved = min(self.reserved, record.reserved)
        try:
            is_written = await self.site.registry.set_members(self.uid, self.guard, record)
            reason = "its key in the registry has changed"
        except DiscoveryError as error:
            is_written, reason = False, f"the registry does not answer ({error})"
        if not is_written:
            self.site.server.metrics.add("fenced_total")
            self.end(reason)
            raise NotLeader(f"not the leader of {self.uid} any more: {reason}")
        self.record, self.reserved = record, record.reserved

    def _noted(self, endpoints: dict[str, str], version: int = 0) -> keys.Members:
        reserved = max(self.committed.version, version)
        # An expert without updates since the last note reserves none, so that a recovery counts none as lost. Others
        # reserve twice as many as came since then, so that few updates wait for a write to etcd.
        if since := reserved - self.record.version:
            reserved += max(_LEAST_RESERVED, 2 * since)
        return self.record.reaching(
            self.committed,
            endpoints=endpoints,
            successor="",
            starts=recovery.with_start(self.record.starts, self.term.number, self.start),
            requests=self.ledger.requests_at(self.committed.version),
            reserved=reserved,
            noted=time.time(),
        )

    async def reserve(self, version: int) -> None:
        """Wait until the record in etcd reserves a version; this bounds what is lost if all members die."""
        while version > self.reserved:
            async with self._changing:
                if self.has_ended:
                    raise NotLeader(f"not the leader of {self.uid} any more")
                if version > self.reserved:
                    await self._write(dict(self.record.endpoints), version)

    async def admit(self, name: str, endpoint: str) -> Message:
        """Return a copy of the expert for a server that joins; every update after the copy is sent to it too."""
        self.check_open()
        if name in self.needed and (member := self.senders.get(name)) is not None:
            await self._remove(member, "it asks for a copy")
        self._check_room(name)
        # The copy is read on the thread that computes, between two steps. Steps before it have called
        # call_soon_threadsafe(await_commit) by then, later ones have not: at_copy() lands between them on the loop, so
        # the new sender gets exactly the updates that the copy lacks.
        sender: list[Sender] = []
        loop = asyncio.get_running_loop()

        def at_copy() -> None:
            known = self.senders.get(name)
            if not self.has_ended and not self._is_full(name) and not (known and name in self.needed):
                sender.append(self._add_sender(name, endpoint))

        def take() -> Message:
            state = read_state(self.site.server.host, self.uid)
            loop.call_soon_threadsafe(at_copy)
            return state

        state = await self.site.on_thread(take)
        self.check_open()
        if not sender:
            self._check_room(name)
            raise NotLeader(f"{name} became a replica of {self.uid} meanwhile: it may ask again")
        return Message(state.tensors, {**state.meta, **self.term.meta("seen")})

    async def promote(self, name: str) -> None:
        """Make a server that has installed its copy a member: nothing is acknowledged without it any more."""
        self.check_open()
        async with self._changing:
            sender = self.senders.get(name)
            if sender is None or sender.is_dead or self.has_ended:
                raise NotLeader(f"{name} has missed updates of {self.uid}: it must take another copy")
            if name in self.needed:
                return  # the same call came twice
            # needed before the record names it; the probe, behind all updates in its queue, shows that it has them
            self.needed.add(name)
            reply = await sender.put(self.probe())
            if reply is None or not reply.is_accepted:
                self.needed.discard(name)
                why = sender.failure or "its log differs"
                raise NotLeader(f"{name} has missed updates of {self.uid}: {why}")
            if self.has_ended:
                raise NotLeader(f"not the leader of {self.uid} any more")
            await self._write({**self.record.endpoints, name: sender.endpoint})
        log.info("%s has %d replicas", self.uid, len(self.record.endpoints))

    def _check_room(self, name: str) -> None:
        if self._is_full(name):
            raise ValueError(f"{self.uid} has its replicas, or servers that take copies: no more")

    def _is_full(self, name: str) -> bool:
        """True if members and servers that take copies, without `name`, are as many as --replicas asks for."""
        return len({*self.needed, *self.senders} - {name}) >= self.site.options.replicas

    async def look_after(self) -> None:
        """Remove members whose servers are gone, note the log's end, and have a server join if replicas are missing."""
        alive, now = self.site.registry.view.servers(), self.site.now()
        try:
            for sender in list(self.senders.values()):
                # every update is queued for a server that takes a copy: not for ever, or the queue would grow
                late = sender.server not in self.needed and now - sender.begun > LEARN_SECONDS
                if sender.is_dead or late or sender.server not in alive:
                    await self._remove(sender, sender.failure or "its server is gone")
            if not self.is_open:  # confirm() does the rest
                return
            # a note every few seconds is what a later recovery counts its losses by
            end = self.committed.version
            if now - self._noted_at >= _NOTE_EVERY and (end, end) != (self.record.version, self.reserved):
                self._noted_at = now
                async with self._changing:
                    await self._write(dict(self.record.endpoints))
        except NotLeader:
            return
        if len({*self.needed, *self.senders}) >= self.site.options.replicas:
            return
        options = self.site.server.options  # a replica must be of the same class and width
        free = {
            name: entry
            for name, entry in self.site.registry.view.servers().items()
            if name not in self.record.endpoints
            and (entry.expert_cls, entry.hidden_dim) == (options.expert_cls, options.hidden_dim)
        }
        if not free or now - self._host_asked < _HOST_AGAIN:
            return
        self._host_asked = now
        name = min(free, key=lambda name: (free[name].num_experts, name))  # the one with the least to do
        request = encode(Message({}, {"uid": self.uid}))
        endpoint, timeout = free[name].endpoint, self.site.options.ack_timeout
        try:
            await self.site.peers.call(endpoint, messages.HOST, request, timeout)
        except RemoteError as error:
            log.warning("%s cannot be replicated at %s: %s", self.uid, endpoint, error)

    # ---------------------------------------------------------------- ending

    async def hand_over(self) -> None:
        """Take no more gradients, wait for those under way, and name a member that has them all as the next leader."""
        self.is_closing = True
        # steps under way on the thread end first; then the loop runs the await_commit() that they have scheduled
        await self.site.on_thread(lambda: None)
        await asyncio.sleep(0)
        if self._commits:
            await asyncio.wait(self._commits, timeout=HAND_OVER_SECONDS)
        async with self._changing:
            if self.has_ended:
                return
            try:
                left = {n: e for n, e in self.record.endpoints.items() if n != self.site.name}
                healthy = (n for n, s in self.senders.items() if n in self.needed and not s.is_dead)
                # nothing is acknowledged beyond the end from here on, so nothing stays reserved
                end = self.committed.version
                record = replace(self._noted(left), successor=next(healthy, ""), reserved=end)
                self.reserved = min(self.reserved, end)
                await self.site.registry.resign(self.uid, self.guard, record)
            finally:
                self.end("this server stops")
