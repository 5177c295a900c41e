from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from fmoe_ext.gates.base_gate import BaseGate


class Choices(NamedTuple):
    """What one forward of a gate chose: before choices were dropped, and after (-1). Both [T, K]."""

    selected: torch.Tensor
    kept: torch.Tensor


class RoutingReplay:
    """Records which experts the gates of a model choose, and makes them choose the same again.

    For reinforcement learning, where the policy is evaluated with the experts that its rollout used ("routing replay"
    of GSPO, 2025), for distillation, and to compare precisions or kernels without the noise of other choices:

        replay = RoutingReplay(model)
        with replay.record():
            old = model(batch)
        with replay.play():
            new = model(batch)  # weights and gradients are those of the present logits

    choices: {name of the gate: one Choices for each forward}, in order; play() goes through them, and around, so that
    a single forward may be recomputed by activation checkpointing. It may be saved and loaded, and choices made
    elsewhere can be put there.
    """

    def __init__(self, model: nn.Module) -> None:
        self.gates = {name: gate for name, gate in model.named_modules() if isinstance(gate, BaseGate)}
        if not self.gates:
            raise ValueError(f"{type(model).__name__} has no gate (a module that is a BaseGate) to record")
        self.choices: dict[str, list[Choices]] = {}

    @contextmanager
    def record(self) -> Iterator[RoutingReplay]:
        """Forgets earlier choices and records those of every forward inside the block."""
        self.choices = {name: [] for name in self.gates}
        with self._tapes(lambda name: _Recorder(self.choices[name])):
            yield self

    @contextmanager
    def play(self) -> Iterator[RoutingReplay]:
        """Gives the recorded choices to every forward inside the block."""
        missing = [name for name in self.gates if not self.choices.get(name)]
        if missing:
            raise RuntimeError(f"nothing was recorded for the gates {', '.join(map(repr, missing))}")
        with self._tapes(lambda name: _Player(self.choices[name])):
            yield self

    @contextmanager
    def _tapes(self, make: Callable[[str], _Recorder | _Player]) -> Iterator[None]:
        hooks = []
        try:
            for name, gate in self.gates.items():
                gate.tape = make(name)
                hooks.append(gate.register_forward_hook(gate.tape.after_forward))
            yield
        finally:
            for gate in self.gates.values():
                gate.tape = None
            for hook in hooks:
                hook.remove()


class _Recorder:
    def __init__(self, choices: list[Choices]) -> None:
        self.choices = choices
        self.selected: torch.Tensor | None = None

    def choose(self, pick: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.selected = selected = pick()
        return selected

    def after_forward(self, gate: BaseGate, args: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        if gate.tape is not self:  # a repeated forward
            return
        kept = output[0]
        selected = kept if self.selected is None else self.selected
        self.choices.append(Choices(selected.detach(), kept.detach()))
        self.selected = None


class _Player:
    def __init__(self, choices: list[Choices]) -> None:
        self.choices = choices
        self.num_played = 0

    def choose(self, pick: Callable[[], torch.Tensor]) -> torch.Tensor:
        return self._current.selected

    def after_forward(
        self, gate: BaseGate, args: tuple[Any, ...], output: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...] | None:
        if gate.tape is not self:  # a repeated forward
            return None
        kept = self._current.kept
        if kept.shape[0] != output[0].shape[0]:
            raise ValueError(
                f"the choices are for {kept.shape[0]} tokens, but there are {output[0].shape[0]}"
            )
        self.num_played += 1
        return (kept.to(output[0].device), *output[1:])

    @property
    def _current(self) -> Choices:
        return self.choices[self.num_played % len(self.choices)]
