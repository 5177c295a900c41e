"""A disk that outlives processes, and what it does to files: flips, cuts, zero pages, old contents, short reads."""

import contextlib
import errno
import io

from fmoe_ext.remote.server.checkpoints import Damaged, decode_with_checksums

PAGE = 512


class Disk:
    """files: what is on it, by name; owner: the process that has locked it. rng decides which bytes are hit."""

    def __init__(self, rng):
        self.rng = rng
        self.files, self.older = {}, {}  # older: a content that the file had before
        self.owner = self.writer = None  # processes
        self.is_full = self.fails_to_sync = False
        self.short_reads = 0.0  # share of reads that end early
        self.blocked = set()  # names that cannot be written
        self.true_names = {}  # of files that an operator renamed
        self.intruder = ""

    def harm(self, kind):
        """Damages a file as disks do -> its name; None if there is nothing to damage."""
        names = sorted(name for name in self.files if name.endswith(".safetensors"))
        if not names:
            return None
        name = self.rng.choice(names)
        data = bytearray(self.files[name])
        place = self.rng.randrange(len(data))
        if kind == "flip":
            data[place] ^= 1 << self.rng.randrange(8)
        elif kind == "cut":
            del data[place:]
        elif kind == "zeros":
            data[place // PAGE * PAGE : place // PAGE * PAGE + PAGE] = bytes(
                len(data[place // PAGE * PAGE :][:PAGE])
            )
        else:
            data = self.older.get(name, data)
        self.files[name] = bytes(data)
        return name

    def misname(self, one, other):
        """An operator gives a file the name of another, which gets its name if it is there."""
        names = {old: new for old, new in ((one, other), (other, one)) if old in self.files}
        self._rename_all(names)
        self.true_names |= {new: old for old, new in names.items()}

    def repair_names(self):
        """The operator has read why the server does not start."""
        self._rename_all(self.true_names)
        self.true_names.clear()
        for name in [name for name in self.files if name.endswith(".safetensors")]:
            with contextlib.suppress(Damaged):  # the server puts it aside
                if f"{decode_with_checksums(self.files[name]).meta['uid']}.safetensors" != name:
                    del self.files[name]  # one that was written, or came back, under the wrong name

    def _rename_all(self, names):
        """An older content stays with its file."""
        for contents in (self.files, self.older):
            contents |= {new: contents.pop(old) for old, new in names.items() if old in contents}

    def wipe(self):
        self.files.clear()
        self.older.clear()
        self.true_names.clear()


class SimFiles:
    """Stands for the Folder of a server."""

    def __init__(self, disk, process):
        self.disk, self.process = disk, process

    def __str__(self):
        return self.process.name

    def names(self):
        return list(self.disk.files)

    def open(self, name, fresh=False):
        if name not in self.disk.files:
            raise FileNotFoundError(name)
        file, rng, share = io.BytesIO(self.disk.files[name]), self.disk.rng, self.disk.short_reads
        if share and rng.random() < share:
            if rng.random() < 0.3:
                raise OSError(errno.EIO, "Input/output error")
            return io.BytesIO(file.getvalue()[: rng.randrange(len(file.getvalue()))])
        return file

    def write(self, name, parts):
        if self.disk.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        writer, self.disk.writer = self.disk.writer, self.process
        if writer not in (None, self.process) and not writer.is_dead:
            self.disk.intruder = f"two processes write into the folder of {self.process.name}"
        self.disk.files[name] = b"".join(bytes(part) for part in parts)
        if self.disk.fails_to_sync:
            raise OSError(errno.EIO, "fsync: Input/output error")

    def rename(self, old, new):
        if new in self.disk.blocked:
            raise IsADirectoryError(errno.EISDIR, "Is a directory")
        if new in self.disk.files:
            self.disk.older[new] = self.disk.files[new]
        self.disk.files[new] = self.disk.files.pop(old)

    def remove(self, name):
        self.disk.files.pop(name, None)

    def sync(self):
        if self.disk.fails_to_sync and self.disk.rng.random() < 0.5:
            raise OSError(errno.EIO, "fsync: Input/output error")

    def lock(self):
        owner = self.disk.owner
        if owner is not None and owner is not self.process and not owner.is_dead:
            raise OSError("another server has the checkpoint folder")
        self.disk.owner = self.process

    def unlock(self):
        if self.disk.owner is self.process:
            self.disk.owner = None
