"""Host experts with one owner each: DeclaredExperts claims them in a directory, WarmCopies copies those of others.

DeclaredExperts is the Placement of a Server without --registry. A directory without a leader, such as the DHT, cannot
promise that only one server owns an expert: two networks that were apart may both have given it away. So a server that
loses its claim keeps the expert with all it has learned, and stops serving it; a later claim may give it back.

A holder of a warm copy looks at the owner by Info, and copies by State when something has changed. When the owner's
record has expired, the holder claims the expert with its copy (_take_over). An owner that is asked to stop refuses
gradients, says that it is leaving, and waits up to HAND_OVER_SECONDS until holders have the last version (stop).
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Sequence

from fmoe_ext.remote import protocol
from fmoe_ext.remote.client.caller import Caller
from fmoe_ext.remote.discovery import Discovery, DiscoveryError, Granted, Pattern, check_uid, coordinates
from fmoe_ext.remote.errors import Refused, RemoteError
from fmoe_ext.remote.security import Credentials
from fmoe_ext.remote.server.ledger import NotLeader
from fmoe_ext.remote.server.server import Server
from fmoe_ext.remote.server.service import LONGEST_LOOK
from fmoe_ext.remote.server.state import write_state
from fmoe_ext.remote.wire import Message, WireError, encode

log = logging.getLogger("fmoe_ext.remote")
HAND_OVER_SECONDS = 10.0  # that an owner which stops waits for copies of the last version
_LOOK_SECONDS = 0.05  # between two looks whether they have it
_LOOKS_A_PERIOD = 5  # a look is small, and by the last one a takeover counts what it loses
_MAX_TRIED = 1024  # uids looked up at a time, to find free ones
COPY_SECONDS = 600.0  # for a copy to come whole: no gradient waits for it


class WarmCopies:
    """Copies of experts that other servers own: looks _LOOKS_A_PERIOD times a period, and copies changes once a period.

    When an owner's record has expired, its expert is claimed and hosted here. Updates since the last copy are lost:
    about one period of them, if copies succeeded. updates_lost_total counts those that are known (the version at the
    last look less the copy's), takeovers_total the takeovers. An owner that is asked to stop waits for a last copy
    (HAND_OVER_SECONDS at most): if that comes, nothing is lost.
    """

    def __init__(
        self,
        discovery: Discovery,
        uids: Sequence[str],
        period: float = 10.0,
        credentials: Credentials | None = None,
    ):
        self.discovery, self.period = discovery, period
        self.looks_every = min(period / _LOOKS_A_PERIOD, LONGEST_LOOK)
        self.uids = [check_uid(uid) for uid in uids]
        self._caller = Caller(credentials)
        self._copies: dict[str, tuple[float, Message]] = {}  # uid: time.monotonic() of the copy, state
        self._seen: dict[str, tuple[int, int]] = {}  # uid: the owner's version and gradients at the last look

    async def run(self, server: Server) -> None:
        """Look and copy until cancelled."""
        try:
            while True:
                await asyncio.sleep(self.looks_every)
                try:
                    records = await self.discovery.get(self.uids, timeout=self.period)
                except DiscoveryError as error:
                    log.warning("copies wait for the directory: %s", error)
                    continue
                for uid, record in zip(self.uids, records, strict=True):
                    if uid in server.host.experts:
                        continue  # it is owned here
                    if record is None and uid in self._copies:
                        await self._take_over(server, uid)
                    elif record is not None:
                        try:
                            await self._refresh(uid, record.endpoints[0])
                        except RemoteError as error:
                            log.warning("%s could not be copied: %s", uid, error)
        finally:
            await self._caller.close()

    async def _refresh(self, uid: str, endpoint: str) -> None:
        """Look at the owner, and take a copy if its version is new and a period has passed, or if it is leaving."""
        request = encode(Message({}, {protocol.UID: uid, protocol.LOOKS_EVERY: f"{self.looks_every:.3f}"}))
        info = await self._caller.call(endpoint, protocol.INFO, request, self.period)
        self._seen[uid] = info.number(protocol.VERSION, 0), info.number(protocol.REQUESTS, 0)
        when, copy = self._copies.get(uid, (-self.period, None))
        is_old = copy is None or copy.meta["version"] != str(self._seen[uid][0])
        is_last = info.meta.get(protocol.LEAVING) == "1"
        if is_old and (is_last or time.monotonic() - when >= self.period):
            state = await self._caller.download(endpoint, protocol.STATE, request, COPY_SECONDS)
            if state.meta.get("uid") != uid or not state.meta.get("version", "").isdecimal():
                raise Refused(f"{endpoint} sent the state of another expert than {uid}")
            self._copies[uid] = time.monotonic(), state

    async def _take_over(self, server: Server, uid: str) -> None:
        # claim first: of several holders one gets the expert
        _, copy = self._copies[uid]
        try:
            granted = await self.discovery.declare([uid], server.endpoint, server.options.ttl)
        except DiscoveryError as error:
            log.warning("%s cannot be taken over: %s", uid, error)
            return
        if uid not in granted:
            return

        def install() -> None:
            try:
                write_state(server.host, copy)
            except WireError:
                if uid in server.host.experts:  # half of a bad copy must not be served, nor declared again
                    server.host.remove(uid)
                raise

        try:
            await asyncio.wrap_future(server.compute.call(install))
        except WireError as error:
            # the copy is bad: another holder may have a better one
            log.error("%s cannot be taken over: %s", uid, error)
            with contextlib.suppress(DiscoveryError):  # the claim expires by itself; the other copies go on
                await self.discovery.withdraw([uid], server.endpoint)
            return
        version, requests = self._seen.get(uid, (0, 0))
        updates = max(0, version - copy.number(protocol.VERSION, 0))
        gradients = max(0, requests - copy.number(protocol.REQUESTS, 0))
        server.metrics.add("updates_lost_total", updates)
        server.metrics.add("gradients_lost_total", gradients)
        server.metrics.add("takeovers_total")
        text = "%s is owned here from version %s on; %d updates of %d gradients, or more, are lost"
        log.warning(text, uid, copy.meta["version"], updates, gradients)


class DeclaredExperts:
    """The Placement of a server that owns its experts: it claims their uids in a directory, and renews the claims.

    copies: WarmCopies of other servers' experts. An expert whose uid the directory gives to another server is saved,
    kept with all it has learned, and not served until the directory gives it back.
    """

    def __init__(self, discovery: Discovery, copies: WarmCopies | None = None):
        self.discovery, self.copies = discovery, copies
        self._renewing: asyncio.Task[None] | None = None
        self._copying: asyncio.Task[None] | None = None
        self._server: Server | None = None
        # uids that start() was granted: stop() withdraws them even if no expert was hosted, as a checkpoint is damaged
        self._claimed: set[str] = set()
        self._hidden: frozenset[str] = frozenset()  # uids that no beam search finds

    async def start(self, server: Server) -> None:
        """Claim the server's experts and begin to renew the claims; ValueError if it cannot get all that it wants.

        After an error stop() withdraws what was claimed.
        """
        self._server = server
        server.metrics.gauge("hidden_experts", lambda: len(self._hidden))
        options, endpoint = server.options, server.endpoint
        # 1. with --expert_uids all of these, or none
        mine = [check_uid(uid) for uid in options.expert_uids]
        if mine:
            granted = await self.discovery.declare(mine, endpoint, options.ttl)
            self._claimed.update(granted)
            self._note_hidden(granted)
            if taken := [uid for uid in mine if uid not in granted]:
                raise ValueError(
                    f"other servers host {', '.join(taken)}: choose other uids, or stop those servers"
                )
        # 2. without: those with checkpoints, as far as they are free, and random free ones up to --num_experts
        else:
            pattern, wanted, rng = Pattern(options.expert_pattern), options.num_experts, random.Random()
            if before := server.saved_uids()[:wanted]:
                mine = sorted(await self.discovery.declare(before, endpoint, options.ttl))
                self._claimed.update(mine)
            saved, tried = len(mine), set[str]()
            # four candidates for each missing one, or a grid that is nearly full would take very many questions
            at_once = min(4 * (wanted - saved), _MAX_TRIED)
            while len(mine) < wanted and len(tried) < pattern.size:
                count = min(pattern.size, len(tried) + at_once)
                candidates = [uid for uid in pattern.sample(count, rng) if uid not in tried]
                tried.update(candidates)
                records = await self.discovery.get(candidates)
                free = [uid for uid, record in zip(candidates, records, strict=True) if record is None]
                while free and len(mine) < wanted:
                    some, free = free[: wanted - len(mine)], free[wanted - len(mine) :]
                    granted = await self.discovery.declare(some, endpoint, options.ttl)
                    self._claimed.update(granted)
                    mine += [uid for uid in some if uid in granted]
            mine[saved:] = sorted(mine[saved:], key=coordinates)  # new ones in the grid's order, not as text
            if len(mine) < wanted:
                raise ValueError(
                    f"{wanted} experts were asked for, but only {len(mine)} uids of {pattern.text} are free: "
                    "give a wider --expert_pattern or a smaller --num_experts"
                )
        # 3. host them
        await server.add_experts(mine)
        self._renewing = asyncio.create_task(self._renew(server))
        if self.copies is not None:
            self._copying = asyncio.create_task(self.copies.run(server))

    def describe(self, uid: str) -> dict[str, str]:
        """Return {}: an expert with one owner has no role and no term."""
        return {}

    async def _renew(self, server: Server) -> None:
        ttl, withheld = server.options.ttl, server.service.withheld
        while True:
            await asyncio.sleep(ttl / 3)  # one renewal may fail before the claim expires
            experts = dict(server.host.experts)
            metadata = {"version": str(max((e.version for e in experts.values()), default=0))}
            try:
                mine = await self.discovery.declare(
                    list(experts), server.endpoint, ttl, metadata=metadata, timeout=ttl / 3
                )
            except DiscoveryError as error:
                log.warning("the directory does not answer: %s", error)
                server.metrics.add("declare_failures_total")
                continue
            self._note_hidden(mine)
            # serve only experts that the directory gives to this server; keep the others, unserved
            lost = experts.keys() - mine
            newly_lost = lost - withheld
            for uid in sorted(newly_lost):
                text = "another server claims %s: it is kept here at version %d and not served until that claim ends"
                log.error(text, uid, experts[uid].version)
                server.metrics.add("experts_lost_total")
            for uid in sorted(withheld & mine):
                log.warning("%s belongs to this server again and is served", uid)
            withheld |= lost
            withheld -= mine
            if newly_lost:
                await server.save()

    def _note_hidden(self, granted: frozenset[str]) -> None:
        """Warn of experts that were granted, but that no node of the DHT shows to beam searches."""
        found_at = granted.found_at if isinstance(granted, Granted) else {}
        hidden = frozenset(uid for uid, count in found_at.items() if count == 0)
        if new := sorted(hidden - self._hidden):
            log.warning(
                "no mixture finds %s: the DHT's nodes have no room for more claims below the prefix; "
                "choose another --expert_pattern",
                ", ".join(new[:8]) + (f" and {len(new) - 8} more" if len(new) > 8 else ""),
            )
        self._hidden = hidden

    async def stop(self) -> None:
        """Withdraw the claims, once the copies at other servers have the last versions."""
        # 1. no new takeovers here, no new gradients: a copy that is complete must not fall behind again
        await _end(self._copying)
        if (server := self._server) is not None:
            copies, experts = server.service.copies, server.host.experts

            def may_step(uid: str) -> None:
                raise NotLeader(f"not the leader of {uid}: this server is about to leave")

            copies.is_leaving, end = True, time.monotonic() + HAND_OVER_SECONDS
            server.host.may_step = may_step
            # a batch under way has ended by then
            await asyncio.wrap_future(server.compute.call(lambda: None))
            # 2. wait for holders of copies that look often enough
            while time.monotonic() < end:
                if not any(copies.is_awaited(uid, expert.version) for uid, expert in list(experts.items())):
                    break
                await asyncio.sleep(_LOOK_SECONDS)
        # 3. the claims last, or a holder could take over an older copy meanwhile
        await _end(self._renewing)
        if self._server is not None:
            try:
                uids = sorted(self._claimed.union(self._server.host.experts))
                await self.discovery.withdraw(uids, self._server.endpoint)
            except DiscoveryError as error:
                log.warning("the uids could not be withdrawn, they expire: %s", error)


async def _end(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait([task])
