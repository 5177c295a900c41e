"""Batch normalisation under microbatches: running statistics of the whole batch, each batch counted once.

A microbatch is normalised by its own mean and variance; those of the batch cannot be known before its last microbatch.
Sums and sums of squares are collected instead, and then move the running statistics once, as one batch norm over the
whole batch would.
Pipe(deferred_batch_norm=True) puts these norms in and calls begin_batch(); the gradients stay those of microbatches.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d

from fmoe_ext.pipeline.batch_norm import BATCH_NORMS, is_recomputing


class DeferredBatchNorm(nn.Module):
    """Batch norm that normalises each microbatch by itself and moves its running statistics once a batch.

    From torchgpipe (Kim et al. 2020). It takes over the parameters, buffers and mode of an nn.BatchNorm1d / 2d / 3d.
    chunks: microbatches of a batch.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, norm: BatchNorm1d | BatchNorm2d | BatchNorm3d, chunks: int):
        super().__init__()
        self.num_features, self.eps, self.momentum = norm.num_features, norm.eps, norm.momentum
        self.chunks = chunks  # FairScale's attribute; forward() reads `expected`
        self.weight, self.bias = norm.weight, norm.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))
        self.expected = chunks
        self.train(norm.training)
        self._begin()

    def begin_batch(self, chunks: int) -> None:
        """Begin a batch of `chunks` microbatches; sums of an unfinished batch are dropped."""
        self.expected = chunks
        self._begin()

    def _begin(self) -> None:
        self._sum: Any = 0.0  # of each channel; tensors after the first microbatch
        self._sum_squares: Any = 0.0
        self._num_rows = self._num_counted = 0

    def forward(self, x: Tensor) -> Tensor:
        """x [B, C, *] -> [B, C, *]; ValueError for another number of channels.

        Equivalent to: F.batch_norm(x, None, None, weight, bias, training=True) for each microbatch.
        """
        if x.dim() < 2 or x.shape[1] != self.num_features:
            raise ValueError(f"x must have shape [B, {self.num_features}, *], but got {list(x.shape)}")
        if not self.training:  # as nn.BatchNorm
            statistics = self.running_mean, self.running_var
            return F.batch_norm(x, *statistics, self.weight, self.bias, False, 0.0, self.eps)
        if not is_recomputing():  # else the microbatch was counted by its first forward
            dims = [0, *range(2, x.dim())]
            wide = x.detach().double()  # the variance is a difference of sums, which float32 would cancel
            self._sum = self._sum + wide.sum(dims)
            self._sum_squares = self._sum_squares + wide.square().sum(dims)
            self._num_rows += x.numel() // x.shape[1]
            self._num_counted += 1
            if self._num_counted == self.expected:
                self._end_batch()
        return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)

    @torch.no_grad()
    def _end_batch(self) -> None:
        """Move the running statistics by those of the whole batch."""
        self.num_batches_tracked.add_(1)
        mean = self._sum / self._num_rows
        var = self._sum_squares / self._num_rows - mean.square()
        var = var * (self._num_rows / max(self._num_rows - 1, 1))  # unbiased, as nn.BatchNorm keeps it
        # momentum None: the mean of all batches so far
        factor = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(var.to(self.running_var.dtype), factor)
        self._begin()


def defer_batch_norm(module: nn.Module, chunks: int) -> nn.Module:
    """Replace each batch norm that keeps running statistics by a DeferredBatchNorm.

    A DeferredBatchNorm that is already there is set to `chunks`. Raises ValueError for a norm that stands in two
    places, whose sums would mix.
    """
    found: dict[BatchNorm1d | BatchNorm2d | BatchNorm3d, str] = {}  # {norm: where it stands}
    for name, norm in module.named_modules(remove_duplicate=False):
        if isinstance(norm, DeferredBatchNorm):
            norm.chunks = chunks
            norm.begin_batch(chunks)
        elif isinstance(norm, BATCH_NORMS) and norm.track_running_stats:
            if norm in found:
                raise ValueError(
                    f"{found[norm]} and {name} are one batch norm, whose statistics cannot be deferred: give each "
                    "place a norm of its own"
                )
            found[norm] = name
    for norm, name in found.items():
        deferred = DeferredBatchNorm(norm, chunks)
        if not name:
            return deferred
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, deferred)
    return module
