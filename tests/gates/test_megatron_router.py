"""Groups, balance loss and drops as Megatron-core's router functions have them, over random inputs."""

import itertools

import pytest
import torch

from fmoe_ext.gates import SigmoidGate, SoftmaxGate

moe_utils = pytest.importorskip(
    "megatron.core.transformer.moe.moe_utils", reason="megatron-core is not installed"
)

D, T = 8, 256
# experts, top_k, groups, groups of a token: DeepSeek-V2 and V3 (smaller) among them
GROUPS = [
    (16, 8, 8, 4), (16, 6, 8, 3), (16, 4, 4, 2), (16, 4, 4, 1), (12, 3, 3, 2),
    (8, 2, 4, 2), (24, 6, 4, 2), (32, 8, 4, 2), (16, 1, 4, 1),
]  # fmt: skip
# our gate and options, Megatron's score and whether its softmax comes before the top-k
SCORES = {
    "softmax after": (SoftmaxGate, {}, "softmax", False),
    "softmax before": (SoftmaxGate, {"normalize": False}, "softmax", True),
    "sigmoid": (SigmoidGate, {}, "sigmoid", False),
    "sigmoid, bias": (SigmoidGate, {}, "sigmoid", False),
}


def dense(topk_idx, values, num_experts):
    """topk_idx, values [T, K] -> [T, E], zero where nothing was chosen; -1 adds nothing."""
    rows = torch.zeros(len(topk_idx), num_experts, dtype=values.dtype)
    return rows.scatter_add(1, topk_idx.clamp(min=0), values * (topk_idx >= 0))


def make(cls, num_experts, top_k, **options):
    torch.manual_seed(num_experts + top_k)
    gate = cls(D, num_experts, 1, top_k, **options).double()
    if cls is SigmoidGate:
        gate.expert_bias.normal_(std=0.1)
    return gate, torch.randn(T, D, dtype=torch.float64)


@pytest.mark.parametrize("shape", GROUPS, ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_groups(name, shape):
    cls, options, score, before = SCORES[name]
    num_experts, top_k, num_groups, topk_groups = shape
    groups = {"num_groups": num_groups, "topk_groups": topk_groups, "group_best": top_k // topk_groups}
    gate, x = make(cls, num_experts, top_k, scale=1.5, **groups, **options)
    if name == "sigmoid":
        gate.expert_bias.zero_()
    topk_idx, topk_weights, logits = gate(x, return_all_scores=True)
    probs, chosen = moe_utils.topk_routing_with_score_function(
        logits,
        top_k,
        use_pre_softmax=before,
        num_groups=num_groups,
        group_topk=topk_groups,
        scaling_factor=1.5,
        score_function=score,
        expert_bias=gate.expert_bias if name == "sigmoid, bias" else None,
    )
    assert torch.equal(dense(topk_idx, torch.ones_like(topk_weights), num_experts).bool(), chosen)
    # Megatron computes both scores in float32, and leaves the one of a single choice undivided
    if (top_k, score) != (1, "sigmoid"):
        torch.testing.assert_close(dense(topk_idx, topk_weights, num_experts), probs, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [shape for shape in GROUPS if shape[1] >= 2], ids=str)
def test_default_of_the_sigmoid_gate_is_megatrons(shape):
    num_experts, top_k, num_groups, topk_groups = shape
    gate, _ = make(SigmoidGate, num_experts, top_k, num_groups=num_groups, topk_groups=topk_groups)
    assert gate.group_best == max(1, top_k // topk_groups)
    assert (
        make(SoftmaxGate, num_experts, top_k, num_groups=num_groups, topk_groups=topk_groups)[0].group_best
        == 1
    )


@pytest.mark.parametrize(
    ("cls", "groups"), [(SoftmaxGate, {}), (SigmoidGate, {"num_groups": 4, "topk_groups": 2})]
)
def test_global_balance_loss(cls, groups):
    """With a bias and groups the loss counts what the scores alone would choose."""
    gate, x = make(cls, 16, 4, balance_loss="global", **groups)
    *_, logits = gate(x, return_all_scores=True)
    score = "sigmoid" if cls is SigmoidGate else "softmax"
    routing_map, scores = moe_utils.compute_routing_scores_for_aux_loss(logits, 4, score)
    expected = moe_utils.switch_load_balancing_loss_func(scores, routing_map.sum(0), T, 4, 16, 1.0)
    torch.testing.assert_close(gate.get_loss(), expected.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("factor", "policy"), list(itertools.product([0.3, 0.5, 1.0], ["score", "token"])))
def test_drops(factor, policy):
    gate, x = make(SoftmaxGate, 8, 2, capacity_factor=factor, drop_policy=policy, normalize=False)
    topk_idx, topk_weights, logits = gate(x, return_all_scores=True)
    probs, chosen = moe_utils.topk_routing_with_score_function(logits, 2, use_pre_softmax=True)
    kept = dense(topk_idx, torch.ones_like(topk_weights), 8).bool()
    if policy == "score":
        _, expected = moe_utils.apply_router_token_dropping(probs, chosen, 2, factor, "probs")
    else:  # the order that Megatron's "position" means; torch.topk, which it asks, promises none among equals
        expected = chosen & (chosen.cumsum(0) <= moe_utils.get_capacity(2 * T, 8, factor))
    assert torch.equal(kept, expected)
