"""Every option of PEFT's LoraConfig on streamed experts: the values of PEFT's own forward, or a refusal by name."""

import pytest
import torch

import fmoe_ext
from tests.finetune.streamed_models import EXPERTS, resident, save, streamed, with_adapters
from tests.huggingface.huggingface_models import make_ids, step

peft = pytest.importorskip("peft")

HONOURED = {
    "rslora": {"use_rslora": True},
    "ranks": {"rank_pattern": {"gate_up_proj": 3}, "alpha_pattern": {"experts.down_proj": 7}},
    "gaussian": {"init_lora_weights": "gaussian"},
    "default": {"init_lora_weights": True},
    "saved head and gate": {"modules_to_save": ["lm_head", "gate"]},
    "bias": {"bias": "all"},
    "tokens": {"trainable_token_indices": [1, 2]},
    "modules": {"target_modules": "all-linear", "exclude_modules": ["q_proj"]},
    "module that is excluded elsewhere": {
        "target_modules": ["q_proj"],
        "exclude_modules": r".*\.0\.self_attn.*",
    },
    "repeated layers": {"layer_replication": [[0, 2], [1, 2]]},
    "one layer": {"target_parameters": ["layers.1.mlp.experts.down_proj"], "layers_to_transform": 1},
    "router": {"target_parameters": [*EXPERTS, "mlp.gate.weight"]},
    "one weight": {"target_parameters": ["down_proj"]},
}
# {option: (values, error)}; the AttributeErrors are PEFT's own
REFUSED = {
    "use_dora": (True, "use_dora=True"),
    "lora_bias": (True, "lora_bias=True"),
    "lora_dropout": (0.1, "lora_dropout != 0"),
    "fan_in_fan_out": (True, "fan_in_fan_out"),
    "alora_invocation_tokens": ([1], "alora_invocation_tokens"),
    "modules_to_save": (["mlp"], "requires_grad_: the weights of these experts stay in the files"),
    "target_modules": (["experts"], r"Experts(.|\n)* is not supported"),
    "layers_to_transform": (
        [1],
        r"leaves layers_to_transform out .* adapts model\.layers\.0\.mlp\.experts without",
    ),
    "exclude_modules": (["1.mlp.experts"], r"leaves exclude_modules out .* model\.layers\.1\.mlp\.experts"),
    "use_qalora": (True, "leaves use_qalora out"),
}
NOT_STARTED_FROM_WEIGHTS = ["pissa", "olora", "orthogonal", "corda"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: save(tmp_path_factory.mktemp(name), name, torch.float64, num_hidden_layers=2)
        for name in ("Qwen3MoeForCausalLM", "GptOssForCausalLM")
    }


@pytest.mark.parametrize("name", HONOURED)
def test_option_equals_peft(folders, name):
    folder = folders["GptOssForCausalLM" if name == "bias" else "Qwen3MoeForCausalLM"]
    plain = resident(folder)
    plain.set_experts_implementation("eager")
    expected = step(with_adapters(plain, fuse=False, **HONOURED[name]), make_ids())
    found = step(with_adapters(streamed(folder, 2, 10**6), **HONOURED[name]), make_ids())
    torch.testing.assert_close(found[0], expected[0], rtol=1e-10, atol=1e-12)
    assert found[2].keys() == expected[2].keys() and len(found[2]) >= 2
    for parameter, gradient in expected[2].items():
        torch.testing.assert_close(found[2][parameter], gradient, rtol=1e-9, atol=1e-11, msg=parameter)


def test_patterns_are_applied(folders):
    """PEFT 0.21 warns that they match no module, and applies them."""
    model = with_adapters(streamed(folders["Qwen3MoeForCausalLM"], 2, 10**6), **HONOURED["ranks"])
    found = {
        w.parameter_name: (w.r["default"], w.scaling["default"])
        for w in model.modules()
        if "lora_A" in dir(w)
    }
    assert found == {"gate_up_proj": (3, 8 / 3), "down_proj": (2, 3.5)}


@pytest.mark.parametrize("option", REFUSED)
def test_option_is_refused_by_name(folders, option):
    value, message = REFUSED[option]
    with pytest.raises((ValueError, RuntimeError), match=message):
        with_adapters(streamed(folders["Qwen3MoeForCausalLM"], 2, 10**6), **{option: value})


@pytest.mark.parametrize("name", NOT_STARTED_FROM_WEIGHTS)
def test_starts_from_base_weights_are_refused_by_peft(folders, name):
    with pytest.raises(AttributeError, match="Experts' object has no attribute 'weight'"):
        with_adapters(streamed(folders["Qwen3MoeForCausalLM"], 2, 10**6), init_lora_weights=name)


def test_eva_is_refused_where_it_would_train(folders, tmp_path):
    folder = folders["Qwen3MoeForCausalLM"]
    with pytest.raises(ValueError, match='init_lora_weights="eva"'):
        with_adapters(streamed(folder, 2, 10**6), init_lora_weights="eva", eva_config=peft.EvaConfig())
    trained = with_adapters(resident(folder), fuse=False, init_lora_weights="eva", use_qalora=True)
    trained.save_pretrained(tmp_path)
    loaded = fmoe_ext.lora.fuse(peft.PeftModel.from_pretrained(streamed(folder, 2, 10**6), tmp_path))
    with torch.no_grad():
        expected = trained(make_ids()).logits
        torch.testing.assert_close(loaded(make_ids()).logits, expected, rtol=1e-10, atol=1e-12)
