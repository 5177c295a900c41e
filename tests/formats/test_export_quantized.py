"""`fmoe export`: a float folder in packed weights, read back by Transformers, by libraries, gguf and llama.cpp."""

import json
import shutil
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

import fmoe_ext
from fmoe_ext import frozen
from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.checkpoint.methods import kind_of
from fmoe_ext.checkpoint.model_folder import ModelFolder
from fmoe_ext.formats import cli, quantized
from fmoe_ext.formats.quantized import export_quantized
from fmoe_ext.gguf import architecture_for
from tests.finetune import streamed_models as streamed
from tests.formats.format_models import make
from tests.formats.test_gguf import OSS, WRITTEN, llama_cpp_or_skip
from tests.formats.trained_tokenizers import byte_level
from tests.sweeps import rest_is_slow

transformers = pytest.importorskip("transformers")

FORMATS = {"mxfp4": "mxfp4", "nvfp4": "nvfp4", "mxfp8": "mxfp8", "fp8": "fp8_block", "nf4": "nf4"}
GGUF_TYPES = ("q4_k", "q8_0", "mxfp4", "nvfp4")
# Two layers of 6 experts, whose rows are whole blocks of every packing
SIZES = {"num_hidden_layers": 2, "norm_topk_prob": True, **streamed.WIDE}
IDS = torch.randint(3, 60, (1, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder in two shards, with a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    made = streamed.make_model("Qwen3MoeForCausalLM", dtype=torch.bfloat16, vocab_size=1024, **SIZES)
    made.save_pretrained(folder, max_shard_size="3MB")
    byte_level([r"\p{N}", *GPT2]).save_pretrained(folder)
    assert len([*folder.glob("*.safetensors")]) > 1
    return folder


GPT2 = [r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"]


# {matrix of vLLM or SGLang: the layers that it joins}
JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "in_proj_qkvbfg_a": ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}


def is_packed(name):
    return name.endswith("_proj.weight")


def nearest(tensors, format):
    """{name: values} of packed linear layers; NVFP4 has one factor for those that are fused."""
    groups = {}
    for name in tensors:
        if is_packed(name):
            stem, _, leaf = name.removesuffix(".weight").rpartition(".")
            fused = {layer: matrix for matrix, layers in JOINED.items() for layer in layers}
            groups.setdefault((stem, fused.get(leaf, leaf) if format == "nvfp4" else leaf), []).append(name)
    values = {}
    for names in groups.values():
        weights = [tensors[name].read().float() for name in names]
        packed = frozen.quantize(torch.cat(weights)[None], format)
        values |= dict(zip(names, packed.dequantize()[0].split([len(w) for w in weights]), strict=True))
    return values


@pytest.mark.parametrize("type", FORMATS)
def test_packed_folder_differs_in_the_packed_weights_alone(type, model, tmp_path):
    """Every tensor, every key of config.json and every byte of other files, in and out."""
    report = export_quantized(model, tmp_path / "out", "packed", type)
    before, after = ModelFolder(model), ModelFolder(tmp_path / "out")
    expected = nearest(before.tensors, FORMATS[type])
    assert len(expected) == report.counts[type] == 44 and not report.left_out
    kind, left = kind_of(after), set(after.tensors)
    for name, tensor in before.tensors.items():
        if name in expected:
            stem = name.removesuffix(".weight")
            found = kind.matrix(after, stem).decode(after.tensors, torch.float32)
            # compressed-tensors divides by what quantize() multiplies with
            torch.testing.assert_close(found, expected[name], rtol=2e-7 if type == "nvfp4" else 0, atol=0)
            left -= {key for key in left if key.startswith(f"{stem}.")}
        else:
            assert torch.equal(after.tensors[name].read(), tensor.read()), name
            left.remove(name)
    assert not left
    config = dict(after.config)
    said = config.pop("quantization_config")
    assert config == before.config
    keys = ("ignore", "modules_to_not_convert", "llm_int8_skip_modules")
    plain = next(said[key] for key in keys if key in said)
    assert plain == ["lm_head", "model.embed_tokens", *(f"model.layers.{i}.mlp.gate" for i in range(2))]
    files = {file.name: file.read_bytes() for file in model.iterdir()}
    copies = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    for name, content in files.items():
        if name.endswith(".safetensors") or name in ("config.json", "model.safetensors.index.json"):
            continue
        assert copies[name] == content, name
    assert f"| packing | {type} |" in copies["README.md"].decode()
    assert report.bytes_after < report.bytes_before * 0.6


@pytest.mark.parametrize(
    "name, joined",
    [
        ("glm4_moe_lite", {"fused_qkv_a_proj", "gate_up_proj"}),
        ("kimi_linear", {"in_proj_qkvbfg_a", "qkv_proj", "gate_up_proj"}),
        ("qwen3_5_moe_text", {"qkv_proj", "gate_up_proj", "in_proj_qkvz", "in_proj_ba"}),
    ],
)
def test_layers_that_servers_join_share_a_factor_in_nvfp4(name, joined, tmp_path):
    """Of a joined matrix vLLM and SGLang keep one weight_global_scale, for the rows of all its layers."""
    model_type, _, values = WRITTEN[name]
    make(model_type, **{**values, **wide(model_type, values)}).to(torch.bfloat16).save_pretrained(
        tmp_path / "in"
    )
    export_quantized(tmp_path / "in", tmp_path / "out", "packed", "nvfp4")
    scales = {
        name.removesuffix(".weight_global_scale"): tensor.read().item()
        for name, tensor in ModelFolder(tmp_path / "out").tensors.items()
        if name.endswith(".weight_global_scale")
    }
    found = set()
    for parent in {name.rpartition(".")[0] for name in scales}:
        for matrix, layers in JOINED.items():
            names = [f"{parent}.{layer}" for layer in layers]
            if all(name in scales for name in names):
                found.add(matrix)
                assert len({scales[name] for name in names}) == 1, names
    assert found == joined


@pytest.mark.parametrize("type", FORMATS)
def test_packed_folder_streams_with_these_values(type, model, tmp_path):
    export_quantized(model, tmp_path / "out", "packed", type)
    tensors = ModelFolder(model).tensors
    values = {name: tensor.read().float() for name, tensor in tensors.items()}
    expected = streamed.of_values(model, values | nearest(tensors, FORMATS[type]))
    found = fmoe_ext.stream(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(
            found(input_ids=IDS).logits, expected(input_ids=IDS).logits, rtol=1e-4, atol=1e-4
        )


# Transformers decodes no NVFP4 experts, and takes bitsandbytes for linear layers that are not experts
@pytest.mark.parametrize("type", ["mxfp4", "mxfp8", "fp8"])
def test_transformers_reads_a_packed_folder(type, model, tmp_path):
    pytest.importorskip("accelerate")
    if type == "mxfp4":
        pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
    export_quantized(model, tmp_path / "out", "packed", type)
    theirs, found = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not found["missing_keys"] and not found["unexpected_keys"]
    values = nearest(ModelFolder(model).tensors, FORMATS[type])
    state = theirs.state_dict()
    for i in range(2):
        names = [f"model.layers.{i}.mlp.experts.{e}.down_proj.weight" for e in range(6)]
        expected = torch.stack([values[name] for name in names]).bfloat16()
        assert torch.equal(state[f"model.layers.{i}.mlp.experts.down_proj"], expected)
    ours = fmoe_ext.stream(tmp_path / "out", dtype=torch.bfloat16)
    with torch.no_grad():
        logits, expected = (m(input_ids=IDS).logits.float() for m in (theirs, ours))
    assert (logits - expected).std() < 0.03 * expected.std()


@pytest.mark.parametrize("type", ["mxfp4", "nvfp4"])
def test_compressed_tensors_decodes_the_same_values(type, model, tmp_path):
    library = pytest.importorskip("compressed_tensors.compressors", reason="pip install compressed-tensors")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    export_quantized(model, tmp_path / "out", "packed", type)
    after = ModelFolder(tmp_path / "out")
    config = QuantizationConfig.model_validate(after.config["quantization_config"])
    group = config.config_groups["group_0"]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**group.weights.model_dump()))
    compressor = library.BaseCompressor.get_value_from_registry(group.format)
    for stem in ("model.layers.1.mlp.experts.4.up_proj", "model.layers.0.self_attn.k_proj"):
        parts = {
            key.rpartition(".")[2]: t.read() for key, t in after.tensors.items() if key.startswith(f"{stem}.")
        }
        theirs = compressor.decompress(parts, scheme)["weight"]
        ours = kind_of(after).matrix(after, stem).decode(after.tensors, theirs.dtype)
        assert torch.equal(ours, theirs)


def test_bitsandbytes_decodes_the_same_values(model, tmp_path):
    library = pytest.importorskip("bitsandbytes.functional", reason="pip install bitsandbytes")
    export_quantized(model, tmp_path / "out", "packed", "nf4")
    after = ModelFolder(tmp_path / "out")
    stem = "model.layers.1.mlp.experts.4.up_proj"
    tensors = {key: t.read() for key, t in after.tensors.items() if key.startswith(f"{stem}.weight")}
    data = tensors.pop(f"{stem}.weight")
    state = library.QuantState.from_dict({k.removeprefix(f"{stem}."): v for k, v in tensors.items()}, "cpu")
    theirs = library.dequantize_4bit(data, state)
    ours = kind_of(after).matrix(after, stem).decode(after.tensors, torch.float32)
    assert theirs.shape == ours.shape and torch.equal(ours.to(theirs.dtype), theirs)


def oss(folder, **options):
    """GPT-OSS whose files have stacks [E, in, out], gates and ups in turn."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    make("gpt_oss", **{**OSS, **sizes, **options}).to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_gpt_oss_has_its_own_packing(tmp_path):
    """Blocks and scales of stacks, which Transformers' own MXFP4 decodes to the same values."""
    oss(tmp_path / "in")
    export_quantized(tmp_path / "in", tmp_path / "out", "packed", "mxfp4")
    before, after = ModelFolder(tmp_path / "in"), ModelFolder(tmp_path / "out")
    assert after.quantization["quant_method"] == "mxfp4"
    expected = {}
    for name, tensor in before.tensors.items():
        value = tensor.read()
        if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj"):
            packed = frozen.quantize(value.mT.float(), "mxfp4")
            assert torch.equal(after.tensors.pop(f"{name}_blocks").read(), packed.data)
            assert torch.equal(after.tensors.pop(f"{name}_scales").read(), packed.scale)
            expected[name] = packed.dequantize(torch.bfloat16).mT
        else:
            assert torch.equal(after.tensors.pop(name).read(), value)
    assert not after.tensors and len(expected) == 4
    ours = fmoe_ext.stream(tmp_path / "out", dtype=torch.float32)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in", dtype=torch.bfloat16)
    plain.load_state_dict(expected, strict=False)
    with torch.no_grad():
        logits = plain.float()(input_ids=IDS).logits
        torch.testing.assert_close(ours(input_ids=IDS).logits, logits, rtol=1e-4, atol=1e-4)
    pytest.importorskip("accelerate")
    config = transformers.Mxfp4Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", quantization_config=config)
    state = theirs.state_dict()
    assert all(torch.equal(state[name].to(value.dtype), value) for name, value in expected.items())


@pytest.mark.parametrize("type", GGUF_TYPES)
def test_gguf_has_the_nearest_values(type, model, tmp_path):
    """By the gguf package's own reader: types, values, the vocabulary; all tensors of the folder and no other."""
    gguf = pytest.importorskip("gguf", reason="pip install gguf")
    report = export_quantized(model, tmp_path / "out", "gguf", type)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["README.md", "model.gguf"]
    reader = gguf.GGUFReader(tmp_path / "out/model.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    base = ModelFolder(model).tensors
    wanted = {"attn_q": "self_attn.q_proj", "attn_output": "self_attn.o_proj"}
    for i in range(2):
        for theirs, ours in wanted.items():
            packed = frozen.quantize(base[f"model.layers.{i}.{ours}.weight"].read().float()[None], type)
            assert_values(gguf, tensors, f"blk.{i}.{theirs}.weight", packed, type)
        for role in ("gate", "up", "down"):
            names = [f"model.layers.{i}.mlp.experts.{e}.{role}_proj.weight" for e in range(6)]
            packed = frozen.quantize(torch.stack([base[name].read().float() for name in names]), type)
            assert_values(gguf, tensors, f"blk.{i}.ffn_{role}_exps.weight", packed, type)
    for theirs, ours in (
        ("token_embd", "model.embed_tokens"),
        ("output", "lm_head"),
        ("output_norm", "model.norm"),
    ):
        kind = "F32" if "norm" in theirs else "BF16"
        assert tensors[f"{theirs}.weight"].tensor_type.name == kind
        found = gguf.quants.dequantize(
            tensors[f"{theirs}.weight"].data, tensors[f"{theirs}.weight"].tensor_type
        )
        assert torch.equal(torch.from_numpy(found.copy()), base[f"{ours}.weight"].read().float())
    scales = [name for name in tensors if name.endswith(".scale")]
    assert len(scales) == (14 if type == "nvfp4" else 0) and report.counts[type] == 14
    assert len(tensors) - len(scales) == sum(report.counts.values()) == 14 + 2 * 5 + 3
    assert reader.fields["tokenizer.ggml.pre"].contents() == "starcoder" and report.has_vocabulary


def assert_values(gguf, tensors, name, packed, type):
    tensor = tensors[name]
    assert tensor.tensor_type.name == type.upper()
    values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).view(
        packed.shape
    )
    if type == "nvfp4":
        factors = torch.from_numpy(tensors[name.replace("weight", "scale")].data.copy())
        values = values * factors.view(-1, 1, 1)
    torch.testing.assert_close(values, packed.dequantize(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("type", GGUF_TYPES)
def test_llama_cpp_computes_with_the_packed_weights(type, model, tmp_path):
    """Its log-probabilities are those of our stream of the file, but for its activations of 8 bits."""
    llama_cpp = llama_cpp_or_skip()
    export_quantized(model, tmp_path / "out", "gguf", type)
    file = tmp_path / "out/model.gguf"
    with torch.no_grad():
        expected = fmoe_ext.stream(file, dtype=torch.float32)(input_ids=IDS).logits[0].log_softmax(-1)
    found = llama_cpp.logits(file, IDS[0].tolist()).log_softmax(-1)
    assert (found - expected).std() < 0.08 * expected.std()


@pytest.mark.parametrize(
    ("name", "type"),
    rest_is_slow(
        [(name, type) for name in WRITTEN for type in GGUF_TYPES],
        [("gpt_oss", "mxfp4"), ("deepseek_v3", "q8_0"), ("gemma4_text", "q4_k"), ("dots1", "nvfp4")],
    ),
)
def test_llama_cpp_loads_every_architecture(name, type, tmp_path):
    """Sizes of 256, so that rows are whole blocks: llama.cpp's logits are those of our stream, for most tokens."""
    llama_cpp = llama_cpp_or_skip()
    model_type, _, values = WRITTEN[name]
    made = make(model_type, **{**values, **wide(model_type, values)})
    made.to(torch.bfloat16).save_pretrained(tmp_path / "in")
    if type == "nvfp4" and not architecture_for(model_type).has_factors:
        with pytest.raises(
            CheckpointError, match="does not multiply by the factors of NVFP4: take --type mxfp4"
        ):
            export_quantized(tmp_path / "in", tmp_path / "out", "gguf", type)
        return
    report = export_quantized(tmp_path / "in", tmp_path / "out", "gguf", type)
    assert report.counts[type] >= 4
    file = tmp_path / "out/model.gguf"
    with torch.no_grad():
        expected = fmoe_ext.stream(file, dtype=torch.float32)(input_ids=IDS).logits[0].log_softmax(-1)
    found = llama_cpp.logits(file, IDS[0].tolist()).log_softmax(-1)
    # activations of 8 bits may choose another expert for a token, and those behind it see that
    assert ((found - expected).std(-1) / expected.std(-1)).median() < 0.1


def wide(model_type, values):
    """Sizes of 256 in the place of a model's small ones."""
    keys = ("hidden_size", "intermediate_size", "moe_intermediate_size")
    return {"hidden_size": 256, **{key: 256 for key in keys if key in values or key == "intermediate_size"}}


def test_rows_that_are_no_whole_blocks(tmp_path):
    """GGUF takes Q8_0 for them, or their own dtype; a folder is refused for experts and leaves linear layers."""
    folder = streamed.save(
        tmp_path / "in",
        dtype=torch.bfloat16,
        **{**SIZES, "hidden_size": 288, "moe_intermediate_size": 256, "head_dim": 12},
    )
    report = export_quantized(folder, tmp_path / "gguf", "gguf", "q4_k")
    assert report.counts == {"q8_0": 10, "q4_k": 2, "bf16": 4, "f32": 11}
    export_quantized(folder, tmp_path / "mxfp4", "packed", "mxfp4")
    after = ModelFolder(tmp_path / "mxfp4")
    plain = [
        name for name, tensor in after.tensors.items() if tensor.dtype == torch.bfloat16 and "proj" in name
    ]
    assert sorted(plain) == [f"model.layers.{i}.self_attn.o_proj.weight" for i in range(2)]
    assert {name.removesuffix(".weight") for name in plain} <= set(after.quantization["ignore"])
    with pytest.raises(
        CheckpointError, match=r"have 288 columns, no whole blocks of 64 as nf4 has them: take"
    ):
        export_quantized(folder, tmp_path / "nf4", "packed", "nf4")
    assert not (tmp_path / "nf4").exists()


def test_tensors_of_further_tokens(tmp_path):
    """A folder keeps them as they are; GGUF has no place for them, and it is said."""
    folder = streamed.save(tmp_path / "in", dtype=torch.bfloat16, **SIZES)
    (file,) = folder.glob("*.safetensors")
    extra = {f"model.layers.2.{name}.weight": torch.randn(256, 256) for name in ("eh_proj", "mlp.up_proj")}
    save_file({**load_file(file), **extra}, file, {"format": "pt"})
    report = export_quantized(folder, tmp_path / "packed", "packed", "mxfp8")
    after = ModelFolder(tmp_path / "packed")
    assert all(torch.equal(after.tensors[name].read(), value) for name, value in extra.items())
    plain = after.quantization["modules_to_not_convert"]
    assert {"model.layers.2.eh_proj", "model.layers.2.mlp.up_proj"} <= set(plain) and not report.left_out
    assert export_quantized(folder, tmp_path / "gguf", "gguf", "q8_0").left_out == sorted(extra)


class Alive(TorchDispatchMode):
    """Counts the bytes of storages that operators make while they are alive."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.known = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                self.note(value.untyped_storage())
        return result

    def note(self, storage):
        if storage not in self.known:
            self.known.add(storage)
            size = storage.nbytes()
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.end, size)

    def end(self, size):
        self.now -= size


@pytest.mark.parametrize(
    ("to", "type"), [("packed", "nvfp4"), ("packed", "nf4"), ("gguf", "q4_k"), ("gguf", "nvfp4")]
)
def test_memory_does_not_grow_with_the_model(to, type, tmp_path):
    """Tensors alive at once: as many with 6 layers as with 2, and no layer of experts in float32."""
    most = []
    for layers in (2, 6):
        sizes = {**SIZES, "num_hidden_layers": layers}
        folder = streamed.save(tmp_path / f"in{layers}", dtype=torch.bfloat16, num_experts=16, **sizes)
        with Alive() as alive:
            export_quantized(folder, tmp_path / f"out{layers}", to, type)
        most.append(alive.most)
    expert = 3 * 256 * 256 * 4
    assert most[0] == pytest.approx(most[1], rel=0.01) and expert / 3 < most[0] < 16 * expert / 2


def test_refused_by_name(model, tmp_path):
    for to, type, said in (
        ("gguf", "mxfp8", "llama.cpp has no type mxfp8: take --type q8_0, or --to packed"),
        ("gguf", "fp8", "take --type q8_0, or --to packed"),
        ("gguf", "nf4", "take --type q4_k, or --to packed"),
        ("packed", "q4_k", "no library of Transformers' folders has a packing q4_k: take --type nvfp4"),
        ("packed", "q8_0", "take --type mxfp8 or fp8, or --to gguf"),
        ("packed", "q6_k", "--type must be one of q4_k, q8_0, mxfp4, nvfp4, mxfp8, fp8, nf4, but got 'q6_k'"),
    ):
        with pytest.raises(CheckpointError, match=said):
            export_quantized(model, tmp_path / "out", to, type)
    packed = tmp_path / "packed"
    export_quantized(model, packed, "packed", "fp8")
    with pytest.raises(CheckpointError, match=r"is quantised \(fp8\)"):
        export_quantized(packed, tmp_path / "out", "gguf", "q8_0")
    with pytest.raises(CheckpointError, match="exists already"):
        export_quantized(model, packed, "packed", "fp8")
    export_quantized(model, tmp_path / "file", "gguf", "q8_0")
    with pytest.raises(CheckpointError, match="is a GGUF file: give the float folder"):
        export_quantized(tmp_path / "file/model.gguf", tmp_path / "out", "packed", "fp8")
    oss(tmp_path / "oss")
    oss(tmp_path / "narrow", hidden_size=48)
    with pytest.raises(CheckpointError, match=r"have 48 columns, no whole blocks of 32 .* take --to gguf$"):
        export_quantized(tmp_path / "narrow", tmp_path / "out", "packed", "mxfp4")
    with pytest.raises(
        CheckpointError, match=r"a stack of all experts, which nvfp4 has .* gguf, or --type mxfp4"
    ):
        export_quantized(tmp_path / "oss", tmp_path / "out", "packed", "nvfp4")
    dense = tmp_path / "dense"
    make("llama").save_pretrained(dense)
    with pytest.raises(CheckpointError, match="LlamaForCausalLM has no experts to pack"):
        export_quantized(dense, tmp_path / "out", "packed", "fp8")
    assert not (tmp_path / "out").exists()


def test_config_without_a_class_or_generation_config(model, tmp_path):
    """Both may be absent: Transformers reads such a folder, and ends an answer at config.json's tokens."""
    gguf = pytest.importorskip("gguf", reason="pip install gguf")
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [7, 9]}))
    export_quantized(folder, tmp_path / "out", "gguf", "q8_0")
    fields = gguf.GGUFReader(tmp_path / "out/model.gguf").fields
    assert fields["general.name"].contents() == "qwen3_moe"
    ids = {kind: fields[f"tokenizer.ggml.{kind}_token_id"].contents() for kind in ("eos", "eot", "eom")}
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert ids == {"eos": tokenizer.eos_token_id, "eot": 7, "eom": 9}


