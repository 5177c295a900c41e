"""Experts on several ranks: tokens travel to their experts and back while other experts compute.

The local experts are cut into chunks. The exchange of the next chunk runs while one computes, in the forward and in the
backward, there and back. An expert's rows stay together, so its sums are the same for any number of chunks.
"""

import functools
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fmoe_ext import ops
from fmoe_ext.dispatch import map_structure, per_row, sort_choices, widen
from fmoe_ext.ep.exchange import (
    check_same,
    exchange_counts,
    find_group,
    next_layer_index,
    register_group,
    start_exchange,
    wait,
)
from fmoe_ext.ep.static import Bound, experts_of_rows, pad_routing
from fmoe_ext.ep.tuning import OverlapTuner

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_HEADER = ("the layer", "the dtype of the tokens", "the elements of a token")


@dataclass(frozen=True)
class Chunk:
    """Rows that travel together: those of the local experts [first_expert, end_expert) of every rank."""

    first_expert: int
    end_expert: int
    begin: int  # first row on the side of the tokens
    send_splits: list[int]  # rows to each rank
    recv_splits: list[int]  # rows from each rank
    topk_idx: (
        torch.Tensor
    )  # [sum(recv_splits), 1] int32: the expert of each received row, counted from first_expert

    @property
    def rows(self):
        return slice(self.begin, self.begin + sum(self.send_splits))


