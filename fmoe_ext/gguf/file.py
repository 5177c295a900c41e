"""Read the header of a GGUF file, and believe nothing in it: no count is used before the file is long enough for it.

    header     magic "GGUF", version u32, number of tensors u64, number of keys u64
    keys       name, type u32, value; an array is type u32 of its items, count u64, items, and has no arrays in it
    tensors    name, number of dimensions u32, each u64 (the fastest first), type u32, offset u64
    padding    zeros to the alignment
    data       the tensors in this order, each padded with zeros to the alignment

Texts are length u64 and UTF-8. Offsets count from the begin of the data. A tensor's offset must be the sum of the
padded sizes before it, as llama.cpp demands, too, and the last tensor must end where the file does. So a damaged
offset, size or type shows, unless it means the same number of bytes.

open_gguf() also joins the parts of a split model, NAME-00001-of-00003.gguf and so on.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.files import check_is_file, inside

_MAGIC, _VERSIONS, _ALIGNMENT = b"GGUF", (2, 3), 32
_MAX_DIMENSIONS = 4  # ggml's
_MIN_KEY, _MIN_TENSOR = 13, 24  # bytes: names of length 0; a value of one byte, a tensor without dimensions
_SPLIT = _SPLIT_NO, _SPLIT_COUNT, _SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)  # of a split model
_SCALARS = MappingProxyType(  # by the names of gguf.GGUFValueType
    {
        **{"UINT8": "B", "INT8": "b", "UINT16": "H", "INT16": "h", "UINT32": "I", "INT32": "i"},
        **{"FLOAT32": "f", "BOOL": "?", "UINT64": "Q", "INT64": "q", "FLOAT64": "d"},
    }
)
_DTYPES = MappingProxyType(  # of types that numpy has; others are bytes
    {
        **{"F16": np.float16, "F32": np.float32, "F64": np.float64},
        **{"I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64},
    }
)


@dataclass
class _Field:
    """A key's value, decoded when it is asked for."""

    types: list[Any]  # gguf.GGUFValueType of it, and of an array's items
    count: int  # of items
    content: memoryview

    def contents(self) -> Any:
        """Return a number, text, or list of one of both; UnicodeDecodeError for a text that is none."""
        item = self.types[-1].name
        if item == "STRING":
            values: list[Any] = [str(part, "utf-8") for part in _strings(self.content, self.count)]
        else:
            values = list(struct.unpack_from(f"={self.count}{_SCALARS[item]}", self.content))
        return values if len(self.types) > 1 else values[0]


@dataclass
class Tensor:
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]  # the fastest dimension first, as the file has it
    tensor_type: Any  # gguf.GGMLQuantizationType
    n_elements: int
    n_bytes: int
    data_offset: int  # in the file
    data: np.ndarray[Any, Any]  # mapped; as gguf's reader has it: numbers, or the bytes of rows
    path: Path  # the file, one of several where a model is split


def open_gguf(file: str | Path) -> GgufFile:
    """Open a GGUF file, with its parts; CheckpointError for other files, and truncated, damaged or big-endian ones."""
    try:
        import gguf  # noqa: F401
    except ModuleNotFoundError as error:
        raise CheckpointError("reading GGUF files needs gguf: pip install gguf") from error
    reader = GgufFile(file)
    reader.take_parts()
    return reader


