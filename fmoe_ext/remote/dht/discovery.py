"""KademliaDiscovery finds and claims experts in the DHT; DHT is its blocking form, for programs without a loop.

Nodes do not agree with each other about who owns a uid, so a node that asks holds an *election*. The record of a uid
lies at the eight nodes nearest to its key. Each of them has one vote, however many records it repeats, for the oldest
live claim that it keeps. The owner with most votes wins; of owners with equally many the one that claimed first, then
the one whose key sorts first. So all that see the same nodes name the same owner. A server that claims a uid holds the
same election over the nodes' answers to its claim.

A claim takes three steps: find the nodes nearest to each uid and each of its prefixes (_ask), store a signed record at
them (_put), and take back the records of elections that were lost (_take_back).
"""

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fmoe_ext.remote import loop
from fmoe_ext.remote.client.client import Settings
from fmoe_ext.remote.client.expert import MARGIN, Directory
from fmoe_ext.remote.dht import records
from fmoe_ext.remote.dht.messages import Item
from fmoe_ext.remote.dht.node import Holder, KademliaNode, Nearby, NodeOptions
from fmoe_ext.remote.dht.records import (
    MAX_SKEW,
    MAX_TTL,
    Identity,
    SignedRecord,
    Value,
    check_endpoint,
    places_of,
    prefix_key,
    uid_key,
)
from fmoe_ext.remote.dht.storage import MAX_UNDER_PREFIX, Peer, Refusal, fair_shares
from fmoe_ext.remote.dht.transport import GrpcTransport
from fmoe_ext.remote.discovery import (
    Claim,
    Discovery,
    DiscoveryError,
    ExpertRecord,
    Granted,
    Unanswered,
    check_prefix,
    check_uid,
    successors_among,
)
from fmoe_ext.remote.security import Credentials

K = TypeVar("K")
T = TypeVar("T")
log = logging.getLogger("fmoe_ext.remote.dht")
# Key of a record's metadata: when its process made its first claim, and a random number. It tells two living processes
# with one key pair apart, such as a server and a copy of its disk.
_INCARNATION = "incarnation"
_SHARE_FOR_LOOKUP = 0.6  # of claim()'s time, to find the nearest nodes; the rest is for storing at them


