"""A card beside each model that is written, which the hub reads; a card that is there already stays."""

import json

import pytest
import torch

import fmoe_ext
from fmoe_ext import fmoefy
from fmoe_ext.checkpoint.card import hub_name, render_card, shown
from tests.formats.format_models import MODELS, make

hub = pytest.importorskip("huggingface_hub")


def card_in(folder):
    text = (folder / "README.md").read_text()
    card = hub.ModelCard(text)
    assert str(folder.parent) not in text, "a card says nothing of the machine"
    rows = [
        line.strip("| ").split(" | ")
        for line in card.content.splitlines()
        if line.startswith("| ") and line != "| | |"
    ]
    return card.data, {row[0]: row[1] for row in rows}, text


def test_names_of_models(tmp_path):
    cached = tmp_path / "hub/models--Qwen--Qwen3-30B-A3B/snapshots/0123"
    assert hub_name(cached) == hub_name("Qwen/Qwen3-30B-A3B") == "Qwen/Qwen3-30B-A3B"
    assert hub_name(tmp_path) is hub_name(None) is None and shown(tmp_path / "mine") == "mine"
    assert (
        all(hub_name(path) is None for path in ("../base", "./base", "base/.."))
        and shown("../base") == "base"
    )


def test_value_with_a_bar_or_of_several_lines_is_one_cell():
    text = render_card("t", "w", None, {"text": "a|b\nc"}, "true")
    assert "| text | a\\|b c |\n" in text


def test_head_is_what_the_hub_reads():
    """Texts that would be something else in YAML stay texts."""
    text = render_card("yes: no", "What.", "me/a: b", {"a": None, "b": 1}, "true", tags=["1.0", 'x"y'])
    data = hub.ModelCard(text).data
    assert data.tags == ["fmoe_ext", "mixture-of-experts", "1.0", 'x"y'] and data.base_model is None
    assert "| b | 1 |" in text and "| a |" not in text
    assert hub.ModelCard(render_card("t", "w", "me/on", {}, "c")).data.base_model == "me/on"


def test_exported_and_saved(tmp_path):
    model = fmoe_ext.import_model(make("mixtral", **MODELS["mixtral"]))
    model.name_or_path = "owner/name"
    fmoe_ext.export(model, tmp_path / "out", "mixtral")
    data, rows, text = card_in(tmp_path / "out")
    assert data.base_model == "owner/name" and data.library_name == "transformers"
    assert data.pipeline_tag == "text-generation" and data.tags == ["fmoe_ext", "mixture-of-experts"]
    assert rows["experts"] == "6" and rows["format"] == "mixtral" and rows["weights"] == "float64"
    assert 'fmoe_ext.export(model, "out", "mixtral")' in text
    model.save_pretrained(tmp_path / "saved")
    assert card_in(tmp_path / "saved")[1]["architecture"] == "MixtralForCausalLM"
    (tmp_path / "saved/README.md").write_text("mine")
    model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved/README.md").read_text() == "mine"
    torch.manual_seed(0)
    fmoefy(make("llama"), 4).save_pretrained(tmp_path / "fmoefied")
    assert card_in(tmp_path / "fmoefied")[1]["architecture"] == "LlamaForCausalLM"


def test_gguf(tmp_path):
    pytest.importorskip("gguf", reason="pip install gguf")
    model = fmoe_ext.import_model(make("mixtral", **MODELS["mixtral"] | {"sliding_window": None}))
    fmoe_ext.export(model, tmp_path / "out", "gguf")
    data, rows, _ = card_in(tmp_path / "out")
    assert data.library_name == "gguf" and rows["format"] == "gguf"


def test_pruned(tmp_path):
    from fmoe_ext.compress import prune

    model = make("qwen3_moe", **MODELS["qwen3_moe"])
    model.save_pretrained(tmp_path / "model")
    tokens = torch.randint(3, 61, (400,), generator=torch.Generator().manual_seed(0))
    report = prune(tmp_path / "model", tmp_path / "out", tokens, experts=2, seq_len=16)
    data, rows, text = card_in(tmp_path / "out")
    assert "pruned" in data.tags and rows["experts of a layer"] == "6 -> 2, by reap"
    assert rows["loss on held-out text, before"] == f"{report['loss_before']:.4f}"
    assert rows["loss on held-out text, after"] == f"{report['loss_after']:.4f}"
    assert "fmoe prune model --experts 2 --criterion reap --text TEXT -o OUT" in text
    assert json.loads((tmp_path / "out/prune_report.json").read_text())["loss_after"] == report["loss_after"]
