"""Hugging Face Transformers: experts on our operators, fmoefied models and their files, balance losses in trainers."""

from fmoe_ext.huggingface.experts import (
    balance_callback,
    expert_parallel,
    experts_forward,
    fused_activation,
    register,
    use,
)
from fmoe_ext.huggingface.saved import from_pretrained
from fmoe_ext.huggingface.training import add_balance_loss

__all__ = [
    "add_balance_loss",
    "balance_callback",
    "expert_parallel",
    "experts_forward",
    "from_pretrained",
    "fused_activation",
    "register",
    "use",
]
