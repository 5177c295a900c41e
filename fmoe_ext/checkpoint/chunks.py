"""Write and read the chunks of tensors in .distcp files, as the planners, writer and reader of torch's checkpoints.

torch.distributed.checkpoint (DCP) asks each rank for its parts of every tensor, decides which rank writes which chunk,
and, on loading, which chunks a rank must read. A chunk is a box of a tensor (offsets, sizes) in a range of a file. Four
classes of DCP are replaced:

    saving    SavePlanner   a chunk that several ranks have is written by the lowest of them
              Writer        keeps where each chunk was written, for manifest.json: no pickle is written
    loading   Planner       refuses entries that are not tensors, which DCP would unpickle
              Reader        reads chunks from a folder, by that manifest

store.py gives them to dcp.save() and dcp.load(). A SavedTensor is what the manifest says of one tensor, and
fingerprints() compare the copies of several ranks. What comes from a file is checked here: nothing but a tensor of the
announced shape and dtype is let through.
"""

import functools
import hashlib
import io
import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias, cast

import torch
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemWriter,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    SavePlan,
    StorageReader,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadItemType, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.files import check_is_file, check_torch_file, inside

_MAX_DIMENSIONS = 64  # torch's own limit
_BLOCK = 2**20  # numbers of 8 bytes that a fingerprint sums at once
Place: TypeAlias = tuple[str, tuple[int, ...]]  # key of a tensor, offsets of a chunk in it


@dataclass(frozen=True)
class Chunk:
    """Places a part of a tensor in the tensor and in a file."""

    offsets: tuple[int, ...]  # of its first element in the tensor
    sizes: tuple[int, ...]
    file: str  # a name in the checkpoint's folder
    begin: int  # in the file
    num_bytes: int  # of what torch.save wrote there, which is more than the elements


@dataclass(frozen=True)
class SavedTensor:
    """Describes one tensor of a checkpoint."""

    dtype: str  # its name in torch, as "float32"
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]  # all of it, each element once (check)

    def check(self, key: str) -> None:
        """Raise CheckpointError unless the types are right, and the chunks fit the tensor and have bytes for it."""
        if not isinstance(key, str) or not isinstance(getattr(torch, str(self.dtype), None), torch.dtype):
            raise CheckpointError(f"the tensor {key!r} has the unknown dtype {self.dtype!r}"[:300])
        if len(self.shape) > _MAX_DIMENSIONS:
            raise CheckpointError(f"{key} has {len(self.shape)} dimensions, more than {_MAX_DIMENSIONS}")
        numbers = [
            *self.shape,
            *(n for c in self.chunks for n in (*c.offsets, *c.sizes, c.begin, c.num_bytes)),
        ]
        if any(type(n) is not int or not 0 <= n < 2**62 for n in numbers):
            raise CheckpointError(f"{key} has sizes or places that are not integers in [0, 2^62)")
        for chunk in self.chunks:
            if not isinstance(chunk.file, str):
                raise CheckpointError(f"{key} is in a file whose name is not a string")
            if not len(chunk.offsets) == len(chunk.sizes) == len(self.shape) or any(
                begin + size > whole
                for begin, size, whole in zip(chunk.offsets, chunk.sizes, self.shape, strict=True)
            ):
                raise CheckpointError(f"{key} {list(self.shape)} has a chunk that is not a part of it")
            if math.prod(chunk.sizes) * self.torch_dtype.itemsize > chunk.num_bytes:
                raise CheckpointError(
                    f"{key}: a chunk {list(chunk.sizes)} of {self.dtype} cannot be in {chunk.num_bytes} bytes"
                )
        # As many elements as the tensor has, and none of them twice: then none is missing
        if sum(math.prod(chunk.sizes) for chunk in self.chunks) != math.prod(self.shape):
            raise CheckpointError(f"the chunks of {key} do not make up its shape {list(self.shape)}")
        if self._has_overlap():
            raise CheckpointError(f"the chunks of {key} {list(self.shape)} overlap")

    def _has_overlap(self) -> bool:
        """True if two chunks have an element in common."""
        if len(self.chunks) < 2 or not self.shape:
            return False
        boxes = [tuple(zip(c.offsets, c.sizes, strict=True)) for c in self.chunks if math.prod(c.sizes)]
        if not boxes:
            return False
        # Sweep along the dimension that is cut most often: there few chunks are side by side
        along = max(range(len(self.shape)), key=lambda d: len({box[d][0] for box in boxes}))
        beside: list[tuple[tuple[int, int], ...]] = []  # earlier chunks that reach to the current one
        for box in sorted(boxes, key=lambda box: box[along][0]):
            beside = [other for other in beside if sum(other[along]) > box[along][0]]
            if any(
                all(a < b + n and b < a + m for (a, m), (b, n) in zip(box, other, strict=True))
                for other in beside
            ):
                return True
            beside.append(box)
        return False

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def as_json(self) -> dict[str, Any]:
        chunks = [[c.offsets, c.sizes, c.file, c.begin, c.num_bytes] for c in self.chunks]
        return {"shape": list(self.shape), "dtype": self.dtype, "chunks": chunks}

    @classmethod
    def from_json(cls, key: str, content: Any) -> "SavedTensor":
        try:
            chunks = [
                Chunk(tuple(offsets), tuple(sizes), file, begin, num_bytes)
                for offsets, sizes, file, begin, num_bytes in content["chunks"]
            ]
            tensor = cls(content["dtype"], tuple(content["shape"]), tuple(chunks))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the entry of {key} does not describe a tensor") from error
        tensor.check(key)
        return tensor


