"""OLMoE with its experts on two ranks, as Transformers before 5.15 spelled it."""

from olmoe_ep import model
from transformers.distributed import DistributedConfig

from fmoe_ext.audit.plans.transformers import from_pretrained

__all__ = ["model", "parallelize"]


def parallelize(model, rank, world):
    plan = DistributedConfig(enable_expert_parallel=True)
    return from_pretrained(model, tp_plan="auto", distributed_config=plan)
