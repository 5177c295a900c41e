"""Small decoders of Transformers whose rollouts are audited, and modules to put into one."""

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
SIZES = {
    **{
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "pad_token_id": 0,
    },
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
}
WINDOWS = {
    "head_dim": 12,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"],
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1}
ROUTED |= {"first_k_dense_replace": 1, "topk_group": 1}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
LATENT |= {"num_key_value_heads": 4}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
GEMMA4 = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24, "enable_moe_block": True}
GEMMA4 |= {"global_head_dim": 12, "num_global_key_value_heads": 2, "vocab_size_per_layer_input": 97}
MODELS = {
    "Qwen3Moe": {**EXPERTS, "head_dim": 12, "norm_topk_prob": True},
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "Mixtral": LOCAL,
    "GptOss": {**LOCAL, **WINDOWS},
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "DeepseekV2": {**ROUTED, **LATENT, "n_group": 1},
    "DeepseekV3": {**ROUTED, **LATENT, "n_group": 2},
    "Gemma2": WINDOWS,
    "Gemma3": WINDOWS,
    "Gemma4": {**WINDOWS, **GEMMA4, "hidden_size_per_layer_input": 8},
    "Phimoe": LOCAL,
    "Glm4Moe": {**ROUTED, "head_dim": 12, "n_group": 1},
    "GraniteMoe": LOCAL,
    "Llama": {},
    "Qwen3": {"head_dim": 12},
}
DTYPES = (torch.float32, torch.bfloat16)


def make_model(name, dtype=torch.float32, **changes):
    config_class = getattr(
        transformers, f"{name}TextConfig" if name in ("Gemma3", "Gemma4") else f"{name}Config"
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config_class(**{**SIZES, **MODELS[name], **changes}))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.new_empty(p.shape).normal_(0, 0.1 if p.dim() > 1 else 0.05, generator=generator))
            p.add_(1.0 if p.dim() == 1 else 0.0)
    return model.to(dtype).eval()


def texts(*shape):
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(3))


class Changed(nn.Module):
    """The identity, but for what change(x) adds; where="view" writes it into half of what was given, in place."""

    def __init__(self, change, where="output"):
        super().__init__()
        self.change, self.where = change, where

    def forward(self, x):
        if self.where == "view":
            x[..., : x.shape[-1] // 2].add_(self.change(x[..., : x.shape[-1] // 2]))
            return torch.zeros_like(x)
        return self.change(x)


class Wrapped(nn.Module):
    """A layer of a decoder after another module."""

    def __init__(self, layer, mixer, by_keyword):
        super().__init__()
        self.mixer, self.layer, self.by_keyword = mixer, layer, by_keyword

    def forward(self, hidden_states, *args, **kwargs):
        hidden_states = hidden_states.clone()
        y = self.mixer(x=hidden_states) if self.by_keyword else self.mixer(hidden_states)
        return self.layer(hidden_states + y, *args, **kwargs)


def with_mixer(mixer, by_keyword=False, **changes):
    model = make_model("Llama", **changes)
    model.model.layers[1] = Wrapped(model.model.layers[1], mixer, by_keyword)
    return model


class Sometimes(nn.Module):
    """The identity by aten.mm where when(x) is true, which batch_invariant() does not cover."""

    def __init__(self, when):
        super().__init__()
        self.when, self.weight = when, nn.Parameter(torch.eye(48))

    def forward(self, x):
        if self.when(x):
            return torch.ops.aten.mm(x.flatten(0, -2), self.weight).view_as(x)
        return nn.functional.linear(x, self.weight)
