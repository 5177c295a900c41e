"""fmoe.layers."""

from collections.abc import Callable
from typing import Any

import torch

from fmoe_ext.compat.functions import MOEGather, MOEScatter, prepare_forward
from fmoe_ext.compat.gates.naive_gate import NaiveGate
from fmoe_ext.layers import FMoE as _FMoE
from fmoe_ext.layers import mark_module_parallel_comm
from fmoe_ext.routing import map_structure

fmoe_faster_schedule = False


class FMoE(_FMoE):
    """FMoE whose default gate is fmoe.gates.NaiveGate."""

    def __init__(
        self,
        num_expert: int = 32,
        d_model: int = 1024,
        world_size: int = 1,
        mp_group: Any = None,
        slice_group: Any = None,
        moe_group: Any = None,
        top_k: int = 2,
        gate: Any = NaiveGate,
        expert: Any = None,
        gate_hook: Callable[..., Any] | None = None,
        mask: torch.Tensor | None = None,
        mask_dict: dict[int, Any] | None = None,
        gate_bias: bool = True,
        *,
        renormalize: bool = False,
        gate_group: Any = None,
        overlap_degree: int | str = 1,
        max_rows_per_rank: int | None = None,
        exchange: str = "choice",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            *(num_expert, d_model, world_size, mp_group, slice_group, moe_group, top_k),
            *(gate, expert, gate_hook, mask, mask_dict, gate_bias),
            renormalize=renormalize,
            gate_group=gate_group,
            overlap_degree=overlap_degree,
            max_rows_per_rank=max_rows_per_rank,
            exchange=exchange,
            device=device,
            dtype=dtype,
        )


def _fmoe_general_global_forward(inp, gate, expert_fn, num_expert, world_size, **kwargs):
    """Scatters inp to the experts, calls expert_fn(rows, fwd_expert_count) and gathers the results.

    inp [B, *] or a nest of such tensors, gate [B, K] or [B], -1 for dropped choices -> [B * K, *], row b * K + k for
    choice k of token b, zero if it was dropped.
    """
    pos, local_expert_count, global_expert_count, fwd_expert_count, fwd_batch_size = prepare_forward(
        gate, num_expert, world_size
    )
    top_k = gate.shape[1] if gate.dim() == 2 else 1
    source = torch.div(pos, top_k, rounding_mode="floor")
    x = map_structure(
        lambda leaf: MOEScatter.apply(
            leaf, source, local_expert_count, global_expert_count, fwd_batch_size, world_size
        ),
        inp,
    )
    return map_structure(
        lambda leaf: MOEGather.apply(
            leaf, pos, local_expert_count, global_expert_count, gate.numel(), world_size
        ),
        expert_fn(x, fwd_expert_count),
    )


__all__ = ["FMoE", "fmoe_faster_schedule", "mark_module_parallel_comm"]
