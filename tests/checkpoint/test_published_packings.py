"""Packings that libraries write, against their own functions where they are installed."""

import copy
import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.checkpoint.expert_layers import InFiles, decode, layer_of
from fmoe_ext.checkpoint.methods import is_usual, kind_of
from fmoe_ext.checkpoint.model_folder import ModelFolder
from fmoe_ext.finetune.streaming.reader import Reader
from fmoe_ext.frozen import Quantized
from tests.packed_experts import packed_layer
from tests.published_packings import CONFIGS, ON_KERNELS, modelopt, pack

E, D, H = 3, 256, 160
PATH = "model.layers.0.mlp.experts"
SHAPES = {"gate_proj": (H, D), "up_proj": (H, D), "down_proj": (D, H)}


def projections():
    generator = torch.Generator().manual_seed(0)
    return {
        (e, name): torch.randn(shape, generator=generator) / 16
        for e in range(E)
        for name, shape in SHAPES.items()
    }


def tensors_of(name):
    """The tensors of a folder, and the values of the projections."""
    tensors, values = {}, {}
    for (e, projection), weight in projections().items():
        packed, values[e, projection] = pack(weight, name)
        tensors |= {f"{PATH}.{e}.{projection}.{key}": value for key, value in packed.items()}
    return tensors, values


def save(folder, tensors, config):
    save_file(tensors, folder / "model.safetensors")
    text = json.dumps({"model_type": "qwen3_moe", "quantization_config": config})
    folder.joinpath("config.json").write_text(text)
    return ModelFolder(folder)


def read(layer, experts):
    """The weights of some experts, their bytes read as a stream reads them."""
    buffer = np.zeros(layer.num_bytes(len(experts)), dtype=np.uint8)
    Reader().read(layer.spans(experts, range(len(experts)), len(experts)), buffer)
    weights = layer.weights(buffer, len(experts))
    return [w.dequantize() if isinstance(w, Quantized) else w for w in weights]


@pytest.mark.parametrize("name", CONFIGS)
def test_experts_have_the_values_of_the_packing(name, tmp_path):
    tensors, values = tensors_of(name)
    layer, used = packed_layer(save(tmp_path, tensors, CONFIGS[name]), PATH)
    assert used == tensors.keys() and layer.is_packed == (name in ON_KERNELS)
    assert layer.shapes == ((E, 2 * H, D), (E, D, H))
    w1, w2 = read(layer, [2, 0])
    for slot, e in enumerate((2, 0)):
        assert torch.equal(w1[slot], torch.cat((values[e, "gate_proj"], values[e, "up_proj"])))
        assert torch.equal(w2[slot], values[e, "down_proj"])


