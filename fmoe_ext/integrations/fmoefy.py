"""fmoefy: one line turns the MLPs of a Transformer into MoE layers."""

import contextlib
import copy
import dataclasses
import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fmoe_ext.distributed import DistributedGroupedDataParallel
from fmoe_ext.ep.exchange import check_same, find_group, register_group
from fmoe_ext.experts import activation_name
from fmoe_ext.gates import SoftmaxGate, find_gate
from fmoe_ext.integrations import huggingface_dense, plain, upcycle
from fmoe_ext.integrations.megatron import core as megatron_core
from fmoe_ext.integrations.megatron import legacy as megatron_legacy
from fmoe_ext.integrations.recognize import simplify
from fmoe_ext.integrations.target import Options
from fmoe_ext.layers import FMoE
from fmoe_ext.transformer import FMoETransformerMLP

KINDS = (megatron_core, megatron_legacy, huggingface_dense, plain)  # asked in this order
INITS = ("random", "upcycle")
WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel, DistributedGroupedDataParallel)


@dataclass(frozen=True)
class Replaced:
    """One MLP that fmoefy replaced: its path, the sizes before and after, and what is different."""

    path: str
    d_model: int
    dense_d_hidden: int | None
    d_hidden: int
    activation: str
    num_experts: int
    top_k: int
    gate: str
    notes: tuple[str, ...]

    def __repr__(self):
        dense = "" if self.dense_d_hidden is None else f" (dense: {self.dense_d_hidden})"
        text = (
            f"{self.path}: {self.top_k} of {self.num_experts} experts of {self.d_model} x {self.d_hidden}{dense}, "
            f"{self.activation}, {self.gate}"
        )
        return "; ".join((text, *self.notes))


@dataclass(frozen=True)
class Report:
    """What fmoefy did to a model, model.fmoe_report. Parameters count the experts of all workers.

    parameters_active: those that one token uses, every choice being another expert.
    """

    kind: str
    init: str
    replaced: tuple[Replaced, ...]
    num_workers: int
    parameters_before: int
    parameters_after: int
    parameters_active: int

    def __repr__(self):
        head = (
            f"fmoefy ({self.kind}, init={self.init!r}): {len(self.replaced)} MLPs became MoE layers on "
            f"{self.num_workers} worker(s); parameters {self.parameters_before:,} -> {self.parameters_after:,}, "
            f"{self.parameters_active:,} of them active"
        )
        return "\n  ".join((head, *map(repr, self.replaced)))


