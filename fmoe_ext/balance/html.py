"""Make the parts of page.py's HTML, which needs no other file: style, tables, tiles, pictures of numbers.

A picture is a PNG of one pixel a number, written here and stretched by the browser, inside the page as base64. Its
colours are transparent at an even share, so that it suits a light page and a dark one.
"""

from __future__ import annotations

import base64
import html
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence

import torch

ABOVE, BELOW = (214, 96, 30), (38, 110, 190)  # more and less than an even share
UNKNOWN = (128, 128, 128, 110)  # red, green, blue, opacity
LEAST, MOST = 64, 360  # pixels of a picture's height
LINE, LABEL = 8, 20  # pixels of a line, and of a line's label with the space around it

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
.map { display: grid; grid-template-columns: auto 1fr; gap: 2px 6px; margin-top: 6px; padding-right: 12px; }
.map .up, .map .along { position: relative; color: var(--soft); font-size: 12px; line-height: 18px; }
.map .up span { position: absolute; right: 0; transform: translateY(-50%); }
.map .along { grid-column: 2; height: 18px; } .map .along span { position: absolute; transform: translateX(-50%); }
.stack { display: grid; gap: 12px; }
.square { aspect-ratio: 1; }
.scale { display: inline-block; width: 160px; height: 11px; border: 1px solid var(--line); vertical-align: -1px;
  margin: 0 6px; background: linear-gradient(to right, var(--below), transparent, var(--above)); }
.unknown { display: inline-block; width: 22px; height: 11px; vertical-align: -1px; margin: 0 6px;
  background: rgb(128 128 128 / 43%); border: 1px solid var(--line); }
.chip { display: inline-block; border: 1px solid var(--line); border-radius: 5px; padding: 0 6px; margin: 1px 3px 1px 0;
  font: 13px ui-monospace, monospace; }
svg { display: block; margin-left: auto; }
polyline { fill: none; stroke: var(--above); stroke-width: 1.5; }
.bars { width: 100%; height: 100%; } .bars .more { fill: var(--above); } .bars .less { fill: var(--below); }
.bars line { stroke: var(--text); stroke-width: 1; vector-effect: non-scaling-stroke; stroke-dasharray: 4 3; }
"""


def document(title: str, body: str) -> str:
    """Return a whole page with this body, HTML, and the style in it."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, '
        f'initial-scale=1"><title>{html.escape(title)}</title><style>{STYLE}</style></head><body>{body}</body></html>\n'
    )


def tiles(facts: Mapping[str, str]) -> str:
    """Show figures in large type, each over its name."""
    cells = "".join(
        f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for name, value in facts.items()
    )
    return f'<div class="tiles">{cells}</div>'


def scale(low: str, middle: str, high: str, unknown: str = "") -> str:
    """Show the colours, with what their ends, their middle and, where it occurs, grey stand for."""
    colours = f'{low}<span class="scale" role="img" aria-label="{middle} in the middle"></span>{high}'
    grey = f'; <span class="unknown" role="img" aria-label="grey"></span>{unknown}' if unknown else ""
    return f"{colours}; no colour: {middle}{grey}"


