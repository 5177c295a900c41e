"""fmoe adapter merge --to packed: the adapter in packed experts, and the certificate of its error."""

import hashlib
import json
import shutil

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

import fmoe_ext
from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.finetune.adapters import cli, repack
from fmoe_ext.finetune.adapters.reading import read_adapter
from tests import published_packings
from tests.finetune.streamed_models import (
    WIDE,
    pack,
    pack_linear,
    save,
    split_gguf,
    with_adapters,
    write_gguf,
)
from tests.huggingface.huggingface_models import make_ids

SIZES = {"intermediate_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 2}
KINDS = ["mxfp4", "mxfp4 of GPT-OSS", "int4", "q4_k", "nvfp4", "mxfp8"]
PUBLISHED = {"nvfp4": "nvfp4-pack-quantized", "mxfp8": "mxfp8"}


def made(folder, kind, std=0.1):
    """(model, adapter): a random packed model, and an adapter of its experts."""
    if kind.startswith("mxfp4"):
        architecture = "GptOssForCausalLM" if "GPT" in kind else "Qwen3MoeForCausalLM"
        sizes = (
            {"intermediate_size": 32, "swiglu_limit": 7.0, "num_hidden_layers": 2} if "GPT" in kind else SIZES
        )
        source = pack(save(folder / "model", architecture, torch.bfloat16, **sizes))
    else:
        sizes = WIDE | {"num_hidden_layers": 1} if kind == "q4_k" else SIZES
        source = save(folder / "model", dtype=torch.bfloat16, **sizes)
        if kind == "q4_k":
            source, _ = write_gguf(source, kind)
        elif kind in PUBLISHED:
            pack_linear(source, PUBLISHED[kind], published_packings)
        else:
            pack_linear(source, kind)
    model = with_adapters(fmoe_ext.stream(source, 2**30, dtype=torch.float32))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(std / 0.1)
    model.save_pretrained(folder / "adapter")
    return source, folder / "adapter"


def tokens(count=1200):
    return torch.randint(3, 61, (count,), generator=torch.Generator().manual_seed(3))


def run(folder, source, adapter, *options, text=True):
    numpy.save(folder / "ids.npy", tokens().numpy())
    given = ["--tokens", str(folder / "ids.npy"), "--seq-len", "20"] if text else ["--rounding", "nearest"]
    arguments = [str(adapter), "--base", str(source), "--packing", "rank_major", "--to", "packed"]
    return cli.main(["merge", *arguments, "-o", str(folder / "out"), *given, *options])


def contents(source):
    files = [source] if source.is_file() else sorted(source.iterdir())
    return {file.name: file.read_bytes() for file in files}


def logits(model):
    with torch.no_grad():
        return model(input_ids=make_ids()).logits.double()


def test_parts_of_a_split_file_become_those_of_the_merged_one(tmp_path):
    gguf = pytest.importorskip("gguf", reason="pip install gguf")
    source, adapter = made(tmp_path, "q4_k")
    parts = split_gguf(source, tmp_path / "parts", 4)
    shutil.copy(source.with_name("config.json"), tmp_path / "parts")
    before = contents(tmp_path / "parts")
    for name, base in (("whole", source), ("split", parts[0])):
        (tmp_path / name).mkdir()
        assert run(tmp_path / name, base, adapter, text=False) == 0
    assert contents(tmp_path / "parts") == before
    whole, old = (
        {t.name: t.data.copy() for t in gguf.GGUFReader(f).tensors}
        for f in (tmp_path / "whole/out" / source.name, source)
    )
    out = sorted((tmp_path / "split/out").glob("*.gguf"))
    assert [file.name for file in out] == [file.name for file in parts]
    split = {t.name: t.data.copy() for file in out for t in gguf.GGUFReader(file).tensors}
    assert split.keys() == whole.keys()
    assert all(numpy.array_equal(split[name], whole[name]) for name in whole)
    changed = {name.split(".")[2] for name in whole if not numpy.array_equal(old[name], whole[name])}
    assert changed == {"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"}


@pytest.mark.parametrize("kind", KINDS)
def test_merged_model_is_nearer_to_the_adapted_one(kind, tmp_path, capsys):
    source, adapter = made(tmp_path, kind)
    before = contents(source)
    assert run(tmp_path, source, adapter) == 0
    assert contents(source) == before
    result = tmp_path / "out" / source.name if source.is_file() else tmp_path / "out"
    base, merged = (fmoe_ext.stream(path, 2**30, dtype=torch.float32) for path in (source, result))
    expected = logits(with_adapters(fmoe_ext.stream(source, 2**30, dtype=torch.float32)))
    assert (logits(merged) - expected).norm() < 0.9 * (logits(base) - expected).norm()
    certificate = json.loads((tmp_path / "out/merge_certificate.json").read_text())
    assert 0 < certificate["ratio"] < 1 and certificate["not_better"] == []
    card = (tmp_path / "out/README.md").read_text()
    assert f"| error relative to not merging | {certificate['ratio']:.3f} |" in card
    digest = hashlib.sha256(tokens().numpy().tobytes()).hexdigest()
    assert digest in card and f"--base {source.name} --to packed --text TEXT -o out" in card
    assert f"all experts: {certificate['ratio']:.3f}" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "ids.npy", "model", "out"]


