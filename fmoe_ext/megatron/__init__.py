"""What programs for Megatron-LM import: FastMoE's names, and moe_layer_spec for Megatron-core.

fmoefy(model) alone serves any version of Megatron; the other names are what FastMoE's patches of Megatron-LM v2.2 to
v3.0.2 use. Nothing here imports Megatron before it is called.
"""

from fmoe_ext.integrations.fmoefy import fmoefy
from fmoe_ext.integrations.megatron.arguments import add_fmoe_args
from fmoe_ext.integrations.megatron.balance import (
    add_balance_log,
    generate_megatron_gate_hook,
    get_balance_profile,
    reset_gate_hook,
)
from fmoe_ext.integrations.megatron.checkpoint import load_checkpoint, save_checkpoint
from fmoe_ext.integrations.megatron.core import moe_layer_spec, with_experts
from fmoe_ext.integrations.megatron.distributed import DistributedDataParallel
from fmoe_ext.integrations.megatron.mlp import MegatronMLP
from fmoe_ext.integrations.megatron.patch import (
    patch_forward_step,
    patch_loss_func_v2_5,
    patch_model_provider,
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
    "moe_layer_spec",
    "patch_forward_step",
    "patch_loss_func_v2_5",
    "patch_model_provider",
    "reset_gate_hook",
    "save_checkpoint",
    "with_experts",
]
