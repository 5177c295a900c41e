"""SigmoidGate's bias over the ranks of a job, and experts drawn alike, as one process has them."""

import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fmoe_ext import FMoETransformerMLP
from fmoe_ext.distributed import DistributedGroupedDataParallel
from fmoe_ext.gates import SigmoidGate
from fmoe_ext.testing import run_distributed

D, H, E, STEPS = 6, 5, 4, 3
SIZES = (8, 3)  # tokens of each rank


def tokens(step, dtype=torch.float64):
    return torch.randn(sum(SIZES), D, generator=torch.Generator().manual_seed(step), dtype=dtype)


def make(**layout):
    torch.manual_seed(0)
    return FMoETransformerMLP(d_model=D, d_hidden=H, gate=SigmoidGate, **layout).double()


def train(layer, part, optimizer=torch.optim.SGD):
    optimizer = optimizer(list(layer.gate.parameters()), lr=0.0)
    biases = []
    for step in range(STEPS):
        layer(tokens(step)[part]).square().mean().backward()
        optimizer.step()
        biases.append(layer.gate.expert_bias.clone())
    return biases


def one_bias(zero):
    rank = dist.get_rank()
    whole = make(num_expert=E)
    mine = make(num_expert=E // 2, world_size=2)
    for ours, theirs in zip(mine.parameters(), whole.parameters(), strict=True):
        part = slice(None) if ours.shape == theirs.shape else slice(2 * rank, 2 * rank + 2)
        assert torch.equal(ours, theirs[part]), "one seed, one draw"
    begin = rank * SIZES[0]
    part = slice(begin, begin + SIZES[rank])
    expected = train(whole, slice(None))
    assert expected[-1].abs().max() > 0
    optimizer = torch.optim.SGD
    if zero:  # whose inner optimizers hold the gate's parameters on one rank each
        from torch.distributed.optim import ZeroRedundancyOptimizer

        def optimizer(params, lr):
            return ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=lr)

    for ours, theirs in zip(train(mine, part, optimizer), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_one_bias(pool):
    pool.run(one_bias, False, world_size=2)


def test_one_bias_with_zero_redundancy(pool):
    pool.run(one_bias, True, world_size=2)


def warned_by(wrap, layer):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped = wrap(layer)
    return [str(warning.message) for warning in caught], wrapped


def copies_of_a_bias():
    """Copies of a gate that counts one rank's tokens are named; with gate_group= they stay equal."""
    rank = dist.get_rank()
    begin = rank * SIZES[0]
    part = slice(begin, begin + SIZES[rank])
    for wrap in (DistributedGroupedDataParallel, DistributedDataParallel):
        texts, _ = warned_by(wrap, make(num_expert=E, expert_dp_comm="dp"))
        assert (
            len(texts) == 1 and "'gate' (SigmoidGate) moves by the tokens of 1 of the 2 ranks" in texts[0]
        ), texts
        fixed = SigmoidGate(D, E, 1, bias_update_speed=0)
        assert warned_by(wrap, FMoETransformerMLP(E, D, H, gate=fixed, expert_dp_comm="dp"))[0] == []
        layer = make(num_expert=E, expert_dp_comm="dp", gate_group=dist.group.WORLD)
        texts, wrapped = warned_by(wrap, layer)
        assert texts == []
        expected = train(make(num_expert=E), slice(None))
        optimizer = torch.optim.SGD(list(layer.gate.parameters()), lr=0.0)
        for step in range(STEPS):
            wrapped(tokens(step)[part]).square().mean().backward()
            optimizer.step()
            assert torch.equal(layer.gate.expert_bias, expected[step])


def copies_under_fully_shard():
    layer = fully_shard(make(num_expert=E), mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def steps(layer):
        for step in range(2):
            layer(tokens(step)).square().mean().backward()
            optimizer.step()

    texts, _ = warned_by(steps, layer)
    assert len(texts) == 1 and "1 of the 2 ranks" in texts[0] and "fully_shard" in texts[0], texts


def counts_of_microbatches():
    """broadcast_buffers=True does not send the first rank's counts in the middle of a step."""
    layer = make(num_expert=E, expert_dp_comm="dp", gate_group=dist.group.WORLD)
    model = DistributedGroupedDataParallel(layer, auto_allreduce=True, broadcast_buffers=True)
    chosen = torch.zeros(E, dtype=torch.int64)
    layer.gate_hook = lambda topk_idx, *_: chosen.add_(topk_idx.flatten().bincount(minlength=E))
    for step in range(2):
        chosen.zero_()
        x = tokens(10 * dist.get_rank() + step)
        with model.no_sync():
            model(x[:5]).sum().backward()
        model(x[5:]).sum().backward()
        model.allreduce_params()
        assert torch.equal(layer.gate.pending_load, chosen)
        torch.optim.SGD(model.parameters(), lr=0.0).step()


def test_copies_of_a_bias(pool):
    pool.run(copies_of_a_bias, world_size=2)


def test_copies_under_fully_shard():
    # in processes of its own: torch's caches would give its mesh to later ranks whose groups have other sizes
    run_distributed(copies_under_fully_shard, 2)


def test_counts_of_microbatches(pool):
    pool.run(counts_of_microbatches, world_size=2)
