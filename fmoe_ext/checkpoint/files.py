"""Write files that are complete or absent, lock them between jobs, read no more than a bound, and stay in a folder.

Complete or absent. A disk writes data and names in any order, so after a power cut a name may stand for an empty file.
atomic_file(), path_of_unfinished() and publish() therefore keep one order:

    write the data under another name    fsync the file    rename it    fsync the folder, which holds the name

Locks are flock()'s: the system releases them when the process ends, however it ends, so none is ever left behind. Some
file systems have none (_try_lock() returns None there). A lock's file is removed by its owner, perhaps just after
another process has opened it: a process that gets a lock checks that the name still stands for its file (_is_still).

Bounded. A pipe, from which reading may never end, and a file that would take much memory are refused before they are
read (check_is_file, read_json, check_torch_file).

Inside. Names that a downloaded file gives are looked up by inside(), which follows links and refuses what is outside.
"""

import errno
import fcntl
import glob
import hashlib
import json
import os
import secrets
import shutil
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from torch.distributed.checkpoint import CheckpointException

from fmoe_ext.checkpoint.errors import CheckpointError, text_of

BLOCK = 2**22  # bytes read at a time
_MAX_JSON = 2**30  # bytes; a larger file is refused before it is read into memory
_MAX_PICKLE = 2**28  # bytes of an old file of torch.save() in which its pickles are looked for
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk, quota, ulimit -f
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # a file system without them


def check_is_file(path: Path) -> None:
    """Raise CheckpointError for a pipe, socket or device, from which reading may never end; OSError without a file."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise CheckpointError(f"{path} is no regular file (a folder, pipe, socket or device)")


def sha256_of(path: Path, progress: Callable[[int], Any] | None = None) -> str:
    """Compute the SHA-256 of a file, as sha256sum prints it; progress(bytes) is called now and then."""
    check_is_file(path)
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            if progress is not None:
                progress(len(block))
    return digest.hexdigest()


def is_zip_of_torch(file: BinaryIO) -> bool:
    """Return whether torch.load() reads a file as a zip: its first four bytes decide, not the directory at its end."""
    file.seek(0)
    return file.read(4) == b"PK\3\4"


def check_torch_file(file: BinaryIO, what: object) -> None:
    """Raise CheckpointError for a file of torch.save() that would need much more memory than it has bytes.

    Three ways to make a small file huge: compressed entries of the zip may be a thousand times as large, entries may
    share their bytes, and a pickle may ask for any number of zeros by `bytearray(number)`, which
    torch.load(weights_only=True) allows.
    """
    num_bytes = file.seek(0, os.SEEK_END)
    if is_zip_of_torch(file):
        with zipfile.ZipFile(file) as content:
            entries = content.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise CheckpointError(f"{what} is compressed, which torch.save never does")
            if sum(entry.file_size for entry in entries) > num_bytes:
                raise CheckpointError(
                    f"{what} has entries that are together larger than its {num_bytes} bytes"
                )
            # torch finds DATA.PKL for data.pkl
            pickles = [content.read(entry) for entry in entries if entry.filename.lower().endswith(".pkl")]
    else:  # of torch before 1.6: pickles, then the tensors
        file.seek(0)
        pickles = [file.read(_MAX_PICKLE)]
    if any(b"\nbytearray\n" in program for program in pickles):  # as the GLOBAL instruction spells it
        raise CheckpointError(f"{what} makes a bytearray, which no checkpoint of tensors needs")
    file.seek(0)


def sync_file(path: Path) -> None:
    """Make the bytes of a file durable, or the names in a folder (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(unfinished: Path, folder: Path) -> None:
    """Rename a finished folder, once all of it would survive a power cut.

    Data first, then the names of files, then the rename, then the name of the folder.
    """
    sync_tree(unfinished)
    os.rename(unfinished, folder)
    for parent in {unfinished.parent, folder.parent}:
        sync_file(parent)


def sync_tree(folder: Path) -> None:
    """Make all files of a folder durable, and their names."""
    # files before the folder that names them, so from the deepest folder up
    for parent, _, names in os.walk(folder, topdown=False):
        for path in (*(Path(parent, name) for name in names), Path(parent)):
            if not path.is_symlink():
                sync_file(path)


def copy_file(source: Path, target: Path) -> None:
    """Make a copy that is complete and on disk, or absent."""
    with open(source, "rb") as file, atomic_file(target) as copy:
        shutil.copyfileobj(file, copy, BLOCK)


def fingerprint(file: Path) -> list[Any]:
    """Identify a job's input by path, size and content; a large file by its first block and its time of change.

    A job that goes on after an interruption compares it. To hash all of a large model would take as long as the job.
    """
    size = file.stat().st_size
    with open(file, "rb") as opened:
        first = hashlib.sha256(opened.read(BLOCK)).hexdigest()
    time = file.stat().st_mtime_ns if size > BLOCK else 0
    return [str(file.absolute()), size, first, time]


def read_text(path: Path) -> str:
    """Read the first BLOCK bytes of a text file, without spaces around them; CheckpointError if they are not UTF-8."""
    check_is_file(path)
    try:
        with open(path, "rb") as file:
            return file.read(BLOCK).decode().strip()
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path} is damaged: it is no text ({error.reason} at {error.start})"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; CheckpointError for anything else."""
    try:
        check_is_file(path)
        if path.stat().st_size > _MAX_JSON:
            raise CheckpointError(f"{path} is larger than {_MAX_JSON} bytes")
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read, or is damaged: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: it holds a {type(content).__name__}, not an object")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object to a JSON file that is complete or absent."""
    with atomic_file(path) as file:
        file.write(json.dumps(content, indent=2).encode())


