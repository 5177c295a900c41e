"""fmoe-dht: run a node of the DHT that hosts no experts, for others to join; it can be a relay, or use one, too."""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fmoe_ext._cli import CANNOT, run
from fmoe_ext.remote import loop, protocol
from fmoe_ext.remote.dht.discovery import KademliaDiscovery, open_node
from fmoe_ext.remote.dht.node import UNREACHABLE, NodeOptions, check_peer
from fmoe_ext.remote.dht.relay import Attachment, Relay, RelayOptions
from fmoe_ext.remote.discovery import DiscoveryError
from fmoe_ext.remote.flags import DATE_FORMAT, LOG_FORMAT, NOT_NEGATIVE, Parser, endpoint, flag, flags_of

log = logging.getLogger("fmoe_ext.remote")


@dataclass(frozen=True)
class _Command:
    """The flags of fmoe-dht that are not options of a node."""

    identity_path: Path | None = flag(None, "a file with this node's key, made if it is not there")
    stats_report_interval: float = flag(60.0, "seconds between progress lines; 0: none", type=NOT_NEGATIVE)
    relay_on: str | None = flag(
        None, "host:port: be a relay for others, there", type=endpoint, group=UNREACHABLE
    )
    expose: str | None = flag(
        None,
        "host:port of a server here that shall be reached through --relay too",
        type=endpoint,
        needs=("relay",),
        group=UNREACHABLE,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT -> 0, or CANNOT if it cannot start."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, datefmt=DATE_FORMAT)
    flags = Parser("fmoe-dht", NodeOptions, _Command, description=__doc__ or "").read(arguments)
    protocol.allow_more_files()
    has_to_end = loop.end_signals()
    try:
        discovery, services = loop.run(_open(flags), 30)
    except (OSError, ValueError, DiscoveryError) as error:
        log.error("%s", error)
        return CANNOT
    log.info("DHT node listens on port %d", discovery.node.port)
    while not has_to_end(flags.stats_report_interval):
        log.info("Knows %d nodes, keeps %d records", len(discovery.node.table), len(discovery.node.store))
    for service in (*services, discovery):
        loop.run(service.close(), 10)
    return 0


async def _open(flags: argparse.Namespace) -> tuple[KademliaDiscovery, list[Relay | Attachment]]:
    # the relay first: this node, or the exposed server, may use it
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
    options = {field: getattr(flags, one.name) for field, one in flags_of(NodeOptions)}
    return await open_node(**options, identity_path=flags.identity_path), services


if __name__ == "__main__":
    run(main)
