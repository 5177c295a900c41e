"""Weights of linear layers packed as published folders have them, written from the formats' descriptions."""

import json

import torch

from fmoe_ext import frozen
from fmoe_ext.frozen.formats.nf4 import NF4_CODE

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
CONFIGS = {
    "fp8_block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}},
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False},
    "gptq_v2": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4 nested": {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
}
DATA = {"fp8_block": "weight", "int4": "weight_packed", "nf4": "weight", "nf4 nested": "weight"}
SCALE = {"fp8_block": "weight_scale_inv", "int4": "weight_scale", "nf4": "weight.absmax"}
SCALE["nf4 nested"] = SCALE["nf4"]


def data_of(name):
    """Name of the data of a layer, behind the layer's name."""
    return DATA.get(name, "qweight")


def scale_of(name):
    """Name of its scales, behind the layer's."""
    return SCALE.get(name, "scales")


def pack(weight, name):
    """A weight [out, in] -> ({what follows the layer's name: tensor}, the values that a format keeps, float32)."""
    if name in ("fp8_block", "int4"):
        packed = frozen.quantize(weight[None].float(), name)
        tensors = {data_of(name): packed.data[0].contiguous(), scale_of(name): packed.scale[0].contiguous()}
        return tensors, packed.dequantize().view(weight.shape)
    return (_nf4 if name.startswith("nf4") else _with_zero_points)(weight.float(), name)


def _with_zero_points(weight, name):
    """GPTQ and AWQ: codes q and zero points z of 4 bits, a scale in float16, and values (q - z) * scale."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=1e-4).half()
    # the first format of GPTQ holds zero points from 1 to 16 less one, of which 16 is no number of 4 bits
    zero = (-low / scale.float()).round().clamp(1 if name == "gptq" else 0, 15).int()
    codes = (groups / scale.float()[..., None]).round().int() + zero[..., None]
    codes = codes.clamp(0, 15)
    values = ((codes - zero[..., None]).float() * scale.float()[..., None]).flatten(1)
    q, z, scales = codes.flatten(1).T, zero.T, scale.T.contiguous()  # [in, out], [groups, out] from here on
    if name == "awq":
        return {
            "qweight": _words(q, 1, AWQ_ORDER),
            "qzeros": _words(z, 1, AWQ_ORDER),
            "scales": scales,
        }, values
    stored = z - 1 if name == "gptq" else z
    order = torch.arange(len(q), dtype=torch.int32) // GROUP
    tensors = {"qweight": _words(q, 0), "qzeros": _words(stored, 1), "scales": scales, "g_idx": order}
    return tensors, values


def _words(codes, dim, order=range(8)):
    """Eight codes along a dimension in each int32; `order`: which of the eight is in the lowest bits, and so on."""
    eights = codes.long().unflatten(dim, (-1, 8))
    words = sum(eights.select(dim + 1, row) << 4 * i for i, row in enumerate(order))
    return (words - (words >> 31 << 32)).int().contiguous()


def _nf4(weight, name):
    """bitsandbytes: flat, blocks may cross rows; nested scales are 8-bit codes in blocks of 256, less their mean."""
    packed = frozen.quantize(weight.reshape(1, 1, -1), "nf4")
    scale = packed.scale.flatten()
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    tensors = {"weight": packed.data.reshape(-1, 1), "weight.quant_map": torch.tensor(NF4_CODE)}
    if name == "nf4 nested":
        code = torch.linspace(-1, 1, 256).pow(3)
        offset = scale.mean()
        blocks = torch.nn.functional.pad(scale - offset, (0, -len(scale) % 256)).view(-1, 256)
        largest = blocks.abs().amax(1)
        near = (blocks / largest[:, None])[..., None].sub(code).abs().argmin(-1).flatten()[: len(scale)]
        tensors |= {"weight.absmax": near.to(torch.uint8), "weight.nested_absmax": largest}
        tensors["weight.nested_quant_map"] = code
        state |= {
            "nested_blocksize": 256,
            "nested_dtype": "float32",
            "nested_offset": offset.item(),
        }
        scale = torch.stack([code[i] * largest[n // 256] + offset for n, i in enumerate(near)])
        packed = frozen.Quantized("nf4", packed.data, scale.view_as(packed.scale))
    else:
        tensors["weight.absmax"] = scale
    text = bytearray(json.dumps(state).encode())
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.frombuffer(text, dtype=torch.uint8).clone()
    return tensors, packed.dequantize().view(weight.shape)
