"""Expert parallelism: the exchange, its overlap with computation, shadowing and placement of experts."""

from collections.abc import Iterator
from typing import Any

from torch import nn


def expert_parallel_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, layer) of every layer of a model, itself included, that has an ExpertParallel: layer.expert_parallel."""
    for name, layer in model.named_modules():
        if getattr(layer, "expert_parallel", None) is not None:
            yield name, layer
