"""Folders in the layouts of makers of large models: streamed in two buffers, the bits of the model in memory."""

import pytest
import torch

import fmoe_ext
from benchmarks.packed_folders import write_packed
from fmoe_ext.checkpoint import CheckpointError
from tests.finetune.streamed_models import (
    bytes_of_adapters,
    checkpoint_layers,
    save,
    streamed,
    with_adapters,
)
from tests.huggingface.huggingface_models import make_ids

transformers = pytest.importorskip("transformers")
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
    write_packed(folder, layout, 5, **SMALL[layout])
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
    write_packed(first, "kimi", 3, **SMALL["kimi"])
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


def test_progress_counts_layers_forward_and_backward(tmp_path, capsys):
    found = []
    folder = save(tmp_path / "model")
    model = fmoe_ext.stream(folder, 2**32, progress=found.append)
    with torch.no_grad():
        model(input_ids=make_ids())
    assert [(p.done, p.total, p.tokens) for p in found] == [(i, 5, 24) for i in range(1, 6)]
    assert found[-1].seconds_left == 0 < found[0].seconds_left
    assert found[-1].tokens_per_second == 24 / found[-1].seconds
    found.clear()
    adapted = with_adapters(model).train()
    checkpoint_layers(adapted)
    adapted(input_ids=make_ids(), labels=make_ids()).loss.backward()
    assert [(p.done, p.total) for p in found] == [(i, 10) for i in range(1, 11)]
    with torch.no_grad():
        fmoe_ext.stream(folder, 2**32, progress=True)(input_ids=make_ids())
    assert "layer 5 of 5" in capsys.readouterr().err
    assert (
        model.expert_stream.steps is not None and fmoe_ext.stream(folder, 2**32).expert_stream.steps is None
    )


def test_trainer_resumes_a_stopped_epoch(tmp_path):
    """From the checkpoint of two of four steps an epoch ends with the bits of one that did not stop."""
    folder = save(tmp_path / "model")

    def train(out, resume=None):
        arguments = transformers.TrainingArguments(
            **{"output_dir": tmp_path / out, "per_device_train_batch_size": 2, "save_steps": 2},
            **{"save_strategy": "steps", "gradient_checkpointing": True, "learning_rate": 1e-2},
            **{"gradient_checkpointing_kwargs": {"use_reentrant": False}, "report_to": [], "use_cpu": True},
            num_train_epochs=1,
        )
        data = [{"input_ids": row, "labels": row} for row in make_ids(8, 10)]
        model = with_adapters(streamed(folder, adapters=2**20))
        trainer = transformers.Trainer(model, arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=resume)
        return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    expected = train("whole")
    found = train("again", resume=str(tmp_path / "whole" / "checkpoint-2"))
    assert found.keys() == expected.keys() != set()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
