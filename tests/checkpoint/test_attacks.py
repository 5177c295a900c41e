"""Files made to attack the reader: nothing in them runs, nothing outside the folder is read, nothing is changed."""

import json
import os
import pickle
import struct
import zipfile

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from fmoe_ext import FMoETransformerMLP, checkpoint
from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.checkpoint.chunks import Chunk, SavedTensor
from fmoe_ext.checkpoint.cli import main
from fmoe_ext.checkpoint.torch_metadata import read_metadata
from tests.checkpoint.forged import (
    KEY,
    MakesFolder,
    copy_of_version_1,
    model_of_version_1,
    programs,
    sign,
    with_bytes_entry,
    with_metadata,
)


def refused(path, out, text, is_data=False, **options):
    """load(), merge and convert refuse a checkpoint; nothing is changed and nothing written.

    is_data: the forged and newly signed data of one tensor, which load() meets after it has loaded others.
    """
    model, optimizer = model_of_version_1()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=text):
        checkpoint.load(path, model, **options)
    changed = [key for key, value in model.state_dict().items() if not torch.equal(value, before[key])]
    assert not changed or is_data
    for command in (["merge"], ["convert", "--to", "fmoe_ext"]):
        with pytest.raises(SystemExit, match=f"^error: .*{text}"):
            main([*command, str(path), "-o", str(out)])
    assert not out.exists()


def test_version_1_loads_bitwise(tmp_path):
    """Written by fmoe_ext before manifests said where the tensors are; torch reads the same bits from it.

    The values were computed on some processor: on another, sin() and Adam may end in other last bits.
    """
    path = copy_of_version_1(tmp_path)
    dcp_to_torch_save(path, tmp_path / "expected.pt")
    saved = torch.load(tmp_path / "expected.pt")
    model, optimizer = model_of_version_1()
    for name, p in model.named_parameters():
        torch.testing.assert_close(saved[f"model.{name}"], p.detach(), rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        for p in (*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())):
            p.fill_(7)
    manifest = checkpoint.load(path, model, optimizer)
    assert (manifest.step, manifest.extra, manifest.version) == (3, {"note": "old"}, 1)
    for name, p in model.named_parameters():
        assert torch.equal(p, saved[f"model.{name}"])
        assert optimizer.state[p].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in optimizer.state[p].items():
            assert torch.equal(value, saved[f"optimizer.{key}.{name}"])
    assert checkpoint.load(sign(path), model, optimizer).step == 3  # the forger's tools themselves are right


def test_entry_of_bytes(tmp_path):
    path = with_bytes_entry(copy_of_version_1(tmp_path / "x"), tmp_path / "marker")
    refused(path, tmp_path / "out", f"{KEY} is no tensor")
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("kind", programs("x"))
def test_programs_in_metadata(tmp_path, kind):
    program = programs(tmp_path / "marker")[kind]
    path = with_metadata(copy_of_version_1(tmp_path / "x"), program)
    refused(path, tmp_path / "out", r"\.metadata cannot be read, or is damaged")
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("kind", programs("x"))
def test_programs_in_the_metadata_of_a_megatron_folder(tmp_path, kind):
    folder = tmp_path / "iter_0000003"
    folder.mkdir()
    (folder / ".metadata").write_bytes(programs(tmp_path / "marker")[kind])
    for command in (["inspect"], ["convert", "--to", "fmoe_ext", "-o", str(tmp_path / "out")]):
        with pytest.raises(SystemExit, match=r"\.metadata cannot be read, or is damaged"):
            main([command[0], str(folder), *command[1:]])
    assert not (tmp_path / "marker").exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ([2**40, 0], "is of 1099511627776 layers"),  # which would become 2^40 names
        ([2**60] * 10**5, "a tuple of more than 1000 values"),  # whose product takes minutes
    ],
)
def test_sizes_in_the_metadata_of_a_megatron_folder(tmp_path, shape, text):
    metadata = pickle.loads((copy_of_version_1(tmp_path / "x") / ".metadata").read_bytes())
    entry = metadata.state_dict_metadata.pop(KEY)
    entry.size, entry.chunks = tuple(shape), []
    metadata.state_dict_metadata = {"decoder.layers.mlp.weight": entry}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(SystemExit, match=text):
        main(["inspect", str(tmp_path)])


