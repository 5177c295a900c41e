"""Check gradients, the optimizer's step and the balance loss; examine.py runs these functions.

A gradient g is right if the loss moves as it says. Let u = g / |g|: two forwards measure the slope along it,

    slope = (loss(w + h u) - loss(w - h u)) / 2h,   h = 0.001,   which must be |g|

In float64 the slope is exact enough, with two exceptions, where the verdict is "undecided": a choice of an expert that
changes on the way (the loss jumps there, and a jump has no gradient), and a custom backward, which may differ from the
slope on purpose, as a straight-through estimator does.

The balance loss is compared with itself: for the batch twice, for another K, and for a router that is forced to be even
or to collapse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from fmoe_ext.doctor.behaviour import draws_numbers
from fmoe_ext.doctor.case import TINY, Case, distance, mapped, off, tensors, verdict
from fmoe_ext.doctor.probe import has_capacity, probe_of
from fmoe_ext.doctor.report import Finding
from fmoe_ext.doctor.structure import Layer, Watch, layers_of, state_of

SLOPE_STEP = 1e-3  # h above
SLOPE_BOUND = 0.05  # allowed difference of slope and gradient, relative
_COST_BOUND = 0.8  # share of E / K that a collapse must cost; with a softmax of a softmax it costs less
_LOW = 40.0  # how far forced scores of other experts lie below the chosen ones': sigmoids and z-losses stay finite
ROUNDING = 1e-6  # relative error of the loss: models of Transformers compute losses and routers in float32
# autograd functions, by the beginning of their names, whose backward is the slope: ours and torch's recomputation
_OWN_BACKWARD = ("ExpertMLP", "fmoe", "Permute", "Gather", "Combine", "CheckpointFunction")


def norm(values: list[torch.Tensor]) -> float:
    """Return the Euclidean norm of all tensors together."""
    return sum(float(v.norm() ** 2) for v in values) ** 0.5


def finite(case: Case) -> Iterator[Finding]:
    """No gradient is infinite or NaN."""
    bad = [n for n, g in case.grads.items() if not g.isfinite().all()]
    yield verdict(
        "finite",
        bad[0] if bad else "",
        bool(bad),
        f"{len(bad)} of {len(case.grads)} gradients are not finite",
    )


def router_gradient(case: Case) -> Iterator[Finding]:
    """The task loss reaches every trainable router."""
    for layer in case.layers:
        trainable = {n: p for n, p in layer.routers.items() if p.requires_grad}
        if not trainable:
            yield verdict("router-gradient", layer.name, None, "the router is frozen")
            continue
        # of several routers the one with the least gradient counts, in relation to the experts' gradient
        experts = norm([case.grads[n] for n in layer.parameters() if n in case.grads])
        sizes = {n: norm([case.grads[n]] if n in case.grads else []) for n in trainable}
        idle = min(sizes, key=lambda n: sizes[n])
        chosen = case.chosen(layer)
        # one expert for all tokens, as by an untrained table of a hash layer: its weight may be the constant 1
        one = chosen is not None and len(chosen) < 2
        dead = None if experts == 0 or one else sizes[idle] <= TINY * experts
        if dead and set(trainable) & set(case.grads) and own_backward(case):
            dead = None  # SparseMixer gives no gradient where one expert alone is within its range of scores
        yield verdict("router-gradient", idle, dead, f"norm {sizes[idle]:.1e}, experts {experts:.1e}")


def expert_gradient(case: Case) -> Iterator[Finding]:
    """The task loss reaches every expert that was chosen for a token on which it depends."""
    names = {id(p): n for n, p in case.model.named_parameters()}

    def grad(p: torch.nn.Parameter) -> torch.Tensor | None:
        return case.grads.get(names[id(p)])

    # a stack's experts are its rows, so that expert() needs a tensor to index; None leaves frozen parameters out
    def trained(p: torch.nn.Parameter) -> torch.Tensor | None:
        return torch.ones(p.shape[:1], dtype=torch.bool, device=p.device) if p.requires_grad else None

    for layer in case.layers:
        trainable = [p for p in layer.parameters().values() if p.requires_grad]
        chosen = case.chosen(layer)
        if layer.shards and probe_of(case, layer).cannot is not None:
            chosen = None  # which expert a choice means is not known
        if not trainable or chosen is None:
            why = "the experts are frozen" if not trainable else "the choices are not visible"
            yield verdict("expert-gradient", layer.name, None, why)
            continue
        frozen = {e for e in chosen if not layer.expert(e, trained)}
        of = {e: norm(layer.expert(e, grad)) for e in chosen if e not in frozen}
        largest = max(of.values(), default=0.0)
        dead = [e for e, size in of.items() if size <= TINY * largest]
        yield verdict(
            "expert-gradient", layer.name, bool(dead), f"{len(dead)} of {len(of)} chosen experts have none"
        )


def gradient_size(case: Case) -> Iterator[Finding]:
    """The gradients of experts and routers are the slopes of the task loss along them."""

    # the parameters of one group move, all the others stay
    def along_gradient(
        model: torch.nn.Module, amount: float, grads: dict[str, torch.Tensor], length: float
    ) -> None:
        own = dict(model.named_parameters())
        with torch.no_grad():
            for name, grad in grads.items():
                own[name].add_(grad, alpha=amount / length)

    for layer in case.layers:
        groups = {"experts": layer.parameters(), "router": layer.routers}
        for kind, parameters in groups.items():
            grads = {n: case.grads[n] for n in parameters if n in case.grads}
            if not grads or norm(list(grads.values())) == 0:
                continue
            expected = norm(list(grads.values()))
            move = partial(along_gradient, grads=grads, length=expected)
            slope, same = slope_of_loss(case, move, SLOPE_STEP)
            # a loss of float32 errs by ROUNDING, and the division by the step makes that large
            noise = ROUNDING * abs(float(case.task)) / SLOPE_STEP
            allowed = SLOPE_BOUND * max(abs(slope), expected) + noise
            bad: bool | None = abs(slope - expected) > allowed
            if not bad and noise > expected:  # a slope of 0 would pass, too
                bad = None
            if bad and same and not own_backward(case):
                # a choice that is not observed may change on the way: a shorter step has another slope then
                shorter, _ = slope_of_loss(case, move, SLOPE_STEP / 8)
                steady = abs(shorter - slope) <= SLOPE_BOUND * max(abs(slope), abs(shorter)) + 8 * noise
                bad = True if steady else None
            elif bad:
                bad = None
            yield verdict(
                "gradient-size", f"{layer.name} {kind}", bad, f"gradient {expected:.4g}, slope {slope:.4g}"
            )


def slope_of_loss(
    case: Case, move: Callable[[torch.nn.Module, float], None], step: float
) -> tuple[float, bool]:
    """Measure the slope of the task loss -> (slope, True if choices are visible and none changed on the way).

    move(model, amount): changes a copy of the model by this amount along some direction of length 1.
    """
    values, same = [], bool(case.choices)
    for amount in (step, -step):
        model = case.copy()
        move(model, amount)
        value, watch = case.run(model, case.subject.batch, case.subject.task)
        values.append(float(value.detach()))
        same &= all(watch.choices[n].equal(c) for n, c in case.choices.items() if n in watch.choices)
    return (values[0] - values[1]) / (2 * step), same


def own_backward(case: Case) -> bool:
    """Return True if the loss's graph has a custom backward, which may differ from the slope on purpose."""
    value, _ = case.run(case.copy(), case.subject.batch, case.subject.task)
    seen, todo = set(), [value.grad_fn]
    while todo:  # every node of the graph, from the loss down
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction) and not node.name().startswith(
            _OWN_BACKWARD
        ):
            return True
        todo += [following for following, _ in node.next_functions]
    return False


