"""Ports for servers that stop and start again, and ports where nobody listens.

A port of the system's ephemeral range may be taken between two uses, by any socket of any process. These lie outside
of it, and each process has a slice of its own.
"""

import os
import socket
from pathlib import Path

SLICE = 400  # ports of a process; the first one is held as long as it lives
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")

_slices = {}  # by process: a fork has another slice than its parent


def free_port():
    """A port that nobody has now, and that no other process gets from here while this one lives."""
    if os.getpid() not in _slices:
        _slices[os.getpid()] = Slice()
    return _slices[os.getpid()].next()


def endpoint():
    """host:port to listen on, as long as it takes and again later."""
    return f"127.0.0.1:{free_port()}"


def ephemeral():
    """Lowest and highest port that the system gives to sockets that ask for none."""
    return tuple(map(int, EPHEMERAL.read_text().split())) if EPHEMERAL.exists() else (32_768, 65_535)


def bound(port):
    """A socket that has a port on all addresses; OSError if another one has it on any, or had it a minute ago."""
    held = socket.socket()
    try:
        held.bind(("", port))
    except OSError:
        held.close()
        raise
    return held


def firsts(low, high):
    """First ports of all slices: below the ephemeral range, above it, and in it where it is nearly all there is."""
    yield from range(low - SLICE, 1023, -SLICE)
    yield from range(high + 1, (1 << 16) - SLICE, SLICE)
    yield from range(low, high - SLICE, SLICE)


class Slice:
    """Ports in a row that this process has for itself."""

    def __init__(self):
        for first in firsts(*ephemeral()):
            try:
                self._held = bound(first)
            except OSError:
                continue  # of another process
            self._first, self._given = first, 0
            return
        raise OSError(f"no {SLICE} ports in a row are left")

    def next(self):
        for _ in range(SLICE - 1):
            port = self._first + 1 + self._given % (SLICE - 1)
            self._given += 1
            try:
                bound(port).close()
            except OSError:
                continue
            return port
        raise OSError(f"all ports from {self._first + 1} to {self._first + SLICE - 1} are in use")
