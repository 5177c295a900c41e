"""Hugging Face Transformers: its MoE experts on our operators, and what its trainers and files need from us.

use(model) computes the experts by our operators, expert_parallel(model) spreads them over ranks. from_pretrained()
loads what fmoefy made and save_pretrained saved. add_balance_loss() and balance_callback() serve trainers.
"""

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
