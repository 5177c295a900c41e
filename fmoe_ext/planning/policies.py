"""Simulate the policies of an expert-parallel layer: expected times of a step, on machines that are not here.

simulate() replays loads, recorded or drawn, through the policies of this package. Of each step it asks the
cost model (ep/cost.py) for the time under every one: nothing, overlap of exchange and experts, shadows of
busy experts, experts placed anew, and all of them. As in training, a policy knows only loads that came
before: shadows are chosen by the load of the last step, a placement by those since the last placement, and
moving its experts costs the time of the busiest rank. A policy that pays on skewed loads that stay may lose
on loads that drift.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import torch

from fmoe_ext.ep.cost import Hardware, Layer, step_time
from fmoe_ext.ep.shadowing import choose_shadows
from fmoe_ext.planning.placement import plan

Loads: TypeAlias = list[list[int]]  # steps, each with the rows of every expert

POLICIES = ("none", "overlap", "shadowing", "overlap + shadowing", "placement", "all")


def draw_loads(num_steps: int, num_experts: int, num_rows: int, skew: float, seed: int = 0) -> Loads:
    """Draw loads whose expert popularity falls as rank^-skew and drifts by a tenth of the experts' order a step."""
    generator = torch.Generator("cpu").manual_seed(seed)
    weights = torch.arange(1, num_experts + 1, dtype=torch.float64, device="cpu") ** -skew
    order = torch.randperm(num_experts, generator=generator, device="cpu")
    loads = []
    for _ in range(num_steps):
        a, b = torch.randint(
            0, num_experts, (2, max(1, num_experts // 10)), generator=generator, device="cpu"
        )
        order[a], order[b] = order[b].clone(), order[a].clone()
        drawn = torch.poisson(weights * (num_rows / weights.sum()), generator=generator)
        loads.append(drawn[order].long().tolist())
    return loads


def read_loads(path: Path, layer: str | None = None) -> Loads:
    """Recorded loads: steps, each with the rows of every expert.

    path: JSON lines {"layers": {gate: {"tokens_per_expert": [E]}}}, as balance.write appends them, of which one gate's
    are taken; or one JSON list of lists. Raises ValueError if there is no such gate or the number of experts changes.
    """
    text = path.read_text()
    try:
        if text.lstrip().startswith("{"):
            records = [json.loads(line)["layers"] for line in text.splitlines() if line.strip()]
            layer = layer or next(iter(records[0]))
            if any(layer not in record for record in records):
                raise ValueError(f"{path} has no layer {layer!r} in every step, but {', '.join(records[0])}")
            loads = [list(record[layer]["tokens_per_expert"]) for record in records]
        else:
            loads = [list(load) for load in json.loads(text)]
    except (KeyError, TypeError, AttributeError, StopIteration, json.JSONDecodeError) as error:
        raise ValueError(f"{path} has no recorded loads ({type(error).__name__}: {error})") from None
    numbers = all(isinstance(rows, int) and rows >= 0 for load in loads for rows in load)
    if not numbers or not loads or not loads[0] or any(len(load) != len(loads[0]) for load in loads):
        raise ValueError(f"{path} must be steps with one number for each expert")
    return loads


def simulate(
    loads: Loads, num_ranks: int, layer: Layer, hardware: Hardware, num_chunks: int, every: int
) -> dict[str, float]:
    """{policy: mean seconds of a step}; placement is planned again every `every` steps and then moves experts."""
    num_experts = len(loads[0])
    num_local = num_experts // num_ranks
    in_place = list(range(num_experts))  # experts in the order of their places
    window = [0] * num_experts  # the load of each expert since the last placement
    sums = dict.fromkeys(POLICIES, 0.0)
    last: Sequence[int] | None = None  # the load of the step before
    for step, load in enumerate(loads):
        moving = 0.0
        if last is not None and step % every == 0:
            order = plan(window, num_ranks, in_place)
            parts = [slice(r * num_local, (r + 1) * num_local) for r in range(num_ranks)]
            arriving = [sum(e not in in_place[part] for e in order[part]) for part in parts]
            # all wait for the rank that gets most; parameters move with two moments of Adam in float32
            moved_bytes = max(arriving) * layer.expert_bytes * (1 + 8 / layer.bytes_per_element)
            moving = moved_bytes / hardware.bandwidth
            in_place, window = order, [0] * num_experts
        placed_load = [load[e] for e in in_place]
        shadows: tuple[int, ...] = ()
        placed_shadows: tuple[int, ...] = ()
        if last is not None:
            shadows = choose_shadows(last, num_ranks, layer, hardware)
            placed_shadows = choose_shadows([last[e] for e in in_place], num_ranks, layer, hardware)
        plain = step_time(load, num_ranks, layer, hardware)
        shadowed = step_time(load, num_ranks, layer, hardware, shadows)
        placed = step_time(placed_load, num_ranks, layer, hardware)
        everything = step_time(placed_load, num_ranks, layer, hardware, placed_shadows)
        sums["none"] += plain.total
        sums["overlap"] += plain.overlapped(num_chunks)
        sums["shadowing"] += shadowed.total
        sums["overlap + shadowing"] += shadowed.overlapped(num_chunks)
        sums["placement"] += placed.total + moving
        sums["all"] += everything.overlapped(num_chunks) + moving
        last = load
        window = [a + b for a, b in zip(window, load, strict=True)]
    return {policy: total / len(loads) for policy, total in sums.items()}


def show(title: str, times: dict[str, float]) -> None:
    """Print the milliseconds of each policy, and its speed-up over "none"."""
    print(f"{title}: ms a layer and step (speed-up)")
    for policy, seconds in times.items():
        print(f"  {policy:20} {seconds * 1e3:10.3f}  {times['none'] / seconds:5.2f}x")
