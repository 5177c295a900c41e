"""hivemind's quick start: two servers by their commands, a DHT, calls of experts, a training loop and a mixture."""

import re

import pytest
import torch
from processes import SERVER, Process, Zygote
from torch import nn

import fmoe_ext.remote as hivemind


@pytest.fixture
def start(tmp_path):
    """start(flags) -> the process of a server."""
    zygote, started = Zygote(), []

    def start(flags):
        started.append(Process(zygote, tmp_path / f"{len(started)}.log", SERVER, *flags.split()))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.end()
    zygote.close()


def test_quick_start_trains_through_experts_of_two_servers(start):
    first = start(
        "--expert_cls ffn --hidden_dim 512 --num_experts 5 --expert_pattern expert.[0:5] "
        "--listen_on 127.0.0.1:0 --dht_port 0"
    )
    first.endpoint()
    peer = "localhost:" + first.wait_for(r"DHT node listens on port (\d+)")[1]
    printed = first.wait_for(r"Got 5 active experts of type ffn: \[(.*)\]")[1]
    assert re.findall(r"expert\.\d", printed) == [f"expert.{i}" for i in range(5)]
    second = start(
        "--hidden_dim 512 --num_experts 10 --expert_pattern expert.[5:250] --listen_on 127.0.0.1:0 "
        f"--initial_peers {peer}"
    )

    dht = hivemind.DHT(initial_peers=[peer], listen=False, start=True)
    expert1, expert4 = dht.get_experts(["expert.1", "expert.4"])
    assert expert1 is not None and expert4 is not None

    torch.manual_seed(0)
    dummy = torch.randn(3, 512)
    out = expert1(dummy)
    assert out.shape == (3, 512)
    out.sum().backward()

    proj_out = nn.Sequential(nn.Linear(512, 3))
    opt = torch.optim.SGD(proj_out.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        out = proj_out(expert1(expert4(dummy)))
        loss = (out - 1).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]

    moe = hivemind.RemoteMixtureOfExperts(
        in_features=512, uid_prefix="expert", grid_size=(5,), dht=dht, k_best=2
    )
    moe(dummy).sum().backward()
    assert all(p.grad is not None for p in moe.parameters())

    second.wait_for(r"Got 10 active experts of type ffn")
    dht.shutdown()
