"""The names of fmoe_ext.integrations.megatron.arguments, where they were before."""

from fmoe_ext.integrations.megatron.arguments import add_fmoe_args

__all__ = ["add_fmoe_args"]
