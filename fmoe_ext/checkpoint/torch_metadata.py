"""Read torch's `.metadata`, a pickle that says where the tensors of a checkpoint are, without running anything in it.

The folders are Megatron-core's (megatron.py) and ours of version 1 (manifest.py). A pickle is a program that names
classes and calls them. Here, where it names one of _CLASSES it gets a class of records, which note their arguments and
state and do nothing. A dtype of torch stays a name, and any other name is refused (_Unpickler). Before that,
_check_program() reads the instructions one by one, because Python's Unpickler can be made to use up time or memory:

* only instructions that build plain values and records are allowed;
* an index of the memo is at most the number of values in it, or Python would make room for 2^31 of them;
* a tuple has few values, counting those of the tuples in it each time. Tuples may be keys of dicts, and Python would
  crash or hang on hashing one that is as deep as the file is long, or one of 2^n values by n references.

Nested lists, dicts and records may have any depth: only checked fields leave this module.
"""

import io
import pickle
import pickletools
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from fmoe_ext.checkpoint.chunks import Chunk, SavedTensor
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.files import check_is_file

T = TypeVar("T")

_OF_DCP = "torch.distributed.checkpoint"
_MAX_BYTES = 2**30
_MAX_VALUES = 1000  # of a tuple; sizes have up to 64
_CLASSES = frozenset(
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
_DTYPES = re.compile(r"float(64|32|16|8_e4m3fn|8_e5m2)|bfloat16|complex(64|128)|u?int(64|32|16|8)|bool")
_INSTRUCTIONS = frozenset(
    (
        *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
        *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
        *("SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES"),
        *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
        *("APPEND", "APPENDS", "SETITEM", "SETITEMS"),
        *("GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD"),
    )
)


class _Name(NamedTuple):
    """The name of a dtype in the file; SavedTensor.check() looks for the dtype of this name."""

    module: str
    name: str


class _Record:
    """One object of the file: the arguments of its class, and its state. Each of _CLASSES is a subclass."""

    __slots__ = ("args", "state")
    args: tuple[Any, ...]
    state: Any
    of = ""

    def __new__(cls, *args: Any) -> "_Record":
        record = super().__new__(cls)
        record.args, record.state = args, None
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Drop the items of an OrderedDict: nothing that is in one is needed."""


_RECORDS = MappingProxyType(
    {place: type(place[1], (_Record,), {"__slots__": (), "of": place[1]}) for place in _CLASSES}
)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return _RECORDS[module, name]
        if module == "torch" and _DTYPES.fullmatch(name):
            return _Name(module, name)
        raise CheckpointError(f"it contains {module}.{name}, which no checkpoint of tensors needs"[:300])


def _check_program(program: bytes) -> None:
    """Raise CheckpointError for instructions that tensor checkpoints lack, and for tuples of more than _MAX_VALUES.

    Follows the program on a stack of sizes in place of values.
    """
    stack: list[int] = []  # for each value: 1, or for a tuple the number of values in it, itself included
    marks: list[int] = []  # heights of the stack at each MARK
    memo: list[int] = []
    for instruction, argument, _ in pickletools.genops(program):
        name = instruction.name
        if name not in _INSTRUCTIONS:
            raise CheckpointError(f"the instruction {name} is in no checkpoint of tensors")
        if name == "STOP":
            return
        if name == "MARK":
            marks.append(len(stack))
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            index = len(memo) if argument is None else argument
            # Python makes room up to the index
            if index > len(memo):
                raise CheckpointError(f"it puts a value at {index} of a memo of {len(memo)}")
            memo[index : index + 1] = stack[-1:]
        elif name in ("BINGET", "LONG_BINGET"):
            assert argument is not None  # as of every such instruction
            stack.append(memo[argument])
        else:
            # pickletools knows what each instruction takes from the stack and leaves there; with a mark, all above it
            before, after = instruction.stack_before, instruction.stack_after
            if pickletools.markobject in before:
                begin = marks.pop() - before.index(pickletools.markobject)
            else:
                begin = len(stack) - len(before)
            if begin < (marks[-1] if marks else 0):
                raise CheckpointError("it takes more from the stack than there is")
            taken = stack[begin:]
            size = 1 + sum(taken) if name.startswith("TUPLE") else 1
            if size > _MAX_VALUES:
                raise CheckpointError(f"it has a tuple of more than {_MAX_VALUES} values")
            stack[begin:] = [size] * len(after)
    raise CheckpointError("it ends too early")


def read_metadata(path: Path) -> tuple[dict[str, SavedTensor], list[str]]:
    """Read a `.metadata` -> ({key: SavedTensor}, keys of what is no tensor); CheckpointError for any other file."""
    try:
        check_is_file(path)
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{path} is larger than {_MAX_BYTES} bytes")
        program = path.read_bytes()
        _check_program(program)
        # Build the records; from here on only checked fields of them are used
        metadata = _fields(_Unpickler(io.BytesIO(program)).load(), "Metadata")
        # {(key, offsets of a chunk): file, begin and length}
        places = {}
        for index, info in metadata["storage_data"].items():
            where, stored = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
            name, offsets = _as(str, where["fqn"]), where.get("offset")
            if stored.get("transform_descriptors"):
                raise CheckpointError(
                    f"{name} is stored with transform_descriptors, which cannot be read here"
                )
            places[name, None if offsets is None else _size(offsets)] = stored
        # The tensors, with the places of their chunks
        tensors, others = {}, []
        for key, entry in metadata["state_dict_metadata"].items():
            _as(str, key)
            if _is(entry, "BytesStorageMetadata"):
                others.append(key)
                continue
            described = _fields(entry, "TensorStorageMetadata")
            chunks = []
            for chunk in described["chunks"]:
                part = _fields(chunk, "ChunkStorageMetadata")
                offsets = _size(part["offsets"])
                stored = places[key, offsets]
                file = _as(str, stored["relative_path"])
                begin, num_bytes = _as(int, stored.get("offset", 0)), _as(int, stored["length"])
                chunks.append(Chunk(offsets, _size(part["sizes"]), file, begin, num_bytes))
            properties = described["properties"]  # pickled as a tuple that begins with the dtype
            if not _is(properties, "TensorProperties") or not isinstance(properties.state, tuple):
                raise CheckpointError("a TensorProperties was expected, but there is something else")
            dtype = properties.state[0]
            if not isinstance(dtype, _Name) or dtype.module != "torch":
                raise CheckpointError("a dtype was expected, but there is something else")
            tensors[key] = SavedTensor(dtype.name, _size(described["size"]), tuple(chunks))
        for key, tensor in tensors.items():
            tensor.check(key)
        return tensors, others
    except CheckpointError as error:
        raise CheckpointError(f"{path} cannot be read, or is damaged: {error}") from error
    except Exception as error:  # a damaged program may raise anything
        raise CheckpointError(
            f"{path} cannot be read, or is damaged: {type(error).__name__}: {error}"[:500]
        ) from error


def _is(value: Any, name: str) -> bool:
    return isinstance(value, _Record) and value.of == name


def _fields(value: Any, name: str) -> dict[str, Any]:
    """Return the fields of a record; CheckpointError for anything but one of this name."""
    if not _is(value, name) or not isinstance(value.state, dict):
        raise CheckpointError(f"a {name} was expected, but there is something else")
    return value.state


def _as(kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise CheckpointError(f"a {kind.__name__} was expected, but there is a {type(value).__name__}")
    return value


def _size(value: Any) -> tuple[int, ...]:
    if _is(value, "Size"):
        (value,) = value.args
    if not isinstance(value, (tuple, list)):
        raise CheckpointError(f"a size was expected, but there is a {type(value).__name__}")
    return tuple(_as(int, number) for number in value)
