"""Propose a balance for Pipe: how many layers each partition gets, by the time or the memory that each layer takes.

A layer's cost is measured alone, on one device; planning.layouts.balance_cost cuts the list of costs so that the
largest partition is as small as possible.
"""

import time
from copy import deepcopy

import torch
from torch import nn

from fmoe_ext.compat.fairscale.microbatch import check_values, move
from fmoe_ext.compat.fairscale.skip import keeping
from fmoe_ext.pipeline.measuring import backward_of_ones, leaves, median, now, parameter_bytes, run_and_weigh
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
    """Return the numbers of layers of the partitions that make the slowest forward and backward as fast as possible.

    sample: a microbatch [B, *] or a tuple. timeout: seconds to measure for. device: where, the sample's if None. The
    module itself is not changed. Raises ValueError for fewer layers than partitions, and for a module with gradients,
    which would be copied with it.
    """
    check_values(sample, "sample")
    if any(p.grad is not None for p in module.parameters()):
        raise ValueError("some parameter already has gradient: call module.zero_grad() first")
    tensor = next(x for x in as_tuple(sample) if isinstance(x, torch.Tensor))
    where = tensor.device if device is None else torch.device(device)
    copy = deepcopy(module).train().to(where)  # buffers, gradients and gates' losses are its own
    # seconds of each layer's forward and backward, once for each run; the median goes into the balance
    runs: list[list[float]] = []
    start = time.perf_counter()
    while not runs or time.perf_counter() - start < timeout:
        values, times = move(sample, where), []
        with keeping({}):
            for layer in copy:
                values = leaves(values)  # cut from the graph: the backward is this layer's alone
                begin = now(where)
                values = layer(values)
                # the graph is kept: the backward of a later layer may come through a skip
                backward_of_ones(values, retain_graph=True)
                times.append(now(where) - begin)
        runs.append(times)
    return balance_cost([median(list(of_layer)) for of_layer in zip(*runs, strict=True)], partitions)


def balance_by_size(
    partitions: int, module: nn.Sequential, sample: Values, *, chunks: int = 1, param_scale: float = 2.0
) -> list[int]:
    """Return the numbers of layers of the partitions that make the largest memory as small as possible.

    A layer's memory is param_scale times its parameters (2.0 for SGD: value and gradient; 3 with momentum, 4 with Adam)
    plus chunks times what its forward of sample, a microbatch, keeps for the backward. Works on any device; nothing is
    changed. Raises ValueError for fewer layers than partitions.
    """
    check_values(sample, "sample")
    values, sizes = sample, []
    with keeping({}):
        for layer in deepcopy(module).train():
            values, kept = run_and_weigh(layer, values)
            sizes.append(parameter_bytes(layer) * param_scale + kept * chunks)
    return balance_cost(sizes, partitions)
