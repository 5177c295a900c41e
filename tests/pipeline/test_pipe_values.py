"""Pipe with values that are no tensors, tensors that are not cut, and tensors of different lengths."""

import pytest
import torch
from torch import nn

from fmoe_ext.compat.fairscale import NoChunk, Pipe

MODES = ("always", "except_last", "never")


class Note(nn.Module):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def forward(self, values):
        self.seen.append(values)
        return values


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("chunks", [1, 2])
def test_other_values_travel_with_the_tensors(chunks, checkpoint):
    """Every microbatch gets them, and the whole of NoChunk's tensor; such results come back as a list."""

    class Combine(nn.Module):
        def forward(self, values):
            x, nothing, numbers, table = values
            assert nothing is None
            return x * sum(numbers) @ table, len(x), nothing

    seen = []
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    table = torch.randn(3, 3, dtype=torch.float64)
    pipe = Pipe(nn.Sequential(Note(seen), Combine()), [1, 1], chunks=chunks, checkpoint=checkpoint)
    y, rows, nothing = pipe((x, None, [1, 2], NoChunk(table)))
    assert rows == [4 // chunks] * chunks and nothing == [None] * chunks
    assert [v[2] for v in seen] == [[1, 2]] * chunks and all(torch.equal(v[3], table) for v in seen)
    torch.testing.assert_close(y, x * 3 @ table, rtol=1e-12, atol=1e-12)
    y.sum().backward()
    torch.testing.assert_close(x.grad, (3 * table).sum(1).expand(4, 3))


def test_results_of_other_kinds_in_microbatches_are_refused():
    class Sometimes(nn.Module):
        def forward(self, x):
            return x, x if len(x) > 1 else None

    with pytest.raises(TypeError, match="tensors in all or in none, but are NoneType, Tensor"):
        Pipe(nn.Sequential(Sometimes()), [1], chunks=2)(torch.ones(3))


def test_tensors_of_different_lengths_are_cut_as_torch_cuts_them():
    seen = []
    a, b = torch.arange(3), torch.arange(6)
    out = Pipe(nn.Sequential(Note(seen)), [1], chunks=5)((a, b))
    assert all(torch.equal(x, y) for x, y in zip(out, (a, b), strict=True))
    for values, *wanted in zip(seen, a.chunk(5), b.chunk(5), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(values, wanted, strict=True))
