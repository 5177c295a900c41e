"""A training as the few functions that an audit calls in every layout.

A job cuts a batch over ranks and microbatches of unequal sizes, and its loss must still be that of the whole
batch. So a loss comes in two parts, each with a weight. A mean over tokens is weighted by the part's share of all
tokens, times the number of ranks, because data parallelism takes the mean over ranks: the sum over microbatches is
then the whole batch's mean. A loss that all ranks compute together, as a balance loss is, is whole on each of them
and is weighted by the microbatch's share of its rank's samples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from fmoe_ext.audit.cases import AuditError, Layout
from fmoe_ext.distributed import DistributedGroupedDataParallel, clip_grad_norm_
from fmoe_ext.layers import FMoE

Batch: TypeAlias = Mapping[str, torch.Tensor]
_MASKS = ("attention_mask", "valid")  # names in a batch of what says which tokens are real
NOT_A_TARGET = -100  # what cross_entropy ignores
_NUM_PADDED = 3  # columns that _pad() adds


@dataclass(frozen=True)
class Part:
    """A microbatch of one rank, and what it is a part of."""

    batch: Batch
    of_rank: Batch  # all that this rank has
    whole: Batch  # the batch of the step, on all ranks
    num_ranks: int
    num_microbatches: int


def count_tokens(batch: Batch) -> int:
    """Count what the mean of a loss is over: labels or targets that count, else tokens of the mask, else samples."""
    if "labels" in batch:
        return int((batch["labels"][:, 1:] != NOT_A_TARGET).sum())
    if "targets" in batch:
        return int((batch["targets"] != NOT_A_TARGET).sum())
    for name in _MASKS:
        if name in batch:
            return int(batch[name].sum())
    return num_samples(batch)


def _weight_by_tokens(part: Part) -> float:
    """Weight mean losses so that their sum over microbatches, averaged over ranks, is the whole batch's mean."""
    return part.num_ranks * count_tokens(part.batch) / max(count_tokens(part.whole), 1)


def _weight_by_samples(part: Part) -> float:
    """Weight a loss that all ranks share so that its sum over a rank's microbatches counts it once."""
    return num_samples(part.batch) / max(num_samples(part.of_rank), 1)


def _data_parallel(model: nn.Module, layout: Layout) -> nn.Module:
    """Wrap in DistributedGroupedDataParallel over the groups of the layout; not in one process."""
    if layout.groups is None:
        return model
    return DistributedGroupedDataParallel(model, **layout.groups.data_parallel_kwargs())


def spread_experts(model: nn.Module, layout: Layout) -> nn.Module:
    """Leave on this rank its share of the experts of every FMoE layer -> the model, changed in place.

    Raises AuditError for layers that are spread already, or whose experts do not divide.
    """
    if layout.groups is None:
        return model
    layers = {name: module for name, module in model.named_modules() if isinstance(module, FMoE)}
    if not layers and layout.ep > 1:
        raise AuditError(
            f"{type(model).__name__} has no FMoE layer whose experts could be spread over {layout.ep} ranks: give a "
            'function that builds it for a layout, or leave_out={"ep": reason}'
        )
    for name, layer in layers.items():
        if layer.expert_parallel is not None:
            raise AuditError(
                f"{name} is spread over ranks already: audit() takes a model that was made for one process"
            )
        if layer.num_experts % layout.ep:
            raise AuditError(
                f"{name} has {layer.num_experts} experts, which {layout.ep} ranks cannot share evenly"
            )
        if layout.ep > 1:
            layer.spread(layout.groups.ep, gate_group=layout.groups.world)
        else:
            layer.share_gate(layout.groups.world)
        layer.mark_parallel_comm("moe")
    return model


def _reduce_gradients(model: nn.Module) -> None:
    """Call allreduce_params() of a DistributedGroupedDataParallel; nothing for other models."""
    if isinstance(model, DistributedGroupedDataParallel):
        model.allreduce_params()


