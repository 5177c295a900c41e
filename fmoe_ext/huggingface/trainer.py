"""Add the gates' balance loss, and the experts' load in the logs, to a Trainer of Transformers or TRL: BalanceCallback.

In a module of its own because its class derives from Transformers': huggingface.balance_callback() imports it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist

from fmoe_ext import balance
from fmoe_ext.huggingface.training import BalanceLoss, add_balance_loss, check_weight

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError(f"BalanceCallback needs transformers ({error}): pip install transformers") from error

_PREFIX = "moe/"
_LOGGED = ("max_over_mean", "dropped_share", "dead_experts")  # of balance.summarize()


class BalanceCallback(TrainerCallback):
    """The gates' balance loss in the training loss, and the experts' load in the logs.

    weight: of the balance loss, which add_balance_loss(trainer, weight) adds. Every log with a training loss gains
    moe/balance_loss (of this rank, summed over the gates, without its weight; the mean of the microbatches), and
    moe/max_over_mean, moe/dropped_share and moe/dead_experts, means over the layers of the load on all ranks
    (balance.summarize), both since the last log. file: of JSON lines, to which balance.write() adds the loads of every
    layer. TrainingArguments(report_to=["tensorboard"]), "wandb" and others get the same numbers.
    """

    def __init__(self, weight: float = 0.01, file: str | None = None) -> None:
        check_weight(weight)
        self.weight = weight
        self.file = file
        self._loss: BalanceLoss | None = None
        self._monitor: balance.LoadMonitor | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._detach()
        trainer = _running_trainer()
        # First, before report_to's callbacks (TensorBoard, W&B), which read the logs that this one completes. In place:
        # Transformers is walking the list, and calls each callback once all the same.
        callbacks = trainer.callback_handler.callbacks
        callbacks.remove(self)
        callbacks.insert(0, self)
        self._loss = add_balance_loss(trainer, self.weight)
        self._monitor = balance.watch(kwargs["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._detach()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs: dict[str, float] = kwargs["logs"]
        # the log of an evaluation, or the last one of a training, has no "loss"
        if self._loss is None or self._monitor is None or "loss" not in logs:
            return
        record = self._monitor.collect(state.global_step, sum_over_ranks=_sum_over_ranks)
        layers = list(record["layers"].values())
        numbers = {_PREFIX + name: sum(layer[name] for layer in layers) / len(layers) for name in _LOGGED}
        numbers[_PREFIX + "balance_loss"] = self._loss.pop_mean()
        logs.update(numbers)
        state.log_history[-1].update(numbers)  # it has a copy of logs
        if self.file is not None and state.is_world_process_zero:
            balance.write(record, self.file)

    def _detach(self) -> None:
        if self._loss is not None:
            self._loss.remove()
        if self._monitor is not None:
            self._monitor.remove()
        self._loss = self._monitor = None


def _running_trainer() -> Trainer:
    """Find the Trainer that runs this callback."""
    # the nearest on the stack: Transformers gives callbacks the model, the optimizer and the data, not the trainer
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    raise ValueError(
        "BalanceCallback works inside Trainer.train() only; elsewhere use add_balance_loss(model)"
    )


def _sum_over_ranks(counted: torch.Tensor) -> torch.Tensor:
    if dist.is_available() and dist.is_initialized():
        counted = counted.clone()
        dist.all_reduce(counted)
    return counted