class KademliaDiscovery(Discovery):
    """A directory without a centre: an expert belongs to the key pair that most of the nodes nearest to it name.

    A node keeps the first live record of a uid and refuses records of other owners, so a claim cannot be taken over.
    When two networks become one, a uid may have two owners with equally many votes: the older claim wins and the other
    is withdrawn. Of two processes with one key the one that began first keeps its uids, once both have renewed them.
    """

    def __init__(self, node: KademliaNode, identity: Identity | None = None):
        self.node, self.identity = node, identity or Identity()
        self._declared: dict[str, SignedRecord] = {}  # our last record of each uid
        self._sequence = 0  # the largest that we have used
        self._incarnation = ""  # of this process, once it has claimed something
        self._copies: set[str] = set()  # incarnations of other living processes with this key

    # ---------------------------------------------------------------- the interface

    async def claim(self, claim: Claim) -> frozenset[str]:
        if not 0 < claim.ttl <= MAX_TTL:
            raise ValueError(f"ttl must be above 0 and at most {MAX_TTL} s, but got {claim.ttl}")
        check_endpoint(claim.endpoint)
        end = time.monotonic() + claim.timeout
        # 1. the nearest nodes, and which uids they show as free or ours
        keys = [key for uid in claim.uids for key in places_of(uid)]
        near = await self._find(keys, claim.timeout * _SHARE_FOR_LOOKUP)
        free = [uid for uid in claim.uids if self._may_claim(uid, near)]
        # 2. a record at each of them; their answers are an election
        signed = [self._sign(uid, claim, near) for uid in free]
        said = await self._put(signed, near, end - time.monotonic())
        now = self.node.clock.now()
        mine = Granted(r.uid for r in signed if _is_granted(r, said[r.uid][uid_key(r.uid)], now))
        mine.found_at = {r.uid: _num_showing(r, said[r.uid], now) for r in signed if r.uid in mine}
        self._declared = {uid: r for uid, r in self._declared.items() if uid not in claim.uids or uid in free}
        self._declared |= {r.uid: r for r in signed}
        # 3. some nodes may keep a record of a lost claim: it would count against the winner
        await self._take_back([r for r in signed if r.uid not in mine], near, end - time.monotonic())
        return mine

    async def withdraw(self, uids: Sequence[str], endpoint: str, *, timeout: float = 5.0) -> None:
        known = (self._declared.get(uid) for uid in dict.fromkeys(uids))
        own = [record for record in known if record is not None and record.endpoint == endpoint]
        if not own:
            return
        end = time.monotonic() + timeout
        near = await self._find([key for r in own for key in places_of(r.uid)], timeout * _SHARE_FOR_LOOKUP)
        await self._take_back(own, near, end - time.monotonic())

    async def get(self, uids: Sequence[str], *, timeout: float = 5.0) -> list[ExpertRecord | None]:
        keys = {uid: uid_key(check_uid(uid)) for uid in uids}
        clock = self.node.clock

        def expert(uid: str, near: Nearby) -> ExpertRecord | None:
            record = _elect(near.holders, uid, clock.now())
            if record is None:
                return None
            # from the network's time to this host's: ExpertRecord counts by time.monotonic()
            expires = time.monotonic() + clock.seconds_until(record.expires)
            return ExpertRecord(uid, (record.endpoint,), expires, record.fence, record.metadata)

        found = await self._ask(keys, timeout, expert)
        return [found[uid] for uid in uids]

    async def successors(self, prefixes: Sequence[str], *, timeout: float = 5.0) -> dict[str, frozenset[int]]:
        bare = {prefix: check_prefix(prefix) for prefix in prefixes}
        now = self.node.clock.now()

        def places(prefix: str, near: Nearby) -> frozenset[int]:
            live = {r.uid: r for at in near.holders for r in at.records if r.is_live(now)}
            # at most as many as one node keeps below a prefix; of too many each owner has an equal share
            uids = [r.uid for r in fair_shares(live.values(), MAX_UNDER_PREFIX, lambda _: 1)]
            return successors_among(uids, [bare[prefix]])[bare[prefix]]

        return await self._ask({prefix: prefix_key(name) for prefix, name in bare.items()}, timeout, places)

    async def store(self, key: str, value: Any, ttl: float, timeout: float = 5.0) -> bool:
        """Store a small value of this owner under a key for ttl seconds -> True if the DHT took it."""
        uid = records.value_uid(key, self.identity.public)
        metadata = records.dump_value(value)
        return uid in await self.declare([uid], records.ENDPOINT, ttl, metadata=metadata, timeout=timeout)

    async def get_values(self, key: str, timeout: float = 5.0) -> dict[str, records.Value]:
        """Return the live values of a key by the public key of their owner."""
        prefix, clock = records.value_prefix(key), self.node.clock

        def values(_: str, near: Nearby) -> dict[str, records.Value]:
            found, now = {}, clock.now()
            for uid in {r.uid for at in near.holders for r in at.records if r.is_live(now)}:
                record = _elect(near.holders, uid, now)
                if record is None or records.is_misplaced(uid, record.owner):
                    continue
                value = records.load_value(record, time.time() + clock.seconds_until(record.expires))
                if value is not None:
                    found[record.owner] = value
            return found

        return (await self._ask({prefix: prefix_key(prefix)}, timeout, values))[prefix]

    async def close(self) -> None:
        await self.node.close()
        self.identity.unlock()

    async def withdraw_all(self, timeout: float = 5.0) -> None:
        """Withdraw all experts that were declared here; values stay until they expire."""
        for endpoint in {record.endpoint for record in self._declared.values()} - {records.ENDPOINT}:
            await self.withdraw(list(self._declared), endpoint, timeout=timeout)

    # ---------------------------------------------------------------- asking

    async def _ask(self, keys: Mapping[K, int], timeout: float, read: Callable[[K, Nearby], T]) -> dict[K, T]:
        """Find the nodes nearest to each name's key -> read(name, these nodes and their records) for each name.

        Unanswered, with the results there are, if the time is too short for some.
        """
        if timeout <= 0:
            raise DiscoveryError("no time was left to ask the DHT")
        near, found = await self.node.find(list(keys.values()), timeout), {}
        for name, key in keys.items():
            holders = near[key].holders
            # believed if the search reached the nearest nodes, or found records before time was up
            if holders and (near[key].is_complete or any(at.records for at in holders)):
                found[name] = read(name, near[key])
        if missing := [name for name in keys if name not in found]:
            text = (
                f"the DHT did not answer for {len(missing)} of {len(keys)} keys within {timeout:.3g} s: this node "
                f"knows {len(self.node.table)} others, its initial peers are {self.node.initial_peers[:8] or 'none'}"
            )
            raise Unanswered(text, found, missing)
        return found

    async def _find(self, keys: Iterable[int], timeout: float) -> dict[int, Nearby]:
        return await self._ask({key: key for key in keys}, timeout, lambda _, near: near)

    def _may_claim(self, uid: str, near: Mapping[int, Nearby]) -> bool:
        """True if the uid is free, or ours and served by no other process with our key that began earlier."""
        record = _elect(near[uid_key(uid)].holders, uid, self.node.clock.now())
        if record is None or record.owner != self.identity.public:
            return record is None
        theirs, mine = record.metadata.get(_INCARNATION, ""), self._own_incarnation()
        declared = self._declared.get(uid)
        # Newer than our last record, though signed with our key: by another process, which lives. A process that has
        # declared nothing yet cannot tell this from a record of its own earlier life.
        is_new = declared is not None and record.sequence > declared.sequence
        if is_new and theirs not in ("", mine, *self._copies):
            self._copies.add(theirs)
            began = "earlier and keeps it" if theirs < mine else "later"
            text = "two servers have one identity: %s is also claimed at %s, by the one that began %s; "
            log.error(text + "give each server a key of its own", uid, record.endpoint, began)
        return theirs not in self._copies or theirs > mine

    def _own_incarnation(self) -> str:
        if not self._incarnation:
            # of a fixed width, so that the earlier sorts first
            milliseconds = int(self.node.clock.now() * 1000)
            self._incarnation = f"{milliseconds:015d}.{self.node.rng.getrandbits(64):016x}"
        return self._incarnation

    # ---------------------------------------------------------------- storing

    def _sign(self, uid: str, claim: Claim, near: Mapping[int, Nearby]) -> SignedRecord:
        now = self.node.clock.now()
        said = [r for at in near[uid_key(uid)].holders for r in at.records if r.uid == uid]
        own = [r for r in said if r.owner == self.identity.public and r.is_live(now)]
        # A claim that is renewed keeps its age; a new one is younger than all known ones, and so loses to them. But no
        # node keeps a claim of the future: above a liar's fence ours would be refused. Half of the skew is left for
        # nodes whose time is behind ours.
        latest = now + MAX_SKEW / 2
        if made_up := [r for r in said if r.is_claimed_after(latest)]:
            text = "%s: a record of %s is refused, for it was claimed %.0f s in the future"
            log.warning(text, uid, made_up[0].owner, made_up[0].fence / 1000 - now)
        newest = max((r.fence for r in said if not r.is_claimed_after(latest)), default=0)
        fence = own[0].fence if own else max(int(now * 1000), newest + 1)
        metadata = dict(claim.metadata)
        if claim.endpoint != records.ENDPOINT:  # a value (store) may be written by any process of its owner
            metadata[_INCARNATION] = self._own_incarnation()
        return self.identity.sign(uid, claim.endpoint, fence, self._next(said), now + claim.ttl, metadata)

    def _next(self, said: Iterable[SignedRecord] = ()) -> int:
        """Return a sequence number above all that this owner has used, in earlier processes too."""
        used = max((r.sequence for r in said if r.owner == self.identity.public), default=0)
        self._sequence = max(self._sequence, used, int(self.node.clock.now() * 1e9)) + 1
        return self._sequence

    async def _put(
        self, signed: Sequence[SignedRecord], near: Mapping[int, Nearby], timeout: float
    ) -> dict[str, dict[int, list[Refusal | None]]]:
        """Store records under all their keys -> {uid: {key: the refusal or None of each node nearest to the key}}."""
        placed: dict[Peer | None, list[Item]] = {}
        for record in signed:
            for key in places_of(record.uid):
                for at in near[key].holders:
                    placed.setdefault(at.peer, []).append(Item(key, record))
        said: dict[str, dict[int, list[Refusal | None]]] = {
            r.uid: {key: [] for key in places_of(r.uid)} for r in signed
        }
        answers = await self.node.put(placed, max(timeout, 0.1))
        for items, refused in zip(placed.values(), answers, strict=True):
            for (key, record), refusal in zip(items, refused, strict=True):
                said[record.uid][key].append(refusal)
        return said

    async def _take_back(
        self, lost: Sequence[SignedRecord], near: Mapping[int, Nearby], timeout: float
    ) -> None:
        # a withdrawal is a record without an endpoint; it lives as long as the record that it takes back
        if lost:
            signed = [self.identity.sign(r.uid, "", r.fence, self._next(), r.expires) for r in lost]
            await self._put(signed, near, timeout)
        for record in lost:
            self._declared.pop(record.uid, None)


