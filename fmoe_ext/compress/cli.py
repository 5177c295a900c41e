"""Write a model without the experts that a text needs least: `fmoe prune FOLDER` (docs/compress.md)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fmoe_ext._cli import add_json, as_json, positive_float, positive_int, reason
from fmoe_ext.checkpoint.cli import table
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.compress.prune import PAGE, prune
from fmoe_ext.compress.scores import CRITERIA
from fmoe_ext.finetune.text import read_tokens, tokenize


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command -> 0: written; 2: could not be done."""
    options = _parser().parse_args(arguments)
    try:
        if options.tokens:
            if options.tokenizer:
                raise CheckpointError("--tokenizer is of --text")
            tokens = read_tokens(options.tokens)
        else:
            tokens = tokenize(options.text, options.tokenizer or options.path)
        report = prune(
            options.path,
            options.out or "",
            tokens,
            keep=options.keep,
            experts=options.experts,
            criterion=options.criterion,
            merge=options.merge,
            memory=options.memory,
            seq_len=options.seq_len,
            batch=options.batch,
            held_out=options.held_out,
            scores=options.scores,
            dry_run=options.dry_run,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except (CheckpointError, OSError, ValueError, MemoryError) as error:
        sys.exit(f"error: {reason(error) or 'there is not enough memory'}")
    print(as_json(report) if options.json else _as_text(report, options.out))
    return 0


def _as_text(report: dict[str, Any], out: str | None) -> str:
    """Format the report as lines: a row a layer, and the losses."""
    rows = [
        (path, str(len(layer["kept"])), str(len(layer["pruned"])), f"{layer['lost_mass']:.2%}")
        for path, layer in report["layers"].items()
    ]
    lines = [*table(("layer", "stay", "go", "routing weight lost"), rows), ""]
    losses = [f"loss before {report['loss_before']:.4f}"] if report["loss_before"] is not None else []
    if report.get("loss_after") is not None:
        losses.append(f"after {report['loss_after']:.4f}")
    lines += [", ".join(losses)] if losses else []
    if report["heads"]:
        lines.append(
            f"heads for further tokens: experts by the norms of their weights, {len(report['heads'])} layers"
        )
    counts = (
        f"{report['experts_before']} -> {report['experts_after']} experts a layer by {report['criterion']}"
    )
    lines.append(
        f"{out}: {counts}; {out}/{PAGE}" if "loss_after" in report else f"{counts}; nothing was written"
    )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fmoe prune", description="Writes a model without the experts that a text needs least."
    )
    add = parser.add_argument
    add("path", help="folder or name of the model, which stays as it is")
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--text", type=Path, help="UTF-8 text like that the model is for")
    text.add_argument("--tokens", type=Path, help="the same as token ids: .npy, or a JSON list")
    number = parser.add_mutually_exclusive_group(required=True)
    number.add_argument("--keep", type=positive_float, help="share of the experts that stay, as 0.75")
    number.add_argument("--experts", type=positive_int, help="their number in each layer instead")
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("-o", "--out", help="folder to write")
    place.add_argument("--dry-run", action="store_true", help="measure and report, write nothing")
    add("--criterion", choices=CRITERIA, default="reap", help="score of an expert, reap by default")
    add(
        "--merge",
        type=positive_float,
        nargs="?",
        const=0.9,
        help="merge experts whose weights have this cosine, 0.9 by default, instead of leaving one out",
    )
    add("--memory", default="auto", help='for the model while it reads, as "8GiB"')
    add("--tokenizer", help="folder or name of the tokenizer, that of the model by default")
    add("--seq-len", type=positive_int, default=512, help="tokens of a sequence, 512 by default")
    add("--batch", type=positive_int, default=8, help="sequences for each pass over the files, 8 by default")
    add(
        "--held-out", type=float, default=0.1, help="share of the text to measure the loss on, 0.1 by default"
    )
    add("--scores", type=Path, help="file that keeps what was measured, for other calls")
    add_json(parser)
    return parser