def places(count: int) -> range:
    """Choose at most five of the numbers 0 .. count - 1, from 0 on and equally far apart, for labels."""
    return range(0, count, max(1, -(-(count - 1) // 4)))


def table(header: Iterable[str], rows: Iterable[Iterable[str]], left: tuple[int, ...]) -> str:
    """Show rows under a header; left: numbers of the columns of text."""

    def line(cells: Iterable[str], tag: str) -> str:
        marked = (
            f"<{tag}{' class=left' if i in left else ''}>{cell}</{tag}>" for i, cell in enumerate(cells)
        )
        return f"<tr>{''.join(marked)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="wide card"><table>{line(header, "th")}{body}</table></div>'


def figure(
    relative: torch.Tensor, caption: str, up: Sequence[str], along: Sequence[str], square: bool = False
) -> str:
    """Show numbers [lines, columns] as a picture: 1 has no colour, more and less have one each, NaN is grey.

    up, along: names of all lines and columns. Some of them are shown, beside the middle of a line or below a column's.
    """
    data = base64.b64encode(png(_colours(relative))).decode()
    caption = html.escape(caption)
    # a line gets LINE pixels within bounds, and a label never less than LABEL
    height = max(LEAST, min(MOST, LINE * len(up)), LABEL * len(places(len(up))))
    shape = 'class="square"' if square else f'style="height:{height}px"'
    width = max(len(up[i]) for i in places(len(up)))
    return (
        f'<figure class="card"><figcaption>{caption}</figcaption><div class="map">'
        f'<div class="up" style="width:{width}ch">{_labels(up, "top")}</div>'
        f'<div {shape}><img alt="{caption}" src="data:image/png;base64,{data}"></div>'
        f'<div class="along">{_labels(along, "left")}</div></div></figure>'
    )


def bars(relative: Sequence[float], caption: str, names: Sequence[str]) -> str:
    """Show a bar for each number, from 0 up, and a line at 1. names: of all bars; some stand below them."""
    top = max(2.0, *relative)
    shapes = "".join(
        f'<rect class="{"more" if value > 1 else "less"}" x="{i + 0.1:.1f}" y="{top - value:.3f}" width="0.8" '
        f'height="{value:.3f}"><title>{html.escape(names[i])}: {value:.2f}</title></rect>'
        for i, value in enumerate(relative)
    )
    # the picture is stretched to the card, so the mean's line has a width that is not
    return (
        f'<figure class="card"><figcaption>{html.escape(caption)}</figcaption><div class="map">'
        f'<div class="up" style="width:3ch"><span style="top:{100 * (1 - 1 / top):.1f}%">1</span></div>'
        f'<div style="height:90px"><svg class="bars" viewBox="0 0 {len(relative)} {top:.3f}" '
        f'preserveAspectRatio="none" role="img" aria-label="{html.escape(caption)}">{shapes}'
        f'<line x1="0" x2="{len(relative)}" y1="{top - 1:.3f}" y2="{top - 1:.3f}"/></svg></div>'
        f'<div class="along">{_labels(names, "left")}</div></div></figure>'
    )


# the names of places(): a span for each, placed in percent of the picture from this side
def _labels(names: Sequence[str], side: str) -> str:
    return "".join(
        f'<span style="{side}:{100 * (i + 0.5) / len(names):.3f}%">{names[i]}</span>'
        for i in places(len(names))
    )


def _colours(relative: torch.Tensor) -> torch.Tensor:
    """Make RGBA pixels, uint8 [lines, columns, 4]: the further from 1, the less transparent; grey for NaN."""
    above = relative >= 1
    high, low = (torch.tensor(rgb, device=relative.device) for rgb in (ABOVE, BELOW))
    rgb = torch.where(above[..., None], high, low)
    alpha = (relative - 1).nan_to_num(0).abs().clamp(max=1) * 255
    colours = torch.cat((rgb, alpha[..., None].round().long()), -1)
    unknown = torch.tensor(UNKNOWN, device=relative.device)
    return torch.where(relative.isnan()[..., None], unknown, colours).to(torch.uint8)


def png(pixels: torch.Tensor) -> bytes:
    """Encode an RGBA picture: pixels uint8 [lines, columns, 4]."""
    lines, columns, _ = pixels.shape
    no_filter = pixels.new_zeros(lines, 1)  # each line begins with the number of its filter
    rows = torch.cat((no_filter, pixels.reshape(lines, -1)), 1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    # 8: bits of a channel; 6: RGBA; the zeros: deflate, the usual filters, not interlaced
    header = struct.pack(">IIBBBBB", columns, lines, 8, 6, 0, 0, 0)
    body = zlib.compress(rows.contiguous().numpy().tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
