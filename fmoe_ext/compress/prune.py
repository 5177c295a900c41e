"""Prune a model: write it without the experts that a text needs least, in the packing that it came in.

    open      the files, the streamed model, how many experts stay; what is known to fail is refused here
    measure   the model reads the text once, while hooks count what each expert does (scores.py)
    choose    the best of each layer stay; with merge=, similar ones become one
    write     the bytes of those that stay are copied from the files (cut.py), so that packed experts lose nothing
    test      the result is streamed over held-out text, which proves that it loads and gives its loss

A text takes hours to read, so a call may be ended anywhere: what it has measured and written stays beside `out`, and
the same call goes on from there (checkpoint.shards.continued). A call with other choices is refused there, as it would
mix the files of two models.

Every layer keeps the same number of experts, as config.json has only one. best() keeps the highest scores.
best_merged() lets an expert that goes live on in a similar one that stays: their weights are averaged by use. Both
ideas of merging are M-SMoE's (Li et al., 2024, https://arxiv.org/abs/2310.01334); M-SMoE keeps all rows of the router,
but a folder of Transformers has one row for each expert, so rows are averaged too.
"""

from __future__ import annotations

import gc
import hashlib
import html
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmoe_ext.balance.html import document, figure, scale, table, tiles
from fmoe_ext.checkpoint.card import render_card, shown, write_card
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.files import atomic_file, fingerprint, write_json
from fmoe_ext.checkpoint.shards import Unfinished, check_is_free, continued
from fmoe_ext.compress.cut import TOP_K, Cut, GgufCut, Shares
from fmoe_ext.compress.scores import CRITERIA, Scores, earlier, measure_into
from fmoe_ext.finetune.streaming.model import stream
from fmoe_ext.finetune.text import sequences
from fmoe_ext.model_files import FolderModel, GgufModel, experts_modules, open_model

_REPORT, PAGE = "prune_report.json", "prune_report.html"
_SCORES = "scores.json"  # of a job that is not done
_MOST_CHIPS = 12  # experts that a row of the report's table names; the rest is a number


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
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Write a model without the experts that a text needs least -> the report, also in out/prune_report.json and .html.

    folder: of Transformers, packed or not, a GGUF file, or a name in the cache of the Hugging Face hub; it is only
    read. out: a new folder, which Transformers, vLLM and stream() load like the first; of a GGUF file it has one.
    tokens: ids [N] int64 of a text like those the model is for. keep: share of the experts that stay in each layer;
    experts: their number instead. criterion: reap, mass or frequency (compress.Scores.of).
    merge: merge an expert into another if their weights have this cosine or more; None: leave experts out only.
    memory: for the model while it reads (stream). batch: sequences of seq_len tokens for each pass over the files.
    held_out: share of the text, its end, to measure the loss on. scores: a file that keeps what was measured, for other
    calls. dry_run: measure and choose, write no model. say: called with lines about the progress.
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
    # Open: whatever is known to fail is refused before the text is read.
    if not dry_run:
        check_is_free(Path(out))
    files = open_model(folder)
    if criterion not in CRITERIA:
        raise ValueError(f'criterion must be one of {", ".join(CRITERIA)}, but got "{criterion}"')
    model: Any = stream(files, memory)
    config = model.config.get_text_config()
    groups = int(getattr(config, "n_group", None) or 1)  # that the router chooses experts among
    sizes = {int(m.num_experts) for m in experts_modules(model).values()}
    if len(sizes) != 1:
        raise CheckpointError(
            f"{files.path} has layers of {sorted(sizes)} experts, which one number cannot replace"
        )
    (size,) = sizes
    number = number_to_keep(size, keep, experts, config.to_dict())
    cut: Cut | GgufCut
    if isinstance(files, GgufModel):
        cut = GgufCut(files, [*experts_modules(model)], size, number)
    else:
        assert isinstance(files, FolderModel)
        cut = Cut(files, model, size, number)
    if merge is not None:
        if not 0 < merge <= 1:
            raise CheckpointError(f"merge must be above 0 and at most 1, but got {merge}")
        if isinstance(cut, GgufCut) or cut.has_tables or groups > 1:
            raise CheckpointError(
                f"{files.path}: experts of GGUF files, of tables and of groups are not merged: prune without merging"
            )
        cut.check_floats()
    if batch < 1:
        raise CheckpointError(f"batch must be at least 1, but got {batch}")
    calibration, test = sequences(tokens, seq_len, held_out, size, config.vocab_size)
    # A file of scores, and an unfinished job, belong to this call if they were written with the same.
    about: dict[str, Any] = {
        "model": str(files.path.absolute()),
        "files": [fingerprint(file) for file in files.inputs],
        "text": hashlib.sha256(tokens.numpy().tobytes()).hexdigest(),
        "split": [seq_len, held_out, batch],
    }
    given = None if scores is None else Path(scores)
    earlier(given, about, criterion)  # refuses those of another text before a folder is made
    choices = {"keep": number, "criterion": criterion, "merge": merge}
    unfinished: AbstractContextManager[Unfinished | None] = (
        nullcontext() if dry_run else continued(Path(out).absolute(), "pruning", about | choices)
    )
    with unfinished as job:
        # Measure, and free the model, whose buffers are half of the memory.
        done = {} if job is None else job.done
        file = given or (None if job is None else job.place / _SCORES)
        found = measure_into(file, about, model, calibration.split(batch), criterion, say)
        if "loss_before" not in done:
            done["loss_before"] = _loss(model, test, say)
        del model
        gc.collect()  # its modules refer to each other

        kept, layers, heads = _choose(cut, found, criterion, number, groups, merge, say)
        report = {
            "base": str(files.path),
            "criterion": criterion,
            "tokens": found.tokens,
            "experts_before": size,
            "experts_after": number,
            "loss_before": done["loss_before"],
            "layers": layers,
            "heads": heads,
        }
        if job is None:
            return report

        # Write, and test what was written; at the end of the block it becomes `out`.
        chosen = json.loads(json.dumps(kept))  # keys as text, as an earlier call's are read
        if job.done.setdefault("kept", chosen) != chosen:
            raise CheckpointError(
                f"{job.place} holds files of other experts than these scores choose: remove it, or give another "
                "folder"
            )
        job.note()
        say("writing the smaller model")
        result = cut.write(job.folder, kept)
        report["loss_after"] = _loss(stream(result, memory), test, say)
        write_json(job.folder / _REPORT, report)
        with atomic_file(job.folder / PAGE) as page:
            page.write(_page(report).encode())
        write_card(job.folder, _card(files.path, report, about["text"], merge))
    return report


