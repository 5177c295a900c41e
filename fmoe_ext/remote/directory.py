"""Directory: discovery for programs without a loop of their own."""

from collections.abc import Sequence

from fmoe_ext.remote import loop
from fmoe_ext.remote.client.client import Client, Settings
from fmoe_ext.remote.client.expert import RemoteExpert
from fmoe_ext.remote.discovery import Discovery
from fmoe_ext.remote.security import Credentials

MARGIN = 1.0


class Directory:
    """Finds experts through any Discovery; every call has a deadline in seconds."""

    def __init__(
        self,
        discovery: Discovery,
        settings: Settings | None = None,
        credentials: Credentials | None = None,
    ):
        self.discovery = discovery
        self.client = Client(discovery, settings, credentials)

    def get_experts(self, uids: Sequence[str], timeout: float = 5.0) -> list[RemoteExpert | None]:
        """The experts of that name, None where there is none; DiscoveryError if nobody answers in time."""
        records = loop.run(self.discovery.get(list(uids), timeout=timeout), timeout + MARGIN)
        return [
            None if record is None else RemoteExpert(record.uid, record, self.client) for record in records
        ]

    def declare_experts(
        self, uids: Sequence[str], endpoint: str, ttl: float = 30.0, timeout: float = 5.0
    ) -> frozenset[str]:
        """Claims uids for an endpoint -> those that are now its."""
        return loop.run(self.discovery.declare(list(uids), endpoint, ttl, timeout=timeout), timeout + MARGIN)

    def shutdown(self, timeout: float = 5.0) -> None:
        """Frees sockets; what was declared stays until it expires."""
        loop.run(self.client.close(), timeout)
        loop.run(self.discovery.close(), timeout)
