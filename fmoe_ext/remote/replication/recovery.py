"""Decide, by pure functions of what a server sees, what it does about an expert without a leader; replicas.py does it.

    A sound member of the record   has every acknowledged update, so it may lead at once (LEAD). If the last leader has
                                   named a successor that is alive, the other members leave it a second.
    Any other server               offers the end of its log (OFFER). If no sound member is left, the server with the
                                   largest end leads (RECOVER) after a wait, in which a better state may return. The
                                   wait is short if it lacks nothing that the record knows of.
A member is sound unless its weights cannot be trusted. Updates that the log of a recovery lacks are lost and counted
(Loss): the record says how far the log had come at the last note, and up to which version (`reserved`) the last leader
may have acknowledged updates since.
"""

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fmoe_ext.remote.etcd import keys
from fmoe_ext.remote.server.ledger import End, Term

# seconds to wait for other servers' offers, if nothing that the record knows of is lacking
_RECOVERY_LOOK = 1.0
_MAX_STARTS = 32  # terms, the last ones, whose first versions a record keeps
_SUCCESSOR_SECONDS = 1.0  # for which the other members leave the lead to the successor in the record


class Action(enum.Enum):
    LEAD = "lead as a member"
    RECOVER = "lead as the best that is left"
    OFFER = "offer"
    WAIT = "wait"


@dataclass(frozen=True)
class Vacancy:
    """An expert without a leader, as one server sees it: the input of decide() and most others."""

    server: str  # that decides
    end: End  # of its log
    is_able: bool  # its weights can be trusted
    record: keys.Members | None
    revision: int  # of the record
    alive: Collection[str]  # servers with a lease
    offers: Mapping[str, keys.Offer]  # by server
    seconds: float  # for which nobody has led under this record
    hopeless_seconds: float  # for which no member has been alive that could lead
    recovery_wait: float  # seconds that a recovery which would lose updates waits for a newer state
    ttl: float  # of leases
    start: int | None = None  # version at which the term of the end began
    requests: int = 0  # gradients in the log up to the end
    lacks: int = 0  # version in this server's damaged checkpoint, 1 if unknown; 0: no damage


@dataclass(frozen=True)
class Loss:
    """Updates that a recovery loses."""

    updates: int  # those that the record knows of
    gradients: int  # in these updates, at least
    most: int  # updates that may have been acknowledged and are lost, at most
    since: float  # time.time() of the last leader at its last note


def decide(vacancy: Vacancy) -> Action:
    """Return a server's next action. It is decided anew at every change in etcd, and on a timer."""
    # 1. a member with a sound state leads
    me, record = vacancy.server, vacancy.record or keys.Members()
    if me in record.endpoints and vacancy.is_able:
        is_named = record.successor not in ("", me) and record.successor in vacancy.alive
        return Action.WAIT if is_named and vacancy.seconds < _SUCCESSOR_SECONDS else Action.LEAD
    # 2. any other server offers, unless its offer is already there
    if vacancy.offers.get(me) != keys.Offer.of(vacancy.end, vacancy.revision):
        return Action.OFFER
    # 3. the largest offer under this record wins; the name decides between equal ends, on all servers alike
    offers = {
        name: (offer.end, name)
        for name, offer in vacancy.offers.items()
        if offer.record == vacancy.revision and name in vacancy.alive
    }
    if any(name in vacancy.alive and name not in offers for name in record.endpoints):
        return Action.WAIT  # a member that makes no offer leads, or is about to
    if max(offers.values(), default=None) != (vacancy.end, me):
        return Action.WAIT
    # 4. it waits for a better state, but not long if it has all that the record knows of, and can be trusted
    if vacancy.record is None and set(vacancy.alive) == {me} and not vacancy.lacks:
        wait = 0.0  # a new expert, and the only server
    elif vacancy.end >= record.end and not vacancy.lacks and vacancy.is_able:
        wait = _RECOVERY_LOOK
    else:
        wait = vacancy.recovery_wait
    if record.voided:  # a leader from before etcd went back may still have its lease
        wait = max(wait, vacancy.ttl)
    return Action.RECOVER if vacancy.hopeless_seconds >= wait else Action.WAIT


def count_lost(vacancy: Vacancy) -> int:
    """Count updates that the record, or a damaged checkpoint here, had and this server lacks.

    This server's log may end at a larger version and still lack some: updates of an older term, which the
    record's has replaced.
    """
    record = vacancy.record or keys.Members()
    damaged = max(0, vacancy.lacks - vacancy.end.version)
    if vacancy.end >= record.end:
        return damaged
    return max(1, damaged, record.version - _version_in_common(record, vacancy.end))


def count_lost_at_most(vacancy: Vacancy) -> int:
    """Bound the updates that were acknowledged and that this server lacks: up to the record's `reserved`."""
    record = vacancy.record or keys.Members()
    return max(count_lost(vacancy), record.reserved - _version_in_common(record, vacancy.end))


def _version_in_common(record: keys.Members, end: End) -> int:
    """Return the version up to which a log with this end agrees with the record's log.

    Where a later term than the end's began at an earlier version, the logs part there.
    """
    later = [start for term, start in record.starts.items() if int(term) > end.term.number]
    return min([end.version, *later])


def loss_of(vacancy: Vacancy) -> Loss:
    """Return what is lost if this server leads."""
    record, lost = vacancy.record or keys.Members(), count_lost(vacancy)
    # each update has one gradient or more
    gradients = max(lost, record.requests - vacancy.requests) if lost else 0
    return Loss(lost, gradients, count_lost_at_most(vacancy), record.noted)


def with_start(starts: Mapping[str, int], term: int, version: int) -> dict[str, int]:
    """Add a term's first version, and keep the last _MAX_STARTS terms. JSON has text as keys."""
    known = sorted({**{int(t): v for t, v in starts.items()}, term: version}.items())
    return {str(t): v for t, v in known[-_MAX_STARTS:]}


def next_record(vacancy: Vacancy, action: Action, term: Term, endpoint: str) -> keys.Members:
    """Return the record with which a server begins to lead."""
    record = vacancy.record or keys.Members()
    endpoints = record.endpoints if action is Action.LEAD else {}
    known = vacancy.end if action is Action.RECOVER else max(vacancy.end, record.end)
    starts = record.starts
    if action is Action.RECOVER:  # what its log lacks is no part of the history any more
        starts = {t: v for t, v in starts.items() if int(t) <= vacancy.end.term.number}
    # the last leader may have died before it noted the start of its own term
    if vacancy.start is not None and vacancy.end >= known:
        starts = with_start(starts, vacancy.end.term.number, vacancy.start)
    requests = vacancy.requests if vacancy.end == known else record.requests
    return record.reaching(
        known,
        requests=requests,
        starts=starts,
        endpoints={**endpoints, vacancy.server: endpoint},
        successor="",
        term=term.number,
        voided=False,
        reserved=known.version,  # nothing beyond is promised: what the last leader acknowledged after it is lost
    )


def voided(record: keys.Members | None, end: End, seen: Term, epoch: int) -> keys.Members:
    """Return the record after etcd went back: no server is known to have every acknowledged update."""
    record = record or keys.Members()
    return record.reaching(
        max(end, record.end),
        endpoints={},
        successor="",
        term=max(record.term, seen.number) + 1,
        epoch=max(record.epoch, epoch) + 1,
        voided=True,
        reserved=max(record.reserved, end.version),
    )
