"""The names of fmoe_ext.integrations.megatron.patch, where they were before."""

from fmoe_ext.integrations.megatron.patch import (
    VERSIONS,
    balance_loss,
    patch_forward_step,
    patch_loss_func_v2_5,
    patch_model_provider,
)

__all__ = ["VERSIONS", "balance_loss", "patch_forward_step", "patch_loss_func_v2_5", "patch_model_provider"]
