"""Split each expert's hidden units over the ranks of a group: Megatron-core's expert tensor parallelism.

An MLP's hidden units are independent of each other, so that its result is a sum over them:

    y = W2 act(W1 x) = sum over ranks r of  W2[:, r] act(W1[r] x)

Each rank gets the rows of all ranks of the group, computes its units' part of each expert's result, and the parts are
summed and sent back; the bias behind the sum is added once. A gated activation has its gate's rows before up's in one
weight: a rank has a part of either half, and a checkpoint stores the halves as shards of their own, so that any number
of ranks loads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fmoe_ext.ep.ranks import WidthGroup
from fmoe_ext.expert_kinds import Fused
from fmoe_ext.experts import is_gated
from fmoe_ext.routing import sort_choices
from fmoe_ext.tokens import Nest
from fmoe_ext.transformer import FMoETransformerMLP

# {name of a parameter of FusedExperts: its dimension that is spread over the ranks, None if it is whole}
_WIDTH_AXES = MappingProxyType({"htoh4.weight": 1, "htoh4.bias": 1, "h4toh.weight": 2, "h4toh.bias": None})


class WidthShardedMLP(FMoETransformerMLP):
    """FMoETransformerMLP whose experts have d_hidden / width_group.size() hidden units on this rank.

    htoh4.weight [e, H / size, D], htoh4.bias [e, H / size], h4toh.weight [e, D, H / size]; h4toh.bias [e, D] is the
    same on all ranks. A gated activation has H / size rows of its gate, then as many of up. With width_group=None, or a
    group of one rank, it is a plain FMoETransformerMLP.
    Raises ValueError if the group's size does not divide d_hidden, and for overlap_degree="auto" or exchange="auto"
    over several ranks, because each rank might measure another value.
    """

    def __init__(self, *, d_hidden: int, width_group: Any = None, **arguments: Any):
        size = 1 if width_group is None else width_group.size()
        if d_hidden % size:
            raise ValueError(
                f"d_hidden must be a multiple of expert_tensor_parallel_size={size}, but is {d_hidden}"
            )
        autos = [name for name in ("overlap_degree", "exchange") if arguments.get(name) == "auto"]
        if size > 1 and autos:
            raise ValueError(
                f'{autos[0]}="auto" is measured by each expert-parallel group for itself, but with '
                f"expert_tensor_parallel_size={size} several of them compute together: give a value"
            )
        super().__init__(d_hidden=d_hidden // size, **arguments)
        self.width = None if size == 1 else WidthGroup(width_group)

    @property
    def expert_kind(self) -> Any:
        """FusedByWidth over several ranks."""
        return super().expert_kind if self.width is None else FusedByWidth(self, self.width)

    def place_experts(self, order: Iterable[int]) -> None:
        """Raise RuntimeError where experts have parts on other ranks, which would not move with them."""
        if self.width is not None:
            raise RuntimeError(
                "experts over expert-tensor-parallel ranks cannot be moved: they have parts elsewhere; use "
                "expert_tensor_parallel_size=1"
            )
        super().place_experts(order)

    def whole_like(self, part: Tensor, name: str) -> Tensor:
        """Make an empty tensor for one whole expert's parameter; this rank has only part of it."""
        # the axis counts the dimension of experts, which part lacks
        shape, axis = list(part.shape), _WIDTH_AXES[name]
        if self.width is not None and axis is not None:
            shape[axis - 1] *= self.width.size
        return part.new_empty(shape)

    def part_of(self, whole: Tensor, name: str) -> Tensor:
        """Return this rank's part of one whole expert's parameter (without the dimension of experts)."""
        axis = _WIDTH_AXES[name]
        if self.width is None or axis is None:
            return whole
        halves = whole.chunk(_num_halves(self, name), axis - 1)
        return torch.cat(
            [half.chunk(self.width.size, axis - 1)[self.width.rank] for half in halves], axis - 1
        )


def _num_halves(moe: FMoETransformerMLP, name: str) -> int:
    """Return 2 for a weight with the gate's rows before up's, else 1."""
    return 2 if name.startswith("htoh4") and is_gated(moe.experts.activation) else 1


class FusedByWidth(Fused):
    """FusedExperts of which each rank has some hidden units: it computes the rows of all, and results are summed."""

    has_whole_experts = False

    def __init__(self, layer: WidthShardedMLP, width: WidthGroup):
        super().__init__(layer)
        self._of, self._width = layer, width

    @property
    def can_be_shadowed(self) -> bool:
        return False

    @property
    def depends_on_batch(self) -> str | None:
        return "their results are summed over expert-tensor-parallel ranks; use expert_tensor_parallel_size=1"

    def _again(self) -> Fused:
        return FusedByWidth(self._of, self._width)

    def compute(self, x: Nest, topk_idx: Tensor, topk_weights: Tensor, first: int, end: int) -> Tensor:
        experts, width = self.layer.experts, self._width
        if experts.must_be_called:
            raise RuntimeError(
                "experts over expert-tensor-parallel ranks take no hooks, adapters or wrappers on htoh4 and h4toh; "
                "use expert_tensor_parallel_size=1"
            )
        # Rows of all ranks, padded to the same number; padding chooses no expert (-1).
        assert isinstance(x, Tensor)
        most = width.most_rows(x)
        (w1, b1, w2, b2), *main_grads = self._weights(end) or (experts.weights, experts.main_grads)
        weights = w1, b1, w2, None if b2 is None else width.add_once(b2)
        handle = sort_choices(width.gather(topk_idx, most, padding=-1), end - first)
        tokens, shares = width.gather(x, most), width.gather(topk_weights, most)
        out = experts(tokens, handle.tokens_per_expert, handle, shares, weights, *main_grads)
        return width.sum(out, x.shape[0])


def sharded_parts(
    moe: FMoETransformerMLP, key: str, name: str, p: Tensor, offsets: tuple[Any, ...], groups: Any
) -> Any:
    """Make the shards of one parameter of the experts for dist_checkpointing, parts of the tensor of all ranks."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    # offsets: of the layer in a stack of layers, an axis in front each
    layer_axes = len(offsets)
    by_expert = (layer_axes, groups.ep.rank(), groups.ep.size())
    rank, size = groups.expt_tp.rank(), groups.expt_tp.size()

    def shard(key: str, part: Tensor, replica_id: Any, *places: tuple[int, int, int]) -> Any:
        return ShardedTensor.from_rank_offsets(
            key, part, *offsets, by_expert, *places, replica_id=replica_id, prepend_axis_num=layer_axes
        )

    # Whole on this rank: cut by experts alone.
    axis = None if size == 1 else _WIDTH_AXES[name]
    if axis is None:
        return shard(key, p, (0, rank, groups.expt_dp.rank()))
    # By width too; with two halves there are 2 * size places: the first `size` are the gate's, the others up's.
    halves, replica_id = _num_halves(moe, name), (0, 0, groups.expt_dp.rank())
    if halves == 1:
        return shard(key, p, replica_id, (layer_axes + axis, rank, size))

    def build(key: str, data: Tensor, replica_id: Any, flattened_range: slice | None = None) -> list[Any]:
        if flattened_range is not None:
            raise RuntimeError(f"{key}: a gated activation's weights over ranks have no flattened shards")
        return [
            shard(key, half, replica_id, (layer_axes + axis, i * size + rank, halves * size))
            for i, half in enumerate(data.chunk(halves, axis))
        ]

    return ShardedTensorFactory(key, p, build, lambda parts: torch.cat(parts, axis), replica_id)
