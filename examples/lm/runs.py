"""One model in training: the step, the schedule, validation and what is reported.

trainer.py has one Run, or with --compare two, which train on the same batches. A Run makes its model for the layout of
the job (spread.py, pipelined.py) and sums losses and loads until the next report.
"""

import math
import time
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

import torch
from job import Job
from model import ModelConfig
from pipelined import PipelinedModel
from precision import Precision
from spread import SpreadModel
from torch import Tensor

from fmoe_ext import balance
from fmoe_ext.gates import BaseGate


class DivergedError(Exception):
    """The loss is not a number any more; what was saved before is good."""


class Run:
    """A model and its counters; every number that it reports is of the whole job."""

    def __init__(
        self, name: str, config: ModelConfig, options: Namespace, job: Job, dtype: torch.dtype
    ) -> None:
        self.name, self.options, self.job = name, options, job
        torch.manual_seed(options.seed)
        self.model = build_model(config, job, Precision.of(dtype, job.device), options)
        gates = any(isinstance(m, BaseGate) for m in self.model.module.modules())
        self.monitor = balance.watch(self.model.module) if gates else None  # a stage may have none
        self.flops_per_token = self.model.whole.flops_per_token(options.seq_len)
        self.seconds = 0.0  # spent in training steps
        self.clear_window()

    def clear_window(self) -> None:
        """Starts the sums that the next report averages."""
        self.window_steps, self.window_start = 0, self.seconds
        # loss, balance loss, norm
        self.window_sums = torch.zeros(3, dtype=torch.float64, device=self.job.device)

    def train_step(
        self, step: int, inputs: Tensor, targets: Tensor, optimizer: torch.optim.Optimizer
    ) -> None:
        """Forward, backward and step on the windows [B, S] of the whole batch, of which this rank takes its share."""
        started = time.perf_counter()
        torch.manual_seed(seed_of(self.options.seed, step, self.job.rank))  # of gates that draw
        loss, balance_loss = self.model.train_step(inputs, targets)
        norm = self.model.clip_grad_norm_(self.options.clip)
        optimizer.step()  # the other run's parameters have no gradients
        optimizer.zero_grad()
        self.window_sums += self.job.mean(torch.stack([x.double() for x in (loss, balance_loss, norm)]))
        self.window_steps += 1
        self.seconds += time.perf_counter() - started

    def validate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
        """Mean loss over the validation windows, in nats per byte."""
        total, count = torch.zeros((), dtype=torch.float64, device=self.job.device), 0
        for inputs, targets in batches:
            total += self.model.evaluate(inputs, targets)
            count += targets.numel()
        return total.item() / count

    def check_finite(self, step: int) -> None:
        """Raises DivergedError if a loss since the last report was not finite; waits for the device."""
        loss = self.window_sums[0].item()
        if not math.isfinite(loss):
            raise DivergedError(f"the {self.name} loss is {loss} at step {step}: lower --lr")

    def report(self, step: int, learning_rate: float, peak_flops: float) -> dict[str, Any]:
        """The record of the steps since the last report: means, speed, each expert's share of the choices."""
        started = time.perf_counter()
        self.check_finite(step)
        loss, balance_loss, norm = (self.window_sums / self.window_steps).tolist()
        self.seconds += time.perf_counter() - started
        tokens = self.window_steps * self.options.batch_size * self.options.seq_len
        tokens_per_second = tokens / (self.seconds - self.window_start)
        record = {
            "run": self.name,
            "step": step,
            "loss": loss,
            "bits_per_byte": loss / math.log(2),
            "grad_norm": norm,
            "lr": learning_rate,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(tokens_per_second),
            "mfu": round(tokens_per_second * self.flops_per_token / peak_flops, 4),
        }
        if self.model.whole.moe_layers():
            record["balance_loss"] = balance_loss
            layers = self.job.of_all_stages(self._loads(step)).values()
            record["expert_load"] = [share_of_choices(layer["tokens_per_expert"]) for layer in layers]
            record["dropped_share"] = [round(layer["dropped_share"], 4) for layer in layers]
        self.clear_window()
        return record

    def _loads(self, step: int) -> dict[str, Any]:
        """Load of each layer of this stage since the last report."""
        if self.monitor is None:
            return {}
        return self.monitor.collect(step, sum_over_ranks=self.job.sum_of_stage)["layers"]


def build_model(
    config: ModelConfig, job: Job, precision: Precision, options: Namespace
) -> SpreadModel | PipelinedModel:
    common = options.balance_weight, options.overlap_degree
    if job.num_stages > 1:
        return PipelinedModel(config, job, precision, options.seq_len, options.chunks, *common)
    return SpreadModel(config, job, precision, options.data_parallel, *common, options.accumulate)


def learning_rate(options: Namespace, step: int) -> float:
    """Linear warm-up, then a cosine to a tenth of the peak at the last step; steps count from 1."""
    if step <= options.warmup:
        return options.lr * step / options.warmup
    progress = (step - options.warmup) / max(options.steps - options.warmup, 1)
    return options.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def seed_of(seed: int, step: int, rank: int) -> int:
    """A seed for one rank's step: nothing random has to be saved, and ranks do not draw the same."""
    return ((1_000_003 * seed + step) * 1_000_003 + rank) % 2**63


def share_of_choices(tokens_per_expert: list[int]) -> list[float]:
    total = max(sum(tokens_per_expert), 1)
    return [round(count / total, 4) for count in tokens_per_expert]
