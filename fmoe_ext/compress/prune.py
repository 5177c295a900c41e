"""prune(): a folder of Transformers without the experts that a text needs least, in the packing it came in."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.files import atomic_file, inside, locked, made_folder
from fmoe_ext.checkpoint.model_folder import Base
from fmoe_ext.checkpoint.shards import MAX_SHARD_BYTES, check_is_free, new_folder, write_model_files
from fmoe_ext.compress.choose import best, number_to_keep
from fmoe_ext.compress.cut import config_with, cut
from fmoe_ext.compress.scores import CRITERIA, Scores, measure
from fmoe_ext.finetune.streaming.model import stream

COPIED = (".json", ".txt", ".model", ".jinja")  # of the tokenizer and the configuration
REPORT = "prune_report.json"
FEWEST_TOKENS = 16  # of the text, for each expert of a layer and choice of a token: fewer say little


def prune(
    folder: str | Path,
    out: str | Path,
    tokens: Tensor,
    *,
    keep: float | None = None,
    experts: int | None = None,
    criterion: str = "reap",
    memory: int | str = "auto",
    seq_len: int = 512,
    held_out: float = 0.1,
    scores: str | Path | None = None,
    dry_run: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Write a model without the experts that a text needs least -> the report, also in out/prune_report.json.

    folder: of Transformers, packed or not; it is only read. out: a new folder that Transformers, vLLM and stream() load
    as the first. tokens: ids [N] int64 of a text like those the model is for. keep: share of the experts that stay in
    each layer; experts: their number instead. criterion: reap, mass or frequency (compress.Scores.of). memory: for the
    model while it reads (stream). held_out: the last share of the text, on which the loss is measured before and after.
    scores: a file that keeps what was measured; the same call goes on with it. dry_run: measures, writes no model.
    Raises CheckpointError for a text that is too short, numbers that do not fit, an `out` that is taken, and a
    folder that cannot be read or cut; ValueError for another criterion.
    REAP: Lasby et al., 2025, https://arxiv.org/abs/2510.13999
    """
    folder, out = Path(folder), Path(out).absolute()
    if criterion not in CRITERIA:
        raise ValueError(f'criterion must be one of {", ".join(CRITERIA)}, but got "{criterion}"')
    if not 0 <= held_out < 1:
        raise CheckpointError(f"held_out must be from 0 to below 1, but got {held_out}")
    if not dry_run:
        check_is_free(out)
    model = stream(folder, memory)
    base = Base(folder)
    text_config = model.config.get_text_config()
    sizes = {int(m.num_experts) for m in model.modules() if hasattr(m, "is_transposed")}
    if len(sizes) != 1:
        raise CheckpointError(
            f"{folder} has layers of {sorted(sizes)} experts, which one number cannot replace"
        )
    (size,) = sizes
    number = number_to_keep(size, keep, experts, text_config.to_dict())
    calibration, test = _split(tokens, seq_len, held_out, FEWEST_TOKENS * size)
    found = _scores(model, folder, calibration, criterion, scores, say)
    groups = int(getattr(text_config, "n_group", None) or 1)
    by_layer = found.of(criterion)
    kept = {path: best(values, number, groups) for path, values in by_layer.items()}
    report: dict[str, Any] = {
        "base": str(folder),
        "criterion": criterion,
        "tokens": found.tokens,
        "experts_before": size,
        "experts_after": number,
        "loss_before": _loss(model, test),
        "layers": {path: _layer_report(found, path, by_layer[path], kept[path]) for path in kept},
    }
    del model
    if dry_run:
        return report
    say(f"writing {out}")
    tensors = cut(base, kept, size)
    lock = out.with_name(f".{out.name}.lock")
    with made_folder(out.parent), locked(lock, f"pruning into {out}"), new_folder(out) as work:
        write_model_files(work, tensors, MAX_SHARD_BYTES)
        _write_rest(base, work, config_with(base.config, size, number))
        report["loss_after"] = _loss(stream(work, memory), test)  # and proves that it loads
        with atomic_file(work / REPORT) as file:
            file.write(json.dumps(report, indent=1).encode())
    return report


def _split(tokens: Tensor, seq_len: int, held_out: float, fewest: int) -> tuple[list[Tensor], list[Tensor]]:
    """(sequences [1, seq_len] to measure, sequences to test)."""
    if tokens.dim() != 1 or tokens.dtype != torch.int64:
        raise CheckpointError(f"tokens must be ids [N] int64, but got {tokens.dtype} {list(tokens.shape)}")
    whole = list(tokens[: tokens.numel() // seq_len * seq_len].view(-1, 1, seq_len))
    num_test = math.ceil(len(whole) * held_out)
    measured = len(whole) - num_test
    if measured * seq_len < fewest:
        raise CheckpointError(
            f"the text has {tokens.numel():,} tokens, of which {measured * seq_len:,} in whole sequences of {seq_len} "
            f"are left to measure: at least {fewest:,} say something about so many experts"
        )
    return whole[:measured], whole[measured:]


def _scores(
    model: Any,
    folder: Path,
    batches: Sequence[Tensor],
    criterion: str,
    file: str | Path | None,
    say: Callable[[str], None],
) -> Scores:
    """The scores, measured now or taken from the file of an earlier call."""
    digest = hashlib.sha256(b"".join(batch.numpy().tobytes() for batch in batches)).hexdigest()
    about = {
        "model": str(folder.absolute()),
        "sequences": len(batches),
        "text": digest,
        "criterion": criterion,
    }
    if file is not None and Path(file).exists():
        say(f"scores of {file}")
        return Scores.load(Path(file), about)

    def with_progress() -> Any:
        for i, batch in enumerate(batches):
            say(f"reading sequence {i + 1} of {len(batches)}")
            yield batch

    found = measure(model, with_progress(), criterion)
    if file is not None:
        found.save(Path(file), about)
    return found


@torch.no_grad()
def _loss(model: Any, batches: Sequence[Tensor]) -> float | None:
    """Mean cross-entropy of the next token over sequences [1, L]; None without any."""
    losses = [model(input_ids=b, labels=b, use_cache=False).loss.double() for b in batches]
    return torch.stack(losses).mean().item() if losses else None


def _layer_report(found: Scores, path: str, scores: Tensor, kept: Sequence[int]) -> dict[str, Any]:
    gone = sorted(set(range(scores.numel())) - set(kept))
    total = found.mass[path].sum().clamp(min=1e-30)
    return {
        "kept": list(kept),
        "pruned": {e: {"score": scores[e].item(), "tokens": found.count[path][e].item()} for e in gone},
        "lost_mass": (found.mass[path][gone].sum() / total).item(),
    }


def _write_rest(base: Base, work: Path, config: dict[str, Any]) -> None:
    for entry in sorted(base.folder.iterdir()):
        if entry.suffix in COPIED and not entry.name.endswith("index.json") and entry.is_file():
            shutil.copyfile(inside(base.folder, entry.name), work / entry.name)
    with atomic_file(work / "config.json") as file:
        file.write(json.dumps(config, indent=2).encode())
