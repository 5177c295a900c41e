"""Queue calls, for memory (ByteBudget) and then for the device (FairQueue): bounded, and fair among peers.

A server that takes all that comes dies of the one client that sends too much. So a call first waits for memory, by the
size that it announces, before a byte of it is read; then it waits in the queue of its peer until the device is free.
    bounded   a call that finds no room in a queue is refused at once, and its caller may go elsewhere
    fair      a peer has half of the memory at most, or one call; the device takes a call of each peer in turn, so that
              a thousand calls of one peer delay another peer's call by one call and not by a thousand
    batched   waiting calls of one kind, forward or backward, are computed together, as many as fit
ByteBudget, which Intake (service.py) asks, lives on the event loop and needs no lock. FairQueue hands jobs from the
loop to the thread that computes.
"""

import asyncio
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from fmoe_ext.memory import limits
from fmoe_ext.remote.protocol import WINDOW_BYTES
from fmoe_ext.remote.wire import STATE

# bytes in grpc's windows that may wait, even if ByteBudget's limit is lower
LEAST_WAITING = 16 * WINDOW_BYTES
# a batch becomes an update's message, where ids and rows are tensors too
_MAX_BATCH_TENSORS = STATE.max_tensors - 8


def share_of_memory(part: int) -> int | None:
    """Return 1 / part of the memory in bytes, the machine's or its cgroups' if that is less; None if it is unknown."""
    sizes = [limit.num_bytes for limit in limits()]
    return max(1, min(sizes) // part) if sizes else None


class QueueFull(Exception):
    """No more calls may wait; the caller should try again later or elsewhere."""


class DeadlinePassed(Exception):
    """The call's deadline is over: its caller waits no more."""


@dataclass
class Job:
    """A call that waits."""

    uid: str
    inputs: tuple[torch.Tensor, ...]
    # called once, with an Answer or an exception, from any thread
    done: Callable[[object], None]
    grad: torch.Tensor | None = None  # of the output; None: a forward call
    request_id: str = ""  # "": the client does not repeat it
    seen_version: int | None = None  # of the weights in the caller's forward
    peer: str = ""  # the caller's name, or address
    deadline: float = float("inf")  # time.monotonic()
    arrived: float = field(default_factory=time.monotonic)

    @property
    def is_backward(self) -> bool:
        return self.grad is not None

    @property
    def num_rows(self) -> int:
        return self.inputs[0].shape[0]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.inputs, *([] if self.grad is None else [self.grad])]

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.tensors)


@dataclass
class Held:
    """The bytes that a call holds of a ByteBudget."""

    budget: "ByteBudget"
    peer: str  # the caller's name, or address
    count: int  # bytes

    def resize(self, count: int) -> None:
        """Hold `count` bytes from now on; QueueFull, at once, if there is no room for more than before."""
        more = count - self.count
        if more > 0 and not self.budget.has_room(self.peer, more, own=self.count):
            raise QueueFull(f"no room for a call of {count} bytes: {self.budget}")
        self.count = count
        self.budget.add(self.peer, more)

    async def wait_for(self, count: int, seconds: float) -> None:
        """Hold `count` bytes instead, as soon as there is room for them; QueueFull after `seconds`."""
        # hold nothing while waiting: two calls that wait for each other's bytes would wait in vain
        self.release()
        self.count = (await self.budget.take(self.peer, min(count, self.budget.limit), seconds)).count

    def move(self) -> "Held":
        """Give these bytes to a new holder, which is returned; this one holds none any more."""
        other, self.count = Held(self.budget, self.peer, self.count), 0
        return other

    def release(self) -> None:
        """Give back all bytes; may be called again."""
        self.resize(0)


class ByteBudget:
    """The bytes of calls under way, on one event loop: `limit` in all, of which a peer has half at most, or one call.

    Calls that wait are admitted in the order of their arrival, passing over peers that have their share. They cost
    memory too: grpc buffers a window of each before it is read. These windows are counted apart and bounded alike; a
    call beyond that is refused at once.
    """

    def __init__(self, limit: int, max_waiting: int = 4096):
        self.limit, self.max_waiting = limit, max_waiting
        self.num_bytes = 0  # held
        self.on_idle: Callable[[], None] = lambda: None  # called when nothing is held any more
        self._of_peer: Counter[str] = Counter()  # bytes held
        # peer and bytes, in the order of arrival
        self._waiting: dict[asyncio.Future[None], tuple[str, int]] = {}

    def __str__(self) -> str:
        return f"calls of {self.num_bytes} bytes are under way, at most {self.limit} (--max_bytes_in_flight)"

    async def take(self, peer: str, count: int, seconds: float) -> Held:
        """Wait until there is room for a call -> its Held, to be released; QueueFull after `seconds`, or at once."""
        # 1. there is room, and no other call was first
        if not self._waiting and self.has_room(peer, count):
            self.add(peer, count)
            return Held(self, peer, count)
        # 2. may it wait? Its window, and those that wait already, must fit
        others = [(name, min(size, WINDOW_BYTES)) for name, size in self._waiting.values()]
        of_peer = [size for name, size in others if name == peer]
        size, most = min(count, WINDOW_BYTES), max(self.limit, LEAST_WAITING)
        is_too_much = size + sum(other for _, other in others) > most or size + sum(of_peer) > most // 2
        if is_too_much or len(others) >= self.max_waiting:
            raise QueueFull(
                f"{len(others)} calls wait for memory, {len(of_peer)} of them of {peer}, and no more may: {self}"
            )
        # 3. wait for its turn
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = peer, count
        self._admit()  # it may pass calls whose peers have their share already
        try:
            await asyncio.wait_for(asyncio.shield(turn), seconds)
        except BaseException as error:
            if self._waiting.pop(turn, None) is None:  # it gave up just when it was admitted
                self.add(peer, -count)
            self._admit()
            if isinstance(error, asyncio.TimeoutError):
                text = f"no room for a call of {count} bytes within {seconds:.1f} s: {self}"
                raise QueueFull(text) from None
            raise
        return Held(self, peer, count)

    def has_room(self, peer: str, count: int, own: int = 0) -> bool:
        """True if a call of a peer that holds `own` bytes may hold `count` more."""
        of_peer = self._of_peer[peer]
        # a peer's only call may be larger than its share, or large calls would be refused for ever
        is_fair = of_peer == own or of_peer + count <= self.limit // 2
        return is_fair and self.num_bytes + count <= self.limit

    def add(self, peer: str, count: int) -> None:
        """Count bytes of a peer, negative ones as free again; calls that wait get what has become free."""
        self.num_bytes += count
        self._of_peer[peer] += count
        if not self._of_peer[peer]:
            del self._of_peer[peer]
        if count < 0:
            self._admit()
            if not self.num_bytes:
                self.on_idle()

    def _admit(self) -> None:
        for turn, (peer, count) in list(self._waiting.items()):
            if self.num_bytes + count > self.limit:
                break  # smaller calls behind it must wait too, or they could pass it for ever
            if not turn.done() and self.has_room(peer, count):
                del self._waiting[turn]
                self.add(peer, count)
                turn.set_result(None)


