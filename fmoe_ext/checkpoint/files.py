"""Files that are complete or absent, and their checksums."""

import hashlib
import os
from contextlib import contextmanager
from pathlib import Path

BLOCK = 2**22


def sha256_of(path, progress=None):
    """The SHA-256 of a file, as sha256sum prints it; progress(bytes) is called now and then."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            if progress is not None:
                progress(len(block))
    return digest.hexdigest()


def sync_folder(folder):
    """Makes the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def atomic_file(path):
    """A binary file that takes its name, in place of an older one, when the body has ended and it is on disk."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.tmp")
    try:
        with open(unfinished, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
