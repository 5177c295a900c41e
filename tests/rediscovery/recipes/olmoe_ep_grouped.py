"""OLMoE with its experts on two ranks, computed by torch's grouped_mm, which has no float64."""

from olmoe_ep import model, parallelize

__all__ = ["dtype", "model", "parallelize"]
dtype = "float32"
