"""A server of a simulation: the real replication, host and service, with a device and a disk of the simulation."""

import asyncio
import contextlib
import types

import torch
from torch import nn

from fmoe_ext.remote.expert_classes import ExpertClass, Gradients
from fmoe_ext.remote.replication.replicas import ReplicatedExperts
from fmoe_ext.remote.server.checkpoints import Checkpoints, Damaged, decode_with_checksums
from fmoe_ext.remote.server.fair_queue import FairQueue, Held
from fmoe_ext.remote.server.host import ExpertHost, Training
from fmoe_ext.remote.server.ledger import End
from fmoe_ext.remote.server.pages import Metrics
from fmoe_ext.remote.server.saving import Saver
from fmoe_ext.remote.server.server import Server
from fmoe_ext.remote.server.service import Call, ComputeThread, ExpertService
from fmoe_ext.remote.server.state import read_state
from fmoe_ext.remote.wire import STATE, Limits, compress, decode, encode
from tests.remote.simulation.checker import PRIME
from tests.remote.simulation.disk import SimFiles
from tests.remote.simulation.etcd import StoreClient
from tests.remote.simulation.network import SimPeers
from tests.remote.simulation.virtual import Process

UIDS = ("expert.0",)
ASIDE = "aside.0"  # an expert that no other server has, and that moves on by itself


class Number(nn.Module):
    def __init__(self, hidden_dim):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x * self.w


NUMBER = ExpertClass("number", Number, lambda hidden_dim: (torch.empty(1),))


class NumberStack:
    """Weights that depend on every gradient and on their order."""

    def __init__(self):
        self.weights = []

    def resize(self, num_places):
        self.weights += [torch.zeros(1) for _ in range(num_places - len(self.weights))]

    def views(self, place):
        return {"w": self.weights[place]}

    def buffers(self, place):
        return {}

    def forward(self, parts):
        return [part.inputs[0] * self.weights[part.place] for part in parts]

    def backward(self, parts):
        return [Gradients((part.grad,), {"w": part.grad.sum().reshape(1)}) for part in parts]


class OrderOptimizer:
    """w becomes 3 w + gradient, modulo a prime."""

    def __init__(self, parameters):
        self.param_groups = [{"params": list(parameters)}]

    def step(self):
        (w,) = self.param_groups[0]["params"]
        w.copy_((w * 3 + w.grad) % PRIME)

    def zero_grad(self, set_to_none=True):
        self.param_groups[0]["params"][0].grad = None

    def state_dict(self):
        return {"state": {}, "param_groups": [{"params": [0]}]}

    def load_state_dict(self, state):
        pass


class OrderTraining(Training):
    def make_optimizer(self, parameters):
        return OrderOptimizer(parameters)


class SimQueue(FairQueue):
    """Says when there is work."""

    on_work = staticmethod(lambda: None)

    def put(self, job):
        super().put(job)
        self.on_work()

    def put_task(self, task):
        super().put_task(task)
        self.on_work()


class SimDevice(ComputeThread):
    """The computing thread, as steps of the loop; each piece of work takes a random time."""

    def __init__(self, host, queue, process, rng):
        super().__init__(host, queue)
        self.process, self.rng = process, rng
        self.max_seconds = 0.004
        self._is_pumping = False
        queue.on_work = self._begin

    def _begin(self):
        if not self._is_pumping:
            self._is_pumping = True
            self.process.spawn(self._pump())

    async def _pump(self):
        while self.queue._tasks or len(self.queue):
            await asyncio.sleep(self.rng.uniform(0.0002, self.max_seconds))
            work = self.queue.take()
            if callable(work):
                work()
            elif work:
                self._run_batch(work)
        self._is_pumping = False


class SimSaver(Saver):
    """Its calls of the disk take a random time, and the process may die before."""

    sleep = staticmethod(asyncio.sleep)

    async def _call(self, function, *arguments):
        await self.sleep()
        return function(*arguments)


