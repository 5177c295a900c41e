"""Check how a MoE layer is wired; examine.py runs these functions.

Each function, and the invariant that a report names:

* unused (used): every trainable parameter beside experts and router gets a gradient
* half_frozen, frozen_choice (frozen): an expert's matrices are frozen together, a router with the bias of its choice
* input_gradient (input-gradient): the gradient of the layer's input is the slope of the loss, as in gradients.py
* weighted_biases (weighted): an expert's bias counts with the token's weight
* choice_bias (choice-bias): a bias of the choice changes choices and no weight
* bias_direction (bias-direction): a step moves it against the load
* grows (cleared): no list keeps tensors of every step
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from fmoe_ext.doctor.case import TINY, Case, off, rows_of, verdict
from fmoe_ext.doctor.gradients import ROUNDING, SLOPE_BOUND, SLOPE_STEP, norm, own_backward, slope_of_loss
from fmoe_ext.doctor.probe import probe_of, stacks
from fmoe_ext.doctor.report import Finding
from fmoe_ext.doctor.structure import Layer, layers_of
from fmoe_ext.doctor.subject import drawn_numbers

_SHIFT = 1e-7  # added to a bias of the choice: too small to change a choice, far above float64's rounding


def unused(case: Case) -> Iterator[Finding]:
    """Every trainable parameter of a MoE layer that is neither an expert's nor a router's gets a gradient.

    One without is tried again after all parameters were drawn near their values: zeros may hide a gradient.
    """
    for layer in case.layers:
        experts = list(layer.parameters())
        # nothing of the layer is in the loss's graph: one finding, undecided if all of it is frozen
        if experts and not any(n in case.grads for n in [*experts, *layer.routers]):
            trains = any(p.requires_grad for p in layer.parameters().values())
            yield verdict(
                "used", layer.name, trains or None, "no expert and no router is in the loss's graph"
            )
            continue
        # what is neither an expert's nor a router's, such as shared experts and latent projections
        own = {*experts, *layer.routers}
        prefix = f"{layer.name}." if layer.name else ""
        others = [
            n
            for n, p in case.model.named_parameters()
            if n.startswith(prefix) and p.requires_grad and n not in own and "lora_" not in n
        ]
        idle = [n for n in others if not _has(case.grads.get(n))]
        if idle:  # once more from other values: a product with zeros has no gradient
            model = case.copy()
            generator = torch.Generator("cpu").manual_seed(0)
            with torch.no_grad():
                for p in model.parameters():
                    noise = torch.randn(p.shape, generator=generator, dtype=p.dtype, device="cpu")
                    p.add_(noise.to(p.device), alpha=0.01)
            grads = case.backward(model, case.subject.loss)[2]
            idle = [n for n in idle if not _has(grads.get(n))]
        text = f"{len(idle)} of {len(others)} trainable parameters beside experts and router get no gradient"
        yield verdict("used", idle[0] if idle else layer.name, bool(idle), text)


def _has(grad: torch.Tensor | None) -> bool:
    return grad is not None and bool(grad.any())


def half_frozen(case: Case) -> Iterator[Finding]:
    """The matrices of an expert are frozen together or trained together."""
    for layer in case.layers:
        # by expert, or shard, or all stacks: freezing some experts whole is a choice
        groups = [
            {n: p.requires_grad for n, p in group.items() if p.ndim > 1 and "lora_" not in n}
            for group in (*layer.separate, *layer.shards, layer.stacked)
        ]
        matrices = {n: trains for group in groups for n, trains in group.items()}
        frozen = [n for n, trains in matrices.items() if not trains]
        mixed = [n for group in groups if len({*group.values()}) > 1 for n in group if not group[n]]
        text = f"{len(frozen)} of {len(matrices)} matrices of the experts are frozen, the others are trained"
        if mixed or not matrices:
            yield verdict("frozen", mixed[0] if mixed else layer.name, bool(mixed) or None, text)


def frozen_choice(case: Case) -> Iterator[Finding]:
    """Beside a frozen router no bias of its choice moves: the file of an adapter would not hold it."""
    layers = [x for x in case.layers if not any(p.requires_grad for p in x.routers.values()) and _biases(x)]
    if not layers:
        return
    ends = {other.name: _biases(other) for other in layers_of(case.stepped([case.subject.batch])[0])}
    for layer in layers:
        moved = [n for n, v in _biases(layer).items() if not ends[layer.name][n].equal(v)]
        text = f"{len(moved)} biases of a frozen router's choice move in a step"
        yield verdict("frozen", moved[0] if moved else layer.name, bool(moved), text)


def input_gradient(case: Case) -> Iterator[Finding]:
    """The gradient of a layer's input is the slope of the loss along a random direction of this input."""
    if own_backward(case):
        yield verdict("input-gradient", "", None, "a custom backward may differ from the slope on purpose")
        return

    def along_input(model: nn.Module, amount: float, layer: Layer, along: torch.Tensor) -> None:
        change = partial(torch.add, amount * along)
        model.get_submodule(layer.name).register_forward_pre_hook(_change_input(change))

    for layer in case.layers:
        # the input becomes a leaf of the graph, whose gradient can be had
        seen: list[torch.Tensor] = []

        def as_leaf(x: torch.Tensor, seen: list[torch.Tensor] = seen) -> torch.Tensor:
            seen.append(x.detach().requires_grad_())
            return seen[-1]

        model = case.copy()
        model.get_submodule(layer.name).register_forward_pre_hook(_change_input(as_leaf))
        value, _ = case.run(model, case.subject.batch, case.subject.task)
        if len(seen) != 1 or not value.requires_grad:
            yield verdict("input-gradient", layer.name, None, f"{len(seen)} inputs are visible")
            continue
        (grad,) = torch.autograd.grad(value, seen, allow_unused=True)
        size = 0.0 if grad is None else float(grad.norm())
        # a random direction, as long as the input is
        random = drawn_numbers(seen[0].shape, 5)
        along = random.to(seen[0]) * (seen[0].detach().norm() / random.norm())
        expected = 0.0 if grad is None else float((grad * along).sum())
        move = partial(along_input, layer=layer, along=along)
        slope, same = slope_of_loss(case, move, SLOPE_STEP)
        # the last of the three: how large the product of gradient and random direction usually is
        scale = max(abs(slope), abs(expected), size * float(along.norm()) / along.numel() ** 0.5)
        gap = abs(slope - expected)
        bad: bool | None = gap > SLOPE_BOUND * scale + 0.1 * ROUNDING * abs(float(case.task)) / SLOPE_STEP
        if bad:
            # a mistake has one slope at every step; rounding, and choices that change unseen, have others
            others = [slope_of_loss(case, move, step) for step in (SLOPE_STEP * 4, SLOPE_STEP / 4)]
            steady = all(alike and abs(other - slope) < 0.2 * gap for other, alike in others)
            bad = True if same and steady else None
        yield verdict("input-gradient", layer.name, bad, f"gradient {expected:.4g}, slope {slope:.4g}")


