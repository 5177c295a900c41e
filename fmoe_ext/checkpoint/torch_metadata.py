"""torch's `.metadata`, a pickle, read by something that cannot call anything.

A pickle is a program for a small stack machine. This one knows the instructions that build plain values; where the
program names a class, the name has to be in CLASSES, and "calling" it only makes a Record that notes the arguments.
No class is looked up, no function runs, whatever the file says.

Nested values may be as deep as the file is long, or, by references, stand for 2^n others: Python would crash or hang
where it hashes, compares or prints one. So keys are texts, numbers or records, and only checked fields leave the file.
"""

import pickletools
import re
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fmoe_ext.checkpoint.chunks import Chunk, SavedTensor
from fmoe_ext.checkpoint.errors import CheckpointError

_OF_DCP = "torch.distributed.checkpoint"
_MAX_BYTES = 2**30
CLASSES = frozenset(
    {
        ("builtins", "getattr"),  # a member of an enum, as Python 3.11.0 to 3.11.3 write it
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib", "WindowsPath"),
        ("pathlib._local", "PosixPath"),
        ("pathlib._local", "WindowsPath"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        (f"{_OF_DCP}.filesystem", "_StorageInfo"),
        (f"{_OF_DCP}.filesystem", "_StoragePrefix"),
        (f"{_OF_DCP}.planner", "SavePlan"),  # Megatron keeps its plans
        (f"{_OF_DCP}.planner", "TensorWriteData"),
        (f"{_OF_DCP}.planner", "WriteItem"),
        (f"{_OF_DCP}.planner", "WriteItemType"),
        (f"{_OF_DCP}.metadata", "BytesStorageMetadata"),
        (f"{_OF_DCP}.metadata", "ChunkStorageMetadata"),
        (f"{_OF_DCP}.metadata", "Metadata"),
        (f"{_OF_DCP}.metadata", "MetadataIndex"),
        (f"{_OF_DCP}.metadata", "StorageMeta"),
        (f"{_OF_DCP}.metadata", "TensorProperties"),
        (f"{_OF_DCP}.metadata", "TensorStorageMetadata"),
        (f"{_OF_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    }
)
DTYPES = re.compile(r"float(64|32|16|8_e4m3fn|8_e5m2)|bfloat16|complex(64|128)|u?int(64|32|16|8)|bool")


class _Name(NamedTuple):
    """A class or dtype that the file names; never looked up."""

    module: str
    name: str


class _Record:
    """One object of the file: the arguments of its class, and its state."""

    __slots__ = ("args", "of", "state")

    def __init__(self, of: _Name, args: tuple[Any, ...]):
        self.of, self.args = of, args
        self.state: Any = None

    def __setitem__(self, key: Any, value: Any) -> None:
        """An OrderedDict is filled so; nothing that is in one is needed."""


def read_metadata(path: Path) -> tuple[dict[str, SavedTensor], list[str]]:
    """({key: SavedTensor}, keys of what is no tensor) of a `.metadata`; CheckpointError for any other file."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{path} is larger than {_MAX_BYTES} bytes")
        return _described(_Machine().run(path.read_bytes()))
    except CheckpointError as error:
        raise CheckpointError(f"{path} cannot be read, or is damaged: {error}") from error
    except Exception as error:  # whatever a damaged program makes of the stack
        raise CheckpointError(
            f"{path} cannot be read, or is damaged: {type(error).__name__}: {error}"[:500]
        ) from error


def _described(root: Any) -> tuple[dict[str, SavedTensor], list[str]]:
    metadata = _fields(root, "Metadata")
    places = {}
    for index, info in metadata["storage_data"].items():
        where, stored = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
        name = _text(where["fqn"])
        if stored.get("transform_descriptors"):
            raise CheckpointError(f"{name} is stored with transform_descriptors, which cannot be read here")
        offsets = where.get("offset")
        places[name, None if offsets is None else _size(offsets)] = stored
    tensors, others = {}, []
    for key, entry in metadata["state_dict_metadata"].items():
        _text(key)
        if _is(entry, "BytesStorageMetadata"):
            others.append(key)
            continue
        described = _fields(entry, "TensorStorageMetadata")
        chunks = []
        for chunk in described["chunks"]:
            part = _fields(chunk, "ChunkStorageMetadata")
            offsets = _size(part["offsets"])
            stored = places[key, offsets]
            place = (
                _text(stored["relative_path"]),
                _number(stored.get("offset", 0)),
                _number(stored["length"]),
            )
            chunks.append(Chunk(offsets, _size(part["sizes"]), *place))
        tensors[key] = SavedTensor(_dtype(described["properties"]), _size(described["size"]), tuple(chunks))
    for key, tensor in tensors.items():
        tensor.check(key)
    return tensors, others


def _is(value: Any, name: str) -> bool:
    return isinstance(value, _Record) and value.of.name == name


def _fields(value: Any, name: str) -> dict[str, Any]:
    if not _is(value, name) or not isinstance(value.state, dict):
        raise CheckpointError(f"a {name} was expected, but there is something else")
    return value.state


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise CheckpointError(f"a text was expected, but there is a {type(value).__name__}")
    return value


def _number(value: Any) -> int:
    if type(value) is not int:
        raise CheckpointError(f"a number was expected, but there is a {type(value).__name__}")
    return value


def _size(value: Any) -> tuple[int, ...]:
    if _is(value, "Size"):
        (value,) = value.args
    if not isinstance(value, (tuple, list)):
        raise CheckpointError(f"a size was expected, but there is a {type(value).__name__}")
    return tuple(map(_number, value))


def _dtype(properties: Any) -> str:
    """The dtype's name: the first of the tuple that a TensorProperties is pickled as."""
    if not _is(properties, "TensorProperties") or not isinstance(properties.state, tuple):
        raise CheckpointError("a TensorProperties was expected, but there is something else")
    dtype = properties.state[0]
    if not isinstance(dtype, _Name) or dtype.module != "torch":
        raise CheckpointError("a dtype was expected, but there is something else")
    return dtype.name


class _Machine:
    """The stack machine; every instruction that it does not know ends it."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, program: bytes) -> Any:
        for instruction, argument, _ in pickletools.genops(program):
            if instruction.name == "STOP":
                return self.stack.pop()
            if instruction.name in _CONSTANTS:
                self.stack.append(_CONSTANTS[instruction.name])
            elif instruction.name in _LITERALS:
                self.stack.append(argument)
            elif instruction.name in _INSTRUCTIONS:
                _INSTRUCTIONS[instruction.name](self, argument)
            else:
                raise CheckpointError(f"the instruction {instruction.name} is in no checkpoint of tensors")
        raise CheckpointError("it ends too early")

    def pop(self, count: int) -> list[Any]:
        if count > len(self.stack) - (self.marks[-1] if self.marks else 0):
            raise CheckpointError("it takes more from the stack than there is")
        taken = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return taken

    def pop_to_mark(self) -> list[Any]:
        mark = self.marks.pop()
        taken = self.stack[mark:]
        del self.stack[mark:]
        return taken

    def mark(self, _: Any) -> None:
        self.marks.append(len(self.stack))

    def memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def get(self, index: int) -> None:
        self.stack.append(self.memo[index])

    def name(self, module: Any, name: Any) -> None:
        if (module, name) not in CLASSES and not (module == "torch" and DTYPES.fullmatch(str(name))):
            raise CheckpointError(f"it contains {module}.{name}, which no checkpoint of tensors needs"[:300])
        self.stack.append(_Name(module, name))

    def name_on_stack(self, _: Any) -> None:
        self.name(*self.pop(2))

    def name_in_program(self, argument: str) -> None:
        self.name(*argument.split(" ", 1))

    def record(self, _: Any) -> None:
        of, args = self.pop(2)
        if not isinstance(of, _Name) or not isinstance(args, tuple):
            raise CheckpointError("it calls something that is no class")
        self.stack.append(_Record(of, args))

    def build(self, _: Any) -> None:
        (state,) = self.pop(1)
        if not isinstance(self.stack[-1], _Record):
            raise CheckpointError("it gives a state to something that has none")
        self.stack[-1].state = state

    def append(self, _: Any) -> None:
        (value,) = self.pop(1)
        self.only(list).append(value)

    def extend(self, _: Any) -> None:
        values = self.pop_to_mark()
        self.only(list).extend(values)

    def set_item(self, _: Any) -> None:
        key, value = self.pop(2)
        self.only(dict, _Record)[_key(key)] = value

    def set_items(self, _: Any) -> None:
        values = self.pop_to_mark()
        target = self.only(dict, _Record)
        for key, value in zip(values[::2], values[1::2], strict=True):
            target[_key(key)] = value

    def only(self, *types: type) -> Any:
        if not isinstance(self.stack[-1], types):
            raise CheckpointError(f"it fills a {type(self.stack[-1]).__name__}")
        return self.stack[-1]


def _key(value: Any) -> Any:
    """value, whose hash is computed in a moment; CheckpointError for what is made of other values."""
    if not isinstance(value, (str, int, bytes, _Record)):
        raise CheckpointError(
            f"the metadata has a key of type {type(value).__name__}, which tensor checkpoints never have"
        )
    return value


def _tuple_of(count: int) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.stack.append(tuple(machine.pop(count)))


def _nothing(machine: _Machine, _: Any) -> None:
    """PROTO and FRAME say how the rest is written."""


_CONSTANTS = MappingProxyType({"NONE": None, "NEWTRUE": True, "NEWFALSE": False})
_LITERALS = (
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES",
)  # fmt: skip
_INSTRUCTIONS: MappingProxyType[str, Callable[[_Machine, Any], None]] = MappingProxyType(
    {
        "PROTO": _nothing,
        "FRAME": _nothing,
        "MARK": _Machine.mark,
        "MEMOIZE": _Machine.memoize,
        "BINPUT": _Machine.put,
        "LONG_BINPUT": _Machine.put,
        "BINGET": _Machine.get,
        "LONG_BINGET": _Machine.get,
        "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
        "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
        "EMPTY_TUPLE": _tuple_of(0),
        "TUPLE1": _tuple_of(1),
        "TUPLE2": _tuple_of(2),
        "TUPLE3": _tuple_of(3),
        "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.pop_to_mark())),
        "APPEND": _Machine.append,
        "APPENDS": _Machine.extend,
        "SETITEM": _Machine.set_item,
        "SETITEMS": _Machine.set_items,
        "GLOBAL": _Machine.name_in_program,
        "STACK_GLOBAL": _Machine.name_on_stack,
        "REDUCE": _Machine.record,
        "NEWOBJ": _Machine.record,
        "BUILD": _Machine.build,
    }
)
