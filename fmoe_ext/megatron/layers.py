"""The names of fmoe_ext.integrations.megatron.mlp, where they were before."""

from fmoe_ext.integrations.megatron.mlp import MegatronMLP, megatron_init_method

__all__ = ["MegatronMLP", "megatron_init_method"]
