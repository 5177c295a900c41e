"""Metadata of GGUF files: each key that the package gguf knows is computed with, changes nothing, or is refused."""

import copy
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fmoe_ext
from fmoe_ext import huggingface
from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.gguf import metadata, rope
from fmoe_ext.gguf import writing as written
from fmoe_ext.gguf.architecture import KEYS, OF_EXPERTS, READ, FixedRouter
from fmoe_ext.gguf.architectures import ARCHITECTURES
from fmoe_ext.gguf.architectures.plain import Qwen3Moe
from fmoe_ext.gguf.file import open_gguf
from fmoe_ext.model_files import GgufModel
from tests.formats.format_models import MODELS
from tests.formats.test_formats import make
from tests.formats.test_gguf import GGUF, llama_cpp_or_skip

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf", reason="pip install gguf")
ARCH = "qwen3moe"
IDS = torch.randint(3, 61, (1, 40), generator=torch.Generator().manual_seed(3))
VALUES = (7, 0.37, "seven", True)  # none of them is that of the model
KINDS = {
    bool: gguf.GGUFValueType.BOOL,
    int: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32,
    str: gguf.GGUFValueType.STRING,
    list: gguf.GGUFValueType.ARRAY,
}
# Compared in architectures whose graph fixes how the router computes
COMPARED = tuple(
    key
    for key in (*KEYS, *OF_EXPERTS, *FixedRouter.keys, "expert_shared_feed_forward_length")
    if key != "expert_weights_scale"
)
# Compared in the others too
ROUTING = (
    *("expert_gating_func", "expert_shared_count", "expert_weights_scale"),
    *("interleave_moe_layer_step", "leading_dense_block_count"),
)
YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 16}


@pytest.fixture(scope="module")
def models():
    """{name: a model of Transformers in float64 that has an architecture in GGUF}."""
    return {
        name: huggingface.use(make(model_type, **values).double())
        for name, (model_type, _, values) in GGUF.items()
    }


def write(model, folder, keys, monkeypatch):
    """Exports a model with further metadata keys -> the file."""
    original = written.write_facts

    def write_facts(writer, config, architecture, num_heads):
        original(writer, config, architecture, num_heads)
        for key, value in keys.items():
            add = {
                bool: writer.add_bool,
                int: writer.add_uint32,
                float: writer.add_float32,
                str: writer.add_string,
            }
            add[type(value)](key, value)

    with monkeypatch.context() as patch:
        patch.setattr(written, "write_facts", write_facts)
        fmoe_ext.export(fmoe_ext.import_model(copy.deepcopy(model)), folder, "gguf")
    return folder / "model.gguf"


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def streamed(file):
    return fmoe_ext.stream(file, 2**40, dtype=torch.float64)


def with_rope(model, **parameters):
    """The model in Transformers with other rope_parameters."""
    config = type(model.config).from_dict(model.config.to_dict())
    config.rope_parameters = config.rope_parameters | parameters
    other = huggingface.use(type(model)(config).double().eval())
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("name", GGUF)
def test_file_alone_has_the_whole_configuration(name, models, tmp_path, monkeypatch):
    model = models[name]
    file = write(model, tmp_path / "out", {}, monkeypatch)
    ours = streamed(file)
    assert type(ours).__name__ == type(model).__name__
    torch.testing.assert_close(logits(ours), logits(model), rtol=1e-5, atol=1e-5)


def rewritten(file, other, keys, tensors=lambda name, data: (data, None), more=(), renamed=None, arch=None):
    """Writes a GGUF file again, with other values of keys, tensors that a function changes, and more -> the file.

    file: or its reader; renamed: {name of a tensor: another one}; arch: another architecture.
    """
    reader = file if isinstance(file, gguf.GGUFReader) else gguf.GGUFReader(file)
    was = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(other, arch or was)
    fields = {
        name.replace(f"{was}.", f"{arch or was}.", 1): (field.contents(), field.types[0])
        for name, field in reader.fields.items()
        if "GGUF." not in name
    }
    changed = {key: (value, KINDS[type(value)]) for key, value in keys.items() if value is not None}
    for name, (contents, kind) in (fields | changed).items():
        if name != "general.architecture" and keys.get(name, 0) is not None:
            writer.add_key_value(name, contents, kind)
    for tensor in reader.tensors:
        data, kind = tensors(tensor.name, tensor.data)
        writer.add_tensor((renamed or {}).get(tensor.name, tensor.name), data, raw_dtype=kind)
    for name, data in more:
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return other


