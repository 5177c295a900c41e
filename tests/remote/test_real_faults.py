"""Real servers, a real etcd, real signals and cut networks: the checker of the simulation on what trainers saw."""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from fmoe_ext.remote import errors, loop, protocol
from fmoe_ext.remote.client.caller import Caller
from fmoe_ext.remote.discovery import DiscoveryError
from fmoe_ext.remote.etcd import keys
from fmoe_ext.remote.etcd.client import EtcdClient, EtcdDiscovery
from fmoe_ext.remote.wire import Message, encode
from tests import ports
from tests.remote.conftest import start_etcd
from tests.remote.simulation.checker import Held, History, check

D, UID, TTL = 16, "expert.0", 2.0
FLAGS = ("--hidden_dim", D, "--num_threads", 1, "--expert_uids", UID, "--replicas", 3, "--lease", TTL)


class Trainers:
    """Gradients under ids of their own, each repeated until it is acknowledged."""

    def __init__(self, etcd, count, pause):
        self.history, self.is_over, self.pause = History(), False, pause
        self.discovery, self.caller = EtcdDiscovery(etcd), Caller()
        self.futures = [loop.submit(self._train(random.Random(n))) for n in range(count)]

    async def _train(self, rng):
        while not self.is_over:
            await self._gradient(rng)
            await asyncio.sleep(rng.uniform(0, 2 * self.pause))

    async def _gradient(self, rng):
        request_id = f"{rng.getrandbits(128):032x}"
        x = torch.full((2, D), rng.uniform(-1, 1))
        data = encode(
            Message({"0": x, "grad": x * 0.1}, {protocol.UID: UID, protocol.REQUEST_ID: request_id})
        )
        self.history.begun[request_id] = time.monotonic()
        while True:
            try:
                (record,) = await self.discovery.get([UID], timeout=2.0)
                where = record.endpoints[0] if record else ""
                answer = await self.caller.call(where, protocol.BACKWARD, data, 3.0)
                self.history.acknowledged[request_id] = int(answer.meta[protocol.VERSION])
                return
            except (errors.RemoteError, DiscoveryError):
                await asyncio.sleep(0.1)

    def finish(self, seconds):
        """Waits until every gradient that was begun is acknowledged."""
        self.is_over = True
        for future in self.futures:
            future.result(seconds)

    def close(self):
        for future in self.futures:
            future.cancel()
        loop.run(self.caller.close(), 60)
        loop.run(self.discovery.close(), 60)


async def read_record(etcd):
    client = EtcdClient(etcd)
    try:
        entries, _ = await client.read(keys.members_key(UID))
        return keys.load(keys.Members, entries[0].value).endpoints if entries else {}
    finally:
        await client.close()


async def read_held(endpoint):
    caller = Caller()
    try:
        request = encode(Message({}, {protocol.UID: UID}))
        state = await caller.download(endpoint, protocol.STATE, request, 5.0)
    finally:
        await caller.close()
    ids = bytes(state.tensors["applied.ids"].tolist())
    names = [ids[n : n + 16].hex() for n in range(0, len(ids), 16)]
    applied = dict(zip(names, state.tensors["applied.versions"].tolist(), strict=True))
    weights = b"".join(
        x.numpy().tobytes() for n, x in sorted(state.tensors.items()) if n.startswith("weight/")
    )
    return Held(applied, int(state.meta["requests"]), int(state.meta["version"]), weights.hex())


def wait_for_members(etcd, count, seconds=90):
    end = time.monotonic() + seconds
    while True:
        held = []
        with contextlib.suppress(errors.RemoteError, DiscoveryError):  # both may be slow on a busy machine
            endpoints = loop.run(read_record(etcd), 60)
            held = [loop.run(read_held(endpoint), 60) for endpoint in endpoints.values()]
        if len(held) == count and len({h.version for h in held}) == 1:
            return held
        assert time.monotonic() < end, f"{len(held)} of {count} members after {seconds} s"
        time.sleep(0.3)


