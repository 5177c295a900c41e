"""A tiny random model of every language model of the installed Transformers whose experts others may compute."""

import functools
import inspect
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto as auto

from tests.huggingface.tiny_architectures import TINY

MAPPINGS = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
EXPERTS = (
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts",
    "moe_num_routed_experts",
)  # fmt: skip
CHOICES = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "num_experts_per_token", "moe_top_k")
SIZES = {
    **TINY,
    **dict.fromkeys(EXPERTS, 6),
    **dict.fromkeys(CHOICES, 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("expert_ffn_hidden_size", "ffn_hidden_size"), 24),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(
        ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "swa_head_dim", "swa_v_head_dim"), 8
    ),
    **dict.fromkeys(("index_head_dim", "index_n_heads", "global_head_dim", "qk_head_dim"), 8),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("num_expert_group", "num_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("num_mtp_layers", "num_nextn_predict_layers", "num_kv_shared_layers"), 0),
    **{"enable_moe_block": True, "num_global_key_value_heads": 2, "swa_num_attention_heads": 4},
    **{"swa_num_key_value_heads": 2, "vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 0},
    **{"moe_layer_start_index": 1, "moe_layer_end_index": 1, "moe_latent_size": 16, "depth": 1},
    **{"projector_hidden_size": 32, "out_hidden_size": 32, "unpadded_vocab_size": 61},
    **{"attn_layer_period": 2, "attn_layer_offset": 1, "moe_hidden_size": 16, "linear_conv_kernel_dim": 4},
}
KINDS_OF_LAYERS = ("layer_types", "mlp_layer_types", "layers_block_type")
# Of classes whose defaults do not shrink alone.
CHANGES = {
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "NemotronHConfig": {"layers_block_type": ["full_attention", "moe"]},
    "GraniteMoeHybridConfig": {"mamba_n_heads": 8, "mamba_d_head": 8, "layer_types": ["mamba", "attention"]},
    "ZayaConfig": {"num_experts_per_tok": 1},
    "Ernie4_5_VLMoeTextConfig": {
        **{"moe_intermediate_size": [24, 24], "head_dim": 8},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    },
    "Glm4vMoeTextConfig": {
        **{"head_dim": 16, "partial_rotary_factor": 0.5},
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
            "partial_rotary_factor": 0.5,
        },
    },
    "Mistral4Config": {
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1},
            "original_max_position_embeddings": 8,
        }
    },
    "MuseSparkVisionConfig": {"num_hidden_layers": 4, "layer_types": None},
    "MuseSparkAudioConfig": {"num_hidden_layers": 4, "hidden_sizes": (8, 8, 16, 16), "out_hidden_size": 32},
    "Glm5NextVisionConfig": {"num_heads": 4, "projection_intermediate_size": 40, "out_hidden_size": 32},
    "Glm5NextTextConfig": {
        **{"num_key_value_heads": 4, "qk_rope_head_dim": 0, "head_dim": 0, "index_kpool": 4},
        **{"num_hidden_layers": 4, "layer_types": None, "mlp_layer_types": None, "indexer_types": None},
        **{"linear_head_dim": 8, "linear_num_heads": 4, "hc_mult": 2, "index_topk": 8},
    },
    "FlintConfig": {"mlp_only_layers": [0]},
    "HYV4VLTextConfig": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    },
    "Inkling2VisionConfig": {"text_hidden_size": 32},
    "Inkling2LoopVisionConfig": {"text_hidden_size": 32},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"], "num_key_value_heads": 4},
    "Qwen4ExpTextConfig": {
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8},
        **{"indexer_compress_ratio": 2, "hc_count": 2, "hc_lowrank": 8},
    },
}
LARGEST = 20_000_000  # parameters


@functools.cache
def architectures():
    """Names of the classes that AutoModelForCausalLM and AutoModelForImageTextToText make in models with experts."""
    folder = Path(inspect.getfile(transformers)).parent / "models"
    with_experts = {
        path.parent.name
        for path in folder.glob("*/modeling_*.py")
        if "use_experts_implementation" in path.read_text()
    }
    found = set()
    for mapping in MAPPINGS:
        for name in mapping.values():
            for one in (name,) if isinstance(name, str) else name:
                module = getattr(getattr(transformers, one, None), "__module__", "")
                if module.split(".")[2:3] and module.split(".")[2] in with_experts:
                    found.add(one)
    return sorted(found)


def tiny_config(config_class, changes=()):
    default = config_class()
    known = default.to_dict()
    values = {name: value for name, value in SIZES.items() if name in known}
    if "kv_lora_rank" in known and "num_key_value_heads" in known:
        values["num_key_value_heads"] = 4
    for name in KINDS_OF_LAYERS:
        if known.get(name):
            kinds = list(dict.fromkeys(known[name]))
            values[name] = [kinds[0], kinds[-1]]
    for name, value in dict(changes).items():
        values[name] = value
    for name in getattr(default, "sub_configs", None) or ():
        if getattr(default, name, None) is not None and name not in dict(changes):
            values[name] = tiny_config(
                type(getattr(default, name)), CHANGES.get(type(getattr(default, name)).__name__, ())
            ).to_dict()
    return config_class(**values)


def tiny_model(name, dtype=torch.float64):
    """A random model of an architecture; raises what its class raises for sizes that it does not expect."""
    model_class = getattr(transformers, name)
    config = tiny_config(model_class.config_class, CHANGES.get(model_class.config_class.__name__, ()))
    config._experts_implementation = "eager"
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters are too many")
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = model_class(config).to(dtype)
        for p in model.parameters():
            if p.is_floating_point():
                p.add_(0.05 * torch.randn(p.shape, dtype=p.dtype))
    return model.eval()


def skip_without(name):
    if not hasattr(transformers, name):
        pytest.skip(f"Transformers {transformers.__version__} has no {name}")


def said_in_docs(section):
    """{class or architecture: its row} of the table in a section of docs/formats.md."""
    page = Path(__file__).parents[2].joinpath("docs/formats.md").read_text()
    lines = page.partition(f"## {section}\n")[2].partition("\n## ")[0].splitlines()
    rows = [
        line.strip("| ").split(" | ")
        for line in lines
        if line.startswith(("| equal |", "| refused: ", "| not "))
    ]
    return {name: text for text, names in rows for name in names.split(", ")}


def outcomes(outcome, folder):
    """{architecture: outcome(name, a new folder)} of all, printed as they come; the folders go."""
    found = {}
    for name in architectures():
        (folder / name).mkdir()
        found[name] = outcome(name, folder / name)
        shutil.rmtree(folder / name, ignore_errors=True)
        print(name, found[name], flush=True)
    return found
