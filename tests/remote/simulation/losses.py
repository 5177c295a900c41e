"""Exactly which acknowledged updates are lost, at which change of leader, and if that was allowed."""

import contextlib
from dataclasses import dataclass

from fmoe_ext.remote.etcd import keys
from fmoe_ext.remote.server.checkpoints import Damaged, decode_with_checksums
from fmoe_ext.remote.server.state import read_ids
from fmoe_ext.remote.wire import WireError
from tests.remote.simulation.checker import Failed

STALE = (
    8.0  # seconds after a registry was restored in which two servers may lead without knowing of each other
)


@dataclass
class Recovery:
    """A server leads without what the record knew. counted, leads, counted_at_most: its metrics before."""

    server: object
    known: int
    counted: float
    leads: float
    lost: int  # whether the record knew of them or not
    counted_at_most: float

    def check(self):
        metrics = self.server.metrics
        reported = metrics.count("updates_lost_total") - self.counted
        if metrics.count("leads_won_total") > self.leads and reported < self.known:
            raise Failed(f"the record knew of {self.known} lost updates, {reported:.0f} were counted")
        at_most = metrics.count("updates_lost_at_most_total") - self.counted_at_most
        if metrics.count("leads_won_total") > self.leads and at_most < self.lost:
            raise Failed(f"{self.lost} updates were lost, but at most {at_most:.0f} were said to be")


class Losses:
    """Compares the log of every new leader with what was acknowledged until then.

    A new leader may lack an update only if all members had died since the last one began to lead (dead, or without a
    lease), or if the update is of the time in which a restored registry misled the servers.
    """

    def __init__(self, world, uid, recovery_wait):
        self.world, self.uid, self.recovery_wait = world, uid, recovery_wait
        self.history = world.history
        self.answered = {}  # request id: version, when a server answered
        self.are_gone = False  # all members, at some time since the last leader began
        self.alone_since = 0.0
        self.restored_until = -1.0
        self.leader = None
        self.recoveries = []

    def note_restore(self):
        """The registry goes back while faults hide the newest log."""
        self.restored_until = self.world.loop.time() + STALE

    def note_members(self, was_killed=False):
        """After a SIGTERM the record may have no members; then a loss needs a kill, or the whole of the wait."""
        now, record = self.world.loop.time(), self._record()
        members = set() if record is None else set(record.endpoints)
        living = {
            server.name
            for server in self.world.everyone()
            if not server.process.is_dead and keys.SERVERS + server.name in self.world.etcd.entries
        }
        if record is None or living & members:
            self.alone_since = now
        elif members or was_killed or now - self.alone_since > 0.9 * self.recovery_wait:
            self.are_gone = True

    def note_answer(self, server, request_id, version):
        """A server acknowledges. One that was paused may do so when another leads already."""
        is_new = request_id not in self.answered
        self.answered[request_id] = version
        if server is self.leader:
            if is_new:  # others were lost and came again, as late messages
                self.history.lost.discard(request_id)
        elif self.leader is not None and request_id not in self.history.lost:
            self._compare({request_id: version}, "acknowledged after the next leader began")

    def before_puts(self, puts):
        """A transaction that succeeds: does it make a leader?"""
        value = dict(puts).get(keys.leader_key(self.uid))
        if value is None:
            return
        self.note_members()
        name, before = keys.load(keys.Leader, value).server, self.leader
        self.leader = next(s for s in self.world.everyone() if s.name == name)
        if before is not self.leader and self.recoveries and not self._has_won(self.recoveries[-1]):
            self.recoveries.pop()  # it died, or was replaced, before it knew
        held, lost = self._held(), self.history.lost
        until = float("inf") if self.are_gone else self.restored_until
        old = {i for i, when in self.history.begun.items() if when < until}
        allowed = {i for i in old if i not in held or held[i] != self.answered.get(i, held[i])}
        new = {i: self.answered[i] for i in allowed - lost if i in self.answered and i not in held}
        lost |= allowed
        self._compare(self.answered, "no member had failed")
        if kept := self._kept_on_disk() & new.keys():
            raise Failed(f"{name} leads without {len(kept)} updates that its own disk has")
        self._note(new)
        self.are_gone = False

    def _note(self, new):
        """The server must count what the record knew of, when it leads without it."""
        if not new:
            return
        self.world.note("lost", len(new), "by", self.leader.name, sorted(i[:6] for i in new))
        record = self._record()
        if record is not None and self.leader.name not in record.endpoints and not record.voided:
            known = len({version for version in new.values() if version <= record.version})
            metrics = self.leader.metrics
            before = metrics.count("updates_lost_total"), metrics.count("leads_won_total")
            lost, at_most = len(set(new.values())), metrics.count("updates_lost_at_most_total")
            self.recoveries.append(Recovery(self.leader, known, *before, lost, at_most))

    @staticmethod
    def _has_won(recovery):
        return recovery.server.metrics.count("leads_won_total") > recovery.leads

    def _compare(self, answered, why):
        held, lost = self._held(), self.history.lost
        if missing := [i[:6] for i, v in answered.items() if held.get(i) != v and i not in lost]:
            raise Failed(f"{self.leader.name} leads without {sorted(missing)}: {why}")

    def _held(self):
        """The request ids in the log of the leader, with versions; older ones than it remembers count as held."""
        ledger = self.leader.placement.replicas[self.uid].ledger
        held = dict(ledger.applied)
        for update in ledger.tail:
            held.update({request.request_id: update.end.version for request in update.requests})
        if len(ledger.applied) >= 1024:
            oldest = min(ledger.applied.values())
            held.update({i: version for i, version in self.answered.items() if version <= oldest})
        return held

    def _kept_on_disk(self):
        """The request ids in whole files of the leader's folder, whatever their names."""
        found = set()
        for data in self.leader.disk.files.values():
            with contextlib.suppress(Damaged, WireError):
                state = decode_with_checksums(data)
                if state.meta["uid"] == self.uid:
                    found |= read_ids(state).keys()
        return found

    def _record(self):
        entry = self.world.etcd.entries.get(keys.members_key(self.uid))
        return None if entry is None else keys.load(keys.Members, entry[0])
