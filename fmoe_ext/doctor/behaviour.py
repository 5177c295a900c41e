"""Check evaluation, recomputation, checkpoints, options and adapters; examine.py runs these functions.

Each check but drops(), which counts rows, compares two runs that must be equal (or, for an option, different):

* evaluation: two evaluations with other random numbers; the choices of training and of evaluation
* repeatable: two forwards from the same random numbers
* recomputation: a step, and the same step with every layer computed again in the backward
* bias_once: a step of one microbatch, and of two
* bias_padding: a step of the batch, and of the batch with padding
* checkpoint: a trained model, and one of other weights that its file was loaded into; both again a step later
* options, adapters: the model, and the model with an option changed or with other adapters, which must differ
* merged: the model with adapters, and with the adapters merged

PEFT begins with B = 0, where an adapter that is never used looks like one that is: random numbers are added first.
"""

from __future__ import annotations

import copy
import io
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from fmoe_ext.doctor.case import TINY, Case, distance, off, parts_of, rows_of, verdict
from fmoe_ext.doctor.probe import has_capacity
from fmoe_ext.doctor.report import Finding
from fmoe_ext.doctor.structure import layers_of, state_of
from fmoe_ext.doctor.subject import copied


def evaluation(case: Case) -> Iterator[Finding]:
    """Two evaluations with other random numbers are equal and leave the state as it was."""
    # 1. two evaluations, and the state after them
    model = case.copy().eval()
    before = {n: v.clone() for n, v in state_of(model).items()}
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            losses.append(float(case.subject.task(model, case.subject.batch)))
    yield verdict("evaluation", "", off(*losses) > TINY, f"two losses {losses[0]:.8g}, {losses[1]:.8g}")
    moved = [n for n, v in state_of(model).items() if n in before and not v.equal(before[n])]
    yield verdict(
        "bias-once", moved[0] if moved else "", bool(moved), f"{len(moved)} tensors moved in evaluation"
    )
    # 2. the choices of training and of evaluation
    random = draws_numbers(case)
    _, watch = case.run(case.copy().eval(), case.subject.batch, case.subject.task)
    for name, choices in case.choices.items():
        other = watch.choices.get(name)
        if random or other is None or other.shape[0] != choices.shape[0]:
            why = "training draws random numbers" if random else "its choices in evaluation are not visible"
            yield verdict("evaluation", name, None, why)
            continue
        same = other.shape == choices.shape and other.sort().values.equal(choices.sort().values)
        # another K is wrong, other experts of the same K may be right: Sinkhorn balances in training only
        bad = True if other.shape != choices.shape else False if same else None
        yield verdict(
            "evaluation", name, bad, f"top {choices.shape[1]} in training, {other.shape[1]} in evaluation"
        )


def draws_numbers(case: Case) -> bool:
    """Return True if a forward in training depends on the generator's state."""
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        losses.append(float(case.subject.task(case.copy(), case.subject.batch).detach()))
    return TINY < off(*losses) < math.inf  # a loss that is not finite says nothing


