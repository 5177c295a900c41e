"""A whole step of a small model in one CUDA graph: forward, balance loss, backward, optimizer; plain and recomputed.

tests/test_capture.py has the same steps on the CPU, under the rules of a capture.
"""

import pytest
import torch

from fmoe_ext import ops
from tests.test_capture import D, Model, T, recomputed

REASON = ops.cuda_module_missing or (None if torch.cuda.is_available() else "there is no CUDA device")
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"needs a GPU: {REASON}")


def make():
    torch.manual_seed(0)
    model = Model("softmax").cuda()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("wrap", [lambda f, x: f(x), recomputed], ids=["plain", "recomputed"])
def test_replayed_training_is_training(wrap):
    batches = [torch.randn(T, D, device="cuda") for _ in range(6)]

    def train(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x, wrap)
        loss.backward()
        optimizer.step()
        return loss.detach()

    plain, optimizer = make()
    expected = [train(plain, optimizer, x) for x in batches]
    model, optimizer = make()
    side, x = torch.cuda.Stream(), batches[0].clone()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        losses = [train(model, optimizer, x.copy_(batch)) for batch in batches[:3]]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = train(model, optimizer, x)
    for batch in batches[3:]:
        x.copy_(batch)
        graph.replay()
        losses.append(loss.clone())
    assert [a.item() for a in losses] == [b.item() for b in expected]
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
