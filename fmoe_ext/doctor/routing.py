"""Invariants of one layer's routing, whatever its code: rows, choices and weights, measured by a Probe.

A token's row depends on its own input and scores. A higher score never costs an expert its token, and never lowers
its weight or raises that of another one. Shapes are those of probe.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from fmoe_ext.doctor.behaviour import declared_capacity, options_of
from fmoe_ext.doctor.case import Case, ChangeScores, verdict
from fmoe_ext.doctor.finding import Layer
from fmoe_ext.doctor.probe import Probe, active
from fmoe_ext.doctor.report import Finding

FAR, NEAR = 20.0, 0.1  # changes of a score: one that decides the choice, one that moves weights
ROW_BOUND = 1e-7  # of the output: some models compute a part in float32
WEIGHT_BOUND = 1e-4
SOME = 0.1  # of the tokens
TRIED = 3  # experts, tokens
TOP_K = re.compile(
    r"(moe_?|router_?|num_)?(top_?k|k)(_experts)?|(num_)?(experts|activated_experts|selected_experts)_per_tok(en)?"
    r"|n_activated_experts|num_(activated|active|selected)_experts"
)
NORMALISED = re.compile(
    r"(?!.*layer)(?!.*rms)(.*(re)?norm(ali[sz]e)?d?_.*(top_?k|prob|weight|gate|rout|expert|score).*"
    r"|.*(top_?k|prob|weight|gate|rout|expert|score).*_(re)?norm(ali[sz]e)?d?|(moe_)?renormali[sz]e|normali[sz]e)"
)


def routing(case: Case) -> Iterator[Finding]:
    for layer in case.layers:
        probe = Probe(case, layer)
        if probe.cannot is not None:
            yield verdict("choice", layer.name, None, f"the layer is not examined alone: {probe.cannot}")
            continue
        parts = probe.parts()
        used = active(parts)
        shared = by_design(probe, used)
        yield from _rows(probe, shared)
        if not used.any():
            yield verdict("choice", layer.name, None, "no expert that is measured adds to the output")
            continue
        yield from _choice(probe, used, shared)
        yield from _weights(probe, parts, used, shared)
        yield from _top_k(probe, used, shared)


def by_design(probe: Probe, used: torch.Tensor) -> str | None:
    """Why a token's experts depend on other tokens by the layer's design; None if nothing says so."""
    if declared_capacity(probe.layer):
        return "a capacity is declared, so that other tokens decide who is dropped"
    if probe.over_tokens:
        return "experts choose tokens, so that other tokens decide"
    if probe.choices is None and bool(used.all()):
        return "nobody is chosen: all experts compute all tokens, or mixtures of them"
    return None


def _only(row: int | None, column: int | None, amount: float) -> ChangeScores:
    """Raise a column of the scores, or draw changes for a whole row."""

    def change(layer: Layer, scores: torch.Tensor) -> torch.Tensor:
        delta = torch.zeros_like(scores)
        if column is not None:
            delta[:, column] = amount
        elif row is not None and row < len(scores):
            generator = torch.Generator("cpu").manual_seed(row)
            delta[row] = amount * torch.randn(scores.shape[-1], generator=generator, device="cpu").to(delta)
        return scores + delta

    return change


def _rows(probe: Probe, shared: str | None) -> Iterator[Finding]:
    """Scores and input of one token move its row and no other one."""
    name, size = probe.layer.name, len(probe.rows)
    scale = float(probe.rows.abs().max())
    tokens = sorted({0, size // 2, size - 1})
    if size < 2:
        yield verdict("own-row", name, None, "the batch has one token")
        return

    def others(moved: torch.Tensor, token: int, base: torch.Tensor) -> list[int]:
        rows = ((moved - base).abs().amax(-1) > ROW_BOUND * scale).nonzero().flatten().tolist()
        return [row for row in rows if row != token]

    if probe.scores is not None:
        wrong = {t: o for t in tokens if (o := others(probe.run(_only(t, None, 3.0)), t, probe.rows))}
        text = "a token's scores move its own row alone"
        if wrong:
            token, rows = next(iter(wrong.items()))
            text = f"scores of token {token} move the rows {_some(rows)}"
            text += f": {shared}" if shared else ""
        yield verdict("own-row", name, None if wrong and shared else bool(wrong), text)
    inputs = {t: probe.with_input(t) for t in tokens}
    if any(made is None for made in inputs.values()):
        yield verdict("own-row", name, None, "no input has a row for each token")
        return
    wrong = {t: o for t, made in inputs.items() if (o := others(probe.run(inputs=made), t, probe.rows))}
    text = "a token's input moves its own row alone"
    bad: bool | None = bool(wrong)
    if wrong:
        token, rows = next(iter(wrong.items()))
        text = f"the input of token {token} moves the rows {_some(rows)}"
        nothing = probe.run(of=0.0)  # the rest of the layer, such as attention beside the experts
        if any(others(probe.run(of=0.0, inputs=inputs[t]), t, nothing) for t in wrong):
            bad, text = None, f"{text}, also without the experts"
        elif shared:
            bad, text = None, f"{text}: {shared}"
    yield verdict("own-row", name, bad, text)


def _some(rows: list[int]) -> str:
    return ", ".join(map(str, rows[:4])) + (", ..." if len(rows) > 4 else "")


def _choice(probe: Probe, used: torch.Tensor, shared: str | None) -> Iterator[Finding]:
    """The experts that were chosen compute, and a higher score takes an expert nothing."""
    layer = probe.layer
    if probe.choices is not None and shared is None:
        chosen = torch.zeros(len(used), layer.num_scores + 1, dtype=torch.bool, device=used.device)
        chosen.scatter_(1, probe.choices.clamp(-1, layer.num_scores - 1) % (layer.num_scores + 1), True)
        chosen = chosen[:, probe.measured]
        strange = int((used & ~chosen).sum())
        twice = probe.choices.sort().values
        doubled = int(((twice[:, 1:] == twice[:, :-1]) & (twice[:, 1:] >= 0)).any(-1).sum())
        text = f"{strange} of {int(used.sum())} experts compute a token that did not choose them"
        if doubled:
            text = f"{doubled} of {len(used)} tokens choose an expert twice"
        dense = bool(used.all())  # choices that are counted alone
        yield verdict("choice", layer.name, None if dense and not doubled else strange + doubled > 0, text)
        lost = int((chosen & ~used).sum())
        text = f"{lost} of {int(chosen.sum())} choices add nothing to their token"
        yield verdict("drops", layer.name, lost > 0, text)
    if probe.scores is None or shared is not None:
        yield verdict(
            "choice", layer.name, None, shared or "the product with the router's weight is not visible"
        )
        return
    far = FAR + 2 * float(probe.scores.abs().max())
    tried = [probe.measured.index(e) for e in _most(probe, used)]
    lost = gained = new = same = 0
    for place in tried:
        expert = probe.measured[place]
        before = used[:, place]
        high, low = (active(probe.parts(_only(None, expert, s * far), [expert]))[:, 0] for s in (1, -1))
        # A part of a zero is active nowhere, but its ratio to itself is: compare with what all tokens have.
        lost += int((before & ~high).sum())
        gained += int((~before & low).sum())
        new += int((~before & high).sum()) + int((before & ~low).sum())
        same += int(bool((before == high).all() and (before == low).all()))
    text = f"a higher score takes {lost} tokens away from {len(tried)} experts, a lower one brings {gained}"
    bad: bool | None = lost + gained > 0
    if bad and _sinks(probe, used, tried):
        bad, text = False, f"{text}: lower scores weigh more, too"
    if not bad and not new and not bool(used.all()):
        bad = True if probe.choices is not None else None
        text = "no score changes who is chosen" + ("" if bad else ", as in layers that choose by a table")
    yield verdict("choice", layer.name, bad, text)


def _most(probe: Probe, used: torch.Tensor) -> list[int]:
    """Measured experts with the most tokens, the busiest first."""
    counts = used.sum(0)
    order = counts.argsort(descending=True)[:TRIED].tolist()
    return [probe.measured[i] for i in order if counts[i]]


def _sinks(probe: Probe, used: torch.Tensor, tried: list[int]) -> bool:
    """True if a higher score lowers an expert's weight: scores are distances, consistently."""
    for place in tried:
        expert = [probe.measured[place]]
        ratio = _ratio(probe.parts(_only(None, expert[0], NEAR), expert), probe.parts(None, expert))[:, 0]
        ratio = ratio[used[:, place] & ratio.isfinite()]
        if not len(ratio) or float((ratio < 1 - WEIGHT_BOUND).double().mean()) < 1 - SOME:
            return False
    return bool(tried)


