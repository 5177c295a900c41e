import torch

from fmoe_ext.ops import debug
from fmoe_ext.ops._autograd import register_fake


def apply_capacity(topk_idx: torch.Tensor, num_experts: int, capacity: int | torch.Tensor) -> torch.Tensor:
    """topk_idx with -1 for every choice over its expert's capacity.

    Priority: all first choices in token order, then all second choices, and so on.
    topk_idx [T, K] int64 or int32, entries in [-1, num_experts); capacity: one number for all, or [E] int64
    -> [T, K] of the dtype of topk_idx. Raises RuntimeError for an index outside that range (on CUDA it counts
    as dropped unless FMOE_DEBUG=1), for a negative capacity and for one whose shape is not [num_experts].
    Equivalent to: torch.where(rank < capacity[topk_idx], topk_idx, -1), rank counting an expert's choices.
    FastMoE: limit_by_capacity, prune_gate_by_capacity.

    Example:

        >>> topk_idx = torch.tensor([[0, 1], [0, 1], [0, 2]])
        >>> apply_capacity(topk_idx, num_experts=3, capacity=2)
        tensor([[ 0,  1],
                [ 0,  1],
                [-1,  2]])
    """
    if num_experts < 1:
        raise RuntimeError(f"num_experts must be at least 1, but got {num_experts}")
    if not isinstance(capacity, torch.Tensor):
        if capacity is None or isinstance(capacity, float):
            raise RuntimeError(f"capacity must be an int or an int64 tensor [E], but got {capacity}")
        if capacity < 0:
            raise RuntimeError(f"capacity must not be negative, but got {capacity}")
        capacity = torch.full((num_experts,), capacity, dtype=torch.int64, device=topk_idx.device)
    elif capacity.dim() == 0:
        capacity = capacity.to(topk_idx.device).expand(num_experts).contiguous()
    elif capacity.shape != (num_experts,):
        raise RuntimeError(
            f"capacity must have shape [num_experts] = [{num_experts}], but got shape {list(capacity.shape)}"
        )
    if debug.wanted(topk_idx):
        debug.check(torch.ops.fmoe_ext.apply_capacity, topk_idx, capacity)
    return torch.ops.fmoe_ext.apply_capacity(topk_idx, capacity)


def apply_capacity_ref(
    topk_idx: torch.Tensor, num_experts: int, capacity: int | torch.Tensor
) -> torch.Tensor:
    """The oracle of apply_capacity: the same in plain PyTorch."""
    by_choice = topk_idx.t().flatten().long()
    chosen = torch.nn.functional.one_hot(by_choice + 1, num_experts + 1)[:, 1:]
    rank = ((chosen.cumsum(0) - 1) * chosen).sum(1)
    limit = torch.as_tensor(capacity, device=topk_idx.device).expand(num_experts)[by_choice]
    kept = torch.where(rank < limit, by_choice, -1)
    return kept.view(topk_idx.t().shape).t().to(topk_idx.dtype)


@register_fake("fmoe_ext::apply_capacity", topk_idx=2, capacity=1)
def _(topk_idx: torch.Tensor, capacity: torch.Tensor) -> torch.Tensor:
    return topk_idx.new_empty(topk_idx.shape)
