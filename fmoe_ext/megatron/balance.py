"""The names of fmoe_ext.integrations.megatron.balance, where they were before."""

from fmoe_ext.integrations.megatron.balance import (
    METRICS,
    PROFILE,
    Profile,
    add_balance_log,
    generate_megatron_gate_hook,
    get_balance_profile,
    reset_balance_profile,
    reset_gate_hook,
    update_balance_profile,
)

__all__ = [
    "METRICS",
    "PROFILE",
    "Profile",
    "add_balance_log",
    "generate_megatron_gate_hook",
    "get_balance_profile",
    "reset_balance_profile",
    "reset_gate_hook",
    "update_balance_profile",
]