@pytest.mark.parametrize(("rows", "columns"), [(192, 320), (128, 256), (96, 64), (1, 192)])
def test_last_blocks_of_modelopt_may_be_smaller(rows, columns, tmp_path):
    """FP8_PB_WO pads a matrix to whole blocks of 128 x 128; its scale is [rows, 1, columns, 1] in blocks."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    packed, values = pack(weight, "float-quantized block")
    tensors = {"a.weight": packed["weight"], "a.weight_scale": packed["weight_scale"][:, None, :, None]}
    base = save(tmp_path, tensors, modelopt("FP8_PB_WO"))
    assert torch.equal(kind_of(base).matrix(base, "a").decode(base.tensors, torch.float32), values)


def matrix(folder, tensors, name):
    base = save(folder, {f"a.{key}": value for key, value in tensors.items()}, CONFIGS[name])
    return kind_of(base).matrix(base, "a").decode(base.tensors, torch.float32)


def test_packing_of_older_versions_is_refused(tmp_path):
    """10 numbers of 3 bits in a word, where newer ones are a stream of bits: by shapes alone, with its reason."""
    tensors, _ = pack(
        torch.randn(32, 4096, generator=torch.Generator().manual_seed(0)), "pack-quantized int3"
    )
    tensors["weight_packed"] = torch.zeros(32, 410, dtype=torch.int32)
    with pytest.raises(CheckpointError, match=r"no 410 words of \[3\] bits; an older compressed-tensors"):
        matrix(tmp_path, tensors, "pack-quantized int3")
    del tensors["weight_shape"]  # it gave 4373 columns
    with pytest.raises(CheckpointError, match=r"lacks a\.weight_shape"):
        matrix(tmp_path, tensors, "pack-quantized int3")


def test_zero_points_of_fp8_are_zero(tmp_path):
    name = "float-quantized channel"
    tensors, values = pack(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)), name)
    tensors["weight_zero_point"] = torch.zeros(32, 1).to(torch.float8_e4m3fn)
    assert torch.equal(matrix(tmp_path, tensors, name), values)
    tensors["weight_zero_point"][3] = 1
    with pytest.raises(CheckpointError, match=r"a\.weight is FP8, whose zero points must be 0"):
        matrix(tmp_path, tensors, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_decoded_experts_are_rounded_once(dtype, tmp_path):
    tensors, values = tensors_of("float-quantized channel")
    layer, _ = packed_layer(save(tmp_path, tensors, CONFIGS["float-quantized channel"]), PATH)
    w1, _ = read(layer.cast(dtype), [1])
    assert torch.equal(w1[0], torch.cat((values[1, "gate_proj"], values[1, "up_proj"])).to(dtype))


def test_projections_in_different_packings_are_decoded(tmp_path):
    """Plain gates, ups of four bits and downs of eight, as mixed precision has them."""
    tensors, values = {}, {}
    kinds = {"up_proj": "mxfp4-pack-quantized", "down_proj": "float-quantized channel"}
    for (e, projection), weight in projections().items():
        packed, values[e, projection] = {"weight": weight.bfloat16()}, weight.bfloat16().float()
        if projection in kinds:
            packed, values[e, projection] = pack(weight, kinds[projection])
        tensors |= {f"{PATH}.{e}.{projection}.{key}": value for key, value in packed.items()}
    config = CONFIGS["mxfp4-pack-quantized"] | {"format": "mixed-precision"}
    joined = (("gate_proj", "up_proj"), ("down_proj",))
    names = (tuple(tuple(f"{PATH}.{e}.{p}.weight" for p in of) for e in range(E)) for of in joined)
    base = save(tmp_path, tensors, config)
    layer, _ = layer_of(base, kind_of(base), PATH, tuple(map(InFiles, names)))
    w1, w2 = read(layer, [0, 1])
    assert torch.equal(w1[1], torch.cat((values[1, "gate_proj"], values[1, "up_proj"])))
    assert torch.equal(w2[0], values[0, "down_proj"])


def test_plain_tensor_beside_packed_ones_must_be_a_matrix(tmp_path):
    name = "mxfp4-pack-quantized"
    tensors, _ = tensors_of(name)
    stem = f"{PATH}.1.up_proj.weight"
    tensors = {key: value for key, value in tensors.items() if not key.startswith(stem)}
    base = save(tmp_path, tensors | {stem: torch.ones(4)}, CONFIGS[name])
    with pytest.raises(CheckpointError, match=rf"{stem} is \[4\], expected a matrix"):
        packed_layer(base, PATH)


def test_blocks_and_scales_of_mxfp4_must_fit(tmp_path):
    blocks, scales = torch.zeros(2, 3, 1, 16, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.uint8)
    base = save(tmp_path, {"a_blocks": blocks, "a_scales": scales}, {"quant_method": "mxfp4"})
    with pytest.raises(CheckpointError, match=r"a_blocks \[2, 3, 1, 16\] and a_scales \[2, 3\] do not fit"):
        decode(base)


@pytest.mark.parametrize("name", CONFIGS)
def test_broken_tensors_are_named(name, tmp_path):
    """Each tensor of a matrix missing, shorter, and in another dtype; scales may have any floating dtype."""
    tensors, _ = tensors_of(name)
    stem = f"{PATH}.1.up_proj."
    for key in [key for key in tensors if key.startswith(stem) and "input" not in key]:
        kept = tensors.pop(key)
        wrong = [] if key.endswith("weight_shape") else [None]  # which the first versions did not write
        wrong += [] if "scale" in key or key.endswith("weight_shape") else [kept.double()]
        wrong += [kept[: len(kept) // 2].contiguous()] if kept.dim() else [kept.expand(3).contiguous()]
        wrong += [kept[..., :-1].contiguous()] if kept.dim() and kept.shape[-1] > 1 else []
        for value in wrong:
            changed = tensors if value is None else tensors | {key: value}
            with pytest.raises(CheckpointError, match=r"experts\.1\.up_proj"):
                layer, _ = packed_layer(save(tmp_path, changed, CONFIGS[name]), PATH)
                read(layer, [1])
        tensors[key] = kept


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "quark"}, "packed by quark"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "modelopt with quant_algo 'NVFP4_AWQ'"),
        ({"quant_method": "modelopt", "quant_algo": "W8A8_SQ_PER_CHANNEL"}, "'W8A8_SQ_PER_CHANNEL'"),
        ({"quant_method": "compressed-tensors", "format": "sparse-24-bitmask"}, "format 'sparse-24-bitmask'"),
        ({"quant_method": "compressed-tensors", "format": "mxfp6-pack-quantized"}, "'mxfp6-pack-quantized'"),
    ],
)
def test_packing_that_is_not_read_is_refused_by_name(config, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        kind_of(save(tmp_path, {"a": torch.zeros(1)}, config))


SETTINGS = [
    ("pack-quantized int8", "num_bits"),
    ("pack-quantized int8", "symmetric"),
    ("mxfp8-quantized", "group_size"),
    ("float-quantized block", "block_structure"),
]


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        *((*setting, value) for setting in SETTINGS for value in ({"a": 1}, [[1], [2]], 1.5)),
        *((*setting, "x") for setting in SETTINGS[:3]),  # older versions wrote block_structure as a text
    ],
)
def test_settings_of_other_types_are_refused(name, key, value, tmp_path):
    config = copy.deepcopy(CONFIGS[name])
    config["config_groups"]["group_0"]["weights"][key] = value
    tensors, _ = tensors_of(name)
    with pytest.raises(CheckpointError, match=f"quantization_config is damaged: group_0 with {key} "):
        packed_layer(save(tmp_path, tensors, config), PATH)


@pytest.mark.parametrize("name", ["pack-quantized int8", "fp8 tensor", "modelopt FP8 channel"])
def test_empty_tensors_are_named(name, tmp_path):
    tensors, _ = tensors_of(name)
    stem = f"{PATH}.1.up_proj."
    for key in [key for key in tensors if key.startswith(stem) and not key.endswith("weight_shape")]:
        empty = torch.empty(3, 0, dtype=tensors[key].dtype)
        with pytest.raises(CheckpointError, match=rf"{key} is \[\d+, 0\]"):
            packed_layer(save(tmp_path, tensors | {key: empty}, CONFIGS[name]), PATH)


def test_scales_of_inputs_in_weights_are_refused(tmp_path):
    tensors, _ = tensors_of("modelopt NVFP4")
    tensors[f"{PATH}.0.up_proj.pre_quant_scale"] = torch.ones(D)
    with pytest.raises(CheckpointError, match="pre_quant_scale, which scales inputs"):
        packed_layer(save(tmp_path, tensors, CONFIGS["modelopt NVFP4"]), PATH)


def test_config_beside_the_model_is_read(tmp_path):
    tensors, values = tensors_of("modelopt NVFP4")
    save(tmp_path, tensors, None)
    details = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    }
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": details}))
    layer, _ = packed_layer(ModelFolder(tmp_path), PATH)
    assert torch.equal(read(layer, [2])[1][0], values[2, "down_proj"])


@pytest.mark.parametrize(
    "name", [name for name, config in CONFIGS.items() if config["quant_method"] == "compressed-tensors"]
)
def test_values_equal_those_of_compressed_tensors(name, tmp_path):
    """To the bit, in the dtype in which the library decodes."""
    library = pytest.importorskip("compressed_tensors.compressors", reason="pip install compressed-tensors")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    config = CONFIGS[name]
    weights = QuantizationArgs(**config["config_groups"]["group_0"]["weights"])
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = library.BaseCompressor.get_value_from_registry(config["format"])
    tensors, _ = tensors_of(name)
    layer, _ = packed_layer(save(tmp_path, tensors, config), PATH)
    w1, w2 = read(layer, list(range(E)))
    for (e, projection), weight in projections().items():
        theirs = compressor.decompress(pack(weight, name)[0], scheme)["weight"]
        ours = {"gate_proj": w1[e, :H], "up_proj": w1[e, H:], "down_proj": w2[e]}[projection]
        assert torch.equal(ours.to(theirs.dtype), theirs)


def test_values_equal_those_of_transformers(tmp_path):
    """MXFP8 and DeepSeek-V4's packings, by the function that decodes them there."""
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    decode = finegrained.Fp8Dequantize(None)._dequantize_one
    for name in ("mxfp8", "DeepSeek-V4 FP4", "fp8 tensor"):
        tensors, _ = tensors_of(name)
        folder = tmp_path / name
        folder.mkdir()
        layer, _ = packed_layer(save(folder, tensors, CONFIGS[name]), PATH)
        _, w2 = read(layer, [1])
        stem = f"{PATH}.1.down_proj."
        scale = tensors[f"{stem}scale" if "V4" in name else f"{stem}weight_scale_inv"]
        theirs = decode(tensors[f"{stem}weight"], scale, torch.float32)
        assert torch.equal(w2[0], theirs)


def test_empty_sparsity_config_is_that_of_a_dense_folder():
    """llm-compressor 0.14 writes it."""
    assert is_usual("sparsity_config", {}) and is_usual("sparsity_config", {"format": "dense"})
    assert not is_usual("sparsity_config", {"format": "sparse-24-bitmask"})


@pytest.mark.parametrize("order", ["transposed", "interleaved"])
@pytest.mark.parametrize(
    "wrong", [torch.ones(D, H), torch.ones(H // 2, D), torch.ones(H, D, dtype=torch.uint8)]
)
def test_plain_experts_in_another_order_must_be_alike(order, wrong, tmp_path):
    """A matrix [in, out] among [out, in] has as many bytes, so that it was read scrambled."""
    names = [f"{PATH}.{e}.weight" for e in range(E)]
    tensors = {name: torch.ones(H, D) for name in names}
    save_file(tensors | {names[2]: wrong}, tmp_path / "model.safetensors")
    weight = InFiles(tuple((name,) for name in names), **{order: True})
    with pytest.raises(
        CheckpointError, match=rf"{names[2]} is {wrong.dtype} \[.*\], unlike the first expert's"
    ):
        layer_of(ModelFolder(tmp_path / "model.safetensors"), None, PATH, (weight, weight))
