"""One run of a simulation: machines, trainers, faults drawn from a seed, and the checker of what came of it."""

import asyncio
import contextlib
import gc
import random
import time
import types
from collections import Counter
from unittest import mock

import torch

from fmoe_ext.remote import errors
from fmoe_ext.remote.etcd import keys
from fmoe_ext.remote.replication import follower
from fmoe_ext.remote.replication.follower import Role
from fmoe_ext.remote.server.ledger import NotLeader
from fmoe_ext.remote.server.options import Replication
from tests.remote.simulation.checker import Failed, Held, History, check
from tests.remote.simulation.disk import Disk
from tests.remote.simulation.etcd import Etcd
from tests.remote.simulation.losses import Losses
from tests.remote.simulation.network import Network
from tests.remote.simulation.server import ASIDE, UIDS, SimServer
from tests.remote.simulation.virtual import Process, VirtualLoop, wall_time

TTL = 2.0
RECOVERY_WAIT = 5.0
BOUND = RECOVERY_WAIT + 6 * TTL + 20.0  # seconds until an expert is served again after the last fault


class World:
    """run() ends with a History, or raises Failed. The same seed gives the same run, to the last message."""

    def __init__(self, seed, faults=None):
        self.seed, self.rng = seed, random.Random(seed)
        self.loop = VirtualLoop()
        rng = self.rng
        self.faults = faults
        self.etcd = Etcd(self.loop, lease_rate=rng.choice((1.0, 1.0, 1.15, 0.7)))
        self.network = Network(self.loop, rng)
        self.history = History()
        self.num_started = 0
        num_machines = rng.choice((1, 2, 3, 3, 3, 4, 5))
        self.replicas = rng.choice((1, 2, 2, 3, 3))
        self.disks = [Disk(rng) for _ in range(num_machines)]
        self.twins = []  # servers that were started although another has their folder
        replication = Replication("", self.replicas, TTL, ack_timeout=0.8, recovery_wait=RECOVERY_WAIT)
        limit = rng.choice((1 << 20, 16))
        follower.COPY_SECONDS = 5.0  # a copy takes no longer here
        self.options = types.SimpleNamespace(replication=replication, max_update_bytes=limit)
        if limit == 16:
            self.network.max_bytes = 720  # the message of one gradient, and little more
        self.servers = [None] * num_machines
        self.outside = Process("trainers", self.loop)
        self.losses = Losses(self, UIDS[0], RECOVERY_WAIT)
        self.etcd.on_expiry = self.losses.note_members
        self.etcd.before_puts = lambda puts: self._guarded(lambda: self.losses.before_puts(puts))
        self.failure, self.num_lost = None, 0
        self.is_over = False
        self.strangers = (
            Counter()
        )  # name of a server: seconds for which it answered forward calls and was no member

    def note(self, *what):
        self.history.trace.append(f"{self.loop.time():9.4f} " + " ".join(map(str, what)))

    def everyone(self):
        """All servers that were started last on a machine, and those that were started beside them."""
        return [server for server in (*self.servers, *self.twins) if server is not None]

    def fail(self, text):
        """A promise was not kept; the run goes on to its end."""
        self.failure = self.failure or Failed(text)
        self.note("FAILED", text)

    def _guarded(self, look):
        """Keeps the first failure of a look at what a server does, which must not see it."""
        try:
            look()
        except Failed as error:
            self.fail(str(error))

    # ------------------------------------------------------------ a run

    def run(self):
        gc.disable()
        try:
            with mock.patch.object(time, "time", wall_time):
                self.loop.run_until_complete(self.outside.spawn(self._main()))
            bad = [e for e in self.loop.errors if not isinstance(e.get("exception"), asyncio.CancelledError)]
            if bad and self.faults is None:
                raise Failed(f"an error nobody handled: {bad[0]}")
        finally:
            self.loop.errors.clear()
            self.loop.drain()
            gc.enable()
        return self.history

    async def _main(self):
        for machine in range(len(self.servers)):
            self._start(machine)
        self.outside.spawn(self._watch_members())
        self.outside.spawn(self._set_clocks())
        trainers = [self.outside.spawn(self._train(n)) for n in range(self.rng.randint(1, 3))]
        await self._make_faults(self.rng.uniform(8.0, 25.0))
        self._heal()
        begin = self.loop.time()
        await self._until(self._is_whole, "replicas and a leader")
        for uid in UIDS:
            await self._gradient(uid, patience=BOUND)
        self.note("served again after", round(self.loop.time() - begin, 1))
        self.is_over = True
        for trainer in trainers:
            await asyncio.wait_for(trainer, BOUND)
        await self._until(self._is_whole, "replicas and a leader at the end")
        self._check()

    def _start(self, machine):
        self.servers[machine] = SimServer(self, machine, self.options)
        self.note("start", machine, self.servers[machine].name)

    async def _until(self, condition, what):
        end = self.loop.time() + BOUND
        while not condition():
            if self.loop.time() > end:
                raise Failed(
                    f"seed {self.seed}: not within {BOUND} s after the faults: {what}\n{self.show()}"
                )
            await asyncio.sleep(0.1)

    # ------------------------------------------------------------ trainers

    async def _train(self, n):
        while not self.is_over:
            burst = self.rng.choice((1, 1, 1, 4))
            await asyncio.gather(*(self._gradient(self.rng.choice(UIDS)) for _ in range(burst)))
            await asyncio.sleep(self.rng.choice((0.02, 0.1, 0.5, 2.0)))

    async def _gradient(self, uid, patience=6.0):
        """One gradient, repeated under its id until it is acknowledged, refused or given up."""
        request_id = f"{self.rng.getrandbits(128):032x}"
        is_bad = self.rng.random() < 0.03
        rows = self.rng.choice((1, 1, 2, 5))
        grad = torch.full((rows, 1), float("nan") if is_bad else float(self.rng.randint(1, 500)))
        x = torch.ones(rows, 1)
        self.history.begun[request_id] = self.loop.time()
        self.history.sums[request_id] = float(grad.sum())
        if is_bad:
            self.history.refused.add(request_id)
        end, target = self.loop.time() + patience, None

        async def handle(server):
            answer = await server.backward(x, grad, request_id, uid)
            self._guarded(lambda: self.losses.note_answer(server, request_id, int(answer.meta["version"])))
            return answer

        while self.loop.time() < end:
            target = self._find_leader(uid) or self.rng.choice(list(self.network.servers) or [""])
            try:
                answer = await asyncio.wait_for(self.network.call(self.outside, target, handle), 2.0)
            except errors.Refused:
                if is_bad:
                    return
            except (errors.RemoteError, asyncio.TimeoutError, OverflowError):
                pass
            else:
                self.history.acknowledged[request_id] = int(answer.meta["version"])
                self.note("acknowledged", request_id[:6], "version", answer.meta["version"], "by", target)
                return
            await asyncio.sleep(self.rng.uniform(0.02, 0.4))
        if patience == BOUND and not is_bad:
            raise Failed(
                f"seed {self.seed}: no gradient was taken within {BOUND} s after the faults\n{self.show()}"
            )

    def _find_leader(self, uid):
        entry = self.etcd.entries.get(keys.leader_key(uid))
        leader = None if entry is None else keys.load(keys.Leader, entry[0])
        return None if leader is None else leader.endpoint

    # ------------------------------------------------------------ faults

    async def _make_faults(self, seconds):
        rng, end = self.rng, self.loop.time() + seconds
        kinds = self.faults or rng.sample(sorted(DRAWN), rng.randint(1, min(4, len(DRAWN))))
        self.is_calm = set(kinds) <= CALM
        self.note("faults", kinds, "machines", len(self.servers), "replicas", self.replicas)
        await asyncio.sleep(rng.uniform(1.0, 4.0))
        while self.loop.time() < end:
            kind = rng.choice(kinds)
            await FAULTS[kind](self)
            await asyncio.sleep(rng.choice((0.05, 0.5, 2.0, 4.0)))

    async def _set_clocks(self):
        """Beside the other faults, in each run, and drawn apart: no correct server notices."""
        rng = random.Random(f"clocks {self.seed}")
        while not self.is_over:
            await asyncio.sleep(rng.uniform(0.2, 5.0))
            process = rng.choice(self.everyone()).process
            process.clock_step = rng.choice((0.0, 3600.0, -3600.0, 1.0, -1.0, 172800.0))
            self.note("set the clock of", process.name, "by", process.clock_step)

    def _later(self, delay, function):
        self.network.later(delay, function)

    def _some(self):
        return self.rng.randrange(len(self.servers))

    async def kill(self):
        machine, server = self._some(), None
        server = self.servers[machine]
        if server.process.is_dead:
            return
        if self.rng.random() < 0.3:
            self.disks[machine].wipe()
            self.note("lose the disk of", machine)
        self.note("kill", machine)
        server.kill()
        self.losses.note_members(was_killed=True)
        self._later(self.rng.choice((0.1, 1.0, 3.0, 8.0)), lambda: self._restart(machine, server))

    async def stop(self):
        machine = self._some()
        server = self.servers[machine]
        if not server.process.is_dead and server.is_ready and not server.is_stopping:
            self.note("stop", machine)
            server.process.spawn(server.stop())
            self._later(self.rng.choice((0.5, 1.0, 3.0)), lambda: self._restart(machine, server))

    async def pause(self):
        machine = self._some()
        server = self.servers[machine]
        self.note("pause", machine)
        server.process.pause()
        self._later(self.rng.choice((0.2, TTL, 2 * TTL, 4 * TTL)), server.process.resume)

    def _restart(self, machine, server):
        if self.servers[machine] is server:
            if not server.process.is_dead:  # its stop takes too long
                server.kill()
            self.losses.note_members()
            self._start(machine)

    async def cut(self):
        """Machines, or etcd, cannot reach each other, in one direction or both."""
        names = [f"machine {n}" for n in range(len(self.servers))]
        side = {name for name in names if self.rng.random() < 0.5} or {names[0]}
        others = {name for name in (*names, None, "trainers") if name not in side}
        if self.rng.random() < 0.5:
            others = {self.rng.choice(sorted(others, key=str))}
        cuts = {(a, b) for a in side for b in others}
        if self.rng.random() < 0.6:
            cuts |= {(b, a) for a, b in cuts}
        self.note("cut", sorted(map(str, cuts)))
        self.network.cuts |= cuts
        self._later(self.rng.choice((0.3, TTL, 3 * TTL)), lambda: self.network.cuts.difference_update(cuts))

    async def pause_etcd(self):
        self.note("pause etcd")
        self.etcd.is_paused = True
        await asyncio.sleep(self.rng.choice((0.3, TTL, 2 * TTL)))
        self.etcd.is_paused = False

    async def restore_etcd(self):
        """A backup of some seconds ago; what was acknowledged until all have noticed may be lost."""
        backup = self.etcd.backup() if self.rng.random() < 0.7 else (1, {}, {})
        await asyncio.sleep(self.rng.uniform(0.5, 5.0))
        self.note("restore etcd", backup[0], "from", self.etcd.revision)
        if self.is_disturbed():
            self.losses.note_restore()
        self.etcd.restore(backup)

    def is_disturbed(self):
        """True if a fault other than the restoration may hide a member or the newest log."""
        return self.faults != ["restore_etcd"]

    async def kill_leaders(self):
        """One server is cut off from the others, the leader dies, and the next one as soon as it leads."""
        server = self.servers[self._some()]
        names = [f"machine {n}" for n in range(len(self.servers))]
        cuts = {(a, b) for a in names for b in names if server.process.name in (a, b) and a != b}
        self.note("cut from other servers", server.process.name)
        self.network.cuts |= cuts
        self._later(3 * TTL, lambda: self.network.cuts.difference_update(cuts))
        await asyncio.sleep(self.rng.uniform(0.0, 0.6))
        for _ in range(2):
            endpoint = self._find_leader(UIDS[0])
            leader = self.network.servers.get(endpoint)
            if leader is not None and not leader.process.is_dead and leader is not server:
                self.note("kill", leader.machine)
                leader.kill()
                self.losses.note_members(was_killed=True)
                self._later(8.0, lambda leader=leader: self._restart(leader.machine, leader))
            end = self.loop.time() + 2 * TTL
            while self.loop.time() < end and self._find_leader(UIDS[0]) in (None, endpoint):
                await asyncio.sleep(0.02)
            await asyncio.sleep(self.rng.uniform(0.0, 0.7))

    async def lose_messages(self):
        self.network.loss = self.rng.choice((0.01, 0.05))
        self.network.repeat = self.rng.choice((0.0, 0.1))
        self.network.etcd_loss = self.rng.choice((0.0, 0.03))
        await asyncio.sleep(2.0)

    async def slow_down(self):
        server = self.servers[self._some()]
        server.compute.max_seconds = self.rng.choice((0.004, 0.3))

    async def fill_disk(self):
        self.disks[self._some()].is_full = self.rng.random() < 0.7

    async def lose_power(self):
        """Every server dies, and disks are damaged; at least one is not, if there are two."""
        self.note("lose power")
        spared = self._some()
        for machine, server in enumerate(self.servers):
            if not server.process.is_dead:
                server.kill()
            if self.rng.random() < 0.6 and (machine != spared or len(self.servers) == 1):
                kind = self.rng.choice(("flip", "flip", "cut", "zeros", "old"))
                self.note(kind, self.disks[machine].harm(kind), "of", machine)
            delay = self.rng.choice((0.1, 0.5, 2.0))
            self._later(delay, lambda m=machine, s=server: self._restart(m, s))
        self.losses.note_members(was_killed=True)
        await asyncio.sleep(4.0)

    async def damage_at_rest(self):
        machine, kind = self._some(), self.rng.choice(("flip", "cut", "zeros", "old"))
        self.note(kind, self.disks[machine].harm(kind), "of", machine)

    async def misname(self):
        """A file gets another name while its server is down; the operator reads why it does not start."""
        machine = self._some()
        server, disk = self.servers[machine], self.disks[machine]
        if server.process.is_dead or disk.true_names:
            return
        server.kill()
        self.losses.note_members(was_killed=True)
        other = self.rng.choice((ASIDE, "expert.7"))
        disk.misname(f"{UIDS[0]}.safetensors", f"{other}.safetensors")
        self.note("misname", disk.true_names, "of", machine)
        self._later(0.2, lambda: self._restart(machine, server))
        self._later(self.rng.choice((1.0, 8.0)), disk.repair_names)

    async def start_twice(self):
        machine = self._some()
        if self.servers[machine].process.is_dead:
            return
        self.note("start another server in the folder of", machine)
        twin = SimServer(self, machine, self.options)
        self.twins.append(twin)
        await asyncio.sleep(self.rng.choice((1.0, 6.0)))
        self._end_twins()

    def _end_twins(self):
        for twin in self.twins:
            if not twin.process.is_dead:
                twin.kill()
                self.losses.note_members(was_killed=True)

    async def bad_disk(self):
        """Writes and reads of a disk fail now and then, or a name cannot be written."""
        disk = self.disks[self._some()]
        disk.fails_to_sync = self.rng.random() < 0.4
        disk.short_reads = self.rng.choice((0.0, 0.1))
        disk.blocked = set(self.rng.choice(((), (f"{UIDS[0]}.safetensors",))))

    async def distrust(self):
        """A follower finds that its weights differ from the leader's, and its call for a new copy may be lost."""
        replicas = [replica for _, replica in self._replicas(UIDS[0]) if replica.role is Role.FOLLOWER]
        if replicas:
            replica = self.rng.choice(replicas)
            self.note("distrust", replica.site.name)
            replica.ledger.broken = "the weights differ from the leader's"
            replica.site.registry.changed()  # its next look comes at once
            self.network.loss = self.rng.choice((0.0, 0.3))
            await asyncio.sleep(0.6)
            self.network.loss = 0.0

    async def strange_errors(self):
        self.network.strange = 0.01
        await asyncio.sleep(2.0)

    def _heal(self):
        self.note("heal")
        network = self.network
        network.cuts.clear()
        network.loss = network.repeat = network.strange = network.etcd_loss = 0.0
        self.etcd.is_paused = False
        for machine, server in enumerate(self.servers):
            server.process.resume()
            server.compute.max_seconds = 0.004
            disk = self.disks[machine]
            disk.is_full = disk.fails_to_sync = False
            disk.short_reads = 0.0
            disk.blocked.clear()
            disk.repair_names()
        self._end_twins()

    # ------------------------------------------------------------ the checker

    async def _watch_members(self):
        while True:
            await asyncio.sleep(0.1)
            self.losses.note_members()
            self._watch_readers()

    def _watch_readers(self):
        """A server that answers forward calls is a member, or etcd has not reached it since it was removed."""
        for uid in UIDS:
            entry = self.etcd.entries.get(keys.members_key(uid))
            members = keys.load(keys.Members, entry[0]).endpoints if entry else {}
            for server, _ in self._replicas(uid):
                process = server.process
                is_unreached = self.etcd.is_paused or self.network.is_cut_off(process) or process.is_paused
                with contextlib.suppress(NotLeader):
                    server.service.may_read(uid)
                    if server.name not in members and not is_unreached:
                        self.strangers[server.name] += 0.1
                        if self.strangers[server.name] > 3 * TTL:
                            self.fail(f"{server.name} is no member of {uid} and answers forward calls")
                        continue
                self.strangers.pop(server.name, None)

    def _replicas(self, uid):
        return [
            (server, server.placement.replicas[uid])
            for server in self.servers
            if server.is_ready and not server.process.is_dead and uid in server.placement.replicas
        ]

    def _is_whole(self):
        """Every expert has an open leader, the wanted number of members, and equal logs."""
        if not all(server.is_ready and not server.process.is_dead for server in self.servers):
            return False
        for uid in UIDS:
            entry = self.etcd.entries.get(keys.members_key(uid))
            if entry is None or keys.leader_key(uid) not in self.etcd.entries:
                return False
            members = keys.load(keys.Members, entry[0]).endpoints
            found = [(s, r) for s, r in self._replicas(uid) if s.name in members]
            roles = sorted(r.role.value for _, r in found)
            if len(found) != min(self.replicas, len(self.servers)) or len(members) != len(found):
                return False
            if roles != ["follower"] * (len(found) - 1) + ["leader"]:
                return False
            if not all(r.leader.takes_steps() for _, r in found if r.role is Role.LEADER):
                return False
            if len({(r.ledger.end, r.ledger.version) for _, r in found}) != 1:
                return False
        return True

    def _check(self):
        history = self.history
        removed = sum(server.metrics.count("members_removed_total") for server in self.servers)
        if self.is_calm and removed:
            raise Failed(
                f"seed {self.seed}: {removed} members were removed, and none had failed\n{self.show()}"
            )
        for uid in UIDS:
            members = keys.load(keys.Members, self.etcd.entries[keys.members_key(uid)][0]).endpoints
            held = [
                Held(dict(r.ledger.applied), r.ledger.num_requests, r.ledger.version, s.host.digest(uid))
                for s, r in self._replicas(uid)
                if s.name in members
            ]
            try:
                if self.failure is not None:
                    raise self.failure
                for recovery in self.losses.recoveries:
                    recovery.check()
                self.num_lost = check(history, held)
            except Failed as error:
                raise Failed(f"seed {self.seed}: {error}\n{self.show()}") from None

    def show(self):
        lines = list(self.history.trace[-60:])
        for key, value in sorted(self.etcd.entries.items()):
            lines.append(f"  {key} {value}")
        for server in self.servers:
            for uid, replica in server.placement.replicas.items():
                ledger = replica.ledger
                lines.append(
                    f"  {server.machine} {server.name} dead={server.process.is_dead} ready={server.is_ready} {uid} "
                    f"{replica.role} {ledger.end} weights={ledger.version} committed={ledger.committed} "
                    f"seen={ledger.seen} broken={ledger.broken!r}"
                )
        return "\n".join(lines)


CALM = {
    "slow_down",
    "fill_disk",
    "bad_disk",
    "damage_at_rest",
}  # faults after which every member still answers
DRAWN = {  # by a run that is given no faults
    "kill": World.kill,
    "kill_leaders": World.kill_leaders,
    "stop": World.stop,
    "pause": World.pause,
    "cut": World.cut,
    "pause_etcd": World.pause_etcd,
    "restore_etcd": World.restore_etcd,
    "lose_messages": World.lose_messages,
    "slow_down": World.slow_down,
    "fill_disk": World.fill_disk,
    "lose_power": World.lose_power,
    "damage_at_rest": World.damage_at_rest,
    "misname": World.misname,
    "start_twice": World.start_twice,
    "bad_disk": World.bad_disk,
    "strange_errors": World.strange_errors,
}
FAULTS = {**DRAWN, "distrust": World.distrust}
