"""Checkpoint folders: written beside the older ones, complete or absent, checked when read.

folder/latest                  name of the newest complete checkpoint, replaced last
folder/step-00001000/          appears under this name when everything in it is on disk
    __<rank>_<n>.distcp        the tensors (torch.distributed.checkpoint)
    .metadata                  where each of them is
    manifest.json              shapes, layers, options of the optimizer, SHA-256 of every file and of itself
"""

import hashlib
import json
import os
import pickle
import shutil
import warnings
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from fmoe_ext.checkpoint.errors import CheckpointError, gather, together
from fmoe_ext.checkpoint.files import atomic_file, sha256_of, sync_folder
from fmoe_ext.checkpoint.model_state import describe_layers
from fmoe_ext.checkpoint.safetensors_file import StoredTensor

VERSION = 1
MODEL = "model."
IN_METADATA = (  # of .metadata, a pickle; with torch's dtypes and the classes of torch.distributed.checkpoint.metadata
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
)


@dataclass
class Manifest:
    """What a checkpoint says of itself. tensors: {key: {"shape", "dtype"}}; files: {name: {"bytes", "sha256"}}."""

    step: int
    layers: dict = field(default_factory=dict)
    optimizer: dict | None = None
    extra: dict = field(default_factory=dict)
    tensors: dict = field(default_factory=dict)
    files: dict = field(default_factory=dict)
    torch: str = torch.__version__
    version: int = VERSION

    def write(self, path):
        content = asdict(self)
        with atomic_file(path) as file:
            file.write(json.dumps({**content, "sha256": _digest(content)}, indent=1).encode())

    @classmethod
    def read(cls, folder):
        path = Path(folder, "manifest.json")
        try:
            content = json.loads(path.read_bytes())
            expected = content.pop("sha256")
            version = content["version"]
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read, or is damaged: {error!r}") from error
        if _digest(content) != expected:
            raise CheckpointError(f"{path} is damaged: its content does not have the SHA-256 {expected}")
        if version != VERSION:
            raise CheckpointError(f"{path} has version {version}, this fmoe_ext reads version {VERSION}")
        return cls(**content)

    def model_shapes(self):
        return {k.removeprefix(MODEL): t["shape"] for k, t in self.tensors.items() if k.startswith(MODEL)}


def write_checkpoint(folder, tensors, manifest, keep=None, process_group=None):
    """Writes {key: tensor or DTensor} and a manifest as the newest checkpoint of a folder -> its path. Collective.

    keep: how many of the newest checkpoints stay, this one included; None for all.
    """
    folder = Path(folder)
    path = None
    with together(f"preparing {folder}", process_group):
        if _is_first(process_group):
            path = _new_path(folder, manifest.step)
    path = next(p for p in gather(path, process_group) if p is not None)
    unfinished = path.with_name(f".{path.name}.tmp")
    with together(f"writing {path}", process_group), _quiet():
        alone = not dist.is_initialized()
        written = dcp.save(
            tensors,
            storage_writer=dcp.FileSystemWriter(unfinished),
            process_group=process_group,
            no_dist=alone,
        )
    names = gather(sorted(file.name for file in unfinished.iterdir()), process_group)[0]
    with together(f"writing {path}: is it on a file system that all ranks share?", process_group):
        mine = {
            name: {"bytes": (unfinished / name).stat().st_size, "sha256": sha256_of(unfinished / name)}
            for name in share(names, process_group)
        }
    files = gather(mine, process_group)
    with together(f"writing {path}", process_group):
        if _is_first(process_group):
            manifest.files = {name: entry for part in files for name, entry in part.items()}
            manifest.tensors = {
                key: {"shape": list(entry.size), "dtype": str(entry.properties.dtype).removeprefix("torch.")}
                for key, entry in written.state_dict_metadata.items()
            }
            manifest.layers = describe_layers(manifest.model_shapes())
            manifest.write(unfinished / "manifest.json")
            os.replace(unfinished, path)
            sync_folder(folder)
            with atomic_file(folder / "latest") as file:
                file.write(path.name.encode())
            if keep is not None:
                older = [other for other in complete(folder) if other != path]
                for old in older[: max(0, len(older) - keep + 1)]:
                    _remove(old)
    return path


def complete(folder):
    """The complete checkpoints of a folder, the oldest first."""
    return sorted(
        (path.parent for path in Path(folder).glob("step-*/manifest.json")),
        key=lambda path: (path.stat().st_mtime_ns, path.name),
    )


def has_checkpoint(path):
    """Whether a path is a checkpoint of ours or a folder with one; other files may lie beside it."""
    return any(Path(path, name).exists() for name in ("manifest.json", "latest"))


