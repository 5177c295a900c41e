"""Two trainers share four experts on three servers, two replicas each; each server is killed once, and others join.

Everything runs on this machine, on 127.0.0.1 and free ports: etcd, the servers, the trainers. The loss curve, with
the moments marked, goes to --out. Exit status: 0 done, 1 something failed, 2 etcd is missing or wrong arguments,
130 or 143 interrupted (Ctrl-C, SIGTERM); whatever it started ends with it.
"""

import argparse
import contextlib
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import matplotlib

from fmoe_ext.remote import Client, Directory, EtcdDiscovery, loop

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
NUM_SERVERS = 3
COLORS = ("#c2410c", "#1d4ed8")


def free_ports(count):
    """Ports below the usual ephemeral range: no outgoing connection takes one before etcd has it."""
    with contextlib.ExitStack() as stack:
        found = []
        while len(found) < count:
            s = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                s.bind(("127.0.0.1", random.randrange(20_000, 32_000)))
                found.append(s.getsockname()[1])
        return found


class Processes:
    """Processes started here, each with its log; they end with this object."""

    def __init__(self, folder):
        self.folder, self.all = folder, {}

    def start(self, name, *command):
        log = (self.folder / f"{name}.log").open("w")
        self.all[name] = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log)
        return self.all[name]

    def wait_for(self, name, text, seconds=300):
        path, end = self.folder / f"{name}.log", time.monotonic() + seconds
        while text not in path.read_text():
            if self.all[name].poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{name} did not say {text!r}, see {path}")
            time.sleep(0.1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in reversed(self.all.values()):
            process.terminate()
        for process in reversed(self.all.values()):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def start_etcd(processes):
    client, peer = free_ports(2)
    client_url, peer_url = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    processes.start(
        "etcd",
        *(shutil.which("etcd"), "--data-dir", processes.folder / "etcd", "--name", "example"),
        *("--listen-client-urls", client_url, "--advertise-client-urls", client_url),
        *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
        *("--initial-cluster", f"example={peer_url}"),
    )
    return f"127.0.0.1:{client}"


def start_server(processes, name, registry, args, num_experts):
    uids = [f"expert.{n}" for n in range(args.num_experts)] if num_experts else []
    flags = ["--expert_uids", *uids] if uids else ["--num_experts", 0]
    processes.start(
        name,
        *(sys.executable, "-m", "fmoe_ext.remote.server.main", "--listen_on", "127.0.0.1:0", *flags),
        *("--registry", f"etcd://{registry}", "--replicas", 2, "--lease", 3, "--hidden_dim", args.width),
        *("--optimizer", "adam", "--lr", 1e-3, "--clip_grad_norm", 1.0, "--num_threads", 1),
        *("--stats_report_interval", 10),
    )


def read_metrics(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_step(paths, step, processes, trainers):
    """Until the slower trainer has made so many steps."""
    while min(len(read_metrics(path)) for path in paths) < step:
        for name in trainers:
            if processes.all[name].poll() not in (None, 0):
                raise RuntimeError(f"{name} failed, see {processes.folder / name}.log")
        time.sleep(0.2)


def draw(paths, killed, joined, out):
    figure, axis = plt.subplots(figsize=(9, 4.5), layout="constrained")
    begin = min(read_metrics(path)[0]["time"] for path in paths)
    for number, path in enumerate(paths):
        records = [r for r in read_metrics(path) if r["loss"] is not None]
        seconds = [r["time"] - begin for r in records]
        axis.plot(seconds, [r["loss"] for r in records], color=COLORS[number], lw=0.8, alpha=0.3)
        axis.plot(
            seconds, smooth([r["loss"] for r in records]), color=COLORS[number], label=f"trainer {number}"
        )
    for number, (dead, new) in enumerate(zip(killed, joined, strict=True)):
        first = number == 0  # one entry in the legend
        axis.axvline(
            dead - begin, color="black", ls="--", lw=1, label="a server is killed" if first else None
        )
        axis.axvline(new - begin, color="gray", ls=":", lw=1, label="another one joins" if first else None)
    axis.set_xlabel("seconds")
    axis.set_ylabel("loss (nats a byte)")
    axis.legend(frameon=False)
    axis.set_title("Two trainers, four experts with two replicas on three servers")
    figure.savefig(out, dpi=120)


def smooth(values, share=0.9):
    smoothed, mean = [], values[0]
    for value in values:
        mean = share * mean + (1 - share) * value
        smoothed.append(mean)
    return smoothed


def count_applied(registry, num_experts):
    """Number of gradients that the experts have applied, as their leaders report."""
    discovery = EtcdDiscovery(registry)
    client, uids = Client(discovery), [f"expert.{n}" for n in range(num_experts)]
    records = loop.run(discovery.get(uids), 10)
    states = [loop.run(client.state(client.handle(r.uid, r), r.endpoints[0], 10), 20) for r in records if r]
    Directory(discovery).shutdown()
    return sum(int(state.meta["requests"]) for state in states)


def run(args, processes):
    registry = start_etcd(processes)
    time.sleep(1)
    for number in range(NUM_SERVERS):
        start_server(processes, f"server-{number}", registry, args, args.num_experts if number == 0 else 0)
        processes.wait_for(f"server-{number}", "Server started")
    wait_for_replicas(registry, args.num_experts)
    trainers = [f"trainer-{number}" for number in range(2)]
    paths = [args.out / f"{name}.jsonl" for name in trainers]
    for number, (name, path) in enumerate(zip(trainers, paths, strict=True)):
        flags = ("--registry", registry, "--steps", args.steps, "--seed", number, "--metrics", path)
        flags += ("--compression", args.compression, "--width", args.width, "--num-experts", args.num_experts)
        processes.start(name, sys.executable, HERE / "trainer.py", *flags)
    killed, joined = [], []
    for number in range(NUM_SERVERS):
        wait_for_step(paths, args.steps * (number + 1) // (NUM_SERVERS + 1), processes, trainers)
        wait_for_replicas(registry, args.num_experts)  # one death at a time: two replicas stand one
        processes.all[f"server-{number}"].send_signal(signal.SIGKILL)
        killed.append(time.time())
        new = f"server-{number + NUM_SERVERS}"
        start_server(processes, new, registry, args, 0)
        processes.wait_for(new, "Server started")
        joined.append(time.time())
        print(f"server-{number} was killed, {new} has joined", flush=True)
    wait_for_step(paths, args.steps, processes, trainers)
    draw(paths, killed, joined, args.out / "curve.png")
    return report(paths, count_applied(registry, args.num_experts), args.out)


def wait_for_replicas(registry, num_experts, seconds=60):
    discovery, end = EtcdDiscovery(registry), time.monotonic() + seconds
    uids = [f"expert.{n}" for n in range(num_experts)]
    while not all(r and len(r.endpoints) == 2 for r in loop.run(discovery.get(uids), 10)):
        if time.monotonic() > end:
            raise RuntimeError(f"the experts did not have two replicas within {seconds} s")
        time.sleep(0.2)
    loop.run(discovery.close(), 5)


def report(paths, num_applied, out):
    """Print what happened -> False if nothing was learned, or an acknowledged gradient is missing or applied twice."""
    learned = True
    for path in paths:
        records = read_metrics(path)
        losses = [r["loss"] for r in records if r["loss"] is not None]
        some = 20 if len(losses) >= 20 else max(1, len(losses) // 2)
        first, last = sum(losses[:some]) / some, sum(losses[-some:]) / some
        longest = max(r["seconds"] for r in records)
        failed = sum(bool(r["failed"]) for r in records)
        print(
            f"{path.stem}: loss {first:.3f} -> {last:.3f} in {len(records)} steps, {records[-1]['lost']} gradients "
            f"lost, {records[-1]['retries']} retries, {failed} failed, longest step {longest:.1f} s"
        )
        learned = learned and last < first and failed <= 0.02 * len(records)
    heard = sum(read_metrics(path)[-1]["applied"] for path in paths)
    lost = sum(read_metrics(path)[-1]["lost"] for path in paths)
    print(
        f"{heard} gradients were acknowledged, {num_applied} are in the experts; curve: {out / 'curve.png'}"
    )
    if not heard <= num_applied <= heard + lost:
        print("an acknowledged gradient is missing, or one was applied twice", file=sys.stderr)
        return False
    return learned


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


def prepare(folder):
    """Makes the folder, or takes away what an earlier run left there; ValueError if anything else is in it."""
    folder.mkdir(parents=True, exist_ok=True)
    ours = {path for name in ("*.log", "trainer-*.jsonl", "curve.png", "etcd") for path in folder.glob(name)}
    if others := sorted(set(folder.iterdir()) - ours):
        raise ValueError(
            f"{folder} holds what no earlier run has left, as {others[0].name}: name a new folder"
        )
    for path in ours:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def positive(text):
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return int(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--steps", type=positive, default=600, help="of each trainer")
    parser.add_argument("--width", type=positive, default=64, help="of the experts' input")
    parser.add_argument("--num-experts", type=positive, default=4)
    parser.add_argument("--compression", choices=("none", "bf16", "int8"), default="none", help="on the wire")
    parser.add_argument(
        "--out", type=Path, default=Path("out/remote"), help="a new folder, or that of an earlier run"
    )
    args = parser.parse_args()
    if shutil.which("etcd") is None:
        print("etcd is needed to keep replicas in order: apt-get install etcd-server", file=sys.stderr)
        return 2
    try:
        prepare(args.out)
    except (OSError, ValueError) as error:
        parser.error(f"--out: {error}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with Processes(args.out) as processes:
            return 0 if run(args, processes) else 1
    except RuntimeError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("train.py: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
