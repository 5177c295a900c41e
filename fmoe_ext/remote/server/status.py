"""Status of every expert: who leads it, who holds it and what waits, from the registry and the servers."""

import asyncio
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from fmoe_ext.remote import protocol
from fmoe_ext.remote.client.caller import Caller
from fmoe_ext.remote.discovery import DiscoveryError
from fmoe_ext.remote.errors import RemoteError
from fmoe_ext.remote.etcd import keys
from fmoe_ext.remote.etcd.client import Entry, EtcdClient
from fmoe_ext.remote.security import Credentials
from fmoe_ext.remote.wire import Message, WireError, encode

Row: TypeAlias = "dict[str, Any]"
_STATUS = "status"  # name of the tensor: JSON as bytes
_FIELDS = MappingProxyType(
    {
        "uid": str,
        "version": int,
        "role": str,
        "term": int,
        "learners": list,
        "is_open": bool,
        "waiting_updates": int,
    }
)


def status_message(status: Mapping[str, Any]) -> Message:
    """A server's status as the answer to a call."""
    data = bytearray(json.dumps(status).encode())
    return Message({_STATUS: torch.frombuffer(data, dtype=torch.uint8)}, {})


def read_status(message: Message) -> Row:
    """The status in an answer; WireError if there is none."""
    data = message.tensors.get(_STATUS)
    if data is None or data.dtype != torch.uint8:
        raise WireError("the answer holds no status")
    try:
        status = json.loads(bytes(data.tolist()))
        return {"experts": {row["uid"]: _checked(row) for row in status["experts"]}}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"the answer holds no status: {error!r}") from None


def _checked(row: Row) -> Row:
    """The fields of a row that the table needs; TypeError if one has another type."""
    checked = {name: row[name] for name in (*_FIELDS, "checkpoint")}
    for name, kind in _FIELDS.items():
        if type(checked[name]) is not kind:
            raise TypeError(f"{name} is no {kind.__name__}")
    if not all(isinstance(learner, str) for learner in checked["learners"]):
        raise TypeError("a learner is no text")
    if (checkpoint := checked["checkpoint"]) is not None:
        checked["checkpoint"] = {"version": int(checkpoint["version"]), "time": float(checkpoint["time"])}
    return checked


def table(entries: Iterable[Entry], answers: Mapping[str, Row | str]) -> list[Row]:
    """One row an expert. entries: of the registry; answers: a server's status, or why there is none, by endpoint."""
    by_key = {entry.key: entry.value for entry in entries}
    held: dict[str, dict[str, Row]] = {}
    for endpoint, answer in answers.items():
        if not isinstance(answer, str):
            for uid, row in answer["experts"].items():
                held.setdefault(uid, {})[endpoint] = row
    uids = {uid for key in by_key if (uid := keys.uid_of(key))} | held.keys()
    return [_row(uid, by_key, held.get(uid, {}), answers) for uid in sorted(uids)]


def _row(
    uid: str, by_key: Mapping[str, bytes], held: Mapping[str, Row], answers: Mapping[str, Row | str]
) -> Row:
    record = keys.load_members(by_key.get(keys.members_key(uid), b""))
    chosen = keys.load_leader(by_key.get(keys.leader_key(uid), b""))
    if keys.members_key(uid) in by_key and record is not None:
        leader, members = chosen.endpoint if chosen else "", sorted(record.endpoints.values())
        version, term = record.version, record.term
    else:  # no registry: the owner is the leader
        members = sorted(endpoint for endpoint, row in held.items() if row["role"] == "owner")
        leader, version, term = members[0] if len(members) == 1 else "", 0, 0
    versions = {endpoint: row["version"] for endpoint, row in sorted(held.items())}
    led = held.get(leader, {})
    return {
        "uid": uid,
        "leader": leader,
        "members": members,
        "learners": led.get("learners", []),
        "version": led.get("version", max([version, *versions.values()])),
        "term": term,
        "versions": versions,
        "terms": {endpoint: row["term"] for endpoint, row in sorted(held.items())},
        "checkpoint": _newest_checkpoint(held),
        "waits": _waits(leader, members, led, answers),
    }


def _newest_checkpoint(held: Mapping[str, Row]) -> Row | None:
    """Version, time.time() and server of the newest checkpoint."""
    found = [{**row["checkpoint"], "server": endpoint} for endpoint, row in held.items() if row["checkpoint"]]
    return max(found, key=lambda one: (one["version"], one["time"]), default=None)


def _waits(leader: str, members: Sequence[str], led: Row, answers: Mapping[str, Row | str]) -> list[str]:
    """Reasons to wait, one sentence each."""
    waits = [] if leader else ["nobody leads"]
    silent = {member: answers[member] for member in members if isinstance(answers.get(member), str)}
    waits += [f"{member} does not answer: {why}" for member, why in silent.items()]
    waits += [f"{learner} takes a copy" for learner in led.get("learners", [])]
    if led and not led["is_open"]:
        waits.append("the leader takes no gradients yet")
    if count := led.get("waiting_updates", 0):
        waits.append(f"{count} updates wait for members")
    return waits


async def collect(
    registry: str | None, servers: Sequence[str], credentials: Credentials, timeout: float
) -> list[Row]:
    """The table of a registry's servers and of those named; DiscoveryError if the registry does not answer."""
    entries: list[Entry] = []
    if registry is not None:
        client = EtcdClient(registry)
        try:
            entries, _ = await client.read(keys.ROOT, is_prefix=True, timeout=timeout)
        finally:
            await client.close()
    known = [keys.load_server(entry.value) for entry in entries if entry.key.startswith(keys.SERVERS)]
    records = [keys.load_members(entry.value) for entry in entries if entry.key.endswith("/members")]
    endpoints = {*servers, *(server.endpoint for server in known if server is not None)}
    endpoints |= {endpoint for record in records if record for endpoint in record.endpoints.values()}
    caller = Caller(credentials)
    ordered = sorted(endpoints)
    try:
        answers = await asyncio.gather(*(_ask(caller, endpoint, timeout) for endpoint in ordered))
    finally:
        await caller.close()
    found = dict(zip(ordered, answers, strict=True))
    lost = [f"{endpoint}: {found[endpoint]}" for endpoint in servers if isinstance(found[endpoint], str)]
    if lost:
        raise DiscoveryError(f"no status of {'; '.join(lost)}")
    return table(entries, found)


async def _ask(caller: Caller, endpoint: str, timeout: float) -> Row | str:
    try:
        return read_status(await caller.call(endpoint, protocol.STATUS, encode(Message({}, {})), timeout))
    except (RemoteError, WireError) as error:
        return str(error)


def to_text(rows: Sequence[Row]) -> str:
    """The table for people."""
    lines = [("uid", "leader", "version", "term", "members", "learners", "checkpoint", "waits")]
    lines += [
        (
            row["uid"],
            row["leader"] or "-",
            str(row["version"]),
            str(row["term"]),
            _versions(row["members"], row["versions"]),
            ", ".join(row["learners"]) or "-",
            _checkpoint(row["checkpoint"]),
            "; ".join(row["waits"]) or "-",
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _versions(members: Sequence[str], versions: Mapping[str, int]) -> str:
    return ", ".join(f"{member} ({versions.get(member, '?')})" for member in members) or "-"


def _checkpoint(checkpoint: Row | None) -> str:
    if checkpoint is None:
        return "-"
    return f"{checkpoint['version']}, {max(0.0, time.time() - checkpoint['time']):.0f} s ago"
