"""MoE layers of Megatron-core with our weights and ours with its: equal outputs; every layout there and back."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from fmoe_ext import FMoETransformerMLP, QuantileGate, SigmoidGate, SoftmaxGate
from fmoe_ext.checkpoint import CheckpointError, from_megatron_core, to_huggingface, to_megatron_core
from fmoe_ext.checkpoint.cli import main

E, D, H = 4, 6, 5
LAYOUTS = ("modules", "te", "stacked", "grouped")


def layer(gate=SoftmaxGate, bias=False, **options):
    torch.manual_seed(0)
    made = FMoETransformerMLP(E, D, H, activation="swiglu", bias=bias, gate=gate, gate_bias=False, **options)
    for name, buffer in made.named_buffers():
        if name.endswith("expert_bias"):
            buffer.normal_()
    return made.double()


def by_hand(state, layout, prefix):
    """Each layout, written down independently of the code under test."""
    w1, w2 = state["experts.htoh4.weight"], state["experts.h4toh.weight"]
    out = {"router.weight": state["gate.gate.weight"]}
    if layout == "stacked":
        out |= {"experts.experts.linear_fc1.weight": w1, "experts.experts.linear_fc2.weight": w2}
    elif layout == "grouped":
        out["experts.weight1"] = torch.stack([w.t() for w in w1]).reshape(w1.shape[2], -1)
        out["experts.weight2"] = torch.cat([w.t() for w in w2])
    else:
        name = {
            "modules": "experts.local_experts.{}.linear_fc{}.weight",
            "te": "experts.linear_fc{1}.weight{0}",
        }
        for e in range(E):
            out |= {name[layout].format(e, 1): w1[e], name[layout].format(e, 2): w2[e]}
    return {prefix + key: value for key, value in out.items()} | {
        "decoder.final_layernorm.weight": torch.ones(D)
    }


def assert_same(a, b):
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_quantile_bias_both_ways():
    state = layer(gate=QuantileGate).state_dict()
    state["gate.quantile_bias"] += torch.arange(E)
    expected = by_hand(state, "te", "mlp.") | {"mlp.router.qb_beta": state["gate.quantile_bias"]}
    whole = {f"mlp.{key}": value for key, value in state.items()}
    whole["decoder.final_layernorm.weight"] = torch.ones(D)
    assert_same(to_megatron_core(whole, "te"), expected)
    assert_same(from_megatron_core(expected), whole)


# The pairs of megatron-bridge 0.6.2 for an MoE layer, of its qwen3_moe_bridge and deepseek/common: one tensor of
# Megatron's, and the same or its two halves in Transformers' files. The first * is the layer, the second the expert.
BRIDGE_EXPERTS = {
    "decoder.layers.*.mlp.router.weight": ("model.layers.*.mlp.gate.weight",),
    "decoder.layers.*.mlp.experts.linear_fc1.weight*": (
        "model.layers.*.mlp.experts.*.gate_proj.weight",
        "model.layers.*.mlp.experts.*.up_proj.weight",
    ),
    "decoder.layers.*.mlp.experts.linear_fc2.weight*": ("model.layers.*.mlp.experts.*.down_proj.weight",),
    "decoder.layers.*.mlp.experts.local_experts.*.linear_fc1.weight": (
        "model.layers.*.mlp.experts.*.gate_proj.weight",
        "model.layers.*.mlp.experts.*.up_proj.weight",
    ),
    "decoder.layers.*.mlp.experts.local_experts.*.linear_fc2.weight": (
        "model.layers.*.mlp.experts.*.down_proj.weight",
    ),
}
BRIDGE_DEEPSEEK = BRIDGE_EXPERTS | {
    "decoder.layers.*.mlp.router.expert_bias": ("model.layers.*.mlp.gate.e_score_correction_bias",),
    "decoder.layers.*.mlp.shared_experts.linear_fc1.weight": (
        "model.layers.*.mlp.shared_experts.gate_proj.weight",
        "model.layers.*.mlp.shared_experts.up_proj.weight",
    ),
    "decoder.layers.*.mlp.shared_experts.linear_fc2.weight": (
        "model.layers.*.mlp.shared_experts.down_proj.weight",
    ),
}


def by_bridge(state, pairs):
    """Convert Megatron's names to Transformers' by the pairs, each tensor by exactly one of them."""
    out = {}
    for key, tensor in state.items():
        matches = [
            (names, match.groups())
            for pattern, names in pairs.items()
            if (match := re.fullmatch(re.escape(pattern).replace(r"\*", r"(\d+)"), key))
        ]
        assert len(matches) == 1, key
        ((names, numbers),) = matches
        for name, part in zip(names, tensor.chunk(len(names)), strict=True):
            for number in numbers:
                name = name.replace("*", number, 1)
            out[name] = part
    return out


@pytest.mark.parametrize("layout", ["modules", "te"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_megatron_bridge_makes_the_files_of_our_export(family, layout):
    """Of a layer in the place of Megatron's MLP, as to_megatron_core writes it."""
    is_deepseek = family == "deepseek_v3"
    shared = {"gate": SigmoidGate, "shared_expert_hidden": 2 * H} if is_deepseek else {}
    states = [layer(**shared).state_dict() for _ in range(2)]
    whole = {f"decoder.layers.{i}.mlp.moe.{k}": v + i for i, s in enumerate(states) for k, v in s.items()}
    converted = by_bridge(to_megatron_core(whole, layout), BRIDGE_DEEPSEEK if is_deepseek else BRIDGE_EXPERTS)
    ours = {f"model.layers.{i}.mlp.{k}": v + i for i, s in enumerate(states) for k, v in s.items()}
    assert_same(converted, to_huggingface(ours, family))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_projections_of_latent_experts(layout):
    state = layer(bias=False, latent_size=3).state_dict()
    expected = by_hand(state, layout, "mlp.")
    for theirs, ours in (("fc1_latent_proj", "latent.narrow"), ("fc2_latent_proj", "latent.widen")):
        expected[f"mlp.{theirs}.weight"] = state[f"{ours}.weight"]
    whole = {f"mlp.{key}": value for key, value in state.items()}
    whole["decoder.final_layernorm.weight"] = torch.ones(D)
    assert_same(to_megatron_core(whole, layout), expected)
    assert_same(from_megatron_core(expected), whole)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    state = layer().state_dict()
    whole = {f"decoder.layers.3.mlp.{key}": value for key, value in state.items()}
    whole["decoder.final_layernorm.weight"] = torch.ones(D)
    expected = by_hand(state, layout, "decoder.layers.3.mlp.")
    assert_same(to_megatron_core(whole, layout), expected)
    assert_same(from_megatron_core(expected), whole)
    inside = {key.replace(".mlp.", ".mlp.moe."): value for key, value in whole.items()}  # in Megatron's model
    assert_same(to_megatron_core(inside, layout), expected)


