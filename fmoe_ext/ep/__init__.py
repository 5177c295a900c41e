"""Expert parallelism: the exchange, its overlap with computation, shadowing and placement of experts.

Where one forward goes:

    expert_parallel.py   ExpertParallel of a layer: which exchange, in how many chunks; tuning.py measures for "auto"
    schedule.py          its phases: plan, send, receive, give_back, collect, with a row for each choice
    token_exchange.py, buffer_exchange.py    the same phases with fewer rows, or by DeepEP
    plan.py, static.py   how many rows go where: counted by the ranks, or a fixed number of each
    exchange.py          the collectives under it, over the group or a communicator of our own
    traced.py, wire.py   the same of a compiled graph; rows in 8 bits on their way

Beside it: placement.py (which rank holds which expert), shadowing.py (experts that come to their tokens), cost.py (what
a step should take), ranks.py (what ranks share beside experts), wrappers.py (who must not wrap them), process_groups.py
(groups by name).
"""

from collections.abc import Iterator
from typing import Any

from torch import nn


def expert_parallel_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, layer) of every layer of a model, itself included, that has expert_parallel."""
    for name, layer in model.named_modules():
        if getattr(layer, "expert_parallel", None) is not None:
            yield name, layer
