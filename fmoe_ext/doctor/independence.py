"""Check that a sample's output is its own, whatever stands beside, behind or before it in the batch.

examine.py runs outputs(), which also runs _causal() and _history(); and it runs padding(). Outputs of the whole model
are compared, sample by sample, with those of a changed batch:

    outputs     other order, other samples absent, or with other values            "batch"
    _causal     later tokens changed, or absent                                    "causality"
    _history    a forward of another batch before                                  "history"
    padding     padding added                                                      "balance-padding"

Experts that compute the right tokens and return them to wrong rows are found here; their choices alone would not show
it. A difference in "batch" or "causality" is undecided where a layer mixes tokens by design (Probe.by_design); one in
"causality", or in the losses with padding, also where the model without its experts differs. A number that becomes NaN
counts as an infinite difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fmoe_ext.doctor.behaviour import draws_numbers
from fmoe_ext.doctor.case import Case, distance, mapped, off, samples_of, verdict
from fmoe_ext.doctor.probe import drawn, has_capacity, probe_of
from fmoe_ext.doctor.report import Finding
from fmoe_ext.doctor.structure import Watch, layers_of, state_of
from fmoe_ext.doctor.subject import Batch

_BOUND = 1e-4  # of the largest output: parts that compute in float32 round differently in another batch


def outputs(case: Case) -> Iterator[Finding]:
    """A sample's output stays the same in another order, alone, among other values, and after another batch."""
    s, count = case.subject, samples_of(case.subject.batch)
    if count is None or count < 2:
        yield verdict("batch", "", None, "the batch has one sample")
        return
    plain, watch = _output(case, s.batch, count)
    if plain is None:
        yield verdict("batch", "", None, "no output of the model has a row for each sample")
        return
    why = _by_design(case, watch)
    # 1. the samples in reverse
    order = torch.arange(count, device="cpu").flip(0)
    turned, _ = _output(case, _samples(s.batch, count, order), count)
    yield _compared("batch", turned, plain[order], why, "the samples are in another order")
    # 2. the first half alone
    half = torch.arange(count // 2, device="cpu")
    alone, _ = _output(case, _samples(s.batch, count, half), count // 2)
    yield _compared("batch", alone, plain[half], why, "the other samples are absent")
    # 3. the first sample, beside samples of other values: samples 0, 1, 1, 2, 2, ..., their tokens in another order
    first = torch.cat(
        [torch.zeros(1, dtype=torch.int64, device="cpu"), 1 + torch.arange(count - 1, device="cpu") // 2]
    )
    others = _behind(_samples(s.batch, count, first), count, 0, from_sample=1)
    if others is not None:
        changed, _ = _output(case, others, count)
        of_first = None if changed is None else changed[:1]
        yield _compared("batch", of_first, plain[:1], why, "the other samples have other values")
    yield from _causal(case, plain, count, why)
    yield from _history(case, count)


def _compared(
    name: str, found: torch.Tensor | None, expected: torch.Tensor, why: str | None, when: str
) -> Finding:
    if found is None or found.shape != expected.shape:
        return verdict(name, "", None, f"the output is missing or has another shape if {when}")
    moved = _distance(found, expected)
    text = f"outputs move by {moved:.1e} of the largest if {when}"
    bad = moved > _BOUND
    return verdict(name, "", None if bad and why else bad, f"{text}: {why}" if bad and why else text)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return distance(a, b, max(float(b.nan_to_num(0, 0, 0).abs().max()), 1e-300))


def _output(
    case: Case, batch: Batch, count: int, model: nn.Module | None = None
) -> tuple[torch.Tensor | None, Watch]:
    """Run the model -> (its first floating-point output with a dimension of samples, as [samples, ...]; the Watch).

    The output is None if no output has such a dimension. model: None for a fresh copy in evaluation.
    """
    model = case.copy().eval() if model is None else model
    found: list[torch.Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        found.extend(v.detach() for v in _floating(output) if v.ndim > 1 and count in v.shape[:2])

    hook = model.register_forward_hook(keep)
    with torch.no_grad():
        _, watch = case.run(model, batch, case.subject.task)
    hook.remove()
    if not found:
        return None, watch
    return found[0] if found[0].shape[0] == count else found[0].transpose(0, 1), watch


def _floating(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output
    elif hasattr(output, "values"):
        for value in output.values():
            yield from _floating(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _floating(value)


def _by_design(case: Case, watch: Watch) -> str | None:
    """Say why a sample's output may depend on others by the model's design; None if nothing says so."""
    for layer in case.layers:
        reason = probe_of(case, layer).by_design
        if reason is not None:
            return f"in {layer.name or 'the layer'} {reason}"

    # choices that were not ranked and stay under wholly other scores come from a table, or from a token's place
    with torch.no_grad():
        _, changed = case.run(case.copy().eval(), case.subject.batch, case.subject.task, drawn(6, 5.0))
    for name, scores in watch.scores.items():
        choices = watch.choices.get(name)
        if choices is None or name in watch.ranked or len(scores) != len(choices):
            continue
        if choices.equal(changed.choices.get(name, choices)):
            return f"{name or 'the layer'} chooses by a token's place or a table, not by scores"
    return None


def _samples(batch: Batch, count: int, numbers: torch.Tensor) -> Batch:
    return mapped(batch, lambda v: v[numbers.to(v.device)] if len(v) == count else v)


def _behind(batch: Batch, count: int, position: int, from_sample: int = 0) -> Batch | None:
    """Reorder the tokens from a position on, in all samples from a number on; None if the batch has no positions."""
    changed = False

    def change(v: torch.Tensor) -> torch.Tensor:
        nonlocal changed
        # [B, L, D], or tokens [B, L]; a mask has no values to change
        sequence = v.ndim > 2 or (v.ndim == 2 and not v.is_floating_point() and v.dtype != torch.bool)
        if len(v) != count or not sequence or v.shape[1] < 2:
            return v
        part = v[from_sample:, position:]
        other = part.flip(1).roll(1, 0)  # another sample's tokens, in reverse
        changed |= not other.equal(part)
        return torch.cat([v[:from_sample], torch.cat([v[from_sample:, :position], other], 1)])

    made = mapped(batch, change)
    return made if changed else None


def _causal(case: Case, plain: torch.Tensor, count: int, why: str | None) -> Iterator[Finding]:
    """Later tokens, changed or absent, move no earlier output; undecided if they do without the experts, too."""
    length = plain.shape[1] if plain.ndim > 2 else 0
    if length < 2:
        return
    middle = length // 2
    first = _samples(case.subject.batch, count, torch.zeros(1, dtype=torch.int64, device="cpu"))
    # two tokens reach few experts: a mistake that is made once for each expert with tokens then shows
    beginning = mapped(first, lambda v: v[:, :2] if v.ndim > 1 and v.shape[:2] == (1, length) else v)
    # (batch, samples of it, tokens whose outputs are compared, words for them)
    trials = [(_behind(case.subject.batch, count, middle), count, middle, "before a change of later tokens")]
    if length > 2:
        trials.append((beginning, 1, 2, "of the first two tokens, if they are alone,"))
    for batch, samples, kept, which in trials:
        if batch is None:
            continue
        try:
            changed, _ = _output(case, batch, samples)
        except Exception as error:  # a model may raise anything for another length than its own
            yield verdict("causality", "", None, f"outputs {which} cannot be computed: {error}")
            continue
        if changed is None or changed.shape[2:] != plain.shape[2:] or changed.shape[1] not in (length, kept):
            continue
        moved = _distance(changed[:, :kept], plain[:samples, :kept])
        text = f"outputs {which} move by {moved:.1e} of the largest"
        bad: bool | None = moved > _BOUND
        if bad:  # the same comparison of the model without its experts
            expected, found = (
                _output(case, other, n, _without_experts(case))[0]
                for other, n in ((case.subject.batch, count), (batch, samples))
            )
            if _distance(found[:, :kept], expected[:samples, :kept]) > _BOUND:  # type: ignore[index]
                bad, text = None, "the model without its experts is not causal"
            elif why:
                bad, text = None, f"{text}: {why}"
        yield verdict("causality", "", bad, text)


def padding(case: Case) -> Iterator[Finding]:
    """Padding changes no loss, and takes no expert away from a token where the experts have a capacity."""
    s = case.subject
    if s.padded is None:
        return
    for layer in case.layers:
        if not has_capacity(case, layer):
            continue
        plain = probe_of(case, layer)
        padded = probe_of(Case(replace(s, batch=s.padded)), layer)
        found = _places(s.batch, s.padded)
        if (
            found is None  # the tokens' rows among the padding are not known
            or plain.cannot is not None
            or padded.cannot is not None
            or (len(plain.rows), len(padded.rows)) != (len(found[0]), found[1])
            or plain.measured != padded.measured
        ):
            yield verdict("balance-padding", layer.name, None, "rows of tokens are not visible with padding")
            continue
        # choices that find an expert without padding, and none with it: padding has taken the place
        lost = int((plain.used & ~padded.used[found[0].to(padded.used.device)]).sum())
        text = f"with padding {lost} of {int(plain.used.sum())} choices of tokens find no room"
        yield verdict("balance-padding", layer.name, lost > 0, text)
    # the balance loss's own check compares the task loss with padding, where parts= is given (gradients.balance)
    if s.parts is None and not any(has_capacity(case, layer) for layer in case.layers):
        losses: list[float] = []
        without: list[float] = []
        for batch in (s.batch, s.padded):
            for values, model in ((losses, case.copy().eval()), (without, _without_experts(case))):
                with torch.no_grad():
                    values.append(float(case.run(model, batch, s.task)[0]))
        bad: bool | None = off(*losses) > 1e-3
        text = f"task off by {off(*losses):.1e}"
        if bad and off(*without) > 1e-3:
            bad, text = None, f"{text}, also without the experts"
        yield verdict("balance-padding", "", bad, text)


def _places(batch: Batch, padded: Batch) -> tuple[torch.Tensor, int] | None:
    """Find the tokens of a batch in the padded one -> (row of each token, number of rows), or None."""
    if not isinstance(batch, Mapping):
        batch, padded = {"": batch}, {"": padded}
    for name, value in batch.items():
        other = padded.get(name)
        if not isinstance(value, torch.Tensor) or value.ndim != 2 or value.is_floating_point():
            continue
        if other is None or other.ndim != 2 or len(other) != len(value) or bool((value == value[0, 0]).all()):
            continue
        (count, length), width = value.shape, other.shape[1]
        for first in (0, width - length):  # padding behind the tokens, or before them
            if width >= length and other[:, first : first + length].equal(value):
                rows = torch.arange(count, device="cpu")[:, None] * width
                return (rows + torch.arange(first, first + length, device="cpu")).flatten(), count * width
    return None


def _without_experts(case: Case) -> nn.Module:
    """Copy the model in evaluation, with MoE layers that return 0; in a model that is one layer, its experts do."""
    model = case.copy().eval()
    for layer in layers_of(model):
        if layer.name:
            layer.module.register_forward_hook(lambda module, args, output: _zeros_like(output))
        with torch.no_grad():
            for p in layer.parameters().values():
                p.zero_()
    return model


def _zeros_like(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return torch.zeros_like(output) if output.is_floating_point() else output
    if type(output) in (tuple, list):
        return type(output)(_zeros_like(part) for part in output)
    return output


def _history(case: Case, count: int) -> Iterator[Finding]:
    """A forward after one of another batch equals a model's first forward."""
    # not the same tokens in another order, which leave the same counts and sums
    some = _samples(case.subject.batch, count, torch.arange(count, device="cpu") // 2)
    changed = _behind(some, count, 0)
    other = some if changed is None else changed
    for training in (False, True):
        fresh, second = case.copy().train(training), case.copy().train(training)
        expected, _ = _output(case, case.subject.batch, count, fresh)
        start = _states(second)
        _output(case, other, count, second)
        moves = [n for n, v in _states(second).items() if n in start and not v.equal(start[n])]
        found, _ = _output(case, case.subject.batch, count, second)
        if expected is None or found is None:
            return
        moved = _distance(found, expected)
        when = "training" if training else "evaluation"
        text = f"outputs in {when} move by {moved:.1e} of the largest after a forward of another batch"
        bad: bool | None = moved > _BOUND
        # in training a state may move by design, and noise may be drawn; evaluation has no excuse
        excuse = training and (
            f"{moves[0]} changed" if moves else draws_numbers(case) and "random numbers are drawn"
        )
        if bad and excuse:
            bad, text = None, f"{text}: {excuse}"
        yield verdict("history", "", bad, text)
        parts = case.subject.parts
        if training and parts is not None and not excuse:
            fresh, second = case.copy(), case.copy()
            alone = float(parts(fresh, case.subject.batch)[1].detach())
            parts(second, other)
            later = float(parts(second, case.subject.batch)[1].detach())
            text = f"balance loss {alone:.6g}, after a forward of another batch {later:.6g}"
            yield verdict("history", "balance loss", off(alone, later) > _BOUND, text)


def _states(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copy the buffers, and the state with "bias" in its name: what may change a later forward by design."""
    biases = {n: v for n, v in state_of(model).items() if "bias" in n}
    return {n: v.clone() for n, v in (dict(model.named_buffers()) | biases).items()}
