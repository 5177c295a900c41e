"""python -m fmoe_ext.checkpoint: from every format to every other and back to the same tensors."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CONFIG_MAPPING

from fmoe_ext import ExpertChoiceGate, FMoE, FMoETransformerMLP, SigmoidGate, SoftmaxGate, checkpoint
from fmoe_ext.checkpoint.cli import main
from fmoe_ext.checkpoint.families import FAMILIES
from fmoe_ext.checkpoint.routing import (
    check_config,
    check_writable,
    facts_of_layers,
    needed_config,
    routing_of,
    routing_of_config,
)
from fmoe_ext.experts import ClampedSwiGLU, GatedActivation
from fmoe_ext.gates import HashGate

D, H, E = 6, 5, 4


def make(seed=0):
    torch.manual_seed(seed)
    gate = functools.partial(SoftmaxGate, gate_bias=False)
    moe = FMoETransformerMLP(E, D, H, activation="swiglu", bias=False, gate=gate)
    return nn.ModuleDict({"norm": nn.LayerNorm(D), "mlp": moe})


def equal(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture
def saved(tmp_path):
    model = make()
    optimizer = torch.optim.Adam(model.parameters())
    model["mlp"](torch.randn(7, D)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "ours", model, optimizer, step=12)
    return tmp_path, model


ROUTES = (
    ("safetensors",),
    ("hf-fused", "hf-mixtral", "hf-qwen3_moe"),
    ("fastmoe", "fmoe_ext", "fastmoe", "safetensors", "hf-qwen3_moe"),
    ("hf-mixtral", "fastmoe"),
)


@pytest.mark.parametrize("route", ROUTES, ids="-".join)
def test_there_and_back(saved, capsys, route):
    folder, model = saved
    source = folder / "ours"
    for i, format in enumerate(route):
        target = folder / f"{i}.safetensors" if format == "safetensors" else folder / str(i)
        ranks = ("--ranks", "2") if format == "fastmoe" else ()
        main(["convert", str(source), "--to", format, "-o", str(target), *ranks])
        assert f"{target}: 5 tensors as {format}" in capsys.readouterr().out
        source = target
    main(["merge", str(source), "-o", str(folder / "merged.safetensors")])
    other = make(seed=1)
    checkpoint.load(folder / "merged.safetensors", other)
    assert equal(model, other)


def test_ours_after_a_conversion_loads(saved):
    folder, model = saved
    main(["convert", str(folder / "ours"), "--to", "hf-qwen3_moe", "-o", str(folder / "hf")])
    names = load_file(folder / "hf" / "model.safetensors").keys()
    assert f"mlp.experts.{E - 1}.up_proj.weight" in names and "mlp.gate.weight" in names
    main(["convert", str(folder / "hf"), "--to", "fmoe_ext", "-o", str(folder / "back")])
    other = make(seed=1)
    checkpoint.load(folder / "back", other)
    assert equal(model, other)


def test_sharded_huggingface_folder(saved):
    folder, model = saved
    state = checkpoint.to_huggingface(model.state_dict(), "qwen3_moe")
    (folder / "hf").mkdir()
    where = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(state)}
    for file in set(where.values()):
        save_file({n: t.contiguous() for n, t in state.items() if where[n] == file}, folder / "hf" / file)
    (folder / "hf" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    main(["merge", str(folder / "hf"), "-o", str(folder / "merged.safetensors")])
    other = make(seed=1)
    checkpoint.load(folder / "merged.safetensors", other)
    assert equal(model, other)


def test_files_of_ranks(saved):
    folder, model = saved
    main(["convert", str(folder / "ours"), "--to", "fastmoe", "-o", str(folder / "fast"), "--ranks", "2"])
    files = sorted((folder / "fast").glob("iter_0000012/*/model_optim_rng.pt"))
    main(["merge", *map(str, files), "-o", str(folder / "merged.safetensors")])
    other = make(seed=1)
    checkpoint.load(folder / "merged.safetensors", other)
    assert equal(model, other)


def test_inspect(saved, capsys):
    folder, model = saved
    main(["inspect", str(folder / "ours"), "--tensors"])
    captured = capsys.readouterr()
    assert "format     fmoe_ext, step 12" in captured.out and "optimizer  Adam" in captured.out
    experts = E * (2 * H * D + H * D)
    assert f"tensors    5, {experts + E * D + 2 * D} elements, {experts} of them of experts" in captured.out
    assert re.search(rf"\nmlp +{E} +{D} +{H} +{experts} +{experts * 4:,}\n", captured.out)
    assert re.search(r"\nmlp\.experts\.htoh4\.weight +\[4, 10, 6\] +torch\.float32", captured.out)
    assert "1 of 1 files have one, all are right" in captured.err
    path = folder / "ours" / "step-00000012" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(SystemExit, match=r"error: .*__0_0\.distcp is damaged"):
        main(["inspect", str(folder / "ours")])
    main(["inspect", str(folder / "ours"), "--no-verify"])
    with pytest.raises(SystemExit, match=r"error: .*nowhere does not exist"):
        main(["inspect", str(folder / "nowhere")])
    with pytest.raises(SystemExit, match="error: no checkpoint in"):
        main(["inspect", str(folder)])


def test_as_a_program(saved):
    """As `python -m`; and `import fmoe_ext` loads nothing of it, nor the package what other formats come from."""
    code = f"""
