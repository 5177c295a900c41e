"""Folders with random weights in the layouts in which makers publish large models: names, shapes and packings.

kimi: names of Kimi-Linear, experts in compressed-tensors' mxfp4-pack-quantized, 896 of them in a layer, 16 chosen, as
in Kimi K3. deepseek_v4: DeepSeek's names, experts in FP4 with scales in e8m0, other linear layers in FP8.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

KIMI = {
    **{"vocab_size": 32768, "hidden_size": 3584, "intermediate_size": 7168, "moe_intermediate_size": 512},
    **{"num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 1024, "kv_lora_rank": 512},
    **{"num_experts": 896, "num_experts_per_token": 16, "num_shared_experts": 1},
    **{"linear_num_heads": 16, "linear_head_dim": 128, "max_position_embeddings": 32768, "pad_token_id": 0},
}
DEEPSEEK_V4 = {
    **{"vocab_size": 32768, "hidden_size": 4096, "moe_intermediate_size": 2048, "n_routed_experts": 256},
    **{"num_experts_per_tok": 6, "n_shared_experts": 1, "num_attention_heads": 16, "num_key_value_heads": 1},
    **{"head_dim": 512, "q_lora_rank": 1024, "o_lora_rank": 1024, "o_groups": 8, "index_n_heads": 16},
    **{"max_position_embeddings": 32768, "pad_token_id": 0},
}
MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
LAYOUTS = {
    "kimi": (
        "KimiLinear",
        KIMI,
        {
            **{"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": MXFP4}},
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
        },
    ),
    "deepseek_v4": (
        "DeepseekV4",
        DEEPSEEK_V4,
        {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    ),
}
NAMES = {
    **{torch.uint8: "U8", torch.int8: "I8", torch.int64: "I64", torch.bfloat16: "BF16", torch.float32: "F32"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0"},
}
EXPONENT = 119  # of the scales: values of about 0.02


def config_of(layout: str, layers: int, **changes: Any) -> Any:
    """The configuration of a layout with some layers, MoE ones but for Kimi's first."""
    import transformers

    name, values, packing = LAYOUTS[layout]
    kinds = {"kimi": ("linear_attention", "full_attention"), "deepseek_v4": ("compressed_sparse_attention",)}
    of_layers = {"layer_types": [kinds[layout][i % len(kinds[layout])] for i in range(layers)]}
    if layout == "kimi":
        of_layers["mlp_layer_types"] = ["dense", *["sparse"] * (layers - 1)]
    else:
        of_layers["mlp_layer_types"] = ["hash_moe", *["moe"] * (layers - 1)]
    values = {**values, "num_hidden_layers": layers, **of_layers, **changes}
    config = getattr(transformers, f"{name}Config")(**values, dtype="bfloat16")
    config.architectures = [f"{name}ForCausalLM"]
    config.quantization_config = packing
    return config


def write_packed(folder: Path, layout: str, layers: int, **changes: Any) -> None:
    """A folder of random weights, one shard a layer; changes: of the configuration. Experts share one noise."""
    import transformers

    from fmoe_ext.checkpoint.safetensors_file import StoredTensor
    from fmoe_ext.checkpoint.weight_names import as_written

    config = config_of(layout, layers, **changes)
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    del config.quantization_config
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config)
    state = skeleton.state_dict().items()
    names = as_written(skeleton, {n: StoredTensor(tuple(v.shape), v.dtype, v.detach) for n, v in state})
    shards: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in names.items():
        number = name.partition("layers.")[2].partition(".")[0] or "outside"
        shards.setdefault(number, {})[name] = tensor
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (2**24,), dtype=torch.uint8, generator=generator)
    weight_map: dict[str, str] = {}
    for number, tensors in shards.items():
        found = {}
        for name, tensor in tensors.items():
            found |= dict(_random(layout, name, tensor, config, noise, generator))
        file = f"model-{number}.safetensors"
        _write_shard(folder / file, found)
        weight_map |= dict.fromkeys(found, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_shard(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A safetensors file of tensors that may share memory, past the cache when it is written."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _random(
    layout: str, name: str, tensor: Any, config: Any, noise: torch.Tensor, generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    shape, stem = tensor.shape, name.removesuffix(".weight")
    if ".experts." in name:
        rows, columns = shape
        begin = int(torch.randint(0, noise.numel() // 2, (), generator=generator))
        count = rows * columns // 2
        codes = noise[begin : begin + count].view(rows, columns // 2)
        scales = torch.full((rows, columns // 32), EXPONENT, dtype=torch.uint8)
        if layout == "kimi":
            yield f"{stem}.weight_packed", codes
            yield f"{stem}.weight_scale", scales
        else:
            yield name, codes.view(torch.int8)
            yield f"{stem}.scale", scales.view(torch.float8_e8m0fnu)
    elif not tensor.dtype.is_floating_point:
        yield name, torch.randint(0, config.n_routed_experts, shape, generator=generator)
    elif len(shape) == 1:
        yield name, torch.ones(shape, dtype=tensor.dtype)
    elif layout == "deepseek_v4" and ".attn.w" in name and not any(n % 128 for n in shape):
        values = torch.randn(shape, generator=generator) * 100
        yield name, values.clamp(-448, 448).to(torch.float8_e4m3fn)  # torch 2.11 makes NaN of what is larger
        grid = [n // 128 for n in shape]
        yield f"{stem}.scale", torch.full(grid, 115, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    else:
        yield name, 0.02 * torch.randn(shape, generator=generator).to(tensor.dtype)