class GgufFile:
    """A GGUF file whose header is read and whose data is mapped; CheckpointError if it is truncated or damaged."""

    fields: dict[str, _Field]  # {key: value}
    tensors: list[Tensor]
    alignment: int  # bytes
    files: list[Path]  # this one alone, until take_parts() adds those that a split model has beside it

    def __init__(self, file: str | Path) -> None:
        from gguf import GGMLQuantizationType, GGUFValueType

        self.path = Path(file)
        self.files = [self.path]
        self._value_types = {int(kind): kind for kind in GGUFValueType}
        self._tensor_types = {int(kind): kind for kind in GGMLQuantizationType}
        check_is_file(self.path)
        with open(self.path, "rb") as opened:
            self._size = self.path.stat().st_size
            if self._size < 24:
                self._refuse(f"it has {self._size} bytes")
            self._data = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
        # The header; self._at is where the next item begins
        self._at = 4
        (version,) = self._take("I")
        if self._data[:4] != _MAGIC:
            self._refuse("it does not begin with GGUF")
        if version & 0xFFFF == 0:  # versions are small numbers: here the bytes of one are swapped
            raise CheckpointError(
                f"{file} is for another order of bytes: turn it by `gguf-convert-endian FILE native`"
            )
        if version not in _VERSIONS:
            self._refuse(f"it has version {version}, known are {', '.join(map(str, _VERSIONS))}")
        num_tensors, num_keys = self._take("QQ")
        # The keys
        self.fields = {}
        self._check_room(num_keys, _MIN_KEY, "keys")  # before a loop over a number that may be anything
        for _ in range(num_keys):
            name = self._text("the name of a key")
            if name in self.fields:
                self._refuse(f"it has {name!r} twice")
            self.fields[name] = self._field(name)
        # The tensors begin at multiples of this
        self.alignment = _ALIGNMENT
        if (field := self.fields.get("general.alignment")) is not None:
            value = field.contents() if [kind.name for kind in field.types] == ["UINT32"] else None
            if value is None or value < 1 or value & (value - 1):
                self._refuse(f"general.alignment is {value}, expected a power of two as UINT32")
            self.alignment = int(value)
        self.tensors = self._tensors(num_tensors)

    def values(self) -> dict[str, Any]:
        """Return {key: its value}; CheckpointError for a text that is none."""
        return {key: self._contents(key) for key in self.fields}

    def _contents(self, key: str) -> Any:
        try:
            return self.fields[key].contents()
        except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{self.path} has damaged metadata: {error}") from error

    @property
    def architecture(self) -> str:
        # needed before values() checks all keys
        field = self.fields.get("general.architecture")
        if field is None or [kind.name for kind in field.types] != ["STRING"]:
            self._refuse("general.architecture is not there, or no text")
        return str(self._contents("general.architecture"))

    @property
    def name(self) -> str:
        """Return the name of the file, or of the one that the parts make together."""
        part = _PART.fullmatch(self.path.name) if len(self.files) > 1 else None
        return f"{part[1]}.gguf" if part else self.path.name

    def take_parts(self) -> None:
        """Add the tensors of a split model's other parts, and drop the keys split.*; this first part has the metadata.

        Raises CheckpointError for a part that is missing, or is not the one that its name says, and for tensors that
        are there twice or not at all.
        """
        count = self._split(_SPLIT_COUNT, 1)
        if count <= 1:
            return
        # The names of all parts follow from this one's
        name = _PART.fullmatch(self.path.name)
        if name is None or int(name[3]) != count:
            raise CheckpointError(
                f"{self.path} is one of {count} parts of a model (split.count), which are found by their names: "
                f"call them NAME-00001-of-{count:05d}.gguf and so on, as they were"
            )
        paths = [
            inside(self.path.parent, f"{name[1]}-{number:05d}-of-{count:05d}.gguf")
            for number in range(1, count + 1)
        ]
        if int(name[2]) != 1:
            raise CheckpointError(
                f"{self.path} is one of {count} parts of a model: give the first one, {paths[0]}"
            )
        if missing := [path.name for path in paths if not path.exists()]:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise CheckpointError(
                f"{self.path} is the first of {count} parts of a model, but {', '.join(missing[:5])}{more} "
                f"{'is' if len(missing) == 1 else 'are'} not beside it"
            )
        # Each part must be the one that its name says
        parts = [self, *(GgufFile(path) for path in paths[1:])]
        places: dict[str, Path] = {}
        for number, part in enumerate(parts):
            # it is the part that its name says, with metadata in the first alone
            for key, expected in ((_SPLIT_NO, number), (_SPLIT_COUNT, count)):
                if (value := part._split(key, None)) != expected:
                    raise CheckpointError(f"{part.path}: {key} is {value}, but by its name it is {expected}")
            others = part.fields.keys() - {*_SPLIT, "general.architecture", "general.alignment"}
            if number and others:
                raise CheckpointError(
                    f"{part.path} has {min(others)}, but llama.cpp reads keys of a split model in its first part alone"
                )
            for tensor in part.tensors:
                if (other := places.setdefault(tensor.name, part.path)) != part.path:
                    raise CheckpointError(f"{other} and {part.path} both have {tensor.name}")
        # Together they have as many tensors as the first one says
        expected = self._split(_SPLIT_TENSORS, None)
        if expected != len(places):
            raise CheckpointError(
                f"{self.path}: {_SPLIT_TENSORS} is {expected}, but its {count} parts have {len(places)} tensors"
            )
        self.tensors = [tensor for part in parts for tensor in part.tensors]
        self.files = paths
        for key in _SPLIT:
            self.fields.pop(key, None)

    def _split(self, key: str, default: Any) -> Any:
        if key not in self.fields:
            return default
        value = self._contents(key)
        if type(value) is not int:
            self._refuse(f"{key} is {value!r}, no number")
        return value

    def _field(self, name: str) -> _Field:
        (kind,) = self._take("I")
        types, count = [self._known(self._value_types, kind, name)], 1
        if types[0].name == "ARRAY":
            kind, count = self._take("IQ")
            types.append(self._known(self._value_types, kind, name))
        # Skip the value: it is decoded when it is used
        begin, item = self._at, types[-1].name
        if item == "ARRAY":
            self._refuse(f"{name} has arrays in an array")
        if item in _SCALARS:
            size = struct.calcsize(f"={_SCALARS[item]}")
            self._check_room(count, size, f"items of {name}")
            self._at += count * size
        else:
            self._check_room(count, 8, f"texts of {name}")
            try:
                self._at += sum(8 + len(part) for part in _strings(self._data[begin:], count))
            except struct.error:
                self._refuse(f"{name} ends behind it")
        return _Field(types, count, self._data[begin : self._at])

    def _tensors(self, count: int) -> list[Tensor]:
        from gguf import GGML_QUANT_SIZES

        self._check_room(count, _MIN_TENSOR, "tensors")
        # The descriptions; end and padded: where the tensors so far end in the data, without and with padding
        found: dict[str, tuple[tuple[int, ...], Any, int, int]] = {}
        end = padded = 0
        for _ in range(count):
            name = self._text("the name of a tensor")
            (num_dimensions,) = self._take("I")
            if num_dimensions > _MAX_DIMENSIONS:
                self._refuse(f"{name} has {num_dimensions} dimensions")
            shape = self._take("Q" * num_dimensions)
            kind, offset = self._take("IQ")
            if name in found:
                self._refuse(f"it has {name!r} twice")
            tensor_type = self._known(self._tensor_types, kind, name)
            block, size = GGML_QUANT_SIZES[tensor_type]  # numbers and bytes of a block, which lies in one row
            if 0 in shape or (shape[0] if shape else 1) % block:
                self._refuse(
                    f"{name} is {list(shape)}, rows of {tensor_type.name} are of {block} numbers each"
                )
            num_bytes = math.prod(shape) // block * size
            if offset != padded:
                self._refuse(f"{name} is at {offset}, but the tensors before it end at {padded}")
            if offset + num_bytes > self._size:
                self._refuse(f"{name} {list(shape)} of {tensor_type.name} ends behind it")
            found[name] = shape, tensor_type, num_bytes, offset
            end = offset + num_bytes
            padded = self._padded(end)
        # The data: the last tensor may be padded or not
        begin = self._padded(self._at)
        if found and not begin + end <= self._size <= begin + padded:
            self._refuse(f"its tensors end at {begin + end}, but it has {self._size} bytes")
        tensors = []
        for name, (shape, kind, num_bytes, offset) in found.items():
            first, last = begin + offset, begin + offset + num_bytes
            if any(self._data[last : first + self._padded(num_bytes)]):
                self._refuse(f"what pads {name} {list(shape)} of {kind.name} is not zero")
            # [..., rows, numbers of a row, or bytes where numpy lacks the type]
            rows = np.frombuffer(self._data[first:last], _DTYPES.get(kind.name, np.uint8))
            data = rows.reshape(*shape[:0:-1], -1) if shape else rows.reshape(())
            tensors.append(Tensor(name, shape, kind, math.prod(shape), num_bytes, first, data, self.path))
        return tensors

    def _padded(self, size: int) -> int:
        return -(-size // self.alignment) * self.alignment

    def _known(self, types: dict[int, Any], kind: int, name: str) -> Any:
        if kind not in types:
            self._refuse(f"{name} has the type {kind}, which is not known")
        return types[kind]

    def _take(self, layout: str) -> tuple[Any, ...]:
        size = struct.calcsize(f"={layout}")
        self._check_room(1, size, "more numbers")
        self._at += size
        return struct.unpack_from(f"={layout}", self._data, self._at - size)

    def _text(self, what: str) -> str:
        (length,) = self._take("Q")
        self._check_room(length, 1, f"bytes of {what}")
        self._at += length
        try:
            return str(self._data[self._at - length : self._at], "utf-8")
        except UnicodeDecodeError as error:
            self._refuse(f"{what} is no text: {error}")

    def _check_room(self, count: int, size: int, what: str) -> None:
        if count * size > self._size - self._at:
            self._refuse(f"{count} {what} at {self._at} do not fit into its {self._size} bytes")

    def _refuse(self, why: str) -> NoReturn:
        raise CheckpointError(f"{self.path} is no GGUF file, or truncated, or damaged: {why}"[:500])


def _strings(content: memoryview, count: int) -> Iterator[memoryview]:
    """Yield texts that each have their length before them; struct.error where they do not fit."""
    begin, size, unpack = 0, len(content), struct.Struct("=Q").unpack_from
    for _ in range(count):
        (length,) = unpack(content, begin)
        begin += 8 + length
        if begin > size:
            raise struct.error("a text ends behind the file")
        yield content[begin - length : begin]
