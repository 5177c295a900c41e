"""Replay of a writer with all that a power cut may take, at every point of its work (Pillai et al., ALICE, OSDI 2014).

A file system promises little: fsync of a file keeps its bytes, fsync of a folder keeps the names in it. All else may
be on disk or not, in any order: a rename without the bytes of its file, a file without its name. `recorded` runs a
writer and looks at its folder before every call that promises or changes a name. What lies there and was not synced is
then lost in the ways that `left_by` lists; each is a folder that the next program may find.

Bytes are compared by looking, not by wrapping write(): what Rust, C++ and memory maps write counts as well.
"""

import itertools
import os
from pathlib import Path

CHANGES = ("rename", "replace", "unlink", "remove", "rmdir", "mkdir", "link")


def recorded(root, monkeypatch, run):
    """Calls run(), which writes into `root` -> the folders {name: bytes, None for a folder} that a cut may leave.

    The likely ones first: of each point the names without the bytes, then everything that came in time.
    """
    disk = _Disk(Path(root))
    with monkeypatch.context() as patch:
        sync = os.fsync

        def fsync(handle):
            disk.point()
            sync(handle)
            disk.sync(os.fstat(getattr(handle, "fileno", lambda: handle)()).st_ino)

        patch.setattr(os, "fsync", fsync)
        for name in CHANGES:
            patch.setattr(os, name, disk.wrapped(getattr(os, name), name in ("rename", "replace")))
        run()
    disk.point()
    disk.close()
    return [dict(state) for kind in range(2) for state in disk.states[kind]]


def replay(root, state):
    """Makes `root` the folder of a state."""
    root = Path(root)
    for parent, folders, files in os.walk(root, topdown=False):
        for name in files:
            os.unlink(Path(parent, name))
        for name in folders:
            os.rmdir(Path(parent, name))
    for name, content in sorted(state.items()):
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)


def seen(root):
    """The state of a folder: {name: bytes, None for a folder}."""
    paths = sorted(Path(root).rglob("*"))
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in paths}


class _Disk:
    """The content of a folder, and the part of it that was synced. Folders and files are known by their inode.

    names: {folder: {name: inode}} as programs see it, kept: as it is on disk; pending: changes between them, in order.
    """

    def __init__(self, root):
        self.root = root
        self.data, self.synced, self.pending = {}, {}, []
        self.names, self.opened = {}, {}
        self.look()
        self.kept = {folder: dict(entries) for folder, entries in self.names.items()}
        self.synced, self.pending = dict(self.data), []
        self.states = {}, {}  # ordered sets: {frozenset of (name, bytes): None}

    def close(self):
        for handle in self.opened.values():
            os.close(handle)

    def look(self):
        """Notes what has changed since the last look."""
        names = {}

        def walk(path):
            inode = os.stat(path).st_ino
            if inode not in self.opened:  # else a file that is made later could get its number
                self.opened[inode] = os.open(path, os.O_RDONLY)
            if os.path.isdir(path):
                names[inode] = {name: walk(os.path.join(path, name)) for name in os.listdir(path)}
            else:
                content = Path(path).read_bytes()
                if self.data.get(inode) != content:
                    self.data[inode] = content
            return inode

        walk(self.root)
        for folder in self.names.keys() | names.keys():
            old, new = self.names.get(folder, {}), names.get(folder, {})
            for name in old.keys() | new.keys():
                if old.get(name) != new.get(name):
                    self.pending.append([(folder, name, new.get(name))])
        self.names = names

    def wrapped(self, call, is_rename):
        def change(*arguments, **options):
            self.point()
            result = call(*arguments, **options)
            count = len(self.pending)
            self.look()
            if is_rename and self.pending[count:]:  # both names change at once
                self.pending[count:] = [[*itertools.chain(*self.pending[count:])]]
            return result

        return change

    def sync(self, inode):
        if inode in self.names:
            done = [change for change in self.pending if any(folder == inode for folder, _, _ in change)]
            self.kept = self._after(done)
            self.pending = [change for change in self.pending if change not in done]
        elif inode in self.data:
            self.synced[inode] = self.data[inode]

    def point(self):
        """Notes what a cut may leave now."""
        self.look()
        old = {inode: self.synced.get(inode, b"") for inode in self.data}
        dirty = [inode for inode, content in self.data.items() if content != old[inode]]
        torn = {i: self.data[i][: len(self.data[i]) // 2] + old[i][len(self.data[i]) // 2 :] for i in dirty}
        everything = self.pending
        self._note(0, everything, old)
        self._note(0, [], old)
        for data in (self.data, self.data | torn):
            self._note(1, everything, data)
            self._note(1, [], data)
        for i, change in enumerate(everything):
            self._note(1, [change], self.data)
            self._note(1, everything[:i] + everything[i + 1 :], self.data)
        for inode in dirty:
            self._note(1, everything, self.data | {inode: old[inode]})

    def _note(self, kind, changes, data):
        names, state = self._after(changes), {}

        def walk(folder, prefix):
            for name, inode in names.get(folder, {}).items():
                is_folder = inode not in data
                state[prefix + name] = None if is_folder else data[inode]
                if is_folder:
                    walk(inode, f"{prefix}{name}/")

        walk(os.stat(self.root).st_ino, "")
        key = frozenset(state.items())
        if key not in self.states[0]:
            self.states[kind].setdefault(key)

    def _after(self, changes):
        names = {folder: dict(entries) for folder, entries in self.kept.items()}
        for change in changes:
            for folder, name, inode in change:
                names.setdefault(folder, {}).pop(name, None)
                if inode is not None:
                    names[folder][name] = inode
        return names
