"""fmoe.megatron; imports without Megatron-LM."""

from fmoe_ext.compat.megatron.balance import generate_megatron_gate_hook, get_balance_profile
from fmoe_ext.compat.megatron.distributed import DistributedDataParallel
from fmoe_ext.compat.megatron.layers import MegatronMLP, fmoefy
from fmoe_ext.megatron import (
    add_balance_log,
    add_fmoe_args,
    load_checkpoint,
    patch_forward_step,
    patch_loss_func_v2_5,
    patch_model_provider,
    reset_gate_hook,
    save_checkpoint,
)

__all__ = [
    "DistributedDataParallel",
    "MegatronMLP",
    "add_balance_log",
    "add_fmoe_args",
    "fmoefy",
    "generate_megatron_gate_hook",
    "get_balance_profile",
    "load_checkpoint",
    "patch_forward_step",
    "patch_loss_func_v2_5",
    "patch_model_provider",
    "reset_gate_hook",
    "save_checkpoint",
]
