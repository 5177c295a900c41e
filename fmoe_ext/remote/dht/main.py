"""fmoe-dht: a node of the DHT that hosts no experts, for others to begin with."""

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from fmoe_ext.remote import loop
from fmoe_ext.remote.dht.dht import open_node
from fmoe_ext.remote.dht.discovery import KademliaDiscovery
from fmoe_ext.remote.discovery import DiscoveryError

log = logging.getLogger("fmoe_ext.remote")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("fmoe-dht", description=__doc__)
    add = parser.add_argument
    add("--listen_on", default="0.0.0.0:1338", help="host:port; [::]:port for IPv6; port 0: any")
    add("--announce", help="host:port that others should call, if it is not where they see this node")
    add("--initial_peers", nargs="*", default=(), help="host:port of other nodes; none: a new DHT begins")
    add("--join_timeout", type=float, default=5.0, help="seconds the initial peers have to answer")
    add("--identity_path", type=Path, help="a file with this node's key, made if it is not there")
    add("--refresh_period", type=float, default=15.0, help="seconds between two searches for new nodes")
    add("--stats_report_interval", type=float, default=60.0, help="seconds between progress lines; 0: none")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs until SIGTERM or SIGINT."""
    logging.basicConfig(
        level=logging.INFO,
        format="[%(asctime)s.%(msecs)03d][%(levelname)s][%(module)s.%(funcName)s:%(lineno)d] %(message)s",
        datefmt="%Y/%m/%d %H:%M:%S",
    )
    flags = make_parser().parse_args(arguments)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    try:
        discovery = loop.run(_open(flags), 30)
    except (OSError, ValueError, DiscoveryError) as error:
        log.error("%s", error)
        return 1
    log.info("DHT node listens on port %d", discovery.node.port)
    while not stopped.wait(flags.stats_report_interval or None):
        log.info("Knows %d nodes, keeps %d records", len(discovery.node.table), len(discovery.node.store))
    loop.run(discovery.close(), 10)
    return 0


async def _open(flags: argparse.Namespace) -> KademliaDiscovery:
    return await open_node(
        list(flags.initial_peers),
        flags.listen_on,
        identity_path=flags.identity_path,
        announce=flags.announce,
        join_timeout=flags.join_timeout,
        refresh_period=flags.refresh_period,
    )


if __name__ == "__main__":
    sys.exit(main())
