"""Bringing tokens to their experts and back, on one rank or many: dispatch(), combine(), each the other's backward."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fmoe_ext import ops
from fmoe_ext.ep.exchange import exchange_counts, find_group, global_exchange, register_group


@dataclass(frozen=True)
class DispatchHandle:
    """Where every choice went, as sort_tokens reports it: what reading rows and combine() need."""

    tokens_per_expert: torch.Tensor  # [E] int64
    offs: torch.Tensor  # [E] int32, cumulative ends
    row_idx: torch.Tensor  # [R] int32, choice t * K + k of each row; -1 past offs[-1]
    inverse: torch.Tensor  # [T, K] int32, row of each choice; -1 if dropped


@dataclass(frozen=True)
class ExchangedHandle(DispatchHandle):
    """The handle of rows that came from all ranks of a group: e local experts, R rows in order of arrival, K = 1."""

    sent: DispatchHandle  # of this rank's own choices, by all experts of the group
    group: str  # its name
    send_splits: tuple[int, ...]  # rows to each rank
    recv_splits: tuple[int, ...]  # rows from each rank


def map_structure(fn, *trees):
    """fn of corresponding tensors in equally shaped nests of lists, tuples and dicts."""
    first = trees[0]
    if isinstance(first, dict):
        return type(first)((key, map_structure(fn, *(tree[key] for tree in trees))) for key in first)
    if isinstance(first, (list, tuple)):
        mapped = [map_structure(fn, *parts) for parts in zip(*trees, strict=True)]
        return type(first)(*mapped) if hasattr(first, "_fields") else type(first)(mapped)
    return fn(*trees)


def sort_choices(topk_idx, num_experts):
    """The handle of a batch: topk_idx [T, K], -1 for dropped choices -> DispatchHandle. No data moves."""
    return DispatchHandle(*ops.sort_tokens(topk_idx, num_experts))


def dispatch(x, topk_idx, num_experts, group=None):
    """Copies every token to the rows of its experts, which may live on other ranks.

    x [T, *] or a nest (list, tuple, dict) of such tensors, topk_idx [T, K] -> (rows [R, *] in the same nest, sorted by
    expert, DispatchHandle). Without a group, R = T * K; rows at or past handle.offs[-1] belong to dropped choices and
    are zero. group: a process group or one-dimensional DeviceMesh of W ranks; rank r has the experts
    [r * e, (r + 1) * e) of num_experts = W * e, and the rows are those that came to this rank's e experts. All ranks
    call it; the split sizes are one copy to the host. Raises ValueError if num_experts is not a multiple of W.
    Equivalent to: x[torch.sort(topk_idx.flatten(), stable=True).indices // K] when nothing is dropped.
    """
    handle = sort_choices(topk_idx, num_experts)
    if group is not None:
        return _dispatch_to_group(x, handle, register_group(group))
    rows = map_structure(lambda leaf: per_row(ops.permute, leaf, handle.row_idx, handle.inverse), x)
    return rows, handle


def combine(y, handle, topk_weights=None):
    """Brings rows from their experts back to the tokens and sums them, weighted by topk_weights.

    y [R, *], or its first handle.offs[-1] rows, or a nest of such tensors; handle: from dispatch(), and with it the
    group; topk_weights [T, K] floating, None for ones -> [T, *] in the same nest, summed in float32 or wider; dropped
    choices add nothing.
    Equivalent to: (topk_weights[..., None] * y[handle.inverse]).sum(1) when nothing is dropped.
    """
    if isinstance(handle, ExchangedHandle):
        arrived = combine(y, _local(handle))
        splits = handle.recv_splits, handle.send_splits
        y = map_structure(lambda leaf: global_exchange(leaf, *splits, handle.group), arrived)
        handle = handle.sent
    num_rows = handle.row_idx.shape[0]

    def leaf(y):
        if y.shape[0] < num_rows:
            y = F.pad(y, (0, 0) * (y.dim() - 1) + (0, num_rows - y.shape[0]))
        return per_row(ops.unpermute, y, handle.row_idx, handle.inverse, widen(topk_weights, y.dtype))

    return map_structure(leaf, y)


def _dispatch_to_group(x, sent, group):
    num_experts, num_ranks = sent.tokens_per_expert.shape[0], dist.get_world_size(find_group(group))
    if num_experts % num_ranks:
        raise ValueError(
            f"num_experts={num_experts} cannot be spread evenly over the {num_ranks} ranks of group"
        )
    counts = sent.tokens_per_expert.view(num_ranks, -1)
    received = exchange_counts(counts, group)
    send_splits, recv_splits = torch.stack((counts.sum(1), received.sum(1))).tolist()
    expert = torch.arange(counts.shape[1], dtype=torch.int32, device=counts.device).repeat(num_ranks)
    expert = expert.repeat_interleave(received.flatten(), output_size=sum(recv_splits))
    handle = sort_choices(expert[:, None], counts.shape[1])

    def leaf(x):
        rows = per_row(ops.permute, x, sent.row_idx, sent.inverse)[: sum(send_splits)]
        arrived = global_exchange(rows, send_splits, recv_splits, group)
        return per_row(ops.permute, arrived, handle.row_idx, handle.inverse)

    rows = map_structure(leaf, x)
    return rows, ExchangedHandle(*_fields(handle), sent, group, tuple(send_splits), tuple(recv_splits))


def _local(handle):
    return DispatchHandle(*_fields(handle))


def _fields(handle):
    return handle.tokens_per_expert, handle.offs, handle.row_idx, handle.inverse


def widen(topk_weights, dtype):
    """topk_weights in the dtype in which rows of dtype are summed: float32, or float64 for float64."""
    return None if topk_weights is None else topk_weights.to(torch.promote_types(dtype, torch.float32))


def per_row(op, x, *args):
    """op, which takes and returns matrices, on x [N, *]."""
    out = op(x.reshape(x.shape[0], math.prod(x.shape[1:])), *args)
    return out.reshape(out.shape[0], *x.shape[1:])
