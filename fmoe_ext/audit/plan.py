"""Plans: what the engine of the audit trains on every rank.

A plan makes a Parallel, the part of a model that one rank trains, and the same model in one process; run.py
trains both and compares them. A PlanRecipe is a plan of the user's own, from the functions of a recipe file.
A built-in layout is another (layout.py): it has its rows of the experts where others have shards that can be
made whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fmoe_ext.audit.cases import DTYPES, SEED, AuditError
from fmoe_ext.audit.compare import Step, Value
from fmoe_ext.audit.recipe import Batch, make_optimizer, take
from fmoe_ext.audit.shrink import vocabulary_of
from fmoe_ext.audit.source import RandomTokens, is_of_transformers, loss_of_transformers

OF_EXPERTS = "_experts_implementation"  # in a configuration of Transformers
# Parts of names that wrappers add: DistributedDataParallel, torch.compile, checkpoint_wrapper, FSDP1.
_WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class Parallel:
    """The part of a model that this rank trains under a plan; a library that trains in its own way overrides methods.

    share: (index, number) of the part of every batch that this rank gets. Ranks with one index see the same tokens.
    """

    compares_modules = False  # True: outputs of all modules() count, not that of the model alone

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
        """Return the parameters of this rank under the names of the model that was given."""
        return {self.plain_name(name): p for name, p in self.model.named_parameters()}

    def modules(self) -> dict[str, nn.Module]:
        """Return the modules of this rank under the names of the model that was given."""
        return {self.plain_name(name): module for name, module in self.model.named_modules()}

    def plain_name(self, name: str) -> str:
        """Return the name that a parameter or module of this rank has in the model that was given."""
        return ".".join(part for part in name.split(".") if part not in _WRAPPERS)

    def output(self, out: Any) -> Value | None:
        """Select what counts of an output: the tensor, the logits, or the first tensor in it; None for nothing."""
        logits = getattr(out, "logits", None)
        if isinstance(out, torch.Tensor):
            x: torch.Tensor | None = out
        elif isinstance(logits, torch.Tensor):
            x = logits
        else:
            parts = (
                out.values() if isinstance(out, Mapping) else out if isinstance(out, (tuple, list)) else ()
            )
            x = next((x for x in parts if isinstance(x, torch.Tensor) and x.is_floating_point()), None)
        return Value(x) if x is not None and x.is_floating_point() else None

    def gradient(self, name: str, p: nn.Parameter) -> torch.Tensor | None:
        """Return the gradient of a parameter, as it is on this rank."""
        grad = p.grad if p.grad is not None else getattr(p, "main_grad", None)
        return None if grad is None else grad.detach()

    def whole(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Make a tensor whole of this rank's part x; every rank calls it for the same names in one order."""
        return x.full_tensor() if isinstance(x, DTensor) else x

    def value(self, name: str, x: torch.Tensor) -> Value:
        """Make of a parameter or gradient x what is compared with one process."""
        return Value(self.whole(name, x).clone())

    def extra(self) -> Step:
        """Return the norm of clipping and the clipped gradients of the last step(), if they are compared."""
        return {}

    def close(self) -> None:
        """Undo what the plan left in this process, after the last step."""


class Start(NamedTuple):
    """A training before its first step."""

    parallel: Parallel
    model: nn.Module  # in no wrapper
    batch: Callable[[int], Batch]  # the whole batch of a step, counted from 0
    bound: float  # the largest error that counts as equal
    initial: Mapping[str, torch.Tensor]  # what every rank begins with


class Plan(Protocol):
    """A training, as the engine needs to know it."""

    @property
    def world(self) -> int:
        """Ranks."""
        ...

    @property
    def steps(self) -> int:
        """Steps of the optimizer."""
        ...

    @property
    def dtype(self) -> str:
        """The dtype of the model and of batches."""
        ...

    def alone(self, initial: Mapping[str, torch.Tensor] | None) -> Start:
        """Start the training in one process; initial: None to make it."""
        ...

    def on_rank(self, initial: Mapping[str, torch.Tensor], rank: int, world: int) -> Start:
        """Start the training on one rank, where torch.distributed is initialized."""
        ...


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
    batch: Callable[[int], Batch] | None = None  # batch(step); None: random tokens for models of Transformers
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

    def alone(self, initial: Mapping[str, torch.Tensor] | None = None) -> Start:
        """Start the training in one process."""
        torch.manual_seed(SEED)
        model: Any = self.model()
        if not isinstance(model, nn.Module):
            raise AuditError(f"model() must return an nn.Module, but returned {type(model).__name__}")
        model = model.to(getattr(torch, self.dtype)).train()
        config = getattr(model, "config", None)
        if self.dtype == "float64" and getattr(config, OF_EXPERTS, "") == "grouped_mm":
            model.set_experts_implementation("eager")  # torch's grouped_mm has no float64
        with torch.no_grad():
            for p in model.parameters():
                if p.is_floating_point():
                    # biases start at zero, where a fault in them would not show
                    p.add_(self.noise * torch.randn(p.shape, dtype=p.dtype, device=p.device))
        if initial is not None:
            model.load_state_dict(initial)
        batch = self.batch
        if batch is None:
            if not is_of_transformers(model):
                raise AuditError(
                    f"no batch can be made for {type(model).__name__}: give batch(step) -> dict of tensors"
                )
            config = getattr(config, "text_config", None) or config
            batch = RandomTokens(vocabulary_of(config, "give batch(step) -> dict of tensors"))
        # Transformers computes norms and routers in float32, whatever the dtype.
        usual = 1e-5 if self.dtype == "float32" or is_of_transformers(model) else 1e-12
        bound = usual if self.tolerance is None else self.tolerance
        return Start(Parallel(model), model, batch, bound, model.state_dict())

    def on_rank(self, initial: Mapping[str, torch.Tensor], rank: int, world: int) -> Start:
        """Start the training under the plan."""
        start = self.alone(initial)  # its batches are made from the configuration, which a plan may wrap
        made = self.parallelize(start.model, rank, world)
        parallel = Parallel(made) if isinstance(made, nn.Module) else made
        if not isinstance(parallel, Parallel):
            raise AuditError(
                f"parallelize(model, rank, world) must return a model or a Parallel, but returned {type(made).__name__}"
            )
        return start._replace(parallel=parallel)


def share_of(batch: Batch, share: tuple[int, int]) -> Batch:
    """Return the samples of one of equal parts of a batch; raise AuditError if it does not divide."""
    index, number = share
    if number == 1:
        return batch
    size = next(iter(batch.values())).shape[0]
    if size % number:
        raise AuditError(
            f"{size} samples cannot be divided among {number} parts: let batch(step) return more"
        )
    return take(batch, size // number * index, size // number * (index + 1))


def recipe_of(module: ModuleType) -> PlanRecipe:
    """Return the recipe that a file's functions make."""
    known = {f.name for f in fields(PlanRecipe)}
    parts = {
        name: value
        for name, value in vars(module).items()
        if name in known and not inspect.ismodule(value)  # a file may import a module of that name
    }
    if missing := [name for name in ("model", "parallelize") if not callable(parts.get(name))]:
        raise AuditError(
            f"{module.__name__} has no function {' and no '.join(missing)}: a recipe file defines model() and "
            "parallelize(model, rank, world); or name a function that returns a Recipe, file.py:function"
        )
    return PlanRecipe(**parts)
