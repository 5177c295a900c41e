"""The experts of a server: batches, versions, state."""

import pytest
import torch
from torch import nn

from fmoe_ext.remote import Training, register_expert_class
from fmoe_ext.remote.expert_classes import ExpertClass, Part, find_expert_class, make_stack
from fmoe_ext.remote.schema import SchemaError, is_finite
from fmoe_ext.remote.server.fair_queue import DeadlinePassed, FairQueue, Job, QueueFull
from fmoe_ext.remote.server.host import Answer, ExpertHost
from fmoe_ext.remote.server.ledger import MAX_REMEMBERED_IDS
from fmoe_ext.remote.server.state import read_state, write_state
from fmoe_ext.remote.wire import STATE, WireError, decode, encode

D = 64


def host_of(uids, optimizer="adam", expert_cls="ffn"):
    host = ExpertHost(find_expert_class(expert_cls), D, Training(optimizer, 0.01, max_grad_norm=1.0))
    host.add(uids)
    return host


def job(uid, rows, seed, backward=True, results=None):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, D, generator=generator)
    grad = torch.randn(rows, D, generator=generator) if backward else None
    done = (lambda _: None) if results is None else results.append
    return Job(uid, (x,), done, grad, f"{seed:032x}")


@register_expert_class("with_buffers", lambda hidden_dim: torch.empty(hidden_dim))
class WithBuffers(nn.Module):
    """A fixed random projection, and a count of the backward calls that changes the output."""

    def __init__(self, hidden_dim):
        super().__init__()
        self.linear = nn.Linear(hidden_dim, hidden_dim)
        self.register_buffer("projection", torch.randn(hidden_dim, hidden_dim))
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.num_steps += torch.is_grad_enabled()
        return self.linear(x @ self.projection) + self.num_steps


UIDS = [f"expert.{n}" for n in range(5)]


@pytest.mark.parametrize("rows", [(1, 1, 1, 1, 1), (3, 130, 1, 64, 7), (257, 2, 33, 128, 19)])
def test_experts_together_and_alone_are_the_same_to_the_last_bit(rows):
    """So that a replica, which repeats updates expert by expert, has the bits of the leader."""
    together, alone = host_of(UIDS), host_of(UIDS)
    for step in range(3):
        ours, theirs = ([], [])
        batches = [
            [job(u, n, 10 * step + p, results=got) for p, (u, n) in enumerate(zip(UIDS, rows, strict=True))]
            for got in (ours, theirs)
        ]
        together.run(batches[0])
        for one in batches[1]:
            alone.run([one])
        assert len(ours) == len(theirs) == len(UIDS)
        for a, b in zip(ours, theirs, strict=True):
            assert isinstance(a, Answer), a
            assert torch.equal(a.tensors[0], b.tensors[0])
    assert [together.digest(uid) for uid in UIDS] == [alone.digest(uid) for uid in UIDS]


def test_update_that_fails_unforeseen_leaves_the_others_of_its_round_alone(monkeypatch):
    """The whole round was run again, and its other experts were stepped twice."""
    host, results = host_of(UIDS[:2]), ([], [])
    jobs = [job(uid, 3, n, results=results[n]) for n, uid in enumerate(UIDS[:2])]
    for each in jobs:
        each.request_id = ""  # the ledger knows no repetition

    def fail(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(host.find("expert.1"), "step", fail)
    host.run(jobs)
    assert [answer.version for answer in results[0]] == [1]
    assert host.find("expert.0").version == 1
    assert [str(error) for error in results[1]] == ["no memory"]


def test_gradient_that_is_refused_among_others_is_counted_once():
    host, results = host_of(UIDS[:1]), ([], [])
    bad, good = (job("expert.0", 3, n, results=results[n]) for n in range(2))
    bad.grad[0, 0] = torch.nan
    host.run([bad, good])
    assert isinstance(results[0][0], SchemaError) and results[1][0].version == 1
    assert host.find("expert.0").num_refused == 1


def test_growing_keeps_weights_and_optimizers():
    grown, whole = host_of(UIDS[:2]), host_of(UIDS)
    for host in (grown, whole):
        host.run([job("expert.0", 8, 1)])
    grown.add(UIDS[2:])
    for host in (grown, whole):
        host.run([job("expert.0", 8, 2)])
        host.run([job("expert.4", 8, 3)])
    assert [grown.digest(uid) for uid in UIDS] == [whole.digest(uid) for uid in UIDS]
    grown.remove("expert.1")
    grown.add(["expert.9"])
    fresh = host_of(["expert.9"])
    assert grown.digest("expert.9") == fresh.digest("expert.9")


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "none"])
def test_state_makes_an_equal_expert(optimizer):
    one, two = host_of(UIDS, optimizer), host_of(UIDS[1:], optimizer)
    for n in range(4):
        one.run([job("expert.0", 8, n)])
    write_state(two, decode(encode(read_state(one, "expert.0")), STATE))
    assert two.find("expert.0").version == one.find("expert.0").version == 4
    assert two.find("expert.0").num_requests == 4
    for host in (one, two):
        host.run([job("expert.0", 8, 2)])  # applied before: no step
        host.run([job("expert.0", 8, 9)])
    assert one.digest("expert.0") == two.digest("expert.0")
    assert two.find("expert.0").version == 5