def fmoefy(
    model,
    num_experts=None,
    distributed_experts=True,
    hidden_hidden_size=None,
    top_k=None,
    gate=None,
    megatron_version=None,
    *,
    fmoe_num_experts=None,
    layers=None,
    init="random",
    split=1,
    noise=0.0,
    activation=None,
    match=None,
    d_model=None,
    **moe_kwargs,
):
    """Replaces the MLPs of a Transformer, in place, by FMoETransformerMLPs -> the model, with model.fmoe_report.

    model: a dense Hugging Face model, a model with nn.TransformerEncoderLayer or nn.TransformerDecoderLayer, or any
    other with match=; a list of models gives a list. Do it before wrapping the model for data parallelism and before
    making the optimizer.

    num_experts, or fmoe_num_experts: experts of each worker, as in FastMoE.
    distributed_experts: with a process group, its ranks have different experts, num_experts each: wrap the model in
      fmoe_ext.distributed.DistributedGroupedDataParallel then, not in DistributedDataParallel, which would average
      them. moe_group=, world_size= choose other ranks than the default group's. False: every rank has all experts, as
      the Trainer and accelerate need it in several processes, because they use DistributedDataParallel.
    hidden_hidden_size: hidden units of an expert. None: those of the MLP divided by top_k, or by split.
    top_k: None is 2, or split. gate: class, function or name of fmoe_ext.gates.GATES; None is SoftmaxGate.
    layers: which of the MLPs, in the order of the model: a number (negative from the end), a slice, a range or other
      iterable of numbers, or a function of the number. None: all.
    match: replaces the search: a class, a pattern of dotted paths ("*.ffn") or a function (path, module). It points
      at TransformerEncoderLayers, at MLPs, or, with init="random", at any module from one tensor [..., d_model] to
      another, whose d_model=, hidden_hidden_size= and activation= are then given.
    activation: None takes that of the MLP. torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Dropout(p)) keeps a dropout
      between the two linear layers, which the report says is left out otherwise; dropout behind the MLP is kept.
    init "random": normal, with the standard deviation of the MLP's own weights, biases 0; with one seed the same model
      in any number of workers.
    init "upcycle": the model's first output is that of the dense one. The experts are copies of its MLP (Komatsuzaki
      et al. 2022, "Sparse Upcycling") or, with split=G, each one of G equal slices of its hidden units, of which every
      token gets whole sets: top_k is a multiple of G (He et al. 2024, "Upcycling Large Language Models into Mixture
      of Experts", virtual groups). Equal experts become different because the gate, random at first, sends them
      different tokens; noise=s adds normal noise of s times the weights' standard deviation to each, which the first
      output then shows.
    megatron_version: for Megatron-LM, found out if None. moe_kwargs: other arguments of FMoETransformerMLP.

    The balance loss stays with the gates: add weight * fmoe_ext.gates.total_loss(model) to the loss, in a Trainer by
    overriding compute_loss. To load a saved state dict, fmoefy a model of the dense configuration first.
    Raises ValueError, and leaves the model as it was, where nothing is found (listing what was looked for), for a
    model that has MoE layers already (unless match= points elsewhere), for layers that it does not have, and for
    init="upcycle" with a gate whose weights have no constant sum.
    Equivalent to: layer.mlp = FMoETransformerMLP(num_experts, d_model, d_hidden, activation) for every layer.
    """
    options = Options(
        num_experts=_one_of(num_experts, fmoe_num_experts),
        distributed_experts=distributed_experts,
        hidden_hidden_size=hidden_hidden_size,
        top_k=top_k,
        gate=gate,
        megatron_version=megatron_version,
        layers=layers,
        match=match,
        init=init,
        split=split,
        noise=noise,
        activation=activation,
        d_model=d_model,
        moe_kwargs=moe_kwargs,
    )
    _check(options)
    if isinstance(model, (list, tuple)):
        return [_replace(chunk, options) for chunk in model]
    return _replace(model, options)


def _one_of(num_experts, fmoe_num_experts):
    if num_experts is not None and fmoe_num_experts is not None:
        raise ValueError(
            f"num_experts and fmoe_num_experts are one argument, but got {num_experts} and {fmoe_num_experts}"
        )
    return fmoe_num_experts if num_experts is None else num_experts


def _check(options):
    if options.init not in INITS:
        raise ValueError(f"init must be one of {INITS}, but got {options.init!r}")
    if options.split < 1:
        raise ValueError(f"split must be at least 1, but got {options.split}")
    if options.noise < 0:
        raise ValueError(f"noise must not be negative, but got {options.noise}")
    if options.init != "upcycle" and (options.split != 1 or options.noise):
        raise ValueError('split and noise are for init="upcycle"')
    if not options.distributed_experts and options.moe_kwargs.keys() & {"moe_group", "world_size"}:
        raise ValueError("moe_group and world_size are for distributed_experts=True, but it is False")


