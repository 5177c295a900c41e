"""Train an image classifier under Pipe, and the same model unsharded: the same losses, the same accuracy.

python examples/pipe_images/train.py                                    handwritten digits, two partitions
python examples/pipe_images/train.py --data cifar-10-batches-bin        CIFAR-10's binary files
python examples/pipe_images/train.py --devices cuda:0 cuda:1            a partition on each GPU
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from images import load_images
from torch import nn
from tqdm import tqdm

from fmoe_ext.compat.fairscale import Pipe, balance_by_size, balance_by_time


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


def build_parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--data", help="the folder with CIFAR-10's data_batch_*.bin; none: scikit-learn's digits")
    add("--devices", nargs="+", default=["cpu", "cpu"], help="one for each partition")
    add("--balance", choices=("time", "size"), default="time", help="what partitions have equally much of")
    add("--chunks", type=int, default=4, help="microbatches of a batch")
    add("--checkpoint", choices=("always", "except_last", "never"), default="except_last")
    add("--width", type=int, default=16, help="channels of the first convolution")
    add("--steps", type=int, default=100)
    add("--batch-size", type=int, default=50)
    add("--lr", type=float, default=1e-3)
    add(
        "--dtype",
        choices=("float64", "float32"),
        default="float64",
        help="float32: training amplifies rounding",
    )
    add("--seed", type=int, default=0)
    add("--out", default="out/pipe_images", help="folder of the picture")
    return parser


def parse(arguments=None):
    """The options; what cannot be ends here."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    for name in ("chunks", "width", "steps", "batch_size", "lr"):
        if not getattr(options, name) > 0:
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag} must be more than 0, but is {getattr(options, name)}")
    for device in options.devices:
        try:
            torch.empty(0, device=device)
        except (AssertionError, RuntimeError) as error:
            parser.error(f"--devices {device} cannot be used here: {str(error).splitlines()[0]}")
    return options


def make_model(width):
    """19 layers from images [B, 3, 32, 32] to logits [B, 10]."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(2 * width, 4 * width, 3, padding=1), nn.ReLU(),
        nn.Conv2d(4 * width, 4 * width, 3, padding=1), nn.ReLU(),
        nn.Conv2d(4 * width, 4 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * width, 16 * width), nn.ReLU(),
        nn.Linear(16 * width, 16 * width), nn.ReLU(), nn.Linear(16 * width, 10),
    )  # fmt: skip


def train(model, images, options, name, device, last_device):
    """The loss of every step and the accuracy on the test images; batches are the same for every model."""
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    generator = torch.Generator().manual_seed(options.seed)
    losses, begin = [], time.perf_counter()
    model.train()
    for _ in tqdm(range(options.steps), name, leave=False, mininterval=1):
        rows = torch.randint(len(images.train), (options.batch_size,), generator=generator)
        logits = model(images.train[rows].to(device))
        loss = F.cross_entropy(logits, images.train_classes[rows].to(last_device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    accuracy = test(model, images, device)
    seconds = time.perf_counter() - begin
    print(f"{name:9} | loss {losses[-1]:.4f} | test accuracy {accuracy:.2%} | {seconds:.1f} s", flush=True)
    return losses, accuracy


@torch.no_grad()
def test(model, images, device):
    model.eval()
    parts = zip(images.test.split(250), images.test_classes.split(250), strict=True)
    right = sum(int((model(x.to(device)).argmax(1).cpu() == classes).sum()) for x, classes in parts)
    return right / len(images.test)


def make_pipe(options, sample):
    torch.manual_seed(options.seed)
    model = make_model(options.width).to(sample.dtype)
    measure = balance_by_time if options.balance == "time" else balance_by_size
    balance = measure(len(options.devices), model, sample)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{len(model)} layers, {parameters:,} parameters, layers of the partitions: {balance}", flush=True)
    return Pipe(model, balance, devices=options.devices, chunks=options.chunks, checkpoint=options.checkpoint)


def draw(curves, path):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for (name, losses), style in zip(curves.items(), ("-", "--"), strict=True):
        axes.plot(losses, style, label=name)
    axes.set_xlabel("steps")
    axes.set_ylabel("training loss")
    axes.legend()
    figure.savefig(path, dpi=120)


def main():
    options = parse()
    Path(options.out).mkdir(parents=True, exist_ok=True)
    images = load_images(options.data, getattr(torch, options.dtype))
    print(f"{images.source}: {len(images.train):,} images to learn, {len(images.test):,} to test", flush=True)
    pipe = make_pipe(options, images.train[: max(1, options.batch_size // options.chunks)])
    torch.manual_seed(options.seed)
    whole = make_model(options.width).to(options.devices[0], images.train.dtype)
    piped, piped_accuracy = train(pipe, images, options, "Pipe", pipe.devices[0], pipe.devices[-1])
    plain, accuracy = train(whole, images, options, "unsharded", *[options.devices[0]] * 2)
    apart = max(abs(a - b) for a, b in zip(piped, plain, strict=True))
    print(
        f"largest difference of the losses: {apart:.1e}; of the accuracies: {piped_accuracy - accuracy:+.2%}"
    )
    draw({"Pipe": piped, "unsharded": plain}, Path(options.out, "loss.png"))
    print(f"picture: {options.out}/loss.png", flush=True)


if __name__ == "__main__":
    main()
