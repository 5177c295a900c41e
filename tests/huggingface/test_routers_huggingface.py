"""Telemetry, replay and the log of choices on the routers of Transformers' own models."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fmoe_ext import RoutingReplay, balance, valid_tokens
from fmoe_ext.balance import load_routed_experts, routed_experts
from fmoe_ext.gates import SqrtSoftplusGate
from tests.huggingface.huggingface_models import make_ids, make_model, step

NAMES = (
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
    "OlmoeForCausalLM",
)


def make(name, seed=0):
    return make_model(name, dtype=torch.float64, seed=seed)


def routers(model):
    return {name: m for name, m in model.named_modules() if type(m).__name__.lower().endswith("topkrouter")}


def chosen_by(model, ids):
    """{router: its choices [T, K]}, seen by a hook."""
    seen = {}
    hooks = [
        m.register_forward_hook(lambda m, _, out, name=name: seen.__setitem__(name, out[-1]))
        for name, m in routers(model).items()
    ]
    model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_record_and_play(name):
    """Recording changes no bit; with the choices of another model's forward, gradients are those of its own scores."""
    model, ids = make(name), make_ids()
    plain, other = step(model, ids), chosen_by(make(name, seed=1), ids)
    own, replay = chosen_by(model, ids), RoutingReplay(model)
    assert own.keys() == replay.gates.keys()
    with replay.record():
        recorded = step(model, ids)
    with replay.play():
        played = step(model, ids)
    for run in (recorded, played):
        assert torch.equal(run[0], plain[0])
        assert all(torch.equal(run[2][key], grad) for key, grad in plain[2].items())
    assert all(torch.equal(replay.choices[key][0].kept, idx) for key, idx in own.items())
    assert any(not torch.equal(own[key].sort().values, idx.sort().values) for key, idx in other.items())
    replay.choices = {key: [type(replay.choices[key][0])(idx, idx)] for key, idx in other.items()}
    seen = {}
    with replay.play():
        seen = chosen_by(model, ids)
        logits, _, gradients = step(model, ids)
    assert all(torch.equal(seen[key], idx) for key, idx in other.items())
    assert not torch.equal(logits, plain[0])
    assert all(gradients[f"{key}.weight"].abs().max() > 0 for key in own)
    replay.remove()
    assert torch.equal(step(model, ids)[0], plain[0])


