"""Checkpoints that are never half written, and the run directory's metrics file cut back to them."""

import json
import os

import torch


def write_atomically(path, write):
    """Calls write(temporary path) and puts the result in the place of `path` in one step."""
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def save(path, step, settings, runs):
    for run in runs:
        run.check_finite(step)
    state = {
        "step": step,
        "settings": settings,
        "runs": {run.name: run.state_dict() for run in runs},
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    write_atomically(path, lambda temporary: torch.save(state, temporary))


def load(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def restore(state, runs):
    """Puts the state of `load` into runs; returns the step that was done last."""
    for run in runs:
        run.load_state_dict(state["runs"][run.name])
    torch.set_rng_state(state["rng"])
    if torch.cuda.is_available() and state["cuda_rng"]:
        torch.cuda.set_rng_state_all(state["cuda_rng"])
    return state["step"]


def cut_metrics(path, step):
    """Drops what an interrupted run wrote after its last checkpoint: those steps are done again."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    write_atomically(path, lambda temporary: temporary.write_text("".join(kept)))
