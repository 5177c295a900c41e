"""Files that are complete or absent, locks between jobs, and nothing outside the folder that was named.

A disk writes data and names in any order, so that a name may stand for an empty file after a power cut. Everything here
that is complete or absent is made in one order: data, synced; names of files, synced; the rename; the name of the
folder, synced. Locks are flock()'s: they end with their process, however it ends, and some file systems have none.
A file that holds a lock may be removed by its owner at the moment when another process opens it, so who gets a lock
looks whether the name still stands for the file that it has (_is_still).
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

BLOCK = 2**22
_MAX_JSON = 2**30  # bytes
_MAX_PICKLE = 2**28  # bytes of an old file of torch.save() in which its pickles are looked for
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # a file system without them


def check_is_file(path: Path) -> None:
    """Raise CheckpointError for a pipe, socket or device, of which reading may never end; OSError where nothing is."""
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


def check_torch_file(file: BinaryIO, what: object) -> None:
    """Raise CheckpointError for a file of torch.save() that would need much more memory than it has bytes.

    What a zip has compressed may be a thousand times as large, its entries may share their bytes, and a pickle may ask
    for any number of zeros by `bytearray(number)`, which torch.load(weights_only=True) allows.
    """
    num_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as content:
            entries = content.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise CheckpointError(f"{what} is compressed, which torch.save never does")
            if sum(entry.file_size for entry in entries) > num_bytes:
                raise CheckpointError(
                    f"{what} has entries that are together larger than its {num_bytes} bytes"
                )
            pickles = [content.read(entry) for entry in entries if entry.filename.endswith(".pkl")]
    else:  # of torch before 1.6: pickles, then the tensors
        file.seek(0)
        pickles = [file.read(_MAX_PICKLE)]
    if any(b"\nbytearray\n" in program for program in pickles):
        raise CheckpointError(f"{what} makes a bytearray, which no checkpoint of tensors needs")
    file.seek(0)


def sync_file(path: Path) -> None:
    """Make the bytes of a file durable, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(unfinished: Path, folder: Path) -> None:
    """Give a finished folder its name, when a power cut can take nothing of it any more.

    Data first, then the names of files, then the rename, then the name of the folder.
    """
    sync_tree(unfinished)
    os.rename(unfinished, folder)
    for parent in {unfinished.parent, folder.parent}:
        sync_file(parent)


def sync_tree(folder: Path) -> None:
    """Make all files of a folder durable, and their names."""
    for parent, _, names in os.walk(folder, topdown=False):
        for path in (*(Path(parent, name) for name in names), Path(parent)):
            if not path.is_symlink():
                sync_file(path)


def copy_file(source: Path, target: Path) -> None:
    """Make a copy that is complete and on disk, or absent."""
    with open(source, "rb") as file, atomic_file(target) as copy:
        shutil.copyfileobj(file, copy, BLOCK)


def fingerprint(file: Path) -> list[Any]:
    """Identify a job's input by place, size and content, a large file by its first part and the time.

    Jobs that go on after an end compare it: to read all of a large model again would take as long as the job.
    """
    size = file.stat().st_size
    with open(file, "rb") as opened:
        first = hashlib.sha256(opened.read(BLOCK)).hexdigest()
    time = file.stat().st_mtime_ns if size > BLOCK else 0
    return [str(file.absolute()), size, first, time]


def read_text(path: Path) -> str:
    """Read a small text file; CheckpointError where it is not UTF-8."""
    check_is_file(path)
    try:
        with open(path, "rb") as file:
            return file.read(BLOCK).decode().strip()
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path} is damaged: it is no text ({error.reason} at {error.start})"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; CheckpointError where there is anything else."""
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
    """Return folder/name; CheckpointError unless that is one component and the file, links followed, in the folder.

    The folders of the Hugging Face hub's cache, whose files are links into `blobs` beside them, pass.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or "\0" in name or {"/", "\\"} & set(name):
        raise CheckpointError(f"{folder}: {name!r} is no name of a file in this folder"[:500])
    path = folder / name
    target, parent = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    of_hub = folder.parent.name == "snapshots" and target.parent == parent.parent.parent / "blobs"
    if target != parent / name and not target.is_relative_to(parent) and not of_hub:
        raise CheckpointError(f"{path} is a link to {target}, outside the folder: give that path itself")
    return path


@contextmanager
def explained(path: Path, num_bytes: int) -> Iterator[None]:
    """Raise CheckpointError that says so where the body fails because the file system has no room for num_bytes."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        # torch's writer swallows the error of the system and complains of a position in the file
        if not _means_no_space(error) and "unexpected pos" not in text_of(error):
            raise
        folder = next(parent for parent in (path, *path.absolute().parents) if parent.is_dir())
        raise CheckpointError(
            f"{path}: no space left on the device, or a limit on the size of files (ulimit -f): "
            f"{num_bytes:,} bytes needed, {shutil.disk_usage(folder).free:,} are free now"
        ) from error


