"""Import and export of every family that models of Transformers' table have, and what is said of the others."""

import copy
import json
import re
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file

import fmoe_ext
from fmoe_ext import FMoETransformerMLP
from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.checkpoint.families import FAMILIES, REFUSED
from tests.formats.format_models import without_float32
from tests.formats.test_formats import resumed
from tests.huggingface.huggingface_models import make_ids

transformers = pytest.importorskip("transformers")

from tests.huggingface import moe_architectures  # noqa: E402
from tests.huggingface.moe_architectures import architectures, said_in_docs, skip_without, tiny_model  # noqa: E402

# What the defaults of Transformers leave out, or our layers do not compute
CHANGES = {
    "Cohere2MoeConfig": {"num_shared_experts": 1},  # chosen and shared experts are averaged
}
LIMITS = ("DeepseekV4Config", "Glm5NextTextConfig", "HYV4Config", "MiniMaxM3VLTextConfig")
SWIGLU_LIMIT = 0.02  # which the activations of these small models reach
# One for each kind of layer and of refusal; the others are slow
FAST = (
    "AriaTextForCausalLM", "Cohere2MoeForCausalLM", "DeepseekV4ForCausalLM", "Gemma4ForCausalLM",
    "Glm5NextForConditionalGeneration", "GlmMoeDsaForCausalLM", "HYV4ForCausalLM", "JambaForCausalLM",
    "KimiLinearForCausalLM", "LagunaForCausalLM", "MiniMaxM3SparseForConditionalGeneration",
    "Mistral4ForCausalLM", "NemotronHForCausalLM", "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration", "ZayaForCausalLM",
)  # fmt: skip
# Classes of later versions that have no such small model
_SIZES = "its class refuses the sizes of small models"
UNTRIED = {
    "Dots3NoteForCausalLM": _SIZES,
    "Dots3NoteForConditionalGeneration": _SIZES,
}


def model_of(name):
    with pytest.MonkeyPatch.context() as patch:
        limits = {
            name: {"swiglu_limit": SWIGLU_LIMIT, **moe_architectures.CHANGES.get(name, {})} for name in LIMITS
        }
        patch.setattr(moe_architectures, "CHANGES", {**moe_architectures.CHANGES, **limits, **CHANGES})
        model = tiny_model(name)
    generator = torch.Generator().manual_seed(0)
    for key, value in model.state_dict().items():
        if key.endswith("tid2eid"):  # of zeros in a new model
            value.copy_(torch.rand(value.shape[0], 6, generator=generator).argsort(1)[:, : value.shape[1]])
    return model


def type_of(name):
    """The type of the language model in a class."""
    return getattr(transformers, name).config_class().get_text_config().model_type


def logits(model):
    is_double = next(model.parameters()).dtype == torch.float64
    with torch.no_grad(), torch.random.fork_rng(), without_float32() if is_double else nullcontext():
        torch.manual_seed(0)  # DiffusionGemma begins with tokens at random
        return model(input_ids=make_ids())[0]


def there_and_back(name, folder):
    """A folder of Transformers -> our layers -> a folder, with the same logits, tensors and configuration."""
    model = model_of(name)
    expected = logits(model)
    model.save_pretrained(folder / "theirs")
    ours = fmoe_ext.import_model(copy.deepcopy(model))
    count = sum(hasattr(m, "is_transposed") for m in model.modules())
    assert sum(isinstance(m, FMoETransformerMLP) for m in ours.modules()) == count > 0
    assert (logits(ours) - expected).abs().max() <= 1e-12 * expected.abs().max()
    ours.save_pretrained(folder / "ours")
    assert_equal_folders(folder / "theirs", folder / "ours")
    assert_taken_back(ours, folder / "ours")


def assert_taken_back(model, folder):
    """load_state_dict() of the tensors in a folder, as a Trainer resumes: the weights are those of the model."""
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()
    left = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    tied = set(model.all_tied_weights_keys)
    own = {key for key in expected if key.endswith(("gate.pending_load", "gate.expert_bias"))}
    assert set(left.missing_keys) <= tied | own and not left.unexpected_keys, left
    got = model.state_dict()
    assert all(torch.equal(expected[key], got[key]) for key in expected)


