"""Save Transformers models with layers of ours: replace save_pretrained() and push_to_hub() of a model.

Transformers' own save_pretrained() would write a fmoefied model under a config.json that describes a dense one, and
every rank of a job would write the part that it has. replace_save_pretrained() therefore sets another one on the
model:

    _save_fmoefied (here)     for what fmoefy made; adds a model card
    _save_spread (ep.py)      for a Transformers MoE model with its experts spread over ranks
    save_adapters (ep.py)     for PEFT's adapters of these; writes into the target itself
    formats/imports.py        for imported models; adds a model card

All but save_adapters write into a folder inside the target, whose files then replace the target's (shards.replacing).
fmoefy imports this module, so it imports fmoe_ext.checkpoint where it is used.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from fmoe_ext.huggingface.record import KEY, NEEDS, check_record
from fmoe_ext.layers import FMoE

MAX_SHARD_SIZE = "5GiB"


def replace_save_pretrained(
    model: Any, save: Callable[..., None], push: Callable[..., Any] | None = None
) -> None:
    """Replace model.save_pretrained(...) by save(model, ...), and push_to_hub(...) by push(model, ...).

    push: None for Transformers' own, which calls save_pretrained() and uploads what it wrote, on one process.
    """
    model.save_pretrained = functools.partial(save, model)
    if hasattr(type(model), "push_to_hub"):
        model.push_to_hub = functools.partial(push or _push_from_one_process, model)


def _push_from_one_process(model: Any, repo_id: str, **options: Any) -> Any:
    """Push as Transformers does, then our model card; RuntimeError where every rank of a job would upload."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"push_to_hub would upload from each of {dist.get_world_size()} ranks: call save_pretrained(folder) on "
            "all of them, then huggingface_hub.upload_folder(repo_id=..., folder_path=folder) on one"
        )
    from huggingface_hub import HfApi

    # Does the repository have a card already? Made first, as push_to_hub() does, for its full name.
    api, revision = HfApi(token=options.get("token")), options.get("revision")
    full = api.create_repo(repo_id, private=options.get("private"), exist_ok=True).repo_id
    has_card = api.file_exists(full, "README.md", revision=revision)
    pushed = type(model).push_to_hub(model, repo_id, **options)
    # where the repository had no card, Transformers has put one that says nothing over save_pretrained()'s
    if not has_card and not hasattr(model, "peft_config"):
        card = card_of(model, model.config, full.rpartition("/")[2], f'model.push_to_hub("{full}")')
        revision = getattr(pushed, "pr_revision", None) or revision
        api.upload_file(
            path_or_fileobj=card.encode(), path_in_repo="README.md", repo_id=full, revision=revision
        )
    return pushed


def card_of(model: Any, config: Any, title: str, command: str, format: str | None = None) -> str:
    """Return the text of a model card, for a Transformers model that is saved in a format (None: its own)."""
    from fmoe_ext.checkpoint.card import render_card

    # what can be said of any model: class, experts, dtype, and the hub's task by the class's name
    inner = config.get_text_config()
    kind = (config.architectures or [type(model).__name__])[0]
    pipelines = {"ForCausalLM": "text-generation", "ForConditionalGeneration": "image-text-to-text"}
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # of the families
    facts = {
        "architecture": kind,
        "format": format,
        "experts": next((str(n) for n in (getattr(inner, name, None) for name in names) if n), None),
        "weights": str(model.dtype).removeprefix("torch."),
    }
    return render_card(
        title,
        "A model with experts, written by fmoe_ext.",
        getattr(model, "name_or_path", None) or None,
        facts,
        command,
        library="gguf" if format == "gguf" else "transformers",
        pipeline=next((name for end, name in pipelines.items() if kind.endswith(end)), None),
    )


def save_as_fmoefied(model: Any) -> None:
    """Make save_pretrained() write the experts of a model that fmoefy has noted in its configuration."""
    record = getattr(getattr(model, "config", None), KEY, None)
    if record is None:
        return
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        replace_save_pretrained(model, _save_fmoefied)
    elif not check_record(record, f"{type(model).__name__}.config")["dense"]:
        replace_save_pretrained(model, _refuse)


def _refuse(model: Any, *_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        f"{type(model).__name__} is no model of Transformers and its configuration names no activation that could say "
        "that its MLPs are MoE layers: save with fmoe_ext.checkpoint.save(folder, model)"
    )


