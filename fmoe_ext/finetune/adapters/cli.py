"""`fmoe adapter check|convert|merge FOLDER`: LoRA adapters of experts (docs/adapters.md).

merge --to packed goes to repack.py; all else works on weights that are read as floats.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from fmoe_ext._cli import positive_int, reason
from fmoe_ext.checkpoint.cli import progress_bar, table
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.expert_layers import decode
from fmoe_ext.checkpoint.model_folder import ModelFolder, local_path
from fmoe_ext.finetune.adapters.check import check, logits
from fmoe_ext.finetune.adapters.convert import LAYOUTS, convert
from fmoe_ext.finetune.adapters.merge import merge
from fmoe_ext.finetune.adapters.packing import EXPERT_MAJOR, RANK_MAJOR
from fmoe_ext.finetune.adapters.reading import CONFIG, WEIGHTS, Adapter, read_adapter
from fmoe_ext.finetune.adapters.repack import as_text as certificate_as_text
from fmoe_ext.finetune.adapters.repack import repack
from fmoe_ext.finetune.text import read_tokens, tokenize
from fmoe_ext.model_files import open_model

# options that only merge --to packed reads, with their defaults
_OF_PACKED: Mapping[str, Any] = MappingProxyType(
    {
        "text": None,
        "tokens": None,
        "tokenizer": None,
        "rounding": "calibrated",
        "memory": "auto",
        "seq_len": 512,
        "held_out": 0.25,
        "force": False,
    }
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, convert or merge an adapter -> 0; 1: check found a problem. An error ends the program with its reason."""
    options = _parser().parse_args(arguments)
    try:
        folder = local_path(options.path, (CONFIG, WEIGHTS))
        adapter = read_adapter(folder, options.packing, options.orientation)
        # merge --to packed opens its base by itself: it may be a GGUF file
        if options.command == "merge":
            if options.to == "packed":
                return _repack(adapter, options)
            if given := _given(options, *_OF_PACKED):
                raise CheckpointError(f"only --to packed takes {given}")
        base = ModelFolder(local_path(options.base)) if options.base else None
        if base is not None:
            decode(base)  # packed weights read as floats from here on
            base.check_plain()
        if options.command == "convert":
            convert(adapter, options.to, Path(options.out), base, check=not options.unchecked)
            print(f"{options.out}: {len(adapter.layers)} layers of experts as {options.to}")
            return 0
        if options.command == "merge":
            dtype = getattr(torch, options.dtype) if options.dtype else None
            total = sum(tensor.num_bytes for tensor in base.tensors.values()) if base else 0
            with progress_bar("merging", total) as progress:
                done = merge(adapter, base, Path(options.out), dtype, progress)  # type: ignore[arg-type]
            print(
                f"{options.out}: {done['changed']} tensors changed, {done['dtype']}; rounding took a share of "
                f"{done['lost_share_median']:.2g} of a change (median), {done['lost_share_worst']:.2g} (worst)"
            )
            return 0
        if options.model and base is None:
            raise CheckpointError("--model needs --base FOLDER")
        if options.scratch and not options.model:
            raise CheckpointError("--scratch is read with --model alone: add --model, or leave it out")
        # check; its --model needs a merged model, which is written to a temporary folder
        report = check(adapter, base)
        if options.model and base is not None and not report["problems"]:
            with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
                merge(adapter, base, Path(folder, "merged"), torch.float32)
                report["logits"] = logits(base, Path(folder, "merged"))
        print(json.dumps(report, indent=2) if options.json else _as_text(report))
        return 1 if report["problems"] else 0
    except (CheckpointError, OSError, ValueError, MemoryError) as error:
        sys.exit(f"error: {reason(error) or 'there is not enough memory'}")


def _given(options: argparse.Namespace, *names: str) -> str:
    """Join the options of these names that differ from their defaults; "" for none."""
    return ", ".join(f"--{n.replace('_', '-')}" for n in names if getattr(options, n) != _OF_PACKED[n])