# -------------------------------------------------------------------- elections


def _elect(holders: Sequence[Holder], uid: str, now: float) -> SignedRecord | None:
    """Return the live record of a uid that wins the election among the nodes nearest to its key; None without one."""
    # 1. each owner's last word: a live record that its owner has replaced or withdrawn does not count
    words = [record for at in holders for record in at.records if record.uid == uid]
    last: dict[str, SignedRecord] = {}
    for record in words:
        if record.owner not in last or last[record.owner].sequence < record.sequence:
            last[record.owner] = record
    live = [record for record in last.values() if record.is_live(now)]
    candidates = {record.owner for record in live}
    # 2. one vote a node, however many records it repeats: for the owner of its oldest live record
    votes: Counter[str] = Counter()
    for at in holders:
        # an expired record still votes if its owner has renewed it at other nodes, but live ones go first
        kept = [r for r in at.records if r.uid == uid and not r.is_withdrawn and r.owner in candidates]
        first = min(kept, key=lambda r: (not r.is_live(now), r.fence, r.owner), default=None)
        if first is not None:
            votes[first.owner] += 1
    return _winner(live, votes) if live else None


def _is_granted(mine: SignedRecord, said: Sequence[Refusal | None], now: float) -> bool:
    """True if a claim wins the election; DiscoveryError if no node keeps it and none names another owner."""
    votes = Counter({mine.owner: said.count(None)})  # None: the node keeps the claim
    others = [r.holder for r in said if r is not None and r.holder is not None]
    live = [r for r in others if r.uid == mine.uid and r.is_live(now)]
    votes.update(r.owner for r in live)
    if not votes[mine.owner] and not live:
        reasons = {r.reason for r in said if r is not None}
        raise DiscoveryError(f"no node of the DHT keeps the record of {mine.uid}: {sorted(reasons)[:3]}")
    return _winner([mine, *live], votes).owner == mine.owner


