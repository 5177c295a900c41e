"""A server that does not compute what it says is caught."""

import pytest
import torch

from fmoe_ext.remote import Auditor, Cheated, Client


def test_honest_server_passes(serve):
    _, directory = serve()
    (expert,) = directory.get_experts(["expert.0"])
    expert(torch.randn(8, 16)).pow(2).sum().backward()  # not the first weights any more
    finding = Auditor(directory.client, seed=0).check(expert.handle, torch.randn(8, 16))
    assert finding.num_rows == 2
    assert finding.error < 1e-5


@pytest.mark.parametrize("lie", ["nothing", "other weights", "one row"])
def test_cheating_server_is_caught(serve, lie):
    server, directory = serve()
    (expert,) = directory.get_experts(["expert.0"])
    forward = server.host._stack.forward

    def cheat(parts):
        outputs = forward(parts)
        if lie == "nothing":
            return [part.inputs[0].clone() for part in parts]
        if lie == "other weights":
            return [1.01 * y for y in outputs]
        outputs[0][3] += 1
        return outputs

    server.host._stack.forward = cheat
    auditor = Auditor(directory.client, rows=8, seed=0)
    with pytest.raises(Cheated, match=server.endpoint):
        auditor.check(expert.handle, torch.randn(8, 16))
    assert auditor.caught[server.endpoint] == 1


def test_weights_come_from_another_replica(serve):
    """A server that answers by its own wrong weights is found by the weights of an honest replica."""
    liar, _ = serve()
    honest, _ = serve()
    liar.compute.call(lambda: [p.add_(1) for p in liar.host.parameters("expert.0").values()]).result(5)
    client = Client()
    handle = client.handle("expert.0", (liar.endpoint, honest.endpoint))
    with pytest.raises(Cheated, match=liar.endpoint):
        Auditor(client, seed=0).check(handle, torch.randn(4, 16))