def experts_differ(case: Case) -> Iterator[Finding]:
    """No two experts have equal values; after a step, if the model says that they begin equal."""

    # the experts a and b of a layer have a matrix in common
    def equal_in(layer: Layer, a: int, b: int) -> bool:
        pairs = list(zip(*(layer.expert(e, lambda p: p) for e in (a, b)), strict=True))
        matrices = [(x, y) for x, y in pairs if x.ndim > 1] or pairs
        if not matrices:  # experts without computation
            return False
        # one equal matrix is enough, unless it is a constant, as the zeros of a LoRA's B are
        return any(x.equal(y) and not bool((x == x.flatten()[0]).all()) for x, y in matrices) or all(
            x.equal(y) for x, y in matrices
        )

    model = case.stepped([case.subject.batch])[0] if case.subject.upcycled else case.model
    when = "after a step" if case.subject.upcycled else "at the start"
    for layer in layers_of(model):
        equal = [(a, b) for b in range(layer.num_experts) for a in range(b) if equal_in(layer, a, b)]
        bad: bool | None = bool(equal)
        if equal and all(not p.any() for p in layer.parameters().values()):
            bad = None
        yield verdict("experts-differ", layer.name, bad, f"{len(equal)} pairs are equal {when}")


def optimizer_steps(case: Case) -> Iterator[Finding]:
    """A step moves what has a gradient, and nothing that is frozen."""
    model, optimizer = case.stepped([case.subject.batch])
    # missing: trainable and in no group of the optimizer; still: with a gradient, and equal after the step
    covered = {id(p) for group in optimizer.param_groups for p in group["params"]}
    before = dict(case.model.named_parameters())
    moe = {n for layer in layers_of(model) for n in (*layer.parameters(), *layer.routers)}
    moe |= {n for n in before if "lora" in n.lower()}
    missing = [
        n for n, p in model.named_parameters() if n in moe and p.requires_grad and id(p) not in covered
    ]
    moved = {n for n, p in model.named_parameters() if not p.equal(before[n])}
    still = [
        n
        for n in sorted(moe)
        if n in case.grads and case.grads[n].any() and n not in moved and n not in missing
    ]
    numbers = f"{len(missing)} missing, {len(still)} with a gradient did not move"
    yield verdict("optimizer", (missing + still or [""])[0], bool(missing or still), numbers)
    frozen = [n for n, p in before.items() if not p.requires_grad]
    if frozen:
        bad = [n for n in frozen if n in moved]
        yield verdict(
            "frozen", bad[0] if bad else "", bool(bad), f"{len(bad)} of {len(frozen)} frozen parameters moved"
        )


