"""Buckets: gradients that travel together, because a message costs a latency.

Buckets are filled in the order in which a backward is expected to compute gradients, the last layer's first.
A parameter that got no gradient on this rank counts as zero; one that no rank had a gradient for keeps None,
which optimizers skip. To tell them apart, each message ends in one number a parameter: how many ranks had it
(times some scale).
"""

import torch
import torch.distributed as dist
from torch import nn


class _Bucket:
    """Parameters of one tag and dtype, whose gradients travel in one message.

    Without a group nothing travels, and the bucket only knows when its gradients have come.
    """

    def __init__(self, params: list[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        self.params = params
        self.group = group
        self.missing = set(params)  # those whose gradient has not come
        self._flat: torch.Tensor | None = None  # the message
        self._work: dist.Work | None = None  # its reduction

    @torch.no_grad()
    def start(self, divide: bool, fp32: bool) -> None:
        if self.group is None:
            return
        dtype = torch.float32 if fp32 else self.params[0].dtype
        device = self.params[0].device
        self._flat = torch.zeros(sum(self._sizes()), dtype=dtype, device=device)
        *grads, present = self._flat.split(self._sizes())
        for p, grad in zip(self.params, grads, strict=True):
            if p.grad is not None and p.grad.layout is not torch.strided:
                raise TypeError(
                    f"the gradient of a parameter of shape {list(p.shape)} is sparse, but "
                    "DistributedGroupedDataParallel reduces dense ones: make nn.Embedding with sparse=False"
                )
            if p.grad is not None:
                grad.copy_(p.grad.flatten())
        present.copy_(torch.tensor([float(p.grad is not None) for p in self.params], device="cpu"))
        if divide:
            self._flat /= dist.get_world_size(self.group)
        self._work = dist.all_reduce(self._flat, group=self.group, async_op=True)

    @torch.no_grad()
    def finish(self, divide: bool) -> None:
        self.missing = set(self.params)
        if self._work is None or self._flat is None:
            return
        self._work.wait()
        if divide:
            self._flat /= dist.get_world_size(self.group)
        *grads, present = self._flat.split(self._sizes())
        for i, (p, grad) in enumerate(zip(self.params, grads, strict=True)):
            if p.grad is not None:
                p.grad.copy_(grad.view_as(p))
            elif present[i] != 0:
                p.grad = grad.view_as(p).to(p.dtype, copy=True)
        self._flat = self._work = None

    def _sizes(self) -> list[int]:
        return [p.numel() for p in self.params] + [len(self.params)]


def make_buckets(
    params: list[nn.Parameter], group: dist.ProcessGroup | None, max_bytes: float
) -> list[_Bucket]:
    """Buckets of at most max_bytes by dtype, in the order in which backward is expected to fill them."""
    buckets: list[list[nn.Parameter]] = []
    open_buckets: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    for p in reversed(params):  # the last layer's gradients come first
        bucket, size = open_buckets.get(p.dtype, ([], 0))
        if not bucket or size + p.numel() * p.element_size() > max_bytes:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(p)
        open_buckets[p.dtype] = bucket, size + p.numel() * p.element_size()
    return [_Bucket(bucket, group) for bucket in buckets]
