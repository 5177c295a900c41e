"""Merge adapters of weights that the files of a base hold joined, split, in turn or padded."""

import warnings

import pytest
import torch

from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.checkpoint.model_folder import ModelFolder
from fmoe_ext.checkpoint.safetensors_file import StoredTensor
from fmoe_ext.checkpoint.weight_names import WeightNames
from fmoe_ext.finetune.adapters import merge
from fmoe_ext.finetune.adapters.reading import read_adapter
from tests.huggingface.moe_architectures import CHANGES, skip_without, tiny_model

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
MINIMAX = "MiniMaxM3SparseForConditionalGeneration"  # its files have gate and up of shared experts apart
# {class: adapted modules}; the last two are of Transformers 5.24
CONVERTED = {
    MINIMAX: r".*shared_experts\.gate_up_proj",
    "InklingForConditionalGeneration": r".*layers\.0\.mlp\.(gate|up)_proj",
    "LaraMiniForCausalLM": r".*in_proj_(qkv|z)",
    "Inkling2ForCausalLM": "lm_head",
}


def folders(name, tmp_path, monkeypatch):
    """A base and an adapter of it -> the parameters after PEFT has merged them."""
    skip_without(name)
    monkeypatch.setitem(CHANGES, "InklingTextConfig", {"mlp_layer_types": ["dense", "sparse"]})
    monkeypatch.setitem(CHANGES, "Inkling2TextConfig", {"vocab_size": 64})
    torch.manual_seed(0)
    model = tiny_model(name)
    model.save_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=5, target_modules=CONVERTED[name]))
    with torch.no_grad():
        for key, p in adapted.named_parameters():
            if "lora_" in key:
                p.copy_(torch.randn(p.shape, dtype=p.dtype) / 10)
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    return dict(adapted.merge_and_unload().named_parameters())


@pytest.mark.parametrize("name", CONVERTED)
def test_adapter_of_a_converted_weight_merges_as_peft_does(name, tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = folders(name, tmp_path, monkeypatch)
    report = merge.merge(read_adapter(tmp_path / "adapter"), ModelFolder(tmp_path / "base"), tmp_path / "out")
    found = getattr(transformers, name).from_pretrained(tmp_path / "out", dtype="auto")
    original = getattr(transformers, name).from_pretrained(tmp_path / "base", dtype="auto")
    changed = [key for key, p in original.named_parameters() if not torch.equal(p, expected[key])]
    assert changed and report["changed"]
    for key, p in found.named_parameters():
        tolerance = 1e-12 if p.dtype == torch.float64 else 1e-6  # 5.24 keeps some routers in float32
        torch.testing.assert_close(p.double(), expected[key].double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("fault", ["adds", "rounds"])
def test_converter_that_computes_is_refused(fault, tmp_path, monkeypatch):
    """Both can be turned round; a constant shows where the adapter is zero, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folders(MINIMAX, tmp_path, monkeypatch)
    adapter = read_adapter(tmp_path / "adapter")
    in_files, in_modules = merge.as_written, merge.as_in_modules
    if fault == "adds":
        for key, factor in adapter.others.items():
            adapter.others[key] = StoredTensor.of(torch.zeros_like(factor.read()))

        def written(model, tensors):
            return {name: StoredTensor.of(t.read() + 1) for name, t in in_files(model, tensors).items()}

        def back(model, tensors):
            return {name: t - 1 for name, t in in_modules(model, tensors).items()}
    else:

        def written(model, tensors):
            return {name: StoredTensor.of(t.read().half()) for name, t in in_files(model, tensors).items()}

        back = in_modules
    monkeypatch.setattr(merge, "as_written", written)
    monkeypatch.setattr(merge, "as_in_modules", back)
    with pytest.raises(CheckpointError, match=r"which does not turn the adapter's change back"):
        merge.merge(adapter, ModelFolder(tmp_path / "base"), tmp_path / "out")


def test_converted_weight_that_is_tied_is_refused_as_a_plain_one(tmp_path, monkeypatch):
    """The refusal was about its converter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folders(MINIMAX, tmp_path, monkeypatch)
    init = WeightNames.__init__

    def tied(self, base, model, *rest):
        init(self, base, model, *rest)
        self.shared = {name: "the head" for name in model.state_dict() if "shared_experts.gate_up" in name}

    monkeypatch.setattr(WeightNames, "__init__", tied)
    with pytest.raises(CheckpointError, match=r"gate_up_proj\.weight shares its values with the head, which"):
        merge.merge(read_adapter(tmp_path / "adapter"), ModelFolder(tmp_path / "base"), tmp_path / "out")


def test_converter_that_cannot_be_undone_is_refused_by_its_name(tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folders(MINIMAX, tmp_path, monkeypatch)
    monkeypatch.setattr(merge, "as_written", lambda model, tensors: tensors)
    with pytest.raises(
        CheckpointError, match=r"up_proj.weight by Transformers' Concatenate, .* Merge in memory"
    ):
        merge.merge(read_adapter(tmp_path / "adapter"), ModelFolder(tmp_path / "base"), tmp_path / "out")
