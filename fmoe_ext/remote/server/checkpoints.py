"""Checkpoints: save each expert to a file of its own and load it, with checksums over every byte; for saving.py.

Disks return wrong bytes without an error, and a power cut leaves half a file. So a file is written under another
name, synced and renamed, and every byte that is read is compared before it is used. A damaged file is set aside under a
name of its own, so that nothing overwrites what may be the only copy. A file is a safetensors file (wire.py):
    8 bytes   length N of the header
    N bytes   the header, JSON; its metadata name the expert and its version
    tensors   weights, optimizer, request ids (state.py)
    checksums [n + 1, 16] uint8, the last tensor: the BLAKE2b digest of each MiB before it, then one of these n digests
The table lies at the end, because a file is written in one pass, and its size follows from the file's size alone, so
that it is found even if the header is damaged.
"""

import contextlib
import errno
import hashlib
import io
import json
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fmoe_ext.remote.discovery import check_uid, is_uid
from fmoe_ext.remote.security import lock_file
from fmoe_ext.remote.wire import WHOLE, Message, WireError, decode, pieces

log = logging.getLogger("fmoe_ext.remote")
SUFFIX, _DAMAGED, _LOCK = ".safetensors", ".damaged-", ".lock"
TABLE = "checksums"
CHUNK, _DIGEST = 1 << 20, 16  # bytes
_METHOD = f"blake2b-{8 * _DIGEST} of every {CHUNK} bytes"
READS = 3  # before a file counts as damaged: one read may fail or end early and the next one succeed
FILE = replace(WHOLE, max_tensors=WHOLE.max_tensors + 1)  # one more: the checksums
_OLD_NAMES = ("weight/", "optimizer/", "applied.")  # how all tensors of files without checksums are named


class Damaged(Exception):
    """A checkpoint does not hold what was written. version: of its expert; None if the header cannot be trusted."""

    def __init__(self, text: str, version: int | None = None):
        super().__init__(text)
        self.version = version


class Misnamed(ValueError):
    """A checkpoint file has the name of one expert and holds another."""


class Folder:
    """The files of a local folder, which is made if it is missing; any method may raise OSError."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._locked: int | None = None

    def __str__(self) -> str:
        return str(self.path)

    def names(self) -> list[str]:
        return os.listdir(self.path)

    def open(self, name: str, fresh: bool = False) -> BinaryIO:
        """Open a file for reading; fresh: read the disk itself, not the system's cache of it."""
        file = open(self.path / name, "rb")  # noqa: SIM115
        if fresh and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file

    def write(self, name: str, parts: Iterable[Any]) -> None:
        """Create a file with these bytes; they are on the disk when this returns."""
        with open(self.path / name, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())

    def rename(self, old: str, new: str) -> None:
        os.replace(self.path / old, self.path / new)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def sync(self) -> None:
        """Return when all renames are on the disk."""
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def lock(self) -> None:
        """Lock the folder for this process until unlock() or its end; InUse if another process has it."""
        self._locked = lock_file(
            self.path / _LOCK,
            f"another server has the checkpoint folder {self.path}: stop it, or name another --checkpoint_dir",
        )

    def unlock(self) -> None:
        if self._locked is not None:
            os.close(self._locked)
            self._locked = None


