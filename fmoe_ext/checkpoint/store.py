"""Write and read checkpoint folders: complete or absent whatever is killed, with a SHA-256 of every file.

folder/latest                  name of the newest complete checkpoint, replaced last
folder/step-00001000/          appears under this name when everything in it is on disk
    __<rank>_<n>.distcp        the tensors (torch.distributed.checkpoint)
    manifest.json              shapes, where each tensor is, layers, options of the optimizer,
                               SHA-256 of every file and of itself

A save may be killed anywhere, and jobs may save and load at once. So write_checkpoint() keeps this order:

    lock     one job at a time saves into a folder; unfinished checkpoints that it finds were left by jobs that ended
    write    under a name that nobody reads (.step-*.tmp), synced to disk
    rename   to step-*, when it is whole; then replace `latest`, so that it always names a whole one
    remove   older ones (keep=), only those that no job is reading (files.read_locked), and by a rename first

Checkpoints of version 1 say where the tensors are in .metadata, a pickle of torch's; torch_metadata.py reads it.
"""

import functools
import os
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from fmoe_ext.checkpoint.chunks import Place, Planner, Reader, SavedTensor, SavePlanner, Writer, fingerprints
from fmoe_ext.checkpoint.errors import CheckpointError, gather, text_of, together
from fmoe_ext.checkpoint.files import (
    atomic_file,
    explained,
    inside,
    lock_unread,
    locked,
    read_locked,
    read_text,
    remove,
    sha256_of,
    sync_file,
    unique,
)
from fmoe_ext.checkpoint.manifest import MODEL, Manifest
from fmoe_ext.checkpoint.model_state import describe_layers
from fmoe_ext.checkpoint.safetensors_file import StoredTensor

