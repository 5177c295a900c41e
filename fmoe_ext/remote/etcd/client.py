"""EtcdClient calls etcd, for replication/registry.py; EtcdDiscovery finds and claims experts in it, for clients.

etcd is a small key-value store that several machines keep in agreement.
    revision      a number that each change increases; a key has those of its creation and of its last change
    transaction   compares revisions of keys and then reads and writes, all at one moment: of two servers that want the
                  same key one gets it
    lease         a key put under it vanishes when the lease's owner has not renewed it in time
    watch         a stream of all changes since a revision
The messages are aetcd's, which are generated from etcd's own. The calls are made here, because each must end within its
timeout.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from fmoe_ext._require import require
from fmoe_ext.remote.discovery import (
    Claim,
    Discovery,
    DiscoveryError,
    ExpertRecord,
    check_prefix,
    check_uid,
    successors_among,
)
from fmoe_ext.remote.etcd.keys import EXPERTS, Leader, Members, dump, leader_key, load, uid_of

try:
    from aetcd import rpc
    from google.protobuf.message import DecodeError
except ImportError:  # needed for a registry alone: EtcdClient raises the error
    rpc, DecodeError = None, ValueError

log = logging.getLogger("fmoe_ext.remote")
_MAX_OPERATIONS = 100  # of one transaction; etcd's default limit is 128


@dataclass(frozen=True)
class Entry:
    """A key with its value, and the revisions at which it was made and last changed."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int


@dataclass(frozen=True)
class Event:
    """A change that a watch saw."""

    entry: Entry  # its value is empty for a deletion
    is_deletion: bool


@dataclass(frozen=True)
class Answer:
    """The answer to a transaction."""

    succeeded: bool  # its comparisons held
    revision: int  # of the store
    ranges: list[list[Entry]]  # what each read found
    cluster: int = 0  # the id of the cluster


def created_at(key: str, revision: int) -> Any:
    """Make a comparison: key was created at that revision; 0: it does not exist."""
    return rpc.Compare(target=rpc.Compare.CREATE, key=key.encode(), create_revision=revision)


def changed_at(key: str, revision: int) -> Any:
    """Make a comparison: key was last changed at that revision; 0: it does not exist."""
    return rpc.Compare(target=rpc.Compare.MOD, key=key.encode(), mod_revision=revision)


def put(key: str, value: bytes, lease: int = 0) -> Any:
    """Make an operation of a transaction: write a key, under a lease unless that is 0."""
    return rpc.RequestOp(request_put=rpc.PutRequest(key=key.encode(), value=value, lease=lease))


def delete(key: str) -> Any:
    """Make an operation of a transaction: delete a key, if it is there."""
    return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key.encode()))


def read(key: str, is_prefix: bool = False, keys_only: bool = False) -> Any:
    """Make an operation of a transaction: read a key, or all keys that begin with it."""
    end = _prefix_end(key) if is_prefix else b""
    return rpc.RequestOp(request_range=rpc.RangeRequest(key=key.encode(), range_end=end, keys_only=keys_only))


def _has_value(key: str, value: bytes) -> Any:
    """Make a comparison: key exists and has this value."""
    return rpc.Compare(target=rpc.Compare.VALUE, key=key.encode(), value=value)


def _prefix_end(prefix: str) -> bytes:
    """Return the first key behind all that begin with prefix: its last byte plus 1 (UTF-8 has no 0xff)."""
    data = prefix.encode()
    return data[:-1] + bytes([data[-1] + 1])


