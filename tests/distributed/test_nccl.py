"""The exchange over our own NCCL communicator: several ranks on one GPU, through the network path of NCCL."""

import os

import pytest
import torch
import torch.distributed as dist

from fmoe_ext import FMoETransformerMLP
from fmoe_ext.ep.exchange import global_exchange
from fmoe_ext.ep.process_groups import register_group
from fmoe_ext.ep.static import check_max_rows
from fmoe_ext.testing import DistributedPool
from tests.distributed.test_exchange import DTYPES, block, splits_of

_C_nccl = pytest.importorskip("fmoe_ext._C_nccl", reason="needs a build with USE_NCCL=1")

# Ranks with different host names may share a GPU; then everything goes over sockets. For correctness only.
ONE_GPU = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "2",
}


def test_rejects():
    with pytest.raises(ValueError, match="id must have 128 bytes, but has 1"):
        _C_nccl.Communicator(b"x", 1, 0, 1.0, 16)
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\), but is 2"):
        _C_nccl.Communicator(b"x" * 128, 2, 2, 1.0, 16)
    assert _C_nccl.nccl_version() >= 22000


def exchange_on_one_gpu():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    os.environ.update(ONE_GPU, NCCL_HOSTID=f"rank{rank}")
    torch.cuda.set_device(0)
    group = register_group(dist.new_group(backend="nccl"))
    for case in ("even", "empty", "uneven"):
        splits = splits_of(world_size, case)
        send, recv = splits[rank], [row[rank] for row in splits]
        for dtype in DTYPES:
            x = torch.cat([block(rank, p, n, 3, dtype) for p, n in enumerate(send)]).cuda()
            expected = torch.cat([block(p, rank, n, 3, dtype) for p, n in enumerate(recv)])
            assert torch.equal(global_exchange(x, send, recv, group).cpu(), expected)


def static_mode_in_a_graph():
    """A captured forward and backward, replayed on other tokens: the dynamic layer's results."""
    os.environ.update(ONE_GPU)
    torch.cuda.set_device(0)
    options = {"world_size": 1, "moe_group": dist.new_group(backend="nccl")}
    layers = []
    for bound in (None, 64):
        torch.manual_seed(0)
        layers.append(FMoETransformerMLP(4, 16, 32, max_rows_per_rank=bound, **options).cuda())
    dynamic, static = layers
    x = torch.randn(32, 16, device="cuda", requires_grad=True)

    def step(layer):
        out = layer(x)
        return out, torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(static)
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            x.copy_(torch.randn(32, 16))
        graph.replay()
        expected = step(dynamic)
        for ours, theirs in zip((captured[0], *captured[1]), (expected[0], *expected[1]), strict=True):
            assert torch.equal(ours, theirs)
    check_max_rows(static)


@pytest.mark.nccl
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_static_mode_in_a_graph():
    with DistributedPool(1) as pool:
        pool.run(static_mode_in_a_graph)


@pytest.mark.nccl
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_exchange_on_one_gpu():
    with DistributedPool(2) as pool:
        pool.run(exchange_on_one_gpu)
