"""Exchange tokens by DeepEP V2: its ElasticBuffer carries them to the ranks of their experts and back (use_buffer).

dispatch() sends a token once to each rank that has an expert of it, with the choices that are there, as
exchange="token" does; combine() brings a row back for each, and sums them. The backward of each is the other: gradients
of results go out by the forward's handle, gradients of rows and of weights come back by combine(). The handle takes the
place of our Plan, so no counts travel and nothing is sorted here.

The calls are those of deepseek-ai/DeepEP at commit 0297fc8, tried with a buffer of that interface over gloo
(tests/distributed/test_buffer_exchange.py). It has not run with DeepEP itself, which needs Hopper GPUs on NVLink.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from fmoe_ext.ep.expert_parallel import ExpertParallel
from fmoe_ext.ep.placement import constant, lookup
from fmoe_ext.ep.schedule import Exchange
from fmoe_ext.routing import ExpertInput
from fmoe_ext.tokens import Nest, map_structure


def use_buffer(layer: Any, buffer: Any) -> None:
    """Send the tokens of an FMoE layer, bfloat16 [T, D], through a DeepEP V2 ElasticBuffer of its moe_group.

    All ranks call it, with buffers made with the same num_max_tokens_per_rank >= T, with hidden=D and num_topk=K, and
    with deterministic=True if runs are to have the same bits. Results equal those of exchange="token" but for rounding.
    Raises ValueError for a layer on one rank, or with overlap_degree, max_rows_per_rank, wire or exchange set.

    Example:

        buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=4096, hidden=2048, num_topk=8, deterministic=True)
        use_buffer(layer, buffer)
    """
    parallel: ExpertParallel | None = layer.expert_parallel
    if parallel is None:
        raise ValueError(f"the experts of {type(layer).__name__} are on one rank: give it moe_group= first")
    set_otherwise = {
        "overlap_degree": parallel.overlap_degree != 1,
        "max_rows_per_rank": parallel.row_limit is not None,
        "wire": parallel.wire != "full",
        "exchange": parallel.exchange != "choice",
    }
    for name, is_set in set_otherwise.items():
        if is_set:
            raise ValueError(f"a DeepEP buffer carries all tokens in one dispatch: leave {name}= out")
    parallel.carry_by("buffer", functools.partial(_BufferExchange, buffer))


class _BufferExchange(Exchange):
    """An Exchange whose rows a DeepEP V2 ElasticBuffer carries. R: rows that come, one for each token and rank."""

    def __init__(self, buffer: Any, *arguments: Any):
        super().__init__(*arguments)
        self._buffer = buffer

    def plan(self) -> None:
        x, most = self._x, self._buffer.num_max_tokens_per_rank
        if not isinstance(x, torch.Tensor) or x.dim() != 2 or x.dtype != torch.bfloat16:
            got = f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
            raise TypeError(f"a DeepEP buffer carries bfloat16 tokens [T, D], but got {got}")
        if len(x) > most:
            raise ValueError(f"{len(x)} tokens exceed num_max_tokens_per_rank={most} of the DeepEP buffer")
        if self._step.is_traced:
            raise RuntimeError("torch.compile cannot trace a DeepEP buffer: leave the layer out of the graph")
        # The handle is no tensor that Forward.messages could keep, and rows are not saved.
        if self._step.is_repeated:
            raise RuntimeError(
                "activation checkpointing cannot repeat a layer whose tokens a DeepEP buffer carries: checkpoint "
                "its experts, or the blocks around it"
            )

    def send(self) -> None:
        placement = self._placement
        # DeepEP takes the experts of a rank for neighbours: it gets places, not numbers
        place = constant(
            tuple(map(placement.experts_in_place.index, range(placement.num_experts))), self._topk_idx.device
        )
        self._transit = _Transit(self._buffer, lookup(place, self._topk_idx).long(), placement.num_experts)
        weights = self._topk_weights.float()
        self._received = _Dispatch.apply(self._transit, self._x.contiguous(), weights.contiguous())

    def receive(self, number: int) -> ExpertInput:
        rows, expert, weights = self._received
        return ExpertInput(rows, expert.to(torch.int32), weights, 0, self._placement.num_local_experts)

    def give_back(self, number: int, results: Nest) -> None:
        self._structure = map_structure(lambda _: None, results)  # one tensor [R, D]
        self._returned = _Combine.apply(self._transit, results)

    def _collect(self) -> tuple[torch.Tensor, ...]:
        return (self._returned,)


class _Transit:
    """The buffer, the places of a forward's choices [T, K], and the handle by which its rows come back."""

    def __init__(self, buffer: Any, places: torch.Tensor, num_experts: int):
        self.buffer, self.places, self.num_experts = buffer, places, num_experts
        self.handle: Any = None


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, transit: _Transit, x: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.transit = transit
        # without async_with_compute_stream the current stream has waited when the call returns
        rows, expert, row_weights, transit.handle, _ = transit.buffer.dispatch(
            x, topk_idx=transit.places, topk_weights=weights, num_experts=transit.num_experts
        )
        ctx.mark_non_differentiable(expert)
        return rows, expert, row_weights

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        transit, (grad_rows, _, grad_weights) = ctx.transit, grads
        dx, dweights, _ = transit.buffer.combine(
            grad_rows.contiguous(), transit.handle, topk_weights=grad_weights.contiguous()
        )
        return None, dx, dweights


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transit: _Transit, results: torch.Tensor) -> torch.Tensor:
        ctx.transit = transit
        summed: torch.Tensor
        summed, _, _ = transit.buffer.combine(results.contiguous(), transit.handle)
        return summed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        transit = ctx.transit
        # num_experts again: dispatch() counts its SMs by it before it looks into the handle
        rows, *_ = transit.buffer.dispatch(
            grads[0].contiguous(), handle=transit.handle, num_experts=transit.num_experts
        )
        return None, rows
