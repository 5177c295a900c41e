"""The doctor names every exhibit of the museum and is silent about models without a mistake."""

import json
import sys
from types import MappingProxyType

import pytest
import torch

from fmoe_ext import FMoETransformerMLP, doctor
from fmoe_ext.audit.cases import AuditError
from fmoe_ext.doctor.cli import main
from fmoe_ext.doctor.subject import from_transformers
from fmoe_ext.gates import GATES
from tests.doctor.architectures import moe_architectures, subject_of
from tests.doctor.held_out import HELD_OUT
from tests.doctor.museum import EXHIBITS, subject
from tests.doctor.museum_finetune import healthy_finetuning
from tests.doctor.museum_wiring import RectifiedRouter, healthy_models
from tests.doctor.plain import Model, parts
from tests.doctor.reported import NAMED, NAMED_ALONE, NOT_SEEN
from tests.pages import ROOT, blocks

ALARMS = MappingProxyType(  # defects of the architectures: docs/doctor.md has the lines
    {"Llama4ForCausalLM": {"balance-in-loss"}, "LongcatFlashForCausalLM": {"expert-gradient"}}
)


@pytest.mark.parametrize("name", [*EXHIBITS, *HELD_OUT])
def test_exhibit_is_named_by_its_invariant(name):
    invariant, thread, make = (EXHIBITS | HELD_OUT)[name]
    report = doctor.check(make())
    assert invariant in report.named(), f"{thread}\n{report}"


@pytest.mark.parametrize("thread", NAMED_ALONE)
def test_reported_mistake_is_named_alone(thread):
    invariant, make = NAMED_ALONE[thread]
    report = doctor.check(make())
    assert report.named() == {invariant}, str(report)


@pytest.mark.parametrize("thread", NAMED)
def test_reported_mistake_is_named(thread):
    invariant, make = NAMED[thread]
    report = doctor.check(make())
    assert invariant in report.named(), str(report)


@pytest.mark.parametrize("thread", NOT_SEEN)
def test_mistake_that_is_not_seen_raises_no_other_alarm(thread):
    report = doctor.check(NOT_SEEN[thread]())
    assert report.ok, str(report)


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"top_k": 1}])
def test_plain_model_without_a_mistake_raises_no_alarm(options):
    report = doctor.check(subject(model=lambda: Model(**options)))
    assert report.ok, str(report)
    assert {"router-gradient", "gradient-size", "checkpoint", "batch"} <= {
        finding.invariant for finding in report.findings if finding.verdict == "ok"
    }


@pytest.mark.parametrize(
    ("name", "made"),
    [*healthy_models(), *healthy_finetuning()],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_model_without_a_mistake_raises_no_alarm(name, made):
    report = doctor.check(made)
    assert report.ok, str(report)


def test_model_that_cannot_run_is_one_sentence_and_status_2(tmp_path, capsys):
    (tmp_path / "broken.py").write_text("def make():\n    raise KeyError('a mistake of the model')\n")
    assert main([f"{tmp_path}/broken.py:make"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "a mistake of the model" in said and said.count("\n") == 1


@pytest.mark.parametrize("name", ["Gemma4ForCausalLM", "ZayaForCausalLM", "Qwen3_5MoeForCausalLM"])
def test_newer_architecture_is_examined_without_an_alarm(name):
    """Gemma 4 has other sizes in other layers, and the router of Zaya one score more than experts."""
    make = pytest.importorskip("tests.checkpoint.test_adapter_sweep").make
    report = doctor.check(from_transformers(lambda: make(name).float()))
    assert report.ok, str(report)


@pytest.mark.parametrize("gate", sorted(GATES.keys() - {"zero"}))  # the zero gate has no router
def test_our_gates_raise_no_alarm(gate):
    torch.manual_seed(0)
    layer = FMoETransformerMLP(
        num_expert=4, d_model=12, d_hidden=10, gate=GATES[gate], top_k=1 if gate == "switch" else 2
    )
    report = doctor.check(layer, torch.randn(16, 12))
    assert not report.wrong, str(report)


def test_museum_holds_enough_published_mistakes():
    assert sum(thread is not None for _, thread, _ in EXHIBITS.values()) >= 24
    assert len(HELD_OUT) >= 6 and len(NAMED_ALONE) + len(NAMED) >= 27


def test_load_that_fails_without_a_text_is_a_violation():
    """Also: the parts beside a Subject replace its own. They were ignored."""

    def load(model, saved):
        raise AssertionError

    report = doctor.check(subject(), load=load)
    (finding,) = (f for f in report.findings if f.invariant == "checkpoint")
    assert (finding.verdict, finding.numbers) == ("wrong", "does not load: AssertionError: ")


def test_bias_beside_choices_that_are_not_visible_is_not_called_unused():
    made = subject(
        model=lambda: Model(RectifiedRouter, bias=True), parts=None, loss=lambda m, b: parts(m, b)[0]
    )
    found = {f.numbers for f in doctor.check(made).findings if f.invariant == "bias-direction"}
    assert found == {"choices are not visible"}


def test_parameters_without_a_gradient_are_counted_beside_experts_and_router():
    report = doctor.check(EXHIBITS["shared_expert_computed_and_dropped"][2]())
    (finding, _) = (f for f in report.findings if f.invariant == "used")
    text = "4 of 4 trainable parameters beside experts and router get no gradient"
    assert (finding.numbers, finding.module) == (text, "blocks.0.shared.up.weight")


def test_random_numbers_of_cuda_go_on_after_a_check(monkeypatch):
    states = ["of the program"]  # one device's generator
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: states.__setitem__(0, seed))
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(states))
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda saved: states.__setitem__(0, *saved))
    doctor.check(FMoETransformerMLP(num_expert=2, d_model=4, d_hidden=4), torch.randn(6, 4))
    assert states == ["of the program"]


