"""The replication protocol of docs/replication.md as a transition system: one expert, three servers, a registry.

A state is a tuple of tuples; steps(state) yields every state that can follow. Each call and each transaction is one
step, with a second version of it whose answer is lost. Messages may be late, lost or repeated: what a leader has sent
stays in `sent`, and any of it may be delivered at any time. Time is absent: leases expire at any moment.

`broken` puts one of the faults of FAULTS back.
"""

from typing import NamedTuple

SERVERS = range(3)
GHOST = 1 << 3  # in a set of members: names of processes that are dead
NOBODY, DEAD = -1, -2  # as leader
IDLE, CONFIRMING, OPEN = 0, 1, 2
UNKNOWN = -1

FAULTS = (
    "order by version",
    "wait of an earlier vacancy",
    "answer before confirming",
    "step without log",
    "idle members never lead",
    "term falls back with the registry",
    "silent sender",
    "update that followers refuse",
    "accept a damaged checkpoint",
    "count what waits for a copy",
)


class Server(NamedTuple):
    """log: of (term, update); a term is (number, server). acked: what each server confirmed of this leader's log."""

    up: bool = True
    lease: bool = True
    role: int = IDLE
    log: tuple = ()
    seen: int = 0
    term: tuple = (0, 0)
    members: int = 0  # as this leader believes
    acked: tuple = (UNKNOWN,) * 3
    epoch: int = 0
    noticed: bool = False  # that the registry went back
    stopped: bool = False  # by SIGTERM, as the leader: it will start again
    joining: bool = False  # a member that takes a copy: updates that come wait for it
    is_follower: bool = False  # only read by a fault
    stray: frozenset = frozenset()  # only written by a fault
    deaf: int = 0  # only written by a fault


class Record(NamedTuple):
    """The registry: what it says of the expert."""

    leader: int = NOBODY
    members: int = 0
    term: int = 0
    end: tuple = ((0, 0), 0)
    epoch: int = 0
    waited: bool = False  # --recovery_wait has passed in this vacancy
    successor: int = NOBODY  # who should lead next, if it lives
    voided: bool = False  # and nobody has led since


class Budget(NamedTuple):
    """The number of faults of each kind that may still happen."""

    updates: int = 2
    crashes: int = 0
    expiries: int = 0
    losses: int = 0  # of a call, so often that its member is removed
    answers: int = 0  # of the registry
    stops: int = 0
    restores: int = 0
    damages: int = 0  # of the checkpoint of a server that is down
    joins: int = (
        0  # a member asks for a copy, as its weights cannot be trusted or no leader probes it in time
    )


class State(NamedTuple):
    servers: tuple
    record: Record
    sent: tuple  # of (term, log)
    acknowledged: frozenset
    budget: Budget
    backup: tuple = ()  # (record,) once it was taken
    forgot: bool = False  # the registry was restored: some promises end


class Violation(Exception):
    """An invariant does not hold."""


def first_state(budget, replicas=3, formed=True):
    """Three servers; formed: some are members already, server 0 leads, and the backup, if any, is two terms old."""
    if not formed:
        return State((Server(),) * 3, Record(), (), frozenset(), budget)
    follower = Server(seen=3, is_follower=True)
    members = (1 << replicas) - 1
    leader = Server(role=OPEN, seen=3, term=(3, 0), members=members, acked=(0, 0, 0))
    backup = (Record(NOBODY, members, 1),) if budget.restores else ()
    return State(
        (leader, follower, follower), Record(0, members, 3), (((3, 0), ()),), frozenset(), budget, backup
    )


def end(log):
    return (log[-1][0] if log else (0, 0), len(log))


