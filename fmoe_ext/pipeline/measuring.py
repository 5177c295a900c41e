"""Run a layer to see what it takes: seconds, parameters, and the bytes that it keeps for its backward.

split() and compat.fairscale's balance_by_time() and balance_by_size() call these functions on copies of layers.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn

from fmoe_ext.pipeline.microbatch import Values, as_tuple, map_tensors


def now(device: torch.device) -> float:
    """Read the clock, in seconds, once all that was started on the device is done."""
    if device.type == "cuda":  # kernels run after the call that started them returned
        torch.cuda.synchronize(device)
    return time.perf_counter()


def copies(values: Values) -> Any:
    """Copy values to begin a new graph with; floating ones have a gradient, and a layer may change all in place."""
    # clones last: autograd refuses to change a leaf in place
    return map_tensors(lambda x: x.detach().requires_grad_(x.is_floating_point()).clone(), values)


def backward_of_ones(values: Values) -> None:
    """Run the backward of the sum of all values that have a gradient."""
    outputs = [x for x in as_tuple(values) if isinstance(x, Tensor) and x.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])


def parameter_bytes(layer: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in layer.parameters())


def run_and_weigh(layer: nn.Module, values: Values) -> tuple[Values, int]:
    """Compute layer(values), and count the bytes that it keeps for backward besides its parameters."""
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept: dict[int, int] = {}  # {address of a storage: its bytes}, so that views of one count once

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        result = layer(copies(values))
    return result, sum(kept.values())
