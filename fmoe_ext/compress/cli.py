"""`fmoe prune FOLDER OUT`: a model without the experts that a text needs least."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from fmoe_ext._cli import add_json, as_json, positive_int, reason
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.compress.page import render
from fmoe_ext.compress.prune import prune
from fmoe_ext.compress.scores import CRITERIA

PAGE = "prune_report.html"


def main(arguments: Sequence[str] | None = None) -> int:
    """0: written, or measured with --dry-run; 2: could not be done."""
    given = parser().parse_args(arguments)
    say = (lambda line: print(line, file=sys.stderr, flush=True)) if not given.quiet else lambda line: None
    transformers.utils.logging.disable_progress_bar()
    try:
        tokens = read_tokens(given.tokens) if given.tokens else tokenized(given.text, given.folder)
        report = prune(
            given.folder,
            given.out,
            tokens,
            keep=given.keep,
            experts=given.experts,
            criterion=given.criterion,
            memory=given.memory,
            seq_len=given.seq_len,
            batch=given.batch,
            held_out=given.held_out,
            scores=given.scores or given.out.with_name(f"{given.out.name}.scores.json"),
            dry_run=given.dry_run,
            say=say,
        )
        if not given.dry_run:
            (given.out / PAGE).write_text(render(report), encoding="utf-8")
    except (CheckpointError, OSError, ValueError, ImportError) as error:
        print(f"error: {reason(error)}", file=sys.stderr)
        return 2
    print(as_json(report) if given.json else summary(report, given.out))
    return 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="fmoe prune",
        description="Writes a model without the experts that a text needs least, in the packing it came in.",
        epilog="Scores stay in OUT.scores.json: a call that was killed goes on, another --keep measures nothing.",
    )
    result.add_argument("folder", type=Path, help="the model, as Transformers saves it; it is only read")
    result.add_argument("out", type=Path, help="a new folder")
    text = result.add_mutually_exclusive_group(required=True)
    text.add_argument("--text", type=Path, help="a text like those that the model is for, for its tokenizer")
    text.add_argument("--tokens", type=Path, help="the same as ids: a .npy file with one row of integers")
    size = result.add_mutually_exclusive_group(required=True)
    size.add_argument("--keep", type=float, help="share of the experts that stay in each layer, such as 0.75")
    size.add_argument("--experts", type=positive_int, help="their number")
    result.add_argument(
        "--criterion", choices=CRITERIA, default="reap", help="default: reap (arXiv 2510.13999)"
    )
    result.add_argument(
        "--memory", default="auto", help='for the model, such as 8GiB; default: what is free ("auto")'
    )
    result.add_argument("--seq-len", type=positive_int, default=512, help="tokens a sequence, default 512")
    result.add_argument(
        "--batch", type=positive_int, default=8, help="sequences that go through a layer together, default 8"
    )
    result.add_argument(
        "--held-out", type=float, default=0.1, help="last share of the text, for the losses, default 0.1"
    )
    result.add_argument("--scores", type=Path, help="where scores are kept, default OUT.scores.json")
    result.add_argument("--dry-run", action="store_true", help="measure and choose, write no model")
    result.add_argument("--quiet", action="store_true", help="no progress")
    add_json(result)
    return result


def read_tokens(path: Path) -> Tensor:
    """ids [N] int64 of a .npy file; ValueError for anything else."""
    found: Any = np.load(path, allow_pickle=False)
    if not isinstance(found, np.ndarray) or found.ndim != 1 or found.dtype.kind not in "iu":
        raise ValueError(f"{path} must have one row of integers")
    return torch.from_numpy(found.astype(np.int64))


def tokenized(text: Path, folder: Path) -> Tensor:
    """ids [N] int64 of a text, by the tokenizer of the model's folder; CheckpointError if it has none that reads it."""
    content = text.read_text(encoding="utf-8")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CheckpointError(
            f"{folder} has no tokenizer that loads ({reason(error)}): give --tokens"
        ) from error
    ids: list[int] = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
    if not ids:  # of a folder without its files, Transformers makes a tokenizer without words
        raise CheckpointError(f"the tokenizer of {folder} finds no token in {text}: give --tokens")
    return torch.tensor(ids, dtype=torch.int64)


def summary(report: dict[str, Any], out: Path) -> str:
    """Lines for people, printed without --json."""
    lines = [
        f"{report['experts_before']} -> {report['experts_after']} experts a layer, by {report['criterion']} on "
        f"{report['tokens']:,} tokens"
    ]
    for path, layer in report["layers"].items():
        gone = ", ".join(map(str, layer["pruned"]))
        lines.append(
            f"{path}: {layer['lost_mass']:.2%} of the routing weight went to pruned experts ({gone})"
        )
    before, after = report["loss_before"], report.get("loss_after")
    if before is not None:
        lines.append(f"held-out loss {before:.4f}" + (f" -> {after:.4f}" if after is not None else ""))
    lines.append(
        f"{out}: written, with {PAGE}" if "loss_after" in report else "nothing was written (--dry-run)"
    )
    return "\n".join(lines)
