"""RoutingTable: Kademlia's k-buckets, nodes by how far their ids are from ours in the XOR metric."""

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from fmoe_ext.remote.dht.records import ID_BITS

BUCKET_SIZE = 20
MAX_FAILURES = 2  # calls in a row without an answer, after which a node is forgotten
MAX_REFRESHED = 24  # buckets: enough for 2^24 nodes


@dataclass(frozen=True)
class Peer:
    node_id: int
    endpoint: str


@dataclass
class _Bucket:
    """Nodes at distances [2^i, 2^(i+1)), silent for longest first, and spares for when one fails."""

    peers: OrderedDict[int, Peer] = field(default_factory=OrderedDict)
    spare: OrderedDict[int, Peer] = field(default_factory=OrderedDict)


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
        """Of each bucket the node that was silent for longest, and those that did not answer last time."""
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
