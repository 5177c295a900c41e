"""The facade with which Megatron-core's own unit tests run against our layer; docs/megatron.md has their results."""

import pytest
import torch

pytest.importorskip("megatron.core", reason="pip install megatron-core")
from megatron_facade import Layer
from megatron_pair import HONOURED, Float64Inside, config_of, fill, theirs_of

pytestmark = pytest.mark.usefixtures("one_megatron_rank")
CASES = ("default", "pre-softmax", "groups by the best score", "expert bias", "sequence loss", "capacity")


def both(name):
    config = config_of(**HONOURED[name] | {"moe_router_dtype": None})
    ours, theirs = Layer(config), theirs_of(config)
    fill(ours, theirs)
    return ours, theirs


@pytest.mark.parametrize("name", CASES)
def test_router_equals_megatrons(name):
    ours, theirs = both(name)
    x = torch.randn(12, 3, ours.config.hidden_size, dtype=torch.float64)
    with Float64Inside():
        (probs, routing_map), (expected, expected_map) = ours.router(x), theirs.router(x)
    assert torch.equal(routing_map, expected_map)
    assert (probs - expected).abs().max() <= 1e-12


def test_router_follows_a_config_that_changes():
    ours, _ = both("default")
    x = torch.randn(12, 3, ours.config.hidden_size, dtype=torch.float64)
    normed = ours.router(x)[0]
    ours.config.moe_router_pre_softmax = True
    plain = ours.router(x)[0]
    assert torch.allclose(normed.sum(1), torch.ones(36, dtype=torch.float64))
    assert (plain.sum(1) < 0.99).all() and torch.equal(plain > 0, normed > 0)


def test_dispatcher_brings_rows_to_experts_and_back():
    ours, theirs = both("top-3")
    x = torch.randn(36, ours.config.hidden_size, dtype=torch.float64)
    probs, routing_map = ours.router(x.view(12, 3, -1))
    results = []
    for dispatcher in (ours.token_dispatcher, theirs.token_dispatcher):
        rows = dispatcher.dispatch_preprocess(x.view(12, 3, -1), routing_map, probs)
        rows, counts, weights = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*rows))
        back = dispatcher.token_combine(dispatcher.combine_preprocess(rows * weights[:, None]))
        results.append((rows, counts, weights, dispatcher.combine_postprocess(back)))
    for mine, their in zip(*results, strict=True):
        torch.testing.assert_close(mine, their.to(mine.dtype), rtol=0, atol=1e-12)
    assert results[0][1].sum() == 36 * 3
