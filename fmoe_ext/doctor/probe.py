"""Measure from outside what each expert adds to each token of one layer, for the checks of the other modules here.

A MoE layer returns  y[t] = sum over e of w[t, e] f_e(x[t]).  To see the weights w without reading the layer's code,
give all experts the same values, so that they are one function f. Then move the values of expert e alone a little:

    y'[t] - y[t] = w[t, e] (f'(x[t]) - f(x[t]))             parts(): [T, M, D], one run of the layer for each expert

Rows that do not move were not computed by e. The factor in brackets is not known, but it is the same for all experts of
a token: the ratios of its moves are the ratios of its weights. Watch (structure.py) changes scores between the router's
product and the choice, so that the effect of a score on choices and weights is measured the same way.

Shapes: T tokens, E experts, M of them measured, D the width of the output.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import nn

from fmoe_ext.doctor.case import Case, ChangeScores, rows_of
from fmoe_ext.doctor.structure import Layer, Watch
from fmoe_ext.doctor.subject import copied, drawn_numbers

Prepare: TypeAlias = Callable[[Layer, dict[str, nn.Parameter]], None]
_MOVE = 1e-2  # relative move of an expert's values: the output is linear in it within 1 %
NEAR = 0.1  # added to a score: moves weights, and few choices
_MOST_MEASURED = 16  # experts that are all measured, each in a run of its own
_MANY = 8  # experts that are measured where there are more, those that were chosen most often
_RATE = re.compile("dropout|pdrop|drop_?(path|rate|prob)", re.IGNORECASE)  # names of what drops at random
_ZERO = 1e-12  # relative to the largest move; smaller ones are rounding: an unused expert moves nothing


class Probe:
    """One layer of the model in evaluation, run alone on the input that it had in the model's first forward."""

    def __init__(self, case: Case, layer: Layer) -> None:
        self.layer = layer
        self.cannot: str | None = None  # why it cannot be measured
        self.rows: torch.Tensor = torch.empty(0, device="cpu")  # [T, D], what it returns
        self.scores: torch.Tensor | None = None  # [T, E]; None where the product is not seen, or of_groups
        self.of_groups = False  # the router has fewer rows of scores than there are tokens
        self.choices: torch.Tensor | None = None  # [T, K]; None where they are not visible
        self.over_tokens = False  # experts choose tokens
        self.ranked = False  # a rank of scores was seen
        self.input_kept = True  # False once a run, in training or in evaluation, wrote into its input
        self.measured: list[int] = []  # numbers of the experts that are measured
        self._module = case.model.get_submodule(layer.name)
        self._inputs: Any = None  # its (args, kwargs) in the model
        outputs: list[torch.Tensor] = []

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._inputs is None:
                self._inputs = _detached((args, kwargs))

        # 1. the layer's input and output inside the model; of several calls the first input
        model = case.copy().eval()
        inside = model.get_submodule(layer.name)
        inside.register_forward_pre_hook(before, with_kwargs=True)
        inside.register_forward_hook(lambda module, args, output: outputs.append(rows_of(output).clone()))
        with torch.no_grad():
            case.run(model, case.subject.batch, case.subject.task)
        if self._inputs is None or not outputs:
            self.cannot = "its input and output are not visible"
            return
        expected = outputs[0]
        # 2. alone on this input it must return the same
        try:
            self.rows, watch = self._run()
        except Exception as error:  # of the model
            self.cannot = f"it does not run alone: {type(error).__name__}"
            return
        self.scores = watch.scores.get(layer.name)
        self.choices = watch.choices.get(layer.name)
        self.over_tokens = layer.name in watch.over_tokens
        self.ranked = layer.name in watch.ranked
        if self.rows.shape != expected.shape or not torch.allclose(self.rows, expected, rtol=1e-4, atol=1e-6):
            self.cannot = "alone it has another output than in the model"
        # 3. scores and choices count if they have a row for each token
        self.of_groups = self.scores is not None and len(self.scores) < len(self.rows)
        if self.scores is not None and len(self.scores) != len(self.rows):
            self.scores = None
        if self.choices is not None and len(self.choices) != len(self.rows):
            self.choices = None
        # 4. the experts to measure
        self.measured = list(range(layer.num_experts))
        if layer.num_experts > _MOST_MEASURED:
            every = torch.arange(layer.num_experts, device=self.rows.device)
            counts = layer.load(every if self.choices is None else self.choices)
            self.measured = counts.topk(_MANY).indices.sort().values.tolist()
        # 5. of shards it is not known which row is which expert: find it by who computed the tokens that chose a number
        if layer.shards and not layer.order:
            if self.choices is None:
                self.cannot = (
                    "its experts are in several parts, and which expert a choice means is not visible"
                )
                return
            if len(self.measured) < layer.num_experts:
                self.cannot = (
                    f"its experts are in several parts, and only {_MANY} of {layer.num_experts} are measured"
                )
                return
            used = active(self.parts()).double()  # [T, places]
            nobody = layer.num_scores  # a column for choices of nobody, cut off below
            chosen = torch.zeros(len(used), nobody + 1, dtype=torch.float64, device=used.device)
            chosen.scatter_(1, torch.where(self.choices < 0, nobody, self.choices), 1.0)
            chosen = chosen[:, : layer.num_experts]
            both = chosen.t() @ used
            either = chosen.sum(0)[:, None] + used.sum(0) - both  # tokens [E, places]
            alike = both / either.clamp(min=1)  # tokens in common, over tokens of either (Jaccard)
            # match greedily: the pair that is most alike first
            order = [-1] * layer.num_experts
            for pair in alike.flatten().argsort(descending=True).tolist():
                number, place = divmod(pair, layer.num_experts)
                if order[number] < 0 and place not in order:
                    order[number] = place
            layer.order = order

    def run(
        self, change: ChangeScores | None = None, prepare: Prepare | None = None, inputs: Any = None
    ) -> torch.Tensor:
        """Return the layer's rows [T, D] in evaluation.

        change: of the scores. prepare: changes parameters before. inputs: (args, kwargs), None for those in the model.
        """
        return self._run(change, prepare, inputs)[0]

    def choose(
        self, change: ChangeScores | None = None, inputs: Any = None, training: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the layer's rows and choices. training: the seed of a run in training; None: in evaluation."""
        rows, watch = self._run(change, None, inputs, training)
        return rows, watch.choices.get(self.layer.name)

    def _run(
        self,
        change: ChangeScores | None = None,
        prepare: Prepare | None = None,
        inputs: Any = None,
        training: int | None = None,
    ) -> tuple[torch.Tensor, Watch]:
        module = copied(self._module).train(training is not None)  # a run leaves no state for the next one
        prefix = f"{self.layer.name}." if self.layer.name else ""
        own = {f"{prefix}{n}": p for n, p in module.named_parameters(remove_duplicate=False)}
        layer = replace(
            self.layer,
            module=module,
            stacked={n: own[n] for n in self.layer.stacked},
            separate=[{n: own[n] for n in expert} for expert in self.layer.separate],
            shards=[{n: own[n] for n in shard} for shard in self.layer.shards],
            routers={n: own[n] for n in self.layer.routers},
        )
        with torch.no_grad():
            if prepare is not None:
                prepare(layer, own)
            # a layer may write into its input: give it a copy, and compare the copy afterwards
            args, kwargs = copy.deepcopy(self._inputs if inputs is None else inputs)
            torch.manual_seed(training or 0)
            before = [v.clone() for v in _floating((args, kwargs))]
            with Watch([layer], change).forward() as watch:
                rows = rows_of(module(*args, **kwargs)).clone()
            after = _floating((args, kwargs))
            self.input_kept &= all(a.equal(b) for a, b in zip(before, after, strict=False))
            return rows, watch

    def parts(self, change: ChangeScores | None = None, experts: list[int] | None = None) -> torch.Tensor:
        """Measure how far each row moves with each expert's values, all experts being equal before -> [T, M, D]."""
        base = self.run(change, _equal([]))
        moves = [
            self.run(change, _equal([e])) - base for e in (self.measured if experts is None else experts)
        ]
        return torch.stack(moves, 1)

    def whole(self, change: ChangeScores | None = None) -> torch.Tensor:
        """Measure how far each row moves with all experts at once -> [T, D]: the sum of a token's weights."""
        return self.run(change, _equal(list(range(self.layer.num_experts)))) - self.run(change, _equal([]))

    @functools.cached_property
    def base(self) -> torch.Tensor:
        """parts() of the scores as they are."""
        return self.parts()

    @functools.cached_property
    def used(self) -> torch.Tensor:
        """bool [T, M]: the experts that add to a token."""
        return active(self.base)

    @functools.cached_property
    def by_design(self) -> str | None:
        """Say why a token's experts depend on other tokens by the layer's design; None if nothing says so."""
        if self.cannot is None and (reason := self.mixes_tokens):
            return reason
        if declared_capacity(self.layer):
            return "a capacity is declared, so that other tokens decide who is dropped"
        return self.capacity

    @functools.cached_property
    def capacity(self) -> str | None:
        """Say why the experts seem to have a capacity; None if they behave as if they had none.

        It is a capacity C if every expert that loses choices computes exactly C tokens, none computes more, and C
        doubles with the batch. A limit that does not follow the batch is a fixed one, and a mistake.
        """
        if self.cannot is not None or self.choices is None:
            return None
        counts, most = self.used.sum(0), []
        chosen = self.layer.load(self.choices)[self.measured]
        if not bool((counts < chosen).any()):
            return None
        args, kwargs = copy.deepcopy(self._inputs)
        values = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.ndim > 1]
        # hidden states [..., D], or tokens [...]
        rows = [v.shape[:-1].numel() if v.is_floating_point() else v.numel() for v in values]
        if not rows or rows[0] != len(self.rows):
            return None  # no input has a row for each token
        # once more with the batch twice, one after the other
        size = len(values[0])

        def doubled(v: Any) -> Any:
            is_of_samples = isinstance(v, torch.Tensor) and v.ndim and len(v) == size
            return torch.cat([v, v]) if is_of_samples else v

        inputs = [doubled(v) for v in args], {n: doubled(v) for n, v in kwargs.items()}
        base = self.run(prepare=_equal([]), inputs=inputs)
        moves = [self.run(prepare=_equal([e]), inputs=inputs) - base for e in self.measured]
        twice = active(torch.stack(moves, 1)).sum(0)
        for computed, asked in ((counts, chosen), (twice, 2 * chosen)):  # [M] tokens of each expert
            full = computed[computed < asked]
            if not len(full) or bool((full != full[0]).any()) or bool((computed > full[0]).any()):
                return None
            most.append(int(full[0]))
        if not 2 * most[0] - 1 <= most[1] <= 2 * most[0] + 1:  # a share of the tokens, rounded
            return None
        return f"each expert computes {most[0]} tokens at most, and {most[1]} of a batch twice as large: a capacity"

    @functools.cached_property
    def mixes_tokens(self) -> str | None:
        """Say why a token's row depends on other tokens even while no choice changes; None if nothing does."""
        if self.over_tokens:
            return "experts choose tokens, so that other tokens decide"
        if self.of_groups:
            return "the router chooses for several tokens at once"
        if self.choices is None and bool(self.used.all()):
            return "nobody is chosen: all experts compute all tokens, or mixtures of them"
        return None

    @functools.cached_property
    def weighs_inputs(self) -> bool:
        """True if scores change what an expert computes and not only its weight, as when they scale its input.

        A weight changes the length of what the expert adds to a row, never its direction: directions are compared.
        """
        if self.cannot is not None or self.scores is None or not self.used.any():
            return False
        place = int(self.used.sum(0).argmax())  # the busiest expert
        # matrices alone: a bias that counts without its weight changes the direction, too
        moved, still = (_equal(numbers, matrices=True) for numbers in ([self.measured[place]], []))
        raised = only(None, self.measured[place], NEAR)
        before, after = (self.run(change, moved) - self.run(change, still) for change in (None, raised))
        both = self.used[:, place] & (after.norm(dim=-1) > 0)
        cosine = torch.nn.functional.cosine_similarity(after[both], before[both], dim=-1)
        return bool(both.any()) and float((cosine < 1 - 1e-6).double().mean()) > 0.5

    def with_input(self, row: int | slice, amount: float = 1.0) -> Any:
        """Return the inputs with noise on one token, or the same on some; None if no input has a row for each token."""
        args, kwargs = copy.deepcopy(self._inputs)
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > 1:
                rows = value.reshape(-1, value.shape[-1])  # a copy, where the model gave a transposed input
                if len(rows) != len(self.rows):
                    return None
                noise = drawn_numbers(rows.shape[-1:], row if isinstance(row, int) else 0)
                rows[row] += amount * noise.to(rows)
                value.copy_(rows.reshape(value.shape))
                return args, kwargs
        return None


