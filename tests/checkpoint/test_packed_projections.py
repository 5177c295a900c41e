"""Layers of packed experts in published files: which bytes they are, and that joined they are the weights."""

import inspect
import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.expert_layers import InFiles, layer_of
from fmoe_ext.checkpoint.methods import KINDS, kind_of
from fmoe_ext.checkpoint.model_folder import ModelFolder
from fmoe_ext.finetune.streaming.reader import Reader
from fmoe_ext.frozen import frozen_gemm, quantize
from fmoe_ext.gguf.file import open_gguf
from fmoe_ext.gguf.packings import PIECES
from fmoe_ext.gguf.reading import gguf_layers
from tests.packed_experts import packed_layer
from tests.packed_layouts import CONFIGS, pack, scale_of

E, D, H = 3, 256, 256
PATH = "model.layers.0.mlp.experts"


def projections(hidden=H):
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate_proj": (hidden, D), "up_proj": (hidden, D), "down_proj": (D, hidden)}
    return {
        (e, name): torch.randn(shape, generator=generator) / 16
        for e in range(E)
        for name, shape in shapes.items()
    }


def tensors_of(name, hidden=H):
    """The tensors of a published folder, and the decoded projections."""
    tensors, decoded = {}, {}
    for (e, projection), weight in projections(hidden).items():
        packed, decoded[e, projection] = pack(weight, name)
        tensors |= {f"{PATH}.{e}.{projection}.{key}": value for key, value in packed.items()}
    return tensors, decoded


def save(folder, tensors, config):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    folder.joinpath("config.json").write_text(
        json.dumps({"model_type": "qwen3_moe", "quantization_config": config})
    )
    return ModelFolder(folder)


def read(layer, experts):
    """The weights of some experts, their bytes read as a stream reads them."""
    buffer = np.zeros(layer.num_bytes(len(experts)), dtype=np.uint8)
    Reader().read(layer.spans(experts, range(len(experts)), len(experts)), buffer)
    return layer.weights(buffer, len(experts))


def check(layer, decoded, hidden=H):
    assert layer.shapes == ((E, 2 * hidden, D), (E, D, hidden)) and layer.is_packed
    w1, w2 = read(layer, [2, 0])
    for slot, e in enumerate((2, 0)):
        joined = torch.cat((decoded[e, "gate_proj"], decoded[e, "up_proj"]))
        assert torch.equal(w1.dequantize()[slot], joined)
        assert torch.equal(w2.dequantize()[slot], decoded[e, "down_proj"])


def widths(name):
    """Numbers of hidden units around the borders of a format's blocks and words."""
    if name == "fp8_block":
        return (1, 63, 64, 65, 80, 96, 112, 127, 128, 129, 191, 192, 193, 208, 224, 255, 256, 257, 352, 480)
    return (64, 128, 192, 256, 320) if name.startswith("nf4") else (32, 64, 96, 128, 160, 224, 256, 288, 352)


@pytest.mark.parametrize(("name", "hidden"), [(name, hidden) for name in CONFIGS for hidden in widths(name)])
def test_projections_of_any_width_are_joined(tmp_path, name, hidden):
    tensors, decoded = tensors_of(name, hidden)
    layer, used = packed_layer(save(tmp_path, tensors, CONFIGS[name]), PATH)
    assert used == tensors.keys()
    check(layer, decoded, hidden)
    w1, _ = read(layer, [2])
    x = torch.eye(D)[-3:]
    offs = torch.tensor([3], dtype=torch.int32)
    joined = torch.cat((decoded[2, "gate_proj"], decoded[2, "up_proj"]))
    torch.testing.assert_close(frozen_gemm(x, w1, offs), joined[:, -3:].T, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", CONFIGS)
def test_missing_and_odd_tensors_are_named(tmp_path, name):
    tensors, _ = tensors_of(name)
    missing = f"{PATH}.1.up_proj.{scale_of(name)}"
    kept = tensors.pop(missing)
    with pytest.raises(CheckpointError, match=f"lacks {missing}"):
        packed_layer(save(tmp_path, tensors, CONFIGS[name]), PATH)
    tensors[missing] = kept[:-1].contiguous()
    with pytest.raises(CheckpointError, match=missing):
        packed_layer(save(tmp_path, tensors, CONFIGS[name]), PATH)


def group(of_group=(), **of_weights):
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32, **of_weights}
    return {"config_groups": {"g": {"weights": weights, "targets": ["Linear"], **dict(of_group)}}}