def assert_equal_folders(theirs, ours):
    before, after = (load_file(folder / "model.safetensors") for folder in (theirs, ours))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) and before[k].dtype == after[k].dtype for k in before)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (theirs, ours)]
    assert configs[0] == configs[1]


def refused_with_the_way_out(name, folder):
    """import_model() names the part that our layers lack; use() computes the experts, and Transformers writes them."""
    model = model_of(name)
    with pytest.raises(CheckpointError, match=rf"{re.escape(REFUSED[type_of(name)])}.*use\(model\)"):
        fmoe_ext.import_model(model)
    expected = logits(model)
    model.save_pretrained(folder / "theirs")
    used = fmoe_ext.huggingface.use(model)
    assert (logits(used) - expected).abs().max() <= 1e-12 * expected.abs().max()
    used.save_pretrained(folder / "ours")
    assert_equal_folders(folder / "theirs", folder / "ours")


def test_every_architecture_is_imported_or_refused_by_name():
    unknown = {name: type_of(name) for name in architectures()}
    assert not {name: kind for name, kind in unknown.items() if kind not in (*FAMILIES, *REFUSED)}
    assert not FAMILIES.keys() & REFUSED.keys()


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in architectures()]
)
def test_architecture_there_and_back(name, tmp_path):
    if name in UNTRIED:
        pytest.skip(UNTRIED[name])
    if type_of(name) in REFUSED:
        refused_with_the_way_out(name, tmp_path)
    else:
        there_and_back(name, tmp_path)


def table():
    """The rows of docs/formats.md on the classes of this Transformers."""
    kinds = {name: type_of(name) for name in architectures()}
    equal = ", ".join(name for name, kind in kinds.items() if kind in FAMILIES)
    rows = [f"| equal | {equal} |"]
    for reason in dict.fromkeys(REFUSED[kind] for kind in kinds.values() if kind in REFUSED):
        names = ", ".join(name for name, kind in kinds.items() if REFUSED.get(kind) == reason)
        rows.append(f"| refused: {reason} | {names} |")
    return "\n".join(rows)


def test_table_of_architectures_is_in_the_docs():
    said = said_in_docs("Imported architectures")
    reasons = {kind: f"refused: {reason}" for kind, reason in REFUSED.items()}
    found = {name: reasons.get(type_of(name), "equal") for name in architectures()}
    assert not {n: text for n, text in found.items() if said.get(n) != text}, f"paste:\n{table()}"


def test_experts_that_compute_nothing_are_refused_by_name():
    config = transformers.LongcatFlashConfig(num_hidden_layers=1, num_layers=1, n_routed_experts=4)
    with torch.device("meta"):
        model = transformers.LongcatFlashForCausalLM(config)
    with pytest.raises(CheckpointError, match=r"compute nothing.*Transformers alone"):
        fmoe_ext.import_model(model)


@pytest.mark.parametrize(
    "name",
    [
        "Lfm2MoeForCausalLM",
        pytest.param("AXK1ForCausalLM", marks=pytest.mark.slow),
        pytest.param("NemotronHForCausalLM", marks=pytest.mark.slow),
        pytest.param("KimiLinearForCausalLM", marks=pytest.mark.slow),
        pytest.param("Gemma4ForCausalLM", marks=pytest.mark.slow),
    ],
)
def test_trainer_resumes_an_imported_model(name, tmp_path):
    """Stopped after two steps and resumed by another process's model: the weights of four steps, bitwise."""
    pytest.importorskip("accelerate")
    got = resumed(lambda: fmoe_ext.import_model(model_of(name)), tmp_path).state_dict()
    before = fmoe_ext.import_model(model_of(name)).state_dict()
    assert any(not torch.equal(before[k], got[k]) for k in got)


