"""A server that does not compute what it says is caught."""

import pytest
import torch

from fmoe_ext.remote import Auditor, Cheated, Client, RemoteError, Settings


def test_honest_server_passes(serve):
    _, directory = serve()
    (expert,) = directory.get_experts(["expert.0"])
    expert(torch.randn(8, 16)).pow(2).sum().backward()  # not the first weights any more
    finding = Auditor(directory.client, seed=0).check(expert.handle, torch.randn(8, 16))
    assert finding.num_rows == 2
    assert finding.error < 1e-5


def test_audit_of_no_rows_is_refused():
    with pytest.raises(ValueError, match="rows must be at least 1"):
        Auditor(Client(), rows=0)


def test_default_device_of_the_program_changes_no_audit(serve):
    _, directory = serve()
    (expert,) = directory.get_experts(["expert.0"])
    x, grad = torch.randn(8, 16), torch.randn(8, 16)
    with torch.device("meta"):
        assert Auditor(directory.client, seed=0).check(expert.handle, x).num_rows == 2
        assert Auditor(directory.client, seed=0).check_backward(expert.handle, (x,), grad).num_rows == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_calls_of_a_gpu_are_audited(serve):
    _, directory = serve()
    (expert,) = directory.get_experts(["expert.0"])
    x, grad = torch.randn(8, 16, device="cuda"), torch.randn(8, 16, device="cuda")
    assert Auditor(directory.client, seed=0).check(expert.handle, x).num_rows == 2
    assert Auditor(directory.client, seed=0).check_backward(expert.handle, (x,), grad).num_rows == 2


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


def test_weights_come_from_another_replica(ends, serve):
    """A server that answers by its own wrong weights is found by the weights of an honest replica."""
    liar, _ = serve()
    honest, _ = serve()
    liar.compute.call(lambda: [p.add_(1) for p in liar.host.parameters("expert.0").values()]).result(60)
    client = ends(Client())
    handle = client.handle("expert.0", (liar.endpoint, honest.endpoint))
    with pytest.raises(Cheated, match=liar.endpoint):
        Auditor(client, seed=0).check(handle, torch.randn(4, 16))


def step(expert):
    x = torch.randn(8, 16, requires_grad=True)
    expert(x).pow(2).sum().backward()
    return x.grad


def test_watched_training_is_the_same(serve):
    """Every call of an honest server is audited, and nothing else changes."""
    _, directory = serve()
    watched, plain = directory.get_experts(["expert.0"])[0], serve()[1].get_experts(["expert.0"])[0]
    Auditor(directory.client, seed=0).watch(1.0)
    for _ in range(3):
        state = torch.get_rng_state()
        grad = step(watched)
        torch.set_rng_state(state)
        assert torch.equal(grad, step(plain))
    assert directory.client.counts["audits"] == 6
    assert directory.client.counts["audits without a result"] == 0


def test_share_of_ordinary_calls(serve):
    _, directory = serve()
    (expert,) = directory.get_experts(["expert.0"])
    auditor = Auditor(directory.client, seed=1).watch(0.25)
    for _ in range(40):
        expert(torch.randn(2, 16))
    assert 3 <= directory.client.counts["audits"] <= 20
    auditor.watch(0)
    before = directory.client.counts["audits"]
    for _ in range(20):
        expert(torch.randn(2, 16))
    assert directory.client.counts["audits"] == before
    with pytest.raises(ValueError, match="between 0 and 1, but got 2"):
        auditor.watch(2)


def test_cheat_in_an_ordinary_forward(serve):
    server, directory = serve()
    (expert,) = directory.get_experts(["expert.0"])
    forward = server.host._stack.forward
    server.host._stack.forward = lambda parts: [1.01 * y for y in forward(parts)]
    assert expert(torch.randn(8, 16)).shape == (8, 16)  # nobody looks yet
    Auditor(directory.client).watch(1.0)
    with pytest.raises(Cheated, match=server.endpoint):
        expert(torch.randn(8, 16))
    assert expert.handle.is_gone  # so that no token goes there for a while


def test_cheat_in_a_gradient(serve):
    server, directory = serve()
    (expert,) = directory.get_experts(["expert.0"])
    x, grad = torch.randn(8, 16), torch.randn(8, 16)
    finding = Auditor(directory.client, seed=0).check_backward(expert.handle, (x,), grad)
    assert finding.num_rows == 2 and finding.error < 1e-5
    backward = server.host._stack.backward

    def cheat(*args):
        found = backward(*args)
        for gradients in found:
            gradients.inputs[0][0].mul_(1.01)
        return found

    server.host._stack.backward = cheat
    with pytest.raises(Cheated, match=server.endpoint):
        Auditor(directory.client, rows=8).check_backward(expert.handle, (x,), grad)
    auditor = Auditor(directory.client, rows=8).watch(1.0)
    with pytest.raises(Cheated, match=server.endpoint):
        step(expert)
    assert auditor.caught[server.endpoint] == 1


def test_weights_that_move_are_no_cheat(serve):
    """Another trainer's step between answer and weights: counted, not blamed."""
    server, directory = serve()
    (expert,) = directory.get_experts(["expert.0"])
    client = directory.client
    state = client.state

    async def late(handle, endpoint, timeout):
        message = await state(handle, endpoint, timeout)
        message.meta["version"] = str(int(message.meta["version"]) + 1)
        return message

    client.state = late
    Auditor(client).watch(1.0)
    expert(torch.randn(8, 16))
    assert client.counts["audits without a result"] == 1
    with pytest.raises(RemoteError, match="changed between answer and weights 5 times"):
        Auditor(client).check(expert.handle, torch.randn(8, 16))


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_rounding_is_no_cheat(serve, codec):
    """The rounding of compression is allowed for; gradients, with errors fed back, are not audited."""
    server, directory = serve(settings=Settings(compression=codec))
    (expert,) = directory.get_experts(["expert.0"])
    auditor = Auditor(directory.client, rows=8, seed=0).watch(1.0)
    for _ in range(5):
        step(expert)
    assert directory.client.counts["audits"] == 5
    with pytest.raises(ValueError, match=f"compression='none' only, but the client has '{codec}'"):
        auditor.check_backward(expert.handle, (torch.randn(8, 16),), torch.randn(8, 16))
    forward = server.host._stack.forward
    server.host._stack.forward = lambda parts: [1.2 * y for y in forward(parts)]
    with pytest.raises(Cheated, match=server.endpoint):
        expert(torch.randn(8, 16))
