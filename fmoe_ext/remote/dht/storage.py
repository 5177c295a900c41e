"""The memory of a node: RoutingTable, other nodes by XOR distance (Kademlia's k-buckets), and RecordStore.

Bucket i has the nodes at distances [2^i, 2^(i+1)): half of the network lies in the last one, a quarter in the one
before. Each keeps at most k nodes, so a node knows all that are near and few that are far.

Everything here may come from an attacker. So each collection has a bound, and entries of a full one are not pushed
out by newcomers: nodes that answer stay, records that live stay. Where owners compete for room below a prefix, each has
an equal share, or one could fill it with claims alone.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random

from fmoe_ext.remote.dht.records import ID_BITS, MAX_SKEW, MAX_TTL, SignedRecord, is_misplaced, places_of

BUCKET_SIZE = 20  # Kademlia's k: that all of them leave within one refresh is improbable
MAX_FAILURES = 2  # calls in a row without an answer, after which a node is forgotten
MAX_REFRESHED = 24  # buckets: enough for 2^24 nodes


@dataclass(frozen=True)
class Peer:
    """Another node."""

    node_id: int
    endpoint: str


@dataclass
class _Bucket:
    """Nodes at distances [2^i, 2^(i+1)), least recently seen first."""

    peers: OrderedDict[int, Peer] = field(default_factory=OrderedDict)
    spare: OrderedDict[int, Peer] = field(default_factory=OrderedDict)  # for when one fails


class RoutingTable:
    """Nodes that have answered. Old ones stay while they answer: who has been there long will stay (Kademlia)."""

    def __init__(self, own_id: int, bucket_size: int = BUCKET_SIZE):
        self.own_id, self.bucket_size = own_id, bucket_size
        self._buckets: dict[int, _Bucket] = {}
        self._failures: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(len(bucket.peers) for bucket in self._buckets.values())

    def __iter__(self) -> Iterator[Peer]:
        for bucket in self._buckets.values():
            yield from bucket.peers.values()

    def has_room_for(self, node_id: int) -> bool:
        """True if a node is unknown and would be kept, if only as a spare."""
        bucket = self._buckets.get(self._index(node_id))
        if bucket is None or node_id == self.own_id:
            return node_id != self.own_id
        is_known = node_id in bucket.peers or node_id in bucket.spare
        return not is_known and len(bucket.spare) < self.bucket_size

    def heard(self, peer: Peer) -> None:
        """A node has answered at its endpoint: it is the youngest of its bucket, or a spare if that is full."""
        if peer.node_id == self.own_id:
            return
        self._failures.pop(peer.node_id, None)
        bucket = self._buckets.setdefault(self._index(peer.node_id), _Bucket())
        is_member = peer.node_id in bucket.peers or len(bucket.peers) < self.bucket_size
        members = bucket.peers if is_member else bucket.spare
        bucket.spare.pop(peer.node_id, None)
        members[peer.node_id] = peer
        members.move_to_end(peer.node_id)
        # the spare that answered longest ago goes
        while len(bucket.spare) > self.bucket_size:
            bucket.spare.popitem(last=False)

    def failed(self, node_id: int) -> Peer | None:
        """A node has not answered -> itself if it is forgotten for that; the youngest spare takes its place."""
        bucket = self._buckets.get(self._index(node_id)) if node_id != self.own_id else None
        if bucket is None or node_id not in bucket.peers:
            return None
        self._failures[node_id] = self._failures.get(node_id, 0) + 1
        if self._failures[node_id] < MAX_FAILURES:
            return None
        del self._failures[node_id]
        gone = bucket.peers.pop(node_id)
        if bucket.spare:
            self.heard(bucket.spare.popitem(last=True)[1])
        elif not bucket.peers:
            del self._buckets[self._index(node_id)]
        return gone

    def closest(self, key: int, count: int | None = None) -> list[Peer]:
        """The nodes nearest to a key that answered when they were last asked, nearest first; bucket_size of them."""
        reliable = (peer for peer in self if peer.node_id not in self._failures)
        return heapq.nsmallest(count or self.bucket_size, reliable, key=lambda peer: peer.node_id ^ key)

    def doubtful(self) -> list[Peer]:
        """List the least recently seen node of each bucket, and nodes that missed the last request."""
        oldest = (next(iter(bucket.peers.values()), None) for bucket in self._buckets.values())
        failing = (peer for peer in self if peer.node_id in self._failures)
        return list(dict.fromkeys(peer for peer in (*oldest, *failing) if peer is not None))

    def ids_to_refresh(self, rng: Random) -> list[int]:
        """Our own id and a random one in every bucket from the nearest non-empty one outwards."""
        nearest = max(min(self._buckets, default=ID_BITS), ID_BITS - MAX_REFRESHED)
        inside = (
            self.own_id ^ (1 << index | rng.getrandbits(index) if index else 1)
            for index in range(nearest, ID_BITS)
        )
        return [self.own_id, *inside]

    def _index(self, node_id: int) -> int:
        return (node_id ^ self.own_id).bit_length() - 1


MAX_RECORDS = 65_536  # 128 MiB, if each is as long as it may be
MAX_OF_OWNER = 16_384  # so that one owner cannot fill a node
MAX_UNDER_PREFIX = 4096  # experts
MAX_OWNERS = 8  # of one uid whose last word is remembered
PREFIX_BYTES = 6 << 20  # of the records under a prefix in one answer


@dataclass(frozen=True)
class Refusal:
    """Why a record is not kept."""

    reason: str
    holder: SignedRecord | None = None  # the record that stands in its way


@dataclass
class _Entry:
    record: SignedRecord
    forget_at: float  # when the last record of this owner that was ever seen here has expired


@dataclass
class _Slot:
    """The records under one key: for each uid the last word of each owner. prefix: None under the key of a uid."""

    prefix: str | None
    by_uid: dict[str, dict[str, _Entry]] = field(default_factory=dict)
    num_of_owner: Counter[str] = field(default_factory=Counter)

    def give_way(self, owner: str, now: float) -> str | None:
        """The uid that makes room for a new one of an owner: one of the owner with most, if that has two more."""
        most, count = self.num_of_owner.most_common(1)[0]
        # with a lead of one, two owners would push each other out in turn
        if count < self.num_of_owner[owner] + 2:
            return None
        alone = [(uid, owners[most].record) for uid, owners in self.by_uid.items() if set(owners) == {most}]
        newest_dead_first = sorted(alone, key=lambda one: (one[1].is_live(now), -one[1].fence, one[0]))
        return newest_dead_first[0][0] if newest_dead_first else None


def fair_shares(
    records: Iterable[SignedRecord], limit: int, weigh: Callable[[SignedRecord], int]
) -> list[SignedRecord]:
    """As many records as weigh no more than limit; where all are too many, each owner has an equal share."""
    waiting: dict[str, list[SignedRecord]] = {}
    for record in records:
        waiting.setdefault(record.owner, []).append(record)
    turns, kept = [(0, owner) for owner in sorted(waiting)], []
    while turns:
        used, owner = heapq.heappop(turns)
        record = waiting[owner].pop()
        if (weight := weigh(record)) > limit:
            continue
        limit -= weight
        kept.append(record)
        if waiting[owner]:
            heapq.heappush(turns, (used + weight, owner))
    return kept


def size_in_answer(record: SignedRecord) -> int:
    """The bytes of a record in an answer, or somewhat more."""
    return 300 + len(record.payload) + record.payload.count('"') + record.payload.count("\\")


class RecordStore:
    """First come, first kept: while a record lives, no other owner's is taken for its uid.

    Where a prefix has as many experts as are kept, each owner has an equal share of them.

    Of one owner the greater sequence holds, and is remembered until every record of its that was seen has expired:
    an old copy cannot come back. Time is the network's, given by the caller.
    """

    def __init__(self, max_records: int = MAX_RECORDS):
        self.max_records = max_records
        self._slots: dict[int, _Slot] = {}
        self._num_of_owner: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(self._num_of_owner.values())

    def put(self, key: int, record: SignedRecord, now: float) -> Refusal | None:
        """Keeps a verified record under a key, or says why not."""
        uid, owner = record.uid, record.owner
        places = places_of(uid)
        if key not in places:
            return Refusal("this is not a key of its uid")
        if not now < record.expires <= now + MAX_TTL + MAX_SKEW:
            return Refusal("it has expired" if record.expires <= now else f"it lives over {MAX_TTL:.0f} s")
        if is_misplaced(uid, owner):
            return Refusal("this place is for a value of another owner")
        if record.fence > (now + MAX_SKEW) * 1000:
            return Refusal("it was claimed in the future")
        slot = self._slots.get(key)
        entries = slot.by_uid.get(uid, {}) if slot else {}
        own = entries.get(owner)
        is_repeated = False
        if own is not None and now < own.forget_at:
            is_repeated = record.payload == own.record.payload  # a message that came twice
            if not is_repeated and record.sequence <= own.record.sequence:
                newest = f"its owner has said something newer (sequence {own.record.sequence})"
                return Refusal(newest, own.record)
        if not (is_repeated or record.is_withdrawn):
            for other, entry in entries.items():
                if other != owner and entry.record.is_live(now):
                    return Refusal(f"{uid} belongs to another owner", entry.record)
        if own is None:
            if record.is_withdrawn:
                return None  # who has said nothing here has nothing to take back
            if (refusal := self._make_room(slot, entries, record, now)) is not None:
                return refusal
        slot = self._slots.setdefault(key, _Slot(places[key]))
        owners = slot.by_uid.setdefault(uid, {})
        before = owners.get(owner)  # making room may have forgotten it
        if before is None:
            self._num_of_owner[owner] += 1
            slot.num_of_owner[owner] += 1
        forget_at = record.expires if before is None else max(before.forget_at, record.expires)
        owners[owner] = _Entry(record, forget_at)
        return None

    def find(self, key: int, now: float) -> list[SignedRecord]:
        """Under a uid's key every owner's last word; under a prefix's, one live record a coordinate below it.

        If the latter have more than PREFIX_BYTES, each owner has an equal share.
        """
        slot = self._slots.get(key)
        if slot is None:
            return []
        if slot.prefix is None:
            entries = (entry for owners in slot.by_uid.values() for entry in owners.values())
            return [entry.record for entry in entries if now < entry.forget_at]
        longest: dict[str, SignedRecord] = {}
        position = slot.prefix.count(".") + 1
        for uid, owners in slot.by_uid.items():
            for entry in owners.values():
                place, record = uid.split(".")[position], entry.record
                if record.is_live(now) and (place not in longest or longest[place].expires < record.expires):
                    longest[place] = record
        return fair_shares(longest.values(), PREFIX_BYTES, size_in_answer)

    def purge(self, now: float) -> None:
        """Forgets what has expired."""
        for key, slot in list(self._slots.items()):
            for uid, owners in list(slot.by_uid.items()):
                for owner, entry in list(owners.items()):
                    if entry.forget_at <= now:
                        self._drop(slot, uid, owner)
                if not owners:
                    del slot.by_uid[uid]
            if not slot.by_uid:
                del self._slots[key]

    def _make_room(
        self, slot: _Slot | None, entries: dict[str, _Entry], record: SignedRecord, now: float
    ) -> Refusal | None:
        """Makes room for the first record of an owner under a uid, or says why there is none."""
        is_new_uid = slot is not None and record.uid not in slot.by_uid
        crowded = is_new_uid and slot is not None and len(slot.by_uid) >= MAX_UNDER_PREFIX
        if len(self) >= self.max_records or crowded or len(entries) >= MAX_OWNERS:
            self.purge(now)  # what has expired holds room until the next refresh
        if len(self) >= self.max_records:
            return Refusal(f"this node keeps no more than {self.max_records} records")
        if self._num_of_owner[record.owner] >= MAX_OF_OWNER:
            return Refusal(f"this node keeps no more than {MAX_OF_OWNER} records of one owner")
        if len(entries) >= MAX_OWNERS:
            return Refusal(f"{record.uid} changed hands {MAX_OWNERS} times within a record's lifetime")
        if is_new_uid and slot is not None and len(slot.by_uid) >= MAX_UNDER_PREFIX:
            uid = slot.give_way(record.owner, now)
            if uid is None:
                full = f"{slot.prefix} has {MAX_UNDER_PREFIX} experts"
                return Refusal(f"{full}, and this owner has its share of them")
            for owner in list(slot.by_uid[uid]):
                self._drop(slot, uid, owner)
            del slot.by_uid[uid]
        return None

    def _drop(self, slot: _Slot, uid: str, owner: str) -> None:
        del slot.by_uid[uid][owner]
        for counter in (self._num_of_owner, slot.num_of_owner):
            counter[owner] -= 1
            if not counter[owner]:
                del counter[owner]
