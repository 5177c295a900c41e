"""What a call to a remote expert costs: p50, p99, calls a second; server and client are two processes on this machine.

python -m benchmarks.bench_remote [--rounds 5] [--calls 40] [--peer "command"] [--json results/remote.json]

--peer: a program that measures another library in turn with this one: it reads a line "case calls" and answers with
a line of JSON, the seconds of each call; cases as in CASES.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks import common
from fmoe_ext.remote import Client, RemoteExpert, RemoteMixtureOfExperts, Settings, StaticList

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
    """fmoe-server in a process of its own, called from here."""

    def __enter__(self):
        self.log = tempfile.NamedTemporaryFile("w+")
        command = (
            *(sys.executable, "-m", "fmoe_ext.remote.server.main", "--no_dht", "--listen_on", "127.0.0.1:0"),
            *("--hidden_dim", str(WIDTH), "--expert_uids", *UIDS, "--lr", "1e-5"),
        )
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        while not (found := re.search(r"Server started at (\S+)", Path(self.log.name).read_text())):
            if self.process.poll() is not None:
                raise RuntimeError(Path(self.log.name).read_text())
            time.sleep(0.1)
        directory = StaticList(dict.fromkeys(UIDS, found[1]))
        client = Client(directory, Settings(forward_timeout=60, backward_timeout=60))
        self.experts = [RemoteExpert(uid, client=client) for uid in UIDS]
        self.mixture = RemoteMixtureOfExperts(
            WIDTH, (NUM_EXPERTS,), directory, "expert", K_BEST, forward_timeout=60, backward_timeout=60
        )
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(30)
        self.log.close()

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


class Peer:
    """Another library, measured by a program of its own."""

    def __init__(self, command):
        self.process = subprocess.Popen(
            shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def measure(self, case, calls):
        self.process.stdin.write(f"{case},{calls}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait(60)


def percentile(seconds, share):
    return sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))]


def summarize(case, name, seconds):
    clients = CLIENTS if CASES[case][0] == "clients" else 1
    return {
        "case": case,
        "who": name,
        "p50_ms": 1e3 * percentile(seconds, 0.5),
        "p99_ms": 1e3 * percentile(seconds, 0.99),
        "calls_per_second": clients * len(seconds) / sum(seconds),
        "calls": len(seconds),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=40, help="a case and round")
    parser.add_argument("--peer")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    with Ours() as ours:
        libraries = {"fmoe_ext": ours}
        if args.peer:
            libraries["peer"] = Peer(args.peer).__enter__()
        for case in CASES:
            seconds = {name: [] for name in libraries}
            for library in libraries.values():
                library.measure(case, 2)
            for _ in range(args.rounds):
                for name, library in libraries.items():
                    seconds[name] += library.measure(case, args.calls)
            results += [summarize(case, name, got) for name, got in seconds.items()]
            print(*results[-len(libraries) :], sep="\n", flush=True)
        if args.peer:
            libraries["peer"].__exit__()
    rows = [
        (r["case"], r["who"], f"{r['p50_ms']:.2f}", f"{r['p99_ms']:.2f}", f"{r['calls_per_second']:.0f}")
        for r in results
    ]
    text = common.table(["case", "who", "p50 ms", "p99 ms", "calls/s"], rows)
    print(text)
    if args.json:
        common.write(args.json, "python -m benchmarks.bench_remote", results, text)


if __name__ == "__main__":
    main()