def test_certificate_has_the_error_of_the_outputs(tmp_path):
    """The ratio of the first layer's w1, computed again from the two folders."""
    source, adapter = made(tmp_path, "mxfp4")
    run(tmp_path, source, adapter)
    model = fmoe_ext.stream(source, 2**30)
    seen = []
    experts = model.model.layers[0].mlp.experts
    experts.register_forward_hook(lambda m, given, y: seen.append(given[:2]))
    whole = tokens().view(-1, 20)
    with torch.no_grad():
        model(input_ids=whole[45:])
    (x, idx), *_ = seen
    x = x.float()
    first, after = (load_file(f / "model.safetensors") for f in (source, tmp_path / "out"))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    old, new = (
        fmoe_ext.frozen.Quantized("mxfp4", t[f"{name}_blocks"], t[f"{name}_scales"]).dequantize()
        for t in (first, after)
    )
    wrapper = with_adapters(model).base_model.model.model.layers[0].mlp.experts
    while wrapper.parameter_name != "gate_up_proj":
        wrapper = wrapper.base_layer
    change = wrapper.get_delta_weight("default").detach().float()
    ours, without = torch.zeros(()), torch.zeros(())
    for e in range(len(old)):
        rows = x[(idx == e).any(1)]
        ours += (rows @ (new[e] - old[e] - change[e]).T).square().sum()
        without += (rows @ change[e].T).square().sum()
    certificate = json.loads((tmp_path / "out/merge_certificate.json").read_text())
    found = certificate["layers"]["model.layers.0.mlp.experts"]["w1"]["ratio"]
    assert found == pytest.approx((ours / without).sqrt().item(), rel=1e-3)


def test_adapter_too_small_for_the_lattice_is_refused(tmp_path, capsys):
    source, adapter = made(tmp_path, "mxfp4", std=1e-5)
    with pytest.raises(SystemExit, match=r"not nearer to the merged weights .*--force writes it"):
        run(tmp_path, source, adapter)
    assert not (tmp_path / "out").exists()
    certificate = json.loads((tmp_path / "out.certificate.json").read_text())
    assert certificate["ratio"] == 1 and len(certificate["not_better"]) == 4
    assert run(tmp_path, source, adapter, "--force") == 0
    assert "error relative to not merging 1.000; rows: file 100%" in capsys.readouterr().out
    assert contents(tmp_path / "out")["model.safetensors"] == contents(source)["model.safetensors"]


def test_nearest_values_need_no_text(tmp_path):
    source, adapter = made(tmp_path, "mxfp4")
    assert run(tmp_path, source, adapter, text=False) == 0
    old, new = (load_file(f / "model.safetensors") for f in (source, tmp_path / "out"))
    changed = {name for name, value in old.items() if not torch.equal(value, new[name])}
    assert changed == {name for name in old if name.endswith(("_blocks", "_scales"))}


def test_killed_merge_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    source, adapter = made(tmp_path, "mxfp4")
    run(tmp_path, source, adapter)
    expected = contents(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "whole")
    rounded = []

    def dies(*arguments):
        rounded.append(1)
        if len(rounded) == 9:
            raise KeyboardInterrupt
        return round_packed(*arguments)

    round_packed = repack.round_packed
    monkeypatch.setattr(repack, "round_packed", dies)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, source, adapter)
    monkeypatch.setattr(repack, "round_packed", round_packed)
    assert (tmp_path / ".out.merging").exists() and not (tmp_path / "out").exists()
    run(tmp_path, source, adapter)
    assert contents(tmp_path / "out") == expected