def _change_input(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """Make a forward pre-hook that changes the first floating-point tensor of the arguments."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        for i, x in enumerate(args):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                return (*args[:i], change(x), *args[i + 1 :])
        return args

    return hook


def weighted_biases(case: Case) -> Iterator[Finding]:
    """A bias of an expert's output counts with the token's weight, as the rest of the expert does.

    One number of a bias is raised by 1, in training: each token's output moves by the weight that it gives the
    expert. If all move by whole numbers from 1 on, the bias was added as it is.
    """
    for layer in case.layers:
        experts = layer.parameters()
        router = norm([case.grads[n] for n in layer.routers if n in case.grads])
        chosen = case.choices.get(layer.name)
        plain = _outputs(case, layer)
        if (
            chosen is None
            or chosen.shape[1] < 2
            or not router
            or plain is None
            or probe_of(case, layer).weighs_inputs
        ):
            continue
        # of a stack one expert's row is moved: all together count with the sum of a token's weights, which may be 1
        busiest = int(layer.load(chosen).argmax())
        of_stacks = stacks(layer, dict(case.model.named_parameters()))  # their biases are [E, D]
        biases: list[tuple[str, torch.Tensor, int | None]] = [
            (n, p, None) for n, p in experts.items() if p.ndim == 1
        ]
        biases += [(n, p, busiest) for n, p in of_stacks.items() if p.ndim == 2]
        for name, p, number in biases:
            if "bias" not in name or p.shape[-1] != plain.shape[-1]:
                continue
            moved = _outputs(case, layer, name, number)
            change = None if moved is None else moved - plain
            if change is None or bool((change[:, 1:].abs() > TINY).any()):
                continue  # no bias of the output, or something follows it in the layer
            rows = change[:, 0][change[:, 0].abs() > TINY]
            if len(rows) < 2:
                continue
            whole = bool((rows - rows.round()).abs().max() < TINY) and bool((rows >= 1 - TINY).all())
            text = f"a bias moved by 1 moves {len(rows)} tokens by {float(rows.min()):.3g} to {float(rows.max()):.3g}"
            yield verdict("weighted", name, whole, text)
            break


def _outputs(case: Case, layer: Layer, name: str = "", number: int | None = None) -> torch.Tensor | None:
    """Return a layer's rows [tokens, D] with 1 added to the first number of a parameter, or of its row `number`."""
    found: list[torch.Tensor] = []
    model = case.copy()

    model.get_submodule(layer.name).register_forward_hook(
        lambda _m, _i, output: found.append(rows_of(output))
    )
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        if name:
            (parameters[name] if number is None else parameters[name][number])[0] += 1.0
    case.run(model, case.subject.batch, case.subject.task)
    return found[0] if len(found) == 1 else None


def choice_bias(case: Case) -> Iterator[Finding]:
    """A bias of the choice changes choices and nothing else: while they stay, the loss stays."""
    base, watch = case.run(case.copy(), case.subject.batch, case.subject.task)
    for layer in case.layers:
        for name in _choice_biases(layer):
            model = case.copy()
            (twin,) = [other for other in layers_of(model) if other.name == layer.name]
            value = _biases(twin)[name]
            with torch.no_grad():
                value += _SHIFT * drawn_numbers(value.shape, 3).to(value)
            moved, other = case.run(model, case.subject.batch, case.subject.task)
            # a choice that changed may change the loss: no verdict
            same = layer.name in watch.choices and all(
                other.choices[n].equal(c) for n, c in watch.choices.items() if n in other.choices
            )
            bad = off(base.detach(), moved.detach()) > 1e-3 * _SHIFT
            losses = f"{float(base.detach()):.12g} and {float(moved.detach()):.12g}"
            text = f"losses {losses} with two biases and the same choices"
            yield verdict("choice-bias", name, bad if same else None, text)


def bias_direction(case: Case) -> Iterator[Finding]:
    """A bias of the choice changes choices, and a step lowers it for busy experts and raises it for idle ones."""
    if not any(_choice_biases(layer) for layer in case.layers):
        return
    after = {x.name: _biases(x) for x in layers_of(case.stepped([case.subject.batch])[0])}
    for layer in case.layers:
        for name, start in _choice_biases(layer).items():
            acts = _answer(case, layer, name)  # the effect of the bias on choices, and its move in a step
            move = (after[layer.name][name] - start).detach().double()
            if acts is None or layer.name not in case.choices:
                yield verdict("bias-direction", name, None, "choices are not visible")
                continue
            if acts == 0 and not move.any():
                yield verdict(
                    "bias-direction", name, None, "it changes no choice and does not move: unused, maybe"
                )
                continue
            if acts == 0:
                yield verdict("bias-direction", name, True, "it moves in a step and changes no choice")
                continue
            counts = layer.load(case.choices[layer.name]).double()
            load = counts - counts.mean()
            if not move.any() or not load.any():
                yield verdict("bias-direction", name, None, "it does not move, or the load is even")
                continue
            # cosine of move and load; turned round where a higher bias takes tokens away
            along = float((move * load).sum() / (move.norm() * load.norm())) * acts
            text = f"a step moves it by {along:.2f} along the load of its experts (-1 to 1)"
            yield verdict("bias-direction", name, along > -0.1, text)


def _answer(case: Case, layer: Layer, name: str) -> int | None:
    """Return 1 if a higher bias brings expert 0 tokens, -1 if it takes them away, 0 if neither; None if not visible."""
    chosen, number = [], 0
    for amount in (-100.0, 100.0):
        model = case.copy()
        (twin,) = [other for other in layers_of(model) if other.name == layer.name]
        with torch.no_grad():
            _biases(twin)[name][number] += amount
        _, watch = case.run(model, case.subject.batch, case.subject.task)
        if layer.name not in watch.choices:
            return None
        chosen.append(int((watch.choices[layer.name] == number).sum()))
    return (chosen[1] > chosen[0]) - (chosen[1] < chosen[0])


def _biases(layer: Layer) -> dict[str, torch.Tensor]:
    """Return tensors [E] with "bias" in their name, which are not trained: biases of the choice or a router's own."""
    frozen = {
        f"{layer.name}.{n}".lstrip("."): p
        for n, p in layer.module.named_parameters()
        if p.shape == (layer.num_experts,) and not p.requires_grad
    }
    return {n: v for n, v in (layer.state() | frozen).items() if "bias" in n.rpartition(".")[2]}


def _choice_biases(layer: Layer) -> dict[str, torch.Tensor]:
    """Return _biases() without those that a router adds to its scores, which move weights as they should."""
    modules = dict(layer.module.named_modules(prefix=layer.name))
    own = set()
    for name, weight in layer.routers.items():
        owner = name.rpartition(".")[0]
        # beside a trained weight a frozen parameter "bias" may be the choice's, as DeepSeek's is
        if isinstance(modules[owner], nn.Linear) or not weight.requires_grad:
            parameters = modules[owner].named_parameters(prefix=owner, recurse=False)
            own |= {n for n, _ in parameters if n.rpartition(".")[2] == "bias"}
    return {n: v for n, v in _biases(layer).items() if n not in own}


def grows(case: Case) -> Iterator[Finding]:
    """No list of tensors in a module grows in each of three steps."""
    model = case.copy()
    optimizer = case.optimizer(model)
    sizes = []
    for _ in range(3):
        torch.manual_seed(0)
        case.subject.step(model, optimizer, [case.subject.batch], case.subject.loss)
        sizes.append(
            {
                f"{path}.{name}".lstrip("."): len(value)
                for path, module in model.named_modules()
                for name, value in vars(module).items()
                if isinstance(value, list) and value and all(isinstance(v, torch.Tensor) for v in value)
            }
        )
    # in both intervals: a list that is filled once stays
    growing = [n for n, size in sizes[0].items() if size < sizes[1].get(n, 0) < sizes[2].get(n, 0)]
    text = f"{len(growing)} lists hold tensors of every step so far"
    yield verdict("cleared", growing[0] if growing else "", bool(growing), text)
