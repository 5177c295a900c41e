"""GGUF headers that lie: refused by name in time and memory that the file bounds; or the values are the same."""

import os
import struct
import tracemalloc

import numpy as np
import pytest

from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.gguf.file import open_gguf
from tests.sweeps import rest_is_long

gguf = pytest.importorskip("gguf", reason="pip install gguf")

TYPES = gguf.GGMLQuantizationType
ALIGNMENT = 64
FLIPS = ["0x01 0x10 0xFF", "0x02 0x04 0x08 0x20 0x40 0x80"]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Every kind of value, tensors that fill their padding and tensors that do not, floats and blocks."""
    file = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = gguf.GGUFWriter(file, "qwen3moe")
    writer.add_custom_alignment(ALIGNMENT)
    writer.add_uint32("qwen3moe.block_count", 2)
    writer.add_array("tokenizer.ggml.tokens", ["a", "", "ccc"])
    writer.add_array("floats", [1.5, -2.0])
    writer.add_bool("yes", True)
    rng = np.random.default_rng(0)
    writer.add_tensor("norm", rng.normal(size=5).astype(np.float32))
    writer.add_tensor("weight", rng.normal(size=(2, 4, 8)).astype(np.float32))
    writer.add_tensor("half", rng.normal(size=(3, 32)).astype(np.float16))
    packed = rng.integers(1, 255, (2, 3, 2 * 34), dtype=np.uint8)
    writer.add_tensor("blocks", packed, raw_dtype=TYPES.Q8_0)
    writer.add_tensor("last", rng.normal(size=(2, 3)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def content(file):
    """({name: (type, shape, bytes)} of the tensors, {key: value}) that readers compute with."""
    opened = open_gguf(file)
    tensors = {t.name: (t.tensor_type, t.shape, t.data.tobytes()) for t in opened.tensors}
    return tensors, {key: field.contents() for key, field in opened.fields.items()}


def test_is_read_as_the_gguf_package_reads_it(original):
    tensors, values = content(original)
    reader = gguf.GGUFReader(original)
    assert list(tensors) == [t.name for t in reader.tensors]
    opened = open_gguf(original)
    assert opened.alignment == ALIGNMENT and opened.architecture == "qwen3moe"
    for ours, theirs in zip(opened.tensors, reader.tensors, strict=True):
        assert ours.shape == tuple(theirs.shape.tolist()) and ours.tensor_type == theirs.tensor_type
        assert (ours.n_elements, ours.n_bytes, ours.data_offset) == (
            theirs.n_elements,
            theirs.n_bytes,
            theirs.data_offset,
        )
        assert ours.data.dtype == theirs.data.dtype and np.array_equal(ours.data, theirs.data)
    theirs = {key: f for key, f in reader.fields.items() if not key.startswith("GGUF.")}
    assert values == {key: field.contents() for key, field in theirs.items()}
    assert {key: field.types for key, field in opened.fields.items()} == {
        k: f.types for k, f in theirs.items()
    }


def places(file):
    """{part of the header: the bytes [begin, end) of it}."""
    reader = gguf.GGUFReader(file)
    found = {}
    for tensor in reader.tensors:
        at = tensor.field.offset
        for name, part in zip(
            ("length", "name", "n_dims", "dims", "type", "offset"), tensor.field.parts, strict=True
        ):
            found[f"{tensor.name}.{name}"] = at, at + part.nbytes
            at += part.nbytes
    field = reader.fields["general.alignment"]
    end = field.offset + sum(part.nbytes for part in field.parts)
    found["alignment"] = end - 4, end
    return found | {"version": (4, 8), "counts": (8, 24)}


@pytest.mark.parametrize("flips", rest_is_long(FLIPS, FLIPS[:1]))
def test_flipped_bits_are_refused_or_change_nothing(original, tmp_path, flips):
    """Of 65 flips in offsets 54 were computed with, of 54 in types 12.

    A dimension that has grown by what pads its tensor is another shape, which readers compare with the model's.
    """
    expected, _ = content(original)
    data = original.read_bytes()
    file = tmp_path / "model.gguf"
    taken = []
    for part, (begin, end) in places(original).items():
        if part.endswith((".name", ".length")):
            continue  # whose tensor is missed by name
        for at in range(begin, end):
            for bits in (*(1 << bit for bit in range(8)), 0xFF):
                damaged = bytearray(data)
                damaged[at] ^= bits
                file.write_bytes(damaged)
                try:
                    tensors, _ = content(file)
                except CheckpointError as error:
                    assert str(error).startswith(str(file))
                    continue
                shapes = [shape for _, shape, _ in tensors.values()]
                if tensors != expected and shapes == [shape for _, shape, _ in expected.values()]:
                    taken.append((part, at - begin, bits))
    assert not taken


def header(num_tensors=0, num_keys=1):
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys)


def text(value):
    return struct.pack("<Q", len(value)) + value


def array(kind, count, items=b"", key=b"k"):
    return text(key) + struct.pack("<IIQ", 9, kind, count) + items


STRING, ARRAY, U8, U64 = 8, 9, 0, 10
NESTED = struct.pack("<IQ", ARRAY, 1) * 20_000
HOSTILE = {
    "80 bytes claim 2^40 numbers": ((header() + array(U8, 2**40)).ljust(80, b"\0"), f"{2**40} items of k"),
    "80 bytes claim 2^61 numbers": ((header() + array(U64, 2**61)).ljust(80, b"\0"), f"{2**61} items of k"),
    "texts": (header() + array(STRING, 2**40) + bytes(100), f"{2**40} texts of k"),
    "a text": (header() + array(STRING, 2, text(b"a") + struct.pack("<Q", 2**63)), "k ends behind it"),
    "nested arrays": (header() + array(ARRAY, 1, NESTED), "k has arrays in an array"),
    "keys": (header(num_keys=2**60), f"{2**60} keys"),
    "tensors": (header(num_tensors=2**60, num_keys=0), f"{2**60} tensors"),
    "dimensions": (
        header(1, 0) + text(b"t") + struct.pack("<I", 2**31) + bytes(99),
        "t has 2147483648 dimensions",
    ),
    "elements": (
        header(1, 0) + text(b"t") + struct.pack("<IQQQQIQ", 4, *[2**63] * 4, 0, 0) + bytes(64),
        "ends behind it",
    ),
    "a key twice": (header(num_keys=2) + 2 * array(U8, 0), "'k' twice"),
    "no text": (header() + text(b"\xff") + struct.pack("<II", 4, 1), "the name of a key is no text"),
    "type": (header() + text(b"k") + struct.pack("<II", 99, 1), "k has the type 99"),
    "empty": (b"", "it has 0 bytes"),
    "short": (b"GGUF", "it has 4 bytes"),
    "alignment": (
        header() + text(b"general.alignment") + struct.pack("<II", 4, 48),
        "general.alignment is 48, expected a power of two",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_header_is_refused(tmp_path, case):
    data, said = HOSTILE[case]
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=said):
            open_gguf(file)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_many_empty_texts_cost_no_more_than_they_are(tmp_path):
    """4 million of them took more than 90 s; each has 8 bytes in the file. No list is made before it is asked for."""
    count = 20_000
    file = tmp_path / "model.gguf"
    file.write_bytes(header() + array(STRING, count, bytes(8 * count)))
    open_gguf(file)
    tracemalloc.start()
    try:
        opened = open_gguf(file)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert opened.fields["k"].contents() == [""] * count


def test_architecture_that_is_no_text_is_refused(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(header() + array(U8, 3, b"abc", b"general.architecture"))
    with pytest.raises(CheckpointError, match=r"general\.architecture is not there, or no text"):
        _ = open_gguf(file).architecture


def test_texts_that_are_not_utf_8_are_refused(tmp_path):
    """Keys whose values are needed before values() checks them all."""
    file = tmp_path / "model.gguf"
    broken = struct.pack("<I", STRING) + text(b"\xff")
    file.write_bytes(header() + text(b"general.architecture") + broken + bytes(64))
    with pytest.raises(CheckpointError, match="has damaged metadata"):
        _ = open_gguf(file).architecture
    file.write_bytes(header() + text(b"split.count") + broken + bytes(64))
    with pytest.raises(CheckpointError, match="has damaged metadata"):
        open_gguf(file)


def test_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="no regular file"):
        open_gguf(tmp_path / "model.gguf")
