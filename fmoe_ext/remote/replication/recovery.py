"""Recovery: what a server does about an expert that nobody leads. No effects: a function of what it sees.

A member in the record has every acknowledged update, so any of them may lead at once. Where none is left, the servers
that have some state offer the end of their logs, and the best one leads after a wait, in which a member may return.
What its log lacks is lost, and counted: the record says how far the last leader may have acknowledged.
"""

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fmoe_ext.remote.etcd import keys
from fmoe_ext.remote.server.ledger import End, Term

RECOVERY_LOOK = 1.0  # seconds for which servers wait for each other's offers
MAX_STARTS = 32  # terms whose beginning a record has
SUCCESSOR_SECONDS = 1.0  # that the server has which the last leader named


class Action(enum.Enum):
    LEAD = "lead as a member"
    RECOVER = "lead as the best that is left"
    OFFER = "offer"
    WAIT = "wait"


@dataclass(frozen=True)
class Vacancy:
    """An expert without a leader, as one server sees it."""

    server: str  # the one that decides
    end: End  # of its log
    is_able: bool  # its state can be trusted, if the record has it as a member
    record: keys.Members | None
    revision: int  # of the record
    alive: Collection[str]  # servers with a lease
    offers: Mapping[str, keys.Offer]  # by server
    seconds: float  # since nobody leads under this record
    hopeless_seconds: float  # since no member is alive that could lead
    recovery_wait: float  # seconds for a newer state than what is offered
    ttl: float  # of leases
    start: int | None = None  # version at which the term of the end began
    requests: int = 0  # gradients in the log up to the end
    lacks: int = 0  # version in this server's damaged checkpoint


@dataclass(frozen=True)
class Loss:
    """Updates that a recovery under way would lose."""

    updates: int  # that etcd knows of
    gradients: int  # in these updates, at least
    most: int  # updates that may have been acknowledged
    since: float  # time.time() of the last leader at its last note


def decide(vacancy: Vacancy) -> Action:
    """Next action of a server; it is decided again at every change and on a timer."""
    me, record = vacancy.server, vacancy.record or keys.Members()
    if me in record.endpoints and vacancy.is_able:
        is_named = record.successor not in ("", me) and record.successor in vacancy.alive
        return Action.WAIT if is_named and vacancy.seconds < SUCCESSOR_SECONDS else Action.LEAD
    if vacancy.offers.get(me) != keys.Offer.of(vacancy.end, vacancy.revision):
        return Action.OFFER
    offers = {
        name: (offer.end, name)  # the name decides between equal ends, everywhere alike
        for name, offer in vacancy.offers.items()
        if offer.record == vacancy.revision and name in vacancy.alive
    }
    if any(name in vacancy.alive and name not in offers for name in record.endpoints):
        return Action.WAIT  # a member that can lead does so
    if max(offers.values(), default=None) != (vacancy.end, me):
        return Action.WAIT
    # the wait is short only for one that has all that the record knows of
    if vacancy.record is None and set(vacancy.alive) == {me} and not vacancy.lacks:
        wait = 0.0  # a new expert, and the only server
    elif vacancy.end >= record.end and not vacancy.lacks:
        wait = RECOVERY_LOOK
    else:
        wait = vacancy.recovery_wait
    if record.voided:  # a leader of before may have its lease still
        wait = max(wait, vacancy.ttl)
    return Action.RECOVER if vacancy.hopeless_seconds >= wait else Action.WAIT


def count_lost(vacancy: Vacancy) -> int:
    """Updates that the record, or a damaged checkpoint here, had and this server has not.

    Its own of later versions are of an older term.
    """
    record = vacancy.record or keys.Members()
    damaged = max(0, vacancy.lacks - vacancy.end.version)
    if vacancy.end >= record.end:
        return damaged
    return max(1, damaged, record.version - _version_in_common(record, vacancy.end))


def count_lost_at_most(vacancy: Vacancy) -> int:
    """No more updates than these were acknowledged and are not in this server's log."""
    record = vacancy.record or keys.Members()
    return max(count_lost(vacancy), record.reserved - _version_in_common(record, vacancy.end))


def _version_in_common(record: keys.Members, end: End) -> int:
    """The version up to which a log with this end is the record's: a later term may have begun before its end."""
    later = [start for term, start in record.starts.items() if int(term) > end.term.number]
    return min([end.version, *later])


def loss_of(vacancy: Vacancy) -> Loss:
    """Count what is lost if this server leads."""
    record, lost = vacancy.record or keys.Members(), count_lost(vacancy)
    # each update has one gradient or more
    gradients = max(lost, record.requests - vacancy.requests) if lost else 0
    return Loss(lost, gradients, count_lost_at_most(vacancy), record.noted)


def with_start(starts: Mapping[str, int], term: int, version: int) -> dict[str, int]:
    """Add the start of one more term; the oldest are forgotten."""
    known = sorted({**{int(t): v for t, v in starts.items()}, term: version}.items())
    return {str(t): v for t, v in known[-MAX_STARTS:]}


def next_record(vacancy: Vacancy, action: Action, term: Term, endpoint: str) -> keys.Members:
    """The record with which a server leads."""
    record = vacancy.record or keys.Members()
    endpoints = record.endpoints if action is Action.LEAD else {}
    known = vacancy.end if action is Action.RECOVER else max(vacancy.end, record.end)
    starts = record.starts
    if action is Action.RECOVER:  # what its log lacks is no part of the history any more
        starts = {t: v for t, v in starts.items() if int(t) <= vacancy.end.term.number}
    # the last leader may have died before its first note
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
        reserved=known.version,  # all that its members have; what the last leader acknowledged beyond is lost
    )


def voided(record: keys.Members | None, end: End, seen: Term, epoch: int) -> keys.Members:
    """The record after the registry went back: nobody is known to have everything."""
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
