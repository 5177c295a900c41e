"""Same loss, gradients and optimizer steps in every layout as in one process."""

import copy
import functools
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fmoe_ext import FMoE, FMoETransformerMLP, ParallelLayout, valid_tokens
from fmoe_ext.gates import GATES, NaiveGate, OneRank
from fmoe_ext.testing import assert_close
from tests.distributed.layouts import D, E, K, assert_equal_training, in_layout, local_part, one_process
from tests.sweeps import rest_is_long

LAYOUTS = [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2), (4, 4, 1), (4, 2, 1), (4, 2, 2), (4, 1, 1)]
FEW_LAYOUTS = [(1, 1, 1), (2, 2, 1), (2, 1, 2), (4, 4, 1), (4, 2, 2)]
ROWS = {1: [7], 2: [5, 8], 4: [5, 8, 0, 3]}


@pytest.mark.parametrize(("world_size", "ep", "slice_"), rest_is_long(LAYOUTS, FEW_LAYOUTS))
def test_layouts(pool, world_size, ep, slice_):
    """Uneven batches, a rank without tokens, odd numbers of rows in a slice; fused and separate experts."""
    pool.run(train_everything, ROWS[world_size // slice_], ep, slice_, world_size=world_size)


def train_everything(rows, ep, slice_):
    for experts in ("fused", "separate"):
        for overlap_degree in (1, 2):
            assert_equal_training(
                rows,
                ep=ep,
                slice_=slice_,
                options={"experts": experts},
                layout_options={"overlap_degree": overlap_degree},
            )


@pytest.mark.parametrize(("world_size", "ep", "slice_"), rest_is_long(LAYOUTS[1:-1], [(2, 1, 2), (4, 2, 2)]))
def test_latent_experts(pool, world_size, ep, slice_):
    """Projections around narrower experts, whose rows alone are exchanged; shared experts have the full width."""
    pool.run(train_latent_experts, ROWS[world_size // slice_], ep, slice_, world_size=world_size)


def train_latent_experts(rows, ep, slice_):
    options = {"latent_size": 3, "shared_expert_hidden": 2}
    for ways in ({}, {"overlap_degree": 2, "exchange": "token"}):
        assert_equal_training(rows, ep=ep, slice_=slice_, options=options, layout_options=ways)


def test_twenty_steps(pool):
    """SGD: Adam divides by gradients near zero, and so makes rounding errors grow."""
    options = {"optimizer": torch.optim.SGD}
    pool.run(functools.partial(assert_equal_training, [4, 6], steps=20, options=options), world_size=2)


TWO_PARTS = [5, 8]


class Parts(OneRank):
    """One process that knows the worker of each token of its batch: SwipeGate's result depends on it."""

    def __init__(self, rows):
        self.rows = rows

    def gather(self, x, same_size=False):
        return x.split(self.rows)


def make_gate(name, size, d_model, num_expert, world_size, top_k):
    """The gate of a layer that is spread over `size` ranks, also for the layer in one process; nothing random."""
    options = {
        "gshard": {"random_routing": False},
        "dc": {"random_routing": False},
        "switch": {"switch_eps": 0.0},
    }
    if name in ("softmax", "sigmoid"):
        options[name] = {
            "capacity_factor": 0.8,
            "drop_policy": "score",
            "z_weight": 0.1,
            "balance_loss": "global",
        }
    if name == "swipe" and world_size == 1:
        options[name] = {"ranks": Parts(TWO_PARTS)}
    gate = GATES[name](d_model, E // size, size, top_k, **options.get(name, {}))
    return gate.eval() if name == "noisy" else gate


class OneExpert(NaiveGate):
    """Sends every token to expert 1, so that the other rank's experts have none, and drops a third of the choices."""

    def forward(self, x):
        topk_idx, topk_weights = super().forward(x)
        keep = (x[:, :1] > -0.4).expand_as(topk_idx)
        return torch.where(keep, torch.ones_like(topk_idx), -1), topk_weights


@pytest.mark.parametrize("name", GATES)
def test_gates(pool, name):
    """Losses, capacities and drops count the tokens of all ranks."""
    options = {"gate": functools.partial(make_gate, name, 2), "top_k": 1 if name == "switch" else K}
    pool.run(functools.partial(assert_equal_training, TWO_PARTS, options=options), world_size=2)


def test_gates_in_slices_and_replicas(pool):
    for slice_, rows in ((2, [5, 7]), (1, [5, 7, 0, 4])):
        options = {"gate": functools.partial(make_gate, "gshard", 2)}
        pool.run(functools.partial(assert_equal_training, rows, slice_=slice_, options=options), world_size=4)


def test_all_tokens_to_one_expert(pool):
    for overlap_degree in (1, 2):
        run = functools.partial(
            assert_equal_training,
            [5, 0],
            options={"gate": OneExpert},
            layout_options={"overlap_degree": overlap_degree},
        )
        pool.run(run, world_size=2)


def low_precision(dtype):
    """Every gradient as near the float64 one as that of plain PyTorch, our layer's own one-process run here."""
    rows = [24, 40]
    truth, plain = (one_process(rows, d, 1)[0] for d in (torch.float64, dtype))
    history, rank, size = in_layout(rows, dtype, 1, 2, 1, overlap_degree=2)
    for name, full in truth[2].items():
        name_here, part = local_part(name, full, rank, size, "fused")
        assert_close(
            history[0][2][name_here], part, local_part(name, plain[2][name], rank, size, "fused")[1], name
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(pool, dtype):
    pool.run(low_precision, dtype, world_size=2)


def overlap_is_bitwise():
    torch.manual_seed(dist.get_rank())
    x = torch.randn(50, D, requires_grad=True)
    weights = torch.randn(50, D)
    results = []
    for overlap_degree in (1, 2, 3, 8):
        torch.manual_seed(7)
        layer = FMoETransformerMLP(3, D, 5, world_size=2, overlap_degree=overlap_degree)
        x.grad = None
        out = layer(x)
        (out * weights).sum().backward()
        results.append([out.detach(), x.grad, *(p.grad for p in layer.parameters())])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_overlap_is_bitwise(pool):
    pool.run(overlap_is_bitwise, world_size=2)


class Pair(nn.Module):
    """An expert on a nest of two tensors of different shapes."""

    def __init__(self, d_model):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(d_model, dtype=torch.float64))

    def forward(self, x):
        return {"a": x["a"] * self.scale, "b": (x["b"] * self.scale[:2]).sum(-1)}


class FirstOfNest(NaiveGate):
    def forward(self, x):
        return super().forward(x["a"])


def nests_masks_meshes_and_copies():
    """FMoE computes the same in one process and on several ranks."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(3)
    options = dict(d_model=D, top_k=2, gate=FirstOfNest)
    whole = FMoE(num_expert=E, expert=Pair, **options).double()
    layer = FMoE(
        num_expert=E // 2, expert=Pair, world_size=2, moe_group=mesh, overlap_degree=2, **options
    ).double()
    held = (
        local_part(n, v, rank, 2, "separate")
        for n, v in (
            ("m.experts" + k[7:], v) if k.startswith("experts") else (k, v)
            for k, v in whole.state_dict().items()
        )
    )
    layer.load_state_dict({n.removeprefix("m."): v for n, v in held if n is not None})
    assert layer.moe_group is mesh.get_group() and layer.num_experts == E
    everyone = {"a": torch.randn(9, D, dtype=torch.float64), "b": torch.randn(9, 3, 2, dtype=torch.float64)}
    mine = {k: v[4 * rank : 4 + 5 * rank].requires_grad_() for k, v in everyone.items()}
    expected = whole(everyone)
    mask = torch.tensor([0, 1, 0, 2])
    for twin in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        out = twin(mine)
        for key in out:
            torch.testing.assert_close(
                out[key], expected[key][4 * rank : 4 + 5 * rank], rtol=1e-12, atol=1e-14
            )
    mine = {k: v.detach()[:4] for k, v in everyone.items()}
    for module in (layer, whole):
        module.mask, module.mask_dict = mask, {1: 0.25}
    expected, out = whole(mine), layer(mine)
    for key in out:
        torch.testing.assert_close(out[key], expected[key], rtol=1e-12, atol=1e-14)


def test_nests_masks_meshes_and_copies(pool):
    pool.run(nests_masks_meshes_and_copies, world_size=2)


def checkpointed_and_shared():
    """One layer used twice, recomputed in the backward: as without."""
    torch.manual_seed(dist.get_rank())
    x = torch.randn(6, D, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    layer = FMoETransformerMLP(2, D, 5, world_size=2, overlap_degree=2).double()
    results = []
    for wrap in (
        lambda f, x: f(x),
        functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
        functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True),
    ):
        x.grad = None
        layer.zero_grad()
        wrap(layer, wrap(layer, x)).square().sum().backward()
        results.append([x.grad, *(p.grad for p in layer.parameters())])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    for overlap_degree in (2, "auto"):  # compiled before any other forward
        torch.manual_seed(1)
        fresh = FMoETransformerMLP(2, D, 5, world_size=2, overlap_degree=overlap_degree).double()
        compiled = torch.compile(fresh, backend="eager")
        torch.testing.assert_close(compiled(x), layer(x), rtol=1e-12, atol=1e-14)


def test_checkpointed_and_shared(pool):
    pool.run(checkpointed_and_shared, world_size=2)


def gradients_of(sizes, valid, order, wrap, **options):
    """Gradients after the forwards of microbatches of these sizes, and their backwards in the given order."""
    torch.manual_seed(1)
    layer = FMoETransformerMLP(2, D, 5, world_size=2, **options).double()
    torch.manual_seed(2 + dist.get_rank())
    with valid_tokens(valid):
        inputs = [torch.randn(size, D, dtype=torch.float64, requires_grad=True) for size in sizes]
        losses = [wrap(layer, x).square().sum() for x in inputs]
    for numbers in order:
        sum(losses[i] for i in numbers).backward()
    return [x.grad for x in (*inputs, *layer.parameters())]


def checkpointed_beside_a_rank_without_tokens():
    sizes = [0, 0, 0] if dist.get_rank() == 0 else [3, 5, 1]
    checkpointed = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    for options in ({"max_rows_per_rank": 16}, {}):
        for order in ([(0, 1, 2)], [(0,), (1,), (2,)]):
            ours = gradients_of(sizes, None, order, checkpointed, **options)
            theirs = gradients_of(sizes, None, order, lambda layer, x: layer(x), **options)
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_checkpointed_beside_a_rank_without_tokens(pool):
    """It had taken one of its microbatches for another, and what other ranks sent in that for what they send now."""
    pool.run(checkpointed_beside_a_rank_without_tokens, world_size=2)


def checkpointed_with_padding_on_one_rank():
    valid = torch.arange(6) < (6 if dist.get_rank() == 0 else 4)
    checkpointed = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    ours = gradients_of([6], valid, [(0,)], checkpointed)
    theirs = gradients_of([6], valid, [(0,)], lambda layer, x: layer(x))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_checkpointed_with_padding_on_one_rank(pool):
    """The ranks had waited for each other: one repeated its forward, the other sent gradients."""
    pool.run(checkpointed_with_padding_on_one_rank, world_size=2, timeout=30)


def parallel_says_what_keywords_say():
    x = torch.arange(6.0 * D, dtype=torch.float64).reshape(6, D).sin()
    results = []
    for how in (
        {"world_size": 2, "moe_group": dist.group.WORLD, "overlap_degree": 2, "exchange": "token"},
        {"parallel": ParallelLayout(moe_group=dist.group.WORLD, overlap_degree=2, exchange="token")},
    ):
        torch.manual_seed(dist.get_rank())
        layer = FMoETransformerMLP(3, D, 5, dtype=torch.float64, **how)
        assert (layer.world_size, layer.num_experts, layer.expert_parallel.exchange) == (2, 6, "token")
        assert layer.expert_parallel.chunk_ends == [1, 3]
        results.append(layer(x))
    assert torch.equal(*results)
    with pytest.raises(ValueError, match="give overlap_degree= to ParallelLayout"):
        FMoETransformerMLP(3, D, 5, overlap_degree=2, parallel=ParallelLayout(world_size=2))
    with pytest.raises(ValueError, match="world_size is 3, but moe_group has 2 ranks"):
        FMoETransformerMLP(3, D, 5, parallel=ParallelLayout(world_size=3))
    default = "".join(("cho", "ice"))  # another object than the default, as one read from a file
    FMoETransformerMLP(3, D, 5, exchange=default, parallel=ParallelLayout())


def test_parallel_and_keywords_give_one_layer(pool):
    pool.run(parallel_says_what_keywords_say, world_size=2)
