"""batch_invariant() with experts on several ranks: a token has the bits of one process."""

import pytest
import torch
import torch.distributed as dist

from fmoe_ext import FMoETransformerMLP, batch_invariant
from fmoe_ext.gates import SoftmaxGate

D, H, E, T = 40, 24, 4, 90


def layer(num_expert, **options):
    torch.manual_seed(0)
    full = FMoETransformerMLP(E, D, H, gate=SoftmaxGate, activation="swiglu")
    if num_expert == E:
        return full
    part = FMoETransformerMLP(num_expert, D, H, gate=SoftmaxGate, activation="swiglu", **options)
    first = part.ep_rank * num_expert
    state = {k: v[first : first + num_expert] if "experts." in k else v for k, v in full.state_dict().items()}
    part.load_state_dict(state)
    return part


def run(module, x, grad):
    x = x.clone().requires_grad_()
    out = module(x)
    return out.detach(), torch.autograd.grad(out, x, grad)[0]


def on_ranks(options):
    rank, size = dist.get_rank(), dist.get_world_size()
    x, grad = torch.randn(2, T, D, generator=torch.Generator().manual_seed(1))
    ours = layer(E // size, world_size=size, moe_group=dist.group.WORLD, **options)
    with batch_invariant():
        whole = run(layer(E), x, grad)
        for cut in (0, 1, 3, 33, 60, T - 1):  # tokens of rank 0 and, in two parts of another order, of rank 1
            rows = torch.arange(cut) if rank == 0 else torch.arange(cut, T).flip(0)
            for part in rows.split(50) if rank else (rows, rows[:0]) if T - cut > 50 else (rows,):
                for mine, all_of_it in zip(run(ours, x[part], grad[part]), whole, strict=True):
                    assert torch.equal(mine, all_of_it[part])


@pytest.mark.parametrize("options", [{}, {"overlap_degree": 2}, {"max_rows_per_rank": 2 * T}], ids=str)
def test_bits_of_one_process(pool, options):
    pool.run(on_ranks, options, world_size=2)


def shadowed():
    module = layer(2, world_size=2, moe_group=dist.group.WORLD)
    module.expert_parallel.shadows = (0,)
    with (
        batch_invariant(),
        pytest.raises(RuntimeError, match="which experts are shadowed depends on the load"),
    ):
        module(torch.zeros(3, D))


def test_shadows_are_refused(pool):
    pool.run(shadowed, world_size=2)
