"""Training through remote experts is training: same losses, same gradients as with the experts here."""

import pytest
import torch
from torch import nn

from fmoe_ext.remote import DeclaredExperts, Directory, Options, Server, StaticList, Training, make_expert

D = 32


@pytest.fixture
def served():
    servers = []

    def serve(**options):
        directory = StaticList()
        given = {
            "hidden_dim": D,
            "expert_uids": ("expert.0", "expert.1"),
            "training": Training("sgd", lr=0.05),
        }
        servers.append(Server(Options(**{**given, **options}), DeclaredExperts(directory)).start())
        return servers[-1], Directory(directory)

    yield serve
    for server in servers:
        server.stop()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_loop_through_two_experts_is_bit_identical_to_local_training(served, optimizer):
    _, directory = served(training=Training(optimizer, lr=0.01))
    uids = ["expert.0", "expert.1"]
    remote = directory.get_experts(uids)
    local = [make_expert("ffn", D, uid=uid) for uid in uids]
    make = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]

    def train(experts, steps=100):
        torch.manual_seed(0)
        head = nn.Linear(D, 1)
        parameters = [p for expert in experts for p in expert.parameters()]
        optimizers = [torch.optim.SGD(head.parameters(), lr=0.01)]
        if parameters:
            optimizers += [make(expert.parameters(), lr=0.01) for expert in experts]
        losses = []
        for _ in range(steps):
            x = torch.randn(16, D)
            y = head(experts[0](experts[1](x)))
            loss = (y - x.sum(1, keepdim=True)).pow(2).mean()
            for o in optimizers:
                o.zero_grad()
            loss.backward()
            for o in optimizers:
                o.step()
            losses.append(loss.item())
        return losses

    ours, theirs = train(remote), train(local)
    assert ours == theirs
    assert theirs[-1] < 0.9 * theirs[0]