def sweep(plain, arch, names, attributes):
    """Counts keys that, alone and of another value, are refused by name, change nothing, or are an attribute."""
    expected, reader = GgufModel(plain).config.to_dict(), gguf.GGUFReader(plain)
    other = plain.parent / "other.gguf"
    kinds = {"refused": 0, "harmless": 0, "computed": 0}
    for name in names:
        key = name.replace("{arch}", arch).replace("{id}", "0")
        if key in ("general.architecture", "general.alignment"):  # of the file itself
            continue
        rest = key.removeprefix(f"{arch}.")
        for value in VALUES:
            try:
                other.unlink(missing_ok=True)  # ext4 flushes a file that is written again
                file = rewritten(reader, other, {key: value})
                config = GgufModel(file).config
            except CheckpointError as error:
                assert key in str(error) or rest in attributes, f"{key} = {value!r}: {error}"
                kinds["refused"] += 1
                continue
            if rest in attributes:
                attribute = attributes[rest]
                rope = {"factor": 1} | getattr(config, "rope_parameters", {})
                found = rope[attribute] if attribute in rope else getattr(config, attribute)
                assert found == (value if isinstance(value, str) else pytest.approx(float(value))), key
                kinds["computed"] += 1
            else:
                assert config.to_dict() == expected, f"{key} = {value!r} changes the configuration"
                kinds["harmless"] += 1
    return kinds


def test_every_key_is_computed_with_or_harmless_or_refused(models, tmp_path, monkeypatch):
    """Alone, a key of another value is refused by name, changes no configuration, or is an attribute of it."""
    plain = write(models["qwen3_moe"], tmp_path / "plain", {}, monkeypatch)
    attributes = {**Qwen3Moe().attributes, "rope.scaling.factor": "factor"}
    kinds = sweep(plain, ARCH, metadata.names(), attributes)
    assert kinds["refused"] > 400 and kinds["harmless"] > 300 and kinds["computed"] >= 5, kinds


@pytest.mark.parametrize("key", COMPARED)
def test_key_that_differs_from_config_json_is_refused(key, models, tmp_path, monkeypatch):
    model = models["qwen3_moe"]
    value = {
        "expert_weights_norm": False,
        "rope.freq_base": 5e5,
        "attention.layer_norm_rms_epsilon": 1e-3,
    }.get(key, 7)
    file = write(model, tmp_path / "out", {f"{ARCH}.{key}": value}, monkeypatch)
    model.config.save_pretrained(file.parent)
    with pytest.raises(CheckpointError, match=rf"{ARCH}\.{key} is .*, but the model is computed with"):
        streamed(file)


@pytest.mark.parametrize("name", GGUF)
@pytest.mark.parametrize(
    ("scaling", "parameters"),
    [
        (YARN, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
        ({"factor": 3.0}, {"rope_type": "linear", "factor": 3.0}),
        ({"type": "linear", "factor": 3.0}, {"rope_type": "linear", "factor": 3.0}),
        ({"type": "none", "factor": 3.0}, {}),
        (
            YARN | {"attn_factor": 0.9, "yarn_beta_fast": 20.0, "yarn_beta_slow": 2.0},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "attention_factor": 0.9 * (1 + 0.1 * math.log(4)),
                "beta_fast": 20.0,
                "beta_slow": 2.0,
            },
        ),
    ],
    ids=["yarn", "linear by default", "linear", "none", "yarn, all parameters"],
)
def test_rope_scaling_is_computed_as_transformers_does(
    name, scaling, parameters, models, tmp_path, monkeypatch
):
    model, arch = models[name], GGUF[name][1]
    keys = {f"{arch}.rope.scaling.{key}": value for key, value in scaling.items()}
    file = write(model, tmp_path / "out", keys, monkeypatch)
    expected = logits(with_rope(model, **parameters))
    torch.testing.assert_close(logits(streamed(file)), expected, rtol=1e-5, atol=1e-5)
    assert parameters == {} or (expected - logits(model)).abs().max() > 0.01
    with_rope(model, **parameters).config.save_pretrained(file.parent)
    torch.testing.assert_close(logits(streamed(file)), expected, rtol=1e-5, atol=1e-5)
    if parameters:
        model.config.save_pretrained(file.parent)
        with pytest.raises(
            CheckpointError, match=r"rope\.scaling\.\* say rope_type .*, but config\.json says"
        ):
            streamed(file)


