"""The operators of the exchange between ranks against torch's, which compute the same on a GPU and in graphs."""

import pytest
import torch

from fmoe_ext.ops import exchange_rows, sort_tokens
from tests.ops.fuzz import choices

SIZES = [(0, 2, 4), (1, 1, 2), (7, 3, 4), (50, 4, 12), (300, 2, 8)]  # T, K, E


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("max_rows", [1, 3, 40, 700])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_pad_routing(size, max_rows, num_ranks):
    handle = sort_tokens(choices(size, 0), size[2])
    arguments = handle.row_idx, handle.inverse, handle.tokens_per_expert, num_ranks, max_rows
    for ours, theirs in zip(
        exchange_rows.pad_routing(*arguments), exchange_rows.pad_routing_ref(*arguments), strict=True
    ):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_pad_routing_by_hand():
    handle = sort_tokens(torch.tensor([[0, 1], [1, -1], [1, 2]]), 4)  # rank 0 has experts 0 and 1
    row_idx, inverse = exchange_rows.pad_routing(
        handle.row_idx, handle.inverse, handle.tokens_per_expert, 2, 3
    )
    assert row_idx.tolist() == [0, 1, 2, 5, -1, -1]
    assert inverse.tolist() == [[0, 1], [2, -1], [-1, 3]]


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (4, 7), (3, 0)])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_counts_to_send(shape, is_ordered):
    torch.manual_seed(0)
    num_counts = shape[0] * shape[1]
    counts, header = torch.randint(0, 9, (num_counts,)), torch.tensor([7, 0, 1])
    order = torch.randperm(num_counts) if is_ordered else None
    for has_most in (False, True):
        if has_most and not shape[1]:
            continue
        arguments = counts, header, order, shape[0], has_most
        ours, theirs = exchange_rows.counts_to_send(*arguments), exchange_rows.counts_to_send_ref(*arguments)
        assert ours.dtype == torch.int64
        assert torch.equal(ours, theirs)


def test_counts_to_send_by_hand():
    sent = exchange_rows.counts_to_send(
        torch.tensor([1, 2, 3, 4]), torch.tensor([9]), torch.tensor([3, 2, 0, 1]), 2, True
    )
    assert sent.tolist() == [[9, 7, 4, 3], [9, 7, 1, 2]]


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (4, 7)])
@pytest.mark.parametrize("max_rows", [0, 1, 5, 100])
def test_columns_of_rows(shape, max_rows):
    torch.manual_seed(0)
    whole = torch.randint(0, 9, (shape[0], shape[1] + 2))
    counts = whole[:, 1:-1]  # not contiguous
    num_rows = shape[0] * max_rows if max_rows else int(counts.sum())
    ours = exchange_rows.columns_of_rows(counts, num_rows, max_rows)
    assert ours.dtype == torch.int32
    assert torch.equal(ours, exchange_rows.columns_of_rows_ref(counts, num_rows, max_rows))
    behind_header = exchange_rows.columns_of_rows(whole, num_rows, max_rows, 1, shape[1] + 1)
    assert torch.equal(ours, behind_header)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_ways_and_experts_of_rows(size, dtype):
    T, K, E = size
    topk_idx, ways, local = choices(size, 1).to(dtype), torch.arange(E) // 2, torch.arange(E) % 2 + 5
    found = exchange_rows.token_ways(topk_idx, ways)
    for ours, theirs in zip(found, exchange_rows.token_ways_ref(topk_idx, ways), strict=True):
        assert ours.dtype == theirs.dtype == torch.int64
        assert torch.equal(ours, theirs)
    row_idx = sort_tokens(found[1], E // 2).row_idx
    for wide in (False, True):
        arguments = topk_idx, found[0], local, row_idx, wide
        ours, theirs = (
            exchange_rows.experts_of_rows(*arguments),
            exchange_rows.experts_of_rows_ref(*arguments),
        )
        assert ours.dtype == theirs.dtype == (torch.int32 if wide else torch.int16)
        assert torch.equal(ours, theirs)


@pytest.mark.cpu("on a GPU they are plain PyTorch")
def test_opcheck():
    handle = sort_tokens(torch.tensor([[0, 1], [1, -1]]), 2)
    counts = handle.tokens_per_expert
    ops = torch.ops.fmoe_ext
    topk_idx, ways = torch.tensor([[0, 1], [1, -1]]), torch.tensor([0, 0])
    way, _ = exchange_rows.token_ways(topk_idx, ways)
    for op, arguments in (
        (ops._pad_routing, (handle.row_idx, handle.inverse, counts, 2, 3)),
        (ops._counts_to_send, (counts, counts, None, 2, True)),
        (ops._columns_of_rows, (counts.view(1, 2), 0, 2, 0, 3)),
        (ops._token_ways, (topk_idx, ways)),
        (ops._experts_of_rows, (topk_idx, way, ways, handle.row_idx, True)),
    ):
        torch.library.opcheck(op.default, arguments)
