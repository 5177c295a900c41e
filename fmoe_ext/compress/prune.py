"""prune(): a folder of Transformers without the experts that a text needs least, in the packing it came in."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
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
    batch: int = 8,
    held_out: float = 0.1,
    scores: str | Path | None = None,
    dry_run: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Write a model without the experts that a text needs least -> the report, also in out/prune_report.json.

    folder: of Transformers, packed or not; it is only read. out: a new folder that Transformers, vLLM and stream() load
    as the first. tokens: ids [N] int64 of a text like those the model is for. keep: share of the experts that stay in
    each layer; experts: their number instead. criterion: reap, mass or frequency (compress.Scores.of). memory: for the
    model while it reads (stream). batch: sequences of seq_len tokens that go through a layer together; a model that
    does not fit is read once for each batch. held_out: the last share of the text, for the loss before and after.
    scores: a file that keeps what was measured after each batch; the same call goes on with it. dry_run: measures and
    chooses, writes no model.
    Raises CheckpointError for a text that is too short or has ids beyond the vocabulary, numbers that do not fit, an
    `out` that is taken, and a folder that cannot be read or cut; ValueError for another criterion.
    REAP: Lasby et al., 2025, https://arxiv.org/abs/2510.13999
    """
    folder, out = Path(folder), Path(out).absolute()
    if criterion not in CRITERIA:
        raise ValueError(f'criterion must be one of {", ".join(CRITERIA)}, but got "{criterion}"')
    if not 0 <= held_out < 1:
        raise CheckpointError(f"held_out must be from 0 to below 1, but got {held_out}")
    if not dry_run:
        check_is_free(out)
    base, model = Base(folder), stream(folder, memory)
    text_config = model.config.get_text_config()
    size = _number_of_experts(model, folder)
    number = number_to_keep(size, keep, experts, text_config.to_dict())
    calibration, test = _split(tokens, seq_len, held_out, FEWEST_TOKENS * size, text_config.vocab_size)
    found = _scores(model, folder, calibration, batch, criterion, scores, say)
    by_layer = found.of(criterion)
    groups = int(getattr(text_config, "n_group", None) or 1)
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
    if not dry_run:
        say(f"writing {out}")
        _write(base, out, kept, report, lambda work: _loss(stream(work, memory), test))
    return report


def _number_of_experts(model: Any, folder: Path) -> int:
    sizes = {int(m.num_experts) for m in model.modules() if hasattr(m, "is_transposed")}
    if len(sizes) != 1:
        raise CheckpointError(
            f"{folder} has layers of {sorted(sizes)} experts, which one number cannot replace"
        )
    return sizes.pop()


def _write(
    base: Base,
    out: Path,
    kept: dict[str, list[int]],
    report: dict[str, Any],
    loss_of: Callable[[Path], float | None],
) -> None:
    """The folder, with its report, to which the loss of the written model is added."""
    size, number = report["experts_before"], report["experts_after"]
    tensors = cut(base, kept, size)
    lock = out.with_name(f".{out.name}.lock")
    with made_folder(out.parent), locked(lock, f"pruning into {out}"), new_folder(out) as work:
        write_model_files(work, tensors, MAX_SHARD_BYTES)
        _write_rest(base, work, config_with(base.config, size, number))
        report["loss_after"] = loss_of(work)  # and proves that it loads
        with atomic_file(work / REPORT) as file:
            file.write(json.dumps(report, indent=1).encode())


def _split(
    tokens: Tensor, seq_len: int, held_out: float, fewest: int, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """(sequences [N, seq_len] to measure, sequences [M, seq_len] to test)."""
    if tokens.dim() != 1 or tokens.dtype != torch.int64:
        raise CheckpointError(f"tokens must be ids [N] int64, but got {tokens.dtype} {list(tokens.shape)}")
    whole = tokens[: tokens.numel() // seq_len * seq_len].view(-1, seq_len)
    measured = len(whole) - math.ceil(len(whole) * held_out)
    if measured * seq_len < fewest:
        raise CheckpointError(
            f"the text has {tokens.numel():,} tokens, of which {measured * seq_len:,} in whole sequences of {seq_len} "
            f"are left to measure: at least {fewest:,} say something about so many experts"
        )
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise CheckpointError(
            f"the tokens are from {tokens.min()} to {tokens.max()}, but the model has words 0 to {vocabulary - 1}"
        )
    return whole[:measured], whole[measured:]


def _scores(
    model: Any,
    folder: Path,
    sequences: Tensor,
    batch: int,
    criterion: str,
    file: str | Path | None,
    say: Callable[[str], None],
) -> Scores:
    """The scores, measured batch by batch; what the file of an earlier call has is not measured again."""
    about = {
        "model": str(folder.absolute()),
        "sequences": len(sequences),
        "text": hashlib.sha256(sequences.numpy().tobytes()).hexdigest(),
        "criterion": criterion,
    }
    found = None
    if file is not None and Path(file).exists():
        found = Scores.load(Path(file), about)
        say(f"{found.tokens:,} of {sequences.numel():,} tokens have scores in {file}")
    begun, done = time.monotonic(), 0
    first = 0 if found is None else found.tokens // sequences.shape[1]
    for at in range(first, len(sequences), batch):
        new = measure(model, [sequences[at : at + batch]], criterion)
        found = new if found is None else found + new
        if file is not None:
            found.save(Path(file), about)
        done += new.tokens
        rate = done / (time.monotonic() - begun)
        left = (sequences.numel() - found.tokens) / rate
        say(
            f"measured {found.tokens:,} of {sequences.numel():,} tokens, {rate:,.0f} a second, {left:,.0f} s left"
        )
    assert found is not None
    return found


@torch.no_grad()
def _loss(model: Any, sequences: Tensor) -> float | None:
    """Mean cross-entropy of the next token over sequences [M, L]; None without any."""
    losses = [model(input_ids=s[None], labels=s[None], use_cache=False).loss.double() for s in sequences]
    return torch.stack(losses).mean().item() if losses else None


def _layer_report(found: Scores, path: str, scores: Tensor, kept: Sequence[int]) -> dict[str, Any]:
    gone = sorted(set(range(scores.numel())) - set(kept))
    total = found.mass[path].sum().clamp(min=1e-30)
    return {
        "kept": list(kept),
        "scores": scores.tolist(),
        "pruned": {e: {"score": scores[e].item(), "tokens": found.count[path][e].item()} for e in gone},
        "lost_mass": (found.mass[path][gone].sum() / total).item(),
    }


def _write_rest(base: Base, work: Path, config: dict[str, Any]) -> None:
    for entry in sorted(base.folder.iterdir()):
        if entry.suffix in COPIED and not entry.name.endswith("index.json") and entry.is_file():
            shutil.copyfile(inside(base.folder, entry.name), work / entry.name)
    with atomic_file(work / "config.json") as file:
        file.write(json.dumps(config, indent=2).encode())
