from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fmoe_ext.ops import apply_capacity, apply_capacity_ref, count_tokens, drop_choices, drop_choices_ref
from fmoe_ext.testing import devices


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("T", "K", "E"), [(0, 2, 3), (1, 1, 1), (4, 0, 2), (33, 4, 7), (40_000, 2, 30)])
def test_apply_capacity(T, K, E, dtype, device):
    topk_idx = torch.randint(-1, E, (T, K), dtype=dtype, device=device)
    average = T * K // E
    for capacity in (0, average // 2, average, T * K, torch.randint(0, average + 2, (E,), device=device)):
        kept = apply_capacity(topk_idx, E, capacity)
        assert kept.dtype == dtype
        assert torch.equal(kept, apply_capacity_ref(topk_idx, E, capacity))
        assert (count_tokens(kept, E) <= torch.as_tensor(capacity, device=device)).all()
        assert torch.equal(apply_capacity(topk_idx.t().contiguous().t(), E, capacity), kept)


def test_first_choices_come_first():
    topk_idx = torch.tensor([[1, 0], [0, 1], [1, 0]])
    assert apply_capacity(topk_idx, 2, 1).tolist() == [[1, -1], [0, -1], [-1, -1]]
    assert apply_capacity(topk_idx, 2, 2).tolist() == [[1, 0], [0, -1], [1, -1]]
    assert apply_capacity(topk_idx.expand(3, 2), 2, torch.tensor([0, 9])).tolist() == [
        [1, -1],
        [-1, 1],
        [1, -1],
    ]


def test_threads():
    topk_idx = torch.randint(-1, 16, (40_000, 4))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = apply_capacity(topk_idx, 16, 7_000)
    torch.set_num_threads(2)
    together = apply_capacity(topk_idx, 16, 7_000)
    torch.set_num_threads(threads)
    assert torch.equal(alone, together)


def test_opcheck():
    arguments = (torch.tensor([[0, 2], [-1, 2]]), torch.tensor([1, 1, 1]))
    torch.library.opcheck(torch.ops.fmoe_ext.apply_capacity.default, arguments)


@pytest.mark.bad_indices
def test_rejects():
    topk_idx = torch.tensor([[0, 2]])
    with pytest.raises(RuntimeError, match="capacity must not be negative, but got -1"):
        apply_capacity(topk_idx, 3, -1)
    with pytest.raises(RuntimeError, match="capacity must not be negative, but expert 1 has -5"):
        apply_capacity(topk_idx, 3, torch.tensor([1, -5, 0]))
    with pytest.raises(
        RuntimeError, match=r"capacity must have shape \[num_experts\] = \[3\], but got shape \[2\]"
    ):
        apply_capacity(topk_idx, 3, torch.tensor([1, 5]))
    with pytest.raises(RuntimeError, match="capacity must be int64, but got Float"):
        apply_capacity(topk_idx, 3, torch.ones(3))
    with pytest.raises(RuntimeError, match=r"topk_idx must be in \[-1, 2\).*element 1 is 2"):
        apply_capacity(topk_idx, 2, 1)
    with pytest.raises(RuntimeError, match="num_experts must be at least 1"):
        apply_capacity(topk_idx, 0, 1)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("T", "K", "E"), [(0, 2, 3), (1, 1, 1), (33, 4, 7), (40_000, 2, 30)])
def test_drop_choices(T, K, E, dtype, device):
    topk_idx = torch.randint(-1, E, (T, K), device=device)
    topk_weights = torch.rand(T, K, dtype=dtype, device=device).t().contiguous().t()
    uniform = torch.rand(T, dtype=dtype, device=device)
    for capacity in (0, T * K // E, T * K):
        for random in ((), (topk_weights, uniform)):
            kept, counts = drop_choices(topk_idx, E, capacity, *random)
            kept_ref, counts_ref = drop_choices_ref(topk_idx, E, capacity, *random)
            assert torch.equal(kept, kept_ref)
            assert torch.equal(counts, counts_ref)
    if T > 100 and K > 1:  # the random ones alone: all first choices stay, some others go
        assert (kept[:, 0] == topk_idx[:, 0]).all()
        assert 0.1 < (kept != topk_idx)[:, 1:].float().mean() < 0.4


@pytest.mark.parametrize("change", range(7))
@pytest.mark.parametrize("device", ["cpu", "a GPU"])
def test_drop_choices_refuses(device, change):
    """A GPU's tensors without a GPU: fake ones, whose values nobody reads."""
    with FakeTensorMode() if device == "a GPU" else nullcontext():
        on = {"device": "cuda" if device == "a GPU" else "cpu"}
        topk_idx, weights = torch.zeros(1, 2, dtype=torch.int64, **on), torch.ones(1, 2, **on)
        arguments, message = [
            ((-1,), "capacity must not be negative, but got -1"),
            ((1, weights), "topk_weights and uniform must both be given"),
            ((1, None, torch.ones(1, **on)), "topk_weights and uniform must both be given"),
            ((1, weights, torch.ones(2, **on)), "uniform must have"),
            ((1, torch.ones(1, 1, 2, **on), torch.ones(1, **on)), "topk_weights must have"),
            ((1, weights, torch.ones(1, dtype=torch.float64, **on)), "uniform must have"),
            ((1, weights.half(), torch.ones(1, **on)), "topk_weights must be float32 or float64"),
        ][change]
        with pytest.raises(RuntimeError, match=message):
            drop_choices(topk_idx, 2, *arguments)


@pytest.mark.cpu("on a GPU it is a composition of other operators")
def test_drop_choices_opcheck():
    topk_idx, weights = torch.tensor([[0, 1]]), torch.ones(1, 2)
    torch.library.opcheck(torch.ops.fmoe_ext.drop_choices.default, (topk_idx, 2, 1, weights, torch.ones(1)))
