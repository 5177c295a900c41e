"""Faults that the replication had, put back into the code one at a time."""

import asyncio
import dataclasses
import time

from fmoe_ext.remote import errors
from fmoe_ext.remote.replication import recovery, replicas
from fmoe_ext.remote.replication.follower import Replica, Role
from fmoe_ext.remote.replication.leader import Leader
from fmoe_ext.remote.replication.messages import Sender, settle
from fmoe_ext.remote.replication.recovery import Action
from fmoe_ext.remote.replication.registry import Registry
from fmoe_ext.remote.replication.replicas import ReplicatedExperts
from fmoe_ext.remote.server import checkpoints
from fmoe_ext.remote.server.checkpoints import Checkpoints, decode_with_checksums
from fmoe_ext.remote.server.fair_queue import FairQueue
from fmoe_ext.remote.server.ledger import End, Ledger, NotLeader, Update
from fmoe_ext.remote.server.saving import Saver
from fmoe_ext.remote.server.state import end_of_state
from fmoe_ext.remote.wire import WireError, decode
from tests.remote.simulation.disk import SimFiles


def order_by_version(patch):
    """Of two states the one with the larger version is newer, whatever its term."""
    for name, key in (
        ("__lt__", lambda a, b: a < b),
        ("__gt__", lambda a, b: a > b),
        ("__ge__", lambda a, b: a >= b),
    ):
        patch.setattr(End, name, lambda self, other, key=key: key(self.version, other.version))


def keep_the_wait_of_an_earlier_vacancy(patch):
    """The time since the first offer counts, although a server has led since."""
    first, decide = {}, recovery.decide

    def late(vacancy):
        begun = first.setdefault(vacancy.server, asyncio.get_running_loop().time())
        seconds = asyncio.get_running_loop().time() - begun
        return decide(dataclasses.replace(vacancy, hopeless_seconds=seconds))

    patch.setattr(recovery, "decide", late)


def answer_before_confirming(patch):
    """A new leader takes gradients and answers repeated ones at once."""
    confirm = Leader.confirm

    async def open_first(self):
        self.ledger.open(self.term)
        self.is_open = True
        await confirm(self)

    patch.setattr(Leader, "confirm", open_first)


def step_without_log(patch):
    """A server that does not lead makes the step and remembers the id; only the log refuses it."""
    patch.setattr(ReplicatedExperts, "may_step", lambda self, uid: None)
    patch.setattr(Ledger, "check_open", lambda self, uid: None)

    def append(self, uid, requests, digest=""):
        if self._leads is None:
            self._note(Update(uid, self.end, End(self.end.term, self.version + 1), tuple(requests)))
            raise NotLeader("not the leader of it: the log has refused the update")
        return original(self, uid, requests, digest)

    original = Ledger.append
    patch.setattr(Ledger, "append", append)


def idle_members_never_lead(patch):
    """A member that has stepped down waits for a leader, and others wait for the member."""
    original = Replica.is_able
    patch.setattr(Replica, "is_able", lambda self: original(self) and self.role is Role.FOLLOWER)
    decide = recovery.decide

    def wait(vacancy):
        record = vacancy.record
        if record is not None and not vacancy.is_able and set(record.endpoints) & set(vacancy.alive):
            return Action.WAIT
        return decide(vacancy)

    patch.setattr(recovery, "decide", wait)


def fall_back_with_the_registry(patch):
    """The number of a term is what the registry says, and nobody notices that it went back."""
    patch.setattr(Replica, "needs_void", lambda self, record, num_returns: False)
    real = replicas.Term

    def term(number, leader):
        return real(term.known + 1, leader)

    async def lead(self, replica, vacancy, action):
        term.known = 0 if vacancy.record is None else vacancy.record.term
        await original(self, replica, vacancy, action)

    original = ReplicatedExperts._lead
    patch.setattr(replicas, "Term", term)
    patch.setattr(ReplicatedExperts, "_lead", lead)


def die_in_silence(patch):
    """A sender expects RemoteErrors only."""

    async def run(self):
        while not self.is_dead:
            append, future = await self._queue.get()
            try:
                reply = await self._send(append)
                settle(future, reply)
            except errors.RemoteError as error:
                self._die(str(error))
                settle(future, None)

    patch.setattr(Sender, "_run", run)


