"""Make training on a CPU faster: keep_memory() lets the process keep freed tensors' memory for the next ones."""

import ctypes
import sys
from collections.abc import Mapping
from types import MappingProxyType

from fmoe_ext import ops

_MAX_BOUND = 2**31 - 1  # mallopt() takes an int

# from <malloc.h> of glibc: the parameters of mallopt(), and the values that a process begins with
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
_BEGINNING = MappingProxyType(
    {_TRIM_THRESHOLD: 128 << 10, _TOP_PAD: 128 << 10, _MMAP_THRESHOLD: 128 << 10, _MMAP_MAX: 65536}
)
_GROWTH = 64 << 20  # bytes that the heap grows by at least


def keep_memory(max_bytes: int | None = _MAX_BOUND) -> None:
    """Let this process keep the memory of freed tensors for the next ones, instead of returning it to the system.

    glibc returns large tensors to the system when they are freed, and the next ones pay for page faults: every 4 KiB
    page is cleared again, each step. After this call large tensors come from the heap, and free memory at its end stays
    there, at most max_bytes bytes, None for all (free memory below a tensor in use stays in any case).
    give_memory_back() undoes it. It holds for the whole process and all of its allocations, and changes no result.
    The first steps still grow the heap: glibc's per-thread caches hold what it cuts off the ends of about the first
    seven tensors of a size, and until they are full the place of a freed tensor is a little too small for the next one.
    Where pieces of free memory lie between tensors in use, the heap grows from step to step (by 20 MB for a dense GPT
    of 3 million parameters with glibc 2.36, which ended in 24 GB): then call give_memory_back() and this now and then.
    It pays in training loops, not in a program that shares a small memory with others.
    Raises ValueError for another max_bytes than 0 to 2^31 - 1, which is what glibc takes, NotImplementedError where the
    C library is not glibc (macOS, Windows, musl).
    The same from outside: MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=<max_bytes> MALLOC_TOP_PAD_=67108864.

    Example:

        >>> keep_memory()  # once, before the training loop
        >>> fmoe_ext.cpu.give_memory_back()
    """
    if max_bytes is not None and not 0 <= max_bytes <= _MAX_BOUND:
        raise ValueError(f"max_bytes must be 0 to {_MAX_BOUND}, or None for no bound, but got {max_bytes}")
    bound = -1 if max_bytes is None else max_bytes
    growth = _GROWTH if max_bytes is None else min(max_bytes, _GROWTH)
    library = _set_malloc({_MMAP_MAX: 0, _TRIM_THRESHOLD: bound, _TOP_PAD: growth})
    if max_bytes is not None:
        library.malloc_trim(ctypes.c_size_t(max_bytes))  # what an earlier call has kept


def give_memory_back() -> None:
    """Undo keep_memory(): set glibc's settings back, and return all free pages to the system at once.

    These include the memory that the operators keep (ops.release_memory). One thing stays: glibc no longer raises its
    threshold for large blocks (128 KiB) by itself, as it does in a process that has never called mallopt().
    Raises NotImplementedError where the C library is not glibc.
    """
    _set_malloc(_BEGINNING).malloc_trim(ctypes.c_size_t(0))
    ops.release_memory()


def can_keep_memory() -> bool:
    """Return whether keep_memory() works here: on Linux with glibc."""
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")


def _set_malloc(values: Mapping[int, int]) -> ctypes.CDLL:
    """Set parameters of malloc -> the C library."""
    if not can_keep_memory():
        raise NotImplementedError(
            f"keep_memory() sets glibc's malloc, but this is {sys.platform} with another C library: "
            "leave the call out (fmoe_ext.cpu.can_keep_memory() says whether it works)"
        )
    library = ctypes.CDLL(None)
    for parameter, value in values.items():
        if library.mallopt(parameter, value) != 1:
            raise RuntimeError(f"mallopt({parameter}, {value}) failed")
    return library
