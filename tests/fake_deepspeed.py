"""An engine under DeepSpeed's name, which takes a model in as DeepSpeed's does."""

import contextlib
import sys
import types

import torch
import torch.distributed as dist
from torch import nn


class DeepSpeedEngine(nn.Module):
    """Casts the model, copies the first rank's weights to the others, and calls it."""

    def __init__(self, model, dtype=None, group=None):
        super().__init__()
        self.__dict__["_modules"]["module"] = self.__dict__["module"] = model  # no hook of nn.Module sees it
        self.seq_data_parallel_group = group
        if dtype is not None:
            model.to(dtype)
        for p in model.parameters():
            if dist.is_initialized():
                dist.broadcast(p.data, dist.get_process_group_ranks(group)[0], group=group)
            else:
                p.data.view(torch.uint8)

    def forward(self, *args):
        return self.module(*args)


@contextlib.contextmanager
def installed():
    """The class has been imported, as in a program that uses it."""
    module = types.ModuleType("deepspeed.runtime.engine")
    module.DeepSpeedEngine = DeepSpeedEngine
    sys.modules[module.__name__] = module
    try:
        yield DeepSpeedEngine
    finally:
        del sys.modules[module.__name__]
