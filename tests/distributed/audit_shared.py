"""Shared parts of the audits' tests: settings, the first difference, and mistakes that fit every model."""

import torch
from torch import nn

import fmoe_ext

PLAIN = {"accumulation": ["1"], "recomputation": ["none"], "padding": ["none"], "dtypes": ["float64"]}
ONE = {"layouts": ["1"]} | PLAIN
TIMEOUT = 300  # seconds of a case; the first one of a process may import Transformers or Megatron


def audited(pool, recipe, **settings):
    return fmoe_ext.audit(recipe, pool=pool, **{"timeout": TIMEOUT} | settings)


def first_difference(report):
    (failure,) = report.failures
    assert failure.error is None, failure.error
    assert "DIFFERENT" in str(report) and str(failure.first) in str(report)
    return failure.first


def unreduced(model):
    """Forgets the reduction of gradients."""


def clip_without_experts(model):
    dense = [p for name, p in model.named_parameters() if ".experts." not in name]
    return nn.utils.clip_grad_norm_(dense, 0.1)


class Noise:
    """A hook before routers: other noise in every call, also in those that activation checkpointing repeats."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, router, args):
        self.num_calls += 1
        generator = torch.Generator().manual_seed(self.num_calls)
        noise = torch.randn(args[0].shape[-1], generator=generator, dtype=args[0].dtype)
        return (args[0] + 0.5 * noise, *args[1:])
