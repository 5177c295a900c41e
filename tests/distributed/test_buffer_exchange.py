"""A DeepEP V2 ElasticBuffer as the exchange of a layer: the calls of its interface, by a buffer over gloo."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from fmoe_ext import FMoETransformerMLP, ParallelLayout
from fmoe_ext.ep.buffer_exchange import use_buffer

D, H, E, K, T = 64, 32, 4, 2, 24


@dataclass
class Handle:
    """As EPHandle: what a later call takes from it, and how the rows of this one came."""

    num_experts: int
    num_max_tokens_per_rank: int
    topk_idx: torch.Tensor
    sent: list[torch.Tensor]  # tokens that each rank got from this one
    counts: list[int]  # rows that came from each rank


class FakeBuffer:
    """ElasticBuffer's dispatch() and combine() at commit 0297fc8: names, defaults, shapes, dtypes and asserts."""

    def __init__(
        self, group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, hidden=0, num_topk=0
    ):
        self.group, self.num_max_tokens_per_rank = group, num_max_tokens_per_rank
        self.rank_idx, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.calls = []

    def dispatch(
        self,
        x,
        topk_idx=None,
        topk_weights=None,
        cumulative_local_expert_recv_stats=None,
        num_experts=None,
        num_max_tokens_per_rank=None,
        expert_alignment=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        previous_event_before_epilogue=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
        handle=None,
        do_handle_copy=True,
        do_cpu_sync=None,
        do_expand=False,
        do_zero_padding=False,
        use_tma_aligned_col_major_sf=False,
    ):
        self.calls.append("dispatch" if handle is None else "dispatch by handle")
        assert x.dtype == torch.bfloat16 and x.dim() == 2 and x.is_contiguous()
        assert num_experts is not None and num_experts % self.num_ranks == 0  # get_theoretical_num_sms()
        if handle is None:
            assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous()
            assert topk_weights.dtype == torch.float32 and topk_weights.shape == topk_idx.shape
            most = num_max_tokens_per_rank or self.num_max_tokens_per_rank
            assert len(x) <= most and self._gather(most) == [most] * self.num_ranks
        else:
            assert topk_idx is None and topk_weights is None and num_experts == handle.num_experts
            topk_idx, most = handle.topk_idx, handle.num_max_tokens_per_rank
        num_local = num_experts // self.num_ranks
        owner = torch.where(topk_idx < 0, -1, topk_idx // num_local)
        sent = [(owner == rank).any(1).nonzero().flatten() for rank in range(self.num_ranks)]
        message = [
            (
                x[tokens],
                torch.where(owner == rank, topk_idx % num_local, -1)[tokens],
                None if topk_weights is None else (topk_weights * (owner == rank))[tokens],
            )
            for rank, tokens in enumerate(sent)
        ]
        rows, experts, weights = zip(*self._swap(message), strict=True)
        new = Handle(num_experts, most, topk_idx.clone(), sent, [len(part) for part in rows])
        recv_weights = None if topk_weights is None else torch.cat(weights)
        return torch.cat(rows), torch.cat(experts), recv_weights, handle or new, None

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        previous_event_before_epilogue=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
    ):
        self.calls.append("combine" if topk_weights is None else "combine with weights")
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and len(x) == sum(handle.counts)
        parts = x.split(handle.counts)
        weights = [None] * self.num_ranks
        if topk_weights is not None:
            assert topk_weights.dtype == torch.float32 and topk_weights.shape == (len(x), K)
            weights = topk_weights.split(handle.counts)
        num_tokens = len(handle.topk_idx)
        out = torch.zeros(num_tokens, x.shape[1])
        out_weights = None if topk_weights is None else torch.zeros(num_tokens, K)
        for tokens, (part, part_weights) in zip(
            handle.sent, self._swap(list(zip(parts, weights, strict=True))), strict=True
        ):
            out.index_add_(0, tokens, part.float())
            if out_weights is not None:
                out_weights.index_add_(0, tokens, part_weights)
        return out.bfloat16(), out_weights, None

    def _swap(self, message):
        return [theirs[self.rank_idx] for theirs in self._gather(message)]

    def _gather(self, value):
        values = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self.group)
        return values


def layer_of(exchange="choice", **layout):
    layout = ParallelLayout(moe_group=dist.group.WORLD, exchange=exchange, **layout)
    layer = FMoETransformerMLP(E // 2, D, H, top_k=K, activation="swiglu", parallel=layout).bfloat16()
    generator = torch.Generator().manual_seed(dist.get_rank())
    for p in layer.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator) * 0.2)
    dist.broadcast(layer.gate.gate.weight.data, 0)
    return layer


def buffer_for(most=T):
    return FakeBuffer(dist.group.WORLD, num_max_tokens_per_rank=most, hidden=D, num_topk=K)


def gradients(layer, x):
    x = x.requires_grad_()
    y = layer(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.experts.parameters()), layer.gate.gate.weight.grad]


def computes_as_by_token(num_tokens, moved):
    """Results and all gradients are those of exchange="token" to bfloat16's rounding, by these calls alone."""
    x = torch.randn(num_tokens, D, generator=torch.Generator().manual_seed(7 + dist.get_rank())).bfloat16()
    if dist.get_rank() == 1:
        x = x[: num_tokens // 3]  # another number of tokens
    expected, found, buffer = layer_of("token"), layer_of(), buffer_for()
    if moved:
        for layer in (expected, found):
            layer.place_experts([2, 0, 3, 1])
    use_buffer(found, buffer)
    for ours, theirs in zip(gradients(found, x.clone()), gradients(expected, x.clone()), strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        torch.testing.assert_close(
            ours, theirs, rtol=0.02, atol=0.02 * theirs.abs().max().item() if len(theirs) else 0
        )
    assert buffer.calls == ["dispatch", "combine", "dispatch by handle", "combine with weights"]
    assert found.expert_parallel.chosen_exchange == "buffer"


def refuses():
    buffer = buffer_for(most=4)
    for options, name in (
        ({"overlap_degree": 2}, "overlap_degree"),
        ({"max_rows_per_rank": 8}, "max_rows_per_rank"),
        ({"wire": "fp8"}, "wire"),
        ({"exchange": "token"}, "exchange"),
    ):
        with pytest.raises(ValueError, match=f"leave {name}= out"):
            use_buffer(layer_of(**options), buffer)
    layer = layer_of()
    use_buffer(layer, buffer)
    with pytest.raises(ValueError, match="5 tokens exceed num_max_tokens_per_rank=4"):
        layer(torch.zeros(5, D).bfloat16())
    with pytest.raises(TypeError, match=r"bfloat16 tokens \[T, D\], but got torch.float32 \[3, 64\]"):
        layer.float()(torch.zeros(3, D))
    layer.bfloat16()
    y = checkpoint(layer, torch.ones(2, D).bfloat16().requires_grad_(), use_reentrant=False)
    with pytest.raises(RuntimeError, match="activation checkpointing cannot repeat a layer"):
        y.sum().backward()


@pytest.mark.parametrize(("num_tokens", "moved"), [(T, False), (T, True), (2, False)])
def test_two_ranks(pool, num_tokens, moved):
    pool.run(computes_as_by_token, num_tokens, moved, world_size=2)


def test_refusals(pool):
    pool.run(refuses, world_size=2)
    with pytest.raises(ValueError, match="are on one rank: give it moe_group= first"):
        use_buffer(FMoETransformerMLP(2, D, H), None)