def test_model_without_experts_is_refused():
    with pytest.raises(AuditError, match="no MoE layer is found"):
        doctor.check(torch.nn.Linear(3, 3), torch.randn(2, 3))


@pytest.mark.parametrize(("make", "status"), [("healthy", 0), ("dead_router", 1)])
def test_command_reports_the_file_of_the_page(make, status, capsys, tmp_path, monkeypatch):
    """The page gives the file whole, so that its commands run in an empty folder."""
    code = next(code for _, code, _ in blocks(ROOT / "docs/doctor.md") if code.startswith("# two_routers.py"))
    example = code.split("\n", 1)[1]
    assert example == (ROOT / "examples/doctor/two_routers.py").read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "two_routers", raising=False)  # of another folder
    tmp_path.joinpath("two_routers.py").write_text(example)
    assert main([f"two_routers.py:{make}", "--json"]) == status
    report = json.loads(capsys.readouterr().out)
    wrong = {finding["invariant"] for finding in report["findings"] if finding["verdict"] == "wrong"}
    assert wrong == ({"router-gradient"} if status else set())


@pytest.mark.slow
@pytest.mark.parametrize("name", list(moe_architectures()))
def test_architecture_of_transformers_raises_known_alarms_only(name):
    subject = subject_of(name)
    if isinstance(subject, str):
        pytest.skip(subject)
    report = doctor.check(subject)
    assert report.named() == ALARMS.get(name, set()), str(report)


def test_line_of_a_violation_names_its_thread_if_there_is_one():
    lines = [str(doctor.Finding(name, "layer", "wrong", "0")) for name in ("used", "top-k")]
    assert lines[0].endswith(" layer: 0; call every layer, and add what it computes to the output")
    assert lines[1].endswith(" layer: 0; see MoLE#7; read the number of experts of a token from the option")


class Unsure(torch.nn.Module):
    """A router of two experts a token, which chooses nobody, -1, in the place of a weak one."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 8) * 0.3)

    def forward(self, x):
        weights, idx = (x @ self.weight.t()).softmax(-1).topk(2, -1)
        return weights, torch.where(weights < 0.3, -1, idx)


class UnsureLayer(torch.nn.Module):
    def __init__(self, loses=False, **options):
        super().__init__()
        self.router, self.loses = Unsure(), loses
        self.experts = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.SiLU(), torch.nn.Linear(16, 8))
            for _ in "abcd"
        )
        vars(self).update(options)

    def forward(self, x):
        weights, idx = self.router(x)
        out = x.clone()
        for e, expert in enumerate(self.experts):
            token, place = (idx == e).nonzero(as_tuple=True)
            if self.loses:
                token, place = token[token % 3 > 0], place[token % 3 > 0]
            if len(token):
                out = out.index_add(0, token, expert(x[token]) * weights[token, place, None])
        return out


class SortsInEvaluation(UnsureLayer):
    """Chooses by topk in training, and in evaluation by a call that does not show how many it chooses."""

    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(8, 4, bias=False)

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        idx = scores.topk(2).indices if self.training else scores.argsort(descending=True)[:, :2]
        out = x.clone()
        for e, expert in enumerate(self.experts):
            token, _ = (idx == e).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(x[token]) * scores[token, e, None])
        return out


def test_choices_that_evaluation_hides_are_no_random_numbers():
    torch.manual_seed(0)
    report = doctor.check(SortsInEvaluation(), torch.randn(32, 8))
    assert report.ok, str(report)
    reasons = [f.numbers for f in report.findings if f.invariant == "evaluation" and f.verdict == "undecided"]
    assert "its choices in evaluation are not visible" in reasons
    assert "training draws random numbers" not in reasons


def test_choices_of_nobody_are_not_lost():
    torch.manual_seed(0)
    report = doctor.check(UnsureLayer(), torch.randn(32, 8))
    assert report.ok, str(report)


@pytest.mark.parametrize(
    "options, is_named",
    [({"drop_tokens": 0}, True), ({"drop_tokens": True}, False), ({"drop_rate": 0.1}, True)],  # a dropout's
)
def test_option_of_drops_that_is_off_excuses_nothing(options, is_named):
    torch.manual_seed(0)
    report = doctor.check(UnsureLayer(loses=True, **options), torch.randn(32, 8))
    lost = [f for f in report.findings if "choices are computed by no expert" in f.numbers]
    assert [f.verdict for f in lost] == ["wrong" if is_named else "undecided"]