def _means_no_space(error: BaseException | None) -> bool:
    seen = 0  # causes may go round in a circle
    while error is not None and seen < 20:
        if isinstance(error, OSError) and (error.errno in _NO_SPACE or " requested and " in str(error)):
            return True  # the text is that of ndarray.tofile, which has no number
        failures = getattr(error, "failures", {})  # of torch.distributed.checkpoint: one of each rank
        if any(_means_no_space(cause) for cause, _ in failures.values()):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Make a folder for the body; where the body fails, those that were made for it are gone again."""
    made = []
    for parent in (folder, *folder.parents):
        if parent.exists():
            break
        made.append(parent)
    folder.mkdir(parents=True, exist_ok=True)
    try:
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
    """Open a binary file that takes its name, instead of an older one, when the body has ended and it is on disk.

    Any number of processes may write the same name at once: one of their files is there in the end, whole. An OSError
    of a full disk names the path.
    """
    path = Path(path)
    with made_folder(path.parent):
        for abandoned in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
            with suppress(OSError), open(abandoned, "rb") as left:
                if _try_lock(left.fileno()):  # its writer has ended: a lock ends with its process
                    abandoned.unlink()
        while True:
            unfinished = path.with_name(f".{path.name}.{unique()}.tmp")
            file = open(unfinished, "xb")  # noqa: SIM115
            if _try_lock(file.fileno()) is not False and _is_still(unfinished, file.fileno()):
                break
            file.close()  # another process took it for an abandoned one before it was locked
        try:
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.replace(unfinished, path)
        except BaseException as error:
            unfinished.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(path)  # which write() and fsync() do not know
            raise
        sync_file(path.parent)


@contextmanager
def path_of_unfinished(path: Path) -> Iterator[Path]:
    """Yield a path for a writer that takes no open file; its file becomes `path` when the body has ended.

    The caller holds a lock for the place: what killed processes left there is removed.
    """
    for abandoned in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        abandoned.unlink()
    unfinished = path.with_name(f".{path.name}.{unique()}.tmp")
    try:
        yield unfinished
        sync_file(unfinished)
        os.rename(unfinished, path)
        sync_file(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def unique() -> str:
    """Make a part of a name that no other process uses, on any machine."""
    return f"{os.getpid()}-{secrets.token_hex(4)}"


@contextmanager
def locked(path: Path, what: str) -> Iterator[bool]:
    """Hold a lock that other processes, also of other machines, see; CheckpointError where one of them holds it.

    The system takes the lock back when its process ends, however it ends: no lock is left behind. Yields False on a
    file system without locks.
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
            if not _is_still(path, handle):  # its last owner has just removed it
                continue
            os.ftruncate(handle, 0)
            with suppress(OSError):  # on a full disk the lock is as good without its text
                os.pwrite(handle, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
            try:
                yield True
            finally:
                path.unlink(missing_ok=True)
                fcntl.flock(handle, fcntl.LOCK_UN)  # also for children that have inherited it
            return
        finally:
            os.close(handle)


@contextmanager
def read_locked(path: Path) -> Iterator[None]:
    """Keep other processes from removing what an existing file stands for, while the body runs: see lock_unread().

    Raises FileNotFoundError where the file was removed before. Does nothing on a file system without locks.
    """
    check_is_file(path)
    with open(path, "rb") as file:
        _try_lock(file.fileno(), fcntl.LOCK_SH)
        if not _is_still(path, file.fileno()):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        yield


@contextmanager
def lock_unread(path: Path) -> Iterator[bool]:
    """Yield True, and no read_locked() begins while the body runs, if none has the file now; True without locks."""
    with open(path, "r+b") as file:  # NFS gives an exclusive lock to writers only
        yield _try_lock(file.fileno()) is not False


def _is_still(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def _try_lock(handle: int, kind: int = fcntl.LOCK_EX) -> bool | None:
    """True if this process has the lock of an open file now; None on a file system without locks."""
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
