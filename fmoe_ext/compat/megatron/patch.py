"""fmoe.megatron.patch."""

from fmoe_ext.megatron.patch import patch_forward_step, patch_loss_func_v2_5, patch_model_provider

__all__ = ["patch_forward_step", "patch_loss_func_v2_5", "patch_model_provider"]