def _repack(adapter: Adapter, options: argparse.Namespace) -> int:
    """Run merge --to packed -> 0."""
    has_text = options.text is not None or options.tokens is not None
    if options.dtype:
        raise CheckpointError("--dtype is for float weights: --to packed keeps the format of the base")
    if has_text == (options.rounding == "nearest"):
        raise CheckpointError(
            "--to packed needs --text or --tokens, a text of the kind the model will see, or --rounding nearest"
            if options.rounding == "calibrated"
            else "--rounding nearest reads no text: leave --text and --tokens out"
        )
    unread = [
        *([] if options.text else ["tokenizer"]),
        *([] if has_text else ["seq_len", "held_out", "force"]),
    ]
    if given := _given(options, *unread):
        why = "--tokens has ids already" if has_text else "--rounding nearest reads no text"
        raise CheckpointError(f"{given} would have no effect: {why}")
    # the text, by the base's tokenizer unless another one is given
    source = open_model(options.base)
    tokens = None
    if options.tokens:
        tokens = read_tokens(options.tokens)
    elif options.text:
        tokens = tokenize(options.text, options.tokenizer or source.path)
    certificate = repack(
        adapter,
        source,
        Path(options.out),
        tokens,
        memory=options.memory,
        seq_len=options.seq_len,
        held_out=options.held_out,
        force=options.force,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(certificate_as_text(certificate))
    return 0


def _as_text(report: dict[str, Any]) -> str:
    """Write the report of check() as a table."""
    scores = ", ".join(f"{name} {score:.1f}" for name, score in report["packing_scores"].items())
    lines = [
        f"layout       {report['form']}: {report['written_by']}",
        f"orientation  {report['orientation'] or '-'}",
        f"packing      {report['packing'] or '-'}{f' (standard scores: {scores})' if scores else ''}",
        f"base         {report['base_model'] or 'not said'}",
        "",
    ]
    # a row for each projection of each layer
    head = ("layer", "projection", "experts", "rank", "in", "out", "scaling", "idle", "delta / weight")
    rows = []
    for row in report["rows"]:
        # shares are of the base's projections, and one of two may have gate_up where the other has gate and up
        delta, own = report.get("delta", {}).get(row["layer"], {}), row["projection"]
        shares = [share for role, of in delta.items() if role in own or own in role for share in of]
        size = f"{min(shares):.2g} to {max(shares):.2g}" if shares else ""
        idle = str(len(row["idle_experts"])) if "idle_experts" in row else "?"
        values = (row["experts"], row["rank"], row["in"], row["out"], f"{row['scaling']:g}", idle, size)
        rows.append((row["layer"], own, *map(str, values)))
    lines += table(head, rows)
    if "logits" in report:
        lines += [
            "",
            *(f"logits: {name.replace('_', ' ')} {value:.3g}" for name, value in report["logits"].items()),
        ]
    notes = (f"note: {text}" for text in report["notes"])
    return "\n".join([*lines, "", *notes, *(f"problem: {text}" for text in report["problems"] or ["none"])])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fmoe adapter")
    commands = parser.add_subparsers(dest="command", required=True)
    # what all three commands take
    source = argparse.ArgumentParser(add_help=False)
    source.add_argument(
        "path", help="folder or name of the adapter: adapter_config.json and adapter_model.safetensors"
    )
    source.add_argument(
        "--packing",
        choices=(RANK_MAJOR, EXPERT_MAJOR),
        help="packing of lora_B, if the file does not show it",
    )
    source.add_argument(
        "--orientation",
        choices=("out_in", "in_out"),
        help="orientation of lora_A, if the file does not show it",
    )
    check_parser = commands.add_parser("check", parents=[source], help="which layout, and what is wrong")
    check_parser.add_argument(
        "--base", help="folder or name of the model: compares shapes, prints the size of the delta"
    )
    check_parser.add_argument(
        "--model", action="store_true", help="run the model with and without the adapter"
    )
    check_parser.add_argument(
        "--scratch", help="folder for the merged model of --model, the system's by default"
    )
    check_parser.add_argument("--json", action="store_true", help="print everything, for each expert")

    convert_parser = commands.add_parser(
        "convert", parents=[source], help="the same adapter in another layout"
    )
    convert_parser.add_argument("--to", required=True, choices=LAYOUTS)
    convert_parser.add_argument(
        "--base", help="folder or name of the model, if the adapter does not say enough about it"
    )
    convert_parser.add_argument(
        "--unchecked", action="store_true", help="do not ask the installed PEFT if it reads the same adapter"
    )
    convert_parser.add_argument("-o", "--out", required=True, help="folder to write")

    merge_parser = commands.add_parser(
        "merge", parents=[source], help="add an adapter to its model, an expert at a time"
    )
    merge_parser.add_argument(
        "--base", required=True, help="folder or name of the model, which stays as it is"
    )
    merge_parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="dtype of the weights, the model's by default"
    )
    merge_parser.add_argument("-o", "--out", required=True, help="folder to write")
    # --to packed, and what belongs to it
    merge_parser.set_defaults(**_OF_PACKED)
    merge_parser.add_argument(
        "--to", choices=("packed",), help="pack the experts again, in the format of the base"
    )
    text = merge_parser.add_mutually_exclusive_group()
    text.add_argument("--text", type=Path, help="UTF-8 text of the kind the model will see, to round by")
    text.add_argument("--tokens", type=Path, help="the same as token ids: .npy, or a JSON list")
    merge_parser.add_argument("--tokenizer", help="folder or name of the tokenizer, the model's by default")
    merge_parser.add_argument(
        "--rounding",
        choices=("calibrated", "nearest"),
        help="nearest: without a text, for adapters trained by lora.fuse(quantize=)",
    )
    merge_parser.add_argument("--memory", help='memory for the model while it reads the text, such as "8GiB"')
    merge_parser.add_argument("--seq-len", type=positive_int, help="tokens of a sequence, 512 by default")
    merge_parser.add_argument(
        "--held-out",
        type=float,
        help="share of the text to measure the error on, 0.25 by default",
    )
    merge_parser.add_argument(
        "--force",
        action="store_true",
        help="write the result even if it is worse than the base without the adapter",
    )
    return parser
