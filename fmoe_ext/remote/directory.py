"""Directory: discovery for programs without a loop of their own."""

from collections.abc import Sequence

from fmoe_ext.remote import loop
from fmoe_ext.remote.client.client import Client, Settings
from fmoe_ext.remote.client.expert import RemoteExpert
from fmoe_ext.remote.discovery import Discovery, is_uid
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
        """The experts of these uids, None where there is none; DiscoveryError if nobody answers in time."""
        names = [uid for uid in dict.fromkeys(uids) if is_uid(uid)]
        records = loop.run(self.discovery.get(names, timeout=timeout), timeout + MARGIN)
        found = {record.uid: record for record in records if record is not None}
        return [RemoteExpert(uid, found[uid], self.client) if uid in found else None for uid in uids]

    def declare_experts(
        self, uids: Sequence[str], endpoint: str, ttl: float = 30.0, timeout: float = 5.0
    ) -> frozenset[str]:
        """Claims uids for an endpoint -> those that are now its."""
        return loop.run(self.discovery.declare(list(uids), endpoint, ttl, timeout=timeout), timeout + MARGIN)

    def shutdown(self, timeout: float = 5.0) -> None:
        """Frees sockets; what was declared stays until it expires."""
        loop.run(self.client.close(), timeout)
        loop.run(self.discovery.close(), timeout)
