import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fmoe_ext import FMoETransformerMLP
from fmoe_ext.optim import Muon, orthogonalize

OPTIONS = [
    {},
    {"nesterov": False, "momentum": 0.5},
    {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3},
    {"adjust_lr_fn": "original", "ns_steps": 3, "lr": 0.1},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [(4, 6, 5), (3, 5, 6), (2, 8, 8), (6, 5)])
def test_each_matrix_is_updated_as_by_torch(shape, options, dtype):
    if dtype == torch.bfloat16 and options.get("nesterov") is False:
        pytest.skip(
            "torch 2.13 scales its own momentum in place there: .bfloat16() of a bfloat16 tensor is no copy"
        )
    torch.manual_seed(0)
    stack = nn.Parameter(torch.randn(shape, dtype=dtype))
    single = [nn.Parameter(x.clone()) for x in stack.detach().reshape(-1, *shape[-2:])]
    ours, theirs = Muon([stack], **options), torch.optim.Muon(single, **options)
    for _ in range(3):
        stack.grad = torch.randn(shape, dtype=dtype)
        for p, grad in zip(single, stack.grad.reshape(-1, *shape[-2:]), strict=True):
            p.grad = grad.clone()
        ours.step()
        theirs.step()
    expected = torch.stack([p.detach() for p in single])
    # both iterate in bfloat16; a norm that rounds to its neighbour moves an update by some of its last bits
    tolerance = 0.02 * ours.param_groups[0]["lr"] + torch.finfo(dtype).eps * expected.abs().max().item()
    torch.testing.assert_close(stack.detach().reshape_as(expected), expected, rtol=0, atol=tolerance)


def test_gate_and_up_are_two_matrices():
    torch.manual_seed(0)
    fused = nn.Parameter(torch.randn(3, 8, 5))
    apart = nn.Parameter(fused.detach().reshape(6, 4, 5).clone())
    fused.grad = torch.randn(3, 8, 5)
    apart.grad = fused.grad.reshape(6, 4, 5).clone()
    Muon([{"params": [fused], "matrices": 2}]).step()
    Muon([apart]).step()
    assert torch.equal(fused.reshape(6, 4, 5), apart)


@pytest.mark.parametrize("copied", [False, True])
def test_layer_says_that_gate_and_up_are_two_matrices(copied):
    torch.manual_seed(0)
    layer = FMoETransformerMLP(3, 8, 4, "swiglu", bias=False)
    layer = copy.deepcopy(layer) if copied else layer
    up, down = layer.experts.htoh4.weight, layer.experts.h4toh.weight
    gate_up = nn.Parameter(up.detach().clone())
    up.grad, down.grad = torch.randn(3, 8, 8), torch.randn(3, 8, 4)
    gate_up.grad = up.grad.clone()
    Muon([up, down]).step()
    Muon([{"params": [gate_up], "matrices": 2}]).step()
    assert torch.equal(up, gate_up)
    plain = FMoETransformerMLP(3, 8, 4, "gelu", bias=False).experts.htoh4.weight
    whole = nn.Parameter(plain.detach().clone())
    plain.grad = torch.randn_like(plain)
    whole.grad = plain.grad.clone()
    Muon([plain]).step()
    Muon([whole], matrices=1).step()
    assert torch.equal(plain, whole)


@pytest.fixture
def mesh():
    """One rank, whose parameters fully_shard replaces nevertheless."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("looks", [False, True])
def test_sharded_layer_says_that_gate_and_up_are_two_matrices(mesh, looks):
    """looks: at a loss between backward and step, after which the layer has its gathered parameters."""
    torch.manual_seed(0)
    x = torch.randn(12, 8)
    plain = FMoETransformerMLP(3, 8, 4, "swiglu", bias=False)
    layer = copy.deepcopy(plain)
    fully_shard(layer.experts, mesh=mesh)
    for mlp in (plain, layer):
        optimizer = Muon(mlp.experts.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            mlp(x).square().sum().backward()
            if looks:
                with torch.no_grad():
                    mlp(x)
            optimizer.step()
            if looks and mlp is layer:
                layer.experts.reshard()  # or torch computes the next forward with the values of before
    for name, p in plain.experts.named_parameters():
        assert torch.equal(layer.experts.get_parameter(name).to_local(), p), name


def test_singular_values_come_near_one():
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(5, 32, 16)).float())
    assert values.min() > 0.6 and values.max() < 1.3


def test_muon_layer_learns_and_state_reloads():
    torch.manual_seed(0)
    layer = FMoETransformerMLP(4, 8, 16, "swiglu", bias=False)
    muon = Muon([layer.experts.htoh4.weight, layer.experts.h4toh.weight], lr=0.02)
    x, target = torch.randn(64, 8), torch.randn(64, 8)
    losses = []
    for _ in range(10):
        muon.zero_grad()
        loss = (layer(x) - target).square().mean()
        loss.backward()
        muon.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.98 * losses[0]
    other = Muon([layer.experts.htoh4.weight, layer.experts.h4toh.weight])
    other.load_state_dict(muon.state_dict())
    assert other.param_groups[0]["lr"] == 0.02
    state = other.state[layer.experts.htoh4.weight]["momentum_buffer"]
    assert torch.equal(state, muon.state[layer.experts.htoh4.weight]["momentum_buffer"])


def test_experts_without_gradient_stay():
    frozen, trained = nn.Parameter(torch.ones(2, 2, 2)), nn.Parameter(torch.ones(2, 2, 2))
    trained.grad = torch.ones(2, 2, 2)
    Muon([frozen, trained]).step()
    assert torch.equal(frozen, torch.ones(2, 2, 2)) and not torch.equal(trained, frozen)


@pytest.mark.parametrize(
    "params, options, text",
    [
        ([torch.ones(3)], {}, r"matrices \[M, N\] and stacks.*\[3\].*AdamW"),
        ([torch.ones(1, 2, 3, 4)], {}, r"\[1, 2, 3, 4\]"),
        ([torch.ones(3, 2)], {"matrices": 2}, "matrices=2 must divide the 3 rows"),
        ([torch.ones(2, 2)], {"lr": -1}, "lr must be at least 0, but got -1"),
        ([torch.ones(2, 2)], {"ns_steps": 100}, r"ns_steps in \[0, 100\)"),
        ([torch.ones(2, 2)], {"adjust_lr_fn": "other"}, "adjust_lr_fn must be one of .*'other'"),
    ],
)
def test_rejects(params, options, text):
    with pytest.raises(ValueError, match=text):
        Muon([nn.Parameter(p) for p in params], **options)


def test_group_that_is_rejected_is_not_kept():
    param, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(3))
    param.grad, vector.grad = torch.ones(2, 2), torch.ones(3)
    muon = Muon([param])
    with pytest.raises(ValueError, match="give it to AdamW"):
        muon.add_param_group({"params": [vector]})
    muon.step()
    assert torch.equal(vector, torch.ones(3)) and not torch.equal(param, torch.ones(2, 2))


def test_rejects_main_grad():
    param = nn.Parameter(torch.ones(2, 2))
    param.main_grad = torch.ones(2, 2)
    with pytest.raises(ValueError, match="gradient in main_grad"):
        Muon([param]).step()