class EtcdClient:
    """A client of one etcd cluster at host:port[,host:port...]. A call that fails or is late raises DiscoveryError."""

    def __init__(self, endpoints: str):
        require("aetcd", "a registry in etcd")
        addresses = [endpoint for endpoint in endpoints.split(",") if endpoint]
        if not addresses:
            raise ValueError("etcd needs an address: etcd://host:2379")
        # grpc tries the addresses of one target in turn, but takes several only as numbers
        self._target = "ipv4:" + ",".join(addresses) if len(addresses) > 1 else addresses[0]
        self._open: grpc.aio.Channel | None = None

    @property
    def _channel(self) -> grpc.aio.Channel:
        if self._open is None:
            # grpc's default pauses between attempts to connect grow to two minutes, which is many leases long
            options = [("grpc.max_reconnect_backoff_ms", 1000), ("grpc.initial_reconnect_backoff_ms", 100)]
            self._open = grpc.aio.insecure_channel(self._target, options)
        return self._open

    async def close(self) -> None:
        channel, self._open = self._open, None
        if channel is not None:
            await channel.close()

    async def transact(
        self,
        compare: Sequence[Any] = (),
        success: Sequence[Any] = (),
        failure: Sequence[Any] = (),
        timeout: float = 5.0,
    ) -> Answer:
        """Run the operations of `success` if every comparison holds, otherwise of `failure`; all at one revision."""
        request = rpc.TxnRequest(compare=compare, success=success, failure=failure)
        reply = await self._call("KV/Txn", request, rpc.TxnResponse, timeout)
        found = [
            [_entry(kv) for kv in response.response_range.kvs]
            for response in reply.responses
            if response.HasField("response_range")
        ]
        return Answer(reply.succeeded, reply.header.revision, found, reply.header.cluster_id)

    async def read(self, key: str, is_prefix: bool = False, timeout: float = 5.0) -> tuple[list[Entry], int]:
        """Return the entries of a key or a prefix, and the revision at which they were so."""
        answer = await self.transact(success=[read(key, is_prefix)], timeout=timeout)
        return answer.ranges[0], answer.revision

    async def grant(self, ttl: float, timeout: float = 5.0) -> int:
        """Make a lease -> its id. Its keys vanish unless it is renewed within ttl seconds (rounded up, at least 1)."""
        request = rpc.LeaseGrantRequest(TTL=max(1, math.ceil(ttl)))
        reply = await self._call("Lease/LeaseGrant", request, rpc.LeaseGrantResponse, timeout)
        return int(reply.ID)

    async def keep_alive(self, lease: int, timeout: float = 5.0) -> bool:
        """Renew the lease for another ttl; False if it has ended."""

        async def once() -> Any:
            stream = self._channel.stream_stream("/etcdserverpb.Lease/LeaseKeepAlive")(timeout=timeout)
            try:
                await stream.write(rpc.LeaseKeepAliveRequest(ID=lease).SerializeToString())
                return rpc.LeaseKeepAliveResponse.FromString(await stream.read())
            finally:
                stream.cancel()

        return (await self._guard(once(), "LeaseKeepAlive", timeout)).TTL > 0

    async def revoke(self, lease: int, timeout: float = 5.0) -> None:
        request = rpc.LeaseRevokeRequest(ID=lease)
        await self._call("Lease/LeaseRevoke", request, rpc.LeaseRevokeResponse, timeout)

    async def watch(self, prefix: str, revision: int) -> AsyncIterator[list[Event]]:
        """Yield the changes under a prefix since a revision, as they come; DiscoveryError when the stream ends."""
        stream = self._channel.stream_stream("/etcdserverpb.Watch/Watch")()
        keys = {"key": prefix.encode(), "range_end": _prefix_end(prefix)}
        create = rpc.WatchCreateRequest(**keys, start_revision=revision)
        try:
            await stream.write(rpc.WatchRequest(create_request=create).SerializeToString())
            while True:
                message = await stream.read()
                if message is grpc.aio.EOF:
                    raise DiscoveryError(f"etcd at {self._target} ended the watch")
                reply = rpc.WatchResponse.FromString(message)
                if reply.canceled:
                    raise DiscoveryError(f"etcd refused the watch: {reply.cancel_reason}")
                if events := [Event(_entry(e.kv), e.type == rpc.Event.DELETE) for e in reply.events]:
                    yield events
        except (grpc.aio.AioRpcError, DecodeError) as error:
            raise DiscoveryError(f"the watch on etcd at {self._target} ended: {_details(error)}") from None
        finally:
            stream.cancel()

    async def _call(self, method: str, request: Any, reply_type: Any, timeout: float) -> Any:
        async def once() -> Any:
            send = self._channel.unary_unary(f"/etcdserverpb.{method}")
            return reply_type.FromString(await send(request.SerializeToString(), timeout=timeout))

        return await self._guard(once(), method.rpartition("/")[2], timeout)

    async def _guard(self, call: Awaitable[Any], name: str, timeout: float) -> Any:
        begin = time.monotonic()
        failures = grpc.aio.AioRpcError, DecodeError, asyncio.TimeoutError
        try:
            return await asyncio.wait_for(call, max(0.0, timeout) + 0.1)
        # InvalidStateError and TypeError: the stream had ended before it was written to, or read (read() gives EOF)
        except (*failures, asyncio.InvalidStateError, TypeError) as error:
            seconds = time.monotonic() - begin
            raise DiscoveryError(
                f"etcd at {self._target} did not do {name} ({seconds:.1f} s): {_details(error)}; is it running, "
                "and can it be reached from here?"
            ) from None


def _entry(kv: Any) -> Entry:
    return Entry(kv.key.decode(errors="replace"), kv.value, kv.create_revision, kv.mod_revision)


def _details(error: BaseException) -> str:
    return str(error.details()) if isinstance(error, grpc.aio.AioRpcError) else repr(error)


# seconds for which a record from etcd is believed: its lease, which ends it, is not known here
_UNSEEN_FOR = 60.0


