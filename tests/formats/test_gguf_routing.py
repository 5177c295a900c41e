"""stream() of GGUF files whose metadata say how the router computes."""

import copy
import itertools

import pytest
import torch

from fmoe_ext import frozen, huggingface
from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.compress.cut import GgufCut
from fmoe_ext.gguf import architecture_for, metadata
from fmoe_ext.gguf.architectures.deepseek2 import DeepseekV2
from fmoe_ext.model_files import GgufModel
from tests.finetune.streamed_models import EXPERTS, with_adapters
from tests.formats.format_models import MODELS
from tests.formats.test_formats import make
from tests.formats.test_gguf import OSS, WRITTEN, YARN, llama_cpp_or_skip
from tests.formats.test_gguf_keys import (
    IDS,
    logits,
    rewritten,
    streamed,
    sweep,
    with_rope,
    write,
)
from tests.sweeps import rest_is_long

pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf", reason="pip install gguf")

NAMES = (
    *WRITTEN,
    "deepseek_v2, queries whole",
    "glm4_moe, biases",
    "ernie4_5_moe, none shared",
    "deepseek_v3, queries whole",
    "gpt_oss, yarn",
)
MORE = {
    "gpt_oss, yarn": (
        *("gpt_oss", "gpt-oss"),
        {**OSS, "rope_parameters": {**YARN, "truncate": False}},
    ),
    "glm4_moe, biases": (
        *("glm4_moe", "glm4moe"),
        {**MODELS["glm4_moe, one group"], "attention_bias": True, "use_qk_norm": False},
    ),
    "ernie4_5_moe, none shared": (
        *("ernie4_5_moe", "ernie4_5-moe"),
        {**MODELS["ernie4_5_moe, none shared"], "tie_word_embeddings": False},
    ),
    "deepseek_v2, queries whole": (
        *("deepseek_v2", "deepseek2"),
        {**MODELS["deepseek_v2, no groups"], "q_lora_rank": None, "v_head_dim": 12},
    ),
    "deepseek_v3, queries whole": (
        *("deepseek_v3", "deepseek2"),
        {**MODELS["deepseek_v3, one group"], "q_lora_rank": None, "v_head_dim": 12},
    ),
}
# {model: what its file is read as alone, because the architecture has another model's name}
ALONE = {"glm4_moe_lite": "DeepseekV3ForCausalLM", "solar_open": "Glm4MoeForCausalLM"}
OF_DEEPSEEK = {
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}
OF_LATENT = {
    **OF_DEEPSEEK,
    "attention.key_length_mla": "qk_head_dim",
    "attention.value_length_mla": "v_head_dim",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
}
OF_DELTA = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
OF_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "expert_shared_feed_forward_length": "shared_intermediate_size",
}
# one model for each architecture, and the attributes that its keys alone can change
ARCHITECTURES = {
    "gemma4_text": {
        "attention.sliding_window": "sliding_window",
        "attention.shared_kv_layers": "num_kv_shared_layers",
        "final_logit_softcapping": "final_logit_softcapping",
        "attention.key_length_swa": "head_dim",
        "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    },
    "exaone_moe": {**OF_DEEPSEEK, "attention.sliding_window": "sliding_window"},
    "afmoe": {
        "attention.sliding_window": "sliding_window",
        "expert_weights_scale": "route_scale",
        "leading_dense_block_count": "num_dense_layers",
    },
    "glm4_moe": OF_DEEPSEEK,
    "deepseek_v2": OF_LATENT,
    "deepseek_v3": {
        **OF_LATENT,
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
    },
    "lfm2_moe": {
        "attention.layer_norm_rms_epsilon": "norm_eps",
        "leading_dense_block_count": "num_dense_layers",
        "shortconv.l_cache": "conv_L_cache",
    },
    "glm_moe_dsa": {
        **{**OF_LATENT, "expert_group_count": "n_group", "expert_group_used_count": "topk_group"},
        "attention.indexer.head_count": "index_n_heads",
        "attention.indexer.key_length": "index_head_dim",
        "attention.indexer.top_k": "index_topk",
    },
    "nemotron_h": {
        **{
            "ssm.conv_kernel": "conv_kernel",
            "ssm.state_size": "ssm_state_size",
            "ssm.group_count": "n_groups",
        },
        **{"ssm.time_step_rank": "mamba_num_heads", "moe_latent_size": "moe_latent_size"},
        **dict.fromkeys(
            ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"), "layer_norm_epsilon"
        ),
        "expert_weights_scale": "routed_scaling_factor",
    },
    "kimi_linear": {
        **{key: attribute for key, attribute in OF_LATENT.items() if key != "leading_dense_block_count"},
        **{"ssm.conv_kernel": "linear_conv_kernel_dim", "kda.head_dim": "linear_head_dim"},
        **{"expert_weights_norm": "moe_renormalize", "leading_dense_block_count": "first_k_dense_replace"},
    },
    "minimax_m2": {},
    "ernie4_5_moe": {
        "leading_dense_block_count": "moe_layer_start_index",
        "interleave_moe_layer_step": "moe_layer_interval",
    },
    "granitemoe": OF_GRANITE,
    "granitemoeshared": OF_GRANITE,
    "granitemoehybrid": OF_GRANITE
    | {
        "ssm.conv_kernel": "mamba_d_conv",
        "ssm.state_size": "mamba_d_state",
        "ssm.group_count": "mamba_n_groups",
    }
    | {"ssm.time_step_rank": "mamba_n_heads"},
    "dots1": OF_DEEPSEEK,
    "hunyuan_v1_moe": {},
    "gpt_oss": {"attention.sliding_window": "sliding_window"},
    "qwen3_next": OF_DELTA,
    "qwen3_5_moe_text": OF_DELTA,
}
WIDE = {
    **{"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 256},
    **{"n_routed_experts": 4, "num_experts": 4, "moe_num_experts": 4, "num_local_experts": 4},
    **{"head_dim": 8},
}


def build(name, **changes):
    """(model of Transformers in float64, architecture)."""
    model_type, architecture, values = {**WRITTEN, **MORE}[name]
    own = transformers_config(model_type)
    changes = {key: value for key, value in changes.items() if key in own}
    return huggingface.use(make(model_type, **{**values, **changes}).double()), architecture


def transformers_config(model_type):
    import transformers

    config = transformers.AutoConfig.for_model(model_type)
    return {**config.to_dict(), **config.attribute_map}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A function: name -> (model, architecture, file that export wrote)."""
    known = {}

    def file_of(name):
        if name not in known:
            model, architecture = build(name)
            with pytest.MonkeyPatch.context() as patch:
                known[name] = (
                    *(model, architecture),
                    write(model, tmp_path_factory.mktemp("gguf") / "out", {}, patch),
                )
        return known[name]

    return file_of


@pytest.mark.parametrize("name", NAMES)
def test_file_alone_and_beside_config_json_equals_the_model(name, files, tmp_path):
    model, _, original = files(name)
    file = rewritten(original, tmp_path / "model.gguf", {})
    expected = logits(model)
    ours = streamed(file)
    assert type(ours).__name__ == ALONE.get(name, type(model).__name__)
    torch.testing.assert_close(logits(ours), expected, rtol=1e-5, atol=1e-5)
    model.config.save_pretrained(tmp_path)
    ours = streamed(file)
    assert type(ours).__name__ == type(model).__name__
    torch.testing.assert_close(logits(ours), expected, rtol=1e-5, atol=1e-5)


def test_correction_bias_with_one_row_is_read(files, tmp_path):
    """As llama.cpp's converter writes Transformers' ERNIE 4.5."""
    model, _, original = files("ernie4_5_moe")

    def as_row(name, data):
        return data[None] if name.endswith("exp_probs_b.bias") else data, None

    file = rewritten(original, tmp_path / "model.gguf", {}, as_row)
    assert (1, 6) in [tuple(tensor.data.shape) for tensor in gguf.GGUFReader(file).tensors]
    torch.testing.assert_close(logits(streamed(file)), logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_of_adapters_are_those_of_the_model_in_memory(name, files, tmp_path):
    model, _, original = files(name)
    file = rewritten(original, tmp_path / "model.gguf", {})
    found = []
    for other in (copy.deepcopy(model), streamed(file)):
        adapted = with_adapters(other, target_parameters=[*EXPERTS, "experts.up_proj"])
        adapted(input_ids=IDS, labels=IDS).loss.backward()
        found.append({n: p.grad for n, p in adapted.named_parameters() if p.requires_grad})
    expected, ours = found
    assert expected.keys() == ours.keys() and any("down_proj" in n or "base_layer" in n for n in ours)
    for parameter, gradient in expected.items():
        assert gradient.abs().max() > 0, parameter
        torch.testing.assert_close(ours[parameter], gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max())


KINDS = ("q8_0", "q4_k", "mxfp4")
QUANTISED = list(itertools.product(ARCHITECTURES, KINDS))
FEW_QUANTISED = list(zip(ARCHITECTURES, itertools.cycle(KINDS), strict=False))


@pytest.mark.parametrize(("name", "kind"), rest_is_long(QUANTISED, FEW_QUANTISED))
def test_quantised_experts_stay_packed(name, kind, tmp_path, monkeypatch):
    model, _ = build(name, **WIDE)
    plain = write(model, tmp_path / "out", {}, monkeypatch)
    values = {}

    def pack(name, data):
        if not name.endswith("_exps.weight"):
            return data, None
        raw = gguf.GGMLQuantizationType[kind.upper()]
        if kind == "mxfp4":
            packed = gguf.quants.quantize(data, raw)
            values[name] = gguf.quants.dequantize(packed, raw)
            return packed, raw
        packed = frozen.quantize(torch.from_numpy(data.copy()), kind)
        values[name] = packed.dequantize().numpy()
        return packed.data.numpy(), raw

    packed = streamed(rewritten(plain, tmp_path / "packed.gguf", {}, pack))
    assert values and all(layer.is_packed for layer in packed.expert_stream.pool.layers)
    decoded = streamed(
        rewritten(plain, tmp_path / "decoded.gguf", {}, lambda name, data: (values.get(name, data), None))
    )
    torch.testing.assert_close(logits(packed), logits(decoded), rtol=1e-5, atol=1e-5)
    assert (logits(packed) - logits(model)).abs().max() > 1e-5


FEW_ARCHITECTURES = (
    "deepseek_v3",
    "gpt_oss",
    "qwen3_next",
)  # latent attention, a window, layers of another kind


@pytest.mark.parametrize("name", rest_is_long(ARCHITECTURES, FEW_ARCHITECTURES))
def test_every_key_is_computed_with_or_harmless_or_refused(name, files, tmp_path):
    _, arch, original = files(name)
    plain = rewritten(original, tmp_path / "model.gguf", {})
    architecture = architecture_for(name)
    own = {*architecture.keys} - {"attention.layer_norm_rms_epsilon"}
    attributes = {key: value for key, value in architecture.attributes.items() if key not in own}
    attributes |= {"rope.scaling.factor": "factor"}
    if not name.startswith("qwen"):  # the tensors say it
        del attributes["feed_forward_length"]
    if isinstance(architecture, DeepseekV2):  # compared with sizes that others say
        for key in ("attention.head_count_kv", "attention.key_length", "attention.value_length"):
            attributes.pop(key, None)
    names = [key for key in metadata.names() if key.startswith("{arch}")]
    if name.startswith("deepseek"):  # which says which of them it is, below
        names.remove("{arch}.expert_gating_func")
    if architecture.rotates_part:  # below
        names.remove("{arch}.rope.dimension_count")
    if name == "gemma4_text":  # one for each kind of layers, below
        names = [key for key in names if not key.startswith("{arch}.rope.freq_base")]
    if name == "granitemoehybrid":  # which says whether there are rotary embeddings, below
        names.remove("{arch}.rope.scaling.finetuned")
    kinds = sweep(plain, arch, names, attributes | ARCHITECTURES[name])
    assert kinds["refused"] > 200 and kinds["harmless"] > 5 and kinds["computed"] >= 3, kinds


@pytest.mark.parametrize("name", ["granitemoehybrid", "granitemoehybrid, rope"])
def test_switch_for_rotary_embeddings_of_granite_is_read(name, files, tmp_path):
    model, arch, original = files(name)
    key = f"{arch}.rope.scaling.finetuned"
    turned = model.config.position_embedding_type is None
    file = rewritten(original, tmp_path / "model.gguf", {key: turned})
    assert streamed(file).config.position_embedding_type == ("rope" if turned else None)
    assert (logits(streamed(file)) - logits(model)).abs().max() > 1e-3
    with pytest.raises(CheckpointError, match=f"{key} is 7, expected true or false"):
        streamed(rewritten(original, file, {key: 7}))


def test_score_says_which_deepseek_a_file_has(files, tmp_path):
    _, arch, original = files("deepseek_v3")
    key = f"{arch}.expert_gating_func"
    bias = [t.name for t in gguf.GGUFReader(original).tensors if t.name.endswith("exp_probs_b.bias")]
    file = rewritten(original, tmp_path / "model.gguf", {key: 1})
    with pytest.raises(CheckpointError, match=rf"{bias[0]} has no name in Transformers"):
        streamed(file)  # DeepSeek-V2 has no bias
    file = rewritten(original, tmp_path / "model.gguf", {key: 3})
    with pytest.raises(CheckpointError, match=f"{key} is 3, but the model is computed with 2"):
        streamed(file)


@pytest.mark.parametrize("name", ["glm4_moe", "minimax_m2"])
def test_part_of_a_head_that_is_rotated(name, files, tmp_path):
    model, arch, original = files(name)
    for rotated in (2, 4, 6):
        file = rewritten(original, tmp_path / "model.gguf", {f"{arch}.rope.dimension_count": rotated})
        part = rotated / model.config.head_dim
        expected = logits(with_rope(model, partial_rotary_factor=part))
        torch.testing.assert_close(logits(streamed(file)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_yarn_of_latent_attention(name, files, tmp_path):
    """With mscale, in the queries' scale alone: as Transformers and as llama.cpp."""
    model, arch, original = files(name)
    said = {"type": "yarn", "factor": 4.0, "original_context_length": 16, "yarn_log_multiplier": 0.07}
    keys = {f"{arch}.rope.scaling.{key}": value for key, value in said.items()}
    file = rewritten(original, tmp_path / "model.gguf", keys)
    theirs = with_rope(
        model,
        **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        **{"mscale": 0.7, "mscale_all_dim": 0.7},
    )
    expected = logits(theirs)
    torch.testing.assert_close(logits(streamed(file)), expected, rtol=1e-5, atol=1e-5)
    assert (expected - logits(model)).abs().max() > 0.01
    by_llama = llama_cpp_or_skip().logits(file, IDS[0].tolist()).log_softmax(-1)
    assert (expected[0].log_softmax(-1) - by_llama).abs().max() < 1e-4
    theirs.config.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(streamed(file)), expected, rtol=1e-5, atol=1e-5)
    (tmp_path / "config.json").unlink()
    for scale in (0.0, None):
        other = rewritten(file, tmp_path / "other.gguf", {f"{arch}.rope.scaling.yarn_log_multiplier": scale})
        with pytest.raises(CheckpointError, match=r"rope\.scaling\.yarn_log_multiplier is 0"):
            streamed(other)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_key_that_differs_from_config_json_is_refused(name, files, tmp_path):
    model, arch, original = files(name)
    model.config.save_pretrained(tmp_path)
    written = gguf.GGUFReader(original).fields
    architecture = architecture_for(model.config.model_type)
    for key in architecture.fields(model.config):
        if key in metadata.READ or key in architecture.harmless:
            continue
        value = written[f"{arch}.{key}"].contents()
        if isinstance(value, list):
            other = [not one for one in value]
        else:
            other = not value if isinstance(value, bool) else 2 * value + 1
        file = rewritten(original, tmp_path / "model.gguf", {f"{arch}.{key}": other})
        with pytest.raises(CheckpointError, match=rf"{arch}\.{key} is .*, but the model is computed with"):
            streamed(file)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tensor_of_another_model_is_refused(name, files, tmp_path):
    _, _, original = files(name)
    vector = torch.zeros(32).numpy()
    file = rewritten(original, tmp_path / "model.gguf", {}, more=[("blk.1.attn_norm.bias", vector)])
    with pytest.raises(CheckpointError, match=r"blk\.1\.attn_norm\.bias has no name in Transformers"):
        streamed(file)
    file = rewritten(original, tmp_path / "model.gguf", {}, more=[("blk.1.time_mix_w1", vector)])
    with pytest.raises(CheckpointError, match=r"blk\.1\.time_mix_w1 has no name in Transformers"):
        streamed(file)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_key_without_which_it_is_another_model(name, files, tmp_path):
    _, arch, original = files(name)
    for key in architecture_for(name).needs:
        file = rewritten(original, tmp_path / "model.gguf", {f"{arch}.{key}": None})
        with pytest.raises(CheckpointError, match=rf"has no key {arch}\.{key}"):
            streamed(file)


def test_keys_that_a_file_lacks_have_the_values_of_llama_cpp(files, tmp_path):
    model, arch, original = files("glm4_moe, scores")
    lacking = ("expert_weights_norm", "expert_group_count", "vocab_size", "attention.key_length_mla")
    file = rewritten(original, tmp_path / "model.gguf", {f"{arch}.{key}": None for key in lacking})
    torch.testing.assert_close(logits(streamed(file)), logits(model), rtol=1e-5, atol=1e-5)
    file = rewritten(original, tmp_path / "model.gguf", {f"{arch}.expert_weights_scale": 0.0})
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if hasattr(module, "routed_scaling_factor"):
            module.routed_scaling_factor = 1.0
    torch.testing.assert_close(logits(streamed(file)), logits(plain), rtol=1e-5, atol=1e-5)
    assert (logits(plain) - logits(model)).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["glm4_moe", "exaone_moe", "glm_moe_dsa", "nemotron_h"])
