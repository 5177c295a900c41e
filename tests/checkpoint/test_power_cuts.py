"""Every command that writes a model, cut off from power at every point: nothing wrong is ever taken for a model.

After each cut that tests/power_cuts.py knows the place of the result must be empty, refused by our readers and by
Transformers, or whole and right; and the same command, and one with other inputs, must end with the right bytes or say
what is in the way. Of fmoe_ext_command.COMMANDS these write models: adapter, checkpoint, export, prune; then there are
export(), save_pretrained, checkpoint.save and Megatron's files. `serve` has tests of its own (tests/remote/simulation).
"""

import functools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fmoe_ext
from fmoe_ext import checkpoint
from fmoe_ext.checkpoint import CheckpointError, convert
from fmoe_ext.checkpoint.cli import main as checkpoint_cli
from fmoe_ext.checkpoint.model_folder import ModelFolder
from fmoe_ext.checkpoint.shards import INDEX
from fmoe_ext.compat.megatron import checkpoint as megatron
from fmoe_ext.compress.cli import main as prune
from fmoe_ext.finetune.adapters.cli import main as adapter
from fmoe_ext.formats.cli import main as export_quantized
from tests import power_cuts

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("gguf")

from transformers import AutoModelForCausalLM

from tests.finetune import streamed_models as streamed
from tests.formats.format_models import MODELS, make
from tests.sweeps import rest_is_long

