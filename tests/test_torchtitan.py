"""torchtitan's MoE layer with our experts, against its own and over ranks; needs torchtitan (docs/torchtitan.md)."""
# ruff: noqa: E402  # imported only where it is installed, for the CPU

import contextlib
import dataclasses
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fmoe_ext.testing import run_distributed

pytest.importorskip("torchtitan", reason="torchtitan is not installed: docs/torchtitan.md has the command")
pytest.importorskip("triton", reason="torchtitan imports triton: docs/torchtitan.md has the command")

from torchtitan.tools import utils  # isort: skip

utils.device_type = "cpu"  # before others read it: torchtitan takes CUDA where it finds no device

import spmd_types as spmd
from torchtitan.config import CompileConfig, OverrideConfig, apply_overrides
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.spmd_types import set_current_spmd_mesh
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.moe import GroupedExperts, MoE
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

OURS = "fmoe_ext.torchtitan.routed_experts"
B, L, D, H, E, K = 4, 8, 16, 32, 8, 2
DRAW = functools.partial(nn.init.normal_, std=0.2)
EXPERTS = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}


def config(dispatcher="standard", ep=1, tp=1):
    """A layer in the manner of DeepSeek-V3: sigmoid scores, normed and scaled, groups, a bias, a shared expert."""
    layer = make_moe_config(
        num_experts=E,
        router=make_router_config(
            dim=D,
            num_experts=E,
            gate_param_init={"weight": DRAW},
            top_k=K,
            route_norm=True,
            route_scale=2.5,
            num_expert_groups=4,
            num_limited_groups=2,
        ),
        routed_experts=make_routed_experts_config(
            dim=D,
            hidden_dim=H,
            num_experts=E,
            top_k=K,
            param_init=dict.fromkeys(EXPERTS, DRAW),
            comm_backend=dispatcher,
        ),
        shared_experts=make_ffn_config(
            dim=D, hidden_dim=H, w1_param_init={"weight": DRAW}, w2w3_param_init={"weight": DRAW}
        ),
    )
    set_moe_sharding_config(layer, enable_ep=ep > 1, enable_sp=tp > 1, expert_param_layout=EXPERTS)
    return layer


def build(layer, dtype, ours=True, compute="bfloat16"):
    """The layer of a config, the same weights each time; with torchtitan's own experts or with ours."""
    if ours:
        apply_overrides(OverrideConfig(imports=[(OURS, {"dtype": compute})]), layer)
    torch.manual_seed(0)
    moe = layer.build()
    moe.init_states(buffer_device=torch.device("cpu"))
    with torch.no_grad():
        moe.expert_bias_E.copy_(torch.linspace(-0.1, 0.1, E))
    return moe.to(dtype)


