"""Spread the experts of a Transformers MoE model over the ranks of a group: huggingface.expert_parallel().

An experts module of Transformers has all its experts in stacked parameters [E, ...]. A rank keeps the rows of its
own E / ranks experts, and an ExpertParallel through which experts_forward sends the tokens. PEFT's adapters of
these parameters are cut with them: A [E * r, in] by rows, B [out, r * E] by columns, where the expert varies
fastest. Beside the forward two calls then need the other ranks: generate() goes on until the last of them has
finished, and save_pretrained() gathers the rows first, so that the files are the same as from one process.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmoe_ext.ep.expert_parallel import ExpertParallel
from fmoe_ext.ep.process_groups import Group, find_group, register_group
from fmoe_ext.huggingface.saving import replace_save_pretrained, replacing_for_transformers
from fmoe_ext.linear import check_plain
from fmoe_ext.spread import keep_rows

_STACKED = tuple(
    f"{name}{suffix}" for name in ("gate_up_proj", "up_proj", "down_proj") for suffix in ("", "_bias")
)


def spread_experts(model: Any, group: Group = None, expert_dp_comm: str = "none") -> None:
    """Spread a Transformers model with experts_implementation="fmoe", for huggingface.expert_parallel()."""
    modules = [m for m in model.modules() if hasattr(m, "is_transposed") and not hasattr(m, "get_base_layer")]
    if not modules:
        raise ValueError(
            f"{type(model).__name__} has no experts module that Transformers lets others compute, so none whose "
            "experts could be spread over ranks"
        )
    size = dist.get_world_size(find_group(register_group(group)))
    # Check all modules before any is changed.
    for experts in modules:
        name = type(experts).__name__
        if getattr(experts, "expert_parallel", None) is not None:
            raise ValueError(f"the experts of {name} are spread over ranks already")
        for _, p in _stacks(experts):
            check_plain(p)  # Transformers' own expert parallelism has made it a DTensor
            if p.shape[0] % size != 0:
                raise ValueError(f"{name} has {p.shape[0]} experts, which {size} ranks cannot share evenly")
    # Keep this rank's experts of each, and of PEFT's adapters.
    for experts in modules:
        whole = dict(_stacks(experts))
        num_local = next(iter(whole.values())).shape[0] // size
        parallel = experts.expert_parallel = ExpertParallel(group, num_local)
        first, end = parallel.rank * num_local, (parallel.rank + 1) * num_local
        for name, p in whole.items():
            with torch.no_grad():
                own = keep_rows(p, first, end)
            # what DistributedGroupedDataParallel reads
            own.dp_comm = expert_dp_comm  # type: ignore[attr-defined]
            setattr(experts, name, own)
        for _, wrapper in adapters_around(model, experts):
            _keep_own_adapters(wrapper, first, end, expert_dp_comm)
    # generate() and save_pretrained() with the other ranks; the base of a PeftModel generates and saves for it.
    if is_peft_model(model):
        replace_save_pretrained(model, save_adapters)
        model = model.get_base_model()
    model.generate = functools.partial(_generate, model)
    replace_save_pretrained(model, _save_spread)


def _generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Go on until every rank has finished, since all of them hold experts that the others need.

    Also where synced_gpus=False is given, as Seq2SeqTrainer does for models that are not under ZeRO 3 or FSDP.
    """
    return type(model).generate(model, *args, **{**kwargs, "synced_gpus": True})


