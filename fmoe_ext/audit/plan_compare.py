"""Compare a rank's step under a plan with one process, and find the module where a forward first differs.

Every tensor is made whole (Parallel.whole) before it is compared, so that sharding is no difference. The first tensor
over the bound, in the order of a step, is where things went wrong; what follows is its consequence. So only that one is
examined: a wrong output is traced to the first block that differs, a wrong gradient to the factor it is off by (a
factor of the number of ranks is a mean taken for a sum).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fmoe_ext.audit.cases import AuditError
from fmoe_ext.audit.plan import Parallel
from fmoe_ext.audit.plan_training import Computed, Tensors, mean_over_parts
from fmoe_ext.audit.values import Difference, Step, Value, compare

BLOCK = re.compile(r"(.+\.)?\d+")  # the name of a module in an nn.ModuleList


def compare_step(
    number: int,
    computed: Computed,
    truth: Computed,
    parallel: Parallel,
    parameters: Mapping[str, nn.Parameter],
    rank: int,
    bound: float,
) -> list[Difference]:
    """Errors of all tensors of a step in the order of a step; the first over the bound says more about itself."""
    ours = _step(computed, truth, parallel, parameters)
    theirs: Step = {"parameter": {name: Value(x) for name, x in truth.parameter.items()}}
    if truth.loss is not None:  # step 0 has parameters alone
        theirs["loss"] = {"": Value(truth.loss.double())}
        theirs["gradient"] = {name: Value(x) for name, x in truth.gradient.items()}
        if "" in truth.outputs:
            theirs["output"] = {"": Value(_rows(truth.outputs[""], parallel.share))}
    found = compare(number, ours, theirs, rank)
    at = next((i for i, d in enumerate(found) if not d.error <= bound), None)
    if at is None:
        return found
    first = found[at]
    # A wrong forward is found by its module; for a gradient or a parameter the factor tells more (a missed mean).
    if first.quantity in ("output", "loss") and computed.outputs:
        found.insert(at, _locate(first, computed.outputs, truth.outputs, parallel.share, bound))
    else:
        value, expected = (step[first.quantity][first.name] for step in (ours, theirs))
        found[at] = replace(first, note=_ratio(value.tensor, expected.tensor))
    return found


def _step(
    computed: Computed, truth: Computed, parallel: Parallel, parameters: Mapping[str, nn.Parameter]
) -> Step:
    """The tensors of this rank made whole, gradients and parameters in one process's order on every rank."""
    if unknown := [name for name in parameters if name not in truth.parameter]:
        raise AuditError(
            f"the model under the plan has {', '.join(map(repr, unknown[:3]))}, but the model in one process does not"
        )
    step: Step = {"gradient": {}, "parameter": {}}
    for name in truth.parameter:
        if name not in parameters:
            continue
        if truth.gradient:
            grad = computed.gradient.get(name)
            # whole() may be a collective: a rank without a gradient has to call it too.
            grad = torch.zeros_like(parameters[name]).detach() if grad is None else grad
            step["gradient"][name] = Value(parallel.whole(name, grad))
        step["parameter"][name] = Value(parallel.whole(name, computed.parameter[name]))
    if truth.loss is not None:
        loss = mean_over_parts(computed.loss, parallel.share)
        step["loss"] = {} if loss is None else {"": Value(loss)}
        computed.outputs = outputs = {
            name: x.full_tensor() if isinstance(x, DTensor) else x
            for name, x in computed.outputs.items()
            if name in truth.outputs
        }
        step["output"] = {"": Value(outputs[""])} if "" in outputs else {}
    return step


def _rows(whole: torch.Tensor, share: tuple[int, int]) -> torch.Tensor:
    index, number = share
    size = whole.shape[0] // number if whole.dim() else 0
    return whole[size * index : size * (index + 1)] if number > 1 and whole.dim() else whole


def _locate(
    first: Difference, ours: Tensors, truth: Tensors, share: tuple[int, int], bound: float
) -> Difference:
    """The difference of the first block whose output differs; its note names the first module inside.

    Modules inside a block may keep partial values under a plan, so that they count only where the block differs too.
    """
    errors = {name: _error(ours[name], _rows(x, share)) for name, x in truth.items() if name in ours}
    differing = {name: error for name, error in errors.items() if error > bound and name}
    block = next((name for name in differing if BLOCK.fullmatch(name)), None)
    if block is None:
        name = next(iter(differing), None)
        return first if name is None else replace(first, name=name, quantity="output", error=differing[name])
    inside = [name for name in differing if name.startswith(block + ".")]
    note = f"first inside it: {inside[0].removeprefix(block + '.')}" if inside else ""
    return replace(first, quantity="output", name=block, error=differing[block], note=note)


def _error(x: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest error over the largest number; 0 for a tensor of another shape, which is a part of the whole."""
    if x.shape != expected.shape or not x.numel():
        return 0.0
    error = (x.double() - expected.double()).abs().max().item() / (expected.abs().max().item() or 1.0)
    return error if error == error else float("inf")


def _ratio(x: torch.Tensor, expected: torch.Tensor) -> str:
    """Say by which factor a tensor differs, if by one factor everywhere."""
    if x.shape != expected.shape:
        return f"shape {list(x.shape)}, expected {list(expected.shape)}"
    if not x.isfinite().all():
        return "NaN or infinity"
    if not x.any():
        return "zero here"
    x, expected = x.double().flatten(), expected.double().flatten()
    # least squares: the factor c of x = c * expected
    factor = (x @ expected / (expected @ expected)).item() if expected.any() else 0.0
    if factor and abs(factor - 1) > 1e-3 and (x - factor * expected).abs().max() < 1e-4 * x.abs().max():
        return f"{factor:.3g} times that of one process"
    return ""