class FairQueue:
    """Jobs in the order of arrival for each peer, peers in turn; and tasks, which run alone before the next batch."""

    def __init__(
        self,
        max_waiting: int = 4096,
        max_of_peer: int = 1024,
        max_batch_rows: int = 4096,
        max_batch_bytes: float = float("inf"),
    ):
        self.max_waiting = max_waiting  # calls in all
        self.max_of_peer = max_of_peer  # calls of one peer, so that none can fill the queue alone
        self.max_batch_rows = max_batch_rows  # exceeded only by a single call
        self.max_batch_bytes = max_batch_bytes  # of the tensors of a batch
        self._peers: OrderedDict[str, deque[Job]] = OrderedDict()  # in the order in which their turn comes
        self._tasks: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()  # its lock guards the jobs, the tasks and their number
        self._num_waiting = 0  # jobs
        self._closed = False

    def __len__(self) -> int:
        return self._num_waiting

    def count(self, uid: str) -> int:
        """Return how many calls wait for an expert."""
        with self._changed:
            return sum(job.uid == uid for jobs in self._peers.values() for job in jobs)

    def put(self, job: Job) -> None:
        """Add a job; QueueFull if the queue or the peer's share of it is full, or after close()."""
        with self._changed:
            waiting = self._peers.get(job.peer, ())
            if self._closed or self._num_waiting >= self.max_waiting or len(waiting) >= self.max_of_peer:
                raise QueueFull(f"{self._num_waiting} calls wait, {len(waiting)} of them from {job.peer}")
            self._peers.setdefault(job.peer, deque()).append(job)
            self._num_waiting += 1
            self._changed.notify()

    def put_task(self, task: Callable[[], None]) -> None:
        """Add a function for the computing thread; such functions run in the order in which they were added."""
        with self._changed:
            self._tasks.append(task)
            self._changed.notify()

    def close(self) -> None:
        """Admit nothing new; take() returns None once all that waits is taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def take(self) -> list[Job] | Callable[[], None] | None:
        """Wait for work -> a task, a batch of jobs that are all forward or all backward, or None after close().

        The batch is empty if the deadlines of all have passed.
        """
        with self._changed:
            while not (self._tasks or self._num_waiting or self._closed):
                self._changed.wait()
            if self._tasks:
                return self._tasks.popleft()
            if not self._num_waiting:
                return None
            batch: list[Job] = []
            expired: list[Job] = []
            sums: tuple[int, ...] = (0, 0, 0)  # rows, tensors and bytes of the batch
            # a backward batch may become one update of one expert, which followers must accept
            limits = self.max_batch_rows, _MAX_BATCH_TENSORS, self.max_batch_bytes
            now = time.monotonic()
            passed = 0  # peers in a row whose next job does not fit
            # round robin: one job of each peer in turn, until no peer's next job fits
            while self._peers and passed < len(self._peers):
                peer, waiting = next(iter(self._peers.items()))
                self._peers.move_to_end(peer)
                job = waiting[0]
                sizes = job.num_rows, len(job.tensors), job.num_bytes
                grown = tuple(map(sum, zip(sums, sizes, strict=True)))
                is_full = any(size > limit for size, limit in zip(grown, limits, strict=True))
                if job.deadline <= now:
                    expired.append(self._pop(peer))
                elif batch and (is_full or job.is_backward != batch[0].is_backward):
                    passed += 1
                else:
                    batch.append(self._pop(peer))
                    sums, passed = grown, 0
            for job in expired:
                waited = f"{now - job.arrived:.1f} s in the queue"
                job.done(DeadlinePassed(f"the deadline passed after {waited}"))
            return batch

    def _pop(self, peer: str) -> Job:
        self._num_waiting -= 1
        waiting = self._peers[peer]
        job = waiting.popleft()
        if not waiting:
            del self._peers[peer]
        return job
