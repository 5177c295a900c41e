"""fmoe_ext.compress.prune(): the folder without some experts is the model without them."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file

import fmoe_ext
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.compress import CRITERIA, measure, prune
from fmoe_ext.compress.prune import best, number_to_keep
from fmoe_ext.compress.scores import Scores
from tests import packed_layouts
from tests.finetune.streamed_models import WIDE, of_values, pack, pack_linear, resident, save
from tests.huggingface.huggingface_models import experts_of, make_model

FEW = {"num_hidden_layers": 2}
DEEPSEEK = {"num_hidden_layers": 3, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}


def tokens(count=600, vocabulary=61):
    return torch.randint(3, vocabulary, (count,), generator=torch.Generator().manual_seed(3))


def run(folder, out, **options):
    given = {"keep": 0.5, "seq_len": 20, "criterion": "reap"} | options
    return prune(folder, out, tokens(), **given)


def cut_in_memory(model, kept):
    """The model with the experts of `kept` alone, {path: experts}: parameters sliced by hand."""
    model = copy.deepcopy(model)
    for path, chosen in kept.items():
        experts = model.get_submodule(path)
        old = experts.num_experts
        block = model.get_submodule(path.rpartition(".")[0])
        for module in block.modules():
            if module is experts or any(part in str(type(module)) for part in ("Shared", "MLP")):
                continue
            for name, tensor in [
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            ]:
                if tensor.shape[:1] == (old,):
                    setattr(module, name, _like(tensor, tensor[chosen]))
                elif tuple(tensor.shape) == (1, old):
                    setattr(module, name, _like(tensor, tensor[:, chosen]))
            for name in ("num_experts", "n_routed_experts", "out_features", "num_local_experts"):
                if getattr(module, name, None) == old:
                    setattr(module, name, len(chosen))
        for name, parameter in experts.named_parameters(recurse=False):
            setattr(experts, name, _like(parameter, parameter[chosen]))
        experts.num_experts = len(chosen)
    return model


def _like(tensor, value):
    value = value.detach().clone()
    return torch.nn.Parameter(value) if isinstance(tensor, torch.nn.Parameter) else value


@pytest.mark.parametrize(
    ("architecture", "changes", "number"),
    [
        ("Qwen3MoeForCausalLM", FEW, 3),
        ("MixtralForCausalLM", FEW, 4),
        ("OlmoeForCausalLM", FEW, 3),
        ("Qwen2MoeForCausalLM", FEW, 3),
        ("DeepseekV3ForCausalLM", DEEPSEEK, 4),
        ("Glm4MoeForCausalLM", DEEPSEEK, 4),
        ("Ernie4_5_MoeForCausalLM", FEW, 3),
        ("GraniteMoeForCausalLM", FEW, 3),
        ("GptOssForCausalLM", FEW, 3),
        ("HunYuanMoEV1ForCausalLM", FEW, 3),
    ],
)
def test_pruned_folder_is_the_model_cut_in_memory(architecture, changes, number, tmp_path):
    folder = save(tmp_path / "model", architecture, **changes)
    before = resident(folder)
    report = run(folder, tmp_path / "out", keep=None, experts=number)
    kept = {path: layer["kept"] for path, layer in report["layers"].items()}
    assert all(len(chosen) == number for chosen in kept.values()) and report["experts_after"] == number
    expected = cut_in_memory(before, kept)
    ids = tokens(16).view(2, 8)
    found = resident(tmp_path / "out")
    assert torch.equal(found(input_ids=ids).logits, expected(input_ids=ids).logits)
    assert (
        json.loads((tmp_path / "out" / "prune_report.json").read_text())["loss_after"] == report["loss_after"]
    )


@pytest.mark.parametrize("criterion", CRITERIA)
def test_planted_dead_experts_go_and_logits_stay(criterion, tmp_path):
    """Channel 0 of the hidden states is the same for all tokens; by it the router turns away from some experts."""
    model = make_model("Qwen3MoeForCausalLM", dtype=torch.float64, **FEW, norm_topk_prob=True)
    dead = [[1, 4], [0, 2]]
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(10)
        model.model.embed_tokens.weight[:, 0] = 10
        for layer, gone in zip(model.model.layers, dead, strict=True):
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.experts.down_proj[:, 0] = 0
            layer.post_attention_layernorm.weight.abs_()
            layer.mlp.gate.weight[:, 0] = 0
            layer.mlp.gate.weight[gone] = 0
            layer.mlp.gate.weight[gone, 0] = -1000
    model.save_pretrained(tmp_path / "model")
    report = run(tmp_path / "model", tmp_path / "out", keep=None, experts=4, criterion=criterion)
    assert [sorted(layer["pruned"]) for layer in report["layers"].values()] == dead
    assert all(
        gone["tokens"] == 0 for layer in report["layers"].values() for gone in layer["pruned"].values()
    )
    ids = tokens(40).view(2, 20)
    before, after = (resident(tmp_path / name)(input_ids=ids).logits for name in ("model", "out"))
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)
    assert report["loss_after"] == pytest.approx(report["loss_before"], rel=1e-12)


def test_reap_is_the_mean_of_weight_times_norm(tmp_path):
    model = make_model("MixtralForCausalLM", dtype=torch.float64, **FEW).eval()
    seen = []
    for experts in experts_of(model):
        experts.register_forward_hook(
            lambda e, given, named, _: seen.append((e, given, named)), with_kwargs=True
        )
    ids = tokens(40).view(2, 20)
    with torch.no_grad():
        model(input_ids=ids)
    inputs = seen[:2]
    found = measure(model, [ids], "reap")
    for (experts, given, _), (path, score) in zip(inputs, found.of("reap").items(), strict=True):
        x, idx, weights = given[:3]
        sums, counts = torch.zeros(6, dtype=torch.float64), torch.zeros(6)
        for t in range(x.shape[0]):
            for k in range(idx.shape[1]):
                e = int(idx[t, k])
                y = experts(x[t : t + 1], torch.tensor([[e]]), torch.ones(1, 1, dtype=torch.float64))
                sums[e] += weights[t, k] * y.norm()
                counts[e] += 1
        torch.testing.assert_close(score, sums / counts.clamp(min=1), rtol=1e-12, atol=0)
        assert found.count[path].tolist() == counts.int().tolist()


@pytest.mark.parametrize("kind", packed_layouts.CONFIGS)
def test_packed_experts_stay_packed(kind, tmp_path):
    folder = save(tmp_path / "model", dtype=torch.float32, **FEW, **WIDE)
    values = pack_linear(folder, kind)
    report = run(folder, tmp_path / "out", keep=None, experts=3, criterion="frequency")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    for path, layer in report["layers"].items():
        for new, old in enumerate(layer["kept"]):
            of_old = {name for name in before if name.startswith(f"{path}.{old}.")}
            assert len(of_old) >= 6
            for name in of_old:
                found = after[name.replace(f"{path}.{old}.", f"{path}.{new}.")]
                assert torch.equal(found.view(torch.uint8), before[name].view(torch.uint8)), name
    kept = {path: layer["kept"] for path, layer in report["layers"].items()}
    expected = cut_in_memory(of_values(folder, values), kept)
    ids = tokens(16).view(2, 8)
    with torch.no_grad():
        found = fmoe_ext.stream(tmp_path / "out", dtype=torch.float32)(input_ids=ids).logits
        torch.testing.assert_close(found, expected(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


def test_stacked_mxfp4_experts_stay_packed(tmp_path):
    folder = pack(save(tmp_path / "model", "GptOssForCausalLM", torch.bfloat16, intermediate_size=32, **FEW))
    report = run(folder, tmp_path / "out", keep=None, experts=3, criterion="frequency")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    for path, layer in report["layers"].items():
        for part in ("gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "gate_up_proj_bias"):
            assert torch.equal(after[f"{path}.{part}"], before[f"{path}.{part}"][layer["kept"]]), part


def test_packed_experts_are_not_merged_and_refused_before_the_text_is_read(tmp_path):
    packed = save(tmp_path / "linear", dtype=torch.float32, **FEW, **WIDE)
    pack_linear(packed, "fp8_block")
    few = FEW | {"intermediate_size": 32}
    stacked = pack(save(tmp_path / "stacked", "GptOssForCausalLM", torch.bfloat16, **few))
    for folder in (packed, stacked):
        lines = []
        with pytest.raises(CheckpointError, match=r"packed.*prune without merging"):
            prune(folder, tmp_path / "out", tokens(), experts=3, seq_len=20, merge=0.9, say=lines.append)
        assert lines == []
        assert not list(tmp_path.glob(".out*"))


def test_scores_are_kept_in_a_file_and_belong_to_one_text(tmp_path):
    folder = save(tmp_path / "model", **FEW)
    file = tmp_path / "scores.json"
    first = run(folder, tmp_path / "first", scores=file)
    lines = []
    again = run(folder, tmp_path / "again", scores=file, say=lines.append)
    assert f"scores of {file}" in lines and not any("reading part" in line for line in lines)
    assert first["layers"] == again["layers"] and first["loss_after"] == again["loss_after"]
    with pytest.raises(CheckpointError, match="scores of another model or text"):
        prune(folder, tmp_path / "third", tokens().flip(0), keep=0.5, seq_len=20, scores=file)
    file.write_text("{")
    with pytest.raises(CheckpointError, match=r"scores\.json cannot be read, or is damaged"):
        run(folder, tmp_path / "third", scores=file)
    assert not (tmp_path / "third").exists()


def test_dry_run_measures_and_writes_nothing(tmp_path):
    folder = save(tmp_path / "model", **FEW)
    report = run(folder, tmp_path / "out", dry_run=True)
    assert report["experts_after"] == 3 and "loss_after" not in report
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_whole_text_is_read_if_none_is_held_out(tmp_path):
    folder = save(tmp_path / "model", **FEW)
    report = run(folder, tmp_path / "out", held_out=0.0)
    assert report["tokens"] == 600 and report["loss_before"] is None and report["loss_after"] is None
    assert "loss" not in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0.0}, "keep must be above 0 and at most 1"),
        ({"keep": 0.1}, "a token chooses 2 experts, so 1 are too few"),
        ({"experts": 3}, "give either keep"),
        ({"keep": None, "experts": 7}, "the model has 6 experts a layer, so 7 cannot stay"),
        ({"seq_len": 500}, "at least 96 say something"),
        ({"held_out": 1.0}, "held_out must be"),
    ],
)
def test_impossible_numbers_are_refused_before_a_file_is_written(options, message, tmp_path):
    folder = save(tmp_path / "model", **FEW)
    given = {"seq_len": 20} | options
    text = tokens(510) if "seq_len" in options else tokens()
    with pytest.raises(CheckpointError, match=message):
        prune(folder, tmp_path / "out", text, **{"keep": 0.5, **given})
    assert not (tmp_path / "out").exists()


def test_groups_of_the_router_keep_as_many_experts_each():
    assert best(torch.tensor([9.0, 8, 7, 1, 2, 3]), 4, groups=2) == [0, 1, 4, 5]
    config = {"num_experts_per_tok": 5, "n_group": 4, "topk_group": 2}
    assert number_to_keep(16, 0.99, None, config) == 16
    lists = {"moe_topk": [2, 4]}  # Hunyuan's, a number for each layer
    assert number_to_keep(16, 0.25, None, lists) == 4
    with pytest.raises(CheckpointError, match="a token chooses 4 experts, so 3 are too few"):
        number_to_keep(16, None, 3, lists)
    with pytest.raises(CheckpointError, match="must be a multiple of 4"):
        number_to_keep(16, None, 6, config)
    with pytest.raises(CheckpointError, match="2 a group are too few"):
        number_to_keep(16, None, 8, config)
    with pytest.raises(CheckpointError, match="scored by its best two experts"):
        number_to_keep(16, None, 4, config | {"num_experts_per_tok": 1})


def test_scores_of_an_unmeasured_criterion_are_refused():
    scores = Scores(4, {"a": torch.tensor([3, 1])}, {"a": torch.tensor([2.0, 1.0])}, {})
    assert scores.of("frequency")["a"].tolist() == [3.0, 1.0]
    with pytest.raises(ValueError, match="lack the norms of outputs"):
        scores.of("reap")
