"""prune() of a GGUF file: bytes of experts, metadata, and llama.cpp's log-probabilities."""

import shutil
import struct

import numpy as np
import pytest
import torch

import fmoe_ext
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.compress import prune
from tests.finetune.streamed_models import WIDE, save, split_gguf, write_gguf

gguf = pytest.importorskip("gguf", reason="pip install gguf")

from tests.formats.test_gguf import llama_cpp_or_skip, of_transformers  # noqa: E402


def tokens(count=600):
    return torch.randint(3, 61, (count,), generator=torch.Generator().manual_seed(3))


def run(file, out, **options):
    return prune(file, out, tokens(), **{"experts": 4, "seq_len": 20} | options)


def read(file):
    reader = gguf.GGUFReader(file)
    facts = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return facts, {t.name: (t.tensor_type.name, np.array(t.data)) for t in reader.tensors}


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "qwen2_moe", "olmoe"])
def test_llama_cpp_computes_the_pruned_file_as_we_do(name, tmp_path):
    llama_cpp = llama_cpp_or_skip()
    fmoe_ext.export(of_transformers(name), tmp_path / "model", "gguf")
    report = run(tmp_path / "model/model.gguf", tmp_path / "out")
    file = tmp_path / "out/model.gguf"
    ids = tokens(12)
    with torch.no_grad():
        expected = fmoe_ext.stream(file, 2**30, dtype=torch.float32)(input_ids=ids[None]).logits[0]
    expected = expected.double().log_softmax(-1)
    got = llama_cpp.logits(file, ids.tolist()).log_softmax(-1)
    assert got.shape == expected.shape and expected.std() > 0.1
    assert (got - expected).abs().max() <= 1e-5
    assert report["loss_after"] > 0 and all(len(layer["kept"]) == 4 for layer in report["layers"].values())


@pytest.mark.parametrize("kind", ["q4_k", "q8_0"])
def test_packed_bytes_and_metadata_stay(kind, tmp_path):
    folder = save(tmp_path / "model", dtype=torch.float32, num_hidden_layers=2, **WIDE)
    file, _ = write_gguf(folder, kind)
    before = file.read_bytes()
    report = run(file, tmp_path / "out")
    assert file.read_bytes() == before
    (old_facts, old), (facts, new) = read(file), read(tmp_path / "out/model.gguf")
    assert facts.pop("qwen3moe.expert_count", 4) == 4
    assert facts == {k: v for k, v in old_facts.items() if k != "qwen3moe.expert_count"}
    kept = [layer["kept"] for layer in report["layers"].values()]
    assert old.keys() == new.keys()
    for name, (kind_of_old, values) in old.items():
        rows = kept[int(name.split(".")[1])] if "exps" in name or "gate_inp" in name else slice(None)
        assert new[name][0] == kind_of_old and np.array_equal(new[name][1], values[rows]), name


def test_split_file_is_pruned_to_the_same_bytes(tmp_path):
    folder = save(tmp_path / "model", dtype=torch.float32, num_hidden_layers=2, **WIDE)
    file, _ = write_gguf(folder, "q4_k")
    parts = split_gguf(file, tmp_path / "parts", 3)
    shutil.copy(file.with_name("config.json"), tmp_path / "parts")
    assert len(parts) > 3
    run(file, tmp_path / "out")
    run(parts[0], tmp_path / "of_parts")
    assert read(tmp_path / "of_parts/split.gguf")[0] == read(tmp_path / "out/model.gguf")[0]
    assert (tmp_path / "of_parts/split.gguf").read_bytes() == (tmp_path / "out/model.gguf").read_bytes()


def test_empty_list_of_the_metadata_is_left_out(tmp_path):
    """Ollama writes some, and the package gguf cannot."""
    fmoe_ext.export(of_transformers("qwen3_moe"), tmp_path / "model", "gguf")
    file = tmp_path / "model/model.gguf"
    data, reader = file.read_bytes(), gguf.GGUFReader(file)
    num_tensors, num_keys = struct.unpack("<QQ", data[8:24])
    key = b"general.tags"
    empty = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, 8, 0)  # a list of strings
    last = reader.tensors[-1].field
    end = last.offset + sum(int(part.nbytes) for part in last.parts)
    head = data[:8] + struct.pack("<QQ", num_tensors, num_keys + 1) + empty + data[24:end]
    head += b"\0" * (-len(head) % reader.alignment)
    file.write_bytes(head + data[reader.data_offset :])
    report = run(file, tmp_path / "out")
    facts, _ = read(tmp_path / "out/model.gguf")
    assert facts["qwen3moe.expert_count"] == 4 and "general.tags" not in facts
    assert report["loss_after"] > 0


def test_tensors_of_experts_that_are_not_known_are_refused(tmp_path):
    fmoe_ext.export(of_transformers("qwen3_moe"), tmp_path / "model", "gguf")
    file = tmp_path / "model/model.gguf"
    file.write_bytes(file.read_bytes().replace(b"blk.0.ffn_gate_inp.weight", b"blk.0.ffn_exps_inp.weight"))
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_exps_inp\.weight"):
        run(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()
