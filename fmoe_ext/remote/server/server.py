"""Server: put the parts of a server together, start them in order, and stop them in order.

    ExpertHost, ComputeThread   the experts, and the thread that computes them
    ExpertService, Guard        the methods on the port, and who may call them
    Placement                   which experts are hosted and published: DeclaredExperts or ReplicatedExperts
    Saver, Pages                checkpoints, if a folder is given, and the status page, which is served if http_on is
A start reads checkpoints and takes uids before the port opens, so that no call finds an expert half loaded. A stop
gives uids away before the port closes, so that another server takes over while calls still end, and then saves.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Sequence
from typing import Any, Protocol

import grpc

from fmoe_ext.remote import loop, protocol
from fmoe_ext.remote.dht.node import check_peer, reachable_here
from fmoe_ext.remote.dht.relay import Attachment
from fmoe_ext.remote.expert_classes import find_expert_class
from fmoe_ext.remote.security import Guard
from fmoe_ext.remote.server.checkpoints import Checkpoints, Damaged
from fmoe_ext.remote.server.fair_queue import ByteBudget, FairQueue, share_of_memory
from fmoe_ext.remote.server.host import ExpertHost
from fmoe_ext.remote.server.ledger import NotLeader
from fmoe_ext.remote.server.options import Options
from fmoe_ext.remote.server.pages import Metrics, Pages
from fmoe_ext.remote.server.saving import Saver
from fmoe_ext.remote.server.service import ComputeThread, ExpertService
from fmoe_ext.remote.server.state import read_state, write_state
from fmoe_ext.remote.wire import Limits, Message, body_bytes

log = logging.getLogger("fmoe_ext.remote")
_SHARE_IN_FLIGHT = 8  # calls may hold an eighth of the memory; computing one takes several times its bytes
_DRAIN_SECONDS = 5.0  # for calls under way when the server stops


class Placement(Protocol):
    """Decides which experts a server hosts, and publishes it: DeclaredExperts or ReplicatedExperts."""

    async def start(self, server: "Server") -> None:
        """Host experts by server.add_experts(), and publish them."""

    async def stop(self) -> None:
        """Withdraw them, so that other servers take over."""

    def describe(self, uid: str) -> dict[str, str]:
        """Return protocol.ROLE, TERM and COMMITTED of this server for an expert, or nothing."""


class Server:
    """A server of experts: start() serves, stop() hands over and ends it for good, so that a Server starts once.

    Both may be called from any thread but the loop's. Also a context manager.
    """

    def __init__(self, options: Options, placement: Placement):
        self.options, self.placement = options, placement
        # 1. what computes
        expert_class = find_expert_class(options.expert_cls)
        learning = options.training, options.device, options.seed
        self.host = ExpertHost(expert_class, options.hidden_dim, *learning)
        # one peer has half of the queue at most; a batch must fit in one message, as followers get it as one update
        bounds = options.max_waiting, max(1, options.max_waiting // 2), options.max_batch_size
        self.queue = FairQueue(*bounds, body_bytes(options.max_message_bytes))
        self.compute = ComputeThread(self.host, self.queue)
        # 2. what answers
        self.metrics = metrics = Metrics()
        call = Limits(max_message_bytes=options.max_message_bytes)
        self.guard = Guard(options.security)
        most = options.max_bytes_in_flight or share_of_memory(_SHARE_IN_FLIGHT)
        budget = None if most is None else ByteBudget(most, options.max_waiting)
        self.service = ExpertService(self.compute, self.guard, metrics, call, budget)
        self.service.max_rows = options.max_rows
        self.service.describe = self.describe
        # 3. what saves and shows
        self.checkpoints = Checkpoints(options.checkpoint_dir) if options.checkpoint_dir else None
        self.saver: Saver | None = None
        if self.checkpoints is not None:
            self.saver = Saver(self.checkpoints, self.host, metrics, self.read_state)
        self.pages = Pages(self.status, metrics)
        self._endpoint = ""
        self._attachment: Attachment | None = None
        self._has_begun = self._has_stopped = False
        self._tasks: list[asyncio.Task[None]] = []
        self._grpc: grpc.aio.Server | None = None
        experts = self.host.experts
        metrics.gauge("experts", lambda: len(experts))
        metrics.gauge("waiting_calls", lambda: len(self.queue))
        metrics.gauge("bytes_in_flight", lambda: self.service.budget.num_bytes)
        metrics.gauge("batches", lambda: self.compute.num_batches)
        metrics.gauge("batched_calls", lambda: self.compute.num_jobs)
        metrics.gauge("updates_refused", lambda: sum(e.num_refused for e in list(experts.values())))
        metrics.gauge("unsaved_experts", lambda: len(self.saver.failures) if self.saver else 0)

    @property
    def endpoint(self) -> str:
        """The address at which others call this server; behind a relay it may change."""
        return self._attachment.endpoint if self._attachment else self._endpoint

    def start(self, timeout: float = 60.0) -> "Server":
        """Listen and claim the experts; return once calls are answered."""
        loop.run(self._start(), timeout)
        return self

    def stop(self, timeout: float | None = 60.0) -> None:
        """Hand experts over, finish calls under way, save, and close."""
        loop.run(self._stop(), timeout)

    def __enter__(self) -> "Server":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ---------------------------------------------------------------- life

    async def _start(self) -> None:
        if self._has_begun:
            raise RuntimeError("a Server starts once: make another one")
        # 1. take a port, on which nothing is answered yet
        self._grpc = grpc.aio.server(
            options=protocol.server_options(self.options.max_message_bytes),
            # max_waiting calls may wait for memory and as many for the device; the rest are being read or answered
            maximum_concurrent_rpcs=4 * self.options.max_waiting,
        )
        self._grpc.add_generic_rpc_handlers((self.service.handlers(),))
        where, credentials = self.options.listen_on, self.options.security.server_credentials()
        try:
            if credentials is None:
                port = self._grpc.add_insecure_port(where)
            else:
                port = self._grpc.add_secure_port(where, credentials)
        except RuntimeError as error:
            text = f"cannot listen on {where}: is the port in use, the address this host's? ({error})"
            raise OSError(text) from None
        self._endpoint = self.options.announce or _announced(self.options.listen_on, port)
        # 2. checkpoints, relay, experts, and then the port opens
        self._has_begun = True
        self.compute.start()
        try:
            if self.checkpoints is not None:
                await asyncio.to_thread(self.checkpoints.begin)
            if self.options.relay is not None:  # its port is the endpoint that placement publishes
                target = f"{reachable_here(self.options.listen_on)}:{port}"
                attachment = Attachment(check_peer(self.options.relay), target, self.options.relay_token)
                self._attachment = await attachment.start()
            await self.placement.start(self)  # experts are there before the first call can come
            await self._grpc.start()
            if self.options.http_on is not None:
                await self.pages.start(self.options.http_on)
                log.info("Status page at http://%s/", _announced(self.options.http_on, self.pages.port))
        except BaseException:
            await self._stop(save=False)
            raise
        # 3. what runs beside the calls
        if self.saver is not None:
            self._tasks.append(asyncio.create_task(self.saver.save_regularly(self.options.checkpoint_period)))
            if (rate := self.options.checkpoint_check_rate) > 0:
                self._tasks.append(asyncio.create_task(self.saver.check_regularly(rate * 1e6)))
        log.info("Server started at %s", self.endpoint)
        active, waiting = [], []
        for uid in sorted(self.host.experts):
            try:
                self.host.may_step(uid)
                active.append(uid)
            except NotLeader:
                waiting.append(uid)
        log.info("Got %d active experts of type %s: %s", len(active), self.options.expert_cls, active)
        if waiting:
            log.info("Hosts %d more, led by another server or not yet by any: %s", len(waiting), waiting)

    def add_handlers(self, handlers: grpc.GenericRpcHandler) -> None:
        """Add methods to the port, before it opens."""
        assert self._grpc is not None
        self._grpc.add_generic_rpc_handlers((handlers,))

    async def _stop(self, save: bool = True) -> None:
        if self._has_stopped or not self._has_begun:
            return
        self._has_stopped = True
        for task in self._tasks:
            task.cancel()
        try:
            await self.placement.stop()  # before the port closes: others take over while calls still end
            if self._grpc is not None:
                await self._grpc.stop(_DRAIN_SECONDS)
        finally:
            if self.saver is not None:
                await self.saver.end(save)
        # late, so that the status page shows how the end goes
        await self.pages.stop()
        if self._attachment is not None:
            await self._attachment.close()
        await asyncio.to_thread(self.compute.stop)
        log.info("Server at %s has stopped", self.endpoint)

    # ---------------------------------------------------------------- experts

    async def add_experts(self, uids: Sequence[str]) -> None:
        """Host experts, from their checkpoints where there are some, otherwise with the weights they start from.

        Raises Damaged for a damaged checkpoint, unless the experts are replicated: then it is set aside, since other
        servers may have a copy.
        """
        # read on another thread, and put into the experts between two batches
        uids = [uid for uid in uids if uid not in self.host.experts]
        states, damaged = list[Message](), dict[str, Damaged]()
        if self.saver is not None:
            states, damaged = await self.saver.load(uids)
            if damaged and not self.host.is_replicated:
                texts = "; ".join(str(error) for error in damaged.values())
                remedy = "Restore what is damaged, or move it away to begin these experts anew"
                raise Damaged(f"{texts}. {remedy}")
            for uid, error in list(damaged.items()):
                try:
                    await self.saver.set_aside(uid, error)
                except Damaged:  # whole when it was read once more: load it after all
                    whole, _ = await self.saver.load([uid])
                    if not whole:
                        raise
                    states += whole
                    del damaged[uid]

        def add() -> None:
            self.host.add(uids)
            # so that a recovery waits for a better copy; 1 if the version is unknown
            for uid, error in damaged.items():
                self.host.find(uid).ledger.lacks = error.version or 1
            for state in states:
                write_state(self.host, state)

        await asyncio.wrap_future(self.compute.call(add))

    def saved_uids(self) -> list[str]:
        """Return the uids of experts that have checkpoints."""
        return self.checkpoints.uids() if self.checkpoints else []

    async def read_state(self, uid: str) -> Message:
        """Return a copy of an expert's state, taken between two batches."""
        return await asyncio.wrap_future(self.compute.call(lambda: read_state(self.host, uid)))

    async def save(self) -> None:
        """Save every expert that has changed; what fails is logged, counted, and tried again after the next period."""
        if self.saver is not None:
            await self.saver.save()

    def describe(self, uid: str) -> dict[str, str]:
        """Return an expert's role, term, versions, waiting calls and failed save, for Info and the status page."""
        saved = {} if self.saver is None else self.saver.describe(uid)
        return self.placement.describe(uid) | saved | {protocol.WAITING: str(self.queue.count(uid))}

    def status(self) -> dict[str, Any]:
        """Return the numbers of the status page."""
        calls, experts = self.metrics.count("calls_total"), sorted(self.host.experts.items())
        return {
            "time": time.time(),
            "endpoint": self.endpoint,
            "expert_cls": self.options.expert_cls,
            "calls": calls,
            "failed": calls - self.metrics.count("calls_total", code="OK"),
            "waiting": len(self.queue),
            "rows": sum(expert.num_rows for _, expert in experts),
            "checkpoints": {} if self.saver is None else self.saver.status(),
            "experts": [
                {
                    "uid": uid,
                    "version": expert.version,
                    "rows": expert.num_rows,
                    "grad_norm": expert.grad_norm,
                    "refused": expert.num_refused,
                    "withheld": uid in self.service.withheld,
                    **self.describe(uid),
                }
                for uid, expert in experts
            ],
            "peers": [
                {"peer": name, "ago": time.monotonic() - heard, "loss": loss}
                for name, (heard, loss) in reversed(self.service.peers.items())
            ],
        }


def _announced(listen_on: str, port: int) -> str:
    """Return the endpoint for others: the address that is listened on, or this host's if that is 0.0.0.0 or [::]."""
    host = listen_on.rpartition(":")[0]
    if host in ("0.0.0.0", "[::]", "*", ""):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                # chooses the interface that leads outside: a documentation address (RFC 5737), to which nothing is sent
                probe.connect(("192.0.2.1", 9))
                host = str(probe.getsockname()[0])
            except OSError:
                host = "127.0.0.1"
    return f"{host}:{port}"
