"""python -m fmoe_ext.checkpoint: from every format to every other and back to the same tensors."""

import functools
import json
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fmoe_ext import FMoETransformerMLP, SoftmaxGate, checkpoint
from fmoe_ext.checkpoint.cli import main

D, H, E = 6, 5, 4


def make(seed=0):
    torch.manual_seed(seed)
    gate = functools.partial(SoftmaxGate, gate_bias=False)
    moe = FMoETransformerMLP(E, D, H, activation="swiglu", bias=False, gate=gate)
    return nn.ModuleDict({"norm": nn.LayerNorm(D), "mlp": moe})


def equal(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture
def saved(tmp_path):
    model = make()
    optimizer = torch.optim.Adam(model.parameters())
    model["mlp"](torch.randn(7, D)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "ours", model, optimizer, step=12)
    return tmp_path, model


ROUTES = (
    ("safetensors",),
    ("hf-fused", "hf-mixtral", "hf-qwen3_moe"),
    ("fastmoe", "fmoe_ext", "fastmoe", "safetensors", "hf-qwen3_moe"),
    ("hf-mixtral", "fastmoe"),
)


@pytest.mark.parametrize("route", ROUTES, ids="-".join)
def test_there_and_back(saved, capsys, route):
    folder, model = saved
    source = folder / "ours"
    for i, format in enumerate(route):
        target = folder / f"{i}.safetensors" if format == "safetensors" else folder / str(i)
        ranks = ("--ranks", "2") if format == "fastmoe" else ()
        main(["convert", str(source), "--to", format, "-o", str(target), *ranks])
        assert f"{target}: 5 tensors as {format}" in capsys.readouterr().out
        source = target
    main(["merge", str(source), "-o", str(folder / "merged.safetensors")])
    other = make(seed=1)
    checkpoint.load(folder / "merged.safetensors", other)
    assert equal(model, other)


def test_ours_after_a_conversion_loads(saved):
    folder, model = saved
    main(["convert", str(folder / "ours"), "--to", "hf-qwen3_moe", "-o", str(folder / "hf")])
    names = load_file(folder / "hf" / "model.safetensors").keys()
    assert f"mlp.experts.{E - 1}.up_proj.weight" in names and "mlp.gate.weight" in names
    main(["convert", str(folder / "hf"), "--to", "fmoe_ext", "-o", str(folder / "back")])
    other = make(seed=1)
    checkpoint.load(folder / "back", other)
    assert equal(model, other)


def test_sharded_huggingface_folder(saved):
    folder, model = saved
    state = checkpoint.to_huggingface(model.state_dict(), "qwen3_moe")
    (folder / "hf").mkdir()
    where = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(state)}
    for file in set(where.values()):
        save_file({n: t.contiguous() for n, t in state.items() if where[n] == file}, folder / "hf" / file)
    (folder / "hf" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    main(["merge", str(folder / "hf"), "-o", str(folder / "merged.safetensors")])
    other = make(seed=1)
    checkpoint.load(folder / "merged.safetensors", other)
    assert equal(model, other)


def test_files_of_ranks(saved):
    folder, model = saved
    main(["convert", str(folder / "ours"), "--to", "fastmoe", "-o", str(folder / "fast"), "--ranks", "2"])
    files = sorted((folder / "fast").glob("iter_0000012/*/model_optim_rng.pt"))
    main(["merge", *map(str, files), "-o", str(folder / "merged.safetensors")])
    other = make(seed=1)
    checkpoint.load(folder / "merged.safetensors", other)
    assert equal(model, other)


def test_inspect(saved, capsys):
    folder, model = saved
    main(["inspect", str(folder / "ours"), "--tensors"])
    captured = capsys.readouterr()
    assert "format     fmoe_ext, step 12" in captured.out and "optimizer  Adam" in captured.out
    experts = E * (2 * H * D + H * D)
    assert f"tensors    5, {experts + E * D + 2 * D} elements, {experts} of them of experts" in captured.out
    assert re.search(rf"\nmlp +{E} +{D} +{H} +{experts} +{experts * 4:,}\n", captured.out)
    assert re.search(r"\nmlp\.experts\.htoh4\.weight +\[4, 10, 6\] +torch\.float32", captured.out)
    assert "1 of 1 files have one, all are right" in captured.err
    path = folder / "ours" / "step-00000012" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(SystemExit, match=r"error: .*__0_0\.distcp is damaged"):
        main(["inspect", str(folder / "ours")])
    main(["inspect", str(folder / "ours"), "--no-verify"])
    with pytest.raises(SystemExit, match=r"error: .*nowhere does not exist"):
        main(["inspect", str(folder / "nowhere")])
    with pytest.raises(SystemExit, match="error: no checkpoint in"):
        main(["inspect", str(folder)])


def test_as_a_program(saved):
    """As `python -m`; and `import fmoe_ext` loads nothing of it, nor the package what other formats come from."""
    code = f"""
import runpy, sys
import fmoe_ext
assert "fmoe_ext.checkpoint" not in sys.modules
import fmoe_ext.checkpoint
assert not {{"safetensors", "transformers"}} & sys.modules.keys()
sys.argv = ["checkpoint", "inspect", {str(saved[0] / "ours")!r}]
runpy.run_module("fmoe_ext.checkpoint", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "format     fmoe_ext, step 12" in done.stdout, done.stderr
