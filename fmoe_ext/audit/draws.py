"""Find modules that draw random numbers: no two layouts draw the same, so that they differ without a mistake."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


@contextmanager
def watch_draws(model: nn.Module) -> Iterator[dict[str, None]]:
    """The names of the innermost modules of a model whose forwards draw from torch's generator of the CPU."""
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
