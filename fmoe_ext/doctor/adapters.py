"""Invariants of adapters: they reach the loss, cover what they name, and are the same after a merge.

PEFT begins with B = 0, where an adapter that is never used looks like one that is: random numbers are added first.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fmoe_ext.doctor.case import TINY, Case, off, verdict
from fmoe_ext.doctor.report import Finding
from fmoe_ext.doctor.structure import layers_of
from fmoe_ext.doctor.subject import copied


def adapters(case: Case) -> Iterator[Finding]:
    """Adapters change the loss when they are not zero, and cover the modules that they name."""
    names = [n for n, _ in case.model.named_parameters() if "lora_" in n]
    for target in case.subject.adapted:
        count = sum(target in n for n in names)
        yield verdict("adapter-targets", target, count == 0, f"{count} adapter tensors")
    if not names:
        return
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
    """A merge of the adapters into the weights has the loss of the adapters, for adapters that are not zero."""
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
    beside = tuple({n.partition("lora_")[0] for n in adapters})
    experts = {n: p for layer in layers_of(model) for n, p in layer.parameters().items() if p.ndim > 1}
    before = {n: p for n, p in experts.items() if n.startswith(beside) and n not in adapters}
    after = {n.replace("base_layer.", ""): p for n, p in result.named_parameters()}
    kept = [
        n for n, p in before.items() if (q := after.get(n.replace("base_layer.", ""))) is None or p.equal(q)
    ]
    moved = f"{len(before) - len(kept)} of {len(before)} matrices beside adapters move"
    text = f"{moved}; loss {losses[0]:.8g}, merged {losses[1]:.8g}"
    yield verdict("merged", (kept or [""])[0], off(*losses) > 1e-6, text)