_STEP = re.compile(r"step-\d{8,}(-\d+)?")
Item = TypeVar("Item")


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    manifest: Manifest,
    keep: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Write {key: tensor or DTensor} and a manifest as the newest checkpoint of a folder -> its path. Collective.

    keep: how many of the newest checkpoints stay, this one included; None for all. One that another job is reading
    stays until a later save. Raises CheckpointError if another job is saving into the same folder, or there is no room;
    what was written is removed then.
    """
    # The first rank locks the folder and chooses the names, which the others get from it
    folder = Path(folder)
    paths = None
    is_first = _is_first(process_group)
    with ExitStack() as until_saved:
        with together(f"preparing {folder}", process_group):
            if is_first:
                folder.mkdir(parents=True, exist_ok=True)
                # False on a file system without locks, where another job's files look like abandoned ones
                if until_saved.enter_context(locked(folder / ".lock", f"saving into {folder}")):
                    for abandoned in folder.glob(".step-*.tmp"):
                        remove(abandoned)
                path = first = folder / f"step-{manifest.step:08d}"
                number = 1
                while os.path.lexists(path):  # the same step was saved before
                    path = first.with_name(f"{first.name}-{number}")
                    number += 1
                unfinished = path.with_name(f".{path.name}.{unique()}.tmp")
                unfinished.mkdir()
                paths = path, unfinished
        path, unfinished = next(p for p in gather(paths, process_group) if p is not None)
        try:
            _write_files(path, unfinished, tensors, manifest, process_group)
        except BaseException as error:
            # A part of a checkpoint must not keep a full disk full. A CheckpointError is raised on all ranks: each
            # removes what is on a disk of its own.
            if is_first or isinstance(error, CheckpointError):
                shutil.rmtree(unfinished, ignore_errors=True)
            raise
        with together(f"writing {path}", process_group):
            if is_first:
                os.rename(unfinished, path)
                # keep= removes the oldest: make this one the newest, even if the clock was set back
                times = (other.stat().st_mtime_ns for other in _complete(folder) if other != path)
                latest = max(times, default=0)
                if path.stat().st_mtime_ns <= latest:
                    os.utime(path, ns=(latest + 1, latest + 1))
                sync_file(folder)  # before `latest`: after a power cut it must not name what is not there
                with atomic_file(folder / "latest") as file:
                    file.write(path.name.encode())
                older = [other for other in _complete(folder) if other != path]
                for old in [] if keep is None else older[: max(0, len(older) - keep + 1)]:
                    with lock_unread(old / "manifest.json") as is_unread:
                        if not is_unread:
                            continue  # held_open() by a job that is loading it: a later save removes it
                        leaving = old.with_name(f".{old.name}.{unique()}.tmp")
                        # a half removed checkpoint must not look like a whole one
                        os.rename(old, leaving)
                    remove(leaving)
    return path


def _write_files(
    path: Path,
    unfinished: Path,
    tensors: Mapping[str, torch.Tensor],
    manifest: Manifest,
    process_group: dist.ProcessGroup | None,
) -> None:
    # The tensors: torch.distributed.checkpoint decides which rank writes what
    own = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors.values())
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in own)
    writer, planner = Writer(unfinished), SavePlanner()
    with together(f"writing {path}", process_group), explained(unfinished, num_bytes), _quiet():
        dcp.save(
            dict(tensors),
            storage_writer=writer,
            planner=planner,
            process_group=process_group,
            no_dist=not dist.is_initialized(),
        )
    compare_replicas(planner.chunks(), process_group)
    # Checksums: each file is hashed by one of the ranks. The first rank must see all: one with a disk of its own lacks
    # the others', which are perhaps hashed where they were written.
    listed = gather([file.name for file in unfinished.glob("*")], process_group)
    names = sorted({name for of_rank in listed for name in of_rank})
    with together(f"writing {path}: is it on a file system that all ranks share?", process_group):
        for name in names if _is_first(process_group) else ():
            (unfinished / name).stat()
        mine = {
            name: {"bytes": (unfinished / name).stat().st_size, "sha256": sha256_of(unfinished / name)}
            for name in share(names, process_group)
        }
    files = gather(mine, process_group)
    # The manifest
    with together(f"writing {path}", process_group), explained(unfinished, num_bytes):
        if _is_first(process_group):
            manifest.files = {name: entry for part in files for name, entry in part.items()}
            manifest.tensors = {key: tensor.as_json() for key, tensor in writer.tensors.items()}
            shapes = {key: entry["shape"] for key, entry in manifest.tensors.items()}
            of_model_alone = {k.removeprefix(MODEL): s for k, s in shapes.items() if k.startswith(MODEL)}
            manifest.layers = describe_layers(of_model_alone)
            manifest.write(unfinished / "manifest.json")
            # Older checkpoints may be removed once this one is there: make sure that load() takes it
            Manifest.read(unfinished).saved(unfinished)


def compare_replicas(
    chunks: Mapping[Place, Callable[[], torch.Tensor]], process_group: dist.ProcessGroup | None
) -> None:
    """Warn of tensors whose copies on several ranks differ; the lowest rank's are saved. Collective.

    chunks: what this rank has. Raises CheckpointError if one name stands for tensors of several shapes.
    """
    # Ranks exchange fingerprints of those chunks that several of them have
    places = gather(list(chunks), process_group)
    holders = Counter(place for of_rank in places for place in of_rank)
    with together("comparing replicas", process_group):
        mine = fingerprints(chunks, {place for place, count in holders.items() if count > 1})
    found = gather(mine, process_group)
    differing: dict[str, str] = {}
    for rank, of_rank in enumerate(found):
        for place, value in of_rank.items():
            # the lowest rank that has it: its copy is the one that was saved
            first = next(other for other, theirs in enumerate(found) if place in theirs)
            expected = found[first][place]
            if value.what != expected.what:
                raise CheckpointError(
                    f"{place[0]} is {value.what} on rank {rank} and {expected.what} on rank {first}, but one name "
                    "stands for one tensor: give the parts of a model names of their own"
                )
            if value != expected:
                differing.setdefault(place[0], f"{place[0]} (rank {rank}'s differs from rank {first}'s)")
    if differing and _is_first(process_group):
        shown = ", ".join([*differing.values()][:10]) + (", ..." if len(differing) > 10 else "")
        warnings.warn(
            f"ranks have different values of {len(differing)} replicated tensors, and those of the lowest rank that "
            f"has one are saved: {shown}. Statistics of batch normalisation differ so; parameters should not, and "
            "parts of a model need names of their own",
            stacklevel=2,
        )


def _complete(folder: Path) -> list[Path]:
    """List the complete checkpoints of a folder, the oldest first."""
    return sorted(
        (path.parent for path in Path(folder).glob("step-*/manifest.json")),
        key=lambda path: (path.stat().st_mtime_ns, path.name),
    )


def has_checkpoint(path: Path) -> bool:
    """True if a path is a checkpoint of ours or a folder with one; other files may lie beside it."""
    return any(Path(path, name).exists() for name in ("manifest.json", "latest"))


def find(path: Path) -> Path:
    """Find the checkpoint that a path means: itself, or the one that `latest` in it names."""
    path = Path(path)
    if (path / "manifest.json").exists():
        return path
    # A loop, because a job that saves at this moment may remove what `latest` named a moment ago
    while (path / "latest").exists():
        name = read_text(inside(path, "latest"))
        if not _STEP.fullmatch(name):
            raise CheckpointError(
                f"{path / 'latest'} names {name[:80]!r}, which is no checkpoint{_others(path)}"
            )
        newest = inside(path, name)
        if (newest / "manifest.json").exists():
            return newest
        if read_text(inside(path, "latest")) == name:  # else a job has just saved: look again
            raise CheckpointError(
                f"{path / 'latest'} names {name}, which has no manifest.json{_others(path)}"
            )
    raise CheckpointError(
        f"no checkpoint in {path}: it has neither `latest` nor manifest.json{_others(path)}"
    )


@contextmanager
def held_open(path: Path) -> Iterator[Path]:
    """Yield the checkpoint that a path means, as find() returns it; no save(keep=) removes it while the body runs."""
    with ExitStack() as until_read:
        while True:
            found = find(path)
            try:
                until_read.enter_context(read_locked(found / "manifest.json"))
            except FileNotFoundError:
                if found == Path(path):
                    raise CheckpointError(f"{path} was removed while it was opened") from None
                continue  # a newer one has taken its place, or find() says what is missing
            break
        yield found


def verify(
    path: Path,
    manifest: Manifest,
    progress: Callable[[int], Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Check size and SHA-256 of a checkpoint's files, each on one rank; CheckpointError names this rank's bad ones."""
    # size before SHA-256: a truncated file need not be read
    wrong = []
    for name in share(sorted(manifest.files), process_group):
        file, expected = inside(path, name), manifest.files[name]
        if not file.is_file():
            wrong.append(f"{file} is missing")
        elif file.stat().st_size != expected["bytes"]:
            wrong.append(f"{file} has {file.stat().st_size} bytes, expected {expected['bytes']}: truncated?")
        elif (found := sha256_of(file, progress)) != expected["sha256"]:
            wrong.append(f"{file} is damaged: its SHA-256 is {found}, expected {expected['sha256']}"[:500])
    if wrong:
        raise CheckpointError("; ".join(wrong) + _others(path.parent, path))


