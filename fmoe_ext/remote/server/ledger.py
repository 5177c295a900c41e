"""Ledger: the history of one expert. ReplyCache: answers to gradients, for when their clients ask again.

ExpertHost adds each step, and replication/ compares the histories of servers. A client whose answer was lost sends its
gradient again. So that it counts once, the ledger remembers the ids of the requests that were applied, and a copy of
the expert carries them along.

An expert's history is a *log* of updates. Each has a version, which counts up by 1, and the term of its leader:
    log        ... 7  8  9  10  11  12    its end is the (term, version) of the last update
    committed  ... 7  8                   every member has the log up to here
    tail                 9  10  11  12    the updates after it are kept, because a member may lack some
    weights    ... 7  8  9  10  11        `version`: 12 has come from the leader and waits for the device
Two logs with the same end are the same, because a term has one leader, which gives each version once. All of this
changes under one lock, the right to make a step too: a step that the log lacks could be acknowledged and lost.
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
    """This server does not take the gradients of the expert, or not yet."""


@dataclass(frozen=True, order=True)
class Term:
    """One leadership, ordered by number, then by the leader's name. No server leads twice with one number."""

    number: int = 0
    leader: str = ""

    def meta(self, key: str) -> dict[str, str]:
        """Return the term as metadata of a message."""
        return {key: str(self.number), f"{key}_leader": self.leader}

    @classmethod
    def read(cls, message: Message, key: str) -> "Term":
        """Return the term that meta(key) has put into a message; WireError if there is none."""
        return cls(message.number(key), message.meta.get(f"{key}_leader", ""))


@dataclass(frozen=True, order=True)
class End:
    """The last update of a log. Logs are ordered by term, then version: a longer log of an older term is smaller."""

    term: Term = Term()
    version: int = 0


@dataclass(frozen=True)
class Request:
    """One client's gradient, as it came."""

    request_id: str  # "": the client does not send it again
    inputs: tuple[torch.Tensor, ...]
    grad: torch.Tensor


@dataclass(frozen=True)
class Update:
    """One step of one expert, as an entry of its log."""

    uid: str
    previous: End  # of the log before it
    end: End  # of the log with it
    requests: tuple[Request, ...]  # a replica that repeats them in this order gets the same bits
    digest: str = ""  # of the weights after it; "": not taken

    @property
    def num_bytes(self) -> int:
        return sum(_size((*request.inputs, request.grad)) for request in self.requests)