@pytest.mark.parametrize("name", GGUF)
def test_rope_scaling_is_computed_as_llama_cpp_does(name, models, tmp_path, monkeypatch):
    llama_cpp = llama_cpp_or_skip()
    keys = {f"{GGUF[name][1]}.rope.scaling.{key}": value for key, value in YARN.items()}
    file = write(models[name], tmp_path / "out", keys, monkeypatch)
    expected = llama_cpp.logits(file, IDS[0].tolist()).log_softmax(-1)
    found = logits(streamed(file))[0].log_softmax(-1)
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "longrope"}, "rope.scaling.type is 'longrope'"),
        ({"type": "x" * 100}, r"rope.scaling.type is 'x{59}\.\.\., which is not computed here"),
        ({"type": "yarn", "factor": 0.5}, "rope.scaling.factor is 0.5"),
        (YARN | {"yarn_log_multiplier": 0.1}, "rope.scaling.yarn_log_multiplier is 0.1"),
        (YARN | {"yarn_ext_factor": 0.5}, "rope.scaling.yarn_ext_factor is 0.5"),
        ({"type": "linear", "factor": 2.0, "attn_factor": 0.5}, "rope.scaling.attn_factor is 0.5"),
        ({"type": "linear", "factor": "2"}, "rope.scaling.factor is '2', but must be a number"),
        (YARN | {"attn_factor": "1"}, "rope.scaling.attn_factor is '1', but must be a number"),
        (YARN | {"yarn_beta_fast": True}, "rope.scaling.yarn_beta_fast is True, but must be a number"),
    ],
)
def test_rope_scaling_that_is_not_computed_is_refused(scaling, message, models, tmp_path, monkeypatch):
    keys = {f"{ARCH}.rope.scaling.{key}": value for key, value in scaling.items()}
    file = write(models["qwen3_moe"], tmp_path / "out", keys, monkeypatch)
    with pytest.raises(CheckpointError, match=message):
        streamed(file)
    # with a configuration beside it
    with pytest.raises(CheckpointError, match=message):
        metadata.check(open_gguf(file), models["qwen3_moe"].config)


