"""audit(): every case on processes that are started once, against one process on the whole batch.

One process in float64 makes the initial parameters, a file that all runs begin with; in every dtype of the cases it
writes all tensors of all steps as the truth. Each rank of each case loads both and compares its own tensors, so that
nothing has to be gathered. The truth of a float32 case is computed in float32 too: rounding is not a difference.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

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
from fmoe_ext.audit.report import AuditReport, Result
from fmoe_ext.audit.source import FromConfig, Source, source_of
from fmoe_ext.audit.training import Facts, Training, look_closely, watch_draws
from fmoe_ext.audit.values import QUANTITIES, Difference, Step, Value, check_finite, compare
from fmoe_ext.testing import DistributedError, DistributedPool

TOLERANCE = MappingProxyType({"float64": 1e-12, "float32": 1e-5})
# Models of Transformers compute norms, attention weights, routers and losses in float32, whatever their dtype.
TOLERANCE_OF_TRANSFORMERS = MappingProxyType({"float64": 1e-6, "float32": 1e-5})


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
    small configuration; others: as they are, with batch= and loss=, their FMoE layers spread over ranks); or
    "module:function". Other keywords are fields of the Recipe. Compared are the outputs of the layers, losses,
    gradients, the clipping norm and updated parameters, all as the largest absolute error over the quantity's largest
    number; tolerance {dtype: float} has the bound of that. leave_out joins the recipe's. progress is called with each
    Result. timeout: seconds for one case. pool: processes to run on, if not ones of its own.
    Raises AuditError for what cannot be run; what a case raises is part of the report.
    """
    source = source_of(model, **parts)
    recipe = source()
    parsed = [parse_layout(x) if isinstance(x, str) else x for x in layouts]
    left_out = {**recipe.leave_out, **(leave_out or {})}
    usual = TOLERANCE_OF_TRANSFORMERS if isinstance(recipe.build, FromConfig) else TOLERANCE
    bounds = {**usual, **(tolerance or {})}
    if steps < 1:
        raise AuditError(f"steps must be at least 1, but got {steps}")
    if not timeout > 0:
        raise AuditError(f"timeout must be more than 0 seconds, but got {timeout}")
    cases = make_cases(parsed, accumulation, recomputation, padding, dtypes, left_out)
    began, results = time.monotonic(), []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if pool is None:
            pool = stack.enter_context(DistributedPool(max(case.layout.num_ranks for case in cases)))
        truths: list[tuple[Facts, list[float]]] = []
        # float64 first: its initial parameters are the file that all other runs begin with.
        for dtype in sorted({"float64", *(case.dtype for case in cases)}, reverse=True):
            try:
                truths += pool.run(
                    _run_reference, source, dtype, steps, folder, world_size=1, timeout=timeout
                )
            except DistributedError as error:
                raise AuditError(f"one process on the whole batch fails in {dtype}:\n{error}") from None
        facts, losses = truths[0]
        for case in cases:
            results.append(_run(pool, source, case, steps, folder, bounds[case.dtype], timeout))
            if progress is not None:
                progress(results[-1])
    return AuditReport(results, facts, losses, left_out, steps, time.monotonic() - began)


def _run_reference(source: Source, dtype: str, steps: int, folder: str) -> tuple[Facts, list[float]]:
    """In a process of the pool: one process on the whole batch; files for run_case."""
    case = Case(dtype=dtype)
    initial = Path(folder, "initial")
    training = Training(source(), case, torch.load(initial) if initial.exists() else None)
    if not initial.exists():
        torch.save(training.view.tensors(), initial)
    start = training.view.parameters()
    with watch_draws(training.bare) as drawing:
        history = [training.step(number) for number in range(steps)]
    check_finite(history)
    plain = [{q: {name: v.tensor for name, v in values.items()} for q, values in s.items()} for s in history]
    torch.save(
        plain, Path(folder, dtype)
    )  # tensors alone, which torch.load() takes without unpickling classes
    return look_closely(start, history[0], drawing), [step["loss"][""].tensor.item() for step in history]


def _run(
    pool: DistributedPool, source: Source, case: Case, steps: int, folder: str, bound: float, timeout: float
) -> Result:
    began = time.monotonic()
    size = case.layout.num_ranks
    errors = [Path(folder, f"error {rank}") for rank in range(size)]
    for path in errors:
        path.unlink(missing_ok=True)
    found: list[Difference] = []
    text = None
    try:
        for of_rank in pool.run(_run_case, source, case, steps, folder, world_size=size, timeout=timeout):
            found += of_rank
    except DistributedError as error:
        text = str(error)  # unless a rank has said more
    texts = [f"rank {rank}: {path.read_text()}" for rank, path in enumerate(errors) if path.exists()]
    if texts or text:  # the first to fail knows why; the others may have waited for it
        times = [path.stat().st_mtime for path in errors if path.exists()]
        text = min(zip(times, texts, strict=True))[1] if texts else text
        return Result(case, bound, {}, None, text, time.monotonic() - began)
    found.sort(key=lambda d: (d.step, QUANTITIES.index(d.quantity)))
    first = next((d for d in found if d.error > bound), None)
    worst = {q: max((d.error for d in found if d.quantity == q), default=0.0) for q in QUANTITIES}
    return Result(case, bound, worst, first, None, time.monotonic() - began)


def _run_case(source: Source, case: Case, steps: int, folder: str) -> list[Difference]:
    """On every rank of a case: each tensor's distance from the reference; a file says why one fails."""
    found: list[Difference] = []
    rank = torch.distributed.get_rank()
    try:
        truth = torch.load(Path(folder, case.dtype))
        training = Training(source(), case, torch.load(Path(folder, "initial")))
        for number in range(steps):
            ours = training.step(number)
            expected: Step = {q: {name: Value(x) for name, x in v.items()} for q, v in truth[number].items()}
            found += compare(number + 1, ours, expected, rank)
    except Exception as error:
        Path(folder, f"error {rank}").write_text(f"{type(error).__name__}: {error}")
        raise  # or ranks that wait for this one would wait for the whole timeout
    return found
