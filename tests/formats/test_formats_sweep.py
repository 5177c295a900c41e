"""Import and export of every family that models of Transformers' table have, and what is said of the others."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file

import fmoe_ext
from fmoe_ext import FMoETransformerMLP
from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.checkpoint.families import FAMILIES
from tests.formats.format_models import MODELS
from tests.huggingface.huggingface_models import make_ids

transformers = pytest.importorskip("transformers")

from tests.huggingface.moe_architectures import tiny_model  # noqa: E402

CLASSES = {
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "exaone_moe": "ExaoneMoeForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "granitemoe_swa": "GraniteMoeSWAForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "hy_v4": "HYV4ForCausalLM",
    "mellum": "MellumForCausalLM",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "minimax": "MiniMaxForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen4_exp_text": "Qwen4ExpForCausalLM",
    "solar_open": "SolarOpenForCausalLM",
}


def logits(model):
    with torch.no_grad():
        return model(input_ids=make_ids())[0]


def there_and_back(name, folder):
    """A folder of Transformers -> our layers -> a folder, with the same logits, tensors and configuration."""
    model = tiny_model(name)
    expected = logits(model)
    model.save_pretrained(folder / "theirs")
    ours = fmoe_ext.import_model(copy.deepcopy(model))
    count = sum(hasattr(m, "is_transposed") for m in model.modules())
    assert sum(isinstance(m, FMoETransformerMLP) for m in ours.modules()) == count > 0
    assert (logits(ours) - expected).abs().max() <= 1e-6 * expected.abs().max()
    ours.save_pretrained(folder / "ours")
    before, after = (load_file(folder / part / "model.safetensors") for part in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) and before[k].dtype == after[k].dtype for k in before)
    configs = [json.loads((folder / part / "config.json").read_text()) for part in ("theirs", "ours")]
    assert configs[0] == configs[1]


def test_every_family_is_tried():
    assert CLASSES.keys() == FAMILIES.keys() - {name.split(",")[0] for name in MODELS}


@pytest.mark.parametrize("name", CLASSES.values())
def test_family_there_and_back(name, tmp_path):
    if not hasattr(transformers, name):
        pytest.skip(f"Transformers {transformers.__version__} has no {name}")
    there_and_back(name, tmp_path)


def test_model_of_no_family_is_refused_with_the_way_out():
    model = tiny_model("AriaTextForCausalLM")
    with pytest.raises(CheckpointError, match=r"aria_text.*huggingface\.use\(model\).*save_pretrained"):
        fmoe_ext.import_model(model)
    assert logits(fmoe_ext.huggingface.use(model)).isfinite().all()
