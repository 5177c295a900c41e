"""Folders of models with images or sound: the text part trains and comes out again, every other byte as it was."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

import fmoe_ext
from fmoe_ext import FMoETransformerMLP, doctor, info
from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.checkpoint.families import REFUSED
from fmoe_ext.doctor import subject

transformers = pytest.importorskip("transformers")

from tests.formats.test_formats_sweep import UNTRIED, logits, type_of  # noqa: E402
from tests.huggingface.huggingface_models import make_ids  # noqa: E402
from tests.huggingface.moe_architectures import architectures, tiny_model  # noqa: E402
from tests.sweeps import rest_is_slow  # noqa: E402

WITH_IMAGES = [name for name in architectures() if "ForCausalLM" not in name and name not in UNTRIED]
QUICK = (
    "Qwen3VLMoeForConditionalGeneration",  # no class for its language model alone; stacks
    "Qwen3_5MoeForConditionalGeneration",  # AutoModelForCausalLM has its language model alone
    "Ernie4_5_VLMoeForConditionalGeneration",  # refused by import
    "Qwen3OmniMoeThinkerForConditionalGeneration",  # sound too
)


@pytest.fixture
def folder(request, tmp_path):
    """The folder of a small model, read once by Transformers, which notes dtypes in config.json."""
    name = request.param
    tiny_model(name, dtype_of(name)).save_pretrained(tmp_path / "in")
    model = of_transformers(getattr(transformers, name), tmp_path / "in")
    model.save_pretrained(tmp_path / "in")
    return tmp_path / "in", model


def dtype_of(name):
    return (
        torch.float32 if name.startswith("Inkling2") else torch.float64
    )  # whose router casts tokens to float32


def of_transformers(model_class, folder):
    # eager: torch's grouped_mm has no float64
    options = {"dtype": dtype_of(model_class.__name__), "experts_implementation": "eager"}
    return model_class.from_pretrained(folder, **options).eval()


def assert_only_experts_differ(one, other):
    before, after = (load_file(path / "model.safetensors") for path in (one, other))
    assert before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert all(before[key].dtype == after[key].dtype for key in before)
    configs = [json.loads((path / "config.json").read_text()) for path in (one, other)]
    assert configs[0] == configs[1]
    return changed


@pytest.mark.parametrize("folder", rest_is_slow(WITH_IMAGES, QUICK), indirect=True)
def test_text_part_trains_and_the_rest_stays(folder):
    path, theirs = folder
    if (kind := type_of(type(theirs).__name__)) in REFUSED:
        with pytest.raises(CheckpointError, match=re.escape(REFUSED[kind])):
            fmoe_ext.import_model(path)
        return
    dtype = dtype_of(type(theirs).__name__)
    near = 1e-10 if dtype == torch.float64 else 1e-5
    ours = fmoe_ext.import_model(path, dtype=dtype).eval()
    assert type(ours) is type(theirs)
    expected = logits(theirs)
    assert (logits(ours) - expected).abs().max() <= near * expected.abs().max()
    fmoe_ext.export(ours, path.parent / "same", ours.config.model_type)
    assert not assert_only_experts_differ(path, path.parent / "same")

    experts = [m.experts for m in ours.modules() if isinstance(m, FMoETransformerMLP)]
    ours.requires_grad_(False)
    parameters = [p.requires_grad_() for module in experts for p in module.parameters()]
    ours.train()(input_ids=make_ids())[0].square().mean().backward()
    torch.optim.SGD(parameters, lr=1.0).step()
    fmoe_ext.export(ours, path.parent / "trained", ours.config.model_type)
    changed = assert_only_experts_differ(path, path.parent / "trained")
    assert changed and all("experts" in key and "shared" not in key for key in changed)
    again = of_transformers(type(theirs), path.parent / "trained")
    trained = logits(ours.eval())
    assert (logits(again) - trained).abs().max() <= near * trained.abs().max()


# The doctor gives tokens alone, which a model of block diffusion does not take, and computes attention in "eager",
# where Transformers does not repeat the keys of Unlimited-OCR's fewer heads.
NOT_EXAMINED = ("DiffusionGemmaForBlockDiffusion", "UnlimitedOcrForConditionalGeneration")
EXAMINED = [name for name in WITH_IMAGES if name not in NOT_EXAMINED]


@pytest.mark.parametrize("folder", rest_is_slow(EXAMINED, QUICK), indirect=True)
def test_doctor_and_info_read_the_folder(folder):
    path, theirs = folder
    found = info.of_model(path, "1GiB", tflops=1.0)
    assert found["experts"] == 6 and found["bytes_of_experts"] > 0
    made = subject.read(str(path))
    assert isinstance(made, doctor.Subject)
    value = made.loss(made.model, made.batch)
    value.backward()
    assert value.isfinite() and any("experts" in key for key, _ in made.model.named_parameters())
    text = theirs.config.get_text_config()
    assert type(made.model.config.get_text_config()) is type(text)
