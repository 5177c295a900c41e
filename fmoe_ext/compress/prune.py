"""prune(): a folder of Transformers without the experts that a text needs least, in the packing it came in.

The model is streamed over the text once, and hooks count what each expert does (scores). The best of each layer stay
(choose), or some are merged into others. Their bytes are copied from the files (cut, cut_gguf), so that packed experts
lose nothing; the result is streamed again over held-out text, which proves that it loads and gives its loss.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fmoe_ext.checkpoint.card import render_card, shown, write_card
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.files import atomic_file, fingerprint, write_json
from fmoe_ext.checkpoint.shards import check_is_free, continued
from fmoe_ext.compress.choose import best, best_merged, number_to_keep, similarities
from fmoe_ext.compress.cut import Cut, Shares
from fmoe_ext.compress.cut_gguf import GgufCut
from fmoe_ext.compress.page import render
from fmoe_ext.compress.scores import CRITERIA, Measurement, Scores
from fmoe_ext.finetune.streaming.model import stream
from fmoe_ext.finetune.text import sequences
from fmoe_ext.model_files import FolderModel, GgufModel, ModelFiles, experts_modules, open_model

REPORT, PAGE = "prune_report.json", "prune_report.html"
SCORES = "scores.json"  # of a job that is not done
Say: TypeAlias = Callable[[str], None]


def prune(
    folder: str | Path,
    out: str | Path,
    tokens: Tensor,
    *,
    keep: float | None = None,
    experts: int | None = None,
    criterion: str = "reap",
    merge: float | None = None,
    memory: int | str = "auto",
    seq_len: int = 512,
    batch: int = 8,
    held_out: float = 0.1,
    scores: str | Path | None = None,
    dry_run: bool = False,
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Write a model without the experts that a text needs least -> the report, also in out/prune_report.json and .html.

    folder: of Transformers, packed or not, a GGUF file, or a name in the cache of the Hugging Face hub; it is only
    read. out: a new folder that Transformers, vLLM and stream() load as the first, or with the GGUF file in it.
    tokens: ids [N] int64 of a text like those the model is for. keep: share of the experts that stay in each layer;
    experts: their number instead. criterion: reap, mass or frequency (compress.Scores.of).
    merge: cosine of two experts' weights from which one is merged into the other.
    memory: for the model while it reads (stream). batch: sequences of seq_len tokens for each pass over the files.
    held_out: the last share of the text, to measure the loss on. scores: a file that keeps what was measured. dry_run:
    measures, writes no model. say: called with lines about the progress.
    What a call that ended early has measured and written stays beside `out`: the same call goes on, to the same bytes.
    Raises CheckpointError for a text that is too short, numbers that do not fit, an `out` that is taken, and a
    folder that cannot be read or cut; ValueError for another criterion.
    REAP: Lasby et al., 2025, https://arxiv.org/abs/2510.13999. Merging: Li et al., 2024, https://arxiv.org/abs/2310.01334

    Example:

        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)
        >>> MixtralForCausalLM(config).save_pretrained("model")
        >>> report = prune("model", "smaller", torch.randint(64, (256,)), keep=0.5, seq_len=16)
        >>> [len(layer["kept"]) for layer in report["layers"].values()]
        [2]
    """
    if not dry_run:
        check_is_free(Path(out))
    job = _Job(open_model(folder), memory, keep, experts, criterion, merge, say)
    job.take_text(tokens, seq_len, held_out, batch)
    file = None if scores is None else Path(scores)
    return job.measured(file, {})[0] if dry_run else job.run(Path(out).absolute(), file)


