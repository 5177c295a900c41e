"""Keep experts of a streamed model in a fixed number of bytes, and read the next ones while these compute.

budget.py says how many bytes a Pool has; Streamed (experts.py) asks it for weights: whole(), part() or chosen(), and
again() in a backward. With memory for two layers a *part* is a layer. With less, a layer is cut so that PARTS parts
fit, or more. A step uses the parts in an order that is known beforehand. With three layers, 2' being the backward of
layer 2:

    training    0 1 2 | 2 2' 1 1' 0 0' | 0 1 2 ...    a checkpoint repeats the forward of a layer before its backward,
                                                      which goes through the parts of the layer in reverse
    generation  0 1 2 | 0 1 2 | 0 1 2 ...

The memory is used in one of two ways at a time:

slots   For many tokens: a slot holds a part. The next parts are read while this one computes, each over the one whose
        next use is furthest (Belady's rule: no other choice needs fewer reads).
caches  For few tokens in eval() without gradients, unless every layer has a slot: each layer has a region with slots
        for single experts. Which ones a token chooses is not known beforehand, so the least recently used gives its
        slot up.

A use of a slot is a *lease*, which ends when the last tensor over its memory is gone. Threads share the buffers: while
another thread has a lease of a slot, the slot is not read over, freed or resized. A read waits for a free slot; a new
size of the buffers waits for a later step, and parts keep their size while a backward may ask for them by number.

Locks, in this order: `turn` is held while a thread computes with chosen experts, and while slots are replaced; `_lock`
guards the state of slots; `_counting` the statistics. Finalisers run anywhere, inside of any of them, so they take none
(_end).
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

PARTS = 4  # the fewest slots where a layer is cut: one computes while others are read


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
    """The parts of all layers, numbered in the order of the forward. size: experts of a part, 0 for whole layers."""

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
        """Yield the numbers of parts in the order in which they are used after this use of part `number`.

        A number may come several times; callers look at its first place.
        """
        layer = self._parts[number].layer
        every = range(len(self._parts))
        if phase is Phase.FORWARD:
            yield from every[number + 1 :]
            # then the whole backward, or in generation the forward of the next token
            yield from self._by_layer_backwards(len(self.of_layer)) if is_training else every
            return
        # the rest of this layer: its repeated forward, and its backward in reverse
        if phase is Phase.REPEATED:
            yield from range(number + 1, self.of_layer[layer].stop)
            yield from reversed(self.of_layer[layer])
        else:
            yield from range(number - 1, self.of_layer[layer].start - 1, -1)
        # the backward of the layers before it, and the forward of the next step
        yield from self._by_layer_backwards(layer)
        yield from every

    def _by_layer_backwards(self, end: int) -> Iterator[int]:
        for parts in reversed(self.of_layer[:end]):
            yield from parts


def plan_buffers(layers: Sequence[Layer], num_bytes: int) -> tuple[int, int]:
    """Return (experts of a part, 0 for all of a layer; number of buffers); ValueError for too few bytes."""
    whole = bytes_of_experts(layers)
    # two whole layers: one computes while the next is read
    if num_bytes >= whole * min(2, len(layers)):
        return 0, min(num_bytes // whole, len(layers))
    # parts together take the memory of one layer at most: more hides no more reads, and activations need the rest.
    # A layer of fewer than PARTS experts is smaller than the least that parts need.
    num_bytes = min(num_bytes, max(whole, PARTS * bytes_of_experts(layers, 1)))
    size = max(layer.num_experts for layer in layers)
    while size and num_bytes // bytes_of_experts(layers, size) < PARTS:
        size -= 1
    if not size:
        raise ValueError(f"{num_bytes:,} bytes do not hold {PARTS} experts")
    return size, num_bytes // bytes_of_experts(layers, size)


def bytes_of_experts(layers: Sequence[Layer], count: int = 0) -> int:
    """Count the bytes of a buffer that holds `count` experts (0: all) of whichever layer is largest."""
    step = ALIGNED if count else BLOCK  # a whole layer begins where O_DIRECT may write
    sizes = (layer.num_bytes(min(count or layer.num_experts, layer.num_experts)) for layer in layers)
    return -(-max(sizes) // step) * step


@dataclass
class Statistics:
    """Counts since the last ExpertStream.reset_statistics()."""

    layers_read: int = 0
    parts_read: int = 0  # where two layers do not fit into the buffers
    experts_read: int = 0
    bytes_read: int = 0
    hits: int = 0  # experts that few tokens chose, and that were there
    misses: int = 0
    tokens: int = 0  # in calls that read chosen experts
    read_seconds: float = 0.0
    waited_seconds: float = 0.0  # in which the computation had to wait for the read of a part that it uses
    buffer_bytes: int = 0  # most memory that buffers had

    @property
    def hidden_share(self) -> float:
        """Share of the time of reading in which something else was computed; 1 if nothing was read."""
        return 1.0 - min(1.0, self.waited_seconds / self.read_seconds) if self.read_seconds else 1.0

    @property
    def bytes_per_token(self) -> float:
        """All bytes read, a prompt's layers among them, over the tokens of calls that read chosen experts."""
        return self.bytes_read / self.tokens if self.tokens else 0.0