def replace_chunk(path, content):
    """The data of one tensor becomes `content`, by a checkpoint of today's version."""
    (path / "__9_9.distcp").write_bytes(content)

    def change(manifest):
        offsets, sizes, *_ = manifest["tensors"][KEY]["chunks"][0]
        manifest["tensors"][KEY]["chunks"] = [[offsets, sizes, "__9_9.distcp", 0, len(content)]]

    return sign(path, change)


@pytest.fixture
def ours(tmp_path):
    """A checkpoint of today's version."""
    return checkpoint.save(tmp_path / "ours", *model_of_version_1())


def saved_bytes(tmp_path, value, **options):
    torch.save(value, tmp_path / "value", **options)
    return (tmp_path / "value").read_bytes()


def test_code_in_the_data(tmp_path, ours):
    for content in (
        saved_bytes(tmp_path, MakesFolder(tmp_path / "marker")),
        saved_bytes(tmp_path, MakesFolder(tmp_path / "marker"), _use_new_zipfile_serialization=False),
        pickle.dumps(MakesFolder(tmp_path / "marker")) + b"\0" * 1000,
    ):
        refused(
            replace_chunk(ours, content),
            tmp_path / "out",
            f"the chunk of {KEY} at 0 cannot be read",
            is_data=True,
        )
    assert not (tmp_path / "marker").exists()


def test_other_data_than_announced(tmp_path, ours):
    shape = list(model_of_version_1()[0].gate.gate.weight.shape)
    wrong = (
        (torch.zeros(1, dtype=torch.float64).expand(100, 100), r"is torch\.float64 \[100, 100\], expected"),
        (torch.zeros(shape), r"is torch\.float32 .*, expected torch\.float64"),
        ([torch.zeros(shape)], "is not a tensor"),
        (torch.zeros(shape, dtype=torch.float64).to_sparse(), "is not a tensor"),
    )
    for value, text in wrong:
        content = saved_bytes(tmp_path, value)
        refused(replace_chunk(ours, content), tmp_path / "out", text, is_data=True)


def test_compressed_data(tmp_path, ours):
    """A bomb: kilobytes that become gigabytes."""
    saved_bytes(tmp_path, torch.zeros(4, 6, dtype=torch.float64))
    with zipfile.ZipFile(tmp_path / "value") as source, zipfile.ZipFile(tmp_path / "bomb", "w") as bomb:
        for entry in source.infolist():
            content = source.read(entry) + b"\0" * (2**24 if entry.filename.endswith("data/0") else 0)
            bomb.writestr(entry.filename, content, zipfile.ZIP_DEFLATED)
    refused(
        replace_chunk(ours, (tmp_path / "bomb").read_bytes()), tmp_path / "out", "is compressed", is_data=True
    )


def test_sizes_that_are_not_there(tmp_path, ours):
    """A few bytes that announce terabytes are refused before memory is asked for."""

    def huge(manifest):
        entry = manifest["tensors"][KEY]
        entry["shape"] = entry["chunks"][0][1] = [2**30, 2**10]

    refused(
        sign(ours, huge), tmp_path / "out", r"a chunk \[1073741824, 1024\] of float64 cannot be in \d+ bytes"
    )


CHUNKS = {
    "outside": (lambda c: c[0].__setitem__(0, 1), "has a chunk that is not a part of it"),
    "negative": (lambda c: c[0].__setitem__(0, -1), "not integers in"),
    "not a number": (lambda c: c[1].__setitem__(0, "4"), "not integers in"),
    "no file": (lambda c: c.__setitem__(2, None), "whose name is not a string"),
    "other file": (lambda c: c.__setitem__(2, "/etc/passwd"), "'/etc/passwd', which has no checksum"),
    "behind the end": (lambda c: c.__setitem__(3, 2**40), "is truncated"),
    "too few": (list.clear, "does not describe a tensor"),
}


@pytest.mark.parametrize("kind", CHUNKS)
def test_places_of_chunks(tmp_path, ours, kind):
    change, text = CHUNKS[kind]
    refused(
        sign(ours, lambda manifest: change(manifest["tensors"][KEY]["chunks"][0])), tmp_path / "out", text
    )