def test_notes_of_other_programs_change_nothing(models, tmp_path, monkeypatch):
    model = models["qwen3_moe"]
    notes = {
        "mradermacher.quantize_version": 2,
        "quantize.imatrix.file": "x.dat",
        "general.finetune": "Instruct",
    }
    ours = streamed(write(model, tmp_path / "out", notes, monkeypatch))
    torch.testing.assert_close(logits(ours), logits(model), rtol=1e-5, atol=1e-5)
    other = write(model, tmp_path / "other", {"llama.rope.freq_base": 5.0}, monkeypatch)
    with pytest.raises(CheckpointError, match=r"llama\.rope\.freq_base is 5\.0, which is not computed here"):
        streamed(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_experts_in_a_floating_dtype_are_read(dtype, models, tmp_path, monkeypatch):
    model = models["qwen3_moe"]
    file = write(copy.deepcopy(model).to(dtype), tmp_path / "out", {}, monkeypatch)
    rounded = with_rope(model)
    rounded.load_state_dict({name: value.to(dtype) for name, value in model.state_dict().items()})
    torch.testing.assert_close(logits(streamed(file)), logits(rounded), rtol=1e-5, atol=1e-5)


def test_gate_of_a_shared_expert_with_one_row_is_read(models, tmp_path, monkeypatch):
    """As llama.cpp's converter writes Transformers' Qwen2-MoE."""
    model = models["qwen2_moe"]

    def as_row(name, data):
        return data.reshape(1, -1) if "ffn_gate_inp_shexp" in name else data, None

    file = rewritten(write(model, tmp_path / "out", {}, monkeypatch), tmp_path / "row.gguf", {}, as_row)
    assert (1, 32) in [tuple(tensor.data.shape) for tensor in gguf.GGUFReader(file).tensors]
    torch.testing.assert_close(logits(streamed(file)), logits(model), rtol=1e-5, atol=1e-5)


def test_language_model_of_qwen3_vl_is_read_as_qwen3(models, tmp_path, monkeypatch):
    """Its sections of a head, for time, height and width, have one position in a text: as llama.cpp."""
    model = models["qwen3_moe"]
    keys = {"qwen3vlmoe.n_deepstack_layers": 0, "qwen3vlmoe.rope.dimension_sections": [2, 2, 2, 0]}
    file = rewritten(
        write(model, tmp_path / "out", {}, monkeypatch), tmp_path / "vl.gguf", keys, arch="qwen3vlmoe"
    )
    torch.testing.assert_close(logits(streamed(file)), logits(model), rtol=1e-5, atol=1e-5)
    by_llama = llama_cpp_or_skip().logits(file, IDS[0].tolist()).log_softmax(-1)
    assert (logits(model)[0].log_softmax(-1) - by_llama).abs().max() < 1e-4
    file = rewritten(file, tmp_path / "other.gguf", {"qwen3vlmoe.expert_used_count": 7})
    model.config.save_pretrained(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"qwen3vlmoe\.expert_used_count is 7, but the model is computed"
    ):
        streamed(file)


def test_frequencies_of_a_tensor_are_refused(models, tmp_path, monkeypatch):
    file = write(models["mixtral"], tmp_path / "out", {}, monkeypatch)
    frequencies = SimpleNamespace(name="rope_freqs.weight", data=torch.tensor([1.0, 2.0]).numpy())
    opened = open_gguf(file)
    opened.tensors = [frequencies]
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight scales frequencies"):
        metadata.check(opened, models["mixtral"].config)
    frequencies.data[1] = 1
    metadata.check(opened, models["mixtral"].config)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"model_type": ["qwen3_moe"]}', '{"model_type": "of_tomorrow"}']
)
def test_damaged_config_json_beside_a_file_is_one_error(text, models, tmp_path, monkeypatch):
    file = write(models["qwen3_moe"], tmp_path / "out", {}, monkeypatch)
    (file.parent / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        streamed(file)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_kernels_of_a_hub_are_refused_by_name(key, models, tmp_path, monkeypatch):
    file = write(models["qwen3_moe"], tmp_path / "out", {}, monkeypatch)
    models["qwen3_moe"].config.save_pretrained(file.parent)
    config = json.loads((file.parent / "config.json").read_text())
    (file.parent / "config.json").write_text(
        json.dumps(config | {"x": {key: "kernels-community/flash-attn3"}})
    )
    for path in (file, file.parent):
        with pytest.raises(
            CheckpointError, match=f"says {key} 'kernels-community/flash-attn3', code of a hub"
        ):
            streamed(path)


def table():
    """The rows of docs/formats.md on metadata keys."""
    kinds = {
        "compared": [],
        "read": [],
        "one value": [],
        "changes no logit": [],
        "refused": [],
    }
    for name in sorted(metadata.names()):
        key = name.removeprefix("{arch}.")
        kind = "refused"
        if key in COMPARED:
            kind = "compared"
        elif key in READ or key.removeprefix(rope.SCALING) in (*rope.YARN, "type", "factor", "attn_factor"):
            kind = "read"
        elif key in metadata.ONLY:
            kind = "one value"
            key = f"{key} = {' or '.join(map(str, metadata.ONLY[key]))}"
        elif key.startswith(metadata.NOTES) or key == rope.SCALING + "finetuned":
            kind = "changes no logit"
        kinds[kind].append(f"`{key}`")
    return "\n".join(f"| {kind} | {', '.join(keys)} |" for kind, keys in kinds.items())


def routing_table():
    """The rows of docs/formats.md on architectures whose files say how their routers compute."""
    rows = []
    for kind in sorted(ARCHITECTURES, key=lambda kind: kind.model_type):
        if not issubclass(kind, FixedRouter):
            known, needs = (
                ", ".join(f"`{key}`" for key in keys)
                for keys in (sorted({*ROUTING, *kind.keys, *kind.read}), kind.needs)
            )
            rows.append(f"| `{kind.name}` ({kind.model_type}) | {known} | {needs or 'none more'} |")
    return "\n".join(rows)


def test_documentation_has_the_table_of_keys():
    page = Path(__file__).parents[2].joinpath("docs/formats.md").read_text()
    assert table() in page, "paste the result of tests.formats.test_gguf_keys.table()"
    assert routing_table() in page, "paste the result of tests.formats.test_gguf_keys.routing_table()"


def test_folder_of_a_gguf_file_is_refused_with_the_name_of_the_file(tmp_path):
    """export() writes such a folder."""
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors.*: give the file .*/model\.gguf"):
        fmoe_ext.stream(tmp_path, "1MiB")


def test_biases_of_queries_and_keys_are_in_the_order_of_their_weights(tmp_path, monkeypatch):
    """llama.cpp's converter turns both for a rotation of neighbours."""
    llama_cpp = llama_cpp_or_skip()
    model = make("granitemoe", **MODELS["granitemoe"], attention_bias=True)
    plain = make("granitemoe", **MODELS["granitemoe"])
    plain.load_state_dict(model.state_dict(), strict=False)
    file = write(plain, tmp_path / "out", {}, monkeypatch)
    model.config.save_pretrained(file.parent)
    names = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
    biases = []
    for i, layer in enumerate(model.model.layers):
        for ours, theirs in names.items():
            bias = layer.self_attn.get_submodule(f"{ours}_proj").bias.detach().float()
            if ours in "qk":
                bias = bias.view(-1, 2, layer.self_attn.head_dim // 2).mT.flatten()
            biases.append((f"blk.{i}.{theirs}.bias", bias.numpy()))
    rewritten(file, file.parent / "biased.gguf", {}, more=biases)
    expected = logits(model).log_softmax(-1)[0]
    found = logits(streamed(file.parent / "biased.gguf")).log_softmax(-1)[0]
    assert (found - expected).abs().max() <= 1e-5
    found = llama_cpp.logits(file.parent / "biased.gguf", IDS[0].tolist()).log_softmax(-1)
    assert (found - expected).abs().max() <= 1e-4
