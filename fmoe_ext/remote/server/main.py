"""fmoe-server: hosts experts until a signal ends it."""

import argparse
import importlib.util
import logging
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from fmoe_ext._cli import CANNOT, run
from fmoe_ext.remote import loop
from fmoe_ext.remote.dht import open_node
from fmoe_ext.remote.discovery import Discovery, DiscoveryError, StaticList
from fmoe_ext.remote.flags import (
    DATE_FORMAT,
    LOG_FORMAT,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_INT,
    Parser,
    build,
    flag,
    port,
)
from fmoe_ext.remote.replication.replicas import ReplicatedExperts
from fmoe_ext.remote.replication.site import Replication
from fmoe_ext.remote.security import ADMISSION, Credentials, Security, check_private
from fmoe_ext.remote.server.declared import DeclaredExperts, WarmCopies
from fmoe_ext.remote.server.options import NETWORK, Options, Training
from fmoe_ext.remote.server.server import Placement, Server

ETCD = "etcd://"
CALLS_OTHERS = ("registry", "copies_of")
# What to write instead of hivemind's flags.
HIVEMIND = MappingProxyType(
    {
        "num_handlers": "one process answers all calls; leave it out",
        "min_batch_size": "calls that wait are computed together at once; leave it out",
        "update_period": "records are renewed three times a --ttl",
        "expiration": "write --ttl",
        "compression": "each client chooses: Settings(compression='bf16')",
        "increase_file_limit": "use ulimit -n",
        "host_maddrs": "write --listen_on host:port",
        "announce_maddrs": "write --announce host:port",
        "no_relay": "no relay is used without --relay",
        "use_auto_relay": "write --relay host:port",
        "use_ipfs": "write --initial_peers host:port",
    }
)


