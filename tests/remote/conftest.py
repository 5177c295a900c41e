"""Fixtures of the tests of remote experts: an etcd of their own, servers that are stopped, whatever happens."""

import contextlib
import dataclasses
import inspect
import shutil
import signal
import socket
import subprocess
import threading
import time

import pytest
from aetcd import rpc
from processes import SERVER, Process, Zygote

from fmoe_ext.remote import (
    Client,
    DeclaredExperts,
    Directory,
    Options,
    RemoteExpert,
    Server,
    Settings,
    StaticList,
    loop,
)
from fmoe_ext.remote.discovery import DiscoveryError
from fmoe_ext.remote.etcd import keys
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


def end(thing):
    """Ends a server, client, caller, discovery, directory or network."""
    names = [name for name in ("stop", "shutdown", "close") if hasattr(thing, name)]
    result = getattr(thing, names[0])()
    if inspect.isawaitable(result):
        loop.run(result, LONG)


@pytest.fixture
def ends():
    """ends(thing) -> thing, which ends after the test, whatever happens: the last one first."""
    with contextlib.ExitStack() as stack:

        def at_the_end(thing):
            stack.callback(end, thing)
            return thing

        yield at_the_end


@pytest.fixture(autouse=True)
def no_server_is_left():
    """Fails a test that leaves a server in this process, where it would go on in the registry of the next tests."""
    before = set(threading.enumerate())
    yield
    left = [
        thread for thread in threading.enumerate() if thread.name == "fmoe-compute" and thread not in before
    ]
    assert not left, f"{len(left)} servers of this test still run: give them to the fixture `ends`"


@pytest.fixture(scope="session")
def etcd_endpoint(tmp_path_factory):
    process, endpoint = start_etcd(tmp_path_factory.mktemp("etcd"))
    yield endpoint
    process.kill()
    process.wait()


@pytest.fixture
def etcd(etcd_endpoint):
    """The endpoint of an empty etcd, which no server of an earlier test uses."""

    async def empty():
        client = EtcdClient(etcd_endpoint)
        entries, _ = await client.read(keys.SERVERS, is_prefix=True)
        everything = rpc.DeleteRangeRequest(key=b"/", range_end=b"0")
        await client._call("KV/DeleteRange", everything, rpc.DeleteRangeResponse, 5.0)
        await client.close()
        servers = [keys.load(keys.ServerEntry, entry.value) for entry in entries]
        return [server.endpoint for server in servers if server is not None]

    for endpoint in loop.run(empty(), 60):  # a dead one's entry stays until its lease ends
        host, _, port = endpoint.rpartition(":")
        if host == "127.0.0.1":
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5.0):
                pytest.fail(f"an earlier test left the server at {endpoint}, which writes into this registry")
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
def expert_at(ends):
    """expert_at(endpoint, uid) -> the expert at this server, which is not waited for."""
    settings = dataclasses.replace(PATIENT, patience=0)
    return lambda endpoint, uid="expert.0": RemoteExpert(uid, endpoint, ends(Client(settings=settings)))


@pytest.fixture
def start_server(start_process):
    """start_server(*flags) -> Process of a small fmoe-server on 127.0.0.1"""
    small = ("--hidden_dim", 16, "--num_threads", 1, "--listen_on")
    return lambda *flags: start_process(SERVER, *small, ports.endpoint(), *flags)


@pytest.fixture
def serve(ends):
    """serve(**options of the server, settings=, credentials=) -> (Server, Directory that finds its experts)."""

    def start(settings=None, credentials=None, discovery=None, **options):
        discovery = discovery or StaticList()
        given = {"hidden_dim": 16, "expert_uids": ("expert.0", "expert.1"), "listen_on": ports.endpoint()}
        server = ends(Server(Options(**{**given, **options}), DeclaredExperts(discovery)).start())
        return server, ends(Directory(discovery, settings or PATIENT, credentials))

    return start
