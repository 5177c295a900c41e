"""Render the report of prune() as one HTML page: scores by layer, and the experts that went."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import torch

from fmoe_ext.balance.html import document, figure, scale, table, tiles

_MOST_CHIPS = 12  # experts that a row of the table names; the rest is a number


def render(report: Mapping[str, Any]) -> str:
    """Render the page of a report of prune()."""
    return document("Pruned experts", _head(report) + _scores(report) + _layers(report))


def _head(report: Mapping[str, Any]) -> str:
    lost = [layer["lost_mass"] for layer in report["layers"].values()]
    facts = {
        "experts before": str(report["experts_before"]),
        "experts after": str(report["experts_after"]),
        "tokens read": f"{report['tokens']:,}",
        "loss before": _number(report["loss_before"]),
        "loss after": _number(report.get("loss_after")),
        "routing weight lost": f"{sum(lost) / len(lost):.2%}",
    }
    heads = ""
    if report["heads"]:
        heads = (
            f" The text does not reach the {len(report['heads'])} layers of heads for the tokens after the next: there "
            "the experts with the largest norms of weights stayed."
        )
    return (
        f"<h1>Pruned experts</h1><p>{html.escape(report['base'])}: in each layer the experts of the highest score "
        f"stayed ({html.escape(report['criterion'])}). Losses are nats a token on held-out text.{heads}</p>"
        f"{tiles(facts)}"
    )


def _scores(report: Mapping[str, Any]) -> str:
    layers = report["layers"]
    values = torch.tensor([layer["scores"] for layer in layers.values()], dtype=torch.float64, device="cpu")
    relative = values / values.mean(1, keepdim=True).clamp(min=1e-30)
    order = relative.sort(1, descending=True).values
    layer_numbers, ranks = ([str(i) for i in range(size)] for size in order.shape)
    caption = f"stayed: columns 0 to {report['experts_after'] - 1}"
    picture = figure(order, caption, layer_numbers, ranks)
    return (
        "<h2>Scores</h2><p>Layers on the left; experts in the order of their scores below. The colour is the score "
        f"over the mean of its layer.</p><p>{scale('0', '1', '2 or more')}</p>{picture}"
    )


def _layers(report: Mapping[str, Any]) -> str:
    rows = []
    for path, layer in report["layers"].items():
        gone = sorted(layer["pruned"].items(), key=lambda item: item[1]["score"])
        chips = [f'<span class="chip">{e}: {one["tokens"]:,}</span>' for e, one in gone[:_MOST_CHIPS]]
        if len(gone) > _MOST_CHIPS:
            chips.append(f"and {len(gone) - _MOST_CHIPS} more")
        rows.append([html.escape(path), f"{layer['lost_mass']:.2%}", "".join(chips)])
    return (
        "<h2>Layers</h2><p>Experts that went, the lowest score first, with the tokens that had chosen them.</p>"
        + table(("layer", "routing weight lost", "experts that went: tokens"), rows, left=(0, 2))
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
