"""The layer's speed at another commit and here, in turn in one run: did a change make it slower?

    make bench-compare REV=main~5                       all shapes of bench_layer, both dtypes
    python -m benchmarks.compare main~5 --shapes A,D --dtypes float32 --rounds 5

The commit is checked out and built in a temporary folder, which goes afterwards. Each side runs in a process of its
own with its own bench_layer, one at a time, and is measured in processor time, which other programs change little. A
ratio is the median of the rounds' ratios, above 1 where the work tree is faster; under 3 % it is noise.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

import fmoe_ext
from benchmarks import bench_layer, common, peers  # in a process that measures: those of the tree it measures

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """A folder with the files of that commit, while the context lasts."""
    git = ["git", "-C", str(ROOT)]
    with tempfile.TemporaryDirectory(prefix="fmoe_compare_") as temporary:
        folder = Path(temporary, "tree")
        added = subprocess.run(
            [*git, "worktree", "add", "--detach", str(folder), revision], capture_output=True, text=True
        )
        if added.returncode != 0:
            sys.exit(f"cannot check out {revision!r}: {added.stderr.strip().splitlines()[-1]}")
        try:
            yield folder
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(folder)], check=True)


def build(folder: Path) -> None:
    """The native modules of the tree, beside its sources."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    env = {"FMOE_CUDA": "0", **os.environ}
    if subprocess.run(command, cwd=folder, env=env, stdout=sys.stderr).returncode != 0:
        sys.exit(f"the commit does not build here: see above; its folder was {folder}")


class Side:
    """A process that measures the package of one tree, a turn at a time."""

    def __init__(self, root: Path, threads: int):
        env = {**os.environ, "PYTHONPATH": str(root)}
        command = [sys.executable, __file__, "--child", str(root), str(threads)]
        self.process = subprocess.Popen(
            command, env=env, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()

    def seconds(self, case: list) -> float:
        """Processor time of one step of [shape, dtype, backward]."""
        print(json.dumps(case), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"a process that measures ended with {self.process.wait()}: its error is above")
        return json.loads(line)


def child(root: str, threads: str) -> None:
    """Answers each case on stdin by seconds on stdout; the first answer for a case builds its tensors."""
    for module in (fmoe_ext, bench_layer):
        assert Path(module.__file__).is_relative_to(root), f"{module.__file__} is not of {root}"
    torch.set_num_threads(int(threads))
    steps = {}
    for line in sys.stdin:
        shape, dtype, backward = json.loads(line)
        if line not in steps:
            steps.clear()
            inputs = bench_layer.make_inputs(
                bench_layer.SHAPES[shape], getattr(torch, dtype), requires_grad=True
            )
            steps[line] = bench_layer.step_of(peers.implementations()["fmoe_ext"], inputs, backward)
        step = steps[line]
        step()
        start, repeats = time.process_time(), 0
        while repeats == 0 or time.process_time() - start < 0.05:
            step()
            repeats += 1
        print(json.dumps((time.process_time() - start) / repeats), flush=True)


def summarise(old: list[float], new: list[float]) -> list[str]:
    """Milliseconds of both, and how many times faster the new one is: median, least and greatest of the rounds."""
    ratios = [before / after for before, after in zip(old, new, strict=True)]
    milliseconds = [f"{statistics.median(times) * 1e3:.3f}" for times in (old, new)]
    return [*milliseconds, f"{statistics.median(ratios):.3f}", f"{min(ratios):.2f}-{max(ratios):.2f}"]


def compare(old: Path, new: Path, cases: list[list], rounds: int, threads: int) -> list[list[str]]:
    """One row a case: shape, dtype, pass, and what summarise() says."""
    rows = []
    with ExitStack() as stack:
        sides = [stack.enter_context(Side(root, threads)) for root in (old, new)]
        for case in cases:
            turns = [[side.seconds(case) for side in sides] for _ in range(rounds + 1)][1:]
            shape, dtype, backward = case
            rows.append(
                [
                    shape,
                    dtype,
                    "fwd+bwd" if backward else "fwd",
                    *summarise(*map(list, zip(*turns, strict=True))),
                ]
            )
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", help="the commit to compare with, as git names it")
    parser.add_argument(
        "--shapes", default=",".join(bench_layer.SHAPES), help="letters (default: %(default)s)"
    )
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    shapes, dtypes = args.shapes.split(","), args.dtypes.split(",")
    cases = [[shape, dtype, backward] for shape in shapes for dtype in dtypes for backward in (False, True)]
    with worktree(args.revision) as old:
        build(old)
        rows = compare(old, ROOT, cases, args.rounds, args.threads)
    print(f"{args.revision} against {common.commit()}, {common.machine()['cpu']}, {args.threads} thread(s)\n")
    print(common.table(["shape", "dtype", "pass", "old ms", "new ms", "old / new", "min-max"], rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        # so that the other commit's folder goes
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
        main()
