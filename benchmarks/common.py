"""Shared parts of the benchmarks: interleave() times steps in turn, write() leaves a JSON file and its table.

write() puts machine, commit and command beside the results; merged() keeps the rows of other cases in such a file.
"""

import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def machine() -> dict:
    """The facts about this machine that a figure needs to be read."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    return {
        "cpu": cpu,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def commit() -> str:
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=10"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return result.stdout.strip() or "unknown"


def interleave(steps: dict, rounds: int = 7, slow: float = 2.0) -> dict:
    """Seconds of each step, measured in turn, A B C A B C ..., so that drift of the machine meets all alike.

    steps: {name: callable}. Each turn begins with a run that is not timed, as in a training loop: memory that a step
    freed one turn ago may have gone back to a virtual machine's host meanwhile. A step that took longer than `slow`
    seconds is measured three times, without that run; one that took longer than five times that only once, its warm-up.
    """

    def timed(step, repeats):
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        return (time.perf_counter() - start) / repeats

    warm_up = {name: timed(step, 1) for name, step in steps.items()}
    seconds = {name: [warm_up[name]] if warm_up[name] > 5 * slow else [] for name in steps}
    for turn in range(rounds):
        for name, step in steps.items():
            if warm_up[name] > 5 * slow or (warm_up[name] > slow and turn >= 3):
                continue
            if warm_up[name] <= slow:
                step()
            seconds[name].append(timed(step, max(1, min(100, int(5e-3 / warm_up[name])))))
    return seconds


def summary(seconds: list) -> dict:
    return {
        "median": statistics.median(seconds),
        "min": min(seconds),
        "max": max(seconds),
        "runs": len(seconds),
    }


def table(header: list, rows: list) -> str:
    """A markdown table, columns padded so that it reads in a terminal as well."""
    cells = [list(map(str, row)) for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def merged(path: Path, rows: list, key: tuple) -> list:
    """rows, after those of other cases that the file of results has of this commit, GPU and torch.

    key: the names whose values tell cases apart. Other results in the file are left out, and that is printed.
    """
    if not path.exists():
        return rows
    content = json.loads(path.read_text())
    ours, theirs = (
        (facts["gpu"], facts["torch"], version.removesuffix("-dirty"))
        for facts, version in ((machine(), commit()), (content["machine"], content["commit"]))
    )
    if ours != theirs:
        print(f"{path} has results of {theirs}, these are of {ours}: they are not merged")
        return rows
    measured = {tuple(row[name] for name in key) for row in rows}
    return [
        row for row in content["results"]["rows"] if tuple(row[name] for name in key) not in measured
    ] + rows


def write(path: Path, command: str, results: list, text: str):
    """The results as JSON with machine, commit and command, and the table beside it as markdown."""
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = {"machine": machine(), "commit": commit(), "command": command, "date": time.strftime("%Y-%m-%d")}
    path.write_text(json.dumps({**meta, "results": results}, indent=1) + "\n")
    place = meta["machine"]["gpu"] or f"{meta['machine']['cpu']}, {meta['machine']['threads']} threads"
    facts = f"{place}, torch {torch.__version__}"
    path.with_suffix(".md").write_text(f"{facts}, commit {meta['commit']}, `{command}`\n\n{text}\n")
