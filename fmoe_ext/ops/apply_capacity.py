"""apply_capacity, drop_choices: limit how many choices an expert takes; those over its capacity are dropped, as -1.

The queue of an expert has all first choices in the order of tokens, then all second ones, and so on: a token loses its
second expert before another loses its first. With a capacity of 2:

    topk_idx [[0, 1], [0, 1], [1, 0]]    expert 0: tokens 0, 1, then 2 as a second choice, which is dropped
                                         expert 1: token 2, then 0 and 1 as second choices: 1 is dropped

apply_capacity drops on one rank, with a capacity for each expert; over several ranks, that is what is left of it by the
ranks before (ep/ranks.py). drop_choices does the same in one pass with GShard's random routing and the counts that a
balance loss needs.
"""

import torch

from fmoe_ext.ops import debug
from fmoe_ext.ops._autograd import register_fake
from fmoe_ext.ops.sort_tokens import count_tokens, count_tokens_ref


def apply_capacity(topk_idx: torch.Tensor, num_experts: int, capacity: int | torch.Tensor) -> torch.Tensor:
    """Put -1 for every choice over its expert's capacity.

    Priority: all first choices in token order, then all second choices, and so on.
    topk_idx [T, K] int64 or int32, entries in [-1, num_experts); capacity: one number for all, or [E] int64
    -> [T, K] of the dtype of topk_idx. Raises RuntimeError for an index outside that range and a negative number in a
    tensor (on CUDA they count as dropped and as 0 unless FMOE_DEBUG=1), for a negative int, and for a tensor whose
    shape is neither [num_experts] nor [].
    Equivalent to: torch.where(rank < capacity[topk_idx], topk_idx, -1), rank a choice's place in its expert's queue.
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
    """Compute apply_capacity in plain PyTorch: its oracle."""
    by_choice = topk_idx.t().flatten().long()  # [K * T], the order of the queues
    chosen = torch.nn.functional.one_hot(by_choice + 1, num_experts + 1)[:, 1:]
    rank = ((chosen.cumsum(0) - 1) * chosen).sum(1)  # of each choice in its expert's queue
    limit = torch.as_tensor(capacity, device=topk_idx.device).expand(num_experts)[by_choice]
    kept = torch.where(rank < limit, by_choice, -1)
    return kept.view(topk_idx.t().shape).t().to(topk_idx.dtype)


def drop_choices(
    topk_idx: torch.Tensor,
    num_experts: int,
    capacity: int,
    topk_weights: torch.Tensor | None = None,
    uniform: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply a capacity and GShard's random routing, and count choices for a balance loss, in one pass on the CPU.

    topk_idx [T, K]; capacity: choices that each expert takes; topk_weights [T, K] with uniform [T], numbers of [0, 1):
    a choice after the first, of weight w, is dropped too where 2 w < uniform, and keeps its place in the capacity
    -> topk_idx with -1 for dropped choices, counts [K, E] int64 of first, second, ... choices before any was dropped.
    Raises RuntimeError for an index outside [-1, num_experts), a negative capacity and for other shapes.
    Equivalent to: apply_capacity(topk_idx, num_experts, capacity), and count_tokens of each column of topk_idx.
    """
    if not (
        getattr(topk_idx, "is_cuda", False)
        or (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting())
    ):
        return torch.ops.fmoe_ext.drop_choices(topk_idx, num_experts, capacity, topk_weights, uniform)
    if (topk_weights is None) != (uniform is None):
        raise RuntimeError("topk_weights and uniform must both be given, or none of them")
    kept = apply_capacity(topk_idx, num_experts, capacity)
    if topk_weights is not None and uniform is not None:
        # Refuse what the operator refuses on the CPU. torch would broadcast, or name its own operands in the error.
        if topk_weights.dtype not in (torch.float32, torch.float64):
            raise RuntimeError(f"topk_weights must be float32 or float64, but got {topk_weights.dtype}")
        if uniform.dtype != topk_weights.dtype:
            raise RuntimeError(
                f"uniform must have the dtype of topk_weights ({topk_weights.dtype}), but got {uniform.dtype}"
            )
        for name, given, shape in (
            ("topk_weights", topk_weights, topk_idx.shape),
            ("uniform", uniform, topk_idx.shape[:1]),
        ):
            if given.shape != shape:
                raise RuntimeError(f"{name} must have shape {list(shape)}, but got shape {list(given.shape)}")
            if given.device != topk_idx.device:
                raise RuntimeError(
                    f"{name} must be on {topk_idx.device} like topk_idx, but it is on {given.device}"
                )
        kept[:, 1:].masked_fill_(2 * topk_weights[:, 1:] < uniform[:, None], -1)
    # with `none`, so that K = 0 gives counts [0, E]
    none = topk_idx.new_empty((0, num_experts), dtype=torch.int64)
    of_choices = [count_tokens(choice, num_experts)[None] for choice in topk_idx.split(1, 1)]
    return kept, torch.cat((none, *of_choices))


def drop_choices_ref(
    topk_idx: torch.Tensor,
    num_experts: int,
    capacity: int,
    topk_weights: torch.Tensor | None = None,
    uniform: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute drop_choices in plain PyTorch: its oracle."""
    kept = apply_capacity_ref(topk_idx, num_experts, capacity)
    if topk_weights is not None and uniform is not None:
        goes = 2 * topk_weights < uniform[:, None]
        goes[:, :1] = False  # a first choice always stays
        kept = torch.where(goes, -1, kept)
    none = topk_idx.new_empty((0, num_experts), dtype=torch.int64)
    return kept, torch.cat((none, *(count_tokens_ref(choice, num_experts)[None] for choice in topk_idx.t())))


@register_fake("fmoe_ext::drop_choices", topk_idx=2, topk_weights=2, uniform=1)
def _(
    topk_idx: torch.Tensor,
    num_experts: int,
    capacity: int,
    topk_weights: torch.Tensor | None,
    uniform: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    counts = topk_idx.new_empty((topk_idx.shape[1], num_experts), dtype=torch.int64)
    return topk_idx.new_empty(topk_idx.shape), counts


@register_fake("fmoe_ext::apply_capacity", topk_idx=2, capacity=1)
def _(topk_idx: torch.Tensor, capacity: torch.Tensor) -> torch.Tensor:
    return topk_idx.new_empty(topk_idx.shape)
