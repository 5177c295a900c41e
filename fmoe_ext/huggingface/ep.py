"""Transformers' MoE models with their experts spread over the ranks of a group, on the exchange of fmoe_ext."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from fmoe_ext.ep.expert_parallel import ExpertParallel
from fmoe_ext.ep.process_groups import Group, find_group, register_group
from fmoe_ext.huggingface.peft_spread import adapters_around, is_peft_model, keep_own_adapters, save_adapters
from fmoe_ext.huggingface.saving import replace_save_pretrained, save_spread, stacks
from fmoe_ext.linear import check_plain
from fmoe_ext.spread import keep_rows


def spread_experts(model: Any, group: Group = None, expert_dp_comm: str = "none") -> None:
    """Spread a Transformers model with experts_implementation="fmoe", for huggingface.expert_parallel()."""
    modules = [m for m in model.modules() if hasattr(m, "is_transposed") and not hasattr(m, "get_base_layer")]
    if not modules:
        raise ValueError(
            f"{type(model).__name__} has no experts module that Transformers lets others compute, so none whose "
            "experts could be spread over ranks"
        )
    size = dist.get_world_size(find_group(register_group(group)))
    for experts in modules:  # before any module has changed
        name = type(experts).__name__
        if getattr(experts, "expert_parallel", None) is not None:
            raise ValueError(f"the experts of {name} are spread over ranks already")
        for _, p in stacks(experts):
            check_plain(p)  # Transformers' own expert parallelism has made it a DTensor
            if p.shape[0] % size != 0:
                raise ValueError(f"{name} has {p.shape[0]} experts, which {size} ranks cannot share evenly")
    for experts in modules:
        whole = dict(stacks(experts))
        num_local = next(iter(whole.values())).shape[0] // size
        parallel = experts.expert_parallel = ExpertParallel(group, num_local)
        first, end = parallel.rank * num_local, (parallel.rank + 1) * num_local
        for name, p in whole.items():
            with torch.no_grad():
                own = keep_rows(p, first, end)
            own.dp_comm = expert_dp_comm  # type: ignore[attr-defined]  # what DistributedGroupedDataParallel reads
            setattr(experts, name, own)
        for _, adapter in adapters_around(model, experts):
            keep_own_adapters(adapter, first, end, expert_dp_comm)
    if is_peft_model(model):
        replace_save_pretrained(model, save_adapters)
        model = model.get_base_model()
    model.generate = functools.partial(_generate, model)
    replace_save_pretrained(model, save_spread)


def _generate(model: Any, *args: Any, synced_gpus: bool = True, **kwargs: Any) -> Any:
    """generate() that goes on until every rank has finished, for all of them hold experts that the others need."""
    return type(model).generate(model, *args, synced_gpus=synced_gpus, **kwargs)