class Protocol:
    """steps(state) -> (name, is_fault, state) of every step; check(state) raises Violation."""

    def __init__(self, broken=None, replicas=3):
        assert broken is None or broken in FAULTS
        self.broken, self.replicas = broken, replicas

    def is_behind(self, one, other):
        """True if an end is smaller than another."""
        if self.broken == "order by version":
            return one[1] < other[1]
        return one < other

    # ------------------------------------------------------------ steps

    def steps(self, state):
        for step in (self._clients, self._leaders, self._vacancy, self._faults):
            for name, is_fault, after in step(state):
                yield name, is_fault, self._acknowledge(after)

    def _acknowledge(self, state):
        """Answers as early as a leader may: everything that all its members have."""
        acknowledged, record = set(state.acknowledged), state.record
        for i in SERVERS:
            s = state.servers[i]
            if not (s.up and s.lease and s.role == OPEN):
                continue
            others = [j for j in SERVERS if j != i and s.members >> j & 1]
            count = min([len(s.log), *(s.acked[j] for j in others)]) if not s.members & GHOST else 0
            if self.broken == "answer before confirming":  # what it had when it began
                count = max(count, sum(1 for term, _ in s.log if term != s.term))
            if s.stray:
                raise Violation(f"server {i} acknowledges {set(s.stray)}, its log is {s.log}")
            done = s.log[: max(0, count)]
            acknowledged.update(update for _, update in done)
            if record.leader == i and end(done) > record.end:  # noted at once; the code does so every 5 s
                record = record._replace(end=end(done))
        if acknowledged == state.acknowledged and record == state.record:
            return state
        return state._replace(acknowledged=frozenset(acknowledged), record=record)

    def _clients(self, state):
        for i in SERVERS:
            s = state.servers[i]
            if not s.up or (not s.lease and s.role != OPEN):
                continue
            if s.role == OPEN:
                logged = {u for _, u in s.log}
                for update in range(state.budget.updates):
                    if update not in logged and all(u in logged for u in range(update - 1)):
                        log = (*s.log, (s.term, update))
                        after = self._with(state, i, log=log)
                        yield f"{i} makes update {update}", False, self._send(after, s.term, log)
            elif self.broken == "step without log" and s.term[0] and not s.stray and s.log:
                yield f"{i} makes a step without log", False, self._with(state, i, stray=frozenset((9,)))

    def _leaders(self, state):
        for i in SERVERS:
            s = state.servers[i]
            if not s.up or not s.role:
                if s.up and s.lease and state.record.leader == i and not s.role:
                    yield (
                        f"{i} gives the key back",
                        False,
                        self._registry(state, leader=NOBODY, waited=False),
                    )
                continue
            if state.record.leader != i:
                yield f"{i} steps down", False, self._step_down(state, i)
            if s.role == CONFIRMING and self._is_confirmed(s, i):
                yield f"{i} opens", False, self._with(state, i, role=OPEN)
            if s.members & GHOST:
                yield from self._remove(state, i, GHOST, False)
            for j in SERVERS:
                if j != i:
                    yield from self._member(state, i, j)
        for term, log in state.sent:
            for j in SERVERS:
                yield from self._deliver(state, term, log, j)

    def _is_confirmed(self, s, i):
        if self.broken == "answer before confirming":
            return True
        others = [j for j in SERVERS if j != i and s.members >> j & 1]
        return not s.members & GHOST and all(s.acked[j] == len(s.log) for j in others)

    def _member(self, state, i, j):
        s, other = state.servers[i], state.servers[j]
        is_member = s.members >> j & 1
        if is_member and not s.deaf >> j & 1:
            reachable = other.up and other.seen <= s.term[0]
            branches = reachable and other.log != s.log[: len(other.log)]
            is_longer = (
                reachable
                and other.lease
                and not other.joining
                and s.role == CONFIRMING
                and self.is_behind(end(s.log), end(other.log))
            )
            if is_longer and state.record.leader == i:
                after = self._registry(state, leader=NOBODY, waited=False, successor=j)
                yield f"{i} yields to {j}", False, self._with(after, i, **IDLE_AGAIN)
            elif branches or (other.up and (other.joining or other.seen > s.term[0])):
                yield from self._remove(state, i, 1 << j, False)
            elif state.budget.losses:
                yield from self._remove(self._spend(state, "losses"), i, 1 << j, True)
                if self.broken == "silent sender":
                    after = self._spend(state, "losses")
                    yield f"the sender to {j} dies", True, self._with(after, i, deaf=s.deaf | 1 << j)
        if not other.up or other.role:
            return
        if state.budget.joins and state.record.leader == i and state.record.members >> j & 1:
            yield f"{j} asks for a copy", True, self._with(self._spend(state, "joins"), j, joining=True)
        if not self._gives_copies(s, j):
            return
        if not is_member and not state.record.members >> j & 1 and other.seen <= s.term[0]:
            if other.joining or other.log != s.log or other.seen != s.term[0]:
                copy = {"log": s.log, "seen": s.term[0], "is_follower": True, "stray": frozenset()}
                after = self._with(state, j, **copy, joining=False)
                yield f"{j} takes a copy from {i}", False, self._acked(after, i, j, len(s.log))
            elif state.record.leader == i:
                members = s.members | 1 << j
                after = self._registry(state, members=members, end=max(state.record.end, end(s.log)))
                told = self._acked(self._with(after, i, members=members), i, j, len(s.log))
                yield f"{j} becomes a member", False, told
                if state.budget.answers:
                    yield (
                        f"{j} becomes a member, the answer is lost",
                        True,
                        self._step_down(self._spend(after, "answers"), i),
                    )

    def _gives_copies(self, s, j):
        return s.role == OPEN and (s.members & ~(1 << j)).bit_count() < self.replicas

    def _remove(self, state, i, bit, is_fault):
        if state.record.leader != i:
            yield f"{i} is fenced", is_fault, self._step_down(state, i)
            return
        members = state.servers[i].members & ~bit
        after = self._registry(state, members=members)
        yield f"{i} removes {bit:#b}", is_fault, self._with(after, i, members=members)
        if state.budget.answers:
            lost = self._step_down(self._spend(after, "answers"), i)
            yield f"{i} removes {bit:#b}, the answer is lost", True, lost

    def _deliver(self, state, term, log, j):
        """Some entry of a leader of this term, early or late, reaches j; its answer arrives or is lost.

        Progress must not depend on a late one, so that one counts as a fault.
        """
        other = state.servers[j]
        if not other.up or term[0] < other.seen or (term[1] == j and other.term == term):
            return
        sender = state.servers[term[1]]
        is_heard = bool(sender.up and sender.role and sender.term == term and not sender.deaf >> j & 1)
        n = len(other.log)
        after = state
        if other.joining:
            yield from self._put_aside(state, term, log, j, is_heard)
            return
        if other.log != log[:n]:
            if other.seen < term[0]:  # refused, but the term is known now
                yield f"{j} hears of term {term}", not is_heard, self._step_down(state, j, seen=term[0])
            return
        if term[0] > other.seen or other.role:
            after = self._step_down(state, j, seen=term[0])
        for k in {n, min(n + 1, len(log))}:
            if k > n and self.broken == "update that followers refuse" and log[n][1] == 0:
                if is_heard:
                    raise Violation(f"{j} refuses update 0 that is the next of its log")
                continue
            got = self._with(after, j, log=log[:k], is_follower=True)
            if got != state:
                yield f"{j} has {k} of term {term}, nobody knows", not is_heard, got
            if is_heard and sender.acked[j] < k:
                yield f"{j} has {k} of term {term}", False, self._acked(got, term[1], j, k)

    def _put_aside(self, state, term, log, j, is_heard):
        """The entry waits for the copy: it is not in the log of j, and is gone if the copy fails."""
        other, sender = state.servers[j], state.servers[term[1]]
        if other.seen < term[0]:
            state = self._with(state, j, seen=term[0])
            yield f"{j} hears of term {term}, and takes a copy", not is_heard, state
        k = min(len(log), max(len(other.log), sender.acked[j]) + 1)
        if self.broken == "count what waits for a copy" and is_heard and sender.acked[j] < k:
            yield f"{j} puts {k} of term {term} aside", False, self._acked(state, term[1], j, k)

    # ------------------------------------------------------------ nobody leads

    def _needs_void(self, s, record):
        if self.broken == "term falls back with the registry":
            return False
        return (s.noticed and record.epoch <= s.epoch) or s.seen > record.term

    def _vacancy(self, state):
        record = state.record
        live = [i for i in SERVERS if state.servers[i].up and state.servers[i].lease]
        for i in live:
            s = state.servers[i]
            if self._needs_void(s, record):
                after = self._registry(
                    state,
                    leader=NOBODY,
                    members=0,
                    term=max(record.term, s.seen) + 1,
                    end=max(record.end, end(s.log)),
                    epoch=max(record.epoch, s.epoch) + 1,
                    waited=False,
                    voided=True,
                )
                after = self._step_down(after, i, noticed=False, epoch=after.record.epoch)
                yield f"{i} voids the record", False, after
            elif s.noticed:
                after = self._step_down(state, i, noticed=False, epoch=record.epoch)
                yield f"{i} sees another epoch", False, after

        if record.leader == DEAD:
            yield "the lease of the dead ends", False, self._registry(state, leader=NOBODY)
        if record.leader != NOBODY:
            return
        alive_members = [i for i in live if record.members >> i & 1]
        for i in live:
            s = state.servers[i]
            if s.role or s.joining or self._needs_void(s, record):
                continue
            if i in alive_members:
                if record.successor not in (i, NOBODY) and record.successor in alive_members:
                    continue
                if self.broken != "idle members never lead" or s.is_follower:
                    yield from self._lead(state, i, record.members, "leads")
            elif not alive_members and not any(
                self.is_behind(end(s.log), end(state.servers[j].log)) for j in live
            ):
                yield from self._recover(state, i)
        stopped = any(s.stopped for s in state.servers)
        if not alive_members and not record.waited and not stopped:
            yield "the wait is over", False, self._registry(state, waited=True)

    def _recover(self, state, i):
        s, record = state.servers[i], state.record
        if record.voided and any(o.noticed for o in state.servers if o.up and o.lease):
            return  # one lease after a void, every leader of before has noticed it
        held = {u for _, u in s.log}
        lost = state.acknowledged - held
        if not self.is_behind(end(s.log), record.end):
            if lost and not state.forgot:
                raise Violation(f"{i} recovers with {s.log}, counts no loss, but {set(lost)} are lost")
            yield from self._lead(self._lose(state, lost), i, 1 << i, "recovers")
        elif record.waited:
            if lost and any(o.stopped and lost <= {u for _, u in o.log} for o in state.servers):
                raise Violation(f"{i} does not wait for the server that starts again with {set(lost)}")
            yield from self._lead(self._lose(state, lost), i, 1 << i, "recovers at a loss")

    def _lose(self, state, lost):
        return state._replace(acknowledged=state.acknowledged - lost) if lost else state

    def _lead(self, state, i, members, name):
        s, record = state.servers[i], state.record
        number = max(record.term, s.seen) + 1
        if self.broken == "term falls back with the registry":
            number = record.term + 1
        term = (number, i)
        waited = record.waited and self.broken == "wait of an earlier vacancy"
        after = self._registry(
            state,
            leader=i,
            members=members,
            term=number,
            end=max(end(s.log), record.end),
            waited=waited,
            successor=NOBODY,
            voided=False,
        )
        if members == 1 << i and not members & record.members:  # a recovery: what is lost is counted once
            after = self._registry(after, end=end(s.log))
        led = self._with(
            after,
            i,
            role=CONFIRMING,
            term=term,
            seen=max(number, s.seen),
            members=members,
            acked=(UNKNOWN,) * 3,
            is_follower=False,
            deaf=0,
        )
        yield f"{i} {name} in term {number}", False, self._send(led, term, s.log)
        if state.budget.answers:
            yield f"{i} {name}, the answer is lost", True, self._spend(after, "answers")

    # ------------------------------------------------------------ faults

    def _faults(self, state):
        budget = state.budget
        leader = state.record.leader
        for i in SERVERS:
            s = state.servers[i]
            if s.joining and not (leader >= 0 and self._gives_copies(state.servers[leader], i)):
                yield f"the copy for {i} is refused", False, self._with(state, i, joining=False)
            elif s.joining and budget.losses:
                after = self._with(self._spend(state, "losses"), i, joining=False)
                yield f"the call of {i} for a copy is lost", True, after
            if not s.up:
                fresh = Server(log=s.log, seen=s.log[-1][0][0] if s.log else 0, epoch=state.record.epoch)
                yield f"{i} starts", False, self._set(state, i, fresh)
                if budget.damages and s.log:
                    yield f"the disk of {i} is damaged", True, self._damage(self._spend(state, "damages"), i)
                continue
            if not s.lease:
                after = self._step_down(state, i, lease=True)
                if state.record.members >> i & 1:  # the wait begins anew while a member lives
                    after = self._registry(after, waited=False)
                yield f"{i} has a lease again", False, after
            elif budget.expiries:
                after = self._with(self._spend(state, "expiries"), i, lease=False)
                if state.record.leader == i:
                    after = self._registry(after, leader=NOBODY)
                yield f"the lease of {i} expires", True, after
            if budget.crashes:
                for kept in range(len(s.log) + 1):
                    after = self._spend(state, "crashes")
                    yield f"{i} dies, {kept} on disk", True, self._die(after, i, s.log[:kept], False)
            if budget.stops and s.lease:
                yield from self._stop(state, i)
        if budget.restores:
            yield "backup", True, state._replace(backup=(state.record,))
            if state.backup:
                yield "restore", True, self._restore(state)

    def _stop(self, state, i):
        s, after = state.servers[i], self._spend(state, "stops")
        if s.role == OPEN and state.record.leader == i:
            others = [j for j in SERVERS if j != i and s.members >> j & 1]
            if any(s.acked[j] != len(s.log) for j in others) or s.members & GHOST:
                return  # it waits for what is under way
            after = self._registry(
                after,
                leader=NOBODY,
                members=s.members & ~(1 << i),
                end=end(s.log),
                waited=after.record.waited,
            )
        yield f"{i} stops", True, self._die(after, i, s.log, s.role == OPEN)

    def _die(self, state, i, disk, stopped):
        """Its name is dead from now on: in the record, and in what leaders believe."""
        record = state.record
        if record.members >> i & 1:
            record = record._replace(members=record.members & ~(1 << i) | GHOST)
        if record.leader == i:
            record = record._replace(leader=DEAD)
        servers = tuple(
            s._replace(members=s.members & ~(1 << i) | GHOST) if s.members >> i & 1 else s
            for s in state.servers
        )
        after = state._replace(record=record, servers=servers)
        if after.backup and (after.backup[0].members >> i & 1 or after.backup[0].leader == i):
            old = after.backup[0]
            members = old.members & ~(1 << i) | (GHOST if old.members >> i & 1 else 0)
            old = old._replace(members=members, leader=DEAD if old.leader == i else old.leader)
            after = after._replace(backup=(old,))
        return self._set(after, i, Server(up=False, lease=False, log=disk, stopped=stopped))

    def _damage(self, state, i):
        """Its checkpoint is put aside at the start; a flipped bit of the term makes it the newest otherwise."""
        log = ()
        if self.broken == "accept a damaged checkpoint":
            *before, ((number, leader), update) = state.servers[i].log
            log = (*before, ((number + 8, leader), update))
        return self._with(state, i, log=log)

    def _restore(self, state):
        (record,) = state.backup
        leader = record.leader
        if leader >= 0 and not state.servers[leader].lease:
            record = record._replace(leader=NOBODY)
        servers = tuple(s._replace(noticed=True) if s.up and s.lease else s for s in state.servers)
        was_cut_off = any(not s.lease for s in state.servers)
        after = self._spend(state, "restores")
        forgot = state.forgot or was_cut_off
        return after._replace(record=record._replace(waited=False), servers=servers, backup=(), forgot=forgot)

    # ------------------------------------------------------------ small changes

    def _with(self, state, i, **changes):
        return self._set(state, i, state.servers[i]._replace(**changes))

    def _set(self, state, i, server):
        return state._replace(servers=(*state.servers[:i], server, *state.servers[i + 1 :]))

    def _registry(self, state, **changes):
        return state._replace(record=state.record._replace(**changes))

    def _spend(self, state, what):
        return state._replace(budget=state.budget._replace(**{what: getattr(state.budget, what) - 1}))

    def _step_down(self, state, i, **changes):
        seen = max(changes.pop("seen", 0), state.servers[i].seen)
        return self._with(state, i, **{**IDLE_AGAIN, "seen": seen, **changes})

    def _acked(self, state, i, j, count):
        acked = state.servers[i].acked
        return self._with(state, i, acked=(*acked[:j], max(acked[j], count), *acked[j + 1 :]))

    def _send(self, state, term, log):
        sent = dict(state.sent)
        sent[term] = log
        return state._replace(sent=tuple(sorted(sent.items())))

    # ------------------------------------------------------------ invariants

    def check(self, state):
        logs = [s.log for s in state.servers if s.up] + [log for _, log in state.sent]
        for log in logs:
            updates = [u for _, u in log]
            if len(updates) != len(set(updates)):
                raise Violation(f"an update is twice in {log}")
        for one in logs:
            for other in logs:
                for k in range(min(len(one), len(other)), 0, -1):
                    if one[k - 1][0] == other[k - 1][0]:
                        if one[:k] != other[:k]:
                            raise Violation(f"{one} and {other} agree at {k}, and not before")
                        break
        if state.forgot:
            return
        for i in SERVERS:
            s = state.servers[i]
            if not s.up:
                continue
            held = {u for _, u in s.log}
            if state.record.members >> i & 1 and not s.noticed and not state.acknowledged <= held:
                raise Violation(f"member {i} lacks {set(state.acknowledged - held)}")
            if s.role == OPEN and state.record.leader == i and not state.acknowledged <= held:
                raise Violation(f"leader {i} lacks {set(state.acknowledged - held)}")

    def is_good(self, state):
        """The wanted number of servers are members of a leader that has answered everything."""
        record = state.record
        if record.leader < 0:
            return False
        leader = state.servers[record.leader]
        up = sum(1 << i for i in SERVERS if state.servers[i].up)
        return (
            leader.role == OPEN
            and leader.lease
            and record.members == leader.members
            and record.members & up == record.members
            and record.members.bit_count() == min(up.bit_count(), self.replicas)
            and {u for _, u in leader.log} <= state.acknowledged
            and not any(s.noticed or s.joining for s in state.servers)
        )


IDLE_AGAIN = {
    "role": IDLE,
    "term": (0, 0),
    "members": 0,
    "acked": (UNKNOWN,) * 3,
    "is_follower": False,
    "deaf": 0,
}
