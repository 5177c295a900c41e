"""Plan the layout of a training: memory a rank and seconds a step of every pp x dp x ep x schedule.

`fmoe pipeline plan` calls plan(), `fmoe info` estimate(), and split() cuts a model by balance_cost(). The search is
exhaustive, because there are few layouts: pp * ep * dp is the number of ranks, and each divides it. For each one, with
each schedule and each number of microbatches that the batch allows, estimate() adds up

    memory    parameters with gradients and Adam, of the fullest rank; activations of the microbatches in flight;
              buffers of one exchange
    seconds   compute of all microbatches on the slowest rank; bubbles, in which a rank waits for the first microbatch
              and after the last; exchanges that nothing hides, and the reduction of gradients

plan() keeps the best number of microbatches for each layout and schedule, and puts those that fit the memory first. A
pipeline is as fast as its slowest stage, so balance_cost() cuts the layers where the greatest stage is least.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from fmoe_ext.ep.cost import Hardware

GIB = 2**30
_PIPELINE_GAIN = 1.01  # a pipeline is put first only if it is faster by more than this factor
OPTIMIZER_COPIES = 4  # of each parameter: value, gradient and Adam's two


@dataclass(frozen=True)
class LayerPlan:
    """Bytes and FLOP of one layer: parameters, and of one sequence activations, work and exchange."""

    dense_bytes: float  # of parameters outside of experts
    expert_bytes: float  # of the parameters of all experts
    activation_bytes: float  # kept for the backward
    flops: float  # of the forward and the backward
    exchange_bytes: float = 0.0  # of one exchange of its tokens, there or back


@dataclass(frozen=True)
class Layout:
    """A division of pp * dp * ep ranks."""

    pp: int  # ranks of a pipeline
    dp: int  # replicas of the experts
    ep: int  # ranks that the experts are spread over
    schedule: str  # "none" without a pipeline
    chunks: int  # microbatches of a step


@dataclass(frozen=True)
class Estimate:
    """Memory and time of a layout."""

    layout: Layout
    parameters: float  # bytes of the fullest rank, with gradients and optimizer
    activations: float  # bytes of the same rank
    buffers: float  # bytes of exchanges of the same rank
    compute: float  # seconds of a step
    bubbles: float  # seconds of a step in which a rank waits for others
    network: float  # seconds of exchanges that are not hidden, and of the reduction of gradients

    @property
    def memory(self) -> float:
        return self.parameters + self.activations + self.buffers

    @property
    def seconds(self) -> float:
        return self.compute + self.bubbles + self.network


@dataclass(frozen=True)
class _ScheduleCost:
    """Costs of a schedule, as functions of p ranks and m microbatches."""

    stages: int  # of a rank
    # (p, rank, m) -> microbatches whose activations a rank keeps, counted once for each stage that keeps them
    in_flight: Callable[[int, int, int], float]
    bubbles: Callable[[int], float]  # p -> idle time, in microbatches of a rank's stages
    # (p, m) -> share of exchanges that a partner hides
    in_pairs: Callable[[int, int], float] = lambda p, m: 0.0
    # of two stages of a rank the second is taken from the other end, else it comes p stages after the first
    is_v: bool = True


# A backward is two parts, of inputs and of weights, each as long as the forward.
SCHEDULE_COSTS = MappingProxyType(
    {
        # all forwards, then all backwards
        "gpipe": _ScheduleCost(1, lambda p, rank, m: m, lambda p: p - 1),
        # rank r begins backwards as soon as the last rank can send one: p - r are in flight
        "1f1b": _ScheduleCost(1, lambda p, rank, m: min(m, p - rank), lambda p: p - 1),
        # before the first backward: a round of the first stage, and two more for each rank behind this one
        "interleaved": _ScheduleCost(
            2,
            lambda p, rank, m: min(2 * m, m // max(1, m // p) + 2 * (p - 1 - rank) + 1),
            lambda p: (p - 1) / 2,
            is_v=False,
        ),
        # the part of weights fills what 1f1b leaves idle, but for the third that the warm-up takes
        "zero_bubble": _ScheduleCost(1, lambda p, rank, m: min(m, p), lambda p: (p - 1) / 3),
        "zero_bubble_v": _ScheduleCost(2, lambda p, rank, m: min(2 * m, 2 * p), lambda p: 0.0),
        # of the 2m forwards of a rank of the middle, 2p + 1 have no backward as their partner
        "dualpipe_v": _ScheduleCost(
            2,
            lambda p, rank, m: min(2 * m, 2 * p + 1),
            lambda p: (p - 1) / 3,
            lambda p, m: max(0.0, 1 - (2 * p + 1) / (2 * m)),
        ),
    }
)


def _layouts(ranks: int, num_layers: int, num_experts: int, batch: int) -> Iterator[Layout]:
    """Yield every layout that divides the ranks, the experts and the batch, and has a layer for each stage."""
    for pp in _divisors(ranks):
        for ep in _divisors(ranks // pp):
            dp = ranks // (pp * ep)
            rows = batch // (dp * ep)
            if batch % (dp * ep) or num_experts % ep:
                continue
            if pp == 1:
                yield from (Layout(1, dp, ep, "none", m) for m in _divisors(rows))
                continue
            for name, cost in SCHEDULE_COSTS.items():
                if pp * cost.stages <= num_layers:
                    yield from (Layout(pp, dp, ep, name, m) for m in _divisors(rows) if m >= pp * cost.stages)


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def estimate(
    layers: Sequence[LayerPlan],
    layout: Layout,
    batch: int,
    hardware: Hardware,
    *,
    checkpoint_bytes: float = 0,
) -> Estimate:
    """Estimate memory and time of a rank in a layout. batch: sequences on all ranks together.

    checkpoint_bytes: what a layer keeps of one sequence with activation checkpointing; 0: without.
    """
    # 1. The layers of each rank.
    rows = batch / (layout.dp * layout.ep * layout.chunks)  # sequences of a microbatch
    cost = SCHEDULE_COSTS.get(layout.schedule, _ScheduleCost(1, lambda p, rank, m: 1, lambda p: 0.0))
    stages, first = [], 0
    for number in balance_cost([layer.flops for layer in layers], layout.pp * cost.stages):
        stages.append(list(layers[first : first + number]))
        first += number
    second = stages[layout.pp :]
    if cost.is_v:
        second.reverse()
    ranks = [stages[rank] + (second[rank] if second else []) for rank in range(layout.pp)]
    # 2. Memory.
    parts = [
        memory_of_rank(
            own, layout, cost.in_flight(layout.pp, rank, layout.chunks) / cost.stages, rows, checkpoint_bytes
        )
        for rank, own in enumerate(ranks)
    ]
    # 3. Seconds of a microbatch. A forward is a third of the work, and has two of the four exchanges, there and back;
    # the backward has the others. Checkpointing computes each forward twice.
    work, num_exchanges = (4 / 3, 6) if checkpoint_bytes > 0 else (1, 4)
    away = (layout.ep - 1) / layout.ep  # share of tokens that leave their rank
    times = [
        (
            rows * sum(layer.flops for layer in own) / hardware.throughput * work,
            num_exchanges * away * rows * sum(layer.exchange_bytes for layer in own) / hardware.bandwidth,
        )
        for own in ranks
    ]
    # 4. Gradients are reduced by a ring over the n ranks that have copies: 2 (n - 1) / n of their bytes.
    copies = layout.dp * layout.ep
    reductions = [
        2 * sum(layer.dense_bytes for layer in own) * (copies - 1) / copies
        + 2 * sum(layer.expert_bytes for layer in own) / layout.ep * (layout.dp - 1) / layout.dp
        for own in ranks
    ]
    compute, exchange = max(times, key=sum)
    fullest = max(parts, key=sum)
    exposed = exchange - cost.in_pairs(layout.pp, layout.chunks) * min(exchange, compute)
    return Estimate(
        layout,
        *fullest,
        compute=layout.chunks * compute,
        bubbles=cost.bubbles(layout.pp) * (compute + exposed),
        network=layout.chunks * exposed + max(reductions) / hardware.bandwidth,
    )


def memory_of_rank(
    layers: list[LayerPlan], layout: Layout, in_flight: float, rows: float, checkpoint_bytes: float
) -> tuple[float, float, float]:
    """Estimate bytes of parameters with gradients and optimizer, of activations, of exchange buffers.

    in_flight: microbatches that the rank keeps, counted as if one stage had all its layers. rows: sequences of one.
    """
    parameters = sum(layer.dense_bytes + layer.expert_bytes / layout.ep for layer in layers)
    largest = max(layer.activation_bytes for layer in layers)
    kept = sum(layer.activation_bytes for layer in layers)
    if checkpoint_bytes:
        kept = checkpoint_bytes * len(layers)  # and one layer's activations, while it is computed again
    else:
        largest = 0.0
    # one buffer to send from and one to receive into
    away = 0.0 if layout.ep == 1 else 2 * max(layer.exchange_bytes for layer in layers)
    if layout.ep > 1 and not checkpoint_bytes:
        kept += sum(layer.exchange_bytes for layer in layers)  # rows that came, which the experts keep
    return OPTIMIZER_COPIES * parameters, rows * (in_flight * kept + largest), rows * away


def balance_cost(costs: Iterable[float], partitions: int) -> list[int]:
    """Cut a sequence of costs into consecutive parts whose greatest sum is least -> the length of each part.

    Equivalent to: the least max(map(sum, parts)) over all ways to cut costs into that many non-empty parts.
    """
    costs = list(costs)
    if not 1 <= partitions <= len(costs):
        raise ValueError(f"partitions must be between 1 and the {len(costs)} layers, but got {partitions}")
    total = [0.0]  # total[n]: sum of the first n costs
    for cost in costs:
        total.append(total[-1] + cost)
    # Dynamic programming. best[n]: (greatest sum, lengths) of the first n costs in `parts` parts. The last part is
    # costs[m:n], before it lies the best cut of the first m into one part fewer.
    best: list[tuple[float, list[int]]] = [(total[n], [n]) for n in range(len(costs) + 1)]
    for parts in range(2, partitions + 1):
        best = [
            min(
                ((max(best[m][0], total[n] - total[m]), [*best[m][1], n - m]) for m in range(parts - 1, n)),
                key=lambda candidate: candidate[0],
            )
            if n >= parts
            else (float("inf"), [])
            for n in range(len(costs) + 1)
        ]
    return best[-1][1]


def plan(
    layers: Sequence[LayerPlan],
    ranks: int,
    batch: int,
    hardware: Hardware,
    *,
    num_experts: int = 1,
    checkpoint_bytes: float = 0,
) -> list[Estimate]:
    """List all layouts, each with its best number of chunks: those that fit the memory, the fastest first, then others.

    The others come by memory, the least first. Raises ValueError if no layout divides the ranks and the batch.
    """
    best: dict[tuple[int, int, int, str], Estimate] = {}

    def order(found: Estimate) -> tuple[bool, float]:
        # what fits by seconds, before what does not fit, by how far it is from fitting
        fits = found.memory <= hardware.memory
        worth = _PIPELINE_GAIN if found.layout.pp > 1 else 1.0
        return not fits, found.seconds * worth if fits else found.memory

    for layout in _layouts(ranks, len(layers), num_experts, batch):
        found = estimate(layers, layout, batch, hardware, checkpoint_bytes=checkpoint_bytes)
        key = layout.pp, layout.dp, layout.ep, layout.schedule
        if key not in best or order(found) < order(best[key]):
            best[key] = found
    if not best:
        raise ValueError(
            f"no layout of {ranks} ranks divides a batch of {batch} sequences: use a batch that is a multiple of some "
            "number of replicas"
        )
    return sorted(best.values(), key=order)


def advice(estimates: Sequence[Estimate], hardware: Hardware) -> str:
    """Say in a sentence which layout to use, and whether a pipeline is worth it."""
    first = estimates[0]
    if first.memory > hardware.memory:
        return (
            f"Nothing fits: the least is {first.memory / GIB:.2f} GiB a rank. Use more ranks, activation checkpointing "
            "or a smaller batch."
        )
    if first.layout.pp == 1:
        return "Do not use a pipeline: data and expert parallelism fit, and lose no time to bubbles."
    # the fastest without a pipeline may not fit where a slower one does
    alone = [e.seconds for e in estimates if e.layout.pp == 1 and e.memory <= hardware.memory]
    if alone:
        times = min(alone) / first.seconds
        return f"A pipeline is {times:.2f} times as fast as the best layout without one, which fits too."
    return "Use a pipeline: without one, no layout fits."
