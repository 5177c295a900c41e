"""EtcdDiscovery: experts as etcd's keys say, for clients and for servers without replicas."""

import time
from collections.abc import Mapping, Sequence

from fmoe_ext.remote.discovery import Discovery, ExpertRecord, check_prefix, check_uid, successors_among
from fmoe_ext.remote.etcd import client as etcd
from fmoe_ext.remote.etcd.client import MAX_OPERATIONS, Entry, EtcdClient
from fmoe_ext.remote.etcd.keys import EXPERTS, Leader, dump, leader_key, load_leader, load_members, uid_of

UNSEEN_FOR = 60.0  # seconds for which a record is believed; etcd takes back what has expired


class EtcdDiscovery(Discovery):
    """A directory in etcd: EtcdDiscovery("host:2379"). Uids are claimed by transactions, and expire with a lease."""

    def __init__(self, endpoints: str):
        self.etcd = EtcdClient(endpoints)
        self._lease: int | None = None

    async def declare(
        self,
        uids: Sequence[str],
        endpoint: str,
        ttl: float,
        *,
        metadata: Mapping[str, str] | None = None,
        timeout: float = 5.0,
    ) -> frozenset[str]:
        deadline = time.monotonic() + timeout
        lease = await self._renew(ttl, timeout)
        mine, value = set(), dump(Leader("", endpoint))
        for uid in map(check_uid, uids):
            key = leader_key(uid)
            answer = await self.etcd.transact(
                [etcd.created_at(key, 0)],
                [etcd.put(key, value, lease)],
                [etcd.read(key)],
                deadline - time.monotonic(),
            )
            owner = None if answer.succeeded or not answer.ranges[0] else answer.ranges[0][0]
            if answer.succeeded or (owner is not None and owner.value == value):
                mine.add(uid)
        return frozenset(mine)

    async def _renew(self, ttl: float, timeout: float) -> int:
        if self._lease is None or not await self.etcd.keep_alive(self._lease, timeout):
            self._lease = await self.etcd.grant(ttl, timeout)
        return self._lease

    async def withdraw(self, uids: Sequence[str], endpoint: str, *, timeout: float = 5.0) -> None:
        value = dump(Leader("", endpoint))
        for uid in uids:
            key = leader_key(uid)
            await self.etcd.transact([etcd.has_value(key, value)], [etcd.delete(key)], timeout=timeout)

    async def get(self, uids: Sequence[str], *, timeout: float = 5.0) -> list[ExpertRecord | None]:
        deadline, records = time.monotonic() + timeout, []
        for first in range(0, len(uids), MAX_OPERATIONS):
            some = [check_uid(uid) for uid in uids[first : first + MAX_OPERATIONS]]
            reads = [etcd.read(f"{EXPERTS}{uid}/", is_prefix=True) for uid in some]
            answer = await self.etcd.transact(success=reads, timeout=deadline - time.monotonic())
            records += [_record(uid, entries) for uid, entries in zip(some, answer.ranges, strict=True)]
        return records

    async def successors(self, prefixes: Sequence[str], *, timeout: float = 5.0) -> dict[str, frozenset[int]]:
        uids: set[str] = set()
        deadline = time.monotonic() + timeout
        for first in range(0, len(prefixes), MAX_OPERATIONS):
            some = [check_prefix(prefix) for prefix in prefixes[first : first + MAX_OPERATIONS]]
            reads = [etcd.read(f"{EXPERTS}{prefix}.", is_prefix=True, keys_only=True) for prefix in some]
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
    return ExpertRecord(uid, (leader.endpoint, *others), time.time() + UNSEEN_FOR, fence)
