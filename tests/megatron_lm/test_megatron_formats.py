"""Weights of Megatron-core's own MoELayer in ours and back, by their state dicts."""

import pytest
import torch

from fmoe_ext.checkpoint import from_megatron_core, to_megatron_core

pytest.importorskip("megatron.core", reason="pip install megatron-core")
from megatron_pair import config_of, ours_of, step, theirs_of

pytestmark = pytest.mark.usefixtures("one_megatron_rank")

CASES = {
    "softmax": {"moe_router_topk": 2},
    "shared": {"moe_router_topk": 2, "moe_shared_expert_intermediate_size": 12},
    "expert bias": {
        "moe_router_topk": 2,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_both_ways(name):
    config = config_of(**CASES[name])
    theirs, ours = theirs_of(config), ours_of(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / 3)
    weights = {k: v for k, v in theirs.state_dict().items() if isinstance(v, torch.Tensor) and v.numel()}
    converted = from_megatron_core(weights)
    own = "shared_experts."
    shared = {k.removeprefix(own): value for k, value in weights.items() if k.startswith(own)}
    if shared:  # Megatron's module stays in its layer
        ours.shared_experts.load_state_dict(shared)
        converted = {k: v for k, v in converted.items() if not k.startswith("shared_experts.")}
    own = ours.moe.state_dict()
    assert converted.keys() == own.keys()
    ours.moe.load_state_dict(converted)
    (got, grad, _), (expected, expected_grad, _) = step(ours), step(theirs)
    for a, b in ((got, expected), (grad, expected_grad)):
        assert (a - b).abs().max() <= 1e-12 * b.abs().max()
    back = to_megatron_core(ours.state_dict(), "modules")  # with Megatron's extra states, which are None
    assert back.keys() == weights.keys() - {"router.local_tokens_per_expert"}
    for key, value in back.items():
        torch.testing.assert_close(value, theirs.state_dict()[key], rtol=0, atol=0)
