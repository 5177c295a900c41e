"""The pictures: loss over steps and over seconds, and how even the load of the experts was."""

import json

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

COLORS = {"moe": "#c2410c", "dense": "#1d4ed8"}
STYLE = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}


def read_metrics(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def draw_curve(records, labels, source, path):
    """labels: {run: text for the legend}. Thin line: training; thick line with dots: validation."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
        for axis, key, title in zip(axes, ("step", "seconds"), ("steps", "seconds of training"), strict=True):
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
        values = sorted(r["bits_per_byte"] for r in records)
        lowest = min(values[0], *(r.get("val_bits_per_byte", values[0]) for r in records))
        highest = values[int(0.85 * (len(values) - 1))]  # the first steps would flatten the rest
        margin = 0.06 * (highest - lowest) + 0.02
        axes[0].set_ylim(lowest - margin, highest + margin)
        axes[0].set_ylabel("bits per byte")
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
        figure.suptitle(f"Validation (thin: training) on {source}", fontsize=11)
        figure.savefig(path, dpi=120)
        plt.close(figure)


def draw_expert_load(records, path):
    """One strip per layer with experts: over the steps (x), each expert's (y) load, 1 being an even share."""
    records = [r for r in records if "expert_load" in r]
    load = np.array([r["expert_load"] for r in records])  # [reports, layers, E]
    num_layers, num_experts = load.shape[1:]
    steps = np.array([r["step"] for r in records])
    edges = np.concatenate([[0], steps])
    with plt.rc_context(STYLE | {"axes.grid": False}):
        figure, axes = plt.subplots(
            num_layers,
            1,
            figsize=(9, max(3.2, 0.8 + 1.3 * num_layers)),
            sharex=True,
            squeeze=False,
            layout="constrained",
        )
        for layer, axis in enumerate(axes[:, 0]):
            relative = num_experts * load[:, layer].T
            image = axis.pcolormesh(
                edges, np.arange(num_experts + 1) - 0.5, relative, cmap="RdBu_r", vmin=0, vmax=2
            )
            axis.set_ylabel(f"MoE layer {layer}\nexpert")
            axis.yaxis.get_major_locator().set_params(integer=True)
        axes[-1, 0].set_xlabel("steps")
        bar = figure.colorbar(image, ax=axes[:, 0], extend="max", pad=0.015, fraction=0.03)
        bar.set_label("load of the expert, 1 = even share")
        figure.suptitle("Share of the tokens' choices that each expert receives", fontsize=11)
        figure.savefig(path, dpi=120)
        plt.close(figure)
