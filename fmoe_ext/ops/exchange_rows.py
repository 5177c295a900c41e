"""Arrange the rows that a rank sends in expert parallelism, and those that come: the operators of fmoe_ext.ep.

    pad_routing       a send buffer with max_rows places for each rank, so that its size does not depend on the choices
    counts_to_send    the message that says how many rows of each kind will come
    columns_of_rows   the kind (an expert, say) of each row that has come, from these counts
    token_ways        a token once for a rank (or node), though several of its experts are there
    experts_of_rows   the label of such a row: which of the receiver's experts it is for

On the CPU each is one operator (csrc/exchange_rows.cpp). On a GPU, and in a compiled graph, which fuses them, they are
the operators of torch in `*_ref`, their oracle.

Letters of shapes: T tokens, K choices of a token, E experts, W ranks, n kinds of rows for a rank, R rows to send, N
rows that come. A suffix as in rank_TK names a tensor's dimensions.
"""

import torch
import torch.nn.functional as F

from fmoe_ext.ops._autograd import register_fake


def _has_operator(x: torch.Tensor) -> bool:
    # anything but a tensor goes to the operator, which rejects it
    return not (
        getattr(x, "is_cuda", False)
        or (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting())
    )


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

        rows for rank 0: a b c    rank 1: d    max_rows 2    ->    a b d -    (c does not fit)
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
    # row_idx: for each place of the buffer, the sorted row that goes there
    place = torch.arange(max_rows, device=ends_W.device)
    source = torch.where(place < needed_W[:, None], begins_W[:, None] + place, row_idx.shape[0])
    # padding reads the entry behind the last, -1, for which permute() writes zeros
    padded_idx = F.pad(row_idx, (0, 1), value=-1)[source.flatten()]
    # inverse: for each choice, its rank and its place among the rows of that rank
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
    """Make the message to each rank: the same header for all, and how many rows of each kind will come.

    counts [W * n] int64; header [h] int64; order [W * n] int64: where in counts the kinds of each rank are, rank after
    rank, None if they lie so. has_most: a column between header and counts has the most rows that one rank gets
    -> [W, h + n] int64.
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
    rank sends this many rows, its counted ones and then padding (-1); 0: it sends the counted ones alone.
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
    # with output_size the host need not wait for the counts of a GPU
    if max_rows == 0:
        column = torch.arange(num_columns, dtype=torch.int32, device=counts.device).repeat(num_ranks)
        return column.repeat_interleave(counts.flatten(), output_size=num_rows).unsqueeze(1)
    # each place of a rank's part lies in the column whose rows end behind it
    place = torch.arange(max_rows, device=counts.device).expand(num_ranks, -1).contiguous()
    column = torch.searchsorted(counts.cumsum(1), place, right=True)
    return torch.where(column < num_columns, column, -1).to(torch.int32).view(-1, 1)


def token_ways(topk_idx: torch.Tensor, ways: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the way of each choice (its expert's rank or node), and the same with only the first choice of each way.

    topk_idx [T, K] int64 or int32, -1 for dropped choices; ways [E] int64: the way of each expert
    -> [T, K] int64, -1 for dropped choices; [T, K] int64, -1 also where an earlier choice of the token goes that way.
    """
    if not _has_operator(topk_idx):
        return token_ways_ref(topk_idx, ways)
    return torch.ops.fmoe_ext._token_ways(topk_idx, ways)


def token_ways_ref(topk_idx: torch.Tensor, ways: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute token_ways in plain PyTorch: its oracle."""
    way_TK = torch.where(topk_idx < 0, -1, ways[topk_idx.clamp(min=0).long()])
    # tril(-1): only earlier choices of the same token count
    repeats_TK = (way_TK.unsqueeze(2) == way_TK.unsqueeze(1)).tril(-1).any(2)  # of [T, K, K] pairs
    return way_TK, torch.where(repeats_TK, -1, way_TK)


def experts_of_rows(
    topk_idx: torch.Tensor, way: torch.Tensor, local: torch.Tensor, row_idx: torch.Tensor, wide: bool
) -> torch.Tensor:
    """Label each row to send with the experts of its token that its way leads to: [R, K] int16, int32 if wide.

    The label has the receiver's number of the expert for each choice of the token, -1 for choices that go another way.
    topk_idx [T, K] int64 or int32; way [T, K] int64 (token_ways); local [E] int64: the number that the receiver has for
    an expert; row_idx [R] int32: the choice t * K + k that a row is for, -1 for padding.
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