def probe_of(case: Case, layer: Layer) -> Probe:
    """Return the Probe of a layer, made once for all checks."""
    if layer.name not in case.probes:
        case.probes[layer.name] = Probe(case, layer)
    probe: Probe = case.probes[layer.name]
    return probe


def declared_capacity(layer: Layer) -> bool:
    """Return True if an option of the layer is named for a capacity or for drops, and is not off."""
    return any(
        # a float beside "drop" is the rate of a dropout: attn_pdrop, hidden_drop
        "capacity" in name.lower()
        or ("drop" in name.lower() and not _RATE.search(name) and not isinstance(value, float))
        for name, value in options_of(layer).items()
        if not isinstance(value, str | None) and not (isinstance(value, int | float) and value == 0)
    )


def options_of(layer: Layer) -> dict[str, Any]:
    """Collect the attributes of a layer's modules and of their configurations; a module's own goes first."""
    found: dict[str, Any] = {}
    for module in layer.module.modules():
        found |= getattr(getattr(module, "config", None), "__dict__", {})
    for module in layer.module.modules():
        found |= vars(module)
    return found


def has_capacity(case: Case, layer: Layer) -> bool:
    """Return True if the experts of a layer have a capacity, declared or measured, so that tokens may be dropped."""
    return declared_capacity(layer) or probe_of(case, layer).capacity is not None


