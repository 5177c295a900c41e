"""fmoe.layers."""

import torch

from fmoe_ext.compat.functions import MOEGather, MOEScatter, prepare_forward
from fmoe_ext.layers import FMoE, mark_module_parallel_comm
from fmoe_ext.routing import map_structure

fmoe_faster_schedule = False


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
