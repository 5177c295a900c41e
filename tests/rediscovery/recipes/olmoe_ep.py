"""OLMoE with its experts on two ranks."""

from transformers import OlmoeConfig, OlmoeForCausalLM
from transformers.distributed import DistributedConfig

from fmoe_ext.audit.plans.transformers import from_pretrained

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2}


def model():
    return OlmoeForCausalLM(OlmoeConfig(**SIZES, num_attention_heads=4, num_experts=8, num_experts_per_tok=2))


def parallelize(model, rank, world):
    plan = DistributedConfig(tp_size=world, enable_expert_parallel=True)
    return from_pretrained(model, distributed_config=plan)
