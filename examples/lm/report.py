"""Pictures of a run, from the records of metrics.jsonl: loss over steps and seconds, and how even the load was.

train.py calls draw_curve() and draw_expert_load() on the first rank.
"""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

COLORS = {"moe": "#c2410c", "dense": "#1d4ed8"}
SMOOTHING = 0.04  # share of the reports that a drawn load is the mean of
STYLE = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}


def draw_curve(records, labels, source, path):
    """labels: {run: text for the legend}. Thin line: training; thick line with dots: validation.

    One run is drawn over steps, with its seconds above. Of two, the second picture has seconds below, and only the
    losses of the later steps, where the runs differ by little.
    """
    is_single = len(labels) == 1
    with plt.rc_context(STYLE):
        size = (7, 4.2) if is_single else (10, 4.2)
        figure, axes = plt.subplots(
            1, 1 if is_single else 2, figsize=size, squeeze=False, layout="constrained"
        )
        axes = axes[0]
        for axis, key, title in zip(
            axes, ("step", "seconds"), ("steps", "seconds of training"), strict=False
        ):
            for run, label in labels.items():
                mine = [r for r in records if r["run"] == run]
                valid = [r for r in mine if "val_bits_per_byte" in r]
                color = COLORS[run]
                x, y = [r[key] for r in mine], [r["bits_per_byte"] for r in mine]
                axis.plot(x, y, color=color, lw=0.9, alpha=0.45)
                x, y = [r[key] for r in valid], [r["val_bits_per_byte"] for r in valid]
                last = f": {y[-1]:.3f} bits" if y else ""
                axis.plot(x, y, color=color, lw=2, marker="o", ms=4, label=f"{label}{last}")
            axis.set_xlabel(title)
            axis.set_xlim(left=0)
            axis.set_ylabel("bits per byte")
        axes[0].set_yscale("log")  # the first steps would flatten the rest
        axes[0].yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 2.5, 3, 4, 5, 6, 8)))
        axes[0].yaxis.set_major_formatter("{x:g}")
        axes[0].yaxis.set_minor_locator(NullLocator())
        if is_single:
            _add_seconds(axes[0], records)
        else:
            values = sorted(r["bits_per_byte"] for r in records)
            lowest = min(values[0], *(r.get("val_bits_per_byte", values[0]) for r in records))
            highest = values[int(0.85 * (len(values) - 1))]
            margin = 0.06 * (highest - lowest) + 0.02
            axes[1].set_ylim(lowest - margin, highest + margin)
            axes[0].set_title("from the first step", fontsize=10)
            axes[1].set_title("the end of the curves", fontsize=10)
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
        figure.suptitle(f"Validation (thin: training) on {source}", fontsize=11)
        figure.savefig(path, dpi=120)
        plt.close(figure)


def _add_seconds(axis, records):
    """A second axis, above: the seconds of training at which the steps were done."""
    steps, seconds = np.array([[0, 0], *([r["step"], r["seconds"]] for r in records)], dtype=float).T
    seconds = np.maximum.accumulate(seconds) + 1e-9 * np.arange(len(seconds))  # strictly rising: invertible
    axis.set_xlim(0, steps[-1])
    above = axis.secondary_xaxis(
        "top", functions=(lambda x: np.interp(x, steps, seconds), lambda x: np.interp(x, seconds, steps))
    )
    above.set_xlabel("seconds of training")
    above.set_xticks([t for t in MaxNLocator(6).tick_values(0, seconds[-1]) if t <= seconds[-1]])


def draw_expert_load(records, path):
    """Two strips a layer with experts: load of each expert over the steps, and the busiest expert over the mean.

    Loads are means over SMOOTHING of the reports: a report has few tokens an expert.
    """
    records = [r for r in records if "expert_load" in r]
    load = np.array([r["expert_load"] for r in records])  # [reports, layers, E]
    num_layers, num_experts = load.shape[1:]
    steps = np.array([r["step"] for r in records])
    edges = np.concatenate([[0], steps])
    width = max(3, round(SMOOTHING * len(steps)))
    smooth = np.stack([load[max(0, i + 1 - width) : i + 1].mean(0) for i in range(len(steps))])
    with plt.rc_context(STYLE | {"axes.grid": False}):
        figure, axes = plt.subplots(
            2 * num_layers,
            1,
            figsize=(9, 0.8 + 3.4 * num_layers),
            sharex=True,
            squeeze=False,
            height_ratios=[2.2, 1] * num_layers,
            layout="constrained",
        )
        axes = axes[:, 0]
        for layer, (axis, below) in enumerate(zip(axes[::2], axes[1::2], strict=True)):
            relative = num_experts * smooth[:, layer].T
            image = axis.pcolormesh(
                edges, np.arange(num_experts + 1) - 0.5, relative, cmap="RdBu_r", vmin=0, vmax=2
            )
            axis.set_ylabel(f"MoE layer {layer}\nexpert")
            axis.yaxis.get_major_locator().set_params(integer=True)
            below.plot(steps, relative.max(0), color=COLORS["moe"], lw=1.5)
            below.axhline(1, color="gray", lw=0.8)
            below.set_ylim(0.9, max(2.0, 1.05 * float(relative.max())))
            below.set_ylabel("max / mean")
        axes[-1].set_xlim(0, steps[-1])
        axes[-1].set_xlabel("steps")
        bar = figure.colorbar(image, ax=list(axes), extend="max", pad=0.015, fraction=0.03)
        bar.set_label("load of the expert, 1 = even share")
        title = f"Share of the tokens' choices that each expert receives, mean of {width} reports"
        figure.suptitle(title, fontsize=11)
        figure.savefig(path, dpi=120)
        plt.close(figure)
