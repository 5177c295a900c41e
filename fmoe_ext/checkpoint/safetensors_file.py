"""Write and read safetensors files a tensor at a time, with a checksum over the whole file.

    8 bytes    length of the header, little-endian
    header     JSON: {"__metadata__": {...}, name: {"dtype", "shape", "data_offsets": [begin, end]}, ...}
    data       the tensors, at these offsets from the end of the header

The checksum is the SHA-256 of the file, in its own metadata: it is computed with 64 zeros in its place, and put there
last. Other programs read these files like any other.

StoredTensor is what all conversions here work on: shape and dtype are known, and the values are read when they are
needed. So write_safetensors() writes a model of any size with one tensor in memory, or one part of a tensor that has
parts.
"""

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.files import BLOCK, atomic_file, check_is_file, explained

OURS = "fmoe_ext"  # key of the metadata in every file that we write
_NO_CHECKSUM = "0" * 64
_BEGIN = b'{"__metadata__":{"sha256":"'  # of our headers, then the checksum
_CHECKSUM_AT = 8 + len(_BEGIN)
DTYPES = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
_NAMES = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})


class StoredTensor:
    """A tensor that is read when it is used. Shape and dtype are known before; rows are entries of dimension 0."""

    def __init__(
        self,
        shape: Iterable[int],
        dtype: torch.dtype,
        read: Callable[[], torch.Tensor],  # fetches it
        rows: Callable[[int, int], torch.Tensor] | None = None,  # fetches rows [first, end) of it
        # yields it in pieces [n, *], first rows first, so that a writer need not hold the whole
        parts: Callable[[], Iterator[torch.Tensor]] | None = None,
        # (file, offset) of its bytes, if they are in a file as they are
        place: tuple[Path, int] | None = None,
    ):
        self.shape = tuple(shape)
        self.dtype = dtype
        self.read = read
        self.rows = rows or (lambda first, end: read()[first:end])
        self.parts = parts or (lambda: iter((read(),)))
        self.place = place

    @classmethod
    def of(cls, tensor: "torch.Tensor | StoredTensor") -> "StoredTensor":
        if isinstance(tensor, StoredTensor):
            return tensor
        value = tensor
        return cls(value.shape, value.dtype, lambda: value.detach())

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def as_stored(state_dict: Mapping[str, Any]) -> tuple[dict[str, StoredTensor], bool]:
    """Make all values StoredTensors -> ({name: StoredTensor}, True if any was one already)."""
    lazy = any(isinstance(value, StoredTensor) for value in state_dict.values())
    return {name: StoredTensor.of(value) for name, value in state_dict.items()}, lazy


def as_given(tensors: dict[str, StoredTensor], lazy: bool) -> dict[str, Any]:
    """Undo as_stored(): return StoredTensors if it was given some (lazy), else tensors in memory of their own."""
    return tensors if lazy else {name: tensor.read().clone() for name, tensor in tensors.items()}


def by_rows(
    tensor: StoredTensor, shape: tuple[int, ...], function: Callable[[torch.Tensor], torch.Tensor]
) -> StoredTensor:
    """Return function(tensor), computed when it is read.

    The function must work on each range of rows alone, so that one expert can be read.
    """
    return StoredTensor(
        shape,
        tensor.dtype,
        lambda: function(tensor.read()),
        lambda first, end: function(tensor.rows(first, end)),
    )


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> StoredTensor:
    """Make a tensor of zeros that takes no memory until it is read."""
    return StoredTensor(shape, dtype, lambda: torch.zeros(shape, dtype=dtype, device="cpu"))


