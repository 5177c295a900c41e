"""Keep decoded copies of packed weights from a forward for its backward, within a bound (keep_decoded).

On CUDA a packed weight is decoded in memory and multiplied. The backward of a layer needs the same numbers again:
decoding twice costs as much as reading the weight in 16 bits four times. A copy is kept from a forward that will have a
backward until that backward takes it. Under activation checkpointing a layer's repeated forward and its backward follow
each other, so one layer's copies are alive; without it the last layers of the forward are kept, whose backward comes
first. Where a new copy would exceed the bound, the oldest are dropped; a copy that is gone is decoded again, to the
same bits.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

_Key: TypeAlias = tuple[Any, ...]


def keep_decoded(limit: int | None) -> None:
    """Bound the decoded weights that frozen_mlp and frozen_gemm keep on each GPU for the backward, in bytes.

    None, the default: a quarter of the memory that is free at that moment. 0 keeps none. What exceeds a smaller bound
    is dropped at once. Nothing is kept on the CPU, during the capture of a CUDA graph, or by torch.compile. Raises
    ValueError for a negative bound.

    Example:

        >>> keep_decoded(2 * 2**30)  # two GiB
        >>> keep_decoded(None)
    """
    if limit is not None and limit < 0:
        raise ValueError(f"limit must be a number of bytes from 0 on, or None, but got {limit}")
    KEPT.set_limit(limit)


class KeptWeights:
    """Decoded weights by the packed ones, the oldest first. free_bytes: counts the free bytes of a device."""

    def __init__(self, free_bytes: Callable[[torch.device], int]) -> None:
        self._free_bytes = free_bytes
        self._limit: int | None = None
        # A copy, and the finalisers that drop it with its weight or scales.
        self._copies: OrderedDict[_Key, tuple[torch.Tensor, list[weakref.finalize[Any, Any]]]] = OrderedDict()
        # Guards _copies and _limit. Autograd takes a copy from a thread of its own; a finaliser may run in any thread,
        # also inside of these methods, so the lock is re-entrant.
        self._lock = threading.RLock()

    def decoded(
        self, weight: torch.Tensor, packing: tuple[Any, ...], dtype: torch.dtype, *, keep: bool, last: bool
    ) -> torch.Tensor:
        """Decode a packed weight, or find its copy. keep: a backward will follow; last: this is that backward."""
        # with scale and zero, which may change while the codes stay
        tensors = [t for t in (weight, *packing[:2]) if t is not None]
        if any(t.is_inference() for t in tensors):
            # such a tensor has no version, and autograd saves none for a backward that would take the copy
            return torch.ops.fmoe_ext._decode_packed(weight, *packing, dtype)
        # A tensor that was written to since has another version; a copy belongs to the stream that it was made on.
        stream = torch.cuda.current_stream(weight.device).cuda_stream if weight.is_cuda else 0
        versions = tuple((id(t.untyped_storage()), t.data_ptr(), t._version) for t in tensors)
        key = (versions, packing[2:], dtype, stream)
        with self._lock:
            copy = self._pop(key)
        if copy is None:
            copy = torch.ops.fmoe_ext._decode_packed(weight, *packing, dtype)
        # during a capture its memory would belong to the graph, whose replays write it
        if keep and not last and not (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
            with self._lock:
                if self._make_room(copy.device, copy.nbytes):
                    drops = [weakref.finalize(t.untyped_storage(), self._pop, key) for t in tensors]
                    for drop in drops:
                        drop.atexit = False
                    self._copies[key] = copy, drops
        return copy

    def set_limit(self, limit: int | None) -> None:
        """Bound the bytes on each device from now on; None: by what is free."""
        with self._lock:
            self._limit = limit
            for device in {copy.device for copy, _ in self._copies.values()}:
                self._make_room(device, 0)

    def num_bytes(self, device: torch.device) -> int:
        """Count the bytes of the copies on a device."""
        with self._lock:
            return sum(copy.nbytes for copy, _ in self._copies.values() if copy.device == device)

    def _make_room(self, device: torch.device, needed: int) -> bool:
        """Drop the oldest copies until `needed` bytes more fit; False if they cannot."""
        held = self.num_bytes(device)
        # A quarter of what is free by default, for activations come after the first layer is decoded. What is kept
        # counts as free: the bound must not shrink by what it allowed.
        limit = (self._free_bytes(device) + held) // 4 if self._limit is None else self._limit
        if needed > limit:
            return False
        for key in [key for key, (copy, _) in self._copies.items() if copy.device == device]:
            if held + needed <= limit:
                break
            dropped = self._pop(key)
            held -= 0 if dropped is None else dropped.nbytes
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
