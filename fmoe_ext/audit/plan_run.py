"""audit_plan(): a model under a parallel plan on gloo processes, against one process.

One process trains first and writes its initial parameters and the tensors of every step to files; then each rank loads
both, applies the plan and compares as it trains. A rank that fails is part of the report: plans often fail on one.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fmoe_ext import _env
from fmoe_ext.audit.cases import AuditError
from fmoe_ext.audit.plan import Parallel, PlanRecipe, recipe_of
from fmoe_ext.audit.plan_compare import compare_step
from fmoe_ext.audit.plan_report import PlanReport, Rank
from fmoe_ext.audit.plan_training import Computed, make_model, train, whole_batch
from fmoe_ext.audit.source import find, load_module
from fmoe_ext.testing import DistributedError, DistributedPool


@dataclass(frozen=True)
class _PlanSource:
    """A recipe that every process makes for itself, since models and plans cannot be sent to one."""

    place: str = ""  # a file or module, or a function in it
    recipe: PlanRecipe | None = None  # or the one that was given
    changes: tuple[tuple[str, Any], ...] = ()

    def __call__(self) -> PlanRecipe:
        recipe = self.recipe
        if recipe is None:
            made = find(self.place)() if self.place.rpartition(":")[0] else load_module(self.place)
            recipe = made if isinstance(made, PlanRecipe) else recipe_of(made)
        return replace(recipe, **dict(self.changes))


def audit_plan(
    what: str | PlanRecipe, *, timeout: float = 300.0, pool: DistributedPool | None = None, **changes: Any
) -> PlanReport:
    """Train a model under a parallel plan and compare every tensor with one process.

    what: a file or module that defines model() and parallelize(model, rank, world), or a PlanRecipe. changes: fields of
    the recipe, such as world=4. Raises AuditError for what cannot be run; what a rank raises is part of the report.
    """
    pairs = tuple(changes.items())
    source = _PlanSource(what, None, pairs) if isinstance(what, str) else _PlanSource("", what, pairs)
    world, began = source().world, time.monotonic()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if pool is None:
            pool = stack.enter_context(DistributedPool(world))
        try:
            ((names, losses),) = pool.run(_run_reference, source, folder, world_size=1, timeout=timeout)
        except DistributedError as error:
            last_line = str(error).strip().splitlines()[-1]
            raise AuditError(f"the training fails in one process:\n{last_line}") from None
        try:
            ranks = pool.run(_run_rank, source, folder, world_size=world, timeout=timeout)
        except DistributedError as error:
            ranks = [Rank(error=str(error))]
    return PlanReport(ranks, names, losses, source().steps, world, time.monotonic() - began)


def _run_reference(source: _PlanSource, folder: str) -> tuple[list[str], list[float]]:
    """In one process: a file of every step's tensors -> names of the parameters, losses."""
    recipe = source()
    model = make_model(recipe)
    torch.save(model.state_dict(), Path(folder, "initial"))
    batches = [whole_batch(recipe, model, number) for number in range(recipe.steps)]
    history = [computed for _, computed, _ in train(recipe, Parallel(model), batches)]
    order = _order(model, history[1])
    for computed in history:
        computed.parameter = {name: computed.parameter[name] for name in order}
        computed.gradient = {
            name: computed.gradient.get(name, torch.zeros_like(computed.parameter[name]))
            for name in (order if computed.loss is not None else ())
        }
    for step, computed in enumerate(history):
        for quantity in ("gradient", "parameter"):
            for name, x in getattr(computed, quantity).items():
                if not x.isfinite().all():
                    raise AuditError(
                        f"step {step}: {quantity} of {name} has NaN or infinity in one process already: mend the "
                        "training first"
                    )
    torch.save(history, Path(folder, "truth"))
    return order, [computed.loss.item() for computed in history if computed.loss is not None]


def _run_rank(source: _PlanSource, folder: str) -> Rank:
    """On every rank: the errors of all tensors of this rank."""
    recipe, rank, world = source(), dist.get_rank(), dist.get_world_size()
    # Libraries read their place in the job from what torchrun sets.
    number = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    number |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOCAL_WORLD_SIZE": str(world)}
    before = _env.everything()
    _env.replace(before | number)
    found = Rank()
    try:
        truth: list[Computed] = torch.load(Path(folder, "truth"), weights_only=False)
        model = make_model(recipe)
        model.load_state_dict(torch.load(Path(folder, "initial")))
        bound = recipe.bound(model)
        # Batches before parallelize(): they are made from the model's configuration, which a plan may wrap.
        batches = [whole_batch(recipe, model, step) for step in range(recipe.steps)]
        made = recipe.parallelize(model, rank, world)
        parallel = Parallel(made) if isinstance(made, nn.Module) else made
        if not isinstance(parallel, Parallel):
            raise AuditError(
                f"parallelize(model, rank, world) must return a model or a Parallel, but returned {type(made).__name__}"
            )
        try:
            for step, computed, parameters in train(recipe, parallel, batches):
                found.names |= parameters.keys()
                errors = compare_step(step, computed, truth[step], parallel, parameters, rank, bound)
                found.add(errors, bound)
        finally:
            parallel.close()
    except Exception as error:
        dist.barrier()  # lets a rank that is ahead fail by itself
        found.error = f"rank {rank}: {type(error).__name__}: {error}"
    finally:
        _env.replace(before)
    return found


def _order(model: nn.Module, first: Computed) -> list[str]:
    """Names of the parameters in the order in which the forward leaves the modules that have them."""
    place = {name: i for i, name in enumerate(first.outputs)}

    def of(name: str) -> int:
        owner = name
        while owner:
            owner = owner.rpartition(".")[0]
            if owner in place:
                return place[owner]
        return len(place)

    return sorted((name for name, _ in model.named_parameters()), key=of)
