"""A small model keeps what differs between the layers of the large one."""

import pytest
import torch
import transformers

from fmoe_ext.audit.cases import AuditError
from fmoe_ext.audit.shrink import SIZES, shrunk_config
from fmoe_ext.audit.source import sendable
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


def test_heads_of_keys_as_a_list_by_layer_are_shrunk():
    large = transformers.PreTrainedConfig(
        num_hidden_layers=3, num_attention_heads=32, num_key_value_heads=[4, 8, 16], hidden_size=256
    )
    small = shrunk_config(large)
    assert (small.num_key_value_heads, small.num_attention_heads) == ([2, 4, 8], 8)


def test_heads_without_heads_of_keys_are_shrunk():
    large = transformers.PreTrainedConfig(num_hidden_layers=2, num_attention_heads=32, hidden_size=256)
    assert shrunk_config(large).num_attention_heads == 4


@pytest.mark.parametrize(("eos", "left"), [([2, 50, 128009], [2, 50]), ([2, 3, 5], [2, 3, 5]), ([999], None)])
def test_ends_of_a_text_beyond_the_small_vocabulary_are_left_out(eos, left):
    small = shrunk_config(transformers.MixtralConfig(num_hidden_layers=3, eos_token_id=eos))
    assert (small.eos_token_id, small.num_hidden_layers) == (left, 2)


def kinds(config):
    """Of each layer whether it has attention, and whether it has experts."""
    with torch.device("meta"):
        layers = transformers.AutoModelForCausalLM.from_config(config).model.layers
    return [
        (hasattr(layer, "self_attn"), any("experts" in n for n, _ in layer.named_modules()))
        for layer in layers
    ]


def built(config):
    return shrunk_config(config, transformers.AutoModelForCausalLM.from_config)


def test_experts_in_every_fourth_layer_are_kept():
    small = built(transformers.Qwen3MoeConfig(num_hidden_layers=12, decoder_sparse_step=4))
    assert kinds(small) == [(True, False)] * 3 + [(True, True)]


def test_audit_of_a_model_trains_its_experts_too():
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32}
    config = transformers.Qwen3MoeConfig(**sizes, num_hidden_layers=4, num_experts=4, decoder_sparse_step=4)
    small = sendable(transformers.Qwen3MoeForCausalLM(config)).build.config
    assert [experts for _, experts in kinds(small)] == [False, False, False, True]


def test_jamba_keeps_attention_mamba_and_experts():
    small = built(transformers.JambaConfig())
    assert kinds(small) == [(False, False), (False, True), (False, False), (False, True), (True, False)]


def test_ernie_keeps_experts_that_begin_late():
    config = transformers.Ernie4_5_MoeConfig(moe_layer_start_index=3, moe_layer_interval=2)
    assert kinds(built(config)) == [(True, False)] * 3 + [(True, True)]


def test_layers_beyond_the_most_are_refused_by_their_modules():
    config = transformers.Qwen3MoeConfig(num_hidden_layers=24, decoder_sparse_step=12)
    with pytest.raises(AuditError, match=r"lose model\.layers\.11 with .*Qwen3MoeSparseMoeBlock"):
        built(config)


def test_folder_of_a_model_whose_kinds_go_by_number_keeps_them(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "num_attention_heads": 4}
    transformers.JambaConfig(num_hidden_layers=8, num_key_value_heads=2, **sizes).save_pretrained(tmp_path)
    assert sum(attention for attention, _ in kinds(read(str(tmp_path)).model.config)) == 1


def test_folder_of_a_model_with_images_is_examined_as_its_text_model(tmp_path):
    text = gemma4(hidden_size_per_layer_input=0)
    transformers.Gemma4Config(text_config=text).save_pretrained(tmp_path)
    subject = read(str(tmp_path))
    assert type(subject.model).__name__ == "Gemma4ForCausalLM"
    assert subject.model.config.vocab_size == SIZES["vocab_size"]