def describe(config: Any, model: Any, dtype: torch.dtype | None) -> None:
    """Write into a configuration what the saved model decides: dtype, size of the vocabulary, tied embeddings.

    They may have changed since the configuration was made. Loading would round the tensors to a dtype that is not
    theirs, and overwrite a head that is tied by mistake.
    """
    inner = config.get_text_config()  # the configuration itself, or the one of the text model inside it
    config.dtype = dtype
    if getattr(inner, "dtype", None) is not None:
        inner.dtype = dtype
    if getattr(config, "is_encoder_decoder", False):  # two vocabularies, and ties of their own
        return
    try:
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    except NotImplementedError:  # models that read no tokens
        return
    if not isinstance(embedding, nn.Embedding):
        return
    a, b = embedding.weight, getattr(head, "weight", None)
    # Mllama embeds 8 tokens more than it predicts; without a head nothing says how many the vocabulary has
    if b is None or a.shape != b.shape:
        return
    if hasattr(inner, "vocab_size"):
        inner.vocab_size = a.shape[0]
    part = config if hasattr(config, "tie_word_embeddings") else inner
    # two parameters of one memory are tied too; the address of one without memory is 0
    is_tied = a is b or 0 != a.data_ptr() == b.data_ptr()
    # a configuration without the field (Inkling 2's) means untied, and its file stays without
    if is_tied or hasattr(part, "tie_word_embeddings"):
        part.tie_word_embeddings = is_tied


@torch.no_grad()
def _save_fmoefied(model: Any, save_directory: str | Path, **options: Any) -> None:
    """Save a fmoefied model: its tensors under their own names, in config.json what fmoefy did.

    huggingface.from_pretrained() loads the folder in one process. options: of Transformers' save_pretrained.
    Where experts are spread over ranks, all of them call it, max_shard_size is the only option, and the first writes;
    fmoe_ext.checkpoint.load(folder, model) reads each rank's experts.
    Raises CheckpointError on every rank.
    """
    folder = Path(save_directory)
    if any(layer.world_size > 1 for layer in model.modules() if isinstance(layer, FMoE)):
        _save_from_all_ranks(model, folder, **options)
        return
    options = options | {"save_original_format": False}  # tensors under the names that the modules have
    describe(model.config, model, model.dtype)
    if not options.get("is_main_process", True):  # it writes nothing, but takes part
        type(model).save_pretrained(model, folder, **options)
        return
    with replacing_for_transformers(folder, options) as unfinished:
        type(model).save_pretrained(model, unfinished, **options)
        _refuse_dense_models(unfinished)
        _write_card(model, unfinished, folder)


@contextmanager
def replacing_for_transformers(folder: Path, options: dict[str, Any]) -> Iterator[Path]:
    """Run shards.replacing(folder) for Transformers' save_pretrained(..., **options), which writes file by file."""
    from fmoe_ext.checkpoint.shards import replacing

    if options.get("push_to_hub"):
        options.setdefault("repo_id", folder.name)  # Transformers takes the name of the folder it writes
    with replacing(folder) as unfinished:
        yield unfinished


def _write_card(model: Any, unfinished: Path, folder: Path) -> None:
    from fmoe_ext.checkpoint.card import write_card

    card = card_of(model, model.config, folder.name, f'model.save_pretrained("{folder.name}")')
    write_card(unfinished, card, kept=folder)


def _save_from_all_ranks(model: Any, folder: Path, *, max_shard_size: int | str = MAX_SHARD_SIZE) -> None:
    """Save a fmoefied model whose experts are spread: gathered() gives the first rank the tensors of all."""
    from fmoe_ext.checkpoint.model_folder import usual_dtype
    from fmoe_ext.checkpoint.saving import gathered
    from fmoe_ext.checkpoint.shards import num_bytes_of, replacing, write_model_files

    with gathered(folder, model) as whole:
        if whole is not None:  # on the first rank, which writes what Transformers' save_pretrained() would
            with replacing(folder) as unfinished:
                write_model_files(unfinished, whole.tensors, num_bytes_of(max_shard_size))
                describe(model.config, model, usual_dtype(whole.tensors.values()))
                model.config.architectures = [type(model).__name__]
                model.config.save_pretrained(unfinished)
                _refuse_dense_models(unfinished)
                if getattr(model, "generation_config", None) is not None:
                    model.generation_config.save_pretrained(unfinished)
                _write_card(model, unfinished, folder)


def _refuse_dense_models(folder: Path) -> None:
    """Keep dense models from being made of a config.json that names no activation: its dtype becomes NEEDS."""
    file = folder / "config.json"
    values = json.loads(file.read_text())
    if not values[KEY]["dense"]:
        values[KEY]["dense"]["dtype"] = values.get("dtype")
        values["dtype"] = NEEDS
        file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
