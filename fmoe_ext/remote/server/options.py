"""Declare the options of a server, of its training and of its replication, and read them from the command line.

Each option is one field of a dataclass; flag() (flags.py) makes it a flag of fmoe-server too. Fields without flag() can
be set in Python alone. parse() returns all flags in one namespace, of which server/main.py builds the dataclasses.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch

from fmoe_ext.remote.flags import (
    NOT_NEGATIVE,
    NOT_NEGATIVE_INT,
    POSITIVE,
    POSITIVE_INT,
    Parser,
    admission_flag,
    endpoint,
    etcd_address,
    flag,
    network_flag,
    port,
)
from fmoe_ext.remote.security import Security, check_private

# The tensors that an optimizer keeps for each parameter; a state (state.py) must have all of them.
STATE_NAMES = MappingProxyType({"sgd": (), "adam": ("step", "exp_avg", "exp_avg_sq"), "none": ()})
OPTIMIZERS = tuple(STATE_NAMES)
SCHEDULERS = ("none", "linear")


@dataclass(frozen=True)
class Training:
    """The way gradients change experts: optimizer, learning rate, clipping, and which gradients are too old.

    scheduler "linear": the learning rate of an expert's update n (from 0) is lr times n / num_warmup_steps, then
    (num_training_steps - n) / (num_training_steps - num_warmup_steps), then 0. n is the expert's version, so the
    schedule goes on after a restart and on every replica.
    """

    optimizer: str = flag("sgd", choices=OPTIMIZERS)
    lr: float = flag(0.01, "learning rate", type=NOT_NEGATIVE)
    max_grad_norm: float | None = flag(
        None, "of one update of one expert", name="clip_grad_norm", type=POSITIVE
    )
    max_staleness: int | None = flag(
        None, "updates allowed between a client's forward and its backward", type=NOT_NEGATIVE_INT
    )
    scheduler: str = flag("none", "linear: warm-up, then linear decay to 0", choices=SCHEDULERS)
    num_warmup_steps: int = flag(
        0, "updates of an expert, with --scheduler linear", type=NOT_NEGATIVE_INT, needs=("scheduler",)
    )
    num_training_steps: int | None = flag(
        None, "updates of an expert, with --scheduler linear", type=POSITIVE_INT, needs=("scheduler",)
    )

    def __post_init__(self) -> None:
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be positive, but is {self.max_grad_norm}")
        if self.scheduler not in SCHEDULERS:
            raise ValueError(f"scheduler must be one of {', '.join(SCHEDULERS)}, but got {self.scheduler!r}")
        has_steps = bool(self.num_warmup_steps or self.num_training_steps)
        if self.scheduler == "none" and has_steps:
            raise ValueError("num_warmup_steps and num_training_steps need scheduler='linear'")
        if self.scheduler == "linear":
            if self.num_training_steps is None:
                raise ValueError("scheduler='linear' needs num_training_steps")
            if not 0 <= self.num_warmup_steps < self.num_training_steps:
                raise ValueError(
                    f"num_warmup_steps must be between 0 and num_training_steps={self.num_training_steps}, "
                    f"but is {self.num_warmup_steps}"
                )

    def make_optimizer(self, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer | None:
        """Make the optimizer of one expert's parameters; None if experts are not trained."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=self.lr)
        if self.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=self.lr)
        if self.optimizer == "none":
            return None
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, but got {self.optimizer!r}")

    def lr_at(self, version: int) -> float:
        """Return the learning rate of the update that follows a version."""
        if self.num_training_steps is None:
            return self.lr
        if version < self.num_warmup_steps:
            return self.lr * version / self.num_warmup_steps
        decay = self.num_training_steps - self.num_warmup_steps
        return self.lr * max(0, self.num_training_steps - version) / decay


@dataclass(frozen=True)
class Options:
    """Options of a server, named as the flags of fmoe-server."""

    expert_cls: str = flag("ffn", "ffn, transformer, nop, det_dropout or a registered one")
    hidden_dim: int = flag(512, type=POSITIVE_INT)
    num_experts: int = flag(
        1, "how many to begin with; 0: only replicas of others'", type=NOT_NEGATIVE_INT, command_default=None
    )
    expert_pattern: str = flag("expert.[0:256]", 'uids to choose free ones from: "grid.[0:32].[0:16]"')
    expert_uids: Sequence[str] = flag((), "exactly these uids", nargs="+")
    listen_on: str = network_flag(
        "127.0.0.1:0",
        "host:port; [::1]:port for IPv6; port 0: any",
        type=endpoint,
        command_default="0.0.0.0:0",
    )
    announce: str | None = network_flag(
        None, "host:port that others should call, if it is not the one that is listened on", type=endpoint
    )
    training: Training = field(default_factory=Training)
    checkpoint_dir: Path | None = flag(None)
    checkpoint_period: float = flag(60.0, "seconds", type=POSITIVE, needs=("checkpoint_dir",))
    checkpoint_check_rate: float = flag(
        8.0,
        "MB a second of checkpoints that are read again to find damage; 0: none",
        type=NOT_NEGATIVE,
        needs=("checkpoint_dir",),
    )
    ttl: float = network_flag(30.0, "seconds for which a record lives unless it is renewed", type=POSITIVE)
    device: str = flag("cpu", "one a server: start a server for each device of a host")
    seed: int = flag(0, "with the uid, decides the weights that an expert starts from", type=int)
    max_batch_size: int = flag(4096, "rows computed together", type=POSITIVE_INT)
    max_rows: int | None = flag(
        None, "rows of one call; none: as many as --max_message_bytes holds", type=POSITIVE_INT
    )
    max_waiting: int = flag(4096, "calls in the queue", type=POSITIVE_INT)
    max_message_bytes: int = flag(256 << 20, type=POSITIVE_INT)
    max_bytes_in_flight: int | None = flag(
        None,
        "of calls under way, over all peers; none: an eighth of the memory of the machine or of its cgroups",
        type=POSITIVE_INT,
    )
    http_on: str | None = network_flag(None, "host:port of the status page and the metrics", type=endpoint)
    relay: str | None = network_flag(
        None,
        "host:port of a relay (fmoe-dht --relay_on) through which others reach this server",
        type=endpoint,
        excludes=("announce",),
    )
    relay_token: str = network_flag("", "token of that relay", needs=("relay",))
    security: Security = field(default_factory=Security)


