"""Transformers' MoE models with their experts spread over the ranks of a group, on the exchange of fmoe_ext."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmoe_ext.ep.exchange import Group, find_group, register_group
from fmoe_ext.ep.expert_parallel import ExpertParallel
from fmoe_ext.linear import check_plain
from fmoe_ext.spread import keep_rows

WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
STACKED = (*WEIGHTS, *(f"{name}_bias" for name in WEIGHTS))


def spread_experts(model: Any, group: Group = None, expert_dp_comm: str = "none") -> None:
    """What huggingface.expert_parallel() does once the model computes with experts_implementation="fmoe"."""
    modules = [m for m in model.modules() if hasattr(m, "is_transposed")]
    if not modules:
        raise ValueError(
            f"{type(model).__name__} has no experts module that Transformers lets others compute, so none whose "
            "experts could be spread over ranks"
        )
    size = dist.get_world_size(find_group(register_group(group)))
    for experts in modules:
        _check(experts, size)
    for experts in modules:
        _keep_own(experts, group, size, expert_dp_comm)
    model.generate = functools.partial(_generate, model)
    model.save_pretrained = functools.partial(_save_pretrained, model)


def _check(experts: Any, size: int) -> None:
    """ValueError for experts that cannot be spread, before any module has changed."""
    name = type(experts).__name__
    if getattr(experts, "expert_parallel", None) is not None:
        raise ValueError(f"the experts of {name} are spread over ranks already")
    for _, p in _stacks(experts):
        check_plain(p)  # Transformers' own expert parallelism has made it a DTensor
        if p.shape[0] % size != 0:
            raise ValueError(f"{name} has {p.shape[0]} experts, which {size} ranks cannot share evenly")


@torch.no_grad()
def _keep_own(experts: Any, group: Group, size: int, expert_dp_comm: str) -> None:
    """Lets go of the experts of other ranks."""
    stacks = dict(_stacks(experts))
    num_local = next(iter(stacks.values())).shape[0] // size
    parallel = experts.expert_parallel = ExpertParallel(group, num_local)
    for name, p in stacks.items():
        own = keep_rows(p, parallel.rank * num_local, (parallel.rank + 1) * num_local)
        own.dp_comm = expert_dp_comm  # type: ignore[attr-defined]  # what DistributedGroupedDataParallel reads
        setattr(experts, name, own)


def _stacks(experts: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter [E, *]) of what each expert has of its own."""
    return ((name, p) for name, p in experts.named_parameters(recurse=False) if name in STACKED)


def _generate(model: Any, *args: Any, synced_gpus: bool = True, **kwargs: Any) -> Any:
    """generate() that goes on until every rank has finished, for all of them hold experts that the others need."""
    return type(model).generate(model, *args, synced_gpus=synced_gpus, **kwargs)


def _save_pretrained(model: Any, save_directory: Any, **options: Any) -> None:
    """save_pretrained() of the whole model; every rank calls it, the first of the job writes."""
    state = _whole_state(model, options.pop("state_dict", None))
    if dist.get_rank() == 0:
        type(model).save_pretrained(model, save_directory, state_dict=state, **options)
    dist.barrier()


def _whole_state(model: nn.Module, state: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """The state dict with the experts of all ranks, on the first rank; collective in its group of experts."""
    state = dict(model.state_dict() if state is None else state)
    for path, experts in model.named_modules():
        if getattr(experts, "expert_parallel", None) is None:
            continue
        group = find_group(experts.expert_parallel.group)
        if 0 not in dist.get_process_group_ranks(group):
            continue  # replicas of the experts that the first rank gathers
        for name, _ in _stacks(experts):
            key = f"{path}.{name}"
            state[key] = _gathered(state[key], group)
    return state


def _gathered(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks, one after the other, on rank 0; the own part elsewhere."""
    part = part.detach().contiguous()
    parts = None
    if dist.get_rank() == 0:
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.gather(part, parts, dst=0, group=group)
    return part if parts is None else torch.cat(parts)