def tokens(dtype):
    return torch.randn(B, L, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def step(moe, x, recompute=False):
    """(output, gradient of x, {name: gradient})"""
    x = x.clone().requires_grad_()
    y = checkpoint(moe, x, use_reentrant=False) if recompute else moe(x)
    y.double().pow(2).sum().backward()
    return y.detach(), x.grad, {name: p.grad for name, p in moe.named_parameters()}


def distance(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def without_bfloat16(patch):
    """Lets torchtitan's experts compute in the dtype of their input."""

    def products(self, *, A, B_t, offs):
        parts = A.tensor_split(offs[:-1].tolist())
        return torch.cat([part @ weight for part, weight in zip(parts, B_t, strict=True)])

    patch.setattr(GroupedExperts, "_grouped_mm", products)
    patch.setattr(torch.Tensor, "bfloat16", lambda x: x)


def test_equals_torchtitans_own(monkeypatch):
    ours = step(build(config(), torch.float64, compute="input"), tokens(torch.float64))
    without_bfloat16(monkeypatch)
    theirs = step(build(config(), torch.float64, ours=False), tokens(torch.float64))
    assert ours[2].keys() == theirs[2].keys()
    pairs = [*zip(ours[:2], theirs[:2], strict=True), *((ours[2][n], theirs[2][n]) for n in ours[2])]
    for a, b in pairs:
        assert distance(a, b) < 1e-6  # torchtitan weights the results of experts in float32


def test_no_farther_from_float64_than_torchtitan_in_bfloat16():
    truth = step(build(config(), torch.float64, compute="input"), tokens(torch.float64))
    ours, theirs = (
        step(build(config(), torch.float32, ours), tokens(torch.float32)) for ours in (True, False)
    )
    assert ours[0].dtype == theirs[0].dtype == torch.float32
    for name in EXPERTS:
        name = f"routed_experts.inner_experts.{name}"
        assert (
            1e-4 < distance(ours[2][name], truth[2][name]) < 1.25 * distance(theirs[2][name], truth[2][name])
        )


def test_state_dict_is_torchtitans_own():
    ours, theirs = build(config(), torch.float32), build(config(), torch.float32, ours=False)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)


class Stack(nn.Module):
    """The parts of a decoder that torchtitan's FSDP looks for."""

    enable_weight_tying = False

    def __init__(self, moe):
        super().__init__()
        self.tok_embeddings = self.norm = self.lm_head = None
        self.layers = nn.ModuleDict({"0": Block(moe)})

    def forward(self, x):
        return self.layers["0"](x)


class Block(nn.Module):
    moe_enabled = True

    def __init__(self, moe):
        super().__init__()
        self.moe = moe

    def forward(self, x):
        return self.moe(x)


def on_ranks(ep, tp, recompute):
    """A rank's step on its part of the batch -> (output, gradient of x, gradients), each as far as it has it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dims = ParallelDims(dp_replicate=1, dp_shard=size // tp, cp=1, tp=tp, pp=1, ep=ep, world_size=size)
    dims.build_mesh()
    moe = build(config(ep=ep, tp=tp), torch.float64, compute="input")
    moe.parallelize(dims)
    with set_current_spmd_mesh(dims.spmd_dense_mesh()):
        return step(moe, part(tokens(torch.float64), rank, size, tp), recompute)


def compiled_block(ep=1, tp=1):
    """The output, gradient of x and gradients of a block by torchtitan's apply_compile, and those of eager."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    dims = ParallelDims(dp_replicate=1, dp_shard=size // tp, cp=1, tp=tp, pp=1, ep=ep, world_size=size)
    found = []
    for compiled in (False, True):
        moe = build(config(ep=ep, tp=tp), torch.float64, compute="input")
        stack, inside = Stack(moe), contextlib.nullcontext()
        if size > 1:
            dims.build_mesh()
            moe.parallelize(dims)
            inside = set_current_spmd_mesh(dims.spmd_dense_mesh())
        if compiled:
            options = CompileConfig(enable=True, components=["model"], backend="aot_eager")
            apply_compile(stack, compile_config=options, parallel_dims=dims)
        with inside:
            y, gx, gradients = step(stack, part(tokens(torch.float64), rank, size, tp))
        found.append([y, gx, *(grad for grad in gradients.values() if grad is not None)])
    return found


@pytest.mark.parametrize(("size", "ep", "tp"), [(1, 1, 1), (2, 2, 1), (4, 2, 2)])
def test_block_that_torchtitan_compiles_has_the_bits_of_eager(size, ep, tp):
    results = [compiled_block()] if size == 1 else run_distributed(compiled_block, size, ep, tp)
    for eager, compiled in results:
        assert len(eager) == len(compiled) == 9
        assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


def under_fsdp(ep, recompute):
    """The same with torchtitan's FSDP, whose gradients are those of all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    backend = "partial_dtensor"  # FSDP of torch 2.13 does not know spmd_types
    set_spmd_backend(backend)
    dims = ParallelDims(
        dp_replicate=1, dp_shard=size, cp=1, tp=1, pp=1, ep=ep, world_size=size, spmd_backend=backend
    )
    dims.build_mesh()
    moe = build(config(ep=ep), torch.float64, compute="input")
    if ep > 1:
        moe.parallelize(dims)
    model = Stack(moe)
    experts = {"ep_degree": ep, "edp_mesh": dims.get_optional_mesh(["efsdp"]) if ep > 1 else None}
    apply_fsdp_to_decoder(
        model, dims.get_mesh(["fsdp"]), torch.float64, torch.float64, pp_enabled=False, **experts
    )
    y, gx, gradients = step(model, part(tokens(torch.float64), rank, size), recompute)
    return y, gx, {name.removeprefix("layers.0.moe."): grad.full_tensor() for name, grad in gradients.items()}


def part(x, rank, size, tp=1):
    """A rank's part [B / data parallel, L / tp, D] of a batch."""
    return x.chunk(size // tp)[rank // tp].chunk(tp, dim=1)[rank % tp]


def kept_or_recomputed(layouts):
    """Parameters of a test: each layout both ways, of which make test runs one, in turn."""
    return [
        pytest.param(
            *layout,
            is_recomputed,
            marks=() if is_recomputed == index % 2 else pytest.mark.slow,
            id=f"{'-'.join(map(str, layout))}-{'recomputed' if is_recomputed else 'kept'}",
        )
        for index, layout in enumerate(layouts)
        for is_recomputed in (False, True)
    ]


@pytest.mark.parametrize(
    ("size", "ep", "tp", "recompute"), kept_or_recomputed([(2, 2, 1), (2, 1, 2), (2, 2, 2), (4, 2, 2)])
)
def test_expert_and_tensor_parallel_equal_one_process(size, ep, tp, recompute):
    y, gx, gradients = step(build(config(), torch.float64, compute="input"), tokens(torch.float64))
    results = run_distributed(on_ranks, size, ep, tp, recompute)
    for rank, ours in enumerate(results):
        assert distance(ours[0], part(y, rank, size, tp)) < 1e-12
        assert distance(ours[1], part(gx, rank, size, tp)) < 1e-12
    for name, dim in EXPERTS.items():
        name = f"routed_experts.inner_experts.{name}"
        for shard, grad in enumerate(
            gradients[name].chunk(ep) if ep > 1 else gradients[name].chunk(tp, dim.dim)
        ):
            here = [ours[2][name] for rank, ours in enumerate(results) if rank % max(ep, tp) == shard]
            assert distance(sum(here), grad) < 1e-12, name


@pytest.mark.parametrize(("size", "ep", "recompute"), kept_or_recomputed([(2, 1), (2, 2), (4, 2)]))
def test_fsdp_equals_one_process(size, ep, recompute):
    y, gx, gradients = step(build(config(), torch.float64, compute="input"), tokens(torch.float64))
    for rank, ours in enumerate(run_distributed(under_fsdp, size, ep, recompute)):
        assert distance(ours[0], part(y, rank, size)) < 1e-12
        assert distance(ours[1], part(gx, rank, size)) < 1e-12
        for name, grad in gradients.items():
            assert distance(ours[2][name], grad) < 1e-12, name


def test_experts_of_gpt_oss_are_computed_by_their_own_module():
    names = ("mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF", "mlp2_bias_ED")
    results = []
    for ours in (True, False):
        layer = config()
        layer.routed_experts.inner_experts = GptOssGroupedExperts.Config(
            dim=D, hidden_dim=H, num_experts=E, param_init=dict.fromkeys(names, DRAW)
        )
        results.append(step(build(layer, torch.bfloat16, ours), tokens(torch.bfloat16)))
    ours, theirs = results
    assert distance(ours[0], theirs[0]) < 0.01  # torchtitan rounds each weighted result, we their sum
    for name in names:
        name = f"routed_experts.inner_experts.{name}"
        assert distance(ours[2][name], theirs[2][name]) < 0.01, name


def test_other_exchanges_and_dtypes_are_refused_by_name():
    layer = config("hybridep")
    with pytest.raises(ValueError, match=r"HybridEPTokenDispatcher.*does not replace.*moe_comm_backend"):
        apply_overrides(OverrideConfig(imports=[OURS]), layer)
    with pytest.raises(ValueError, match='dtype must be "bfloat16" or "input"'):
        build(config(), torch.float32, compute="float16")


def test_counts_and_bias_stay_torchtitans():
    ours, theirs = build(config(), torch.float32), build(config(), torch.float32, ours=False)
    for moe in (ours, theirs):
        assert isinstance(moe, MoE)
        moe.train()(tokens(torch.float32))
    assert torch.equal(ours.tokens_per_expert_E, theirs.tokens_per_expert_E)
    assert ours.tokens_per_expert_E.sum() == B * L * K


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("parallelize", None),
        ("undivided", "gradient"),
        ("over_tensors", "tp=2: only data and expert parallelism"),
    ],
)
def test_audit_of_experts_over_ranks_under_fsdp(plan, said):
    import audit_torchtitan as audited

    from fmoe_ext.audit import audit_plan

    report = audit_plan(dataclasses.replace(audited.RECIPE, parallelize=getattr(audited, plan)))
    if said is None:
        assert report.ok, str(report)
    elif said == "gradient":
        first = report.first
        assert (first.quantity, first.name, first.note) == (
            "gradient",
            "lm_head.bias",
            "2 times that of one process",
        )
    else:
        assert said in report.error