def drops(case: Case) -> Iterator[Finding]:
    """Every choice is computed by an expert, and no token leaves a layer as zeros."""
    outputs: dict[str, torch.Tensor] = {}
    model = case.copy()
    layers = layers_of(model)
    computed: dict[str, int] = {}
    for layer in layers:
        layer.module.register_forward_hook(
            lambda _m, _i, out, n=layer.name: outputs.__setitem__(n, rows_of(out))
        )
        # Modules of one expert each tell how many rows they compute; of stacked experts no hook sees it.
        lists = [m for m in layer.module.modules() if isinstance(m, nn.ModuleList | nn.ModuleDict)]
        own = [m for m in lists if len(m) == layer.num_experts == len(layer.separate)]
        for expert in own[0].children() if len(own) == 1 else ():
            expert.register_forward_hook(
                lambda _m, _i, out, n=layer.name: computed.__setitem__(
                    n, computed.get(n, 0) + len(rows_of(out))
                )
            )
    _, watch = case.run(model, case.subject.batch, case.subject.task)
    for layer in layers:
        choices = watch.choices.get(layer.name)
        # rows that experts computed, less than were chosen
        if choices is not None and layer.name in computed:
            chosen = int(layer.load(choices).sum())  # without choices of nobody
            lost = chosen - computed[layer.name]
            if lost > 0:
                declared = None if has_capacity(case, layer) else True
                text = f"{lost} of {chosen} choices are computed by no expert"
                yield verdict("drops", layer.name, declared, text)
                continue
        if layer.name not in outputs or has_capacity(case, layer):
            yield verdict(
                "drops", layer.name, None, "the experts have a capacity, or the output is not visible"
            )
            continue
        zero = int((outputs[layer.name] == 0).all(-1).sum())
        total = len(outputs[layer.name])
        bad: bool | None = 0 < zero < total
        if bad and layer.name not in case.choices:
            bad = None  # a router that may choose no expert, as ReLU does
        yield verdict("drops", layer.name, bad, f"{zero} of {total} rows are 0")