def test_heads_for_further_tokens_are_left_out(name, files, tmp_path):
    model, arch, original = files(name)
    count = model.config.num_hidden_layers
    last = [
        (f"blk.{count}.{tensor.name.split('.', 2)[2]}", tensor.data)
        for tensor in gguf.GGUFReader(original).tensors
        if tensor.name.startswith(f"blk.{count - 1}.")
    ]
    last.append((f"blk.{count}.nextn.eh_proj.weight", torch.ones(32, 64).numpy()))
    keys = {f"{arch}.nextn_predict_layers": 1, f"{arch}.block_count": count + 1}
    for key, field in gguf.GGUFReader(original).fields.items():
        if key.startswith(arch) and isinstance(field.contents(), list):
            keys[key] = [*field.contents(), field.contents()[-1]]
    file = rewritten(original, tmp_path / "model.gguf", keys, more=last)
    ours = streamed(file)
    assert ours.config.num_hidden_layers == count
    layers = ours.expert_stream.pool.layers
    with pytest.raises(CheckpointError, match=rf"blk\.{count}\.ffn_.*_exps\.weight has experts of no layer"):
        GgufCut(GgufModel(file), [layer.path for layer in layers], layers[0].shapes[0][0], 4)
    torch.testing.assert_close(logits(ours), logits(model), rtol=1e-5, atol=1e-5)
    model.config.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(streamed(file)), logits(model), rtol=1e-5, atol=1e-5)
    (tmp_path / "config.json").unlink()
    file = rewritten(original, tmp_path / "model.gguf", keys | {f"{arch}.nextn_predict_layers": 0}, more=last)
    with pytest.raises(
        CheckpointError, match=rf"blk\.{count}\.nextn\.eh_proj\.weight has no name|{count + 1}"
    ):
        streamed(file)
