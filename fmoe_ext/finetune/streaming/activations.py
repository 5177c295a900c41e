"""Keep the inputs of checkpointed layers in a file: stream(activations=folder).

A checkpointed layer keeps its input alone, [batch, tokens, width] for each layer: with long sequences these are
what grows. SavedOnDisk puts hooks for saved tensors around a decoder's forward, which write them to an ActivationFile,
and read them when the backward asks. The file has no name, and is written past the page cache where the system can
(O_DIRECT): the cache would only move them to memory that the process is charged for as well.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fmoe_ext.finetune.streaming.budget import ExpertStream
from fmoe_ext.finetune.streaming.reader import BLOCK, CHUNK, aligned_memory


class ActivationFile:
    """Space in one file without a name, whose bytes the system frees with the process. folder: where it is.

    num_bytes: in use; bytes_written: of all tensors so far. Raises OSError where the folder has no room.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.num_bytes = self.bytes_written = 0
        self._end = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # {size: offsets}
        self._bounce = aligned_memory(CHUNK)
        self._lock = threading.RLock()  # reentrant: the garbage collector may release a tensor inside put()
        with tempfile.TemporaryFile(dir=folder) as file:
            direct = getattr(os, "O_DIRECT", 0)
            try:  # the same file again, past the page cache
                self._file = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR | os.O_CLOEXEC | direct)
            except OSError:  # no /proc, or a file system without O_DIRECT
                self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)

    def put(self, tensor: Tensor) -> _Stored:
        """Write the values of a tensor; its space is free again when the result is gone."""
        values = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        size = -(-values.size // BLOCK) * BLOCK
        with self._lock:
            # a place
            free = self._free[size]  # a step has few sizes, so that a fit is exact and nothing fragments
            offset = free.pop() if free else self._end
            stored = _Stored(offset, tensor.dtype, tensor.shape)
            self.num_bytes += size
            self._end = max(self._end, offset + size)
            weakref.finalize(stored, self._release, offset, size)
            # the bytes, a chunk at a time through aligned memory, as O_DIRECT wants it
            try:
                for begin in range(0, values.size, CHUNK):
                    part = values[begin : begin + CHUNK]
                    wanted = -(-part.size // BLOCK) * BLOCK
                    self._bounce[: part.size] = part
                    done = 0
                    while done < wanted:
                        done += os.pwrite(self._file, self._bounce[done:wanted].data, offset + begin + done)
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"{self.folder} has no room for the inputs of layers: {self.num_bytes:,} bytes are needed so far. "
                    "Give stream() another folder for activations, or train with fewer tokens a step "
                    f"({error.strerror})",
                ) from error
            self.bytes_written += values.size
            return stored

    def get(self, stored: _Stored) -> Tensor:
        """Read the tensor as it was."""
        tensor = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        values = tensor.view(-1).view(torch.uint8).numpy()
        with self._lock:
            for begin in range(0, values.size, CHUNK):
                part = values[begin : begin + CHUNK]
                wanted = -(-part.size // BLOCK) * BLOCK  # O_DIRECT reads whole blocks
                done = 0
                while done < part.size:
                    into, at = self._bounce[done:wanted].data, stored.offset + begin + done
                    done += (count := os.preadv(self._file, [into], at))
                    if count == 0:
                        raise OSError(f"the file for activations in {self.folder} ends too early")
                part[:] = self._bounce[: part.size]
        return tensor

    def _release(self, offset: int, size: int) -> None:
        with self._lock:
            self.num_bytes -= size
            self._free[size].append(offset)
            if self.num_bytes == 0:  # between steps: the disk gets its space back, and other sizes may come
                self._end = 0
                self._free.clear()
                os.ftruncate(self._file, 0)


@dataclass(frozen=True, eq=False)
class _Stored:
    """A tensor in the file."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size


class SavedOnDisk:
    """Hooks of a decoder that put floats [batch, tokens, width] which its forward saves into a file; weights stay."""

    def __init__(self, decoder: nn.Module, stream: ExpertStream, file: ActivationFile) -> None:
        self.stream, self.file = stream, file
        self._resident: frozenset[int] = frozenset()  # addresses of weights, which are in memory anyway
        self._hooks: list[Any] = []  # entered, of the forwards that run now
        decoder.register_forward_pre_hook(self._enter)
        # after an error too, or the hooks would stay
        decoder.register_forward_hook(self._leave, always_call=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> SavedOnDisk:
        return self

    def _enter(self, *_: Any) -> None:
        tensors = self.stream.resident_tensors()  # again, as an adapter may have come since the last step
        self._resident = frozenset(t.untyped_storage().data_ptr() for t in tensors)
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._hooks.append(hooks)

    def _leave(self, *_: Any) -> None:
        if self._hooks:
            self._hooks.pop().__exit__(None, None, None)

    def _pack(self, tensor: Tensor) -> Tensor | _Stored:
        address = tensor.untyped_storage().data_ptr()
        if (
            not tensor.is_floating_point()
            or tensor.dim() < 3  # [batch, tokens, width]; others are small
            or tensor.device.type != "cpu"
            or address in self._resident
            or self.stream.pool.contains(address)
        ):
            return tensor
        return self.file.put(tensor)

    def _unpack(self, packed: Tensor | _Stored) -> Tensor:
        return self.file.get(packed) if isinstance(packed, _Stored) else packed
