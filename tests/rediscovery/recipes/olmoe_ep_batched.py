"""OLMoE with its experts on two ranks, computed by batched products."""

import olmoe_ep
from olmoe_ep import parallelize

__all__ = ["model", "parallelize"]


def model():
    made = olmoe_ep.model()
    made.set_experts_implementation("batched_mm")
    return made
