"""The seconds of each part of a training step, for the four models in turn: `python examples/speedrun/parts.py`.

They are seconds of the processor, not of the clock, so that other work on the machine counts less.
--map PICTURE: a step's seconds beside the dense model's, over width and tokens of a step.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from contest import cross_entropy
from models import DESCRIPTIONS, GPT, MLPS, SIZES, Size
from sources import Corpus, as_tensor

from fmoe_ext import cpu

PARTS = ("forward", "backward", "Muon", "AdamW", "step")
WIDTHS, WINDOWS, MAP_DEPTH = (128, 256, 384, 512, 768), (2, 8, 32), 2  # of the map


def measure(
    size: Size, steps: int, bfloat16: bool = False, adamw_alone: bool = False
) -> dict[str, dict[str, float]]:
    """{model: {part: seconds, the median of the steps}}, the models in turn; the first step is not counted.

    adamw_alone: fused AdamW moves all parameters, and Muon none.
    """
    text = torch.randint(256, (steps + 2, size.windows * (size.context + 1))).flatten()
    corpus = Corpus(text.to(torch.uint8), as_tensor(b"-"), "random bytes")
    models = {}
    for name in MLPS:
        model = GPT(name, size)
        models[name] = model, optimizers_of(model, adamw_alone)
    seconds: dict[str, dict[str, list[float]]] = {name: {part: [] for part in PARTS} for name in MLPS}
    for step in range(steps + 1):
        inputs, targets = corpus.batch(step + 1, size.windows, size.context, 0)
        for name, (model, (muon, adam)) in models.items():
            marks = [time.process_time()]
            with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
                logits = model(inputs)
            loss = cross_entropy(logits, targets)
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


def optimizers_of(model: GPT, adamw_alone: bool) -> list[torch.optim.Optimizer]:
    if not adamw_alone:
        return model.optimizers(1.0)
    none = torch.optim.SGD([torch.nn.Parameter(torch.empty(0))])
    return [none, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)]


def measure_map(
    picture: Path, steps: int, widths: tuple[int, ...], windows: tuple[int, ...], bfloat16: bool
) -> None:
    """A step's seconds over the dense model's, for each width and number of windows: a picture, and JSON beside it."""
    ratios: dict[str, list[list[float]]] = {name: [] for name in MLPS if name != "dense"}
    for number in windows:
        for name in ratios:
            ratios[name].append([])
        for width in widths:
            size = replace(SIZES["cpu"], width=width, depth=MAP_DEPTH, windows=number)
            found = measure(size, steps, bfloat16)
            for name, rows in ratios.items():
                rows[-1].append(found[name]["step"] / found["dense"]["step"])
            row = "".join(f"{name:>14} {rows[-1][-1]:.2f}" for name, rows in ratios.items())
            print(f"width {width:4}, {number * size.context:6} tokens a step, of dense: {row}", flush=True)
    picture.parent.mkdir(parents=True, exist_ok=True)
    tokens = [number * SIZES["cpu"].context for number in windows]
    content = {"widths": widths, "tokens": tokens, "ratios": ratios}
    picture.with_suffix(".json").write_text(json.dumps(content, indent=1))
    draw_map(picture, ratios, widths, tokens)


def draw_map(
    picture: Path, ratios: Mapping[str, list[list[float]]], widths: tuple[int, ...], tokens: list[int]
) -> None:
    """A panel a model: green where a step takes less time than the dense model's, brown where it takes more."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import TwoSlopeNorm

    figure, panels = pyplot.subplots(1, len(ratios), figsize=(12, 3.4), constrained_layout=True, sharey=True)
    norm = TwoSlopeNorm(1.0, 0.6, 1.6)
    for axes, (name, rows) in zip(panels, ratios.items(), strict=True):
        image = axes.imshow(rows, cmap="BrBG_r", norm=norm, aspect="auto", origin="lower")
        for (y, row), x in itertools.product(enumerate(rows), range(len(widths))):
            color = "black" if 0.75 < row[x] < 1.4 else "white"
            axes.text(x, y, f"{row[x]:.2f}", ha="center", va="center", color=color)
        axes.set_xticks(range(len(widths)), widths)
        axes.set_yticks(range(len(tokens)), [f"{number:,}" for number in tokens])
        axes.set(xlabel="width", title=DESCRIPTIONS[name])
        axes.title.set_fontsize(9)
    panels[0].set_ylabel("tokens of a step")
    figure.colorbar(image, ax=panels, label="seconds of a step, of dense")
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="cpu")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--threads", type=int, default=1, help="1: threads that wait for each other count too"
    )
    parser.add_argument(
        "--map", type=Path, help="measure all widths and steps instead, and draw this picture"
    )
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="of the map")
    parser.add_argument("--windows", type=int, nargs="+", default=WINDOWS, help="of a step, for the map")
    parser.add_argument("--bfloat16", action="store_true", help="products in bfloat16, by autocast")
    parser.add_argument("--adamw", action="store_true", help="fused AdamW for all parameters, without Muon")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if cpu.can_keep_memory():
        cpu.keep_memory()
    if options.map:
        widths, windows = tuple(options.widths), tuple(options.windows)
        return measure_map(options.map, options.steps, widths, windows, options.bfloat16)
    found = measure(SIZES[options.size], options.steps, options.bfloat16, options.adamw)
    print(f"{'milliseconds':48}" + "".join(f"{part:>10}" for part in PARTS) + f"{'of dense':>10}")
    for name, parts in found.items():
        row = "".join(f"{1e3 * parts[part]:10.0f}" for part in PARTS)
        print(f"{DESCRIPTIONS[name]:48}{row}{parts['step'] / found['dense']['step']:10.2f}")


if __name__ == "__main__":
    main()
