"""Small MoE models of every architecture of the installed Transformers."""

import functools
from pathlib import Path

import torch
import transformers

from fmoe_ext.audit.shrink import shrunk_config
from fmoe_ext.doctor.structure import layers_of
from fmoe_ext.doctor.subject import from_transformers
from tests.huggingface.tiny_architectures import LARGEST, architectures, tiny_config

MORE_SIZES = {
    "zero_expert_num": 2,
    "index_n_heads": 2,
    "index_head_dim": 16,
}
ATTENTION = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "head_dim": 8}
# Values without which the defaults of an architecture hold no experts, or do not run at this size.
NEEDED = {
    "DogeForCausalLM": {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 2},
    "Gemma4ForCausalLM": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
    "HunYuanMoEV1ForCausalLM": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "DeepseekV2ForCausalLM": {**ATTENTION, "num_experts_per_tok": 2},
    "Mistral4Model": {**ATTENTION, "num_key_value_heads": 4},
    "LongcatFlashForCausalLM": {**ATTENTION, "qk_head_dim": 16},
    "BailingHybridForCausalLM": {**ATTENTION, "first_k_dense_replace": 0},
    "Glm5NextTextModel": {"mlp_layer_types": ["dense", "sparse"]},
    "InklingForCausalLM": {"mlp_layer_types": ["sparse", "sparse"]},
    "DeepseekV32ForCausalLM": {**ATTENTION, "mlp_layer_types": ["dense", "sparse"]},
    "GlmMoeDsaForCausalLM": {**ATTENTION, "mlp_layer_types": ["dense", "sparse"]},
    "KimiLinearForCausalLM": {**ATTENTION},
    "SwitchTransformersForConditionalGeneration": {"decoder_start_token_id": 0, "encoder_sparse_step": 1},
    "NllbMoeForConditionalGeneration": {"encoder_sparse_step": 1, "decoder_sparse_step": 1},
    "Lfm2MoeForCausalLM": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1},
    "GraniteMoeHybridForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def moe_architectures():
    """Names of the classes whose source speaks of experts; imports none of them, as every run of the tests asks."""
    folder = Path(transformers.__file__).parent
    for name in architectures():
        file = folder / f"{transformers._class_to_module.get(name, '').replace('.', '/')}.py"
        if file.is_file() and "expert" in file.read_text().lower():
            yield name


def smaller(config):
    """The configuration and those inside it with few, small experts."""
    config = shrunk_config(config)
    for name, size in MORE_SIZES.items():
        if isinstance(getattr(config, name, None), int) and getattr(config, name) > size:
            setattr(config, name, size)
    for name in getattr(config, "sub_configs", None) or ():
        if getattr(config, name, None) is not None:
            setattr(config, name, smaller(getattr(config, name)))
    return config


def configs(name, config_class):
    def needed(config):
        for key, value in {"use_cache": False, **NEEDED.get(name, {})}.items():
            setattr(config, key, value)
        return config

    yield lambda: needed(smaller(tiny_config(config_class)))
    yield lambda: needed(smaller(config_class()))
    yield lambda: needed(tiny_config(config_class))


def subject_of(name):
    """A doctor.Subject of an architecture, or the reason why none is built."""
    model_class, reason = getattr(transformers, name), ""
    for config in configs(name, model_class.config_class):
        try:
            with torch.device("meta"):
                small = model_class(config())
            if sum(p.numel() for p in small.parameters()) > LARGEST:
                reason = "too large"
                continue
            subject = from_transformers(functools.partial(lambda c: model_class(c()), config))
            subject.task(subject.model, subject.batch)
            if any(layer.named for layer in layers_of(subject.model)):
                return subject
            reason = "no MoE layer is found"
        except Exception as error:  # an architecture may raise anything for sizes that it does not expect
            reason = f"{type(error).__name__}: {str(error)[:100]}".replace("\n", " ")
    return reason
