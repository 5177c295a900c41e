"""What of a layer would give a token another result in another batch, refused under fmoe_ext.batch_invariant()."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fmoe_ext import ops
from fmoe_ext.gates import BaseGate
from fmoe_ext.routing import Nest, leaves_of

if TYPE_CHECKING:
    from fmoe_ext.layers import FMoE


def check_batch_invariance(layer: FMoE, moe_inp: Nest) -> None:
    """RuntimeError in the mode, for a layer that cannot keep its promise."""
    if not ops.is_batch_invariant():
        return
    for what, reason in _reasons(layer, moe_inp):
        if reason is not None:
            raise RuntimeError(
                f"batch_invariant() promises that a token's result does not depend on its batch, but {what}: {reason}"
            )


def _reasons(layer: FMoE, moe_inp: Nest) -> Iterator[tuple[str, str | None]]:
    """(what, why it depends on the batch or None), of each part."""
    if isinstance(layer.gate, BaseGate):
        yield f"not with a {type(layer.gate).__name__}", layer.gate.depends_on_batch
    yield "not with such experts", layer.expert_kind.depends_on_batch
    if layer.expert_parallel is not None and layer.expert_parallel.exchange != "choice":
        yield (
            f"exchange={layer.expert_parallel.exchange!r} sums the results of a rank's experts first",
            'another number of ranks sums others; use exchange="choice"',
        )
    if layer.expert_parallel is not None and layer.expert_parallel.shadows:
        yield (
            "shadowed experts' results are summed apart",
            "shadows follow the load; clear layer.expert_parallel.shadows",
        )
    yield "not on this device", ops.kernels_depend_on_batch(leaves_of(moe_inp)[0])
