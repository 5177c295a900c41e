"""The keys of etcd and their values, which are JSON.

    /fmoe/servers/SERVER                     a server that lives: its entry lies under its lease
    /fmoe/experts/UID/leader                 who takes the gradients, under the leader's lease
    /fmoe/experts/UID/members                the record of the expert, for ever
    /fmoe/experts/UID/candidates/SERVER      what a server offers while nobody leads, under its lease
A value that cannot be read counts as one that is not there: a server of another release may have written it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fmoe_ext.remote.discovery import check_uid

T = TypeVar("T", "Members", "Offer")
ROOT = "/fmoe/"
SERVERS, EXPERTS = f"{ROOT}servers/", f"{ROOT}experts/"


def leader_key(uid: str) -> str:
    """Its value says who takes the gradients; its create revision is the fencing token; it lives as a lease does."""
    return f"{EXPERTS}{uid}/leader"


def members_key(uid: str) -> str:
    """The record: which servers have every acknowledged update, in which term, up to where."""
    return f"{EXPERTS}{uid}/members"


def candidate_key(uid: str, server: str) -> str:
    """The offer of a server that has some state of an expert that nobody leads."""
    return f"{EXPERTS}{uid}/candidates/{server}"


def uid_of(key: str) -> str | None:
    """The expert that a key is about."""
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
    """The record of an expert."""

    endpoints: Mapping[str, str] = field(default_factory=dict)  # of the members, by server
    version: int = 0  # with the next two fields: an end that the log has reached
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


@dataclass(frozen=True)
class Offer:
    """The end of the log that a server has."""

    term_of_end: int
    leader_of_end: str
    version: int
    record: int  # revision of the record that the offer answers to


@dataclass(frozen=True)
class ServerEntry:
    """A server that lives."""

    endpoint: str
    expert_cls: str
    hidden_dim: int
    num_experts: int  # that it hosts


def dump(value: Leader | Members | ServerEntry | Offer) -> bytes:
    return json.dumps(value.__dict__, default=dict).encode()


def load_leader(value: bytes) -> Leader | None:
    entries = _load(value)
    server, endpoint = entries.get("server"), entries.get("endpoint")
    return Leader(server, endpoint) if isinstance(server, str) and isinstance(endpoint, str) else None


def load_members(value: bytes) -> Members | None:
    entries = _load(value)
    endpoints = entries.pop("endpoints", None)
    found = _typed(Members(), entries)
    if (
        found is None
        or not isinstance(endpoints, dict)
        or not all(term.isdecimal() and type(version) is int for term, version in found.starts.items())
    ):
        return None
    return replace(found, endpoints={str(k): str(v) for k, v in endpoints.items()})


def load_offer(value: bytes) -> Offer | None:
    return _typed(Offer(0, "", 0, 0), _load(value))


def _typed(default: T, entries: dict[str, Any]) -> T | None:
    """default with the fields that entries have; None if one is of another type."""
    known = {key: value for key, value in entries.items() if hasattr(default, key)}
    if any(type(value) is not type(getattr(default, key)) for key, value in known.items()):
        return None
    return replace(default, **known)


def load_server(value: bytes) -> ServerEntry | None:
    entries = _load(value)
    try:
        kind = str(entries["expert_cls"]), int(entries["hidden_dim"])
        return ServerEntry(str(entries["endpoint"]), *kind, int(entries["num_experts"]))
    except (KeyError, TypeError, ValueError):
        return None


def _load(value: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(value)
    except ValueError:
        return {}
    return entries if isinstance(entries, dict) else {}
