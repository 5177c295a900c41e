"""The engine of the audit: a training under a plan on gloo processes, against the same training in one process.

One process trains first. It writes its initial parameters and the tensors of every step to files. Then each
rank loads both, trains under the plan, and compares its tensors as it goes: its rows of the experts in a
built-in layout, shards made whole under another library's plan. A rank that fails is part of the result: plans
often fail on one.

audit_plan() runs one plan of the user's. audit() runs a plan for each case of a Recipe, on processes that are
started once. All of its cases begin with the parameters that one process made in float64; the truth of a
float32 case is computed in float32 too, since rounding is not a difference.
"""

from __future__ import annotations

import functools
import pickle
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from fmoe_ext import _env
from fmoe_ext.audit.cases import (
    ACCUMULATION,
    DTYPES,
    LAYOUTS,
    PADDING,
    RECOMPUTATION,
    AuditError,
    Case,
    Layout,
    make_cases,
    parse_layout,
)
from fmoe_ext.audit.compare import INSIDE, QUANTITIES, Difference, Truth, check_finite, compare, explain
from fmoe_ext.audit.layout import CasePlan
from fmoe_ext.audit.plan import Plan, PlanRecipe, recipe_of
from fmoe_ext.audit.report import AuditReport, Outcome, PlanReport, Result
from fmoe_ext.audit.source import FromConfig, find, load_module, recipe_at, sendable
from fmoe_ext.audit.training import Facts, look_closely, train, watch_draws
from fmoe_ext.testing import DistributedError, DistributedPool

_TOLERANCE = MappingProxyType({"float64": 1e-12, "float32": 1e-5})
# Models of Transformers compute norms, attention weights, routers and losses in float32, whatever their dtype.
_TOLERANCE_OF_TRANSFORMERS = MappingProxyType({"float64": 1e-6, "float32": 1e-5})


@dataclass(frozen=True)
class _Reference:
    """Results of a training in one process."""

    names: list[str]  # of its parameters
    losses: list[float]
    facts: Facts | None  # None: nothing is clipped


@dataclass
class _Rank:
    """Findings of one rank."""

    number: int
    worst: dict[str, float] = field(default_factory=dict)  # largest error in each quantity
    first: Difference | None = None  # first one over the bound
    names: set[str] = field(default_factory=set)  # parameters of this rank
    error: str | None = None  # what it raised
    failed_at: float = 0.0  # when, by the clock of this machine


