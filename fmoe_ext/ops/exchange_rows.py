"""Rows that a rank sends in expert parallelism, and rows that come: the operators of fmoe_ext.ep.

On the CPU each is one operator (csrc/exchange_rows.cpp). On a GPU, and in a compiled graph, which fuses them, they are
the operators of torch in `*_ref`, their oracle.

Letters of shapes: T tokens, K choices of a token, E experts, W ranks, n kinds of rows for a rank, R rows to send, N
rows that come.
"""

import torch
import torch.nn.functional as F

from fmoe_ext.ops._autograd import register_fake


def _has_operator(x: torch.Tensor) -> bool:
    return not (getattr(x, "is_cuda", False) or torch.compiler.is_compiling())  # it rejects what is no tensor


def pad_routing(
    row_idx: torch.Tensor,
    inverse: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    num_ranks: int,
    max_rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Place rows in a send buffer in which those for rank p begin at p * max_rows.

    row_idx [R], inverse [T, K] int32, tokens_per_expert [W * n] int64: of rows sorted by rank (ops.sort_tokens)
    -> row_idx [W * max_rows], inverse [T, K], -1 for padding and for rows that do not fit.
    """
    if not _has_operator(row_idx):
        return pad_routing_ref(row_idx, inverse, tokens_per_expert, num_ranks, max_rows)
    return torch.ops.fmoe_ext._pad_routing(row_idx, inverse, tokens_per_expert, num_ranks, max_rows)


def pad_routing_ref(
    row_idx: torch.Tensor,
    inverse: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    num_ranks: int,
    max_rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute pad_routing in plain PyTorch: its oracle."""
    needed_W = tokens_per_expert.view(num_ranks, -1).sum(1)
    ends_W = needed_W.cumsum(0)
    begins_W = ends_W - needed_W
    place = torch.arange(max_rows, device=ends_W.device)
    source = torch.where(place < needed_W[:, None], begins_W[:, None] + place, row_idx.shape[0])
    # padding reads the entry behind the last, -1, for which permute() writes zeros
    padded_idx = F.pad(row_idx, (0, 1), value=-1)[source.flatten()]
    rank_TK = torch.bucketize(inverse, ends_W, right=True).clamp(max=num_ranks - 1)
    place_TK = inverse - begins_W[rank_TK]
    fits_TK = (inverse >= 0) & (place_TK < max_rows)
    return padded_idx, torch.where(fits_TK, rank_TK * max_rows + place_TK, -1).to(torch.int32)


def counts_to_send(
    counts: torch.Tensor,
    header: torch.Tensor,
    order: torch.Tensor | None,
    num_ranks: int,
    has_most: bool = False,
) -> torch.Tensor:
    """Make what a rank tells each other one: the same header, and how many rows of each kind come.

    counts [W * n] int64, header [h] int64, order [W * n] int64: places in counts by rank, None if counts are so
    -> [W, h + n] int64; has_most: between header and counts a column with the most rows for one rank.
    Equivalent to: torch.cat((header.expand(W, -1), counts[order].view(W, -1)), 1).
    """
    if not _has_operator(counts):
        return counts_to_send_ref(counts, header, order, num_ranks, has_most)
    return torch.ops.fmoe_ext._counts_to_send(counts, header, order, num_ranks, has_most)


def counts_to_send_ref(
    counts: torch.Tensor,
    header: torch.Tensor,
    order: torch.Tensor | None,
    num_ranks: int,
    has_most: bool = False,
) -> torch.Tensor:
    """Compute counts_to_send in plain PyTorch: its oracle."""
    counts_Wn = (counts if order is None else counts[order]).view(num_ranks, -1)
    parts = [header.expand(num_ranks, -1), counts_Wn]
    if has_most:
        parts.insert(1, counts_Wn.sum(1).max().expand(num_ranks, 1))
    return torch.cat(parts, 1)


def columns_of_rows(
    counts: torch.Tensor, num_rows: int, max_rows: int = 0, first: int = 0, end: int | None = None
) -> torch.Tensor:
    """Find the column of counts [W, n] int64 in which each incoming row was counted -> [num_rows, 1] int32.

    Rows come by rank, then by column; only the columns [first, end) count, and are numbered from first. max_rows: every
    rank sends as many, behind its counted ones padding (-1); 0: it sends what is counted.
    Equivalent to: torch.arange(n).repeat(W).repeat_interleave(counts.flatten())[:, None].
    """
    end = counts.shape[1] if end is None else end
    if not _has_operator(counts):
        return columns_of_rows_ref(counts, num_rows, max_rows, first, end)
    return torch.ops.fmoe_ext._columns_of_rows(counts, first, end, max_rows, num_rows)


def columns_of_rows_ref(
    counts: torch.Tensor, num_rows: int, max_rows: int = 0, first: int = 0, end: int | None = None
) -> torch.Tensor:
    """Compute columns_of_rows in plain PyTorch: its oracle."""
    counts = counts[:, first:end]
    num_ranks, num_columns = counts.shape
    if max_rows == 0:
        column = torch.arange(num_columns, dtype=torch.int32, device=counts.device).repeat(num_ranks)
        return column.repeat_interleave(counts.flatten(), output_size=num_rows).unsqueeze(1)
    place = torch.arange(max_rows, device=counts.device).expand(num_ranks, -1).contiguous()
    column = torch.searchsorted(counts.cumsum(1), place, right=True)
    return torch.where(column < num_columns, column, -1).to(torch.int32).view(-1, 1)


def token_ways(topk_idx: torch.Tensor, ways: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the way that each choice goes, and the same with -1 where an earlier choice of the token goes it too.

    topk_idx [T, K] int64 or int32, -1 for dropped choices; ways [E] int64: of each expert -> [T, K] int64 each.
    """
    if not _has_operator(topk_idx):
        return token_ways_ref(topk_idx, ways)
    return torch.ops.fmoe_ext._token_ways(topk_idx, ways)


def token_ways_ref(topk_idx: torch.Tensor, ways: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute token_ways in plain PyTorch: its oracle."""
    way_TK = torch.where(topk_idx < 0, -1, ways[topk_idx.clamp(min=0).long()])
    repeats_TK = (way_TK.unsqueeze(2) == way_TK.unsqueeze(1)).tril(-1).any(2)  # of [T, K, K] pairs
    return way_TK, torch.where(repeats_TK, -1, way_TK)


def experts_of_rows(
    topk_idx: torch.Tensor, way: torch.Tensor, local: torch.Tensor, row_idx: torch.Tensor, wide: bool
) -> torch.Tensor:
    """List for each row to send the experts of its token that its way leads to, else -1: [R, K] int16, int32 if wide.

    topk_idx [T, K] int64 or int32, way [T, K] int64 (token_ways), local [E] int64: the number that the receiver has for
    an expert, row_idx [R] int32: choice t * K + k that a row is for, -1 for padding.
    """
    if not _has_operator(topk_idx):
        return experts_of_rows_ref(topk_idx, way, local, row_idx, wide)
    return torch.ops.fmoe_ext._experts_of_rows(topk_idx, way, local, row_idx, wide)


def experts_of_rows_ref(
    topk_idx: torch.Tensor, way: torch.Tensor, local: torch.Tensor, row_idx: torch.Tensor, wide: bool
) -> torch.Tensor:
    """Compute experts_of_rows in plain PyTorch: its oracle."""
    num_tokens, top_k = topk_idx.shape
    # padding is a token behind the last, which has chosen nothing
    token_R = torch.where(row_idx < 0, num_tokens, row_idx // top_k)
    way_RK = F.pad(way, (0, 0, 0, 1), value=-1)[token_R]
    expert_TK = torch.where(topk_idx < 0, -1, local[topk_idx.clamp(min=0).long()])
    expert_TK = expert_TK.to(torch.int32 if wide else torch.int16)
    expert_RK = F.pad(expert_TK, (0, 0, 0, 1), value=-1)[token_R]
    # the way that the row goes: the receiver must see only the choices that go it too
    own_way_R1 = way_RK.gather(1, (row_idx.clamp(min=0) % top_k).long().unsqueeze(1))
    return torch.where(way_RK == own_way_R1, expert_RK, -1)


@register_fake("fmoe_ext::_pad_routing", row_idx=1, inverse=2, tokens_per_expert=1)
def _(
    row_idx: torch.Tensor,
    inverse: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    num_ranks: int,
    max_rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return row_idx.new_empty((num_ranks * max_rows,)), inverse.new_empty(inverse.shape)


@register_fake("fmoe_ext::_counts_to_send", counts=1, header=1, order=1)
def _(
    counts: torch.Tensor, header: torch.Tensor, order: torch.Tensor | None, num_ranks: int, has_most: bool
) -> torch.Tensor:
    return counts.new_empty((num_ranks, len(header) + has_most + len(counts) // num_ranks))


@register_fake("fmoe_ext::_columns_of_rows", counts=2)
def _(counts: torch.Tensor, first: int, end: int, max_rows: int, num_rows: int) -> torch.Tensor:
    return counts.new_empty((num_rows, 1), dtype=torch.int32)


@register_fake("fmoe_ext::_token_ways", topk_idx=2, ways=1)
def _(topk_idx: torch.Tensor, ways: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(topk_idx.new_empty(topk_idx.shape, dtype=torch.int64) for _ in range(2))  # type: ignore[return-value]


@register_fake("fmoe_ext::_experts_of_rows", topk_idx=2, way=2, local=1, row_idx=1)
def _(
    topk_idx: torch.Tensor, way: torch.Tensor, local: torch.Tensor, row_idx: torch.Tensor, wide: bool
) -> torch.Tensor:
    return topk_idx.new_empty((len(row_idx), topk_idx.shape[1]), dtype=torch.int32 if wide else torch.int16)
