"""Megatron-core, if there is one, whose functions are called as they are: Inductor takes each rank seconds for them.

Import it before Megatron; examples/megatron runs with compiled ones.
"""

import importlib.util
from unittest import mock

import torch


def uncompiled(function=None, **options):
    return (lambda inner: inner) if function is None else function


if importlib.util.find_spec("megatron") is not None:
    with mock.patch.object(torch, "compile", uncompiled):
        import megatron.core.jit  # noqa: F401  (its jit_fuser is torch.compile)
