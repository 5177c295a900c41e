"""Training through remote experts is training: same losses, same gradients as with the experts here."""

import pytest
import torch
from torch import nn

from fmoe_ext.remote import Training, make_expert

D = 32


@pytest.mark.parametrize(("optimizer", "steps"), [("sgd", 100), ("adam", 20)])
def test_loop_through_two_experts_is_bit_identical_to_local_training(serve, optimizer, steps):
    _, directory = serve(hidden_dim=D, training=Training(optimizer, lr=0.01))
    uids = ["expert.0", "expert.1"]
    remote = directory.get_experts(uids)
    local = [make_expert("ffn", D, uid=uid) for uid in uids]
    make = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]

    def train(experts):
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
    assert theirs[-1] < theirs[0]
