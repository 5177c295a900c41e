"""Weights packed as libraries write them, in layouts that are decoded when they are read."""

import torch

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def compressed_tensors(format, **weights):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


def modelopt(algorithm):
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}


FLOAT8 = {"num_bits": 8, "type": "float"}
# {name: quantization_config}
CONFIGS = {
    "mxfp4-pack-quantized": compressed_tensors(
        "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32
    ),
    "nvfp4-pack-quantized": compressed_tensors(
        "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
    ),
    "float-quantized tensor": compressed_tensors("float-quantized", strategy="tensor", **FLOAT8),
    "float-quantized channel": compressed_tensors("float-quantized", strategy="channel", **FLOAT8),
    "float-quantized block": compressed_tensors(
        "float-quantized", strategy="block", block_structure=[128, 128], **FLOAT8
    ),
    "mxfp8-quantized": compressed_tensors("mxfp8-quantized", strategy="group", group_size=32, **FLOAT8),
    "int-quantized": compressed_tensors("int-quantized", num_bits=8, type="int", strategy="channel"),
    "pack-quantized int8": compressed_tensors("pack-quantized", num_bits=8, strategy="channel"),
    "pack-quantized int4 of 16": compressed_tensors(
        "pack-quantized", num_bits=4, strategy="group", group_size=16
    ),
    "pack-quantized int3": compressed_tensors(
        "pack-quantized", num_bits=3, strategy="group", group_size=32, symmetric=False
    ),
    "modelopt NVFP4": modelopt("NVFP4"),
    "modelopt FP8": modelopt("FP8"),
    "modelopt FP8 channel": modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
    "modelopt MXFP8": modelopt("MXFP8"),
    "mxfp8": {"quant_method": "mxfp8", "weight_block_size": [1, 32], "activation_scheme": "dynamic"},
    "fp8 tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "DeepSeek-V4 FP4": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    "DeepSeek-V4 FP8": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
}
ON_KERNELS = (
    "mxfp4-pack-quantized",
    "DeepSeek-V4 FP4",
    "DeepSeek-V4 FP8",
    "mxfp8-quantized",
    "modelopt MXFP8",
    "mxfp8",
    "nvfp4-pack-quantized",
    "modelopt NVFP4",
)


def pack(weight, name):
    """A weight [out, in] -> ({what follows the layer's name: tensor}, the values that a layout keeps, float32)."""
    weight = weight.float()
    if "pack-quantized int" in name or name == "int-quantized":
        return _integers(weight, name)
    if name in ("mxfp4-pack-quantized", "DeepSeek-V4 FP4"):
        scale, stored = _powers(weight.unflatten(1, (-1, 32)).abs().amax(-1) / 6)
        codes, values = _fp4(weight, scale.repeat_interleave(32, 1))
        if name == "DeepSeek-V4 FP4":
            return {"weight": codes.view(torch.int8), "scale": stored.view(torch.float8_e8m0fnu)}, values
        return {"weight_packed": codes, "weight_scale": stored}, values
    if name in ("nvfp4-pack-quantized", "modelopt NVFP4"):
        whole = weight.abs().max() / 6 / 448
        stored = (
            (weight.unflatten(1, (-1, 16)).abs().amax(-1) / 6 / whole).clamp(2**-9).to(torch.float8_e4m3fn)
        )
        if name == "modelopt NVFP4":
            codes, values = _fp4(weight, (stored.float() * whole).repeat_interleave(16, 1))
            beside = {"weight_scale_2": whole, "input_scale": torch.tensor(0.5)}
            return {"weight": codes, "weight_scale": stored, **beside}, values
        whole = (1 / whole)[None]
        codes, values = _fp4(weight, (stored.float() / whole).repeat_interleave(16, 1))
        beside = {"weight_global_scale": whole, "input_global_scale": torch.ones(1)}
        return {"weight_packed": codes, "weight_scale": stored, **beside}, values
    return _fp8(weight, name)


def _powers(scale):
    """Scales rounded up to powers of two -> (them, their exponents in uint8)."""
    exponent = torch.log2(scale.clamp(min=1e-9)).ceil().clamp(-126, 126)
    return torch.exp2(exponent), (exponent + 127).to(torch.uint8)


def _fp4(weight, scale):
    """Two codes a byte, the first in the low bits -> (bytes, values)."""
    nearest = (weight.abs() / scale)[..., None].sub(E2M1).abs().argmin(-1)
    codes = (nearest + 8 * (weight < 0)).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, E2M1[nearest] * torch.where(weight < 0, -1, 1) * scale


def _fp8(weight, name):
    rows, columns = weight.shape
    is_mx = "mxfp8" in name.lower()
    block = (1, 32) if is_mx else (rows, columns)
    if name.endswith("channel"):
        block = (1, columns)
    elif name.endswith(("block", "DeepSeek-V4 FP8")):
        block = (128, 128)
    grid = [-(-n // m) for n, m in zip(weight.shape, block, strict=True)]
    scale = torch.empty(grid)
    for i in range(grid[0]):
        for j in range(grid[1]):
            part = weight[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scale[i, j] = part.abs().max() / 448
    stored = scale
    if is_mx or name.startswith("DeepSeek"):
        scale, stored = _powers(scale)
    whole = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    codes = (weight / whole).to(torch.float8_e4m3fn)
    if name.startswith("DeepSeek"):
        tensors = {"weight": codes, "scale": stored.view(torch.float8_e8m0fnu)}
    elif name in ("mxfp8", "fp8 tensor"):
        tensors = {"weight": codes, "weight_scale_inv": stored if is_mx else stored.reshape(())}
    else:
        shapes = {"modelopt FP8": (), "modelopt FP8 channel": (rows,), "float-quantized tensor": (1,)}
        tensors = {"weight": codes, "weight_scale": stored.reshape(shapes.get(name, stored.shape))}
    return tensors, codes.float() * whole


def _integers(weight, name):
    rows, columns = weight.shape
    bits = int(name.split("int")[-1].split()[0]) if name != "int-quantized" else 8
    size = {"pack-quantized int4 of 16": 16, "pack-quantized int3": 32}.get(name, columns)
    groups = weight.unflatten(1, (-1, size))
    most = 2 ** (bits - 1)
    scale = (groups.abs().amax(-1) / most).bfloat16()
    zero = torch.zeros(scale.shape, dtype=torch.int32)
    if bits == 3:
        zero = torch.arange(zero.numel()).view(zero.shape).int() % 7 - 3
    codes = (groups / scale.float()[..., None]).round() + zero[..., None]
    codes = codes.clamp(-most, most - 1).int()
    values = ((codes - zero[..., None]).float() * scale.float()[..., None]).flatten(1)
    codes = codes.flatten(1)
    if name == "int-quantized":
        return {"weight": codes.to(torch.int8), "weight_scale": scale}, values
    tensors = {"weight_packed": _stream(codes + most, bits), "weight_scale": scale}
    tensors["weight_shape"] = torch.tensor([rows, columns])
    if bits == 3:
        tensors["weight_zero_point"] = _stream(zero.T + most, bits).T.contiguous()
    return tensors, values


def _stream(codes, bits):
    """Rows of integers as a stream of bits in words of 32, the lowest first."""
    out = []
    for row in codes.tolist():
        stream = sum(code << bits * i for i, code in enumerate(row))
        num_words = -(-len(row) * bits // 32)
        words = [stream >> 32 * i & 0xFFFFFFFF for i in range(num_words)]
        out.append([word - (word >> 31 << 32) for word in words])
    return torch.tensor(out, dtype=torch.int32)