def ratio_of(after: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Divide the weights of one measurement [T, M, D] by those of another -> [T, M]; NaN where an expert adds nothing.

    The moves of one token and expert are parallel: their ratio is the projection of one on the other.
    """
    return (after * before).sum(-1) / (before * before).sum(-1)


def only(row: int | None, column: int | None, amount: float) -> ChangeScores:
    """Make a change of scores: `amount` on one expert's column, or random numbers of this size on one row."""

    def change(layer: Layer, scores: torch.Tensor) -> torch.Tensor:
        delta = torch.zeros_like(scores)
        if column is not None:
            delta[:, column] = amount
        elif row is not None and row < len(scores):
            generator = torch.Generator("cpu").manual_seed(row)
            delta[row] = amount * torch.randn(scores.shape[-1], generator=generator, device="cpu").to(delta)
        return scores + delta

    return change


def drawn(seed: int, amount: float = 1.0) -> ChangeScores:
    """Make a change of scores: random numbers of this size on all of them."""

    def change(layer: Layer, scores: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator("cpu").manual_seed(seed)
        return scores + amount * torch.randn(scores.shape, generator=generator, device="cpu").to(scores)

    return change


def active(parts: torch.Tensor) -> torch.Tensor:
    """Find the experts that add to a token: parts [T, M, D] -> bool [T, M]."""
    sizes = parts.norm(dim=-1)
    return sizes > _ZERO * sizes.max().clamp(min=1e-300)


def without_experts(layer: Layer, own: dict[str, nn.Parameter]) -> None:
    """Prepare a run in which every expert returns 0."""
    for p in (*layer.parameters().values(), *stacks(layer, own).values()):
        p.zero_()


def without_matrices(layer: Layer, own: dict[str, nn.Parameter]) -> None:
    """Prepare a run in which experts and all other products but the router's return 0."""
    without_experts(layer, own)
    products = {n.rpartition(".")[0] for n, p in own.items() if p.ndim > 1 and n not in layer.routers}
    for name, p in own.items():
        if name.rpartition(".")[0] in products and name not in layer.routers:
            p.zero_()


def stacks(layer: Layer, own: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the parameters that have a row for each expert: the stacks, and the matrices of biases beside them."""
    beside = {n.rpartition(".")[0] for n in layer.stacked}
    rows = {
        n: p
        for n, p in own.items()
        if n.rpartition(".")[0] in beside and p.ndim == 2 and len(p) == layer.num_experts
    }
    return {n: p for n, p in (rows | layer.stacked).items() if n not in layer.routers}


def _equal(moved: list[int], matrices: bool = False) -> Prepare:
    """Prepare a run in which all experts equal the first one, and those in `moved` have the same noise on top.

    matrices: the noise is on matrices alone, not on biases.
    """

    def make_equal(layer: Layer, own: dict[str, nn.Parameter]) -> None:
        generator = torch.Generator("cpu").manual_seed(9)

        def give(values: dict[int, torch.Tensor]) -> None:
            first = next(iter(values.values())).clone()
            noise = torch.randn(first.shape, generator=generator, dtype=torch.float64, device="cpu")
            size = float(first.abs().mean()) or 0.02  # zeros, as of a fresh bias, must move too
            for e, value in values.items():  # views of the copy's parameters: written in place
                value.copy_(first)
                if e in moved and (first.ndim > 1 or not matrices):
                    value.add_(noise.to(first), alpha=_MOVE * size)

        # the three forms of experts (Layer): modules, some maybe empty; stacks; stacks in shards
        with_values = {e: list(expert.values()) for e, expert in enumerate(layer.separate) if expert}
        for tensors in zip(*with_values.values(), strict=True):
            give(dict(zip(with_values, tensors, strict=True)))
        for p in stacks(layer, own).values():
            give(dict(enumerate(p.unbind(0))))
        for tensors in zip(*(shard.values() for shard in layer.shards), strict=True):
            rows = [row for p in tensors for row in p.unbind(0)]
            give({e: rows[layer.place(e)] for e in range(layer.num_experts)})

    return make_equal


def _floating(inputs: Any) -> list[torch.Tensor]:
    args, kwargs = inputs
    return [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.is_floating_point()]


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return type(value)(_detached(v) for v in value)
    if isinstance(value, dict):
        return {n: _detached(v) for n, v in value.items()}
    return value