# {method: the class of Transformers for its configuration}
CLASSES = {
    "fp8": "FineGrainedFP8Config",
    "compressed-tensors": "CompressedTensorsConfig",
    "gptq": "GPTQConfig",
    "awq": "AwqConfig",
    "bitsandbytes": "BitsAndBytesConfig",
}


@pytest.mark.parametrize("method", CLASSES)
def test_every_key_of_transformers_is_read_or_changes_no_weight(method):
    from transformers.utils import quantization_config

    named = inspect.signature(getattr(quantization_config, CLASSES[method]).__init__).parameters
    assert not {"quant_method", *named} - {*KINDS[method].known.split()} - {"self", "kwargs", "quant_method"}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("fp8_block", {"weight_block_size": [64, 64]}, "weight_scale_inv is torch.float32"),
        ("fp8_block", {"weight_block_size": [64]}, r"weight_block_size \[64\]"),
        ("int4", {"format": "marlin-24"}, "format 'marlin-24'"),
        ("int4", {"format": "mxfp6-pack-quantized"}, "format 'mxfp6-pack-quantized'"),
        (
            "int4",
            {"config_groups": {"g": {"weights": {"num_bits": 4, "strategy": "group", "actorder": "group"}}}},
            "actorder 'group'",
        ),
        ("nf4", {"bnb_4bit_quant_type": "fp4"}, "type 'fp4'"),
        ("nf4", {"load_in_4bit": False}, "8 bits instead of 4"),
        ("nf4", {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage 'bfloat16'"),
        ("gptq", {"bits": 3}, "GPTQ with 3 bits instead of 4"),
        ("gptq", {"bits": 8}, "GPTQ with 8 bits instead of 4"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ("gptq", {"dynamic": {"+:.*down.*": {"bits": 8}}}, "8 bits for .*down"),
        ("awq", {"bits": 3}, "AWQ with 3 bits instead of 4"),
        ("awq", {"version": "GEMV"}, "version 'gemv' instead of 'gemm'"),
        ("gptq", {"rotation": "hadamard"}, "quantization_config with rotation 'hadamard'"),
        ("gptq", {"pack_dtype": "int8"}, "pack_dtype 'int8'"),
        ("fp8_block", {"fmt": "e5m2"}, "fmt 'e5m2'"),
        ("int4", {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        ("int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config .*sparse-24"),
        ("int4", {"moe_sparsity_config": {"layers": 1}}, "moe_sparsity_config"),
        ("int4", group(type="float"), "g with type 'float'"),
        ("int4", group(dynamic=True), "g with dynamic True"),
        ("nf4", {"of_tomorrow": 1}, "of_tomorrow 1"),
    ],
)
def test_settings_that_are_not_computed_are_refused(tmp_path, name, changes, message):
    base = save(tmp_path, tensors_of(name)[0], {**CONFIGS[name], **changes})
    with pytest.raises(CheckpointError, match=message):
        packed_layer(base, PATH)


def test_plain_stack_beside_a_packed_weight_is_refused(tmp_path):
    """Not for other experts: a stack has all of them."""
    tensors, _ = tensors_of("fp8_block")
    base = save(tmp_path, tensors | {"down": torch.zeros(E, D, H)}, CONFIGS["fp8_block"])
    w1 = InFiles(tuple(tuple(f"{PATH}.{e}.{name}_proj.weight" for name in ("gate", "up")) for e in range(E)))
    with pytest.raises(CheckpointError, match=r"down is a plain stack, but the other weight of its layer is"):
        layer_of(base, kind_of(base), PATH, (w1, InFiles((("down",),) * E, is_stack=True)))


def test_other_methods_are_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match="packed by hqq, which is not computed here"):
        packed_layer(save(tmp_path, tensors_of("int4")[0], {"quant_method": "hqq"}), PATH)


@pytest.mark.parametrize("damage", [{"dynamic": [1]}, {"quant_method": ["gptq"]}, {"dynamic": {"a": 3}}])
def test_damaged_quantization_config(tmp_path, damage):
    tensors, _ = tensors_of("gptq")
    with pytest.raises(CheckpointError, match="quantization_config is damaged"):
        packed_layer(save(tmp_path, tensors, CONFIGS["gptq"] | damage), PATH)


def test_act_order_is_refused(tmp_path):
    tensors, _ = tensors_of("gptq")
    name = f"{PATH}.2.down_proj.g_idx"
    tensors[name] = tensors[name].flip(0)
    with pytest.raises(CheckpointError, match=f"GPTQ with act-order \\({name}"):
        packed_layer(save(tmp_path, tensors, CONFIGS["gptq"]), PATH)
    without = {key: value for key, value in tensors.items() if not key.endswith("g_idx")}
    with pytest.raises(CheckpointError, match="act-order"):
        packed_layer(save(tmp_path, without, CONFIGS["gptq"] | {"desc_act": True}), PATH)
    layer, _ = packed_layer(save(tmp_path, without, CONFIGS["gptq"]), PATH)
    check(layer, tensors_of("gptq")[1])


def test_biases_of_zeros_alone_are_left_out(tmp_path):
    tensors, decoded = tensors_of("gptq")
    name = f"{PATH}.0.up_proj.bias"
    tensors[name] = torch.zeros(H, dtype=torch.float16)
    check(packed_layer(save(tmp_path, tensors, CONFIGS["gptq"]), PATH)[0], decoded)
    tensors[name][3] = 1
    with pytest.raises(CheckpointError, match=f"{name} is a bias"):
        packed_layer(save(tmp_path, tensors, CONFIGS["gptq"]), PATH)


def test_nested_scales_in_other_blocks_are_refused(tmp_path):
    tensors, _ = tensors_of("nf4 nested")
    name = f"{PATH}.1.gate_proj.weight.nested_absmax"
    tensors[name] = torch.cat((tensors[name], tensors[name]))
    with pytest.raises(CheckpointError, match=name):
        packed_layer(save(tmp_path, tensors, CONFIGS["nf4 nested"]), PATH)


def test_blocks_of_no_values_are_refused(tmp_path):
    tensors, _ = tensors_of("nf4")
    name = f"{PATH}.1.gate_proj.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(tensors[name].tolist())) | {"blocksize": 0}
    tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=f"{name} is no quant_state: blocksize is 0"):
        packed_layer(save(tmp_path, tensors, CONFIGS["nf4"]), PATH)


def write_gguf(path, kinds=("q4_k", "q4_k", "q6_k"), leave_out=""):
    decoded = {}
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for role, kind in zip(("gate", "up", "down"), kinds, strict=True):
        weight = torch.stack([projections()[e, f"{role}_proj"] for e in range(E)])
        packed = quantize(weight, kind)
        for e in range(E):
            decoded[e, f"{role}_proj"] = packed.dequantize()[e]
        if role != leave_out:
            raw = gguf.GGMLQuantizationType[kind.upper()]
            writer.add_tensor(f"blk.0.ffn_{role}_exps.weight", packed.data.numpy(), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return decoded


def test_gguf_experts_are_read_as_they_are(tmp_path):
    decoded = write_gguf(tmp_path / "model.gguf")
    layers = gguf_layers(open_gguf(tmp_path / "model.gguf"))
    assert list(layers) == [0]
    check(layers[0], decoded)
    w1, w2 = read(layers[0], [0])
    assert (w1.format, w2.format) == ("q4_k", "q6_k")


def write_types(path, types, width=256, beside=(), roles=("gate", "up", "down")):
    """A layer whose projections have random bytes of these types -> their values. beside: further tensors."""
    generator = np.random.default_rng(0)
    writer, values = gguf.GGUFWriter(path, "qwen3moe"), {}
    for role, kind in zip(roles, types, strict=True):
        raw = gguf.GGMLQuantizationType[kind]
        block, num_bytes = gguf.GGML_QUANT_SIZES[raw]
        data = generator.integers(0, 256, (E, width, width // block * num_bytes), np.uint8)
        if kind == "MXFP4":
            data[..., ::num_bytes] %= 255  # no NaN, which gguf takes for 2^128
        elif kind == "NVFP4":
            data.reshape(E, width, -1, num_bytes)[..., :4] &= 127  # scales have no sign
        writer.add_tensor(f"blk.0.ffn_{role}_exps.weight", data, raw_dtype=raw)
        try:
            values[role] = gguf.quants.dequantize(data, raw)
        except NotImplementedError:
            continue
    for name, data in beside:
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


PACKED_TYPES = [kind.name for kind, (block, _) in gguf.GGML_QUANT_SIZES.items() if block > 1]


@pytest.mark.filterwarnings("ignore:invalid value|overflow encountered")
@pytest.mark.parametrize("kind", [*PACKED_TYPES, "mixed"])
def test_every_type_of_gguf_is_read_or_refused_by_name(kind, tmp_path):
    """With the bits of the gguf package's own function."""
    path = tmp_path / "model.gguf"
    values = write_types(path, [kind] * 3 if kind != "mixed" else ["Q4_K", "Q5_K", "IQ4_XS"])
    if not values:
        with pytest.raises(
            CheckpointError, match=rf"ffn_gate_exps\.weight is {kind.lower()}, which the gguf"
        ):
            gguf_layers(open_gguf(path))
        return
    layer = gguf_layers(open_gguf(path))[0]
    assert layer.shapes == ((E, 512, 256), (E, 256, 256))
    weights = read(layer, [2, 0])
    assert all(torch.is_tensor(w) != (kind.lower() in PIECES) for w in weights)
    w1, w2 = (w if torch.is_tensor(w) else w.dequantize() for w in weights)
    for slot, e in enumerate((2, 0)):
        joined = np.concatenate((values["gate"][e], values["up"][e]))
        for ours, theirs in ((w1, joined), (w2, values["down"][e])):
            np.testing.assert_array_equal(ours[slot].numpy(), theirs.astype(np.float32))


@pytest.mark.parametrize("kinds", [["NVFP4"] * 3, ["NVFP4", "NVFP4", "Q3_K"]])
def test_factors_of_experts_in_nvfp4(kinds, tmp_path):
    """llama.cpp's converter writes one for each expert beside the blocks."""
    path = tmp_path / "model.gguf"
    scales = np.linspace(0.1, 0.7, E, dtype=np.float32)
    values = write_types(path, kinds, beside=[("blk.0.ffn_up_exps.scale", scales)])
    w1, w2 = (
        w if torch.is_tensor(w) else w.dequantize() for w in read(gguf_layers(open_gguf(path))[0], [2, 0])
    )
    for slot, e in enumerate((2, 0)):
        joined = np.concatenate((values["gate"][e], values["up"][e] * scales[e]))
        np.testing.assert_allclose(w1[slot].numpy(), joined, rtol=2e-7)
        np.testing.assert_array_equal(w2[slot].numpy(), values["down"][e].astype(np.float32))


@pytest.mark.parametrize(
    ("kind", "scales", "message"),
    [
        ("MXFP4", np.ones(E, np.float32), "scales a weight in mxfp4, which is not computed"),
        ("NVFP4", np.ones(E + 1, np.float32), rf"expected F32 \[{E}\]"),
        ("NVFP4", np.ones(E, np.float16), "is F16"),
    ],
)
def test_factors_of_experts_that_do_not_fit_are_refused(kind, scales, message, tmp_path):
    path = tmp_path / "model.gguf"
    write_types(path, [kind] * 3, beside=[("blk.0.ffn_up_exps.scale", scales)])
    with pytest.raises(CheckpointError, match=rf"blk\.0\.ffn_up_exps\.scale.*{message}"):
        gguf_layers(open_gguf(path))


def test_gate_and_up_of_gguf_in_one_tensor(tmp_path):
    path = tmp_path / "model.gguf"
    values = write_types(path, ["MXFP4", "MXFP4"], roles=("gate_up", "down"))
    w1, w2 = read(gguf_layers(open_gguf(path))[0], [1])
    np.testing.assert_array_equal(w1.dequantize()[0].numpy(), values["gate_up"][1])
    np.testing.assert_array_equal(w2.dequantize()[0].numpy(), values["down"][1])


def test_gguf_files_that_are_broken(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, leave_out="up")
    with pytest.raises(CheckpointError, match=r"lacks blk\.0\.ffn_up_exps\.weight"):
        gguf_layers(open_gguf(path))
    write_gguf(path)
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(CheckpointError, match="truncated"):
        gguf_layers(open_gguf(path))
    path.write_bytes(b"no model")
    with pytest.raises(CheckpointError, match="no GGUF file"):
        gguf_layers(open_gguf(path))
