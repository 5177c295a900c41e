"""The report of a run's choices as one HTML file that needs nothing else: pictures are in it, scripts are none."""

from __future__ import annotations

import base64
import html
import struct
import zlib
from collections.abc import Iterable, Mapping

import torch

from fmoe_ext.balance.load import summarize
from fmoe_ext.balance.report import LAST_SHARE, OVERLOAD, GateSummary, Summary

ABOVE, BELOW = (214, 96, 30), (38, 110, 190)  # more and less than an even share
NUM_PAIRS = 5
MIN_EXPECTED = 5  # tokens
NUM_TOGETHER_PICTURES = 12

STYLE = """
:root { color-scheme: light dark; --text: #1c1c1a; --soft: #66645f; --line: #dedcd6; --page: #fbfaf8; --card: #fff;
  --above: rgb(214 96 30); --below: rgb(38 110 190); }
@media (prefers-color-scheme: dark) { :root { --text: #eceae5; --soft: #a3a098; --line: #3a3936; --page: #191918;
  --card: #222221; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1200px; padding: 24px 20px 60px; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 36px 0 4px; }
p { margin: 4px 0 12px; color: var(--soft); max-width: 75ch; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 10px; margin: 18px 0; }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; }
.tile b { display: block; font-size: 21px; font-weight: 600; }
.tile span, figcaption { color: var(--soft); font-size: 13px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; font-size: 13px; } .left { text-align: left; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); gap: 12px; }
figure { margin: 0; } figcaption { overflow-wrap: anywhere; }
img { display: block; width: 100%; height: 100%; image-rendering: pixelated; border: 1px solid var(--line); }
.map { display: grid; grid-template-columns: auto 1fr; gap: 2px 6px; margin-top: 6px; }
.map .up, .map .along { display: flex; justify-content: space-between; color: var(--soft); font-size: 12px; }
.map .up { flex-direction: column; text-align: right; } .map .along { grid-column: 2; }
.stack { display: grid; gap: 12px; }
.square { aspect-ratio: 1; }
.scale { display: inline-block; width: 160px; height: 11px; border: 1px solid var(--line); vertical-align: -1px;
  margin: 0 6px; background: linear-gradient(to right, var(--below), transparent, var(--above)); }
.chip { display: inline-block; border: 1px solid var(--line); border-radius: 5px; padding: 0 6px; margin: 1px 3px 1px 0;
  font: 13px ui-monospace, monospace; }
svg { display: block; margin-left: auto; }
polyline { fill: none; stroke: var(--above); stroke-width: 1.5; }
"""


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