def test_weights_of_played_choices_are_those_of_the_scores():
    model, ids = make("Qwen3MoeForCausalLM"), make_ids()
    replay, (name, router) = RoutingReplay(model), next(iter(routers(model).items()))
    with replay.record():
        model(input_ids=ids)
    flipped = replay.choices[name][0].kept.flip(1)
    replay.choices[name] = [type(replay.choices[name][0])(flipped, flipped)]
    x = torch.randn(flipped.shape[0], model.config.hidden_size, dtype=torch.float64)
    with replay.play():
        _, weights, topk_idx = router(x)
    scores = (x @ router.weight.t()).softmax(-1, dtype=torch.float).gather(1, flipped)
    assert torch.equal(topk_idx, flipped)
    expected = scores / scores.sum(1, keepdim=True) if router.norm_topk_prob else scores
    torch.testing.assert_close(weights.float(), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_repeated_forward_chooses_what_the_first_one_chose(reentrant):
    """Also when the block of the replay has ended, and the input has drifted."""
    model = make("MixtralForCausalLM")
    router = next(iter(routers(model).values()))
    replay, drift, seen = RoutingReplay(router), torch.zeros(32, dtype=torch.float64), []
    x = torch.randn(20, 32, dtype=torch.float64, requires_grad=True)

    def forward(x):
        _, weights, topk_idx = router(x + drift)
        seen.append(topk_idx)
        return weights.exp()  # a repetition ends with the last tensor that is kept

    with replay.record():
        out = checkpoint(forward, x, use_reentrant=reentrant)
    drift += 0.5 * torch.randn(32, dtype=torch.float64)
    out.sum().backward()
    assert len(seen) == 2
    assert torch.equal(*seen)
    assert len(replay.choices[""]) == 1


def test_watch_counts_real_tokens():
    model, ids = make("DeepseekV3ForCausalLM").train(), make_ids()
    chosen, monitor = chosen_by(model, ids), balance.watch(model)
    mask = torch.ones_like(ids).bool()
    mask[0, :5] = False
    with valid_tokens(mask):
        model(input_ids=ids)
    layers = monitor.collect()["layers"]
    for name, topk_idx in chosen.items():
        counts = torch.bincount(topk_idx[mask.flatten()].flatten(), minlength=8)
        assert layers[name]["tokens_per_expert"] == counts.tolist()
    monitor.remove()


def test_padding_on_the_left_plays_the_choices_of_its_own_tokens():
    """Inside valid_tokens() choices for 24 tokens were cut to the 17 real ones, and given to the first 17 tokens."""
    model, ids = make("OlmoeForCausalLM"), make_ids()
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    padded = {"input_ids": ids, "attention_mask": mask, "position_ids": places}
    other_model = make("OlmoeForCausalLM", seed=1)
    other = RoutingReplay(other_model)
    with valid_tokens(mask), other.record():
        other_model(**padded)
    replay = RoutingReplay(model)
    replay.choices = other.choices
    with valid_tokens(mask), replay.play():
        logits = model(**padded).logits
    # the first sequence without its padding, and the second, which has none
    for row, begin in ((0, 7), (1, 0)):
        real = slice(12 * row + begin, 12 * row + 12)
        replay.choices = {
            name: [type(c)(c.selected[real], c.kept[real]) for c in of_gate]
            for name, of_gate in other.choices.items()
        }
        with replay.play():
            alone = model(input_ids=ids[row : row + 1, begin:]).logits
        torch.testing.assert_close(logits[row, begin:], alone[0])


def test_routed_experts_there_and_back():
    """An engine's arrays, one without a row for the last token: what they name is chosen, the rest anew."""
    model, ids = make("OlmoeForCausalLM"), make_ids()
    mask = torch.ones_like(ids).bool()
    mask[1, 8:] = False
    replay = RoutingReplay(model)
    with replay.record():
        model(input_ids=ids)
    own = routed_experts(replay, mask)
    assert [list(part.shape) for part in own] == [[12, 2, 3], [8, 2, 3]]
    assert torch.equal(own[1][:, 1], replay.choices["model.layers.1.mlp.gate"][0].kept[12:20].to(torch.int16))
    given = [(own[0] + 1) % 6, (own[1][:-1] + 1) % 6]
    given[0][3] = -1
    load_routed_experts(replay, [part.numpy() for part in given], mask)
    with replay.play():
        seen = chosen_by(model, ids)
    first = seen["model.layers.0.mlp.gate"].view(2, 12, 3).to(torch.int16)
    assert torch.equal(first[0, :3], given[0][:3, 0])
    assert torch.equal(first[1, :7], given[1][:, 0])
    assert torch.equal(first[0, 3], own[0][3, 0])
    alone = chosen_by(model, ids)["model.layers.0.mlp.gate"].view(2, 12, 3).to(torch.int16)
    assert torch.equal(first[1, 7:], alone[1, 7:])


def test_log_of_choices(tmp_path):
    model, ids = make("Qwen3MoeForCausalLM").train(), make_ids()
    chosen = chosen_by(model, ids)
    with balance.log_choices(model, tmp_path / "log") as log:
        model(input_ids=ids)
        log.end_step(7, ids)
    gates, records = balance.read_log(tmp_path / "log")
    records = list(records)
    assert [gate.name for gate in gates] == list(chosen)
    assert {record.step for record in records} == {7}
    for record in records:
        expected = ids.flatten() if record.gate is None else chosen[record.gate]
        assert torch.equal(record.topk_idx, expected)


def test_copy_of_a_watched_model_chooses_for_itself():
    model, ids = make("MixtralForCausalLM"), make_ids()
    replay = RoutingReplay(model)
    with replay.record():
        model(input_ids=ids)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for router in routers(other).values():
            router.weight.neg_()
    expected = make("MixtralForCausalLM")
    expected.load_state_dict(other.state_dict())
    assert torch.equal(other(input_ids=ids).logits, expected(input_ids=ids).logits)


def test_sqrt_softplus_gate_is_the_router_of_deepseek_v4():
    modeling = pytest.importorskip(
        "transformers.models.deepseek_v4.modeling_deepseek_v4", reason="this Transformers has no DeepSeek-V4"
    )
    config = modeling.DeepseekV4Config(hidden_size=32, num_local_experts=8, num_experts_per_tok=3)
    router = modeling.DeepseekV4TopKRouter(config).double()
    torch.manual_seed(0)
    torch.nn.init.normal_(router.weight)
    router.e_score_correction_bias.copy_(torch.linspace(-0.3, 0.3, 8))
    gate = SqrtSoftplusGate(32, 8, 1, 3, gate_bias=False, scale=config.routed_scaling_factor).double()
    gate.load_state_dict(
        {"gate.weight": router.weight.detach(), "expert_bias": router.e_score_correction_bias}, strict=False
    )
    x = torch.randn(200, 32, dtype=torch.float64)
    _, weights, topk_idx = router(x)
    ours, our_weights = gate(x)
    expected, order = topk_idx.sort(1)
    got, own_order = ours.sort(1)
    assert torch.equal(got, expected)
    torch.testing.assert_close(our_weights.gather(1, own_order), weights.gather(1, order), rtol=1e-12, atol=0)
