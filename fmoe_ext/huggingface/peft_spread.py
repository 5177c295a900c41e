"""PEFT's adapters on experts that are spread over ranks: a rank holds its experts' adapters, a file all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmoe_ext.ep.expert_parallel import ExpertParallel
from fmoe_ext.ep.process_groups import find_group


def is_peft_model(model: nn.Module) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def adapters_around(model: nn.Module, experts: nn.Module | None = None) -> Iterator[tuple[str, Any]]:
    """(name, PEFT's wrapper of one weight) around an experts module, or around any whose experts are spread."""
    for name, module in model.named_modules():
        if not hasattr(module, "get_base_layer") or not hasattr(module, "lora_A"):
            continue
        base = module.get_base_layer()
        if base is experts or (experts is None and _parallel(base) is not None):
            yield name, module


def _parallel(base: nn.Module) -> ExpertParallel | None:
    return getattr(base, "expert_parallel", None) if hasattr(base, "is_transposed") else None


@torch.no_grad()
def keep_own_adapters(wrapper: Any, first: int, end: int, comm: str) -> None:
    """Keep the adapters of experts [first, end) only; comm: the tag of their parameters (param.dp_comm)."""
    for name in wrapper.lora_A:
        a, b = wrapper.lora_A[name], wrapper.lora_B[name]
        # PEFT has A as [E * r, in] and B as [out, r * E], the expert fastest
        own_a = a.weight.reshape(wrapper.num_experts, -1, a.weight.shape[1])[first:end].flatten(0, 1)
        own_b = b.weight.reshape(b.weight.shape[0], -1, wrapper.num_experts)[..., first:end].flatten(1)
        for linear, own in ((a, own_a), (b, own_b)):
            linear.weight = nn.Parameter(own.clone(), requires_grad=linear.weight.requires_grad)
            linear.weight.dp_comm = comm
            linear.out_features, linear.in_features = own.shape
    wrapper.num_experts = end - first


@torch.no_grad()
def save_adapters(model: Any, save_directory: Any, **options: Any) -> None:
    """save_pretrained() of a PeftModel whose experts are spread: every rank calls it, the first of the job writes.

    The files are those of PEFT, with the adapters of all experts. options: those of PEFT's save_pretrained.
    """
    state = dict(options.pop("state_dict", None) or model.state_dict())
    for prefix, wrapper in adapters_around(model):
        parallel = _parallel(wrapper.get_base_layer())
        assert parallel is not None
        for name in wrapper.lora_A:
            a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
            state[f"{prefix}.lora_A.{name}.weight"] = torch.cat(_of_all_ranks(a, parallel))
            parts = [part.reshape(b.shape[0], -1, wrapper.num_experts) for part in _of_all_ranks(b, parallel)]
            state[f"{prefix}.lora_B.{name}.weight"] = torch.cat(parts, dim=2).flatten(1)
    if dist.get_rank() == 0:
        type(model).save_pretrained(model, save_directory, state_dict=state, **options)
    dist.barrier()


def _of_all_ranks(t: Tensor, parallel: ExpertParallel) -> list[Tensor]:
    parts = [torch.empty_like(t) for _ in range(parallel.size)]
    dist.all_gather(parts, t.contiguous(), group=find_group(parallel.group))
    return parts
