"""Options of Server and of its training, which are the flags of fmoe-server too."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fmoe_ext.remote.flags import NOT_NEGATIVE, NOT_NEGATIVE_INT, POSITIVE, POSITIVE_INT, endpoint, flag
from fmoe_ext.remote.security import Security

OPTIMIZERS = ("sgd", "adam", "none")
SCHEDULERS = ("none", "linear")
NETWORK = "how others find it"


@dataclass(frozen=True)
class Training:
    """The way gradients change experts. max_grad_norm: of one update of one expert. max_staleness: updates between
    the forward that a client saw and its backward.

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
        """The optimizer of one expert's parameters; None if it is not trained."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=self.lr)
        if self.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=self.lr)
        if self.optimizer == "none":
            return None
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, but got {self.optimizer!r}")

    def lr_at(self, version: int) -> float:
        """The learning rate of the update that follows a version."""
        if self.num_training_steps is None:
            return self.lr
        if version < self.num_warmup_steps:
            return self.lr * version / self.num_warmup_steps
        decay = self.num_training_steps - self.num_warmup_steps
        return self.lr * max(0, self.num_training_steps - version) / decay


@dataclass(frozen=True)
class Options:
    """Options of a server; the names are those of the flags of fmoe-server."""

    expert_cls: str = flag("ffn", "ffn, transformer, nop, det_dropout or a registered one")
    hidden_dim: int = flag(512, type=POSITIVE_INT)
    num_experts: int = flag(
        1, "how many to begin with; 0: only replicas of others'", type=NOT_NEGATIVE_INT, command_default=None
    )
    expert_pattern: str = flag("expert.[0:256]", 'uids to choose free ones from: "grid.[0:32].[0:16]"')
    expert_uids: Sequence[str] = flag((), "exactly these uids", nargs="+")
    listen_on: str = flag(
        "127.0.0.1:0",
        "host:port; [::1]:port for IPv6; port 0: any",
        type=endpoint,
        command_default="0.0.0.0:0",
        group=NETWORK,
    )
    announce: str | None = flag(
        None,
        "host:port that others should call, if it is not the one that is listened on",
        type=endpoint,
        group=NETWORK,
    )
    training: Training = field(default_factory=Training)
    checkpoint_dir: Path | None = flag(None, type=Path)
    checkpoint_period: float = flag(60.0, "seconds", type=POSITIVE, needs=("checkpoint_dir",))
    ttl: float = flag(
        30.0, "seconds for which a record lives unless it is renewed", type=POSITIVE, group=NETWORK
    )
    device: str = flag("cpu", "one a server: start a server for each device of a host")
    seed: int = flag(0, "with the uid, decides the weights that an expert starts from", type=int)
    max_batch_size: int = flag(4096, "rows computed together", type=POSITIVE_INT)
    max_rows: int = flag(1 << 20, "rows of one call", type=POSITIVE_INT)
    max_waiting: int = flag(4096, "calls in the queue", type=POSITIVE_INT)
    max_message_bytes: int = flag(256 << 20, type=POSITIVE_INT)
    http_on: str | None = flag(
        None, "host:port of the status page and the metrics", type=endpoint, group=NETWORK
    )
    relay: str | None = flag(
        None,
        "host:port of a relay (fmoe-dht --relay_on) through which others reach this server",
        type=endpoint,
        excludes=("announce",),
        group=NETWORK,
    )
    relay_token: str = flag("", "token of that relay", needs=("relay",), group=NETWORK)
    security: Security = field(default_factory=Security)
