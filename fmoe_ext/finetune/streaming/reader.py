"""Read spans of files into memory: how the Pool of a streamed model gets experts from the disk.

Three ways past or through the system's page cache, whose pages a memory cgroup charges to the process:

    through_cache   where memory is left for all spans: the cache keeps them, and the second read of a span is a copy
    O_DIRECT        else; it wants offsets, lengths and addresses in multiples of BLOCK, so that a read goes into an
                    aligned buffer ("bounce") first, and its spans are copied from there
    neither         file systems without O_DIRECT: through the cache, and each range is dropped from it after the copy

Spans of neighbouring experts lie side by side, so past the cache they are joined to reads of up to CHUNK bytes, gaps
included; through it each span is read into its place. Two threads share the reads. Spans whose bytes have to be
transformed (Span.turn) go through memory of RAW bytes first.
"""

import functools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from mmap import mmap
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.expert_files import ALIGNED, Span

BLOCK = 4096  # bytes to which O_DIRECT aligns offsets, lengths and addresses
CHUNK = 4 * 2**20  # bytes of one read
_MAX_GAP = 16 * 2**10  # gaps between two spans up to this many bytes are read rather than skipped
RAW = 64 * 2**20  # bytes that are read at once to be transformed
_THREADS = 2


_Source: TypeAlias = tuple[Path, int, int]  # file, begin and number of bytes


class _Chunk(NamedTuple):
    """Spans of one file that one read fetches."""

    path: Path
    begin: int
    end: int
    spans: list[Span]


class _Open(NamedTuple):
    """An open file."""

    handle: int
    is_direct: bool  # past the page cache
    changed: int  # time of the last change in nanoseconds, to notice another one while it is streamed


