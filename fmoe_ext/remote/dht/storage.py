"""Keep what a DHT node remembers: other nodes (RoutingTable) and records (RecordStore), both bounded.

RoutingTable sorts nodes into Kademlia's k-buckets by their XOR distance from this node:
    bucket 255   distances [2^255, 2^256): half of the network     at most k of them are kept
    bucket 254   distances [2^254, 2^255): a quarter               at most k
    ...          ... down to buckets that hold all nodes at their distances
So a node knows all its near neighbours and some nodes far away, k log2(n) of n in all.

RecordStore keeps records under keys: those of uids and those of their prefixes. Everything in both may come from an
attacker. So each collection has a bound, and newcomers do not push out what is good: nodes that answer stay in their
bucket, records that live stay. Only where owners compete for room below a prefix does each get an equal share, or one
of them could fill it with claims; and of spare nodes the one that answered longest ago goes.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random

from fmoe_ext.remote.dht.records import ID_BITS, MAX_SKEW, MAX_TTL, SignedRecord, is_misplaced, places_of

BUCKET_SIZE = 20  # Kademlia's k: that all of them leave within one refresh is improbable
_MAX_FAILURES = 2  # calls in a row without an answer, after which a node is forgotten
_MAX_REFRESHED = 24  # buckets: enough for 2^24 nodes


@dataclass(frozen=True)
class Peer:
    """Another node."""

    node_id: int
    endpoint: str


@dataclass
class _Bucket:
    """Nodes at distances [2^i, 2^(i+1)) by id, least recently seen first."""

    peers: OrderedDict[int, Peer] = field(default_factory=OrderedDict)
    # nodes beyond bucket_size, which take the place of one that fails
    spare: OrderedDict[int, Peer] = field(default_factory=OrderedDict)


class RoutingTable:
    """Nodes that have answered. The old ones stay while they answer: long-lived nodes live longest (Kademlia)."""

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
        """Note that a node has answered: it is the most recent of its bucket, or a spare if the bucket is full."""
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
        """Note that a node has not answered -> the node if it is forgotten now, in favour of the latest spare."""
        bucket = self._buckets.get(self._index(node_id)) if node_id != self.own_id else None
        if bucket is None or node_id not in bucket.peers:
            return None
        self._failures[node_id] = self._failures.get(node_id, 0) + 1
        if self._failures[node_id] < _MAX_FAILURES:
            return None
        del self._failures[node_id]
        gone = bucket.peers.pop(node_id)
        if bucket.spare:
            self.heard(bucket.spare.popitem(last=True)[1])
        elif not bucket.peers:
            del self._buckets[self._index(node_id)]
        return gone

    def closest(self, key: int) -> list[Peer]:
        """Return the bucket_size nodes nearest to a key, nearest first, but none that failed last time."""
        reliable = (peer for peer in self if peer.node_id not in self._failures)
        return heapq.nsmallest(self.bucket_size, reliable, key=lambda peer: peer.node_id ^ key)

    def doubtful(self) -> list[Peer]:
        """List the least recently seen node of each bucket, and nodes that missed the last request."""
        oldest = (next(iter(bucket.peers.values()), None) for bucket in self._buckets.values())
        failing = (peer for peer in self if peer.node_id in self._failures)
        return list(dict.fromkeys(peer for peer in (*oldest, *failing) if peer is not None))

    def ids_to_refresh(self, rng: Random) -> list[int]:
        """Return ids to search for: our own, and a random one in each bucket from the nearest used one outwards."""
        nearest = max(min(self._buckets, default=ID_BITS), ID_BITS - _MAX_REFRESHED)
        inside = (
            self.own_id ^ (1 << index | rng.getrandbits(index) if index else 1)
            for index in range(nearest, ID_BITS)
        )
        return [self.own_id, *inside]

    def _index(self, node_id: int) -> int:
        return (node_id ^ self.own_id).bit_length() - 1


MAX_RECORDS = 65_536  # 128 MiB, if each has MAX_RECORD_BYTES
MAX_OF_OWNER = 16_384  # so that one owner cannot fill a node
MAX_UNDER_PREFIX = 4096  # experts
MAX_OWNERS = 8  # of one uid, whose last records are remembered
# of the records under a prefix in one answer; messages.MAX_ANSWER_BYTES bounds all of it
_PREFIX_BYTES = 6 << 20


@dataclass(frozen=True)
class Refusal:
    """Why a record is not kept."""

    reason: str
    holder: SignedRecord | None = None  # the record that stands in its way


@dataclass
class _Entry:
    record: SignedRecord
    # when every record of this owner that was ever seen here has expired: none can come back
    forget_at: float


@dataclass
class _Slot:
    """The records under one key: for each uid the last one of each owner."""

    prefix: str | None  # None: the key is a uid's, and by_uid has that uid alone
    by_uid: dict[str, dict[str, _Entry]] = field(default_factory=dict)  # uid: owner: entry
    num_of_owner: Counter[str] = field(default_factory=Counter)  # entries

    def give_way(self, owner: str, now: float) -> str | None:
        """Return the uid to drop for a new one of `owner`: one of the owner with most uids, if it has two more."""
        most, count = self.num_of_owner.most_common(1)[0]
        # with a lead of one, two owners would push each other out in turn
        if count < self.num_of_owner[owner] + 2:
            return None
        # only uids that no other owner has a record of; expired ones first, then the newest claims
        alone = [(uid, owners[most].record) for uid, owners in self.by_uid.items() if set(owners) == {most}]
        newest_dead_first = sorted(alone, key=lambda one: (one[1].is_live(now), -one[1].fence, one[0]))
        return newest_dead_first[0][0] if newest_dead_first else None


def fair_shares(
    records: Iterable[SignedRecord], limit: int, weigh: Callable[[SignedRecord], int]
) -> list[SignedRecord]:
    """Return as many records as weigh `limit` at most; if not all fit, an equal share of the weight for each owner."""
    # the owner with the least weight so far has the next turn
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
    """Return a bound of a record's bytes in an answer: JSON escapes quotes and backslashes of its payload."""
    return 300 + len(record.payload) + record.payload.count('"') + record.payload.count("\\")


