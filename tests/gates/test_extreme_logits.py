"""Every gate and loss with logits that overflow, underflow or exclude experts, against float64."""

import functools

import pytest
import torch
from torch import nn

import fmoe_ext
from fmoe_ext.gates import GATES, HashGate, QuantileGate, noisy_gate
from fmoe_ext.gates.scored_gate import ScoredGate

T, E, TOP_K = 8, 8, 2
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WITHOUT_LOGITS = ("zero",)
CHOOSE_BY_OTHER_THINGS = (
    "hash",
    "uniform",
)  # so that they may choose experts at -inf alone, whose weights are 0 / 0
DRAW = (
    "noisy",
    "switch",
    "uniform",
    "gshard",
    "dc",
    "sinkhorn",
)  # other noise in float64; sinkhorn: other rounds
SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
LOSSES = {"global": 1.0, "sequence": 1.0, "running": 1.0}


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def with_first_row(value):
    logits = random(T, E)
    logits[0] = value
    return logits


LOGITS = {
    "all -1e4": torch.full((T, E), -1e4),
    "all 1e4": torch.full((T, E), 1e4),
    "all equal": torch.zeros(T, E),
    "one token at -100": with_first_row(-100.0),
    "one token at -800": with_first_row(-800.0),
    "one token at -1e4": with_first_row(-1e4),
    "-1e4 and 1e4": random(T, E).sign() * 1e4,
    "-inf but one": torch.full((T, E), -torch.inf).fill_diagonal_(3.0),
    "-inf but three": torch.where(random(T, E).argsort(1) < 3, random(T, E), -torch.inf),
}


class Given(nn.Module):
    """Gives these logits for every input."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, inp):
        return self.logits


def gates():
    for name, make in GATES.items():
        if name not in WITHOUT_LOGITS:
            yield name, functools.partial(make, E, E, 1, TOP_K)
    yield "sinkhorn of one choice", functools.partial(GATES["sinkhorn"], E, E, 1, 1)
    for score in SCORES:
        yield f"hash {score}", functools.partial(HashGate, E, E, 1, TOP_K, vocab_size=T, score=score)
        yield f"quantile {score}", functools.partial(QuantileGate, E, E, 1, TOP_K, score=score)


def with_losses(make):
    """The gate with every balance loss and the z loss, where it takes them."""
    gate_class = make.func
    if not (isinstance(gate_class, type) and issubclass(gate_class, ScoredGate)):
        return make()
    if gate_class is HashGate:
        return make(z_weight=1.0)
    return make(balance_loss=LOSSES, seq_len=T // 2, z_weight=1.0)


def step(make, logits, dtype, training, monkeypatch):
    """Weights, loss and the gradients of both for logits rounded to dtype."""
    torch.manual_seed(0)
    gate = with_losses(make).train(training)
    given = Given(logits)
    if hasattr(gate, "w_gate"):
        both = iter((given.logits, torch.zeros_like(logits)))  # of w_gate and of w_noise
        monkeypatch.setattr(noisy_gate, "wide_linear", lambda inp, weight: next(both))
    else:
        gate.gate = given
    with fmoe_ext.token_ids(torch.arange(T)):
        topk_idx, topk_weights = gate(torch.ones(T, E, dtype=dtype))
    loss = gate.get_loss().sum()
    factors = torch.arange(1, topk_weights.shape[1] + 1, dtype=topk_weights.dtype)
    outputs = {"of weights": (topk_weights * factors).sum(), "of loss": loss}
    gradients = {
        name: torch.autograd.grad(y, given.logits, retain_graph=True, allow_unused=True)[0]
        if y.requires_grad
        else None
        for name, y in outputs.items()
    }
    return {"idx": topk_idx, "weights": topk_weights, "loss": loss, **gradients}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("case", LOGITS)
@pytest.mark.parametrize(("name", "make"), gates(), ids=[name for name, _ in gates()])
def test_gate_of_extreme_logits_is_finite_and_as_in_float64(name, make, case, training, monkeypatch):
    if "-inf" in case and name.split()[0] in CHOOSE_BY_OTHER_THINGS:
        return
    values = torch.tensor(LOGITS[case].tolist(), dtype=torch.float64)  # on the device under test
    for dtype in DTYPES:
        logits = values.to(dtype)
        ours = step(make, logits.to(torch.promote_types(dtype, torch.float32)), dtype, training, monkeypatch)
        for what, value in ours.items():
            assert value is None or value.isfinite().all(), f"{what} in {dtype}: {value}"
        if training and name.split()[0] in DRAW:
            continue
        wide = step(make, logits.double(), torch.float64, training, monkeypatch)
        assert torch.equal(ours["idx"], wide["idx"])
        for what in ("weights", "loss", "of weights", "of loss"):
            if wide[what] is not None:
                torch.testing.assert_close(ours[what].double(), wide[what], rtol=1e-3, atol=1e-6)