def _stacks(experts: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter [E, ...]) of what each expert of an experts module of Transformers has of its own."""
    return ((name, p) for name, p in experts.named_parameters(recurse=False) if name in _STACKED)


def _save_spread(model: Any, save_directory: Any, **options: Any) -> None:
    """Save the whole model: every rank calls it, the first of the job writes. Raises CheckpointError on every rank."""
    from fmoe_ext.checkpoint.errors import CheckpointError, together  # it brings torch.distributed.checkpoint

    given = options.pop("state_dict", None)
    state = dict(model.state_dict() if given is None else given)
    spread = [
        (experts, [f"{path}.{name}" for name, _ in _stacks(experts)])
        for path, experts in model.named_modules()
        if getattr(experts, "expert_parallel", None) is not None
    ]
    with together(f"writing {save_directory}"):
        if missing := [key for _, keys in spread for key in keys if key not in state]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(
                f"state_dict lacks {missing[0]}{more}, of which every rank gives the rows of its experts: leave "
                "state_dict out, or give model.state_dict() on every rank"
            )
    # Replace each part by the whole, on the first rank; the others take part in gathering.
    for experts, keys in spread:
        group = find_group(experts.expert_parallel.group)
        if 0 not in dist.get_process_group_ranks(group):
            continue  # copies of the experts that the first rank gathers
        for key in keys:
            part = state[key].detach().contiguous()
            parts = None
            if dist.get_rank() == 0:  # only the writer needs room for all
                parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
            dist.gather(part, parts, dst=0, group=group)
            state[key] = part if parts is None else torch.cat(parts)
    with together(f"writing {save_directory}"):  # the others wait, and raise what the first one raises
        if dist.get_rank() == 0:
            with replacing_for_transformers(Path(save_directory), options) as unfinished:
                type(model).save_pretrained(model, unfinished, state_dict=state, **options)


def is_peft_model(model: nn.Module) -> bool:
    """Return True for a model that PEFT has wrapped."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def adapters_around(model: nn.Module, experts: nn.Module | None = None) -> Iterator[tuple[str, Any]]:
    """Yield (name, PEFT's wrapper of one weight) around an experts module, or around any whose experts are spread."""
    for name, module in model.named_modules():
        if not hasattr(module, "get_base_layer") or not hasattr(module, "lora_A"):
            continue
        base = module.get_base_layer()
        is_spread = hasattr(base, "is_transposed") and getattr(base, "expert_parallel", None) is not None
        if base is experts or (experts is None and is_spread):
            yield name, module


@torch.no_grad()
def _keep_own_adapters(wrapper: Any, first: int, end: int, comm: str) -> None:
    """Keep the adapters of experts [first, end) only; comm: the tag of their parameters (param.dp_comm)."""
    for name in wrapper.lora_A:
        a, b = wrapper.lora_A[name], wrapper.lora_B[name]
        # A [E * r, in] as [E, r, in], B [out, r * E] as [out, r, E]
        own_a = a.weight.reshape(wrapper.num_experts, -1, a.weight.shape[1])[first:end].flatten(0, 1)
        own_b = b.weight.reshape(b.weight.shape[0], -1, wrapper.num_experts)[..., first:end].flatten(1)
        for linear, own in ((a, own_a), (b, own_b)):
            linear.weight = nn.Parameter(own.clone(), requires_grad=linear.weight.requires_grad)
            linear.weight.dp_comm = comm
            linear.out_features, linear.in_features = own.shape
    wrapper.num_experts = end - first


@torch.no_grad()
def save_adapters(model: Any, save_directory: Any, **options: Any) -> None:
    """Save a PeftModel whose experts are spread: every rank calls it, the first of the job writes.

    The files are PEFT's, with the adapters of all experts. options: of PEFT's save_pretrained. Raises CheckpointError
    on every rank.
    """
    # A joins by rows [E * r, in], B by experts, which are its innermost dimension: [out, r, E] of all ranks.
    state = dict(options.pop("state_dict", None) or model.state_dict())
    for prefix, wrapper in adapters_around(model):
        parallel = wrapper.get_base_layer().expert_parallel
        for name in wrapper.lora_A:
            a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
            state[f"{prefix}.lora_A.{name}.weight"] = torch.cat(_of_all_ranks(a, parallel))
            parts = [part.reshape(b.shape[0], -1, wrapper.num_experts) for part in _of_all_ranks(b, parallel)]
            state[f"{prefix}.lora_B.{name}.weight"] = torch.cat(parts, dim=2).flatten(1)
    from fmoe_ext.checkpoint.errors import together  # it brings torch.distributed.checkpoint

    with together(f"writing {save_directory}"):
        if dist.get_rank() == 0:
            type(model).save_pretrained(model, save_directory, state_dict=state, **options)


def _of_all_ranks(t: Tensor, parallel: ExpertParallel) -> list[Tensor]:
    parts = [torch.empty_like(t) for _ in range(parallel.size)]
    dist.all_gather(parts, t.contiguous(), group=find_group(parallel.group))
    return parts
