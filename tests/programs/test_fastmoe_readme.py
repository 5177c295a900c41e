"""FastMoE's README: fmoefy of a Megatron model, its layers in another model, and its data-parallel wrapper."""

import sys

import pytest
import torch
from test_megatron_legacy import Model, install_megatron
from torch import nn

D = 8


@pytest.fixture
def megatron(monkeypatch):
    modules, _ = install_megatron(distributed_experts=False)
    for name in [name for name in sys.modules if name == "megatron" or name.startswith("megatron.")]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_fmoefy_takes_num_experts_as_the_readme_writes_it(fmoe_installed, megatron):
    from fmoe.megatron import fmoefy

    model = Model()
    model = fmoefy(model, num_experts=6)

    assert [layer.mlp.num_experts for layer in model.layers] == [6, 6]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, 4, D, generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    with pytest.raises(
        ValueError, match="num_experts and fmoe_num_experts are one argument, but got 6 and 4"
    ):
        fmoefy(Model(), 4, num_experts=6)


def program():
    import fmoe_ext.compat

    fmoe_ext.compat.install()

    import torch.distributed as dist
    from fmoe import FMoETransformerMLP
    from fmoe.distributed import DistributedGroupedDataParallel as DDP

    world_size = dist.get_world_size()

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(D)
            self.mlp = FMoETransformerMLP(
                num_expert=4 // world_size, d_model=D, d_hidden=16, world_size=world_size, top_k=2
            )

        def forward(self, x):
            return x + self.mlp(self.norm(x))

    torch.manual_seed(0)
    model = Block()
    generator = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():  # the same numbers in every layout
        whole = torch.randn(4, *p.shape[1:], generator=generator) if "experts" in name else None
        here = slice(dist.get_rank() * 4 // world_size, (dist.get_rank() + 1) * 4 // world_size)
        with torch.no_grad():
            p.copy_(0.1 * whole[here] if whole is not None else torch.randn(p.shape, generator=generator))
    model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, D, generator=generator).chunk(world_size)[dist.get_rank()]
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        model.allreduce_params()
        optimizer.step()
        mean = loss.detach() / world_size
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def test_expert_parallel_program_trains_as_one_process(pool):
    alone = pool.run(program, world_size=1)[0]
    for losses in pool.run(program):
        assert losses == pytest.approx(alone, rel=1e-5)
    assert alone[-1] < alone[0]
