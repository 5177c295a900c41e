"""Compare one process with several that share the experts: both train by train.py, and their loss curves are equal.

python examples/lm/train_ep.py                          one process against 4 on this machine
python examples/lm/train_ep.py --ranks 2 --steps 100    other options are those of train.py, for both
"""

import argparse
import subprocess
import sys
from pathlib import Path

import metrics

TRAIN = str(Path(__file__).with_name("train.py"))
# Small, in float64, a record of every step: what differs between the curves is rounding.
OPTIONS = """
    --d-model 64 --num-layers 2 --num-heads 4 --num-experts 8 --d-hidden 64 --batch-size 8 --seq-len 64 --steps 40
    --dtype float64 --overlap-degree 2 --log-every 1 --val-every 20 --val-windows 8 --sample-bytes 0 --device cpu
"""
TOLERANCE = {"float64": 1e-9, "float32": 1e-3}


def train(launcher: list[str], options: list[str], out: Path) -> list[metrics.Record]:
    """The records of one training."""
    command = [sys.executable, *launcher, TRAIN, *OPTIONS.split(), *options, "--out", str(out)]
    status = subprocess.run(command).returncode
    if status:
        raise SystemExit(f"{' '.join(command)} ended with status {status}")
    return metrics.read(out / "metrics.jsonl")


def compare(alone: list[metrics.Record], spread: list[metrics.Record], ranks: int, tolerance: float) -> None:
    print(f"{'step':>4}  {'1 process':>16}  {f'{ranks} processes':>16}  difference")
    largest = 0.0
    for a, b in zip(alone, spread, strict=True):
        difference = abs(a["loss"] - b["loss"])
        largest = max(largest, difference)
        if a["step"] == 1 or a["step"] % 5 == 0 or a is alone[-1]:
            print(f"{a['step']:4}  {a['loss']:16.12f}  {b['loss']:16.12f}  {difference:.1e}")
    if not largest <= tolerance:
        raise SystemExit(f"the curves differ by {largest:.1e}, more than {tolerance:g}")
    print(f"the loss curves are equal: the largest difference in {len(alone)} steps is {largest:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="processes that share the experts")
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="float64")
    parser.add_argument("--out", type=Path, default=Path("out/lm_ep"), help="both runs are written there")
    own, options = parser.parse_known_args()
    options += ["--dtype", own.dtype]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(own.ranks)]
    launcher += ["--log-dir", str(own.out / "torchrun")]
    alone = train([], options, own.out / "1_process")
    spread = train(launcher, options, own.out / f"{own.ranks}_processes")
    compare(alone, spread, own.ranks, TOLERANCE[own.dtype])


if __name__ == "__main__":
    main()