@pytest.mark.parametrize("name, said", [("gptq", "int4 in another layout"), ("nf4", "nf4"), (None, "floats")])
def test_other_packings_are_refused(name, said, tmp_path):
    source = save(tmp_path / "model", dtype=torch.bfloat16, num_hidden_layers=1, **WIDE)
    if name is not None:
        pack_linear(source, name)
    with_adapters(fmoe_ext.stream(source, 2**30, dtype=torch.float32)).save_pretrained(tmp_path / "adapter")
    with pytest.raises(
        SystemExit, match=f"the experts of .* are {said}.*--to packed is for mxfp4, int4, q4_k, mxfp8, nvfp4"
    ):
        run(tmp_path, source, tmp_path / "adapter")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options, said",
    [
        (["--to", "packed"], "--to packed needs --text or --tokens"),
        (["--to", "packed", "--dtype", "float32"], "--dtype is for float weights"),
        (["--to", "packed", "--rounding", "nearest", "--text", "a"], "--rounding nearest reads no text"),
        (
            ["--to", "packed", "--tokens", "a", "--tokenizer", "b"],
            "--tokenizer would have no effect: --tokens",
        ),
        (["--to", "packed", "--rounding", "nearest", "--seq-len", "9"], "--seq-len would have no effect"),
        (["--to", "packed", "--rounding", "nearest", "--force"], "--force would have no effect"),
        (["--force"], "only --to packed takes --force"),
        (["--memory", "1GiB", "--held-out", "0.5"], "only --to packed takes --memory, --held-out"),
    ],
)
def test_options_that_exclude_each_other(options, said, tmp_path):
    source, adapter = made(tmp_path, "mxfp4")
    with pytest.raises(SystemExit, match=said):
        cli.main(["merge", str(adapter), "--base", str(source), "-o", str(tmp_path / "out"), *options])


def test_text_without_a_held_out_part_is_refused(tmp_path):
    source, adapter = made(tmp_path, "mxfp4")
    with pytest.raises(CheckpointError, match="held_out=0 leaves no text to measure the error on"):
        repack.repack(
            read_adapter(adapter, "rank_major"), source, tmp_path / "out", tokens(), seq_len=20, held_out=0
        )


def test_text_for_an_adapter_without_experts_is_refused(tmp_path):
    source, folder = made(tmp_path, "int4")
    config = fmoe_ext.model_files.open_model(source).config
    width = config.num_attention_heads * config.head_dim
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    tensors = {f"{name}A.weight": torch.ones(2, config.hidden_size), f"{name}B.weight": torch.ones(width, 2)}
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="has no adapter of experts, which a text is for"):
        repack.repack(read_adapter(folder), source, tmp_path / "out", tokens(), seq_len=20)
    assert not list(tmp_path.glob("*out*"))


def test_adapter_of_a_packed_layer_is_refused_before_files_are_copied(tmp_path, monkeypatch):
    source, folder = made(tmp_path, "int4")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    save_file(
        {f"{name}A.weight": torch.ones(2, 3), f"{name}B.weight": torch.ones(5, 2)},
        folder / "adapter_model.safetensors",
    )
    monkeypatch.setattr(repack, "copy_file", lambda *_: pytest.fail("copied"))
    with pytest.raises(CheckpointError, match=r"has no float weight for .*q_proj.lora_A.weight"):
        repack.repack(read_adapter(folder), source, tmp_path / "out", None)
    assert not list(tmp_path.glob("*out*"))


def test_experts_that_a_layer_without_an_adapter_shares_are_not_merged(tmp_path, monkeypatch):
    from transformers import Qwen3MoeForCausalLM

    source, adapter = made(tmp_path, "int4")
    first, second = (f"model.layers.{i}.mlp.experts" for i in (0, 1))
    tied = {f"{second}.{leaf}": f"{first}.{leaf}" for leaf in ("gate_up_proj", "down_proj")}
    monkeypatch.setattr(Qwen3MoeForCausalLM, "_tied_weights_keys", tied)
    config = json.loads((source / "config.json").read_text()) | {
        "tie_word_embeddings": True
    }  # ties those, too
    (source / "config.json").write_text(json.dumps(config))
    for file in (source / "model.safetensors", adapter / "adapter_model.safetensors"):
        save_file({n: t for n, t in load_file(file).items() if second not in n}, file)
    with pytest.raises(
        CheckpointError, match=f"{first} and {second} share their experts, which a merge would"
    ):
        repack.repack(read_adapter(adapter, "rank_major"), source, tmp_path / "out", None)