@dataclass(frozen=True)
class Replication:
    """Options of experts with replicas."""

    registry: str | None = network_flag(  # "host:port" of etcd, several with commas
        None,
        "etcd://host:2379: experts with replicas",
        type=etcd_address,
        excludes=("dht_port", "initial_peers", "identity_path", "ttl", "copies_of", "no_dht"),
    )
    replicas: int = network_flag(
        2, "servers an expert, with --registry", type=POSITIVE_INT, needs=("registry",)
    )
    ttl: float = network_flag(
        5.0,
        "seconds after which a silent server counts as dead",
        name="lease",
        type=POSITIVE,
        needs=("registry",),
    )
    ack_timeout: float = 2.0  # seconds that a follower has for an update
    recovery_wait: float = network_flag(
        30.0, "seconds to wait for the newest copy when all are gone", type=NOT_NEGATIVE, needs=("registry",)
    )


_CALLS_OTHERS = ("registry", "copies_of")  # flags with which a server calls other servers
# hivemind's flags, and what to write instead of them
_HIVEMIND = MappingProxyType(
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
class _Command:
    """The flags of fmoe-server that are not options of a Server."""

    config: Path | None = flag(None, "a YAML file of `flag: value` lines; flags given here win", short="-c")
    custom_module_path: Path | None = flag(None, "a Python file that registers expert classes")
    num_threads: int | None = flag(None, "of torch", type=POSITIVE_INT)
    stats_report_interval: float = flag(60.0, "seconds between progress lines; 0: none", type=NOT_NEGATIVE)
    dht_port: int | None = network_flag(None, "of a DHT node in this server", type=port)
    initial_peers: Sequence[str] = network_flag(
        (), "host:port of other DHT nodes; none: a new DHT begins", nargs="*"
    )
    identity_path: Path | None = network_flag(
        None, "a file with the key that owns the uids, made if it is not there"
    )
    copies_of: Sequence[str] = network_flag(
        (), "uids of others to keep warm copies of, without --registry", nargs="+"
    )
    copy_period: float = network_flag(
        10.0, "seconds between copies: what a takeover can lose", type=POSITIVE, needs=("copies_of",)
    )
    no_dht: bool = network_flag(
        False,
        "tell nobody: for clients with a static list",
        action="store_true",
        excludes=("dht_port", "initial_peers", "identity_path", "ttl", "copies_of"),
    )
    tls_ca: Path | None = admission_flag(
        None, "PEM file that signed the other servers' certificates", needs=_CALLS_OTHERS
    )
    tokens: Path | None = admission_flag(None, "a file of `name: token` lines; calls without one are refused")
    own_token: str | None = admission_flag(
        None, "the name in --tokens under which this server calls the others", needs=_CALLS_OTHERS
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return all flags; those given in `arguments` win over the file of --config. SystemExit if they do not fit."""
    parser = Parser(
        "fmoe-server",
        *(Options, Training, Security, Replication, _Command),
        description="Hosts experts until a signal ends it.",
        usage="fmoe serve [--flag value ...], or fmoe serve status --help, or fmoe serve --help",
        foreign=_HIVEMIND,
    )
    flags = parser.read(arguments, "config")
    if flags.expert_uids and flags.num_experts not in (None, len(flags.expert_uids)):
        parser.error(f"--num_experts {flags.num_experts}, but {len(flags.expert_uids)} --expert_uids")
    if twice := sorted({uid for uid in flags.expert_uids if list(flags.expert_uids).count(uid) > 1}):
        parser.error(f"--expert_uids has {', '.join(twice)} twice")
    if flags.own_token is not None and flags.tokens is None:
        parser.error("--own_token means nothing without --tokens")
    if flags.num_experts is None:  # command_default: None shows that it was not given
        flags.num_experts = len(flags.expert_uids) or 1
    return flags


def read_tokens(path: Path) -> dict[str, str]:
    """Read `name: token` lines, with comments behind " #" -> {token: name}; SystemExit for a bad or a public file."""
    try:
        check_private(path)
        lines = path.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} cannot be read: {error}") from None
    names: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition(" #")[0].strip()
        if not text or text.startswith("#"):
            continue
        name, colon, token = (part.strip() for part in text.partition(":"))
        if not colon:
            raise SystemExit(f"{path}:{number}: write `name: token`, without which this line means nothing")
        if not (name and token):
            raise SystemExit(f"{path}:{number}: write `name: token`; an empty one would admit everybody")
        if token in names:
            raise SystemExit(f"{path}:{number}: {name} has the token of {names[token]}: give each its own")
        names[token] = name
    if not names:
        raise SystemExit(f"--tokens {path} holds no token: write `name: token` lines, or leave the flag out")
    return names
