"""Replica: one expert at one server, as the network's thread sees it."""

import asyncio
import enum
from dataclasses import dataclass, field

from fmoe_ext.remote.etcd import keys
from fmoe_ext.remote.replication.leader import Leader
from fmoe_ext.remote.replication.messages import Append
from fmoe_ext.remote.server.ledger import Ledger


class Role(enum.Enum):
    IDLE = "idle"  # has some state, which nobody counts on
    JOINING = "joining"  # takes a copy; updates wait
    FOLLOWER = "follower"
    LEADER = "leader"


@dataclass
class Replica:
    """The history is the ledger's; here is what this server does with it."""

    uid: str
    ledger: Ledger
    role: Role = Role.IDLE
    leader: Leader | None = None  # while this server leads
    idle_since: float = 0.0
    early: list[Append] = field(default_factory=list)  # that came while it was joining
    copying: "asyncio.Task[object] | None" = None  # the call for a copy
    joins_from: str = ""  # the leader that copies
    joining: "asyncio.Task[None] | None" = None
    vacant: tuple[int, float] | None = None  # revision of the record, since when nobody leads
    hopeless_since: float = 0.0  # no member that could lead has been alive since then
    epoch: int = 0
    num_returns: int = 0  # of the registry, that were dealt with
    loss: int = 0  # what a recovery under way would lose

    def become_idle(self, now: float) -> None:
        self.role, self.leader, self.idle_since = Role.IDLE, None, now

    def is_able(self) -> bool:
        """True if its state can be trusted to be that of a member, when the record has it as one."""
        return self.role is not Role.JOINING and not self.ledger.broken

    def needs_void(self, record: keys.Members | None, num_returns: int) -> bool:
        """True if the registry has gone back since this server learned of the expert's last term."""
        if self.ledger.seen.number > (0 if record is None else record.term):
            return True
        if record is not None and record.epoch > self.epoch:
            self.epoch, self.num_returns = record.epoch, num_returns
        return self.num_returns < num_returns and self.ledger.seen.number > 0
