"""Buffers for the experts of some layers in a fixed number of bytes, read while others compute.

With memory for two layers a part is a layer. With less, a layer is cut so that PARTS parts fit. A step uses the parts
in an order that is known beforehand:

    forward of layers 0 1 2, then, in training, for each layer from the last: its forward again, as a checkpoint repeats
    it, and its backward, through its parts in reverse:  0 1 2 | 2 2' 1 1' 0 0' | 0 1 2 ...

After generation's forward the next one follows:  0 1 2 | 0 1 2 ...
The memory is used in one of two ways at a time:

slots   For many tokens: a slot holds a part. The next parts are read while this one computes, each over the one whose
        next use is furthest (Belady's rule, which no other order of reads beats).
caches  For few tokens without gradients: each layer has a region with slots for single experts. Which ones a token
        chooses is not known beforehand, so the least recently used gives its slot up.

A use of a slot is a lease, which ends when the last tensor over its memory is gone. Threads share the buffers: nothing
that another thread has a lease of is read over, given back or cut anew. A read waits for a buffer; a new size waits for
a later step, and while a graph may come back to parts by their numbers, parts keep their size.

Locks: `turn` is held by a thread that computes with chosen experts, and around what replaces slots; `_lock` for the
state of slots. Finalisers run anywhere, inside of either, so they take neither (_end).
"""

import enum
import gc
import mmap
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from queue import Empty, SimpleQueue
from threading import Lock, RLock, get_ident
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from fmoe_ext.checkpoint.expert_files import ALIGNED, Layer, Weights
from fmoe_ext.finetune.streaming.reader import BLOCK, Reader

PARTS = 4  # buffers, where a layer is cut: one computes while others are read


class Phase(enum.Enum):
    """The use of a layer: forward, the forward that a checkpoint repeats in the backward, backward."""

    FORWARD = enum.auto()
    REPEATED = enum.auto()
    BACKWARD = enum.auto()


class Part(NamedTuple):
    """Experts [begin, end) of a layer, which are read together."""

    layer: int
    begin: int
    end: int


class Parts:
    """The parts of all layers, by number; size: experts of a part, 0 for all of a layer."""

    def __init__(self, layers: Sequence[Layer], size: int) -> None:
        self._parts: list[Part] = []
        self.of_layer: list[range] = []  # numbers of the parts of each layer
        for index, layer in enumerate(layers):
            first, step = len(self._parts), size or layer.num_experts
            for begin in range(0, layer.num_experts, step):
                self._parts.append(Part(index, begin, min(begin + step, layer.num_experts)))
            self.of_layer.append(range(first, len(self._parts)))

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, number: int) -> Part:
        return self._parts[number]

    def after(self, number: int, phase: Phase, is_training: bool) -> Iterator[int]:
        """Yield the numbers of parts in the order of their next uses, after this use of one.

        A backward repeats the forward of a layer, as checkpoints do, and then goes backwards through its parts.
        """
        layer = self._parts[number].layer
        every = range(len(self._parts))
        if phase is Phase.FORWARD:
            yield from every[number + 1 :]
            yield from self._by_layer_backwards(len(self.of_layer)) if is_training else every
            return
        if phase is Phase.REPEATED:
            yield from range(number + 1, self.of_layer[layer].stop)
            yield from reversed(self.of_layer[layer])
        else:
            yield from range(number - 1, self.of_layer[layer].start - 1, -1)
        yield from self._by_layer_backwards(layer)
        yield from every

    def _by_layer_backwards(self, end: int) -> Iterator[int]:
        for parts in reversed(self.of_layer[:end]):
            yield from parts