def _winner(live: Sequence[SignedRecord], votes: Mapping[str, int]) -> SignedRecord:
    """Return the record with most votes, then the oldest claim, then the smallest public key."""
    return min(live, key=lambda record: (-votes[record.owner], record.fence, record.owner))


def _num_showing(mine: SignedRecord, said: Mapping[int, Sequence[Refusal | None]], now: float) -> int:
    """Count the nodes that show a uid to beam searches: the fewest over its prefixes.

    A node shows a uid below a prefix by any owner's live record. said: by key, the answers of its nearest nodes.
    """

    def shows(refusal: Refusal | None) -> bool:
        holder = None if refusal is None else refusal.holder
        return refusal is None or (holder is not None and holder.uid == mine.uid and holder.is_live(now))

    return min(sum(map(shows, words)) for key, words in said.items() if key != uid_key(mine.uid))


# -------------------------------------------------------------------- nodes


async def open_node(
    initial_peers: list[str],
    listen_on: str | None = None,
    *,
    identity_path: Path | str | None = None,
    alone: bool = False,
    **options: Any,
) -> KademliaDiscovery:
    """Start a node and join the network of initial_peers -> its KademliaDiscovery; options: as NodeOptions.

    listen_on: host:port, None to ask only. identity_path: the file of the key pair that owns what is declared, made if
    it is missing; alone: InUse if another process has locked it. OSError if the port is in use, DiscoveryError if no
    initial peer answers.
    """
    discovery = _make(initial_peers, listen_on, identity_path, options, alone)
    try:
        await discovery.node.start()
    except BaseException:
        discovery.identity.unlock()
        raise
    return discovery