import runpy, sys
import fmoe_ext
assert "fmoe_ext.checkpoint" not in sys.modules
import fmoe_ext.checkpoint
assert not {{"safetensors", "transformers"}} & sys.modules.keys()
sys.argv = ["checkpoint", "inspect", {str(saved[0] / "ours")!r}]
runpy.run_module("fmoe_ext.checkpoint", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "format     fmoe_ext, step 12" in done.stdout, done.stderr


def with_gate(**options):
    gate = functools.partial(SoftmaxGate, gate_bias=False, **options)
    moe = FMoETransformerMLP(E, D, H, activation="swiglu", bias=False, gate=gate)
    return nn.ModuleDict({"norm": nn.LayerNorm(D), "mlp": moe})


def expert_choice():
    gate = functools.partial(ExpertChoiceGate, gate_bias=False)
    moe = FMoETransformerMLP(E, D, H, activation="swiglu", bias=False, gate=gate)
    return nn.ModuleDict({"mlp": moe})


GATES = {
    "scale": (lambda: with_gate(scale=2.5), "scale=2.5, expected 1"),
    "groups": (lambda: with_gate(num_groups=2), "num_groups=2, expected 1"),
    "capacity": (lambda: with_gate(capacity_factor=1.25), "capacity_factor=1.25, expected None"),
    "expert choice": (expert_choice, "ExpertChoiceGate, expected one of NaiveGate, SoftmaxGate"),
}


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("source", ["folder", "file", "fmoe_ext", "model"])
def test_gates_that_hugging_face_does_not_have(tmp_path, kind, source):
    """Their tensors have the same names and shapes, and give other numbers there."""
    make_model, text = GATES[kind]
    text = f"the gate of mlp has {text}"
    if source == "model":
        with pytest.raises(checkpoint.CheckpointError, match=re.escape(text)):
            checkpoint.to_huggingface(make_model(), "qwen3_moe")
        return
    path = tmp_path / "model.safetensors" if source == "file" else tmp_path / "ours"
    if source == "file":
        checkpoint.export_safetensors(path, make_model())
    else:
        checkpoint.save(path, make_model())
    if source == "fmoe_ext":  # what the gate is survives a conversion
        main(["convert", str(path), "--to", "fmoe_ext", "-o", str(tmp_path / "again")])
        path = tmp_path / "again"
    with pytest.raises(SystemExit, match=re.escape(text)):
        main(["convert", str(path), "--to", "hf-qwen3_moe", "-o", str(tmp_path / "hf")])
    assert not (tmp_path / "hf").exists()


def test_config_must_name_the_gates_options(tmp_path, capsys):
    checkpoint.save(tmp_path / "ours", with_gate(normalize=False))
    main(["convert", str(tmp_path / "ours"), "--to", "hf-qwen3_moe", "-o", str(tmp_path / "hf")])
    expected = 'config.json must say "num_experts_per_tok": 2, "norm_topk_prob": false'
    assert expected in capsys.readouterr().out
    with pytest.raises(SystemExit, match="normalize=False, expected True"):
        main(["convert", str(tmp_path / "ours"), "--to", "hf-mixtral", "-o", str(tmp_path / "mixtral")])


@pytest.mark.parametrize(
    ("activation", "layout", "expected"),
    [
        ("swiglu", "mixtral", {}),
        ("geglu", "mixtral", {"hidden_act": "gelu"}),
        ("geglu_tanh", "gemma4_text", {"hidden_activation": "gelu_pytorch_tanh"}),
        ("swiglu", "gemma4_text", {"hidden_activation": "silu"}),
        ("relu", "nemotron_h", {"mlp_hidden_act": "relu"}),
        ("swiglu", "lfm2_moe", {}),
        ("limited_swiglu", "hy_v4", {}),
    ],
)
def test_config_must_name_the_activation(activation, layout, expected):
    """Under the family's own key, which may have another default than silu."""
    assert needed_config({"mlp": {"activation": activation}}, layout) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "cohere2_moe"}, {"gate": "SoftmaxGate", "normalize": True, "activation": "swiglu"}),
        (
            {"model_type": "gemma4_text"},
            {"gate": "NormedGate", "normalize": True, "activation": "geglu_tanh"},
        ),
        (
            {"model_type": "nemotron_h"},
            {"gate": "SigmoidGate", "group_best": 2, "activation": "relu2"},
        ),
    ],
)
def test_keys_that_config_lacks_have_their_defaults(config, expected):
    assert routing_of_config(config) == expected
    made = CONFIG_MAPPING[config["model_type"]]().to_dict()
    assert routing_of_config(made)["activation"] == expected["activation"]
    assert routing_of_config(made)["gate"] == expected["gate"]


