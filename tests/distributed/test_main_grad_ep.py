"""gradient_accumulation_fusion with experts spread over processes: main gradients are those of one process."""

import pytest
import torch
import torch.distributed as dist

from fmoe_ext import FMoETransformerMLP

E, D, H, TOKENS = 4, 6, 5, 12


def make(num_expert, **options):
    """Experts whose values depend on their number over all ranks."""
    layer = FMoETransformerMLP(
        num_expert, D, H, "swiglu", top_k=2, gradient_accumulation_fusion=True, **options
    ).double()
    rank = dist.get_rank() if options else 0
    for seed, (name, p) in enumerate(layer.named_parameters()):
        full = (E, *p.shape[1:]) if name.startswith("experts.") else p.shape
        value = torch.randn(full, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) / 2
        p.data = value[rank * num_expert : (rank + 1) * num_expert] if full != p.shape else value
        if "h" in name and name.endswith("weight"):
            p.main_grad = torch.ones_like(p)
    return layer


def run(layer, x):
    for part in x:  # two micro-batches
        layer(part).square().sum().backward()
    return {n: p.main_grad for n, p in layer.named_parameters() if n.startswith("experts.") and p.dim() == 3}


def equals_one_process(overlap_degree):
    x = torch.randn(2, TOKENS, D, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    truth = run(make(E), x)
    rank, size = dist.get_rank(), dist.get_world_size()
    layer = make(E // size, world_size=size, overlap_degree=overlap_degree)
    got = run(layer, x.chunk(size, 1)[rank])
    assert got.keys() == truth.keys() and len(got) == 2
    for name, main_grad in got.items():
        expected = truth[name].chunk(size)[rank]
        torch.testing.assert_close(main_grad, expected, rtol=1e-12, atol=1e-12)
        assert (main_grad - 1).abs().max() > 1e-3
        assert layer.get_parameter(name).grad is None


def shadows_are_refused():
    layer = make(2, world_size=2)
    layer.expert_parallel.shadows = (1,)
    with pytest.raises(RuntimeError, match="gradient_accumulation_fusion=True cannot be shadowed"):
        layer(torch.zeros(3, D, dtype=torch.float64))


@pytest.mark.parametrize("overlap_degree", [1, 2])
def test_equals_one_process(pool, overlap_degree):
    pool.run(equals_one_process, overlap_degree, world_size=2)


def test_shadows_are_refused(pool):
    pool.run(shadows_are_refused, world_size=2)
