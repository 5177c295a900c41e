"""Build the MoE layer that replaces a dense MLP: sizes, arguments, weights. fmoefy calls build().

Every value is taken from the first of three that has it: the user's options, the model kind's Target, a default. The
ranks that share a layer agree on its name and sizes, and on a seed that rank 0 draws: the gate is equal on all of them,
and each expert's weights follow from the seed and its number, whatever rank holds it.

init="random" draws weights of the dense MLP's scale. init="upcycle" begins with the MLP's output, in one of two ways:

* Copies (Komatsuzaki et al. 2022, "Sparse Upcycling: Training Mixture-of-Experts from Dense Checkpoints"): each expert
  is the MLP, and its second matrix is divided by the sum of a token's weights.
* Slices (He et al. 2024, "Upcycling Large Language Models into Mixture of Experts", "virtual groups"): with split = 2
  the experts 0, 2, 4, ... have the first half of the hidden units, 1, 3, 5, ... the second, with the
  values of the second matrix doubled. The gate starts with equal scores for the experts 0 and 1, 2 and 3, ...: a token
  chooses both or neither, and gets both halves with one weight. Their sum is the MLP's output, while each choice costs
  half the units.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmoe_ext.ep.process_groups import check_same, find_group, register_group
from fmoe_ext.gates import NaiveGate, ScoredGate, SoftmaxGate, find_gate
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
        _check_upcycle(layer, dense, options.split)
        _fill_from_dense(layer, dense, first, options.split, options.noise, seed + 1)
    else:
        _fill_randomly(layer, dense, first, seed + 1)
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
    return max(1, dense.d_hidden // top_k)  # so that a token costs as much as in the dense MLP


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
    # with a larger world_size each rank holds other experts: their gradients are not averaged
    kwargs.setdefault("expert_dp_comm", "none" if kwargs["world_size"] > 1 else "dp")
    return kwargs


def _shared_seed(target: Target, kwargs: dict[str, Any], sizes: tuple[Any, ...]) -> int:
    """Return a seed that the ranks of a layer share; raise unless they build the same layer, of the same sizes."""
    # from the user's generator, so that torch.manual_seed() determines the model; rank 0's counts
    seed = [int(torch.randint(2**62, (), device="cpu"))]
    if kwargs["world_size"] > 1:
        group = find_group(register_group(kwargs.get("moe_group")))
        check_same(
            f"{target.path} and d_model, d_hidden, num_local_experts, top_k", (target.path, *sizes), group
        )
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


def _check_upcycle(layer: FMoETransformerMLP, dense: Any, split: int) -> None:
    """Raise ValueError unless the layer, filled from dense without noise, will give the output of dense."""
    _total_weight(layer.gate)  # raises for gates whose weights have no constant sum
    if layer.latent is not None:
        raise ValueError(
            'init="upcycle" copies the dense MLP into experts of its width, but latent_size= makes them narrower: '
            'leave latent_size out, or take init="random"'
        )
    if dense.has_bias and layer.experts.weights[1] is None:
        raise ValueError(
            'init="upcycle" keeps the biases of the dense MLP, but bias is False: leave bias out, or take init="random"'
        )
    if split == 1:  # copies: any choice of experts gives the same
        return
    for name, value in (("the number of experts of all ranks", layer.num_experts), ("top_k", layer.top_k)):
        if value % split != 0:
            raise ValueError(f"{name} must be a multiple of split={split}, but is {value}")
    if dense.d_hidden % split != 0:
        raise ValueError(f"split must divide the {dense.d_hidden} hidden units, but is {split}")
    gate = layer.gate
    if not isinstance(gate, ScoredGate) and type(gate) is not NaiveGate:
        raise ValueError(
            f"split={split} needs a gate that chooses by its scores alone: NaiveGate, SoftmaxGate, SigmoidGate or "
            f"UniformGate, but got {type(gate).__name__}"
        )
    # experts that are chosen together must be in one of the gate's groups
    num_groups = getattr(gate, "num_groups", 1)
    if layer.num_experts // num_groups % split != 0:
        raise ValueError(
            f"split={split} must divide the {layer.num_experts // num_groups} experts of each of the gate's "
            f"num_groups={num_groups} groups"
        )


def _total_weight(gate: nn.Module) -> float:
    """Return the sum of a token's topk_weights; ValueError for gates where it is not the same for every token.

    A gate of the user's declares it by an attribute total_weight.
    """
    declared = getattr(gate, "total_weight", None)
    if declared is not None:
        return declared
    why = gate.weights_vary if hasattr(gate, "weights_vary") else "it is no fmoe_ext.BaseGate"
    if why is None:
        return gate.weight_sum
    raise ValueError(
        'init="upcycle" needs a gate whose weights have the same sum for every token, so that the first output is the '
        f"dense model's, but those of {type(gate).__name__} have not: {why}"
    )


@torch.no_grad()
def _fill_from_dense(
    layer: FMoETransformerMLP, dense: Any, first: int, split: int, noise: float, seed: int
) -> None:
    """Give every expert of this rank its part of the dense MLP; first: the number of the first one among all experts.

    Expert e gets part e % split of the hidden units, and `split` times the values of the second matrix: K choices that
    hold every part equally often then sum to the dense output. The experts g split ... g split + split - 1 have all
    parts once and begin with equal scores. A gate breaks ties by number, so that it chooses all of them together.
    Training tells them apart. Shared experts begin with zero results.
    """
    if layer.shared_experts is not None:  # adds nothing at first
        layer.shared_experts.begin_with_zero()
    size = dense.d_hidden // split
    scale = split / _total_weight(layer.gate)
    w1, b1, w2, b2 = layer.experts.weights
    for i in range(layer.num_local_experts):
        part = slice((first + i) % split * size, ((first + i) % split + 1) * size)
        w1[i].copy_(torch.cat([w[part] for w in dense.w1_parts]))
        w2[i].copy_(dense.w2[:, part] * scale)  # a token gets a split-th of the units from each choice
        if dense.b1 is not None:
            b1[i].copy_(torch.cat([b[part] for b in dense.b1.split(dense.d_hidden)]))
        elif b1 is not None:
            b1[i].zero_()
        if dense.b2 is not None:
            b2[i].copy_(dense.b2 * (scale / split))  # whole in each expert: the weights' sum counts it once
        elif b2 is not None:
            b2[i].zero_()
        if noise:
            generator = _generator(w1, seed, first + i)  # of the expert, whatever rank holds it
            for w in (w1[i], w2[i]):
                w.add_(torch.empty_like(w).normal_(0, noise * w.float().std().item(), generator=generator))
    if split > 1:
        _tie(layer.gate.gate.weight, split)
        if layer.gate.gate.bias is not None:
            _tie(layer.gate.gate.bias, split)


def _tie(scores: Tensor, split: int) -> None:
    """Give each group of `split` neighbours along the first dimension the values of its first."""
    scores.copy_(scores[::split].repeat_interleave(split, 0))


@torch.no_grad()
def _fill_randomly(layer: FMoETransformerMLP, dense: Any, first: int, seed: int) -> None:
    """Draw every expert's weights from N(0, s^2), s as in the dense MLP's weights; biases are 0.

    For an unreadable MLP s = 1 / sqrt(3 * inputs), as in nn.Linear. The draw depends on seed and the expert's number
    among all ranks; first is the number of the first one here.
    """
    w1, b1, w2, b2 = layer.experts.weights
    # w [experts, out, in]
    default = [1 / math.sqrt(3 * w.shape[2]) for w in (w1, w2)]
    stds = default if dense.w1 is None else [_std(*dense.w1_parts), _std(dense.w2)]
    for i in range(layer.num_local_experts):
        generator = _generator(w1, seed, first + i)
        for w, std in zip((w1, w2), stds, strict=True):
            w[i].normal_(0, std, generator=generator)
    for b in (b1, b2):
        if b is not None:
            b.zero_()


def _std(*parts: Tensor) -> float:
    return math.sqrt(sum(w.float().var(correction=0).item() for w in parts) / len(parts))


def _generator(like: Tensor, seed: int, number: int) -> torch.Generator:
    """Make an expert's generator: what it draws follows from the seed and the expert's number, not from the ranks."""
    return torch.Generator(like.device).manual_seed(seed + number)
