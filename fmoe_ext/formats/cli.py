"""`fmoe export FOLDER`: a float model in packed weights, for llama.cpp or Transformers (docs/formats.md)."""

import argparse
import sys
from collections.abc import Sequence

from fmoe_ext._cli import reason
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.formats.quantized import TARGETS, TYPES, export_quantized


def main(arguments: Sequence[str] | None = None) -> int:
    """0: written; 2: could not be done."""
    parser = argparse.ArgumentParser(
        prog="fmoe export",
        description="Writes a float model in packed weights, an expert in memory at a time.",
    )
    parser.add_argument("path", help="folder or name of the model, which stays as it is")
    to = "gguf: model.gguf for llama.cpp; packed: a folder for Transformers and vLLM"
    parser.add_argument("--to", required=True, choices=TARGETS, help=to)
    parser.add_argument("--type", required=True, choices=TYPES, help="the packing of the weights")
    parser.add_argument("-o", "--out", required=True, help="folder to write")
    options = parser.parse_args(arguments)
    try:
        report = export_quantized(options.path, options.out, options.to, options.type)
    except (CheckpointError, OSError, ValueError, MemoryError) as error:
        sys.exit(f"error: {reason(error) or 'there is not enough memory'}")
    counts = ", ".join(f"{count} {name}" for name, count in report.counts.items())
    print(f"{options.out}: tensors: {counts}; {report.bytes_before:,} -> {report.bytes_after:,} bytes")
    if report.left_out:
        print(f"left out, no tensors of the model: {len(report.left_out)}, as {report.left_out[0]}")
    if not report.has_vocabulary:
        print(
            f"model.gguf has no vocabulary, so servers of llama.cpp refuse it: {options.path} has no tokenizer",
            file=sys.stderr,
        )
    return 0
