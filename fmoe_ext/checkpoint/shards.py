"""Write the files of a Hugging Face folder under another name, and rename them when all of them are on disk.

There are three ways to a folder, in the order of files.py (data, names, rename, folder):

    new_folder()    export(): a new one, in one call: a folder beside it is renamed
    continued()     `fmoe export`, `fmoe prune`, `fmoe adapter merge`: a new one, over several calls of one job that may
                    be interrupted anywhere: what is done stays in .<out>.<doing>, with a note of the job
    replacing()     save_pretrained(): a model in a folder that has other files, too: files can only be renamed one by
                    one, so config.json goes first and comes last, and a folder without it is refused (check_is_whole)

write_model_files() splits tensors into shards with an index.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.files import (
    locked,
    made_folder,
    publish,
    read_json,
    sync_file,
    sync_tree,
    unfinished_of,
    unique,
    write_json,
)
from fmoe_ext.checkpoint.safetensors_file import StoredTensor, write_safetensors

MAX_SHARD_BYTES = 5 * 2**30
_LAYER = re.compile(r"(.*?\.\d+\.)")  # of a tensor's name: up to the first number, as model.layers.3.
CONFIG, INDEX, _JOB = "config.json", "model.safetensors.index.json", "job.json"
_MODEL_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_UNITS = MappingProxyType(
    {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Make a folder to write into; it is renamed to `folder` when the body has ended, and removed if the body fails.

    Raises CheckpointError, before the body, if something other than an empty folder is there. The caller holds a lock
    for the folder: unfinished ones of its name were left by killed processes, and are removed.
    """
    check_is_free(folder)
    with made_folder(folder.parent):
        _remove(unfinished_of(folder))
        unfinished = folder.with_name(f".{folder.name}.{unique()}.tmp")
        try:
            unfinished.mkdir()
            yield unfinished
            publish(unfinished, folder)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise


class Unfinished:
    """A job that is not done, as continued() gives it to the body."""

    place: Path  # .<out>.<doing> beside `out`: has the folder and the note
    folder: Path  # will be renamed to `out`
    # notes (JSON) that say which files in `folder` are whole: call note() once they are on disk
    done: dict[str, Any]

    def __init__(self, place: Path, about: Mapping[str, Any]) -> None:
        self.place, self.folder = place, place / "model"
        self._file = place / _JOB
        self._about = json.loads(json.dumps(about))  # as the note will have it: tuples become lists
        self.done = {}
        # .tmp: write_json() may have been interrupted
        others = [path for path in place.iterdir() if not path.name.endswith(".tmp")]
        # The place holds a job: it must be this one
        if others:
            note = read_json(self._file) if self._file.exists() else {}
            if note.get("about") != self._about:
                raise CheckpointError(
                    f"{place} holds parts of another job: remove it, or give another folder"
                )
            if self.folder.is_dir():
                self.done = note["done"]
                return
        self.note()  # before `folder` is there, so that it always belongs to the job of the note
        self.folder.mkdir()
        sync_file(place)

    def note(self) -> None:
        """Write `done` to disk."""
        write_json(self._file, {"about": self._about, "done": self.done})

    def remove(self) -> None:
        """Remove what is left of the job, the note last: without it the rest would belong to no job."""
        for path in self.place.iterdir():
            if path != self._file:
                path.unlink()
        sync_file(self.place)
        self._file.unlink()
        self.place.rmdir()


@contextmanager
def continued(out: Path, doing: str, about: Mapping[str, Any]) -> Iterator[Unfinished]:
    """Make a folder that a job writes over several calls; it is renamed to `out` when the body of the last has ended.

    about: digests of the job's inputs, and its choices (JSON). What an interrupted call has written stays in
    .<out>.<doing> beside `out`, with a note of its job: the same job goes on with it, another one gets a
    CheckpointError. The note is removed after `out` has its name, so files of one job are never taken for another's.
    """
    place = out.with_name(f".{out.name}.{doing}")
    with made_folder(out.parent), locked(out.with_name(f".{out.name}.lock"), f"{doing} into {out}"):
        check_is_free(out)
        place.mkdir(exist_ok=True)
        sync_file(out.parent)
        unfinished = Unfinished(place, about)
        yield unfinished
        publish(unfinished.folder, out)
        unfinished.remove()
        sync_file(out.parent)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Make a folder to write into; its files replace those of `folder` when the body has ended.

    Shards that only the earlier model had are removed. If the body fails, `folder` is as it was.
    Files can only be renamed one by one, so an interrupted call could leave some of each model. So config.json and the
    index go first and come last: a folder without them is refused by Transformers, and by check_is_whole() with the
    reason.
    """
    with made_folder(folder):
        abandoned = [*folder.glob(".new.*.tmp")]
        if (folder / CONFIG).exists():  # else one of them has the only whole model
            _remove(abandoned)
        unfinished = folder / f".new.{unique()}.tmp"
        try:
            unfinished.mkdir()
            yield unfinished
            sync_tree(unfinished)
            sync_file(folder)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        # Interrupted from here on, it leaves files of two models: check_is_whole() sees that config.json is missing
        names = {file.name for file in unfinished.iterdir()}
        last = [name for name in (INDEX, CONFIG) if name in names]
        # Make the folder unreadable, remove shards that the new model does not have, then rename the new files
        for name in (CONFIG, INDEX):
            (folder / name).unlink(missing_ok=True)
            sync_file(folder)
        for old in folder.iterdir():
            if _MODEL_FILE.fullmatch(old.name) and old.name not in names:
                old.unlink()
        for name in (*sorted(names - {*last}), *last):
            if name in last:
                sync_file(folder)
            os.replace(unfinished / name, folder / name)
        sync_file(folder)
        _remove([*abandoned, unfinished])


def _remove(folders: Sequence[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def check_is_whole(folder: Path) -> None:
    """Raise CheckpointError for a folder whose save was interrupted while replacing() renamed its files."""
    parts = min(folder.glob(".new.*.tmp"), default=None)
    if parts is not None and not (folder / CONFIG).exists():
        raise CheckpointError(
            f"{folder}: a save was ended while it replaced the model, so that the files are of two: save again, or "
            f"move what is in {parts.name} into the folder, {CONFIG} last"
        )


def check_is_free(folder: Path) -> None:
    """Raise CheckpointError unless nothing exists under this path, or an empty folder."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists already: give a new folder, or remove it first")


def write_model_files(folder: Path, tensors: Mapping[str, StoredTensor], max_shard_bytes: int) -> list[Path]:
    """Write model.safetensors, or model-<i>-of-<n>.safetensors and their index, a tensor at a time -> the files.

    The tensors of one layer stay together, so a shard is larger than max_shard_bytes if a layer is. A shard that exists
    stays as it is: an earlier call of the job wrote it.
    """
    # Group the tensors by layer, then fill shards with layers
    layers: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        match = _LAYER.match(name)
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
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        if not (folder / name).exists():
            write_safetensors(folder / name, shard)
    # after the shards that it names
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.num_bytes for tensor in tensors.values())},
            "weight_map": {key: name for name, shard in zip(names, shards, strict=True) for key in shard},
        }
        write_json(folder / INDEX, index)
    return [folder / name for name in names]


def num_bytes_of(size: int | str) -> int:
    """Parse a number, or a text like "5GB", as Transformers takes max_shard_size."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?I?B?)", str(size).upper())
    if match is None or match[2] not in _UNITS:
        raise CheckpointError(f"max_shard_size must be bytes, or a text as '5GB', but got {size!r}")
    return int(match[1]) * _UNITS[match[2]]