@pytest.mark.parametrize(
    ("name", "missing", "says"),
    [
        ("KimiLinearForCausalLM", "self_attn.k_conv1d.weight", "size mismatch for .*self_attn.conv1d.weight"),
        (
            "Inkling2LoopForCausalLM",
            "middle_cycle_cross_pass_kv_queries",
            "message_input.query is not made of .*cross_pass_queries by Inkling2LoopMergeMessageQueries",
        ),
    ],
)
def test_tensor_of_which_a_part_is_missing_is_one_clear_error(name, missing, says, tmp_path):
    skip_without(name)
    model = fmoe_ext.import_model(model_of(name))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    left = {key: value for key, value in tensors.items() if not key.endswith(missing)}
    assert len(left) < len(tensors)
    with pytest.raises((RuntimeError, CheckpointError), match=says):
        model.load_state_dict(left, strict=False)


@pytest.mark.parametrize(
    ("name", "config", "changes", "says"),
    [
        ("LagunaForCausalLM", "LagunaConfig", {"moe_router_logit_softcapping": 3.0}, "softcapping=3.0"),
        ("Lfm2MoeForCausalLM", "Lfm2MoeConfig", {"use_expert_bias": False}, "use_expert_bias=False"),
        ("AXK2ForCausalLM", "AXK2Config", {"n_group": 2, "topk_group": 1}, "n_group=2.*score 0"),
        ("DeepseekV4ForCausalLM", "DeepseekV4Config", {"scoring_func": "sigmoid"}, "scoring_func=sigmoid"),
    ],
)
def test_option_that_our_layers_lack_is_refused_by_name(name, config, changes, says, monkeypatch):
    known = moe_architectures.CHANGES.get(config, {})
    monkeypatch.setitem(CHANGES, config, {**known, **changes})
    with pytest.raises(CheckpointError, match=says):
        fmoe_ext.import_model(model_of(name))


def test_shared_experts_may_be_added_instead_of_averaged(tmp_path, monkeypatch):
    averaged = logits(model_of("Cohere2MoeForCausalLM"))
    values = {**CHANGES["Cohere2MoeConfig"], "shared_expert_combination_strategy": "sum"}
    monkeypatch.setitem(CHANGES, "Cohere2MoeConfig", values)
    assert (logits(model_of("Cohere2MoeForCausalLM")) - averaged).abs().max() > 1e-3 * averaged.abs().max()
    there_and_back("Cohere2MoeForCausalLM", tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "DeepseekV4ForCausalLM",
        "AXK1ForCausalLM",
        "NemotronHForCausalLM",
        "MiniMaxM3VLForCausalLM",
        "Gemma4ForCausalLM",
    ],
)
def test_gradients_of_an_imported_model(name):
    """Gradients of the experts and of all other parameters are those of Transformers."""
    theirs = model_of(name)
    ours = fmoe_ext.import_model(copy.deepcopy(theirs))
    for model in (theirs, ours):
        model(input_ids=make_ids())[0].double().square().mean().backward()
    expected = dict(theirs.named_parameters())
    for key, parameter in ours.named_parameters():
        if key in expected and expected[key].grad is not None:
            grad = expected[key].grad
            assert (parameter.grad - grad).abs().max() <= 1e-5 * grad.abs().max() + 1e-12, key
    for key, layer in ours.named_modules():
        if isinstance(layer, FMoETransformerMLP):
            block = theirs.get_submodule(key.removesuffix(".experts"))
            pairs = [(layer.experts.h4toh.weight, block.experts.down_proj)]
            if key.endswith(".experts"):  # of Gemma 4, beside the router
                pairs += [
                    (layer.gate.gate.weight, block.router.proj.weight),
                    (layer.gate.input_scale, block.router.scale),
                    (layer.gate.expert_scale, block.router.per_expert_scale),
                ]
            for ours, grad in ((ours.grad, theirs.grad) for ours, theirs in pairs):
                assert grad.any()
                assert (ours - grad).abs().max() <= 1e-5 * grad.abs().max(), key


def test_conversion_of_files_that_halve_the_output_is_refused(tmp_path):
    """A checkpoint of tensors cannot say it; a layer that is built by hand would compute twice as much."""
    from fmoe_ext.checkpoint.convert import read

    model_of("Cohere2MoeForCausalLM").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"multiplies the output of each MoE layer by 0\.5"):
        read(tmp_path)
