"""Replica: what one server knows of one expert: its role, its log's end, and as a leader its followers."""

import asyncio
import enum
from dataclasses import dataclass, field

from fmoe_ext.remote.replication.messages import Entry
from fmoe_ext.remote.replication.sender import Sender
from fmoe_ext.remote.wire import WireError


class Role(enum.Enum):
    IDLE = "idle"  # has some state, or none, and nobody counts on it
    JOINING = "joining"  # takes a copy; updates wait
    FOLLOWER = "follower"
    LEADER = "leader"


class Fenced(Exception):
    """A message of a leader that was followed by another."""


class LogGap(WireError):
    """The entry is not the next one of this replica's log: it has to take a copy."""


@dataclass
class Replica:
    """fence: the highest ever seen; version, last_fence: of the last entry received; server: whom it follows."""

    uid: str
    role: Role = Role.IDLE
    fence: int = 0
    version: int = 0
    last_fence: int = 0
    members: dict[str, str] = field(default_factory=dict)  # as its leader wrote them: server, endpoint
    senders: dict[str, Sender] = field(default_factory=dict)
    early: list[Entry] = field(default_factory=list)  # that came while it was joining
    commits: set["asyncio.Task[None]"] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one change of members at a time
    is_closing: bool = False  # its leader hands over: no new gradients
    host_asked: float = 0.0  # when another server was last asked to join
    offered: float = 0.0  # when the state was first offered for recovery

    def accept(self, entry: Entry) -> bool:
        """Whether an entry is to be applied now; raises Fenced or LogGap if it is out of place."""
        if entry.fence < self.fence or (entry.fence == self.fence and self.role is Role.LEADER):
            raise Fenced(f"fence {entry.fence} of {self.uid} is over, {self.fence} leads")
        self.fence = entry.fence
        if self.role is Role.JOINING:
            self.early.append(entry)
            return False
        expected = self.version + (entry.update is not None)
        if self.role is not Role.FOLLOWER or entry.version != expected or entry.last_fence != self.last_fence:
            raise LogGap(
                f"{self.uid} is {self.role.value} at version {self.version} of fence {self.last_fence}; entry "
                f"{entry.version} after fence {entry.last_fence} is not the next"
            )
        if entry.update is None:
            return False
        self.version, self.last_fence = entry.version, entry.fence
        return True

    def begin_copy(self, version: int, last_fence: int) -> list[Entry]:
        """Sets the end of the log to that of a copy -> the entries that came since it was taken, in order."""
        self.version, self.last_fence, self.role = version, last_fence, Role.FOLLOWER
        early, self.early = self.early, []
        return [entry for entry in early if entry.version > version and self.accept(entry)]

    def step_down(self) -> None:
        """What it has done since its last acknowledged update is worth nothing: it must take a copy."""
        self.role = Role.IDLE
        for sender in self.senders.values():
            sender.stop()
        self.senders.clear()
