"""The report of prune() as one HTML file that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import torch

from fmoe_ext.balance.page import document, figure, table, tiles


def render(report: Mapping[str, Any]) -> str:
    """The page of a report: losses, a row and a picture of scores for each layer."""
    after = report.get("loss_after")
    facts = {
        "experts a layer before": str(report["experts_before"]),
        "experts a layer after": str(report["experts_after"]),
        "loss before": _number(report["loss_before"]),
        "loss after": _number(after) if "loss_after" in report else "not written",
        "tokens measured": f"{report['tokens']:,}",
        "criterion": html.escape(report["criterion"]),
    }
    body = (
        f"<h1>Pruned experts</h1><p>{html.escape(report['base'])}. The loss is the mean cross-entropy of the "
        "next token on the held-out end of the text.</p>" + tiles(facts) + _layers(report) + _pictures(report)
    )
    return document("Pruned experts", body)


def _number(loss: float | None) -> str:
    return "no held-out text" if loss is None else f"{loss:.4f}"


def _layers(report: Mapping[str, Any]) -> str:
    rows = [
        [
            html.escape(path),
            str(len(layer["kept"])),
            f"{layer['lost_mass']:.2%}",
            str(sum(gone["tokens"] == 0 for gone in layer["pruned"].values())),
            ", ".join(map(str, layer["pruned"])),
        ]
        for path, layer in report["layers"].items()
    ]
    return (
        "<h2>Layers</h2><p>Lost weight: share of all routing weights of the text that went to pruned experts. Unused: "
        "pruned experts that no token chose.</p>"
        + table(("layer", "kept", "lost weight", "unused", "pruned experts"), rows, left=(0, 4))
    )


def _pictures(report: Mapping[str, Any]) -> str:
    """Layers from top to bottom, experts from left to right, by score over the mean of the layer; pruned ones below."""
    layers = list(report["layers"].values())
    scores = torch.tensor([layer["scores"] for layer in layers], dtype=torch.float64)
    relative = scores / scores.mean(1, keepdim=True).clamp(min=1e-30)
    fate = torch.ones_like(relative)
    for i, layer in enumerate(layers):
        fate[i, [int(expert) for expert in layer["pruned"]]] = 0
    ends = [f"expert {e}" for e in sorted({0, scores.shape[1] - 1})]
    names = ["first layer", "last layer"][: min(2, len(layers))]
    height = f"height:{max(48, min(480, 14 * len(layers)))}px"
    return (
        "<h2>Scores</h2><p>Over the mean of the layer: orange above, blue below. Then the experts that were pruned, in "
        "blue.</p>"
        f'<div class="stack">{figure(relative, "score", names, ends, height)}'
        f"{figure(fate, 'pruned', names, ends, height)}</div>"
    )
