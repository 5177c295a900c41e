"""fmoefy itself: what it accepts, what it refuses, what the experts start as."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fmoe_ext import FMoETransformerMLP, fmoefy, gates

D, H = 8, 12
X = torch.randn(3, 5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class MLP(nn.Module):
    def __init__(self, d_hidden=H):
        super().__init__()
        self.fc1 = nn.Linear(D, d_hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(d_hidden, D)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Model(nn.Module):
    def __init__(self, num_layers=4):
        super().__init__()
        self.layers = nn.ModuleList(MLP() for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().double()


def replaced(model):
    return [i for i, layer in enumerate(model.layers) if isinstance(layer, FMoETransformerMLP)]


def max_error(a, b):
    return (a - b).abs().max().item()


def to_moe(model, num_experts=4, *args, **options):
    return fmoefy(copy.deepcopy(model), num_experts, *args, match=MLP, **options)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (None, [0, 1, 2, 3]),
        (1, [1]),
        (-1, [3]),
        ([0, -2], [0, 2]),
        (slice(1, None, 2), [1, 3]),
        (range(2), [0, 1]),
        (lambda i: i % 2 == 0, [0, 2]),
    ],
)
def test_layers(model, layers, expected):
    dense = model.layers[expected[0]]
    assert fmoefy(model, 4, match=MLP, layers=layers) is model
    assert replaced(model) == expected
    assert [r.path for r in model.fmoe_report.replaced] == [f"layers.{i}" for i in expected]
    assert dense not in list(model.modules())


def test_fastmoe_arguments(model):
    by_position = to_moe(model, 4, True, 6, 1, gates.NaiveGate, None).layers[0]
    assert type(by_position.gate) is gates.NaiveGate
    assert (by_position.num_expert, by_position.d_hidden, by_position.top_k) == (4, 6, 1)
    by_name = fmoefy(model, num_local_experts=3, match=MLP, gate="switch").layers[0]
    assert by_name.num_expert == 3 and type(by_name.gate) is gates.SwitchGate
    assert by_name.d_hidden == H // 2  # divided by top_k


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(num_experts=4, num_local_experts=2), "num_local_experts=2 (of each rank) say the same thing"),
        (dict(), "num_experts must be given"),
        (dict(num_experts=0), "num_experts must be at least 1, but got 0"),
        (dict(num_experts=4, top_k=0), "top_k must be at least 1, but got 0"),
        (dict(num_experts=4, init="copy"), "init must be one of ('random', 'upcycle'), but got 'copy'"),
        (dict(num_experts=4, split=0, init="upcycle"), "split must be at least 1, but got 0"),
        (dict(num_experts=4, split=2), 'for init="upcycle"'),
        (dict(num_experts=4, noise=-1.0, init="upcycle"), "noise must not be negative, but got -1.0"),
        (dict(num_experts=4, layers=4), "layers= must be in [-4, 4), the MLPs found, but has 4"),
        (dict(num_experts=4, layers=[]), "leaves none of the 4 MLPs"),
        (
            dict(num_experts=6, init="upcycle", split=5),
            "the number of experts of all ranks must be",
        ),
        (
            dict(num_experts=4, init="upcycle", split=4, top_k=2),
            "top_k must be a multiple of split=4, but is 2",
        ),
        (dict(num_experts=10, init="upcycle", split=5), "split must divide the 12 hidden units, but is 5"),
        (
            dict(num_experts=4, init="upcycle", split=2, gate="noisy"),
            "a gate that chooses by its scores alone",
        ),
        (dict(num_experts=4, init="upcycle", hidden_hidden_size=6), "but hidden_hidden_size is 6"),
        (dict(num_experts=4, init="upcycle", activation="relu"), "gelu, but activation= is relu"),
        (
            dict(num_experts=4, init="upcycle", bias=False),
            "biases of the dense MLP, but bias is False: leave",
        ),
        (dict(num_experts=4, d_model=9), "d_model=9, but layers.0 has 8"),
        (dict(num_experts=4, distributed_experts=False, world_size=2), "are for distributed_experts=True"),
        (dict(num_experts=4, match="nothing.*"), "match='nothing.*' points at no module of Model"),
    ],
)
def test_errors_leave_the_model_as_it_was(model, options, text):
    before = dict(model.named_modules())
    with pytest.raises(ValueError) as error:
        fmoefy(model, **{"match": MLP, **options})
    assert text in str(error.value)
    assert dict(model.named_modules()) == before


def test_fmoefy_without_mlps_names_what_it_sought():
    pytest.importorskip("transformers")  # it asks the libraries that a program has imported
    with pytest.raises(ValueError) as error:
        fmoefy(nn.Linear(3, 3), 4)
    for text in ("nn.TransformerEncoderLayer", "Hugging Face Transformers", "match="):
        assert text in str(error.value)


def test_twice_is_an_error_unless_match_points_elsewhere(model):
    fmoefy(model, 4, match="layers.0")
    first = model.layers[0]
    with pytest.raises(ValueError, match=r"MoE layers already, the first at 'layers\.0'"):
        fmoefy(model, 4)
    fmoefy(model, 2, match=lambda path, module: path == "layers.1")
    assert replaced(model) == [0, 1] and model.layers[0] is first and model.layers[1].num_expert == 2


def test_wrapped_models_are_refused(model):
    with pytest.raises(ValueError, match="fmoefy the model first, then wrap it in DataParallel"):
        fmoefy(nn.DataParallel(model), 4, match=MLP)


def test_one_gate_module_for_many_layers_is_refused(model):
    gate = gates.NaiveGate(D, 4, 1)
    with pytest.raises(TypeError, match="the 4 layers would share the NaiveGate"):
        fmoefy(model, 4, match=MLP, gate=gate)
    assert fmoefy(model, 4, match="layers.2", gate=gate).layers[2].gate is gate


def test_fmoefy_list_of_models(model):
    chunks = fmoefy([model, Model()], 4, match=MLP)
    assert [replaced(chunk) for chunk in chunks] == [[0, 1, 2, 3]] * 2


def test_mlp_that_two_layers_share_becomes_one_moe_layer(model):
    model.other = nn.Sequential(model.layers[1])
    fmoefy(model, 4, match=MLP)
    assert model.other[0] is model.layers[1] and len(model.fmoe_report.replaced) == 4


def test_report(model):
    before = sum(p.numel() for p in model.parameters())
    moe = fmoefy(model, 4, match=MLP, layers=[0, 2], top_k=1, init="upcycle")
    report = moe.fmoe_report
    expert = H * D + H + D * H + D
    gate = 4 * D + 4
    assert report.parameters_before == before == 4 * expert
    assert (
        report.parameters_after
        == sum(p.numel() for p in moe.parameters())
        == before + 2 * (3 * expert + gate)
    )
    assert report.parameters_active == before + 2 * gate
    text = repr(report)
    assert "2 MLPs became MoE layers" in text and "init='upcycle'" in text
    assert "layers.2: 1 of 4 experts of 8 x 12 (dense: 12), gelu, SoftmaxGate" in text


GATES = [
    gates.NaiveGate,
    gates.SoftmaxGate,
    functools.partial(gates.SoftmaxGate, scale=2.5, num_groups=2, topk_groups=1, jitter=0.1),
    gates.SigmoidGate,
    functools.partial(gates.SigmoidGate, scale=2.5),
    gates.UniformGate,
    gates.NoisyGate,
    gates.SwipeGate,
    gates.ZeroGate,
    gates.gen_faster_gate(0),
    functools.partial(gates.GShardGate, capacity=(4.0, 4.0), random_routing=False),
    functools.partial(gates.DCGate, random_routing=False),
]
REFUSED = [
    (gates.SwitchGate, "probabilities among all experts"),
    (functools.partial(gates.NaiveGate, normalize=False), "probabilities among all experts"),
    (functools.partial(gates.SoftmaxGate, normalize=False), "probabilities among all experts"),
    (functools.partial(gates.SoftmaxGate, capacity_factor=2.0), "capacity_factor=2.0"),
    (gates.GShardGate, "second choices at random"),
    (functools.partial(gates.GShardGate, random_routing=False), r"its capacity \(1\.2, 2\.4\)"),
    (gates.ExpertChoiceGate, "its experts choose tokens"),
    (gates.BaseGate, "its weights are not known"),
]


@pytest.mark.parametrize("gate", GATES, ids=lambda g: getattr(g, "func", g).__name__)
@pytest.mark.parametrize("training", [True, False])
def test_upcycled_output_is_the_dense_one(model, gate, training):
    moe = to_moe(model, init="upcycle", gate=gate)
    assert max_error(moe.train(training)(X), model(X)) < 1e-12
    for layer in moe.layers:
        nn.init.zeros_(layer.experts.h4toh.weight)
    assert max_error(moe(X), model(X)) > 1e-2


@pytest.mark.parametrize(("gate", "why"), REFUSED)
def test_gates_whose_weights_have_no_constant_sum_are_refused(model, gate, why):
    if gate is gates.BaseGate:
        gate = lambda d_model, num_expert, world_size, top_k: gates.BaseGate(num_expert, world_size)  # noqa: E731
    with pytest.raises(ValueError, match=why):
        fmoefy(model, 4, match=MLP, init="upcycle", gate=gate)
    assert replaced(model) == []


def test_gate_of_ones_own_declares_its_weight(model):
    class Halves(gates.NaiveGate):
        total_weight = 0.5

        def forward(self, inp):
            topk_idx, topk_weights = super().forward(inp)
            return topk_idx, topk_weights / 2

    moe = to_moe(model, init="upcycle", gate=Halves)
    assert max_error(moe(X), model(X)) < 1e-12


@pytest.mark.parametrize(
    ("split", "top_k", "num_experts"), [(2, 2, 4), (2, 4, 8), (3, 3, 6), (4, 4, 4), (6, 6, 12)]
)
@pytest.mark.parametrize("gate", [gates.NaiveGate, gates.SoftmaxGate, gates.SigmoidGate, gates.UniformGate])
def test_slices(model, gate, split, top_k, num_experts):
    """Any number of sets of slices; tokens of zeros, whose scores are all equal, included."""
    moe = to_moe(model, num_experts, init="upcycle", split=split, top_k=top_k, gate=gate)
    assert moe.layers[0].d_hidden == H // split
    x = torch.cat((X, torch.zeros_like(X)))
    assert max_error(moe(x), model(x)) < 1e-12
    topk_idx, _ = moe.layers[0].gate(X.flatten(0, 1))
    slices = (topk_idx % split).sort(dim=1).values
    assert torch.equal(slices, torch.arange(split).repeat_interleave(top_k // split).expand_as(slices))


def test_slices_in_groups_of_experts(model):
    gate = functools.partial(gates.SoftmaxGate, num_groups=2, topk_groups=1)
    moe = to_moe(model, 8, init="upcycle", split=2, top_k=4, gate=gate)
    assert max_error(moe(X), model(X)) < 1e-12
    with pytest.raises(
        ValueError, match="must divide the 2 experts of each of the gate's num_groups=4 groups"
    ):
        gate = functools.partial(gates.SoftmaxGate, num_groups=4, topk_groups=4)
        fmoefy(model, 8, match=MLP, init="upcycle", split=4, gate=gate)


def test_slices_are_told_apart_by_training(model):
    moe = to_moe(model, init="upcycle", split=2)
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.1)
    gate = moe.layers[0].gate.gate.weight
    assert torch.equal(gate[0], gate[1]) and not torch.equal(gate[0], gate[2])
    before = copy.deepcopy(moe.state_dict())
    moe(X).square().mean().backward()
    for name, p in moe.named_parameters():
        assert p.grad.isfinite().all() and (p.grad != 0).any(), name
    optimizer.step()
    assert not torch.equal(gate[0], gate[1])
    assert all(not torch.equal(p, before[name]) for name, p in moe.named_parameters())


def test_equal_experts_become_different(model):
    moe = to_moe(model, init="upcycle")
    w = moe.layers[0].experts.htoh4.weight
    assert torch.equal(w[0], w[1])
    moe(X).square().mean().backward()
    torch.optim.SGD(moe.parameters(), lr=0.1).step()
    assert all(not torch.equal(w[i], w[j]) for i in range(4) for j in range(i))


def test_noise(model):
    moe = to_moe(model, init="upcycle", noise=0.01)
    w, dense = moe.layers[0].experts.htoh4.weight, model.layers[0].fc1.weight
    ratio = (w - dense).std(dim=(1, 2)) / dense.std()
    assert ((ratio > 0.005) & (ratio < 0.02)).all() and not torch.equal(w[0], w[1])
    assert 1e-5 < max_error(moe(X), model(X)) < 0.1


def test_random_experts_have_the_scale_of_the_dense_mlp(model):
    with torch.no_grad():
        for layer in model.layers:
            layer.fc1.weight.normal_(0, 0.02)
            layer.fc2.weight.normal_(0, 0.003)
    experts = to_moe(model, 16, hidden_hidden_size=32).layers[0].experts
    assert 0.017 < experts.htoh4.weight.std() < 0.023 and 0.0025 < experts.h4toh.weight.std() < 0.0035
    assert (experts.htoh4.bias == 0).all() and (experts.h4toh.bias == 0).all()
    assert not torch.equal(experts.htoh4.weight[0], experts.htoh4.weight[1])


def test_seed_and_the_generator(model):
    def weights(seed):
        torch.manual_seed(seed)
        return [p.detach() for p in to_moe(model, layers=[0, 1]).layers[:2].parameters()]

    assert all(map(torch.equal, weights(3), weights(3)))
    assert not any(torch.equal(a, b) for a, b in zip(weights(3), weights(4), strict=True) if a.any())
    first, second = to_moe(model).layers[:2]
    assert not torch.equal(first.gate.gate.weight, second.gate.gate.weight)


def test_dtype_and_mode_are_those_of_the_model(model):
    model.layers[1].eval()
    moe = to_moe(model.bfloat16())
    assert {p.dtype for p in moe.parameters()} == {torch.bfloat16}
    assert [layer.training for layer in moe.layers] == [True, False, True, True]


def test_activation_of_the_users(model):
    moe = to_moe(model, init="upcycle", activation=nn.Sequential(nn.GELU(), nn.Dropout(0.5)))
    assert max_error(moe.eval()(X), model(X)) < 1e-12
    assert max_error(moe.train()(X), model(X)) > 1e-2
    assert moe.layers[0].experts.activation is not moe.layers[1].experts.activation
    assert to_moe(model, activation=F.silu).layers[0].experts.fused_activation == "silu"


def test_total_loss(model):
    moe = to_moe(model)
    moe(X)
    expected = sum(layer.gate.get_loss(clear=False) for layer in moe.layers)
    loss = gates.total_loss(moe)
    assert loss.shape == () and torch.equal(loss, expected) and loss > 3.9
    assert torch.equal(gates.total_loss(moe), loss)
    with pytest.raises(ValueError, match="has no gate of fmoe_ext"):
        gates.total_loss(model)


def test_options_of_the_layer_are_passed_on(model):
    layer = to_moe(model, expert_dp_comm="moe", renormalize=True).layers[0]
    assert layer.renormalize and {p.dp_comm for p in layer.experts.parameters()} == {"moe"}
    assert {p.dp_comm for p in to_moe(model).layers[0].experts.parameters()} == {"dp"}
    with pytest.raises(TypeError, match="colour"):
        fmoefy(model, 4, match=MLP, colour="red")


TYPED = """
from typing_extensions import assert_type
from torch import nn
from fmoe_ext import fmoefy

class Mine(nn.Module): ...

assert_type(fmoefy(Mine(), num_experts=4, init="upcycle"), Mine)
assert_type(fmoefy([Mine()], 4), list[Mine])
fmoefy(Mine(), num_experts="four")
"""


@pytest.mark.long
def test_fmoefy_returns_the_type_that_it_gets():
    """Without the types of torch, which take mypy most of a minute and are not what this is about."""
    mypy = pytest.importorskip("mypy.api")
    alone = ["--config-file=", "--follow-imports=silent", "--no-site-packages", "--ignore-missing-imports"]
    output, _, _ = mypy.run([*alone, "-c", TYPED])
    assert [
        line.split("error: ")[1].split("  [")[0] for line in output.splitlines() if "error: " in line
    ] == ['Argument "num_experts" to "fmoefy" has incompatible type "str"; expected "int | None"']


def test_tuple_of_models_gives_a_tuple():
    models = tuple(Model(1) for _ in range(2))
    results = fmoefy(models, 4, match=MLP)
    assert type(results) is tuple and all(a is b for a, b in zip(results, models, strict=True))
