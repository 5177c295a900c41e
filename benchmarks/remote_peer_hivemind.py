"""hivemind 1.1.12 behind the line protocol of bench_remote: run by the Python of an environment that has it.

python -m venv DIR && DIR/bin/pip install --only-binary hivemind hivemind==1.1.12
python -m benchmarks.bench_remote --peer "DIR/bin/python benchmarks/remote_peer_hivemind.py"

--through PORT PROXY: its server listens on that port, and others reach it at the port of a proxy.
Reads "kind,rows,backward,clients,calls", answers {"seconds": [...]} or {"error": text}. Imports nothing from here.
"""

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

os.environ["HIVEMIND_LOGLEVEL"] = "ERROR"
import torch
from hivemind import DHT
from hivemind.moe import RemoteMixtureOfExperts, Server, get_experts

WIDTH, NUM_EXPERTS, K_BEST = 512, 5, 4


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


def measure(line, experts, mixture):
    kind, *numbers = line.strip().split(",")
    rows, with_backward, clients, calls = map(int, numbers)
    if kind == "mixture":
        return timed(mixture, rows, with_backward, calls)
    with ThreadPoolExecutor(clients) as pool:
        jobs = [
            pool.submit(timed, experts[n % NUM_EXPERTS], rows, with_backward, calls) for n in range(clients)
        ]
        return [s for job in jobs for s in job.result()]


def own_dht():
    """The options of the server's DHT."""
    if "--through" not in sys.argv:
        return {}
    port, proxy = sys.argv[sys.argv.index("--through") + 1 :][:2]
    return {
        "host_maddrs": [f"/ip4/127.0.0.1/tcp/{port}"],
        "announce_maddrs": [f"/ip4/127.0.0.1/tcp/{proxy}"],
    }


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    uids = [f"expert.{n}" for n in range(NUM_EXPERTS)]
    server = Server.create(
        expert_uids=uids,
        expert_cls="ffn",
        hidden_dim=WIDTH,
        optim_cls=lambda parameters: torch.optim.SGD(parameters, lr=1e-5),
        start=True,
        device="cpu",
        **own_dht(),
    )
    # a client that listened might be called back, past the proxy
    dht = DHT(initial_peers=server.dht.get_visible_maddrs(), client_mode=bool(own_dht()), start=True)
    while not all(experts := get_experts(dht, uids)):
        time.sleep(0.5)
    timeouts = {"forward_timeout": 60, "backward_timeout": 60}
    mixture = RemoteMixtureOfExperts(
        in_features=WIDTH, grid_size=(NUM_EXPERTS,), dht=dht, uid_prefix="expert.", k_best=K_BEST, **timeouts
    )
    for line in sys.stdin:
        try:
            answer = {"seconds": measure(line, experts, mixture)}
        except Exception as error:
            answer = {"error": repr(error)[:300]}
        print(json.dumps(answer), file=answers, flush=True)
    dht.shutdown()
    server.shutdown()


if __name__ == "__main__":
    main()