class Reader:
    """Open files of a model, and threads that read them. paths: files to open now, so that others cannot replace them.

    through_cache: the system's page cache keeps what is read. Raises CheckpointError if a file cannot be read.
    """

    def __init__(self, paths: Iterable[Path] = (), through_cache: bool = False) -> None:
        self.through_cache = through_cache
        self._handles: dict[Path, _Open] = {}
        self._threads = ThreadPoolExecutor(_THREADS, "fmoe_ext read")
        # a function: a method would keep self alive
        weakref.finalize(self, _close, self._handles, self._threads)
        for path in paths:
            self._open(path)

    def read(self, spans: Sequence[Span], into: "np.ndarray[Any, Any]") -> int:
        """Fill the places of spans in `into` [num_bytes] uint8, transformed where they say so -> bytes that were read.

        Raises CheckpointError if a file ends too early or cannot be read.
        """
        num_bytes = self._fetch([span for span in spans if span.turn is None], into)
        # To transform: all sources of a group into `raw`, then from there to their places in `into`.
        for group in _groups([span for span in spans if span.turn is not None]):
            # its place in raw; each once, as codes and scales may be of the same bytes
            moved: dict[_Source, Span] = {}
            end = 0
            for source in (part[:3] for span in group for part in (span, *span.beside)):
                if source not in moved:
                    moved[source] = Span(*source, end)
                    end += -(-source[2] // ALIGNED) * ALIGNED
            raw = np.empty(end, dtype=np.uint8)
            num_bytes += self._fetch([*moved.values()], raw)
            self._all(functools.partial(_turn, into, raw, moved), group)
        return num_bytes

    def _fetch(self, spans: Sequence[Span], into: "np.ndarray[Any, Any]") -> int:
        chunks = list(_chunks(spans))
        for path in {chunk.path for chunk in chunks}:
            self._open(path)
        # neighbours go to different threads, so that the disk sees its file in order
        shares = [chunks[first::_THREADS] for first in range(min(_THREADS, len(chunks)))]
        self._all(functools.partial(self._read, into), shares)
        if self.through_cache:  # each span by itself
            return sum(span.num_bytes for chunk in chunks for span in chunk.spans)
        return sum(chunk.end - chunk.begin for chunk in chunks)  # with the gaps

    def _all(self, function: Callable[..., None], *arguments: Sequence[Any]) -> None:
        """Call a function in the threads. When this ends, also by an error or Ctrl-C, none of them writes any more."""
        calls = [self._threads.submit(function, *given) for given in zip(*arguments, strict=True)]
        try:
            for call in calls:
                call.result()
        finally:
            wait(calls)

    def _open(self, path: Path) -> None:
        if path not in self._handles:
            direct = 0 if self.through_cache else getattr(os, "O_DIRECT", 0)
            try:
                handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | direct)
            except OSError:  # of a file system without O_DIRECT
                direct = 0
                try:
                    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise CheckpointError(f"{path} cannot be read: {error}") from error
            self._handles[path] = _Open(handle, bool(direct), os.fstat(handle).st_mtime_ns)

    def _read(self, into: "np.ndarray[Any, Any]", chunks: Sequence[_Chunk]) -> None:
        """Read chunks into the places of their spans; in one of the threads."""
        # a chunk grows by less than a block at either end when it is aligned; through the cache nothing bounces
        bounce = aligned_memory(BLOCK if self.through_cache else CHUNK + 2 * BLOCK)
        for chunk in chunks:
            handle, is_direct, changed = self._handles[chunk.path]
            # before each read, since a file may be written over in place while it is open
            now = os.fstat(handle)
            if (missing := chunk.end - now.st_size) > 0:
                raise CheckpointError(f"{chunk.path} is damaged: it ends {missing} bytes too early")
            if now.st_mtime_ns != changed:
                raise CheckpointError(f"{chunk.path} was changed while it is streamed: call stream() again")
            if self.through_cache:  # a span at a time, without the gaps, into its place
                for span in chunk.spans:
                    place = into[span.at : span.at + span.num_bytes]
                    _fill(handle, chunk, place, span.begin, span.num_bytes)
                continue
            begin = chunk.begin // BLOCK * BLOCK if is_direct else chunk.begin
            size = chunk.end - begin
            wanted = -(-size // BLOCK) * BLOCK if is_direct else size  # may reach behind the end of the file
            _fill(handle, chunk, bounce[:wanted], begin, size)
            for span in chunk.spans:
                first = span.begin - begin
                into[span.at : span.at + span.num_bytes] = bounce[first : first + span.num_bytes]
            if not is_direct:  # drop the range, which the cgroup would charge
                os.posix_fadvise(handle, begin, size, os.POSIX_FADV_DONTNEED)


def aligned_memory(num_bytes: int) -> "np.ndarray[Any, Any]":
    """Allocate uint8 [num_bytes] at the beginning of a page, as O_DIRECT wants it."""
    return np.frombuffer(mmap(-1, num_bytes), dtype=np.uint8)


def _fill(handle: int, chunk: _Chunk, into: "np.ndarray[Any, Any]", begin: int, size: int) -> None:
    """Read into `into` until `size` bytes are there: fewer than it has room for, where O_DIRECT wants whole blocks."""
    done = 0
    while done < size:  # preadv may return less than it was asked for
        try:
            count = os.preadv(handle, [into[done:].data], begin + done)
        except OSError as error:
            raise CheckpointError(f"{chunk.path} cannot be read: {error}") from error
        if count == 0:
            raise CheckpointError(f"{chunk.path} is damaged: it ends {size - done} bytes too early")
        done += count


def _turn(
    into: "np.ndarray[Any, Any]", raw: "np.ndarray[Any, Any]", moved: Mapping[_Source, Span], span: Span
) -> None:
    """Transform a span, with those that its transformation needs beside it, from `raw` into its place in `into`."""
    assert span.turn is not None
    lie = (moved[part[:3]] for part in (span, *span.beside))
    turned = span.turn(*(raw[m.at : m.at + m.num_bytes] for m in lie)).reshape(-1).view(np.uint8)
    into[span.at : span.at + turned.size] = turned


def _groups(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Group spans in the order of the files, as many together as fit into RAW bytes; a longer span is alone."""
    group: list[Span] = []
    size = 0
    for span in sorted(spans, key=lambda span: span[:2]):  # by file and begin
        num_bytes = sum(part.num_bytes for part in (span, *span.beside))
        if group and size + num_bytes > RAW:
            yield group
            group, size = [], 0
        group.append(span)
        size += num_bytes
    if group:
        yield group


def _chunks(spans: Sequence[Span]) -> Iterator[_Chunk]:
    """Join spans in the order of the files to reads of at most CHUNK bytes; a longer span is split."""
    current: _Chunk | None = None
    for span in sorted(spans):
        begin, left, at = span.begin, span.num_bytes, span.at
        while left:
            if current is not None and (
                current.path != span.path
                or begin < current.begin  # of the same bytes as an earlier span, which has been split
                or begin - current.end > _MAX_GAP
                or max(begin, current.end) - current.begin >= CHUNK  # full
            ):
                yield current
                current = None
            if current is None:
                current = _Chunk(span.path, begin, begin, [])
            size = min(left, current.begin + CHUNK - begin)
            current.spans.append(Span(span.path, begin, size, at))
            current = current._replace(end=max(current.end, begin + size))
            begin, left, at = begin + size, left - size, at + size
    if current is not None:
        yield current


def _close(handles: dict[Path, _Open], threads: ThreadPoolExecutor) -> None:
    threads.shutdown(wait=False)
    for file in handles.values():
        os.close(file.handle)
    handles.clear()
