"""Models of Transformers, with the mistakes that an audit of them has to find."""

import torch
from audit_shared import Noise
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from fmoe_ext.audit.shrink import shrunk_config

SIZES = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32}
EXPERTS = 4


def qwen(**options):
    sizes = {"num_hidden_layers": 2, "moe_intermediate_size": 8, "head_dim": 8, "num_experts": EXPERTS}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, **sizes, num_experts_per_tok=2, max_position_embeddings=32, **options)
    )


def mixtral(**options):
    sizes = {"num_hidden_layers": 3, "intermediate_size": 8, "num_local_experts": 8}
    return MixtralForCausalLM(
        MixtralConfig(**SIZES, **sizes, num_experts_per_tok=2, max_position_embeddings=32, **options)
    )


# One mistake each


def optimizer_without_routers(model):
    trained = [p for name, p in model.named_parameters() if not name.endswith("mlp.gate.weight")]
    return torch.optim.AdamW(trained, lr=1e-2)


def loss_with_balance(model, batch):
    """Transformers' own balance loss, which leaves padding out."""
    out = model(**batch, output_router_logits=True)
    balance = load_balancing_loss_func(out.router_logits, EXPERTS, 2, batch["attention_mask"])
    return out.loss + 0.5 * balance


def loss_that_counts_padding(model, batch):
    out = model(**batch, output_router_logits=True)
    return out.loss + 0.5 * load_balancing_loss_func(out.router_logits, EXPERTS, 2)


def forgetful(layout):
    """Its routers see other noise in every call, also in those that activation checkpointing repeats."""
    model = Qwen3MoeForCausalLM(shrunk_config(qwen().config))
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_pre_hook(Noise())
    return model
