"""KademliaNode: one node of the DHT, which answers other nodes, searches through them, and keeps records for all.

    start()            call the initial peers (join), then search for ids at every distance to fill the routing table
    handle()           answer Ping, Find and Store of others (messages.py)
    find() / put()     search for the nodes nearest to keys (lookup.py), and store records at them
    _maintain()        about every refresh_period: drop what has expired, call nodes that may be gone, search again
Only a node that has answered at its endpoint gets into the routing table. What others say about it is a hint: a
stranger that asks something and names its endpoint is called back there first.

Records expire by the network's time (NetworkClock), on which nodes agree although their hosts' clocks do not. Every
answer has that time as its sender sees it; a node takes the median of them, so a minority cannot move it far.
"""

import asyncio
import logging
import random
import secrets
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fmoe_ext.remote.dht import messages
from fmoe_ext.remote.dht.lookup import Search, look_up
from fmoe_ext.remote.dht.messages import Answer, BadMessage, Found, Header, Item, Request
from fmoe_ext.remote.dht.records import BadRecord, Identity, SignedRecord, check_endpoint, node_id_of
from fmoe_ext.remote.dht.relay import Attachment
from fmoe_ext.remote.dht.storage import MAX_RECORDS, Peer, RecordStore, Refusal, RoutingTable, size_in_answer
from fmoe_ext.remote.dht.transport import GrpcTransport, Unreachable
from fmoe_ext.remote.discovery import DiscoveryError
from fmoe_ext.remote.flags import POSITIVE, endpoint, flag

log = logging.getLogger("fmoe_ext.remote.dht")
_REPLICAS = 8  # nodes that keep each record
_MAX_GREETED = 64  # strangers that are called back at a time
_MAX_LOST = 64  # endpoints of forgotten nodes, which are tried again when no other node is left
UNREACHABLE = "for hosts that nobody can reach"  # title of a group of flags
RETRY_PAUSE = 0.2  # seconds between two rounds of calling the initial peers


@dataclass(frozen=True)
class NodeOptions:
    """Options of a node, named as the flags of fmoe-dht."""

    initial_peers: Sequence[str] = flag((), "host:port of other nodes; none: a new DHT begins", nargs="*")
    listen_on: str | None = flag(  # None: the node asks but is not asked
        "0.0.0.0:0",
        "host:port; [::]:port for IPv6; port 0: any",
        type=endpoint,
        command_default="0.0.0.0:1338",
    )
    announce: str | None = flag(
        None, "host:port that others should call, if it is not where they see this node", type=endpoint
    )
    relay: str | None = flag(
        None, "host:port of a relay through which this node can be reached", type=endpoint, group=UNREACHABLE
    )
    relay_token: str = flag(
        "", "token of the relay, this one or that one", needs=("relay", "relay_on"), group=UNREACHABLE
    )
    refresh_period: float = flag(15.0, "seconds between two searches for new nodes", type=POSITIVE)
    call_timeout: float = 1.5  # seconds one node has for one answer
    join_timeout: float = flag(5.0, "seconds the initial peers have to answer", type=POSITIVE)
    replicas: int = _REPLICAS
    max_records: int = MAX_RECORDS


@dataclass(frozen=True)
class Holder:
    """One of the nodes nearest to a key, and what it keeps there."""

    peer: Peer | None  # None: this node itself
    records: Sequence[SignedRecord]  # that it has under the key


@dataclass(frozen=True)
class Nearby:
    """The result of a search: the nodes nearest to a key."""

    holders: Sequence[Holder]  # nearest first
    is_complete: bool  # False: time was up, and a nearer node may not have been asked
    hops: int  # nodes on the way to the nearest, that one included


_MAX_VOICES = 64  # addresses whose clocks are remembered
_MAX_OFFSET = 3600.0  # seconds; a clock that is further away than this is ignored
_MAX_RATE = 1.0  # seconds a second by which a node that has joined follows the others
_LONGEST_PAUSE = 60.0  # seconds; a longer time since the last step counts as this, so that no step is larger


