"""fmoe.megatron.utils."""

from fmoe_ext.megatron.utils import add_fmoe_args

__all__ = ["add_fmoe_args"]