@pytest.mark.parametrize("value", [[], {}, "x", -1, None])
def test_damaged_values_of_config_are_refused(value):
    """Or they count as missing, as null does; no error is one of Python's."""
    layers = [("mlp", with_gate().mlp)]
    for family in FAMILIES.values():
        keys = {*family.config.values(), *family.defaults, family.activation_key} - {""}
        for key in keys:
            said = {"model_type": family.name, key: value}
            try:
                check_config(said, layers)
            except checkpoint.CheckpointError:
                continue
            assert key != "expert_selection_fn" or value is None
    facts = routing_of_config({"model_type": "mixtral", "hidden_act": value})
    assert facts["activation"] == ("swiglu" if value is None else str(value))


@pytest.mark.parametrize(
    ("config", "options", "text"),
    [
        (
            {"norm_topk_prob": False},
            {},
            "normalize=True, but config.json of the model says norm_topk_prob=False",
        ),
        ({"norm_topk_prob": True}, {}, None),
        ({"model_type": "qwen3_moe"}, {}, "normalize=True, .* says norm_topk_prob=False"),
        ({"model_type": "qwen3_moe"}, {"normalize": False}, None),
        (
            {"model_type": "mixtral"},
            {"normalize": False},
            "normalize=False, but every mixtral has normalize=True",
        ),
        ({"text_config": {"norm_topk_prob": False}}, {}, "normalize=True"),
        ({"num_experts_per_tok": 3}, {}, "layer mlp has top_k=2, .* says num_experts_per_tok=3"),
        ({"routed_scaling_factor": 2.5}, {}, "scale=1.0, .* says routed_scaling_factor=2.5"),
        (
            {"model_type": "mixtral", "hidden_act": "gelu"},
            {},
            "activation swiglu, but by config.json .* geglu",
        ),
    ],
)
def test_config_of_a_huggingface_folder(tmp_path, config, options, text):
    source, target = with_gate(), with_gate(**options)
    save_file(checkpoint.to_huggingface(source, "qwen3_moe"), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    before = {key: value.clone() for key, value in target.state_dict().items()}
    if text is None:
        checkpoint.load(tmp_path, target)
        assert equal(source, target)
        return
    with pytest.raises(checkpoint.CheckpointError, match=text):
        checkpoint.load(tmp_path, target)
    assert all(torch.equal(value, before[key]) for key, value in target.state_dict().items())


CLAMPED = FMoETransformerMLP(E, D, H, activation=ClampedSwiGLU(limit=5.0), bias=False, gate="softmax")
SIGMOID = FMoETransformerMLP(E, D, H, activation="swiglu", bias=False, gate=SigmoidGate)


def test_score_of_a_gate_with_a_table_is_compared():
    gate = functools.partial(HashGate, vocab_size=8, score="sigmoid")
    layer = FMoETransformerMLP(
        E, D, H, activation=GatedActivation(nn.SiLU(), limit=5.0), bias=False, gate=gate
    )
    config = {"model_type": "deepseek_v4", "swiglu_limit": 5.0}
    with pytest.raises(
        checkpoint.CheckpointError, match=r"the gate of mlp has score=sigmoid, but every deepseek_v4 "
    ):
        check_config(config, [("mlp", layer)])
    layer.gate.score = "sqrtsoftplus"
    check_config(config, [("mlp", layer)])


@pytest.mark.parametrize(
    ("config", "layer", "text"),
    [
        (
            {"model_type": "gpt_oss", "swiglu_limit": 7.0},
            CLAMPED,
            "the activation of mlp has swiglu_limit=5.0, but config.json of the model says swiglu_limit=7.0: the "
            "outputs would differ. Build the layer with that activation, or change config.json",
        ),
        (
            {"model_type": "cohere2_moe", "expert_selection_fn": "softmax"},
            SIGMOID,
            "layer mlp has gate=SigmoidGate, but by config.json of the model it has gate=SoftmaxGate: the outputs "
            "would differ. Build the layer with gate=SoftmaxGate, or change config.json",
        ),
        (
            {"model_type": "deepseek_v3", "routed_scaling_factor": 2.5},
            SIGMOID,
            "the gate of mlp has scale=1.0, but config.json of the model says routed_scaling_factor=2.5: the outputs "
            "would differ. Build the gate with functools.partial(SigmoidGate, scale=2.5), or change config.json",
        ),
    ],
)
def test_difference_from_config_is_named_with_its_cure(config, layer, text):
    with pytest.raises(checkpoint.CheckpointError) as error:
        check_config(config, [("mlp", layer)])
    assert str(error.value) == text


def test_layer_of_another_class_is_refused_by_its_class():
    layer = FMoE(E, D, gate=SoftmaxGate, expert=lambda d: nn.Linear(d, d))
    layer.experts = CLAMPED.experts
    with pytest.raises(checkpoint.CheckpointError) as error:
        facts_of_layers(SimpleNamespace(layers={"layers.0.mlp": layer}), FAMILIES["mixtral"])
    assert str(error.value) == (
        "layers.0.mlp is a FMoE, which no format has a place for: build an FMoETransformerMLP"
    )


@pytest.mark.parametrize("score", ["sqrtsoftplus", "softmax"])
def test_scores_of_a_table_are_those_of_the_format(score):
    """DeepSeek-V4's: its files say nothing about them."""
    gate = functools.partial(HashGate, vocab_size=9, score=score, gate_bias=False)
    layer = FMoETransformerMLP(E, D, H, activation=GatedActivation(F.silu, limit=7.0), bias=False, gate=gate)
    facts = {"mlp": routing_of(layer)}
    if score == "sqrtsoftplus":
        check_writable(facts, "mlp.", "deepseek_v4")
        return
    with pytest.raises(checkpoint.CheckpointError, match="mlp has score=softmax, expected sqrtsoftplus"):
        check_writable(facts, "mlp.", "deepseek_v4")


@pytest.mark.parametrize(
    ("config", "to", "text"),
    [
        ({"model_type": "mixtral"}, "gpt_oss", "activation swiglu, but those of Hugging Face's gpt_oss"),
        ({"model_type": "mixtral", "hidden_act": "relu"}, "qwen3_moe", "have the activation relu"),
        ({"model_type": "qwen3_moe"}, "mixtral", "normalize=False, expected True"),
        ({"model_type": "deepseek_v3"}, "qwen3_moe", "SigmoidGate, expected one of NaiveGate, SoftmaxGate"),
    ],
)
def test_huggingface_folder_unknown_to_format_is_refused(tmp_path, capsys, config, to, text):
    """The facts about gates and experts are in its config.json, and go with the tensors."""
    save_file(checkpoint.to_huggingface(with_gate(), "qwen3_moe"), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"num_experts_per_tok": 2, **config}))
    main(["convert", str(tmp_path), "--to", "fmoe_ext", "-o", str(tmp_path / "ours")])
    for source in (tmp_path, tmp_path / "ours"):
        with pytest.raises(SystemExit, match=text):
            main(["convert", str(source), "--to", f"hf-{to}", "-o", str(tmp_path / "hf")])
        assert not (tmp_path / "hf").exists()
    if config == {"model_type": "mixtral"}:
        capsys.readouterr()
        main(["convert", str(tmp_path / "ours"), "--to", "hf-qwen3_moe", "-o", str(tmp_path / "hf")])
        assert 'must say "num_experts_per_tok": 2, "norm_topk_prob": true' in capsys.readouterr().out


