"""Write results.json, the picture of the losses and the table of the runs of speedrun.py.

Ratios are to the dense run of the same seed; "time to dense" is the share of its seconds after which a model has the
loss that the dense one ends with.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from contest import Record, write
from models import DESCRIPTIONS, GPT, MLPS, Size

COLOURS = {"dense": "black", "grouped_mm": "tab:orange", "ours": "tab:blue", "fine": "tab:green"}


def seconds_to(curve: list[tuple[float, float]], bits: float) -> float | None:
    """Seconds of training after which a curve first has this loss, on a line between two validations; None: never."""
    before = None
    for seconds, value in curve:
        if value <= bits:
            if before is None:
                return seconds
            share = (before[1] - bits) / (before[1] - value)
            return before[0] + share * (seconds - before[0])
        before = (seconds, value)
    return None


def summarize(records: list[Record], size: Size) -> dict[str, dict[str, Any]]:
    """{name: figures} of the runs that are done; ratios are to the dense run of the same seed."""
    done = {(r.name, r.seed): r for r in records if r.is_done and r.curve and not r.diverged}
    tokens = size.windows * size.context
    found: dict[str, dict[str, Any]] = {}
    for name in MLPS:
        own = [r for (n, _), r in done.items() if n == name]
        if not own:
            continue
        pairs = [(r, done["dense", r.seed]) for r in own if ("dense", r.seed) in done]
        times = [seconds_to(r.curve, dense.bits) for r, dense in pairs]
        reached = [t / dense.budget for t, (_, dense) in zip(times, pairs, strict=True) if t is not None]
        found[name] = {
            "seeds": len(own),
            "bits_per_byte": mean(r.bits for r in own),
            "deviation": stdev(r.bits for r in own) if len(own) > 1 else None,
            "tokens_per_second": sum(r.steps for r in own) * tokens / sum(r.seconds for r in own),
            "of_dense_tokens_per_second": mean(
                (r.steps / r.seconds) / (d.steps / d.seconds) for r, d in pairs
            )
            if pairs
            else None,
            "of_dense_seconds_to_its_loss": mean(reached) if pairs and len(reached) == len(pairs) else None,
            "seeds_that_reach_it": len(reached),
            "busiest_expert": mean(load for r in own for load in r.busiest),
            "rate_factor": own[0].factor,
        }
    return found


def parameters(size: Size) -> dict[str, tuple[int, int]]:
    return {name: GPT(name, size).num_parameters() for name in MLPS}


def write_results(
    path: Path,
    settings: Mapping[str, Any],
    machine: Mapping[str, Any],
    trials: list[Record],
    records: list[Record],
) -> dict[str, dict[str, Any]]:
    """Write results.json -> its summary."""
    summary = summarize(records, Size(**settings["size"]))
    content = {
        "settings": settings,
        "machine": machine,
        "summary": summary,
        "runs": [asdict(record) for record in records],
        "trials": [asdict(record) for record in trials],
    }
    write(path, lambda file: file.write_text(json.dumps(content, indent=1)))
    return summary


def table(summary: Mapping[str, Mapping[str, Any]], counts: Mapping[str, tuple[int, int]]) -> str:
    """The summary for people."""

    def ratio(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    rows = [
        f"{'':48} {'M (active)':>13} {'tokens/s':>9} {'of dense':>8} {'bits/byte':>15} {'time to dense':>13} "
        f"{'busiest expert':>14}"
    ]
    for name, f in summary.items():
        total, active = (count / 1e6 for count in counts[name])
        spread = "" if f["deviation"] is None else f" +-{f['deviation']:.4f}"
        rows.append(
            f"{DESCRIPTIONS[name]:48} {f'{total:.1f} ({active:.1f})':>13} {f['tokens_per_second']:9.0f} "
            f"{ratio(f['of_dense_tokens_per_second']):>8} {f['bits_per_byte']:.4f}{spread:9} "
            f"{ratio(f['of_dense_seconds_to_its_loss']):>13} {f['busiest_expert']:14.2f}"
        )
    return "\n".join(rows)


def draw(path: Path, records: list[Record], source: str) -> None:
    """The validation loss over seconds of training: a thin line a seed, a thick one for their mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), constrained_layout=True)
    for name in MLPS:
        curves = [r.curve for r in records if r.name == name and r.curve]
        for curve in curves:
            axes.plot(*zip(*curve, strict=True), color=COLOURS[name], linewidth=0.6, alpha=0.5)
        if curves:
            points = list(zip(*curves, strict=False))  # as far as all seeds have come
            line = [(mean(s for s, _ in point), mean(b for _, b in point)) for point in points]
            axes.plot(*zip(*line, strict=True), color=COLOURS[name], linewidth=2, label=DESCRIPTIONS[name])
    if axes.lines:
        last = [bits for r in records for _, bits in r.curve[1:]] or [
            bits for r in records for _, bits in r.curve
        ]
        axes.set_ylim(min(last) - 0.05, sorted(last)[int(0.95 * (len(last) - 1))] + 0.1)
        axes.legend()
    axes.set(xlabel="seconds of training", ylabel="bits per byte of packages it has not seen", title=source)
    axes.grid(alpha=0.3)
    part = path.with_suffix(".part.png")
    figure.savefig(part, dpi=120)
    pyplot.close(figure)
    part.replace(path)
