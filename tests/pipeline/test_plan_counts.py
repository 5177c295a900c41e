"""The planner's parameters of each layer are those of the Transformers model, for every MoE architecture."""

import pytest

pytest.importorskip("transformers")

import torch
import transformers

from fmoe_ext.planning.cli import main
from fmoe_ext.planning.sizes import sizes_of
from tests.huggingface.moe_architectures import CHANGES, architectures, tiny_config

FAST = ("Gemma4ForCausalLM", "DeepseekV3ForCausalLM", "Qwen3VLMoeForConditionalGeneration")
SIZES_REFUSED = ("Dots3NoteForCausalLM", "Dots3NoteForConditionalGeneration")  # by the class, small ones
GEMMA = {
    **{"num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 24, "num_global_key_value_heads": 1},
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


def config_of(name, **changes):
    config_class = getattr(transformers, name).config_class
    return tiny_config(config_class, {**CHANGES.get(config_class.__name__, {}), **changes})


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in architectures()]
)
def test_parameters_of_each_layer(name, tmp_path):
    if name in SIZES_REFUSED:
        pytest.skip("its class refuses the sizes of small models")
    config = config_of(name)
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    found, _ = sizes_of(str(tmp_path))
    plans = found.layers(length=8, element=1)
    numels = {key: p.numel() for key, p in model.named_parameters()}
    assert sum(p.dense_bytes + p.expert_bytes for p in plans) == sum(numels.values())
    experts = {key: size for key, size in numels.items() if ".experts." in key}
    assert sum(p.expert_bytes for p in plans) == sum(experts.values()) > 0
    stack = next(iter(experts)).partition("layers.")[0]
    for i, plan in enumerate(plans[1:-1]):
        own = [size for key, size in numels.items() if key.startswith(f"{stack}layers.{i}.")]
        assert plan.dense_bytes + plan.expert_bytes == sum(own)


def test_layers_with_heads_of_their_own(tmp_path, capsys):
    """Full attention of Gemma 4 has wider heads, and values that are its keys."""
    config_of("Gemma4ForCausalLM", **GEMMA).save_pretrained(tmp_path)
    found, _ = sizes_of(str(tmp_path))
    assert [block.q for block in found.blocks] == [64, 96, 64, 96]
    dense = [block.dense for block in found.blocks]
    assert dense[0] == dense[2] != dense[1] == dense[3]
    main(["plan", "--model", str(tmp_path), "--ranks", "2", "--json"])
    out = capsys.readouterr()
    assert '"layouts"' in out.out and not out.err


@pytest.mark.parametrize(
    ("kind", "changes", "width"),
    [
        ("llama", {"intermediate_size": 88}, 2 * 88),
        ("phi3", {"intermediate_size": 88, "pad_token_id": 0}, 2 * 88),
        (
            "qwen2_moe",
            {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 40},
            2 * (2 * 24 + 40),
        ),
    ],
)
def test_gate_and_up_of_a_token(tmp_path, kind, changes, width):
    """The backward needs the gate and up projections of dense and shared MLPs as well."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    transformers.AutoConfig.for_model(kind, vocab_size=64, **sizes, **changes).save_pretrained(tmp_path)
    found, _ = sizes_of(str(tmp_path))
    assert [block.hidden for block in found.blocks] == [width]
