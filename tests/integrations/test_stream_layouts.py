"""Folders in the layouts of makers of large models: streamed in two buffers, the bits of the model in memory."""

import pytest
import torch
from safetensors.torch import save_file

import fmoe_ext
from benchmarks.packed_folders import write_packed
from fmoe_ext.checkpoint import CheckpointError
from tests.integrations.huggingface_models import make_ids
from tests.integrations.streamed_models import (
    bytes_of_adapters,
    checkpoint_layers,
    streamed,
    with_adapters,
)

pytest.importorskip("transformers")
pytest.importorskip("peft")
COMMON = {
    **{"vocab_size": 61, "hidden_size": 128, "moe_intermediate_size": 64, "num_attention_heads": 4},
    **{"q_lora_rank": 128, "max_position_embeddings": 64, "pad_token_id": 0},
}
SMALL = {
    "kimi": {
        **{**COMMON, "num_experts": 8, "num_experts_per_token": 3, "intermediate_size": 64},
        **{"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
        **{"num_key_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 8},
    },
    "deepseek_v4": {
        **{**COMMON, "n_routed_experts": 8, "num_experts_per_tok": 3, "num_key_value_heads": 1},
        **{"head_dim": 32, "qk_rope_head_dim": 8, "o_lora_rank": 128, "o_groups": 2, "index_topk": 8},
        **{"index_head_dim": 8, "index_n_heads": 8, "hc_mult": 2},
    },
}


def trained(model):
    """Logits, and gradients of adapters on the experts."""
    with torch.no_grad():
        logits = model(input_ids=make_ids()).logits
    adapted = with_adapters(model).train()
    checkpoint_layers(adapted)
    adapted(input_ids=make_ids()).logits.float().square().mean().backward()
    return logits, {n: p.grad for n, p in adapted.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("layout", SMALL)
def test_small_buffers_keep_the_bits_of_the_model_in_memory(layout, tmp_path):
    folder = tmp_path / "model"
    write_packed(folder, layout, 5, lambda path, tensors: save_file(tensors, path), **SMALL[layout])
    whole = fmoe_ext.stream(folder, 2**32)
    expected, gradients = trained(whole)
    model = streamed(folder, num_layers=2, adapters=4 * bytes_of_adapters(whole))
    logits, found = trained(model)
    assert whole.expert_stream.pool.holds_all and not model.expert_stream.pool.holds_all
    assert torch.equal(logits, expected) and expected.isfinite().all() and expected.std() > 0
    assert found.keys() == gradients.keys() != set()
    assert all(torch.equal(found[name], gradients[name]) for name in gradients)
    assert any(gradient.any() for gradient in gradients.values())


def test_shards_in_several_folders(tmp_path):
    """Files that the index names are found in the folders that are given; a missing one is named."""
    first, second = tmp_path / "first", tmp_path / "second"
    write_packed(first, "kimi", 3, lambda path, tensors: save_file(tensors, path), **SMALL["kimi"])
    with torch.no_grad():
        expected = fmoe_ext.stream(first, 2**32)(input_ids=make_ids()).logits
    second.mkdir()
    (first / "model-1.safetensors").rename(second / "model-1.safetensors")
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors"):
        fmoe_ext.stream(first, 2**32)
    model = fmoe_ext.stream(first, 2**32, folders=[second])
    with torch.no_grad():
        assert torch.equal(model(input_ids=make_ids()).logits, expected)
    (second / "model-1.safetensors").rename(tmp_path / "outside.safetensors")
    (second / "model-1.safetensors").symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(CheckpointError, match="outside"):
        fmoe_ext.stream(first, 2**32, folders=[second])
