"""GGUF files that are truncated, or have tensors of other shapes or names: one error, which names the tensor."""

import re

import pytest

from fmoe_ext.checkpoint import CheckpointError
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


def test_one_part_of_several_is_refused_before_a_tensor_is_missed(files, tmp_path):
    """As gguf-split writes them: metadata are in the first part alone, and a layer may begin in one, end in another."""
    _, arch, original = files("glm4_moe")
    reader = gguf.GGUFReader(original)
    for at in (0, len(reader.tensors) // 2):
        for number, tensors in enumerate((reader.tensors[:at], reader.tensors[at:])):
            file = tmp_path / f"model-{number + 1:05d}-of-00002.gguf"
            writer = gguf.GGUFWriter(file, arch)
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", 2)
            for tensor in tensors:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            with pytest.raises(
                CheckpointError, match=r"00002\.gguf: split\.count is 2, .*gguf-split --merge"
            ):
                streamed(file)


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
