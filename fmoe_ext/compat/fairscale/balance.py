"""Propose a balance for Pipe: how many layers each partition gets, by the time or the memory that each layer takes.

A program calls balance_by_time() or balance_by_size() and gives the list to Pipe(balance=). A layer's cost is measured
alone, on one device, in a copy; planning.layouts.balance_cost cuts the list of costs so that the largest partition is
as small as possible. Signatures are FairScale's, but device=None means the sample's
device.
"""

import time
from copy import deepcopy
from statistics import median_high

import torch
from torch import nn

from fmoe_ext.compat.fairscale.microbatch import check_values, move, scatter
from fmoe_ext.compat.fairscale.skip import Skips, keeping
from fmoe_ext.pipeline.measuring import backward_of_ones, copies, now, parameter_bytes, run_and_weigh
from fmoe_ext.pipeline.microbatch import Values, as_tuple
from fmoe_ext.planning.layouts import balance_cost


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Values,
    *,
    timeout: float = 1.0,
    device: torch.device | str | None = None,
) -> list[int]:
    """Return how many layers each partition gets, so that the slowest partition takes as little time as possible.

    sample: a microbatch [B, *] or a tuple. timeout: how many seconds to measure. device: where to run, the sample's if
    None. Nothing is changed. Raises ValueError for fewer layers than partitions, and for a module with gradients, which
    would be copied with it.
    """
    check_values(sample, "sample")
    if any(p.grad is not None for p in module.parameters()):
        raise ValueError("a parameter already has a gradient: call module.zero_grad() first")
    copy, where = _copy_to(module, partitions, sample, device)
    # seconds of each layer's forward and backward, once for each run; the median goes into the balance
    runs: list[list[float]] = []
    start = time.perf_counter()
    while not runs or time.perf_counter() - start < timeout:
        values, times = move(sample, where), []
        skips: Skips = {}
        with keeping(skips):
            for layer in copy:
                # cut from the graph, and skips too: the backward is this layer's alone
                values, earlier = copies(values), set(skips)
                begin = now(where)
                values = layer(values)
                stashed = skips.keys() - earlier
                backward_of_ones((*as_tuple(values), *(skips[key] for key in stashed)))
                times.append(now(where) - begin)
                for key in stashed:
                    (skips[key],) = copies((skips[key],))  # copies() takes None only inside a tuple
        runs.append(times)
    return balance_cost([median_high(of_layer) for of_layer in zip(*runs, strict=True)], partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Values,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: torch.device | str | None = None,
) -> list[int]:
    """Return how many layers each partition gets, so that the largest memory of any partition is as small as possible.

    A layer's memory is param_scale times its parameters (2.0 for SGD: value and gradient; 3 with momentum, 4 with Adam)
    plus what its forward of a microbatch keeps for the backward. input: a mini-batch [B, *] or a tuple, which Pipe cuts
    into `chunks` microbatches. device: where to run, the input's if None. Nothing is changed. Raises ValueError for
    fewer layers than partitions.
    """
    check_values(input, "input")
    copy, where = _copy_to(module, partitions, input, device)
    values, sizes = move(scatter(input, chunks)[0], where), []
    with keeping({}):
        for layer in copy:
            values, kept = run_and_weigh(layer, values)
            sizes.append(parameter_bytes(layer) * param_scale + kept)
    return balance_cost(sizes, partitions)


def _copy_to(
    module: nn.Sequential, partitions: int, sample: Values, device: torch.device | str | None
) -> tuple[nn.Sequential, torch.device]:
    """Copy a module to a device, the sample's if None -> copy, device. ValueError for fewer layers than partitions."""
    balance_cost([0.0] * len(module), partitions)  # raises now, not after measuring
    tensor = next(x for x in as_tuple(sample) if isinstance(x, torch.Tensor))
    where = tensor.device if device is None else torch.device(device)
    copy = deepcopy(module).train().to(where)  # has buffers, gradients and gates' losses of its own
    return copy, where
