"""Trainings of one model in several layouts, in the dtypes that people use: how far apart do they end?

    python -m benchmarks.bench_drift                 1,000 steps in float32 and bfloat16, about 40 minutes on two cores
    python -m benchmarks.bench_drift --steps 50 --dtypes float32 --out out/drift/drift.json

examples/lm/train.py trains each layout on the same batches. The yardsticks are another seed, and torch's own
DistributedDataParallel on the dense model: on two ranks against one process. A distance is that of all parameters
after the last step, |p - q| / |q|; q are those of one process.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from benchmarks import common

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "lm"
MODEL = """--d-model 64 --num-layers 3 --num-heads 4 --moe-every 1 --num-experts 8 --d-hidden 64 --batch-size 16
    --seq-len 64 --device cpu --val-windows 64 --sample-bytes 0 --log-every 1"""
LAYOUTS = {  # name: (ranks, options)
    "one process": (1, ""),
    "another seed": (1, "--seed 1"),
    "4 microbatches accumulated": (1, "--accumulate 4"),
    "ep 2": (2, "--expert-parallel 2"),
    "ep 4": (4, "--expert-parallel 4"),
    "pp 2, 4 microbatches": (2, "--pp 2 --chunks 4"),
    "FSDP2 on 2": (2, "--expert-parallel 1 --data-parallel fsdp2"),
}
DENSE = {"dense, one process": 1, "dense, torch's DDP on 2": 2}
REFERENCE = {name: "dense, one process" if name in DENSE else "one process" for name in (*LAYOUTS, *DENSE)}


def launcher(ranks: int, log: Path) -> list[str]:
    if ranks == 1:
        return [sys.executable]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, *torchrun, "--log-dir", str(log)]


def train(name: str, dtype: str, steps: int, folder: Path):
    """(losses of all steps, {parameter: tensor}) of one training."""
    if name in DENSE:
        command = [
            *launcher(DENSE[name], folder / "log"),
            "-m",
            "benchmarks.bench_drift",
            "--dense-into",
            str(folder),
        ]
    else:
        ranks, options = LAYOUTS[name]
        command = [
            *launcher(ranks, folder / "log"),
            str(EXAMPLE / "train.py"),
            *MODEL.split(),
            *options.split(),
        ]
        command += ["--out", str(folder), "--val-every", str(steps), "--save-every", str(steps)]
    subprocess.run([*command, "--dtype", dtype, "--steps", str(steps)], check=True, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record], parameters(folder)


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    if (folder / "dense.safetensors").exists():
        return load_file(folder / "dense.safetensors")
    merged = folder / "merged.safetensors"
    command = [
        sys.executable,
        "-m",
        "fmoe_ext.checkpoint",
        "merge",
        str(folder / "checkpoints"),
        "-o",
        str(merged),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return load_file(merged)


def train_dense(folder: Path, dtype: str, steps: int) -> None:
    """One rank, or the only process, of the dense model under torch's DistributedDataParallel."""
    sys.path.insert(0, str(EXAMPLE))
    from data import load_corpus
    from model import LanguageModel, ModelConfig

    distributed = dist.is_torchelastic_launched()
    if distributed:
        dist.init_process_group("gloo")
    rank, size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    torch.manual_seed(0)
    sizes = {"d_model": 64, "num_layers": 3, "num_heads": 4, "num_experts": 8, "d_hidden": 64, "top_k": 2}
    module = LanguageModel(ModelConfig(**sizes, gate="softmax", dense=True))
    model = torch.nn.parallel.DistributedDataParallel(module) if distributed else module
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, betas=(0.9, 0.95))
    corpus, losses = load_corpus(seq_len=64), []
    for step in range(1, steps + 1):
        inputs, targets = (t.chunk(size)[rank] for t in corpus.batch(step, 16, 64, seed=0))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            logits = model(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        mean = loss.detach() / size
        if distributed:
            dist.all_reduce(mean)
        losses.append(mean.item())
    if rank == 0:
        save_file(module.state_dict(), folder / "dense.safetensors")
        (folder / "metrics.jsonl").write_text("".join(json.dumps({"loss": loss}) + "\n" for loss in losses))
    if distributed:
        dist.destroy_process_group()


def distance(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == reference.keys(), sorted(ours.keys() ^ reference.keys())
    off = sum((ours[n].double() - reference[n].double()).square().sum().item() for n in reference)
    return (off / sum(t.double().square().sum().item() for t in reference.values())) ** 0.5


def compare(runs) -> list[dict]:
    """Rows: each training beside its reference."""
    rows = []
    for (name, dtype), (losses, weights) in runs.items():
        reference, reference_weights = runs[REFERENCE[name], dtype]
        last = max(1, len(losses) // 20)
        row = {"layout": name, "dtype": dtype, "loss": sum(losses[-last:]) / last}
        row["loss_off"] = row["loss"] - sum(reference[-last:]) / last
        row["largest_step"] = max(abs(a - b) for a, b in zip(losses, reference, strict=True))
        row["distance"] = distance(weights, reference_weights)
        rows.append(row | {"losses": losses})
    return rows


def report(rows: list[dict]) -> str:
    header = [
        "dtype",
        "layout",
        "mean loss of the last 5 % of steps",
        "difference",
        "largest of one step",
        "distance of parameters",
    ]
    lines = [
        [
            row["dtype"],
            row["layout"],
            f"{row['loss']:.4f}",
            f"{row['loss_off']:+.1e}",
            f"{row['largest_step']:.1e}",
            f"{row['distance']:.1e}",
        ]
        for row in rows
        if row["layout"] != REFERENCE[row["layout"]]
    ]
    return common.table(header, lines)


def draw(rows: list[dict], path: Path) -> None:
    from matplotlib.figure import Figure

    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    figure = Figure(figsize=(5 * len(dtypes), 3.4), layout="constrained")
    for axes, dtype in zip(
        figure.subplots(1, len(dtypes), squeeze=False, sharey=True)[0], dtypes, strict=True
    ):
        of_dtype = {row["layout"]: row for row in rows if row["dtype"] == dtype}
        for name, row in of_dtype.items():
            reference = of_dtype[REFERENCE[name]]["losses"]
            off = [max(abs(a - b), 1e-8) for a, b in zip(row["losses"], reference, strict=True)]
            if name != REFERENCE[name]:
                axes.semilogy(range(1, len(off) + 1), off, label=name, linewidth=0.7)
        axes.set(title=dtype, xlabel="step")
    figure.axes[0].set_ylabel("loss: difference from one process")
    figure.axes[-1].legend(fontsize=7, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    parser.add_argument(
        "--layouts",
        default=",".join(LAYOUTS),
        help="names of LAYOUTS; one process and the dense ones always run",
    )
    parser.add_argument("--out", type=Path, default=common.RESULTS / "drift.json")
    parser.add_argument("--picture", type=Path, help="PNG of the differences over the steps")
    parser.add_argument("--dense-into", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.dense_into:
        train_dense(args.dense_into, args.dtype, args.steps)
        return
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        for dtype in args.dtypes.split(","):
            layouts = [
                n for n in LAYOUTS if n in args.layouts or n == "one process"
            ]  # what others are off from
            for number, name in enumerate(layouts + list(DENSE)):
                place = Path(folder, f"{dtype}-{number}")
                place.mkdir()
                runs[name, dtype] = train(name, dtype, args.steps, place)
                print(f"{dtype}, {name}: loss {runs[name, dtype][0][-1]:.4f}", flush=True)
    rows = compare(runs)
    text = report(rows)
    print(text)
    command = " ".join(["python -m benchmarks.bench_drift", *sys.argv[1:]])
    common.write(args.out, command, [{k: v for k, v in row.items() if k != "losses"} for row in rows], text)
    if args.picture:
        draw(rows, args.picture)


if __name__ == "__main__":
    main()
