"""Inspect, merge and convert checkpoints of all formats of convert.py: `fmoe checkpoint inspect|merge|convert PATH`."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from fmoe_ext._cli import add_json, as_json, reason
from fmoe_ext.checkpoint import convert, deepspeed, fastmoe
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.files import read_locked
from fmoe_ext.checkpoint.model_folder import local_path
from fmoe_ext.checkpoint.model_state import EXPERT_NAME, describe_layers
from fmoe_ext.checkpoint.routing import needed_config


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    try:
        with ExitStack() as until_read:
            options.path = [local_path(path) for path in options.path]
            path = options.path[0]
            # Refuse options that this format would ignore
            if options.mp_rank is not None and not (fastmoe.is_fastmoe(path) or deepspeed.is_deepspeed(path)):
                raise CheckpointError(
                    f"--mp-rank is for folders of FastMoE and DeepSpeed, which {path} is not"
                )
            if options.command == "convert" and options.ranks != 1 and options.to != "fastmoe":
                raise CheckpointError(
                    f"--ranks {options.ranks} is for --to fastmoe: {options.to} has no ranks"
                )
            checkpoint = convert.read(*options.path, mp_rank=options.mp_rank, trust=options.trust)
            if checkpoint.manifest is not None and checkpoint.files:  # hold it: no save(keep=) removes it
                until_read.enter_context(read_locked(checkpoint.files[0].with_name("manifest.json")))
            if options.verify:
                # only our checkpoints and safetensors files have checksums
                files = [f for f in checkpoint.files if checkpoint.manifest or f.suffix == ".safetensors"]
                with progress_bar("verifying", sum(file.stat().st_size for file in files)) as progress:
                    count = checkpoint.verify(progress)
                total = len(checkpoint.files)
                print(f"checksums  {count} of {total} files have one, all are right", file=sys.stderr)
            if options.command == "inspect":
                _inspect(checkpoint, options.json, options.tensors)
            else:
                _convert(checkpoint, options)
    except (CheckpointError, OSError, MemoryError) as error:
        sys.exit(f"error: {reason(error) or 'there is not enough memory'}")


def _inspect(checkpoint: convert.Checkpoint, in_json: bool, every_tensor: bool) -> None:
    """Print the files and layers of a checkpoint, and every tensor if asked; JSON always has every tensor."""
    manifest, tensors = checkpoint.manifest, checkpoint.tensors
    layers = describe_layers({name: t.shape for name, t in tensors.items()})
    optimizer = manifest.optimizer["type"] if manifest and manifest.optimizer else None
    sizes = {file: file.stat().st_size for file in checkpoint.files}
    if in_json:
        content = {
            "format": checkpoint.format,
            "step": checkpoint.step,
            "optimizer": optimizer,
            "files": {str(file): size for file, size in sizes.items()},
            "layers": layers,
            "tensors": {
                name: {"shape": list(t.shape), "dtype": str(t.dtype), "bytes": t.num_bytes}
                for name, t in tensors.items()
            },
            "left_out": checkpoint.left_out,
        }
        print(as_json(content))
        return
    # As a table
    num_params = sum(math.prod(t.shape) for t in tensors.values())
    of_experts = sum(math.prod(t.shape) for name, t in tensors.items() if EXPERT_NAME.fullmatch(name))
    lines = [
        f"format     {checkpoint.format}, step {checkpoint.step}",
        f"tensors    {len(tensors)}, {num_params:,} elements, {of_experts:,} of them of experts",
        f"optimizer  {optimizer or 'none'}",
        "",
        *table(("file", "bytes"), [(file.name, f"{size:,}") for file, size in sizes.items()]),
    ]
    # A row for each layer, then for each tensor
    rows: list[tuple[str, ...]] = []
    for name, layer in layers.items():
        prefix = f"{name}.experts." if name else "experts."
        own = [t for key, t in tensors.items() if key.startswith(prefix)]
        widths = (str(layer.get(key, "")) for key in ("d_model", "d_hidden"))
        counts = sum(math.prod(t.shape) for t in own), sum(t.num_bytes for t in own)
        rows.append((name or "(root)", str(layer["num_experts"]), *widths, *(f"{n:,}" for n in counts)))
    if rows:
        lines += ["", *table(("layer", "experts", "d_model", "d_hidden", "elements", "bytes"), rows)]
    if every_tensor:
        rows = [(name, str(list(t.shape)), str(t.dtype)) for name, t in tensors.items()]
        lines += ["", *table(("tensor", "shape", "dtype"), rows)]
    print("\n".join(lines))


def _convert(checkpoint: convert.Checkpoint, options: argparse.Namespace) -> None:
    total = sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
    with progress_bar("writing", total) as progress:
        convert.write(options.out, checkpoint, options.to, options.ranks, progress)
    print(f"{options.out}: {len(checkpoint.tensors)} tensors as {options.to}")
    if options.to.startswith("hf-"):
        config = needed_config(checkpoint.routing, options.to.removeprefix("hf-"))
        if config:
            print(f"config.json must say {json.dumps(config)[1:-1]}")
    # what did not come along
    if checkpoint.left_out:
        print(f"left out, no tensors of the model: {len(checkpoint.left_out)}, as {checkpoint.left_out[0]}")
    has_optimizer = bool(checkpoint.manifest and checkpoint.manifest.optimizer)
    if checkpoint.format in ("fastmoe", "deepspeed") or has_optimizer:
        print("the state of the optimizer, if any, is not converted")


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a table; the first column is aligned to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        first = row[0].ljust(widths[0])
        yield "  ".join(
            [first, *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], Any]]:
    """Show a progress bar of bytes on the terminal; yield the function that advances it by some bytes."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError as error:
        raise CheckpointError("progress bars need tqdm: pip install tqdm") from error
    with tqdm(desc=what, total=total, unit="B", unit_scale=True, disable=None) as bar:
        yield bar.update


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fmoe checkpoint")
    commands = parser.add_subparsers(dest="command", required=True)
    source = argparse.ArgumentParser(add_help=False)
    source.add_argument(
        "path",
        nargs="+",
        help="a checkpoint, or a model's name in the cache of the Hugging Face hub; or the .pt files of FastMoE's "
        "ranks, rank 0 first",
    )
    source.add_argument("--mp-rank", help="FastMoE and DeepSpeed: the model-parallel part, as mp_rank_00")
    source.add_argument("--trust", action="store_true", help="run the code in pickled files of others")
    no_verify = "do not check the checksums first"
    source.add_argument("--no-verify", dest="verify", action="store_false", help=no_verify)
    inspect = commands.add_parser("inspect", parents=[source], help="files, layers, experts, sizes")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor too")
    add_json(inspect)
    merge = commands.add_parser("merge", parents=[source], help="any checkpoint to one safetensors file")
    merge.add_argument("-o", "--out", required=True, help="file to write")
    merge.set_defaults(to="safetensors", ranks=1)
    change = commands.add_parser("convert", parents=[source], help="any checkpoint to any format")
    change.add_argument("-o", "--out", required=True, help="folder to write")
    change.add_argument("--to", required=True, choices=convert.FORMATS)
    ranks = "fastmoe: data-parallel ranks to write files for"
    change.add_argument("--ranks", type=int, default=1, help=ranks)
    return parser
