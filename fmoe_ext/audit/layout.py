"""A built-in layout as a plan: a Recipe in one case, on one rank.

audit() (run.py) makes a CasePlan of each case. The model is built in its layout and gets its rows of the tensors of one
process. Each rank has samples of its own. Their numbers may differ by one, for which weight(part) makes up; the loss is
that of the whole job. Experts are compared by the rows that a rank has, so that nothing has to be gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fmoe_ext.audit.cases import SEED, AuditError, Case, Layout
from fmoe_ext.audit.compare import Step, Value
from fmoe_ext.audit.plan import Parallel, PlanRecipe, Start
from fmoe_ext.audit.recipe import Batch, Part, Recipe, blocks_of, num_samples, take
from fmoe_ext.audit.source import recipe_at
from fmoe_ext.checkpoint.model_state import ModelState
from fmoe_ext.distributed.groups import init_groups
from fmoe_ext.step import is_counted


@dataclass(frozen=True)
class CasePlan:
    """A recipe in the layout of a case."""

    given: str | Recipe  # a name is resolved in every process anew: not every recipe can be sent to one
    case: Case
    steps: int  # of the optimizer
    bound: float  # the largest error that counts as equal

    @property
    def world(self) -> int:
        """Ranks of the layout."""
        return self.case.layout.num_ranks

    @property
    def dtype(self) -> str:
        """The case's."""
        return self.case.dtype

    def alone(self, initial: Mapping[str, torch.Tensor] | None) -> Start:
        """Make the recipe in one process on the whole batch."""
        return self._start(Layout(), Case(dtype=self.dtype), initial)

    def on_rank(self, initial: Mapping[str, torch.Tensor], rank: int, world: int) -> Start:
        """Make the recipe in the layout."""
        layout = self.case.layout
        if world > 1:
            layout = replace(layout, groups=init_groups(ep=layout.ep, dp=layout.dp))
        return self._start(layout, self.case, initial)

    def _start(self, layout: Layout, case: Case, initial: Mapping[str, torch.Tensor] | None) -> Start:
        recipe = recipe_at(self.given)
        parallel = _InLayout(recipe, layout, case, initial)
        tensors = {name: x.detach() for name, x in parallel.state.tensors.items()}
        return Start(parallel, parallel.bare, recipe.batch, self.bound, tensors)