def _uptime() -> float:
    """Return seconds of a clock that cannot be set, and that goes on while the host sleeps, where there is one."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


class NetworkClock:
    """The median of the network's time as this node and those that answered it have it; one voice an address.

    A node that joins takes the median of the nodes that it joins. Later it follows by at most _MAX_RATE seconds a
    second, so that attackers who win a majority cannot expire all records at once. A node alone begins with its host's
    clock. Setting that clock later has no effect: the local time is the wall clock at the start plus the time since.
    """

    def __init__(self, local: Callable[[], float] | None = None):
        began = time.time() - _uptime()
        self.local = local or (lambda: began + _uptime())
        self._offsets: OrderedDict[str, float] = OrderedDict()
        self._stepped_at = self.local()
        self.offset = 0.0  # seconds that the network is ahead of this host
        self.is_joining = False

    def now(self) -> float:
        return self.local() + self.offset

    def hear(self, address: str, their_time: float, sent: float, received: float) -> None:
        """Take in the network's time as an address has it, read between two moments of the local clock."""
        # 1. the difference to our local clock; within the measurement's error it counts as none to our time
        offset = their_time - (sent + received) / 2
        if abs(offset) > _MAX_OFFSET:
            return
        if abs(offset - self.offset) <= (received - sent) / 2:
            offset = self.offset
        # 2. one voice an address, or a host could outvote the others with many ids
        self._offsets[address] = offset
        self._offsets.move_to_end(address)
        while len(self._offsets) > _MAX_VOICES:
            self._offsets.popitem(last=False)
        # 3. the median; at once while joining, otherwise in small steps, and with our own voice
        if self.is_joining:
            self.offset = statistics.median(self._offsets.values())
            self._stepped_at = received
        else:
            wanted = statistics.median([self.offset, *self._offsets.values()])
            furthest = _MAX_RATE * min(max(0.0, received - self._stepped_at), _LONGEST_PAUSE)
            self._stepped_at = received
            self.offset += max(-furthest, min(furthest, wanted - self.offset))

    def seconds_until(self, moment: float) -> float:
        """Return the seconds from now to a moment of the network's time."""
        return moment - self.now()


