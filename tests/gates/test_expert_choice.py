import pytest
import torch

from fmoe_ext import FMoETransformerMLP
from fmoe_ext.gates import ExpertChoiceGate

D, E = 6, 4


def gate_and_tokens(num=18, **options):
    torch.manual_seed(0)
    return ExpertChoiceGate(D, E, 1, **options).double(), torch.randn(num, D, dtype=torch.float64)


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 1}, {"capacity_factor": 1.3}, {"max_experts": 2}, {"top_k": 4}]
)
def test_expert_choice(options):
    gate, x = gate_and_tokens(**options)
    topk_idx, topk_weights, logits = gate(x, return_all_scores=True)
    scores = logits.softmax(-1)
    capacity = min(18, -int(-options.get("capacity_factor", 1.0) * 18 * options.get("top_k", 2) // E))
    picked = {t: [] for t in range(18)}
    for e in range(E):
        for t in sorted(range(18), key=lambda t, e=e: -scores[t, e].item())[:capacity]:
            picked[t].append(e)
    columns = options.get("max_experts", E)
    for t, experts in picked.items():
        experts = sorted(experts, key=lambda e, t=t: -scores[t, e].item())[:columns]
        assert topk_idx[t].tolist() == experts + [-1] * (columns - len(experts))
        expected = [scores[t, e].item() for e in experts] + [0.0] * (columns - len(experts))
        assert topk_weights[t].tolist() == pytest.approx(expected)
    if columns == E:
        assert topk_idx[topk_idx >= 0].bincount().tolist() == [capacity] * E
    assert gate.get_loss().item() == 0


def test_equal_scores_take_the_earlier_token():
    gate, _ = gate_and_tokens()
    topk_idx, _ = gate(torch.ones(8, D, dtype=torch.float64))
    assert (topk_idx[:4] >= 0).all()
    assert (topk_idx[4:] == -1).all()


def test_in_a_layer_with_gradients():
    torch.manual_seed(0)
    layer = FMoETransformerMLP(E, D, 8, gate=ExpertChoiceGate, activation="relu").double()
    x = torch.randn(18, D, dtype=torch.float64, requires_grad=True)
    out = layer(x)
    topk_idx, topk_weights = layer.gate(x)
    experts = layer.experts
    expected = torch.zeros_like(x)
    for t in range(18):
        for e, weight in zip(topk_idx[t].tolist(), topk_weights[t], strict=True):
            if e >= 0:
                hidden = torch.relu(experts.htoh4.weight[e] @ x[t] + experts.htoh4.bias[e])
                expected[t] = expected[t] + weight * (
                    experts.h4toh.weight[e] @ hidden + experts.h4toh.bias[e]
                )
    torch.testing.assert_close(out, expected)
    ours = torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()])
    theirs = torch.autograd.grad(expected.sin().sum(), [x, *layer.parameters()])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_no_tokens():
    gate, _ = gate_and_tokens()
    topk_idx, topk_weights = gate(torch.zeros(0, D, dtype=torch.float64))
    assert topk_idx.shape == topk_weights.shape == (0, E)


@pytest.mark.bad_indices
def test_rejects():
    with pytest.raises(ValueError, match="capacity_factor must be positive, but got 0"):
        gate_and_tokens(capacity_factor=0)
    with pytest.raises(ValueError, match="max_experts must be between 1 and the 4 experts, but got 5"):
        gate_and_tokens(max_experts=5)
