"""Shared state of the parts of one server's replication."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from fmoe_ext.remote.replication.effects import Hosting, Peers
from fmoe_ext.remote.replication.registry import Registry



@dataclass(frozen=True)
class Replication:
    """registry: "host:port" of etcd, several with commas; replicas: servers an expert; ttl: seconds after which a
    silent server counts as dead; ack_timeout: seconds that a follower has for an update; recovery_wait: seconds to
    wait for a newer copy when all members are gone."""

    registry: str
    replicas: int = 2
    ttl: float = 5.0
    ack_timeout: float = 2.0
    recovery_wait: float = 30.0


@dataclass(frozen=True)
class Site:
    """This server: its name, which is new after every start, and its ways to the world."""

    name: str
    options: Replication
    registry: Registry
    peers: Peers
    server: Hosting

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def on_thread(self, function: Callable[[], T]) -> "asyncio.Future[T]":
        """function() on the thread that computes."""
        return asyncio.wrap_future(self.server.compute.call(function))
