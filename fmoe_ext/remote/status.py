"""fmoe serve status: show who leads each replicated expert, its members, terms, versions and checkpoints."""

# etcd says who leads and who is a member; each server is asked by Info for its role, version and checkpoint. Servers
# that are no members are asked too: one that takes a copy has the expert already.

import argparse
import asyncio
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmoe_ext._cli import positive_float
from fmoe_ext.remote import errors, loop, protocol
from fmoe_ext.remote.client.caller import Caller
from fmoe_ext.remote.discovery import DiscoveryError
from fmoe_ext.remote.etcd import keys
from fmoe_ext.remote.etcd.client import Entry, EtcdClient
from fmoe_ext.remote.flags import etcd_address
from fmoe_ext.remote.security import Credentials
from fmoe_ext.remote.server.options import read_tokens
from fmoe_ext.remote.wire import Message, encode

MAX_CALLS = 64  # under way at a time


@dataclass(frozen=True)
class ReplicaStatus:
    """An expert at one server, as etcd and the server say. None: the server does not say it, or did not answer."""

    server: str
    endpoint: str
    is_member: bool
    role: str | None = None
    term: int | None = None
    version: int | None = None
    committed: int | None = None  # the version that all members have
    saved: int | None = None  # the version in its last checkpoint
    waiting: int | None = None  # calls that wait for the expert
    unsaved: str = ""  # why no newer version could be saved
    error: str = ""


@dataclass(frozen=True)
class ExpertStatus:
    """One expert, as etcd's record and its servers say."""

    uid: str
    leader: str | None  # endpoint
    term: int  # of the record
    version: int  # of the record, which the leader notes every few seconds
    replicas: tuple[ReplicaStatus, ...]

    @property
    def is_led(self) -> bool:
        """True if a server that leads answers, and says that it takes gradients."""
        return any(replica.role == "leader" and replica.endpoint == self.leader for replica in self.replicas)


async def read_status(
    endpoints: str, credentials: Credentials | None = None, timeout: float = 5.0
) -> list[ExpertStatus]:
    """Return the experts that etcd at host:port has, sorted by uid; every server is asked about each.

    Raises DiscoveryError if etcd does not answer within timeout seconds. A member that does not has its error in the
    result.
    """
    etcd, caller, turns = EtcdClient(endpoints), Caller(credentials), asyncio.Semaphore(MAX_CALLS)

    async def ask(uid: str, server: str, endpoint: str, is_member: bool) -> ReplicaStatus | None:
        replica = ReplicaStatus(server, endpoint, is_member)
        data = encode(Message({}, {protocol.UID: uid}))
        try:
            async with turns:  # every server is asked about every expert: not all at once
                meta = (await caller.call(endpoint, protocol.INFO, data, timeout)).meta
        except errors.RemoteError as error:  # a member must answer; another server simply does not host it
            return dataclasses.replace(replica, error=str(error)) if is_member else None
        names = (protocol.TERM, protocol.VERSION, protocol.COMMITTED, protocol.SAVED, protocol.WAITING)
        numbers: dict[str, Any] = {name: int(meta[name]) for name in names if meta.get(name, "").isdigit()}
        unsaved = meta.get(protocol.UNSAVED, "")
        return dataclasses.replace(replica, role=meta.get(protocol.ROLE), unsaved=unsaved, **numbers)

    async def look_at(uid: str, found: dict[str, Entry]) -> ExpertStatus:
        # the members, dead ones too, and all servers that live
        record = keys.load(keys.Members, found[keys.members_key(uid)].value) or keys.Members()
        entry = found.get(keys.leader_key(uid))
        leader = None if entry is None else keys.load(keys.Leader, entry.value)
        servers = dict(record.endpoints)
        for key, value in found.items():
            server = keys.load(keys.ServerEntry, value.value) if key.startswith(keys.SERVERS) else None
            if server is not None:
                servers.setdefault(key.removeprefix(keys.SERVERS), server.endpoint)
        by_endpoint = sorted(servers.items(), key=lambda item: item[1])
        answers = await asyncio.gather(
            *(ask(uid, *item, item[0] in record.endpoints) for item in by_endpoint)
        )
        replicas = tuple(replica for replica in answers if replica is not None)
        return ExpertStatus(uid, leader.endpoint if leader else None, record.term, record.version, replicas)

    try:
        entries, _ = await etcd.read(keys.ROOT, is_prefix=True, timeout=timeout)
        found = {entry.key: entry for entry in entries}
        uids = sorted({uid for key in found if (uid := keys.uid_of(key)) and keys.members_key(uid) in found})
        return list(await asyncio.gather(*(look_at(uid, found) for uid in uids)))
    finally:
        await caller.close()
        await etcd.close()


def to_text(experts: Sequence[ExpertStatus]) -> str:
    """Format a table: a line for each expert, then a line for each server that has it."""
    header = ("expert, server", "role", "term", "version", "committed", "saved", "waiting")
    lines: list[tuple[str, ...]] = [header]
    for expert in experts:
        what = "led by " + expert.leader if expert.leader else "nobody leads"
        lines.append((expert.uid, what, str(expert.term), str(expert.version), "", "", ""))
        for replica in expert.replicas:
            role = replica.error or replica.role or "hosted"
            if not replica.is_member:
                role += ", no member"
            if replica.unsaved:
                role += f", cannot save: {replica.unsaved}"
            numbers = (replica.term, replica.version, replica.committed, replica.saved, replica.waiting)
            lines.append((f"  {replica.endpoint}", role, *("-" if n is None else str(n) for n in numbers)))
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the status. Returns 1 if an expert is not led or not saved, or if a member does not answer; otherwise 0.

    SystemExit, with which the command ends with 2, if etcd does not answer.
    """
    parser = argparse.ArgumentParser(prog="fmoe serve status", description=__doc__)
    parser.add_argument(
        "--registry", required=True, type=etcd_address, help="etcd://host:port[,host:port...]"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--timeout", type=positive_float, default=5.0, help="seconds for each answer")
    parser.add_argument("--tokens", metavar="FILE", type=Path, help="the servers' file of names and tokens")
    parser.add_argument("--own_token", metavar="NAME", help="which of them to show")
    for name, help in (
        ("ca", "who signed the servers' certificates"),
        ("certificate", "yours"),
        ("key", "yours"),
    ):
        parser.add_argument(f"--tls_{name}", metavar="FILE", help=help)
    flags = parser.parse_args(arguments)
    if (flags.tokens is None) != (flags.own_token is None):
        parser.error("give --tokens and --own_token together")
    # the token with which to call the servers, as they call each other
    tokens = {} if flags.tokens is None else read_tokens(flags.tokens)
    names = {name: token for token, name in tokens.items()}  # the file has {token: name}
    if flags.own_token is not None and flags.own_token not in names:
        parser.error(f"--own_token {flags.own_token} is no name in {flags.tokens}")
    try:
        token = names.get(flags.own_token)
        credentials = Credentials(flags.tls_ca, flags.tls_certificate, flags.tls_key, token)
        reading = read_status(flags.registry, credentials, flags.timeout)
        experts = loop.run(reading, 10 * flags.timeout)
    except (DiscoveryError, OSError, ValueError) as error:
        raise SystemExit(f"etcd://{flags.registry}: {error}") from None
    print(json.dumps([dataclasses.asdict(e) for e in experts], indent=2) if flags.json else to_text(experts))
    missing = any(replica.error or replica.unsaved for expert in experts for replica in expert.replicas)
    return int(missing or not all(expert.is_led for expert in experts))
