"""GGUF files that are truncated, or have tensors of other shapes or names: one error, which names the tensor."""

import re
import shutil
import struct

import pytest
import torch
import transformers

from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.gguf import architecture_for, config_of, metadata, open_gguf
from tests.finetune.streamed_models import split_gguf
from tests.formats import test_gguf_routing
from tests.formats.test_gguf_keys import rewritten, streamed

gguf = pytest.importorskip("gguf", reason="pip install gguf")

files = test_gguf_routing.files  # a fixture
LATEST = (
    "granitemoeshared",
    "granitemoehybrid",
    "lfm2_moe",
    "afmoe",
    "exaone_moe",
    "glm_moe_dsa",
    "nemotron_h",
    "kimi_linear",
    "gemma4_text",
)


@pytest.mark.parametrize("name", LATEST)
def test_tensor_of_another_shape_or_name_or_none_is_one_error(name, files, tmp_path):
    """The error has the tensor's name, there or in Transformers, or the key that does not fit it."""
    _, arch, original = files(name)
    tensors = {t.name.split(".", 2)[-1]: t.name for t in gguf.GGUFReader(original).tensors}
    for kind, full in tensors.items():
        known = (
            rf"{re.escape(kind)}|model\.layers\.\d|(embed_tokens|norm|lm_head)\.weight|{arch}\.|gate and up"
        )
        for cut in (lambda data: data[:-1], lambda data: data[..., :-1], None):

            def change(other, data, full=full, cut=cut):
                return (cut(data).copy() if cut and other == full else data), None

            file = rewritten(
                original, tmp_path / "model.gguf", {}, change, renamed={} if cut else {full: f"{full}_x"}
            )
            with pytest.raises(CheckpointError, match=known) as caught:
                streamed(file)
            assert "ignore_mismatched_sizes" not in str(caught.value)


def test_layer_that_is_no_number_is_one_error(files, tmp_path):
    _, _, original = files("exaone_moe")
    full = next(t.name for t in gguf.GGUFReader(original).tensors if t.name.endswith("ffn_down_exps.weight"))
    odd = re.sub(r"blk\.\d+", "blk.x", full)
    file = rewritten(original, tmp_path / "model.gguf", {}, lambda _, data: (data, None), renamed={full: odd})
    with pytest.raises(CheckpointError, match=r"model\.gguf has no blk\.N\.ffn_down_exps\.weight"):
        streamed(file)


def test_tensor_of_tokens_that_is_missing_is_called_a_tensor(files, tmp_path):
    _, _, original = files("exaone_moe")
    renamed = {"token_embd.weight": "token_embd.weights"}
    file = rewritten(original, tmp_path / "model.gguf", {}, renamed=renamed)
    with pytest.raises(CheckpointError, match=r"model\.gguf has no tensor token_embd\.weight$"):
        streamed(file)


def test_model_type_that_transformers_lacks_is_not_a_fault_of_the_file(files, monkeypatch):
    class Later(architecture_for("exaone_moe").__class__):
        model_type = "exaone_moe_2"

        def accepts(self, fields):
            return True

    monkeypatch.setattr(metadata, "ARCHITECTURES", (Later,))
    said = (
        rf"transformers {re.escape(transformers.__version__)} has no model type exaone_moe_2: pip install -U"
    )
    with pytest.raises(CheckpointError, match=said):
        config_of(open_gguf(files("exaone_moe")[2]))


@pytest.mark.parametrize("name", LATEST)
def test_truncated_file_is_one_error(name, files, tmp_path):
    _, _, original = files(name)
    data = original.read_bytes()
    for part in (0.02, 0.3, 0.99):
        (tmp_path / "model.gguf").write_bytes(data[: int(len(data) * part)])
        with pytest.raises(CheckpointError, match=r"model\.gguf is no GGUF file, or truncated, or damaged"):
            streamed(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["granitemoehybrid", "lfm2_moe", "nemotron_h"])