def test_buffers_belong_to_an_expert():
    """Fixed ones are the same wherever an expert starts, and all travel with its state."""
    outputs = []
    hosts = [host_of(UIDS[:2], "sgd", "with_buffers") for _ in range(2)]
    for n in range(3):
        hosts[0].run([job("expert.0", 4, n)])
    for host in hosts:
        host.run([job("expert.1", 4, 9, False, outputs)])
    assert torch.equal(outputs[0].tensors[0], outputs[1].tensors[0])
    write_state(hosts[1], decode(encode(read_state(hosts[0], "expert.0")), STATE))
    for host in hosts:
        host.run([job("expert.0", 4, 9, False, outputs)])
    assert torch.equal(outputs[2].tensors[0], outputs[3].tensors[0])
    assert hosts[1].buffers("expert.0")["num_steps"] == 3
    old = read_state(hosts[0], "expert.1")  # as earlier releases wrote it
    write_state(hosts[1], type(old)({k: x for k, x in old.tensors.items() if k[:7] != "buffer/"}, old.meta))
    hosts[1].remove("expert.0")
    hosts[1].add(["expert.2"])  # in the place of the one that has left
    assert hosts[1].buffers("expert.2")["num_steps"] == 0


def test_state_of_another_kind_is_refused():
    state = read_state(host_of(UIDS, "sgd"), "expert.0")
    with pytest.raises(WireError, match="optimizer=sgd"):
        write_state(host_of(UIDS, "adam"), state)
    wrong = dict(state.tensors) | {"weight/norm_weight": torch.zeros(2, D)}
    with pytest.raises(WireError, match="norm_weight"):
        write_state(host_of(UIDS, "sgd"), type(state)(wrong, state.meta))


def queued(queue, peer, count, rows=1, **options):
    for n in range(count):
        queue.put(Job(f"{peer}.{n}", (torch.zeros(rows, 1),), lambda _: None, peer=peer, **options))


def test_peers_take_turns():
    queue = FairQueue(max_batch_rows=4)
    queued(queue, "a", 6)
    queued(queue, "b", 2)
    assert [j.uid for j in queue.take()] == ["a.0", "b.0", "a.1", "b.1"]
    assert [j.uid for j in queue.take()] == ["a.2", "a.3", "a.4", "a.5"]


def test_peer_cannot_fill_the_queue():
    queue = FairQueue(max_waiting=8, max_of_peer=4)
    queued(queue, "a", 4)
    with pytest.raises(QueueFull, match="from a"):
        queued(queue, "a", 1)
    queued(queue, "b", 4)
    with pytest.raises(QueueFull):
        queued(queue, "c", 1)


def test_batches_are_of_one_kind_and_one_size():
    queue = FairQueue(max_batch_rows=10)
    queued(queue, "a", 1, rows=8)
    queued(queue, "b", 1, rows=8)
    queued(queue, "c", 1, rows=2)
    queued(queue, "d", 1, grad=torch.zeros(1, 1))
    assert [j.peer for j in queue.take()] == ["a", "c"]
    assert [j.peer for j in queue.take()] in (["b"], ["d"])
    assert len(queue.take()) == 1
    assert len(queue) == 0


def test_calls_whose_deadline_has_passed_are_not_computed():
    queue, results = FairQueue(), []
    queue.put(Job("late", (torch.zeros(1, 1),), results.append, peer="a", deadline=0.0))
    queued(queue, "b", 1)
    assert [j.peer for j in queue.take()] == ["b"]
    assert isinstance(results[0], DeadlinePassed)


def test_tasks_go_first_and_the_end_is_seen():
    queue = FairQueue()
    queued(queue, "a", 1)
    queue.put_task(lambda: None)
    queue.close()
    assert callable(queue.take())
    assert len(queue.take()) == 1
    assert queue.take() is None
    with pytest.raises(QueueFull):
        queued(queue, "a", 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_is_finite(dtype):
    x = torch.full((3, 4), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(x)  # though its sum is not
    assert is_finite(-x)
    assert is_finite(torch.arange(3))
    for bad in (float("nan"), float("inf"), -float("inf")):
        x[1, 2] = bad
        assert not is_finite(x)


def test_replies_are_kept_as_long_as_their_request_ids():
    """Replies whose id was forgotten stayed: a server grew by 1 KiB a call until 128 MiB of tensors."""
    host = host_of(["expert.0"], "none", "nop")
    for n in range(MAX_REMEMBERED_IDS + 50):
        host.run([job("expert.0", 1, n)])
    assert next(iter(host.find("expert.0").ledger.applied)) == f"{50:032x}"
    assert len(host._replies) == MAX_REMEMBERED_IDS
    assert host._replies.get("expert.0", f"{49:032x}") is None
    assert host._replies.num_bytes == MAX_REMEMBERED_IDS * D * 4


class Scale(nn.Module):
    """Experts of a grouped stack, without the reads of values that tensors on the meta device lack."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.empty(1, D))

    def compute(self, parameters, rows, tokens_per_expert):
        return rows * parameters[0].sum(0)


def test_gradients_come_to_the_device_of_the_experts():
    """The wire makes all tensors on the CPU, and autograd refuses a gradient on another device than the output."""
    grouped = ExpertClass("scale", nn.Identity, lambda d: (torch.empty(d),), lambda num_experts, d: Scale())
    stacks = [make_stack(c, D, torch.device("meta")) for c in (find_expert_class("transformer"), grouped)]
    for stack, shape in zip(stacks, ((3, 5, D), (3, D)), strict=True):
        stack.resize(2)
        parts = [Part(place, (torch.randn(shape),), torch.randn(shape)) for place in range(2)]
        for part, found in zip(parts, stack.backward(parts), strict=True):
            assert found.inputs[0].shape == shape and found.inputs[0].device.type == "meta"
            for name, p in stack.views(part.place).items():
                assert (
                    found.parameters[name].shape == p.shape and found.parameters[name].device.type == "meta"
                )
