"""Padding, recomputation, microbatches, shared experts in layouts: the training of one process on real tokens."""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from fmoe_ext import valid_tokens
from fmoe_ext.ep import plan, ranks
from fmoe_ext.gates import GATES, NoisyGate, QuantileGate, SigmoidGate, SinkhornGate, SoftmaxGate, WholeBatch
from tests.distributed import layouts
from tests.distributed.layouts import assert_equal_histories, in_layout, one_process

LAYOUTS = [(2, 2, 1), (2, 1, 2), (4, 2, 2)]
ROWS = {1: [7], 2: [5, 8]}
SOFTMAX = functools.partial(SoftmaxGate, capacity_factor=0.8, z_weight=0.1)
KINDS = {
    "padded": {},
    "padded, overlap": {"overlap_degree": 2},
    "padded, static": {"max_rows_per_rank": 32},
    "repeated": {},
    "repeated, overlap": {"overlap_degree": 2},
    "repeated, reentrant": {},
}


@contextlib.contextmanager
def real_run(kind):
    """Model.forward with padding between the tokens, or with checkpoints whose second forward drifts."""
    plain = layouts.Model.forward

    def padded(model, x):
        valid = torch.arange(3 * len(x)) % 3 == 1
        wide = torch.full((3 * len(x), x.shape[1]), 1e3, dtype=x.dtype).masked_scatter(valid[:, None], x)
        with valid_tokens(valid):
            return plain(model, wide)[valid]

    def repeated(model, x):
        x = model.before(x)
        for layer in model.moe:
            x = x + checkpoint(layer, x, use_reentrant="reentrant" in kind)
        return model.after(x.tanh())

    layouts.Model.forward = padded if "padded" in kind else repeated
    try:
        yield
    finally:
        layouts.Model.forward = plain


def train(kind, rows, ep, slice_, options, layout_options):
    gate_loss = 0.0 if "reentrant" in kind else 0.5
    expected = one_process(rows, torch.float64, 2, gate_loss=gate_loss, **options)
    if "reentrant" in kind:  # whose gate losses have no gradient outside
        layouts.Model.gate_loss, kept = lambda model: torch.zeros(()), layouts.Model.gate_loss
    try:
        with real_run(kind):
            history = in_layout(
                rows, torch.float64, 2, ep, slice_, gate_loss=gate_loss, **options, **layout_options
            )
    finally:
        if "reentrant" in kind:
            layouts.Model.gate_loss = kept
    assert_equal_histories(expected, *history)