def _replace(model, options):
    _check_model(model, options)
    kind, targets = _find(model, options)
    targets = _select(targets, options.layers)
    parameters_before = _count(model)
    layers = [_build(target, options, len(targets)) for target in targets]
    modules = [target.wrap(layer) for target, layer in zip(targets, layers, strict=True)]
    for target, module in zip(targets, modules, strict=True):  # from here on nothing fails
        module.train(getattr(target.parent, target.attribute).training)
        _put(model, target, module)
        target.finish()
    after = _count(model) + sum((moe.world_size - 1) * _count(moe.experts) for moe in layers)
    idle = sum((moe.num_experts - moe.top_k) * (_count(moe.experts) // moe.num_expert) for moe in layers)
    model.fmoe_report = Report(
        kind=kind,
        init=options.init,
        replaced=tuple(map(_describe, targets, layers)),
        num_workers=max((moe.world_size for moe in layers), default=1),
        parameters_before=parameters_before,
        parameters_after=after,
        parameters_active=after - idle,
    )
    return model


def _check_model(model, options):
    for path, module in model.named_modules():
        if isinstance(module, WRAPPERS):
            raise ValueError(f"fmoefy the model first, then wrap it in {type(module).__name__}")
        if isinstance(module, FMoE) and options.match is None:
            raise ValueError(
                f"the model has MoE layers already, the first at {path!r}: layers= of one call says which MLPs to "
                "replace, match= points at others"
            )
    for name, p in model.named_parameters():
        if p.is_meta or isinstance(p, DTensor):
            what = "on the meta device: load the model" if p.is_meta else "sharded: fmoefy the model"
            raise ValueError(f"fmoefy reads and copies weights, but {name} is {what} first")


def _find(model, options):
    kinds = KINDS if options.match is None else (plain,)
    for kind in kinds:
        targets = kind.find(model, options)
        if targets:  # a module that the model refers to at two places is one target
            distinct = {}
            for target in targets:
                distinct.setdefault(id(getattr(target.parent, target.attribute)), target)
            return kind.KIND, list(distinct.values())
    if options.match is not None:
        raise ValueError(f"match={options.match!r} points at no module of {type(model).__name__}")
    looked_for = "\n".join(f"* {kind.KIND}: {kind.LOOKED_FOR}" for kind in kinds)
    raise ValueError(f"{type(model).__name__} has no MLP that fmoefy knows. It looked for\n{looked_for}")


def _select(targets, layers):
    """The targets that layers= asks for."""
    if layers is None:
        return targets
    numbers = [i if target.layer_index is None else target.layer_index for i, target in enumerate(targets)]
    total = targets[0].num_layers or len(targets)
    everywhere = range(total)
    if callable(layers):
        wanted = {i for i in everywhere if layers(i)}
    elif isinstance(layers, slice):
        wanted = set(everywhere[layers])
    else:
        asked = [layers] if isinstance(layers, int) else list(layers)
        for i in asked:
            if not isinstance(i, int) or not -total <= i < total:
                raise ValueError(f"layers= must be in [-{total}, {total}), the MLPs found, but has {i!r}")
        wanted = {i % total for i in asked}
    if not wanted:
        raise ValueError(f"layers={layers!r} leaves none of the {total} MLPs")
    return [target for number, target in zip(numbers, targets, strict=True) if number in wanted]


def _build(target, options, num_targets):
    """The MoE layer of a target, filled."""
    dense = _with_users_sizes(target, options)
    kwargs = _moe_kwargs(target, options)
    num_expert = kwargs.pop("num_expert", None)
    if num_expert is None:
        raise ValueError("num_experts must be given: the experts of each worker")
    num_experts = num_expert * kwargs["world_size"]
    top_k = kwargs.pop("top_k", None) or (options.split if options.split > 1 else min(2, num_experts))
    d_hidden = _d_hidden(target, dense, options, top_k)
    gate = _gate(kwargs.pop("gate", None) or SoftmaxGate, target, num_targets)
    seed = _shared_seed(target, kwargs, (dense.d_model, d_hidden, num_expert, top_k))
    like = dense.w2 if dense.w2 is not None else _any_parameter(target)
    with _seeded(like.device, seed), like.device:
        layer = FMoETransformerMLP(
            num_expert,
            dense.d_model,
            d_hidden,
            activation=dense.activation,
            bias=kwargs.pop("bias", dense.w1 is None or dense.has_bias),
            top_k=top_k,
            gate=gate,
            **kwargs,
        ).to(like)
    first = 0 if layer.moe_group is None else dist.get_rank(layer.moe_group) * num_expert
    if options.init == "upcycle":
        upcycle.check(layer, dense, options.split)
        upcycle.fill_from_dense(layer, dense, first, options.split, options.noise, seed + 1)
    else:
        upcycle.fill_randomly(layer, dense, first, seed + 1)
    return layer


def _with_users_sizes(target, options):
    """The target's MLP with what the user says about it; ValueError where the two disagree or something is missing."""
    dense = target.dense
    if options.d_model is not None and dense.d_model not in (None, options.d_model):
        raise ValueError(f"d_model={options.d_model}, but {target.path} has {dense.d_model}")
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
    if options.activation is not None:  # a module belongs to one layer
        dense = dataclasses.replace(dense, activation=copy.deepcopy(options.activation))
    if options.d_model is not None:
        dense = dataclasses.replace(dense, d_model=options.d_model)
    for name, value in (("d_model", dense.d_model), ("activation", dense.activation)):
        if value is None:
            raise ValueError(f"{name}= must be given for {target.path}: {dense.why_unreadable}")
    return dense


def _d_hidden(target, dense, options, top_k):
    """Hidden units of an expert."""
    if options.init == "upcycle":
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
    return max(1, dense.d_hidden // top_k)


def _moe_kwargs(target, options):
    """Arguments of FMoETransformerMLP: the user's, else those of the model kind, else those of the default group."""
    kwargs = dict(target.moe_kwargs)
    if not options.distributed_experts:
        kwargs.pop("moe_group", None)
        kwargs["world_size"] = 1
    named = {"num_expert": options.num_experts, "top_k": options.top_k, "gate": options.gate}
    kwargs |= {name: value for name, value in named.items() if value is not None} | dict(options.moe_kwargs)
    if "world_size" not in kwargs:
        kwargs["world_size"] = 1
        if dist.is_initialized():
            kwargs["world_size"] = dist.get_world_size(find_group(register_group(kwargs.get("moe_group"))))
    kwargs.setdefault("expert_dp_comm", "none" if kwargs["world_size"] > 1 else "dp")
    return kwargs


def _gate(gate, target, num_targets):
    if isinstance(gate, nn.Module) and num_targets > 1:
        raise TypeError(
            f"gate must be a class, function or name: the {num_targets} layers would share the {type(gate).__name__}"
        )
    gate = find_gate(gate) if isinstance(gate, str) else gate
    return functools.partial(gate, **target.gate_kwargs) if target.gate_kwargs else gate


def _shared_seed(target, kwargs, sizes):
    """A seed that the workers of a layer share, after they have agreed that it is one layer."""
    seed = [int(torch.randint(2**62, ()))]
    if kwargs["world_size"] > 1:
        group = find_group(register_group(kwargs.get("moe_group")))
        check_same(f"{target.path} and d_model, d_hidden, num_experts, top_k", (target.path, *sizes), group)
        dist.broadcast_object_list(seed, group=group, group_src=0)
    return seed[0]


@contextlib.contextmanager
def _seeded(device, seed):
    """Random numbers that follow from seed; afterwards the generators are as they were."""
    is_cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if is_cuda else []):
        torch.default_generator.manual_seed(seed)
        if is_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def _any_parameter(target):
    return next(getattr(target.parent, target.attribute).parameters(), torch.empty(0))


def _put(model, target, module):
    """Replaces the target's MLP wherever the model refers to it."""
    old = getattr(target.parent, target.attribute)
    places = [(m, name) for m in model.modules() for name, child in m.named_children() if child is old]
    for parent, name in places:
        setattr(parent, name, module)


def _count(module):
    return sum(p.numel() for p in module.parameters())


def _describe(target, layer):
    activation = layer.experts.activation
    return Replaced(
        path=target.path,
        d_model=layer.d_model,
        dense_d_hidden=target.dense.d_hidden,
        d_hidden=layer.d_hidden,
        activation=activation_name(activation) or str(activation),
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        gate=type(layer.gate).__name__,
        notes=target.notes,
    )
