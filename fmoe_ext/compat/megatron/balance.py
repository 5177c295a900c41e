"""fmoe.megatron.balance."""

from fmoe_ext.megatron.balance import (
    PROFILE,
    add_balance_log,
    generate_megatron_gate_hook,
    get_balance_profile,
    reset_gate_hook,
)

balance_dict = PROFILE.figures


def __getattr__(name):
    if name == "num_layers":
        return PROFILE.num_layers
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "add_balance_log",
    "balance_dict",
    "generate_megatron_gate_hook",
    "get_balance_profile",
    "reset_gate_hook",
]
