"""Shadowing: experts that many tokens want come to the tokens, instead of the tokens to them.

A shadowed expert's parameters are broadcast in the forward, every rank computes its own tokens with them, and their
gradients are reduced to the rank where the expert lives. The optimizer's state never moves. Which experts: decided
between steps, from the load of earlier ones, so that no forward waits for a decision: a training loop calls
update_shadows(), and in the forward expert_kinds.Fused calls fetch().

Letters of shapes: e experts of a rank, S shadowed experts, * what an expert's parameter has.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fmoe_ext.ep import expert_parallel_layers
from fmoe_ext.ep.cost import Hardware, Layer, step_time
from fmoe_ext.ep.process_groups import find_group
from fmoe_ext.ep.traced import in_turn
from fmoe_ext.ops._autograd import custom_op, register_autograd, register_not_differentiable

_MEASURED_ROWS = 8192  # of a rank at most, when its hardware is measured


def choose_shadows(
    load: Sequence[int],
    num_ranks: int,
    layer: Layer,
    hardware: Hardware,
    max_shadows: int | None = None,
) -> tuple[int, ...]:
    """Choose the places of experts to shadow: the most loaded first, as many as make the expected step shortest.

    load: rows of the expert at each place. The search ends 8 experts past the best number so far.
    """
    by_load = sorted(range(len(load)), key=lambda place: (-load[place], place))
    best = step_time(load, num_ranks, layer, hardware).total
    chosen: tuple[int, ...] = ()
    for number in range(1, len(by_load[:max_shadows]) + 1):
        candidate = tuple(sorted(by_load[:number]))
        total = step_time(load, num_ranks, layer, hardware, candidate).total
        if total < best:
            best, chosen = total, candidate
        # Where several ranks are equally busy, one shadow does not help and all of them together do: the step time may
        # rise before it falls again.
        elif number - len(chosen) >= 8:
            break
    return chosen


def update_shadows(
    module: nn.Module, hardware: Hardware | None = None, max_shadows: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Choose the shadowed experts of every expert-parallel layer of a module from its load since the last call.

    A collective call, between steps. hardware: ep.cost.Hardware; None: measured with the shapes of the first layer.
    Returns {name of the layer: experts}. Experts other than FusedExperts are never shadowed.
    """
    chosen: dict[str, tuple[int, ...]] = {}
    for name, layer in expert_parallel_layers(module):
        parallel = layer.expert_parallel
        if not getattr(getattr(layer, "expert_kind", None), "can_be_shadowed", False):
            continue
        weights = layer.experts.weights
        load = parallel.pop_load()
        order = parallel.experts_in_place
        # weights: w1 [e, H or 2H, D], b1, w2 [e, D, H], b2
        sizes = Layer(
            layer.d_model,
            weights[2].shape[2],
            2 + (weights[0].shape[1] > weights[2].shape[2]),
            weights[0].element_size(),
            layer.top_k,
            parallel.chosen_exchange,
        )
        # measured once for all layers, with as many rows as a rank gets on average
        if hardware is None:
            rows = min(max(sum(load) // parallel.size, 1), _MEASURED_ROWS)
            num_experts, group = min(rows, parallel.num_local_experts), find_group(parallel.group)
            hardware = Hardware.measure(group, sizes, rows, num_experts, weights[0].device)
        places = choose_shadows([load[e] for e in order], parallel.size, sizes, hardware, max_shadows)
        parallel.shadows = chosen[name] = tuple(order[place] for place in places)
    return chosen


def fetch(
    weights: Sequence[torch.Tensor | None],
    places: Sequence[int],
    num_local_experts: int,
    group_name: str,
    after: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """Bring the parameters of the experts at `places` to every rank: weights [e, *] or None -> [S, *] each.

    after: a tensor that a compiled graph computes first (traced.in_turn).
    """
    present = [w for w in weights if w is not None]
    if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
        fetched = iter(_fetch(in_turn(present, after), list(places), num_local_experts, group_name))
    else:
        fetched = iter(_Fetch.apply(places, num_local_experts, group_name, *present))
    return tuple(None if w is None else next(fetched) for w in weights)


def _broadcast(
    weights: Sequence[torch.Tensor], places: Sequence[int], num_local_experts: int, group_name: str
) -> list[torch.Tensor]:
    """Broadcast the weights [e, *] of each rank -> weights [S, *] of the experts at places."""
    group = find_group(group_name)
    rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    packets = []
    for place in places:
        home, index = divmod(place, num_local_experts)
        # one message an expert, all its parameters in it: a broadcast has one source, and costs a latency
        if home == rank:
            packet = torch.cat([w[index].flatten() for w in weights])
        else:
            packet = weights[0].new_empty(sum(w[:1].numel() for w in weights))
        packets.append((packet, dist.broadcast(packet, ranks[home], group=group, async_op=True)))
    for _, work in packets:
        work.wait()
    parts = torch.stack([packet for packet, _ in packets]).split([w[:1].numel() for w in weights], 1)
    return [part.reshape(-1, *w.shape[1:]) for part, w in zip(parts, weights, strict=True)]


def _reduce(
    grads: Sequence[torch.Tensor], places: Sequence[int], num_local_experts: int, group_name: str
) -> list[torch.Tensor]:
    """Sum the gradients [S, *] of the experts at places over the ranks -> [e, *] of this rank's experts."""
    group = find_group(group_name)
    rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    packets = torch.cat([grad.flatten(1) for grad in grads], 1)  # [S, all parameters of an expert]
    homes = [divmod(place, num_local_experts) for place in places]
    works = [
        dist.reduce(packet, ranks[home], group=group, async_op=True)
        for packet, (home, _) in zip(packets, homes, strict=True)
    ]
    for work in works:
        work.wait()
    # experts of this rank that are not shadowed get their gradients elsewhere: zeros here
    out = [grad.new_zeros((num_local_experts, *grad.shape[1:])) for grad in grads]
    for packet, (home, index) in zip(packets, homes, strict=True):
        if home == rank:
            for whole, part in zip(out, packet.split([grad[:1].numel() for grad in grads]), strict=True):
                whole[index] = part.view(whole.shape[1:])
    return out


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, places, num_local_experts, group_name, *weights):
        ctx.arguments = places, num_local_experts, group_name
        return tuple(_broadcast(weights, places, num_local_experts, group_name))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        return None, None, None, *_reduce(grads, *ctx.arguments)


@custom_op("fmoe_ext::fetch_experts")
def _fetch(
    weights: Sequence[torch.Tensor], places: Sequence[int], num_local_experts: int, group: str
) -> list[torch.Tensor]:
    return [w.clone() for w in _broadcast(weights, places, num_local_experts, group)]  # no views


@custom_op("fmoe_ext::reduce_experts")
def _reduce_fetched(
    grads: Sequence[torch.Tensor], places: Sequence[int], num_local_experts: int, group: str
) -> list[torch.Tensor]:
    return _reduce(grads, places, num_local_experts, group)


@torch.library.register_fake("fmoe_ext::fetch_experts")  # type: ignore[untyped-decorator]
def _(
    weights: Sequence[torch.Tensor], places: Sequence[int], num_local_experts: int, group: str
) -> list[torch.Tensor]:
    return [w.new_empty((len(places), *w.shape[1:])) for w in weights]


@torch.library.register_fake("fmoe_ext::reduce_experts")  # type: ignore[untyped-decorator]
def _(
    grads: Sequence[torch.Tensor], places: Sequence[int], num_local_experts: int, group: str
) -> list[torch.Tensor]:
    return [grad.new_empty((num_local_experts, *grad.shape[1:])) for grad in grads]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    ctx.arguments = inputs[1:]


def _backward(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    return _reduce_fetched(grads, *ctx.arguments), None, None, None


register_autograd("fmoe_ext::fetch_experts", _backward, _setup_context, places=(0,))
register_not_differentiable("fmoe_ext::reduce_experts")