@pytest.mark.parametrize(
    ("kills", "stops", "seconds"),
    [
        pytest.param(3, 2, 25, marks=pytest.mark.long),
        pytest.param(100, 50, 600, marks=pytest.mark.slow),
    ],
)
def test_signals_at_random_lose_no_update(etcd, start_process, tmp_path, kills, stops, seconds):
    """One server at a time is killed or paused; it comes back before the next one is chosen."""
    rng = random.Random(kills)

    def start(n):
        flags = (*FLAGS, "--listen_on", ports.endpoint(), "--registry", f"etcd://{etcd}")
        server = start_process(
            "fmoe_ext.remote.server.main", *flags, "--checkpoint_dir", tmp_path / f"disk-{n}"
        )
        server.endpoint()
        return server

    servers = [start(n) for n in range(3)]
    wait_for_members(etcd, 3)
    trainers = Trainers(etcd, 4, seconds / 220)
    faults = ["kill"] * kills + ["stop"] * stops
    rng.shuffle(faults)
    begin = time.monotonic()
    try:
        for number, fault in enumerate(faults):
            place = rng.randrange(3)
            if fault == "kill":
                os.kill(servers[place].pid, signal.SIGKILL)
                servers[place].wait()
                servers[place] = start(place)
            else:
                os.kill(servers[place].pid, signal.SIGSTOP)
                time.sleep(rng.choice((0.3, 1.5 * TTL)))
                os.kill(servers[place].pid, signal.SIGCONT)
            wait_for_members(etcd, 3)
            time.sleep(
                max(0.0, rng.uniform(0, 2) * (begin + seconds * number / len(faults) - time.monotonic()))
            )
        trainers.finish(60)
        held = wait_for_members(etcd, 3)
    finally:
        trainers.close()
    check(trainers.history, held)
    assert len(trainers.history.acknowledged) == held[0].num_requests > len(faults)


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def namespaces():
    """Addresses of a bridge and of three network namespaces on it; cut(a, b) stops what a sends to b."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    mark = f"{os.getpid() % 100_000}"
    net = f"10.{200 + os.getpid() % 50}.{os.getpid() % 250}"
    names = [f"fmoe{mark}n{n}" for n in range(3)]
    made = []
    try:
        try:
            ip("link", "add", f"fb{mark}", "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no bridge can be made here: {error.stderr.decode().strip()}")
        made.append(("link", "del", f"fb{mark}"))
        ip("addr", "add", f"{net}.1/24", "dev", f"fb{mark}")
        ip("link", "set", f"fb{mark}", "up")
        for n, name in enumerate(names):
            ip("netns", "add", name)
            made.append(("netns", "del", name))
            ip("link", "add", f"fv{mark}{n}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"fv{mark}{n}", "master", f"fb{mark}", "up")
            ip("-n", name, "addr", "add", f"{net}.{n + 2}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names, [f"{net}.{n}" for n in (1, 2, 3, 4)]
    finally:
        for command in reversed(made):
            ip(*command)


@pytest.mark.slow
def test_networks_cut_in_one_direction_or_both_lose_no_update(namespaces, tmp_path):
    names, addresses = namespaces
    rng = random.Random(0)
    process, etcd = start_etcd(tmp_path / "etcd", host=addresses[0])
    servers, trainers = [], None
    try:
        for n, name in enumerate(names):
            command = [sys.executable, "-m", "fmoe_ext.remote.server.main", *map(str, FLAGS)]
            command += ["--listen_on", f"{addresses[n + 1]}:1400", "--registry", f"etcd://{etcd}"]
            with open(tmp_path / f"server-{n}.log", "w") as log:
                inside = ["ip", "netns", "exec", name, *command]
                servers.append(subprocess.Popen(inside, stdout=log, stderr=log))
        wait_for_members(etcd, 3, 180)
        trainers = Trainers(etcd, 4, 0.5)
        for _ in range(12):
            place = rng.randrange(3)
            others = [a for n, a in enumerate(addresses) if n != place + 1]
            cut = [(names[place], a) for a in (others if rng.random() < 0.5 else rng.sample(others, 1))]
            if rng.random() < 0.5:  # the other direction too, between servers
                cut += [(name, addresses[place + 1]) for name in names if name != names[place]]
            for name, address in cut:
                ip("-n", name, "route", "add", "blackhole", f"{address}/32")
            time.sleep(rng.choice((0.5, 1.5 * TTL, 3 * TTL)))
            for name, address in cut:
                ip("-n", name, "route", "del", "blackhole", f"{address}/32")
            wait_for_members(etcd, 3)
        trainers.finish(60)
        held = wait_for_members(etcd, 3)
        check(trainers.history, held)
        assert len(trainers.history.acknowledged) == held[0].num_requests > 12
    finally:
        if trainers is not None:
            trainers.close()
        for server in servers:
            server.kill()
            server.wait()
        process.kill()
        process.wait()
