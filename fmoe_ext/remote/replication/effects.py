"""Interfaces of replication to network, registry, device and disk. The simulation has its own."""

import concurrent.futures
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol, TypeVar

from fmoe_ext.remote.etcd.client import Answer, Event
from fmoe_ext.remote.server.host import ExpertHost
from fmoe_ext.remote.server.metrics import Metrics
from fmoe_ext.remote.wire import Message

T = TypeVar("T")


class Peers(Protocol):
    """Calls to other servers: the answer within timeout seconds, or a RemoteError."""

    async def call(self, endpoint: str, method: str, data: bytes, timeout: float) -> Message: ...
    async def download(self, endpoint: str, method: str, data: bytes, timeout: float) -> Message: ...
    async def close(self) -> None: ...


class Store(Protocol):
    """etcd; every call ends within its timeout, with a DiscoveryError if it fails."""

    async def transact(
        self,
        compare: Sequence[bytes] = (),
        success: Sequence[bytes] = (),
        failure: Sequence[bytes] = (),
        timeout: float = 5.0,
    ) -> Answer: ...
    async def grant(self, ttl: float, timeout: float = 5.0) -> int: ...
    async def keep_alive(self, lease: int, timeout: float = 5.0) -> bool: ...
    async def revoke(self, lease: int, timeout: float = 5.0) -> None: ...
    def watch(self, prefix: str, revision: int) -> AsyncIterator[list[Event]]: ...
    async def close(self) -> None: ...


class Device(Protocol):
    """The thread that computes: functions run one after the other, in the order of the calls."""

    def call(self, function: Callable[[], T]) -> "concurrent.futures.Future[T]": ...


class Hosting(Protocol):
    """The server around the replicas."""

    options: Any  # expert_cls, hidden_dim, expert_uids, num_experts, expert_pattern
    metrics: Metrics
    service: Any  # may_step is set

    @property
    def host(self) -> ExpertHost: ...
    @property
    def compute(self) -> Device: ...
    @property
    def endpoint(self) -> str: ...
    def saved_uids(self) -> list[str]: ...
    async def add_experts(self, uids: Sequence[str]) -> None: ...
