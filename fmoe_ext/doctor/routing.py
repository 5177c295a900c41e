"""Check the routing of each layer alone, whatever its code: rows, choices and weights, measured by a Probe (probe.py).

examine.py runs routing(). What every router keeps, be it a softmax, sigmoids, noise or a bias of the choice:

* A token's row of the output depends on this token's input and scores alone.
* A token is computed by the experts that it chose, once each, and by no others.
* A higher score never costs an expert a token, never lowers its weight and never raises another expert's weight.
  Where scores are distances it is the other way round.
* Scores reach the output as weights of experts, and in no other way.

A Probe knows weights of one token up to a common factor, so that their ratios are judged, and their sum by its ratio
under other scores (_normalised). Shapes: T tokens, M measured experts, D the width of the output, K choices.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from fmoe_ext.doctor.case import Case, distance, verdict
from fmoe_ext.doctor.probe import (
    NEAR,
    Prepare,
    Probe,
    active,
    drawn,
    only,
    options_of,
    probe_of,
    ratio_of,
    without_experts,
    without_matrices,
)
from fmoe_ext.doctor.report import Finding
from fmoe_ext.doctor.structure import Layer

_FAR = 10.0  # added to a score: decides the choice
_SMALL = 1e-5  # added to a token: changes no choice
_ROW_BOUND = 1e-7  # relative to the largest output: some models compute a part in float32
_WEIGHT_BOUND = 1e-4  # relative change of a weight that counts as none
_SOME = 0.1  # share of the tokens up to which a broken rule is ignored
_TRIED = 3  # experts whose scores are changed
# Names of options that say how many experts a token has. One of the first kind counts only where there is none of the
# second: its name is less clear, and may mean something else.
_TOP_K = (
    re.compile(r"(moe_?|router_?|num_)?(top_?k|k)(_experts)?|num_selected(_experts)?"),
    re.compile(
        r"(num_|n_)?(activated_|active_|selected_|routed_)?experts_per_tok(en)?|n(um)?_activ(at)?ed?_experts"
    ),
)
_SCORES = r"(top_?k|prob|weight|gate|rout|expert|score)"
# names of options that say whether a token's weights are divided by their sum; not those of layer norms
_NORM = r"(re)?norm(ali[sz]e)?d?"
_NORMALISED = re.compile(
    rf"(?!.*(layer|rms|post|pre|qk))(.*{_NORM}_.*{_SCORES}.*|.*{_SCORES}.*_{_NORM}|(moe_)?renormali[sz]e|normali[sz]e)"
)


def routing(case: Case) -> Iterator[Finding]:
    """Examine each layer alone: its rows, who computes them, and with which weights."""
    for layer in case.layers:
        probe = probe_of(case, layer)
        if probe.cannot is not None:
            yield verdict("choice", layer.name, None, f"the layer is not examined alone: {probe.cannot}")
            continue
        used, shared = probe.used, probe.by_design  # bool [T, M]; why tokens depend on each other, or None
        yield _as_in_training(probe, shared)
        kept = (
            "the layer leaves its input as it is"
            if probe.input_kept
            else "the layer writes into its own input"
        )
        yield verdict("own-row", layer.name, not probe.input_kept, kept)
        yield from _rows(probe, shared)
        # what follows is about the experts of each token
        if not used.any():
            yield verdict("choice", layer.name, None, "no expert that is measured adds to the output")
            continue
        yield from _used_as_chosen(probe, used, shared)
        # and this about the effect of scores
        if probe.scores is None or shared is not None:
            why = shared or "the product with the router's weight is not visible"
            yield verdict("choice", layer.name, None, why)
        else:
            yield from _weights(probe, used)
            yield _beside(probe)
            yield from _same_added(probe)
        yield from _top_k(probe, used, shared)


def _as_in_training(probe: Probe, shared: str | None) -> Finding:
    """The same choices have the same output in training and in evaluation."""
    (rows, choices), (again, _) = probe.choose(training=1), probe.choose(training=2)
    scale = float(probe.rows.abs().max())
    if not rows.equal(again):
        return verdict("evaluation", probe.layer.name, None, "training draws random numbers")
    if choices is None or probe.choices is None or choices.shape != probe.choices.shape or shared:
        return verdict("evaluation", probe.layer.name, None, shared or "choices are not visible")
    if not choices.sort().values.equal(probe.choices.sort().values):
        return verdict(
            "evaluation", probe.layer.name, None, "training chooses others, as balanced assignments do"
        )
    gap = distance(rows, probe.rows, scale) if scale else 0.0
    bad: bool | None = gap > _WEIGHT_BOUND
    text = f"the same choices and input, outputs differ by {gap:.1e} of the largest"
    if bad and any("running_mean" in n for n, _ in probe.layer.module.named_buffers()):
        bad, text = None, f"{text}: a norm has statistics of the batch"
    return verdict("evaluation", probe.layer.name, bad, text)


def _rows(probe: Probe, shared: str | None) -> Iterator[Finding]:
    """Scores and input of one token move its row and no other one. shared: why others may move by design, or None."""
    name, size = probe.layer.name, len(probe.rows)
    scale = float(probe.rows.abs().max())
    tokens = sorted({0, size // 2, size - 1})
    if size < 2:
        yield verdict("own-row", name, None, "the batch has one token")
        return
    if not math.isfinite(scale):
        yield verdict("own-row", name, None, "the layer's output is not finite")
        return

    # the rows, other than the token's, that differ from base
    def others(moved: torch.Tensor, token: int, base: torch.Tensor) -> list[int]:
        stays = (moved - base).abs().amax(-1) <= _ROW_BOUND * scale  # a row that becomes NaN does not
        rows = (~stays).nonzero().flatten().tolist()
        return [row for row in rows if row != token]

    # 1. scores of the first, a middle and the last token
    if probe.scores is not None:
        wrong = {t: o for t in tokens if (o := others(probe.run(only(t, None, 3.0)), t, probe.rows))}
        text = "a token's scores move its own row alone"
        bad: bool | None = bool(wrong)
        if wrong:
            token, rows = next(iter(wrong.items()))
            text = f"scores of token {token} move the rows {_some(rows)}"
            if shared:
                bad, text = None, f"{text}: {shared}"
        yield verdict("own-row", name, bad, text)
    # 2. their inputs. If others move, who is to blame: the rest of the layer, its design, or a mistake?
    inputs = {t: probe.with_input(t) for t in tokens}
    if any(made is None for made in inputs.values()):
        yield verdict("own-row", name, None, "no input has a row for each token")
        return
    wrong = {t: o for t, made in inputs.items() if (o := others(probe.run(inputs=made), t, probe.rows))}
    text = "a token's input moves its own row alone"
    bad = bool(wrong)
    if wrong:
        token, rows = next(iter(wrong.items()))
        text = f"the input of token {token} moves the rows {_some(rows)}"
        nothing = probe.run(prepare=without_experts)  # the rest of the layer, such as attention
        if any(others(probe.run(None, without_experts, inputs[t]), t, nothing) for t in wrong):
            bad, text = None, f"{text}, also without the experts"
        elif shared:
            bad, text = None, f"{text}: {shared}"
            # a capacity excuses no row that moves while all choices stay: who is dropped depends on choices alone
            if probe.mixes_tokens is None and probe.choices is not None:
                for first in (0, 1):  # all tokens, so that a pair of them in one place is seen
                    moved, choices = probe.choose(inputs=probe.with_input(slice(first, None, 2), _SMALL))
                    rows = [row for row in others(moved, -1, probe.rows) if row % 2 != first]
                    if rows and choices is not None and choices.equal(probe.choices):
                        bad = True
                        text = (
                            f"the input of other tokens moves the rows {_some(rows)}, and no choice changes"
                        )
                        break
    yield verdict("own-row", name, bad, text)


def _some(rows: list[int]) -> str:
    return ", ".join(map(str, rows[:4])) + (", ..." if len(rows) > 4 else "")


def _used_as_chosen(probe: Probe, used: torch.Tensor, shared: str | None) -> Iterator[Finding]:
    """The experts that were chosen compute, each once, and no others."""
    layer = probe.layer
    if probe.choices is None or shared is not None:
        return
    none = layer.num_scores  # the column of choices of nobody
    chosen = torch.zeros(len(used), none + 1, dtype=torch.bool, device=used.device)
    chosen.scatter_(1, torch.where(probe.choices < 0, none, probe.choices), True)
    chosen = chosen[:, probe.measured]
    strange = int((used & ~chosen).sum())
    ordered = probe.choices.sort().values
    doubled = int(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(-1).sum())
    text = f"{strange} of {int(used.sum())} experts compute a token that did not choose them"
    if doubled:
        text = f"{doubled} of {len(used)} tokens choose an expert twice"
    dense = bool(used.all())  # every expert computes every token: the choices serve a count or a loss alone
    yield verdict("choice", layer.name, None if dense and not doubled else strange + doubled > 0, text)
    # the other way round: chosen, but not computed
    lost = int((chosen & ~used).sum())
    text = f"{lost} of {int(chosen.sum())} choices add nothing to their token"
    # a top p sorts all experts and cuts at a share of the probability; experts in a stack may compute nothing
    sorted_all = probe.choices.shape[1] == layer.num_experts
    idle = lost == int(chosen[:, ~used.any(0)].sum())
    yield verdict("drops", layer.name, None if lost and (sorted_all or idle) else lost > 0, text)


def _weights(probe: Probe, used: torch.Tensor) -> Iterator[Finding]:
    """A higher score takes no token away from its expert, never lowers its weight and raises no other one's.

    Three measurements for each of the busiest experts: its tokens with a score far up and far down, all weights with a
    score a little up, and the output with it. Tokens whose choice changes with the little step are left out.
    """
    layer, parts = probe.layer, probe.base
    counts = used.sum(0)
    tried = [i for i in counts.argsort(descending=True)[:_TRIED].tolist() if counts[i]]  # the busiest
    assert probe.scores is not None
    # 1. choices: `far` brings a score above or below all others
    far = _FAR + 2 * float(probe.scores.abs().max())
    up = down = 0  # tokens whose choice follows the score, and runs against it
    for place in tried:
        expert, before = probe.measured[place], used[:, place]
        high, low = (active(probe.parts(only(None, expert, s * far), [expert]))[:, 0] for s in (1, -1))
        up += int((high & ~before).sum() + (before & ~low).sum())
        down += int((before & ~high).sum() + (low & ~before).sum())
    # 2. the parts must add up to the whole, else there are no weights of experts to speak of
    whole = probe.whole()
    if len(probe.measured) == layer.num_experts:
        gap = (parts.sum(1) - whole).norm(dim=-1)
        if bool((gap > 0.1 * whole.norm(dim=-1).max()).any()):  # moves of 1 % add up but for their squares
            yield verdict("weights", layer.name, None, "the output is not a sum over experts")
            return
    # [T, M]: each weight over the sum of the token's weights
    share = (parts * whole[:, None]).sum(-1) / (whole * whole).sum(-1)[:, None]
    # 3. weights: tokens asked, and those of them whose weights all stay
    asked = still = 0
    # tokens: [own weight, another one's] x [lower, higher]
    moves = torch.zeros(2, 2, dtype=torch.int64, device="cpu")
    acts = False  # scores move the output
    for place in tried:
        change = only(None, probe.measured[place], NEAR)
        after = probe.parts(change)
        same = (active(after) == used).all(-1) & used[:, place]
        ratio = torch.where(used, ratio_of(after, parts), 1.0)[same]  # new weight over old one
        own = ratio[:, place].clone()
        ratio[:, place] = 1.0
        asked += len(own)
        for row, values in enumerate((own[:, None], ratio)):
            moves[row, 0] += int((values < 1 - _WEIGHT_BOUND).any(-1).sum())
            moves[row, 1] += int((values > 1 + _WEIGHT_BOUND).any(-1).sum())
        still += int(
            ((own - 1).abs() < _WEIGHT_BOUND).logical_and(((ratio - 1).abs() < _WEIGHT_BOUND).all(-1)).sum()
        )
        moved = (probe.run(change) - probe.rows)[same].abs().amax(-1)
        acts |= bool((moved > _WEIGHT_BOUND * NEAR * float(probe.rows.abs().max())).any())
    # 4. the verdicts, on choices first
    (own_lower, own_higher), (other_lower, other_higher) = moves.tolist()
    distances = down > up and own_lower > (1 - _SOME) * asked > 0
    text = f"a higher score brings its expert {up} tokens and takes {down} away"
    bad: bool | None = not distances and down > 0
    if not up + down and not bool(used.all()):  # wrong only where the choice was seen to rank scores
        bad = True if probe.ranked else None
        text = "no score changes who is chosen" + (
            "" if bad else ", as in layers that choose by a table or a place"
        )
    yield verdict("choice", layer.name, bad, text)
    if not asked:
        yield verdict("weights", layer.name, None, "every small change of a score changes choices")
        return
    if probe.weighs_inputs:
        yield verdict(
            "weights", layer.name, None, "scores change what an expert computes: they weigh its input"
        )
        return
    lower, higher = (own_higher, other_lower) if distances else (own_lower, other_higher)
    text = f"a higher score lowers its own weight for {lower} of {asked} tokens, raises another one's for {higher}"
    if distances:
        text = f"scores are distances: a higher one raises its own weight for {lower} of {asked} tokens"
    bad = max(lower, higher) > _SOME * asked
    if not bad and still == asked and acts:
        bad, text = True, "scores reach the output and do not weigh the experts"
    if not bad and bool((share[used] < -0.01).any()):
        bad, text = True, f"{int((share[used] < -0.01).sum())} of {int(used.sum())} weights are negative"
    if not bad and (twice := _twice(probe, share, used)):
        bad, text = True, twice
    yield verdict("weights", layer.name, bad, text)
    yield from _normalised(probe, whole, used)


def _beside(probe: Probe) -> Finding:
    """Scores weigh experts alone, and not a shared expert beside them."""
    name, scale = probe.layer.name, float(probe.rows.abs().max())
    if probe.layer.num_scores != probe.layer.num_experts:
        return verdict("weights", name, None, "a score is of no expert: it may be of a shared one")

    def moved(prepare: Prepare) -> bool:
        rows = probe.run(None, prepare), probe.run(drawn(4), prepare)
        return float((rows[1] - rows[0]).abs().max()) > _ROW_BOUND * scale

    if not moved(without_experts):
        return verdict("weights", name, False, "without the experts no score moves the output")
    if moved(without_matrices):
        text = "scores weigh the input itself, as of experts without computation"
        return verdict("weights", name, None, text)
    return verdict("weights", name, True, "scores weigh what stands beside the experts, as a shared expert")


def _same_added(probe: Probe) -> Iterator[Finding]:
    """Choices stay where weights do: the same amount added to all scores changes neither of a softmax."""
    assert probe.scores is not None
    # Amounts beyond all scores change every choice that they can; those of the scores' own spread leave the choices of
    # some tokens, which show whether weights move.
    spread = float(probe.scores.std(correction=0))
    amounts = [s * a for a in (1 + 2 * float(probe.scores.abs().max()), spread) for s in (1, -1)]

    def raised(layer: Layer, scores: torch.Tensor, by: float) -> torch.Tensor:
        return scores + by

    seen = [(probe.rows, probe.choices), *(probe.choose(partial(raised, by=by)) for by in amounts)]
    scale = float(probe.rows.abs().max())
    for (rows, choices), (other_rows, other_choices) in itertools.combinations(seen, 2):
        if choices is None or other_choices is None or choices.shape != other_choices.shape:
            return
        same = (choices.sort().values == other_choices.sort().values).all(-1)
        gap = (rows - other_rows).abs().amax(-1)
        if not same.any() or float(gap[same].max()) > _WEIGHT_BOUND * scale:
            continue  # weights change too
        others = int((~same).sum())
        if others > _SOME * len(same):
            text = "the same amount added to all scores changes no weight, and the choices of"
            text += f" {others} of {len(same)} tokens"
            yield verdict("choice", probe.layer.name, True, text)
            return


def _twice(probe: Probe, share: torch.Tensor, used: torch.Tensor) -> str | None:
    """Say which function of the scores was applied twice; None if the weights do not look so.

    Ratios of two weights of a token tell. With scores a and b a softmax has log(w_a / w_b) = a - b whatever its sum is,
    its square 2 (a - b), and a softmax of a softmax p has p_a - p_b; sigmoids likewise with log sigmoid(a).
    """
    scores = probe.scores
    if scores is None or scores.shape[-1] != probe.layer.num_experts:
        return None
    scores = scores.double()[:, probe.measured]
    # tokens with two experts or more whose shares have logarithms; of each token the first two experts
    rows = (used.sum(-1) > 1) & (used & (share <= 0)).any(-1).logical_not()
    if int(rows.sum()) < 4:
        return None
    pairs = [(t, *used[t].nonzero().flatten()[:2].tolist()) for t in rows.nonzero().flatten().tolist()]
    t, a, b = (torch.tensor(column, device=scores.device) for column in zip(*pairs, strict=True))
    weights = share.double()[t, a].log() - share.double()[t, b].log()
    all_scores = probe.scores.double().softmax(-1)[:, probe.measured] if probe.scores is not None else scores
    once = {"softmax": scores, "sigmoid": F.logsigmoid(scores)}
    twice = {f"weights are those of a {name}, squared": 2 * logs for name, logs in once.items()}
    twice["weights are a softmax of a softmax"] = all_scores

    # largest error of these logarithms of the weights
    def gap(logs: torch.Tensor) -> float:
        return float((weights - (logs[t, a] - logs[t, b])).abs().max())

    nearest = min(map(gap, once.values()))  # scores near 0: a sigmoid's square is almost a softmax
    found = min(twice, key=lambda text: gap(twice[text]))
    return found if gap(twice[found]) < min(0.02 * float(weights.abs().max()), 0.1 * nearest) else None


def _normalised(probe: Probe, whole: torch.Tensor, used: torch.Tensor) -> Iterator[Finding]:
    """A token's weights have the same sum under all scores where an option says that they are normalised.

    Where the option is off they may have one, too: the softmax of the chosen scores sums to 1 by itself.
    """
    said = {
        n: v for n, v in options_of(probe.layer).items() if isinstance(v, bool) and _NORMALISED.fullmatch(n)
    }
    if not said or int(used.sum(-1).max()) < 2 or probe.layer.is_partly_empty:
        return

    # the sum of each token's weights under other scores, over that under its own
    ratio = (probe.whole(drawn(4)) * whole).sum(-1) / (whole * whole).sum(-1)
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
    """The number of experts that compute a token is the one that an option says."""
    numbers = {n: v for n, v in options_of(probe.layer).items() if type(v) is int and v > 0}
    weak, strong = ({n: v for n, v in numbers.items() if kind.fullmatch(n)} for kind in _TOP_K)
    said = strong or weak
    # not visible if some experts are not measured, or have no parameters to move
    is_visible = len(probe.measured) == probe.layer.num_experts and not probe.layer.is_partly_empty
    if not said or not is_visible or shared is not None:
        return
    counts = used.sum(-1)
    options = ", ".join(f"{n}={v}" for n, v in said.items())
    text = f"{options}; {int(counts.min())} to {int(counts.max())} experts add to a token"
    bad: bool | None = None
    if bool((counts == counts[0]).all()):
        bad = int(counts[0]) not in said.values()
    yield verdict("top-k", probe.layer.name, bad, text)
