"""Encode and decode messages: tensors and short strings, in the layout of a safetensors file.

    8 bytes   length N of the header, little endian
    N bytes   JSON {"name": {"dtype", "shape", "data_offsets": [begin, end]}, ..., "__metadata__": {str: str}}, padded
              with spaces so that the first tensor begins at a multiple of 64 bytes
    the rest  the tensors' elements, one tensor behind the other without gaps, in the order of the header
Calls and states are sent in this form, and checkpoints are files of it (server/checkpoints.py). A reader distrusts
every number: decode() checks each against Limits and against the bytes that came before it makes a tensor. Nothing in a
message is ever executed. compress() sends floating tensors in fewer bits; ErrorFeedback adds the rounding errors of
earlier gradients to later ones.
"""

import ctypes
import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from fmoe_ext.remote.protocol import PART_BYTES

_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_ALIGNMENT = 64  # bytes
DTYPES = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
NAMES = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})


class WireError(ValueError):
    """A message cannot be decoded; the text says what is wrong with it."""


@dataclass(frozen=True)
class Limits:
    """The most that a reader accepts, whatever a header says."""

    max_message_bytes: int = 256 << 20
    max_header_bytes: int = 32 << 10
    max_tensors: int = 32
    max_dims: int = 6
    max_metadata: int = 32  # entries
    max_text: int = 4096  # characters of a name or a value


_CALL = Limits()  # of a client's call and its answer
MAX_MESSAGE_BYTES = 2**31 - 1  # the largest message that gRPC takes
STATE = Limits(MAX_MESSAGE_BYTES, max_header_bytes=1 << 20, max_tensors=4096)  # of messages between servers
WHOLE = replace(STATE, max_message_bytes=1 << 40)  # of a state that comes in parts, or from a file
_HEADER_BYTES = 1 << 20  # of a message's largest size, kept free for its header
_MAX_ELEMENTS = 1 << 62  # of a shape, its sizes of 0 taken as 1


