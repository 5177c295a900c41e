"""Qwen3-MoE with its experts on two ranks, as Transformers before 5.15 spelled it."""

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

from fmoe_ext.audit.plans.transformers import from_pretrained

SIZES = {"vocab_size": 64, "hidden_size": 32, "moe_intermediate_size": 16, "intermediate_size": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2}


def model():
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **HEADS, num_experts=8, num_experts_per_tok=2))


def parallelize(model, rank, world):
    plan = DistributedConfig(enable_expert_parallel=True)
    return from_pretrained(model, tp_plan="auto", distributed_config=plan)