RUNS = 3  # of a case in make test after cuts
QUICK = [  # and whether the command runs again after every cut
    ("save_pretrained, imported", False),
    ("adapter merge", False),
    ("adapter merge --to packed", False),
    ("checkpoint convert hf-mixtral", False),
    ("export --to packed", False),
]
SIZES = {"intermediate_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 1}


@dataclass
class Case:
    """A writer: run(root, other) writes root/out, of other inputs on request; is_over: in the place of older files."""

    run: Any
    is_over: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def mixtral(seed):
    return make(
        "mixtral", seed, **MODELS["mixtral"] | {"sliding_window": None, "num_hidden_layers": 1}
    ).float()


def imported(seed):
    return fmoe_ext.import_model(mixtral(seed))


def fmoefied(seed=0):
    torch.manual_seed(seed)
    return fmoe_ext.fmoefy(make("llama", seed).float(), 4)


def export(root, other, given, format="mixtral"):
    fmoe_ext.export(imported(int(other)), root / "out", format, max_shard_bytes=30_000)


def save_imported(root, other, given, sizes=("20KB", "20KB")):
    imported(int(other)).save_pretrained(root / "out", max_shard_size=sizes[other])


def save_fmoefied(root, other, given, sizes=("60KB", "60KB")):
    fmoefied(int(other)).save_pretrained(root / "out", max_shard_size=sizes[other])


def pruned(root, other, given, kind="model"):
    line = ["--tokens", str(given / "ids.npy"), "--seq-len", "20", "--experts", "4" if other else "3"]
    assert prune([str(given / kind), *line, "-o", str(root / "out"), "--criterion", "frequency"]) == 0


def merged(root, other, given):
    line = [
        "merge",
        str(given / f"adapter{int(other)}"),
        "--base",
        str(given / "base"),
        "-o",
        str(root / "out"),
    ]
    assert adapter([*line, "--packing", "rank_major"]) == 0


def repacked(root, other, given):
    line = [str(given / f"adapter{int(other)}"), "--base", str(given / "packed"), "-o", str(root / "out")]
    options = ["--to", "packed", "--rounding", "nearest", "--packing", "rank_major"]
    assert adapter(["merge", *line, *options]) == 0


def quantized(root, other, given, to="packed", type="fp8"):
    line = [str(given / f"model{int(other)}"), "--to", to, "--type", type, "-o", str(root / "out")]
    assert export_quantized(line) == 0


def converted_adapter(root, other, given):
    line = ["convert", str(given / f"adapter{int(other)}"), "--to", "unsloth", "-o", str(root / "out")]
    assert adapter([*line, "--packing", "rank_major"]) == 0


def converted(root, other, given, to="fmoe_ext"):
    checkpoint_cli(["convert", str(given / f"model{int(other)}"), "--to", to, "-o", str(root / "out")])


def merged_checkpoint(root, other, given):
    checkpoint_cli(["merge", str(given / f"model{int(other)}"), "-o", str(root / "out")])


def small(other):
    torch.manual_seed(int(other))
    return fmoe_ext.FMoETransformerMLP(num_expert=2, d_model=4, d_hidden=8, gate="softmax")


def saved(root, other, given):
    checkpoint.save(root / "out", small(other), step=1 + other)


def exported_file(root, other, given):
    checkpoint.export_safetensors(root / "out", small(other))


def of_megatron(root, other, given):
    megatron._write(small(other).state_dict(), root / "out")


CASES = {
    "export": Case(export),
    "export gguf": Case(export, options={"format": "gguf"}),
    "save_pretrained, imported": Case(save_imported, is_over=True),
    "save_pretrained, fewer files": Case(save_imported, is_over=True, options={"sizes": ("20KB", "5GB")}),
    "save_pretrained, more files": Case(save_imported, is_over=True, options={"sizes": ("5GB", "20KB")}),
    "save_pretrained, fmoefied": Case(save_fmoefied, is_over=True),
    "prune": Case(pruned),
    "prune gguf": Case(pruned, options={"kind": "file/model.gguf"}),
    "export --to packed": Case(quantized),
    "export --to gguf": Case(quantized, options={"to": "gguf", "type": "q8_0"}),
    "adapter merge": Case(merged),
    "adapter merge --to packed": Case(repacked),
    "adapter convert": Case(converted_adapter),
    **{
        f"checkpoint convert {to}": Case(converted, options={"to": to})
        for to in ("fmoe_ext", "hf-mixtral", "fastmoe")
    },
    "checkpoint merge": Case(merged_checkpoint, is_over=True),
    "checkpoint.save": Case(saved, is_over=True),
    "export_safetensors": Case(exported_file, is_over=True),
    "megatron": Case(of_megatron, is_over=True),
}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Inputs of the commands: models 0 and 1, adapters 0 and 1 of `base` and `packed`, tokens."""
    folder = tmp_path_factory.mktemp("given")
    np.save(
        folder / "ids.npy", torch.randint(3, 61, (200,), generator=torch.Generator().manual_seed(3)).numpy()
    )
    for seed in range(2):
        mixtral(seed).save_pretrained(folder / f"model{seed}", max_shard_size="60KB")
    streamed.save(folder / "model", dtype=torch.float32, num_hidden_layers=1)
    streamed.write_gguf(
        streamed.save(folder / "file", dtype=torch.float32, num_hidden_layers=1, **streamed.WIDE), "q8_0"
    )
    streamed.make_model("Qwen3MoeForCausalLM", dtype=torch.bfloat16, **SIZES).save_pretrained(
        folder / "base", max_shard_size="20KB"
    )
    packed = streamed.pack(streamed.save(folder / "packed", dtype=torch.bfloat16, **SIZES))
    model = streamed.with_adapters(fmoe_ext.stream(packed, 2**30, dtype=torch.float32))
    for seed in range(2):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.mul_(1 + seed)
        model.save_pretrained(folder / f"adapter{seed}")
    return folder


def readers(out):
    """The readers of a place: for each a function -> tensors, which raises where it refuses what is there."""
    if out.is_file() and out.read_bytes()[:2] == b"PK":
        return [lambda: torch.load(out)]
    if not any((out / name).exists() for name in ("config.json", INDEX, "model.safetensors")):
        return [lambda: _read(convert.read(out).tensors)]
    config = mixtral(0).config
    return [
        lambda: AutoModelForCausalLM.from_pretrained(out, local_files_only=True).state_dict(),
        lambda: AutoModelForCausalLM.from_pretrained(out, local_files_only=True, config=config).state_dict(),
        lambda: _read(ModelFolder(out).tensors),
    ]


def _read(tensors):
    return {name: tensor.read() for name, tensor in tensors.items()}


def values(out):
    """The tensors that each of the readers finds; None where it refuses."""
    found = []
    for read in readers(out):
        try:
            found.append(read())
        except Exception:  # of ours, Transformers, torch
            found.append(None)
    return found


def same(found, expected):
    """The same tensors, whatever their files are called."""
    return found.keys() == expected.keys() and all(torch.equal(v, expected[k]) for k, v in found.items())


def at_out(state):
    return {name: content for name, content in state.items() if name == "out" or name.startswith("out/")}


def attempt(run):
    """ "" if a command ends, else what it says."""
    try:
        run()
    except (SystemExit, CheckpointError, OSError, ValueError) as error:
        return str(error)
    return ""


def cases():
    """QUICK for make test, each command after a few of its cuts for .ci/run, after every one for make test-all."""
    rest = [name for name in CASES if name not in dict(QUICK)]
    every = [(name, True) for name in CASES if (name, True) not in QUICK]
    return [
        *rest_is_long([*QUICK, *((name, False) for name in rest)], QUICK),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in every),
    ]


@pytest.mark.parametrize(("name", "every"), cases())
def test_command_without_power(name, every, given, tmp_path, monkeypatch, capsys):
    """every: the commands run again after each cut, not after a few of them."""
    case, root = CASES[name], tmp_path / "disk"
    root.mkdir()

    def run(other=False):
        case.run(root, other, given, **case.options)

    results, tensors = [], []  # of other inputs, which may be there before, and of these
    for other in (True, False):
        power_cuts.replay(root, {})
        run(other)
        results.append(at_out(power_cuts.seen(root)))
        tensors.append(values(root / "out"))
    power_cuts.replay(root, results[0] if case.is_over else {})
    states = power_cuts.recorded(root, monkeypatch, run)
    assert len(states) > 3

    def is_right(found, among):
        """Whole and right; False where it is refused; an error where it is taken for a model that it is not."""
        if any(found == results[i] for i in among):
            return True
        loaded = values(root / "out")
        for one in zip(loaded, *(tensors[i] for i in among), strict=False):
            assert one[0] is None or any(right and same(one[0], right) for right in one[1:]), sorted(found)
        return any(one is not None for one in loaded)

    judged, going_on = {}, []
    for state in states:
        found = at_out(state)
        key = frozenset(found.items())
        if key not in judged:
            power_cuts.replay(root, state)
            judged[key] = bool(found) and is_right(found, (0, 1) if case.is_over else (1,))
        if not judged[key]:
            going_on.append(state)
    for state in going_on[:: 1 if every else max(1, len(going_on) // RUNS)]:
        for other in (False, True):
            power_cuts.replay(root, state)
            if said := attempt(functools.partial(run, other)):
                # of `out` itself it must not say that it exists: what is there is no model
                names_a_part = "exists already" in said and f"{root / 'out'} exists already" not in said
                assert names_a_part or "holds parts of another" in said, said
                continue
            assert is_right(at_out(power_cuts.seen(root)), (0,) if other else (1,)), sorted(state)
            left = {path.name for path in root.iterdir()} - {"out", ".out.lock"}
            assert not left, (sorted(state), left)


def test_half_replaced_model_says_how_to_complete_it(tmp_path, monkeypatch):
    """A save that ends while it renames: all readers refuse the folder, ours by name; moving the rest mends it."""
    out = tmp_path / "out"
    imported(1).save_pretrained(out, max_shard_size="20KB")
    with monkeypatch.context() as patch:
        replace = os.replace

        def dies(old, new):
            if Path(new).parent == out and Path(new).name.startswith("model-00002"):
                raise KeyboardInterrupt
            replace(old, new)

        patch.setattr(os, "replace", dies)
        with pytest.raises(KeyboardInterrupt):
            imported(0).save_pretrained(out, max_shard_size="20KB")
    for read in (fmoe_ext.stream, ModelFolder, fmoe_ext.import_model, fmoe_ext.huggingface.from_pretrained):
        with pytest.raises(CheckpointError, match="a save was ended while it replaced the model"):
            read(out)
    with pytest.raises((OSError, ValueError), match=r"config\.json"):
        AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    (rest,) = out.glob(".new.*.tmp")
    for file in sorted(rest.iterdir(), key=lambda file: file.name == "config.json"):
        file.rename(out / file.name)
    rest.rmdir()
    found = AutoModelForCausalLM.from_pretrained(out, local_files_only=True).state_dict()
    assert same(found, mixtral(0).state_dict())
