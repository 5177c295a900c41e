"""Fingerprints of replicas: tensors of other bytes have another one."""

import pytest
import torch

from fmoe_ext.checkpoint.chunks import fingerprints

PAIRS = {
    "a sign": (torch.zeros(3), torch.tensor([0.0, -0.0, 0.0])),
    "two signs": (torch.zeros(4), torch.tensor([0.0, -0.0, 0.0, -0.0])),
    "0 and -1": (torch.tensor([0]), torch.tensor([-1])),
    "all bits": (torch.tensor([5, 1 << 40]), torch.tensor([~5, 1 << 40])),
    "bytes": (torch.zeros(8, dtype=torch.uint8), torch.full((8,), 255, dtype=torch.uint8)),
    "order": (torch.tensor([1, 2]), torch.tensor([2, 1])),
}


@pytest.mark.parametrize("name", PAIRS)
def test_other_values_have_another_fingerprint(name):
    first, second = (
        fingerprints({("t", ()): lambda t=tensor: t}, {("t", ())})["t", ()] for tensor in PAIRS[name]
    )
    assert first.what == second.what
    assert first.value != second.value


def test_same_bytes_have_the_same_fingerprint():
    tensor = torch.arange(100.0)
    found = fingerprints({("a", ()): lambda: tensor, ("b", ()): tensor.clone}, {("a", ()), ("b", ())})
    assert found["a", ()] == found["b", ()]
