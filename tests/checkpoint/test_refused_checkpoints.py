"""Models, optimizers and options that do not fit a checkpoint are refused by name, and nothing changes."""

import functools

import pytest
import torch
from torch import nn

from fmoe_ext import FMoETransformerMLP, SigmoidGate, checkpoint
from fmoe_ext.checkpoint import CheckpointError, routing
from fmoe_ext.gates import ExpertChoiceGate, HashGate, SwitchGate
from tests.checkpoint.trained_models import D, E, H, Model, by_group, equal, train


def test_packed_tensors_are_refused_by_name(tmp_path):
    """Their bytes were written as if they were those of the dtype that they report: no load could read them."""
    quantization = pytest.importorskip("torchao.quantization", reason="pip install torchao")
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(1))
    packed = nn.Linear(64, 64)
    quantization.quantize_(packed, quantization.Int8WeightOnlyConfig())
    with pytest.raises(
        CheckpointError, match=r"state 'weight' is a \w+, whose values are not .*dequantize\(\)"
    ):
        checkpoint.save(tmp_path, packed)
    optimizer.state[model.before.weight]["exp_avg"] = packed.weight
    with pytest.raises(CheckpointError, match=r"state 'exp_avg' of before\.weight is a \w+, whose values"):
        checkpoint.save(tmp_path, model, optimizer)
    assert not list(tmp_path.iterdir())


def more(model):
    model.before.extra = nn.Parameter(torch.zeros(2))


def fewer(model):
    model.before.bias = None


MISFITS = {
    "missing": (more, r"missing in the checkpoint: before\.extra$"),
    "extra": (fewer, r"not in the model: before\.bias$"),
    "both": (
        lambda m: (more(m), fewer(m)),
        r"missing in the checkpoint: before\.extra; not in the model: before\.bias",
    ),
    "shape": (
        lambda m: setattr(m, "moe", Model(d_hidden=7).moe),
        r"moe\.experts\.htoh4\.weight is \[4, 14, 6\] in the model and \[4, 10, 6\] in the checkpoint; .*h4toh",
    ),
    "num_experts": (
        lambda m: setattr(m, "moe", Model(num_expert=8).moe),
        r"layer moe has 8 experts in the model, 4 in the checkpoint$",
    ),
    "num_experts, separate": (
        lambda m: setattr(m, "separate", Model(num_expert=2).separate),
        r"layer separate has 2 experts in the model, 4 in the checkpoint$",
    ),
}


@pytest.mark.parametrize("kind", MISFITS)
@pytest.mark.parametrize("target", ["folder", "file"])
def test_misfit_is_named_and_nothing_changes(tmp_path, kind, target):
    change, text = MISFITS[kind]
    model, other = Model(), Model(seed=1)
    path = tmp_path
    if target == "folder":
        checkpoint.save(path, model)
    else:
        path = tmp_path / "model.safetensors"
        checkpoint.export_safetensors(path, model)
    change(other)
    before = {key: value.clone() for key, value in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=text):
        checkpoint.load(path, other)
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())


def test_optimizers_that_do_not_fit(tmp_path):
    model = Model()
    checkpoint.save(tmp_path / "bare", model)
    with pytest.raises(CheckpointError, match="has no optimizer state"):
        checkpoint.load(tmp_path / "bare", model, torch.optim.Adam(model.parameters()))
    part = torch.optim.Adam(model.moe.parameters())
    train(model, part, range(1))
    checkpoint.save(tmp_path, model, part)
    with pytest.raises(
        CheckpointError, match=r"no optimizer state for before\.bias, before\.weight, separate"
    ):
        checkpoint.load(tmp_path, model, torch.optim.Adam(model.parameters()))
    with pytest.raises(
        CheckpointError, match="the optimizer is SGD, but the checkpoint has the state of Adam"
    ):
        checkpoint.load(tmp_path, model, torch.optim.SGD(model.moe.parameters()))
    with pytest.raises(CheckpointError, match=r"a parameter of shape \[3\] that is not one of the model"):
        checkpoint.save(tmp_path, model, torch.optim.SGD([nn.Parameter(torch.zeros(3))]))
    with pytest.raises(CheckpointError, match=r"extra must be plain values \(JSON\): .*Tensor"):
        checkpoint.save(tmp_path, model, extra={"state": torch.zeros(2)})
    whole = torch.optim.Adam(model.parameters())
    train(model, whole, range(1))
    checkpoint.save(tmp_path, model, whole)
    with pytest.raises(
        CheckpointError, match=r"optimizer state for others too: before\.bias, before\.weight, separate"
    ):
        checkpoint.load(tmp_path, model, part)
    two_groups = by_group(model)
    train(model, two_groups, range(1))
    checkpoint.save(tmp_path, model, two_groups)
    with pytest.raises(CheckpointError, match="group 0 were in 2 groups"):
        checkpoint.load(tmp_path, model, torch.optim.AdamW(model.parameters()))


class Copies(nn.Linear):
    """As FullyShardedDataParallel: state_dict() is made for its caller."""

    def state_dict(self, *args, **kwargs):
        return {name: value.detach().clone() for name, value in super().state_dict(*args, **kwargs).items()}


@pytest.mark.parametrize("make", [Copies, lambda *sizes: nn.Linear(*sizes, device="meta")])
def test_model_that_cannot_be_filled_is_refused(tmp_path, make):
    model = nn.Linear(2, 3)
    checkpoint.save(tmp_path, model)
    before = (other := make(2, 3)).weight.detach().clone()
    with pytest.raises(
        CheckpointError, match=r"returns copies of 'weight'|'weight' and 1 other .* meta device"
    ):
        checkpoint.load(tmp_path, other)
    assert other.weight.is_meta or torch.equal(other.weight, before)
    checkpoint.save(tmp_path, Copies(2, 3))  # of which copies are as good
    checkpoint.load(tmp_path, model)