class Writer(FileSystemWriter):
    """Writes the chunks, and keeps in `tensors` what was written where, in place of torch's pickle .metadata."""

    tensors: dict[str, SavedTensor]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        # Where every rank has written each of its chunks
        places = {result.index: result.storage_data for of_rank in results for result in of_rank}
        self.tensors = {}
        for key, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise CheckpointError(f"{key} is not a tensor")
            chunks = []
            for chunk in entry.chunks:
                info = places[MetadataIndex(key, chunk.offsets)]
                place = info.relative_path, info.offset, info.length
                chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), *place))
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            self.tensors[key] = SavedTensor(dtype, tuple(entry.size), tuple(chunks))


class Reader(StorageReader):
    """Reads {key: SavedTensor} from the files of a folder for torch.distributed.checkpoint.load."""

    def __init__(self, folder: Path, tensors: Mapping[str, SavedTensor]):
        self.folder = folder
        self.tensors = tensors

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for key, tensor in self.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks]
            properties = TensorProperties(dtype=tensor.torch_dtype)
            entries[key] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        return Metadata(entries)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        # A rank may need several boxes of one chunk: read it once
        by_chunk: dict[tuple[str, tuple[int, ...]], list[ReadItem]] = {}
        for item in plan.items:
            if item.type != LoadItemType.TENSOR or item.storage_index.offset is None:
                raise CheckpointError(f"{item.storage_index.fqn} is not a tensor")
            place = item.storage_index.fqn, tuple(item.storage_index.offset)
            by_chunk.setdefault(place, []).append(item)
        for (key, offsets), items in by_chunk.items():
            tensor = self.tensors[key]
            chunk = next(chunk for chunk in tensor.chunks if chunk.offsets == offsets)
            value = _load_chunk(self.folder, key, chunk, tensor.torch_dtype)  # once for all items, then freed
            for item in items:
                begins = zip(item.storage_offsets, item.lengths, strict=True)
                # the box of the chunk that goes into this tensor
                target = planner.resolve_tensor(item).detach()
                target.copy_(value[tuple(slice(begin, begin + length) for begin, length in begins)])
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class SavePlanner(DefaultSavePlanner):
    """Saves what several ranks have from the lowest of them, and gives the chunks to compare their copies.

    torch's own planner takes each tensor from the rank with the least to write: of one module, as of a batch
    normalisation, the mean could come from one rank and the variance from another.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
        self.items: dict[Place, WriteItem] = {}

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.items = {(item.index.fqn, tuple(item.index.offset or ())): item for item in plan.items}
        return plan

    def chunks(self) -> dict[Place, Callable[[], torch.Tensor]]:
        """Return {(key, offsets): function that returns the chunk} of this rank."""
        return {
            place: functools.partial(cast(Callable[[WriteItem], torch.Tensor], self.resolve_data), item)
            for place, item in self.items.items()
        }


class _Fingerprint(NamedTuple):
    """A digest that tensors of one dtype, shape and content share, and others do not, except by chance."""

    what: str  # dtype and shape
    value: str


def fingerprints(
    chunks: Mapping[Place, Callable[[], torch.Tensor]], shared: Set[Place]
) -> dict[Place, _Fingerprint]:
    """Compute fingerprints of the chunks that other ranks have too, on the chunk's device: none is copied to the CPU.

    A chunk is cut into blocks of 64-bit numbers x_i. The sums of w_i f(x_i) mod 2^64 over each block, with random odd
    w_i and f(x) = x ^ (x >> 31), go into a SHA-256. If one number alone differs, its block's sum always
    differs: f is one-to-one, and odd w_i are invertible mod 2^64.
    """
    if not shared:  # in one process the 8 MiB of weights would be the peak of its memory
        return {}
    seeded = torch.Generator("cpu").manual_seed(0)  # the same on every rank
    weights = torch.randint(2**62, (_BLOCK,), generator=seeded, dtype=torch.int64, device="cpu")
    weights = weights * 2 + 1  # odd
    found = {}
    for place, give in chunks.items():
        if place not in shared:
            continue
        tensor = give()
        weights = weights.to(tensor.device)
        sums = []
        for block in tensor.detach().contiguous().view(-1).view(torch.uint8).split(8 * _BLOCK):
            numbers = torch.zeros(-(-len(block) // 8), dtype=torch.int64, device=block.device)
            numbers.view(torch.uint8)[: len(block)] = block
            # f: else two flipped top bits, 2^63 each whatever the weight, would cancel. The mask makes the shift
            # logical: with copies of the sign, x and ~x would be the same, as 0 and -1
            numbers ^= (numbers >> 31) & (2**33 - 1)
            sums.append((numbers * weights[: len(numbers)]).sum())
        of_blocks = torch.stack(sums).tolist() if sums else []
        what = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        found[place] = _Fingerprint(what, hashlib.sha256(str(of_blocks).encode()).hexdigest())
    return found


class Planner(DefaultLoadPlanner):
    """Refuses entries of bytes, which torch's own planner would unpickle, whatever is in them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.storage_index.fqn} is not a tensor")


