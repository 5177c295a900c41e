"""fmoe.megatron.patch."""

from fmoe_ext.compat._core import core


def patch_loss_func_v2_5(loss_func):
    """A loss function of Megatron-LM v2.5 that adds the balance loss."""
    return _core("patch_loss_func_v2_5")(loss_func)


def patch_forward_step(forward_step_func, Megatron_Version="v2.2"):
    """A forward step of Megatron-LM that adds the balance loss."""
    return _core("patch_forward_step")(forward_step_func, Megatron_Version)


def patch_model_provider(model_provider, gate=None, Megatron_Version="v2.2"):
    """A model provider of Megatron-LM whose models have MoE layers."""
    return _core("patch_model_provider")(model_provider, gate, Megatron_Version)


def _core(name):
    return core("integrations.megatron", name, f"fmoe.megatron.patch.{name}")
