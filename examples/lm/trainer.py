"""The training loop: batches, reports, checkpoints, and stopping in time. train.py makes a Trainer on every rank."""

import math
import sys
from argparse import Namespace
from dataclasses import fields
from typing import Any

import saving
import torch
from data import Corpus
from job import Job, StopSignals
from metrics import Metrics, Record
from model import ModelConfig
from profiling import StepProfile, run_range
from runs import Run, learning_rate
from speed import measure_peak, peak_memory
from tqdm import tqdm

from fmoe_ext import balance


class TrainerError(Exception):
    """The run cannot go on; the message says why."""


class Trainer:
    """The models of a run on all ranks of the job. They share one optimizer, whose step moves what has gradients."""

    def __init__(self, options: Namespace, job: Job, corpus: Corpus, dtype: torch.dtype) -> None:
        self.options, self.job, self.corpus = options, job, corpus
        self.runs = build_runs(options, job, dtype)
        groups = [group for run in self.runs for group in run.model.param_groups(options.weight_decay)]
        self.optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=True)
        self.validation = corpus.validation_batches(options.batch_size, options.seq_len, options.val_windows)
        self.peak_flops = options.peak_flops or measure_peak(job, dtype)
        self.step = 0  # done last
        self.metrics: Metrics | None = None  # of the first rank
        self.models = {run.name: run.model.module for run in self.runs}
        self.choices: balance.ChoiceLog | None = None
        self.profile = StepProfile(self.models, job.device) if options.profile and job.is_first else None

    def resume(self) -> None:
        """Goes on where the newest checkpoint is; all that came after it is done again."""
        self.step = saving.load(self.options.out, self.runs, self.optimizer, self.job)
        if self.options.steps < self.step:
            raise TrainerError(
                f"the checkpoint in {self.options.out} is at step {self.step}, past --steps {self.options.steps}"
            )

    def train(self) -> int:
        """All steps that are left -> the number of the signal that ended them early, or 0."""
        options, job = self.options, self.job
        last = min(options.steps, options.stop_after or options.steps)
        if job.is_first:
            self.metrics = Metrics(options.out, self.step, options.tensorboard)
        if options.choices:
            name = (
                f"choices-{self.step}.log" if self.step else "choices.log"
            )  # a resumed run keeps the first log
            self.choices = balance.log_choices(
                self.models["moe"], options.out / name, every=options.log_every
            )
        with self.progress_bar() as bar, StopSignals(job) as signals:
            while self.step < last and not signals.number:
                signals.ask()
                self.step += 1
                self.train_step()
                self.report(bar)
                bar.update()
                signals.answer()
                if self.step % options.save_every == 0 or self.step == last or signals.number:
                    saving.save(options.out, self.step, self.runs, self.optimizer, job)
        if self.metrics:
            self.metrics.close()
        if self.profile:
            self.profile.close()
        if self.choices:
            self.choices.close()
        return signals.number

    def progress_bar(self) -> tqdm:
        interval = 0.1 if sys.stderr.isatty() else 10  # seconds; few lines where the output goes to a file
        return tqdm(
            total=self.options.steps,
            initial=self.step,
            unit="step",
            dynamic_ncols=True,
            mininterval=interval,
            disable=not self.job.is_first,
        )

    def train_step(self) -> None:
        options = self.options
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(options, self.step)
        batch = self.corpus.batch(
            self.step, options.batch_size, options.seq_len, options.seed, options.data_order
        )
        if self.profile:
            self.profile.step_begins()
        for run in self.runs:
            with run_range(run.name):
                run.train_step(self.step, *batch, self.optimizer)
        if self.choices:
            self.choices.end_step(self.step, batch[0])

    def report(self, bar: tqdm) -> None:
        """Validates and writes records where it is time to."""
        options = self.options
        with_validation = self.step % options.val_every == 0 or self.step == options.steps
        if not with_validation and self.step % options.log_every:
            return
        records = [self.record_of(run, with_validation) for run in self.runs]
        if self.metrics:
            self.metrics.write(records)
        bar.set_postfix_str(progress(records), refresh=False)

    def record_of(self, run: Run, with_validation: bool) -> Record:
        record = run.report(self.step, learning_rate(self.options, self.step), self.peak_flops)
        record["memory_gib"] = round(peak_memory(self.job), 3)
        if with_validation:
            record["val_loss"] = run.validate(self.validation)
            record["val_bits_per_byte"] = record["val_loss"] / math.log(2)
        return record


def build_runs(options: Namespace, job: Job, dtype: torch.dtype) -> list[Run]:
    names = ["moe", "dense"] if options.compare else ["dense"] if options.dense else ["moe"]
    shape: dict[str, Any] = {
        field.name: getattr(options, field.name)
        for field in fields(ModelConfig)
        if field.name not in ("dense", "ep_size", "layer_options")
    }
    return [Run(name, ModelConfig(**shape, dense=name == "dense"), options, job, dtype) for name in names]


def progress(records: list[Record]) -> str:
    def line(record: Record) -> str:
        name = f"{record['run']} " if len(records) > 1 else ""
        return (
            f"{name}loss {record['loss']:.3f} {record['bits_per_byte']:.3f} bits/byte "
            f"{record['tokens_per_second']} tokens/s {record['mfu']:.0%} MFU"
        )

    return ", ".join(map(line, records)) + f", {records[-1]['memory_gib']:.1f} GiB"