def _load_chunk(folder: Path, key: str, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
    """Read the tensor of one chunk; CheckpointError where the file holds anything else."""
    path = inside(folder, chunk.file)
    text = f"{path}: the chunk of {key} at {chunk.begin}"
    try:
        check_is_file(path)
        if chunk.begin + chunk.num_bytes > path.stat().st_size:
            raise CheckpointError(f"{path} is truncated: it has no {chunk.num_bytes} bytes at {chunk.begin}")
        # the chunk is a file of torch.save inside the file: nothing outside of it can be read
        with open(path, "rb") as file, io.BufferedReader(_Part(file, chunk.begin, chunk.num_bytes)) as part:
            check_torch_file(part, text)
            value = torch.load(part, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # of zipfile and torch, for damaged content of any kind
        raise CheckpointError(f"{text} cannot be read: {type(error).__name__}: {error}"[:500]) from error
    # nothing but the tensor that was announced
    if type(value) is not torch.Tensor or value.layout != torch.strided:
        raise CheckpointError(f"{text} is not a tensor")
    if value.dtype != dtype or tuple(value.shape) != chunk.sizes:
        raise CheckpointError(
            f"{text} is {value.dtype} {list(value.shape)}, expected {dtype} {list(chunk.sizes)}"
        )
    return value


class _Part(io.RawIOBase):
    """A range of a file as a file of its own, which torch.load() can read."""

    def __init__(self, file: BinaryIO, begin: int, num_bytes: int):
        self.file, self.begin, self.num_bytes, self.place = file, begin, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: self.num_bytes}[whence]
        self.place = max(0, start + offset)
        return self.place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self.num_bytes - self.place)]
        self.file.seek(self.begin + self.place)
        num_read = self.file.readinto(view)  # type: ignore[attr-defined]
        self.place += num_read
        return num_read