@pytest.mark.parametrize(("world_size", "ep", "slice_"), LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_as_one_process(pool, kind, world_size, ep, slice_):
    if "static" in kind and ep == 1:
        pytest.skip("static sizes are those of an exchange")
    run = functools.partial(
        train, options={"gate": SOFTMAX, "shared_expert_hidden": 3}, layout_options=KINDS[kind]
    )
    pool.run(run, kind, ROWS[world_size // slice_], ep, slice_, world_size=world_size)


OTHERS = {
    name: GATES[name] for name in ("naive", "faster", "expert_choice", "uniform", "sigmoid", "sinkhorn")
}
OTHERS["running loss"] = functools.partial(SoftmaxGate, balance_loss="running")


@pytest.mark.parametrize("name", OTHERS)
def test_padding_in_other_gates(pool, name):
    run = functools.partial(train, options={"gate": OTHERS[name]}, layout_options={})
    pool.run(run, "padded", ROWS[2], 2, 1, world_size=2)


def drifting(gate):
    """Every rank's choices in both forwards, whose inputs differ, and the messages of the second."""
    torch.manual_seed(3)
    group = dist.group.WORLD
    layer = layouts.FMoETransformerMLP(
        2, layouts.D, 5, world_size=2, moe_group=group, gate=gate, activation="swiglu"
    ).double()
    chosen, drift = [], torch.zeros(layouts.D, dtype=torch.float64)
    layer.gate_hook = lambda topk_idx, *_: chosen.append(topk_idx.clone())
    torch.manual_seed(dist.get_rank())
    x = torch.randn(9, layouts.D, dtype=torch.float64, requires_grad=True)
    out = checkpoint(lambda x: layer(x + drift), x, use_reentrant=False)
    drift += 0.5 * torch.randn(layouts.D, dtype=torch.float64)
    out.square().sum().backward()
    assert torch.equal(*chosen)
    load = layer.expert_parallel.pop_load()
    assert sum(load) == sum(2 * 9 for _ in range(2)), "the repeated forward counts again"


def messages_of_a_repetition(options):
    """Number of messages about sizes and sums in a first forward, and in its recomputation."""
    asked = []

    def counted(function):
        return lambda *args: asked.append(1) or function(*args)

    torch.manual_seed(3)
    options = {"gate": functools.partial(SoftmaxGate, z_weight=0.1, capacity_factor=0.8)} | options
    layer = layouts.FMoETransformerMLP(
        2, layouts.D, 5, world_size=2, moe_group=dist.group.WORLD, **options
    ).double()
    x = torch.randn(9, layouts.D, dtype=torch.float64, requires_grad=True)
    layer(x)  # ranks compare their layers once
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "exchange_counts", counted(plan.exchange_counts))
        patch.setattr(ranks, "_all_reduce", counted(ranks._all_reduce))
        out = checkpoint(layer, x, use_reentrant=False)
        first = len(asked)
        (out.square().sum() + layer.gate.get_loss()).backward()
    assert first >= 3, "sizes, and the sums of two losses"
    assert len(asked) == first, "the repetition asks again"
    repeated, x.grad = x.grad, None
    plain = layer(x)
    (plain.square().sum() + layer.gate.get_loss()).backward()
    assert torch.equal(plain, out)
    torch.testing.assert_close(repeated, x.grad, rtol=1e-12, atol=1e-14)


SINKHORN = functools.partial(SinkhornGate, z_weight=0.1, capacity_factor=0.8)
RUNNING = functools.partial(SoftmaxGate, z_weight=0.1, capacity_factor=0.8, balance_loss="running")
REPEATED = {
    "default": {},
    "static": {"max_rows_per_rank": 18},
    "overlap": {"overlap_degree": 2},
    "sinkhorn": {"gate": SINKHORN},
    "running loss": {"gate": RUNNING},
    "quantiles": {"gate": functools.partial(QuantileGate, z_weight=0.1, balance_loss="global")},
}


@pytest.mark.parametrize("options", REPEATED.values(), ids=REPEATED)
def test_recomputation_sends_no_message(pool, options):
    pool.run(messages_of_a_repetition, options, world_size=2)


@pytest.mark.parametrize("gate", [SoftmaxGate, NoisyGate, SigmoidGate])
def test_ranks_agree_about_rows_though_inputs_drift(pool, gate):
    pool.run(drifting, gate, world_size=2)


def quantile_bias():
    """The bias after three steps of two ranks, of which one has no tokens in the second, and of one process."""
    rank, steps = dist.get_rank(), ((4, 6), (0, 7), (5, 3))
    models = [
        layouts.fill(layouts.Model(layouts.E, gate=QuantileGate, **options), torch.float64)
        for options in ({"gate_group": dist.group.WORLD}, {})
    ]
    gates = [next(m for m in model.modules() if isinstance(m, QuantileGate)) for model in models]
    for step, sizes in enumerate(steps):
        parts = [layouts.batch(2 * step + i, 0, n, torch.float64)[0] for i, n in enumerate(sizes)]
        models[0](parts[rank])
        models[1](torch.cat(parts))
        for gate in gates:
            assert gate.num_quantiles == 1
            gate.update_bias()
        assert torch.equal(gates[0].quantile_bias, gates[1].quantile_bias)
        assert gates[0].quantile_bias.abs().max() > 0


def test_quantile_bias_of_ranks_is_that_of_one_process(pool):
    pool.run(quantile_bias, world_size=2)


def whole_batch(gate):
    """Two ranks with two microbatches each against one process: the gate's gradients of the global loss."""
    rank = dist.get_rank()
    model = layouts.fill(layouts.Model(layouts.E, gate=gate, gate_group=dist.group.WORLD), torch.float64)
    parts = [layouts.batch(i, 0, n, torch.float64)[0] for i, n in enumerate((4, 6, 3, 5))]
    mine, batch = parts[2 * rank : 2 * rank + 2], WholeBatch(model)
    with batch.first_pass():
        for part in mine:
            model(part)
    with batch.second_pass():
        for part in mine:
            model(part)
            loss = model.gate_loss()
            (loss / len(mine)).backward()
    ours = layouts.grads_of(model)
    for grad in ours.values():
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    alone = layouts.fill(layouts.Model(layouts.E, gate=gate), torch.float64)
    alone(torch.cat(parts))
    expected = alone.gate_loss()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for name, grad in layouts.grads_of(alone).items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-12, atol=1e-14)


def test_microbatches_of_several_ranks(pool):
    pool.run(whole_batch, functools.partial(SoftmaxGate, z_weight=0.1), world_size=2)