class ExpertParallel:
    """Where the experts of one layer live, and how tokens get there and back.

    Rank r of the group holds the experts [r * e, (r + 1) * e) of E = group size * e, unless they are placed otherwise.
    overlap_degree: number of chunks, at most e; "auto" measures the first forwards and then chooses.
    max_rows_per_rank: static mode, every rank sends every other this many rows, padding included.
    Plain data, so that layers can be copied and pickled; the group is found by its name.
    """

    def __init__(self, group, num_local_experts, overlap_degree=1, max_rows_per_rank=None):
        self.group = register_group(group)
        self.size = dist.get_world_size(find_group(self.group))
        self.rank = dist.get_rank(find_group(self.group))
        self.num_local_experts = num_local_experts
        self.num_experts = num_local_experts * self.size
        self.layer_index = next_layer_index(self.group)
        self.experts_in_place = list(range(self.num_experts))  # rank r holds the r-th part
        self.shadows = ()  # experts that are computed where their tokens are
        self._load = None
        self._is_checked = False
        self.overlap_degree = overlap_degree
        self.chunk_ends, self._tuner = [num_local_experts], None
        if overlap_degree == "auto":
            self._tuner = OverlapTuner(self.group, self.layer_index)
        elif isinstance(overlap_degree, str) or overlap_degree < 1:
            raise ValueError(f'overlap_degree must be at least 1, or "auto", but got {overlap_degree!r}')
        else:
            self.chunk_ends = _even_ends(num_local_experts, min(overlap_degree, num_local_experts))
        self.bound = None
        if max_rows_per_rank is not None:
            if max_rows_per_rank < 1 or overlap_degree != 1:
                raise ValueError(
                    "max_rows_per_rank must be at least 1 and needs overlap_degree=1, but got "
                    f"max_rows_per_rank={max_rows_per_rank}, overlap_degree={overlap_degree!r}"
                )
            ranks = dist.get_process_group_ranks(find_group(self.group))
            self.bound = Bound(max_rows_per_rank, self.layer_index, ranks)

    def choose_overlap(self, max_chunks):
        """Ends the measurements of overlap_degree="auto" once there are enough; all ranks call it before a forward."""
        if self._tuner is not None and self._tuner.is_due:
            num_chunks = self._tuner.choose(min(max_chunks, self.num_local_experts))
            self.chunk_ends, self._tuner = _even_ends(self.num_local_experts, num_chunks), None

    def __call__(self, x, topk_idx, topk_weights, compute, compute_shadows=None):
        """x [T, *] or a nest, topk_idx [T, K], topk_weights [T, K] -> the experts' results for x, summed by weight.

        compute(rows [N, *], topk_idx [N, 1], topk_weights [N, 1], first_expert, end_expert) -> [N, *] is called
        for each chunk with the rows that reached this rank and their experts, counted from first_expert. It weighs
        its results, so that they need not be kept here for the gradient of topk_weights. While the first rows are under
        way, compute_shadows(x, topk_idx [T, K], topk_weights, places) computes the choices of shadowed experts.
        """
        leaves = []
        map_structure(leaves.append, x)
        device = topk_idx.device
        lap = self._begin_laps(device)
        weights = widen(topk_weights, leaves[0].dtype).reshape(-1, 1)
        self._count(topk_idx)
        shadow_idx = None
        if self.shadows:
            topk_idx, shadow_idx = self._split_shadows(topk_idx)
        slots = self._slots()
        handle = sort_choices(_lookup(_constant(slots, device), topk_idx), self.num_experts)
        places = _constant(tuple(slots[expert] for expert in self.experts_in_place), device)
        counts = handle.tokens_per_expert[places].view(self.size, self.num_local_experts)
        row_idx, inverse = handle.row_idx, handle.inverse
        lap("sort")
        if self.bound is None:
            message = _HostCopy(self._exchange_counts(counts, leaves))
        else:
            row_idx, inverse, needed = pad_routing(handle, self.size, self.bound.max_rows)
            received, lost = self._exchange_bounded_counts(counts, leaves, needed)
            if lost is not None:
                weights = weights * torch.where(lost, torch.nan, 1.0)  # gradients become NaN too
        lap("counts")
        rows = [per_row(ops.permute, leaf, row_idx, inverse) for leaf in leaves]
        rows.append(ops.permute(weights, row_idx, inverse.reshape(-1, 1)))
        chunks = [self._static_chunk(received)] if self.bound else self._chunks(message.get(), device)
        step = _Step(self.group, chunks)
        lap("permute")

        tokens = _Send.apply(step, *rows)
        if self.shadows:
            places = [self.experts_in_place.index(expert) for expert in self.shadows]
            shadowed = compute_shadows(x, shadow_idx, topk_weights, places)
        back, structure = [], None
        for number, chunk in enumerate(step.chunks):
            *received, received_weights = _Receive.apply(step, number, tokens[number])
            lap("exchange")
            source = iter(received)
            received = map_structure(lambda _, source=source: next(source), x)
            y = compute(received, chunk.topk_idx, received_weights, chunk.first_expert, chunk.end_expert)
            structure, results = y, []
            map_structure(results.append, y)
            lap("compute")
            back.append(_Return.apply(step, number, *results))
        out = iter(_Collect.apply(step, *back))
        lap("exchange")
        out = map_structure(lambda _: per_row(ops.unpermute, next(out), row_idx, inverse, None), structure)
        return map_structure(torch.add, out, shadowed) if self.shadows else out

    def pop_load(self, everywhere=False):
        """Choices of each expert by all ranks of the group (or of the job) since the last call; collective."""
        load = torch.zeros(self.num_experts, dtype=torch.int64)
        if self._load is not None:
            load = self._load.clone()
            self._load.zero_()
        group = dist.group.WORLD if everywhere else find_group(self.group)
        load = load.to("cuda" if dist.get_backend(group) == "nccl" else "cpu")
        dist.all_reduce(load, group=group)
        return load.tolist()

    def _count(self, topk_idx):
        if self._load is None or self._load.device != topk_idx.device:
            self._load = torch.zeros(self.num_experts, dtype=torch.int64, device=topk_idx.device)
        self._load += ops.count_tokens(topk_idx, self.num_experts)  # in place: a CUDA graph repeats it

    def _begin_laps(self, device):
        """A function that says which part of the step ends now, while overlap_degree="auto" measures."""
        if self._tuner is None:
            return lambda part: None
        self._tuner.begin_step(device)
        return functools.partial(self._tuner.lap, device=device)

    def _split_shadows(self, topk_idx):
        """Choices of other experts, and choices of shadowed ones numbered as in shadows; -1 for the rest."""
        number = [-1] * self.num_experts
        for position, expert in enumerate(self.shadows):
            number[expert] = position
        shadow_idx = _lookup(_constant(tuple(number), topk_idx.device), topk_idx)
        return torch.where(shadow_idx < 0, topk_idx, -1), shadow_idx

    def _slots(self):
        """The rank of each expert in the order of sending: by chunk, then by rank, then by place."""
        first, order = 0, []
        for end in self.chunk_ends:
            for rank in range(self.size):
                begin = rank * self.num_local_experts
                order += self.experts_in_place[begin + first : begin + end]
            first = end
        slots = [0] * self.num_experts
        for slot, expert in enumerate(order):
            slots[expert] = slot
        return tuple(slots)

    def _exchange_counts(self, counts, leaves):
        """[2, ranks, header and counts]: what was sent to each rank and what came from it."""
        header = self._header(leaves, counts.device)
        sent = torch.cat((header.expand(self.size, -1), counts), 1)
        return torch.stack((sent, exchange_counts(sent, self.group)))

    def _exchange_bounded_counts(self, counts, leaves, needed):
        """Received counts [ranks, e], and whether all is lost because a rank has more rows than are sent."""
        header = self._header(leaves, counts.device)
        most = needed.max().expand(self.size, 1)
        received = exchange_counts(torch.cat((header.expand(self.size, -1), most, counts), 1), self.group)
        headers, most, counts = received.split([len(_HEADER), 1, self.num_local_experts], 1)
        if not self.bound.is_read_now(received):
            return counts, self.bound.note(most.flatten(), headers)
        self._check_headers(headers.tolist())
        self.bound.raise_for(most.flatten().tolist())
        return counts, None

    def _header(self, leaves, device):
        if not self._is_checked:
            check_same(
                "(layer, num_experts, experts of a rank, overlap_degree, max_rows_per_rank)",
                (
                    *(self.layer_index, self.num_experts, self.num_local_experts, self.overlap_degree),
                    self.bound and self.bound.max_rows,
                ),
                find_group(self.group),
            )
            self._is_checked = True
        width = sum(math.prod(leaf.shape[1:]) for leaf in leaves)
        return _constant((self.layer_index, _code(leaves[0].dtype), width), device)

    def _static_chunk(self, counts):
        splits = [self.bound.max_rows] * self.size
        topk_idx = experts_of_rows(counts, self.bound.max_rows)
        return Chunk(0, self.num_local_experts, 0, splits, splits, topk_idx)

    def _chunks(self, message, device):
        self._check_headers(message[1][:, : len(_HEADER)].tolist())
        sent, received = message[:, :, len(_HEADER) :]
        first, begin, chunks = 0, 0, []
        for end in self.chunk_ends:
            mine = received[:, first:end]
            expert = torch.arange(end - first, dtype=torch.int32, device=device).repeat(self.size)
            chunks.append(
                Chunk(
                    first,
                    end,
                    begin,
                    sent[:, first:end].sum(1).tolist(),
                    mine.sum(1).tolist(),
                    expert.repeat_interleave(
                        mine.flatten().to(device, non_blocking=True), output_size=int(mine.sum())
                    ).unsqueeze(1),
                )
            )
            begin += sum(chunks[-1].send_splits)
            first = end
        return chunks

    def _check_headers(self, headers):
        """Every rank sees every other's header, so that every rank reports a difference."""
        if all(header == headers[0] for header in headers):
            return
        ranks = dist.get_process_group_ranks(find_group(self.group))
        texts = []
        for name, values in zip(_HEADER, zip(*headers, strict=True), strict=True):
            if len(set(values)) > 1:
                shown = [_DTYPES[v] if "dtype" in name else v for v in values]
                texts.append(
                    f"{name} ({', '.join(f'rank {r}: {v}' for r, v in zip(ranks, shown, strict=True))})"
                )
        raise RuntimeError(
            f"ranks {ranks} do not exchange the same tokens; they differ in {'; '.join(texts)}"
        )


