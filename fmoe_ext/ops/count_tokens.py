import torch

from fmoe_ext.ops import debug
from fmoe_ext.ops._autograd import register_fake


def count_tokens(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Count the choices of each expert, dropped ones (-1) left out.

    topk_idx [T, K] int64 or int32, entries in [-1, num_experts) -> tokens_per_expert [E] int64.
    Raises RuntimeError for an index outside that range (on CUDA it counts as dropped unless FMOE_DEBUG=1).
    Equivalent to: torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts). FastMoE: expert_count.

    Example:

        >>> count_tokens(torch.tensor([[2, 0], [1, 2], [0, -1]]), num_experts=3)
        tensor([2, 1, 2])
    """
    if debug.wanted(topk_idx):
        debug.check(torch.ops.fmoe_ext.count_tokens, topk_idx, num_experts)
    return torch.ops.fmoe_ext.count_tokens(topk_idx, num_experts)


def count_tokens_ref(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Compute count_tokens in plain PyTorch: its oracle."""
    return torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)


@register_fake("fmoe_ext::count_tokens", topk_idx=2)
def _(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    return topk_idx.new_empty((num_experts,), dtype=torch.int64)
