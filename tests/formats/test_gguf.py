"""export() as GGUF: read by gguf's reader, and by llama.cpp."""

import functools
import shutil

import numpy
import pytest
import torch

import fmoe_ext
from fmoe_ext import SoftmaxGate, fmoefy
from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.gguf.architecture import known_names
from fmoe_ext.gguf.architectures import ARCHITECTURES
from fmoe_ext.gguf.writing import write_gguf
from tests.formats.format_models import ONE_GROUP
from tests.formats.test_formats import (
    HEADS,
    MODELS,
    llama,
    logits,
    make,
    randomised,
    without_float32,
)

transformers = pytest.importorskip("transformers")


def halves(w, heads):
    """Undo what llama.cpp's converter does to rows of q and k."""
    return w.reshape(heads, -1, 2, w.shape[1]).transpose(0, 2, 1, 3).reshape(w.shape)


def by_hand(tensors, layers, heads, kv_heads, pairs):
    """{name of Transformers: array} of a GGUF file, written down independently of the code under test."""
    state = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        "model.norm.weight": tensors["output_norm.weight"],
        "lm_head.weight": tensors["output.weight"],
    }
    names = {
        **{
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "attn_v": "self_attn.v_proj",
        },
        **{
            "attn_output": "self_attn.o_proj",
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
        },
        **{"ffn_gate_inp": "mlp.gate", "ffn_down_shexp": "mlp.shared_expert.down_proj"},
        **{"ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj"},
        **{"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj"},
    }
    for i in range(layers):
        blk = {
            name.removeprefix(f"blk.{i}."): v for name, v in tensors.items() if name.startswith(f"blk.{i}.")
        }
        if pairs:
            blk["attn_q.weight"] = halves(blk["attn_q.weight"], heads)
            blk["attn_k.weight"] = halves(blk["attn_k.weight"], kv_heads)
        mlp = f"model.layers.{i}.mlp."
        gate, up = blk.pop("ffn_gate_exps.weight"), blk.pop("ffn_up_exps.weight")
        state[f"{mlp}experts.gate_up_proj"] = numpy.concatenate([gate, up], 1)
        state[f"{mlp}experts.down_proj"] = blk.pop("ffn_down_exps.weight")
        if "ffn_gate_inp_shexp.weight" in blk:
            state[f"{mlp}shared_expert_gate.weight"] = blk.pop("ffn_gate_inp_shexp.weight")[None]
        for name, value in blk.items():
            stem, _, kind = name.rpartition(".")
            state[f"model.layers.{i}.{names[stem]}.{kind}"] = value
    return state


GGUF = {
    "mixtral": ("mixtral", "llama", {**MODELS["mixtral"], "sliding_window": None}),
    "qwen3_moe": ("qwen3_moe", "qwen3moe", {**MODELS["qwen3_moe"], "mlp_only_layers": []}),
    "qwen2_moe": ("qwen2_moe", "qwen2moe", MODELS["qwen2_moe"]),
    "olmoe": ("olmoe", "olmoe", {**MODELS["olmoe"], "clip_qkv": None, "num_key_value_heads": 4}),
}


