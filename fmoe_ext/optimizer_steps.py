"""Call modules before and after an optimizer's step: gates adjust biases, data parallelism ends its reduction.

    follower.before(optimizer)          before step()
    follower.after_closure(optimizer)   after each call of the closure of step(closure), which runs a backward
    follower.after(optimizer)           after step()

This file registers one hook of each kind with torch.optim for all modules. Hooks of the modules' own would be removed
when these are garbage collected, which may happen while torch walks over its hooks, and would end the step with an
error.
"""

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


class _Follower(Protocol):
    """Called around the steps of every optimizer of torch.optim; it must not keep its module alive.

    after_closure(optimizer) is optional.
    """

    def before(self, optimizer: Optimizer) -> None: ...

    def after(self, optimizer: Optimizer) -> None: ...


FOLLOWERS: weakref.WeakKeyDictionary[nn.Module, _Follower] = weakref.WeakKeyDictionary()


def follow_optimizers(module: nn.Module, follower: _Follower) -> None:
    """Call follower as long as module lives; it replaces an earlier one."""
    FOLLOWERS[module] = follower


def has_a_parameter_of(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether the optimizer steps any of these parameters."""
    wanted = {id(p) for p in parameters if p.requires_grad}
    groups = optimizer.param_groups
    return bool(wanted) and any(id(p) in wanted for group in groups for p in group["params"])


class _ActsAfterSteps(Protocol):
    """A module for AfterOptimizerStep."""

    def after_optimizer_step(self) -> None: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


class AfterOptimizerStep:
    """Calls module.after_optimizer_step() after each step of any torch.optim optimizer that has a parameter of module.

    An optimizer inside another's step (ZeroRedundancyOptimizer has one) counts as the outer one, so that ranks whose
    inner optimizers hold different parameters still act together.
    """

    def __init__(self, module: _ActsAfterSteps) -> None:
        self._module = weakref.ref(module)
        # the outermost one that is inside step() and has a parameter of module
        self._stepping: weakref.ref[Optimizer] | None = None

    def before(self, optimizer: Optimizer) -> None:
        module = self._module()
        if _makes_state_only(optimizer):
            return
        inside_another = self._stepping is not None and _is_running(self._stepping())
        if module is not None and not inside_another and has_a_parameter_of(optimizer, module.parameters()):
            self._stepping = weakref.ref(optimizer)

    def after(self, optimizer: Optimizer) -> None:
        module = self._module()
        if module is not None and self._stepping is not None and self._stepping() is optimizer:
            self._stepping = None
            module.after_optimizer_step()


def _is_running(optimizer: Optimizer | None) -> bool:
    """Return whether the optimizer's step is on this thread's stack.

    One whose last step ended with an error is not, though `after` was never called: torch calls no hook then.
    """
    frame = inspect.currentframe()
    while optimizer is not None and frame is not None:
        if frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False


def _makes_state_only(optimizer: Optimizer) -> bool:
    """Return whether torch.distributed.checkpoint makes state to fill, by a step with rate 0 and gradients of 0."""
    if optimizer.state or any(float(group.get("lr", 1)) for group in optimizer.param_groups):
        return False
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return bool(grads) and not any(grad.any() for grad in grads)


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    # a list: the garbage collector may drop a follower meanwhile
    for follower in list(FOLLOWERS.values()):
        follower.before(optimizer)
    # torch calls step() with the arguments that a hook returns: (optimizer, closure)
    if len(args) > 1 and callable(args[1]):
        return (args[0], _followed(optimizer, args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _followed(optimizer, kwargs["closure"])}
    return None


def _followed(optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap a closure, whose backward runs inside the step, so that followers act after each call."""

    def run() -> Any:
        loss = closure()
        for follower in list(FOLLOWERS.values()):
            if (after_closure := getattr(follower, "after_closure", None)) is not None:
                after_closure(optimizer)
        return loss

    return run


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for follower in list(FOLLOWERS.values()):
        follower.after(optimizer)


HOOKS = (register_optimizer_step_pre_hook(_before_step), register_optimizer_step_post_hook(_after_step))