class Ledger:
    """The history of an expert; its methods are safe from any thread. Without replicas all updates are committed."""

    def __init__(self, is_replicated: bool = False, forget: Callable[[str], None] = lambda _: None) -> None:
        self.lock = threading.RLock()
        self.end = End()  # of the log
        self.start: int | None = 0  # version at which the term of the end began; None: not known
        self.version = 0  # of the weights
        self.committed = 0  # up to here every member has the log
        self.seen = Term()  # the largest term in any message or record; messages of smaller ones are refused
        self.broken = ""  # why the weights cannot be trusted; "": they can
        # version in this server's damaged checkpoint, which no other replica may have; 0: none
        self.lacks = 0
        self.applied: OrderedDict[str, int] = OrderedDict()  # request id -> version
        self.num_requests = 0  # gradients applied since the expert began, each counted once
        self.tail: list[Update] = []  # updates that members may lack
        self.is_replicated = is_replicated
        self._forget = forget  # called with each request id that is not remembered any more
        self._leads: Term | None = None  # of which this server is the leader
        self._is_open = False  # steps may be made

    # ---------------------------------------------------------------- leading

    def lead(self, term: Term) -> End:
        """Begin a term -> the end of the log; steps are refused until open()."""
        with self.lock:
            self._leads, self._is_open = term, False
            self.seen = max(self.seen, term)
            return self.end

    def open(self, term: Term) -> None:
        """Allow steps from now on: every member has this log. Ignored if the term is over by now."""
        with self.lock:
            if self._leads == term:
                self._is_open = True
                self.committed = self.end.version

    def step_down(self) -> None:
        """End the term: steps are refused."""
        with self.lock:
            self._leads, self._is_open = None, False

    def check_open(self, uid: str) -> None:
        """Raise NotLeader if no step may be made; the caller holds the lock until append()."""
        if self.is_replicated and not (self._is_open and not self.broken):
            raise NotLeader(f"not the leader of {uid}, or not yet")

    def append(self, uid: str, requests: Sequence[Request], digest: str = "") -> Update:
        """Note a step that was just made; the caller has held the lock since check_open() allowed it."""
        with self.lock:
            # without replicas there are no terms
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
        """Note that every member has the log up to a version, and drop that part of the tail."""
        with self.lock:
            self.committed = max(self.committed, min(version, self.end.version))
            # except updates that wait for the device: a copy of now must name the end that its weights have
            while self.tail and self.tail[0].end.version <= min(self.committed, self.version):
                del self.tail[0]

    def requests_at(self, version: int) -> int:
        """Return how many gradients were applied up to a version, which is committed or in the tail."""
        with self.lock:
            later = [update for update in self.tail if version < update.end.version <= self.version]
            return self.num_requests - sum(len(update.requests) for update in later)

    def tail_after(self, end: End) -> list[Update] | None:
        """Return the updates that a log with this end lacks; None if it is not known to be a part of this one."""
        with self.lock:
            if end == self.end:
                return []
            for n, update in enumerate(self.tail):
                if update.previous == end:
                    return self.tail[n:]
            return None

    # ---------------------------------------------------------------- following

    def see(self, term: Term) -> None:
        """Note a term, so that messages of smaller ones are refused."""
        with self.lock:
            self.seen = max(self.seen, term)

    def receive(self, update: Update, committed: int) -> bool:
        """Add a leader's update to the log -> True if it has to be applied, False if the log had it already.

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
        """Note that an update which was received has been applied to the weights."""
        with self.lock:
            self._note(update)

    def install(self, end: End, applied: "OrderedDict[str, int]", num_requests: int) -> None:
        """Replace the history by a copy's."""
        with self.lock:
            self.start = None  # a copy does not say it
            self.end, self.version = end, end.version
            # 0: the copy may hold updates that not every member has yet
            self.committed = 0 if self.is_replicated else end.version
            self.applied, self.num_requests = applied, num_requests
            self.seen = max(self.seen, end.term)
            self.tail.clear()
            self.broken, self.lacks = "", 0

    def trust(self) -> str:
        """Take broken weights for sound, because no others are left -> why they were broken. The log ends with them."""
        with self.lock:
            why, self.broken = self.broken, ""
            while self.tail and self.tail[-1].end.version > self.version:  # received, and never applied
                self.end, self.start = self.tail.pop().previous, None
            return why

    def _move_to(self, end: End) -> None:
        if end.term != self.end.term:  # the first update of a term
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
    """Return request ids as uint8 [16 * number]; zeros for ""."""
    data = bytearray().join(bytes.fromhex(one or "00" * ID_BYTES) for one in ids)
    if not data:  # frombuffer takes no empty buffer
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(data, dtype=torch.uint8)


def unpack_ids(packed: torch.Tensor) -> list[str]:
    """Return the request ids that pack_ids() was given, with 32 zeros for ""."""
    data = bytes(packed.tolist())
    return [data[n : n + ID_BYTES].hex() for n in range(0, len(data), ID_BYTES)]


_MAX_REPLY_BYTES = 128 << 20  # of the answers in a ReplyCache


class ReplyCache:
    """The latest answers to gradients, by expert and request id. For the computing thread."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._answers: OrderedDict[tuple[str, str], tuple[torch.Tensor, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def put(self, uid: str, request_id: str, tensors: tuple[torch.Tensor, ...]) -> None:
        self.drop(uid, request_id)
        # copied if it is a part of a larger tensor, of a batch or a message, all of which it would keep alive
        tensors = tuple(x if x.untyped_storage().nbytes() <= x.nbytes else x.clone() for x in tensors)
        self._answers[uid, request_id] = tensors
        self.num_bytes += _size(tensors)
        while self.num_bytes > _MAX_REPLY_BYTES:
            self.drop(*next(iter(self._answers)))

    def get(self, uid: str, request_id: str) -> tuple[torch.Tensor, ...] | None:
        return self._answers.get((uid, request_id))

    def forget(self, uid: str) -> None:
        """Drop the answers of one expert."""
        for key in [key for key in self._answers if key[0] == uid]:
            self.drop(*key)

    def drop(self, uid: str, request_id: str) -> None:
        self.num_bytes -= _size(self._answers.pop((uid, request_id), ()))


def _size(tensors: tuple[torch.Tensor, ...]) -> int:
    return sum(x.nbytes for x in tensors)