def torch_dist(folder, tensors, iteration=10):
    """A Megatron folder, as far as it matters here: written by torch's own checkpoint."""
    dcp.save(
        tensors | {"extra_state/shard_0_1": {"a": 1}},
        storage_writer=dcp.FileSystemWriter(folder / f"iter_{iteration:07d}"),
        no_dist=True,
    )
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder


def test_torch_dist_folder(tmp_path, capsys):
    """Our layers in a Megatron model: alike ones are one tensor there, with the layers in front."""
    models = [make(0), make(1)]
    states = [model.state_dict() for model in models]
    tensors = {f"decoder.layers.{key}": torch.stack([s[key] for s in states]) for key in states[0]}
    tensors["optimizer.state.exp_avg.decoder.norm"] = torch.zeros(3)
    folder = torch_dist(tmp_path / "megatron", tensors)
    main(["inspect", str(folder)])
    out = capsys.readouterr().out
    assert "format     torch_dist, step 10" in out
    assert re.search(rf"\ndecoder\.layers\.1\.mlp +{E} +{D} +{H} ", out)
    main(["merge", str(folder), "-o", str(tmp_path / "merged.safetensors")])
    assert "left out, no tensors of the model: 2, as extra_state/shard_0_1" in capsys.readouterr().out
    other = nn.ModuleDict({"decoder": nn.ModuleDict({"layers": nn.ModuleList([make(2), make(3)])})})
    checkpoint.load(tmp_path / "merged.safetensors", other)
    assert equal(other, nn.ModuleDict({"decoder": nn.ModuleDict({"layers": nn.ModuleList(models)})}))


