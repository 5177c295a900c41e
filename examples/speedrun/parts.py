"""The seconds of each part of a training step, for the four models in turn: `python examples/speedrun/parts.py`.

They are seconds of the processor, not of the clock, so that other work on the machine counts less.
"""

import argparse
import itertools
import statistics
import time

import torch
from contest import cross_entropy
from models import DESCRIPTIONS, GPT, MLPS, SIZES
from sources import Corpus, as_tensor

from fmoe_ext import cpu

PARTS = ("forward", "backward", "Muon", "AdamW", "step")


def measure(size_name: str, steps: int) -> dict[str, dict[str, float]]:
    """{model: {part: seconds, the median of the steps}}, the models in turn; the first step is not counted."""
    size = SIZES[size_name]
    text = torch.randint(256, (steps + 2, size.windows * (size.context + 1))).flatten()
    corpus = Corpus(text.to(torch.uint8), as_tensor(b"-"), "random bytes")
    models = {}
    for name in MLPS:
        model = GPT(name, size)
        models[name] = model, model.optimizers(1.0)
    seconds: dict[str, dict[str, list[float]]] = {name: {part: [] for part in PARTS} for name in MLPS}
    for step in range(steps + 1):
        inputs, targets = corpus.batch(step + 1, size.windows, size.context, 0)
        for name, (model, (muon, adam)) in models.items():
            marks = [time.process_time()]
            loss = cross_entropy(model(inputs), targets)
            marks.append(time.process_time())
            loss.backward()
            marks.append(time.process_time())
            muon.step()
            marks.append(time.process_time())
            adam.step()
            model.after_step()
            marks.append(time.process_time())
            model.zero_grad()
            if step:
                took = [b - a for a, b in itertools.pairwise(marks)]
                for part, value in zip(PARTS, [*took, sum(took)], strict=True):
                    seconds[name][part].append(value)
    return {
        n: {part: statistics.median(values) for part, values in own.items()} for n, own in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="cpu")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--threads", type=int, default=1, help="1: threads that wait for each other count too"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if cpu.can_keep_memory():
        cpu.keep_memory()
    found = measure(options.size, options.steps)
    print(f"{'milliseconds':48}" + "".join(f"{part:>10}" for part in PARTS) + f"{'of dense':>10}")
    for name, parts in found.items():
        row = "".join(f"{1e3 * parts[part]:10.0f}" for part in PARTS)
        print(f"{DESCRIPTIONS[name]:48}{row}{parts['step'] / found['dense']['step']:10.2f}")


if __name__ == "__main__":
    main()
