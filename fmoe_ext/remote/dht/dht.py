"""DHT: the synchronous face of a node, as hivemind's users know it."""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fmoe_ext.remote import loop
from fmoe_ext.remote.client.client import Settings
from fmoe_ext.remote.dht.discovery import KademliaDiscovery
from fmoe_ext.remote.dht.node import KademliaNode, NodeOptions
from fmoe_ext.remote.dht.records import Identity, Value
from fmoe_ext.remote.dht.transport import GrpcTransport
from fmoe_ext.remote.directory import MARGIN, Directory
from fmoe_ext.remote.discovery import DiscoveryError
from fmoe_ext.remote.security import Credentials


async def open_node(
    initial_peers: list[str],
    listen_on: str | None = None,
    *,
    identity_path: Path | str | None = None,
    **options: Any,
) -> KademliaDiscovery:
    """A node that listens (listen_on None: does not) and has joined; options are those of NodeOptions.

    OSError if the port is in use, DiscoveryError if no initial peer answers. identity_path: a file with the key of
    what it declares, made if it is not there.
    """
    discovery = _make(initial_peers, listen_on, identity_path, options)
    await discovery.node.start()
    return discovery


class DHT(Directory):
    """A node of the DHT in this process: DHT(initial_peers=["host:1338"], start=True).

    listen=False: asks others but keeps nothing for them. Further options are those of NodeOptions. Raises
    DiscoveryError if none of the initial peers answers within join_timeout (5 s); without any it begins a new DHT.
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
        """Joins the network of initial_peers, or begins one -> self."""
        loop.run(self.node.start(), self.node.options.join_timeout * 2 + MARGIN)
        return self

    def join(self, endpoint: str, timeout: float = 5.0) -> None:
        """Tells a node of another network that this one exists: the two become one."""
        if not loop.run(self.node.join([endpoint], timeout), timeout + MARGIN):
            raise DiscoveryError(f"no other node answered at {endpoint} within {timeout:.3g} s")
        loop.run(self.node.refresh(), self.node.options.refresh_period + timeout + MARGIN)

    def store(self, key: str, value: Any, expiration_time: float, timeout: float = 5.0) -> bool:
        """Keeps a small value (JSON) of this process under a key until expiration_time -> True if the DHT took it.

        expiration_time: as time.time(), at most an hour ahead. Values of others under the same key stay beside it; a
        value of the same identity (identity_path) is replaced.
        """
        ttl = expiration_time - time.time()
        return loop.run(self._kademlia.store(key, value, ttl, timeout), timeout + MARGIN)

    def get(self, key: str, timeout: float = 5.0) -> Value | None:
        """The value of a key that expires last, None if there is none."""
        found = self.get_all(key, timeout).values()
        return max(found, key=lambda value: (value.expiration_time, value.owner), default=None)

    def get_all(self, key: str, timeout: float = 5.0) -> dict[str, Value]:
        """The live values of a key by the public key of their owner."""
        return loop.run(self._kademlia.get_values(key, timeout), timeout + MARGIN)

    def shutdown(self, timeout: float = 5.0) -> None:
        """Takes back the experts that were declared here and leaves."""
        with contextlib.suppress(DiscoveryError):  # nobody is left to tell: the records expire
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
) -> KademliaDiscovery:
    node = KademliaNode(GrpcTransport(), NodeOptions(tuple(initial_peers), listen_on, **options))
    return KademliaDiscovery(node, Identity.at(Path(identity_path)) if identity_path else None)
