"""Leading: updates go to all members before anyone hears that they were made; members come, fail and are replaced."""

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from fmoe_ext.remote.discovery import DiscoveryError
from fmoe_ext.remote.errors import RemoteError
from fmoe_ext.remote.etcd import keys
from fmoe_ext.remote.replication import messages
from fmoe_ext.remote.replication.messages import Entry, entry_message
from fmoe_ext.remote.replication.replica import Replica, Role
from fmoe_ext.remote.replication.sender import Sender
from fmoe_ext.remote.server.host import Commit, Fail, Finish, Update
from fmoe_ext.remote.server.service import NotLeader
from fmoe_ext.remote.server.state import digest
from fmoe_ext.remote.wire import Message, encode

if TYPE_CHECKING:
    from fmoe_ext.remote.replication.replicas import ReplicatedExperts

log = logging.getLogger("fmoe_ext.remote")
DIGEST_EVERY = 50  # updates
HAND_OVER_SECONDS = 5.0
LEARN_SECONDS = 60.0  # for a copy
HOST_AGAIN = 3.0  # seconds until another server is asked to be a replica
NOTE_EVERY = 5.0  # seconds between notes of the version in the registry


class Leading:
    """What a server does for the experts that it leads."""

    def __init__(self, owner: "ReplicatedExperts"):
        self.owner = owner
        self._noted: dict[str, tuple[float, int]] = {}  # uid: when, version

    # ---------------------------------------------------------------- updates

    def commit_from_thread(self, loop: asyncio.AbstractEventLoop) -> Commit:
        """commit() of an ExpertHost: called where experts compute, continues on the loop."""

        def commit(update: Update, finish: Finish, fail: Fail) -> None:
            taken = digest(self.owner.server.host, update.uid) if update.version % DIGEST_EVERY == 0 else ""
            loop.call_soon_threadsafe(self._ship, update, taken, finish, fail)

        return commit

    def _ship(self, update: Update, taken: str, finish: Finish, fail: Fail) -> None:
        replica = self.owner.replicas.get(update.uid)
        if replica is None or replica.role is not Role.LEADER or update.version != replica.version + 1:
            fail(NotLeader(f"not the leader of {update.uid} any more: the update was not made"))
            return
        entry = Entry(update.uid, replica.fence, update.version, replica.last_fence, update, taken)
        replica.version, replica.last_fence = update.version, replica.fence
        data = encode(entry_message(entry)) if replica.senders else b""
        acks = {sender: sender.put(data) for sender in replica.senders.values()}
        task = asyncio.create_task(self._commit(replica, acks, finish, fail))
        replica.commits.add(task)
        task.add_done_callback(replica.commits.discard)

    async def _commit(
        self, replica: Replica, acks: dict[Sender, "asyncio.Future[bool]"], finish: Finish, fail: Fail
    ) -> None:
        """Answers when every member has the update, or is a member no more."""
        fence = replica.fence
        try:
            for sender, ack in acks.items():
                if not await ack and sender.is_member:
                    await self._drop(replica, sender)
        except NotLeader as error:
            fail(error)
            return
        if replica.role is Role.LEADER and replica.fence == fence and self.owner.registry.has_lease():
            finish()
        else:
            fail(NotLeader(f"not the leader of {replica.uid} any more: send the gradient to the next one"))

    # ---------------------------------------------------------------- members

    def begin(self, replica: Replica, fence: int, members: dict[str, str]) -> None:
        """This server leads now: the other members are asked whether their logs end where this one's does."""
        replica.role, replica.fence, replica.members = Role.LEADER, fence, dict(members)
        for name, endpoint in members.items():
            if name != self.owner.name:
                sender = self._add_sender(replica, name, endpoint)
                sender.is_member = True
                question = Entry(replica.uid, fence, replica.version, replica.last_fence)
                sender.put(encode(entry_message(question)))
        log.info("%s is led from here, version %d, fence %d", replica.uid, replica.version, fence)

    def _add_sender(self, replica: Replica, name: str, endpoint: str) -> Sender:
        if (old := replica.senders.pop(name, None)) is not None:
            old.stop()
        timeout = self.owner.options.ack_timeout
        sender = Sender(self.owner.caller, name, endpoint, messages.APPEND, timeout)
        replica.senders[name] = sender
        return sender

    async def _drop(self, replica: Replica, sender: Sender) -> None:
        """The registry is told that a member has fallen behind; if it says that another leads, this one stops."""
        async with replica.lock:
            if replica.role is not Role.LEADER or not sender.is_member:
                return
            left = {name: where for name, where in replica.members.items() if name != sender.server}
            log.warning("%s: %s falls behind (%s)", replica.uid, sender.endpoint, sender.failure)
            await self._write_members(replica, left)
            sender.is_member = False
            if replica.senders.get(sender.server) is sender:  # not one that took its place meanwhile
                del replica.senders[sender.server]
            sender.stop()

    async def _write_members(self, replica: Replica, members: dict[str, str]) -> None:
        """Raises NotLeader, and leads no more, unless the registry takes them from this leader."""
        try:
            written = await self.owner.registry.set_members(
                replica.uid, replica.fence, keys.Members(members, replica.version)
            )
        except DiscoveryError:
            written = False
        if not written:
            self.owner.server.metrics.add("fenced_total")
            replica.step_down()
            raise NotLeader(
                f"not the leader of {replica.uid} any more: the registry says so, or does not answer"
            )
        replica.members = members

    async def admit(self, uid: str, name: str, endpoint: str) -> Message:
        """A copy for a server that wants to follow; every update after it goes there too."""
        replica = self._led(uid)
        if name in replica.members and name != self.owner.name:
            sender = replica.senders.get(name)
            if sender is not None:
                await self._drop(replica, sender)
        marks: dict[str, int] = {}

        def at_copy(version: int) -> None:
            known = replica.senders.get(name)
            if known is not None and known.is_member:
                return  # this call is older than the one that made it a member: what it has stays
            if self._is_full(replica, name):  # another has begun while this one waited for its copy
                marks["full"] = True
                return
            marks.update(fence=replica.fence, last_fence=replica.last_fence, version=replica.version)
            if replica.role is Role.LEADER:
                self._add_sender(replica, name, endpoint)

        full = f"{uid} has its replicas, or servers that take copies: no more"
        if self._is_full(replica, name):
            raise ValueError(full)
        state = await self.owner.copy_state(uid, at_copy)
        self._led(uid)
        if "full" in marks:
            raise ValueError(full)
        if not marks:
            raise NotLeader(f"{name} became a replica of {uid} meanwhile: ask again if it needs another copy")
        if str(marks["version"]) != state.meta["version"]:
            raise NotLeader(f"not the leader of {uid} any more: it lost updates while it was copied")
        meta = {**state.meta, "fence": str(marks["fence"]), "last_fence": str(marks["last_fence"])}
        return Message(state.tensors, meta)

    def _is_full(self, replica: Replica, name: str) -> bool:
        """Whether members and those who take copies, other than name, are as many as there shall be."""
        learning = [s for s in replica.senders.values() if not s.is_member and s.server != name]
        others = [member for member in replica.members if member != name]
        return len(others) + len(learning) >= self.owner.options.replicas

    async def promote(self, uid: str, name: str) -> None:
        """A follower that has its copy becomes a member: from now on nothing is acknowledged without it."""
        replica = self._led(uid)
        async with replica.lock:
            sender = replica.senders.get(name)
            if sender is None or sender.is_dead:
                raise NotLeader(f"{name} has missed updates of {uid}: it must take another copy")
            if sender.is_member:
                return  # the same call came twice
            sender.is_member = (
                True  # before the registry knows, so that none is acknowledged without it after
            )
            question = Entry(uid, replica.fence, replica.version, replica.last_fence)
            has_all = await sender.put(encode(entry_message(question)))
            if not has_all:
                sender.is_member = False
                raise NotLeader(f"{name} has missed updates of {uid}: {sender.failure}")
            await self._write_members(replica, {**replica.members, name: sender.endpoint})
        log.info("%s has %d replicas", uid, len(replica.members))

    def _led(self, uid: str) -> Replica:
        self.owner.may_step(uid)
        return self.owner.replicas[uid]

    # ---------------------------------------------------------------- care

    async def look_after(self, replica: Replica) -> None:
        """Drops members whose servers are gone, finds new ones, notes the version."""
        alive = self.owner.registry.servers()
        for sender in list(replica.senders.values()):
            late = not sender.is_member and time.monotonic() - sender.begun > LEARN_SECONDS
            if not (sender.is_dead or late or sender.server not in alive):
                continue
            sender.failure = sender.failure or "its server is gone"
            if sender.is_member:
                try:
                    await self._drop(replica, sender)
                except NotLeader as error:
                    log.warning("%s", error)
                    return
            else:
                replica.senders.pop(sender.server, None)
                sender.stop()
        if len({*replica.members, *replica.senders}) < self.owner.options.replicas:
            await self._find_another(replica)
        await self._note_version(replica)

    async def _find_another(self, replica: Replica) -> None:
        now = time.monotonic()
        if now - replica.host_asked < HOST_AGAIN:
            return
        options = self.owner.server.options
        free = {
            name: entry
            for name, entry in self.owner.registry.servers().items()
            if name not in replica.members
            and (entry.expert_cls, entry.hidden_dim) == (options.expert_cls, options.hidden_dim)
        }
        if not free:
            return
        replica.host_asked = now
        name = min(free, key=lambda name: (free[name].num_experts, name))
        request = encode(Message({}, {"uid": replica.uid}))
        try:
            await self.owner.caller.call(
                free[name].endpoint, messages.HOST, request, self.owner.options.ack_timeout
            )
        except RemoteError as error:
            log.warning("%s cannot be replicated at %s: %s", replica.uid, free[name].endpoint, error)

    async def _note_version(self, replica: Replica) -> None:
        when, version = self._noted.get(replica.uid, (0.0, -1))
        now = time.monotonic()
        if replica.version == version or now - when < NOTE_EVERY:
            return
        self._noted[replica.uid] = now, replica.version
        async with replica.lock:
            if replica.role is Role.LEADER:
                try:
                    await self._write_members(replica, replica.members)
                except NotLeader as error:
                    log.warning("%s", error)

    async def hand_over(self, replica: Replica) -> None:
        """Takes no more gradients, waits for those under way, and lets a member lead that has them all."""
        replica.is_closing = True
        await self.owner.on_thread(lambda: None)  # what was computed before has been shipped
        if replica.commits:
            await asyncio.wait(replica.commits, timeout=HAND_OVER_SECONDS)
        async with replica.lock:
            left = {name: where for name, where in replica.members.items() if name != self.owner.name}
            successor = next(
                (name for name, s in replica.senders.items() if s.is_member and not s.is_dead), ""
            )
            written = keys.Members(left, replica.version, successor)
            await self.owner.registry.resign(replica.uid, replica.fence, written)