def audit(
    model: Any,
    *,
    layouts: Sequence[Layout | str] = LAYOUTS,
    accumulation: Sequence[str] = ACCUMULATION,
    recomputation: Sequence[str] = RECOMPUTATION,
    padding: Sequence[str] = PADDING,
    dtypes: Sequence[str] = DTYPES,
    steps: int = 2,
    tolerance: Mapping[str, float] | None = None,
    leave_out: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    progress: Callable[[Result], None] | None = None,
    pool: DistributedPool | None = None,
    **parts: Any,
) -> AuditReport:
    """Train a model in every layout and compare it with one process on the whole batch.

    model: a Recipe; a function layout -> model with batch= and loss=; an nn.Module (of Transformers: audited with a
    small configuration, or, where that is made of others, as text and vision, with its own, up to 2^24 parameters; any
    other: as it is, with batch= and loss=, its FMoE layers spread over ranks); or "module:function". Other keywords are
    fields of the Recipe. Compared are the outputs of the layers, losses, gradients, the clipping norm and updated
    parameters, all as the largest absolute error over the quantity's largest number; tolerance {dtype: float} has the
    bound of that. leave_out joins the recipe's. progress is called with each Result. timeout: seconds for one case.
    pool: processes to run on, if not ones of its own.
    Raises AuditError for what cannot be run; what a case raises is part of the report.

    Example:

        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)
        >>> report = audit(MixtralForCausalLM(config), layouts=("1", "dp2"), accumulation=("1",),
        ...     recomputation=("none",), padding=("none",), dtypes=("float64",))
        >>> report.ok
        True
    """
    given = sendable(model, **parts)
    recipe = recipe_at(given)
    parsed = [parse_layout(x) if isinstance(x, str) else x for x in layouts]
    left_out = {**recipe.leave_out, **(leave_out or {})}
    usual = _TOLERANCE_OF_TRANSFORMERS if isinstance(recipe.build, FromConfig) else _TOLERANCE
    bounds = {**usual, **(tolerance or {})}
    if steps < 1:
        raise AuditError(f"steps must be at least 1, but got {steps}")
    if not timeout > 0:
        raise AuditError(f"timeout must be more than 0 seconds, but got {timeout}")
    cases = make_cases(parsed, accumulation, recomputation, padding, dtypes, left_out)
    began, results, references = time.monotonic(), [], {}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if pool is None:
            pool = stack.enter_context(DistributedPool(max(case.layout.num_ranks for case in cases)))
        # float64 first: its initial parameters are the file that all other runs begin with.
        for dtype in sorted({"float64", *(case.dtype for case in cases)}, reverse=True):
            source = functools.partial(CasePlan, given, Case(dtype=dtype), steps, bounds[dtype])
            try:
                (references[dtype],) = pool.run(_run_reference, source, folder, world_size=1, timeout=timeout)
            except DistributedError as error:
                raise AuditError(f"one process on the whole batch fails in {dtype}:\n{error}") from None
        for case in cases:
            case_began, bound = time.monotonic(), bounds[case.dtype]
            source = functools.partial(CasePlan, given, case, steps, bound)
            names = references[case.dtype].names
            outcome = _run_ranks(pool, source, case.layout.num_ranks, names, folder, timeout)
            if outcome.error is not None:
                outcome = Outcome({}, None, outcome.error)  # what was compared before is no finding
            seconds = time.monotonic() - case_began
            results.append(Result(**vars(outcome), case=case, bound=bound, seconds=seconds))
            if progress is not None:
                progress(results[-1])
    facts, losses = references["float64"].facts, references["float64"].losses
    assert facts is not None  # every Recipe clips
    return AuditReport(results, facts, losses, left_out, steps, time.monotonic() - began)


def audit_plan(
    what: str | PlanRecipe, *, timeout: float = 300.0, pool: DistributedPool | None = None, **changes: Any
) -> PlanReport:
    """Train a model under a parallel plan and compare every tensor with one process.

    what: a file or module that defines model() and parallelize(model, rank, world), or a PlanRecipe. changes: fields of
    the recipe, such as world=4. Raises AuditError for what cannot be run; what a rank raises is part of the report.
    """
    source = functools.partial(_plan_of, what, changes)
    plan, began = source(), time.monotonic()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if pool is None:
            pool = stack.enter_context(DistributedPool(plan.world))
        try:
            (reference,) = pool.run(_run_reference, source, folder, world_size=1, timeout=timeout)
        except DistributedError as error:
            last_line = str(error).strip().splitlines()[-1]
            raise AuditError(f"the training fails in one process:\n{last_line}") from None
        outcome = _run_ranks(pool, source, plan.world, reference.names, folder, timeout)
    seconds = time.monotonic() - began
    losses, steps = reference.losses, plan.steps
    return PlanReport(**vars(outcome), losses=losses, steps=steps, world=plan.world, seconds=seconds)


def _plan_of(what: str | PlanRecipe, changes: Mapping[str, Any]) -> PlanRecipe:
    """Make the recipe, in every process anew: models and plans cannot be sent to another."""
    if isinstance(what, str):
        made = find(what)() if what.rpartition(":")[0] else load_module(what)
        what = made if isinstance(made, PlanRecipe) else recipe_of(made)
    return replace(what, **changes)


