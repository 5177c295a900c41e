"""fmoe-dht: a node of the DHT that hosts no experts, for others to begin with."""

import argparse
import logging
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

from fmoe_ext._cli import CANNOT, run
from fmoe_ext.remote import loop
from fmoe_ext.remote.dht.dht import open_node
from fmoe_ext.remote.dht.discovery import KademliaDiscovery
from fmoe_ext.remote.dht.node import check_peer
from fmoe_ext.remote.dht.relay import Attachment, Relay, RelayOptions
from fmoe_ext.remote.discovery import DiscoveryError
from fmoe_ext.remote.flag_types import NOT_NEGATIVE, POSITIVE, endpoint

log = logging.getLogger("fmoe_ext.remote")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("fmoe-dht", description=__doc__)
    add = parser.add_argument
    add(
        "--listen_on",
        type=endpoint,
        default="0.0.0.0:1338",
        help="host:port; [::]:port for IPv6; port 0: any",
    )
    add(
        "--announce",
        type=endpoint,
        help="host:port that others should call, if it is not where they see this node",
    )
    add("--initial_peers", nargs="*", default=(), help="host:port of other nodes; none: a new DHT begins")
    add("--join_timeout", type=POSITIVE, default=5.0, help="seconds the initial peers have to answer")
    add("--identity_path", type=Path, help="a file with this node's key, made if it is not there")
    add("--refresh_period", type=POSITIVE, default=15.0, help="seconds between two searches for new nodes")
    add(
        "--stats_report_interval",
        type=NOT_NEGATIVE,
        default=60.0,
        help="seconds between progress lines; 0: none",
    )
    group = parser.add_argument_group("for hosts that nobody can reach")
    add = group.add_argument
    add("--relay_on", type=endpoint, help="host:port: be a relay for others, there")
    add("--relay", type=endpoint, help="host:port of a relay through which this node can be reached")
    add("--relay_token", default="", help="what a relay asks for, this one or that one")
    add(
        "--expose", type=endpoint, help="host:port of a server here that shall be reached through --relay too"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs until SIGTERM or SIGINT."""
    logging.basicConfig(
        level=logging.INFO,
        format="[%(asctime)s.%(msecs)03d][%(levelname)s][%(module)s.%(funcName)s:%(lineno)d] %(message)s",
        datefmt="%Y/%m/%d %H:%M:%S",
    )
    parser = make_parser()
    flags = parser.parse_args(arguments)
    if flags.relay_token and not (flags.relay or flags.relay_on):
        parser.error("--relay_token means nothing without --relay or --relay_on")
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    try:
        discovery, services = loop.run(_open(flags), 30)
    except (OSError, ValueError, DiscoveryError) as error:
        log.error("%s", error)
        return CANNOT
    log.info("DHT node listens on port %d", discovery.node.port)
    while not stopped.wait(min(flags.stats_report_interval, threading.TIMEOUT_MAX) or None):
        log.info("Knows %d nodes, keeps %d records", len(discovery.node.table), len(discovery.node.store))
    for service in (*services, discovery):
        loop.run(service.close(), 10)
    return 0


async def _open(flags: argparse.Namespace) -> tuple[KademliaDiscovery, list[Relay | Attachment]]:
    if flags.expose and not flags.relay:
        raise ValueError("--expose needs --relay: through which relay?")
    services: list[Relay | Attachment] = []
    if flags.relay_on:
        relay = Relay(RelayOptions(flags.relay_token))
        log.info("Relay listens on port %d", await relay.start(flags.relay_on))
        services.append(relay)
    if flags.expose:
        attachment = Attachment(check_peer(flags.relay), check_peer(flags.expose), flags.relay_token)
        await attachment.start()
        log.info("%s can be reached at %s: its --announce", flags.expose, attachment.endpoint)
        services.append(attachment)
    return await _open_node(flags), services


async def _open_node(flags: argparse.Namespace) -> KademliaDiscovery:
    return await open_node(
        list(flags.initial_peers),
        flags.listen_on,
        identity_path=flags.identity_path,
        announce=flags.announce,
        join_timeout=flags.join_timeout,
        relay=flags.relay,
        relay_token=flags.relay_token,
        refresh_period=flags.refresh_period,
    )


if __name__ == "__main__":
    run(main)
