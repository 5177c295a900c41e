"""The report of a run's choices as one HTML file that needs nothing else: pictures are in it, scripts are none."""

from __future__ import annotations

import html
from collections.abc import Mapping

import torch

from fmoe_ext.balance.html import document, figure, scale, table, tiles
from fmoe_ext.balance.load import summarize
from fmoe_ext.balance.report import LAST_SHARE, OVERLOAD, GateSummary, Summary

_NUM_PAIRS = 5
_MIN_EXPECTED = 5  # tokens
_NUM_TOGETHER_PICTURES = 12


def render(summary: Summary, vocabulary: Mapping[int, str] | None = None) -> str:
    """The page. vocabulary: the text of token ids."""
    body = "".join(
        (
            _head(summary),
            _layers(summary),
            _over_steps(summary),
            _notable(summary, vocabulary or {}),
            _together(summary),
        )
    )
    return document("Choices of experts", body)


def _head(summary: Summary) -> str:
    gates = summary.gates
    choices = sum(int(gate.load.sum()) for gate in gates)
    dropped = sum(float(gate.dropped.sum()) for gate in gates)
    facts = {
        "logged steps": f"{len(summary.steps):,}",
        "layers": str(len(gates)),
        "choices": f"{choices + dropped:,.0f}",
        "dropped": f"{dropped / max(choices + dropped, 1):.2%}",
        "dead experts": str(sum(len(gate.dead) for gate in gates)),
        "overloaded experts": str(sum(len(gate.overloaded) for gate in gates)),
    }
    names = ", ".join(html.escape(path.name) for path in summary.paths)
    return (
        f"<h1>Choices of experts</h1><p>{names}: steps {summary.steps[0]:,} to {summary.steps[-1]:,}. Dead: no token "
        f"in the last {1 / LAST_SHARE:.0%} of the steps; overloaded: more than {OVERLOAD:g} times the mean there. "
        f"The logs take {8 * summary.num_bytes / max(choices + dropped, 1):.1f} bits a choice on disk.</p>"
        f"{tiles(facts)}"
    )


def _layers(summary: Summary) -> str:
    header = (
        "layer",
        "experts",
        "max / mean",
        "cv",
        "entropy",
        "dropped",
        "dead",
        "overloaded",
        "max / mean over steps",
    )
    rows = []
    for gate in summary.gates:
        numbers = summarize(gate.load.sum(0), float(gate.dropped.sum()))
        mean = gate.load.double().mean(1).clamp(min=1e-9)
        rows.append(
            [
                html.escape(gate.gate.name),
                str(gate.gate.num_experts),
                f"{numbers['max_over_mean']:.2f}",
                f"{numbers['cv']:.2f}",
                f"{numbers['entropy']:.3f}",
                f"{numbers['dropped_share']:.2%}",
                str(len(gate.dead)),
                str(len(gate.overloaded)),
                _curve((gate.load.max(1).values / mean).tolist()),
            ]
        )
    return (
        "<h2>Layers</h2><p>Over all steps. Entropy of the load: 1 is balanced, 0 is one expert.</p>"
        + table(header, rows, left=(0,))
    )


def _over_steps(summary: Summary) -> str:
    figures = []
    steps = [f"{step:,}" for step in summary.bins]
    for gate in summary.gates:
        load = gate.load.double()  # [bins, E]
        relative = load / load.mean(1, keepdim=True).clamp(min=1e-9)
        figures.append(figure(relative.t(), gate.gate.name, _numbers(gate.gate.num_experts), steps))
    return (
        "<h2>Load over steps</h2><p>Numbers of experts on the left, steps below; the colour is the expert's load over "
        f"the mean of its layer.</p><p>{scale('0', '1', '2 or more')}</p>"
        f'<div class="stack">{"".join(figures)}</div>'
    )


def _notable(summary: Summary, vocabulary: Mapping[int, str]) -> str:
    rows = []
    for gate in summary.gates:
        share = gate.recent.double() / gate.recent.double().mean().clamp(min=1e-9)
        for expert in gate.notable:
            active = (gate.load[:, expert] > 0).nonzero().flatten()
            last = "never" if len(active) == 0 else f"{summary.bins[int(active[-1])]:,}"
            fed = ""
            for token, part in gate.feeders.get(expert, []):
                # white space that can be seen
                text = vocabulary.get(token, str(token)).replace(" ", "\u2423").replace("\n", "\u23ce")
                fed += f'<span class="chip">{html.escape(text)} {part:.0%}</span>'
            kind = "dead" if expert in gate.dead else "overloaded"
            rows.append([html.escape(gate.gate.name), str(expert), kind, f"{share[expert]:.2f}", last, fed])
    if not rows:
        return "<h2>Dead and overloaded experts</h2><p>None.</p>"
    note = (
        "Tokens that fed it, over all logged steps, with their share of its tokens."
        if summary.has_ids
        else ("The logs have no tokens: pass token_ids to end_step().")
    )
    header = ("layer", "expert", "", "load / mean", "last token in the steps from", "tokens")
    return f"<h2>Dead and overloaded experts</h2><p>{note}</p>" + table(header, rows, left=(0, 2, 5))


def _together(summary: Summary) -> str:
    figures = []
    for gate in summary.gates[:_NUM_TOGETHER_PICTURES]:
        if gate.together is None or not bool(gate.together.any()):
            continue
        lift = _lift(gate)
        best = lift.nan_to_num(0).triu(1).flatten().topk(min(_NUM_PAIRS, lift.numel()))
        named = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        size = lift.shape[0]
        pairs = ", ".join(
            f"{place // size} + {place % size} ({value:.1f} times)" for place, value in named if value > 1
        )
        numbers = _numbers(gate.gate.num_experts)
        figures.append(figure(lift, gate.gate.name + (pairs and f": {pairs}"), numbers, numbers, square=True))
    if not figures:
        return ""
    unknown = f"fewer than {_MIN_EXPECTED} tokens expected, as of a dead expert, or an expert with itself"
    return (
        "<h2>Experts chosen together</h2><p>By one token, over what their loads alone would give. Numbers of experts "
        f"on both sides.</p><p>{scale('never', 'as expected', 'twice or more', unknown)}</p>"
        f'<div class="cards">{"".join(figures)}</div>'
    )


def _lift(gate: GateSummary) -> torch.Tensor:
    """Frequency of two experts sharing a token, over what is expected of pairs drawn by their loads [E, E].

    NaN for the diagonal, and where fewer than _MIN_EXPECTED tokens are expected, which say nothing.
    """
    assert gate.together is not None
    together = gate.together.double()
    share = together.sum(1) / together.sum().clamp(min=1)
    expected = share[:, None] * share[None, :]
    expected.fill_diagonal_(0)
    expected *= together.sum() / expected.sum().clamp(min=1e-12)
    lift = torch.where(expected < _MIN_EXPECTED, torch.nan, together / expected.clamp(min=_MIN_EXPECTED))
    return lift.fill_diagonal_(torch.nan)


def _numbers(count: int) -> list[str]:
    return [str(i) for i in range(count)]


def _curve(values: list[float]) -> str:
    """Values from 1 upwards as a small line."""
    top = max(2.0, *values)
    last = max(len(values) - 1, 1)
    points = " ".join(
        f"{150 * i / last:.1f},{29 - 28 * (v - 1) / (top - 1):.1f}" for i, v in enumerate(values)
    )
    label = f"from {values[0]:.2f} to {values[-1]:.2f}, at most {max(values):.2f}"
    return (
        f'<svg width="150" height="30" role="img" aria-label="{label}"><title>{label}</title>'
        f'<polyline points="{points}"/></svg>'
    )
