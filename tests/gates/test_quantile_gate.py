"""QuantileGate: its choices, weights and bias against loops, and the quantile over ranks to the bit."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fmoe_ext import FMoE, QuantileGate
from fmoe_ext.gates.quantile_gate import even_quantile
from tests.gates.test_ranks import SIZES, on_threads

D, E = 6, 8


def make(top_k=2, **options):
    torch.manual_seed(0)
    return QuantileGate(D, E, 1, top_k, **options).double()


def tokens(num=40, seed=1):
    return torch.randn(num, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def expected_quantile(logits, bias, top_k):
    """By sorting, as Megatron-core 0.19 defines it."""
    biased = (logits - bias).sort(1, descending=True).values
    lead = logits - biased[:, top_k : top_k + 1]
    return lead.sort(0, descending=True).values[len(logits) * top_k // logits.shape[1]]


SCORES = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: torch.nn.functional.softplus(logits).sqrt(),
}


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_choices_weights_and_bias(score, top_k):
    gate, x = make(top_k, score=score, ema=0.25, normalize=False), tokens()
    bias = torch.linspace(-0.5, 0.5, E).roll(3)
    gate.quantile_bias.copy_(bias)
    topk_idx, weights, logits = gate(x, return_all_scores=True)
    assert torch.equal(topk_idx, (logits - bias).topk(top_k).indices)
    torch.testing.assert_close(weights, SCORES[score](logits).gather(1, topk_idx), rtol=1e-12, atol=0)
    quantile = expected_quantile(logits, bias, top_k)
    torch.testing.assert_close(gate.quantile_sum, quantile.float(), rtol=0, atol=0)
    gate.update_bias()
    moved = 0.25 * bias + 0.75 * quantile.float()
    torch.testing.assert_close(gate.quantile_bias, moved - moved.mean(), rtol=1e-6, atol=1e-7)
    assert gate.num_quantiles == 0 and gate.quantile_sum.abs().sum() == 0


def test_one_step_of_the_optimizer_evens_a_skewed_load():
    gate, x = make(gate_bias=True), tokens(400)
    with torch.no_grad():
        gate.gate.bias[3] += 4
    optimizer = torch.optim.SGD(gate.parameters(), lr=0.0)
    loads = []
    for _ in range(4):
        topk_idx, weights = gate(x)
        loads.append(topk_idx.flatten().bincount(minlength=E).max().item() / (400 * 2 / E))
        weights.square().sum().backward()
        optimizer.step()
    assert loads[0] > 3.5 and loads[1] < 1.5 and loads[3] < 1.1
    before = gate.quantile_bias.clone()
    optimizer.step()  # without a forward
    gate.eval()(x)
    optimizer.step()
    assert torch.equal(gate.quantile_bias, before)


def test_several_forwards_count_with_their_mean_and_a_repeated_one_once():
    gate = make()
    parts = [tokens(seed=seed) for seed in (1, 2)]
    quantiles = [expected_quantile(gate.logits(x), gate.quantile_bias, 2) for x in parts]
    layer = FMoE(E, D, gate=lambda *_, **__: gate, expert=lambda d: torch.nn.Linear(d, d)).double()
    layer.gate.quantile_bias, layer.gate.quantile_sum = torch.zeros(E), torch.zeros(E)
    for x in parts:
        checkpoint(layer, x.requires_grad_(), use_reentrant=False).sum().backward()
    assert layer.gate.num_quantiles == 2
    layer.gate.update_bias()
    mean = sum(quantiles) / 2
    torch.testing.assert_close(
        layer.gate.quantile_bias, (mean - mean.mean()).float(), rtol=1e-5, atol=1e-6, check_dtype=False
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["random", "equal values", "wide"])
def test_quantile_over_ranks_is_that_of_one_rank(dtype, kind):
    values = torch.randn(sum(SIZES), E, generator=torch.Generator().manual_seed(3)).to(dtype)
    if kind == "equal values":
        values = values.round()
        values[values == 0] *= -1  # zeros of both signs
    if kind == "wide":
        values = values.exp2().pow(20) * values.sign() / 1e3
        values[3, 2], values[5, 1], values[9, 2] = torch.inf, -torch.inf, torch.nan
    gate = make()
    expected = even_quantile(values, 2, gate.ranks)
    by_hand = values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    assert torch.equal(expected, by_hand.sort(0, descending=True).values[len(values) * 2 // E])
    found = on_threads(lambda mine, rank: even_quantile(values.split(SIZES)[rank], 2, mine.ranks), gate)
    assert all(torch.equal(part, expected) for part in found)


def test_no_tokens_all_experts_and_bad_options():
    gate = make()
    assert gate(tokens(0))[0].shape == (0, 2) and gate.num_quantiles == 0
    assert on_threads(lambda mine, _: even_quantile(torch.zeros(0, E), 2, mine.ranks), gate) == [None] * 3
    every = make(top_k=E)
    assert every(tokens(4))[0].sort(1).values.tolist() == [list(range(E))] * 4 and every.num_quantiles == 0
    for options, message in (
        ({"num_groups": 2}, "QuantileGate has no num_groups, but got num_groups=2"),
        ({"score": "relu"}, "score must be one of .* but got 'relu'"),
        ({"ema": 1.0}, r"ema must be in \[0, 1\), but got 1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**options)


def test_gate_cast_to_bfloat16_that_begins_in_inference_mode_trains():
    gate, x = QuantileGate(D, E, 1, 2).bfloat16(), tokens().bfloat16()
    with torch.inference_mode():
        gate.eval()(x)
    gate.train()(x)
    gate.update_bias()
    assert gate.quantile_bias.dtype == torch.float32 and gate.quantile_bias.abs().max() > 0
