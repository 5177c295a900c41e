"""Read and write manifest.json, a checkpoint's description of itself; all of it is checked before any is used.

save() makes a Manifest, store.py writes it as the last file of the folder, and load() returns it. It has the step, the
shapes and places of tensors, sizes and SHA-256 of files, the record of the optimizer, what gates compute, the user's
`extra`, and its own SHA-256 over the other entries. Versions: 1, which is only read, says in .metadata, a pickle of
torch's, where the tensors are; 2 says it itself; 3 has an `extra` for each rank. A file is written in version 2 if that
can say it, so that older readers refuse only what they do not know.
"""

import hashlib
import json
import warnings
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from fmoe_ext.checkpoint.chunks import SavedTensor
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.files import atomic_file, inside, read_json
from fmoe_ext.checkpoint.torch_metadata import read_metadata

_VERSION = 2
_WITH_EXTRAS = 3
_VERSIONS = (1, 2, _WITH_EXTRAS)
MODEL = "model."  # prefix of the model's tensors; the optimizer's state has optimizer_state.PREFIX
# {entry: the types that it may have}
_TYPES: MappingProxyType[str, tuple[type, ...]] = MappingProxyType(
    {
        "step": (int,),
        "layers": (dict,),
        "optimizer": (dict, type(None)),
        "extra": (dict,),
        "extras": (list,),
        "tensors": (dict,),
        "files": (dict,),
        "routing": (dict,),
    }
)
_TYPES_OF_OPTIMIZER: MappingProxyType[str, type] = MappingProxyType(
    {"type": str, "groups": list, "params": dict, "values": dict}
)


