"""How many layers each partition should get: by the time or the memory that each layer takes."""

import time
from collections.abc import Iterable
from copy import deepcopy

import torch
from torch import Tensor, nn

from fmoe_ext.pipeline.microbatch import Tensors, check_tensors, move
from fmoe_ext.pipeline.skip import keeping


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Tensors,
    *,
    timeout: float = 1.0,
    device: torch.device | str | None = None,
) -> list[int]:
    """Layers a partition, such that the slowest partition's forward and backward are as fast as possible.

    sample: a microbatch [B, *] or a tuple. timeout: seconds to measure for. device: where, the sample's if None. The
    module itself is not changed. Raises ValueError for fewer layers than partitions.
    """
    return balance_cost(profile_times(module, sample, timeout, device), partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    sample: Tensors,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
) -> list[int]:
    """Layers a partition, such that the largest partition's memory is as small as possible.

    A layer's memory: param_scale times its parameters (2.0 for SGD: value and gradient; 3 with momentum, 4 with Adam)
    and chunks times what its forward of sample, a microbatch, keeps for backward. Works on any device; nothing is
    changed. Raises ValueError for fewer layers than partitions.
    """
    return balance_cost(profile_sizes(module, sample, chunks, param_scale), partitions)


def balance_cost(costs: Iterable[float], partitions: int) -> list[int]:
    """Cuts a sequence of costs into consecutive parts whose greatest sum is least -> the length of each part.

    Equivalent to: the least max(map(sum, parts)) over all ways to cut costs into so many non-empty parts.
    """
    costs = list(costs)
    if not 1 <= partitions <= len(costs):
        raise ValueError(f"partitions must be between 1 and the {len(costs)} layers, but got {partitions}")
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    best: list[tuple[float, list[int]]] = [(total[n], [n]) for n in range(len(costs) + 1)]
    for parts in range(2, partitions + 1):
        best = [
            min(
                ((max(best[m][0], total[n] - total[m]), [*best[m][1], n - m]) for m in range(parts - 1, n)),
                key=_greatest,
            )
            if n >= parts
            else (float("inf"), [])
            for n in range(len(costs) + 1)
        ]
    return best[-1][1]


def _greatest(candidate: tuple[float, list[int]]) -> float:
    return candidate[0]


def profile_times(
    module: nn.Sequential, sample: Tensors, timeout: float, device: torch.device | str | None = None
) -> list[float]:
    """Seconds of each layer's forward and backward, the median over as many runs as the timeout allows."""
    check_tensors(sample, "sample")
    first = sample if isinstance(sample, Tensor) else sample[0]
    where = first.device if device is None else torch.device(device)
    copy = _trial_copy(module).to(where)
    runs: list[list[float]] = []
    begin = time.perf_counter()
    while not runs or time.perf_counter() - begin < timeout:
        runs.append(_time_layers(copy, move(sample, where), where))
    return [sorted(times)[len(times) // 2] for times in zip(*runs, strict=True)]


def _time_layers(module: nn.Sequential, values: Tensors, device: torch.device) -> list[float]:
    times = []
    with keeping({}):
        for layer in module:
            values = _detached(values)
            begin = _now(device)
            values = layer(values)
            outputs = [values] if isinstance(values, Tensor) else list(values)
            outputs = [x for x in outputs if x.requires_grad]
            torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs], retain_graph=True)
            times.append(_now(device) - begin)
    return times


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def profile_sizes(module: nn.Sequential, sample: Tensors, chunks: int, param_scale: float) -> list[float]:
    """Bytes of each layer: its parameters, scaled, and what its forward keeps for backward, times chunks."""
    check_tensors(sample, "sample")
    copy, values, sizes = _trial_copy(module), sample, []
    with keeping({}):
        for layer in copy:
            values = _detached(values)
            own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
            kept: dict[int, int] = {}

            def keep(x: Tensor, own: set[int] = own, kept: dict[int, int] = kept) -> Tensor:
                storage = x.untyped_storage()
                if storage.data_ptr() not in own:
                    kept[storage.data_ptr()] = storage.nbytes()
                return x

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                values = layer(values)
            params = sum(p.numel() * p.element_size() for p in layer.parameters())
            sizes.append(params * param_scale + sum(kept.values()) * chunks)
    return sizes


def _trial_copy(module: nn.Sequential) -> nn.Sequential:
    """A copy that can be run without a trace in the module: buffers, gradients and gates' losses are its own."""
    return deepcopy(module).train()


def _detached(values: Tensors) -> Tensors:
    def leaf(x: Tensor) -> Tensor:
        return x.detach().requires_grad_(x.is_floating_point())

    return leaf(values) if isinstance(values, Tensor) else tuple(leaf(x) for x in values)