def joined(prefix: str, *columns: list[StoredTensor]) -> StoredTensor:
    """Join lists of E tensors [rows, *], such as gates and ups, to one [E, sum of rows, *]; prefix: for errors."""
    for column in columns:
        if any(t.shape != column[0].shape or t.dtype != column[0].dtype for t in column):
            raise CheckpointError(
                f"the experts of {prefix} differ: {[(list(t.shape), t.dtype) for t in column]}"
            )
    num_rows = sum(column[0].shape[0] for column in columns)
    shape = (len(columns[0]), num_rows, *columns[0][0].shape[1:])

    def rows(first: int, end: int) -> torch.Tensor:
        experts = zip(*(column[first:end] for column in columns), strict=True)
        return torch.stack([torch.cat([t.read() for t in parts]) for parts in experts])

    return StoredTensor(shape, columns[0][0].dtype, lambda: rows(0, shape[0]), rows)


def write_safetensors(
    path: Path,
    tensors: Mapping[str, "torch.Tensor | StoredTensor"],
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[int], Any] | None = None,
) -> None:
    """Write {name: StoredTensor or tensor} to one file, in this order and one at a time; atomically.

    metadata: {string: string} for the header. progress(bytes) is called after each part of a tensor. Raises
    CheckpointError for dtypes that are not in DTYPES, for a tensor that is not what it announced, and if the file
    system has no room.
    """
    path = Path(path)
    stored = {name: StoredTensor.of(tensor) for name, tensor in tensors.items()}
    # The checksum stands first: _CHECKSUM_AT
    first = {"sha256": _NO_CHECKSUM, "format": "pt", OURS: "{}"}
    header: dict[str, Any] = {"__metadata__": first | dict(metadata or {}) | {"sha256": _NO_CHECKSUM}}
    end = 0
    for name, tensor in stored.items():
        if tensor.dtype not in _NAMES:
            raise CheckpointError(
                f"{path}: {name} has dtype {tensor.dtype}, which cannot be written here: "
                f"{', '.join(map(str, _NAMES))} can"
            )
        begin, end = end, end + tensor.num_bytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the first tensor begins at a multiple of 8 bytes
    size = struct.pack("<Q", len(text))
    # The checksum is of the file with zeros in its place
    digest = hashlib.sha256(size + text)
    with explained(path, len(size + text) + end), atomic_file(path) as file:
        file.write(size + text)
        for name, tensor in stored.items():
            for data in _bytes_of(name, tensor):
                digest.update(data)
                file.write(data)
                if progress is not None:
                    progress(len(data))
        file.seek(_CHECKSUM_AT)
        file.write(digest.hexdigest().encode())