class _InLayout(Parallel):
    """The model of a recipe on one rank of a layout; initial: the tensors of one process, None to make them."""

    compares_modules = True  # its blocks are whole on every rank

    def __init__(
        self, recipe: Recipe, layout: Layout, case: Case, initial: Mapping[str, torch.Tensor] | None
    ) -> None:
        torch.manual_seed(SEED)
        bare: Any = recipe.build(layout)
        if not isinstance(bare, nn.Module):
            raise AuditError(f"build(layout) must return an nn.Module, but returned {type(bare).__name__}")
        bare.to(getattr(torch, case.dtype)).train()
        self.recipe, self.layout, self.case, self.bare = recipe, layout, case, bare
        self.state = ModelState(bare)  # tensors by the names and rows that they have in the whole model
        if initial is not None:
            for name, x in self.state.tensors.items():
                if name not in initial:
                    raise AuditError(
                        f"the model has {name!r} in this layout, but not in one process: build(layout) must make the "
                        "same model everywhere"
                    )
                rows = self.state.local_rows(name)
                source = initial[name] if rows is None else initial[name][slice(*rows)]
                if source.shape != x.shape:
                    raise AuditError(
                        f"{name!r} has shape {list(x.shape)} in this layout, but {list(source.shape)} of it would be "
                        f"expected here: experts of one rank are whole, in order, and known to an FMoE layer"
                    )
                x.detach().copy_(source)
        self.blocks = blocks_of(bare)
        if case.recomputation != "none":
            recipe.recompute(bare, case.recomputation)
        super().__init__(recipe.wrap(bare, layout))  # share: the whole batch, which backward() cuts
        self._rows = 0, 0  # samples of the microbatch that is on its way
        self._num_padded = 0  # columns that it was padded by
        self._extra: Step = {}

    def prepare(self, recipe: PlanRecipe) -> None:
        """Make the optimizer of the wrapped model."""
        self.optimizer = self.recipe.optimizer(self.model)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of this rank under the names of the whole model."""
        return {name: x for name, x in self.state.tensors.items() if isinstance(x, nn.Parameter)}

    def modules(self) -> dict[str, nn.Module]:
        """Return the model's blocks."""
        return self.blocks

    def value(self, name: str, x: torch.Tensor) -> Value:
        """Put x in the order of the experts, with the rows of the whole tensor that it has."""
        return Value(self.state.in_order(name, x).clone(), self.state.local_rows(name))

    def output(self, out: Any) -> Value | None:
        """Return the samples of the microbatch without padding, which has no equal in the whole batch."""
        x = out[0] if isinstance(out, tuple) and out else out
        first, end = self._rows
        if not is_counted():
            return None  # a forward that only looks ahead, or repeats another
        if not isinstance(x, torch.Tensor) or x.dim() < 2 or x.shape[0] != end - first:
            return None  # not the samples of the batch in dimension 0: the other quantities have to do
        if self._num_padded and x.dim() > 2:
            x = x[:, self._num_padded :] if self.case.padding == "left" else x[:, : -self._num_padded]
        return Value(x, self._rows)

    def backward(self, recipe: PlanRecipe, batch: Batch) -> torch.Tensor:
        """Forward and backward of this rank's microbatches of the whole batch -> the loss of the job."""
        self.optimizer.zero_grad()
        num, ranks = num_samples(batch), self.layout.num_ranks
        rank = dist.get_rank() if ranks > 1 else 0
        if num < ranks:
            raise AuditError(
                f"{self.layout} needs {ranks} samples, but batch(step) returned {num}: let it return more"
            )
        first = num * rank // ranks
        of_rank = take(batch, first, num * (rank + 1) // ranks)
        num, accumulation = num_samples(of_rank), self.case.accumulation
        least = {"1": 0, "2": 2, "uneven": 3}[accumulation]
        if num < least:
            raise AuditError(
                f"accumulation {accumulation} needs {least} samples on every rank, but one has {num}: let "
                "batch(step) return more"
            )
        # uneven: 1 and the rest, as uneven as can be, so that a mean of microbatches' means shows
        cuts = {"1": [0, num], "2": [0, num // 2, num], "uneven": [0, 1, num]}[accumulation]
        microbatches = [take(of_rank, begin, end) for begin, end in itertools.pairwise(cuts)]
        side = self.case.padding
        with_padding = [part if side == "none" else self.recipe.pad(part, side) for part in microbatches]
        total = torch.zeros((), dtype=torch.float64, device="cpu")
        with self.recipe.accumulate(self.model, with_padding):
            for number, (part, padded) in enumerate(zip(microbatches, with_padding, strict=True), 1):
                self._rows = first, first + num_samples(part)
                first = self._rows[1]
                added = [padded[name].shape[1] - x.shape[1] for name, x in part.items() if x.dim() > 1]
                self._num_padded = max(added, default=0)
                no_sync: Any = getattr(self.model, "no_sync", nullcontext)
                # Gradients are reduced once, with the last microbatch's backward.
                with no_sync() if number < len(microbatches) else nullcontext():
                    losses: Any = self.recipe.loss(self.model, padded)
                    is_pair = isinstance(losses, (tuple, list)) and len(losses) == 2
                    mean, shared = losses if is_pair else (losses, 0.0)
                    is_scalar = isinstance(mean, torch.Tensor) and not mean.dim()
                    if not is_scalar or torch.as_tensor(shared, device="cpu").dim():
                        given = (
                            f"shape {list(mean.shape)}"
                            if isinstance(mean, torch.Tensor)
                            else type(mean).__name__
                        )
                        raise AuditError(
                            "loss(model, batch) must return a tensor [] with the mean over the tokens, or a pair of it "
                            f"and a loss [] that all ranks share, but returned {given}"
                        )
                    place = Part(part, of_rank, batch, ranks, len(microbatches))
                    loss = mean * self.recipe.weight(place) + shared * self.recipe.shared_weight(place)
                    loss.backward()
                total += loss.detach()
        if ranks > 1:
            dist.all_reduce(total)
        self.recipe.reduce(self.model)
        return total / ranks

    def step(self) -> None:
        """Clip the gradients and update the parameters."""
        norm = self.recipe.clip(self.model)
        clipped = {}
        for name, p in self.parameters().items():
            grad = self.gradient(name, p)
            clipped[name] = self.value(name, torch.zeros_like(p).detach() if grad is None else grad)
        self._extra = {"norm": {}, "clipped": clipped}
        if norm is not None:
            self._extra["norm"][""] = Value(torch.as_tensor(norm, device="cpu").detach())
        self.optimizer.step()

    def extra(self) -> Step:
        """Return the norm before clipping, and the gradients after it."""
        return self._extra
