"""Heads for the tokens after the next (MTP): each tensor and key of a folder that goes in comes out again."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

import fmoe_ext
from fmoe_ext.checkpoint.families import REFUSED
from fmoe_ext.compress import prune
from fmoe_ext.finetune.adapters import cli as adapters
from fmoe_ext.formats.cli import main as export_command
from fmoe_ext.formats.quantized import export_quantized

transformers = pytest.importorskip("transformers")

from transformers.modeling_layers import MtpModel  # noqa: E402

from tests.formats.format_models import make  # noqa: E402
from tests.formats.test_formats_sweep import type_of  # noqa: E402
from tests.formats.test_gguf import GLM_DSA, llama_cpp_or_skip  # noqa: E402
from tests.huggingface.huggingface_models import make_ids  # noqa: E402
from tests.huggingface.moe_architectures import tiny_model  # noqa: E402
from tests.huggingface.moe_heads import add_heads, with_heads  # noqa: E402
from tests.sweeps import rest_is_slow  # noqa: E402

QUICK = ("DeepseekV3ForCausalLM", "MiMoV2FlashForCausalLM", "Qwen3_5MoeForConditionalGeneration")
IMPORTED = [name for name in with_heads() if type_of(name) not in REFUSED]


def assert_equal_folders(one, other):
    """Every tensor and key, but for the dtype that Transformers notes for the parts of a model when it reads one."""
    before, after = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) and before[k].dtype == after[k].dtype for k in before)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (one, other)]
    for config in configs:
        for part in config.values():
            if isinstance(part, dict):
                part.pop("dtype", None)
    assert configs[0] == configs[1]


@pytest.mark.parametrize("name", rest_is_slow(IMPORTED, QUICK))
def test_heads_go_in_and_out(name, tmp_path):
    """By import of the folder, and of the model that Transformers reads from it."""
    add_heads(tiny_model(name, torch.float32), tmp_path / "in")
    model = fmoe_ext.import_model(tmp_path / "in", dtype=torch.float32)
    assert type(model).__name__ == name
    fmoe_ext.export(model, tmp_path / "out", model.config.model_type)
    assert_equal_folders(tmp_path / "in", tmp_path / "out")
    in_memory = getattr(transformers, name).from_pretrained(tmp_path / "out", dtype=torch.float32)
    fmoe_ext.import_model(in_memory).save_pretrained(tmp_path / "again")
    assert_equal_folders(tmp_path / "in", tmp_path / "again")
    in_memory.load_state_dict(load_file(tmp_path / "again/model.safetensors"), strict=False)


@pytest.mark.parametrize("name", ["Glm4MoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_transformers_drafts_with_the_heads(name, tmp_path, monkeypatch):
    """generate(use_mtp=True) of plain Transformers, of the streamed and the imported model, and of what they write."""
    # the class knows the number of layers of published models alone
    own = [r"model\.layers\.2\."]
    monkeypatch.setattr(getattr(transformers, name), "_keys_to_ignore_on_load_unexpected", own)
    add_heads(tiny_model(name, torch.float32), tmp_path / "in")

    def drafted(model):
        weights = MtpModel.from_pretrained(model).state_dict()
        plain, fast = (
            model.generate(make_ids(1, 6), max_new_tokens=8, min_new_tokens=8, do_sample=False, use_mtp=use)
            for use in (None, True)
        )
        assert plain.shape == (1, 14) and torch.equal(plain, fast)
        return {key: value for key, value in weights.items() if key.startswith("layers.")}

    def of_transformers(folder):
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    expected = drafted(of_transformers(tmp_path / "in"))
    ours = fmoe_ext.import_model(tmp_path / "in", dtype=torch.float32).eval()
    ours.save_pretrained(tmp_path / "out")
    for model in (ours, of_transformers(tmp_path / "out"), fmoe_ext.stream(tmp_path / "in")):
        found = drafted(model)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())
    tokens = torch.randint(3, 61, (200,), generator=torch.Generator().manual_seed(3))
    prune(tmp_path / "in", tmp_path / "pruned", tokens, experts=4, seq_len=20, criterion="frequency")
    assert drafted(of_transformers(tmp_path / "pruned")).keys() == expected.keys()


def test_merge_and_quantise_copy_the_heads(tmp_path):
    """An adapter of the experts, and the packing of all weights of the model, leave each byte of a head."""
    peft = pytest.importorskip("peft")
    head = add_heads(tiny_model("Glm4MoeForCausalLM", torch.float32), tmp_path / "in")
    lora = peft.LoraConfig(r=2, target_parameters=["experts.gate_up_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(fmoe_ext.stream(tmp_path / "in"), lora)
    fmoe_ext.lora.fuse(adapted).save_pretrained(tmp_path / "adapter")
    merge = ["merge", str(tmp_path / "adapter"), "--base", str(tmp_path / "in"), "--packing", "rank_major"]
    assert adapters.main([*merge, "-o", str(tmp_path / "merged")]) == 0
    export_quantized(tmp_path / "in", tmp_path / "packed", "packed", "fp8")
    for out in ("merged", "packed"):
        after = load_file(tmp_path / out / "model.safetensors")
        assert all(torch.equal(after[key], value) for key, value in head.items()), out
        config = json.loads((tmp_path / out / "config.json").read_text())
        assert config["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize("name", ["Glm4MoeForCausalLM", "GlmMoeDsaForCausalLM"])
def test_gguf_has_the_heads_of_glm(name, tmp_path):
    """Tensors and keys as llama.cpp's converter names them; llama.cpp computes the model with them in the file."""
    gguf, llama_cpp = pytest.importorskip("gguf"), llama_cpp_or_skip()
    is_dsa = name.startswith("GlmMoeDsa")  # whose indexers have widths that llama.cpp's graph takes
    made = make("glm_moe_dsa", **GLM_DSA).float() if is_dsa else tiny_model(name, torch.float32)
    head, E = add_heads(made, tmp_path / "in"), made.config.n_routed_experts
    model = fmoe_ext.import_model(tmp_path / "in", dtype=torch.float32).eval()
    with pytest.warns(UserWarning, match="no vocabulary"):
        fmoe_ext.export(model, tmp_path / "out", "gguf")
    report = export_quantized(tmp_path / "in", tmp_path / "packed", "gguf", "q8_0")
    assert not report.left_out
    tokens = make_ids(1, 8)
    with torch.no_grad():
        expected = model(input_ids=tokens).logits[0].log_softmax(-1)
    for folder in ("out", "packed"):
        file = tmp_path / folder / "model.gguf"
        reader = gguf.GGUFReader(file)
        fields = {key: field.contents() for key, field in reader.fields.items()}
        begin = fields["general.architecture"]
        assert fields[f"{begin}.nextn_predict_layers"] == 1 and fields[f"{begin}.block_count"] == 3
        found = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
        begin = "model.layers.2."
        assert torch.equal(found["blk.2.nextn.eh_proj.weight"], head[f"{begin}eh_proj.weight"])
        assert torch.equal(
            found["blk.2.nextn.shared_head_norm.weight"], head[f"{begin}shared_head.norm.weight"]
        )
        up = torch.stack([head[f"{begin}mlp.experts.{e}.up_proj.weight"] for e in range(E)])
        assert torch.equal(found["blk.2.ffn_up_exps.weight"], up)
        halves = sum(key.endswith("kv_b_proj.weight") for key in head)  # two tensors there
        assert len([name for name in found if name.startswith("blk.2.")]) == len(head) - 3 * (E - 1) + halves
        # Q8_0 rounds the weights, and llama.cpp rounds their factors to 8 bits too: .093 and .072 here
        near = {"rtol": 1e-4, "atol": 1e-4} if folder == "out" else {"rtol": 0, "atol": 0.12}
        with torch.no_grad():
            streamed = fmoe_ext.stream(file, dtype=torch.float32)(input_ids=tokens).logits[0].log_softmax(-1)
        torch.testing.assert_close(streamed, expected, **near)
        theirs = llama_cpp.logits(file, tokens[0].tolist()).log_softmax(-1).float()
        torch.testing.assert_close(theirs, streamed, **near)


