"""Checkpoints of a run, by fmoe_ext.checkpoint: never half written, and loadable on any number of ranks.

trainer.py calls save() and load(), train.py prepare(). Beside model and optimizer a checkpoint has the sums of the next
report (loss, seconds, loads of experts), so that a resumed run reports what one that was never stopped reports.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import metrics
import torch
from job import Job
from runs import Run
from torch import nn

from fmoe_ext import balance, checkpoint

KEPT = 2  # checkpoints


class SettingsError(Exception):
    """The settings of a run cannot be read; the message says which."""


def folder(out: Path) -> Path:
    return out / "checkpoints"


def exists(out: Path) -> bool:
    return (folder(out) / "latest").exists()


def read_settings(out: Path) -> dict[str, Any]:
    """Options that the run in this folder was started with."""
    path = out / "settings.json"
    try:
        settings = json.loads(path.read_text())
        if isinstance(settings, dict):
            return settings
    except (OSError, ValueError):
        pass
    raise SettingsError(f"{path} is missing or damaged: --resume takes the run's settings from it")


def prepare(out: Path, settings: dict[str, Any], resumes: bool) -> None:
    """Readies a folder, on the first rank; a new run puts an earlier one's checkpoints aside."""
    out.mkdir(parents=True, exist_ok=True)
    if not resumes:
        aside = folder(out).with_name("checkpoints.old")
        if exists(out):
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(folder(out), aside)
            print(f"a new run: the earlier checkpoints are now in {aside}")
        metrics.write_atomically(out / "metrics.jsonl", "")
    metrics.write_atomically(out / "settings.json", json.dumps(settings, indent=1) + "\n")


def save(out: Path, step: int, runs: list[Run], optimizer: torch.optim.Optimizer, job: Job) -> None:
    """Saves all runs after a step as one checkpoint; all ranks call it."""
    for run in runs:
        run.check_finite(step)
        pool_counts(run.monitor, job)
    extra = {"runs": {run.name: counts_of(run, job) for run in runs}}
    checkpoint.save(folder(out), joined(runs), optimizer, step=step, extra=extra, keep=KEPT)


def load(out: Path, runs: list[Run], optimizer: torch.optim.Optimizer, job: Job) -> int:
    """Puts the newest checkpoint into runs -> the step that was done last."""
    saved = checkpoint.load(folder(out), joined(runs), optimizer)
    for run in runs:
        put_counts(run, saved.extra["runs"][run.name], job)
    return saved.step


def joined(runs: list[Run]) -> nn.Module:
    models = {run.name: run.model.saved for run in runs}
    return models.popitem()[1] if len(models) == 1 else nn.ModuleDict(models)


def pool_counts(monitor: balance.LoadMonitor | None, job: Job) -> None:
    """Lets one rank of each stage have what all its ranks have counted since the last report, the others nothing."""
    for counters in monitor.counters.values() if monitor else ():
        counters.idle_steps.copy_(job.min_of_stage(counters.idle_steps))
        for name in ("tokens_per_expert", "num_dropped", "num_tokens", "gate_entropy_sum"):
            total = job.sum_of_stage(getattr(counters, name))
            getattr(counters, name).copy_(total if job.data_rank == 0 else torch.zeros_like(total))


def counts_of(run: Run, job: Job) -> dict[str, Any]:
    """State of the sums for the next report, as plain values."""
    counters = run.monitor.state_dict()["counters"] if run.monitor else {}
    return {
        "seconds": run.seconds,
        "window": (run.window_steps, run.window_start, run.window_sums.tolist()),
        "counters": job.of_all_stages(
            {gate: {key: value.tolist() for key, value in kept.items()} for gate, kept in counters.items()}
        ),
    }


def put_counts(run: Run, saved: dict[str, Any], job: Job) -> None:
    run.seconds = saved["seconds"]
    run.window_steps, run.window_start, sums = saved["window"]
    run.window_sums = torch.tensor(sums, dtype=torch.float64, device=job.device)
    if run.monitor is None:
        return
    state = run.monitor.state_dict()
    for gate, counts in state["counters"].items():
        for key, value in counts.items():
            value.copy_(torch.tensor(saved["counters"][gate][key], dtype=value.dtype))
    run.monitor.load_state_dict(state)
    if job.data_rank > 0:
        for counters in run.monitor.counters.values():
            counters.reset()
