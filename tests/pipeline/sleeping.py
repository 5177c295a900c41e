"""Layers that take a time of a clock that nothing else moves: what a machine does besides changes no measurement."""

import contextlib
import types
from unittest import mock

import torch
from torch import nn

from fmoe_ext.compat.fairscale import balance
from fmoe_ext.pipeline import measuring

_seconds = [0.0]


def pass_time(seconds):
    _seconds[0] += seconds


class Sleep(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        pass_time(self.seconds)
        return x * self.weight


@contextlib.contextmanager
def sleeping():
    """Layers of a model are timed by what Sleep layers take, all others take none."""
    clock = types.SimpleNamespace(perf_counter=lambda: _seconds[0])
    with mock.patch.object(measuring, "time", clock), mock.patch.object(balance, "time", clock):
        yield
