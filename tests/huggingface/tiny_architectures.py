"""A tiny random model of every architecture of the installed Transformers that builds from a changed default config."""

import torch
import transformers
from transformers.models.auto import modeling_auto as auto

WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size", "attn_dim")
HIDDEN = (
    "intermediate_size",
    "d_ff",
    "ffn_dim",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "n_inner",
    "hidden_dim",
)
LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
    "num_decoder_layers", "num_encoder_layers", "num_encoder_blocks", "depth", "num_blocks", "l_layers",
    "x_layers", "r_layers", "layers", "num_spatial_layers", "num_temporal_layers", "speech_encoder_layers",
    "conf_num_hidden_layers", "resampler_depth", "decoder_num_hidden_layers", "encoder_num_hidden_layers",
    "pred_num_hidden_layers", "memory_attention_num_layers", "t2u_encoder_layers", "t2u_decoder_layers",
)  # fmt: skip
HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
    "decoder_attention_heads", "mamba_n_heads", "linear_num_value_heads",
)  # fmt: skip
LENGTHS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx",
    "max_source_positions", "max_target_positions",
)  # fmt: skip
TINY = {
    **dict.fromkeys(WIDTHS, 32),
    **dict.fromkeys(HIDDEN, 40),
    **dict.fromkeys(LAYERS, 2),
    **dict.fromkeys(HEADS, 4),
    **dict.fromkeys(LENGTHS, 64),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_dim", "linear_key_head_dim", "sliding_window"), 8),
    **dict.fromkeys(("linear_value_head_dim", "mamba_d_state", "mamba_d_head", "mamba_chunk_size"), 8),
    **dict.fromkeys(("state_size", "hidden_size_per_layer_input", "patch_size"), 8),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 61),
    **dict.fromkeys(("image_size", "num_mel_bins", "projection_dim"), 16),
    **{"num_key_value_heads": 2, "linear_num_key_heads": 2, "type_vocab_size": 2, "num_channels": 3},
    **{"mamba_d_ssm": 32, "mamba_n_groups": 1, "max_window_layers": 1, "decoder_start_token_id": 1},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": 2},
}
KINDS_OF_LAYERS = ("layer_types", "mlp_layer_types", "layers_block_type")
HEADS_OF_MODELS = (
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
    auto.MODEL_MAPPING_NAMES,
)
LARGEST = 20_000_000  # parameters


def architectures():
    """The first class of each model type, and those that translate."""
    found = {}
    for mapping in HEADS_OF_MODELS:
        for model_type, name in mapping.items():
            found.setdefault(model_type, name if isinstance(name, str) else name[0])
    return sorted({*found.values(), *auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values()})


def tiny_config(config_class):
    default = config_class()
    known = default.to_dict()
    values = {name: value for name, value in TINY.items() if name in known}
    for name in KINDS_OF_LAYERS:
        if known.get(name):
            kinds = known[name]
            values[name] = [kinds[0], next((kind for kind in kinds if kind != kinds[0]), kinds[0])]
    for name in getattr(default, "sub_configs", None) or ():
        if getattr(default, name, None) is not None:
            values[name] = tiny_config(type(getattr(default, name))).to_dict()
    return config_class(**values)


def tiny_model(name):
    """A random model of an architecture; None if it does not build so, or is too large."""
    try:
        model_class = getattr(transformers, name)
        with torch.device("meta"):
            size = sum(p.numel() for p in model_class(tiny_config(model_class.config_class)).parameters())
        if size > LARGEST:
            return None
        torch.manual_seed(0)
        return model_class(tiny_config(model_class.config_class)).eval()
    except Exception:  # whatever the class of an architecture says of sizes that it does not expect
        return None
