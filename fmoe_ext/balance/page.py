"""The report of a run's choices as one HTML file that needs nothing else: pictures are in it, scripts are none.

The page goes from the answer to its reasons, a function for each section:

    in short            load of the busiest expert, dead and overloaded experts, dropped choices
    who got what        a bar for each expert of a layer, over the mean of the layer
    tokens              what feeds the busiest and the overloaded experts; when a dead one was last chosen
    how even            the numbers of balance.summarize over all steps, and a curve of the busiest over the mean
    over the steps      a picture of each layer, experts x bins of steps: where it tipped over, and whether it returned
    together            a picture of each layer, experts x experts: which of them the same tokens choose
    the log             its size

"Now" is the last quarter of the steps: an expert that starved in the first steps and recovered is not reported dead.
Every picture has the same colours: more than an even share, less, and grey where too little is known.
"""

from __future__ import annotations

import html
from collections.abc import Mapping

import torch

from fmoe_ext.balance.html import bars, document, figure, scale, table, tiles
from fmoe_ext.balance.load import summarize
from fmoe_ext.balance.report import LAST_SHARE, OVERLOAD, GateSummary, Summary

_NUM_PAIRS = 5  # pairs of experts that are named above a picture
_MIN_EXPECTED = 5  # expected tokens of a pair, below which a ratio says nothing
_NUM_TOGETHER_PICTURES = 12  # layers whose pairs are drawn


def render(summary: Summary, vocabulary: Mapping[int, str] | None = None) -> str:
    """Return the page as HTML. vocabulary: {token id: text}; ids that it does not have are shown as numbers."""
    dropped = sum(float(gate.dropped.sum()) for gate in summary.gates)
    choices = sum(int(gate.load.sum()) for gate in summary.gates) + dropped
    bits = 8 * summary.num_bytes / max(choices, 1)
    body = "".join(
        (
            _in_short(summary, choices, dropped),
            _who_got_what(summary),
            _tokens(summary, vocabulary or {}),
            _how_even(summary),
            _over_steps(summary),
            _together(summary),
            f"<h2>The log</h2><p>It has {summary.num_bytes:,} bytes: {bits:.1f} bits for each choice of an "
            "expert by a token, with the token ids if they were logged.</p>",
        )
    )
    return document("Which expert got which tokens", body)


def _in_short(summary: Summary, choices: float, dropped: float) -> str:
    """Answer in short: how much the busiest expert got, and whether any got none."""
    gates = summary.gates
    busiest = max(gates, key=lambda gate: float(_recent_share(gate).max()))
    facts = {
        "load of the busiest expert over the mean": f"{_recent_share(busiest).max():.2f}",
        "dead experts, chosen by no token": str(sum(len(gate.dead) for gate in gates)),
        f"overloaded experts, over {OVERLOAD:g} times the mean": str(
            sum(len(gate.overloaded) for gate in gates)
        ),
        "of the choices dropped": f"{dropped / max(choices, 1):.2%}",
        "layers with experts": str(len(gates)),
        "choices of an expert by a token": f"{choices:,.0f}",
    }
    names = ", ".join(html.escape(path.name) for path in summary.paths)
    return (
        f"<h1>Which expert got which tokens</h1><p>{names}: {len(summary.steps):,} steps were logged, from step "
        f"{summary.steps[0]:,} to {summary.steps[-1]:,}. Busiest, dead and overloaded are judged by the last "
        f"{1 / LAST_SHARE:.0%} of them.</p>{tiles(facts)}"
    )


def _recent_share(gate: GateSummary) -> torch.Tensor:
    """Divide the load of the last quarter by its mean: [E] float64."""
    recent = gate.recent.double()
    return recent / recent.mean().clamp(min=1e-9)


# a bar for each expert of each layer, over the last quarter of the steps
def _who_got_what(summary: Summary) -> str:
    figures = []
    for gate in summary.gates:
        share = _recent_share(gate)
        most, least = int(share.argmax()), int(share.argmin())
        even = gate.gate.num_experts  # load over mean, divided by E, is the share of all choices
        caption = (
            f"{gate.gate.name}: most to expert {most} ({share[most] / even:.1%} of all choices), "
            f"least to expert {least} ({share[least] / even:.1%})"
        )
        figures.append(bars(share.tolist(), caption, _numbers(even)))
    return (
        f"<h2>Who got what</h2><p>A bar for each expert: its share of the tokens in the last {1 / LAST_SHARE:.0%} of "
        "the steps, over the mean. With an even load all bars end at the dashed line.</p>"
        f'<div class="cards">{"".join(figures)}</div>'
    )


