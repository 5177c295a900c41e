"""EtcdClient: keys, transactions, leases and watches, protocol buffers by hand; EtcdDiscovery: experts in etcd.

Field numbers are those of etcd's rpc.proto (API v3); https://protobuf.dev/programming-guides/encoding.
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from fmoe_ext.remote.discovery import (
    Claim,
    Discovery,
    DiscoveryError,
    ExpertRecord,
    check_prefix,
    check_uid,
    successors_among,
)
from fmoe_ext.remote.etcd.keys import EXPERTS, Leader, dump, leader_key, load_leader, load_members, uid_of

Value: TypeAlias = "int | bytes | str | Sequence[int | bytes | str]"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class _ProtoError(ValueError):
    """Bytes that are no protocol buffer."""


class _Fields(defaultdict[int, list[int | bytes]]):
    """Decode a message: every value of every field."""

    def number(self, field: int) -> int:
        """An int64, 0 where it is left out."""
        value = self[field][-1] if self.get(field) else 0
        if not isinstance(value, int):
            raise _ProtoError(f"field {field} is no number")
        return value - (1 << 64) if value >= 1 << 63 else value

    def data(self, field: int) -> bytes:
        value = self[field][-1] if self.get(field) else b""
        if not isinstance(value, bytes):
            raise _ProtoError(f"field {field} is no string of bytes")
        return value

    def messages(self, field: int) -> list["_Fields"]:
        return [parse(value) for value in self.get(field, []) if isinstance(value, bytes)]


def build(fields: Mapping[int, Value]) -> bytes:
    """A message: {field number: value or values}; 0 and empty are left out, except in a list."""
    parts = []
    for number, value in fields.items():
        if isinstance(value, (int, bytes, str)):
            value = [value] if value else []
        for one in value:
            if isinstance(one, int):
                parts.append(_varint(number << 3 | _VARINT) + _varint(one))
            else:
                data = one.encode() if isinstance(one, str) else one
                parts.append(_varint(number << 3 | _BYTES) + _varint(len(data)) + data)
    return b"".join(parts)


def parse(data: bytes) -> _Fields:
    """The fields of a message; _ProtoError for bytes that are none."""
    fields, place = _Fields(list), 0
    while place < len(data):
        tag, place = _read_varint(data, place)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, place = _read_varint(data, place)
            fields[number].append(value)
            continue
        if kind == _BYTES:
            length, place = _read_varint(data, place)
        elif kind in (_FIXED64, _FIXED32):
            length = 8 if kind == _FIXED64 else 4
        else:
            raise _ProtoError(f"unknown wire type {kind}")
        if place + length > len(data):
            raise _ProtoError(f"field {number} ends after its message")
        fields[number].append(data[place : place + length])
        place += length
    return fields


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # negative numbers travel as 64 bits in two's complement
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            break
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return value, place
    raise _ProtoError("a number has no end")


MAX_OPERATIONS = 100  # of one transaction; etcd's default limit is 128
_CREATE, _MOD, _VALUE = 1, 2, 3  # what a Compare looks at


@dataclass(frozen=True)
class Entry:
    key: str
    value: bytes
    create_revision: int
    mod_revision: int


@dataclass(frozen=True)
class Event:
    """A change that a watch saw; entry.value is empty for a deletion."""

    entry: Entry
    is_deletion: bool


@dataclass(frozen=True)
class Answer:
    """The answer to a transaction."""

    succeeded: bool  # its comparisons held
    revision: int  # of the store
    ranges: list[list[Entry]]  # what each read found
    cluster: int = 0  # the id of the cluster


def created_at(key: str, revision: int) -> bytes:
    """Holds if key was created at that revision; 0: if it does not exist."""
    return build({2: _CREATE, 3: key, 5: [revision]})


def changed_at(key: str, revision: int) -> bytes:
    """Holds if key was last changed at that revision; 0: if it does not exist."""
    return build({2: _MOD, 3: key, 6: [revision]})


def put(key: str, value: bytes, lease: int = 0) -> bytes:
    return build({2: build({1: key, 2: value, 3: lease})})


def delete(key: str) -> bytes:
    return build({3: build({1: key})})


def read(key: str, is_prefix: bool = False, keys_only: bool = False) -> bytes:
    return build({1: build({1: key, 2: _prefix_end(key) if is_prefix else b"", 8: int(keys_only)})})


def _prefix_end(prefix: str) -> bytes:
    """The first key behind all that begin with prefix."""
    data = prefix.encode()
    return data[:-1] + bytes([data[-1] + 1])


class EtcdClient:
    """One cluster at host:port[,host:port...]; every call ends within its timeout, DiscoveryError if it fails."""

    def __init__(self, endpoints: str):
        self.endpoints = [endpoint for endpoint in endpoints.split(",") if endpoint]
        if not self.endpoints:
            raise ValueError("etcd needs an address: etcd://host:2379")
        target = self.endpoints[0]
        if len(self.endpoints) > 1:
            target = "ipv4:" + ",".join(self.endpoints)
        options = [("grpc.max_reconnect_backoff_ms", 1000), ("grpc.initial_reconnect_backoff_ms", 100)]
        self._target, self._options = target, options
        self._open: grpc.aio.Channel | None = None

    @property
    def _channel(self) -> grpc.aio.Channel:
        if self._open is None:
            self._open = grpc.aio.insecure_channel(self._target, self._options)
        return self._open

    async def close(self) -> None:
        channel, self._open = self._open, None
        if channel is not None:
            await channel.close()

    async def transact(
        self,
        compare: Sequence[bytes] = (),
        success: Sequence[bytes] = (),
        failure: Sequence[bytes] = (),
        timeout: float = 5.0,
    ) -> Answer:
        """success if every comparison holds, otherwise failure; all at one revision."""
        request = build({1: compare, 2: success, 3: failure})
        reply = await self._call("/etcdserverpb.KV/Txn", request, timeout)
        header = reply.messages(1)
        found = [
            [_entry(kv) for kv in response.messages(1)[0].messages(2)]
            for response in reply.messages(3)
            if response.messages(1)
        ]
        revision, cluster = (header[0].number(3), header[0].number(1)) if header else (0, 0)
        return Answer(bool(reply.number(2)), revision, found, cluster)

    async def read(self, key: str, is_prefix: bool = False, timeout: float = 5.0) -> tuple[list[Entry], int]:
        """The entries of a key or a prefix, and the revision at which they were so."""
        answer = await self.transact(success=[read(key, is_prefix)], timeout=timeout)
        return answer.ranges[0], answer.revision

    async def grant(self, ttl: float, timeout: float = 5.0) -> int:
        """A new lease: keys under it vanish unless it is kept alive within ttl seconds (whole ones, at least 1)."""
        reply = await self._call(
            "/etcdserverpb.Lease/LeaseGrant", build({1: max(1, math.ceil(ttl))}), timeout
        )
        return reply.number(2)

    async def keep_alive(self, lease: int, timeout: float = 5.0) -> bool:
        """Renew the lease for another ttl; False if it has ended."""

        async def once() -> _Fields:
            stream = self._channel.stream_stream("/etcdserverpb.Lease/LeaseKeepAlive")(timeout=timeout)
            try:
                await stream.write(build({1: lease}))
                return parse(await stream.read())
            finally:
                stream.cancel()

        return (await self._guard(once(), "LeaseKeepAlive", timeout)).number(3) > 0

    async def revoke(self, lease: int, timeout: float = 5.0) -> None:
        await self._call("/etcdserverpb.Lease/LeaseRevoke", build({1: lease}), timeout)

    async def watch(self, prefix: str, revision: int) -> AsyncIterator[list[Event]]:
        """The changes under a prefix since revision, as they come; DiscoveryError when the stream ends."""
        stream = self._channel.stream_stream("/etcdserverpb.Watch/Watch")()
        try:
            await stream.write(build({1: build({1: prefix, 2: _prefix_end(prefix), 3: revision})}))
            while True:
                message = await stream.read()
                if message is grpc.aio.EOF:
                    raise DiscoveryError(f"etcd at {self._target} ended the watch")
                reply = parse(message)
                if reply.number(4):
                    raise DiscoveryError(f"etcd refused the watch: {reply.data(6).decode(errors='replace')}")
                events = [Event(_entry(e.messages(2)[0]), e.number(1) == 1) for e in reply.messages(11)]
                if events:
                    yield events
        except (grpc.aio.AioRpcError, _ProtoError) as error:
            raise DiscoveryError(f"the watch on etcd at {self._target} ended: {_details(error)}") from None
        finally:
            stream.cancel()

    async def _call(self, method: str, request: bytes, timeout: float) -> _Fields:
        async def once() -> _Fields:
            return parse(await self._channel.unary_unary(method)(request, timeout=timeout))

        return await self._guard(once(), method.rpartition("/")[2], timeout)

    async def _guard(self, call: "asyncio.Future[_Fields] | object", name: str, timeout: float) -> _Fields:
        begin = time.monotonic()
        try:
            return await asyncio.wait_for(call, max(0.0, timeout) + 0.1)  # type: ignore[arg-type]
        except (
            grpc.aio.AioRpcError,
            _ProtoError,
            asyncio.TimeoutError,
            TypeError,
            asyncio.InvalidStateError,
        ) as error:
            seconds = time.monotonic() - begin
            raise DiscoveryError(
                f"etcd at {self._target} did not do {name} ({seconds:.1f} s): {_details(error)}; is it running, "
                "and can it be reached from here?"
            ) from None


def _entry(kv: _Fields) -> Entry:
    return Entry(kv.data(1).decode(errors="replace"), kv.data(5), kv.number(2), kv.number(3))


def _details(error: BaseException) -> str:
    return str(error.details()) if isinstance(error, grpc.aio.AioRpcError) else repr(error)


UNSEEN_FOR = 60.0  # seconds for which a record is believed; etcd takes back what has expired


class EtcdDiscovery(Discovery):
    """A directory in etcd: EtcdDiscovery("host:2379"). Uids are claimed by transactions, and expire with a lease."""

    def __init__(self, endpoints: str):
        self.etcd = EtcdClient(endpoints)
        self._lease: int | None = None

    async def claim(self, claim: Claim) -> frozenset[str]:
        deadline = time.monotonic() + claim.timeout
        if self._lease is None or not await self.etcd.keep_alive(self._lease, claim.timeout):
            self._lease = await self.etcd.grant(claim.ttl, claim.timeout)
        mine, value = set(), dump(Leader("", claim.endpoint))
        for uid in claim.uids:
            key = leader_key(uid)
            answer = await self.etcd.transact(
                [created_at(key, 0)], [put(key, value, self._lease)], [read(key)], deadline - time.monotonic()
            )
            owner = None if answer.succeeded or not answer.ranges[0] else answer.ranges[0][0]
            if answer.succeeded or (owner is not None and owner.value == value):
                mine.add(uid)
        return frozenset(mine)

    async def withdraw(self, uids: Sequence[str], endpoint: str, *, timeout: float = 5.0) -> None:
        value = dump(Leader("", endpoint))
        for uid in uids:
            key = leader_key(uid)
            is_own = build({2: _VALUE, 3: key, 7: [value]})  # the key is not another server's by now
            await self.etcd.transact([is_own], [delete(key)], timeout=timeout)

    async def get(self, uids: Sequence[str], *, timeout: float = 5.0) -> list[ExpertRecord | None]:
        deadline, records = time.monotonic() + timeout, []
        for first in range(0, len(uids), MAX_OPERATIONS):
            some = [check_uid(uid) for uid in uids[first : first + MAX_OPERATIONS]]
            reads = [read(f"{EXPERTS}{uid}/", is_prefix=True) for uid in some]
            answer = await self.etcd.transact(success=reads, timeout=deadline - time.monotonic())
            records += [_record(uid, entries) for uid, entries in zip(some, answer.ranges, strict=True)]
        return records

    async def successors(self, prefixes: Sequence[str], *, timeout: float = 5.0) -> dict[str, frozenset[int]]:
        uids: set[str] = set()
        deadline = time.monotonic() + timeout
        for first in range(0, len(prefixes), MAX_OPERATIONS):
            some = [check_prefix(prefix) for prefix in prefixes[first : first + MAX_OPERATIONS]]
            reads = [read(f"{EXPERTS}{prefix}.", is_prefix=True, keys_only=True) for prefix in some]
            answer = await self.etcd.transact(success=reads, timeout=deadline - time.monotonic())
            leaders = (entry for found in answer.ranges for entry in found if entry.key.endswith("/leader"))
            uids.update(uid for entry in leaders if (uid := uid_of(entry.key)))
        return successors_among(sorted(uids), prefixes)

    async def close(self) -> None:
        await self.etcd.close()


def _record(uid: str, entries: Sequence[Entry]) -> ExpertRecord | None:
    by_key = {entry.key.removeprefix(f"{EXPERTS}{uid}/"): entry for entry in entries}
    if "leader" not in by_key:
        return None
    leader = load_leader(by_key["leader"].value)
    members = load_members(by_key["members"].value) if "members" in by_key else None
    if leader is None:
        return None
    others = [] if members is None else [e for e in members.endpoints.values() if e != leader.endpoint]
    fence = by_key["leader"].create_revision
    return ExpertRecord(uid, (leader.endpoint, *others), time.monotonic() + UNSEEN_FOR, fence)