class Checkpoints:
    """The checkpoints of a server; its methods are safe from any thread."""

    def __init__(self, where: Path | Folder):
        self.files = Folder(where) if isinstance(where, (str, Path)) else where
        # held while files are written or renamed, so that set_aside() moves no newer one
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Lock the folder, remove half-written files of an earlier process; Misnamed if a file was renamed."""
        self.files.lock()
        for name in self.files.names():
            if f"{SUFFIX}.tmp-" in name:
                self.files.remove(name)
            elif name.endswith(SUFFIX):
                uid, holds = name.removesuffix(SUFFIX), self._uid_in_header(name)
                if holds is not None and holds != uid:
                    raise _misnamed(self.files, uid, holds)

    def end(self) -> None:
        """Unlock the folder."""
        with self._lock:  # a save whose task was cancelled may still be writing on its thread
            self.files.unlock()

    def save(self, state: Message) -> None:
        """Write a state to a new file, sync it and rename it over the old one: a crash leaves one of both, whole."""
        name = _file_name(state.meta["uid"])
        temporary = f"{name}.tmp-{os.getpid()}"
        with self._lock:
            try:
                self.files.write(temporary, encode_with_checksums(state))
                self.files.rename(temporary, name)
            except BaseException:
                with contextlib.suppress(OSError):
                    self.files.remove(temporary)
                raise
            self.files.sync()  # the rename is not on the disk before the folder is

    def load(self, uid: str) -> Message | None:
        """Return the state that was saved last; None without one, Damaged or Misnamed if it must not be used."""
        # 1. read it, several times if it seems damaged
        name = _file_name(uid)
        for read in range(1, READS + 1):
            try:
                with self.files.open(name) as file:
                    state = decode_with_checksums(file.read())
            except FileNotFoundError:
                return None
            except OSError as error:
                # EIO is the disk's fault; others, such as EACCES, no new read mends
                if error.errno != errno.EIO:
                    raise
                failure = Damaged(str(error))
            except Damaged as error:
                failure = error
            else:
                break
            if read == READS:
                raise Damaged(f"the checkpoint {self.files}/{name} is damaged: {failure}", failure.version)
        # 2. the state in it, without the table
        if TABLE not in state.meta:
            text = "%s/%s has no checksums, so that damage cannot be found: the next save adds them"
            log.warning(text, self.files, name)
        if state.meta.get("uid") != uid:
            raise _misnamed(self.files, uid, state.meta.get("uid", ""))
        tensors = {n: x for n, x in state.tensors.items() if n != TABLE}
        return Message(tensors, {k: v for k, v in state.meta.items() if k != TABLE})

    def check(self, uid: str) -> Iterator[int]:
        """Read a file from the disk, yielding the number of bytes after each chunk; Damaged if it differs."""
        name = _file_name(uid)
        for read in range(1, READS + 1):
            try:
                with self.files.open(name, fresh=True) as file:
                    yield from _check_file(file)
                return
            except FileNotFoundError:
                return
            except (Damaged, OSError) as error:
                if read == READS:
                    raise Damaged(f"the checkpoint {self.files}/{name} is damaged: {error}") from None

    def set_aside(self, uid: str) -> str | None:
        """Rename a damaged file, so that nothing reads or overwrites it -> its new name; None if it is whole now."""
        name = _file_name(uid)
        with self._lock:
            # read once more under the lock: a save may have replaced the file since
            with contextlib.suppress(Damaged):
                for _ in self.check(uid):
                    pass
                return None
            taken = set(self.files.names())
            number = next(n for n in range(1, len(taken) + 2) if f"{name}{_DAMAGED}{n}" not in taken)
            self.files.rename(name, f"{name}{_DAMAGED}{number}")
            self.files.sync()
            return f"{name}{_DAMAGED}{number}"

    def uids(self) -> list[str]:
        """Return the experts that have a file; files with other names are not this server's."""
        names = (name.removesuffix(SUFFIX) for name in self.files.names() if name.endswith(SUFFIX))
        return sorted(filter(is_uid, names))

    def _uid_in_header(self, name: str) -> str | None:
        """Return the uid in a file's header; None if the header cannot be read, or is damaged."""
        for _ in range(2 * READS):  # more often than elsewhere: missing a renamed file begins its expert anew
            with contextlib.suppress(OSError), self.files.open(name) as file:
                if (uid := _read_meta(file).get("uid")) is not None:
                    return uid
        return None


def _file_name(uid: str) -> str:
    return f"{check_uid(uid)}{SUFFIX}"


def _misnamed(files: Folder, uid: str, holds: str) -> Misnamed:
    return Misnamed(
        f"{files}/{uid}{SUFFIX} holds the state of {holds or 'no expert'}: give it back its name, or move it away"
    )


# ---------------------------------------------------------------- the format


