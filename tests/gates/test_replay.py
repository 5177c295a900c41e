import copy
import functools

import pytest
import torch
from torch import nn

from fmoe_ext import FMoETransformerMLP
from fmoe_ext.balance import Choices, RoutingReplay, load_routed_experts, routed_experts
from fmoe_ext.gates import (
    GATES,
    ExpertChoiceGate,
    GShardGate,
    NoisyGate,
    SigmoidGate,
    SoftmaxGate,
    SwitchGate,
    ZeroGate,
)

D, E = 6, 4


def tokens(seed=0):
    return torch.randn(16, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", GATES)
def test_plays_what_was_recorded(name):
    """With other logits the recorded experts are chosen; with the same ones everything is as recorded."""
    torch.manual_seed(0)
    gate = GATES[name](D, E, 1, 2).double()
    replay = RoutingReplay(gate)
    with replay.record():
        recorded, recorded_weights = gate(tokens())
    if name != "noisy":  # its noise is drawn again
        with replay.play():
            topk_idx, topk_weights = gate(tokens())
        assert torch.equal(topk_idx, recorded)
        if name != "switch":  # its jitter too
            torch.testing.assert_close(topk_weights, recorded_weights, rtol=1e-13, atol=1e-15)
    with replay.play():
        topk_idx, topk_weights = gate(tokens(seed=1))
    assert torch.equal(topk_idx, recorded)
    if name not in ("zero", "uniform"):
        assert not torch.equal(gate(tokens(seed=1))[0], recorded), "these tokens choose otherwise"


def test_weights_and_gradients_are_those_of_the_present_logits():
    torch.manual_seed(0)
    gate = SigmoidGate(D, E, 1, 2, scale=2.0).double()
    replay = RoutingReplay(gate)
    with replay.record():
        recorded, _ = gate(tokens())
    x = tokens(seed=1).requires_grad_()
    with replay.play():
        _, topk_weights, logits = gate(x, return_all_scores=True)
    scores = logits.sigmoid().gather(1, recorded)
    expected = 2 * scores / scores.sum(1, keepdim=True)
    torch.testing.assert_close(topk_weights, expected)
    (ours,) = torch.autograd.grad(topk_weights.sin().sum(), x, retain_graph=True)
    (theirs,) = torch.autograd.grad(expected.sin().sum(), x)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("cls", [GShardGate, functools.partial(SoftmaxGate, capacity_factor=0.5)])
def test_random_and_capacity_drops_are_replayed(cls):
    torch.manual_seed(0)
    gate = cls(D, E, 1).double()
    replay = RoutingReplay(gate)
    with replay.record():
        recorded, recorded_weights = gate(tokens())
    assert (recorded == -1).any()
    with replay.play():
        for _ in range(3):
            topk_idx, topk_weights = gate(tokens())
            assert torch.equal(topk_idx, recorded)
            torch.testing.assert_close(topk_weights, recorded_weights)


def test_several_gates_and_forwards():
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": SoftmaxGate(D, E, 1), "b": NoisyGate(D, E, 1)}).double()
    replay = RoutingReplay(model)
    with replay.record():
        expected = [(model["a"](tokens(s))[0], model["b"](tokens(s))[0]) for s in range(3)]
    assert {name: len(choices) for name, choices in replay.choices.items()} == {"a": 3, "b": 3}
    loaded = RoutingReplay(model)
    loaded.choices = copy.deepcopy(replay.choices)
    with loaded.play():
        for a, b in expected:
            assert torch.equal(model["a"](tokens(9))[0], a)
            assert torch.equal(model["b"](tokens(9))[0], b)
    assert not torch.equal(model["a"](tokens(9))[0], expected[0][0]), "outside the block gates choose again"


def test_nested_replay_leaves_the_outer_one_as_it_was():
    """Recorded inside of a replay, and replayed inside of a record."""
    layer, x, y = FMoETransformerMLP(8, D, 16, gate="softmax").double(), tokens(1), tokens(2)
    outer, inner = RoutingReplay(layer), RoutingReplay(layer)
    with outer.record():
        layer(x)
        layer(y)
    recorded = [choices.kept for choices in outer.choices["gate"]]
    assert not torch.equal(*recorded)
    with outer.play():
        assert torch.equal(layer.gate(y)[0], recorded[0])
        with inner.record():
            assert torch.equal(layer.gate(x)[0], recorded[0])
        assert torch.equal(layer.gate(x)[0], recorded[1])
    with outer.record():
        with inner.play():
            layer(y)
        layer(y)
    (choices,) = outer.choices["gate"]
    assert torch.equal(choices.kept, recorded[1])


def test_choices_made_elsewhere():
    gate = SoftmaxGate(D, E, 1).double()
    replay = RoutingReplay(gate)
    idx = torch.tensor([[3, -1]] * 15 + [[-1, -1]])
    replay.choices = {"": [Choices(idx, idx)]}
    x = tokens().requires_grad_()
    with replay.play():
        topk_idx, topk_weights = gate(x)
    assert torch.equal(topk_idx, idx)
    assert topk_weights.tolist() == [[1, 0]] * 15 + [[0, 0]]
    topk_weights.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.bad_indices
def test_choices_on_the_cpu_are_played_by_a_gate_elsewhere():
    """As those of an inference engine or of a file: the gate's tensors are on the meta device here."""
    gate = SoftmaxGate(D, E, 1, 2).to("meta")
    replay = RoutingReplay(gate)
    chosen = torch.arange(2, device="cpu").expand(3, 2)
    replay.choices = {name: [Choices(chosen, chosen)] for name in replay.views}
    with replay.play():
        topk_idx, topk_weights = gate(torch.empty(3, D, device="meta"))
    assert {topk_idx.device.type, topk_weights.device.type} == {"meta"}


def test_rejects():
    gate = SwitchGate(D, E, 1).double()
    replay = RoutingReplay(gate)
    with pytest.raises(RuntimeError, match="nothing was recorded for the gates ''"), replay.play():
        pass
    with replay.record():
        pass  # the gate runs in no forward, as heads for further tokens in generation
    with pytest.raises(
        RuntimeError, match="nothing was recorded for the gates '': record a forward in which"
    ):
        routed_experts(replay)
    with replay.record():
        gate(tokens())
    with replay.play(), pytest.raises(ValueError, match="choices are for 16 tokens, but there are 5"):
        gate(tokens()[:5])
    expert_choice = ExpertChoiceGate(D, E, 1).double()
    replay = RoutingReplay(expert_choice)
    with replay.record():
        expert_choice(tokens())
    with replay.play(), pytest.raises((ValueError, RuntimeError)):
        expert_choice(tokens()[:5])
    with pytest.raises(ValueError, match="Linear has no gate"):
        RoutingReplay(nn.Linear(2, 2))


def test_arrays_of_an_engine_are_refused_where_experts_choose_tokens():
    """A token may have any number of experts, also none, which the arrays would take for one that chooses anew."""
    replay = RoutingReplay(FMoETransformerMLP(4, 8, 16, gate=ExpertChoiceGate))
    with pytest.raises(ValueError, match="gate is an ExpertChoiceGate, whose experts choose tokens"):
        load_routed_experts(replay, [torch.tensor([[[0, 1]], [[2, 3]]])])
    assert replay.choices == {}


def test_replay_of_choices_without_a_row_for_each_token_is_refused():
    replay = RoutingReplay(FMoETransformerMLP(4, 8, 16, gate="softmax"))
    replay.choices = {"gate": [Choices(torch.zeros(3).long(), torch.zeros(3).long())]}
    with (
        pytest.raises(ValueError, match=r"gate: the choices must be \[tokens, K\], but are \[3\]"),
        replay.play(),
    ):
        pass


def test_replay_of_an_expert_twice_in_a_row_is_refused():
    """Unless the gate itself had chosen it twice."""
    layer, x = FMoETransformerMLP(4, 8, 16, gate="softmax"), torch.randn(3, 8)
    replay = RoutingReplay(layer)
    rows = torch.tensor([[0, 1], [2, -1], [3, 3]])
    replay.choices = {"gate": [Choices(rows, rows)]}
    with pytest.raises(ValueError, match=r"gate: token 2 chooses an expert twice, \[3, 3\]"), replay.play():
        pass
    layer = FMoETransformerMLP(4, 8, 16, gate=ZeroGate)
    replay = RoutingReplay(layer)
    with replay.record():
        expected = layer(x)
    with replay.play():
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize(
    "selected, kept, text",
    [
        ([[0, 1]], [[0, 4]], "gate: the choices name expert 4, but there are 4 experts"),
        ([[3, -2]], [[3, -2]], r"gate: token 0 has \[3, -2\], but all choices of a token must be -2 or none"),
        ([[-2, -2]], [[0, 1]], r"gate: selected and kept differ in the tokens that choose anew \(-2\)"),
    ],
)
def test_choices_that_experts_would_get_are_checked(selected, kept, text):
    layer = FMoETransformerMLP(4, 8, 16, gate="softmax")
    replay = RoutingReplay(layer)
    replay.choices = {"gate": [Choices(torch.tensor(selected), torch.tensor(kept))]}
    with pytest.raises(ValueError, match=text), replay.play():
        pass
