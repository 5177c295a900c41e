"""Layers that do not fit twice into the buffers are computed in parts, with the bits of the resident model."""

from types import SimpleNamespace

import pytest
import torch

import fmoe_ext
from fmoe_ext.finetune.streaming.pool import plan_buffers
from tests.finetune.streamed_models import (
    bytes_of_adapters,
    checkpoint_layers,
    decoded,
    pack,
    resident,
    save,
    streamed,
    train,
    with_adapters,
)
from tests.huggingface.huggingface_models import make_ids, step

# Qwen3-MoE has a gated activation inside the operator, GPT-OSS one of its own and biases, Mixtral fewer experts
SIZES = {"intermediate_size": 32, "moe_intermediate_size": 32}
MODELS = {
    "Qwen3Moe": ("Qwen3MoeForCausalLM", SIZES),
    "GptOss": ("GptOssForCausalLM", {"intermediate_size": 32, "swiglu_limit": 7.0}),  # packed rows alternate
}
DTYPES = torch.float64, torch.bfloat16
ARCHITECTURES = ["Qwen3MoeForCausalLM", "GptOssForCausalLM", "MixtralForCausalLM"]


def assert_same_step(plain, model, **options):
    """Outputs and gradients of one step, which are returned."""
    (logits, loss, gradients), (ours, our_loss, our_gradients) = (
        step(m.train(), make_ids(**options)) for m in (plain, model)
    )
    assert torch.equal(ours, logits) and torch.equal(our_loss, loss)
    assert gradients.keys() == our_gradients.keys()
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0, name
        assert torch.equal(our_gradients[name], gradient), name
    return gradients


def cut(folder, share, fuse=True, make=resident):
    """The streamed model with adapters on all experts, and memory for a share of a layer. make: a model in memory."""
    adapters = bytes_of_adapters(with_adapters(make(folder)))
    return with_adapters(streamed(folder, share, 4 * adapters), fuse=fuse)


@pytest.mark.parametrize(
    "architecture, checkpointing, dtype, share",
    [
        *((architecture, False, dtype, 1.5) for architecture in ARCHITECTURES for dtype in DTYPES),
        *((ARCHITECTURES[0], reentrant, torch.bfloat16, 0.8) for reentrant in (None, False, True)),
    ],
)
def test_training_in_parts_equals_the_resident_model(tmp_path, architecture, checkpointing, dtype, share):
    folder = save(tmp_path, architecture, dtype, num_hidden_layers=2)
    plain, model = with_adapters(resident(folder)), cut(folder, share)
    if checkpointing is not None:
        for each in (plain, model):
            each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
            each.enable_input_require_grads()
    assert len(assert_same_step(plain, model, num_tokens=60)) == 8
    pool = model.expert_stream.pool
    assert len(pool.parts.of_layer[0]) > 1 and pool.statistics.parts_read > 0 == pool.statistics.layers_read
    assert pool.statistics.buffer_bytes <= pool.num_bytes < 2 * pool.layer_bytes


@pytest.mark.parametrize("name", MODELS)
def test_packed_experts_in_parts_equal_whole_layers(tmp_path, name):
    architecture, changes = MODELS[name]
    folder = pack(save(tmp_path, architecture, torch.bfloat16, num_hidden_layers=2, **changes))
    whole, model = (cut(folder, share, make=decoded) for share in (2, 1))
    for each in (whole, model):
        checkpoint_layers(each)
    assert_same_step(whole, model, num_tokens=60)
    assert (
        len(whole.expert_stream.pool.parts.of_layer[0]) == 1 < len(model.expert_stream.pool.parts.of_layer[0])
    )
    with torch.no_grad():
        assert torch.equal(model.eval()(make_ids()).logits, whole.eval()(make_ids()).logits)


def test_adapters_on_the_values_of_mxfp4_in_parts(tmp_path):
    folder = pack(save(tmp_path, dtype=torch.bfloat16, num_hidden_layers=2, **SIZES))
    models = [cut(folder, share, fuse=False, make=decoded) for share in (2, 1)]
    for each in models:
        fmoe_ext.lora.fuse(each, quantize="mxfp4")
        checkpoint_layers(each)
    assert_same_step(*models)
    assert models[1].expert_stream.statistics.parts_read > 0


def test_trainer_with_autocast_in_parts(tmp_path):
    pytest.importorskip("accelerate")
    folder = save(tmp_path / "model", dtype=torch.float32, num_hidden_layers=2)
    losses = [
        train(model, tmp_path / "out", max_steps=3, bf16=True)[0]
        for model in (with_adapters(resident(folder)), cut(folder, 1.5))
    ]
    assert losses[0] == losses[1] and losses[0][2] < losses[0][0]


