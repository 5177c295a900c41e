"""Keys of quantization_config that are read or change no weight; any other is refused by name.

Activations that a key would round are not rounded here: scales of inputs and of the cache are left alone.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

_TEXT = MappingProxyType(
    {
        "fp8": """
        weight_block_size fmt scale_fmt activation_scheme modules_to_not_convert modules_to_convert ignored_layers
        dequantize
    """,
        "compressed-tensors": """
        format config_groups quantization_status kv_cache_scheme global_compression_ratio ignore version run_compressed
        dequantize use_optimized_inference
    """,
        "gptq": """
        bits desc_act checkpoint_format format is_marlin_format dynamic group_size sym damp_percent damp_auto_increment
        static_groups true_sequential lm_head model_name_or_path model_file_base_name meta act_group_aware backend
        tokenizer dataset model_seqlen block_name_to_quantize module_name_preceding_first_block batch_size pad_token_id
        max_input_length cache_block_outputs modules_in_block_to_quantize use_exllama exllama_config max_input_len
        use_cuda_fp16 disable_exllama cache_examples_on_gpu
    """,
        "awq": """
        bits w_bit version format group_size q_group_size zero_point backend modules_to_not_convert exllama_config
        do_fuse modules_to_fuse fuse_max_seq_len
    """,
        "bitsandbytes": """
        load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit bnb_4bit_quant_type bnb_4bit_quant_storage
        bnb_4bit_compute_dtype bnb_4bit_use_double_quant llm_int8_threshold llm_int8_skip_modules
        llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight
    """,
    }
)
KNOWN = MappingProxyType({method: frozenset(text.split()) for method, text in _TEXT.items()})
# Parts of compressed-tensors' config_groups.
GROUP = frozenset(("targets", "weights", "format"))
WEIGHTS = frozenset(
    [
        "num_bits",
        "strategy",
        "actorder",
        "symmetric",
        "group_size",
        "observer",
        "observer_kwargs",
        "scale_dtype",
        "zp_dtype",
    ]
)
# Values that say "as usual", of keys that are refused with any other.
USUAL = MappingProxyType({"fmt": ("e4m3", "float8_e4m3fn"), "pack_dtype": ("int32",), "type": ("int",)})


def refusals(method: str, config: Mapping[str, Any]) -> Iterator[str]:
    """Key and value of each key of a quantization_config that is not computed with."""
    for key, value in config.items():
        is_known = key in KNOWN[method] or key == "quant_method"
        if not (is_known or _is_usual(key, value)) or (key == "fmt" and value not in USUAL["fmt"]):
            yield f"{key} {value!r}"
    if method == "compressed-tensors":
        for name, group in (config.get("config_groups") or {}).items():
            weights = (group or {}).get("weights") or {}
            for known, part in ((GROUP, group or {}), (WEIGHTS, weights)):
                yield from (
                    f"{name} with {key} {value!r}"
                    for key, value in part.items()
                    if key not in known and not _is_usual(key, value)
                )


def _is_usual(key: str, value: Any) -> bool:
    if key == "sparsity_config" and isinstance(value, Mapping):
        return value.get("format") == "dense"
    return value in (None, False, "", [], {}) or value in USUAL.get(key, ())