# Seconds in which no lease ends, after which the leases of other threads, too, count as kept by autograd.
PATIENCE = 60.0


class Lease:
    """A thread's use of a slot, alive as long as tensors are over its memory; or a graph whose backward reads parts."""

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
        # [slots]: expert in each slot, or the last that was there; 0 before the first
        self.order = torch.zeros(num_slots, dtype=torch.int64, device="cpu")
        self._slots: OrderedDict[int, int] = OrderedDict()  # {expert: slot}, least recently used first
        self._free = list(range(num_slots))

    def make_room(self, experts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Free slots for experts that are not there -> (the experts to read, slots for them).

        The slots hold no expert until put(), so that a read that fails leaves no slot with the weights of another one.
        """
        missing = [e for e in experts if e not in self._slots]
        for e in experts:  # first, or the loop below might free the slot of one that is needed now
            if e in self._slots:
                self._slots.move_to_end(e)
        while len(self._free) < len(missing):
            expert, slot = self._slots.popitem(last=False)
            self.place[expert] = -1
            self._free.append(slot)
        return missing, self._free[: len(missing)]

    def put(self, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Note experts that were read into slots."""
        for expert, slot in zip(experts, slots, strict=True):
            self._free.remove(slot)
            self._slots[expert] = slot
            self.place[expert], self.order[slot] = slot, expert


class Pool:
    """The buffers of all layers. num_bytes: of all together; through_cache: of Reader.

    Raises ValueError if num_bytes do not hold PARTS experts of the largest layer.
    """

    def __init__(self, layers: Sequence[Layer], num_bytes: int, through_cache: bool = False) -> None:
        self.layers = tuple(layers)
        self.statistics = Statistics()
        self._counting = Lock()  # for the statistics, which threads change that hold different locks
        self._num_bytes = 0
        # one block for all that may come: resize() and the two ways of use cut it anew, and free its pages by madvise
        self._memory = in_huge_pages(min(num_bytes, self.layer_bytes * len(layers)) // BLOCK * BLOCK)
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8)
        self.address = int(self._bytes.ctypes.data)
        paths = {span.path for layer in layers for span in layer.every_span()}
        self._reader = Reader(paths, through_cache)
        # one part at a time, in the order of their use
        self._ahead = ThreadPoolExecutor(1, "fmoe_ext read ahead")
        self._lock = Lock()
        self.turn = RLock()  # held while chosen experts are computed with, which other reads would replace
        self._inside: Counter[int] = Counter()  # {thread: how many of its calls are inside used()}
        self._graphs: weakref.WeakSet[Lease] = weakref.WeakSet()  # given by graph(), while their graphs live
        # one for each thread that waits for a slot; gets an entry whenever a lease ends
        self._waiting: list[SimpleQueue[None]] = []
        self._slots: list[_Slot] = []  # empty while the memory is used by caches, or given back
        self._size = 0  # experts of a part, 0 for all of a layer
        self._caches: list[_Cache] = []  # one a layer; empty while slots have the memory
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
        """Keep the sizes and contents of the buffers as they are inside the block, also where it takes no lease."""
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
        """List the leases that forbid parts of another size, and fewer buffers."""
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
        """Give the buffers another number of bytes, at most that of the start; emptied unless the same slots remain.

        Does nothing while other threads compute with them: a later step asks again. Raises RuntimeError between a
        forward and its backward.
        """
        num_bytes = min(num_bytes, self._bytes.size)
        plan = plan_buffers(self.layers, num_bytes)
        with self.turn, self._lock:
            # the same slots: nothing has to be read again
            if self._slots and plan == plan_buffers(self.layers, self._num_bytes):
                self._num_bytes = num_bytes
                return
            held = self._leases(plan[0])
            if {*self._inside, *(lease.thread for lease in held)} - {get_ident()}:
                return
            self._settle()
            if held:
                gc.collect()  # graphs that nobody reaches any more still hold leases
            if self._leases(plan[0]):
                raise RuntimeError("buffers of experts cannot shrink between a forward and its backward")
            self._num_bytes = num_bytes
            self._size, self._most_slots = plan
            self._slot_bytes = bytes_of_experts(self.layers, self._size)
            self.parts = Parts(self.layers, self._size)
            self._forget()

    def forget(self) -> None:
        """Give the memory of the buffers back until they are read again; do nothing while tensors use it."""
        with self.turn, self._lock:
            self._settle()
            if not self._inside and not self._leases(self._size):
                self._forget()

    def whole(self, index: int, *, is_backward: bool, is_training: bool) -> Weights:
        """Return the weights of a layer that is one part, reading it if need be.

        Its slot is free again when the last tensor over the weights is gone. Raises RuntimeError if tensors that
        autograd keeps have all slots.
        """
        layer = self.layers[index]
        # Every layer has its slot for good, and no graph outlives the call: generation needs no lease, and makes the
        # tensors of a layer once, not for each token.
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
        """Return the weights of a part, as whole() does for a layer."""
        part = self.parts[number]  # the last part of a layer may have fewer experts
        return self.layers[part.layer].weights(self._lease(number, phase, is_training), part.end - part.begin)

    def again(
        self, index: int, offset: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> torch.Tensor:
        """Return one tensor of a layer's weights in a backward, by its place in the layer's buffer (layer_at)."""
        buffer = torch.from_numpy(self._lease(self.parts.of_layer[index].start, Phase.BACKWARD, True))
        # view() wants whole elements: the buffer ends where a page does
        values = buffer[: buffer.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        return values.as_strided(shape, stride, offset // dtype.itemsize)

    def _lease(self, number: int, phase: Phase, is_training: bool) -> "np.ndarray[Any, Any]":
        """Lease the slot of a part -> its bytes, whose end of life ends the lease; read the part if no slot has it."""
        # {part: distance}, by which Belady's rule chooses the slot to read over
        next_use: dict[int, int] = {}
        for distance, part in enumerate(self.parts.after(number, phase, is_training)):
            next_use.setdefault(part, distance)
        # Find a slot, or wait for one. The lease is taken under the lock that finds it, or another thread might read
        # over it.
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
        # Wait for the read, without the lock: other threads go on.
        assert done is not None
        begun = time.perf_counter()
        try:
            done.result()
        except BaseException:
            self._end(slot, lease)
            with self._lock:
                # A failed read leaves an empty slot. Not done(): Ctrl-C ended the wait, and the read goes on. Another
                # `done`: a thread has begun the read again.
                if done.done() and slot.done is done:
                    slot.part = slot.done = None
            raise
        self.count(waited_seconds=time.perf_counter() - begun)
        # Begin the next reads, then hand the slot out: a fresh view, so that its finaliser is this lease's.
        with self._lock:
            self._note_buffers(len(self._slots) * self._slot_bytes)
            self._read_ahead(number, next_use)
        buffer = self._bytes[slot.begin : slot.begin + self._slot_bytes]
        weakref.finalize(buffer, self._end, slot, lease)
        return buffer

    def _end(self, slot: _Slot, lease: Lease) -> None:
        """End a lease. A finaliser, which runs wherever the garbage collector does: it takes no lock."""
        slot.leases.discard(lease)
        for waiting in tuple(self._waiting):
            waiting.put(None)  # of SimpleQueue, whose put() may interrupt itself

    def _wait(self, released: SimpleQueue[None]) -> None:
        """Wait until a lease ends; RuntimeError if none does, because autograd keeps the weights."""
        try:
            with self._lock:
                others = any(lease.thread != get_ident() for s in self._slots for lease in tuple(s.leases))
                # a lease ended before `released` was in the list
                free = any(not slot.leases for slot in self._slots)
            if not free:
                # this thread's own leases cannot end while it waits
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
        """Read experts into the cache of their layer, where they stay until the next call; the caller holds `turn`.

        None if its slots are too few, or tensors are over the slots of parts. Raises CheckpointError.
        """
        layer = self.layers[index]
        # Make the caches, over the memory of the slots.
        with self._lock:
            if not self._caches:
                if any(slot.leases for slot in self._slots):
                    return None
                # equal regions, all of as many slots: what fits for every layer, at most the experts of the smallest
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
        # Read what is missing. Nothing else computes meanwhile: a token waits for its experts.
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
        """Add to the counters of these names in the statistics."""
        with self._counting:
            for name, amount in amounts.items():
                setattr(self.statistics, name, getattr(self.statistics, name) + amount)

    def _note_buffers(self, num_bytes: int) -> None:
        with self._counting:
            self.statistics.buffer_bytes = max(self.statistics.buffer_bytes, num_bytes)

    def _forget(self) -> None:
        self._slots, self._caches, self._described = [], [], {}
        if hasattr(mmap, "MADV_DONTNEED"):  # the pages go back to the system, the addresses stay ours
            self._memory.madvise(mmap.MADV_DONTNEED)

    def _settle(self) -> None:
        """Wait for reads that are under way; they take no lock but `_counting`, so the caller may hold the others."""
        for slot in self._slots:
            if slot.done is not None:
                slot.done.exception()

    def _find(self, number: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.part == number), None)

    def _victim(self, next_use: dict[int, int]) -> _Slot | None:
        """Choose the slot to read a part into: an empty one, or the one used again last; None if all are leased."""
        for _ in range(3):  # now, after the reads under way, and after the garbage collector has run
            free = [s for s in self._slots if not s.leases and (s.done is None or s.done.done())]
            if free:
                return max(free, key=lambda s: _when(s, next_use))
            busy = [s for s in self._slots if not s.leases and s.done is not None]
            if busy:
                busy[0].done.exception()  # type: ignore[union-attr]  # waits for the read
                continue
            if any(lease.thread != get_ident() for s in self._slots for lease in tuple(s.leases)):
                return None  # it will end
            gc.collect()  # graphs that nobody reaches any more still hold leases
        return None

    def _begin_read(self, number: int, slot: _Slot) -> _Slot:
        """Give a slot to a part, and queue its read."""
        slot.part = number
        slot.done = self._ahead.submit(self._read_part, number, slot.begin)
        return slot

    def _read_part(self, number: int, begin: int) -> None:
        """Read a part into the slot at a byte of the memory; in the thread that reads ahead."""
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
        """Begin to read the next parts that are not there, unless they would take the place of an earlier one."""
        for part in sorted(next_use, key=next_use.__getitem__)[: len(self._slots)]:  # no more of them fit
            if part == number or self._find(part) is not None:
                continue
            free = [s for s in self._slots if not s.leases and (s.done is None or s.done.done())]
            victim = max(free, key=lambda s: _when(s, next_use), default=None)
            if victim is None or _when(victim, next_use) <= next_use[part]:
                return  # all later parts are needed later still
            self._begin_read(part, victim)


def in_huge_pages(num_bytes: int) -> mmap.mmap:
    """Allocate memory in pages of 2 MiB, where the system has them: weights are read from them up to twice as fast."""
    memory = mmap.mmap(-1, num_bytes, **_PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages refuses; small ones do
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


_PRIVATE: Mapping[str, Any] = MappingProxyType(
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
)


def _when(slot: _Slot, next_use: dict[int, int]) -> float:
    """Measure the distance to a slot's next use: empty ones are furthest, then parts of which no use is known."""
    if slot.part is None:
        return float("inf")
    return next_use.get(slot.part, 1e9)
