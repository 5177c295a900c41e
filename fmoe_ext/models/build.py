"""Build the MoE layer that takes the place of a dense MLP: its sizes, its arguments, its weights; fmoefy calls build().

Every value may come from three sides, in this order: the user's options, the model kind's Target, a default. The ranks
that share a layer agree on its name and sizes, and on a seed that rank 0 draws: the gate is equal on all of them, and
each expert's weights follow from the seed and its number, whatever rank holds it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fmoe_ext.ep.process_groups import check_same, find_group, register_group
from fmoe_ext.gates import SoftmaxGate, find_gate
from fmoe_ext.models import upcycle
from fmoe_ext.models.recognize import simplify
from fmoe_ext.models.target import DenseMLP, Options, Target
from fmoe_ext.transformer import FMoETransformerMLP


def build(target: Target, options: Options, num_targets: int) -> FMoETransformerMLP:
    """Build a target's MoE layer and fill its weights. num_targets: the number of layers that fmoefy builds."""
    # sizes and arguments
    dense = _with_users_sizes(target, options)
    kwargs = _moe_kwargs(target, options)
    num_local_experts = kwargs.pop("num_expert", None)
    if num_local_experts is None:
        raise ValueError("num_experts must be given: the experts of all ranks")
    num_experts = num_local_experts * kwargs["world_size"]
    if num_experts < 1:
        raise ValueError(f"num_experts must be at least 1, but got {num_experts}")
    top_k = kwargs.pop("top_k", None)
    if top_k is None:
        top_k = options.split if options.split > 1 else min(2, num_experts)
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, but got {top_k}")
    d_hidden = _d_hidden(target, dense, options, top_k)
    gate = kwargs.pop("gate", None) or SoftmaxGate
    if isinstance(gate, nn.Module) and num_targets > 1:
        raise TypeError(
            f"gate must be a class, function or name: the {num_targets} layers would share the {type(gate).__name__}"
        )
    gate = find_gate(gate) if isinstance(gate, str) else gate
    if target.gate_kwargs:
        gate = functools.partial(gate, **target.gate_kwargs)
    seed = _shared_seed(target, kwargs, (dense.d_model, d_hidden, num_local_experts, top_k))
    like = dense.w2
    if like is None:  # an unreadable MLP still shows the dtype and device of the model
        nothing = torch.empty(0, device=torch.get_default_device())
        like = next(getattr(target.parent, target.attribute).parameters(), nothing)
    assert dense.d_model is not None and dense.activation is not None
    # the layer; the gate's weights follow from the shared seed, and the user's generators stay where they were
    with _seeded(like.device, seed), like.device:
        layer = FMoETransformerMLP(
            num_local_experts,
            dense.d_model,
            d_hidden,
            activation=dense.activation,
            bias=kwargs.pop("bias", dense.w1 is None or dense.has_bias),
            top_k=top_k,
            gate=gate,
            **kwargs,
        ).to(like)
    # weights; first: the number of this rank's first expert among all
    first = 0 if layer.moe_group is None else dist.get_rank(layer.moe_group) * num_local_experts
    if options.init == "upcycle":
        upcycle.check(layer, dense, options.split)
        upcycle.fill_from_dense(layer, dense, first, options.split, options.noise, seed + 1)
    else:
        upcycle.fill_randomly(layer, dense, first, seed + 1)
    return layer


def _with_users_sizes(target: Target, options: Options) -> DenseMLP:
    """Return the target's MLP, completed by the user's options; ValueError where they disagree or a size is missing."""
    dense = target.dense
    if options.d_model is not None and dense.d_model not in (None, options.d_model):
        raise ValueError(f"d_model={options.d_model}, but {target.path} has {dense.d_model}")
    # copies of weights need weights, and keep the activation that they were trained with
    if options.init == "upcycle":
        if dense.why_unreadable:
            raise ValueError(
                f'init="upcycle" needs the weights of {target.path}, but {dense.why_unreadable}; init="random" does not'
            )
        wanted = None if options.activation is None else simplify(options.activation)
        if isinstance(wanted, str) and wanted != dense.activation:
            raise ValueError(
                f'init="upcycle" keeps the activation of {target.path}, {dense.activation}, but activation= is {wanted}'
            )
    if options.activation is not None:  # a copy: each layer has a module of its own
        dense = dataclasses.replace(dense, activation=copy.deepcopy(options.activation))
    if options.d_model is not None:
        dense = dataclasses.replace(dense, d_model=options.d_model)
    for name, value in (("d_model", dense.d_model), ("activation", dense.activation)):
        if value is None:
            raise ValueError(f"{name}= must be given for {target.path}: {dense.why_unreadable}")
    return dense


def _d_hidden(target: Target, dense: DenseMLP, options: Options, top_k: int) -> int:
    """Return the number of hidden units of an expert."""
    if options.init == "upcycle":
        assert dense.d_hidden is not None  # its weights could be read
        d_hidden = dense.d_hidden // options.split
        if options.hidden_hidden_size not in (None, d_hidden):
            raise ValueError(
                f'init="upcycle" with split={options.split} makes experts of {d_hidden} hidden units at {target.path}, '
                f"but hidden_hidden_size is {options.hidden_hidden_size}"
            )
        return d_hidden
    if options.hidden_hidden_size is not None:
        return options.hidden_hidden_size
    if dense.d_hidden is None:
        raise ValueError(f"hidden_hidden_size= must be given for {target.path}: {dense.why_unreadable}")
    return max(1, dense.d_hidden // top_k)  # so that a token costs what it did


def _moe_kwargs(target: Target, options: Options) -> dict[str, Any]:
    """Collect the arguments of FMoETransformerMLP: from the user, else the model kind, else the default group."""
    kwargs = dict(target.moe_kwargs)  # the model kind's
    if not options.distributed_experts:
        kwargs.pop("moe_group", None)
        kwargs["world_size"] = 1
    named = {"top_k": options.top_k, "gate": options.gate}
    kwargs |= {name: value for name, value in named.items() if value is not None} | dict(options.moe_kwargs)
    if "world_size" not in kwargs:
        kwargs["world_size"] = 1
        if dist.is_initialized():
            kwargs["world_size"] = dist.get_world_size(find_group(register_group(kwargs.get("moe_group"))))
    num_local_experts = options.experts_of_rank(kwargs["world_size"])
    if num_local_experts is not None:
        kwargs["num_expert"] = num_local_experts
    # experts that ranks share are different ones: their gradients are not averaged
    kwargs.setdefault("expert_dp_comm", "none" if kwargs["world_size"] > 1 else "dp")
    return kwargs


def _shared_seed(target: Target, kwargs: dict[str, Any], sizes: tuple[Any, ...]) -> int:
    """Return a seed that the ranks of a layer share; raise unless they build the same layer, of the same sizes."""
    # from the user's generator, so that torch.manual_seed() determines the model; rank 0's counts
    seed = [int(torch.randint(2**62, (), device="cpu"))]
    if kwargs["world_size"] > 1:
        group = find_group(register_group(kwargs.get("moe_group")))
        check_same(f"{target.path} and d_model, d_hidden, num_experts, top_k", (target.path, *sizes), group)
        dist.broadcast_object_list(seed, group=group, group_src=0)
    return seed[0]


@contextlib.contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the generators of the CPU and of the device inside the block; restore them afterwards."""
    is_cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if is_cuda else []):
        torch.default_generator.manual_seed(seed)
        if is_cuda:  # manual_seed() would seed all devices, of which one alone is restored
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