def plan_buffers(layers: Sequence[Layer], num_bytes: int) -> tuple[int, int]:
    """Return (experts of a part, 0 for all of a layer; number of buffers); ValueError for too few bytes.

    Parts together take the memory of one layer at most: more hides no more reads, and activations need the rest.
    """
    whole = bytes_of_experts(layers)
    if num_bytes >= whole * min(2, len(layers)):
        return 0, min(num_bytes // whole, len(layers))
    num_bytes = min(num_bytes, whole)
    size = max(layer.num_experts for layer in layers)
    while size and num_bytes // bytes_of_experts(layers, size) < PARTS:
        size -= 1
    if not size:
        raise ValueError(f"{num_bytes:,} bytes do not hold {PARTS} experts")
    return size, num_bytes // bytes_of_experts(layers, size)


def bytes_of_experts(layers: Sequence[Layer], count: int = 0) -> int:
    """Count the bytes of a buffer for some experts of any of the layers, by default for all of them."""
    step = ALIGNED if count else BLOCK
    sizes = (layer.num_bytes(min(count or layer.num_experts, layer.num_experts)) for layer in layers)
    return -(-max(sizes) // step) * step


@dataclass
class Statistics:
    """Counts since the last reset()."""

    layers_read: int = 0
    parts_read: int = 0  # where two layers do not fit into the buffers
    experts_read: int = 0
    bytes_read: int = 0
    hits: int = 0  # experts that few tokens chose, and that were there
    misses: int = 0
    tokens: int = 0  # in calls that read chosen experts
    read_seconds: float = 0.0
    waited_seconds: float = 0.0  # in which the computation had to wait for reads
    buffer_bytes: int = 0  # most memory that buffers had

    @property
    def hidden_share(self) -> float:
        """Share of the time of reading in which something else was computed; 1 if nothing was read."""
        return 1.0 - min(1.0, self.waited_seconds / self.read_seconds) if self.read_seconds else 1.0

    @property
    def bytes_per_token(self) -> float:
        """Bytes read for each token of the calls that read chosen experts."""
        return self.bytes_read / self.tokens if self.tokens else 0.0


# Seconds without a lease that ends, after which those of other threads count as kept by autograd.
PATIENCE = 60.0


class Lease:
    """A thread's use of a buffer that has not ended, or a graph whose backward will read the same parts again."""

    def __init__(self) -> None:
        self.thread = get_ident()


@dataclass(eq=False)
class _Slot:
    """A buffer for one part of a layer."""

    begin: int  # byte in the memory of the pool
    part: int | None = None  # its number among the parts of all layers
    done: Future[None] | None = None  # its read
    leases: set[Lease] = field(default_factory=set)


class _Cache:
    """The slots of one layer's chosen experts, the weights in them, and which expert is where."""

    def __init__(self, layer: Layer, buffer: "np.ndarray[Any, Any]", num_slots: int) -> None:
        self.buffer, self.num_slots = buffer, num_slots
        self.weights = layer.weights(buffer, num_slots)
        # [E + 1]: slot of each expert, -1 for none; the entry at the end is what a dropped choice, -1, finds
        self.place = torch.full((layer.num_experts + 1,), -1, device="cpu")
        # [slots]: expert in each slot, 0 for empty ones
        self.order = torch.zeros(num_slots, dtype=torch.int64, device="cpu")
        self._slots: OrderedDict[int, int] = OrderedDict()  # {expert: slot}, least recently used first
        self._free = list(range(num_slots))

    def make_room(self, experts: Sequence[int]) -> tuple[list[int], list[int]]:
        """(experts that have to be read, slots for them); marks the others as used.

        The slots have no expert until put(), so that a read that fails leaves none in a slot of another one.
        """
        missing = [e for e in experts if e not in self._slots]
        for e in experts:
            if e in self._slots:
                self._slots.move_to_end(e)
        while len(self._free) < len(missing):
            expert, slot = self._slots.popitem(last=False)
            self.place[expert] = -1
            self._free.append(slot)
        return missing, self._free[: len(missing)]

    def put(self, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Notes experts that were read into slots."""
        for expert, slot in zip(experts, slots, strict=True):
            self._free.remove(slot)
            self._slots[expert] = slot
            self.place[expert], self.order[slot] = slot, expert


class Pool:
    """Memory for experts of layers. num_bytes: of all buffers together; through_cache: of Reader.

    Raises ValueError if it does not hold PARTS experts of the largest layer.
    """

    def __init__(self, layers: Sequence[Layer], num_bytes: int, through_cache: bool = False) -> None:
        self.layers = tuple(layers)
        self.statistics = Statistics()
        self._counting = Lock()  # for the statistics, which threads change that hold different locks
        self._num_bytes = 0
        self._memory = in_huge_pages(min(num_bytes, self.layer_bytes * len(layers)) // BLOCK * BLOCK)
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8)
        self.address = int(self._bytes.ctypes.data)
        paths = {span.path for layer in layers for span in layer.every_span()}
        self._reader = Reader(paths, through_cache)
        self._ahead = ThreadPoolExecutor(1, "fmoe_ext read ahead")
        self._lock = Lock()
        self.turn = RLock()  # held while chosen experts are computed with, which other reads would replace
        self._inside: Counter[int] = Counter()  # {thread: its calls that compute now}
        self._graphs: weakref.WeakSet[Lease] = weakref.WeakSet()
        # A queue for each thread that waits for a buffer, which gets an entry when a lease ends. _end() takes no lock.
        self._waiting: list[SimpleQueue[None]] = []
        self._slots: list[_Slot] = []
        self._size = 0  # experts of a part, 0 for all of a layer
        self._caches: list[_Cache] = []
        self._described: dict[int, Weights] = {}  # of layers that were read, while all have a buffer
        self.resize(num_bytes)
        weakref.finalize(self, self._ahead.shutdown, wait=False)

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes of the buffer of one layer."""
        return bytes_of_experts(self.layers)

    @property
    def num_bytes(self) -> int:
        """Bytes that the buffers may take."""
        return self._num_bytes

    @property
    def bytes_in_use(self) -> int:
        """Bytes of the buffers that are there now."""
        return len(self._slots) * self._slot_bytes or sum(cache.buffer.size for cache in self._caches)

    @property
    def holds_all(self) -> bool:
        """True if every layer has a buffer of its own."""
        return self._num_bytes >= self.layer_bytes * len(self.layers)

    @contextmanager
    def used(self) -> Iterator[None]:
        """The buffers keep their sizes and contents for this thread inside the block, where it takes no lease."""
        thread = get_ident()
        with self._lock:
            self._inside[thread] += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside[thread] -= 1
                if not self._inside[thread]:
                    del self._inside[thread]

    def graph(self) -> Lease:
        """Make a lease to keep as long as a graph whose backward reads parts by the numbers that they have now."""
        lease = Lease()
        with self._lock:
            self._graphs.add(lease)
        return lease

    def _leases(self, size: int) -> list[Lease]:
        """List the leases under which the buffers may not become fewer, nor get parts of another size."""
        held = [lease for slot in self._slots for lease in tuple(slot.leases)]
        return held if size == self._size else [*held, *self._graphs]

    def would_grow(self, num_bytes: int) -> bool:
        """Return whether resize(num_bytes) may be called now and adds a buffer, or makes parts larger."""
        num_bytes = min(num_bytes, self._bytes.size)
        before, after = (plan_buffers(self.layers, n) for n in (self._num_bytes, num_bytes))
        if num_bytes <= self._num_bytes or before == after:
            return False
        with self._lock:
            return not self._leases(after[0])

    def resize(self, num_bytes: int) -> None:
        """Makes the buffers smaller, or as large as they were; they are read again unless their number stays.

        Does nothing while other threads compute with them: a later step asks again.
        """
        num_bytes = min(num_bytes, self._bytes.size)
        plan = plan_buffers(self.layers, num_bytes)
        with self.turn, self._lock:
            if self._slots and plan == plan_buffers(self.layers, self._num_bytes):
                self._num_bytes = num_bytes
                return
            held = self._leases(plan[0])
            if {*self._inside, *(lease.thread for lease in held)} - {get_ident()}:
                return
            self._settle()
            if held:
                gc.collect()  # graphs that nobody reaches any more
            if self._leases(plan[0]):
                raise RuntimeError("buffers of experts cannot shrink between a forward and its backward")
            self._num_bytes = num_bytes
            self._size, self._most_slots = plan
            self._slot_bytes = bytes_of_experts(self.layers, self._size)
            self.parts = Parts(self.layers, self._size)
            self._forget()

    def forget(self) -> None:
        """Gives the memory of the buffers back until they are read again; not while tensors use it."""
        with self.turn, self._lock:
            self._settle()
            if not self._inside and not self._leases(self._size):
                self._forget()

    def whole(self, index: int, *, is_backward: bool, is_training: bool) -> Weights:
        """Read a layer of one part; its buffer is free again when the last tensor of the weights is gone.

        Raises RuntimeError if tensors that autograd keeps have all buffers.
        """
        layer = self.layers[index]
        # Nothing outlives the call and nothing gives way, so generation needs no lease for each layer of each token.
        is_short = self.holds_all and not torch.is_grad_enabled()
        if is_short and index in self._described:
            return self._described[index]
        phase = Phase.REPEATED if is_backward else Phase.FORWARD
        number = self.parts.of_layer[index].start
        weights = layer.weights(self._lease(number, phase, is_training), layer.num_experts)
        if is_short and (slot := self._find(number)) is not None:
            buffer = self._bytes[slot.begin : slot.begin + self._slot_bytes]
            self._described[index] = layer.weights(buffer, layer.num_experts)
        return weights

    def part(self, number: int, phase: Phase, is_training: bool) -> Weights:
        """Read a part, as whole() reads a layer."""
        part = self.parts[number]  # parts of one layer differ in size where its experts are no multiple
        return self.layers[part.layer].weights(self._lease(number, phase, is_training), part.end - part.begin)

    def again(
        self, index: int, offset: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> torch.Tensor:
        """Read a layer of one part in a backward -> a tensor of its weights, by its place in the buffer."""
        buffer = torch.from_numpy(self._lease(self.parts.of_layer[index].start, Phase.BACKWARD, True))
        values = buffer[: buffer.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        return values.as_strided(shape, stride, offset // dtype.itemsize)

    def _lease(self, number: int, phase: Phase, is_training: bool) -> "np.ndarray[Any, Any]":
        """Lease a buffer that has a part, reading it if none has."""
        # {part: distance}, by which Belady's rule chooses the buffer to read over
        next_use: dict[int, int] = {}
        for distance, part in enumerate(self.parts.after(number, phase, is_training)):
            next_use.setdefault(part, distance)
        # The lease is taken under the lock that finds the buffer, or another thread might read over it.
        lease, slot = Lease(), None
        while slot is None:
            released: SimpleQueue[None] = SimpleQueue()
            with self.turn, self._lock:
                if not self._slots:  # forgotten, or chosen experts had the memory
                    self._caches = []
                    count = min(self._most_slots, len(self.parts))
                    self._slots = [_Slot(i * self._slot_bytes) for i in range(count)]
                slot = self._find(number)
                if slot is None and (victim := self._victim(next_use)) is not None:
                    slot = self._begin_read(number, victim)
                if slot is not None:
                    slot.leases.add(lease)
                    done = slot.done
                else:
                    self._waiting.append(released)
            if slot is None:
                self._wait(released)
        assert done is not None
        begun = time.perf_counter()
        try:
            done.result()
        except BaseException:
            self._end(slot, lease)
            with self._lock:
                # not done: Ctrl-C ended the wait, and the read goes on; another: a thread has begun it again
                if done.done() and slot.done is done:
                    slot.part = slot.done = None
            raise
        self.count(waited_seconds=time.perf_counter() - begun)
        with self._lock:
            self._note_buffers(len(self._slots) * self._slot_bytes)
            self._read_ahead(number, next_use)
        buffer = self._bytes[slot.begin : slot.begin + self._slot_bytes]
        weakref.finalize(buffer, self._end, slot, lease)
        return buffer

    def _end(self, slot: _Slot, lease: Lease) -> None:
        """End a lease, wherever the garbage collector runs: it takes no lock."""
        slot.leases.discard(lease)
        for waiting in tuple(self._waiting):
            waiting.put(None)

    def _wait(self, released: SimpleQueue[None]) -> None:
        """Wait until a lease ends; RuntimeError if none does, because autograd keeps the weights."""
        try:
            with self._lock:
                others = any(lease.thread != get_ident() for s in self._slots for lease in tuple(s.leases))
                free = any(not slot.leases for slot in self._slots)
            if not free:
                released.get(timeout=PATIENCE if others else 0)
        except Empty:
            raise RuntimeError(
                f"all {len(self._slots)} buffers for layers of experts are in use, because autograd keeps their "
                "weights. Call "
                'model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}) for '
                "training, and leave other hooks for saved tensors out"
            ) from None
        finally:
            self._waiting.remove(released)

    def chosen(self, index: int, experts: Sequence[int]) -> _Cache | None:
        """Read experts into the cache of their layer, where they are until the next call: the caller holds the turn.

        None if its slots are too few, or buffers of whole layers are in use. Raises CheckpointError.
        """
        layer = self.layers[index]
        with self._lock:
            if not self._caches:
                if any(slot.leases for slot in self._slots):
                    return None
                # a region for each layer, with the experts of any layer that fit into it as slots
                region = self._num_bytes // len(self.layers) // ALIGNED * ALIGNED
                count = min(other.num_experts for other in self.layers)
                while count and any(other.num_bytes(count) > region for other in self.layers):
                    count -= 1
                if count < len(experts):
                    return None
                self._settle()
                self._slots = []
                begins = range(0, region * len(self.layers), region)
                self._caches = [
                    _Cache(other, self._bytes[begin : begin + other.num_bytes(count)], count)
                    for begin, other in zip(begins, self.layers, strict=True)
                ]
                self._note_buffers(begins[-1] + self._caches[-1].buffer.size)
            if len(experts) > min(cache.num_slots for cache in self._caches):
                return None
        cache = self._caches[index]
        missing, slots = cache.make_room(experts)
        self.count(hits=len(experts) - len(missing), misses=len(missing))
        if missing:
            begun = time.perf_counter()
            num_bytes = self._reader.read(layer.spans(missing, slots, cache.num_slots), cache.buffer)
            seconds = time.perf_counter() - begun
            self.count(
                bytes_read=num_bytes, experts_read=len(missing), read_seconds=seconds, waited_seconds=seconds
            )
            cache.put(missing, slots)
        return cache

    def resident_layers(self) -> list[int]:
        """List the layers that have a part in a buffer, or one that is being read."""
        return [self.parts[slot.part].layer for slot in self._slots if slot.part is not None]

    def contains(self, address: int) -> bool:
        """Return whether an address is in the buffers."""
        return self.address <= address < self.address + self._bytes.size

    def layer_at(self, address: int) -> tuple[int, int]:
        """Find (layer, offset in its buffer) of an address in the buffer of a whole layer."""
        offset = address - self.address
        slot = self._slots[offset // self._slot_bytes]
        assert slot.part is not None
        return self.parts[slot.part].layer, offset - slot.begin

    def count(self, **amounts: float) -> None:
        """Adds to the counters of these names in the statistics."""
        with self._counting:
            for name, amount in amounts.items():
                setattr(self.statistics, name, getattr(self.statistics, name) + amount)

    def _note_buffers(self, num_bytes: int) -> None:
        with self._counting:
            self.statistics.buffer_bytes = max(self.statistics.buffer_bytes, num_bytes)

    def _forget(self) -> None:
        self._slots, self._caches, self._described = [], [], {}
        if hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED)

    def _settle(self) -> None:
        """Waits for reads that are under way."""
        for slot in self._slots:
            if slot.done is not None:
                slot.done.exception()

    def _find(self, number: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.part == number), None)

    def _victim(self, next_use: dict[int, int]) -> _Slot | None:
        """Choose the buffer to read a part into: an empty one, or the one used last; None if all are leased."""
        for _ in range(3):  # now, after the reads under way, and after the garbage collector has run
            free = [s for s in self._slots if not s.leases and (s.done is None or s.done.done())]
            if free:
                return max(free, key=lambda s: _when(s, next_use))
            busy = [s for s in self._slots if not s.leases and s.done is not None]
            if busy:
                busy[0].done.exception()  # type: ignore[union-attr]
                continue
            if any(lease.thread != get_ident() for s in self._slots for lease in tuple(s.leases)):
                return None  # it will end
            gc.collect()
        return None

    def _begin_read(self, number: int, slot: _Slot) -> _Slot:
        slot.part = number
        slot.done = self._ahead.submit(self._read_part, number, slot.begin)
        return slot

    def _read_part(self, number: int, begin: int) -> None:
        begun = time.perf_counter()
        index, first, end = self.parts[number]
        experts = range(first, end)
        buffer = self._bytes[begin : begin + self._slot_bytes]
        spans = self.layers[index].spans(experts, range(len(experts)), len(experts))
        num_bytes = self._reader.read(spans, buffer)
        whole = len(self.parts.of_layer[index]) == 1
        self.count(
            bytes_read=num_bytes,
            experts_read=len(experts),
            read_seconds=time.perf_counter() - begun,
            layers_read=int(whole),
            parts_read=int(not whole),
        )

    def _read_ahead(self, number: int, next_use: dict[int, int]) -> None:
        """Begins to read the next parts that are not there, unless they would take the place of an earlier one."""
        for part in sorted(next_use, key=next_use.__getitem__)[: len(self._slots)]:
            if part == number or self._find(part) is not None:
                continue
            free = [s for s in self._slots if not s.leases and (s.done is None or s.done.done())]
            victim = max(free, key=lambda s: _when(s, next_use), default=None)
            if victim is None or _when(victim, next_use) <= next_use[part]:
                return  # all later parts are needed later still
            self._begin_read(part, victim)


def in_huge_pages(num_bytes: int) -> mmap.mmap:
    """Allocate memory in pages of 2 MiB, where the system has them: with small ones a token takes longer."""
    memory = mmap.mmap(-1, num_bytes, **_PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a hint
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


_PRIVATE: Mapping[str, Any] = MappingProxyType(
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
)


def _when(slot: _Slot, next_use: dict[int, int]) -> float:
    """Measure the distance to a buffer's next use: empty ones are furthest, then parts that no use is known of."""
    if slot.part is None:
        return float("inf")
    return next_use.get(slot.part, 1e9)
