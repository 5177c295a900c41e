"""fmoe-server: hosts experts until it is told to stop."""

import argparse
import importlib
import importlib.util
import json
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fmoe_ext.remote import loop
from fmoe_ext.remote.discovery import Discovery, DiscoveryError, StaticList
from fmoe_ext.remote.replication.replicas import ReplicatedExperts, Replication
from fmoe_ext.remote.security import Credentials, Security
from fmoe_ext.remote.server.host import OPTIMIZERS, Training
from fmoe_ext.remote.server.server import DeclaredExperts, Options, Placement, Server
from fmoe_ext.remote.server.warm_copies import WarmCopies

log = logging.getLogger("fmoe_ext.remote")
ETCD = "etcd://"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("fmoe-server", description=__doc__)
    add = parser.add_argument
    add("--config", type=Path, help="a file of `flag: value` lines (YAML); flags given here win")
    add("--expert_cls", default="ffn", help="ffn, transformer, nop, det_dropout or a registered one")
    add("--custom_module_path", type=Path, help="a Python file that registers expert classes")
    add("--hidden_dim", type=int, default=512)
    add("--num_experts", type=int, default=None, help="how many to begin with; 0: only replicas of others'")
    add(
        "--expert_pattern",
        default="expert.[0:256]",
        help='uids to choose free ones from: "grid.[0:32].[0:16]"',
    )
    add("--expert_uids", nargs="+", default=(), help="exactly these uids")
    add("--listen_on", default="0.0.0.0:0", help="host:port; [::1]:port for IPv6; port 0: any")
    add("--announce", help="host:port that others should call, if it is not the one that is listened on")
    add("--http_on", help="host:port of the status page and the metrics")
    add("--optimizer", choices=OPTIMIZERS, default="sgd")
    add("--lr", type=float, default=0.01)
    add("--clip_grad_norm", type=float, help="of one update of one expert")
    add("--max_staleness", type=int, help="updates allowed between a client's forward and its backward")
    add("--checkpoint_dir", type=Path)
    add("--checkpoint_period", type=float, default=60.0, help="seconds")
    add("--device", default="cpu")
    add("--seed", type=int, default=0, help="with the uid, decides the weights that an expert starts from")
    add("--max_batch_size", type=int, default=4096, help="rows computed together")
    add("--max_waiting", type=int, default=4096, help="calls in the queue")
    add("--max_message_bytes", type=int, default=256 << 20)
    add("--num_threads", type=int, help="of torch")
    add("--stats_report_interval", type=float, default=60.0, help="seconds between progress lines; 0: none")
    group = parser.add_argument_group("how others find it")
    add = group.add_argument
    add("--registry", help="etcd://host:2379: experts with replicas")
    add("--replicas", type=int, default=2, help="servers an expert, with --registry")
    add("--lease", type=float, default=5.0, help="seconds after which a silent server counts as dead")
    add(
        "--recovery_wait",
        type=float,
        default=30.0,
        help="seconds to wait for the newest copy when all are gone",
    )
    add("--dht_port", type=int, help="of a DHT node in this server")
    add("--initial_peers", nargs="*", default=(), help="host:port of other DHT nodes")
    add("--ttl", type=float, default=30.0, help="seconds for which a record lives unless it is renewed")
    add(
        "--copies_of", nargs="+", default=(), help="uids of others to keep warm copies of, without --registry"
    )
    add("--copy_period", type=float, default=10.0, help="seconds between copies: what a takeover can lose")
    add("--no_dht", action="store_true", help="tell nobody: for clients with a static list")
    group = parser.add_argument_group("who may call")
    add = group.add_argument
    add("--tls_certificate", type=Path)
    add("--tls_key", type=Path)
    add("--tls_client_ca", type=Path, help="demand client certificates that it signed")
    add("--tls_ca", type=Path, help="that signed the other servers' certificates")
    add("--tokens", type=Path, help="a file of `name: token` lines; calls without one are refused")
    add("--own_token", help="the name in --tokens under which this server calls the others")
    add("--allow_backward", nargs="+", help="names that may send gradients; all, if not given")
    add("--calls_per_second", type=float, default=float("inf"), help="of each peer")
    add("--bytes_per_second", type=float, default=float("inf"), help="of each peer")
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags, with those of --config behind them."""
    parser = make_parser()
    first = parser.parse_args(arguments)
    if first.config is not None:
        known = {action.dest for action in parser._actions}
        values = read_flat(first.config)
        if unknown := sorted(values.keys() - known):
            parser.error(f"{first.config} holds unknown flags: {', '.join(unknown)}")
        parser.set_defaults(**_converted(parser, values))
        first = parser.parse_args(arguments)
    if first.num_experts is None:
        first.num_experts = len(first.expert_uids) or 1
    if first.expert_uids and first.num_experts != len(first.expert_uids):
        parser.error(f"--num_experts {first.num_experts}, but {len(first.expert_uids)} --expert_uids")
    if first.registry is not None and not first.registry.startswith(ETCD):
        parser.error(f"--registry must be {ETCD}host:port, but is {first.registry}")
    if first.registry and (first.dht_port is not None or first.initial_peers):
        parser.error("--registry and a DHT exclude each other: leave out --dht_port and --initial_peers")
    if first.copies_of and (first.registry or first.no_dht):
        parser.error("--copies_of is for servers on a DHT: with --registry, --replicas keeps them")
    return first


def read_flat(path: Path) -> dict[str, Any]:
    """`key: value` lines, values as JSON where they are, otherwise as text; # begins a comment."""
    values: dict[str, Any] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.partition(" #")[0].strip()
        if not text or text.startswith("#"):
            continue
        key, colon, value = text.partition(":")
        if not colon:
            raise SystemExit(f"{path}:{number}: write `flag: value`, not {text!r}")
        try:
            values[key.strip()] = json.loads(value)
        except ValueError:
            values[key.strip()] = value.strip()
    return values