def test_other_formats_name_the_heads_that_they_leave_out(tmp_path, capsys):
    head = add_heads(tiny_model("DeepseekV3ForCausalLM", torch.float32), tmp_path / "in")
    model = fmoe_ext.import_model(tmp_path / "in", dtype=torch.float32)
    named = rf"heads for the tokens after the next \({len(head)} of model.layers.2\)"
    with pytest.warns(UserWarning, match=rf"no place for {len(head)} tensors.*, {named}: they are left out"):
        fmoe_ext.formats.check_export(model, "gguf")
    assert (
        export_command([str(tmp_path / "in"), "--to", "gguf", "--type", "q8_0", "-o", str(tmp_path / "out")])
        == 0
    )
    assert re.search(rf"left out, {len(head)} tensors.*: {named}", capsys.readouterr().out)
    assert re.search(rf"\| left out \| {named} \|", (tmp_path / "out/README.md").read_text())


def test_layers_that_the_caller_leaves_out_are_no_heads(tmp_path):
    tiny_model("Qwen3MoeForCausalLM", torch.float32).save_pretrained(tmp_path / "in")
    with pytest.warns(UserWarning, match="has 2 layers, the model 1: .* left out"):
        model = fmoe_ext.import_model(tmp_path / "in", num_hidden_layers=1)
    model.save_pretrained(tmp_path / "out")
    assert not any("layers.1." in key for key in load_file(tmp_path / "out/model.safetensors"))


def test_other_tensors_that_transformers_leaves_in_the_files_stay(tmp_path):
    head = add_heads(tiny_model("DeepseekV3ForCausalLM", torch.float32), tmp_path / "in")
    assert json.loads((tmp_path / "in/config.json").read_text())["num_nextn_predict_layers"] == 1
    model = fmoe_ext.import_model(tmp_path / "in")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    for _ in range(2):  # over the files that it came from
        model.save_pretrained(tmp_path / "in")
        after = load_file(tmp_path / "in/model.safetensors")
        assert all(torch.equal(after[key], value) for key, value in head.items())