class _Step:
    """One pass through a layer: its chunks, and what is under way in either direction."""

    def __init__(self, group, chunks):
        self.group = group
        self.chunks = chunks
        self.under_way = [None] * len(
            chunks
        )  # of each chunk: works, buffers that are filled, buffers that are read
        self.returned = None  # results on the side of the tokens, [R, *] each
        self.returned_grads = None  # gradients there

    def to_experts(self, number, rows):
        """Starts the exchange of a chunk's part of rows [R, *]."""
        chunk = self.chunks[number]
        sources = [x[chunk.rows] for x in rows]
        targets = [x.new_empty((sum(chunk.recv_splits), *x.shape[1:])) for x in rows]
        self._start(number, targets, sources, chunk.send_splits, chunk.recv_splits)

    def to_tokens(self, number, results, returned):
        """Starts the exchange of a chunk's results into its part of returned [R, *]."""
        chunk = self.chunks[number]
        targets = [x[chunk.rows] for x in returned]
        self._start(number, targets, [x.contiguous() for x in results], chunk.recv_splits, chunk.send_splits)

    def _start(self, number, targets, sources, send_splits, recv_splits):
        works = [
            start_exchange(target, source, send_splits, recv_splits, self.group)
            for target, source in zip(targets, sources, strict=True)
        ]
        self.under_way[number] = works, targets, sources

    def finish(self, number):
        works, targets, _ = self.under_way[number]
        for work in works:
            wait(work, self.group)
        self.under_way[number] = None
        return tuple(targets)

    def new_returned(self, num_rows, like):
        """Buffers [num_rows, *] for what comes back; rows of dropped choices, at the end, are zero."""
        returned = [x.new_empty((num_rows, *x.shape[1:])) for x in like]
        for x in returned:
            x[self.chunks[-1].rows.stop :] = 0
        return returned


