"""Names for programs with Megatron-core: moe_layer_spec and with_experts; fmoefy(model) serves any version of Megatron.

Megatron-LM v2.2 to v3.0.2, which FastMoE patches: fmoe_ext.compat.megatron. Nothing here imports Megatron before it is
called.
"""

from typing import NoReturn

from fmoe_ext.megatron.core import moe_layer_spec, with_experts
from fmoe_ext.models.fmoefy import fmoefy

__all__ = ["fmoefy", "moe_layer_spec", "with_experts"]

_IN_COMPAT = (
    *("DistributedDataParallel", "MegatronMLP", "add_balance_log", "add_fmoe_args", "get_balance_profile"),
    *("generate_megatron_gate_hook", "load_checkpoint", "patch_forward_step", "patch_loss_func_v2_5"),
    *("patch_model_provider", "reset_gate_hook", "save_checkpoint"),
)


def __getattr__(name: str) -> NoReturn:
    if name in _IN_COMPAT:  # no AttributeError: `from fmoe_ext.megatron import ...` would drop its text
        raise ImportError(f"fmoe_ext.megatron.{name} is fmoe_ext.compat.megatron.{name} now")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
