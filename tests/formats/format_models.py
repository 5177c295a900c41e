"""Small random models of the Hugging Face families that export() and import_model() know: a family is an entry here."""

import contextlib
import functools

import pytest
import torch

from fmoe_ext import FMoETransformerMLP, SigmoidGate, SoftmaxGate

transformers = pytest.importorskip("transformers")

SIZES = {
    **{"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
HEADS = {"head_dim": 12}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = {"shared_expert_intermediate_size": 28}
GATED_DELTA = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 8, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
}
ERNIE = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24}
ONE_GROUP = {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}
LATENT = {
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "num_key_value_heads": 4},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
}
DEEPSEEK = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "n_shared_experts": 2},
    **{"first_k_dense_replace": 1, "moe_intermediate_size": 24, "routed_scaling_factor": 2.5},
}
# MoE models of Transformers, with the options that change what they compute
MODELS = {
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 5, **HEADS},
    "qwen3_moe": {**MOE, **HEADS, "norm_topk_prob": True, "mlp_only_layers": [0]},
    "qwen3_moe, probabilities": {**MOE, **HEADS, "norm_topk_prob": False, "hidden_act": "gelu_pytorch_tanh"},
    "qwen2_moe": {**MOE, **SHARED, "norm_topk_prob": False},
    "qwen2_moe, normalised": {**MOE, **SHARED, "norm_topk_prob": True},
    "qwen3_next": {**MOE, **SHARED, **GATED_DELTA, "norm_topk_prob": True},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": False, "clip_qkv": 0.5},
    "flex_olmo": {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": False},
    "deepseek_v2": {**DEEPSEEK, **LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v2, no groups": {**DEEPSEEK, **LATENT, "topk_method": "greedy"},
    "deepseek_v3": {**DEEPSEEK, **LATENT, "num_mtp_layers": 0},
    "deepseek_v3, one group": {**DEEPSEEK, **LATENT, **ONE_GROUP, "num_mtp_layers": 0},
    "glm4_moe": {**DEEPSEEK, **HEADS, "num_mtp_layers": 0},
    "glm4_moe, one group": {**DEEPSEEK, **HEADS, **ONE_GROUP, "num_mtp_layers": 0, "use_qk_norm": True},
    "glm4_moe_lite": {**DEEPSEEK, **LATENT, "mlp_layer_types": ["sparse", "dense"]},
    "dots1": {**DEEPSEEK, **HEADS},
    "minimax_m2": {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8},
    "ernie4_5_moe": {**ERNIE, "moe_num_shared_experts": 2, "moe_layer_start_index": 1},
    "ernie4_5_moe, none shared": {**ERNIE, "moe_num_shared_experts": 0, "moe_layer_start_index": 0},
    "granitemoe": {
        **{"num_local_experts": 6, "num_experts_per_tok": 2, "embedding_multiplier": 2.0},
        **{"residual_multiplier": 0.7, "logits_scaling": 3.0, "attention_multiplier": 0.3},
    },
    "gpt_oss": {
        **{"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 4},
        **{"swiglu_alpha": 1.5, "swiglu_limit": 0.5},
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    },
}
FIRST_IS_DENSE = (
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "dots1",
    "ernie4_5_moe",
)


def num_moe_layers(name):
    """MoE layers among the two of a model of MODELS."""
    dense = name in FIRST_IS_DENSE or name.endswith(("one group", "no groups"))
    return 1 if dense else 2


# dense models of Transformers, arguments of fmoefy, and the formats that can hold the result
DENSE = {
    "llama to mixtral": ("llama", "mixtral", {}, {}),
    "mistral to mixtral": ("mistral", "mixtral", {"sliding_window": 5, **HEADS}, {}),
    "qwen3 to qwen3_moe": ("qwen3", "qwen3_moe", HEADS, {}),
    "qwen3, some layers": ("qwen3", "qwen3_moe", {**HEADS, "tie_word_embeddings": True}, {"layers": [1]}),
    "qwen3, probabilities": (
        *("qwen3", "qwen3_moe", {"hidden_act": "gelu_pytorch_tanh"}),
        {"gate": functools.partial(SoftmaxGate, normalize=False)},
    ),
    "qwen2 to qwen2_moe": (
        *("qwen2", "qwen2_moe", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        {"shared_expert_hidden": 12, "shared_expert_gate": True},
    ),
    "llama to qwen2_moe": (
        "llama",
        "qwen2_moe",
        {},
        {"shared_expert_hidden": 12, "shared_expert_gate": True},
    ),
    "granite to granitemoe": (
        "granite",
        "granitemoe",
        {"embedding_multiplier": 2.0, "logits_scaling": 3.0},
        {},
    ),
    "olmo2 to flex_olmo": ("olmo2", "flex_olmo", {}, {}),
    "ernie4_5 to ernie4_5_moe": ("ernie4_5", "ernie4_5_moe", HEADS, {"shared_expert_hidden": 40}),
    "ernie4_5, biased": ("ernie4_5", "ernie4_5_moe", {}, {"gate": "biased_softmax", "layers": [1]}),
    "deepseek_v3": (
        *(
            "deepseek_v3",
            "deepseek_v3",
            {**LATENT, "num_mtp_layers": 0, "first_k_dense_replace": 2, "n_routed_experts": 4},
        ),
        {
            "gate": functools.partial(SigmoidGate, num_groups=2, topk_groups=1, group_best=2, scale=2.5),
            **{"layers": [1], "hidden_hidden_size": 24, "shared_expert_hidden": 48},
        },
    ),
}


@contextlib.contextmanager
def without_float32():
    """Transformers computes norms, rotary angles and routers in float32, whatever the dtype; in here in float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def make(model_type, seed=0, **values):
    """A random model, its parameters so large that gates and experts matter, in float64."""
    config = transformers.AutoConfig.for_model(model_type, **SIZES | values)
    config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    return randomised(model, seed)


def randomised(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                noise = torch.randn(value.shape, generator=generator)
                value.copy_(0.2 * noise + (value == 1))
    return model.double().eval()


def logits(model, seed=3):
    ids = torch.randint(3, SIZES["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad(), without_float32():
        return model(input_ids=ids).logits


def assert_equal_logits(model, expected):
    assert (logits(model) - expected).abs().max() <= 1e-12 * expected.abs().max()


def load(folder):
    """As any program does: without us."""
    loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager", output_loading_info=True
    )
    model, info = loading
    assert not any(info.values()), info
    return model.eval()


def moe_layers(model):
    return [m for m in model.modules() if isinstance(m, FMoETransformerMLP)]