OSS = {**MODELS["gpt_oss"], "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
YARN = {
    **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4},
    **{"beta_fast": 2.0, "beta_slow": 0.5},
}
HYBRID = {
    **MODELS["granitemoe"],
    **{"shared_intermediate_size": 28, "layer_types": ["linear_attention", "full_attention"]},
    **{"mamba_n_heads": 4, "mamba_d_state": 8},
}
AFMOE = {
    **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_dense_layers": 1},
    **{"num_shared_experts": 2, "route_scale": 2.5, "num_hidden_layers": 5, "sliding_window": 4},
    **{"mup_enabled": True, **HEADS},
}
EXAONE = {
    **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_shared_experts": 2},
    **{"mlp_layer_types": ["dense", "sparse", "sparse"], "num_hidden_layers": 3, "sliding_window": 4},
    **{"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], **HEADS},
}
GLM_DSA = {
    **{key: value for key, value in MODELS["deepseek_v3, one group"].items() if key != "num_mtp_layers"},
    **{"mlp_layer_types": ["dense", "sparse"], "indexer_types": ["full", "shared"]},
    **{"index_topk": 4, "index_n_heads": 8, "index_head_dim": 64, "rms_norm_eps": 1e-6},
}
NEMOTRON = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    **{"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    **{"moe_shared_expert_intermediate_size": 28, "routed_scaling_factor": 2.5, "n_groups": 2},
    **{"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8},
}
KIMI_LINEAR = {
    **{"num_experts": 6, "num_experts_per_token": 2, "moe_intermediate_size": 24, "num_shared_experts": 2},
    **{"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]},
    **{"linear_head_dim": 8, "linear_num_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-6},
    **{"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
}
LFM2 = {
    **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_dense_layers": 1},
    **{"layer_types": ["conv", "full_attention"]},
}
GEMMA = {
    **{"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24, "enable_moe_block": True},
    **{"head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    **{"hidden_size_per_layer_input": 0, "sliding_window": 4, "final_logit_softcapping": 5.0},
    **{"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GEMMA_SHARED = {
    **GEMMA,
    **{"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": None},
    **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 61, "attention_k_eq_v": False},
}
# Those whose files say how their routers compute: llama.cpp checks them here, stream() in test_gguf_routing.py
WRITTEN = {
    "afmoe": ("afmoe", "afmoe", AFMOE),
    "deepseek_v2": ("deepseek_v2", "deepseek2", MODELS["deepseek_v2, no groups"]),
    "deepseek_v3": ("deepseek_v3", "deepseek2", MODELS["deepseek_v3, one group"]),
    "deepseek_v3, groups": ("deepseek_v3", "deepseek2", MODELS["deepseek_v3"]),
    "dots1": ("dots1", "dots1", {**MODELS["dots1"], **ONE_GROUP, "num_key_value_heads": 4}),
    "ernie4_5_moe": ("ernie4_5_moe", "ernie4_5-moe", {**MODELS["ernie4_5_moe"]}),
    "exaone_moe": ("exaone_moe", "exaone-moe", EXAONE),
    "gemma4_text": ("gemma4_text", "gemma4", GEMMA),
    "gemma4_text, shared": ("gemma4_text", "gemma4", GEMMA_SHARED),
    "glm_moe_dsa": ("glm_moe_dsa", "glm-dsa", GLM_DSA),
    "glm4_moe_lite": (
        *("glm4_moe_lite", "deepseek2"),
        {**MODELS["glm4_moe_lite"], "mlp_layer_types": ["dense", "sparse"], "rms_norm_eps": 1e-6},
    ),
    "solar_open": ("solar_open", "glm4moe", {**MODELS["glm4_moe, one group"], "num_key_value_heads": 4}),
    "glm4_moe": ("glm4_moe", "glm4moe", {**MODELS["glm4_moe, one group"], "norm_topk_prob": True}),
    "glm4_moe, scores": ("glm4_moe", "glm4moe", MODELS["glm4_moe, one group"]),
    "granitemoe": ("granitemoe", "granitemoe", MODELS["granitemoe"]),
    "granitemoeshared": (
        *("granitemoeshared", "granitemoe"),
        {**MODELS["granitemoe"], "shared_intermediate_size": 28},
    ),
    "granitemoehybrid": ("granitemoehybrid", "granitehybrid", HYBRID),
    "granitemoehybrid, rope": (
        *("granitemoehybrid", "granitehybrid"),
        {**HYBRID, "position_embedding_type": "rope"},
    ),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", "hunyuan-moe", {"num_experts": 6, "moe_topk": 2, **HEADS}),
    "kimi_linear": ("kimi_linear", "kimi-linear", KIMI_LINEAR),
    "lfm2_moe": ("lfm2_moe", "lfm2moe", LFM2),
    "minimax_m2": ("minimax_m2", "minimax-m2", {**MODELS["minimax_m2"], "num_key_value_heads": 4}),
    "gpt_oss": ("gpt_oss", "gpt-oss", OSS),
    "nemotron_h": ("nemotron_h", "nemotron_h_moe", NEMOTRON),
    "nemotron_h, latent": ("nemotron_h", "nemotron_h_moe", {**NEMOTRON, "moe_latent_size": 16}),
    "qwen3_next": ("qwen3_next", "qwen3next", MODELS["qwen3_next"]),
    "qwen3_5_moe_text": (
        *("qwen3_5_moe_text", "qwen35moe"),
        {
            **{key: value for key, value in MODELS["qwen3_next"].items() if key != "norm_topk_prob"},
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
                "mrope_section": [1, 1, 0],  # llama.cpp wants no more than a head has
            },
        },
    ),
}
# llama.cpp rounds the bounds of YaRN's ramp; for GPT-OSS Transformers does so with truncate=True alone
OF_LLAMA_CPP = {
    "gpt_oss, yarn": ("gpt_oss", "gpt-oss", {**OSS, "rope_parameters": {**YARN, "truncate": True}}),
}


@pytest.mark.parametrize("name", GGUF)
def test_gguf(name, tmp_path):
    """Read by gguf's own reader and put back by hand: the model's logits, as exact as float32 is."""
    gguf = pytest.importorskip("gguf", reason="pip install gguf")
    model_type, architecture, values = GGUF[name]
    theirs = make(model_type, **values)
    expected, expected_state = logits(theirs), theirs.state_dict()
    fmoe_ext.export(fmoe_ext.import_model(make(model_type, **values)), tmp_path / "out", "gguf")
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == ["README.md", "model.gguf"]
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    facts = {name: field.contents() for name, field in reader.fields.items()}
    assert facts["general.architecture"] == architecture
    assert facts["tokenizer.ggml.model"] == "no_vocab"
    assert facts[f"{architecture}.expert_count"] == 6
    assert facts[f"{architecture}.expert_used_count"] == theirs.config.num_experts_per_tok
    assert facts[f"{architecture}.vocab_size"] == 61 and facts[f"{architecture}.block_count"] == 2
    assert facts[f"{architecture}.attention.head_count_kv"] == theirs.config.num_key_value_heads
    assert facts[f"{architecture}.rope.freq_base"] == theirs.config.rope_parameters["rope_theta"]
    tensors = {t.name: t.data for t in reader.tensors}
    known = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), 2).mapping.values()
    assert {t.removesuffix(".weight").removesuffix(".bias") for t in tensors} <= {n for _, n in known}
    state = by_hand(tensors, 2, 4, 2, pairs=name == "mixtral")
    assert state.keys() == expected_state.keys()
    assert all(numpy.array_equal(v, expected_state[k].float().numpy()) for k, v in state.items())
    theirs.load_state_dict({k: torch.tensor(v) for k, v in state.items()})
    assert (logits(theirs) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_gguf_of_a_bfloat16_model(tmp_path):
    gguf = pytest.importorskip("gguf", reason="pip install gguf")
    model = llama().bfloat16()
    fmoe_ext.export(model, tmp_path / "out", "gguf")
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    assert types["blk.0.ffn_up_exps.weight"] == "BF16" and types["token_embd.weight"] == "BF16"
    assert types["blk.1.ffn_gate_inp.weight"] == types["blk.0.attn_norm.weight"] == "F32"
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(
        CheckpointError, match=r"gguf is written for .*, deepseek_v2, .* but this model is flex_olmo"
    ):
        model = fmoe_ext.import_model(make("flex_olmo", **MODELS["flex_olmo"]))
        fmoe_ext.export(model, tmp_path / "out", "gguf")
    for name, value, said in (
        ("swiglu_limit", 6.0, "6.0"),
        ("layer_types", ["full_attention"] * 2, "..full_attention.*"),
        ("rope_parameters", {**YARN, "attention_factor": 0.9}, ".*"),
    ):
        model = fmoe_ext.import_model(make("gpt_oss", **{**OSS, name: value}))
        with pytest.raises(CheckpointError, match=f"{name}={said} has no place in GGUF's gpt-oss"):
            fmoe_ext.export(model, tmp_path / "out", "gguf")
    for model_type, values, said in (
        ("afmoe", {**AFMOE, "mup_enabled": False}, "mup_enabled=False .*afmoe"),
        ("exaone_moe", {**EXAONE, "tie_word_embeddings": True}, "tie_word_embeddings=True .*exaone-moe"),
        (
            *("exaone_moe", {**EXAONE, "mlp_layer_types": ["sparse", "dense", "sparse"]}),
            r"mlp_layer_types=\['sparse', 'dense', 'sparse'\] .*exaone-moe",
        ),
        ("granitemoehybrid", {**HYBRID, "mamba_n_groups": 2}, "mamba_n_groups=2 .*granitehybrid"),
        ("lfm2_moe", {**LFM2, "norm_topk_prob": False}, "norm_topk_prob=False .*lfm2moe"),
        ("gemma4_text", {**GEMMA, "hidden_activation": "silu"}, "hidden_activation=silu .*gemma4"),
        ("gemma4_text", {**GEMMA, "hidden_size_per_layer_input": 8}, "vocab_size_per_layer_input=.*gemma4"),
        ("gemma4_text", {**GEMMA, "num_kv_shared_layers": 1}, "num_kv_shared_layers=1 .*gemma4"),
        *(
            ("gemma4_text", {**GEMMA, name: value}, f"{name}=.* has no place in GGUF's gemma4")
            for name, value in (
                ("use_bidirectional_attention", "all"),
                ("rope_parameters", {**GEMMA_ROPE, "sliding_attention": {**YARN}}),
            )
        ),
    ):
        with pytest.raises(CheckpointError, match=said):
            fmoe_ext.export(fmoe_ext.import_model(make(model_type, **values)), tmp_path / "out", "gguf")
    sizes = {**MODELS["qwen3_moe"], "norm_topk_prob": False, "mlp_only_layers": []}
    with pytest.raises(CheckpointError, match="norm_topk_prob=False has no place in GGUF's qwen3moe"):
        fmoe_ext.export(fmoe_ext.import_model(make("qwen3_moe", **sizes)), tmp_path / "out", "gguf")
    with pytest.raises(CheckpointError, match="n_group=4 has no place in GGUF's deepseek2"):
        model = fmoe_ext.import_model(make("deepseek_v2", **MODELS["deepseek_v2"]))
        fmoe_ext.export(model, tmp_path / "out", "gguf")
    with pytest.raises(CheckpointError, match=r"moe_norm_min=0\.5 has no place in GGUF's ernie4_5-moe"):
        values = {**MODELS["ernie4_5_moe"], "moe_norm_min": 0.5}
        fmoe_ext.export(fmoe_ext.import_model(make("ernie4_5_moe", **values)), tmp_path / "out", "gguf")
    grouped = {**MODELS["olmoe"], "clip_qkv": None, "num_key_value_heads": 2}
    with pytest.raises(CheckpointError, match="num_key_value_heads=2 has no place in GGUF's olmoe"):
        fmoe_ext.export(fmoe_ext.import_model(make("olmoe", **grouped)), tmp_path / "out", "gguf")
    assert not list(tmp_path.iterdir())


# dense models that fmoefy changed, into the formats of GGUF
FMOEFIED = {
    "llama": lambda: fmoefy(make("llama", tie_word_embeddings=True), 4),
    "qwen3": lambda: fmoefy(make("qwen3", **HEADS), 4, top_k=3),
    "qwen2": lambda: fmoefy(
        make("qwen2"),
        4,
        gate=functools.partial(SoftmaxGate, normalize=False),
        shared_expert_hidden=12,
        shared_expert_gate=True,
    ),
}


def of_transformers(name):
    model_type, _, values = {**GGUF, **WRITTEN, **OF_LLAMA_CPP}[name]
    return fmoe_ext.import_model(make(model_type, **values))


def assert_llama_cpp_agrees(model, folder, tolerance, reference=None, **options):
    """llama.cpp's log-probabilities of every next token are those of the model, or of another, in float64."""
    llama_cpp = llama_cpp_or_skip()
    fmoe_ext.export(model, folder, "gguf")
    ids = torch.randint(3, 61, (1, 12), generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), without_float32():
        expected = (reference or model).double()(input_ids=ids).logits[0].log_softmax(-1)
    got = llama_cpp.logits(folder / "model.gguf", ids[0].tolist(), **options).log_softmax(-1)
    assert got.shape == expected.shape == (12, 61) and expected.std() > 0.1
    assert (got - expected).abs().max() <= tolerance


def llama_cpp_or_skip():
    pytest.importorskip("gguf", reason="pip install gguf")
    pytest.importorskip("xllamacpp", reason="pip install xllamacpp, which has llama.cpp inside")
    from tests.formats import llama_cpp

    return llama_cpp


@pytest.mark.parametrize("name", [*GGUF, *WRITTEN, *OF_LLAMA_CPP])
def test_llama_cpp(name, tmp_path):
    """A model of Transformers: log-probabilities to float32's precision."""
    reference = None
    tolerance = 2e-5 if name == "qwen3_next" else 1e-5  # its scan is in another order
    if name.startswith("gemma"):  # whose GELU is a table of 16 bits there
        tolerance, (model_type, _, values) = 2e-3, WRITTEN[name]
        reference = make(model_type, **values)
        for module in reference.modules():
            if hasattr(module, "act_fn"):
                module.act_fn = GeluOfTable()
    assert_llama_cpp_agrees(of_transformers(name), tmp_path / "out", tolerance, reference)


class GeluOfTable(torch.nn.Module):
    def forward(self, x):
        rounded = torch.nn.functional.gelu(x.half().double(), approximate="tanh").half().to(x.dtype)
        return rounded.where(x.abs() < 10, x.relu())


@pytest.mark.parametrize("name", FMOEFIED)
def test_llama_cpp_on_fmoefied_models(name, tmp_path):
    assert_llama_cpp_agrees(randomised(FMOEFIED[name]()), tmp_path / "out", 1e-5)


def test_heads_rotate_whole_where_the_model_ignores_a_partial_factor(tmp_path):
    """The file said half of each head: llama.cpp ended the process, and stream() refused the file."""
    gguf = pytest.importorskip("gguf", reason="pip install gguf")
    rope = {"rope_type": "default", "rope_theta": 777.0, "partial_rotary_factor": 0.5}
    model = fmoe_ext.import_model(make("qwen3_moe", **{**GGUF["qwen3_moe"][2], "rope_parameters": rope}))
    fmoe_ext.export(model, tmp_path / "out", "gguf")
    fields = gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields
    assert fields["qwen3moe.rope.dimension_count"].contents() == model.config.head_dim
    assert_llama_cpp_agrees(model, tmp_path / "again", 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 0.01), (torch.bfloat16, 0.1)])
def test_llama_cpp_with_16_bits(dtype, tolerance, tmp_path):
    """Weights, keys and values of 16 bits, with which llama.cpp multiplies activations of 16 bits."""
    model = of_transformers("mixtral").to(dtype)
    assert_llama_cpp_agrees(model, tmp_path / "out", tolerance, cache=llama_cpp_or_skip().F16)


def test_older_package_gguf_is_named(tmp_path):
    """One that lacks an architecture, or a packing."""
    with pytest.raises(CheckpointError, match="gguf does not know an-architecture: pip install -U gguf"):
        known_names("an-architecture")
    config = make("olmoe", **GGUF["olmoe"][2]).config
    with pytest.raises(CheckpointError, match="gguf has no type Q9_Z: pip install -U gguf"):
        write_gguf(tmp_path / "model.gguf", {}, config, packings={"a": "q9_z"})
    assert not (tmp_path / "model.gguf").exists()


def test_model_of_dense_layers_alone_has_a_place_in_deepseek2():
    """Looking for its first MoE layer was a ValueError, 'sparse' is not in list."""
    config = transformers.Glm4MoeLiteConfig(num_hidden_layers=2, mlp_layer_types=["dense", "dense"])
    (kind,) = (kind for kind in ARCHITECTURES if kind.model_type == "glm4_moe_lite")
    assert not kind().refused(config)["mlp_layer_types"]
    config.mlp_layer_types = ["sparse", "dense"]
    assert kind().refused(config)["mlp_layer_types"]
