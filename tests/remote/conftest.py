"""Fixtures of the tests of remote experts: an etcd of their own, servers that are stopped, whatever happens."""

import contextlib
import dataclasses
import shutil
import signal
import subprocess
import time

import pytest
from processes import SERVER, Process, Zygote

from fmoe_ext.remote import DeclaredExperts, Directory, Options, Server, Settings, StaticList, loop
from fmoe_ext.remote.discovery import DiscoveryError
from fmoe_ext.remote.etcd.client import EtcdClient
from tests import ports

LONG = 60.0  # seconds that nothing takes here, on however slow and busy a machine
PATIENT = Settings(forward_timeout=LONG, backward_timeout=LONG, info_timeout=LONG)
QUICK = dataclasses.replace(PATIENT, patience=0.3)


@contextlib.contextmanager
def within(seconds):
    """Asserts that the block takes less than so many seconds: far more than it does, far less than LONG."""
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < seconds


def wait_until(condition, what="it came true", seconds=LONG):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def start_etcd(folder, host="127.0.0.1"):
    """(process, "host:port") of an etcd that answers."""
    binary = shutil.which("etcd")
    if binary is None:
        pytest.skip("etcd is not installed (Debian: apt-get install etcd-server)")
    client, peer = ports.free_port(), ports.free_port()
    command = [
        binary, "--data-dir", str(folder), "--name", "test", "--unsafe-no-fsync",
        "--listen-client-urls", f"http://{host}:{client}",
        "--advertise-client-urls", f"http://{host}:{client}",
        "--listen-peer-urls", f"http://127.0.0.1:{peer}",
        "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}",
        "--initial-cluster", f"test=http://127.0.0.1:{peer}",
        "--logger", "zap", "--log-level", "error",
    ]  # fmt: skip
    command.remove("--unsafe-no-fsync")  # etcd 3.4 does not know it
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    endpoint = f"{host}:{client}"
    probe = EtcdClient(endpoint)
    for _ in range(1200):
        try:
            loop.run(probe.read("/", timeout=1.0), 60)
            loop.run(probe.close(), 60)
            return process, endpoint
        except DiscoveryError:
            time.sleep(0.1)
    process.kill()
    raise RuntimeError("etcd did not start within 120 s")


@pytest.fixture(scope="session")
def etcd_endpoint(tmp_path_factory):
    process, endpoint = start_etcd(tmp_path_factory.mktemp("etcd"))
    yield endpoint
    process.kill()
    process.wait()


@pytest.fixture
def etcd(etcd_endpoint):
    """The endpoint of an empty etcd."""
    from fmoe_ext.remote.etcd.client import build

    async def empty():
        client = EtcdClient(etcd_endpoint)
        await client._call("/etcdserverpb.KV/DeleteRange", build({1: b"/", 2: b"0"}), 5.0)
        await client.close()

    loop.run(empty(), 60)
    return etcd_endpoint


@pytest.fixture(scope="session")
def zygote():
    started = Zygote()
    yield started
    started.close()


@pytest.fixture
def start_process(zygote, tmp_path):
    """start_process(module, *flags) -> Process that is killed at the end"""
    started = []

    def start(module, *flags):
        started.append(Process(zygote, tmp_path / f"process-{len(started)}.log", module, *flags))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.end(signal.SIGKILL)


@pytest.fixture
def start_server(start_process):
    """start_server(*flags) -> Process of a small fmoe-server on 127.0.0.1"""
    small = ("--hidden_dim", 16, "--num_threads", 1, "--listen_on")
    return lambda *flags: start_process(SERVER, *small, ports.endpoint(), *flags)


@pytest.fixture
def serve():
    """serve(**options of the server, settings=, credentials=) -> (Server, Directory that finds its experts)."""
    stop = []

    def start(settings=None, credentials=None, discovery=None, **options):
        discovery = discovery or StaticList()
        given = {"hidden_dim": 16, "expert_uids": ("expert.0", "expert.1"), "listen_on": ports.endpoint()}
        server = Server(Options(**{**given, **options}), DeclaredExperts(discovery)).start()
        directory = Directory(discovery, settings or PATIENT, credentials)
        stop.extend((directory.shutdown, server.stop))
        return server, directory

    yield start
    for end in stop:
        end()