def inside(folder: Path, name: Any) -> Path:
    """Return folder/name; CheckpointError unless name is one component and the file, links followed, is inside.

    Folders of the Hugging Face hub's cache pass: their files are links into `blobs` beside them.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or "\0" in name or {"/", "\\"} & set(name):
        raise CheckpointError(f"{folder}: {name!r} is no name of a file in this folder"[:500])
    path = folder / name
    target, parent = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    # snapshots/<commit>/file -> ../../blobs/<hash>
    of_hub = folder.parent.name == "snapshots" and target.parent == parent.parent.parent / "blobs"
    if target != parent / name and not target.is_relative_to(parent) and not of_hub:
        raise CheckpointError(f"{path} is a link to {target}, outside the folder: give that path itself")
    return path


@contextmanager
def explained(path: Path, num_bytes: int) -> Iterator[None]:
    """Explain a full disk: if the body fails for lack of room, raise CheckpointError with what is needed and free.

    num_bytes: what the body is going to write.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:
        # torch's writer swallows the error of the system and complains of a position in the file
        if not _means_no_space(error) and "unexpected pos" not in text_of(error):
            raise
        # the folder that is there, to ask how much is free
        folder = next(parent for parent in (path, *path.absolute().parents) if parent.is_dir())
        raise CheckpointError(
            f"{path}: no space left on the device, or a limit on the size of files (ulimit -f): "
            f"{num_bytes:,} bytes needed, {shutil.disk_usage(folder).free:,} are free now"
        ) from error


def _means_no_space(error: BaseException | None) -> bool:
    seen = 0  # a bound, because causes may refer to each other in a circle
    while error is not None and seen < 20:
        if isinstance(error, OSError) and (error.errno in _NO_SPACE or " requested and " in str(error)):
            return True  # ndarray.tofile's error has no errno, only this text
        # look into each rank's error, then into its causes
        failures = getattr(error, "failures", {})  # of torch.distributed.checkpoint: one of each rank
        if any(_means_no_space(cause) for cause, _ in failures.values()):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Make a folder, with those above it, for the body; if the body fails, remove the ones that were made."""
    made = []
    for parent in (folder, *folder.parents):
        if parent.exists():
            break
        made.append(parent)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        raise
    for parent in made:
        sync_file(parent.parent)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file that gets its name, in place of an older one, once the body has ended and it is on disk.

    Any number of processes may write the same name at once: in the end one of their files is there, whole. An OSError
    of a full disk names the path.
    """
    path = Path(path)
    with made_folder(path.parent):
        # Remove what killed processes left; then make a file of our own and lock it, so that nobody removes it
        for abandoned in unfinished_of(path):
            with suppress(OSError), open(abandoned, "rb") as left:
                if _try_lock(left.fileno()):  # its writer has ended: a lock ends with its process
                    abandoned.unlink()
        while True:
            unfinished = path.with_name(f".{path.name}.{unique()}.tmp")
            file = open(unfinished, "xb")  # noqa: SIM115
            if _try_lock(file.fileno()) is not False and _is_still(unfinished, file.fileno()):
                break
            file.close()  # another process removed it as abandoned before it was locked: make another
        try:
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.replace(unfinished, path)
        except BaseException as error:
            unfinished.unlink(missing_ok=True)
            # write() and fsync() do not know the name; other errors may be of a file that the body reads
            if isinstance(error, OSError) and error.errno in _NO_SPACE and error.filename is None:
                error.filename = str(path)
            raise
        sync_file(path.parent)