def of_options(**options):
    return FMoETransformerMLP(
        E, D, H, **{"activation": "swiglu", "gate": SigmoidGate, "top_k": 2, "gate_bias": False} | options
    )


OTHER_NUMBERS = {
    "activation": (dict(activation="geglu"), "activation=geglu, but {} was saved with activation=swiglu"),
    "top_k": (dict(top_k=1), "top_k=1, but {} was saved with top_k=2"),
    "gate": (dict(gate="naive"), "gate=NaiveGate, but {} was saved with gate=SoftmaxGate"),
    "scale": (
        dict(gate=functools.partial(SigmoidGate, scale=2.0)),
        "scale=2.0, but {} was saved with scale=1.0",
    ),
    "score": (
        dict(gate=functools.partial(HashGate, vocab_size=9, score="sigmoid")),
        "score=sigmoid, but {} was saved with score=softmax",
    ),
    "capacity": (
        dict(gate=functools.partial(SwitchGate, capacity=(1.2, 3)), top_k=1),
        "capacity=[1.2, 3], but {} was saved with capacity=[1.2, 2.4]",
    ),
    "no capacity": (
        dict(gate=functools.partial(SwitchGate, capacity=None), top_k=1),
        "capacity=None, but {} was saved with capacity=[1.2, 2.4]",
    ),
    "drop_policy": (
        dict(gate=functools.partial(SigmoidGate, capacity_factor=1.0, drop_policy="score")),
        "drop_policy=score, but {} was saved with drop_policy=position",
    ),
    "max_experts": (
        dict(gate=functools.partial(ExpertChoiceGate, max_experts=1)),
        "max_experts=1, but {} was saved with max_experts=2",
    ),
}
# {option: what was saved}, where it is not of_options()
SAVED = {
    "gate": dict(gate="softmax"),
    "score": dict(gate=functools.partial(HashGate, vocab_size=9, score="softmax")),
    "capacity": dict(gate=SwitchGate, top_k=1),
    "no capacity": dict(gate=SwitchGate, top_k=1),
    "drop_policy": dict(gate=functools.partial(SigmoidGate, capacity_factor=1.0)),
    "max_experts": dict(gate=functools.partial(ExpertChoiceGate, max_experts=2)),
}


@pytest.mark.parametrize("target", ["folder", "file"])
@pytest.mark.parametrize("option", OTHER_NUMBERS)
def test_layer_with_other_options_is_refused(tmp_path, option, target):
    options, text = OTHER_NUMBERS[option]
    path = tmp_path / "model.safetensors"
    saved = SAVED.get(option, {})
    model, other = of_options(**saved), of_options(**options)
    assert other.state_dict().keys() == model.state_dict().keys()
    if target == "folder":
        path = checkpoint.save(tmp_path, model)
    else:
        checkpoint.export_safetensors(path, model)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    source = "the checkpoint" if target == "folder" else str(path)
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(path, other)
    assert text.format(source) in str(error.value)
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())
    same = of_options(**saved)
    checkpoint.load(path, same)
    assert equal(same, model)


@pytest.mark.parametrize("option", ["score", "capacity", "drop_policy", "max_experts"])
def test_checkpoint_from_before_an_option_was_saved_is_loaded(tmp_path, option, monkeypatch):
    """It says nothing about the option, which is then not compared."""
    model, other = of_options(**SAVED[option]), of_options(**OTHER_NUMBERS[option][0])
    with monkeypatch.context() as older:
        older.setattr(routing, "OPTIONS", tuple(name for name in routing.OPTIONS if name != option))
        checkpoint.save(tmp_path, model)
    checkpoint.load(tmp_path, other)
    assert equal(other, model)


def test_facts_of_usual_gates_are_those_of_before():
    """Score of the class, and a policy without a capacity, change nothing and are not saved."""
    expected = {"gate": "SigmoidGate", "top_k": 2, "normalize": True, "scale": 1.0, "num_groups": 1}
    expected |= {"topk_groups": 1, "group_best": 2, "capacity_factor": None, "norm_eps": 0.0}
    expected |= {"biased": "scores", "activation": "swiglu"}
    assert routing.routing_of(of_options()) == expected
    other = of_options(gate=functools.partial(SigmoidGate, drop_policy="score"))
    assert routing.routing_of(other) == expected
    of_a_user = of_options()
    of_a_user.gate.capacity = 24  # of its last batch
    assert routing.routing_of(of_a_user) == expected


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(extra=[1, 2]), r"extra must be a dict, but got a list"),
        (dict(step=-1), "step must not be negative, but got -1"),
        (dict(step=1.5), "step must be an integer, but got 1.5"),
        (dict(keep=1.5), "keep must be at least 1, or None for all, but got 1.5"),
        (dict(keep=True), "keep must be at least 1, or None for all, but got True"),
    ],
)
def test_save_that_load_would_refuse_removes_nothing(tmp_path, options, text):
    model = nn.Linear(2, 3)
    checkpoint.save(tmp_path, model, step=1, keep=1)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=text):
        checkpoint.save(tmp_path, model, **{"step": 2, "keep": 1} | options)
    assert sorted(tmp_path.rglob("*")) == before and checkpoint.load(tmp_path, model).step == 1
