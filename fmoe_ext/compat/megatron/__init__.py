"""fmoe.megatron, for Megatron-LM v2.2 to v3.0.2; imports without Megatron-LM. find.py finds its MLPs for fmoefy."""

from fmoe_ext.compat.megatron.balance import (
    add_balance_log,
    generate_megatron_gate_hook,
    get_balance_profile,
    reset_gate_hook,
)
from fmoe_ext.compat.megatron.checkpoint import load_checkpoint, save_checkpoint
from fmoe_ext.compat.megatron.distributed import DistributedDataParallel
from fmoe_ext.compat.megatron.layers import MegatronMLP, fmoefy
from fmoe_ext.compat.megatron.patch import patch_forward_step, patch_loss_func_v2_5, patch_model_provider
from fmoe_ext.compat.megatron.runtime import add_fmoe_args

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