def clipping(case: Case) -> Iterator[Finding]:
    """Clipping scales every gradient by max_norm over the norm of all gradients, each counted once."""
    if case.subject.clip is None:
        return
    model = case.copy()
    case.run(model, case.subject.batch, case.subject.loss)[0].backward()
    before = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    expected = norm(list(before.values()))
    said = case.subject.clip(model, expected / 2)  # half the norm: every gradient must be halved
    clipped = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    # factor of each gradient: the projection of the clipped one on the old one
    factors = {n: float((clipped[n] * g).sum() / (g * g).sum()) for n, g in before.items()}
    # experts first, so that the finding names one of them
    experts = [n for layer in layers_of(model) for n in layer.parameters()]
    wrong = [n for n in [*experts, *before] if off(factors.get(n, 0.5), 0.5) > 1e-3]
    told = expected if said is None else float(said)
    others = f"{len(set(wrong))} of {len(before)} are clipped otherwise"
    text = f"norm {told:.5g}, that of all gradients {expected:.5g}; {others}"
    bad = bool(wrong) or off(told, expected) > 1e-3
    yield verdict("clip-norm", (wrong or [""])[0], bad, text)


def balance(case: Case) -> Iterator[Finding]:
    """The balance loss stays the same for the batch twice, does not grow with K, and ignores padding."""
    s = case.subject
    if s.parts is None:
        yield verdict("balance-size", "", None, "no balance loss is given (parts=)")
        return
    task, balance = _parts(case, 0)  # the seed of Case.run, whose total is compared with these
    if TINY < off(balance, _parts(case, 1)[1]) < math.inf:  # another seed
        yield verdict("balance-size", "", None, "the balance loss draws random numbers")
        yield from _in_loss(case, task, balance)
        return
    # a mean over tokens is the same for twice the tokens; a sum doubles
    twice = mapped(s.batch, lambda v: torch.cat([v, v]))
    numbers = {"batch twice": float(s.parts(case.copy(), twice)[1].detach())}
    bad: bool | None = any(off(balance, n) > 1e-3 for n in numbers.values())
    if (
        bad
        and any(has_capacity(case, layer) for layer in case.layers)
        and off(balance, numbers["batch twice"]) < 0.1
    ):
        bad = None  # other tokens are dropped, so that later layers have other inputs
    text = ", ".join(f"{name} {n:.5g}" for name, n in numbers.items())
    yield verdict("balance-size", "", bad, f"{balance:.5g}; {text}")
    if s.with_top_k is not None:
        # counts that are not divided by K make the loss of K = 2 twice as large, off by 0.5
        others = [case.build(partial(s.with_top_k, k)).train() for k in (1, 2)]
        sizes = [float(s.parts(model, s.batch)[1].detach()) for model in others]
        yield verdict("balance-size", "top k", off(*sizes) > 0.4, f"K=1 {sizes[0]:.5g}, K=2 {sizes[1]:.5g}")
    if s.padded is not None:
        padded = s.parts(case.copy(), s.padded)
        errors = [off(task, padded[0].detach()), off(balance, padded[1].detach())]
        yield verdict(
            "balance-padding", "", max(errors) > 1e-3, f"task off by {errors[0]:.1e}, balance {errors[1]:.1e}"
        )
    yield from _in_loss(case, task, balance)


