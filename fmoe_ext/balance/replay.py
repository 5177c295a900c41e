"""RoutingReplay: record which experts the gates of a model choose, and make them choose the same again.

A gate's forward asks a tape for its choices (views.py), and there are two tapes:

    _Recorder   lets the gate choose, and keeps the choices before and after some were dropped
    _Player     gives forward number n the n-th recorded choices, from the first again after the last

Weights and gradients are those of the gate's present logits at the given choices. Inside valid_tokens() our gates get
real tokens alone: choices that were recorded for all tokens are cut to those. Other libraries' routers get all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from fmoe_ext.balance.views import GateView, RouterView, Tape, views_of
from fmoe_ext.tokens import current_batch

CHOOSE_ANEW = -2  # stands for every choice of a token without a record, which then chooses for itself


class Choices(NamedTuple):
    """Choices of one forward of a gate.

    A token whose choices are all CHOOSE_ANEW (-2) chooses for itself when the others' are replayed.
    """

    selected: torch.Tensor  # [T, K], before choices were dropped
    kept: torch.Tensor  # [T, K], -1 for dropped ones


class RoutingReplay:
    """Records which experts the gates of a model choose, and makes them choose the same again.

    For reinforcement learning, where the policy is evaluated with the experts that its rollout used ("routing replay"
    of GSPO, 2025), for distillation, and to compare precisions or kernels without the noise of other choices.

    The gates are ours, or the routers of Transformers 5 and Megatron-core (docs/telemetry.md), whose hooks stay until
    remove(). choices: {name of the gate: one Choices for each forward}, in order; play() goes through them and
    then begins again. A forward that activation checkpointing repeats chooses what the first one chose. choices may
    be saved and loaded; balance.load_routed_experts() sets them to what an inference engine chose.

    Example:

        >>> mlp = fmoe_ext.FMoETransformerMLP(num_expert=4, d_model=8, d_hidden=16, gate="softmax")
        >>> x = torch.randn(10, 8)
        >>> replay = RoutingReplay(mlp)
        >>> with replay.record():
        ...     old = mlp(x)
        >>> with replay.play():
        ...     new = mlp(x)  # weights and gradients are those of the present logits
        >>> torch.allclose(new, old, atol=1e-6)
        True
    """

    def __init__(self, model: nn.Module) -> None:
        self.views = views_of(model, "record")
        self.gates = {name: view.module for name, view in self.views.items()}
        self.choices: dict[str, list[Choices]] = {}
        # the lists of the last record(), so that _check() lets a gate choose an expert twice (SwipeGate)
        self._recorded: dict[str, list[Choices]] = {}

    @contextmanager
    def record(self) -> Iterator[RoutingReplay]:
        """Forget earlier choices and record every forward inside the block."""
        self.choices = {name: [] for name in self.views}
        self._recorded = dict(self.choices)
        with self._tapes(lambda name: _Recorder(self.choices[name])):
            yield self

    @contextmanager
    def play(self) -> Iterator[RoutingReplay]:
        """Give the recorded choices to every forward inside the block."""
        self.check_recorded()
        for name, view in self.views.items():
            _check(name, view, self.choices[name], self.choices[name] is self._recorded.get(name))
        with self._tapes(lambda name: _Player(self.choices[name], self.views[name])):
            yield self

    def check_recorded(self) -> None:
        """Raise RuntimeError for gates without choices, such as those of heads that no recorded forward ran."""
        missing = [name for name in self.views if not self.choices.get(name)]
        if missing:
            raise RuntimeError(
                f"nothing was recorded for the gates {', '.join(map(repr, missing))}: record a forward in which they "
                "run, or make the RoutingReplay of a part of the model without them"
            )

    def remove(self) -> None:
        """Remove the hooks of other libraries' routers; a forward that a backward repeats after this chooses anew."""
        for view in self.views.values():
            view.remove()

    @contextmanager
    def _tapes(self, make: Callable[[str], Tape]) -> Iterator[None]:
        with ExitStack() as stack:
            for name, view in self.views.items():
                stack.enter_context(view.taped(make(name)))
            yield