def body_bytes(max_message_bytes: int) -> int:
    """Return how many bytes of tensors always fit in a message of max_message_bytes."""
    # where messages are bounded below 2 MiB, half is kept for the header
    return max_message_bytes - min(_HEADER_BYTES, max_message_bytes // 2)


@dataclass(frozen=True)
class Message:
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    meta: Mapping[str, str] = field(default_factory=dict)

    def text(self, key: str) -> str:
        """Return an entry of the metadata; WireError if it is missing or empty."""
        value = self.meta.get(key)
        if not value:
            raise WireError(f"the message does not say {key}")
        return value

    def number(self, key: str, default: int | None = None) -> int:
        """Return an entry of the metadata as a number; default if it is not a number, WireError without a default."""
        text = self.meta.get(key, "")
        # 18 digits: below 10^18, which int64 holds
        if not (text.isascii() and text.isdecimal() and len(text) <= 18):
            if default is not None:
                return default
            raise WireError(f"{key} must be a number, but is {text[:50]!r}")
        return int(text)


def encode(message: Message) -> bytes:
    """Return the bytes of a message; its tensors may be on any device and have any strides."""
    return b"".join(pieces(message))


def encode_parts(message: Message, part_bytes: int = PART_BYTES) -> Iterator[bytes]:
    """Yield the bytes of a message in parts of at most part_bytes, without a copy of the whole."""
    for piece in pieces(message):
        view = memoryview(piece).cast("B")
        for begin in range(0, len(view), part_bytes):
            yield bytes(view[begin : begin + part_bytes])


def pieces(message: Message) -> list[Any]:
    """Return the header with its length, then the buffer of each tensor."""
    header: dict[str, Any] = {_METADATA: dict(message.meta)}
    parts, end = [], 0
    for name, tensor in message.tensors.items():
        data = bytes_of(tensor)
        begin, end = end, end + len(data)
        dtype, shape = _dtype_name(tensor.dtype), list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        parts.append(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    # the first tensor begins at a multiple of the alignment; of later ones decode() copies those that do not
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNMENT)
    return [_LENGTH.pack(len(text)) + text, *parts]


def bytes_of(tensor: torch.Tensor) -> Any:
    """Return the elements of a tensor as a buffer, which keeps them alive; no copy on the CPU if contiguous."""
    tensor = tensor.detach().to("cpu").contiguous()
    if tensor.numel() == 0:
        return b""
    view = (ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    view.owner = tensor  # type: ignore[attr-defined]  # the memory lives as long as the view
    return view


def decode(data: bytes | bytearray, limits: Limits = _CALL) -> Message:
    """Return the message in data; WireError if anything in it is malformed or beyond the limits.

    The tensors share the memory of a bytearray where they can; bytes are copied, because torch may write into its
    tensors.
    """
    # 1. the header's length, and its JSON
    if not _LENGTH.size <= len(data) <= limits.max_message_bytes:
        most = limits.max_message_bytes
        raise WireError(f"a message has {_LENGTH.size} to {most} bytes, but this one has {len(data)}")
    (length,) = _LENGTH.unpack_from(data)
    if length > min(limits.max_header_bytes, len(data) - _LENGTH.size):
        raise WireError(
            f"the header claims {length} bytes; {limits.max_header_bytes} are allowed and "
            f"{len(data) - _LENGTH.size} came"
        )
    first = _LENGTH.size + length  # byte of the first tensor
    try:
        header = json.loads(bytes(data[_LENGTH.size : first]))
    except (ValueError, RecursionError) as error:
        raise WireError(f"the header is no JSON: {str(error)[:200]}") from None
    if not isinstance(header, dict):
        raise WireError(f"the header must be a JSON object, but is a {type(header).__name__}")
    # 2. names and metadata
    if not all(_is_text(name, limits) for name in header):
        raise WireError(f"a name in the header must be text of at most {limits.max_text} characters")
    meta = header.pop(_METADATA, {})
    if not isinstance(meta, dict) or len(meta) > limits.max_metadata:
        raise WireError(f"{_METADATA} must be an object of at most {limits.max_metadata} entries")
    for key, value in meta.items():
        if not (_is_text(key, limits) and _is_text(value, limits)):
            what = f"{_METADATA}[{key[:100]!r}]"
            raise WireError(f"{what} must be text of at most {limits.max_text} characters")
    if len(header) > limits.max_tensors:
        raise WireError(f"{len(header)} tensors, but at most {limits.max_tensors} are allowed")
    # 3. each tensor; `end` is where the one before ends in the rest of the message, which has `size` bytes
    if not isinstance(data, bytearray):
        data, first = bytearray(memoryview(data)[first:]), 0
    tensors, end, size = {}, 0, len(data) - first
    for name, entry in header.items():
        what = f"tensor {name[:100]!r}"
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise WireError(f"{what} must have dtype, shape and data_offsets, nothing else")
        shape, offsets = entry["shape"], entry["data_offsets"]
        if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
            raise WireError(f"{what}: unknown dtype {str(entry['dtype'])[:100]!r}")
        if not _are_sizes(shape) or len(shape) > limits.max_dims:
            raise WireError(f"{what}: the shape must be at most {limits.max_dims} sizes")
        # sizes of 0 count as 1: torch multiplies the other sizes for the strides of an empty tensor too
        if math.prod(max(1, size) for size in shape) > _MAX_ELEMENTS:
            raise WireError(f"{what}: the shape {shape} has more elements than can be counted")
        if not _are_sizes(offsets) or len(offsets) != 2:
            raise WireError(f"{what}: data_offsets must be two places")
        # directly behind the tensor before, exactly as long as its shape says, and within what came
        dtype, count, (begin, stop) = DTYPES[entry["dtype"]], math.prod(shape), offsets
        if begin != end or stop - begin != count * dtype.itemsize or stop > size:
            raise WireError(
                f"{what}: {NAMES[dtype]} {shape} at bytes [{begin}, {stop}) does not fit: it needs "
                f"{count * dtype.itemsize} bytes from {end} on, of {size} that came"
            )
        body, begin, end = data, first + begin, stop
        if count == 0:  # frombuffer takes none
            tensors[name] = torch.empty(shape, dtype=dtype, device="cpu")
        elif dtype is torch.bool:  # in memory a bool must be 0 or 1, but a message may hold any byte
            truth = torch.frombuffer(body, dtype=torch.uint8, count=count, offset=begin).view(shape)
            tensors[name] = truth != 0
        else:
            if begin % dtype.itemsize:  # frombuffer takes any offset, but kernels expect aligned elements
                body, begin = body[begin : begin + count * dtype.itemsize], 0
            tensors[name] = torch.frombuffer(body, dtype=dtype, count=count, offset=begin).view(shape)
    if end != size:
        raise WireError(f"{size - end} bytes belong to no tensor")
    return Message(tensors, meta)


def _is_text(value: Any, limits: Limits) -> bool:
    """True for text within the limits that can be encoded again: JSON's \\ud800 alone, half of a pair, cannot."""
    if not isinstance(value, str) or len(value) > limits.max_text:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _are_sizes(sizes: Any) -> bool:
    return isinstance(sizes, list) and all(type(size) is int and 0 <= size < 2**40 for size in sizes)


def _dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name in headers, such as F32; WireError for a dtype that messages cannot hold."""
    if dtype not in NAMES:
        raise WireError(f"{dtype} cannot be sent: use one of {', '.join(str(d) for d in NAMES)}")
    return NAMES[dtype]


# -------------------------------------------------------------------- fewer bits


CODECS = ("none", "bf16", "int8")
_DTYPE, _SCALE = ":dtype", ":scale"


def check_codec(codec: str) -> str:
    if codec not in CODECS:
        raise ValueError(f"compression must be one of {', '.join(CODECS)}, but got {codec!r}")
    return codec


def compress(tensors: Mapping[str, torch.Tensor], codec: str, meta: Mapping[str, str]) -> Message:
    """Make a message with the floating tensors in fewer bits; metadata name + ":dtype" says what they were.

    int8: q = round(x / s) with s = max|row| / 127, sent as tensor name + ":scale" [*, 1]. A row is the last dimension.
    """
    check_codec(codec)
    packed: dict[str, torch.Tensor] = {}
    notes = dict(meta)
    for name, tensor in tensors.items():
        # integers are exact, and a scalar has no row
        if codec == "none" or not tensor.is_floating_point() or tensor.dim() == 0:
            packed[name] = tensor
            continue
        notes[name + _DTYPE] = _dtype_name(tensor.dtype)
        if codec == "bf16":
            packed[name] = tensor.to(torch.bfloat16)
        else:
            # in float32 at least: a scale of 16 bits would shift every element of its row
            wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
            if wide.numel() == 0:  # amax of no elements is an error
                packed[name] = wide.to(torch.int8)
                packed[name + _SCALE] = wide.new_zeros((*wide.shape[:-1], 1))
            else:
                scale = wide.abs().amax(-1, keepdim=True) / 127  # [*, 1]
                packed[name] = (wide / torch.where(scale == 0, 1, scale)).round().to(torch.int8)
                packed[name + _SCALE] = scale
    return Message(packed, notes)


def decompress(message: Message) -> dict[str, torch.Tensor]:
    """Return the tensors of a message as before compress(), up to rounding; WireError for scales that do not fit."""
    restored = {}
    for name, tensor in message.tensors.items():
        if name.endswith(_SCALE):
            continue
        was = message.meta.get(name + _DTYPE)
        if was is None:
            restored[name] = tensor
            continue
        dtype = DTYPES.get(was)
        if dtype is None or not dtype.is_floating_point:
            raise WireError(f"tensor {name!r} was compressed from {was!r}, which is no floating dtype")
        if tensor.dtype is torch.int8:
            scale = message.tensors.get(name + _SCALE)
            # as compress() writes it, and as unpacked_bytes() counts
            wide = torch.promote_types(dtype, torch.float32)
            if scale is None or scale.shape != (*tensor.shape[:-1], 1) or scale.dtype != wide:
                raise WireError(
                    f"tensor {name!r} is int8 {list(tensor.shape)}, but has no scale in {wide} for each row"
                )
            tensor = tensor.to(wide).mul_(scale)
        restored[name] = tensor.to(dtype)
    return restored


def unpacked_bytes(message: Message) -> int:
    """Return the bytes of the tensors that decompress() makes anew, beside the message's own."""
    count = 0
    for name, x in message.tensors.items():
        if name + _DTYPE in message.meta and not name.endswith(_SCALE):
            dtype = DTYPES.get(message.meta[name + _DTYPE], x.dtype)
            count += x.numel() * dtype.itemsize
            # int8 is multiplied by its scale in float32 at least, and rounded to 16 bits then
            if x.dtype is torch.int8 and dtype.itemsize < 4:
                count += x.numel() * torch.float32.itemsize
    return count


class ErrorFeedback:
    """Compress gradients, and make up in each message for what rounding took from the ones before.

    Error feedback (Seide et al. 2014; Karimireddy et al. 2019, for vectors) carries errors over element by element.
    Here the rows are other tokens in every batch, so only the sum of their errors, [D], is carried over, and spread
    over the rows of the next message. The sum of all messages, which is a bias's gradient, then stays within the error
    of one message of the exact sum, however many are sent.
    """

    def __init__(self, codec: str):
        self.codec = check_codec(codec)
        self._owed: dict[str, torch.Tensor] = {}  # [D] by tensor: exact sums less what was sent

    def compress(self, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, str]) -> Message:
        """Compress the tensors plus what is owed; what this message rounds away is owed from now on."""
        if self.codec == "none":
            return compress(tensors, self.codec, meta)
        asked = dict(tensors)
        for name, tensor in tensors.items():
            owed = self._owed.get(name)
            fits = (
                tensor.dim() > 1 and tensor.numel() and owed is not None and owed.shape[0] == tensor.shape[-1]
            )
            if owed is not None and fits:
                num_rows = tensor.numel() // tensor.shape[-1]
                asked[name] = tensor + (owed / num_rows).to(tensor.dtype)
        message = compress(asked, self.codec, meta)
        for name, sent in decompress(message).items():
            if asked[name].is_floating_point() and asked[name].numel() and asked[name].dim() > 1:
                lost = (asked[name] - sent).reshape(-1, sent.shape[-1])
                owed = lost.sum(0, dtype=torch.promote_types(lost.dtype, torch.float32))
                if owed.isfinite().all():  # a server refuses NaN and infinity, so what was owed stays owed
                    self._owed[name] = owed
        return message
