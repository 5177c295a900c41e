"""Protocol buffers by hand: numbers and bytes by field number (https://protobuf.dev/programming-guides/encoding)."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Value: TypeAlias = "int | bytes | str | Sequence[int | bytes | str]"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class ProtoError(ValueError):
    """Bytes that are no protocol buffer."""


class Fields(defaultdict[int, list[int | bytes]]):
    """Decode a message: every value of every field."""

    def number(self, field: int) -> int:
        """An int64, 0 where it is left out."""
        value = self[field][-1] if self.get(field) else 0
        if not isinstance(value, int):
            raise ProtoError(f"field {field} is no number")
        return value - (1 << 64) if value >= 1 << 63 else value

    def data(self, field: int) -> bytes:
        value = self[field][-1] if self.get(field) else b""
        if not isinstance(value, bytes):
            raise ProtoError(f"field {field} is no string of bytes")
        return value

    def messages(self, field: int) -> list["Fields"]:
        return [parse(value) for value in self.get(field, []) if isinstance(value, bytes)]


def build(fields: Mapping[int, Value]) -> bytes:
    """A message: {field number: value or values}; 0 and empty are left out, except in a list."""
    parts = []
    for number, value in fields.items():
        if isinstance(value, (int, bytes, str)):
            value = [value] if value else []
        for one in value:
            parts.append(_field(number, one))
    return b"".join(parts)


def parse(data: bytes) -> Fields:
    """The fields of a message; ProtoError for bytes that are none."""
    fields, place = Fields(list), 0
    while place < len(data):
        tag, place = _read_varint(data, place)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, place = _read_varint(data, place)
            fields[number].append(value)
            continue
        if kind == _BYTES:
            length, place = _read_varint(data, place)
        elif kind in (_FIXED64, _FIXED32):
            length = 8 if kind == _FIXED64 else 4
        else:
            raise ProtoError(f"unknown wire type {kind}")
        if place + length > len(data):
            raise ProtoError(f"field {number} ends after its message")
        fields[number].append(data[place : place + length])
        place += length
    return fields


def _field(number: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3 | _VARINT) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | _BYTES) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            break
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return value, place
    raise ProtoError("a number has no end")