def _check(name: str, view: GateView, choices: list[Choices], is_recorded: bool) -> None:
    for selected, kept in choices:
        if selected.shape != kept.shape:
            raise ValueError(
                f"{name}: selected {list(selected.shape)} and kept {list(kept.shape)} have different shapes"
            )
        if selected.dim() != 2:
            raise ValueError(f"{name}: the choices must be [tokens, K], but are {list(selected.shape)}")
        for chosen in (selected, kept):
            # -1: dropped; -2: chooses anew
            outside = (chosen >= view.num_experts) | (chosen < CHOOSE_ANEW)
            if bool(outside.any()):
                raise ValueError(
                    f"{name}: the choices name expert {int(chosen[outside][0])}, but there are {view.num_experts} "
                    "experts"
                )
            is_anew = chosen == CHOOSE_ANEW
            in_part = is_anew.any(1) & ~is_anew.all(1)
            if bool(in_part.any()):
                row = int(in_part.nonzero()[0])
                raise ValueError(
                    f"{name}: token {row} has {chosen[row].tolist()}, but all choices of a token must be {CHOOSE_ANEW} "
                    "or none. Where a token has fewer choices, fill up with -1"
                )
        if not torch.equal(selected == CHOOSE_ANEW, kept == CHOOSE_ANEW):
            raise ValueError(
                f"{name}: selected and kept differ in the tokens that choose anew ({CHOOSE_ANEW})"
            )
        # twice in a row: equal neighbours among the row's sorted choices
        ordered = selected.sort(1).values
        is_twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        if not is_recorded and bool(is_twice.any()):
            row = int(is_twice.any(1).nonzero()[0])
            raise ValueError(
                f"{name}: token {row} chooses an expert twice, {selected[row].tolist()}: its weights would count that "
                "expert once too often. Where a token has fewer choices, fill up with -1"
            )
        # the topk of other libraries' routers gathers a score for each choice, and -1 has none
        if isinstance(view, RouterView) and bool((selected == -1).any()):
            raise ValueError(f"{name}: {type(view.module).__name__} cannot drop choices, but some are -1")


class _Recorder:
    only_listens = True

    def __init__(self, choices: list[Choices]) -> None:
        self.choices = choices
        self.selected: torch.Tensor | None = None

    def choose(self, pick: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.selected = selected = pick()  # until after_forward(), which has the choices that were kept
        return selected

    def after_forward(self, view: GateView, output: Any) -> None:
        kept = view.read(output)[0]
        selected = kept if self.selected is None else self.selected
        self.choices.append(Choices(selected.detach(), kept.detach()))
        self.selected = None


class _Player:
    def __init__(self, choices: list[Choices], view: GateView) -> None:
        own = next(chain(view.module.parameters(), view.module.buffers()), None)
        self.choices = choices
        self._sees_padding = isinstance(view, RouterView)
        if own is not None:  # choices of an inference engine or of a file are on the CPU
            self.choices = [Choices(*(part.to(own.device) for part in pair)) for pair in choices]
        self.num_played = 0
        # checked once: to look at a tensor's values in a forward would wait for the device
        self._are_whole = [not bool((selected == CHOOSE_ANEW).any()) for selected, _ in choices]

    def choose(self, pick: Callable[[], torch.Tensor]) -> torch.Tensor:
        selected = self._current.selected
        return selected if self._is_whole else _filled(selected, pick())

    def after_forward(self, view: GateView, output: Any) -> Any:
        kept, own = self._current.kept, view.read(output)[0]
        if kept.shape[0] != own.shape[0]:
            raise ValueError(f"the choices are for {kept.shape[0]} tokens, but there are {own.shape[0]}")
        kept = kept if self._is_whole else _filled(kept, own)
        self.num_played += 1
        return view.with_kept(output, kept)

    @property
    def _is_whole(self) -> bool:
        return self._are_whole[self.num_played % len(self.choices)]

    @property
    def _current(self) -> Choices:
        """Return the choices of this forward, cut to the real tokens if the gate sees only these."""
        choices, batch = self.choices[self.num_played % len(self.choices)], current_batch()
        # rows: the places of the real tokens among num_tokens
        if self._sees_padding or batch.rows is None or batch.num_tokens != choices.kept.shape[0]:
            return choices
        return Choices(*(batch.take(part.to(batch.rows.device)) for part in choices))


def _filled(given: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Replace CHOOSE_ANEW in the given choices [T, K] by the gate's own; ValueError for other sizes."""
    if given.shape != own.shape:
        raise ValueError(f"the choices are {list(given.shape)}, but the gate chooses {list(own.shape)}")
    given = given.to(own.device)
    return torch.where(given == CHOOSE_ANEW, own, given)
