"""Ledger: the history of one expert (term, version, request ids, uncommitted updates); ReplyCache: late answers.

A client whose answer was lost sends its gradient again. So that it counts once, the ledger remembers the ids of the
requests that were applied, and a copy of the expert carries them along.

An expert's history is a *log* of updates. Logs are compared by their end, a term and a version: two logs with the same
end are the same, because a term has one leader, which gives each version once. The log up to `committed` is at every
member; the *tail* behind it is kept, for a member may lack some of it. A log runs ahead of the weights (`version`) only
while updates wait for the device. Everything here happens under one lock, the right to make a step included: a step
that the log does not have could be acknowledged and lost.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from fmoe_ext.remote.wire import Message

ID_BYTES = 16  # of a request id
MAX_REMEMBERED_IDS = 1024  # of each expert: a call that is repeated after more others counts as new


class NotLeader(Exception):
    """Another server takes the gradients of this expert."""


@dataclass(frozen=True, order=True)
class Term:
    """One leadership. A server never leads twice with one number, so that no two leaders share a term."""

    number: int = 0
    leader: str = ""

    def meta(self, key: str) -> dict[str, str]:
        """The term as metadata of a message."""
        return {key: str(self.number), f"{key}_leader": self.leader}

    @classmethod
    def read(cls, message: Message, key: str) -> "Term":
        """The term that meta(key) has put into a message; WireError if there is none."""
        return cls(message.number(key), message.meta.get(f"{key}_leader", ""))


@dataclass(frozen=True, order=True)
class End:
    """The last update of a log: logs are ordered by term, then version."""

    term: Term = Term()
    version: int = 0


@dataclass(frozen=True)
class Request:
    """One client's gradient, as it came."""

    request_id: str  # "": the client does not repeat it
    inputs: tuple[torch.Tensor, ...]
    grad: torch.Tensor


@dataclass(frozen=True)
class Update:
    """One step of one expert, in its log."""

    uid: str
    previous: End  # of the log before it
    end: End  # of the log with it
    requests: tuple[Request, ...]  # the same ones in the same order give the same bits
    digest: str = ""  # of the weights after it, "" if not taken