# a table with a row for each notable expert: its most frequent tokens, and when it was last chosen
def _tokens(summary: Summary, vocabulary: Mapping[int, str]) -> str:
    rows = []
    for gate in summary.gates:
        share = _recent_share(gate)
        for expert in gate.notable:
            # the last bin with a token of this expert
            active = (gate.load[:, expert] > 0).nonzero().flatten()
            last = "never" if len(active) == 0 else f"{summary.bins[int(active[-1])]:,}"
            fed = ""
            for token, part in gate.feeders.get(expert, []):
                # white space that can be seen
                text = vocabulary.get(token, str(token)).replace(" ", "\u2423").replace("\n", "\u23ce")
                fed += f'<span class="chip">{html.escape(text)} {part:.0%}</span>'
            kind = "dead" if expert in gate.dead else "overloaded" if expert in gate.overloaded else ""
            rows.append([html.escape(gate.gate.name), str(expert), kind, f"{share[expert]:.2f}", fed, last])
    note = (
        "Percentages: share of the expert's tokens, over all logged steps."
        if summary.has_ids
        else "The logs have no tokens: pass token_ids to end_step()."
    )
    # a bin of several steps is named by its first one
    near = "last chosen at step" if len(summary.bins) == len(summary.steps) else "last chosen near step"
    header = ("layer", "expert", "", "load / mean", "its most frequent tokens", near)
    return (
        f"<h2>The busiest experts and their tokens</h2><p>Dead and overloaded experts are here too. {note}</p>"
        + table(header, rows, left=(0, 2, 4))
    )


# a table with a row for each layer: balance.summarize over the whole run
def _how_even(summary: Summary) -> str:
    counted = ("busiest / mean", "cv", "entropy", "dropped", "dead", "overloaded")
    header = ("layer", "experts", *counted, "busiest / mean over the steps")
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
                # busiest over mean in each bin
                _curve((gate.load.max(1).values / mean).tolist()),
            ]
        )
    return (
        "<h2>How even</h2><p>Over all logged steps. With an even load busiest / mean is 1, cv (standard deviation "
        "over mean) 0 and entropy 1; entropy is 0 if one expert gets all.</p>"
        + table(header, rows, left=(0,))
    )


def _curve(values: list[float]) -> str:
    """Draw values from 1 upwards as a line: 1 is at the bottom, the largest value, at least 2, at the top."""
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


# a picture for each layer: experts x bins of steps, load over the mean of the bin
def _over_steps(summary: Summary) -> str:
    figures = []
    steps = [f"{step:,}" for step in summary.bins]
    for gate in summary.gates:
        load = gate.load.double()  # [bins, E]
        relative = load / load.mean(1, keepdim=True).clamp(min=1e-9)
        figures.append(figure(relative.t(), gate.gate.name, _numbers(gate.gate.num_experts), steps))
    return (
        "<h2>Load over the steps</h2><p>Experts on the left, steps below; the colour is the expert's load over the "
        f"mean of its layer.</p><p>{scale('0', '1', '2 or more')}</p>"
        f'<div class="stack">{"".join(figures)}</div>'
    )


# a picture for each of the first layers: experts x experts, how often a token chose both
def _together(summary: Summary) -> str:
    figures = []
    for gate in summary.gates[:_NUM_TOGETHER_PICTURES]:
        if gate.together is None or not bool(gate.together.any()):  # too many experts, or one choice a token
            continue
        lift = _lift(gate)
        # each pair once: above the diagonal
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
        "<h2>Experts chosen together</h2><p>How often one token chose both experts, compared with experts that are "
        "drawn independently by their loads. Experts are on both sides.</p>"
        f"<p>{scale('never', 'as expected', 'twice or more', unknown)}</p>"
        f'<div class="cards">{"".join(figures)}</div>'
    )


def _lift(gate: GateSummary) -> torch.Tensor:
    """Divide how often two experts share a token by what independent draws by their loads would give: [E, E].

    NaN for the diagonal, and where fewer than _MIN_EXPECTED tokens are expected, which say nothing.
    """
    assert gate.together is not None
    together = gate.together.double()
    share = together.sum(1) / together.sum().clamp(min=1)
    expected = share[:, None] * share[None, :]
    expected.fill_diagonal_(0)  # no token chooses an expert twice, so the rest has to sum up to all pairs
    expected *= together.sum() / expected.sum().clamp(min=1e-12)
    lift = torch.where(expected < _MIN_EXPECTED, torch.nan, together / expected.clamp(min=_MIN_EXPECTED))
    return lift.fill_diagonal_(torch.nan)


def _numbers(count: int) -> list[str]:
    return [str(i) for i in range(count)]