class SimServer:
    """One process on a machine with a disk."""

    def __init__(self, world, machine, options):
        self.world, self.machine = world, machine
        world.num_started += 1
        self.process = Process(f"machine {machine}", world.loop)
        self.endpoint = f"machine-{machine}:{world.num_started}"
        self.options = types.SimpleNamespace(
            expert_cls="number", hidden_dim=1, expert_uids=UIDS, num_experts=1, expert_pattern="expert.[0:9]"
        )
        self.metrics = Metrics()
        self.host = ExpertHost(NUMBER, 1, OrderTraining("sgd"), stack=NumberStack())
        self.compute = SimDevice(
            self.host, SimQueue(max_batch_bytes=options.max_update_bytes), self.process, world.rng
        )
        self.service = ExpertService(self.compute, None, self.metrics, Limits())
        store = StoreClient(world.etcd, world.network, self.process)
        self.placement = ReplicatedExperts(
            options.replication, store=store, peers=SimPeers(world.network, self.process)
        )
        self.placement.name = self.placement.registry.server = f"{world.rng.getrandbits(64):016x}"
        self.name = self.placement.name
        self.disk = world.disks[machine]
        self.checkpoints = Checkpoints(SimFiles(self.disk, self.process))
        self.saver = SimSaver(self.checkpoints, self.host, self.metrics, self.read_state)
        self.saver.sleep = lambda: asyncio.sleep(world.rng.uniform(0.0, 0.03))
        self.is_ready = self.is_stopping = False
        world.network.servers[self.endpoint] = self
        self.process.spawn(self._run())

    async def _run(self):
        while True:
            try:
                self.checkpoints.begin()
                await self.placement.begin(self)
                break
            except Exception:  # a program that cannot start is started again
                for task in self.placement.registry._tasks:
                    task.cancel()
                await asyncio.sleep(0.3)
        self.is_ready = True
        while True:
            await asyncio.sleep(self.world.rng.uniform(1.0, 6.0))
            await self.save()
            if self.world.rng.random() < 0.3:
                await self.saver.check_at_rest(1e9)

    def saved_uids(self):
        return self.checkpoints.uids()

    async def add_experts(self, uids):
        await Server.add_experts(self, [*uids, ASIDE])

    async def read_state(self, uid):
        return await asyncio.wrap_future(self.compute.call(lambda: read_state(self.host, uid)))

    async def save(self):
        """One expert that cannot be written must not keep the other from the disk."""
        ledger, disk = self.host.find(ASIDE).ledger, self.disk
        ledger.install(End(version=ledger.version + 1), ledger.applied, 0)
        version, was_well = ledger.version, not (disk.is_full or disk.fails_to_sync)
        with contextlib.suppress(OSError):
            await self.saver.save()
        if was_well and not (disk.is_full or disk.fails_to_sync or self.process.is_dead):
            with contextlib.suppress(KeyError, Damaged):  # the disk has damaged it already
                state = decode_with_checksums(disk.files[f"{ASIDE}.safetensors"])
                if state.meta["uid"] == ASIDE and int(state.meta["version"]) < version:
                    self.world.fail(
                        f"{self.process.name} has not saved {ASIDE}: {state.meta['version']} < {version}"
                    )
        if disk.intruder:
            self.world.fail(disk.intruder)

    async def stop(self):
        self.is_stopping = True
        await self.placement.stop()
        await self.save()
        self.kill()

    def kill(self):
        self.process.kill()
        self.world.network.servers.pop(self.endpoint, None)

    async def backward(self, x, grad, request_id, uid):
        """A gradient of a client, as the service gets it from grpc."""
        if not self.is_ready:
            raise ConnectionError("not listening yet")
        message = compress({"0": x, "grad": grad}, "none", {"uid": uid, "id": request_id})
        held = Held(self.service.budget, "client", 0)
        answer = await self.service._backward(Call(message, "client", float("inf"), held))
        return decode(encode(answer), STATE)
