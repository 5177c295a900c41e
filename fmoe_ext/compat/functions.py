"""fmoe.functions: count, scatter and gather rows as autograd functions.

FastMoE's programs write a layer's forward in three steps, each the other's mirror in the backward:

    prepare_forward   choices [T, K] -> pos, the choices sorted by expert, and counts
    MOEScatter        rows inp[pos // K], a token for each choice, in the order (rank, expert), exchanged -> the rows of
                      the experts here, in the order (expert, rank)
    MOEGather         the experts' results back to the ranks that sent the rows, and to the places pos of [T * K, *]

Counts are indexed [rank * num_expert + expert]: lec (local_expert_count) is what this rank sends to each expert, gec
(global_expert_count) what each rank sends to the experts here. Rows of one expert keep the order of their tokens.
"""

from typing import Any

import torch
from torch.autograd import Function

from fmoe_ext import ops
from fmoe_ext.compat import _ranks
from fmoe_ext.ep.process_groups import Group


def ensure_comm(t: torch.Tensor, comm: Group) -> None:
    """Make comm (None: the default group) the group of the functions in this module; t is ignored."""
    _ranks.set_group(comm)


def get_moe_group() -> Group:
    """Return the group of the last ensure_comm()."""
    return _ranks.get_group()


# FastMoE's private variable, which programs read
def __getattr__(name: str) -> Any:
    if name == "_moe_group":
        return _ranks.get_group()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def count_by_gate(
    gate: torch.Tensor, num_expert: int, world_size: int, require_pos: bool = True
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Count the choices of each expert: gate [T, K] or [T], -1 for dropped -> (pos, lec, gec).

    Counts are int64 [num_expert * world_size] on the device of gate: what this rank sends to each expert, and what
    each rank sends to the experts here. pos: flat choices ordered by expert, None without require_pos.
    """
    choices = gate.reshape(-1, 1)  # each choice is a row of its own
    num_experts = num_expert * world_size
    if not require_pos:
        local_expert_count = ops.count_tokens(choices, num_experts)
        return None, local_expert_count, _ranks.exchange_counts(local_expert_count, world_size)
    local_expert_count, offs, row_idx, _ = ops.sort_tokens(choices, num_experts)
    pos = row_idx[: int(offs[-1])].long()  # the last end: dropped choices come after it
    return pos, local_expert_count, _ranks.exchange_counts(local_expert_count, world_size)


def prepare_forward(
    gate: torch.Tensor, num_expert: int, world_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Do count_by_gate() -> (pos, lec, gec, rows of each expert here, rows of all of them); counts are on the CPU."""
    pos, local_expert_count, global_expert_count = count_by_gate(gate, num_expert, world_size)
    assert pos is not None
    # on the CPU, for the exchange must know its sizes; this waits for the device
    global_expert_count = _ranks.to_host(global_expert_count, world_size, _ranks.get_group())
    fwd_expert_count = global_expert_count.view(world_size, num_expert).sum(0)
    return (
        pos,
        local_expert_count.cpu(),
        global_expert_count,
        fwd_expert_count,
        int(fwd_expert_count.sum()),
    )


def _local_scatter(inp: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    return inp.index_select(0, pos)


def _local_gather(
    inp: torch.Tensor, pos: torch.Tensor, out_batch_size: int, maybe_overlap: bool = True
) -> torch.Tensor:
    """Put the rows of inp at pos of out_batch_size rows of zeros. maybe_overlap: add rows that share a place."""
    # MOEGather's forward: each choice has a place of its own. MOEScatter's backward: the choices of a token share one.
    out = inp.new_zeros((out_batch_size, *inp.shape[1:]))
    return out.index_add_(0, pos, inp) if maybe_overlap else out.index_copy_(0, pos, inp)


class MOEScatter(Function):
    """Copy rows inp[pos] and send them to their experts; pos here are tokens, prepare_forward's pos // K."""

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        pos: torch.Tensor,
        local_expert_count: torch.Tensor,
        global_expert_count: torch.Tensor,
        fwd_batch_size: int,
        world_size: int,
    ) -> torch.Tensor:
        ctx.num_rows = inp.shape[0]
        ctx.exchange = local_expert_count, global_expert_count, world_size, _ranks.get_group()
        ctx.save_for_backward(pos)
        return _ranks.to_experts(_local_scatter(inp, pos), *ctx.exchange)

    @staticmethod
    def backward(ctx: Any, global_grad_in: torch.Tensor) -> tuple[Any, ...]:
        (pos,) = ctx.saved_tensors
        # the way back of the rows; a token that was copied gets the sum of its copies' gradients
        grad = _ranks.from_experts(global_grad_in, *ctx.exchange)
        return _local_gather(grad, pos, ctx.num_rows), None, None, None, None, None


class MOEGather(Function):
    """Bring rows back from their experts and put them at pos of local_batch_size rows of zeros."""

    @staticmethod
    def forward(
        ctx: Any,
        global_output_buf: torch.Tensor,
        pos: torch.Tensor,
        local_expert_count: torch.Tensor,
        global_expert_count: torch.Tensor,
        local_batch_size: int,
        world_size: int,
    ) -> torch.Tensor:
        ctx.exchange = local_expert_count, global_expert_count, world_size, _ranks.get_group()
        ctx.save_for_backward(pos)
        rows = _ranks.from_experts(global_output_buf, *ctx.exchange)
        return _local_gather(rows, pos, local_batch_size, maybe_overlap=False)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        (pos,) = ctx.saved_tensors
        grad = _ranks.to_experts(_local_scatter(grad_out.contiguous(), pos), *ctx.exchange)
        return grad, None, None, None, None, None


class AllGather(Function):
    """Join the inputs of all ranks of a group, one after the other; the gradient is this rank's part of it."""

    @staticmethod
    def forward(ctx: Any, inp: torch.Tensor, rank: int, world_size: int, group: Group) -> torch.Tensor:
        parts = _ranks.all_gather(inp, world_size, group)
        begin = sum(part.shape[0] for part in parts[:rank])  # ranks may have different numbers of rows
        ctx.rows = begin, begin + inp.shape[0]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        begin, end = ctx.rows
        return grad_out[begin:end], None, None, None


class Slice(Function):
    """Take this rank's rows of an input [B, *] that all ranks of a group have; the gradient is joined from all of them.

    The first B % world_size ranks have one row more than the others.
    """

    @staticmethod
    def forward(ctx: Any, inp: torch.Tensor, rank: int, world_size: int, group: Group) -> torch.Tensor:
        ctx.group = world_size, group
        return inp.tensor_split(world_size)[rank].clone()

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        return torch.cat(_ranks.all_gather(grad_out, *ctx.group)), None, None, None