class RecordStore:
    """Records by key. While a record lives, no record of another owner is taken for its uid: first come, first kept.

    Of one owner's records for a uid the one with the greatest sequence is kept, and remembered until every record of
    that owner that was seen here has expired: an old copy cannot come back. Where a prefix has MAX_UNDER_PREFIX
    experts, each owner has an equal share of them. Time is the network's (node.py), given by the caller.
    """

    def __init__(self, max_records: int = MAX_RECORDS):
        self.max_records = max_records
        self._slots: dict[int, _Slot] = {}
        self._num_of_owner: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(self._num_of_owner.values())

    def put(self, key: int, record: SignedRecord, now: float) -> Refusal | None:
        """Keep a record, whose signature was checked, under a key -> None, or a Refusal that says why not."""
        # 1. refuse what may never lie here
        uid, owner = record.uid, record.owner
        places = places_of(uid)
        if key not in places:
            return Refusal("this is not a key of its uid")
        if not now < record.expires <= now + MAX_TTL + MAX_SKEW:
            return Refusal("it has expired" if record.expires <= now else f"it lives over {MAX_TTL:.0f} s")
        if is_misplaced(uid, owner):
            return Refusal("this place is for a value of another owner")
        if record.is_claimed_after(now + MAX_SKEW):
            return Refusal("it was claimed in the future")
        # 2. of this owner: only a newer record, or the same one again
        slot = self._slots.get(key)
        entries = slot.by_uid.get(uid, {}) if slot else {}
        own = entries.get(owner)
        is_repeated = False
        if own is not None and now < own.forget_at:
            is_repeated = record.payload == own.record.payload  # a message that came twice
            if not is_repeated and record.sequence <= own.record.sequence:
                newest = f"its owner has said something newer (sequence {own.record.sequence})"
                return Refusal(newest, own.record)
        # 3. no live record of another owner; withdrawing its own is every owner's right
        if not (is_repeated or record.is_withdrawn):
            for other, entry in entries.items():
                if other != owner and entry.record.is_live(now):
                    return Refusal(f"{uid} belongs to another owner", entry.record)
        # 4. room for an owner's first record
        if own is None:
            if record.is_withdrawn:
                return None  # there is no record to take back
            if (refusal := self._make_room(slot, entries, record, now)) is not None:
                return refusal
        slot = self._slots.setdefault(key, _Slot(places[key]))
        owners = slot.by_uid.setdefault(uid, {})
        before = owners.get(owner)  # not `own`, which _make_room() may have dropped as expired
        if before is None:
            self._num_of_owner[owner] += 1
            slot.num_of_owner[owner] += 1
        forget_at = record.expires if before is None else max(before.forget_at, record.expires)
        owners[owner] = _Entry(record, forget_at)
        return None

    def find(self, key: int, now: float) -> list[SignedRecord]:
        """Return each owner's last record under a uid's key; under a prefix's key one live record for each coordinate.

        Beam search needs one for each. If these have more than _PREFIX_BYTES, each owner gets an equal share.
        """
        slot = self._slots.get(key)
        if slot is None:
            return []
        if slot.prefix is None:
            entries = (entry for owners in slot.by_uid.values() for entry in owners.values())
            return [entry.record for entry in entries if now < entry.forget_at]
        # of the records below one coordinate the one that lives longest
        longest: dict[str, SignedRecord] = {}
        position = slot.prefix.count(".") + 1
        for uid, owners in slot.by_uid.items():
            for entry in owners.values():
                place, record = uid.split(".")[position], entry.record
                if record.is_live(now) and (place not in longest or longest[place].expires < record.expires):
                    longest[place] = record
        return fair_shares(longest.values(), _PREFIX_BYTES, size_in_answer)

    def purge(self, now: float) -> None:
        """Drop the entries whose owner's records have all expired."""
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
        """Make room for the first record of an owner under a uid -> None, or a Refusal that says why there is none."""
        is_new_uid = slot is not None and record.uid not in slot.by_uid
        crowded = is_new_uid and slot is not None and len(slot.by_uid) >= MAX_UNDER_PREFIX
        if len(self) >= self.max_records or crowded or len(entries) >= MAX_OWNERS:
            self.purge(now)  # expired entries take up room until the next refresh
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