def number_to_keep(
    num_experts: int, keep: float | None, experts: int | None, config: Mapping[str, Any]
) -> int:
    """Compute how many of num_experts stay in each layer.

    keep: a share of them, above 0 and up to 1, rounded to the nearest; experts: their number instead. config: of the
    text model. Raises CheckpointError if neither or both are given, for fewer than a token chooses, and for a number
    with which a group-limited router would have unequal groups, or too few experts in those that it chooses.
    """
    if (keep is None) == (experts is None):
        raise CheckpointError("give either keep, a share of the experts, or experts, their number")
    if keep is not None and not 0 < keep <= 1:
        raise CheckpointError(f"keep must be above 0 and at most 1, but got {keep}")
    number = max(1, round(num_experts * keep)) if keep is not None else int(experts or 0)
    if not 1 <= number <= num_experts:
        raise CheckpointError(f"the model has {num_experts} experts a layer, so {number} cannot stay")
    # A token must find its top_k experts, in a group-limited router in the groups that it chooses.
    chosen = next((config[name] for name in TOP_K if config.get(name)), 1)
    top_k = max(chosen) if isinstance(chosen, list) else int(chosen)  # Hunyuan lists a number for each layer
    groups = int(config.get("n_group") or 1)
    if number < top_k:
        raise CheckpointError(f"a token chooses {top_k} experts, so {number} are too few")
    if number % groups:
        raise CheckpointError(
            f"the router chooses among {groups} groups of experts, so {number} must be a multiple of {groups}"
        )
    if groups > 1 and number // groups < 2:
        raise CheckpointError(
            f"a group of experts is scored by its best two experts, so {number} in {groups} are too few"
        )
    chosen_groups = int(config.get("topk_group") or groups)
    if number // groups * chosen_groups < top_k:
        raise CheckpointError(
            f"a token chooses {top_k} experts of {chosen_groups} groups, so {number // groups} a group are too few"
        )
    return number