class KademliaNode:
    """A node of the DHT: start() before anything else, close() at the end, everything on one event loop."""

    def __init__(
        self,
        transport: GrpcTransport,
        options: NodeOptions | None = None,
        clock: NetworkClock | None = None,
        rng: random.Random | None = None,
    ):
        self.transport, self.options = transport, options or NodeOptions()
        self.clock = clock or NetworkClock()
        self._identity = Identity(None if rng is None else rng.randbytes(32))
        self.rng = rng or random.Random(secrets.randbits(64))
        self.initial_peers = [check_peer(endpoint) for endpoint in self.options.initial_peers]
        self.node_id = node_id_of(self._identity.public)
        self.table = RoutingTable(self.node_id)
        self.lost: OrderedDict[str, None] = OrderedDict()  # endpoints of forgotten nodes, oldest first
        self.greeting: dict[str, asyncio.Task[None]] = {}  # calls back to strangers, by endpoint
        # endpoint in requests; ":port" for the address that others see, "" if it does not listen
        self.announced = ""
        self.attachment: Attachment | None = None  # to a relay, whose endpoint is then announced instead
        self.store = RecordStore(self.options.max_records)
        self.port: int | None = None  # None: does not listen
        self._maintenance: asyncio.Task[None] | None = None

    @property
    def is_serving(self) -> bool:
        return self.port is not None

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        """Listen and join; OSError if the port is in use, DiscoveryError if no initial peer answers in join_timeout."""
        # 1. a port, and a relay's in front of it
        if self.options.listen_on is not None:
            self.port = await self.transport.serve(self.options.listen_on, self.handle)
            self.announced = self.options.announce or f":{self.port}"
        try:
            if self.options.relay is not None and self.is_serving:
                target = f"{reachable_here(self.options.listen_on)}:{self.port}"
                self.attachment = Attachment(check_peer(self.options.relay), target, self.options.relay_token)
                await self.attachment.start(self.options.join_timeout)
            # 2. the initial peers, and through them nodes at every distance
            if self.initial_peers:
                self.clock.is_joining = True
                timeout, peers = self.options.join_timeout, self.initial_peers
                end = time.monotonic() + timeout
                # at most half of the time for one round, so that the next one finds peers that start a moment later
                while not await self.join(peers, max(0.1, min(timeout / 2, end - time.monotonic()))):
                    if time.monotonic() + RETRY_PAUSE >= end:
                        raise DiscoveryError(
                            f"none of the initial peers {', '.join(peers[:8])} answered within {timeout:.3g} s: "
                            "is a node listening there (fmoe-dht, fmoe-server --dht_port), and can it be reached "
                            "from here?"
                        )
                    await asyncio.sleep(RETRY_PAUSE)
                await self.find(self.table.ids_to_refresh(self.rng), max(1.0, end - time.monotonic()))
                self.clock.is_joining = False
            elif not self.is_serving:
                raise DiscoveryError(
                    "a node that does not listen needs initial_peers: give it host:port of some"
                )
        except BaseException:
            await self.close()
            raise
        self._maintenance = asyncio.create_task(self._maintain())

    async def close(self) -> None:
        tasks = [*self.greeting.values(), *([self._maintenance] if self._maintenance else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.attachment is not None:
            await self.attachment.close()
        self._maintenance = self.attachment = None
        self.port = None
        await self.transport.close()

    async def join(self, endpoints: Iterable[str], timeout: float) -> int:
        """Call nodes at their endpoints -> how many answered. They learn of this node, so two networks become one."""
        calls = (self.ping(Peer(-1, endpoint), timeout) for endpoint in endpoints)
        return sum(1 for peer in await asyncio.gather(*calls) if peer is not None)

    async def refresh(self) -> None:
        """Forget expired records, call nodes that may be gone, and search for new ones at every distance."""
        self.store.purge(self.clock.now())
        timeout = self.options.call_timeout
        # initial peers that were forgotten, as after a partition; without any node left, all forgotten ones
        known = {peer.endpoint for peer in self.table}
        again = [endpoint for endpoint in self.initial_peers if endpoint not in known]
        again += list(self.lost) if not known else []
        doubtful = (self.ping(peer, timeout) for peer in self.table.doubtful())
        await asyncio.gather(self.join(again, timeout), *doubtful)
        await self.find(self.table.ids_to_refresh(self.rng), self.options.refresh_period)

    async def _maintain(self) -> None:
        while True:
            # a random pause, so that nodes which were started together do not search at the same moments for ever
            await asyncio.sleep(self.options.refresh_period * self.rng.uniform(0.8, 1.2))
            try:
                await self.refresh()
            except Exception:  # without maintenance a node would lose its neighbours one by one, unnoticed
                log.exception("the DHT node's maintenance failed, it goes on")

    # ---------------------------------------------------------------- the nodes that this one knows

    async def ping(self, peer: Peer, timeout: float, header: Header | None = None) -> Peer | None:
        """Call a node -> who answers at its endpoint; None if no node does, or this one. peer.node_id -1: any node."""
        try:
            answer = await self.call(peer, messages.PING, Request(header or self._header()), timeout)
        except Unreachable:
            return None
        return Peer(answer.header.node_id, peer.endpoint)

    async def call(self, peer: Peer, method: str, request: Request, timeout: float) -> Answer:
        """Send a request -> the answer in the seal. Remember a node that answers, forget one that fails twice in a row.

        Unreachable if there is no valid answer, or if another node than peer.node_id (-1: any) answers.
        """
        # the answer's signature covers the nonce, so an old answer cannot be sent again
        nonce, sent = secrets.token_hex(16), self.clock.local()
        try:
            data = messages.encode_request(replace(request, nonce=nonce))
            answer = messages.unseal(await self.transport.call(peer.endpoint, method, data, timeout), nonce)
        except (Unreachable, BadMessage) as error:
            self._forget(peer)
            raise Unreachable(f"{peer.endpoint}: {error}") from None
        node_id = answer.header.node_id
        if node_id == self.node_id:
            raise Unreachable(f"{peer.endpoint} is this node itself")
        received = self.clock.local()
        self.table.heard(replace(peer, node_id=node_id))
        # clocks are compared by address and not by id, because ids cost nothing
        address = await self.transport.address(peer.endpoint)
        self.clock.hear(address, answer.header.time, sent, received)
        if peer.node_id not in (-1, node_id):
            self._forget(peer)
            raise Unreachable(f"{peer.endpoint} is another node now")
        return answer

    def _forget(self, peer: Peer) -> None:
        if peer.node_id >= 0 and self.table.failed(peer.node_id) is not None:
            self.lost[peer.endpoint] = None
            while len(self.lost) > _MAX_LOST:
                self.lost.popitem(last=False)

    def _header(self) -> Header:
        endpoint = self.attachment.endpoint if self.attachment else self.announced
        return Header(self.node_id, self.clock.now(), endpoint)

    # ---------------------------------------------------------------- what others ask

    async def handle(self, method: str, data: bytes, host: str) -> bytes:
        """Answer one request of a host; BadMessage if it cannot be read."""
        request = messages.decode_request(data)
        sender, endpoint = request.header.node_id, request.header.endpoint
        endpoint = f"{host}{endpoint}" if endpoint.startswith(":") else endpoint

        async def greet() -> None:
            # without our endpoint, or the stranger would call us back in turn, and so on for ever
            header = Header(self.node_id, self.clock.now())
            try:
                await self.ping(Peer(-1, endpoint), self.options.call_timeout, header)
            finally:
                self.greeting.pop(endpoint, None)

        # 1. a stranger that says where it listens is called back, if the table has room for it
        is_wanted = endpoint and self.table.has_room_for(sender) and endpoint not in self.greeting
        if is_wanted and len(self.greeting) < _MAX_GREETED:
            self.greeting[endpoint] = asyncio.create_task(greet())
        # 2. the answer
        answer = Answer(Header(self.node_id, self.clock.now()))
        if method == messages.FIND:
            found: dict[int, Found] = {}
            size = 0
            for key in request.keys:
                peers = [p for p in self.table.closest(key) if p.node_id != sender]
                found[key] = Found(peers, self.store.find(key, self.clock.now()))
                # an estimate of the JSON: 200 bytes a key, 120 a peer, and the records
                size += 200 + sum(120 + len(p.endpoint) for p in peers)
                size += sum(map(size_in_answer, found[key].records))
                # the other keys are missing in the answer, and are asked for again (lookup.py)
                if size > messages.FULL_ANSWER_BYTES:
                    break
            answer = replace(answer, found=found)
        elif method == messages.STORE:
            answer = replace(answer, refused=[self._put(item) for item in request.items])
        return messages.seal(messages.encode_answer(answer), request.nonce, self._identity)

    def _put(self, item: Item | str) -> Refusal | None:
        return Refusal(item) if isinstance(item, str) else self.store.put(*item, self.clock.now())

    # ---------------------------------------------------------------- what we ask others

    async def find(self, keys: Sequence[int], timeout: float) -> dict[int, Nearby]:
        """Search for the nodes nearest to each key, and their records there -> {key: what is known when time is up}."""
        searches = [Search(key, self.options.replicas) for key in dict.fromkeys(keys)]
        for search in searches:
            search.add(self.table.closest(search.key), hops=1)

        async def ask(peer: Peer, some: Sequence[int]) -> dict[int, Found]:
            request = Request(self._header(), keys=some)
            answer = await self.call(peer, messages.FIND, request, self.options.call_timeout)
            return {key: answer.found[key] for key in some if key in answer.found}

        await look_up(ask, searches, self.node_id, timeout)
        near = {}
        for search in searches:
            holders = [Holder(c.peer, tuple(c.found.records)) for c in search.answers()]
            if self.is_serving:  # this node is one of them, if it is near enough
                holders.append(Holder(None, tuple(self.store.find(search.key, self.clock.now()))))
            # XOR is Kademlia's distance; no two nodes have the same one to a key
            distances = {(at.peer.node_id if at.peer else self.node_id) ^ search.key: at for at in holders}
            nearest = [distances[distance] for distance in sorted(distances)]
            near[search.key] = Nearby(nearest[: self.options.replicas], search.is_finished, search.hops)
        return near

    async def put(
        self, placed: Mapping[Peer | None, Sequence[Item]], timeout: float
    ) -> list[list[Refusal | None]]:
        """Store items at nodes (None: here) -> for each node and each of its items a Refusal, or None if it is kept.

        A node that cannot be reached counts as refusing the rest.
        """
        end = time.monotonic() + timeout

        async def put_at(peer: Peer | None, items: Sequence[Item]) -> list[Refusal | None]:
            if peer is None:
                return [self._put(item) for item in items]
            refused: list[Refusal | None] = []
            for first in range(0, len(items), messages.MAX_ITEMS):
                some = items[first : first + messages.MAX_ITEMS]
                limit = min(end - time.monotonic(), self.options.call_timeout)
                try:
                    if limit <= 0:
                        raise Unreachable(f"{peer.endpoint}: no time was left to store at it")
                    answer = await self.call(peer, messages.STORE, Request(self._header(), items=some), limit)
                    if len(answer.refused) != len(some):
                        text = f"{peer.endpoint} answered {len(answer.refused)} of {len(some)} items"
                        raise Unreachable(text)
                    refused += answer.refused
                except Unreachable as error:
                    return [*refused, *[Refusal(str(error))] * (len(items) - len(refused))]
            return refused

        return await asyncio.gather(*(put_at(peer, items) for peer, items in placed.items()))


def reachable_here(listen_on: str | None) -> str:
    """Return the address by which this host reaches its own port: 127.0.0.1 for 0.0.0.0, [::1] for [::]."""
    host = (listen_on or "").rpartition(":")[0]
    return {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "": "127.0.0.1"}.get(host, host)


def check_peer(endpoint: str) -> str:
    """Return endpoint if it is host:port or [IPv6]:port; ValueError otherwise."""
    try:
        return check_endpoint(endpoint)
    except BadRecord as error:
        raise ValueError(f"initial_peers and relay: {error}") from None
