"""Where what is written in etcd, and how the values are read."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fmoe_ext.remote.discovery import check_uid

ROOT = "/fmoe/"
SERVERS, EXPERTS = f"{ROOT}servers/", f"{ROOT}experts/"


def leader_key(uid: str) -> str:
    """Its value says who takes the gradients; its create revision is the fencing token; it lives as a lease does."""
    return f"{EXPERTS}{uid}/leader"


def members_key(uid: str) -> str:
    """The replicas that have every update that was ever acknowledged."""
    return f"{EXPERTS}{uid}/members"


def candidate_key(uid: str, server: str) -> str:
    """A server that has some version of an expert whose members are all gone."""
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
    server: str
    endpoint: str


@dataclass(frozen=True)
class Members:
    """version: one that the expert had reached when this was written; successor: who should lead next."""

    endpoints: Mapping[str, str] = field(default_factory=dict)  # by server
    version: int = 0
    successor: str = ""


@dataclass(frozen=True)
class ServerEntry:
    endpoint: str
    expert_cls: str
    hidden_dim: int
    num_experts: int


def dump(value: Leader | Members | ServerEntry) -> bytes:
    return json.dumps(value.__dict__, default=dict).encode()


def load_leader(value: bytes) -> Leader | None:
    entries = _load(value)
    server, endpoint = entries.get("server"), entries.get("endpoint")
    return Leader(server, endpoint) if isinstance(server, str) and isinstance(endpoint, str) else None


def load_members(value: bytes) -> Members | None:
    entries = _load(value)
    endpoints, version, successor = (entries.get(key) for key in ("endpoints", "version", "successor"))
    if not isinstance(endpoints, dict) or not isinstance(version, int) or not isinstance(successor, str):
        return None
    return Members({str(k): str(v) for k, v in endpoints.items()}, version, successor)


def load_server(value: bytes) -> ServerEntry | None:
    entries = _load(value)
    try:
        return ServerEntry(
            str(entries["endpoint"]),
            str(entries["expert_cls"]),
            int(entries["hidden_dim"]),
            int(entries["num_experts"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


def _load(value: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(value)
    except ValueError:
        return {}
    return entries if isinstance(entries, dict) else {}
