"""The flags of fmoe-server: what they mean, and which of them need or exclude each other."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fmoe_ext.remote.flag_types import NOT_NEGATIVE, NOT_NEGATIVE_INT, POSITIVE, POSITIVE_INT, endpoint, port
from fmoe_ext.remote.server.host import OPTIMIZERS

ETCD = "etcd://"
# A flag on the left would be ignored without the one on the right, and is therefore refused.
NEEDS = MappingProxyType(
    {
        "replicas": "registry",
        "lease": "registry",
        "recovery_wait": "registry",
        "copy_period": "copies_of",
        "checkpoint_period": "checkpoint_dir",
        "relay_token": "relay",
        "tls_key": "tls_certificate",
        "tls_client_ca": "tls_certificate",
        "own_token": "tokens",
    }
)
# The flags of each line exclude the one that it belongs to.
EXCLUDED_BY = MappingProxyType(
    {
        "registry": ("dht_port", "initial_peers", "identity_path", "ttl", "copies_of", "no_dht"),
        "no_dht": ("dht_port", "initial_peers", "identity_path", "ttl", "copies_of"),
        "relay": ("announce",),
    }
)


def make_parser() -> argparse.ArgumentParser:
    usage = "fmoe-server [--flag value ...], or fmoe-server --help"
    parser = argparse.ArgumentParser("fmoe-server", usage, "Hosts experts until it is told to stop.")
    _add_experts(parser)
    _add_limits(parser)
    _add_network(parser.add_argument_group("how others find it"))
    _add_admission(parser.add_argument_group("who may call"))
    return parser


def _add_experts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--config", type=Path, help="a file of `flag: value` lines (YAML); flags given here win")
    add("--expert_cls", default="ffn", help="ffn, transformer, nop, det_dropout or a registered one")
    add("--custom_module_path", type=Path, help="a Python file that registers expert classes")
    add("--hidden_dim", type=POSITIVE_INT, default=512)
    add(
        "--num_experts",
        type=NOT_NEGATIVE_INT,
        default=None,
        help="how many to begin with; 0: only replicas of others'",
    )
    add(
        "--expert_pattern",
        default="expert.[0:256]",
        help='uids to choose free ones from: "grid.[0:32].[0:16]"',
    )
    add("--expert_uids", nargs="+", default=(), help="exactly these uids")
    add("--optimizer", choices=OPTIMIZERS, default="sgd")
    add("--lr", type=NOT_NEGATIVE, default=0.01)
    add("--clip_grad_norm", type=POSITIVE, help="of one update of one expert")
    add(
        "--max_staleness",
        type=NOT_NEGATIVE_INT,
        help="updates allowed between a client's forward and its backward",
    )
    add("--checkpoint_dir", type=Path)
    add("--checkpoint_period", type=POSITIVE, default=60.0, help="seconds")
    add("--device", default="cpu", help="one a server: start a server for each device of a host")
    add("--seed", type=int, default=0, help="with the uid, decides the weights that an expert starts from")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--max_batch_size", type=POSITIVE_INT, default=4096, help="rows computed together")
    add("--max_waiting", type=POSITIVE_INT, default=4096, help="calls in the queue")
    add("--max_message_bytes", type=POSITIVE_INT, default=256 << 20)
    add("--num_threads", type=POSITIVE_INT, help="of torch")
    add(
        "--stats_report_interval",
        type=NOT_NEGATIVE,
        default=60.0,
        help="seconds between progress lines; 0: none",
    )


def _add_network(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--listen_on", type=endpoint, default="0.0.0.0:0", help="host:port; [::1]:port for IPv6; port 0: any")
    add(
        "--announce",
        type=endpoint,
        help="host:port that others should call, if it is not the one that is listened on",
    )
    add("--http_on", type=endpoint, help="host:port of the status page and the metrics")
    add("--registry", help="etcd://host:2379: experts with replicas")
    add("--replicas", type=POSITIVE_INT, default=2, help="servers an expert, with --registry")
    add("--lease", type=POSITIVE, default=5.0, help="seconds after which a silent server counts as dead")
    add(
        "--recovery_wait",
        type=NOT_NEGATIVE,
        default=30.0,
        help="seconds to wait for the newest copy when all are gone",
    )
    add("--dht_port", type=port, help="of a DHT node in this server")
    add("--initial_peers", nargs="*", default=(), help="host:port of other DHT nodes; none: a new DHT begins")
    add("--identity_path", type=Path, help="a file with the key that owns the uids, made if it is not there")
    add("--ttl", type=POSITIVE, default=30.0, help="seconds for which a record lives unless it is renewed")
    add(
        "--copies_of", nargs="+", default=(), help="uids of others to keep warm copies of, without --registry"
    )
    add("--copy_period", type=POSITIVE, default=10.0, help="seconds between copies: what a takeover can lose")
    add("--no_dht", action="store_true", help="tell nobody: for clients with a static list")
    add(
        "--relay",
        type=endpoint,
        help="host:port of a relay (fmoe-dht --relay_on) through which others reach this server",
    )
    add("--relay_token", default="", help="what the relay asks for")


def _add_admission(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--tls_certificate", type=Path)
    add("--tls_key", type=Path)
    add("--tls_client_ca", type=Path, help="demand client certificates that it signed")
    add("--tls_ca", type=Path, help="that signed the other servers' certificates")
    add("--tokens", type=Path, help="a file of `name: token` lines; calls without one are refused")
    add("--own_token", help="the name in --tokens under which this server calls the others")
    add("--allow_backward", nargs="+", help="names that may send gradients; all, if not given")
    add("--calls_per_second", type=POSITIVE, default=float("inf"), help="of each peer")
    add("--bytes_per_second", type=POSITIVE, default=float("inf"), help="of each peer")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags, with those of --config behind them; SystemExit with one sentence if they make no sense."""
    parser = make_parser()
    flags = parser.parse_args(arguments)
    configured: dict[str, Any] = {}
    if flags.config is not None:
        configured = _configured(parser, flags.config)
        parser.set_defaults(**configured)
        flags = parser.parse_args(arguments)
    _check(flags, _named(parser, arguments, configured), parser)
    if flags.num_experts is None:
        flags.num_experts = len(flags.expert_uids) or 1
    return flags


