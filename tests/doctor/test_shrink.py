"""A small model keeps what differs between the layers of the large one."""

import pytest
import torch
import transformers

from fmoe_ext.audit.cases import AuditError
from fmoe_ext.audit.shrink import SIZES, shrunk_config
from fmoe_ext.doctor.subject import read


def gemma4(**changes):
    experts = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2}
    return transformers.Gemma4TextConfig(**experts, **heads, attention_k_eq_v=True, **changes)


def shapes(model, name):
    return [tuple(weight.shape) for key, weight in model.named_parameters() if key.endswith(name)]


def loss(config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    tokens = torch.arange(3, 27).view(2, 12)
    return model, model(input_ids=tokens, labels=tokens).loss


def test_gemma_4_keeps_head_sizes_of_sliding_and_full_layers():
    small = shrunk_config(gemma4(hidden_size_per_layer_input=0))
    model, value = loss(small)
    assert small.layer_types == ["sliding_attention", "full_attention"]
    assert shapes(model, "q_proj.weight") == [(4 * 8, 32), (4 * 16, 32)]
    assert shapes(model, "k_proj.weight") == [(4 * 8, 32), (2 * 16, 32)]
    assert shapes(model, "experts.down_proj") == [(4, 32, 16)] * 2
    assert value.isfinite()


def test_gemma_4_keeps_layers_that_share_keys():
    small = shrunk_config(gemma4(num_kv_shared_layers=12))
    model, value = loss(small)
    assert small.layer_types == ["sliding_attention", "full_attention"] * 2
    assert small.num_kv_shared_layers == 2
    assert len(shapes(model, "q_proj.weight")) == 4 and len(shapes(model, "k_proj.weight")) == 2
    assert value.isfinite()


def test_step_3_7_keeps_head_counts_of_sliding_layers():
    kinds = ["full_attention", *["sliding_attention"] * 3] * 5
    large = transformers.Step3p7TextConfig(
        num_hidden_layers=20, layer_types=kinds, num_sliding_attention_heads=96
    )
    small = shrunk_config(large)
    assert [layer.num_attention_heads for layer in small.per_layer_config] == [4, 8, 8, 4]
    assert small.layer_types == [kinds[i] for i in (0, 1, 3, 4)]
    assert small.mlp_layer_types == ["dense", "dense", "sparse", "sparse"]


def test_laguna_keeps_head_counts_by_layer():
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"]
    large = transformers.LagunaConfig(
        num_hidden_layers=8, layer_types=kinds * 2, num_attention_heads_per_layer=[48, 64, 64, 64] * 2
    )
    model, value = loss(shrunk_config(large))
    assert shapes(model, "q_proj.weight") == [(4 * 8, 32), (8 * 8, 32), (4 * 8, 32)]
    assert value.isfinite()


def test_linear_and_full_attention_are_both_kept():
    small = shrunk_config(transformers.Qwen3NextConfig())
    assert small.layer_types == ["linear_attention", "full_attention"]


def test_numbers_of_layers_follow_the_kept_ones():
    large = transformers.Qwen3MoeConfig(num_hidden_layers=12, mlp_only_layers=[3, 4])
    small = shrunk_config(large)
    assert (small.num_hidden_layers, small.mlp_only_layers) == (2, [1])


def test_too_many_kinds_of_layers_are_refused_by_the_field_that_differs():
    large = transformers.Qwen3MoeConfig(num_hidden_layers=12)
    large.per_layer_config = {i: {"moe_intermediate_size": 100 + i} for i in range(12)}
    with pytest.raises(AuditError, match=r"12 kinds of layers, .* moe_intermediate_size of per_layer_config"):
        shrunk_config(large)


def test_folder_of_a_model_with_images_is_examined_as_its_text_model(tmp_path):
    text = gemma4(hidden_size_per_layer_input=0)
    transformers.Gemma4Config(text_config=text).save_pretrained(tmp_path)
    subject = read(str(tmp_path))
    assert type(subject.model).__name__ == "Gemma4ForCausalLM"
    assert subject.model.config.vocab_size == SIZES["vocab_size"]