@contextmanager
def path_of_unfinished(path: Path) -> Iterator[Path]:
    """Yield a path for a writer that takes no open file; its file is renamed to `path` when the body has ended.

    The caller holds a lock for the folder: unfinished files there were left by killed processes, and are removed.
    """
    for abandoned in unfinished_of(path):
        abandoned.unlink()
    unfinished = path.with_name(f".{path.name}.{unique()}.tmp")
    try:
        yield unfinished
        sync_file(unfinished)
        os.rename(unfinished, path)
        sync_file(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def unfinished_of(path: Path) -> list[Path]:
    """List the unfinished files of `path`, of running and killed writers: .<name>.<unique()>.tmp beside it."""
    begin = f".{path.name}."
    # unique() has no dot: .model.v2.<unique()>.tmp is of model.v2, not of model
    found = path.parent.glob(f"{glob.escape(begin)}*.tmp")
    return [other for other in found if "." not in other.name.removeprefix(begin).removesuffix(".tmp")]


def unique() -> str:
    """Make a part of a name, without dots, that no other process uses, on any machine."""
    return f"{os.getpid()}-{secrets.token_hex(4)}"


@contextmanager
def locked(path: Path, what: str) -> Iterator[bool]:
    """Hold a lock while the body runs; CheckpointError that names the owner if another process has it.

    Processes on other machines see it where their file system shares flock(), as NFS does. The system releases the lock
    when the process ends, however it ends. Yields False on a file system without locks.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            got = _try_lock(handle)
            if got is False:
                owner = os.pread(handle, 200, 0).decode(errors="replace") or "another process"
                raise CheckpointError(f"{what}: {owner} is doing so now; give each job a folder of its own")
            if got is None:
                yield False
                return
            if not _is_still(path, handle):  # its last owner has just removed it: open the new one
                continue
            os.ftruncate(handle, 0)
            with suppress(OSError):  # on a full disk the lock is as good without its text
                os.pwrite(handle, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
            try:
                yield True
            finally:
                # removed while it is held: a process that has just opened it sees that it is gone (_is_still)
                path.unlink(missing_ok=True)
                fcntl.flock(handle, fcntl.LOCK_UN)  # close() would not, if a child has inherited the handle
            return
        finally:
            os.close(handle)


@contextmanager
def read_locked(path: Path) -> Iterator[None]:
    """Hold a shared lock on a file, so that lock_unread() of other processes sees that it is read while the body runs.

    Raises FileNotFoundError if the file was removed meanwhile. Does nothing on a file system without locks.
    """
    check_is_file(path)
    with open(path, "rb") as file:
        if _try_lock(file.fileno(), fcntl.LOCK_SH) is False:
            # wait for the body of lock_unread(), which may remove the file
            fcntl.flock(file.fileno(), fcntl.LOCK_SH)
        if not _is_still(path, file.fileno()):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        yield


@contextmanager
def lock_unread(path: Path) -> Iterator[bool]:
    """Yield True if no read_locked() has the file now: new ones wait until the body ends. True without locks, too."""
    with open(path, "r+b") as file:  # NFS gives an exclusive lock to writers only
        got = _try_lock(file.fileno())
        try:
            yield got is not False
        finally:
            if got:
                # close() would not unlock, if a child has inherited the handle
                fcntl.flock(file.fileno(), fcntl.LOCK_UN)


def _is_still(path: Path, handle: int) -> bool:
    """Return whether the name still stands for the open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def _try_lock(handle: int, kind: int = fcntl.LOCK_EX) -> bool | None:
    """Try to lock an open file -> True if this process has the lock now; None on a file system without locks."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def remove(path: Path) -> None:
    """Remove a folder with its content, or the link to one and not what it points to."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)