def _named(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, configured: Mapping[str, Any]
) -> set[str]:
    """The flags that are given, be it with their default; not those that a file switches off."""
    unset = object()
    blank = argparse.Namespace(**dict.fromkeys(vars(parser.parse_args([])), unset))
    parsed = vars(parser.parse_args(arguments, blank))
    given = {**configured, **{name: value for name, value in parsed.items() if value is not unset}}
    return {name for name, value in given.items() if value is not None and value is not False}


def _check(flags: argparse.Namespace, given: set[str], parser: argparse.ArgumentParser) -> None:
    """Refuses by name what would be ignored."""
    if flags.expert_uids and flags.num_experts not in (None, len(flags.expert_uids)):
        parser.error(f"--num_experts {flags.num_experts}, but {len(flags.expert_uids)} --expert_uids")
    if twice := sorted({uid for uid in flags.expert_uids if list(flags.expert_uids).count(uid) > 1}):
        parser.error(f"--expert_uids has {', '.join(twice)} twice")
    for flag in given & {"tls_ca", "own_token"}:
        if not given & {"registry", "copies_of"}:
            parser.error(
                f"--{flag} means nothing without --registry or --copies_of: this server calls no others"
            )
    if flags.registry is not None and not flags.registry.startswith(ETCD):
        parser.error(f"--registry must be {ETCD}host:port, but is {flags.registry}")
    for flag, excluded in EXCLUDED_BY.items():
        if flag in given and (both := sorted(given.intersection(excluded))):
            parser.error(f"--{flag} excludes --{', --'.join(both)}: leave one or the other out")
    for flag, needed in NEEDS.items():
        if flag in given and needed not in given:
            parser.error(f"--{flag} means nothing without --{needed}")


def read_flat(path: Path) -> dict[str, Any]:
    """`key: value` lines, values as JSON where they are, otherwise as text; # begins a comment."""
    values: dict[str, Any] = {}
    for _, key, value in _read_lines(path, "flag: value"):
        try:
            values[key] = json.loads(value)
        except ValueError:
            values[key] = value
    return values


def read_tokens(path: Path) -> dict[str, str]:
    """`name: token` lines, tokens as they stand -> {token: name}; SystemExit for a file that would let others in."""
    names: dict[str, str] = {}
    for number, name, token in _read_lines(path, "name: token"):
        if not (name and token):
            raise SystemExit(f"{path}:{number}: write `name: token`; an empty one would admit everybody")
        if token in names:
            raise SystemExit(f"{path}:{number}: {name} has the token of {names[token]}: give each its own")
        names[token] = name
    if not names:
        raise SystemExit(f"--tokens {path} holds no token: write `name: token` lines, or leave the flag out")
    return names


def _read_lines(path: Path, form: str) -> Iterator[tuple[int, str, str]]:
    """(number, key, value) of each line; SystemExit names the first that has another form."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"{path} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        text = line.partition(" #")[0].strip()
        if not text or text.startswith("#"):
            continue
        key, colon, value = text.partition(":")
        if not colon:
            raise SystemExit(f"{path}:{number}: write `{form}`, without which this line means nothing")
        yield number, key.strip(), value.strip()


def _configured(parser: argparse.ArgumentParser, path: Path) -> dict[str, Any]:
    """The values of a file through each flag's type, as argparse does for strings only."""
    types: dict[str, Any] = {action.dest: action.type for action in parser._actions}
    values = read_flat(path)
    if unknown := sorted(values.keys() - types):
        parser.error(f"{path} holds unknown flags: {', '.join(unknown)}")
    for key, value in values.items():
        if value is not None and types[key] is not None:
            try:
                values[key] = types[key](value)
            except (TypeError, ValueError, argparse.ArgumentTypeError) as error:
                parser.error(f"{path}: {key}: {error}")
    return values
