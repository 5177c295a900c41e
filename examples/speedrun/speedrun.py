"""Experts against a dense model at equal seconds of training: `python examples/speedrun/speedrun.py --help`.

Four models of the same active parameters train in turns, slice by slice, each with its own learning rate, for three
seeds. Stop it whenever you like; the same command goes on.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import results
import torch
from contest import Run, Sweep, next_run
from model import generate  # of examples/lm, whose folder sources.py adds
from models import DESCRIPTIONS, GPT, MLPS, SIZES, Size
from sources import Corpus, DataError, as_tensor, installed_packages, load_text
from tqdm import tqdm

from fmoe_ext import cpu

PROMPT = b"def "


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, help="default: cpu, or gpu with --device cuda")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--models", nargs="+", choices=MLPS, default=list(MLPS), help="these and the dense one (all)"
    )
    parser.add_argument("--out", type=Path, help="default: out/speedrun/<size>")
    parser.add_argument("--seconds", type=float, help="stop after so many seconds; the same command goes on")
    parser.add_argument("--train-seconds", type=float, help="seconds of training of each run (of the size)")
    parser.add_argument(
        "--trial-seconds", type=float, help="seconds of each learning rate's trial (of the size)"
    )
    parser.add_argument("--slice", type=float, default=20.0, help="seconds of training of a slice (20)")
    parser.add_argument("--seeds", type=int, default=3, help="how many (3)")
    parser.add_argument(
        "--factor", type=float, help="this factor of the learning rates for all, without trials"
    )
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="one step of each model with one window, on any device; no files",
    )
    options = parser.parse_args(argv)
    options.models = [name for name in MLPS if name == "dense" or name in options.models]
    options.size = options.size or ("gpu" if options.device == "cuda" else "cpu")
    options.out = options.out or Path("out/speedrun") / options.size
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "--device cuda: PyTorch finds no GPU here; --size gpu --dry-run tries the models on the CPU"
        )
    for name in ("seconds", "train_seconds", "trial_seconds", "slice", "seeds", "factor", "threads"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, but is {value}")
    return options


def size_of(options: argparse.Namespace) -> Size:
    size = SIZES[options.size]
    given = {"seconds": options.train_seconds, "trial_seconds": options.trial_seconds}
    return replace(size, **{name: value for name, value in given.items() if value is not None})


def machine(device: torch.device) -> dict[str, Any]:
    """Device and versions, which results.json notes beside the figures."""
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    model = ""
    if (info := Path("/proc/cpuinfo")).exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else ""
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else model or platform.processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": git.stdout.strip(),
    }


class Speedrun:
    """Text, runs and files of one folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.size = options, size_of(options)
        self.device = torch.device(options.device)
        self.out: Path = options.out
        self.settings = {"size": asdict(self.size), "seeds": options.seeds, "factor": options.factor}
        self.settings["models"] = self.names = options.models
        self._check_settings()
        self.corpus = self._text()
        self.counts = results.parameters(self.size)
        self.sweep = Sweep(
            lambda name, factor: self._run(name, 0, factor, self.size.trial_seconds), self.names
        )
        self.runs: list[Run] = []
        self.drawn = 0.0

    def _check_settings(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        file = self.out / "settings.json"
        if file.exists() and json.loads(file.read_text()) != self.settings:
            sys.exit(f"error: {self.out} has runs with other settings (settings.json): pass another --out")
        file.write_text(json.dumps(self.settings))

    def _text(self) -> Corpus:
        """Of the first start, for all later ones: packages may change."""
        file = self.out / "text.pt"
        if not file.exists():
            corpus = load_text(installed_packages(), self.size.most_bytes)
            torch.save({"train": corpus.train, "valid": corpus.valid, "source": corpus.source}, file)
        return Corpus(**torch.load(file, weights_only=True))

    def _run(self, name: str, seed: int, factor: float, seconds: float) -> Run:
        return Run(self.out / "runs", self.size, self.device, name, seed, factor, seconds)

    def next_run(self) -> Run | None:
        """A trial, then the runs of one seed after the other."""
        if self.options.factor is None and (trial := self.sweep.next_run()):
            return trial
        for seed in range(self.options.seeds):
            own = [run for run in self.runs if run.record.seed == seed]
            if not own:
                factors = {name: self.options.factor or self.sweep.best(name) for name in self.names}
                own = [self._run(name, seed, factors[name], self.size.seconds) for name in self.names]
                self.runs += own
            if run := next_run(own):
                return run
        return None

    def left(self) -> float:
        """Seconds of training that are left, as far as it is known which trials there will be."""
        trials = [] if self.options.factor else [r for of in self.sweep.runs.values() for r in of.values()]
        unfinished = [run.record for run in (*trials, *self.runs) if not run.record.is_done]
        left = sum(record.budget - record.seconds for record in unfinished)
        return left + (len(self.names) * self.options.seeds - len(self.runs)) * self.size.seconds

    def write(self) -> dict[str, dict[str, Any]]:
        records = [run.record for run in self.runs]
        trials = [run.record for of in self.sweep.runs.values() for run in of.values()]
        trials = [record for record in trials if record.steps]
        shown = records if any(record.curve for record in records) else trials
        results.draw(self.out / "picture.png", shown, self.corpus.source)
        return results.write_results(
            self.out / "results.json", self.settings, machine(self.device), trials, records
        )

    def sample(self) -> str:
        """A text of each model of the first seed."""
        texts = []
        for run in self.runs:
            if run.record.seed == 0:
                text = generate(run.reader(), PROMPT, 300, self.size.context, self.device)
                texts.append(f"--- {DESCRIPTIONS[run.record.name]}\n{text.decode(errors='replace')}")
        return "\n\n".join(texts) + "\n"

    def go(self) -> bool:
        """Train in turns until all is done or the time is over -> True if all is done."""
        start = time.monotonic()
        limit = self.options.seconds or float("inf")
        warm_up(self.size, self.device, self.names)
        bar_format = "{l_bar}{bar}| {n:.0f}/{total:.0f} s {postfix}"
        interval = 0.5 if sys.stderr.isatty() else 30  # few lines where the output goes to a file
        with tqdm(total=self.left(), bar_format=bar_format, mininterval=interval) as bar:
            while (run := self.next_run()) and time.monotonic() - start < limit:
                record, is_trial = run.record, run not in self.runs
                what = "trial" if is_trial else f"seed {record.seed}"
                bar.set_postfix_str(
                    f"{record.name}, {what}, rate x{record.factor:g}, {record.bits:.3f} bits/byte"
                )
                run.train(
                    self.corpus, self.options.slice, lambda took: bar.update(min(took, bar.total - bar.n))
                )
                if is_trial and record.is_done:
                    run.forget_weights()
                keep_memory(self.device)
                bar.total = bar.n + self.left()
                if time.monotonic() - self.drawn > 20:
                    self.write()
                    self.drawn = time.monotonic()
        return run is None


def first_steps(
    size: Size, device: torch.device, names: Iterable[str]
) -> Iterator[tuple[str, GPT, float, float]]:
    """One step of each model -> its name, itself, loss and seconds."""
    corpus = Corpus(*[as_tensor(b"def main():\n" * (2 * size.context)) for _ in range(2)], "a line")
    for name in names:
        run = Run(Path("none"), size, device, name, 0, 1.0, size.seconds)
        model, optimizers = run.build()
        seconds = run.step(model, optimizers, corpus)
        yield name, model, run.loss, seconds


def keep_memory(device: torch.device) -> None:
    """Keep freed memory from here on, and give back what has been kept: the heap of a dense model grows by its step."""
    if device.type == "cpu" and cpu.can_keep_memory():
        cpu.give_memory_back()
        cpu.keep_memory()


def warm_up(size: Size, device: torch.device, names: Iterable[str]) -> None:
    """Take the first step of a process, which is slower, outside of all runs."""
    for _ in first_steps(size, device, names):
        pass


def dry_run(size: Size, device: torch.device, names: Iterable[str]) -> None:
    """One step of each model with one window."""
    for name, model, loss, seconds in first_steps(replace(size, windows=1), device, names):
        total, active = (count / 1e6 for count in model.num_parameters())
        print(
            f"{DESCRIPTIONS[name]}: {total:.1f} M parameters, {active:.1f} M active, loss {loss:.3f}, {seconds:.1f} s"
        )


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.dry_run:
        dry_run(size_of(options), torch.device(options.device), options.models)
        return 0
    keep_memory(torch.device(options.device))
    try:
        speedrun = Speedrun(options)
    except DataError as error:
        sys.exit(f"error: {error}")
    corpus = speedrun.corpus
    print(f"{corpus.source}: {len(corpus.train):,} bytes, {len(corpus.valid):,} more for validation")
    try:
        is_done = speedrun.go()
    except KeyboardInterrupt:
        is_done = False
    print(results.table(speedrun.write(), speedrun.counts))
    if not is_done:
        print(f"stopped, {speedrun.left():.0f} s of training are left: the same command goes on")
        return 0
    (speedrun.out / "samples.txt").write_text(speedrun.sample())
    print(f"{speedrun.out}: picture.png, results.json, samples.txt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
