import pytest
import torch

from fmoe_ext.ops import apply_capacity, count_tokens, sort_tokens, sort_tokens_ref
from fmoe_ext.testing import devices

SHAPES = [(0, 2, 3), (1, 1, 1), (5, 0, 2), (33, 4, 7), (300, 1, 1), (70_000, 2, 300), (40, 2, 100_000)]


def assert_same(ours, truth):
    for name, mine, expected in zip(truth._fields, ours, truth, strict=True):
        assert mine.dtype == expected.dtype, name
        assert torch.equal(mine, expected), name


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("T", "K", "E"), SHAPES)
def test_sort_tokens(T, K, E, dtype, device, request):
    topk_idx = torch.randint(-1, E, (T, K), dtype=dtype, device=device)
    if (device == "cuda" or request.config.getoption("--device") == "emulated") and E > 12_288:
        with pytest.raises(RuntimeError, match="num_experts must be at most 12288 on CUDA, but got 100000"):
            sort_tokens(topk_idx, E)
        return
    expected = sort_tokens_ref(topk_idx, E)
    assert_same(sort_tokens(topk_idx, E), expected)
    assert_same(sort_tokens(topk_idx.t().contiguous().t(), E), expected)


@pytest.mark.parametrize("device", devices())
def test_skewed(device):
    one_expert = torch.full((50_000, 2), 3, device=device)
    assert_same(sort_tokens(one_expert, 8), sort_tokens_ref(one_expert, 8))
    all_dropped = torch.full((9, 2), -1, device=device)
    result = sort_tokens(all_dropped, 4)
    assert result.offs.tolist() == [0] * 4
    assert (result.row_idx == -1).all() and (result.inverse == -1).all()
    expanded = torch.tensor([[2, -1, 0]], device=device).expand(40, 3)
    assert_same(sort_tokens(expanded, 3), sort_tokens_ref(expanded, 3))


def test_by_hand():
    result = sort_tokens(torch.tensor([[2, 0], [-1, 2], [0, 2]]), 3)
    assert result.tokens_per_expert.tolist() == [2, 0, 3]
    assert result.offs.tolist() == [2, 2, 5]
    assert result.row_idx.tolist() == [1, 4, 0, 3, 5, -1]
    assert result.inverse.tolist() == [[2, 0], [-1, 3], [1, 4]]


def test_threads():
    topk_idx = torch.randint(-1, 64, (60_000, 4))
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(sort_tokens(topk_idx, 64))
    torch.set_num_threads(threads)
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def test_opcheck():
    torch.library.opcheck(torch.ops.fmoe_ext.sort_tokens.default, (torch.tensor([[0, 2], [-1, 1]]), 3))


def test_more_choices_than_int32_counts():
    """Refused before anything is read or allocated."""
    topk_idx = torch.zeros(1, 1, dtype=torch.int32).expand(2**31, 1)
    for function in (sort_tokens, count_tokens, lambda idx, E: apply_capacity(idx, E, 1)):
        with pytest.raises(RuntimeError, match=r"topk_idx must have fewer than 2\^31 elements"):
            function(topk_idx, 3)


@pytest.mark.bad_indices
def test_rejects():
    with pytest.raises(RuntimeError, match=r"topk_idx must be in \[-1, 3\).*element 1 is 3"):
        sort_tokens(torch.tensor([[0, 3]]), 3)
    with pytest.raises(RuntimeError, match="element 0 is -2"):
        sort_tokens(torch.tensor([[-2, 3]]), 3)
    with pytest.raises(RuntimeError, match="int64 or int32, but got Short"):
        sort_tokens(torch.zeros(2, 2, dtype=torch.int16), 3)
    with pytest.raises(RuntimeError, match=r"shape \[T, K\], but got shape \[2\]"):
        sort_tokens(torch.zeros(2, dtype=torch.int64), 3)
    with pytest.raises(RuntimeError, match="num_experts must be at least 1, but got -4"):
        sort_tokens(torch.zeros(2, 2, dtype=torch.int64), -4)
    with pytest.raises(RuntimeError, match="num_experts must be less than"):
        sort_tokens(torch.zeros(2, 2, dtype=torch.int64), 2**31)