class Ledger:
    """The history of an expert. All methods are safe from any thread; without replicas everything is committed."""

    def __init__(self, is_replicated: bool = False, forget: Callable[[str], None] = lambda _: None) -> None:
        self.lock = threading.RLock()
        self.end = End()  # of the log
        self.start: int | None = 0  # version at which the term of the end began; None: not known
        self.version = 0  # of the weights
        self.committed = 0  # up to here every member has the log
        self.seen = Term()  # the largest in any message or record; smaller ones are refused
        self.broken = ""  # why the weights cannot be trusted
        self.lacks = 0  # version in a damaged checkpoint, which may be in no other replica
        self.applied: OrderedDict[str, int] = OrderedDict()  # request id -> version
        self.num_requests = 0  # gradients applied since the expert began, each counted once
        self.tail: list[Update] = []  # what members may lack
        self.is_replicated = is_replicated
        self._forget = forget  # called with a request id that is remembered no more
        self._leads: Term | None = None
        self._is_open = False

    # ---------------------------------------------------------------- leading

    def lead(self, term: Term) -> End:
        """Begins a term -> where the log ends; steps are refused until open()."""
        with self.lock:
            self._leads, self._is_open = term, False
            self.seen = max(self.seen, term)
            return self.end

    def open(self, term: Term) -> None:
        """Takes steps from now on: every member has this log."""
        with self.lock:
            if self._leads == term:
                self._is_open = True
                self.committed = self.end.version

    def step_down(self) -> None:
        """Takes no steps any more."""
        with self.lock:
            self._leads, self._is_open = None, False

    def check_open(self, uid: str) -> None:
        """Raises NotLeader if no step may be made."""
        if self.is_replicated and not (self._is_open and not self.broken):
            raise NotLeader(f"not the leader of {uid}, or not yet")

    def append(self, uid: str, requests: Sequence[Request], digest: str = "") -> Update:
        """Notes a step that was just made, inside the lock in which check_open() allowed it."""
        with self.lock:
            end = End(self._leads or self.end.term, self.version + 1)
            update = Update(uid, self.end, end, tuple(requests), digest)
            self._move_to(end)
            self._note(update)
            if self.is_replicated:
                self.tail.append(update)
            else:
                self.committed = end.version
            return update

    def commit(self, version: int) -> None:
        """Every member has the log up to version."""
        with self.lock:
            self.committed = max(self.committed, min(version, self.end.version))
            # what waits for the device stays: a copy taken now must name the end that its weights have
            while self.tail and self.tail[0].end.version <= min(self.committed, self.version):
                del self.tail[0]

    def requests_at(self, version: int) -> int:
        """Gradients applied up to a version that is not yet out of the tail."""
        with self.lock:
            later = [update for update in self.tail if version < update.end.version <= self.version]
            return self.num_requests - sum(len(update.requests) for update in later)

    def tail_after(self, end: End) -> list[Update] | None:
        """The updates behind an end of another log; None if the logs are not known to agree there."""
        with self.lock:
            if end == self.end:
                return []
            for n, update in enumerate(self.tail):
                if update.previous == end:
                    return self.tail[n:]
            return None

    # ---------------------------------------------------------------- following

    def see(self, term: Term) -> None:
        """Notes a term; smaller ones are refused from now on."""
        with self.lock:
            self.seen = max(self.seen, term)

    def receive(self, update: Update, committed: int) -> bool:
        """Adds an update of a leader to the log: it has to be applied. False if it is there already.

        ValueError if it does not follow this log.
        """
        with self.lock:
            if update.end == self.end:
                return False
            if update.previous != self.end or self.broken:
                raise ValueError("not the next update")
            self._move_to(update.end)
            self.tail.append(update)
            self.commit(committed)
            return True

    def note_applied(self, update: Update) -> None:
        """The weights have reached an update that was received."""
        with self.lock:
            self._note(update)

    def install(self, end: End, applied: "OrderedDict[str, int]", num_requests: int) -> None:
        """Replaces the history with a copy's."""
        with self.lock:
            self.start = None
            self.end, self.version = end, end.version
            # a copy may hold updates that not every member has yet
            self.committed = 0 if self.is_replicated else end.version
            self.applied, self.num_requests = applied, num_requests
            self.seen = max(self.seen, end.term)
            self.tail.clear()
            self.broken, self.lacks = "", 0

    def _move_to(self, end: End) -> None:
        if end.term != self.end.term:
            self.start = self.end.version
        self.end = end

    def _note(self, update: Update) -> None:
        self.version = update.end.version
        self.num_requests += len(update.requests)
        for request in update.requests:
            if request.request_id:
                self.applied[request.request_id] = update.end.version
        while len(self.applied) > MAX_REMEMBERED_IDS:
            self._forget(self.applied.popitem(last=False)[0])


def pack_ids(ids: Iterable[str]) -> torch.Tensor:
    """Request ids as uint8 [16 * number]; zeros for ""."""
    data = bytearray().join(bytes.fromhex(one or "00" * ID_BYTES) for one in ids)
    if not data:  # frombuffer takes no empty buffer
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(data, dtype=torch.uint8)


def unpack_ids(packed: torch.Tensor) -> list[str]:
    """The request ids of pack_ids()."""
    data = bytes(packed.tolist())
    return [data[n : n + ID_BYTES].hex() for n in range(0, len(data), ID_BYTES)]


class ReplyCache:
    """The latest answers that fit in max_bytes, by expert and request id."""

    def __init__(self, max_bytes: int = 128 << 20):
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._answers: OrderedDict[tuple[str, str], tuple[torch.Tensor, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def put(self, uid: str, request_id: str, tensors: tuple[torch.Tensor, ...]) -> None:
        self.drop(uid, request_id)
        # A part of a larger tensor, of a batch or of a message, would keep all of it.
        tensors = tuple(x if x.untyped_storage().nbytes() <= x.nbytes else x.clone() for x in tensors)
        self._answers[uid, request_id] = tensors
        self.num_bytes += _size(tensors)
        while self.num_bytes > self.max_bytes:
            self.drop(*next(iter(self._answers)))

    def get(self, uid: str, request_id: str) -> tuple[torch.Tensor, ...] | None:
        return self._answers.get((uid, request_id))

    def forget(self, uid: str) -> None:
        """Drops the answers of one expert."""
        for key in [key for key in self._answers if key[0] == uid]:
            self.drop(*key)

    def drop(self, uid: str, request_id: str) -> None:
        self.num_bytes -= _size(self._answers.pop((uid, request_id), ()))


def _size(tensors: tuple[torch.Tensor, ...]) -> int:
    return sum(x.nbytes for x in tensors)
