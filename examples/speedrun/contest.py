"""Runs that train for equal seconds, in slices by turns; the state of each lies in its folder after every slice.

speedrun.py asks next_run() whose turn it is and trains it for a slice. A Sweep has the trials that come first: short
runs of each model at several learning rates, of which the best is taken.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from models import GPT, Size
from sources import Corpus
from torch import Tensor

WARM_UP, COOL_DOWN = 0.02, 0.5  # shares of a run's seconds: the rate rises, and falls to nothing
LEAST_CHECKS, MOST_CHECKS, SECONDS_OF_CHECK = 4, 16, 15  # validations of a run: one in so many seconds


@dataclass
class Record:
    """Progress of a run.

    curve: (seconds of training, validation loss in bits per byte). busiest: the busiest expert's load over the mean
    load, at each of these.
    """

    name: str  # of the model, a key of models.MLPS
    seed: int
    factor: float  # of all learning rates
    budget: float  # seconds of training that the run has
    seconds: float = 0.0  # that it has used
    steps: int = 0
    slices: int = 0
    diverged: bool = False
    curve: list[tuple[float, float]] = field(default_factory=list)
    busiest: list[float] = field(default_factory=list)

    @property
    def checks_due(self) -> int:
        """Validations that there should be by now."""
        number = max(LEAST_CHECKS, min(MOST_CHECKS, int(self.budget / SECONDS_OF_CHECK)))
        return int(number * min(1.0, self.seconds / self.budget))

    @property
    def is_done(self) -> bool:
        return self.diverged or self.seconds >= self.budget

    @property
    def bits(self) -> float:
        """The last validation loss; infinite before the first one and where the learning rate was too high."""
        return self.curve[-1][1] if self.curve and not self.diverged else math.inf


class Run:
    """One model in training: its record is always here, its weights only during a slice."""

    def __init__(
        self,
        folder: Path,
        size: Size,
        device: torch.device,
        name: str,
        seed: int,
        factor: float,
        budget: float,
    ) -> None:
        self.size, self.device = size, device
        self.loss, self.busiest = math.inf, 1.0  # of the last step
        self.folder = folder / f"{name}-seed{seed}-x{factor:g}-{budget:g}s"
        self.record = Record(name, seed, factor, budget)
        if (saved := self.folder / "record.json").exists():
            self.record = Record(**json.loads(saved.read_text()))

    def build(self) -> tuple[GPT, list[torch.optim.Optimizer]]:
        """Model and optimizers, as the last slice left them."""
        torch.manual_seed(self.record.seed)
        model = GPT(self.record.name, self.size).to(self.device)
        optimizers = model.optimizers(self.record.factor)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["full_lr"] = group["lr"]
        if self.record.steps:
            state = torch.load(self._state_file, map_location=self.device, weights_only=True)
            model.load_state_dict(state["model"])
            for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
        return model, optimizers

    @property
    def _state_file(self) -> Path:
        # Named by the step, which the record names: a kill between the two files leaves a pair that fits.
        return self.folder / f"state-{self.record.steps}.pt"

    def train(
        self, corpus: Corpus, seconds: float, on_step: Callable[[float], None] = lambda _: None
    ) -> None:
        """A slice: train for so many seconds, then save. Validation and saving do not count."""
        record, before = self.record, self._state_file
        model, optimizers = self.build()
        end = min(record.seconds + seconds, record.budget)
        while record.seconds < end:
            took = self.step(model, optimizers, corpus)
            record.seconds += took
            record.steps += 1
            on_step(took)
            if len(record.curve) < record.checks_due:
                bits = self.validate(model, corpus)
                record.diverged = not math.isfinite(bits)
                if not record.diverged:
                    record.curve.append((record.seconds, bits))
                    record.busiest.append(self.busiest)
            record.diverged |= not math.isfinite(self.loss)
            if record.diverged:
                break
        record.slices += 1
        self._save(model, optimizers)
        if before != self._state_file:
            before.unlink(missing_ok=True)

    def step(self, model: GPT, optimizers: list[torch.optim.Optimizer], corpus: Corpus) -> float:
        """One step -> the seconds that it took, with the making of its batch."""
        start = time.perf_counter()
        record = self.record
        share = record.seconds / record.budget
        rate = min(1.0, (share + 1e-3) / WARM_UP, (1 - share) / COOL_DOWN)
        batch = corpus.batch(record.steps + 1, self.size.windows, self.size.context, record.seed, "epochs")
        inputs, targets = (part.to(self.device) for part in batch)
        loss = cross_entropy(self.logits(model, inputs), targets)
        loss.backward()
        self.busiest = model.busiest()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["full_lr"] * rate
            optimizer.step()
            optimizer.zero_grad()
        model.after_step()
        self.loss = loss.item()  # waits for the device
        return time.perf_counter() - start

    def logits(self, model: GPT, tokens: Tensor) -> Tensor:
        """In bfloat16 on a GPU."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits: Tensor = model(tokens)
        return logits

    def reader(self) -> Callable[[Tensor], Tensor]:
        """tokens -> logits of the model as it is saved."""
        model = self.build()[0].eval()

        @torch.no_grad()
        def logits_of(tokens: Tensor) -> Tensor:
            return self.logits(model, tokens)

        return logits_of

    @torch.no_grad()
    def validate(self, model: GPT, corpus: Corpus) -> float:
        """Bits per byte of the validation text."""
        model.eval()
        size = self.size
        batches = corpus.validation_batches(size.windows, size.context, 8 * size.windows)
        losses = [cross_entropy(self.logits(model, x.to(self.device)), y.to(self.device)) for x, y in batches]
        model.train()
        return torch.stack(losses).mean().item() / math.log(2)

    def _save(self, model: GPT, optimizers: list[torch.optim.Optimizer]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
        write(self._state_file, lambda file: torch.save(state, file))
        write(self.folder / "record.json", lambda file: file.write_text(json.dumps(asdict(self.record))))

    def forget_weights(self) -> None:
        """Delete the state of a run that is done and whose record is enough."""
        self._state_file.unlink(missing_ok=True)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def write(path: Path, fill: Callable[[Path], Any]) -> None:
    """Write a file whole or not at all."""
    part = path.with_suffix(".part")
    fill(part)
    os.replace(part, path)


def next_run(runs: Iterable[Run]) -> Run | None:
    """The run whose turn it is: the one with the fewest slices, of those that are not done."""
    return min(
        (run for run in runs if not run.record.is_done), key=lambda run: run.record.slices, default=None
    )


class Sweep:
    """The learning rate of each name: factors 1/2, 1 and 2, and further ones while the best is at an end."""

    def __init__(self, new_run: Callable[[str, float], Run], names: Iterable[str], widest: int = 3) -> None:
        self.new_run, self.names, self.widest = new_run, list(names), widest
        self.runs = {name: {e: new_run(name, 2.0**e) for e in (-1, 0, 1)} for name in self.names}
        for name in self.names:
            self.widen(name)

    def widen(self, name: str) -> None:
        """Add a factor beside the best one, if that is at an end and all are done."""
        runs = self.runs[name]
        while all(run.record.is_done for run in runs.values()):
            best = min(runs, key=lambda e: runs[e].record.bits)
            beyond = best + (1 if best == max(runs) else -1 if best == min(runs) else 0)
            if beyond in runs or abs(beyond) > self.widest:
                return
            runs[beyond] = self.new_run(name, 2.0**beyond)

    def next_run(self) -> Run | None:
        """The trial whose turn it is; None when every factor is found."""
        for name in self.names:
            self.widen(name)
        return next_run(run for runs in self.runs.values() for run in runs.values())

    def best(self, name: str) -> float:
        """The factor with the least validation loss."""
        return min(self.runs[name].values(), key=lambda run: run.record.bits).record.factor
