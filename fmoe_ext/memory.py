"""Count bytes of memory: sizes as text ("8GiB"), and what the machine and the memory cgroups leave this process.

stream() bounds its buffers by it, `fmoe info` says what fits, and a server of experts bounds its queue.

A container's limit is not in /proc/meminfo but in a cgroup, whose files lie below a mount:
    /proc/self/cgroup      the group of this process, as a path of the hierarchy     0::/jobs/17
    /proc/self/mountinfo   where the hierarchy is mounted, and which part of it      / /sys/fs/cgroup ... cgroup2
    <mount>/jobs/17/memory.max, memory.current, memory.stat; the groups above it have limits too

Version 1 and 2 of cgroups name the files differently (_GROUPS).
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import NamedTuple

_UNITS = MappingProxyType(
    {
        **{"": 1, "B": 1},
        **{f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)},
        **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)},
    }
)
# {type of file system: (files with a limit, file with the use, lines of memory.stat about pages of files)}; the kernel
# takes pages of files back when memory is short
_GROUPS = MappingProxyType(
    {
        "cgroup": (
            ("memory.limit_in_bytes",),
            "memory.usage_in_bytes",
            ("total_inactive_file", "total_active_file"),
        ),
        "cgroup2": (("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")),
    }
)


class _Limit(NamedTuple):
    """Bytes that the processes of a group, or of the machine, may use together. path: the file that says so."""

    path: Path
    num_bytes: int
    used: int

    @property
    def free(self) -> int:
        return max(0, self.num_bytes - self.used)

    def __str__(self) -> str:
        return f"{self.num_bytes:,} bytes in {self.path}, of which {self.used:,} are used"


class Memory(NamedTuple):
    """Memory for a model."""

    num_bytes: int
    source: str  # where "auto" found them, for texts; else empty
    limit: _Limit | None  # the smallest of this process
    free: int = 0  # bytes that all limits leave, 0 if there are none


def memory_of(memory: int | str, proc: str | Path = "/proc") -> Memory:
    """Return the bytes of "auto", "8GiB", "500 MB", "1073741824" or a positive number; ValueError for anything else.

    "auto": what is free under the limits of the memory cgroups and of the machine.
    """
    found = limits(proc)
    smallest = min(found, key=lambda limit: limit.num_bytes, default=None)
    free = min((limit.free for limit in found), default=0)
    if memory != "auto":
        return Memory(bytes_of_text(memory), "", smallest, free)
    if not found:
        raise ValueError('memory="auto" needs /proc/meminfo, as on Linux: give a size like memory="8GiB"')
    limit = min(found, key=lambda limit: limit.free)
    return Memory(free, f' from memory="auto" ({limit})', smallest, free)


def bytes_of_text(memory: int | str) -> int:
    """Return the bytes of "8GiB", "500 MB", "1073741824" or a positive number; ValueError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|B|)\s*", str(memory))
    num_bytes = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if num_bytes < 1:
        raise ValueError(
            f'memory must be bytes or a text like "8GiB", at least 1 byte, or "auto", but got {memory!r}'
        )
    return num_bytes


class Process(NamedTuple):
    """Bytes of this process in memory; files that it maps count."""

    now: int
    most: int  # so far


def process(proc: str | Path = "/proc") -> Process | None:
    """Return the memory of this process as the system counts it; None without /proc."""
    try:
        text = (Path(proc) / "self/status").read_text()
    except OSError:
        return None
    sizes = {
        name: int(size) * 1024 for name, size in re.findall(r"^Vm(RSS|HWM):\s+(\d+) kB", text, re.MULTILINE)
    }
    return Process(sizes["RSS"], sizes["HWM"]) if len(sizes) == 2 else None


def restart_peak(proc: str | Path = "/proc") -> None:
    """Make Process.most begin anew at Process.now, where Linux lets us; getrusage's ru_maxrss is the same number."""
    with suppress(OSError):
        (Path(proc) / "self/clear_refs").write_text("5")  # proc(5): resets VmHWM and nothing else


def trim_heap() -> None:
    """Return the free pages of the C library's heap to the system, where that library is glibc."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(ctypes.c_size_t(0))


def room_of_process(now: int, proc: str | Path = "/proc") -> int | None:
    """Return the bytes that the limits let this process have, now included; None without limits."""
    found = limits(proc)
    return now + min(limit.free for limit in found) if found else None


def limits(proc: str | Path = "/proc") -> list[_Limit]:
    """List the memory of the machine, and the limits of the memory cgroups of this process; empty without /proc."""
    proc = Path(proc)
    try:
        text = (proc / "meminfo").read_text()
    except OSError:
        return []
    sizes = {name: int(size) * 1024 for name, size in re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE)}
    total = sizes["MemTotal"]
    available = sizes.get("MemAvailable", sizes["MemFree"])  # MemAvailable: since Linux 3.14
    found = [_Limit(proc / "meminfo", total, total - available)]
    for kind, folder in _groups(proc):
        names, usage, reclaimable = _GROUPS[kind]
        for name in names:
            limit, used = _number(folder / name), _number(folder / usage)
            # version 1 says a huge number for "no limit"
            if limit is not None and used is not None and limit < total:
                # pages of files do not count as used
                try:
                    lines = (folder / "memory.stat").read_text().splitlines()
                except OSError:
                    lines = []
                of_files = sum(int(line.split()[1]) for line in lines if line.split()[0] in reclaimable)
                found.append(_Limit(folder / name, limit, max(0, used - of_files)))
    return found


def _groups(proc: Path) -> Iterator[tuple[str, Path]]:
    """Yield (type of file system, folder) of this process's memory cgroups, and of those above them."""
    try:
        groups, mounts = (proc / "self/cgroup").read_text(), (proc / "self/mountinfo").read_text()
    except OSError:
        return
    # 1. The group of this process: lines "number:controllers:path"; number 0 is version 2.
    own: dict[str, PurePosixPath] = {}
    for line in groups.splitlines():
        number, controllers, own_path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            own["cgroup2" if number == "0" else "cgroup"] = PurePosixPath(own_path)
    # 2. Its folder: lines "id parent device root mount options ... - kind source options"; root is the path in the
    # hierarchy that is mounted there.
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        root, mount = left.split(" ")[3:5]
        kind, _, options = right.split(" ")[:3]
        if kind not in own or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        path, top = own[kind], Path(mount)
        # a container may see only its own group, mounted as the root, while the path is that of the host
        folder = top / path.relative_to(root) if path.is_relative_to(root) and ".." not in path.parts else top
        # 3. And the groups above, whose limits hold for this process too.
        yield kind, folder
        while folder != top:
            folder = folder.parent
            yield kind, folder


def _number(path: Path) -> int | None:
    """Read the number in a file; None for "max" and for a file that is not there."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
