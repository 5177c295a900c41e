"""GPT-OSS with its experts on two ranks, as Transformers before 5.15 spelled it."""

from transformers import GptOssConfig, GptOssForCausalLM
from transformers.distributed import DistributedConfig

from fmoe_ext.audit.plans.transformers import from_pretrained

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}


def model():
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return GptOssForCausalLM(
        GptOssConfig(
            **SIZES,
            **heads,
            num_local_experts=8,
            num_experts_per_tok=2,
            layer_types=["full_attention"] * 2,
            attn_implementation="eager",
        )
    )


def parallelize(model, rank, world):
    plan = DistributedConfig(enable_expert_parallel=True)
    return from_pretrained(model, tp_plan="auto", distributed_config=plan)
