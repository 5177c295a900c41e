"""What a module does by itself whenever an optimizer has stepped."""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


class FollowsOptimizers(Protocol):
    """A module that wants to know."""

    def after_optimizer_step(self) -> None: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


class AfterOptimizerStep:
    """Calls module.after_optimizer_step() once a step of any torch.optim optimizer that has a parameter of module.

    An optimizer inside another's step (ZeroRedundancyOptimizer has one) counts as the outer one, so that ranks whose
    inner optimizers hold different parameters still act together. The module is not kept alive by this.
    """

    def __init__(self, module: FollowsOptimizers) -> None:
        self._module = weakref.ref(module)
        self._stepping: weakref.ref[Optimizer] | None = None
        FOLLOWERS[module] = self

    def before(self, optimizer: Optimizer) -> None:
        module = self._module()
        inside_another = self._stepping is not None and self._stepping() is not None
        if module is not None and not inside_another and _has_a_parameter_of(optimizer, module.parameters()):
            self._stepping = weakref.ref(optimizer)

    def after(self, optimizer: Optimizer) -> None:
        module = self._module()
        if module is not None and self._stepping is not None and self._stepping() is optimizer:
            self._stepping = None
            module.after_optimizer_step()


def _has_a_parameter_of(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> bool:
    wanted = {id(p) for p in parameters if p.requires_grad}
    groups = optimizer.param_groups
    return bool(wanted) and any(id(p) in wanted for group in groups for p in group["params"])


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    for follower in list(FOLLOWERS.values()):
        follower.before(optimizer)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for follower in list(FOLLOWERS.values()):
        follower.after(optimizer)


# One pair of hooks for all: one that the garbage collector removed while torch walks over its hooks would end the step.
FOLLOWERS: weakref.WeakKeyDictionary[FollowsOptimizers, AfterOptimizerStep] = weakref.WeakKeyDictionary()
HOOKS = (register_optimizer_step_pre_hook(_before_step), register_optimizer_step_post_hook(_after_step))