def find(path):
    """The checkpoint that a path means: itself, or the one that `latest` in it names."""
    path = Path(path)
    if (path / "manifest.json").exists():
        return path
    if (path / "latest").exists():
        newest = path / (path / "latest").read_text().strip()
        if (newest / "manifest.json").exists():
            return newest
        raise CheckpointError(
            f"{path / 'latest'} names {newest.name}, which has no manifest.json{_others(path)}"
        )
    raise CheckpointError(
        f"no checkpoint in {path}: it has neither `latest` nor manifest.json{_others(path)}"
    )


def verify(path, manifest, progress=None, process_group=None):
    """Checks size and SHA-256 of the files of a checkpoint, each on one rank; CheckpointError names the bad ones."""
    wrong = []
    for name in share(sorted(manifest.files), process_group):
        file, expected = Path(path, name), manifest.files[name]
        if not file.exists():
            wrong.append(f"{file} is missing")
        elif file.stat().st_size != expected["bytes"]:
            wrong.append(f"{file} has {file.stat().st_size} bytes, expected {expected['bytes']}: truncated?")
        elif (found := sha256_of(file, progress)) != expected["sha256"]:
            wrong.append(f"{file} is damaged: its SHA-256 is {found}, expected {expected['sha256']}")
    if wrong:
        raise CheckpointError("; ".join(wrong) + _others(Path(path).parent, Path(path)))


def read_into(path, tensors):
    """Fills tensors and DTensors {key: tensor} from the files of a checkpoint, without any communication."""
    with _quiet():
        dcp.load(dict(tensors), storage_reader=_Reader(path), no_dist=True)


def stored_tensors(path, manifest):
    """{key: StoredTensor} of a checkpoint, read one at a time."""
    make_reader, last = cache(lambda: _Reader(path)), {}

    def read(key, shape, dtype):
        if key not in last:  # experts of one tensor are often asked for one after the other
            value = torch.empty(shape, dtype=dtype)
            with _quiet():
                dcp.load({key: value}, storage_reader=make_reader(), no_dist=True)
            last.clear()
            last[key] = value
        return last[key]

    return {
        key: _stored(read, key, entry["shape"], getattr(torch, entry["dtype"]))
        for key, entry in manifest.tensors.items()
    }


def model_tensors(path, manifest):
    """{name: StoredTensor} of the model in a checkpoint."""
    tensors = stored_tensors(path, manifest)
    return {key.removeprefix(MODEL): t for key, t in tensors.items() if key.startswith(MODEL)}


def _stored(read, key, shape, dtype):
    return StoredTensor(shape, dtype, lambda: read(key, shape, dtype))


class _Reader(dcp.FileSystemReader):
    """Reads .metadata once, and takes nothing from it but what describes tensors."""

    def __init__(self, path):
        super().__init__(path)
        try:
            with open(Path(path, ".metadata"), "rb") as file:
                self._metadata = _MetadataUnpickler(file).load()
        except (pickle.UnpicklingError, OSError, EOFError, ValueError) as error:
            raise CheckpointError(
                f"{Path(path, '.metadata')} cannot be read, or is damaged: {error!r}"
            ) from error

    def read_metadata(self, *args, **kwargs):
        return self._metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module, name):
        whole = module == "torch.distributed.checkpoint.metadata" and "." not in name
        if whole or (module, name) in IN_METADATA or _is_dtype(module, name):
            return super().find_class(module, name)
        raise CheckpointError(f".metadata contains {module}.{name}, which no checkpoint of tensors needs")


def _is_dtype(module, name):
    return module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)


def _new_path(folder, step):
    """A name for a new checkpoint; what an interrupted save has left behind is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for unfinished in folder.glob(".step-*.tmp"):
        shutil.rmtree(unfinished)
    path = again = folder / f"step-{step:08d}"
    number = 1
    while again.exists():
        again = path.with_name(f"{path.name}-{number}")
        number += 1
    (again.with_name(f".{again.name}.tmp")).mkdir()
    return again


def _remove(path):
    unfinished = path.with_name(f".{path.name}.tmp")
    os.replace(path, unfinished)  # a half removed checkpoint must not look like one
    shutil.rmtree(unfinished)


def _others(folder, without=None):
    names = [path.name for path in complete(folder) if path != without]
    return f" (complete checkpoints there: {', '.join(names)})" if names else ""


def _is_first(process_group):
    return not dist.is_initialized() or dist.get_rank(process_group) == 0


def share(items, process_group):
    """The items that are this rank's to work on."""
    if not dist.is_initialized():
        return items
    return items[dist.get_rank(process_group) :: dist.get_world_size(process_group)]


def _digest(content):
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@contextmanager
def _quiet():
    """torch warns of work without process group even where that is what was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