# The four halves of the exchanges there and back. Between them a scalar stands for the rows that are under way: nobody
# can read what has not come, and autograd knows the order.


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx, step, *rows):
        ctx.step = step
        step.num_rows = rows[0].shape[0]
        for number in range(len(step.chunks)):
            step.to_experts(number, rows)
        return tuple(rows[-1].new_zeros(()) for _ in step.chunks)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *_):
        step = ctx.step
        for number in range(len(step.chunks)):
            step.finish(number)
        grads, step.returned_grads = step.returned_grads, None
        return None, *grads


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, step, number, token):
        ctx.step, ctx.number = step, number
        received = step.finish(number)
        ctx.mark_non_differentiable(*(x for x in received if not x.is_floating_point()))
        return received

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        step = ctx.step
        if step.returned_grads is None:
            step.returned_grads = step.new_returned(step.num_rows, grads)
        step.to_tokens(ctx.number, grads, step.returned_grads)
        return None, None, grads[-1].new_zeros(())


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx, step, number, *results):
        ctx.step, ctx.number = step, number
        if step.returned is None:
            step.returned = step.new_returned(step.num_rows, results)
        step.to_tokens(number, results, step.returned)
        return results[0].new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, _):
        return None, None, *ctx.step.finish(ctx.number)


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, step, *tokens):
        ctx.step = step
        for number in range(len(step.chunks)):
            step.finish(number)
        returned, step.returned = step.returned, None
        return tuple(returned)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        step = ctx.step
        for number in reversed(range(len(step.chunks))):  # the order in which autograd asks for them
            step.to_experts(number, [grad.contiguous() for grad in grads])
        return None, *(grads[0].new_zeros(()) for _ in step.chunks)


class _HostCopy:
    """A copy of a tensor to the host that runs while the device goes on."""

    def __init__(self, x):
        self._event = None
        self._copy = x
        if x.is_cuda:
            self._copy = torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def get(self):
        if self._event is not None:
            self._event.synchronize()
        return self._copy


def _constant(values, device):
    """A tensor of these int64 values that stays on the device, so that no step copies it there; not to be changed."""
    return (torch.tensor if torch.compiler.is_compiling() else _kept)(values, device=device)


@functools.lru_cache(maxsize=256)
def _kept(values, device):
    return torch.tensor(values, device=device)


def _lookup(slots, topk_idx):
    return torch.where(topk_idx < 0, -1, slots[topk_idx.clamp(min=0).long()])


def _even_ends(total, parts):
    """Ends of `parts` ranges that cover [0, total), as equal as can be."""
    return [total * (part + 1) // parts for part in range(parts)]


def _code(dtype):
    if dtype not in _DTYPES:
        raise TypeError(f"tokens must be float64, float32, bfloat16 or float16, but got {dtype}")
    return _DTYPES.index(dtype)
