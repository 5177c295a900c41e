"""WarmCopies: without a registry, a server keeps copies of experts that others own, and takes over when they vanish."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fmoe_ext.remote import protocol
from fmoe_ext.remote.client.caller import Caller
from fmoe_ext.remote.discovery import Discovery, DiscoveryError, ExpertRecord, check_uid
from fmoe_ext.remote.errors import RemoteError
from fmoe_ext.remote.security import Credentials
from fmoe_ext.remote.server.hand_over import LONGEST_LOOK
from fmoe_ext.remote.server.state import write_state
from fmoe_ext.remote.wire import STATE, Message, encode

if TYPE_CHECKING:
    from fmoe_ext.remote.server.server import Server

log = logging.getLogger("fmoe_ext.remote")
LOOKS_A_PERIOD = 5
COPY_SECONDS = 60.0


class WarmCopies:
    """Looks at every owner LOOKS_A_PERIOD times a period, and copies what has changed once a period.

    When the record of an owner has expired, the copy is declared and hosted here. What the owner did since the last
    copy is lost: at most one period of updates, if the copies succeeded. updates_lost_total counts what is known of
    it (the version at the last look less the copy's), takeovers_total how often it happened. An owner that is told to
    stop waits for a last copy: nothing is lost then.
    """

    def __init__(
        self,
        discovery: Discovery,
        uids: Sequence[str],
        period: float = 10.0,
        credentials: Credentials | None = None,
    ):
        self.discovery, self.period = discovery, period
        self.looks_every = min(period / LOOKS_A_PERIOD, LONGEST_LOOK)
        self.uids = [check_uid(uid) for uid in uids]
        self._caller = Caller(credentials, STATE)
        self._copies: dict[str, tuple[float, Message]] = {}  # uid: when, state
        self._seen: dict[str, int] = {}  # uid: the owner's version at the last look

    async def run(self, server: "Server") -> None:
        """Until it is cancelled."""
        try:
            while True:
                await asyncio.sleep(self.looks_every)
                try:
                    records = await self.discovery.get(self.uids, timeout=self.period)
                except DiscoveryError as error:
                    log.warning("copies wait for the directory: %s", error)
                    continue
                for uid, record in zip(self.uids, records, strict=True):
                    await self._look_at(server, uid, record)
        finally:
            await self._caller.close()

    async def _look_at(self, server: "Server", uid: str, record: ExpertRecord | None) -> None:
        if uid in server.host.experts:
            return
        if record is None:
            if uid in self._copies:
                await self._take_over(server, uid)
            return
        try:
            await self._refresh(uid, record.endpoints[0])
        except RemoteError as error:
            log.warning("%s could not be copied: %s", uid, error)

    async def _refresh(self, uid: str, endpoint: str) -> None:
        request = encode(Message({}, {protocol.UID: uid, protocol.LOOKS_EVERY: f"{self.looks_every:.3f}"}))
        info = await self._caller.call(endpoint, protocol.INFO, request, self.period)
        self._seen[uid] = int(info.meta.get(protocol.VERSION, "0")[:18])
        when, copy = self._copies.get(uid, (-self.period, None))
        is_old = copy is None or copy.meta["version"] != str(self._seen[uid])
        is_last = info.meta.get(protocol.LEAVING) == "1"
        if is_old and (is_last or time.monotonic() - when >= self.period):
            state = await self._caller.call(endpoint, protocol.STATE, request, COPY_SECONDS)
            self._copies[uid] = time.monotonic(), state

    async def _take_over(self, server: "Server", uid: str) -> None:
        _, copy = self._copies[uid]
        try:
            granted = await self.discovery.declare([uid], server.endpoint, server.options.ttl)
        except DiscoveryError as error:
            log.warning("%s cannot be taken over: %s", uid, error)
            return
        if uid not in granted:
            return
        await asyncio.wrap_future(server.compute.call(lambda: write_state(server.host, copy)))
        lost = max(0, self._seen.get(uid, 0) - int(copy.meta["version"]))
        server.metrics.add("updates_lost_total", lost)
        server.metrics.add("takeovers_total")
        log.warning(
            "%s is owned here from version %s on, %d updates or more are lost",
            uid,
            copy.meta["version"],
            lost,
        )