def recomputation(case: Case) -> Iterator[Finding]:
    """A layer that is computed again in the backward has the same gradients, and its state moves once."""

    def again_in_backward(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return case.subject.recompute(partial(forward, **kwargs), *args)

    def recompute_layers(model: nn.Module) -> None:
        for layer in layers_of(model):
            layer.module.forward = partial(again_in_backward, layer.module.forward)

    again, batches = case.copy(), [case.subject.batch]
    recompute_layers(again)
    try:
        expected = case.backward(case.copy(), case.subject.task)[2]
        grads = case.backward(again, case.subject.task)[2]
        # States are compared after a step. Before it a count may be doubled without harm: a step that takes the sign of
        # the load, and clears the count, moves the bias as far.
        a, b = (state_of(case.stepped(batches, prepare)[0]) for prepare in (None, recompute_layers))
    except Exception as error:  # models may refuse this kind of recomputation
        yield verdict("recomputation", "", None, str(error).splitlines()[0][:80] if str(error) else "refused")
        return
    scale = max((float(g.abs().max()) for g in expected.values()), default=0.0)
    difference = max((distance(grads[n], g) for n, g in expected.items() if n in grads), default=0.0)
    missing = [n for n in expected if n not in grads]
    yield verdict(
        "recomputation",
        "",
        not difference <= 1e-6 * scale or bool(missing),
        f"gradients differ by {difference:.1e} of {scale:.1e}",
    )
    bad = [n for n in a if n in b and not torch.allclose(a[n], b[n])]
    yield verdict(
        "bias-once", bad[0] if bad else "", bool(bad), f"{len(bad)} tensors differ after a recomputed step"
    )


def bias_once(case: Case) -> Iterator[Finding]:
    """The state per expert moves as far in a step of two microbatches as in a step of one."""
    halves = parts_of(case.subject.batch)
    start = state_of(case.model)
    if not start or halves is None:
        why = "no layer has a state of each expert" if not start else "the batch has one sample"
        yield verdict("bias-once", "", None, why)
        return
    ends = [state_of(case.stepped(list(batches))[0]) for batches in ([case.subject.batch], halves)]
    # kinds of state that move in some layer: names without the layers' numbers
    moving = {_of_any_layer(n) for n, v in start.items() if n in ends[0] and not ends[0][n].equal(v)}
    uneven = set()  # layers whose experts were chosen unequally often
    for layer in case.layers:
        if layer.name in case.choices:
            counts = case.choices[layer.name].flatten().bincount(minlength=layer.num_experts)
            if bool((counts != counts[0]).any()):
                uneven.add(f"{layer.name}.")
    for name, value in start.items():
        moves = [float((end[name] - value).abs().max()) for end in ends if name in end]
        counted = moves and max(moves) >= 1  # a counter of tokens, not a bias
        # two updates instead of one move a bias twice as far; 1.5 allows for the halves' other loads
        bad = len(moves) < 2 or (not counted and moves[1] > 1.5 * moves[0] and moves[0] > 0)
        # it stays where others of its kind move, although its load is uneven: the step leaves it out
        bad |= not any(moves) and _of_any_layer(name) in moving and name.startswith(tuple(uneven))
        yield verdict(
            "bias-once",
            name,
            bad,
            f"moves by {' and '.join(f'{m:.3g}' for m in moves)} in 1 and 2 microbatches",
        )


def bias_padding(case: Case) -> Iterator[Finding]:
    """A bias of the choice moves by the load of the tokens, in which padding does not count."""
    s = case.subject
    start = {n: v for n, v in state_of(case.model).items() if "bias" in n.rpartition(".")[2]}
    if s.padded is None or not start:
        return
    plain, padded = (state_of(case.stepped([b])[0]) for b in (s.batch, s.padded))
    for name, value in start.items():
        if name not in plain or name not in padded or plain[name].equal(value):
            continue
        gap = float((padded[name] - plain[name]).abs().max())
        bad: bool | None = not torch.allclose(padded[name], plain[name])
        if bad and any(has_capacity(case, layer) for layer in case.layers):
            bad = None  # other tokens are dropped, so that later layers have other inputs
        move = float((plain[name] - value).abs().max())
        yield verdict("balance-padding", name, bad, f"moves by {move:.3g}, with padding off by {gap:.3g}")


def _of_any_layer(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def checkpoint(case: Case) -> Iterator[Finding]:
    """A saved model that is loaded into other random weights has the same loss."""
    s = case.subject
    # 1. a model that has trained for a step, and whose state is far from that of any fresh model
    saved_from = case.copy()
    torch.manual_seed(7)
    early = s.save(saved_from)
    optimizer = case.optimizer(saved_from)
    s.step(saved_from, optimizer, [s.batch], s.loss)
    with torch.no_grad():
        for value in state_of(saved_from).values():
            value.add_(torch.randn_like(value))
    late = s.save(saved_from)
    # state whose shape has changed in the step: the loading model still has the shape of the beginning
    shapes = [{n: getattr(v, "shape", None) for n, v in state.items()} for state in (early, late)]
    stale = [n for n, shape in shapes[0].items() if shapes[1].get(n, shape) != shape]
    # 2. a model of other weights to load into
    if s.build is not None:
        torch.manual_seed(99)
        fresh = case.build(s.build)
    else:
        fresh = case.copy()
        with torch.no_grad():
            for p in [*fresh.parameters(), *state_of(fresh).values()]:
                p.add_(torch.randn_like(p))
    try:
        buffer = io.BytesIO()
        torch.save(dict(late), buffer)  # as a file, which shares nothing with the model that was saved
        buffer.seek(0)
        result = s.load(fresh, torch.load(buffer, weights_only=True))
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]  # an assert without a text has none
        yield verdict("checkpoint", "", True, f"does not load: {type(error).__name__}: {text[:80]}")
        return
    losses = [float(case.run(m.eval(), s.batch, s.task)[0].detach()) for m in (saved_from, fresh)]
    absent = getattr(result, "missing_keys", [])
    missing = [*absent, *stale]
    bad = off(*losses) > 1e-6 or any(n in dict(fresh.named_parameters()) for n in absent)
    yield verdict("checkpoint", (missing or [""])[0], bad, f"loss {losses[0]:.8g}, loaded {losses[1]:.8g}")
    # 3. The optimizer: a step of one that was loaded moves the parameters as a step of the saved one does.
    model, twin = saved_from.train(), copied(saved_from)
    other = case.optimizer(twin)
    try:
        other.load_state_dict(copy.deepcopy(s.save_optimizer(optimizer)))
    except (ValueError, KeyError) as error:
        yield verdict("optimizer-checkpoint", "", True, str(error)[:80])
        return
    for m, o in ((model, optimizer), (twin, other)):
        torch.manual_seed(3)
        s.step(m, o, [s.batch], s.loss)
    pairs = zip(model.named_parameters(), twin.parameters(), strict=True)
    differ = [n for (n, a), b in pairs if not torch.allclose(a, b, rtol=0, atol=1e-9)]
    text = f"{len(differ)} parameters differ a step later"
    yield verdict("optimizer-checkpoint", differ[0] if differ else "", bool(differ), text)


def repeatable(case: Case) -> Iterator[Finding]:
    """Two forwards from the same random numbers have the same loss, to the bit."""
    losses = [case.run(case.copy(), case.subject.batch, case.subject.task)[0].detach() for _ in range(2)]
    yield verdict(
        "repeatable", "", not losses[0].equal(losses[1]), f"losses {losses[0]:.10g}, {losses[1]:.10g}"
    )


def options(case: Case) -> Iterator[Finding]:
    """A model with an option changed, and the same weights, has another loss."""
    for name, build in case.subject.options.items():
        model = case.build(build).train()
        model.load_state_dict(case.model.state_dict(), strict=False)
        value = float(case.run(model, case.subject.batch, case.subject.loss)[0].detach())
        base = float(case.run(case.copy(), case.subject.batch, case.subject.loss)[0].detach())
        yield verdict("options", name, off(value, base) <= TINY, f"loss {base:.8g}, changed {value:.8g}")


def adapters(case: Case) -> Iterator[Finding]:
    """Adapters change the loss, get gradients from it, and cover the modules that they name."""
    names = [n for n, _ in case.model.named_parameters() if "lora_" in n]
    for target in case.subject.adapted:
        count = sum(target in n for n in names)
        yield verdict("adapter-targets", target, count == 0, f"{count} adapter tensors")
    if not names:
        return
    # random numbers on every adapter: the loss must move, and each tensor must have a gradient
    base = case.run(case.copy().eval(), case.subject.batch, case.subject.task)[0].detach()
    model = case.copy().eval()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in names:
            parameters[name].add_(torch.randn_like(parameters[name]))
    value = case.run(model, case.subject.batch, case.subject.task)[0]
    grads = (
        torch.autograd.grad(value, [parameters[n] for n in names], allow_unused=True)
        if value.requires_grad
        else [None] * len(names)
    )
    dead = [n for n, g in zip(names, grads, strict=True) if g is None or not g.any()]
    bad = off(base, value.detach()) <= TINY or bool(dead)
    yield verdict(
        "adapters", (dead or [""])[0], bad, f"{len(dead)} of {len(names)} tensors do not reach the loss"
    )


def merged(case: Case) -> Iterator[Finding]:
    """The model with its adapters merged has the loss of the model with adapters, and every matrix beside one moves."""
    if case.subject.merge is None:
        return
    model = case.copy().eval()
    adapters = {n: p for n, p in model.named_parameters() if "lora_" in n}
    torch.manual_seed(11)
    with torch.no_grad():
        for p in adapters.values():
            p.add_(torch.randn_like(p))
    result = case.subject.merge(copied(model)).eval()
    losses = [float(case.run(m, case.subject.batch, case.subject.task)[0].detach()) for m in (model, result)]
    # matrices of experts with an adapter beside them; a merge that leaves one as it was has lost its delta
    beside = tuple({n.partition("lora_")[0] for n in adapters})
    experts = {n: p for layer in layers_of(model) for n, p in layer.parameters().items() if p.ndim > 1}
    before = {n: p for n, p in experts.items() if n.startswith(beside) and n not in adapters}
    # PEFT's wrappers put "base_layer." into names, and take it out again when they merge
    after = {n.replace("base_layer.", ""): p for n, p in result.named_parameters()}
    kept = [
        n for n, p in before.items() if (q := after.get(n.replace("base_layer.", ""))) is None or p.equal(q)
    ]
    moved = f"{len(before) - len(kept)} of {len(before)} matrices beside adapters move"
    text = f"{moved}; loss {losses[0]:.8g}, merged {losses[1]:.8g}"
    yield verdict("merged", (kept or [""])[0], off(*losses) > 1e-6, text)