def read_into(path: Path, saved: Mapping[str, SavedTensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors and DTensors {key: tensor} from the files of a checkpoint, without communication between ranks."""
    with _quiet():
        try:
            dcp.load(dict(tensors), storage_reader=Reader(path, saved), planner=Planner(), no_dist=True)
        except dcp.CheckpointException as error:
            raise CheckpointError(
                "; ".join(text_of(cause) for cause, _ in error.failures.values())
            ) from error


def stored_tensors(path: Path, saved: Mapping[str, SavedTensor]) -> dict[str, StoredTensor]:
    """Return {key: StoredTensor} of a checkpoint, read when they are used; the last one read is kept."""
    last: dict[str, torch.Tensor] = {}

    def read(key: str) -> torch.Tensor:
        if key not in last:  # experts of one tensor are often read one after the other
            value = torch.empty(saved[key].shape, dtype=saved[key].torch_dtype, device="cpu")
            read_into(path, saved, {key: value})
            last.clear()
            last[key] = value
        return last[key]

    return {
        key: StoredTensor(tensor.shape, tensor.torch_dtype, functools.partial(read, key))
        for key, tensor in saved.items()
    }


def model_tensors(path: Path, manifest: Manifest) -> dict[str, StoredTensor]:
    """Return {name: StoredTensor} of the model in a checkpoint."""
    return of_model(stored_tensors(path, manifest.saved(path)))


def of_model(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Select the model's tensors of {key: StoredTensor}, under their names there."""
    return {key.removeprefix(MODEL): t for key, t in tensors.items() if key.startswith(MODEL)}


def _others(folder: Path, without: Path | None = None) -> str:
    names = [path.name for path in _complete(folder) if path != without]
    return f" (complete checkpoints there: {', '.join(names)})" if names else ""


def _is_first(process_group: dist.ProcessGroup | None) -> bool:
    return not dist.is_initialized() or dist.get_rank(process_group) == 0


def share(items: Sequence[Item], process_group: dist.ProcessGroup | None) -> Sequence[Item]:
    """Return this rank's share of the work: every n-th item for n ranks."""
    if not dist.is_initialized():
        return items
    return items[dist.get_rank(process_group) :: dist.get_world_size(process_group)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's warning about work without process group, which is what no_dist=True asks for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
