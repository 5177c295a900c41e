"""A training under any parallel plan: the functions of a recipe file, and the part of a model on one rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fmoe_ext.audit.cases import DTYPES, AuditError
from fmoe_ext.audit.recipe import Batch, make_optimizer, take
from fmoe_ext.audit.shrink import smallest_vocabulary
from fmoe_ext.audit.source import RandomTokens, loss_of_transformers

# Parts of names that wrappers add: DistributedDataParallel, torch.compile, checkpoint_wrapper, FSDP1.
WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class Parallel:
    """The part of a model that this rank trains under a plan; a library that trains in its own way overrides methods.

    share: (index, number) of the part of every batch that this rank gets. Ranks with one index see the same tokens.
    """

    def __init__(self, model: nn.Module, share: tuple[int, int] = (0, 1)) -> None:
        self.model, self.share = model, share

    def prepare(self, recipe: PlanRecipe) -> None:
        """Make the optimizer, before the first step."""
        self.optimizer: Optimizer = recipe.optimizer(self.model)

    def backward(self, recipe: PlanRecipe, batch: Batch) -> torch.Tensor | None:
        """Forward and backward of this rank's share of a batch -> its mean loss; None if this rank computes none."""
        self.optimizer.zero_grad()
        loss = recipe.loss(self.model, batch)
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        """Update the parameters."""
        self.optimizer.step()

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of this rank under the names of the model that was given."""
        return {_plain_name(name): p for name, p in self.model.named_parameters()}

    def modules(self) -> dict[str, nn.Module]:
        """Modules of this rank under the names of the model that was given."""
        return {_plain_name(name): module for name, module in self.model.named_modules()}

    def gradient(self, name: str, p: nn.Parameter) -> torch.Tensor | None:
        """Gradient of a parameter, as it is on this rank."""
        grad = p.grad if p.grad is not None else getattr(p, "main_grad", None)
        return None if grad is None else grad.detach()

    def whole(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Make a tensor whole of this rank's part x; every rank calls it for the same names in one order."""
        return x.full_tensor() if isinstance(x, DTensor) else x

    def close(self) -> None:
        """Undo what the plan left in this process, after the last step."""


@dataclass(frozen=True)
class PlanRecipe:
    """A training and its parallel plan; of all functions, only model and parallelize have no default.

    parallelize(model, rank, world) returns the model under the plan on one rank, or a Parallel of it. Its parameters
    are those of one process already; the default process group is gloo's.
    tolerance None: 1e-12 in float64 (1e-5 for models of Transformers, which compute norms and routers in float32),
    1e-5 in float32.
    """

    model: Callable[[], nn.Module]  # the model in one process, seeded by the audit
    parallelize: Callable[[nn.Module, int, int], Any]
    batch: Callable[[int], Batch] | None = (
        None  # batch(step); None: random tokens for a model of Transformers
    )
    loss: Callable[[Any, Batch], torch.Tensor] = loss_of_transformers  # loss(model, batch), a mean
    optimizer: Callable[[Any], Optimizer] = make_optimizer  # SGD with momentum
    world: int = 2  # ranks
    dtype: str = "float64"  # or float32, for what has no float64
    steps: int = 2  # of the optimizer
    tolerance: float | None = None  # largest error over the largest number of a quantity
    noise: float = 0.05  # standard deviation, added to the initial parameters so that no bias is zero

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise AuditError(f"dtype must be of {', '.join(DTYPES)}, but got {self.dtype!r}")
        for name in ("world", "steps"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise AuditError(f"{name} must be a positive number, but got {getattr(self, name)!r}")

    def batch_of(self, model: nn.Module, step: int) -> Batch:
        """The whole batch of a step; random tokens if the recipe has none and the model is one of Transformers."""
        if self.batch is not None:
            return self.batch(step)
        if not _is_of_transformers(model):
            raise AuditError(
                f"no batch can be made for {type(model).__name__}: give batch(step) -> dict of tensors"
            )
        config = getattr(model.config, "text_config", None) or model.config
        return RandomTokens(smallest_vocabulary(config))(step)

    def bound(self, model: nn.Module) -> float:
        """Largest error that counts as equal."""
        if self.tolerance is not None:
            return self.tolerance
        if self.dtype == "float32":
            return 1e-5
        return 1e-5 if _is_of_transformers(model) else 1e-12


def _is_of_transformers(model: Any) -> bool:
    """True for a PreTrainedModel of Transformers."""
    return hasattr(getattr(model, "config", None), "to_dict") and hasattr(
        model, "gradient_checkpointing_enable"
    )


def _plain_name(name: str) -> str:
    """A name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def share_of(batch: Batch, share: tuple[int, int]) -> Batch:
    """The samples of one of equal parts of a batch; AuditError if it does not divide."""
    index, number = share
    size = next(iter(batch.values())).shape[0]
    if size % number:
        raise AuditError(
            f"{size} samples cannot be divided among {number} parts: let batch(step) return more"
        )
    return take(batch, size // number * index, size // number * (index + 1))


def recipe_of(module: ModuleType) -> PlanRecipe:
    """The recipe that a file's functions make."""
    known = {f.name for f in fields(PlanRecipe)}
    parts = {name: value for name, value in vars(module).items() if name in known}
    parts = {name: value for name, value in parts.items() if not inspect.ismodule(value)}
    if missing := [name for name in ("model", "parallelize") if not callable(parts.get(name))]:
        raise AuditError(
            f"{module.__name__} has no function {' and no '.join(missing)}: a recipe file defines model() and "
            "parallelize(model, rank, world); or name a function that returns a Recipe, file.py:function"
        )
    return PlanRecipe(**parts)