@pytest.mark.parametrize("layout", ["modules", "te", "stacked"])
def test_biases_shared_experts_and_sigmoid(layout):
    source = layer(SigmoidGate, bias=True, shared_expert_hidden=3, shared_expert_gate=True)
    state = source.state_dict()
    theirs = to_megatron_core(state, layout)
    assert torch.equal(theirs["router.expert_bias"], state["gate.expert_bias"])
    assert theirs["shared_experts.linear_fc1.weight"].shape == (6, D)
    assert theirs["shared_experts.gate_weight"].shape == (1, D)
    assert_same(from_megatron_core(theirs), state)
    with pytest.raises(
        CheckpointError, match="experts have biases, which GroupedMLP has not: layout='modules'"
    ):
        to_megatron_core(state, "grouped")


def test_misfitting_tensors_are_refused():
    theirs = to_megatron_core(layer().state_dict(), "modules")
    missing = {key: value for key, value in theirs.items() if "experts.2.linear_fc2" not in key}
    with pytest.raises(CheckpointError, match=r"missing: experts\.local_experts\.2\.linear_fc2\.weight"):
        from_megatron_core(missing)
    stacked = to_megatron_core(layer().state_dict(), "stacked")
    stacked["router.weight"] = torch.zeros(E + 1, D)
    with pytest.raises(CheckpointError, match="router is for 5 experts, but there are 4"):
        from_megatron_core(stacked)
    grouped = to_megatron_core(layer().state_dict(), "grouped")
    grouped["experts.weight1"] = grouped["experts.weight1"][:, 1:]
    with pytest.raises(
        CheckpointError, match=r"experts\.weight1 \[.*\] does not fit the router: 4 experts of width"
    ):
        from_megatron_core(grouped)
    with pytest.raises(CheckpointError, match=r"\(root\) has a router, but no experts"):
        from_megatron_core({"router.weight": torch.zeros(E, D)})
    with pytest.raises(CheckpointError, match="layout must be one of modules, te, stacked, grouped"):
        to_megatron_core(layer().state_dict(), "x")
    with pytest.raises(CheckpointError, match="there is no FMoETransformerMLP"):
        to_megatron_core({"weight": torch.zeros(2)})
    noisy = layer("noisy").state_dict()
    with pytest.raises(CheckpointError, match=r"gate\.w_\w+.* has no place in a layer of Megatron-core"):
        to_megatron_core(noisy)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_command_line(layout, tmp_path, capsys):
    """A file of Megatron's becomes a checkpoint of ours."""
    state = layer().state_dict()
    theirs = {
        key: value.contiguous() for key, value in by_hand(state, layout, "decoder.layers.0.mlp.").items()
    }
    save_file(theirs, tmp_path / "megatron.safetensors")
    main(
        ["convert", str(tmp_path / "megatron.safetensors"), "--to", "fmoe_ext", "-o", str(tmp_path / "ours")]
    )
    main(["merge", str(tmp_path / "ours"), "-o", str(tmp_path / "ours.safetensors")])
    ours = load_file(tmp_path / "ours.safetensors")
    assert_same(
        {k: v for k, v in ours.items() if "mlp" in k},
        {f"decoder.layers.0.mlp.{k}": v for k, v in state.items()},
    )
    capsys.readouterr()
    with pytest.raises(
        SystemExit, match="attention has Megatron's names too, are not converted to hf-qwen3_moe"
    ):
        main(
            [
                "convert",
                str(tmp_path / "megatron.safetensors"),
                "--to",
                "hf-qwen3_moe",
                "-o",
                str(tmp_path / "hf"),
            ]
        )
