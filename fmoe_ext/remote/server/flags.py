"""Flags of fmoe-server: the fields of its options, and the settings of its process."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from fmoe_ext.remote.flags import (
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_INT,
    Parser,
    flag,
    port,
)
from fmoe_ext.remote.security import ADMISSION, Security, check_private
from fmoe_ext.remote.server.options import NETWORK, Options, Training

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
        usage="fmoe serve [--flag value ...], or fmoe serve status --help, or fmoe serve --help",
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