def test_chunks_that_overlap(tmp_path, ours):
    """As many elements as the tensor has, but the first half twice: the second would keep what memory has."""

    def twice(manifest):
        chunks = manifest["tensors"][KEY]["chunks"]
        offsets, sizes, *place = chunks[0]
        assert sizes[0] % 2 == 0
        chunks[:] = [[offsets, [sizes[0] // 2, *sizes[1:]], *place]] * 2

    refused(sign(ours, twice), tmp_path / "out", r"the chunks of .* overlap")


@pytest.mark.parametrize(
    ("shape", "boxes", "overlap"),
    [
        ((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 2)), ((2, 2), (2, 2))], False),
        ((4, 4), [((0, 0), (2, 4)), ((1, 0), (2, 2)), ((2, 2), (2, 2))], True),
        ((1, 6), [((0, i), (1, 1)) for i in range(6)], False),
        ((6,), [((0,), (4,)), ((4,), (0,)), ((4,), (2,))], False),  # a rank that has no rows
        ((6,), [((0,), (4,)), ((3,), (2,))], True),
        ((), [((), ())], False),
    ],
)
def test_overlap_of_boxes(shape, boxes, overlap):
    chunks = tuple(Chunk(offsets, sizes, "f", 0, 2**10) for offsets, sizes in boxes)
    tensor = SavedTensor("float32", shape, chunks)
    if overlap:
        with pytest.raises(CheckpointError, match=r"the chunks of t .*overlap"):
            tensor.check("t")
    else:
        tensor.check("t")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", "", "a\\b", "a\0b"])
def test_files_of_the_manifest(tmp_path, ours, name):
    path = sign(ours, lambda manifest: manifest["files"].update({name: {"bytes": 0, "sha256": ""}}))
    refused(path, tmp_path / "out", "is no name of a file in this folder")


def test_links_out_of_the_folder(tmp_path, ours):
    data = ours / "__0_0.distcp"
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    refused(ours, tmp_path / "out", r"__0_0\.distcp is a link to .*elsewhere, outside the folder")
    refused(ours, tmp_path / "out", "is a link to .*elsewhere", verify=False)
    data.unlink()
    (tmp_path / "elsewhere").rename(data)
    folder = ours.parent
    ours.rename(tmp_path / "step-00000009")
    (folder / ours.name).symlink_to(tmp_path / "step-00000009")
    refused(folder, tmp_path / "out", "is a link to .*step-00000009, outside the folder: give that path")
    checkpoint.load(folder / ours.name, model_of_version_1()[0], verify=False)  # named by the user


@pytest.mark.parametrize("name", ["../step-00000009", "/tmp", ".", "step-00000009/../..", "a" * 5000, ""])
def test_latest(tmp_path, ours, name):
    (ours.parent / "latest").write_text(name)
    refused(ours.parent, tmp_path / "out", "latest names .*, which is no checkpoint")


def test_manifests_of_other_things(tmp_path, ours):
    good = (ours / "manifest.json").read_text()
    for text in ("[" * 100000, "[]", "null", "{}", "{", "\xff", '{"version": 2, "sha256": 5}', good[:-40]):
        (ours / "manifest.json").write_bytes(text.encode("latin-1"))
        refused(ours, tmp_path / "out", r"manifest\.json (cannot be read|is damaged)")
    (ours / "manifest.json").write_text(good)
    changes = (
        lambda m: m.update(tensors=[]),
        lambda m: m.update(files={"a": []}),
        lambda m: m.update(routing={"": 5}),
        lambda m: m.update(step="9"),
        lambda m: m.update(unknown=1),
        lambda m: m.update(optimizer={"type": "Adam"}),
        lambda m: m["optimizer"].update(params={"a": 99}),
    )
    for change in changes:
        (ours / "manifest.json").write_text(good)
        refused(sign(ours, change), tmp_path / "out", r"manifest\.json is damaged")
    (ours / "manifest.json").write_text(good)
    refused(
        sign(ours, lambda m: m.update(version=9)), tmp_path / "out", r"has version 9, .* reads versions 1, 2"
    )


def safetensors_with(path, change):
    """A file of two tensors whose header is changed; its data is as long as before."""
    save_file({"a": torch.arange(4.0), "b": torch.arange(4.0, 8.0)}, path)
    content = path.read_bytes()
    (num_header,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + num_header])
    text = change(header) or json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + num_header :])