@dataclass
class Manifest:
    """The description of a checkpoint; fields are in the order of the file."""

    step: int
    layers: dict[str, Any] = field(default_factory=dict)  # {layer: number of experts, widths}
    optimizer: dict[str, Any] | None = None  # optimizer_state.take()'s record
    extra: dict[str, Any] = field(default_factory=dict)  # this rank's
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)  # {key: {"shape", "dtype", "chunks"}}
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # {name: {"bytes", "sha256"}}
    # {layer: what its gate computes}, which no tensor says
    routing: dict[str, Any] = field(default_factory=dict)
    torch: str = torch.__version__
    version: int = _VERSION
    extras: list[dict[str, Any]] = field(default_factory=list)  # every rank's, where they differ

    def keep_extras(self, extras: list[dict[str, Any]]) -> None:
        """Take the `extra` of every rank, in their order."""
        if any(other != extras[0] for other in extras):
            self.extras, self.version = extras, _WITH_EXTRAS

    def take_extra(self, rank: int, num_ranks: int) -> None:
        """Make `extra` what this rank saved, if as many ranks saved it; else warn that it is rank 0's."""
        if len(self.extras) == num_ranks:
            self.extra = self.extras[rank]
        elif self.extras:
            differing = [
                k for k, v in self.extra.items() if any(k not in e or e[k] != v for e in self.extras)
            ]
            warnings.warn(
                f"{len(self.extras)} ranks saved `extra` with different values of "
                f"{', '.join(map(repr, differing))}, and {num_ranks} load it: each gets rank 0's in manifest.extra; "
                "manifest.extras has those of every rank",
                stacklevel=4,
            )

    def write(self, path: Path) -> None:
        keyed = {"extra": encode_keys(self.extra), "optimizer": encode_keys(self.optimizer)}
        # JSON makes text of every key, so dicts with numbers as keys become pairs. A damaged digit shows in the digest
        content = asdict(replace(self, **keyed, extras=encode_keys(self.extras)))
        if not self.extras:
            del content["extras"]  # readers of version 2 do not know it
        with atomic_file(path) as file:
            file.write(json.dumps({**content, "sha256": _digest(content)}, indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        path = inside(folder, "manifest.json")
        content = read_json(path)
        # the digest before the version: a damaged version must not look like one of the future
        expected, version = content.pop("sha256", None), content.get("version")
        if _digest(content) != expected:
            raise CheckpointError(
                f"{path} is damaged: its content does not have the SHA-256 {expected}"[:500]
            )
        if version not in _VERSIONS:
            known = ", ".join(map(str, _VERSIONS))
            raise CheckpointError(f"{path} has version {version}, this fmoe_ext reads versions {known}"[:500])
        try:
            return cls(**content).checked(path)
        except TypeError as error:
            raise CheckpointError(f"{path} is damaged: {error}"[:500]) from error

    def checked(self, path: Path) -> "Manifest":
        """Return itself, keys decoded; CheckpointError if anything has another type than save() writes."""
        try:
            self.extra, self.optimizer = decode_keys(self.extra), decode_keys(self.optimizer)
            self.extras = decode_keys(self.extras)
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: {error}"[:500]) from error
        # The digest shows damage, not malice: look at the types of everything
        for name, expected in _TYPES.items():
            if not isinstance(getattr(self, name), expected):
                raise CheckpointError(f"{path} is damaged: its {name!r} is {getattr(self, name)!r}"[:500])
        entries = (*self.tensors.values(), *self.files.values(), *self.routing.values())
        if not all(isinstance(entry, dict) for entry in entries):
            raise CheckpointError(
                f"{path} is damaged: tensors, files or routing are not described by objects"
            )
        for name, entry in self.files.items():
            inside(path.parent, name)
            if type(entry.get("bytes")) is not int or not isinstance(entry.get("sha256"), str):
                raise CheckpointError(f"{path} is damaged: it has no size or checksum of {name}")
        if not all(isinstance(extra, dict) for extra in self.extras):
            raise CheckpointError(f"{path} is damaged: its 'extras' are {self.extras!r}"[:500])
        # Types and bounds of everything that loading indexes with
        record = self.optimizer  # what optimizer_state.Loading takes from it
        if record is not None and not (
            all(isinstance(record.get(name), kind) for name, kind in _TYPES_OF_OPTIMIZER.items())
            and all(isinstance(options, dict) for options in record["groups"])
            and all(type(i) is int and 0 <= i < len(record["groups"]) for i in record["params"].values())
            and all(isinstance(values, dict) for values in record["values"].values())
        ):
            raise CheckpointError(
                f"{path} is damaged: what it says of the optimizer is not what save() writes"
            )
        return self

    def saved(self, folder: Path) -> dict[str, SavedTensor]:
        """Return {key: the tensor's shape, dtype and places}; CheckpointError for entries that are no tensors."""
        if self.version == 1:
            tensors, others = read_metadata(inside(folder, ".metadata"))
            if others:
                raise CheckpointError(f"{folder / '.metadata'}: {others[0]} is no tensor")
            for key, entry in self.tensors.items():
                if key not in tensors or [*tensors[key].shape] != entry.get("shape"):
                    raise CheckpointError(f"{folder}: .metadata and manifest.json do not agree on {key}")
            return {key: tensors[key] for key in self.tensors}
        # A chunk's file must be one of those that have a checksum
        tensors = {}
        for key, entry in self.tensors.items():
            tensors[key] = SavedTensor.from_json(key, entry)
            for chunk in tensors[key].chunks:
                if chunk.file not in self.files:
                    raise CheckpointError(
                        f"{folder}: {key} is in {chunk.file!r}, which has no checksum"[:500]
                    )
        return tensors


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


_ITEMS = "__items__"  # {1: "a"} is written as {"__items__": [[1, "a"]]}


def encode_keys(value: Any) -> Any:
    """Make a value ready for JSON so that dicts keep numbers and None as keys; TypeError for other keys."""
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and value.keys() != {_ITEMS}:
            return {key: encode_keys(part) for key, part in value.items()}
        if others := [key for key in value if not isinstance(key, (str, int, float, type(None)))]:
            raise TypeError(f"{type(others[0]).__name__} {others[0]!r} as a key")
        return {_ITEMS: [[key, encode_keys(part)] for key, part in value.items()]}
    return [encode_keys(part) for part in value] if isinstance(value, (list, tuple)) else value


def decode_keys(value: Any) -> Any:
    """Undo encode_keys()."""
    if isinstance(value, dict):
        pairs = value[_ITEMS] if value.keys() == {_ITEMS} else value.items()
        return {key: decode_keys(part) for key, part in pairs}
    return [decode_keys(part) for part in value] if isinstance(value, list) else value