def _ratio(after: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Of two measurements [T, M, D] the ratio of the weights [T, M]; NaN where an expert adds nothing."""
    return (after * before).sum(-1) / (before * before).sum(-1)


def _weights(probe: Probe, parts: torch.Tensor, used: torch.Tensor, shared: str | None) -> Iterator[Finding]:
    """A higher score raises its own weight and no other one's, and reaches the output through weights only."""
    layer = probe.layer
    if probe.scores is None or shared is not None:
        yield verdict(
            "weights", layer.name, None, shared or "the product with the router's weight is not visible"
        )
        return
    whole = probe.whole()
    if len(probe.measured) == layer.num_experts:
        gap = (parts.sum(1) - whole).norm(dim=-1)
        if bool((gap > 0.1 * whole.norm(dim=-1).max()).any()):
            yield verdict("weights", layer.name, None, "the output is not a sum over experts")
            return
    share = (parts * whole[:, None]).sum(-1) / (whole * whole).sum(-1)[:, None]
    lower = higher = asked = still = 0
    acts = False
    for expert in _most(probe, used):
        place = probe.measured.index(expert)
        change = _only(None, expert, NEAR)
        after = probe.parts(change)
        same = (active(after) == used).all(-1) & used[:, place]
        ratio = _ratio(after, parts)
        own = ratio[same, place]
        rest = used[same] & (torch.arange(len(probe.measured), device=used.device) != place)
        asked += len(own)
        lower += int((own < 1 - WEIGHT_BOUND).sum())
        higher += int(((ratio[same] > 1 + WEIGHT_BOUND) & rest).any(-1).sum())
        still += int((((ratio[same] - 1).abs() < WEIGHT_BOUND) | ~used[same]).all(-1).sum())
        moved = (probe.run(change) - probe.rows)[same].abs().amax(-1)
        acts |= bool((moved > WEIGHT_BOUND * NEAR * float(probe.rows.abs().max())).any())
    if not asked:
        yield verdict("weights", layer.name, None, "every small change of a score changes choices")
        return
    text = f"a higher score lowers its own weight for {lower} of {asked} tokens, raises another one's for {higher}"
    bad = max(lower, higher) > SOME * asked
    if lower > (1 - SOME) * asked and _sinks(
        probe, used, [probe.measured.index(e) for e in _most(probe, used)]
    ):
        bad = False  # distances
    if not bad and still == asked and acts:
        bad, text = True, "scores reach the output and do not weigh the experts"
    if not bad and bool((share[used] < -0.01).any()):
        bad, text = True, f"{int((share[used] < -0.01).sum())} of {int(used.sum())} weights are negative"
    if not bad and (twice := _twice(probe, share, used)):
        bad, text = True, twice
    yield verdict("weights", layer.name, bad, text)
    yield from _normalised(probe, whole, used)


def _twice(probe: Probe, share: torch.Tensor, used: torch.Tensor) -> str | None:
    """What was applied twice, if ratios of a token's weights say so."""
    scores = probe.scores
    if scores is None or scores.shape[-1] != probe.layer.num_experts:
        return None
    scores = scores.double()[:, probe.measured]
    rows = (used.sum(-1) > 1) & (used & (share <= 0)).any(-1).logical_not()
    if int(rows.sum()) < 4:
        return None
    pairs = [(t, *used[t].nonzero().flatten()[:2].tolist()) for t in rows.nonzero().flatten().tolist()]
    t, a, b = (torch.tensor(column, device=scores.device) for column in zip(*pairs, strict=True))
    weights = share.double()[t, a].log() - share.double()[t, b].log()
    all_scores = probe.scores.double().softmax(-1)[:, probe.measured] if probe.scores is not None else scores
    kinds = {
        "weights are those of a softmax, squared": 2 * scores,
        "weights are those of a sigmoid, squared": 2 * F.logsigmoid(scores),
        "weights are a softmax of a softmax": all_scores,
    }
    for text, logs in kinds.items():
        expected = logs[t, a] - logs[t, b]
        if float((weights - expected).abs().max()) < 0.02 * float(expected.abs().max()):
            return text
    return None


def _normalised(probe: Probe, whole: torch.Tensor, used: torch.Tensor) -> Iterator[Finding]:
    """A token's weights have one sum, whatever its scores, where an option says so.

    Where it denies it they may have one too: a softmax over the chosen scores has.
    """
    said = {
        n: v for n, v in options_of(probe.layer).items() if isinstance(v, bool) and NORMALISED.fullmatch(n)
    }
    if not said or int(used.sum(-1).max()) < 2:
        return

    def change(layer: Layer, scores: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator("cpu").manual_seed(4)
        return scores + torch.randn(scores.shape, generator=generator, device="cpu").to(scores)

    ratio = (probe.whole(change) * whole).sum(-1) / (whole * whole).sum(-1)
    spread = float((ratio - 1).abs().max())
    one_sum = spread < 1e-2
    name, value = next(iter(said.items()))
    text = f"{name}={value}, and other scores change the sum of a token's weights by {spread:.1e}"
    if len(set(said.values())) > 1:
        yield verdict("normalised", probe.layer.name, None, f"{' and '.join(said)} differ")
        return
    yield verdict(
        "normalised", probe.layer.name, (not one_sum) if value else None if one_sum else False, text
    )


def _top_k(probe: Probe, used: torch.Tensor, shared: str | None) -> Iterator[Finding]:
    """As many experts compute a token as an option says."""
    said = {
        n: v
        for n, v in options_of(probe.layer).items()
        if isinstance(v, int) and not isinstance(v, bool) and v > 0 and TOP_K.fullmatch(n)
    }
    if not said or len(probe.measured) != probe.layer.num_experts or shared is not None:
        return
    counts = used.sum(-1)
    options = ", ".join(f"{n}={v}" for n, v in said.items())
    text = f"{options}; {int(counts.min())} to {int(counts.max())} experts add to a token"
    bad: bool | None = None
    if bool((counts == counts[0]).all()):
        bad = int(counts[0]) not in said.values()
    yield verdict("top-k", probe.layer.name, bad, text)
