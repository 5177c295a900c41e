"""SigmoidGate's bias over the ranks of a job, and experts drawn alike, as one process has them."""

import torch
import torch.distributed as dist

from fmoe_ext import FMoETransformerMLP
from fmoe_ext.gates import SigmoidGate

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
