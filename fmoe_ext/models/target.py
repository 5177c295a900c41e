"""Interface of fmoefy and a model kind: Options go in, Targets (with their DenseMLP) come out.

whole() gathers an MLP that tensor parallelism has cut, for both kinds of Megatron.

A model kind is a module that knows the MLPs of one library's models. It has
    KIND                    its name in the report
    LOOKED_FOR              its line in the error when nothing was found
    find(model, options)    -> list of Target, empty if the model is not of this kind
    after_replacing(model, kind, targets, layers, options)    -> a sentence for the report; optional, and called for
                            every model, of whatever kind (not plain.py's)
fmoefy asks a kind (fmoefy.LIBRARIES) once its library is imported, and plain.py last; with match= plain.py alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Options:
    """The arguments of fmoefy(), which documents them."""

    num_experts: int | None = None  # of all ranks
    num_local_experts: int | None = None
    distributed_experts: bool = True
    hidden_hidden_size: int | None = None
    top_k: int | None = None
    gate: Any = None
    megatron_version: str | None = None
    layers: Any = None
    match: Any = None
    init: str = "random"
    split: int = 1
    noise: float = 0.0
    activation: Any = None
    d_model: int | None = None
    load_dense: Any = None
    moe_kwargs: Mapping[str, Any] = field(default_factory=dict)  # further arguments of FMoETransformerMLP

    def experts_of_rank(self, num_ranks: int) -> int | None:
        """Number of experts on each rank; None if neither option is given, ValueError for both or an uneven split."""
        if self.num_experts is None:
            return self.num_local_experts
        if self.num_local_experts is not None:
            raise ValueError(
                f"num_experts={self.num_experts} (of all ranks) and num_local_experts={self.num_local_experts} (of "
                "each rank) say the same thing: give num_experts only"
            )
        if self.num_experts % num_ranks:
            raise ValueError(
                f"num_experts={self.num_experts} is the number of experts of all ranks together: it must be a multiple "
                f"of the {num_ranks} ranks"
            )
        return self.num_experts // num_ranks


@dataclass(frozen=True)
class DenseMLP:
    """The MLP that is replaced: y = act(x @ w1^T + b1) @ w2^T + b2.

    Weights are detached and may share the model's memory. Where they cannot be read, w1 and w2 are None; d_model,
    d_hidden and activation may be None too, and the user has to give them.
    """

    d_model: int | None
    d_hidden: int | None
    activation: str | Callable[..., Any] | None  # what FMoETransformerMLP takes, gated ones by name
    # [H1, d_model], H1 = 2 * d_hidden if gated, gate rows first; or (gate, up), each [d_hidden, d_model]
    w1: Tensor | tuple[Tensor, Tensor] | None = None
    b1: Tensor | None = None  # [H1], gate before up
    w2: Tensor | None = None  # [d_model, d_hidden]
    b2: Tensor | None = None  # [d_model]
    # why w1 and w2 are None; beside weights: only the activation is unknown, and the user's stands in for it
    why_unreadable: str = ""

    @property
    def w1_parts(self) -> Any:
        """w1 as its matrices [d_hidden, d_model]: (w1,), or (gate, up)."""
        if isinstance(self.w1, tuple):
            return self.w1
        assert self.w1 is not None, self.why_unreadable
        return self.w1.split(self.d_hidden)

    @property
    def has_bias(self) -> bool:
        return self.b1 is not None or self.b2 is not None


@dataclass(frozen=True)
class Target:
    """One MLP of a model and how to put an MoE layer in its place: parent.<attribute> = wrap(moe), then finish().

    moe_kwargs: arguments of FMoETransformerMLP that the kind wants (num_expert, top_k, gate, world_size, moe_group,
    ...) unless the user says otherwise. is_candidate: found by its structure, not by its class; if it cannot be
    read, it stays dense and the report says why.
    """

    path: str  # dotted name in the model, for the report
    parent: nn.Module
    attribute: str  # may be the index in a ModuleList
    dense: DenseMLP
    # gives the MoE layer the calling convention that the model expects
    wrap: Callable[[Any], nn.Module] = field(default=lambda moe: moe)
    finish: Callable[[], None] = field(default=lambda: None)  # called once the layer is there
    # the layer's number in the whole model, where this process has a part (pipeline); None: layers= counts targets
    layer_index: int | None = None
    num_layers: int | None = None  # of the whole model
    moe_kwargs: Mapping[str, Any] = field(default_factory=dict)
    gate_kwargs: Mapping[str, Any] = field(default_factory=dict)  # bound to the gate's class
    notes: tuple[str, ...] = ()  # what is different from the dense MLP, for the report
    is_candidate: bool = False


def whole(dense: DenseMLP, gated: bool, group: Any) -> DenseMLP:
    """Gather an MLP that tensor parallelism has cut: rows of w1 and b1, columns of w2. A collective call.

    dense has weights, w1 as one tensor. d_model and d_hidden are those of the whole MLP already, and every rank has all
    of b2.
    """
    if dist.get_world_size(group) == 1:
        return dense
    return replace(
        dense,
        w1=_join_rows(dense.w1, gated, group),
        b1=None if dense.b1 is None else _join_rows(dense.b1, gated, group),
        w2=torch.cat(_gather(dense.w2, group), 1),
    )


def _join_rows(part: Any, gated: bool, group: Any) -> Tensor:
    """Join the rows of all ranks; a rank of a gated MLP has its gate rows before its up rows."""
    parts = _gather(part, group)
    if not gated:
        return torch.cat(parts)
    gate, up = zip(*(part.chunk(2) for part in parts), strict=True)
    return torch.cat((*gate, *up))


# equal shapes on all ranks: Megatron cuts evenly
def _gather(part: Any, group: Any) -> list[Tensor]:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return parts
