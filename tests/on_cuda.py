"""Tests that name no device, on the GPU. A module of its own, since compiled programs find its globals by its name.

(Every conftest.py is called "conftest"; of those that a run imports only the last can be found so.)
"""

import torch
from torch.overrides import TorchFunctionMode

FACTORIES = (
    torch.tensor, torch.empty, torch.zeros, torch.ones, torch.full, torch.eye,
    torch.arange, torch.linspace, torch.logspace, torch.rand, torch.randn, torch.randint, torch.randperm,
)  # fmt: skip


class OnCuda(TorchFunctionMode):
    """Makes tensors on the GPU, filled on the CPU, so that seeds and generators mean the same on both.

    In the thread that entered it. Noise that a layer draws for itself (torch.randn_like) is the GPU's.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function not in FACTORIES or kwargs.get("device") is not None or kwargs.get("out") is not None:
            return function(*args, **kwargs)
        requires_grad = kwargs.pop("requires_grad", False)
        return function(*args, **kwargs).to("cuda").requires_grad_(requires_grad)