MEGATRON = {
    "grouped": {"weight1": [D, E * 2 * H], "weight2": [E * H, D]},
    "of each expert": {
        **{f"linear_fc1.weight{e}": [2 * H, D] for e in range(E)},
        **{f"linear_fc2.weight{e}": [D, H] for e in range(E)},
    },
    "modules": {
        **{f"local_experts.{e}.linear_fc1.weight": [2 * H, D] for e in range(E)},
        **{f"local_experts.{e}.linear_fc2.weight": [D, H] for e in range(E)},
    },
    "stacked": {"experts.linear_fc1.weight": [E, 2 * H, D], "experts.linear_fc2.weight": [E, D, H]},
}


@pytest.mark.parametrize("kind", MEGATRON)
@pytest.mark.parametrize("source", ["file", "torch_dist"])
def test_megatron_core_experts(tmp_path, capsys, kind, source):
    """They are counted right and converted; tests/checkpoint/test_megatron_experts.py has the values."""
    prefix = "decoder.layers.0.mlp."
    tensors = {f"{prefix}experts.{name}": torch.zeros(shape) for name, shape in MEGATRON[kind].items()}
    tensors[f"{prefix}router.weight"] = torch.zeros(E, D)
    path = tmp_path / "model.safetensors"
    if source == "file":
        save_file(tensors, path)
    else:
        path = torch_dist(tmp_path / "megatron", tensors)
    main(["inspect", str(path)])
    assert re.search(rf"\ndecoder\.layers\.0\.mlp +{E} ", capsys.readouterr().out)
    with pytest.raises(SystemExit, match=r"mlp: experts under Megatron-core's own names.* to hf-qwen3_moe"):
        main(["convert", str(path), "--to", "hf-qwen3_moe", "-o", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
    main(["convert", str(path), "--to", "fmoe_ext", "-o", str(tmp_path / "out")])
    main(["inspect", str(tmp_path / "out")])
    assert re.search(rf"\ndecoder\.layers\.0\.mlp +{E} +{D} +{H} ", capsys.readouterr().out)
    main(["merge", str(path), "-o", str(tmp_path / "merged.safetensors")])
    assert load_file(tmp_path / "merged.safetensors").keys() == tensors.keys()


def test_failed_conversions_leave_nothing(saved, tmp_path_factory):
    out = tmp_path_factory.mktemp("empty") / "a" / "b"
    for options in (("--to", "fastmoe", "--ranks", "3"), ("--to", "fastmoe", "--ranks", "0")):
        with pytest.raises(SystemExit, match="error: "):
            main(["convert", str(saved[0] / "ours"), "-o", str(out), *options])
        assert not out.parent.exists()
    damaged = out.parent.parent / "damaged"
    shutil.copytree(saved[0] / "ours", damaged)
    for data in damaged.rglob("*.distcp"):
        os.truncate(data, 100)
    for format in ("safetensors", "fastmoe", "fmoe_ext"):  # found while it writes
        with pytest.raises(SystemExit, match=r"error: .*truncated"):
            main(["convert", str(damaged), "--no-verify", "--to", format, "-o", str(out)])
        assert not out.parent.exists()


def test_run_is_not_given_a_checkpoint_without_its_optimizer(saved):
    """It was: `convert out --to fmoe_ext -o out` became what `out` resumes from, Adam's state lost."""
    ours = str(saved[0] / "ours")
    with pytest.raises(SystemExit, match=r"has a checkpoint already: .*no optimizer"):
        main(["convert", ours, "--to", "fmoe_ext", "-o", ours])
    model = make(1)
    optimizer = torch.optim.Adam(model.parameters())
    assert checkpoint.load(ours, model, optimizer).step == 12 and optimizer.state


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("merge", "ours", "-o", "."), "is a folder: name a file, as .*model.safetensors"),
        (
            ("convert", "ours", "--to", "safetensors", "--ranks", "2", "-o", "a"),
            "--ranks 2 is for --to fastmoe",
        ),
        (
            ("inspect", "ours", "--mp-rank", "mp_rank_00"),
            "--mp-rank is for folders of FastMoE and DeepSpeed, which ours is not",
        ),
        (("inspect", "ours", "ours"), "the files of FastMoE's ranks, but ours is a folder"),
    ],
)
def test_options_that_would_be_ignored(saved, monkeypatch, arguments, message):
    monkeypatch.chdir(saved[0])
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        main(arguments)


def test_folder_named_as_a_file(saved, capsys):
    """FastMoE's folder may end in .pt."""
    folder = saved[0] / "model.pt"
    main(["convert", str(saved[0] / "ours"), "--to", "fastmoe", "-o", str(folder)])
    main(["inspect", str(folder), "--mp-rank", "mp_rank_00"])
    assert "format     fastmoe, step 12" in capsys.readouterr().out


def test_tracker_without_files(tmp_path):
    (tmp_path / "iter_0000010").mkdir()
    for text, expected in (
        ("10", "has no mp_rank"),
        ("11", "says 11, but there is no iter_0000011"),
        ("../10", "must hold a number or 'release'"),
        ("\xff", "it is no text"),
    ):
        (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(text.encode("latin-1"))
        with pytest.raises(SystemExit, match=f"error: .*{expected}"):
            main(["merge", str(tmp_path), "-o", str(tmp_path / "out")])