def test_gradients_of_biases_beside_adapters_are_refused_in_parts(tmp_path):
    folder = save(tmp_path, "GptOssForCausalLM", torch.bfloat16, num_hidden_layers=2, **MODELS["GptOss"][1])
    model = cut(pack(folder), 1.5, make=decoded).train()
    for name, parameter in model.named_parameters():
        if name.endswith("down_proj_bias"):
            parameter.requires_grad_()
    with pytest.raises(RuntimeError, match="biases of streamed experts are frozen"):
        step(model, make_ids())


def test_gradients_of_norms_behind_experts_are_refused_in_parts(tmp_path):
    """Muse Spark's experts have one, which no part returns a gradient of."""
    model = cut(save(tmp_path, num_hidden_layers=2), 1.5).train()
    experts = [module for module in model.modules() if type(module).__name__ == "Qwen3MoeExperts"]
    for module in experts:
        module.post_expert_norm = torch.nn.RMSNorm(8)
    assert len(experts) == 2
    with pytest.raises(RuntimeError, match="post_expert_norm of experts that are read in parts is frozen"):
        step(model, make_ids())


def test_norms_behind_experts_are_applied_in_parts(tmp_path):
    """Muse Spark's experts norm each row before it is weighed, beside adapters too."""
    folder = save(tmp_path, num_hidden_layers=2)
    plain, model = with_adapters(resident(folder)), cut(folder, 1.5)
    for each in (plain, model):
        for module in each.modules():
            if type(module).__name__ == "Qwen3MoeExperts":
                module.has_post_expert_norm = True
                module.post_expert_norm = torch.nn.RMSNorm(each.config.hidden_size, dtype=torch.float64)
                module.post_expert_norm.requires_grad_(False)
    assert_same_step(plain, model, num_tokens=60)
    assert model.expert_stream.statistics.parts_read > 0


def test_each_part_is_read_once_in_a_forward_and_once_in_a_backward(tmp_path):
    """Buffers that hold a layer keep its parts between the repeated forward and the backward."""
    model = cut(save(tmp_path, num_hidden_layers=3), 1.5)
    checkpoint_layers(model)
    stream = model.expert_stream
    step(model.train(), make_ids(num_tokens=60))
    num_parts = len(stream.pool.parts)
    kept = len(stream.pool._slots)
    assert num_parts // 3 <= kept < num_parts
    stream.reset_statistics()
    step(model, make_ids(num_tokens=60))
    assert 2 * (num_parts - kept) <= stream.statistics.parts_read <= 2 * num_parts - kept


def test_optimizer_state_that_changes_no_buffer_leaves_them_filled(tmp_path):
    """AdamW has counters of steps beside its two moments, for which memory is left."""
    model = cut(save(tmp_path, num_hidden_layers=2), 1.5)
    checkpoint_layers(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    stream = model.expert_stream
    reads = []
    for _ in range(3):
        stream.reset_statistics()
        step(model.train(), make_ids(num_tokens=60))
        optimizer.step()
        reads.append(stream.statistics.parts_read)
    assert reads[1] == reads[2] == reads[0] - len(stream.pool._slots)


def test_memory_for_too_few_experts_is_refused(tmp_path):
    folder = save(tmp_path, num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"\(4 experts\)"):
        streamed(folder, 0.3)


@pytest.mark.parametrize(
    "num_experts, memory, expected",
    [
        (3, 4, (1, 4)),  # experts' bytes: more than the layer of 3 has
        (3, 5, (1, 4)),  # not 5: no more than the least
        (3, 6, (0, 2)),
        (2, 4, (0, 2)),
        (8, 15, (2, 4)),
        (8, 4, (1, 4)),
    ],
)
def test_buffers_of_few_experts(num_experts, memory, expected):
    expert = 1 << 20
    layers = [SimpleNamespace(num_experts=num_experts, num_bytes=lambda count: count * expert)] * 2
    assert plan_buffers(layers, memory * expert) == expected
    with pytest.raises(ValueError, match="3,145,728 bytes do not hold 4 experts"):
        plan_buffers(layers, 3 * expert)


def test_layers_of_three_experts_in_parts_equal_the_resident_model(tmp_path):
    folder = save(tmp_path, "MixtralForCausalLM", torch.float64, num_hidden_layers=2, num_local_experts=3)
    gradients = assert_same_step(with_adapters(resident(folder)), cut(folder, 1.5))
    assert gradients
