"""FMoE.spread(): a layer that was made for one process computes the same with its experts on several ranks."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fmoe_ext import FMoE, FMoELinear, FMoETransformerMLP
from fmoe_ext.gates import FasterGate, SoftmaxGate

D, H, E, T = 6, 5, 4, 7


class OneModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = FMoELinear(E, D, H), FMoELinear(E, H, D)

    def forward(self, rows, counts):
        return self.down(self.up(rows, counts).relu(), counts)


class OneModuleLayer(FMoE):
    def __init__(self, **options):
        super().__init__(E, D, **options)
        self.experts = OneModule()


GATE = functools.partial(SoftmaxGate, capacity_factor=0.8, balance_loss="global")
LAYERS = {
    "fused": lambda: FMoETransformerMLP(E, D, H, activation="swiglu", shared_expert_hidden=3, gate=GATE),
    "separate": lambda: FMoE(E, D, expert=lambda d: nn.Linear(d, d), gate=GATE),
    "one module": lambda: OneModuleLayer(gate=GATE),
}


def batch(rank):
    return torch.randn(T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def local_part(value, name, whole):
    if ".experts." not in f".{name}" or value.shape == whole.shape:
        return whole
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def number_of(name):
    """experts.<e>.weight -> the name of the same expert in one process."""
    head, number, *rest = name.split(".")
    if head != "experts" or not number.isdigit():
        return name
    return ".".join([head, str(int(number) + dist.get_rank() * (E // dist.get_world_size())), *rest])


def trains_as_in_one_process(kind, options):
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    one = LAYERS[kind]().double()
    layer = copy.deepcopy(one)
    layer.spread(**options)
    assert (layer.num_expert, layer.num_experts, layer.world_size) == (E // size, E, size)
    x = torch.cat([batch(r) for r in range(size)])
    expected = one(x)
    (expected.square().sum() + one.gate.get_loss()).backward()
    out = layer(batch(rank))
    (out.square().sum() + layer.gate.get_loss() / size).backward()
    torch.testing.assert_close(out, expected[rank * T : (rank + 1) * T], rtol=1e-12, atol=1e-12)
    whole = dict(one.named_parameters())
    for name, p in layer.named_parameters():
        grad = p.grad
        if not name.startswith("experts"):
            dist.all_reduce(grad)
        truth = local_part(p, name, whole[number_of(name)].grad)
        torch.testing.assert_close(grad, truth, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("options", [{}, {"overlap_degree": 2}, {"exchange": "token"}], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_spread_layer_trains_as_in_one_process(pool, kind, options):
    if kind == "one module" and "overlap_degree" in options:
        options = {"max_rows_per_rank": 2 * T}  # one module cannot compute some of its experts
    pool.run(trains_as_in_one_process, kind, options, world_size=2)


class WithCount(nn.Module):
    """An expert that is called with its number of rows."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, rows, fwd_expert_count):
        assert fwd_expert_count.tolist() == [len(rows)]
        return self.linear(rows)


def calls_each_expert_its_way():
    torch.manual_seed(0)
    layer = FMoE(d_model=D, expert=[lambda d: nn.Linear(d, d)] * 2 + [WithCount] * 2, gate="softmax").double()
    expected = layer(batch(0))
    layer.spread()
    torch.testing.assert_close(layer(batch(0)), expected)


def test_experts_of_a_list_keep_their_way_of_being_called(pool):
    pool.run(calls_each_expert_its_way, world_size=2, timeout=20)


def keeps_attributes():
    layer = LAYERS["fused"]()
    layer.mark_parallel_comm("moe")
    layer.experts.htoh4.bias.requires_grad_(False)
    layer.spread()
    assert {p.dp_comm for p in layer.experts.parameters()} == {"moe"}
    assert not layer.experts.htoh4.bias.requires_grad and layer.experts.htoh4.weight.requires_grad
    assert layer.experts.num_experts == layer.experts.htoh4.num_expert == E // 2
    with pytest.raises(ValueError, match="the experts of FMoETransformerMLP are spread over ranks already"):
        layer.spread()
    odd = FMoETransformerMLP(3, D, H)
    with pytest.raises(ValueError, match="has 3 experts, which 2 ranks cannot share evenly"):
        odd.spread()
    assert odd.expert_parallel is None and len(odd.experts.htoh4.weight) == 3
    faster = FMoETransformerMLP(E, D, H, gate=FasterGate(D, E, 1, 0, gpus_per_node=1))
    with pytest.raises(ValueError, match="takes all 2 ranks for one node of 1"):
        faster.spread()
    assert faster.expert_parallel is None
    one_node = FMoETransformerMLP(E, D, H, gate=FasterGate(D, E, 1, 0, gpus_per_node=2))
    one_node.spread()
    assert one_node.expert_parallel is not None


def test_spread_keeps_tags_and_refuses_what_it_cannot_divide(pool):
    pool.run(keeps_attributes, world_size=2)