def test_heads_of_layers_that_no_model_has_are_refused(name, files, tmp_path):
    model, arch, original = files(name)
    count = model.config.num_hidden_layers
    for heads, said in (
        ([2] * (count - 1), f"has {count - 1} entries for {count} layers"),
        ([1, 2] * (count // 2), r"has \[1, 2\] heads in layers of attention"),
        ("two", "is 'two', no number of heads"),
        ([2] * count, r"blk\.0|layers\.0|is \[2, 2, .*, but the model is computed with"),
    ):
        file = rewritten(original, tmp_path / "model.gguf", {f"{arch}.attention.head_count_kv": heads})
        with pytest.raises(CheckpointError, match=said):
            streamed(file)


@pytest.mark.parametrize("name", ["glm4_moe", "gemma4_text"])
def test_split_file_is_read_as_the_whole_one(name, files, tmp_path):
    """Gate, up and down of a layer's experts lie in different parts, and metadata in the first one alone."""
    _, _, original = files(name)
    parts = split_gguf(original, tmp_path / "parts", 2)
    assert len(parts) > 3
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        whole, split = (streamed(file)(input_ids=ids).logits for file in (original, parts[0]))
    assert torch.equal(whole, split)
    assert whole.std() > 0.01


def edited(part, change):
    """Replaces bytes of a part, which must be there."""
    data = part.read_bytes()
    old, new = change
    assert data.count(old) == 1
    part.write_bytes(data.replace(old, new))


def key(name, layout, value):
    kind = {"H": 2, "i": 5}[layout]
    return name.encode() + struct.pack(f"<I{layout}", kind, value)


def test_part_that_is_missing_or_another_one_is_refused_by_name(files, tmp_path):
    _, _, original = files("glm4_moe")
    made = split_gguf(original, tmp_path / "parts", 8)
    count, total = len(made), len(gguf.GGUFReader(original).tensors)
    end = f"of-{count:05d}.gguf"
    second = gguf.GGUFReader(made[1]).tensors[0].name

    def lose(parts):
        parts[1].unlink()
        parts[-1].unlink()

    def exchange(parts):
        content = parts[1].read_bytes()
        parts[1].write_bytes(parts[2].read_bytes())
        parts[2].write_bytes(content)

    def rename_tensor(parts):
        first = gguf.GGUFReader(parts[0]).tensors
        same = next(t.name for t in first if len(t.name) == len(second) and t.name != second)
        edited(parts[1], (second.encode(), same.encode()))

    refused = {
        "missing": (
            lose,
            f"of {count} parts of a model, but split-00002-{end}, split-{count:05d}-{end} are not",
        ),
        "order": (exchange, f"split-00002-{end}: split.no is 2, but by its name it is 1"),
        "count": (
            lambda parts: edited(
                parts[1], (key("split.count", "H", count), key("split.count", "H", count + 1))
            ),
            f"split-00002-{end}: split.count is {count + 1}, but by its name it is {count}",
        ),
        "total": (
            lambda parts: edited(
                parts[0],
                (key("split.tensors.count", "i", total), key("split.tensors.count", "i", total + 1)),
            ),
            f"split.tensors.count is {total + 1}, but its {count} parts have {total} tensors",
        ),
        "twice": (rename_tensor, f"split-00001-{end} and .*split-00002-{end} both have "),
        "truncated": (
            lambda parts: parts[2].write_bytes(parts[2].read_bytes()[:-40]),
            f"split-00003-{end} is no",
        ),
    }
    for name, (change, said) in refused.items():
        shutil.copytree(tmp_path / "parts", tmp_path / name)
        parts = sorted((tmp_path / name).iterdir())
        change(parts)
        with pytest.raises(CheckpointError, match=said):
            streamed(parts[0])
    with pytest.raises(CheckpointError, match=f"give the first one, {made[0]}"):
        streamed(made[1])
    renamed = made[0].rename(tmp_path / "parts" / "model.gguf")
    with pytest.raises(CheckpointError, match=f"found by their names: call them NAME-00001-{end}"):
        streamed(renamed)


def test_file_of_another_order_of_bytes_is_refused(files, tmp_path):
    _, arch, original = files("glm4_moe")
    reader = gguf.GGUFReader(original)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", arch, False, gguf.GGUFEndian.BIG)
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data.copy(), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="another order of bytes"):
        streamed(tmp_path / "model.gguf")
