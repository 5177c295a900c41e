"""Single files: what the safetensors library reads and writes, parts of tensors, damage."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fmoe_ext import FMoETransformerMLP, checkpoint
from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.checkpoint.safetensors_file import (
    DTYPES,
    StoredTensor,
    joined,
    read_safetensors,
    read_unmapped,
    renew_checksum,
    verify_safetensors,
    write_safetensors,
)


def tensors():
    torch.manual_seed(0)
    some = {f"x.{name}": torch.randn(3, 4, 2).mul(9).to(dtype) for name, dtype in DTYPES.items()}
    return {**some, "number": torch.tensor(1.5), "empty": torch.zeros(0, 3), "strided": torch.randn(4, 6).t()}


def same_bits(a, b):
    a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


def test_library_reads_what_we_write(tmp_path):
    written, path = tensors(), tmp_path / "new" / "x.safetensors"
    seen = []
    write_safetensors(path, written, {"note": "0" * 64}, seen.append)
    read = load_file(path)
    assert read.keys() == written.keys()
    for name, value in written.items():
        assert (
            read[name].dtype == value.dtype
            and read[name].shape == value.shape
            and same_bits(read[name], value)
        ), name
    with safe_open(path, "pt") as file:
        assert file.metadata()["note"] == "0" * 64
    assert sum(seen) == sum(t.nbytes for t in written.values())
    assert verify_safetensors(path)


def test_we_read_what_the_library_writes(tmp_path):
    written, path = {k: v.contiguous() for k, v in tensors().items()}, tmp_path / "x.safetensors"
    save_file(written, path, {"a": "b"})
    read, metadata = read_safetensors(path)
    assert metadata == {"a": "b"} and read.keys() == written.keys()
    for name, value in written.items():
        assert read[name].shape == value.shape and same_bits(read[name].read(), value), name
        if value.dim():
            assert same_bits(read[name].rows(0, value.shape[0] // 2), value[: value.shape[0] // 2]), name
    assert torch.equal(read["strided"].rows(2, 5), written["strided"][2:5])
    assert not verify_safetensors(path)  # has no checksum


@pytest.mark.parametrize("read", [read_safetensors, read_unmapped])
def test_rows_end_with_the_tensor(tmp_path, read):
    save_file({"a": torch.arange(6.0).view(3, 2), "b": torch.ones(4)}, tmp_path / "x.safetensors")
    assert read(tmp_path / "x.safetensors")[0]["a"].rows(2, 5).tolist() == [[4, 5]]


def test_joined_experts_differ_by_dtype():
    columns = [StoredTensor.of(torch.ones(2, 3, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    with pytest.raises(CheckpointError, match=r"of mlp differ: .*torch\.float32.*torch\.bfloat16"):
        joined("mlp", columns)


def test_tensors_are_fetched_one_at_a_time(tmp_path):
    alive = []

    def fetch(value):
        alive.append(value)
        return torch.full((2, 3), float(value))

    lazy = {str(i): StoredTensor((2, 3), torch.float32, lambda i=i: fetch(i)) for i in range(4)}
    write_safetensors(tmp_path / "x.safetensors", lazy)
    assert alive == [0, 1, 2, 3]
    assert all(load_file(tmp_path / "x.safetensors")[str(i)].eq(i).all() for i in range(4))


def test_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": torch.ones(2)})
    for bad, text in (
        (
            StoredTensor((3,), torch.float32, lambda: torch.ones(3), parts=lambda: iter(())),
            r"a is torch.float32 \[0\], but was announced",
        ),
        (
            StoredTensor((3,), torch.float32, lambda: torch.ones(2)),
            r"a is torch.float32 \[2\], but was announced",
        ),
        (
            torch.ones(2, dtype=torch.complex64),
            "a has dtype torch.complex64, which cannot be written here: torch.float64, ",
        ),
    ):
        with pytest.raises(CheckpointError, match=text):
            write_safetensors(path, {"a": bad})
    assert load_file(path)["a"].tolist() == [1, 1] and [p.name for p in tmp_path.iterdir()] == [
        "x.safetensors"
    ]


def test_metadata_of_a_model(tmp_path):
    path = tmp_path / "model.safetensors"
    model = torch.nn.ModuleList(
        [FMoETransformerMLP(4, 6, 5, activation="swiglu"), FMoETransformerMLP(2, 6, 7)]
    )
    checkpoint.export_safetensors(path, model)
    content = json.loads(read_safetensors(path)[1]["fmoe_ext"])
    assert content["version"] == 1
    assert content["layers"] == {
        "0": {"num_experts": 4, "d_model": 6, "d_hidden": 5},
        "1": {"num_experts": 2, "d_model": 6, "d_hidden": 7},
    }
    assert checkpoint.load(path, model).layers == content["layers"]
    assert torch.equal(load_file(path)["0.experts.htoh4.weight"], model[0].experts.htoh4.weight)


@pytest.mark.parametrize("place", ["length", "header", "metadata", "data", "end"])
@pytest.mark.parametrize("damage", ["flipped", "truncated"])
def test_damage_is_found(tmp_path, place, damage):
    path = tmp_path / "model.safetensors"
    model = FMoETransformerMLP(2, 6, 5)
    checkpoint.export_safetensors(path, model)
    content = bytearray(path.read_bytes())
    num_header = int.from_bytes(content[:8], "little")
    where = {"length": 3, "header": 200, "metadata": 30, "data": num_header + 100, "end": len(content) - 1}[
        place
    ]
    if damage == "truncated":
        del content[where:]
    else:
        content[where] ^= 1
    path.write_bytes(content)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors is (damaged|truncated|no safetensors file)"
    ):
        checkpoint.load(path, model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("sha256", ["abc", "0" * 63, "0" * 64, "\u00e9"])
@pytest.mark.parametrize("copied", [{}, {"fmoe_ext": "{}"}], ids=["theirs", "with a copy of our metadata"])
def test_sha256_of_others_is_not_ours(tmp_path, sha256, copied):
    """Other programs note what they like under "sha256", and copy our metadata into files of other tensors."""
    path, values = tmp_path / "x.safetensors", torch.arange(6, dtype=torch.uint8)
    header = {
        "__metadata__": {**copied, "sha256": sha256},
        "a": {"dtype": "U8", "shape": [6], "data_offsets": [0, 6]},
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    before = len(text).to_bytes(8, "little") + text + bytes(values.tolist())
    path.write_bytes(before)
    assert not verify_safetensors(path)
    renew_checksum(path)
    assert path.read_bytes() == before and torch.equal(load_file(path)["a"], values)


def test_renewed_checksum(tmp_path):
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": torch.zeros(8, dtype=torch.uint8)}, {"sha256": "of the caller", "b": "c"})
    assert verify_safetensors(path)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"x")
    with pytest.raises(CheckpointError, match="damaged: its SHA-256 is"):
        verify_safetensors(path)
    renew_checksum(path)
    assert verify_safetensors(path) and load_file(path)["a"].tolist() == [0] * 7 + [ord("x")]
    write_safetensors(tmp_path / "y.safetensors", load_file(path), {"b": "c"})
    assert path.read_bytes() == (tmp_path / "y.safetensors").read_bytes()
