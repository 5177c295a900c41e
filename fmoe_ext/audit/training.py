"""The steps of one case on one rank, what they computed, and which modules draw random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fmoe_ext.audit.cases import AuditError, Case
from fmoe_ext.audit.recipe import (
    Batch,
    Part,
    Recipe,
    blocks_of,
    cut,
    num_samples,
    sizes_of_microbatches,
    take,
)
from fmoe_ext.audit.values import ModelView, Step, Value, Values
from fmoe_ext.distributed.groups import init_groups
from fmoe_ext.step import is_counted

SEED = 0


@dataclass
class Facts:
    """Facts about a training that one process alone shows."""

    clipped_apart: dict[str, float]  # {parameter: its factor}, where clipping scales not all gradients alike
    usual_factor: float
    not_updated: list[str]  # parameters with a gradient that no step of the optimizer moves
    drawing: list[str]  # modules that draw random numbers


class Training:
    """A recipe in the layout of a case; whole: the tensors of the model in one process, None to make them."""

    def __init__(self, recipe: Recipe, case: Case, whole: Mapping[str, torch.Tensor] | None) -> None:
        layout = case.layout
        self.recipe, self.case = recipe, case
        if layout.num_ranks > 1:
            layout = replace(layout, groups=init_groups(ep=layout.ep, dp=layout.dp))
        self.layout = layout
        torch.manual_seed(SEED)
        model: Any = recipe.build(layout)
        if not isinstance(model, nn.Module):
            raise AuditError(f"build(layout) must return an nn.Module, but returned {type(model).__name__}")
        self.bare = model.to(getattr(torch, case.dtype)).train()
        self.view = ModelView(self.bare)
        if whole is not None:
            self.view.load(dict(whole))
        self.recorder = _Recorder(self.bare, case.padding)
        if case.recomputation != "none":
            recipe.recompute(self.bare, case.recomputation)
        self.model = recipe.wrap(self.bare, layout)
        self.optimizer = recipe.optimizer(self.model)

    def step(self, number: int) -> Step:
        """One step of the optimizer; everything that it computed on the way."""
        self.optimizer.zero_grad()
        torch.manual_seed(SEED + number)
        dtype = getattr(torch, self.case.dtype)
        whole = {k: x.to(dtype) if x.is_floating_point() else x for k, x in self.recipe.batch(number).items()}
        loss = self._backward(whole)
        self.recipe.reduce(self.model)
        computed: Step = {"output": self.recorder.take(), "loss": {"": Value(loss)}}
        computed["gradient"] = self.view.gradients()
        norm = self.recipe.clip(self.model)
        computed["norm"] = {} if norm is None else {"": Value(torch.as_tensor(norm, device="cpu").detach())}
        computed["clipped"] = self.view.gradients()
        self.optimizer.step()
        computed["parameter"] = self.view.parameters()
        return computed

    def _backward(self, whole: Batch) -> torch.Tensor:
        """Forward and backward of this rank's microbatches -> the loss of the job."""
        num, ranks = num_samples(whole), self.layout.num_ranks
        rank = dist.get_rank() if ranks > 1 else 0
        if num < ranks:
            raise AuditError(
                f"{self.layout} needs {ranks} samples, but batch(step) returned {num}: let it return more"
            )
        first = num * rank // ranks  # the parts of ranks may differ by a sample: weight(part) makes up for it
        of_rank = take(whole, first, num * (rank + 1) // ranks)
        microbatches = cut(of_rank, sizes_of_microbatches(num_samples(of_rank), self.case.accumulation))
        total = torch.zeros((), dtype=torch.float64, device="cpu")
        side = self.case.padding
        with_padding = [batch if side == "none" else self.recipe.pad(batch, side) for batch in microbatches]
        with self.recipe.accumulate(self.model, with_padding):
            for number, (batch, padded) in enumerate(zip(microbatches, with_padding, strict=True)):
                end = first + num_samples(batch)
                added = [padded[name].shape[1] - x.shape[1] for name, x in batch.items() if x.dim() > 1]
                self.recorder.begin(first, end, max(added, default=0))
                first = end
                part = Part(batch, of_rank, whole, ranks, len(microbatches))
                with ExitStack() as stack:
                    no_sync: Any = getattr(self.model, "no_sync", None)
                    # Gradients are reduced once, with the last microbatch's backward.
                    if number + 1 < len(microbatches) and no_sync is not None:
                        stack.enter_context(no_sync())
                    mean, shared = _two_losses(self.recipe.loss(self.model, padded))
                    loss = mean * self.recipe.weight(part) + shared * self.recipe.shared_weight(part)
                    loss.backward()
                total += loss.detach()
        if ranks > 1:
            dist.all_reduce(total)
        return total / ranks


class _Recorder:
    """The outputs of a model's blocks for every sample, of the first forward of each microbatch."""

    def __init__(self, model: nn.Module, padding: str) -> None:
        self._padding = padding
        self._outputs: dict[str, dict[int, Value]] = {}
        self._first = self._end = self._num_padded = 0
        for name, block in blocks_of(model).items():
            block.register_forward_hook(lambda _, __, out, name=name: self._keep(name, out))

    def begin(self, first: int, end: int, num_padded: int) -> None:
        """Expect the samples [first, end) next, padded by num_padded columns."""
        self._first, self._end, self._num_padded = first, end, num_padded

    def take(self) -> Values:
        """Records since the last call, for each block."""
        outputs, self._outputs = self._outputs, {}
        taken = {}
        for name, parts in outputs.items():
            values = list(parts.values())
            rows = (values[0].rows or (0, 0))[0], (values[-1].rows or (0, 0))[1]
            taken[name] = Value(torch.cat([value.tensor for value in values]), rows)
        return taken

    def _keep(self, name: str, out: Any) -> None:
        x = out[0] if isinstance(out, tuple) and out else out
        if not is_counted():
            return  # a forward that only looks ahead, or repeats another
        if not isinstance(x, torch.Tensor) or x.dim() < 2 or x.shape[0] != self._end - self._first:
            return  # not the samples of the batch in dimension 0: the other quantities have to do
        x = x.detach()
        if self._num_padded and x.dim() > 2:  # [B, S, ...]: padded columns have no equal in the whole batch
            x = x[:, self._num_padded :] if self._padding == "left" else x[:, : -self._num_padded]
        # The first forward of a microbatch is the one that its loss comes from; later ones repeat it.
        self._outputs.setdefault(name, {}).setdefault(self._first, Value(x.clone(), (self._first, self._end)))


def look_closely(start: Values, first: Step, drawing: Iterable[str]) -> Facts:
    """Find what clipping and the optimizer left out in the first step from the parameters start."""
    before, after, end = (first[quantity] for quantity in ("gradient", "clipped", "parameter"))
    factors = {}
    for name, value in before.items():
        largest = value.tensor.abs().max() if value.tensor.numel() else value.tensor.new_zeros(())
        if largest > 0:
            at = value.tensor.abs().argmax()
            factors[name] = (after[name].tensor.flatten()[at] / value.tensor.flatten()[at]).item()
    ordered = sorted(factors.values())
    usual = ordered[0] if ordered else 1.0  # whatever is left out is scaled least
    apart = {name: factor for name, factor in factors.items() if abs(factor - usual) > 1e-6 * abs(usual)}
    still = [name for name in factors if torch.equal(start[name].tensor, end[name].tensor)]
    return Facts(apart, usual, still, list(drawing))


def _two_losses(loss: Any) -> tuple[torch.Tensor, Any]:
    """(the mean over the tokens, what all ranks share), where a recipe's loss may be the former alone."""
    mean, shared = loss if isinstance(loss, (tuple, list)) and len(loss) == 2 else (loss, 0.0)
    if not isinstance(mean, torch.Tensor) or mean.dim() or torch.as_tensor(shared, device="cpu").dim():
        given = f"shape {list(mean.shape)}" if isinstance(mean, torch.Tensor) else type(mean).__name__
        raise AuditError(
            "loss(model, batch) must return a tensor [] with the mean over the tokens, or a pair of it and a loss [] "
            f"that all ranks share, but returned {given}"
        )
    return mean, shared


@contextmanager
def watch_draws(model: nn.Module) -> Iterator[dict[str, None]]:
    """Collect the names of the innermost modules whose forwards draw from torch's generator of the CPU.

    No two layouts draw the same numbers, so that they differ without a mistake.
    """
    names = {module: name or type(model).__name__ for name, module in model.named_modules()}
    found: dict[str, None] = {}
    running: list[tuple[torch.Tensor, int]] = []
    num_draws = 0

    def enter(module: nn.Module, _: Any) -> None:
        if module in names:
            running.append((torch.get_rng_state(), num_draws))

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        nonlocal num_draws
        if module not in names:
            return
        state, num_before = running.pop()
        if num_draws == num_before and not torch.equal(state, torch.get_rng_state()):
            found[names[module]] = None
            num_draws += 1

    # not the modules' own hooks: with those, experts would run in another way
    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