def _parts(case: Case, seed: int) -> tuple[float, float]:
    torch.manual_seed(seed)
    assert case.subject.parts is not None
    task, balance = case.subject.parts(case.copy(), case.subject.batch)
    return float(task.detach()), float(balance.detach())


def _in_loss(case: Case, task: float, balance: float) -> Iterator[Finding]:
    """The total loss holds weight * balance loss, and every trainable router gets a gradient of it."""
    s = case.subject
    assert s.parts is not None
    if s.balance_weight == 0:
        yield verdict("balance-in-loss", "", None, "its weight is 0")
        return
    total, _, grads, _ = case.backward(case.copy(), s.loss)
    added = float(total) - task
    expected = s.balance_weight * balance
    # the routers' gradient of the total, less that of the task loss: what the balance loss gave
    routers = [n for layer in case.layers for n in layer.routers if n in grads and n in case.grads]
    by_balance = norm([grads[n] - case.grads[n] for n in routers])
    wrong_size = balance == 0 or off(added, expected) > 1e-2
    dead = by_balance <= TINY * norm([grads[n] for n in routers]) if routers else None
    if dead and any(
        case.choices[x.name].shape[1] == x.num_experts for x in case.layers if x.name in case.choices
    ):
        dead = None  # all experts are chosen: the load is even
    numbers = f"adds {added:.4g}, weight x balance {expected:.4g}, gradient of routers {by_balance:.1e}"
    yield verdict("balance-in-loss", "", wrong_size or dead, numbers)
    if wrong_size or dead is not False:
        return

    # forward hook: the layer's output without its graph
    def cut(module: torch.nn.Module, args: object, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return output.detach()
        if type(output) is tuple and output and isinstance(output[0], torch.Tensor):
            return (output[0].detach(), *output[1:])
        return None

    # The gradient above may come through later layers alone. Cut behind each layer, a router gets its own part only.
    model = case.copy()
    for layer in layers_of(model):
        layer.module.register_forward_hook(cut)
    torch.manual_seed(0)
    s.parts(model, s.batch)[1].backward()
    own = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for layer in case.layers:
        size = norm([own[n] for n in layer.routers if n in own])
        text = f"its gradient of this layer's router {size:.1e}"
        if any(p.requires_grad for p in layer.routers.values()):
            dead = size <= TINY * max(norm([g]) for g in own.values())
            yield verdict("balance-in-loss", next(iter(layer.routers)), dead, text)


def balance_cost(case: Case) -> Iterator[Finding]:
    """A router that sends all tokens to the same experts costs E / K times what an even one costs, or more."""
    s = case.subject
    if s.parts is None:
        return
    rows = {n: len(c) for n, c in case.choices.items()}
    layers = [layer for layer in case.layers if layer.name in rows]
    if not layers or len(layers) < len(case.layers):
        yield verdict("balance-cost", "", None, "choices are not visible")
        return
    seen: set[str] = set()  # layers whose scores could be forced

    # Scores 0 for K experts, -_LOW for the others. Even: token t chooses the experts t K, t K + 1, ... modulo E.
    def scores(layer: Layer, old: torch.Tensor, even: bool) -> torch.Tensor:
        seen.add(layer.name)
        k, size = case.choices[layer.name].shape[1], layer.num_experts
        token = torch.arange(len(old), device=old.device)[:, None] if even else 0
        place = (torch.arange(k, device=old.device) + token * k) % size
        new = torch.full_like(old, -_LOW)
        return new.scatter(1, place.expand(len(old), k), 0.0)

    costs = []
    for even in (True, False):
        model = case.copy()
        torch.manual_seed(0)
        with Watch(layers_of(model), partial(scores, even=even)).forward():
            costs.append(float(s.parts(model, s.batch)[1].detach()))
    ks = [case.choices[layer.name].shape[1] for layer in layers]
    first = next(tensors(s.batch))
    length = first.shape[1] if first.ndim > 1 else len(first)  # a loss of each sequence is less even
    expected = min(min(x.num_experts / k, float(length)) for x, k in zip(layers, ks, strict=True))
    text = f"even scores {costs[0]:.4g}, a collapse {costs[1]:.4g}, E / K {expected:.3g}"
    if len(seen) < len(case.layers) or expected < 1.5 or costs == [0, 0]:
        yield verdict(
            "balance-cost", "", None, f"scores are not visible, or almost all experts are chosen: {text}"
        )
        return
    enough = costs[1] >= _COST_BOUND * expected * costs[0] if costs[0] > 0 else costs[1] > costs[0]
    yield verdict("balance-cost", "", not enough, text)


def accumulation(case: Case) -> Iterator[Finding]:
    """A step of two equal microbatches has the gradients of a step of one."""
    s = case.subject
    if draws_numbers(case):
        yield verdict("accumulation", "", None, "training draws random numbers")
        return
    found, ends = [], []
    for batches in ([s.batch], [s.batch, s.batch]):
        model = case.copy()
        optimizer = case.optimizer(model)
        noted: dict[str, torch.Tensor] = {}

        # as the optimizer sees them: the step may clear the gradients afterwards
        def note(*_: object, model: torch.nn.Module = model, noted: dict[str, torch.Tensor] = noted) -> None:
            noted |= {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.register_step_pre_hook(note)
        torch.manual_seed(0)
        s.step(model, optimizer, batches, s.loss)
        if not noted:  # an optimizer of another class has no hook: what the step left
            note()
        found.append(noted)
        ends.append(state_of(model))
    scale = max((float(g.abs().max()) for g in found[0].values()), default=0.0)
    if scale == 0 or found[0].keys() != found[1].keys():
        yield verdict("accumulation", "", None, "gradients are not visible when the optimizer steps")
        return
    # a bias that moves with the tokens counted is different in the second microbatch: gradients may be, too
    moved = next((n for n, v in ends[0].items() if "bias" in n and not v.equal(ends[1][n])), None)
    gaps = {  # relative; gradients below a thousandth of the largest are rounding
        n: distance(found[1][n], g, max(float(g.abs().max()), 1e-3 * scale)) for n, g in found[0].items()
    }
    worst = max(gaps, key=lambda n: gaps[n])
    bad: bool | None = gaps[worst] > 1e-3
    text = f"gradients of two equal microbatches differ from those of one by {gaps[worst]:.1e}"
    if bad and moved:
        bad, text = None, f"{text}: {moved} moves otherwise, too"
    elif bad and own_backward(case):  # Megatron's router loss has its scale from the training loop
        bad, text = None, f"{text}: a custom backward may be scaled by the training loop"
    yield verdict("accumulation", worst, bad, text)
