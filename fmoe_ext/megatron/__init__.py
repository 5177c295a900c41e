"""Names for programs with Megatron: moe_layer_spec and with_experts for Megatron-core, FastMoE's for v2.2 to v3.0.2.

fmoefy(model) serves any version of Megatron; the other names are those of FastMoE's patches, which fmoe_ext.compat has.
Nothing here imports Megatron before it is called.
"""

from fmoe_ext.compat.megatron.balance import (
    add_balance_log,
    generate_megatron_gate_hook,
    get_balance_profile,
    reset_gate_hook,
)
from fmoe_ext.compat.megatron.checkpoint import load_checkpoint, save_checkpoint
from fmoe_ext.compat.megatron.distributed import DistributedDataParallel
from fmoe_ext.compat.megatron.mlp import MegatronMLP
from fmoe_ext.compat.megatron.patch import patch_forward_step, patch_loss_func_v2_5, patch_model_provider
from fmoe_ext.compat.megatron.utils import add_fmoe_args
from fmoe_ext.megatron.core import moe_layer_spec, with_experts
from fmoe_ext.models.fmoefy import fmoefy

__all__ = [
    "DistributedDataParallel",
    "MegatronMLP",
    "add_balance_log",
    "add_fmoe_args",
    "fmoefy",
    "generate_megatron_gate_hook",
    "get_balance_profile",
    "load_checkpoint",
    "moe_layer_spec",
    "patch_forward_step",
    "patch_loss_func_v2_5",
    "patch_model_provider",
    "reset_gate_hook",
    "save_checkpoint",
    "with_experts",
]