def test_command(model, tmp_path, capsys):
    line = [str(model), "--to", "gguf", "--type", "q8_0", "-o", str(tmp_path / "out")]
    assert cli.main(line) == 0
    assert "14 q8_0" in capsys.readouterr().out and (tmp_path / "out/model.gguf").exists()
    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    for file in quantized.tokenizer_files(bare):
        file.unlink()
    assert cli.main([str(bare), *line[1:-1], str(tmp_path / "bare_out")]) == 0
    assert f"has no vocabulary, so servers of llama.cpp refuse it: {bare} has no" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        cli.main([str(model), "--to", "gguf", "--type", "nf4", "-o", str(tmp_path / "no")])
    assert str(end.value) == "error: llama.cpp has no type nf4: take --type q4_k, or --to packed"
    with pytest.raises(SystemExit):
        cli.main([*line[:-1], str(tmp_path / "no"), "--tokenizer", str(model)])
    assert "--tokenizer is for --text" in capsys.readouterr().err


def test_export_that_was_ended_goes_on(model, tmp_path, monkeypatch):
    """Shards that are whole stay; another type does not go on with them."""
    monkeypatch.setattr(quantized, "MAX_SHARD_BYTES", 1_000_000)
    write, files = quantized.write_model_files, []

    def dies(folder, *rest):
        write(folder, *rest)
        files.extend((file, file.stat().st_mtime_ns) for file in sorted(folder.glob("*.safetensors")))
        files[-1][0].unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(quantized, "write_model_files", dies)
    with pytest.raises(KeyboardInterrupt):
        export_quantized(model, tmp_path / "out", "packed", "fp8")
    monkeypatch.setattr(quantized, "write_model_files", write)
    with pytest.raises(CheckpointError, match="holds parts of another job"):
        export_quantized(model, tmp_path / "out", "packed", "nf4")
    export_quantized(model, tmp_path / "out", "packed", "fp8")
    times = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "out").glob("*.safetensors")}
    assert len(times) == len(files) > 2
    assert all(times[file.name] == time for file, time in files[:-1])
    assert (
        json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
    )
