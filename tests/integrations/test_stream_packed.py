"""Streams of experts in packed formats."""

import pytest
import torch

from tests.integrations.huggingface_models import make_ids, step
from tests.integrations.streamed_models import (
    bytes_of_adapters,
    checkpoint_layers,
    decoded,
    pack,
    save,
    streamed,
    with_adapters,
)

pytest.importorskip("transformers")
pytest.importorskip("peft")

SIZES = {"intermediate_size": 32, "moe_intermediate_size": 32}
MODELS = {
    "Qwen3Moe": ("Qwen3MoeForCausalLM", SIZES),
    "GptOss": ("GptOssForCausalLM", {"intermediate_size": 32, "swiglu_limit": 7.0}),
    "GptOss, other limit": ("GptOssForCausalLM", {"intermediate_size": 32}),
}


def error(found, expected):
    """Relative error in the norm."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("name", MODELS)
def test_mxfp4_equals_the_decoded_model(tmp_path, name):
    architecture, changes = MODELS[name]
    folder = pack(save(tmp_path, architecture, torch.bfloat16, **changes))
    plain = with_adapters(decoded(folder)).train()
    ours = streamed(folder, 2, 4 * bytes_of_adapters(plain), dtype=torch.float32)
    ours = with_adapters(ours).train()
    checkpoint_layers(ours)
    expected, found = step(plain, make_ids()), step(ours, make_ids())
    assert error(found[0], expected[0]) < 1e-5
    assert found[2].keys() == expected[2].keys()
    for parameter, gradient in found[2].items():
        assert error(gradient, expected[2][parameter]) < 1e-4, parameter
    statistics = ours.expert_stream.statistics
    assert statistics.bytes_read == statistics.layers_read * 6 * (2 * 32 * 32 + 32 * 32) * 17 // 32
    ours.eval(), plain.eval()
    with torch.no_grad():
        options = {"max_new_tokens": 6, "do_sample": False}
        assert torch.equal(
            ours.generate(make_ids(1, 3), **options), plain.generate(make_ids(1, 3), **options)
        )
    assert ours.expert_stream.statistics.hits > 0