def _clip_gradients(model: nn.Module, max_norm: float = 0.1) -> torch.Tensor:
    """Clip by the norm of all gradients of the job -> that norm; max_norm is small, so that clipping acts."""
    if isinstance(model, DistributedGroupedDataParallel):
        return clip_grad_norm_(model, max_norm)
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def make_optimizer(model: nn.Module) -> Optimizer:
    """Make SGD with momentum: linear, so that rounding stays rounding."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _recompute_blocks(model: Any, kind: str) -> None:
    """Put torch.utils.checkpoint around every block of blocks_of(model), or use a Transformers model's own."""
    reentrant = kind == "reentrant"
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        return
    blocks = blocks_of(model)
    if not blocks:
        raise AuditError(
            f"{type(model).__name__} has no nn.ModuleList whose modules could be recomputed: give the recipe "
            'recompute=, or leave_out={"recomputation": reason}'
        )
    for block in blocks.values():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=reentrant)


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Find {name: module} of the modules in the outermost nn.ModuleLists: the layers of most models."""
    blocks: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            blocks |= {f"{name}.{index}": block for index, block in enumerate(child)}
        else:
            blocks |= {f"{name}.{inner}": block for inner, block in blocks_of(child).items()}
    return blocks


def _pad(batch: Batch, side: str) -> Batch:
    """Add _NUM_PADDED columns to the left or right of every tensor [B, S, ...], which the batch's mask excludes."""
    mask = next((batch[name] for name in _MASKS if name in batch), None)
    if mask is None:
        raise AuditError(
            f"the batch has no {' or '.join(_MASKS)} [B, S] that could say which tokens are padding, only "
            f'{", ".join(batch)}: add one, give the recipe pad=, or leave_out={{"padding": reason}}'
        )

    def padded(name: str, x: torch.Tensor) -> torch.Tensor:
        if x.dim() < 2 or x.shape[1] != mask.shape[1]:
            return x
        filling = 0 if name in _MASKS else NOT_A_TARGET if name in ("labels", "targets") else 1
        columns = x.new_full((x.shape[0], _NUM_PADDED, *x.shape[2:]), filling)
        return torch.cat((columns, x) if side == "left" else (x, columns), 1)

    return {name: padded(name, x) for name, x in batch.items()}


def _accumulate_nothing(model: Any, microbatches: Sequence[Batch]) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class Recipe:
    """A training as functions of a module, which other processes can import; all but three have defaults.

    build(layout) makes the model for Layout(dp, ep, groups), of Transformers or any other with its experts where the
    layout says; its parameters are overwritten with those of one process.
    loss(model, batch) returns the mean loss of (a part of) a batch; or the pair of it and a loss that all ranks share
    and compute together, as the gates' balance losses are. The job's loss is the sum over microbatches of both, times
    weight(part) and shared_weight(part), averaged over ranks.
    leave_out may name dp, ep, accumulation, 2, uneven, recomputation, reentrant, non-reentrant, padding, left, right,
    float32. The report says so.
    """

    build: Callable[[Layout], nn.Module]
    batch: Callable[[int], Batch]  # batch(step): the whole {name: tensor [B, ...]}, the same on every rank
    loss: Callable[[Any, Batch], torch.Tensor | tuple[torch.Tensor, torch.Tensor]]
    weight: Callable[[Part], float] = _weight_by_tokens
    shared_weight: Callable[[Part], float] = _weight_by_samples
    # around all forwards and backwards of a step; may run forwards of the microbatches before (gates.WholeBatch)
    accumulate: Callable[[Any, Sequence[Batch]], AbstractContextManager[Any]] = _accumulate_nothing
    wrap: Callable[[nn.Module, Layout], nn.Module] = _data_parallel  # for data parallelism, after build
    reduce: Callable[[Any], None] = _reduce_gradients  # after the last backward
    clip: Callable[[Any], torch.Tensor | None] = _clip_gradients  # may return the norm
    optimizer: Callable[[Any], Optimizer] = make_optimizer  # of the wrapped model
    recompute: Callable[[Any, str], None] = _recompute_blocks  # turns on "reentrant" or "non-reentrant"
    pad: Callable[[Batch, str], Batch] = _pad  # the same samples, "left" or "right" of tokens without effect
    # {setting: why this training does not offer it}
    leave_out: Mapping[str, str] = field(default_factory=dict)


def num_samples(batch: Batch) -> int:
    """Dimension 0 that all tensors of a batch share; AuditError if they do not."""
    if not isinstance(batch, Mapping) or not all(isinstance(x, torch.Tensor) for x in batch.values()):
        raise AuditError(
            f"batch(step) must return a dict of tensors [B, ...], but returned {type(batch).__name__}"
        )
    sizes = {name: x.shape[0] if x.dim() else None for name, x in batch.items()}
    if len(set(sizes.values())) != 1 or None in sizes.values():
        raise AuditError(
            f"the tensors of a batch must have one number of samples in dimension 0, but: {sizes}"
        )
    return next(size for size in sizes.values() if size is not None)


def take(batch: Batch, first: int, end: int) -> Batch:
    """Return the samples [first, end) of a batch."""
    return {name: x[first:end] for name, x in batch.items()}
