"""Fixtures of the tests of the DHT: nodes on 127.0.0.1 that are closed, whatever happens."""

import pytest

from fmoe_ext.remote import loop
from fmoe_ext.remote.dht import open_node
from tests import ports


@pytest.fixture
def open_nodes(ends):
    """open_nodes(initial_peers, listen_on, **options) -> KademliaDiscovery"""

    def open_one(initial_peers=(), listen_on="", **options):
        listen_on = ports.endpoint() if listen_on == "" else listen_on
        return ends(loop.run(open_node(list(initial_peers), listen_on, **options), 60))

    return open_one


@pytest.fixture
def endpoint_of():
    return lambda discovery: f"127.0.0.1:{discovery.node.port}"