class _Job:
    """One model that is to lose experts."""

    def __init__(
        self,
        files: ModelFiles,
        memory: int | str,
        keep: float | None,
        experts: int | None,
        criterion: str,
        merge: float | None,
        say: Say,
    ) -> None:
        if criterion not in CRITERIA:
            raise ValueError(f'criterion must be one of {", ".join(CRITERIA)}, but got "{criterion}"')
        self.files, self.memory, self.criterion, self.merge, self.say = files, memory, criterion, merge, say
        self.folder = files.path
        self.model: Any = stream(files, memory)  # until all is measured
        self.config = self.model.config.get_text_config()
        self.groups = int(getattr(self.config, "n_group", None) or 1)  # that the router chooses experts among
        sizes = {int(m.num_experts) for m in experts_modules(self.model).values()}
        if len(sizes) != 1:
            raise CheckpointError(
                f"{files.path} has layers of {sorted(sizes)} experts, which one number cannot replace"
            )
        (self.size,) = sizes
        self.number = number_to_keep(self.size, keep, experts, self.config.to_dict())
        self.cut: Cut | GgufCut
        if isinstance(files, GgufModel):
            self.cut = GgufCut(files, [*experts_modules(self.model)], self.size, self.number)
        else:
            assert isinstance(files, FolderModel)
            self.cut = Cut(files, self.model, self.size, self.number)
        if merge is not None and not 0 < merge <= 1:
            raise CheckpointError(f"merge must be above 0 and at most 1, but got {merge}")
        if merge is not None and (isinstance(self.cut, GgufCut) or self.cut.has_tables or self.groups > 1):
            raise CheckpointError(
                f"{self.folder}: experts of GGUF files, of tables and of groups are not merged: prune without merging"
            )

    def take_text(self, tokens: Tensor, seq_len: int, held_out: float, batch: int) -> None:
        """Split the text, and note what belongs to this measurement alone."""
        if batch < 1:
            raise CheckpointError(f"batch must be at least 1, but got {batch}")
        calibration, self.test = sequences(tokens, seq_len, held_out, self.size, self.config.vocab_size)
        self.batches = calibration.split(batch)
        text = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
        self.about = {
            "model": str(self.folder.absolute()),
            "files": [fingerprint(file) for file in self.files.inputs],
            "text": text,
            "split": [seq_len, held_out, batch],
        }

    def run(self, out: Path, scores: Path | None) -> dict[str, Any]:
        """Measure, and write `out` -> the report; scores: a file for them instead of one beside `out`."""
        self.earlier(scores)  # refuses another text before a folder is made
        choices = {"keep": self.number, "criterion": self.criterion, "merge": self.merge}
        with continued(out, "pruning", self.about | choices) as job:
            work = job.folder
            report, kept = self.measured(scores or job.place / SCORES, job.done)
            chosen = json.loads(json.dumps(kept))  # keys as text, as an earlier call's are read
            if job.done.setdefault("kept", chosen) != chosen:
                raise CheckpointError(
                    f"{job.place} holds files of other experts than these scores choose: remove it, or give another "
                    "folder"
                )
            job.note()
            self.say("writing the smaller model")
            result = self.cut.write(work, kept)
            report["loss_after"] = self.loss(stream(result, self.memory))  # and proves that it loads
            write_json(work / REPORT, report)
            with atomic_file(work / PAGE) as file:
                file.write(render(report).encode())
            write_card(work, self._card(report))
        return report

    def _card(self, report: Mapping[str, Any]) -> str:
        """Write the model card without the name of `out`, so that the same job writes the same bytes anywhere."""
        losses = [report[f"loss_{when}"] for when in ("before", "after")]
        before, after = (None if loss is None else f"{loss:.4f}" for loss in losses)
        merging = f" --merge {self.merge}" if self.merge is not None else ""
        facts = {
            "experts of a layer": f"{self.size} -> {self.number}, by {self.criterion}",
            "text, SHA-256 of its token ids": f"`{self.about['text']}`, {report['tokens']:,} tokens read",
            "loss on held-out text, before": before,
            "loss on held-out text, after": after,
        }
        return render_card(
            f"{shown(self.folder)}, pruned",
            "A model without the experts that a text needs least. Figures for each layer: prune_report.html.",
            self.folder,
            facts,
            f"fmoe prune {shown(self.folder)} --experts {self.number} --criterion {self.criterion}{merging} "
            "--text TEXT -o OUT",
            library="gguf" if self.folder.is_file() else "transformers",
            tags=["pruned"],
        )

    def measured(self, file: Path | None, done: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Shares]]:
        """Return (report before anything is written, {path: experts that stay, with their shares}); free the model."""
        found = self._scores(file)
        if "loss_before" not in done:
            done["loss_before"] = self.loss(self.model)
        self.model = None
        gc.collect()  # its modules refer to each other, and its buffers are half of the memory
        by_layer = found.of(self.criterion)
        kept: dict[str, Shares] = {}
        for path, values in by_layer.items():
            if self.merge is None or isinstance(self.cut, GgufCut):
                kept[path] = {e: {e: 1.0} for e in best(values, self.number, self.groups)}
            else:
                self.say(f"comparing experts of {path}")
                cosine = similarities(self.cut.matrices(path))
                kept[path] = best_merged(values, found.count[path], cosine, self.number, self.merge)
        report = {
            "base": str(self.folder),
            "criterion": self.criterion,
            "tokens": found.tokens,
            "experts_before": self.size,
            "experts_after": self.number,
            "loss_before": done["loss_before"],
            "layers": {path: _layer_report(found, path, by_layer[path], kept[path]) for path in kept},
            "heads": {},
        }
        if isinstance(self.cut, Cut):
            for path, values in self.cut.scores_of_heads().items():
                kept[path] = {e: {e: 1.0} for e in best(values, self.number, self.groups)}
                report["heads"][path] = {
                    "criterion": "norms of weights",
                    "kept": [*kept[path]],
                    "scores": values.tolist(),
                }
        return report, kept

    def earlier(self, file: Path | None) -> Scores | None:
        """Load the scores in a file, of a part of the text or all; CheckpointError if they are about something else."""
        if file is None or not file.exists():
            return None
        found = Scores.load(file, self.about)
        if self.criterion == "reap" and not found.saliency:
            raise CheckpointError(f"{file} lacks the norms of outputs, which reap needs: name another file")
        return found

    def _scores(self, file: Path | None) -> Scores:
        """Take the scores from a file as far as an earlier call came, and measure from there on."""
        before = self.earlier(file)
        done = 0 if before is None else -(-before.tokens // self.batches[0].numel())
        if before is not None and done == len(self.batches):
            self.say(f"scores of {file}")
            return before
        with Measurement(self.model, self.criterion, before) as found:
            for i, batch in enumerate(self.batches[done:], done + 1):
                self.say(f"reading part {i} of {len(self.batches)} of the text")
                found.read(batch)
                if file is not None:
                    found.scores().save(file, self.about)
        return found.scores()

    @torch.no_grad()
    def loss(self, model: Any) -> float | None:
        """Compute the mean cross-entropy of the next token over the sequences to test; None without any."""
        losses = []
        for i, one in enumerate(self.test.split(1), 1):
            self.say(f"held-out sequence {i} of {len(self.test)}")
            losses.append(model(input_ids=one, labels=one, use_cache=False).loss.double())
        return torch.stack(losses).mean().item() if losses else None


def _layer_report(found: Scores, path: str, scores: Tensor, kept: Shares) -> dict[str, Any]:
    merged = {other: e for e, shares in kept.items() for other in shares if other != e}
    gone = sorted(set(range(scores.numel())) - set(kept))
    total = found.mass[path].sum().clamp(min=1e-30)
    return {
        "kept": list(kept),
        "scores": scores.tolist(),
        "pruned": {e: {"score": scores[e].item(), "tokens": found.count[path][e].item()} for e in gone},
        "merged": merged,
        "lost_mass": (found.mass[path][[e for e in gone if e not in merged]].sum() / total).item(),
    }
