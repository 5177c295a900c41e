"""Train a Transformer language model with data parallelism across pipelines: 2 replicas x 2 stages on 4 processes.

    python examples/pipeline_lm/train.py                                      4 processes on this machine (gloo)
    python examples/pipeline_lm/train.py --moe 4 --schedule zero_bubble_v     experts in the MLPs, another schedule
    python examples/pipeline_lm/train.py --data wikitext-2                    the folder with wiki.*.tokens
    torchrun --nproc-per-node 4 examples/pipeline_lm/train.py --device cuda   one process for each GPU (NCCL)

The log lines are those of PyTorch's former tutorial. Pictures of the loss and of one step's schedule are in --out.
"""

import argparse
import copy
import math
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from model import ModelConfig, make_model
from text import batchify, get_batch, load_text, num_batches
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

from fmoe_ext.pipeline import SCHEDULES, Pipeline, draw, split

TRACED_STEPS = 20
STAGES_OF_A_RANK = {"interleaved": 2, "zero_bubble_v": 2, "dualpipe_v": 2}


POSITIVE = (
    "ranks", "pp", "chunks", "d_model", "d_hidden", "num_layers", "num_heads",
    "epochs", "batch_size", "bptt", "lr", "log_interval",
)  # fmt: skip
NOT_NEGATIVE = ("vocabulary", "megabytes", "moe", "batches", "dropout", "seed")


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


def build_parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--data", help="folder of WikiText's files, a text file or folder; none: Python's standard library")
    add("--vocabulary", type=int, default=4096, help="most words; 0: all of the training text")
    add(
        "--megabytes",
        type=float,
        default=1,
        help="read so much training text; 0: all. WikiText is always read whole",
    )
    add("--ranks", type=int, default=4, help="processes to start here, unless torchrun starts them")
    add("--pp", type=int, default=2, help="processes that a model is cut over")
    add("--schedule", choices=list(SCHEDULES), default="1f1b")
    add("--by", choices=("time", "memory"), default="time", help="what stages have equally much of")
    add("--chunks", type=int, default=4, help="microbatches of a batch")
    add("--moe", type=int, default=0, metavar="EXPERTS", help="experts in each MLP; 0: dense")
    add("--d-model", type=int, default=128)
    add("--d-hidden", type=int, default=256)
    add("--num-layers", type=int, default=8)
    add("--num-heads", type=int, default=4)
    add("--dropout", type=float, default=0.1)
    add("--epochs", type=int, default=3)
    add("--batches", type=int, default=50, help="of an epoch; 0: the whole text")
    add("--batch-size", type=int, default=20, help="rows of each replica")
    add("--bptt", type=int, default=35, help="words in a row")
    add("--optimizer", choices=("adamw", "sgd"), default="adamw")
    add(
        "--lr",
        type=float,
        default=1e-3,
        help="the tutorial's 5.0 with sgd does not converge with a causal mask",
    )
    add("--log-interval", type=int, default=10)
    add("--checkpoint", action="store_true", help="compute activations again in backward")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--seed", type=int, default=0)
    add("--out", default="out/pipeline_lm", help="folder of the pictures")
    return parser


