"""Safetensors files that are written and read a tensor at a time, with a checksum over the whole file.

The format: 8 bytes with the length of the header, a JSON header, the tensors. The checksum is in the metadata of the
header; it is computed with 64 zeros in its own place. Other programs read these files as any other.
"""

import hashlib
import json
import math
import os
import struct
from pathlib import Path
from types import MappingProxyType

import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.files import BLOCK, atomic_file

NO_CHECKSUM = "0" * 64
OURS = "fmoe_ext"  # key of the metadata in every file that we write
DTYPES = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
NAMES = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})


class StoredTensor:
    """A tensor somewhere else: its shape and dtype are known, read() fetches it, rows(first, end) a part of it."""

    def __init__(self, shape, dtype, read, rows=None):
        self.shape = tuple(shape)
        self.dtype = dtype
        self.read = read
        self.rows = rows or (lambda first, end: read()[first:end])

    @classmethod
    def of(cls, tensor):
        return cls(tensor.shape, tensor.dtype, lambda: tensor.detach())

    @property
    def num_bytes(self):
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(path, tensors, metadata=None, progress=None):
    """Writes {name: StoredTensor or tensor} to one file, in this order and one at a time; atomically.

    metadata: {string: string} for the header. progress(bytes) is called after each tensor.
    """
    tensors = {k: StoredTensor.of(t) if isinstance(t, torch.Tensor) else t for k, t in tensors.items()}
    header = {"__metadata__": {"sha256": NO_CHECKSUM, "format": "pt", OURS: "{}", **(metadata or {})}}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise CheckpointError(f"{path}: safetensors has no name for {tensor.dtype}, the dtype of {name}")
        begin, end = end, end + tensor.num_bytes
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    size = struct.pack("<Q", len(text))
    digest = hashlib.sha256(size + text)
    with atomic_file(path) as file:
        file.write(size + text)
        for name, tensor in tensors.items():
            value = tensor.read()
            if tuple(value.shape) != tensor.shape or value.dtype != tensor.dtype:
                raise CheckpointError(
                    f"{name} is {value.dtype} {list(value.shape)}, "
                    f"but was announced as {tensor.dtype} {list(tensor.shape)}"
                )
            data = memoryview(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
            digest.update(data)
            file.write(data)
            if progress is not None:
                progress(len(data))
        file.seek(len(size))
        file.write(text.replace(NO_CHECKSUM.encode(), digest.hexdigest().encode(), 1))


def read_safetensors(path):
    """({name: StoredTensor}, metadata) of a file; CheckpointError where it is truncated or no safetensors file."""
    header, data_begin = _read_header(path)
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise CheckpointError(f"{path}: unknown dtype {entry['dtype']} of {name}")
        tensors[name] = _stored(
            path, DTYPES[entry["dtype"]], entry["shape"], data_begin + entry["data_offsets"][0]
        )
    return tensors, metadata


def verify_safetensors(path, progress=None):
    """Checks the checksum; returns whether the file has one."""
    header, data_begin = _read_header(path)
    expected = header.get("__metadata__", {}).get("sha256")
    if expected is None:
        if OURS in header.get("__metadata__", {}):
            raise CheckpointError(f"{path} is damaged: it has no checksum, but fmoe_ext wrote it with one")
        return False
    with open(path, "rb") as file:
        head = file.read(data_begin).replace(expected.encode(), NO_CHECKSUM.encode(), 1)
        digest = hashlib.sha256(head)
        while block := file.read(BLOCK):
            digest.update(block)
            if progress is not None:
                progress(len(block))
    if digest.hexdigest() != expected:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is {digest.hexdigest()}, expected {expected}")
    return True


def _read_header(path):
    """(header, where the tensors begin)."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        prefix = file.read(8)
        num_header = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + num_header > size:
            raise CheckpointError(f"{path} is no safetensors file, or truncated: it has {size} bytes")
        try:
            header = json.loads(file.read(num_header))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is no safetensors file, or damaged: its header says {error!r}"
            ) from error
    expected = 8 + num_header + max(ends, default=0)
    if size != expected:
        raise CheckpointError(f"{path} is truncated: it has {size} bytes, expected {expected}")
    return header, 8 + num_header


def _stored(path, dtype, shape, offset):
    path = Path(path)
    bytes_of_row = math.prod(shape[1:]) * dtype.itemsize

    def read(begin, shape):
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        data = bytearray(num_bytes)
        with open(path, "rb") as file:
            file.seek(begin)
            if file.readinto(data) != num_bytes:
                raise CheckpointError(
                    f"{path} is truncated: {num_bytes} bytes expected at {begin} are not there"
                )
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)

    def rows(first, end):
        return read(offset + first * bytes_of_row, [end - first, *shape[1:]])

    return StoredTensor(shape, dtype, lambda: read(offset, shape), rows)
