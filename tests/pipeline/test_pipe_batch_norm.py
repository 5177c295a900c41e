from copy import deepcopy

import pytest
import torch
from torch import nn

from fmoe_ext.compat.fairscale import DeferredBatchNorm, Pipe, defer_batch_norm

MODES = ("always", "except_last", "never")


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("norm, shape", [(nn.BatchNorm1d, (7, 3)), (nn.BatchNorm2d, (7, 3, 4, 5))])
def test_running_statistics_are_those_of_the_batch(norm, shape, checkpoint, momentum):
    torch.manual_seed(0)
    plain = norm(3, momentum=momentum, dtype=torch.float64)
    pipe = Pipe(
        nn.Sequential(deepcopy(plain)), [1], chunks=3, checkpoint=checkpoint, deferred_batch_norm=True
    )
    for _ in range(2):
        x = torch.randn(shape, dtype=torch.float64)
        pipe(x).mean().backward()
        plain(x)
    for name, value in plain.named_buffers():
        torch.testing.assert_close(getattr(pipe[0], name), value, rtol=1e-12, atol=1e-14)
    x = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(pipe.eval()(x), plain.eval()(x), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("checkpoint", MODES)
def test_plain_batch_norm_under_checkpoint_counts_once(checkpoint):
    torch.manual_seed(0)
    plain = nn.BatchNorm1d(3)
    pipe = Pipe(nn.Sequential(deepcopy(plain)), [1], chunks=2, checkpoint=checkpoint)
    x = torch.randn(8, 3)
    pipe(x).sum().backward()
    for part in x.chunk(2):
        plain(part)
    for name, value in plain.named_buffers():
        assert torch.equal(getattr(pipe[0], name), value), name


def test_gradients_and_parameters():
    norm = nn.BatchNorm1d(3)
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3), nn.Sequential(norm)), [1, 1], deferred_batch_norm=True)
    assert isinstance(pipe[1][0], DeferredBatchNorm)
    assert pipe[1][0].weight is norm.weight and "partitions.1.1.0.running_mean" in pipe.state_dict()
    pipe(torch.randn(4, 3)).square().sum().backward()
    assert norm.weight.grad.abs().sum() > 0


def test_unfinished_batch_is_dropped():
    class FailOnce(nn.Module):
        fail = True

        def forward(self, x):
            if self.fail and x[0, 0] < 0:
                raise RuntimeError("once")
            return x

    pipe = Pipe(
        nn.Sequential(nn.BatchNorm1d(1), FailOnce()),
        [1, 1],
        chunks=3,
        checkpoint="never",
        deferred_batch_norm=True,
    )
    x = torch.tensor([[1.0], [2.0], [3.0], [5.0], [0.0], [7.0]])
    with pytest.raises(RuntimeError, match="once"):
        pipe(x)
    FailOnce.fail = False
    before = pipe[0].num_batches_tracked.item()
    pipe(x)
    assert pipe[0].num_batches_tracked == before + 1
    plain = nn.BatchNorm1d(1)
    for _ in range(before + 1):
        plain(x)
    torch.testing.assert_close(pipe[0].running_mean, plain.running_mean)


def test_wrong_channels():
    norm = DeferredBatchNorm(nn.BatchNorm2d(3), 2)
    with pytest.raises(ValueError, match=r"\[B, 3, \*\], but got \[2, 4, 1, 1\]"):
        norm(torch.ones(2, 4, 1, 1))


def test_converted_module_counts_the_new_number_of_microbatches():
    plain = nn.Sequential(nn.BatchNorm1d(3)).double()
    once = defer_batch_norm(deepcopy(plain), 4)
    again = defer_batch_norm(once, 2)
    assert again[0] is once[0] and again[0].chunks == 2
    x = torch.randn(6, 3, dtype=torch.float64)
    plain(x)
    for part in x.chunk(2):
        again(part)
    assert again[0].num_batches_tracked == 1
    torch.testing.assert_close(again[0].running_var, plain[0].running_var)


def test_frozen_norm_stays_frozen():
    model = nn.Sequential(nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(3))
    model[0].running_mean.fill_(2.0)
    deferred = defer_batch_norm(model, 1)
    assert [norm.training for norm in deferred] == [False, True]
    x = torch.randn(6, 3)
    torch.testing.assert_close(deferred[0](x), (x - 2) / (1 + deferred[0].eps) ** 0.5)
    assert deferred[0].running_mean.tolist() == [2.0] * 3


@pytest.mark.parametrize("place", ["2", "1.0"])
def test_norm_that_stands_in_two_places_is_refused(place):
    """The second place kept a plain norm, which moved the shared statistics at every microbatch."""
    norm = nn.BatchNorm1d(3)
    model = (
        nn.Sequential(norm, nn.Sequential(norm)) if place == "1.0" else nn.Sequential(norm, nn.ReLU(), norm)
    )
    with pytest.raises(
        ValueError, match=f"0 and {place} are one batch norm, whose statistics cannot be deferred"
    ):
        defer_batch_norm(model, 2)
    assert model[0] is norm
