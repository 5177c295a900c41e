"""What balance.watch() and balance.log_choices() cost a training step of `make train`, in turn with plain steps."""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks import common
from fmoe_ext import balance

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "lm"))
import data
import options
from model import ModelConfig
from runs import Run

KINDS = ("plain", "watched", "watched and logged")


def make_run() -> tuple[Run, torch.Tensor, torch.Tensor]:
    """The example's model in float32 with its defaults, not watched, and a batch."""
    settings = options.parse([])
    run = Run("moe", ModelConfig(), settings, torch.device("cpu"), torch.float32)
    run.monitor.remove()
    return run, *data.load_corpus(seq_len=settings.seq_len).batch(1, settings.batch_size, settings.seq_len, 0)


def steps_of(run: Run, inputs: torch.Tensor, targets: torch.Tensor, stack: ExitStack) -> dict[str, Callable]:
    """{kind: a training step with that telemetry}; the log has every choice and the ids of the tokens."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())

    def plain() -> None:
        run.train_step(100, inputs, targets)

    def watched() -> None:
        monitor = balance.watch(run.model)
        plain()
        monitor.remove()

    def logged() -> None:
        with balance.log_choices(run.model, Path(folder, "log")) as log:
            watched()
            log.end_step(100, inputs)

    return dict(zip(KINDS, (plain, watched, logged), strict=True))


def seconds(step: Callable) -> tuple[float, float]:
    """(processor time, time by the clock) of the second of two steps."""
    step()
    began = time.process_time(), time.perf_counter()
    step()
    return time.process_time() - began[0], time.perf_counter() - began[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    with ExitStack() as stack:
        steps = steps_of(*make_run(), stack)
        times = {kind: [] for kind in KINDS}
        for _ in range(rounds):
            for kind, step in steps.items():
                times[kind].append(seconds(step))
    print(common.machine()["cpu"], common.commit(), f"{rounds} rounds, one thread")
    for number, name in enumerate(("processor time", "clock")):
        median = {kind: statistics.median(pair[number] for pair in times[kind]) for kind in KINDS}
        for kind in KINDS:
            more = 100 * (median[kind] / median["plain"] - 1)
            print(f"{name}: {kind} {1e3 * median[kind]:.2f} ms ({more:+.2f} %)")


if __name__ == "__main__":
    main()
