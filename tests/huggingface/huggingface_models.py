"""Small random models of Transformers architectures that use the experts interface."""

from typing import NamedTuple

import torch

SIZES = {
    **{"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64},
    **{"num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None},
}
HEADS = {"num_key_value_heads": 2, "head_dim": 8}
LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24, "num_key_value_heads": 2}
NUMBERED = {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24, "num_key_value_heads": 2}
DEEPSEEK = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "n_shared_experts": 1},
    **{"first_k_dense_replace": 1, "intermediate_size": 40, "moe_intermediate_size": 24},
    **{"num_key_value_heads": 4},
}
LATENT_ATTENTION = {
    **{"kv_lora_rank": 16, "q_lora_rank": 16},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
}


class Architecture(NamedTuple):
    changes: dict  # to SIZES
    fused: bool = True  # one operator computes the experts


ARCHITECTURES = {
    "Qwen3MoeForCausalLM": Architecture({**NUMBERED, **HEADS, "moe_intermediate_size": 24}),
    "MixtralForCausalLM": Architecture(LOCAL),
    "OlmoeForCausalLM": Architecture({**NUMBERED, "num_experts_per_tok": 3}),
    "Qwen2MoeForCausalLM": Architecture(
        {**NUMBERED, "num_experts": 5, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28}
    ),
    "DeepseekV3ForCausalLM": Architecture({**DEEPSEEK, **LATENT_ATTENTION, "num_mtp_layers": 0}),
    "Glm4MoeForCausalLM": Architecture({**DEEPSEEK, "head_dim": 8, "num_mtp_layers": 0}),
    "Dots1ForCausalLM": Architecture({**DEEPSEEK, "head_dim": 8}),
    "Ernie4_5_MoeForCausalLM": Architecture(
        {
            **{"moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 1, "moe_intermediate_size": 24},
            **{"moe_layer_start_index": 1, "moe_layer_end_index": 1, "intermediate_size": 40},
            **{"num_key_value_heads": 2},
        }
    ),
    "GraniteMoeForCausalLM": Architecture(LOCAL),
    "PhimoeForCausalLM": Architecture(LOCAL),
    "MiniMaxForCausalLM": Architecture(
        {**LOCAL, "head_dim": 8, "block_size": 8, "layer_types": ["linear_attention", "full_attention"]}
    ),
    "JambaForCausalLM": Architecture(
        {**NUMBERED, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4}
    ),
    "HunYuanMoEV1ForCausalLM": Architecture(
        {**HEADS, "num_experts": 6, "moe_topk": 2, "intermediate_size": 24},
    ),
    "GptOssForCausalLM": Architecture(
        {**LOCAL, "head_dim": 8, "swiglu_limit": 0.5, "sliding_window": 4, "initial_context_length": 64},
        fused=False,
    ),
    "AriaTextForCausalLM": Architecture(
        {**HEADS, "moe_num_experts": 6, "moe_topk": 2, "moe_num_shared_experts": 1, "intermediate_size": 24},
        fused=False,
    ),
    "NemotronHForCausalLM": Architecture(
        {
            **HEADS,
            **{"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
            **{"intermediate_size": 40, "moe_shared_expert_intermediate_size": 24},
            **{"layers_block_type": ["full_attention", "moe"]},
        }
    ),
    "MuseSparkTextModel": Architecture(
        {**LOCAL, "head_dim": 8, "moe_intermediate_size": 24, "moe_hidden_size": 16}
    ),
}


def make_model(architecture, implementation="eager", dtype=torch.float32, seed=0, **changes):
    """A model of a class of Transformers, its parameters drawn anew, large enough that every gate matters."""
    import transformers

    model_class = getattr(transformers, architecture)
    sizes = SIZES | ARCHITECTURES[architecture].changes | changes
    config = model_class.config_class(**sizes)
    config._experts_implementation = implementation
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = model_class(config)
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape)
            p.copy_(0.2 * noise if p.dim() > 1 or "bias" in name else p + 0.1 * noise)
    return model.to(dtype)


def make_ids(batch=2, num_tokens=12):
    return torch.randint(
        3, SIZES["vocab_size"], (batch, num_tokens), generator=torch.Generator().manual_seed(0)
    )


def experts_of(model):
    return [module for module in model.modules() if hasattr(module, "is_transposed")]


def step(model, ids):
    """One forward and backward -> logits (a text model's hidden states), loss, {name: gradient}."""
    model.zero_grad()
    if hasattr(model, "lm_head"):
        out = model(input_ids=ids, labels=ids)
        logits, loss = out.logits, out.loss
    else:
        logits = model(input_ids=ids)[0]
        loss = logits.square().mean()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), loss.detach(), gradients