def _run_reference(source: Callable[[], Plan], folder: str) -> _Reference:
    """Train in one process; write its initial parameters, if no file has them, and every step's tensors."""
    plan, initial = source(), Path(folder, "initial")
    start = plan.alone(torch.load(initial) if initial.exists() else None)
    if not initial.exists():
        torch.save(dict(start.initial), initial)
    with watch_draws(start.model) as drawing:
        # tensors alone, which torch.load() takes without unpickling classes
        history: list[Truth] = [
            {
                quantity: {name: value.tensor for name, value in values.items()}
                for quantity, values in step.items()
            }
            for step in train(plan, start)
        ]
    if not start.parallel.compares_modules:
        # Parameters in the order in which the forward leaves their modules, so that the first difference is named.
        place = {name: number for number, name in enumerate(history[1][INSIDE])}

        def leaves(name: str) -> int:
            while name:
                name = name.rpartition(".")[0]
                if name in place:
                    return place[name]
            return len(place)

        order = sorted(history[0]["parameter"], key=leaves)
        for step in history:
            for quantity in ("gradient", "parameter"):
                if quantity in step:
                    step[quantity] = {name: step[quantity][name] for name in order}
    check_finite(history)
    torch.save(history, Path(folder, f"truth in {plan.dtype}"))
    facts = look_closely(history[0], history[1], drawing) if "clipped" in history[1] else None
    return _Reference(list(history[0]["parameter"]), [s["loss"][""].item() for s in history[1:]], facts)


def _run_ranks(
    pool: DistributedPool,
    source: Callable[[], Plan],
    world: int,
    names: Sequence[str],
    folder: str,
    timeout: float,
) -> Outcome:
    """Run a plan on all of its ranks; names: the parameters of one process."""
    files = [Path(folder, f"failed {rank}") for rank in range(world)]
    for file in files:
        file.unlink(missing_ok=True)
    try:
        ranks: list[_Rank] = pool.run(_run_rank, source, folder, world_size=world, timeout=timeout)
        there = set().union(*(rank.names for rank in ranks))
        absent = [name for name in names if name not in there]
        error = f"no rank has {', '.join(absent[:3])}" if absent else None
    except DistributedError as raised:
        ranks = [pickle.loads(file.read_bytes()) for file in files if file.exists()]
        error = str(raised)  # unless a rank has said more
        if ranks:
            # the first to fail knows why; the others may have waited for it, or have failed alike
            why = min(ranks, key=lambda rank: rank.failed_at).error
            rank = next(rank for rank in ranks if rank.error == why)
            error = f"rank {rank.number}: {why}"
    worst = {q: max((rank.worst.get(q, 0.0) for rank in ranks), default=0.0) for q in QUANTITIES}
    found = [rank.first for rank in ranks if rank.first is not None]
    # in the order of the computation, on the lowest of the ranks that have it
    first = min(found, key=lambda d: (d.step, QUANTITIES.index(d.quantity)), default=None)
    return Outcome(worst, first, error)


def _run_rank(source: Callable[[], Plan], folder: str) -> _Rank:
    """Train on one rank and compare its tensors; a file says why one fails."""
    plan, rank, world = source(), dist.get_rank(), dist.get_world_size()
    # Libraries read their place in the job from what torchrun sets.
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOCAL_WORLD_SIZE": str(world)}
    before = _env.everything()
    _env.replace(before | place)
    found = _Rank(rank)
    try:
        history: list[Truth] = torch.load(Path(folder, f"truth in {plan.dtype}"))
        start = plan.on_rank(torch.load(Path(folder, "initial")), rank, world)
        parallel = start.parallel
        try:
            for number, step in enumerate(train(plan, start, history[1])):
                found.names |= step["parameter"].keys()
                errors = compare(number, step, history[number], rank, parallel.share)
                if not parallel.compares_modules:  # else the name of a block is the place already
                    errors = explain(errors, step, history[number], parallel.share, start.bound)
                for difference in errors:
                    largest = max(found.worst.get(difference.quantity, 0.0), difference.error)
                    found.worst[difference.quantity] = largest
                    if found.first is None and difference.error > start.bound:
                        found.first = difference
        finally:
            parallel.close()
    except Exception as error:
        found.error, found.failed_at = f"{type(error).__name__}: {error}", time.monotonic()
        Path(folder, f"failed {rank}").write_bytes(pickle.dumps(found))
        raise  # or ranks that wait for this one would wait for the whole timeout
    finally:
        _env.replace(before)
    return found
