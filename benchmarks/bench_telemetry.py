"""Cost of balance.watch() and balance.log_choices() in a training step of `make train`.

python -m benchmarks.bench_telemetry [--rounds 40]

The whole step wanders by more than they cost. Timed are the step, and, in turn with and without telemetry, what it adds
to: the forwards of the gates alone, and end_step().
"""

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
from fmoe_ext.gates import BaseGate

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "lm"))
import data
import options
from job import Job
from runs import Run
from trainer import build_runs

KINDS = ("plain", "watched", "logged", "both")


def make_run() -> tuple[Run, torch.Tensor, torch.Tensor]:
    """The example's model in float32 with its defaults, not watched, and a batch."""
    job = Job(torch.device("cpu"))
    settings, _ = options.parse([], job)
    (run,) = build_runs(settings, job, torch.float32)
    run.monitor.remove()
    return run, *data.load_corpus(seq_len=settings.seq_len).batch(1, settings.batch_size, settings.seq_len, 0)


def gates_of(run: Run, tokens: torch.Tensor) -> Callable[[], None]:
    """The forwards of all gates for as many tokens as a step has."""
    gates = [module for module in run.model.module.modules() if isinstance(module, BaseGate)]
    x = torch.randn(tokens.numel(), run.model.module.config.d_model)

    def forwards() -> None:
        for gate in gates:
            gate(x)

    return forwards


def processor_ms(function: Callable[[], None], rounds: int) -> float:
    """Median over rounds."""
    times = []
    for _ in range(rounds):
        began = time.process_time()
        function()
        times.append(time.process_time() - began)
    return 1e3 * statistics.median(times)


def begin(kind: str, model: torch.nn.Module, path: Path, stack: ExitStack) -> Callable[..., None]:
    """Watches or logs a model until stack ends -> what the training loop calls after a step."""
    if kind in ("watched", "both"):
        stack.callback(balance.watch(model).remove)
    if kind in ("logged", "both"):
        return stack.enter_context(balance.log_choices(model, path)).end_step
    return lambda *_: None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    run, inputs, targets = make_run()
    forwards = gates_of(run, inputs)
    optimizer = torch.optim.AdamW(run.model.param_groups(0.1), fused=True)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(5):
            for kind, measured in times.items():
                with ExitStack() as this:
                    end_step = begin(kind, run.model.module, Path(folder, "log"), this)
                    measured.append(processor_ms(lambda end=end_step: (forwards(), end(1, inputs)), rounds))
        step = processor_ms(lambda: run.train_step(100, inputs, targets, optimizer), 7)
    print(
        common.machine()["cpu"], common.commit(), f"one thread, a step takes {step:.1f} ms of processor time"
    )
    gates = {kind: statistics.median(values) for kind, values in times.items()}
    for kind in KINDS[1:]:
        more = gates[kind] - gates["plain"]
        print(f"{kind}: {more:.3f} ms more, {100 * more / step:.2f} % of a step")


if __name__ == "__main__":
    main()
