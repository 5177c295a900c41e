"""Keep decoded copies of packed weights from a forward for its backward, within a bound (keep_decoded).

On CUDA a packed weight is decoded in memory and multiplied (frozen_gemm.packed_product, which asks KEPT). The backward
of a layer needs the same numbers again, so a copy is kept from a forward that will have a backward until that backward
takes it. Where a new copy would exceed the bound, the oldest are dropped: the last layers' copies stay, whose backward
comes first. A copy that is gone is decoded again, to the same bits.

A copy lives no longer than its ticket, an empty tensor that the operator saves for its backward beside the others. So
it goes with a graph that has no backward, and wherever hooks let go of what is saved. Activation checkpointing does
that after the first forward: it leaves no copies, and the copies of one checkpoint at a time live from the repeated
forward to its backward.
"""

import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch

_Key: TypeAlias = tuple[Any, ...]
_ticket: ContextVar[torch.Tensor | None] = ContextVar("the ticket of the operator that runs", default=None)
ticket = _ticket.get  # what an operator's setup saves for its backward


def keep_decoded(limit: int | None) -> None:
    """Bound the decoded weights that frozen_mlp and frozen_gemm keep on each GPU for the backward, in bytes.

    None, the default: a quarter of what is free whenever a copy is to be kept, the copies counted as free. 0 keeps
    none. What exceeds a smaller bound is dropped at once. Nothing is kept on the CPU, during the capture of a CUDA
    graph, or by torch.compile or torch.func. Raises ValueError for a negative bound.

    Example:

        >>> keep_decoded(2 * 2**30)  # two GiB
        >>> keep_decoded(None)
    """
    if limit is not None and limit < 0:
        raise ValueError(f"limit must be a number of bytes from 0 on, or None, but got {limit}")
    KEPT.set_limit(limit)


def call_with_ticket(op: Callable[..., Any], device: torch.device, *arguments: Any) -> Any:
    """Call an operator that may keep what it decodes on a device, for a backward that saves ticket()."""
    # one for each call, kept or not: a checkpoint requires that a repeated forward saves as many tensors as the first
    before = _ticket.set(torch.empty(0, device=device))
    try:
        return op(*arguments)
    finally:
        _ticket.reset(before)


class KeptWeights:
    """Decoded weights by the packed ones, the oldest first. free_bytes: counts the free bytes of a device."""

    def __init__(self, free_bytes: Callable[[torch.device], int]) -> None:
        self._free_bytes = free_bytes
        self._limit: int | None = None
        # A copy, and the finalisers that drop it with its weight, scales or ticket.
        self._copies: dict[_Key, tuple[torch.Tensor, list[weakref.finalize[Any, Any]]]] = {}
        # Guards _copies and _limit. Autograd takes a copy from a thread of its own; a finaliser may run in any thread,
        # also inside of these methods, where a garbage collection begins: so the lock is re-entrant, and loops go
        # over a list of what was there (which nothing interrupts), never over _copies.
        self._lock = threading.RLock()

    def decoded(
        self, weight: torch.Tensor, packing: tuple[Any, ...], dtype: torch.dtype, *, last: bool
    ) -> torch.Tensor:
        """Decode a packed weight, or find its copy, and keep it with a ticket. last: no more product will follow."""
        # with scale and zero, which may change while the codes stay
        tensors = [t for t in (weight, *packing[:2]) if t is not None]
        if any(t.is_inference() for t in tensors):
            # such a tensor has no version, and autograd saves none for a backward that would take the copy
            return torch.ops.fmoe_ext._decode_packed(weight, *packing, dtype)
        # A tensor that was written to since has another version, and a slice that begins with it another shape; a copy
        # belongs to the stream that it was made on.
        stream = torch.cuda.current_stream(weight.device).cuda_stream if weight.is_cuda else 0
        versions = tuple(
            (id(t.untyped_storage()), t.data_ptr(), t._version, t.shape, t.stride()) for t in tensors
        )
        key = (versions, packing[2:], dtype, stream)
        with self._lock:
            copy = self._pop(key)
        if copy is None:
            copy = torch.ops.fmoe_ext._decode_packed(weight, *packing, dtype)
        # during a capture its memory would belong to the graph, whose replays write it
        until = None if last or (weight.is_cuda and torch.cuda.is_current_stream_capturing()) else ticket()
        if until is not None:
            with self._lock:
                self._pop(key)  # of another thread, whose finalisers would drop this copy
                if self._make_room(copy.device, copy.nbytes):
                    drops = [weakref.finalize(t.untyped_storage(), self._pop, key) for t in (*tensors, until)]
                    for drop in drops:
                        drop.atexit = False
                    self._copies[key] = copy, drops
        return copy

    def set_limit(self, limit: int | None) -> None:
        """Bound the bytes on each device from now on; None: by what is free."""
        with self._lock:
            self._limit = limit
            for device in {copy.device for copy, _ in list(self._copies.values())}:
                self._make_room(device, 0)

    def num_bytes(self, device: torch.device) -> int:
        """Count the bytes of the copies on a device."""
        with self._lock:
            return sum(copy.nbytes for copy, _ in list(self._copies.values()) if copy.device == device)

    def _make_room(self, device: torch.device, needed: int) -> bool:
        """Drop the oldest copies until `needed` bytes more fit; False if they cannot."""
        held = self.num_bytes(device)
        # A quarter of what is free by default, for activations come after the first layer is decoded. What is kept
        # counts as free: the bound must not shrink by what it allowed.
        limit = (self._free_bytes(device) + held) // 4 if self._limit is None else self._limit
        if needed > limit:
            return False
        for key, (copy, _) in self._copies.copy().items():
            if held + needed <= limit:
                break
            if copy.device == device:
                self._pop(key)
                held -= copy.nbytes  # also if a finaliser came first
        return True

    def _pop(self, key: _Key) -> torch.Tensor | None:
        with self._lock:
            copy, drops = self._copies.pop(key, (None, []))
        for drop in drops:
            drop.detach()
        return copy


def _free_on(device: torch.device) -> int:
    """Count the free bytes of a GPU, with those that torch's allocator holds unused; 0 on other devices."""
    if device.type != "cuda":
        return 0
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


KEPT = KeptWeights(_free_on)
