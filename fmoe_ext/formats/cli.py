"""Write a float model in packed weights, for llama.cpp or Transformers: `fmoe export FOLDER` (docs/formats.md)."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fmoe_ext._cli import positive_int, reason
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.finetune.text import read_tokens, tokenize
from fmoe_ext.formats.quantized import TARGETS, TYPES, export_quantized


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 once the model is written, or exit with an error."""
    parser = argparse.ArgumentParser(
        prog="fmoe export",
        description="Writes a float model in packed weights, an expert in memory at a time.",
    )
    parser.add_argument("path", help="folder or name of the model, which stays as it is")
    to = "gguf: model.gguf for llama.cpp; packed: a folder for Transformers and vLLM"
    parser.add_argument("--to", required=True, choices=TARGETS, help=to)
    parser.add_argument("--type", required=True, choices=TYPES, help="the packing of the weights")
    parser.add_argument("-o", "--out", required=True, help="folder to write")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--text", type=Path, help="UTF-8 text like that the model is for, to choose scales by")
    text.add_argument("--tokens", type=Path, help="the same as token ids: .npy, or a JSON list")
    parser.add_argument(
        "--seq-len", type=positive_int, default=512, help="tokens of a sequence of the text, 512 by default"
    )
    parser.add_argument("--tokenizer", help="folder or name of the text's tokenizer, the model's by default")
    parser.add_argument("--memory", default="auto", help='for the model while it reads the text, as "8GiB"')
    options = parser.parse_args(arguments)
    if options.tokenizer and not options.text:
        parser.error("--tokenizer is for --text, which it turns into token ids")
    try:
        tokens = read_tokens(options.tokens) if options.tokens else None
        if options.text:
            tokens = tokenize(options.text, options.tokenizer or options.path)
        report = export_quantized(
            options.path,
            options.out,
            options.to,
            options.type,
            tokens=tokens,
            seq_len=options.seq_len,
            memory=options.memory,
        )
    except (CheckpointError, OSError, ValueError, MemoryError) as error:
        sys.exit(f"error: {reason(error) or 'there is not enough memory'}")
    counts = ", ".join(f"{count} {name}" for name, count in report.counts.items())
    print(f"{options.out}: tensors: {counts}; {report.bytes_before:,} -> {report.bytes_after:,} bytes")
    if report.left_out:
        print(
            f"left out, {len(report.left_out)} tensors that llama.cpp has no place for: {report.left_out_text}"
        )
    # of GGUF alone: folders get the tokenizer's files
    if not report.has_vocabulary:
        print(
            f"model.gguf has no vocabulary, so servers of llama.cpp refuse it: {options.path} has no tokenizer",
            file=sys.stderr,
        )
    return 0