def parse(arguments=None):
    """The options; what cannot be ends here, before any process starts."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    for name in (*POSITIVE, *NOT_NEGATIVE):
        value, flag = getattr(options, name), "--" + name.replace("_", "-")
        if not (value > 0 or (value == 0 and name in NOT_NEGATIVE)):
            parser.error(
                f"{flag} must be {'at least' if name in NOT_NEGATIVE else 'more than'} 0, but is {value}"
            )
    if options.ranks % options.pp and not dist.is_torchelastic_launched():
        parser.error(f"--ranks {options.ranks} is not a multiple of --pp {options.pp}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no CUDA device here")
    return options


class Trainer:
    """One process: its replica's part of the text and its stages of the model."""

    def __init__(self, options, text):
        self.options, self.text = options, text
        self.rank = dist.get_rank()
        self.device = options.device
        mesh = init_device_mesh(
            options.device, (options.pp, dist.get_world_size() // options.pp), mesh_dim_names=("pp", "dp")
        )
        self.replica, self.num_replicas = mesh.get_local_rank("dp"), mesh.size(1)
        self.pipeline = self.make_pipeline(mesh)
        make = torch.optim.AdamW if options.optimizer == "adamw" else torch.optim.SGD
        self.optimizer = make(self.pipeline.parameters(), lr=options.lr)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.95)
        self.train_source = self.part_of(text.train)
        self.num_trained = 0  # batches so far
        self.curve = []  # (batches so far, training loss)
        self.valid_curve = []
        self.traces = []  # the spans of the last steps

    def make_pipeline(self, mesh):
        options = self.options
        config = ModelConfig(
            len(self.text.words),
            options.d_model,
            options.d_hidden,
            options.num_layers,
            options.num_heads,
            options.dropout,
            options.moe,
        )
        torch.manual_seed(options.seed)
        model = make_model(config).to(self.device)
        if self.rank == 0:
            print(f"{self.text.source}: {len(self.text.words):,} different words", flush=True)
            print(f"Total parameters in model: {sum(p.numel() for p in model.parameters()):,}", flush=True)
        rows = -(-options.batch_size // options.chunks)
        sample = torch.zeros(rows, options.bptt, dtype=torch.int64, device=self.device)
        stages = split(model, options.pp * STAGES_OF_A_RANK.get(options.schedule, 1), sample, by=options.by)
        if self.rank == 0:
            print(f"layers of the stages: {[len(stage.layers) for stage in stages]}", flush=True)
        torch.manual_seed(options.seed + 1 + self.rank)  # dropout differs between ranks
        return Pipeline(
            stages,
            schedule=options.schedule,
            chunks=options.chunks,
            groups=mesh,
            balance_weight=0.01 / options.num_layers if options.moe else 0.0,
            checkpoint=options.checkpoint,
            device=self.device,
        )

    def part_of(self, words):
        """The rows of this replica."""
        return batchify(words, self.options.batch_size * self.num_replicas).tensor_split(self.num_replicas)[
            self.replica
        ]

    def say(self, line):
        """Print a line on one rank of each replica, the last of its pipeline; all ranks know the loss."""
        if self.rank // self.num_replicas == self.options.pp - 1:
            tqdm.write(f"[RANK {self.rank}]: {line}", file=sys.stdout)
            sys.stdout.flush()

    def epoch(self, number):
        options = self.options
        total = num_batches(self.train_source, options.bptt)
        total = min(total, options.batches) if options.batches else total
        losses, begin = [], time.perf_counter()
        for i in tqdm(range(total), f"epoch {number}", disable=self.rank > 0, leave=False, mininterval=1):
            self.optimizer.zero_grad()
            x, y = get_batch(self.train_source, i, options.bptt)
            is_traced = number == options.epochs and i >= total - TRACED_STEPS
            losses.append(self.pipeline.train_step(x, y, trace=is_traced).item())
            if is_traced:
                self.traces.append(self.pipeline.spans())
            self.pipeline.clip_grad_norm_(0.5)
            self.optimizer.step()
            self.num_trained += 1
            if len(losses) == options.log_interval:
                self.log(number, i + 1, total, losses, time.perf_counter() - begin)
                losses, begin = [], time.perf_counter()

    def log(self, epoch, batch, total, losses, seconds):
        loss = sum(losses) / len(losses)
        self.curve.append((self.num_trained, loss))
        self.say(
            f"| epoch {epoch:3d} | {batch:5d}/{total:5d} batches | lr {self.scheduler.get_last_lr()[0]:02.2g} | "
            f"ms/batch {1e3 * seconds / len(losses):5.2f} | loss {loss:5.2f} | ppl {math.exp(loss):8.2f}"
        )

    def evaluate(self, words):
        """The mean loss of a word, over all windows of equal size."""
        source = self.part_of(words)
        total = num_batches(source, self.options.bptt)
        total = min(total, self.options.batches) if self.options.batches else total
        losses = [self.pipeline.evaluate(*get_batch(source, i, self.options.bptt)) for i in range(total)]
        return torch.stack(losses).mean().item()

    def draw(self):
        """The losses, and of the traced steps the fastest: other load on the machine draws bubbles too."""
        folder = Path(self.options.out)
        draw_curve(self.curve, self.valid_curve, folder / "loss.png")
        fastest = min(self.traces, key=lambda spans: max(span.end for span in spans))
        draw(fastest, folder / "trace.png", f"{self.options.schedule}, one step:")
        print(f"pictures: {folder}/loss.png, {folder}/trace.png", flush=True)

    def run(self):
        best, best_loss = None, math.inf
        for number in range(1, self.options.epochs + 1):
            begin = time.perf_counter()
            self.epoch(number)
            loss = self.evaluate(self.text.valid)
            self.valid_curve.append((self.num_trained, loss))
            self.say("-" * 89)
            self.say(
                f"| end of epoch {number:3d} | time: {time.perf_counter() - begin:5.2f}s | valid loss {loss:5.2f} | "
                f"valid ppl {math.exp(loss):8.2f}"
            )
            self.say("-" * 89)
            if best is None or loss < best_loss:  # a first loss may be NaN
                best, best_loss = copy.deepcopy(self.pipeline.module.state_dict()), loss
            self.scheduler.step()
        self.pipeline.module.load_state_dict(best)
        loss = self.evaluate(self.text.test)
        self.say("=" * 89)
        self.say(f"| End of training | test loss {loss:5.2f} | test ppl {math.exp(loss):8.2f}")
        self.say("=" * 89)
        if self.rank == 0:
            self.draw()


def draw_curve(train, valid, path):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for points, label, style in ((train, "training", "-"), (valid, "validation", "o-")):
        axes.plot([x for x, _ in points], [y for _, y in points], style, label=label)
    axes.set_xlabel("batches")
    axes.set_ylabel("nats a word")
    axes.legend()
    figure.savefig(path, dpi=120)


def run_process(rank, options, text, store):
    """One of the processes that main() starts."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
    start(options, init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    Trainer(options, text).run()
    dist.destroy_process_group()


def start(options, **kwargs):
    dist.init_process_group("gloo" if options.device == "cpu" else "nccl", **kwargs)
    if options.device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())


def main():
    options = parse()
    Path(options.out).mkdir(parents=True, exist_ok=True)
    text = load_text(options.data, options.vocabulary or None, options.megabytes)
    if dist.is_torchelastic_launched():
        start(options)
        Trainer(options, text).run()
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options, text, str(Path(folder, "store")))
        torch.multiprocessing.spawn(run_process, arguments, nprocs=options.ranks)


if __name__ == "__main__":
    main()
