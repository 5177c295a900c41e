"""fmoe.balance: figures of the load in a dict of lists; fmoe_ext.balance is the richer way."""

from fmoe_ext.megatron.balance import METRICS as metrics
from fmoe_ext.megatron.balance import reset_balance_profile, update_balance_profile

__all__ = ["metrics", "reset_balance_profile", "update_balance_profile"]