def make_what_followers_refuse(patch):
    """An update holds as much as a batch does."""
    original = FairQueue.__init__

    def without_limit(self, max_batch_bytes):
        original(self)

    patch.setattr(FairQueue, "__init__", without_limit)


def count_no_loss(patch):
    """A recovery leads with less than the record knows of and does not say so."""
    patch.setattr(recovery, "count_lost", lambda vacancy: 0)


def count_by_version_alone(patch):
    """A log of an older term counts as whole up to its version."""
    original = recovery.count_lost

    def count(vacancy):
        if vacancy.record is None:
            return original(vacancy)
        return min(original(vacancy), max(1, vacancy.record.version - vacancy.end.version))

    patch.setattr(recovery, "count_lost", count)


def accept_damaged_files(patch):
    """A file counts as whole if it can be read at all."""

    def read(data):
        try:
            return decode(data, checkpoints.FILE)
        except WireError as error:
            raise checkpoints.Damaged(str(error)) from None

    patch.setattr(checkpoints, "decode_with_checksums", read)


def share_a_folder(patch):
    """A second server starts in the folder of the first."""
    patch.setattr(SimFiles, "lock", lambda self: None)


def stop_saving_at_the_first_failure(patch):
    """An expert that cannot be written keeps the later ones from the disk."""

    async def save(self, uid, patience=None):
        state = await self.read_state(uid)
        await self._call(self.checkpoints.save, state)
        self.saved[uid] = end_of_state(state)

    patch.setattr(Saver, "_save", save)


def trust_names_of_files(patch):
    """A file is loaded whatever expert it holds."""

    def load(self, uid):
        if f"{uid}.safetensors" not in self.files.names():
            return None
        with self.files.open(f"{uid}.safetensors") as file:
            return decode_with_checksums(file.read())

    patch.setattr(Checkpoints, "_uid_in_header", lambda self, name: None)
    patch.setattr(Checkpoints, "load", load)


def acknowledge_beyond_the_reservation(patch):
    """A leader does not wait for etcd to know up to which version it acknowledges."""

    confirm = Leader.confirm

    async def at_once(version):
        pass

    async def confirm_and_forget(self):
        self.reserve = at_once
        await confirm(self)

    patch.setattr(Leader, "confirm", confirm_and_forget)


def answer_after_the_membership(patch):
    """A server that was removed from the members answers forward calls by the weights that it has."""
    patch.setattr(ReplicatedExperts, "may_read", lambda self, uid: None)


def count_leases_by_the_clock_on_the_wall(patch):
    """A clock that is set back makes a lease longer than etcd's."""
    patch.setattr(Registry, "_clock", property(lambda self: time.time, lambda self, _: None), raising=False)


def count_what_waits_for_a_copy(patch):
    """A member that takes a copy has acknowledged what came before it, and loses that with the copy."""
    original = Replica.receive
    patch.setattr(
        Replica, "receive", lambda self, append: dataclasses.replace(original(self, append), is_early=False)
    )


def never_trust_a_broken_state(patch):
    """A server whose weights cannot be trusted leads, as no other is left, and refuses every gradient."""
    patch.setattr(Ledger, "trust", lambda self: self.broken)


MUTANTS = {  # mutant: (faults, the first seed that finds it)
    order_by_version: (["cut", "stop", "kill"], 104),
    keep_the_wait_of_an_earlier_vacancy: (["stop"], 20),
    answer_before_confirming: (["kill_leaders"], 75),
    step_without_log: (["pause_etcd", "cut", "slow_down"], 81),
    idle_members_never_lead: (["pause_etcd", "lose_messages"], 1),
    fall_back_with_the_registry: (["restore_etcd", "stop"], 8),
    die_in_silence: (["strange_errors"], 3),
    make_what_followers_refuse: (["slow_down"], 11),
    count_no_loss: (["kill"], 1),
    acknowledge_beyond_the_reservation: (["kill"], 1),
    count_by_version_alone: (None, 174),
    accept_damaged_files: (["lose_power"], 11),
    share_a_folder: (["start_twice"], 0),
    stop_saving_at_the_first_failure: (["bad_disk"], 6),
    trust_names_of_files: (["misname"], 40),
    count_leases_by_the_clock_on_the_wall: (["pause"], 99),
    answer_after_the_membership: (["cut"], 0),
    count_what_waits_for_a_copy: (["distrust", "kill"], 7),
    never_trust_a_broken_state: (["distrust", "kill"], 3),
}
