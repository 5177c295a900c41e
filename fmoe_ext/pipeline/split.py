"""split(): a model cut into stages of equal cost.

Each layer is run once, on a copy, on what the layer before returned: that gives its cost and the shapes at every cut.
balance_cost() then finds the cut whose greatest stage is least, since a pipeline is as fast as its slowest stage.
Measured times differ between ranks, so that the first rank's cut is everybody's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmoe_ext.layers import FMoE
from fmoe_ext.pipeline.layers import layers_of, part_of
from fmoe_ext.pipeline.materialize import trial_copy
from fmoe_ext.pipeline.measuring import backward_of_ones, leaves, median, now, parameter_bytes, run_and_weigh
from fmoe_ext.pipeline.microbatch import Tensors, as_tuple, check_tensors, map_tensors
from fmoe_ext.pipeline.stage import Boundary, Stage
from fmoe_ext.planning.layouts import balance_cost

MEASURES = ("time", "memory", "load")


@dataclass(frozen=True)
class _LayerCost:
    """Cost of one layer."""

    seconds: float  # of a forward and backward of the sample
    parameter_bytes: int
    activation_bytes: int  # what the backward needs
    seconds_in_experts: list[float]  # of those, in each of its MoE layers


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

    model: an nn.Sequential, a decoder of Transformers or a module with pipeline_layers() (layers.layers_of); it is not
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
    layers = layers_of(model)
    _check(layers, stages, sample, by, load)
    costs, boundaries = _measure(layers, sample, rounds if by in ("time", "load") else 0)
    if isinstance(by, str):
        names = {id(module): name for name, module in model.named_modules()}
        cut = balance_cost(_numbers(costs, layers, by, load or {}, names, param_scale), stages)
    else:
        cut = list(by)
    if dist.is_initialized():
        shared = [cut]  # ranks measure different times, but must cut alike
        dist.broadcast_object_list(shared, src=0)
        cut = shared[0]
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
    """The cost of each layer, run on a copy, and what travels into the first, between them and out of the last.

    rounds: how often each is timed; 0 runs it once for its shapes and sizes.
    """
    costs, boundaries, values = [], [Boundary.of(sample)], sample
    for layer in layers:
        copy = trial_copy(layer, as_tuple(sample)[0].device)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            result, kept = run_and_weigh(copy, values)
            runs = [_time(copy, values) for _ in range(rounds)]
        seconds = median([whole for whole, _ in runs])
        in_experts = [median(list(times)) for times in zip(*(experts for _, experts in runs), strict=True)]
        costs.append(_LayerCost(seconds, parameter_bytes(copy), kept, in_experts))
        values = map_tensors(Tensor.detach, result)
        boundaries.append(Boundary.of(values))
    return costs, boundaries


def _time(layer: nn.Module, values: Tensors) -> tuple[float, list[float]]:
    """Seconds of a forward and backward, and those of them in each MoE layer, by its share of the forward."""
    device = as_tuple(values)[0].device
    moes = _moe_layers(layer)
    in_experts: dict[nn.Module, float] = dict.fromkeys(moes, 0.0)

    def spend(sign: int, moe: nn.Module) -> None:
        in_experts[moe] += sign * now(device)

    handles = [moe.register_forward_pre_hook(lambda moe, *_: spend(-1, moe)) for moe in moes]
    handles += [moe.register_forward_hook(lambda moe, *_: spend(1, moe)) for moe in moes]
    begin = now(device)
    outputs = layer(leaves(values))
    forward = now(device) - begin
    backward_of_ones(outputs)
    seconds = now(device) - begin
    for handle in handles:
        handle.remove()
    layer.zero_grad(set_to_none=True)
    return seconds, [seconds * s / max(forward, 1e-9) for s in in_experts.values()]


def _numbers(
    costs: list[_LayerCost],
    layers: list[nn.Module],
    by: str,
    load: Mapping[str, Sequence[int]],
    names: dict[int, str],
    param_scale: float,
) -> list[float]:
    if by == "memory":
        return [cost.parameter_bytes * param_scale + cost.activation_bytes for cost in costs]
    numbers = [cost.seconds for cost in costs]
    if by == "load":
        for i, (cost, layer) in enumerate(zip(costs, layers, strict=True)):
            for moe, seconds in zip(_moe_layers(layer), cost.seconds_in_experts, strict=True):
                if (recorded := load.get(names.get(id(moe.gate), ""))) is not None:
                    tokens = torch.tensor(list(recorded), dtype=torch.float64, device="cpu")
                    of_ranks = tokens.view(moe.world_size, -1).sum(1)
                    # All wait for the busiest rank; the sample's time is taken for an even load's.
                    if of_ranks.sum() > 0:
                        numbers[i] += seconds * (float(of_ranks.max() / of_ranks.mean()) - 1)
    return numbers


def _check(
    layers: list[nn.Module], stages: int, sample: Tensors, by: str | Sequence[int], load: object
) -> None:
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
    if isinstance(by, str) and by not in MEASURES:
        raise ValueError(
            f"by must be one of {', '.join(map(repr, MEASURES))} or the layers of each stage, not {by!r}"
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