def _choose(
    cut: Cut | GgufCut,
    found: Scores,
    criterion: str,
    number: int,
    groups: int,
    merge: float | None,
    say: Callable[[str], None],
) -> tuple[dict[str, Shares], dict[str, Any], dict[str, Any]]:
    """Choose the experts that stay -> ({path: their shares}, {path: report of a layer}, {path: report of a head})."""
    kept: dict[str, Shares] = {}
    layers: dict[str, dict[str, Any]] = {}
    for path, values in found.of(criterion).items():
        if merge is None or isinstance(cut, GgufCut):
            kept[path] = {e: {e: 1.0} for e in best(values, number, groups)}
        else:
            say(f"comparing experts of {path}")
            cosine = similarities(cut.matrices(path))
            kept[path] = best_merged(values, found.count[path], cosine, number, merge)
        # for the report: who went into whom, and the share of routing weight that nobody computes any more
        merged = {other: e for e, shares in kept[path].items() for other in shares if other != e}
        gone = [e for e in range(len(values)) if e not in kept[path]]
        mass = found.mass[path]
        lost = mass[[e for e in gone if e not in merged]].sum() / mass.sum().clamp(min=1e-30)
        layers[path] = {
            "kept": [*kept[path]],
            "scores": values.tolist(),
            "pruned": {e: {"score": values[e].item(), "tokens": found.count[path][e].item()} for e in gone},
            "merged": merged,
            "lost_mass": lost.item(),
        }
    # config.json has one number of experts, for heads too
    heads: dict[str, dict[str, Any]] = {}
    for path, values in (cut.scores_of_heads() if isinstance(cut, Cut) else {}).items():
        kept[path] = {e: {e: 1.0} for e in best(values, number, groups)}
        heads[path] = {
            "criterion": "norms of weights",
            "kept": [*kept[path]],
            "scores": values.tolist(),
        }
    return kept, layers, heads


