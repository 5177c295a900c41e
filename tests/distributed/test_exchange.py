"""exchange_counts and global_exchange against the definition: rank r's block p arrives as rank p's block r."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fmoe_ext.dispatch import combine, dispatch
from fmoe_ext.ep import exchange
from fmoe_ext.ep.exchange import exchange_counts, global_exchange
from fmoe_ext.ep.expert_parallel import ExpertParallel
from fmoe_ext.ep.process_groups import backend_of, find_group, host_device, register_group
from fmoe_ext.routing import permute_rows, unpermute_rows
from fmoe_ext.testing import DistributedError
from tests.forked import run_python

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def splits_of(world_size, case):
    """splits[r][p]: rows from rank r to rank p."""
    if case == "even":
        return [[2] * world_size for _ in range(world_size)]
    if case == "empty":
        return [[0] * world_size for _ in range(world_size)]
    return [[(3 * r + 5 * p) % 4 * (r != 1) for p in range(world_size)] for r in range(world_size)]


def block(source, target, rows, width, dtype):
    values = (
        torch.arange(rows * width, dtype=torch.float64).reshape(rows, width) % 13 + 20 * source + 3 * target
    )
    return values.to(dtype)


def exchange_all_dtypes():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group = register_group()
    for case in ("even", "empty", "uneven"):
        splits = splits_of(world_size, case)
        send, recv = splits[rank], [row[rank] for row in splits]
        for dtype in DTYPES:
            for width in (3, 0):
                x = torch.cat([block(rank, p, n, width, dtype) for p, n in enumerate(send)])
                expected = torch.cat([block(p, rank, n, width, dtype) for p, n in enumerate(recv)])
                assert torch.equal(global_exchange(x, send, recv, group), expected), (case, dtype)
                strided = x.new_empty((width, sum(send))).t().copy_(x)
                assert torch.equal(global_exchange(strided, send, recv, group), expected)
    counts = torch.arange(2 * world_size).reshape(world_size, 2) + 100 * rank
    expected = torch.stack([torch.arange(2) + 2 * rank + 100 * p for p in range(world_size)])
    assert torch.equal(exchange_counts(counts, group), expected)


def exchange_gradient():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group = register_group()
    splits = splits_of(world_size, "uneven")
    send, recv = splits[rank], [row[rank] for row in splits]
    x = torch.randn(sum(send), 2, dtype=torch.float64, requires_grad=True)
    out = global_exchange(x, send, recv, group)
    # the receiver p weighs its rows from rank r by 10 r + p
    weights = torch.cat(
        [torch.full((n, 2), 10.0 * r + rank, dtype=torch.float64) for r, n in enumerate(recv)]
    )
    (out.square() * weights).sum().backward()
    sent = torch.cat([torch.full((n, 2), 10.0 * rank + p, dtype=torch.float64) for p, n in enumerate(send)])
    torch.testing.assert_close(x.grad, 2 * sent * x.detach(), rtol=1e-14, atol=0)


def exchange_opcheck():
    group = register_group()
    splits = [1] * dist.get_world_size()
    x = torch.randn(len(splits), 3, requires_grad=True)
    torch.library.opcheck(torch.ops.fmoe_ext.global_exchange.default, (x, splits, splits, group))
    torch.library.opcheck(exchange_counts, (torch.ones(len(splits), 2, dtype=torch.int64), group))


def exchange_two_groups():
    """One compiled function serves two groups: the name is an argument, not a constant of the graph."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    everyone = register_group()
    pairs = [dist.new_group([r, r + 1]) for r in range(0, world_size, 2)]
    pair = register_group(pairs[rank // 2])
    assert find_group(pair) is pairs[rank // 2]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def double(x, splits, group):
        return 2 * global_exchange(x, splits, splits, group)

    x = torch.full((world_size, 2), float(rank), requires_grad=True)
    out = double(x, [1] * world_size, everyone)
    assert torch.equal(out[:, 0], 2 * torch.arange(float(world_size)))
    out.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
    out = double(x[:2], [1, 1], pair)
    first = rank // 2 * 2
    assert torch.equal(out[:, 0], 2 * torch.arange(first, first + 2.0))


def exchange_rejects():
    group = register_group()
    x = torch.zeros(3, 2)
    for args, text in (
        ((x, [1, 1], [1, 1], group), "sum.send_splits. = 2 rows, but got shape .3, 2."),
        ((x, [3], [1, 1], group), "send_splits must be 2 numbers >= 0"),
        ((x, [1, 2], [-1, 1], group), r"recv_splits must be 2 numbers >= 0.*-1, 1"),
        ((x, [1, 2], [1, 1], "nobody"), "no process group 'nobody'"),
    ):
        with pytest.raises(RuntimeError, match=text):
            global_exchange(*args)
    with pytest.raises(RuntimeError, match=r"shape \[2, n\].*but got \[3, 1\]"):
        exchange_counts(torch.zeros(3, 1, dtype=torch.int64), group)
    with pytest.raises(RuntimeError, match=r"int64, but got torch\.int32"):
        exchange_counts(torch.zeros(2, 1, dtype=torch.int32), group)


def meet_nobody():
    group = register_group()
    if dist.get_rank() == 0:
        global_exchange(torch.zeros(2, 2), [1, 1], [1, 1], group)
    # rank 1 leaves without reaching the exchange


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_exchange(pool, world_size):
    pool.run(exchange_all_dtypes, world_size=world_size)
    pool.run(exchange_gradient, world_size=world_size)


def test_exchange_opcheck(pool):
    pool.run(exchange_opcheck, world_size=1)


def test_exchange_two_groups(pool):
    pool.run(exchange_two_groups, world_size=4)


def test_exchange_rejects(pool):
    pool.run(exchange_rejects, world_size=2)


def test_exchange_with_absent_rank_ends(pool):
    with pytest.raises(DistributedError, match=r"rank 0: the exchange in the group of ranks \[0, 1\] failed"):
        pool.run(meet_nobody, world_size=2, timeout=5)


def dispatch_and_combine():
    """Experts that scale rows: through the group as by hand, values and gradients; a rank without tokens."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    num_experts, rows = 2 * world_size, [5, 0, 3, 7][rank]
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(rows, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    topk_idx = torch.randint(-1, num_experts, (rows, 2), generator=generator)
    topk_weights = torch.rand(rows, 2, dtype=torch.float64, generator=generator, requires_grad=True)
    scale = torch.arange(1.0, num_experts + 1, dtype=torch.float64)

    home = ExpertParallel(dist.group.WORLD, 2)
    dispatched = dispatch({"x": x}, topk_idx, topk_weights, num_experts, home)
    (chunk,) = dispatched.chunks
    arrived = chunk.receive()
    assert (arrived.first, arrived.end) == (0, 2)
    local, handle = permute_rows(arrived.x, arrived.topk_idx, 2)
    everyone = [None] * world_size
    dist.all_gather_object(everyone, (x.detach(), topk_idx))
    mine = range(2 * rank, 2 * rank + 2)
    expected = [xs[(idx == e).nonzero()[:, 0]] for e in mine for xs, idx in everyone]
    assert torch.equal(local["x"], torch.cat(expected))
    counts = [sum(int((idx == e).sum()) for _, idx in everyone) for e in mine]
    assert handle.tokens_per_expert.tolist() == counts
    assert handle.offs.tolist() == [counts[0], sum(counts)]
    with pytest.raises(dataclasses.FrozenInstanceError):
        handle.offs = None

    y = local["x"] * scale[2 * rank : 2 * rank + 2].repeat_interleave(handle.tokens_per_expert)[:, None]
    chunk.give_back(unpermute_rows({"y": y}, handle, arrived.topk_weights))
    out = combine(dispatched)["y"]
    factor = torch.where(topk_idx < 0, 0, scale[topk_idx])
    by_hand = (topk_weights * factor).sum(1, keepdim=True) * x
    torch.testing.assert_close(out, by_hand, rtol=1e-14, atol=1e-14)
    grads = torch.autograd.grad(out.square().sum(), (x, topk_weights))
    for ours, theirs in zip(
        grads, torch.autograd.grad(by_hand.square().sum(), (x, topk_weights)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    with pytest.raises(
        ValueError, match=f"num_experts=5, but .* has 2 experts on each of {world_size} ranks"
    ):
        dispatch(x, topk_idx.clamp(max=4), topk_weights, 5, home)


@pytest.mark.parametrize("world_size", [2, 4])
def test_dispatch_and_combine(pool, world_size):
    pool.run(dispatch_and_combine, world_size=world_size)


COUNTS = """
import tempfile

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from fmoe_ext import FMoETransformerMLP

class Counted(TorchDispatchMode):
    total = views = waits = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.total += 1
        self.views += function.is_view or "detach" in str(function)
        self.waits += "_local_scalar_dense" in str(function) or "nonzero" in str(function)
        return function(*args, **(kwargs or {}))

with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    ways = {"choice": {}, "token": {"exchange": "token"}, "static": {"max_rows_per_rank": 16}}
    ways["static token"] = ways["token"] | ways["static"]
    for name, options in ways.items():
        layer = FMoETransformerMLP(4, 16, 16, top_k=2, moe_group=dist.group.WORLD, **options)
        layer(x := torch.randn(8, 16))
        with Counted() as counted:
            layer(x)
        print(name, counted.total, counted.total - counted.views, counted.waits, sep=",")
    dist.destroy_process_group()
"""


def test_forward_over_ranks_dispatches_few_operators():
    """Padding, counting and labelling are an operator each, not twenty of torch's."""
    ran = run_python(
        COUNTS
    )  # in a process of its own: kernels that another test has put in place dispatch more
    counts = {line.split(",")[0]: [*map(int, line.split(",")[1:])] for line in ran.stdout.splitlines()}
    most = {"choice": (27, 22), "token": (35, 27), "static": (28, 23), "static token": (36, 28)}
    assert counts.keys() == most.keys(), ran.stderr
    for name, (total, without_views) in most.items():
        assert counts[name][0] <= total, counts
        assert counts[name][1] <= without_views, counts
        assert counts[name][2] == 0, counts


def backends_by_device():
    # init_process_group() without a name makes "undefined", which is NCCL in builds of torch for CUDA
    unnamed = ("undefined",) if torch.accelerator.current_accelerator() is None else ()
    for text in ("gloo", "cpu:gloo", *unnamed):
        group = dist.new_group(backend=text)
        assert dist.get_backend(group) == text
        assert (backend_of(group, "cpu"), host_device(group)) == ("gloo", "cpu")
        assert backend_of(group, "cuda") == ("gloo" if text == "gloo" else None)
        counts = torch.arange(dist.get_world_size())[:, None] + 10 * dist.get_rank()
        expected = 10 * torch.arange(dist.get_world_size())[:, None] + dist.get_rank()
        assert torch.equal(exchange_counts(counts, register_group(group)), expected)


def test_backends_by_device(pool):
    pool.run(backends_by_device, world_size=2)


@pytest.mark.parametrize(
    ("backends", "is_nccl", "host"),
    [
        ("cuda:nccl", True, "cuda"),
        ("cpu:gloo,cuda:nccl", True, "cpu"),
        ("cpu:gloo,cuda:gloo", False, "cpu"),
        ("cpu:gloo", False, "cpu"),
    ],
)
def test_own_communicator_wherever_cuda_has_nccl(monkeypatch, backends, is_nccl, host):
    """dist.get_backend() says "nccl" only of groups that were made by this name alone."""

    class Group:
        pass

    class Exchange:
        def __init__(self, group, device):
            pass

        def start(self, outs, xs, send_splits, recv_splits):
            return "over our communicator"

    group = Group()
    monkeypatch.setattr(dist, "get_backend", lambda group: "undefined")
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(dist, "all_to_all_single", lambda *args, **options: None)
    monkeypatch.setattr(exchange, "find_group", lambda name: group)
    monkeypatch.setattr(exchange, "_C_nccl", object())
    monkeypatch.setattr(exchange, "_NcclExchange", Exchange)
    monkeypatch.setattr(exchange, "Transfer", lambda work, over_nccl: (work, over_nccl))
    x = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), dtype=torch.float32)
    work, over_nccl = exchange.start_exchange([x], [x], [1], [1], "")
    assert (work == "over our communicator", over_nccl, host_device(group)) == (is_nccl, is_nccl, host)
