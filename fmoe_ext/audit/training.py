"""Train for some steps and yield everything that each step computes, under the names of the whole model.

run.py calls train() twice: in one process on the whole batch (the truth), then on every rank of a plan, whose steps it
compares with the truth (compare.py). The facts at the end are of the one process alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fmoe_ext.audit.cases import SEED, AuditError
from fmoe_ext.audit.compare import INSIDE, Step, Truth, Value
from fmoe_ext.audit.plan import Parallel, Plan, Start, share_of
from fmoe_ext.audit.recipe import count_tokens


def train(plan: Plan, start: Start, truth: Truth | None = None) -> Iterator[Step]:
    """Yield what each step computes on this rank; first the parameters before the first step.

    truth: a step of one process. All ranks go through its names in its order, since making a sharded tensor whole is a
    collective. None in the one process itself.
    """
    parallel, dtype = start.parallel, getattr(torch, plan.dtype)
    # A PlanRecipe; or a CasePlan, whose Parallel ignores the argument and asks its own Recipe.
    parallel.prepare(plan)  # type: ignore[arg-type]
    known = None if truth is None else truth["parameter"].keys()
    yield {"parameter": _values(parallel, known, lambda name, p: p.detach())}
    recorder = Recorder(parallel)
    for number in range(plan.steps):
        torch.manual_seed(SEED + number)
        whole = {name: x.to(dtype) if x.is_floating_point() else x for name, x in start.batch(number).items()}
        part, num_parts = share_of(whole, parallel.share), parallel.share[1]
        if num_parts > 1 and count_tokens(part) * num_parts != count_tokens(whole):
            # The mean of means is the mean only for parts with equally many tokens.
            raise AuditError(
                f"a part of the batch has {count_tokens(part)} of {count_tokens(whole)} tokens, and there are "
                f"{num_parts} parts: let batch(step) return samples with equally many"
            )
        recorder.is_on = True
        own_loss = parallel.backward(plan, part)  # type: ignore[arg-type]
        recorder.is_on = False
        # The job's loss is the mean over the parts of the batch. Ranks that share a part count once; a rank that
        # computes no loss sends None.
        every: list[Any] = [None] * dist.get_world_size()
        if own_loss is not None:
            own_loss = (own_loss.full_tensor() if isinstance(own_loss, DTensor) else own_loss).double()
        dist.all_gather_object(every, (parallel.share[0], own_loss))
        losses = {index: x for index, x in reversed(every) if x is not None}
        if own_loss is not None:
            # ranks of one part may differ: each is compared with its own
            losses[parallel.share[0]] = own_loss
        loss = {"": Value(torch.stack(list(losses.values())).mean())} if losses else {}
        outputs = recorder.take(None if truth is None else truth[INSIDE].keys())
        step: Step = {"loss": loss, INSIDE: outputs}
        compared = outputs if parallel.compares_modules else {"": outputs[""]} if "" in outputs else {}
        step["output"] = compared
        step["gradient"] = _values(parallel, known, parallel.gradient)
        parallel.step()
        step |= parallel.extra()
        step["parameter"] = _values(parallel, known, lambda name, p: p.detach())
        yield step


def _values(
    parallel: Parallel,
    names: Collection[str] | None,
    read: Callable[[str, nn.Parameter], torch.Tensor | None],
) -> dict[str, Value]:
    """Values of every parameter, or of its gradient; zero where there is none."""
    parameters = parallel.parameters()
    names = parameters.keys() if names is None else names
    if unknown := [name for name in parameters if name not in names]:
        raise AuditError(
            f"the model under the plan has {', '.join(map(repr, unknown[:3]))}, but the model in one process does not"
        )
    values = {}
    for name in names:
        if name in parameters:
            x = read(name, parameters[name])
            # value() may be a collective: a rank without a gradient has to call it too
            x = torch.zeros_like(parameters[name]).detach() if x is None else x
            values[name] = parallel.value(name, x)
    return values


class Recorder:
    """Keep the outputs of a rank's modules, once for each range of rows: a second forward of them is recomputation."""

    def __init__(self, parallel: Parallel) -> None:
        self.is_on = False
        self._found: dict[str, dict[tuple[int, int] | None, Value]] = {}  # {module: {rows: output}}

        def keep(name: str, out: Any) -> None:
            value = parallel.output(out) if self.is_on else None
            parts = self._found.setdefault(name, {})
            if value is not None and value.rows not in parts:
                parts[value.rows] = Value(value.tensor.detach().clone(), value.rows)

        for name, module in parallel.modules().items():
            module.register_forward_hook(lambda _, __, out, name=name: keep(name, out))

    def take(self, names: Collection[str] | None) -> dict[str, Value]:
        """Outputs since the last call under their modules' names, "" for the model's."""
        found, self._found = self._found, {}
        taken = {}
        for name, parts in found.items():
            if not parts or (names is not None and name not in names):
                continue
            values = list(parts.values())
            # a part without samples in dimension 0 leaves a gap: the other quantities have to do
            if any(a.rows and b.rows and a.rows[1] != b.rows[0] for a, b in pairwise(values)):
                continue
            x = values[0].tensor if len(values) == 1 else torch.cat([value.tensor for value in values])
            first, last = values[0].rows, values[-1].rows
            rows = None if first is None or last is None else (first[0], last[1])
            taken[name] = Value(x.full_tensor() if isinstance(x, DTensor) else x, rows)
        return taken


@dataclass
class Facts:
    """Facts that the training in one process shows by itself, without a comparison."""

    clipped_apart: dict[str, float]  # {parameter: its factor}, where clipping scales not all gradients alike
    usual_factor: float  # by which clipping scales all other gradients
    not_updated: list[str]  # parameters with a gradient that the first step of the optimizer does not move
    drawing: list[str]  # modules that draw random numbers: a reason to differ that is no fault of the layout


def look_closely(start: Truth, first: Truth, drawing: Iterable[str]) -> Facts:
    """Find gradients that clipping scaled otherwise than the rest, and parameters that the first step did not move."""
    factors = {}
    for name, before in first["gradient"].items():
        if before.numel() and before.any():
            at = before.abs().argmax()
            factors[name] = (first["clipped"][name].flatten()[at] / before.flatten()[at]).item()
    # a gradient that clipping leaves out keeps a factor nearer to 1
    usual = min(factors.values(), default=1.0)
    apart = {name: factor for name, factor in factors.items() if abs(factor - usual) > 1e-6 * abs(usual)}
    still = [name for name in factors if torch.equal(start["parameter"][name], first["parameter"][name])]
    return Facts(apart, usual, still, list(drawing))


@contextmanager
def watch_draws(model: nn.Module) -> Iterator[Mapping[str, None]]:
    """Collect the names of the modules whose own forwards draw from torch's generator of the CPU.

    Layouts draw different numbers, so they may differ though nothing is wrong; a report names these modules beside a
    failure.
    """
    names = {module: name or type(model).__name__ for name, module in model.named_modules()}
    found: dict[str, None] = {}
    running: list[str] = []  # the innermost last
    state = torch.get_rng_state()

    def look() -> None:
        """Name the innermost running module if the generator has moved since a module last began or ended."""
        nonlocal state
        before, state = state, torch.get_rng_state()
        if running and not torch.equal(before, state):
            found[running[-1]] = None

    def enter(module: nn.Module, _: Any) -> None:
        if module in names:
            look()
            running.append(names[module])

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        if module in names:
            look()
            running.pop()

    # global hooks: experts with hooks of their own would take another path
    handles = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),  # a model may catch what a module raises
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
