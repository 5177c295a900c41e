"""Cost of a call to a remote expert: p50, p99, calls a second; server and client are two processes on this machine.

python -m benchmarks.bench_remote [--rounds 5] [--calls 40] [--peer "command"] [--json results/remote.json]
    [--replicas 2] [--bad_network] [--cases "forward 1,forward 256"]

--replicas: so many servers keep each expert, with an etcd of this run's own. --bad_network: a proxy between client and
server delays data by 50 ms a way (25 to 75), and 2 % of it as TCP does after a lost packet.

--peer: a program that measures another library in turn with this one (remote_peer_hivemind.py says how to get it and
what it reads). One that fails, or takes longer than --patience seconds, is started again; what it could not do is in
the table as an error, and the run goes on.
"""

import argparse
import contextlib
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks import common
from benchmarks.remote_servers import hosting
from fmoe_ext.remote import Client, RemoteExpert, RemoteMixtureOfExperts, Settings
from tests.ports import free_port
from tests.remote.proxy import BadNetwork

WIDTH, NUM_EXPERTS, K_BEST, MOE_BATCH, CLIENTS = 512, 5, 4, 32, 8
UIDS = [f"expert.{n}" for n in range(NUM_EXPERTS)]
CASES = {
    "forward 1": ("expert", 1, False),
    "forward + backward 1": ("expert", 1, True),
    "forward 256": ("expert", 256, False),
    "forward + backward 256": ("expert", 256, True),
    "8 clients forward": ("clients", 64, False),
    "8 clients forward + backward": ("clients", 64, True),
    "mixture forward": ("mixture", MOE_BATCH, False),
    "mixture forward + backward": ("mixture", MOE_BATCH, True),
}


class Ours:
    """fmoe-server in processes of its own, called from here."""

    def __init__(self, replicas=0, network=None):
        self.replicas, self.network = replicas, network

    def __enter__(self):
        self.stack = contextlib.ExitStack()
        directory = self.stack.enter_context(hosting(UIDS, WIDTH, self.replicas, self.network))
        client = Client(directory, Settings(forward_timeout=60, backward_timeout=60))
        self.experts = [RemoteExpert(uid, client=client) for uid in UIDS]
        self.mixture = RemoteMixtureOfExperts(
            WIDTH, (NUM_EXPERTS,), directory, "expert", K_BEST, forward_timeout=60, backward_timeout=60
        )
        return self

    def __exit__(self, *_):
        self.stack.close()

    def measure(self, case, calls):
        kind, rows, with_backward = CASES[case]
        module = self.mixture if kind == "mixture" else self.experts[0]
        if kind != "clients":
            return timed(module, rows, with_backward, calls)
        with ThreadPoolExecutor(CLIENTS) as pool:
            jobs = [
                pool.submit(timed, self.experts[n % NUM_EXPERTS], rows, with_backward, calls)
                for n in range(CLIENTS)
            ]
            seconds = [s for job in jobs for s in job.result()]
        return seconds


def timed(module, rows, with_backward, calls):
    seconds, x = [], torch.randn(rows, WIDTH)
    for _ in range(calls):
        begin = time.perf_counter()
        if with_backward:
            module(x).sum().backward()
        else:
            with torch.no_grad():
                module(x)
        seconds.append(time.perf_counter() - begin)
    return seconds


class PeerFailed(Exception):
    """The other library did not measure a case; the text is what it said."""


class Peer:
    """Another library, measured by a program of its own."""

    def __init__(self, command, patience, network=None):
        self.command, self.patience, self.process = shlex.split(command), patience, None
        if network is not None:
            port = free_port()
            proxy = network.to(f"127.0.0.1:{port}").rpartition(":")[2]
            self.command += ["--through", str(port), proxy]

    def measure(self, case, calls):
        kind, rows, with_backward = CASES[case]
        clients = CLIENTS if kind == "clients" else 1
        answer = self._ask(f"{kind},{rows},{int(with_backward)},{clients},{calls}")
        if "error" in answer:
            self.stop()  # its processes may be out of step with each other
            raise PeerFailed(answer["error"])
        return answer["seconds"]

    def _ask(self, line):
        if self.process is None:
            self._start()
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            return json.loads(self.lines.get(timeout=self.patience) or '{"error": "it ended"}')
        except (queue.Empty, OSError) as error:
            return {"error": f"no answer within {self.patience:.0f} s {error!r}"}

    def _start(self):
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.lines = lines = queue.Queue()
        threading.Thread(target=_read_lines, args=(self.process.stdout, lines), daemon=True).start()

    def stop(self):
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):  # with all that it has started
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(60)
            self.process = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


def _read_lines(stream, lines):
    for line in stream:
        lines.put(line)
    lines.put("")


def percentile(seconds, share):
    return sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))]


def summarize(case, name, seconds, error):
    clients = CLIENTS if CASES[case][0] == "clients" else 1
    facts = {"case": case, "who": name, "calls": len(seconds), "error": error}
    if seconds:
        facts["p50_ms"] = 1e3 * percentile(seconds, 0.5)
        facts["p99_ms"] = 1e3 * percentile(seconds, 0.99)
        facts["calls_per_second"] = clients * len(seconds) / sum(seconds)
    return facts


def run_case(case, libraries, rounds, calls):
    """All libraries in turn, round by round -> a summary of each."""
    seconds = {name: [] for name in libraries}
    errors = dict.fromkeys(libraries, "")
    for number in range(rounds + 1):  # the first one warms up
        for name, library in libraries.items():
            try:
                got = library.measure(case, calls if number else 2)
                seconds[name] += got if number else []
            except PeerFailed as error:
                errors[name] = str(error)
    return [summarize(case, name, got, errors[name]) for name, got in seconds.items()]


def row(result):
    if "p50_ms" not in result:
        return result["case"], result["who"], "failed", result["error"][:60], ""
    p50, p99, rate = (
        f"{result[key]:.{n}f}" for key, n in (("p50_ms", 2), ("p99_ms", 2), ("calls_per_second", 0))
    )
    return result["case"], result["who"], p50, p99, rate


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=40, help="a case and round")
    parser.add_argument("--peer")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds the peer has for a round")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--replicas", type=int, default=0, help="servers that keep each expert; 0: no registry"
    )
    parser.add_argument("--bad_network", action="store_true", help="50 ms a way and 2 %% loss")
    parser.add_argument("--cases", default=",".join(CASES), help="those to measure")
    args = parser.parse_args()
    cases = args.cases.split(",")
    if unknown := set(cases) - set(CASES):
        parser.error(f"unknown cases {sorted(unknown)}: choose from {', '.join(CASES)}")
    results = []
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(contextlib.closing(BadNetwork())) if args.bad_network else None
        libraries = {"fmoe_ext": stack.enter_context(Ours(args.replicas, network))}
        if args.peer:
            libraries["peer"] = stack.enter_context(Peer(args.peer, args.patience, network))
        for case in cases:
            results += run_case(case, libraries, args.rounds, args.calls)
            print(*results[-len(libraries) :], sep="\n", flush=True)
    text = common.table(["case", "who", "p50 ms", "p99 ms", "calls/s"], [row(r) for r in results])
    print(text)
    if args.json:
        common.write(
            args.json, shlex.join(["python", "-m", "benchmarks.bench_remote", *sys.argv[1:]]), results, text
        )


if __name__ == "__main__":
    main()