def _converted(parser: argparse.ArgumentParser, values: dict[str, Any]) -> dict[str, Any]:
    """Values through each flag's type, as argparse does for strings only."""
    types: dict[str, Any] = {action.dest: action.type for action in parser._actions}
    return {
        key: value if value is None or types[key] is None else types[key](value)
        for key, value in values.items()
    }


def make_server(flags: argparse.Namespace) -> Server:
    """The server that the flags describe, not yet started."""
    tokens = {} if flags.tokens is None else {str(t): name for name, t in read_flat(flags.tokens).items()}
    security = Security(
        flags.tls_certificate,
        flags.tls_key,
        flags.tls_client_ca,
        tokens,
        None if flags.allow_backward is None else frozenset(flags.allow_backward),
        flags.calls_per_second,
        flags.bytes_per_second,
    )
    options = Options(
        expert_cls=flags.expert_cls,
        hidden_dim=flags.hidden_dim,
        num_experts=flags.num_experts,
        expert_pattern=flags.expert_pattern,
        expert_uids=tuple(flags.expert_uids),
        listen_on=flags.listen_on,
        announce=flags.announce,
        training=Training(flags.optimizer, flags.lr, flags.clip_grad_norm, flags.max_staleness),
        checkpoint_dir=flags.checkpoint_dir,
        checkpoint_period=flags.checkpoint_period,
        ttl=flags.ttl,
        device=flags.device,
        seed=flags.seed,
        max_batch_size=flags.max_batch_size,
        max_waiting=flags.max_waiting,
        max_message_bytes=flags.max_message_bytes,
        http_on=flags.http_on,
        security=security,
    )
    return Server(options, _placement(flags, tokens))


def _placement(flags: argparse.Namespace, tokens: dict[str, str]) -> Placement:
    if flags.registry is not None:
        own = next((token for token, name in tokens.items() if name == flags.own_token), None)
        if tokens and own is None:
            raise SystemExit("replicas call each other: name this server's token with --own_token")
        credentials = Credentials(flags.tls_ca, flags.tls_certificate, flags.tls_key, own)
        where = flags.registry.removeprefix(ETCD)
        replication = Replication(where, flags.replicas, flags.lease, recovery_wait=flags.recovery_wait)
        return ReplicatedExperts(replication, credentials)
    discovery = StaticList() if flags.no_dht else _open_dht(flags)
    if not flags.copies_of:
        return DeclaredExperts(discovery)
    own = next((token for token, name in tokens.items() if name == flags.own_token), None)
    credentials = Credentials(flags.tls_ca, flags.tls_certificate, flags.tls_key, own)
    return DeclaredExperts(discovery, WarmCopies(discovery, flags.copies_of, flags.copy_period, credentials))


def _open_dht(flags: argparse.Namespace) -> Discovery:
    dht = importlib.import_module("fmoe_ext.remote.dht")
    host = flags.listen_on.rpartition(":")[0]
    return loop.run(dht.open_node(list(flags.initial_peers), f"{host}:{flags.dht_port or 0}"), 30)


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
    logging.basicConfig(
        level=logging.INFO,
        format="[%(asctime)s.%(msecs)03d][%(levelname)s][%(module)s.%(funcName)s:%(lineno)d] %(message)s",
        datefmt="%Y/%m/%d %H:%M:%S",
    )
    flags = parse(arguments)
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
        return 1
    counted: dict[str, float] = {}
    interval = flags.stats_report_interval
    while not stopped.wait(interval or None):
        counted = report(server, interval, counted)
    server.stop()
    return 0


def _run_file(path: Path) -> None:
    spec = importlib.util.spec_from_file_location("fmoe_server_custom_module", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"--custom_module_path {path} is no Python file")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "__main__":
    sys.exit(main())
