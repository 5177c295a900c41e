"""Name the keys in etcd, and read and write their values, which are JSON.

    /fmoe/servers/SERVER                  ServerEntry  a server that lives; under its lease
    /fmoe/experts/UID/leader              Leader       who takes the gradients; under the leader's lease
    /fmoe/experts/UID/members             Members      the *record* of the expert; stays for ever
    /fmoe/experts/UID/candidates/SERVER   Offer        what a server offers while no server leads; under its lease
A value that cannot be read counts as missing, and unknown fields are ignored: a server of another release may have
written it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, get_args

from fmoe_ext.remote.discovery import check_uid
from fmoe_ext.remote.server.ledger import End, Term

T = TypeVar("T", "Leader", "Members", "Offer", "ServerEntry")
ROOT = "/fmoe/"
SERVERS, EXPERTS = f"{ROOT}servers/", f"{ROOT}experts/"


def leader_key(uid: str) -> str:
    """Return the key of the leader; its create revision is the fencing token (Leader.guard)."""
    return f"{EXPERTS}{uid}/leader"


def members_key(uid: str) -> str:
    """Return the key of the record: which servers have every acknowledged update, in which term, up to where."""
    return f"{EXPERTS}{uid}/members"


def candidate_key(uid: str, server: str) -> str:
    """Return the key of the offer of a server that has some state of an expert without a leader."""
    return f"{EXPERTS}{uid}/candidates/{server}"


def uid_of(key: str) -> str | None:
    """Return the expert that a key is about; None if it is about none."""
    if not key.startswith(EXPERTS):
        return None
    uid = key.removeprefix(EXPERTS).partition("/")[0]
    try:
        return check_uid(uid)
    except ValueError:
        return None


@dataclass(frozen=True)
class Leader:
    """The server that takes the gradients of an expert."""

    server: str
    endpoint: str


@dataclass(frozen=True)
class Members:
    """The record of an expert, which its leader writes; docs/replication.md, State."""

    endpoints: Mapping[str, str] = field(default_factory=dict)  # of the members, by server; always written
    version: int = 0  # with the two fields *_of_end: an end that the log has reached
    successor: str = ""  # the server that should lead next
    term: int = 0  # number of the last leadership
    term_of_end: int = 0
    leader_of_end: str = ""
    epoch: int = 0  # grows when the registry went back
    voided: bool = False  # nobody has led since the registry went back
    starts: Mapping[str, int] = field(default_factory=dict)  # version at which a term began, by its number
    requests: int = 0  # gradients in the log up to the end
    reserved: int = 0  # the leader acknowledges no later version before it has written a larger one here
    noted: float = 0.0  # time.time() of the leader when it wrote this

    @property
    def end(self) -> End:
        return End(Term(self.term_of_end, self.leader_of_end), self.version)

    def reaching(self, end: End, **changes: Any) -> "Members":
        """Return this record with another end and other changes."""
        number, leader = end.term.number, end.term.leader
        return replace(self, version=end.version, term_of_end=number, leader_of_end=leader, **changes)


@dataclass(frozen=True)
class Offer:
    """The end of a server's log, offered for a recovery."""

    term_of_end: int
    leader_of_end: str
    version: int
    record: int  # revision of the record that the offer answers to

    @classmethod
    def of(cls, end: End, record: int) -> "Offer":
        return cls(end.term.number, end.term.leader, end.version, record)

    @property
    def end(self) -> End:
        return End(Term(self.term_of_end, self.leader_of_end), self.version)


@dataclass(frozen=True)
class ServerEntry:
    """A server that lives."""

    endpoint: str
    expert_cls: str
    hidden_dim: int
    num_experts: int  # that it hosts


def dump(value: Leader | Members | ServerEntry | Offer) -> bytes:
    return json.dumps(value.__dict__, default=dict).encode()


def load(kind: type[T], value: bytes) -> T | None:
    """Return the value of a key as this kind; None if it is none. Unknown fields are left out."""
    try:
        given = json.loads(value)
    except ValueError:
        return None
    known: dict[str, Any] = {}
    for one in fields(kind) if isinstance(given, dict) else ():
        if one.name in given:
            # inner: of a Mapping[str, X] its types (str, X); of a plain type ()
            found, inner = given[one.name], get_args(one.type)
            if inner:
                fits = isinstance(found, dict) and all(type(x) is inner[1] for x in found.values())
            else:
                fits = type(found) is one.type
            if not fits or (one.name == "starts" and not all(term.isdecimal() for term in found)):
                return None
            known[one.name] = found
    if kind is Members and "endpoints" not in known:
        return None  # taken for a record without members, it would let any server recover the expert
    try:
        return kind(**known) if known else None
    except TypeError:  # a field without a default is missing
        return None
