"""export() and import_model(): plain Transformers and our layers give equal logits, in float64 to 1e-12."""

import contextlib

import pytest
import torch

import fmoe_ext
from fmoe_ext import FMoETransformerMLP

transformers = pytest.importorskip("transformers")

SIZES = {
    **{"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
HEADS = {"head_dim": 12}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "num_key_value_heads": 4, "num_mtp_layers": 0},
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
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 28, "norm_topk_prob": False},
    "qwen2_moe, normalised": {**MOE, "shared_expert_intermediate_size": 28, "norm_topk_prob": True},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": False, "clip_qkv": 0.5},
    "deepseek_v3": {**DEEPSEEK, **LATENT},
    "deepseek_v3, one group": {**DEEPSEEK, **LATENT, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    "gpt_oss": {
        **{"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 4},
        **{
            "swiglu_alpha": 1.5,
            "swiglu_limit": 0.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}
DEEPSEEKS = ("deepseek_v3", "deepseek_v3, one group")  # whose first layer is dense


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


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name, tmp_path):
    """A model of Transformers -> its folder -> ours -> a folder -> Transformers: the same logits, the same tensors."""
    model = make(name.split(",")[0], **MODELS[name])
    model.config._experts_implementation = "eager"
    expected = logits(model)
    model.save_pretrained(tmp_path / "theirs")
    ours = fmoe_ext.import_model(tmp_path / "theirs", dtype=torch.float64)
    assert len(moe_layers(ours)) == (1 if name in ("qwen3_moe", *DEEPSEEKS) else 2)
    assert_equal_logits(ours, expected)
    fmoe_ext.export(ours, tmp_path / "ours", name.split(",")[0])
    again = load(tmp_path / "ours")
    assert type(again) is type(model)
    assert_equal_logits(again, expected)
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
