"""The files of a Hugging Face folder, written beside its place and put there when all of them are on disk."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.files import atomic_file, made_folder, sync_folder, unique
from fmoe_ext.checkpoint.safetensors_file import StoredTensor, write_safetensors

MAX_SHARD_BYTES = 5 * 2**30
LAYER = re.compile(r"(.*?\.\d+\.)")
MODEL_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
UNITS = MappingProxyType(
    {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `folder` when the body has ended and is removed where it fails.

    CheckpointError, before the body, where there is something at that place that is no empty folder. The caller holds a
    lock for the place: what killed processes left there is removed.
    """
    check_is_free(folder)
    with made_folder(folder.parent):
        for abandoned in folder.parent.glob(f".{folder.name}.*.tmp"):
            shutil.rmtree(abandoned, ignore_errors=True)
        unfinished = folder.with_name(f".{folder.name}.{unique()}.tmp")
        try:
            unfinished.mkdir()
            yield unfinished
            os.rename(unfinished, folder)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        sync_folder(folder.parent)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A folder to write into, whose files take the places of those of `folder` one by one when the body has ended.

    Files of a model that an earlier save had more are removed. Where the body fails, `folder` is as it was.
    """
    with made_folder(folder):
        for abandoned in folder.glob(".new.*.tmp"):
            shutil.rmtree(abandoned, ignore_errors=True)
        unfinished = folder / f".new.{unique()}.tmp"
        try:
            unfinished.mkdir()
            yield unfinished
            names = {file.name for file in unfinished.iterdir()}
            # what names the others, last
            for name in sorted(names, key=lambda name: (name.endswith(".json"), name)):
                os.replace(unfinished / name, folder / name)
            for old in folder.iterdir():
                if MODEL_FILE.fullmatch(old.name) and old.name not in names:
                    old.unlink()
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        sync_folder(folder)


def check_is_free(folder: Path) -> None:
    """CheckpointError unless there is nothing at a place, or an empty folder."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists already: give a new folder, or remove it first")


def write_model_files(folder: Path, tensors: Mapping[str, StoredTensor], max_shard_bytes: int) -> list[Path]:
    """Writes model.safetensors, or model-<i>-of-<n>.safetensors and their index -> the files, a tensor at a time.

    The tensors of one layer stay together, so that a shard is larger than max_shard_bytes where a layer is. A shard
    that is there already stays as it is: an earlier call wrote it.
    """
    shards = _shards(tensors, max_shard_bytes)
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        if not (folder / name).exists():
            write_safetensors(folder / name, shard)
    if len(shards) == 1:
        return [folder / names[0]]
    index = {
        "metadata": {"total_size": sum(tensor.num_bytes for tensor in tensors.values())},
        "weight_map": {key: name for name, shard in zip(names, shards, strict=True) for key in shard},
    }
    with atomic_file(folder / "model.safetensors.index.json") as file:
        file.write(json.dumps(index, indent=2).encode())
    return [folder / name for name in names]


def _shards(tensors: Mapping[str, StoredTensor], max_shard_bytes: int) -> list[dict[str, StoredTensor]]:
    layers: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        match = LAYER.match(name)
        layers.setdefault(match[1] if match else name, {})[name] = tensor
    shards: list[dict[str, StoredTensor]] = [{}]
    size = 0
    for layer in layers.values():
        num_bytes = sum(tensor.num_bytes for tensor in layer.values())
        if shards[-1] and size + num_bytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1] |= layer
        size += num_bytes
    return shards


def num_bytes_of(size: int | str) -> int:
    """Bytes of a number, or of a text like "5GB", as Transformers takes max_shard_size."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?I?B?)", str(size).upper())
    if match is None or match[2] not in UNITS:
        raise CheckpointError(f"max_shard_size must be bytes, or a text as '5GB', but got {size!r}")
    return int(match[1]) * UNITS[match[2]]