def offsets(**values):
    return lambda header: [header[name].update(data_offsets=value) for name, value in values.items()] and None


HEADERS = {
    "shifted": offsets(a=[4, 20], b=[20, 36]),
    "negative": offsets(a=[-16, 0]),
    "reversed": offsets(a=[16, 0]),
    "gapped": offsets(a=[0, 12], b=[16, 32]),
    "overlapping": offsets(b=[0, 32]),
    "too short": offsets(b=[16, 24]),
    "other shape": lambda header: header["a"].update(shape=[5]),
    "huge shape": lambda header: header["a"].update(shape=[2**62, 4]),
    "unknown dtype": lambda header: header["a"].update(dtype="Q7"),
    "no object": lambda header: b"[1, 2]",
    "no JSON": lambda header: b"{" * 1000,
    "no text": lambda header: b"\xff\xfe" * 50,
    "metadata of numbers": lambda header: header.update(__metadata__={"a": 1}),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_headers_of_safetensors(tmp_path, kind):
    path = tmp_path / "model.safetensors"
    safetensors_with(path, HEADERS[kind])
    model = torch.nn.ParameterDict({"a": torch.zeros(4), "b": torch.zeros(4)})
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no safetensors file, or"):
        checkpoint.load(path, model)
    assert not model["a"].any() and not model["b"].any()
    with pytest.raises(SystemExit, match=r"^error: .*model\.safetensors is no safetensors file, or"):
        main(["merge", str(path), "-o", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("length", [0, 7, 2**20, 2**40, 2**63, 2**64 - 8])
def test_length_of_the_header(tmp_path, length):
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}" * 20)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no safetensors file, or"):
        checkpoint.load(path, torch.nn.Linear(2, 2))


def huggingface_folder(folder, index):
    folder.mkdir(parents=True)
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(index)
    return folder


@pytest.mark.parametrize("name", ["../secret.safetensors", "{root}/secret.safetensors", "sub/x", 7, None])
def test_weight_map_out_of_the_folder(tmp_path, name):
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "secret.safetensors")
    name = name.format(root=tmp_path) if isinstance(name, str) else name
    folder = huggingface_folder(tmp_path / "hf", json.dumps({"weight_map": {"weight": name, "bias": name}}))
    with pytest.raises(CheckpointError, match="is no name of a file in this folder"):
        checkpoint.load(folder, torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    "index", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', "\0", "[" * 99999]
)
def test_broken_index(tmp_path, index):
    folder = huggingface_folder(tmp_path / "hf", index)
    with pytest.raises(CheckpointError, match=r"index\.json (cannot be read|is damaged)"):
        checkpoint.load(folder, torch.nn.Linear(2, 2))


def test_links_in_folders_of_models(tmp_path):
    """Links out of the folder are refused; those of the hub's cache, into the blobs beside it, pass."""
    state = FMoETransformerMLP(2, 4, 3).state_dict()
    hub = tmp_path / "models--a--b" / "snapshots" / "0f"
    blob = tmp_path / "models--a--b" / "blobs" / "12ab"
    for folder in (hub, blob.parent, tmp_path / "other"):
        folder.mkdir(parents=True)
    save_file(state, blob)
    (hub / "model.safetensors").symlink_to(os.path.relpath(blob, hub))
    model = FMoETransformerMLP(2, 4, 3)
    checkpoint.load(hub, model)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    (tmp_path / "other" / "model.safetensors").symlink_to(blob)
    with pytest.raises(CheckpointError, match=r"other/model\.safetensors is a link to .*12ab"):
        checkpoint.load(tmp_path / "other", model)
    checkpoint.load(tmp_path / "other" / "model.safetensors", model)  # named by the user


def test_enum_members_named_by_getattr_are_read(tmp_path, monkeypatch):
    """As Python 3.11.0 to 3.11.3 pickle them, that of Debian 12 among them."""
    from torch.distributed.checkpoint import metadata

    monkeypatch.setattr(
        metadata._MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name))
    )
    torch.distributed.checkpoint.save(
        {"a": torch.arange(6.0).view(2, 3)}, checkpoint_id=tmp_path, no_dist=True
    )
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    tensors, others = read_metadata(tmp_path / ".metadata")
    assert list(tensors) == ["a"] and others == []
