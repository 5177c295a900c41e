import pytest
import torch

from fmoe_ext.ops import count_tokens, count_tokens_ref
from fmoe_ext.testing import devices


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("T", "K", "E"), [(0, 2, 3), (1, 1, 1), (33, 4, 7), (70_000, 2, 300)])
def test_count_tokens(T, K, E, dtype, device):
    topk_idx = torch.randint(-1, E, (T, K), dtype=dtype, device=device)
    assert torch.equal(count_tokens(topk_idx, E), count_tokens_ref(topk_idx, E))
    assert torch.equal(count_tokens(topk_idx.t().contiguous().t(), E), count_tokens_ref(topk_idx, E))


def test_count_tokens_threads():
    topk_idx = torch.randint(-1, 64, (60_000, 4), generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2, 3, 2):
        torch.set_num_threads(count)
        results.append(count_tokens(topk_idx, 64))
    torch.set_num_threads(threads)
    assert all(torch.equal(result, count_tokens_ref(topk_idx, 64)) for result in results)


def test_count_tokens_opcheck():
    torch.library.opcheck(torch.ops.fmoe_ext.count_tokens.default, (torch.tensor([[0, 2], [-1, 1]]), 3))


@pytest.mark.bad_indices
def test_count_tokens_rejects():
    with pytest.raises(RuntimeError, match=r"topk_idx must be in \[-1, 3\).*element 1 is 3"):
        count_tokens(torch.tensor([[0, 3]]), 3)
    with pytest.raises(RuntimeError, match="element 70001 is -2"):
        count_tokens(
            torch.zeros(40_000, 2, dtype=torch.int64).index_put(
                (torch.tensor(35_000), torch.tensor(1)), torch.tensor(-2)
            ),
            3,
        )
    with pytest.raises(RuntimeError, match="int64 or int32, but got Float"):
        count_tokens(torch.zeros(2, 2), 3)
    with pytest.raises(RuntimeError, match=r"shape \[T, K\], but got shape \[2\]"):
        count_tokens(torch.zeros(2, dtype=torch.int64), 3)
    with pytest.raises(RuntimeError, match="num_experts must be at least 1"):
        count_tokens(torch.zeros(2, 2, dtype=torch.int64), 0)
