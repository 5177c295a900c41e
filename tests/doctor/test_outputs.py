"""The doctor measures outputs, choices and weights, whatever the code of a layer."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fmoe_ext import doctor
from fmoe_ext.audit.cases import AuditError
from fmoe_ext.doctor import probe as probe_module
from fmoe_ext.doctor.case import Case, distance, off
from fmoe_ext.doctor.probe import Probe, declared_capacity
from fmoe_ext.doctor.structure import layers_of
from tests.doctor.held_out_by_a_stranger import TWINS, dense_with_a_head_of_as_many_classes
from tests.doctor.museum import subject
from tests.doctor.museum_outputs import HEALTHY, MISTAKES
from tests.doctor.plain import EXPERTS, D, Model
from tests.sweeps import rest_is_slow

# The others are long: a check of a model takes most of a second.
QUICK_MISTAKES = (
    "rows_in_another_order",
    "load_divides_by_the_tokens_of_an_idle_expert",
    "routing_of_the_previous_batch",
    "weights_of_the_other_choice",
)
QUICK_HEALTHY = ("experts_choose_tokens", "scores_are_distances")
QUICK_TWINS = ("farthest_centroids",)


@pytest.mark.parametrize("name", rest_is_slow(MISTAKES, QUICK_MISTAKES))
def test_mistake_is_named(name):
    invariants, make = MISTAKES[name]
    report = doctor.check(make())
    assert invariants & report.named(), str(report)


@pytest.mark.parametrize("name", rest_is_slow(HEALTHY, QUICK_HEALTHY))
def test_model_without_a_mistake_raises_no_alarm(name):
    report = doctor.check(HEALTHY[name]())
    assert report.ok, str(report)


@pytest.mark.parametrize("name", rest_is_slow(TWINS, QUICK_TWINS))
def test_mistake_is_named_and_its_healthy_twin_is_not(name):
    invariant, make = TWINS[name]
    wrong, right = (doctor.check(make(mistaken)) for mistaken in (True, False))
    assert invariant in wrong.named(), str(wrong)
    assert right.ok, str(right)


def test_number_that_is_not_finite_is_an_infinite_difference():
    nan, inf = float("nan"), float("inf")
    assert [off(a, b) for a, b in ((1.0, nan), (nan, nan), (inf, inf), (2.0, 1.0))] == [inf, inf, inf, 0.5]
    values, others = torch.tensor([1.0, nan, inf]), torch.tensor([1.5, nan, inf])
    assert distance(values, others) == 0.5  # what is not finite in both has not moved
    assert distance(values, torch.zeros(3)) == inf == distance(torch.zeros(3), values, 2.0)


def test_dense_model_with_as_many_classes_as_layers_is_refused():
    with pytest.raises(AuditError, match="no MoE layer is found"):
        doctor.check(*dense_with_a_head_of_as_many_classes())


def test_dependence_by_design_is_told_with_its_reason():
    report = doctor.check(HEALTHY["declared_capacity"]())
    told = [
        f.numbers for f in report.findings if f.invariant in ("batch", "own-row") and f.verdict == "undecided"
    ]
    assert any("a capacity is declared" in numbers for numbers in told), str(report)


def test_three_samples_are_compared():
    report = doctor.check(HEALTHY["three_samples"]())
    lines = [finding for finding in report.findings if finding.invariant in ("batch", "bias-once", "history")]
    assert sum(finding.verdict == "ok" for finding in lines) >= 4, str(report)
    assert "halved" not in str(report)


def test_probe_measures_the_weights_of_the_router():
    case = Case(replace(subject(), padded=None))
    probe = Probe(case, case.layers[0])
    whole = probe.whole()
    share = (probe.parts() * whole[:, None]).sum(-1) / whole.square().sum(-1, keepdim=True)
    weights = probe.scores.softmax(-1)
    chosen = torch.zeros_like(weights).scatter(1, weights.topk(2).indices, 1.0)
    expected = weights * chosen / (weights * chosen).sum(-1, keepdim=True)
    assert probe.scores.shape == (48, EXPERTS)
    torch.testing.assert_close(share, expected, rtol=0, atol=1e-6)


class Transposed(Model):
    """Gives its layers [S, B, D], as sequence parallelism does, without a copy."""

    def forward(self, tokens, valid=None):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x.transpose(0, 1), valid.t()).transpose(0, 1)
        return self.head(x)


def test_input_that_is_transposed_is_moved_row_by_row():
    case = Case(replace(subject(model=Transposed), padded=None))
    probe = Probe(case, case.layers[0])
    (as_it_was, *_), _ = probe.with_input(0, amount=0.0)
    assert as_it_was.shape == (6, 8, D) and not as_it_was.is_contiguous()
    (moved, *_), _ = probe.with_input(9)
    rows = (moved - as_it_was).abs().amax(-1)  # row 9 of [6, 8] is [1, 1]
    assert rows[1, 1] > 0.1 and rows.count_nonzero() == 1
    report = doctor.check(subject(model=Transposed))
    own_row = [(f.module, f.verdict) for f in report.findings if "token's input moves its own" in f.numbers]
    assert own_row == [("blocks.0", "ok"), ("blocks.1", "ok")], str(report)


def test_shards_of_too_many_experts_to_measure_are_named(monkeypatch):
    """Their choices are visible."""
    monkeypatch.setattr(probe_module, "_MOST_MEASURED", 7)
    monkeypatch.setattr(probe_module, "_MANY", 2)
    case = Case(replace(TWINS["ids_of_other_shards_become_the_first_expert"][1](False), padded=None))
    probe = Probe(case, case.layers[0])
    assert probe.choices is not None
    assert probe.cannot == "its experts are in several parts, and only 2 of 8 are measured"


@pytest.mark.parametrize(
    "options, declared",
    [
        (dict(attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1), False),  # GPT-2's
        (dict(drop_path_rate=[0.0, 0.1], hidden_drop=0.1, Dropout=1), False),
        (dict(drop_tokens=True), True),
        (dict(drop_tokens=False, capacity_factor=None), False),
        (dict(moe_capacity=1.25), True),
    ],
)
def test_rates_of_dropout_are_no_capacity(options, declared):
    (layer,) = layers_of(Model())[:1]
    layer.module.config = SimpleNamespace(**options)
    assert declared_capacity(layer) == declared


def test_shards_in_two_lists_are_one_bank_of_experts():
    """The second list was left out: its matrices were not the experts'."""

    class Part(torch.nn.Module):
        def __init__(self, rows, columns):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(2, rows, columns))

    model = torch.nn.Module()
    model.router = torch.nn.Linear(6, 4, bias=False)
    model.up = torch.nn.ModuleList(Part(6, 8) for _ in range(2))
    model.down = torch.nn.ModuleList(Part(8, 6) for _ in range(2))
    (layer,) = layers_of(model)
    assert (layer.num_experts, len(layer.shards)) == (4, 2)
    assert set(layer.parameters()) == {f"{name}.{i}.weight" for name in ("up", "down") for i in range(2)}
    assert [tuple(x.shape) for x in layer.expert(3, lambda p: p)] == [(6, 8), (8, 6)]
