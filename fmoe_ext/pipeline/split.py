"""Cut a model into stages of about equal cost: split(), whose stages Pipeline trains.

1. layers_of() takes the model for a sequence of layers, each called with what the one before returns.
2. _measure() runs a copy of each: that gives its cost and the shapes at every cut.
3. balance_cost() finds the cut whose greatest stage is least, since a pipeline is as fast as its slowest stage.
   Measured times differ between ranks, so the first rank's cut is everybody's.
4. part_of() finds the model's modules that a stage uses, so that a stage's state_dict() is a part of the model's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmoe_ext.layers import FMoE
from fmoe_ext.pipeline.materialize import trial_copy
from fmoe_ext.pipeline.measuring import backward_of_ones, copies, now, parameter_bytes, run_and_weigh
from fmoe_ext.pipeline.microbatch import Tensors, as_tuple, check_tensors, map_tensors
from fmoe_ext.pipeline.stage import Boundary, Stage
from fmoe_ext.planning.layouts import balance_cost

_MEASURES = ("time", "memory", "load")  # of split(by=)
# what _DecoderBlock can compute: causal attention over all tokens, by an implementation that takes a mask of numbers
_FULL_ATTENTION = (None, "full_attention")
_MASKED_ATTENTION = ("sdpa", "eager")


@dataclass(frozen=True)
class _LayerCost:
    """Cost of one layer."""

    seconds: float  # of a forward and backward of the sample
    parameter_bytes: int
    activation_bytes: int  # what the backward needs
    seconds_in_experts: list[float]  # of these, in each of its MoE layers


def split(
    model: nn.Module,
    stages: int,
    sample: Tensors,
    *,
    by: str | Sequence[int] = "time",
    load: Mapping[str, Sequence[int]] | None = None,
    param_scale: float = 4.0,
    rounds: int = 3,
) -> list[Stage]:
    """Cut a model into consecutive stages whose greatest cost is least; Pipeline trains them.

    model: an nn.Sequential, a decoder of Transformers or a module with pipeline_layers() (layers_of); it is not
    changed, stages share its parameters. On the meta device it is measured a layer at a time, with random weights, and
    Pipeline(init=) fills each rank's stages. sample: a microbatch [B, *] as the first layer takes it. by: "time", the
    forward and backward of each layer (median of `rounds`); "memory", param_scale times the parameters (4: value,
    gradient and Adam's two) and the activations of the sample; "load", the time with that of experts scaled to the
    busiest rank; or the number of layers of each stage. load: {name of a gate: tokens_per_expert}, as
    balance.watch(model).collect()["layers"] records it, for by="load".

    Where torch.distributed is initialized all ranks call it, and the first rank's cut is everybody's.
    Raises ValueError for a wrong number of stages or an unknown `by`, TypeError for stages that is no int.

    Example:

        >>> layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
        >>> stages = split(layers, 2, torch.randn(4, 8), by=[2, 1])
        >>> len(stages)
        2
    """
    # Measure; layers are timed only where times count.
    layers = layers_of(model)
    _check(layers, stages, sample, by, load)
    costs, boundaries = _measure(layers, sample, rounds if by in ("time", "load") else 0)
    # Choose the cut.
    if isinstance(by, str):
        numbers = [cost.seconds for cost in costs]
        if by == "memory":
            numbers = [cost.parameter_bytes * param_scale + cost.activation_bytes for cost in costs]
        if by == "load":
            names = {module: name for name, module in model.named_modules()}
            for i, (cost, layer) in enumerate(zip(costs, layers, strict=True)):
                for moe, seconds in zip(_moe_layers(layer), cost.seconds_in_experts, strict=True):
                    if (recorded := (load or {}).get(names.get(moe.gate, ""))) is not None:
                        tokens = torch.tensor(list(recorded), dtype=torch.float64, device="cpu")
                        of_ranks = tokens.view(moe.world_size, -1).sum(1)  # [E] as [ranks, E / ranks]
                        # All wait for the busiest rank; the sample's time is taken for an even load's.
                        if of_ranks.sum() > 0:
                            numbers[i] += seconds * (float(of_ranks.max() / of_ranks.mean()) - 1)
        cut = balance_cost(numbers, stages)
    else:
        cut = list(by)
    if dist.is_initialized():
        shared = [cut]  # ranks measure different times, but must cut alike
        dist.broadcast_object_list(shared, src=0)
        cut = shared[0]
    # Make the stages.
    made, first = [], 0
    for index, count in enumerate(cut):
        own = layers[first : first + count]
        stage = Stage(own, index, len(cut), boundaries[first], boundaries[first + count])
        stage.__dict__["parts"] = part_of(model, own)  # no child: names stay unique
        made.append(stage)
        first += count
    return made


def _measure(
    layers: Sequence[nn.Module], sample: Tensors, rounds: int = 3
) -> tuple[list[_LayerCost], list[Boundary]]:
    """Measure a copy of each layer -> its costs, and the boundaries: the first input and the output of each layer.

    rounds: how often each is timed; 0 runs it once for its shapes and sizes.
    """
    costs, boundaries, values = [], [Boundary.of(sample)], sample
    for layer in layers:
        # one layer at a time: the model may be too large for one process
        copy = trial_copy(layer, as_tuple(sample)[0].device)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            result, kept = run_and_weigh(copy, values)
            runs = [_time(copy, values) for _ in range(rounds)]
        seconds = median_high([whole for whole, _ in runs]) if runs else 0.0
        in_experts = [median_high(times) for times in zip(*(experts for _, experts in runs), strict=True)]
        costs.append(_LayerCost(seconds, parameter_bytes(copy), kept, in_experts))
        values = map_tensors(Tensor.detach, result)
        boundaries.append(Boundary.of(values))
    return costs, boundaries


def _time(layer: nn.Module, values: Tensors) -> tuple[float, list[float]]:
    """Time a forward and backward -> seconds, and those of them in each MoE layer, by its share of the forward."""
    device = as_tuple(values)[0].device
    moes = _moe_layers(layer)
    in_experts: dict[nn.Module, float] = dict.fromkeys(moes, 0.0)  # seconds of the forward

    def spend(sign: int, moe: nn.Module) -> None:
        in_experts[moe] += sign * now(device)

    handles = [moe.register_forward_pre_hook(lambda moe, *_: spend(-1, moe)) for moe in moes]
    handles += [moe.register_forward_hook(lambda moe, *_: spend(1, moe)) for moe in moes]
    inputs = copies(values)
    begin = now(device)
    outputs = layer(inputs)
    forward = now(device) - begin
    backward_of_ones(outputs)
    seconds = now(device) - begin
    for handle in handles:
        handle.remove()
    layer.zero_grad(set_to_none=True)
    return seconds, [seconds * s / max(forward, 1e-9) for s in in_experts.values()]


def _check(
    layers: list[nn.Module], stages: int, sample: Tensors, by: str | Sequence[int], load: object
) -> None:
    """Raise TypeError or ValueError for arguments of split() that do not fit each other or the model."""
    if not isinstance(stages, int) or isinstance(stages, bool):
        raise TypeError(
            f"stages must be a number of stages, but got {stages!r}; give the layers of each stage by by=: "
            "split(model, 2, sample, by=[3, 3])"
        )
    check_tensors(sample, "sample")
    # layers that compat.fairscale.skippable made, known by its method: nothing here imports compat
    if any(hasattr(m, "stash_keys") for layer in layers for m in layer.modules()):
        raise ValueError(
            "skip connections between layers (skippable) need fmoe_ext.compat.fairscale.Pipe: stages pass values only "
            "to the next"
        )
    if isinstance(by, str) and by not in _MEASURES:
        raise ValueError(
            f"by must be one of {', '.join(map(repr, _MEASURES))} or the layers of each stage, not {by!r}"
        )
    if not 1 <= stages <= len(layers):
        raise ValueError(
            f"stages must be between 1 and the {len(layers)} layers of the model, but got {stages}"
        )
    if not isinstance(by, str) and (
        len(by) != stages or sum(by) != len(layers) or any(number < 1 for number in by)
    ):
        raise ValueError(
            f"by must give each of the {stages} stages at least one of the {len(layers)} layers, but got {list(by)}"
        )
    if by == "load" and not load:
        raise ValueError(
            'by="load" needs load={name of a gate: tokens_per_expert}, as balance.watch(model).collect() records it'
        )
    if by != "load" and load is not None:
        raise ValueError(f'load= is for by="load", but by is {by!r}')


def _moe_layers(layer: nn.Module) -> list[FMoE]:
    return [m for m in layer.modules() if isinstance(m, FMoE)]


def layers_of(model: nn.Module) -> list[nn.Module]:
    """List the layers of a model, each called with what the one before returns, a tensor or a tuple of tensors.

    A model is an nn.Sequential, a module with a method pipeline_layers() that returns such a list (modules that share
    its parameters), or a decoder of Transformers of Llama's form (Llama, Mistral, Mixtral, Qwen2, Qwen3, their MoE
    variants, OLMoE), called with input_ids [B, S] and causal attention.
    Raises TypeError for other models, ValueError for a decoder whose attention is not causal over all tokens.
    """
    if isinstance(model, nn.Sequential):
        return list(model)
    own: Any = getattr(model, "pipeline_layers", None)
    if own is not None:
        return list(own())
    base = getattr(model, "model", None)
    if all(hasattr(base, name) for name in ("embed_tokens", "layers", "norm", "rotary_emb")):
        return _decoder_layers(model, base)
    raise TypeError(
        f"{type(model).__name__} cannot be cut: give an nn.Sequential, a decoder of Transformers with "
        "model.embed_tokens, model.layers, model.norm and model.rotary_emb, or a module with a method "
        "pipeline_layers() -> its layers in order"
    )


def _decoder_layers(model: Any, base: Any) -> list[nn.Module]:
    """List embedding, blocks and head of a decoder; ValueError for what its own forward does and stages would not."""
    # Full causal attention in all layers. Without layer_types a window is for all of them.
    kinds = set(getattr(model.config, "layer_types", None) or ())
    window = getattr(model.config, "sliding_window", None)
    if not kinds <= set(_FULL_ATTENTION) or (window is not None and not kinds):
        raise ValueError(
            f"{type(model).__name__} has attention of other kinds than full causal attention (layer_types "
            f"{sorted(kinds)}, sliding_window {window}), which a pipeline would not honour: set sliding_window=None, "
            "or give it a method pipeline_layers()"
        )
    # _DecoderBlock gives a mask of numbers; flash attention takes none
    attention = getattr(model.config, "_attn_implementation", "sdpa")
    if attention not in _MASKED_ATTENTION:
        raise ValueError(
            f"{type(model).__name__} computes attention by {attention!r}, which takes no mask of numbers: load "
            f"it with attn_implementation= one of {', '.join(map(repr, _MASKED_ATTENTION))}, or give it a method "
            "pipeline_layers()"
        )
    if getattr(model.config, "output_router_logits", False):
        raise ValueError(
            f"{type(model).__name__} adds its router's loss itself (output_router_logits), which stages do not: fmoefy "
            "it, and pass Pipeline(balance_weight=)"
        )
    blocks = [_DecoderBlock(layer, base.rotary_emb) for layer in base.layers]
    head: nn.Module = nn.Sequential(base.norm, model.lm_head)
    return [base.embed_tokens, *blocks, head]


class _DecoderBlock(nn.Module):
    """A block of a decoder of Transformers that makes its own mask and rotation, so that only x travels."""

    def __init__(self, layer: nn.Module, rotary: nn.Module):
        super().__init__()
        self.layer = layer
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        later = positions[None] > positions[:, None]  # [S, S]: key after query
        mask = torch.zeros_like(later, dtype=x.dtype).masked_fill(later, torch.finfo(x.dtype).min)
        out = self.layer(
            x,
            attention_mask=mask.expand(x.shape[0], 1, -1, -1),
            position_ids=positions[None],
            position_embeddings=self.rotary(x, positions[None]),
        )
        return out[0] if isinstance(out, tuple) else out


def part_of(model: nn.Module, layers: list[nn.Module]) -> nn.Module:
    """Collect the modules of a model that some of its layers use, under the names that they have in the model.

    Its state_dict() is a part of the model's. Raises ValueError for a parameter that no module of the model has.
    """
    # Layers may be made of modules of the model (as _DecoderBlock is), so look for these: the outermost that are used.
    used = {id(module) for layer in layers for module in layer.modules()}
    part = nn.Module()
    for path, module in _outermost(model, used):
        *parents, name = path.split(".")
        inner = part
        for parent in parents:
            if parent not in inner._modules:
                inner.add_module(parent, nn.Module())
            inner = inner.get_submodule(parent)
        inner.add_module(name, module)
    found = {id(p) for p in part.parameters()}
    if lost := [n for layer in layers for n, p in layer.named_parameters() if id(p) not in found]:
        raise ValueError(
            f"{lost[0]} of a pipeline layer is a parameter of no module of {type(model).__name__}: layers must be made "
            "of the model's own modules"
        )
    return part


def _outermost(module: nn.Module, used: set[int], path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of the used modules that are inside no other used one."""
    # not named_children(), which leaves out a second name of a module
    for name, child in module._modules.items():
        if child is None:
            continue
        full = f"{path}.{name}" if path else name
        if id(child) in used:
            yield full, child
        else:
            yield from _outermost(child, used, full)