def document(title: str, body: str) -> str:
    """An HTML file of this style."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, '
        f'initial-scale=1"><title>{title}</title><style>{STYLE}</style></head><body>{body}</body></html>\n'
    )


def tiles(facts: Mapping[str, str]) -> str:
    """{name: value} as a row of tiles."""
    cells = "".join(
        f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for name, value in facts.items()
    )
    return f'<div class="tiles">{cells}</div>'


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
        + tiles(facts)
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
    rows = [_layer_row(gate) for gate in summary.gates]
    return (
        "<h2>Layers</h2><p>Over all steps. Entropy of the load: 1 is balanced, 0 is one expert.</p>"
        + table(header, rows, left=(0,))
    )


def _layer_row(gate: GateSummary) -> list[str]:
    numbers = summarize(gate.load.sum(0), float(gate.dropped.sum()))
    mean = gate.load.double().mean(1).clamp(min=1e-9)
    return [
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


def _over_steps(summary: Summary) -> str:
    figures = [
        figure(
            _relative(gate.load).t(),
            gate.gate.name,
            _numbers(gate.gate.num_experts),
            [f"step {summary.bins[i]:,}" for i in _places(len(summary.bins))],
            f"height:{max(64, min(360, 8 * gate.gate.num_experts))}px",
        )
        for gate in summary.gates
    ]
    return (
        "<h2>Load over steps</h2><p>Numbers of experts on the left, steps below; the colour is the expert's load over "
        f"the mean of its layer.</p><p>{_scale('0', '1', '2 or more')}</p>"
        f'<div class="stack">{"".join(figures)}</div>'
    )


def _notable(summary: Summary, vocabulary: Mapping[int, str]) -> str:
    rows = []
    for gate in summary.gates:
        share = gate.recent.double() / gate.recent.double().mean().clamp(min=1e-9)
        for expert in gate.notable:
            active = (gate.load[:, expert] > 0).nonzero().flatten()
            last = "never" if len(active) == 0 else f"{summary.bins[int(active[-1])]:,}"
            fed = "".join(
                f'<span class="chip">{html.escape(_text(token, vocabulary))} {part:.0%}</span>'
                for token, part in gate.feeders.get(expert, [])
            )
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
    for gate in summary.gates[:NUM_TOGETHER_PICTURES]:
        if gate.together is None or not bool(gate.together.any()):
            continue
        lift = _lift(gate)
        pairs = _top_pairs(gate, lift)
        numbers = _numbers(gate.gate.num_experts)
        figures.append(figure(lift, f"{gate.gate.name}: {pairs}", numbers, numbers, "", "square"))
    if not figures:
        return ""
    return (
        "<h2>Experts chosen together</h2><p>By one token, over what their loads alone would give. Numbers of experts "
        f"on both sides.</p><p>{_scale('never', 'as expected', 'twice or more')}</p>"
        f'<div class="cards">{"".join(figures)}</div>'
    )


def _lift(gate: GateSummary) -> torch.Tensor:
    """Frequency of two experts sharing a token, over what is expected of pairs drawn by their loads [E, E].

    1 for the diagonal, and where fewer than MIN_EXPECTED tokens are expected, which say nothing.
    """
    assert gate.together is not None
    together = gate.together.double()
    share = together.sum(1) / together.sum().clamp(min=1)
    expected = share[:, None] * share[None, :]
    expected.fill_diagonal_(0)
    expected *= together.sum() / expected.sum().clamp(min=1e-12)
    lift = torch.where(expected < MIN_EXPECTED, 1.0, together / expected.clamp(min=MIN_EXPECTED))
    return lift.fill_diagonal_(1)


def _top_pairs(gate: GateSummary, lift: torch.Tensor) -> str:
    best = lift.triu(1).flatten().topk(min(NUM_PAIRS, lift.numel()))
    size = lift.shape[0]
    named = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return ", ".join(
        f"{place // size} + {place % size} ({value:.1f} times)" for place, value in named if value > 1
    )


def _relative(load: torch.Tensor) -> torch.Tensor:
    """load [bins, E] over the mean of each bin."""
    load = load.double()
    return load / load.mean(1, keepdim=True).clamp(min=1e-9)


def _text(token: int, vocabulary: Mapping[int, str]) -> str:
    return vocabulary.get(token, str(token)).replace(" ", "\u2423").replace("\n", "\u23ce")


def _scale(low: str, middle: str, high: str) -> str:
    """The colours, with what their ends and their middle stand for."""
    return f'{low}<span class="scale" role="img" aria-label="{middle} in the middle"></span>{high}; no colour: {middle}'


def _places(count: int) -> list[int]:
    """At most five of 0 .. count - 1, evenly spread, both ends among them."""
    ends = max(1, min(4, count - 1))
    return sorted({round(i * (count - 1) / ends) for i in range(ends + 1)})


def _numbers(count: int) -> list[str]:
    return [str(i) for i in _places(count)]


def table(header: Iterable[str], rows: Iterable[Iterable[str]], left: tuple[int, ...]) -> str:
    """Cells of HTML; left: columns that are aligned to the left."""

    def line(cells: Iterable[str], tag: str) -> str:
        marked = (
            f"<{tag}{' class=left' if i in left else ''}>{cell}</{tag}>" for i, cell in enumerate(cells)
        )
        return f"<tr>{''.join(marked)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="wide card"><table>{line(header, "th")}{body}</table></div>'


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


def figure(
    relative: torch.Tensor, caption: str, up: list[str], along: list[str], style: str, shape: str = ""
) -> str:
    """relative [lines, columns], 1 where nothing is to be seen. up, along: texts beside lines, below columns."""
    data = base64.b64encode(png(_colours(relative))).decode()
    caption = html.escape(caption)
    sides = ("".join(f"<span>{text}</span>" for text in texts) for texts in (up, along))
    return (
        f'<figure class="card"><figcaption>{caption}</figcaption><div class="map">'
        f'<div class="up">{next(sides)}</div>'
        f'<div class="{shape}" style="{style}"><img alt="{caption}" src="data:image/png;base64,{data}"></div>'
        f'<div class="along">{next(sides)}</div></div></figure>'
    )


def _colours(relative: torch.Tensor) -> torch.Tensor:
    """uint8 [lines, columns, 4]: the further from 1, the less transparent."""
    above = relative >= 1
    rgb = torch.where(above[..., None], torch.tensor(ABOVE), torch.tensor(BELOW))
    alpha = (relative - 1).abs().clamp(max=1) * 255
    return torch.cat((rgb, alpha[..., None].round().long()), -1).to(torch.uint8)


def png(pixels: torch.Tensor) -> bytes:
    """An RGBA picture: pixels uint8 [lines, columns, 4]."""
    lines, columns, _ = pixels.shape
    # filter 0 before each
    rows = torch.cat((torch.zeros(lines, 1, dtype=torch.uint8), pixels.reshape(lines, -1)), 1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", columns, lines, 8, 6, 0, 0, 0)
    body = zlib.compress(rows.contiguous().numpy().tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