class EtcdDiscovery(Discovery):
    """A directory in etcd: EtcdDiscovery("host:2379"). Claims are transactions, and expire with the claimer's lease.

    All claims of one object lie under one lease, so they have one ttl, live while any of them is renewed, and end
    together: a server that renews none in time has lost all of them until it claims again.
    It reads the keys of replicated experts too (etcd/keys.py): the leader takes gradients, all members answer forwards.
    """

    def __init__(self, endpoints: str):
        self.etcd = EtcdClient(endpoints)
        self._lease: int | None = None
        self._ttl = 0.0  # of the lease
        self._held: set[str] = set()  # uids whose keys lie under the lease

    async def claim(self, claim: Claim) -> frozenset[str]:
        deadline = time.monotonic() + claim.timeout
        if self._lease is None or not await self.etcd.keep_alive(self._lease, claim.timeout):
            if self._held:
                text = "the lease of %d experts has ended, and others could claim them: they are claimed anew"
                log.warning(text, len(self._held))
            self._lease = await self.etcd.grant(claim.ttl, deadline - time.monotonic())
            self._ttl = claim.ttl
            self._held.clear()
        elif claim.ttl != self._ttl:
            raise ValueError(
                f"the claims of this EtcdDiscovery have one lease, of {self._ttl:g} s, but ttl is {claim.ttl:g}: "
                "use another EtcdDiscovery for it"
            )
        mine, value = set(), dump(Leader("", claim.endpoint))
        for uid in claim.uids:
            key = leader_key(uid)
            answer = await self.etcd.transact(
                [created_at(key, 0)], [put(key, value, self._lease)], [read(key)], deadline - time.monotonic()
            )
            owner = None if answer.succeeded or not answer.ranges[0] else answer.ranges[0][0]
            is_own = answer.succeeded or (owner is not None and owner.value == value)
            # of an earlier process at this endpoint, or of a lease that has ended: the key would vanish with that
            if is_own and not answer.succeeded and uid not in self._held:
                condition, again = _has_value(key, value), put(key, value, self._lease)
                left = deadline - time.monotonic()
                is_own = (await self.etcd.transact([condition], [again], timeout=left)).succeeded
            if is_own:
                mine.add(uid)
                self._held.add(uid)
        return frozenset(mine)

    async def withdraw(self, uids: Sequence[str], endpoint: str, *, timeout: float = 5.0) -> None:
        deadline, value = time.monotonic() + timeout, dump(Leader("", endpoint))
        for uid in uids:
            key = leader_key(uid)
            is_own = _has_value(key, value)  # it is not another server's by now
            await self.etcd.transact([is_own], [delete(key)], timeout=deadline - time.monotonic())
            self._held.discard(uid)

    async def get(self, uids: Sequence[str], *, timeout: float = 5.0) -> list[ExpertRecord | None]:
        names = [check_uid(uid) for uid in uids]
        ranges = await self._read_all([read(f"{EXPERTS}{uid}/", is_prefix=True) for uid in names], timeout)
        records: list[ExpertRecord | None] = []
        for uid, entries in zip(names, ranges, strict=True):
            by_key = {entry.key.removeprefix(f"{EXPERTS}{uid}/"): entry for entry in entries}
            leader = load(Leader, by_key["leader"].value) if "leader" in by_key else None
            if leader is None:
                records.append(None)
                continue
            members = load(Members, by_key["members"].value) if "members" in by_key else None
            others = [] if members is None else list(members.endpoints.values())
            endpoints = leader.endpoint, *(endpoint for endpoint in others if endpoint != leader.endpoint)
            expires, fence = time.monotonic() + _UNSEEN_FOR, by_key["leader"].create_revision
            records.append(ExpertRecord(uid, endpoints, expires, fence))
        return records

    async def successors(self, prefixes: Sequence[str], *, timeout: float = 5.0) -> dict[str, frozenset[int]]:
        places = [f"{EXPERTS}{check_prefix(prefix)}." for prefix in prefixes]
        ranges = await self._read_all([read(at, is_prefix=True, keys_only=True) for at in places], timeout)
        keys = {entry.key for found in ranges for entry in found if entry.key.endswith("/leader")}
        return successors_among(sorted(uid for key in keys if (uid := uid_of(key))), prefixes)

    async def _read_all(self, reads: Sequence[Any], timeout: float) -> list[list[Entry]]:
        """Return the entries that each read finds, _MAX_OPERATIONS reads in one transaction."""
        deadline, found = time.monotonic() + timeout, []
        for first in range(0, len(reads), _MAX_OPERATIONS):
            some = reads[first : first + _MAX_OPERATIONS]
            found += (await self.etcd.transact(success=some, timeout=deadline - time.monotonic())).ranges
        return found

    async def close(self) -> None:
        await self.etcd.close()