def best(scores: Tensor, number: int, groups: int = 1) -> list[int]:
    """Return the `number` best experts by scores [E], equally many of each group, ascending; of equals the first."""
    in_groups = scores.view(groups, -1)
    order = torch.argsort(in_groups, dim=1, descending=True, stable=True)[:, : number // groups]
    offset = torch.arange(groups, device=scores.device)[:, None] * in_groups.shape[1]
    found: list[int] = (order + offset).flatten().sort().values.tolist()
    return found


def similarities(matrices: Iterable[Tensor]) -> Tensor:
    """Return the cosine of each pair of experts, all weights of one as one vector: [E, E] float64, 0 on the diagonal.

    matrices: each a projection of all experts, [E, n]. They are read one at a time, so an iterator saves memory.
    """
    products: Tensor | None = None
    for matrix in matrices:
        wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
        product = (wide @ wide.T).double()
        products = product if products is None else products + product
    if products is None:
        raise ValueError("there are no weights to compare")
    norms = products.diagonal().clamp(min=1e-300).sqrt()  # an expert of zeros is similar to none
    return (products / norms / norms[:, None]).fill_diagonal_(0)


def best_merged(
    scores: Tensor, count: Tensor, cosine: Tensor, number: int, least: float
) -> dict[int, dict[int, float]]:
    """Choose the experts that stay -> {expert that stays: {expert whose weights it is made of: share}}.

    1. While more than `number` are left: of the most similar pair, if its cosine is at least `least`, the expert with
       the lower score goes. 2. Then the lowest scores go, until `number` are left. 3. Each expert that goes is merged
       into the most similar one that stays, or dropped if their cosine is below `least`. Shares follow `count`: an
       expert without tokens has none, unless all of a group are without. Of equal scores the first stays.
    scores [E] float64, count [E] int64: tokens of each expert, cosine [E, E].
    """
    # 1. The worse of each similar pair
    pairs = cosine.clone()
    gone: list[int] = []
    while scores.numel() - len(gone) > number and pairs.max() >= least:
        pair = divmod(int(pairs.argmax()), scores.numel())
        goes = min(pair, key=lambda e: (float(scores[e]), -e))
        gone.append(goes)
        pairs[goes] = pairs[:, goes] = -torch.inf  # it is in no pair any more
    # 2. The lowest scores
    worst_first = reversed(torch.argsort(scores, descending=True, stable=True).tolist())
    others = [e for e in worst_first if e not in gone]
    gone += others[: max(0, scores.numel() - len(gone) - number)]
    # 3. Who is merged into whom, by their shares of tokens
    stay = sorted(set(range(scores.numel())) - set(gone))
    groups = {e: [e] for e in stay}
    for e in gone:
        nearest = max(stay, key=lambda other: float(cosine[e, other]))
        if cosine[e, nearest] >= least:
            groups[nearest].append(e)
    shares = {}
    for e, group in groups.items():
        total = int(count[group].sum())
        if total:
            shares[e] = {other: int(count[other]) / total for other in group if count[other]}
        else:  # no token chose any of them: the one that stays is kept as it is
            shares[e] = {e: 1.0}
    return shares


@torch.no_grad()
def _loss(model: Any, test: Tensor, say: Callable[[str], None]) -> float | None:
    """Compute the mean cross-entropy of the next token over sequences [m, L]; None without any."""
    losses = []
    for i, one in enumerate(test[:, None], 1):
        say(f"held-out sequence {i} of {len(test)}")
        losses.append(model(input_ids=one, labels=one, use_cache=False).loss.double())
    return torch.stack(losses).mean().item() if losses else None


def _page(report: Mapping[str, Any]) -> str:
    """Render the report as one HTML page: scores by layer, and the experts that went."""
    layers = report["layers"]
    # What was kept, and what it cost.
    losses = (report["loss_before"], report.get("loss_after"))
    before, after = ("-" if loss is None else f"{loss:.4f}" for loss in losses)
    facts = {
        "experts before": str(report["experts_before"]),
        "experts after": str(report["experts_after"]),
        "tokens read": f"{report['tokens']:,}",
        "loss before": before,
        "loss after": after,
        "routing weight lost": f"{sum(layer['lost_mass'] for layer in layers.values()) / len(layers):.2%}",
    }
    heads = ""
    if report["heads"]:
        heads = (
            f" The text does not reach the {len(report['heads'])} layers of heads for the tokens after the next: there "
            "the experts with the largest norms of weights stayed."
        )
    # The scores of each layer, the highest first.
    values = torch.tensor([layer["scores"] for layer in layers.values()], dtype=torch.float64, device="cpu")
    relative = values / values.mean(1, keepdim=True).clamp(min=1e-30)
    order = relative.sort(1, descending=True).values
    layer_numbers, ranks = ([str(i) for i in range(size)] for size in order.shape)
    caption = f"stayed: columns 0 to {report['experts_after'] - 1}"
    picture = figure(order, caption, layer_numbers, ranks)
    # The experts that went.
    rows = []
    for path, layer in layers.items():
        gone = sorted(layer["pruned"].items(), key=lambda item: item[1]["score"])
        chips = [f'<span class="chip">{e}: {one["tokens"]:,}</span>' for e, one in gone[:_MOST_CHIPS]]
        if len(gone) > _MOST_CHIPS:
            chips.append(f"and {len(gone) - _MOST_CHIPS} more")
        rows.append([html.escape(path), f"{layer['lost_mass']:.2%}", "".join(chips)])
    return document(
        "Pruned experts",
        f"<h1>Pruned experts</h1><p>{html.escape(report['base'])}: in each layer the experts of the highest score "
        f"stayed ({html.escape(report['criterion'])}). Losses are nats a token on held-out text.{heads}</p>"
        f"{tiles(facts)}"
        "<h2>Scores</h2><p>Layers on the left; experts in the order of their scores below. The colour is the score "
        f"over the mean of its layer.</p><p>{scale('0', '1', '2 or more')}</p>{picture}"
        "<h2>Layers</h2><p>Experts that went, the lowest score first, with the tokens that had chosen them.</p>"
        + table(("layer", "routing weight lost", "experts that went: tokens"), rows, left=(0, 2)),
    )


def _card(model: Path, report: Mapping[str, Any], text: str, merge: float | None) -> str:
    """Write the model card without the name of `out`, so that the same job writes the same bytes anywhere."""
    losses = [report[f"loss_{when}"] for when in ("before", "after")]
    before, after = (None if loss is None else f"{loss:.4f}" for loss in losses)
    number, criterion = report["experts_after"], report["criterion"]
    merging = f" --merge {merge}" if merge is not None else ""
    facts = {
        "experts of a layer": f"{report['experts_before']} -> {number}, by {criterion}",
        "text, SHA-256 of its token ids": f"`{text}`, {report['tokens']:,} tokens read",
        "loss on held-out text, before": before,
        "loss on held-out text, after": after,
    }
    return render_card(
        f"{shown(model)}, pruned",
        "A model without the experts that a text needs least. Figures for each layer: prune_report.html.",
        model,
        facts,
        f"fmoe prune {shown(model)} --experts {number} --criterion {criterion}{merging} --text TEXT -o OUT",
        library="gguf" if model.is_file() else "transformers",
        tags=["pruned"],
    )