@dataclass(frozen=True)
class Command:
    """The flags of fmoe-server that are no options of a Server."""

    config: Path | None = flag(
        None, "a YAML file of `flag: value` lines; flags given here win", type=Path, short="-c"
    )
    custom_module_path: Path | None = flag(None, "a Python file that registers expert classes", type=Path)
    num_threads: int | None = flag(None, "of torch", type=POSITIVE_INT)
    stats_report_interval: float = flag(60.0, "seconds between progress lines; 0: none", type=NOT_NEGATIVE)
    registry: str | None = flag(
        None,
        "etcd://host:2379: experts with replicas",
        excludes=("dht_port", "initial_peers", "identity_path", "ttl", "copies_of", "no_dht"),
        group=NETWORK,
    )
    replicas: int = flag(
        2, "servers an expert, with --registry", type=POSITIVE_INT, needs=("registry",), group=NETWORK
    )
    lease: float = flag(
        5.0,
        "seconds after which a silent server counts as dead",
        type=POSITIVE,
        needs=("registry",),
        group=NETWORK,
    )
    recovery_wait: float = flag(
        30.0,
        "seconds to wait for the newest copy when all are gone",
        type=NOT_NEGATIVE,
        needs=("registry",),
        group=NETWORK,
    )
    dht_port: int | None = flag(None, "of a DHT node in this server", type=port, group=NETWORK)
    initial_peers: Sequence[str] = flag(
        (), "host:port of other DHT nodes; none: a new DHT begins", nargs="*", group=NETWORK
    )
    identity_path: Path | None = flag(
        None, "a file with the key that owns the uids, made if it is not there", type=Path, group=NETWORK
    )
    copies_of: Sequence[str] = flag(
        (), "uids of others to keep warm copies of, without --registry", nargs="+", group=NETWORK
    )
    copy_period: float = flag(
        10.0,
        "seconds between copies: what a takeover can lose",
        type=POSITIVE,
        needs=("copies_of",),
        group=NETWORK,
    )
    no_dht: bool = flag(
        False,
        "tell nobody: for clients with a static list",
        action="store_true",
        excludes=("dht_port", "initial_peers", "identity_path", "ttl", "copies_of"),
        group=NETWORK,
    )
    tls_ca: Path | None = flag(
        None,
        "PEM file that signed the other servers' certificates",
        type=Path,
        needs=CALLS_OTHERS,
        group=ADMISSION,
    )
    tokens: Path | None = flag(
        None, "a file of `name: token` lines; calls without one are refused", type=Path, group=ADMISSION
    )
    own_token: str | None = flag(
        None,
        "the name in --tokens under which this server calls the others",
        needs=CALLS_OTHERS,
        group=ADMISSION,
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags, with those of --config behind them; SystemExit with one sentence if they make no sense."""
    parser = Parser(
        "fmoe-server",
        *(Options, Training, Security, Command),
        description="Hosts experts until a signal ends it.",
        usage="fmoe-server [--flag value ...], or fmoe-server --help",
        foreign=HIVEMIND,
    )
    flags = parser.read(arguments, "config")
    if flags.expert_uids and flags.num_experts not in (None, len(flags.expert_uids)):
        parser.error(f"--num_experts {flags.num_experts}, but {len(flags.expert_uids)} --expert_uids")
    if twice := sorted({uid for uid in flags.expert_uids if list(flags.expert_uids).count(uid) > 1}):
        parser.error(f"--expert_uids has {', '.join(twice)} twice")
    if flags.own_token is not None and flags.tokens is None:
        parser.error("--own_token means nothing without --tokens")
    if flags.registry is not None and not flags.registry.startswith(ETCD):
        parser.error(f"--registry must be {ETCD}host:port, but is {flags.registry}")
    if flags.num_experts is None:
        flags.num_experts = len(flags.expert_uids) or 1
    return flags


def read_tokens(path: Path) -> dict[str, str]:
    """`name: token` lines, tokens as they stand -> {token: name}; SystemExit for a file that would let others in."""
    names: dict[str, str] = {}
    for number, name, token in _read_lines(path):
        if not (name and token):
            raise SystemExit(f"{path}:{number}: write `name: token`; an empty one would admit everybody")
        if token in names:
            raise SystemExit(f"{path}:{number}: {name} has the token of {names[token]}: give each its own")
        names[token] = name
    if not names:
        raise SystemExit(f"--tokens {path} holds no token: write `name: token` lines, or leave the flag out")
    return names


def _read_lines(path: Path) -> Iterator[tuple[int, str, str]]:
    """(number, name, token) of each line; SystemExit names the first that has another form."""
    try:
        check_private(path)
        lines = path.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        text = line.partition(" #")[0].strip()
        if not text or text.startswith("#"):
            continue
        name, colon, token = text.partition(":")
        if not colon:
            raise SystemExit(f"{path}:{number}: write `name: token`, without which this line means nothing")
        yield number, name.strip(), token.strip()


log = logging.getLogger("fmoe_ext.remote")


def make_server(flags: argparse.Namespace) -> Server:
    """The server that the flags describe, not yet started."""
    tokens = {} if flags.tokens is None else read_tokens(flags.tokens)
    options = build(
        Options,
        flags,
        training=build(Training, flags),
        security=build(Security, flags, tokens=tokens),
    )
    return Server(options, _placement(flags, tokens))


def _placement(flags: argparse.Namespace, tokens: dict[str, str]) -> Placement:
    own = next((token for token, name in tokens.items() if name == flags.own_token), None)
    if flags.own_token is not None and own is None:
        raise SystemExit(f"--own_token {flags.own_token} is no name in {flags.tokens}")
    if tokens and own is None and (flags.registry or flags.copies_of):
        raise SystemExit("servers call each other: name this server's token with --own_token")
    credentials = _credentials(flags, own)
    if flags.registry is not None:
        where = flags.registry.removeprefix(ETCD)
        replication = Replication(where, flags.replicas, flags.lease, recovery_wait=flags.recovery_wait)
        return ReplicatedExperts(replication, credentials)
    discovery = StaticList() if flags.no_dht else _open_dht(flags)
    copies = (
        WarmCopies(discovery, flags.copies_of, flags.copy_period, credentials) if flags.copies_of else None
    )
    return DeclaredExperts(discovery, copies)


def _credentials(flags: argparse.Namespace, token: str | None) -> Credentials:
    """The proofs that this server shows to others."""
    if flags.tls_ca is not None:
        return Credentials(flags.tls_ca, flags.tls_certificate, flags.tls_key, token)
    if flags.tls_certificate is not None and (flags.registry or flags.copies_of):
        raise SystemExit("servers call each other by TLS: name who signed their certificates with --tls_ca")
    return Credentials(token=token)


def _open_dht(flags: argparse.Namespace) -> Discovery:
    host = flags.listen_on.rpartition(":")[0]
    node = open_node(
        list(flags.initial_peers),
        f"{host}:{flags.dht_port or 0}",
        identity_path=flags.identity_path,
        relay=flags.relay,
        relay_token=flags.relay_token,
    )
    discovery = loop.run(node, 30)
    log.info("DHT node listens on port %d", discovery.node.port)
    return discovery


def report(server: Server, seconds: float, before: dict[str, float]) -> dict[str, float]:
    """One line of progress since the last one -> what it has counted up to now."""
    now = {
        "forward": server.metrics.count("calls_total", method="forward", code="OK"),
        "backward": server.metrics.count("calls_total", method="backward", code="OK"),
        "batches": float(server.compute.num_batches),
        "rows": float(sum(expert.num_rows for expert in list(server.host.experts.values()))),
    }
    new = {key: value - before.get(key, 0) for key, value in now.items()}
    log.info(
        "Processed %d batches in last %.1f seconds: %d forward calls (%d rows), %d backward calls, %d waiting",
        *(new["batches"], seconds, new["forward"], new["rows"], new["backward"], len(server.queue)),
    )
    return now


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs until SIGTERM or SIGINT; 0 after everything was handed over and saved."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, datefmt=DATE_FORMAT)
    flags = parse(arguments)
    _check_device(flags.device)
    if flags.num_threads is not None:
        torch.set_num_threads(flags.num_threads)
    if flags.custom_module_path is not None:
        _run_file(flags.custom_module_path)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    sys.setswitchinterval(0.001)  # the network's thread must not wait for the one that computes
    try:
        server = make_server(flags)
        server.start()
    except (OSError, ValueError, DiscoveryError) as error:
        log.error("%s", error)
        return CANNOT
    counted: dict[str, float] = {}
    interval = flags.stats_report_interval
    while not stopped.wait(min(interval, threading.TIMEOUT_MAX) or None):
        counted = report(server, interval, counted)
    server.stop()
    if isinstance(server.placement, DeclaredExperts):
        loop.run(server.placement.discovery.close(), 10)
    return 0


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        raise SystemExit(f"--device {device} cannot be used here: {str(error).splitlines()[0]}") from None


def _run_file(path: Path) -> None:
    spec = importlib.util.spec_from_file_location("fmoe_server_custom_module", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SystemExit(f"--custom_module_path {path} is no Python file")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "__main__":
    run(main)
