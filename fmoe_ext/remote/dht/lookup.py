"""Search for the nodes nearest to keys: Kademlia's iterative search, for many keys at once (KademliaNode.find()).

    1. begin with the nodes of our table that are nearest to the key
    2. ask the nearest ones that have not been asked, three at a time, for nearer ones; one that is dead costs a timeout
    3. end when the `width` nearest that are known have all answered: no nearer node is left, unless all of them hide it
A node knows most nodes near itself and few far away, so those nearest to a key know nearer ones, and each step at least
halves the distance: among n nodes a search takes about log2(n) steps. A batch of tokens has hundreds of keys, so their
searches run side by side and share calls: a node that is asked for one key is asked for all keys that it is near to.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from fmoe_ext.remote.dht.messages import MAX_KEYS, Found
from fmoe_ext.remote.dht.storage import Peer
from fmoe_ext.remote.dht.transport import Unreachable

_ALPHA = 3  # nodes asked at a time for one key
_MAX_CANDIDATES = 512  # nodes that one key's search considers: answers may name any number of made-up ones
Ask: TypeAlias = "Callable[[Peer, Sequence[int]], Awaitable[dict[int, Found]]]"


class _State(Enum):
    NEW, ASKED, ANSWERED, FAILED = range(4)


@dataclass
class _Candidate:
    peer: Peer
    hops: int  # 1 for a node of our table, one more for each node on the way
    state: _State = _State.NEW
    found: Found = field(default_factory=Found)


class Search:
    """The search for one key: finished when the `width` nearest nodes that can be reached have answered."""

    def __init__(self, key: int, width: int):
        self.key, self.width = key, width
        self.candidates: dict[int, _Candidate] = {}
        self._nearest: list[_Candidate] | None = None  # nearest(), cached until a candidate comes or fails

    def add(self, peers: Iterable[Peer], hops: int) -> None:
        for peer in peers:
            if peer.node_id not in self.candidates and len(self.candidates) < _MAX_CANDIDATES:
                self.candidates[peer.node_id] = _Candidate(peer, hops)
                self._nearest = None

    def fail(self, node_id: int) -> None:
        """Leave out a node that cannot be reached; the next nearest takes its place."""
        self.candidates[node_id].state = _State.FAILED
        self._nearest = None

    def nearest(self) -> list[_Candidate]:
        if self._nearest is None:
            reachable = (c for c in self.candidates.values() if c.state is not _State.FAILED)
            self._nearest = sorted(reachable, key=lambda c: c.peer.node_id ^ self.key)[: self.width]
        return self._nearest

    @property
    def is_finished(self) -> bool:
        return all(c.state is _State.ANSWERED for c in self.nearest())

    def answers(self) -> list[_Candidate]:
        """Return those of the nearest nodes that have answered, nearest first."""
        return [c for c in self.nearest() if c.state is _State.ANSWERED]

    @property
    def hops(self) -> int:
        """Return how many nodes lie on the way to the nearest one, that one included."""
        return max((c.hops for c in self.answers()[:1]), default=0)


async def look_up(ask: Ask, searches: Sequence[Search], own_id: int, timeout: float) -> None:
    """Search for many keys at once, until every search is finished or time is up; is_finished of each says which.

    ask(node, keys) -> what that node knows of them; what several keys want of one node goes in one call.
    """
    end, by_key = time.monotonic() + timeout, {search.key: search for search in searches}
    pending: dict[asyncio.Task[dict[int, Found]], tuple[Peer, tuple[int, ...]]] = {}
    try:
        while (left := end - time.monotonic()) > 0:
            # 1. choose the next nodes of each search, so that _ALPHA of its calls are under way
            wanted: dict[Peer, list[int]] = {}
            nearest = [(search, search.nearest()) for search in searches]
            called: set[Peer] = set()
            for _, near in nearest:
                num_asked = sum(c.state is _State.ASKED for c in near)
                new = [c.peer for c in near if c.state is _State.NEW]
                called.update(new[: max(0, _ALPHA - num_asked)])
            # 2. call them, each for all keys that it is near to and has not been asked for
            for search, near in nearest:
                for candidate in near:
                    if candidate.state is _State.NEW and candidate.peer in called:
                        candidate.state = _State.ASKED
                        wanted.setdefault(candidate.peer, []).append(search.key)
            for peer, keys in wanted.items():
                for first in range(0, len(keys), MAX_KEYS):
                    some = tuple(keys[first : first + MAX_KEYS])
                    pending[asyncio.ensure_future(ask(peer, some))] = peer, some
            if not pending or all(search.is_finished for search in searches):
                return
            # 3. take the answers that have come: the nodes that they name are candidates, one hop further
            done, _ = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in pending if task in done]:
                peer, asked = pending.pop(task)
                try:
                    answers = task.result()
                except Unreachable:
                    answers = {}
                for key in asked:
                    search, found = by_key[key], answers.get(key)
                    candidate = search.candidates[peer.node_id]
                    if found is not None:
                        candidate.state, candidate.found = _State.ANSWERED, found
                        others = (p for p in found.peers if p.node_id != own_id)
                        search.add(others, candidate.hops + 1)
                    elif answers:  # the answer was full before this key: ask again
                        candidate.state = _State.NEW
                    else:
                        search.fail(peer.node_id)
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
