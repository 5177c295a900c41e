"""Checkpoints as a forger makes them: every checksum is right."""

import hashlib
import json
import pickle
import shutil
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from fmoe_ext import FMoETransformerMLP, SigmoidGate

VERSION_1 = (
    Path(__file__).parent / "data" / "version-1"
)  # written by fmoe_ext before manifests said where tensors are
NAME = "step-00000003"
KEY = "model.gate.gate.weight"


def model_of_version_1():
    """The model that was saved there; its optimizer's state too -> (model, optimizer)."""
    model = FMoETransformerMLP(
        4, 6, 5, activation="swiglu", gate=SigmoidGate, bias=False, gate_bias=False, top_k=2
    ).double()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.arange(p.numel(), dtype=p.dtype).reshape(p.shape).mul(0.37).add(i).sin())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for i, p in enumerate(model.parameters()):
        p.grad = torch.arange(p.numel(), dtype=p.dtype).reshape(p.shape).mul(0.11).add(i).cos()
    optimizer.step()
    return model, optimizer


def copy_of_version_1(folder):
    """A folder with a copy of it -> the checkpoint in it."""
    shutil.copytree(VERSION_1, folder, dirs_exist_ok=True)
    return folder / NAME


def sign(path, change=lambda content: None):
    """Changes the manifest of a checkpoint and signs all anew; the digest has no key."""
    manifest = path / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["sha256"]
    content["files"] = {
        file.name: {
            "bytes": file.stat().st_size,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
        for file in path.iterdir()
        if file != manifest
    }
    change(content)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    manifest.write_text(json.dumps({**content, "sha256": digest}))
    return path


class MakesFolder:
    """Pickled, it is a call of os.mkdir."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        import os

        return os.mkdir, (str(self.marker),)


def with_metadata(path, content):
    (path / ".metadata").write_bytes(content)
    return sign(path)


def with_bytes_entry(path, marker):
    """A tensor becomes an entry of bytes, which torch's planner unpickles: torch.load(weights_only=False)."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    torch.save(MakesFolder(marker), path / "__0_1.distcp")
    metadata.state_dict_metadata[KEY] = BytesStorageMetadata()
    place = _StorageInfo("__0_1.distcp", 0, (path / "__0_1.distcp").stat().st_size)
    metadata.storage_data[MetadataIndex(KEY)] = place
    return with_metadata(path, pickle.dumps(metadata))


def dataclass_program(marker):
    """Annotations are put on a class and `dataclass`, which the module imports, makes source text of their names."""
    name = f'x=__import__("os").mkdir("{marker}")[0],y=\''
    module = b"ctorch.distributed.checkpoint.metadata\n"
    annotations = pickle.dumps((None, {"__annotations__": {name: "int"}}), 2)[2:-1]
    storage_meta = module + b"StorageMeta\n"
    return (
        b"\x80\x02" + storage_meta + annotations + b"b0" + module + b"dataclass\n" + storage_meta + b"\x85R."
    )


def _doubled(times):
    """Instructions that make the top of the stack a pair of itself, and so on."""
    return b"".join(b"q%ch%c\x86" % (i, i) for i in range(times))


FIELDS = {  # of metadata: {field: its owner}
    "fqn": lambda metadata: next(iter(metadata.storage_data)),
    "offset": lambda metadata: next(iter(metadata.storage_data)),
    "relative_path": lambda metadata: next(iter(metadata.storage_data.values())),
    "length": lambda metadata: next(iter(metadata.storage_data.values())),
    "transform_descriptors": lambda metadata: next(iter(metadata.storage_data.values())),
    "offsets": lambda metadata: metadata.state_dict_metadata[KEY].chunks[0],
    "sizes": lambda metadata: metadata.state_dict_metadata[KEY].chunks[0],
    "size": lambda metadata: metadata.state_dict_metadata[KEY],
    "storage_data": lambda metadata: metadata,
}


def _with_field(field, value):
    """Metadata, pickled, with another value in one of FIELDS."""
    metadata = pickle.loads((VERSION_1 / NAME / ".metadata").read_bytes())
    object.__setattr__(FIELDS[field](metadata), field, value)
    return pickle.dumps(metadata)


def _endless():
    """A tuple of 2^60 values."""
    value = ()
    for _ in range(60):
        value = (value, value)
    return value


def programs(marker):
    """{kind: pickle} that call something, or use up the memory."""
    call = f"__import__('os').mkdir({str(marker)!r})".encode()
    text = b"X" + len(call).to_bytes(4, "little") + call
    path = str(marker).encode()
    nested = pickle.loads((VERSION_1 / NAME / ".metadata").read_bytes())
    nested.planner_data = MakesFolder(marker)
    return {
        "reduce": pickle.dumps(MakesFolder(marker)),
        "reduce inside": pickle.dumps(nested),
        "dataclass": dataclass_program(marker),
        "eval": b"\x80\x02cbuiltins\neval\n" + text + b"\x85R.",
        "inst": b"(V" + path + b"\niposix\nmkdir\n.",
        "obj": b"\x80\x02(cposix\nmkdir\nX" + len(path).to_bytes(4, "little") + path + b"o.",
        "newobj_ex": b"\x80\x04cposix\nmkdir\nX" + len(path).to_bytes(4, "little") + path + b"\x85}\x92.",
        "dotted name": b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x0eos.path.os.sep\x93.",
        "extension": b"\x80\x02\x82\x01.",
        "persistent": b"\x80\x02" + text + b"Q.",
        "build a class": b"\x80\x02cpathlib\nPosixPath\n}X\x05\x00\x00\x00parts" + text + b"sb.",
        "call of a value": b"\x80\x02" + text + b")R.",
        "call of a dtype": b"\x80\x02ctorch\nfloat32\n)R.",
        "names by a function": b"\x80\x02cbuiltins\ngetattr\n(ctorch\nSize\n" + text + b"tR.",
        "memo that is not there": b"\x80\x04j\xff\xff\xff\x7f.",
        "place in the memo far away": b"\x80\x02Nr\xff\xff\xff\x7f.",
        "huge frame": b"\x80\x04\x95" + (2**60).to_bytes(8, "little") + b"N.",
        "list in itself": b"\x80\x02]q\x00h\x00a.",
        "class with a state": b"\x80\x02ctorch\nSize\n}b.",
        "huge text announced": b"\x80\x04\x8d" + (2**40).to_bytes(8, "little") + b"x.",
        "marks only": b"\x80\x02" + b"(" * 10000 + b".",
        "tuples in tuples": b"\x80\x02)" + b"\x85" * 200000 + b".",
        "deep tuple as a key": b"\x80\x02})" + b"\x85" * 300000 + b"Ns.",
        "tuple of 2^60 values as a key": b"\x80\x02})" + _doubled(60) + b"Ns.",
        "tuple of 2^60 values as a key of several": b"\x80\x02}()" + _doubled(60) + b"Nu.",
        **{f"{field} of 2^60 values": _with_field(field, _endless()) for field in FIELDS},
        "nothing": b"",
        "text": b"not a pickle\n",
    }
