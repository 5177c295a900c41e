"""A small model of Transformers under its plans, and under one with a mistake."""

from unittest import mock

import transformers
from packaging.version import Version
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig, tensor_parallel

from fmoe_ext.audit import PlanRecipe
from fmoe_ext.audit.plans.transformers import from_pretrained

# Since Transformers 5.24 dense layers are divided with the experts; tp_plan={} is refused.
EXPERTS_ALONE = {"tp_plan": {}} if Version(transformers.__version__) < Version("5.24") else {}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "moe_intermediate_size": 16, "head_dim": 8}


def model():
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, **heads, vocab_size=64, num_experts=8, num_experts_per_tok=2)
    )


def expert_parallel(model, rank, world):
    plan = DistributedConfig(tp_size=world, ep_size=world, **EXPERTS_ALONE)
    return from_pretrained(model, distributed_config=plan)


def tensor_parallel_(model, rank, world):
    return from_pretrained(model, distributed_config=DistributedConfig(tp_size=world))


def fully_sharded(model, rank, world):
    return from_pretrained(model, distributed_config=DistributedConfig(fsdp_size=world))


def undivided(model, rank, world):
    return from_pretrained(model)


def with_detached_weights(model, rank, world):
    """No gradient flows to the routers through the weights of the experts' outputs."""
    if EXPERTS_ALONE:
        experts = tensor_parallel.EpDispatchExpertsParallel

        def combine(self, output, weights, *others):
            return original(self, output, weights.detach(), *others)

    else:
        experts = transformers.distributed.expert_parallel.AllToAllEP

        def combine(self, output, state):
            return original(self, output, state._replace(top_k_weights=state.top_k_weights.detach()))

    original = experts._combine_tokens

    parallel = expert_parallel(model, rank, world)
    inner = parallel.backward

    def backward(recipe, batch):
        with mock.patch.object(experts, "_combine_tokens", combine):
            return inner(recipe, batch)

    parallel.backward = backward
    return parallel


PLANS = {
    "expert_parallel": expert_parallel,
    "tensor_parallel": tensor_parallel_,
    "fully_sharded": fully_sharded,
    "undivided": undivided,
    "with_detached_weights": with_detached_weights,
}


def recipe(plan):
    return PlanRecipe(model, PLANS[plan])