def encode_with_checksums(state: Message) -> Iterator[Any]:
    """Yield the bytes of a checkpoint in parts, with the checksums as the last one."""

    def without_table(num_chunks: int) -> list[Any]:
        table = torch.zeros(num_chunks + 1, _DIGEST, dtype=torch.uint8, device="cpu")
        return pieces(Message({**state.tensors, TABLE: table}, {**state.meta, TABLE: _METHOD}))[:-1]

    # 1. the number of chunks: the header names the table's size, and may grow by a digit with it, so try until it fits
    count, parts = 1, without_table(1)
    while (needed := -(-sum(map(len, parts)) // CHUNK)) != count:
        count, parts = needed, without_table(needed)
    # 2. the parts, digested on the way; chunks of a MiB do not end where parts do
    digests, chunk, room = [], hashlib.blake2b(digest_size=_DIGEST), CHUNK
    for part in parts:
        view = memoryview(part).cast("B")
        begin = 0
        while begin < len(view):
            piece = view[begin : begin + room]
            chunk.update(piece)
            begin += len(piece)
            room -= len(piece)
            if room == 0:
                digests.append(chunk.digest())
                chunk, room = hashlib.blake2b(digest_size=_DIGEST), CHUNK
        yield part
    # 3. the last chunk, which may be shorter, and the table in place of the zeros that the header was made with
    if room < CHUNK:
        digests.append(chunk.digest())
    rows = b"".join(digests)
    yield rows + _digest(rows)


def decode_with_checksums(data: bytes) -> Message:
    """Return the state in a file, with its table; Damaged unless every byte is as it was written."""
    try:
        for _ in _check_file(io.BytesIO(data)):
            pass
        return decode(data, FILE)
    except WireError as error:
        raise Damaged(f"it cannot be read ({error})") from None
    except Damaged as error:
        version = _read_meta(io.BytesIO(data)).get("version", "")
        raise Damaged(str(error), int(version) if version.isdecimal() else None) from None


def _num_chunks(size: int) -> int:
    """Return the number of chunks of a file, which follows from its size alone; Damaged if no file has this size."""
    # n chunks have n + 1 digests: size = end + _DIGEST * (n + 1), with end between CHUNK * (n - 1) and CHUNK * n
    count = max(1, -(-(size - _DIGEST) // (CHUNK + _DIGEST)))
    if size - _DIGEST * (count + 1) <= CHUNK * (count - 1):
        raise Damaged(f"it was cut off: no checkpoint has {size} bytes")
    return count


def _check_file(file: BinaryIO) -> Iterator[int]:
    """Compare each chunk with its digest, yielding its number of bytes; Damaged if one differs."""
    size = file.seek(0, os.SEEK_END)
    try:
        # the table first: a file that was cut off, or whose table is damaged, shows there
        count = _num_chunks(size)
        end = size - _DIGEST * (count + 1)
        file.seek(end)
        table = file.read(size - end)
        rows, whole = table[:-_DIGEST], table[-_DIGEST:]
        if len(table) != size - end or _digest(rows) != whole:
            raise Damaged("its checksums are damaged, or it was cut off")
        # then each chunk
        file.seek(0)
        for n in range(count):
            begin, stop = n * CHUNK, min((n + 1) * CHUNK, end)
            if _digest(file.read(stop - begin)) != rows[n * _DIGEST : (n + 1) * _DIGEST]:
                raise Damaged(f"bytes {begin} to {stop} differ from what was written")
            yield stop - begin
    except Damaged:
        # A release before the checksums may have written it. One damaged byte cannot make a newer file look like that,
        # which names the table twice: in the metadata and among the tensors.
        file.seek(0)
        with contextlib.suppress(WireError):
            old = decode(file.read(), FILE)
            if TABLE not in old.meta and all(name.startswith(_OLD_NAMES) for name in old.tensors):
                return
        raise


def _read_meta(file: BinaryIO) -> dict[str, str]:
    """Return the metadata in a file's header if its first MiB is whole, whatever happened to the rest; else {}."""
    size = file.seek(0, os.SEEK_END)
    try:
        count = _num_chunks(size)
        end = size - _DIGEST * (count + 1)
        file.seek(end)
        expected = file.read(_DIGEST)
        file.seek(0)
        data = file.read(min(CHUNK, end))
        meta = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    except (Damaged, ValueError, RecursionError, KeyError, TypeError):
        return {}
    # without a table in its metadata it is a file of an earlier release
    is_trusted = _digest(data) == expected or (isinstance(meta, dict) and TABLE not in meta)
    return meta if is_trusted and isinstance(meta, dict) else {}


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()