def _bytes_of(name: str, tensor: StoredTensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor, part by part; CheckpointError unless they make up the announced shape and dtype."""
    expected = tensor.shape or (1,)
    num_rows, found = 0, f"{tensor.dtype} {[0, *expected[1:]]}"  # of parts so far
    for part in tensor.parts():
        value = part if part.dim() else part[None]
        num_rows += value.shape[0]
        found = f"{value.dtype} {[num_rows, *value.shape[1:]]}"
        # checked before it is written: the header says already where each tensor ends
        if value.shape[1:] != expected[1:] or value.dtype != tensor.dtype or num_rows > expected[0]:
            break  # more or other rows than the header has room for
        yield value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    else:
        if num_rows == expected[0]:
            return
    raise CheckpointError(f"{name} is {found}, but was announced as {tensor.dtype} {list(tensor.shape)}")


def read_safetensors(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return ({name: StoredTensor}, metadata) of a file; CheckpointError if it is truncated or no safetensors file.

    The safetensors library checks the header now, and reads a tensor from its memory map when it is used.
    """
    path = Path(path)
    file = _opened(path)

    def tensor_of(name: str) -> StoredTensor:
        def whole() -> torch.Tensor:
            with torch.device("cpu"):  # the library's slices follow the default device
                return file.get_tensor(name)

        def rows(first: int, end: int) -> torch.Tensor:
            with torch.device("cpu"):
                return file.get_slice(name)[first:end]

        part = file.get_slice(name)
        if part.get_dtype() not in DTYPES:
            raise CheckpointError(
                f"{path}: {name} has dtype {part.get_dtype()}, which cannot be read here: "
                f"{', '.join(DTYPES)} can"
            )
        return StoredTensor(part.get_shape(), DTYPES[part.get_dtype()], whole, rows)

    return {name: tensor_of(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def read_unmapped(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Do as read_safetensors(), but read by file offsets: a memory map's pages would count as memory of the process.

    The safetensors library has checked the header before an offset of it is used.
    """
    tensors, metadata = read_safetensors(path)
    with open(path, "rb") as file:
        (num_header,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(num_header))
    for name, tensor in tensors.items():
        begin = 8 + num_header + header[name]["data_offsets"][0]
        tensors[name] = _at(path, begin, tensor.shape, tensor.dtype)
    return tensors, metadata


def _at(path: Path, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> StoredTensor:
    """Describe the tensor whose bytes begin at a place of a file."""
    # bytes of a row, the unit of rows()
    row = math.prod(shape[1:]) * dtype.itemsize

    def read(at: int, wanted: tuple[int, ...]) -> torch.Tensor:
        data = bytearray(math.prod(wanted) * dtype.itemsize)
        with open(path, "rb", buffering=0) as file:
            file.seek(at)
            view = memoryview(data)
            # the system may return fewer bytes than asked for, and never more than 2 GiB at once
            while view and (count := file.readinto(view)):
                view = view[count:]
        if view:
            raise CheckpointError(f"{path} is damaged: it ends {len(view)} bytes too early")
        if not data:
            return torch.empty(wanted, dtype=dtype, device="cpu")
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(wanted)

    return StoredTensor(
        shape,
        dtype,
        lambda: read(begin, shape),
        # up to the last row, as slices end there
        lambda first, end: read(begin + first * row, (min(end, shape[0]) - first, *shape[1:])),
        place=(path, begin),
    )


def _opened(path: Path) -> Any:
    """Open a file by the safetensors library, which checks its header."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise CheckpointError(
            "reading safetensors files needs safetensors: pip install safetensors"
        ) from error
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder")
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    check_is_file(path)
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is no safetensors file, or truncated, or damaged: it has {path.stat().st_size} bytes; {error}"
        ) from error


def _has_our_checksum(path: Path, metadata: Mapping[str, str]) -> bool:
    """Return whether write_safetensors() put a checksum into a file; a "sha256" of others may mean anything."""
    with open(path, "rb") as file:
        head = file.read(_CHECKSUM_AT + len(_NO_CHECKSUM) + 1)
    return OURS in metadata and head[8:_CHECKSUM_AT] == _BEGIN and head.endswith(b'"')


def _digest_of(path: Path, progress: Callable[[int], Any] | None = None) -> tuple[str, str]:
    """Return (SHA-256 of one of our files with zeros in place of its checksum, this checksum)."""
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read(_CHECKSUM_AT) + _NO_CHECKSUM.encode())
        checksum = file.read(len(_NO_CHECKSUM)).decode(errors="replace")
        while block := file.read(BLOCK):
            digest.update(block)
            if progress is not None:
                progress(len(block))
    return digest.hexdigest(), checksum


def renew_checksum(path: Path) -> None:
    """Compute and write the checksum anew, after tensors were changed in place; files of others stay as they are."""
    if _has_our_checksum(path, _opened(path).metadata() or {}):
        digest, _ = _digest_of(path)
        with open(path, "r+b") as file:
            file.seek(_CHECKSUM_AT)
            file.write(digest.encode())


def verify_safetensors(path: Path, progress: Callable[[int], Any] | None = None) -> bool:
    """Check the checksum of a file -> True if it has one of ours; CheckpointError if it is wrong."""
    metadata = _opened(Path(path)).metadata() or {}
    if not _has_our_checksum(path, metadata):
        if OURS in metadata and "sha256" not in metadata:
            raise CheckpointError(f"{path} is damaged: it has no checksum, but fmoe_ext wrote it with one")
        return False
    digest, expected = _digest_of(path, progress)
    if digest != expected:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is {digest}, expected {expected}")
    return True
