"""fmoe.functions, fmoe.gates.utils and the schedule, as programs call them; several ranks are threads here."""

import copy
import threading

import pytest
import torch
from torch import nn

from fmoe_ext.compat import _ranks
from fmoe_ext.compat.fastermoe import schedule
from fmoe_ext.compat.functions import AllGather, MOEGather, MOEScatter, Slice, count_by_gate, prepare_forward
from fmoe_ext.compat.gates.utils import limit_by_capacity
from fmoe_ext.compat.layers import _fmoe_general_global_forward

E, D = 4, 3


def draw(num_tokens, top_k, seed=0, dropped=0.2):
    generator = torch.Generator().manual_seed(seed)
    gate = torch.rand(num_tokens, E, generator=generator).topk(top_k).indices
    return gate.masked_fill(torch.rand(num_tokens, top_k, generator=generator) < dropped, -1)


def test_prepare_forward():
    gate = torch.tensor([[2, 0], [0, -1], [3, 2]])
    pos, local_count, global_count, forward_count, forward_size = prepare_forward(gate, E, 1)
    assert pos.tolist() == [1, 2, 0, 5, 4]  # ordered by expert, then by token
    assert local_count.tolist() == global_count.tolist() == forward_count.tolist() == [2, 0, 2, 1]
    assert forward_size == 5 and isinstance(forward_size, int)
    pos, local_count, global_count = count_by_gate(gate.flatten(), E, 1, require_pos=False)
    assert pos is None and local_count.tolist() == global_count.tolist() == [2, 0, 2, 1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_scatter_and_gather_round_trip(top_k, dtype):
    gate = draw(9, top_k)
    x = torch.randn(9, D, dtype=dtype)
    pos, local_count, global_count, _, forward_size = prepare_forward(gate, E, 1)
    rows = MOEScatter.apply(x, pos // top_k, local_count, global_count, forward_size, 1)
    flat = gate.flatten().tolist()
    order = [i for e in range(E) for i in range(len(flat)) if flat[i] == e]
    assert torch.equal(rows, torch.stack([x[i // top_k] for i in order]))
    back = MOEGather.apply(rows, pos, local_count, global_count, gate.numel(), 1)
    expected = x.repeat_interleave(top_k, 0).masked_fill((gate < 0).view(-1, 1), 0)
    assert torch.equal(back, expected)


def test_gradients():
    gate = draw(7, 2)
    pos, local_count, global_count, _, forward_size = prepare_forward(gate, E, 1)
    x = torch.randn(7, D, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(forward_size, D, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x: MOEScatter.apply(x, pos // 2, local_count, global_count, forward_size, 1), x
    )
    assert torch.autograd.gradcheck(
        lambda rows: MOEGather.apply(rows, pos, local_count, global_count, 14, 1), rows
    )


@pytest.mark.parametrize("one_dimensional", [False, True])
def test_general_forward_is_the_loop(one_dimensional):
    gate = draw(24, 1 if one_dimensional else 2)
    experts = nn.ModuleList(nn.Linear(D, D) for _ in range(E)).double()
    x = torch.randn(24, D, dtype=torch.float64, requires_grad=True)

    def expert_fn(rows, fwd_expert_count):
        parts = rows.split(fwd_expert_count.tolist())
        return torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])

    out = _fmoe_general_global_forward(x, gate.squeeze(1), expert_fn, E, 1, experts=experts)
    expected = torch.stack(
        [
            experts[e](x[t]) if e >= 0 else torch.zeros(D, dtype=torch.float64)
            for t in range(24)
            for e in gate[t].tolist()
        ]
    )
    torch.testing.assert_close(out, expected)

    scheduled = schedule._fmoe_general_global_forward(
        x, gate, lambda rows, count, idx: experts[idx](rows), E, 1, experts=experts
    )
    assert torch.equal(scheduled, out)
    ours = torch.autograd.grad(out.sin().sum(), [x, *experts.parameters()])
    theirs = torch.autograd.grad(expected.sin().sum(), [x, *experts.parameters()])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_general_forward_of_a_nest():
    gate = draw(5, 2, dropped=0)
    x = {"a": torch.randn(5, D), "b": [torch.randn(5, 2, 2)]}
    out = _fmoe_general_global_forward(x, gate, lambda rows, count: rows, E, 1)
    assert torch.equal(out["a"], x["a"].repeat_interleave(2, 0))
    assert torch.equal(out["b"][0], x["b"][0].repeat_interleave(2, 0))


def test_moe_forward_function():
    gate = draw(8, 2)
    experts = nn.ModuleList(nn.Linear(D, D) for _ in range(E))
    x = torch.randn(8, D)
    pos, local_count, global_count, _, forward_size = prepare_forward(gate, E, 1)
    arguments = (pos // 2, pos, local_count, global_count, None, forward_size, 16, E, 1)
    out = schedule.MoEForward.apply(lambda rows, count, idx: experts[idx](rows), experts, x, *arguments)
    for i, e in enumerate(gate.flatten().tolist()):
        torch.testing.assert_close(out[i], experts[e](x[i // 2]) if e >= 0 else torch.zeros(D))


def test_limit_by_capacity():
    gate = torch.tensor([[0, 1], [0, 1], [0, 2], [1, 0]])
    new_lec, new_gec, limited = limit_by_capacity(gate, 3, 1, 2)
    assert new_lec.tolist() == new_gec.tolist() == [2, 2, 1]
    assert limited.tolist() == [[0, 1], [0, -1], [-1, 2], [1, -1]]  # first choices before second ones
    _, _, flat = limit_by_capacity(gate[:, 0], 3, 1, torch.tensor([1, 5, 0]))
    assert flat.tolist() == [0, -1, -1, 1]


def test_slice_and_all_gather_on_one_worker():
    x = torch.randn(5, D, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: AllGather.apply(Slice.apply(x, 0, 1, None), 0, 1, None), x)
    assert torch.equal(AllGather.apply(x, 0, 1, None), x)


class Threads:
    """fmoe_ext.ep.exchange and all_gather for threads, with the contract of the real ones."""

    def __init__(self, world_size):
        self.world_size = world_size
        self.slots = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=120)
        self.local = threading.local()

    def share(self, x):
        self.slots[self.local.rank] = x
        self.barrier.wait()
        shared = list(self.slots)
        self.barrier.wait()
        return shared

    def register_group(self, group):
        return "threads"

    def check(self, group):
        """Errors are raised at once."""

    def exchange_counts(self, counts, group):
        return torch.stack([part[self.local.rank] for part in self.share(counts.clone())])

    def global_exchange(self, x, send_splits, recv_splits, group):
        assert len(x) == sum(send_splits)
        parts = [part.split(splits)[self.local.rank] for part, splits in self.share((x.clone(), send_splits))]
        assert [len(part) for part in parts] == recv_splits
        return torch.cat(parts)

    def all_gather(self, x, world_size, group):
        return self.share(x.detach().clone())

    def run(self, function):
        results, errors = [None] * self.world_size, []

        def work(rank):
            self.local.rank = rank
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


@pytest.fixture
def threads(monkeypatch):
    ranks = Threads(2)
    monkeypatch.setattr(_ranks, "exchange", ranks)
    monkeypatch.setattr(_ranks, "all_gather", ranks.all_gather)
    return ranks


def test_two_ranks_compute_what_one_does(threads):
    sizes = (6, 9)
    x = torch.randn(sum(sizes), D, dtype=torch.float64)
    gate = draw(sum(sizes), 2)
    experts = nn.ModuleList(nn.Linear(D, D) for _ in range(E)).double()

    def forward(x, gate, experts, world_size):
        def expert_fn(rows, fwd_expert_count):
            parts = rows.split(fwd_expert_count.tolist())
            return torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])

        return _fmoe_general_global_forward(x, gate, expert_fn, len(experts), world_size)

    whole = x.clone().requires_grad_()
    expected = forward(whole, gate, experts, 1)
    expected.sin().sum().backward()

    def work(rank):
        mine = copy.deepcopy(experts[2 * rank : 2 * rank + 2])
        mine.zero_grad()
        part = x.split(sizes)[rank].clone().requires_grad_()
        out = forward(part, gate.split(sizes)[rank], mine, 2)
        out.sin().sum().backward()
        return out.detach(), part.grad, mine

    results = threads.run(work)
    torch.testing.assert_close(torch.cat([r[0] for r in results]), expected)
    torch.testing.assert_close(torch.cat([r[1] for r in results]), whole.grad)
    for rank, (_, _, mine) in enumerate(results):
        for ours, theirs in zip(
            mine.parameters(), experts[2 * rank : 2 * rank + 2].parameters(), strict=True
        ):
            torch.testing.assert_close(ours.grad, theirs.grad)


def test_layouts_of_the_counts_and_the_buffer(threads):
    gates = torch.tensor([[0], [3], [2]]), torch.tensor([[2], [0], [2]])

    def work(rank):
        pos, local_count, global_count, forward_count, forward_size = prepare_forward(gates[rank], 2, 2)
        x = torch.tensor([[10.0], [11.0], [12.0]]) + 10 * rank
        rows = MOEScatter.apply(x, pos, local_count, global_count, forward_size, 2)
        back = MOEGather.apply(rows, pos, local_count, global_count, 3, 2)
        assert torch.equal(back, x)
        return (
            local_count.tolist(),
            global_count.tolist(),
            forward_count.tolist(),
            rows.flatten().tolist(),
        )

    first, second = threads.run(work)
    # rank 0 has the experts 0 and 1, rank 1 the experts 2 and 3; rows by (expert, rank)
    assert first == ([1, 0, 1, 1], [1, 0, 1, 0], [2, 0], [10, 21])
    assert second == ([1, 0, 2, 0], [1, 1, 2, 0], [3, 1], [12, 20, 22, 11])


def test_limit_by_capacity_serves_the_first_worker_first(threads):
    gates = torch.tensor([[0], [0], [3]]), torch.tensor([[0], [0], [3]])
    results = threads.run(lambda rank: limit_by_capacity(gates[rank], 2, 2, 3))
    assert [r[0].tolist() for r in results] == [[2, 0, 0, 1], [1, 0, 0, 1]]
    assert [r[1].tolist() for r in results] == [[2, 0, 1, 0], [0, 1, 0, 1]]
    assert [r[2].flatten().tolist() for r in results] == [[0, 0, 3], [0, -1, 3]]


def test_slice_keeps_the_remainder(threads):
    x = torch.randn(5, D, dtype=torch.float64)

    def work(rank):
        mine = x.clone().requires_grad_()
        part = Slice.apply(mine, rank, 2, None)
        whole = AllGather.apply(part * (rank + 1), rank, 2, None)
        whole.square().sum().backward()
        return part.detach(), whole.detach(), mine.grad

    results = threads.run(work)
    assert [len(part) for part, _, _ in results] == [3, 2]
    scale = torch.tensor([1.0, 1, 1, 2, 2]).view(5, 1)
    for _, whole, grad in results:
        torch.testing.assert_close(whole, x * scale)
        torch.testing.assert_close(grad, 2 * x * scale**2)
