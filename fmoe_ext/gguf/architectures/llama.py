"""Mixtral, and dense Llama and Mistral models with MoE layers."""

from fmoe_ext.gguf.architecture import FixedRouter


class Llama(FixedRouter):
    name = "llama"
    model_type = "mixtral"
    has_factors = True
    rotates_pairs = True
