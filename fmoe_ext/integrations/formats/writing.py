"""export(): a model with our MoE layers as a folder that plain Transformers loads."""

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.checkpoint.errors import together
from fmoe_ext.checkpoint.families import FAMILIES, formats_for
from fmoe_ext.checkpoint.model_state import ModelState
from fmoe_ext.checkpoint.saving import Whole, gathered
from fmoe_ext.checkpoint.shards import MAX_SHARD_BYTES, check_is_free, new_folder, write_model_files
from fmoe_ext.integrations.formats.gguf import check_writable, write_gguf
from fmoe_ext.integrations.formats.plan import Plan, plan_export, values_of

GGUF = "gguf"
TOKENIZER_FILES = (
    "token*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)


@torch.no_grad()
def export(
    model: nn.Module,
    folder: str | Path,
    format: str,
    *,
    tokenizer: Any = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Writes a Transformers model with FMoETransformerMLPs as a model of Transformers' own -> the folder.

    model: what fmoefy or import_model() made. folder: a new or empty one; it gets config.json, generation_config.json,
    the tokenizer's files, safetensors of at most max_shard_bytes (a layer stays in one), in the dtypes of the model.
    format: a model type of Transformers, as "mixtral" or "qwen3_moe"; docs/formats.md lists them and says which models
    each can hold. "gguf": folder/model.gguf for llama.cpp, without a vocabulary.
    tokenizer: one of Transformers, or a folder that has its files.

    All ranks that share the experts call it; the first one writes. What is for training alone (losses, jitter, the
    speed of the bias, parallel layouts) is not in the files. Raises CheckpointError, on every rank and before anything
    is written, for what the format cannot say: another model, gate, activation, bias, scale, capacity.
    Equivalent to: AutoModelForCausalLM.from_pretrained(folder) has the logits of model.
    """
    folder = Path(folder)
    with together(f"export to {folder}", process_group):
        check_is_free(folder)
        _check_tokenizer(tokenizer, format)
        plan = plan_export(model, _type_for_gguf(model) if format == GGUF else format)
        if format == GGUF:
            check_writable(plan.family, plan.config)
    with gathered(folder, model, process_group) as whole:
        if whole is not None:
            with new_folder(folder) as unfinished:
                if format == GGUF:
                    write_gguf(unfinished / "model.gguf", plan.in_memory(whole), plan.family, plan.config)
                else:
                    write_files(plan, whole, unfinished, max_shard_bytes)
                _write_tokenizer(tokenizer, unfinished)
    return folder


def write_files(plan: Plan, whole: Whole, folder: Path, max_shard_bytes: int) -> None:
    """Writes the tensors and the configurations into a folder that is there."""
    write_model_files(folder, plan.convert(whole), max_shard_bytes)
    plan.config.save_pretrained(folder)
    generation = getattr(plan.model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)


def _type_for_gguf(model: nn.Module) -> str:
    """The model type by which a model goes into a GGUF file."""
    source = values_of(ModelState(model).model)["model_type"]
    return next((name for name in formats_for(source) if FAMILIES[name].gguf), source)


def _check_tokenizer(tokenizer: Any, format: str) -> None:
    if tokenizer is not None and format == GGUF:
        raise CheckpointError(
            "the file of format='gguf' has no vocabulary, so tokenizer= would be lost: export to a model type with it, "
            "then run llama.cpp's convert_hf_to_gguf.py on the folder"
        )
    if tokenizer is None or hasattr(tokenizer, "save_pretrained"):
        return
    if not _tokenizer_files(Path(tokenizer)):
        raise CheckpointError(f"{tokenizer} has no files of a tokenizer ({', '.join(TOKENIZER_FILES)})")


def _write_tokenizer(tokenizer: Any, folder: Path) -> None:
    if tokenizer is None:
        return
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(folder)
        return
    for file in _tokenizer_files(Path(tokenizer)):
        shutil.copy(file, folder / file.name)


def _tokenizer_files(folder: Path) -> list[Path]:
    return sorted({file for pattern in TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()})
