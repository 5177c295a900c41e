"""Servers for bench_remote: fmoe-server processes, with or without a registry, directly or through a bad network."""

import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fmoe_ext.remote import EtcdDiscovery, StaticList, loop
from fmoe_ext.remote.discovery import DiscoveryError
from tests.ports import endpoint


@contextlib.contextmanager
def running(*command):
    """A process and the file of what it prints; it is ended with the block."""
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield process, Path(log.name)
        finally:
            process.terminate()
            process.wait(30)


@contextlib.contextmanager
def etcd():
    """host:port of an etcd of this run's own."""
    if shutil.which("etcd") is None:
        raise SystemExit("--replicas needs etcd (Debian: apt-get install etcd-server)")
    client, peer = endpoint(), endpoint()
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--data-dir", folder, "--name", "bench", "--initial-cluster", f"bench=http://{peer}")
        clients = ("--listen-client-urls", f"http://{client}", "--advertise-client-urls", f"http://{client}")
        peers = ("--listen-peer-urls", f"http://{peer}", "--initial-advertise-peer-urls", f"http://{peer}")
        with running("etcd", *flags, *clients, *peers):
            yield client


@contextlib.contextmanager
def server(*flags):
    """host:port of an fmoe-server."""
    command = (sys.executable, "-m", "fmoe_ext.remote.server.main", "--listen_on", "127.0.0.1:0", *flags)
    with running(*command) as (process, log):
        while not (found := re.search(r"Server started at (\S+)", log.read_text())):
            if process.poll() is not None:
                raise RuntimeError(log.read_text())
            time.sleep(0.1)
        yield found[1]


@contextlib.contextmanager
def hosting(uids, width, replicas=0, network=None):
    """The directory of experts that servers host. replicas: servers that keep each of them, 0: no registry."""
    flags = ("--hidden_dim", str(width), "--expert_uids", *uids, "--lr", "1e-5")
    with contextlib.ExitStack() as stack:
        if not replicas:
            endpoint = stack.enter_context(server("--no_dht", *flags))
            yield StaticList(dict.fromkeys(uids, network.to(endpoint) if network else endpoint))
            return
        registry = stack.enter_context(etcd())
        for _ in range(replicas):
            where = ()
            if network is not None:
                where = ("--listen_on", own := endpoint(), "--announce", network.to(own))
            more = ("--registry", f"etcd://{registry}", "--replicas", str(replicas), *where)
            stack.enter_context(server(*flags, *more))
        directory = EtcdDiscovery(registry)
        stack.callback(lambda: loop.run(directory.close(), 5))
        _wait_for(directory, uids, replicas)
        yield directory


def _wait_for(directory, uids, replicas):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with contextlib.suppress(DiscoveryError):
            records = loop.run(directory.get(uids), 10)
            if all(record and len(record.endpoints) >= replicas for record in records):
                return
        time.sleep(0.2)
    raise RuntimeError(f"the experts do not have {replicas} replicas after 60 s")