class DHT(Directory):
    """A node of the DHT in this process: DHT(initial_peers=["host:1338"], start=True).

    Without initial peers it begins a new DHT. listen=False: asks other nodes but keeps no records for them. Further
    options: as NodeOptions. start() raises DiscoveryError if no initial peer answers within join_timeout (5 s).
    """

    def __init__(
        self,
        initial_peers: Sequence[str] = (),
        *,
        start: bool = False,
        listen: bool = True,
        listen_on: str = "0.0.0.0:0",
        identity_path: Path | str | None = None,
        settings: Settings | None = None,
        credentials: Credentials | None = None,
        **options: Any,
    ):
        self._kademlia = _make(initial_peers, listen_on if listen else None, identity_path, options)
        super().__init__(self._kademlia, settings, credentials)
        if start:
            self.start()

    @property
    def node(self) -> KademliaNode:
        """This process's node in the network."""
        return self._kademlia.node

    @property
    def port(self) -> int | None:
        """The port that the node listens on; None if it does not listen."""
        return self.node.port

    def start(self) -> "DHT":
        """Join the network of initial_peers, or begin one -> self."""
        # twice: the relay and the initial peers have join_timeout each
        loop.run(self.node.start(), self.node.options.join_timeout * 2 + MARGIN)
        return self

    def join(self, endpoint: str, timeout: float = 5.0) -> None:
        """Join another network through one of its nodes, so that the two become one."""
        if not loop.run(self.node.join([endpoint], timeout), timeout + MARGIN):
            raise DiscoveryError(f"no other node answered at {endpoint} within {timeout:.3g} s")
        loop.run(self.node.refresh(), self.node.options.refresh_period + timeout + MARGIN)

    def store(self, key: str, value: Any, expiration_time: float, timeout: float = 5.0) -> bool:
        """Store a small value (JSON) of this process under a key until expiration_time -> True if the DHT took it.

        expiration_time: as time.time(), at most an hour ahead. Each identity (identity_path) has one value under a key:
        storing again replaces it, and values of other identities stay.
        """
        ttl = expiration_time - time.time()
        return loop.run(self._kademlia.store(key, value, ttl, timeout), timeout + MARGIN)

    def get(self, key: str, timeout: float = 5.0) -> Value | None:
        """Return the value of a key that expires last; None without one."""
        found = self.get_all(key, timeout).values()
        return max(found, key=lambda value: (value.expiration_time, value.owner), default=None)

    def get_all(self, key: str, timeout: float = 5.0) -> dict[str, Value]:
        """Return the live values of a key by the public key of their owner."""
        return loop.run(self._kademlia.get_values(key, timeout), timeout + MARGIN)

    def shutdown(self, timeout: float = 5.0) -> None:
        """Withdraw the experts that were declared here, and leave the network."""
        with contextlib.suppress(DiscoveryError):  # no other node answers: the records expire by themselves
            loop.run(self._kademlia.withdraw_all(timeout), timeout + MARGIN)
        super().shutdown(timeout)

    def __enter__(self) -> "DHT":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _make(
    initial_peers: Sequence[str],
    listen_on: str | None,
    identity_path: Path | str | None,
    options: dict[str, Any],
    alone: bool = False,
) -> KademliaDiscovery:
    node = KademliaNode(GrpcTransport(), NodeOptions(tuple(initial_peers), listen_on, **options))
    return KademliaDiscovery(node, Identity.at(Path(identity_path), alone) if identity_path else None)
