"""fmoe adapter: which layout a file has, the same delta in every other one, and merging, against the real PEFT."""

import json
import os
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.checkpoint.base_experts import Experts
from fmoe_ext.checkpoint.files import locked
from fmoe_ext.checkpoint.model_folder import ModelFolder
from fmoe_ext.finetune.adapters import cli, merge
from fmoe_ext.finetune.adapters.check import check, logits
from fmoe_ext.finetune.adapters.convert import convert
from fmoe_ext.finetune.adapters.delta import compare_experts
from fmoe_ext.finetune.adapters.reading import read_adapter
from fmoe_ext.model_files import experts_modules, open_model
from tests.checkpoint.adapter_models import (
    assert_same,
    base,
    by_expert,
    peft,
    peft_weights,
    rewritten,
    trained,
)
from tests.finetune.streamed_models import save
from tests.forked import start_python
from tests.formats.format_models import load

BASES = ["qwen3_moe", "mixtral", "gpt_oss"]


@pytest.fixture(scope="module", params=BASES)
def made(request, tmp_path_factory):
    """(model type, folder of its base, folder of an adapter, weights after PEFT's merge, weights before)."""
    folder = tmp_path_factory.mktemp(request.param)
    start = dict(base(request.param, folder / "base").named_parameters())
    trained(request.param, folder / "adapter")
    return (
        request.param,
        folder / "base",
        folder / "adapter",
        peft_weights(request.param, folder / "adapter"),
        start,
    )


@pytest.mark.parametrize("to", ["peft-0.19", "vllm", "unsloth", "peft-0.18", "per-expert", "sglang"])
def test_conversion_keeps_the_delta(made, to, tmp_path):
    """There and back again: PEFT computes the delta of the original from it."""
    name, base_folder, folder, expected, start = made
    model = ModelFolder(base_folder)
    convert(read_adapter(folder), to, tmp_path / "there", model, check=False)
    there = read_adapter(tmp_path / "there")
    assert there.form == {"per-expert": "numbered", "sglang": "stacked"}.get(to, "flat")
    assert there.packing == {"per-expert": "", "sglang": "", "unsloth": "expert_major"}.get(to, "rank_major")
    if name != "gpt_oss" and there.form == "flat":
        assert there.orientation == ("in_out" if to == "peft-0.18" else "out_in")
    if to.startswith(("peft", "vllm")):
        assert_same(peft_weights(name, tmp_path / "there", old=to == "peft-0.18"), expected, start)
    convert(there, "peft-0.19", tmp_path / "back", model)
    assert_same(peft_weights(name, tmp_path / "back"), expected, start)
    original, back = (load_file(f / "adapter_model.safetensors") for f in (folder, tmp_path / "back"))
    assert original.keys() == back.keys()
    assert all(torch.equal(value, back[key]) for key, value in original.items())  # to the bit, rank included


@pytest.mark.parametrize("made", ["qwen3_moe"], indirect=True)
def test_two_conversions_into_one_folder(made, tmp_path):
    """Keep what another process is writing, and remove what a killed one has left."""
    name, _, folder, expected, start = made
    unfinished, out = tmp_path / ".out.1-abcd.tmp", tmp_path / "out"
    unfinished.mkdir()
    with (
        locked(tmp_path / ".out.lock", "another conversion"),
        pytest.raises(CheckpointError, match=r"converting into .*out: process \d+ on .* is doing so now"),
    ):
        convert(read_adapter(folder), "peft-0.19", out)
    assert unfinished.exists() and not out.exists()
    convert(read_adapter(folder), "peft-0.19", out)
    assert_same(peft_weights(name, out), expected, start)
    assert list(tmp_path.iterdir()) == [out]


def test_adapters_of_single_experts_load_in_peft(made, tmp_path):
    """PEFT reads a module an expert for these types itself: the same delta."""
    name, base_folder, folder, expected, start = made
    if name == "gpt_oss":
        with pytest.raises(CheckpointError, match=r"per-expert: PEFT .* leaves .*experts\.down_proj out"):
            convert(read_adapter(folder), "per-expert", tmp_path / "out", ModelFolder(base_folder))
        with pytest.raises(CheckpointError, match="one rank"):  # joined, gate and up need twice the rank
            _with_own_ranks(name, base_folder, folder, tmp_path, "vllm")
        return
    convert(read_adapter(folder), "per-expert", tmp_path / "out", ModelFolder(base_folder))
    assert_same(peft_weights(name, tmp_path / "out"), expected, start)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen2_moe", "olmoe"])
def test_per_expert_is_refused_where_peft_reads_another_adapter(name, tmp_path):
    base(name, tmp_path / "base")
    trained(name, tmp_path / "adapter")
    options = ["--to", "per-expert", "--base", str(tmp_path / "base"), "-o", str(tmp_path / "out")]
    if name == "olmoe":
        assert cli.main(["convert", str(tmp_path / "adapter"), *options]) == 0
        return
    with pytest.raises(
        SystemExit, match=r"cannot be written as per-expert: PEFT .*--unchecked writes it for vLLM"
    ):
        cli.main(["convert", str(tmp_path / "adapter"), *options])
    assert not (tmp_path / "out").exists()
    assert cli.main(["convert", str(tmp_path / "adapter"), *options, "--unchecked"]) == 0
    with pytest.raises(SystemExit, match="give --base"):
        cli.main(["convert", str(tmp_path / "adapter"), "--to", "per-expert", "-o", str(tmp_path / "other")])


def _with_own_ranks(name, base_folder, folder, tmp_path, to):
    """Convert an adapter whose gate and up have factors of their own."""
    convert(read_adapter(folder), "per-expert", tmp_path / "apart", ModelFolder(base_folder), check=False)
    rewritten(
        tmp_path / "apart", lambda k, v: (k, v + 0.01 if "up_proj.lora_A" in k or ".w3.lora_A" in k else v)
    )
    convert(read_adapter(tmp_path / "apart"), to, tmp_path / "joined", ModelFolder(base_folder))


@pytest.mark.parametrize("to", ["vllm", "sglang"])
@pytest.mark.parametrize("pattern", [{"rank_pattern": {"q_proj": 8}}, {"alpha_pattern": {"q_proj": 7}}])
def test_servers_that_read_no_patterns(pattern, to, tmp_path):
    """A module's own rank or lora_alpha is refused; a pattern of modules that have no adapter is left out."""
    trained("qwen3_moe", tmp_path / "adapter")
    rewritten(tmp_path / "adapter", lambda k, v: (k, v), **{name: {"k_proj": 9} for name in pattern})
    convert(read_adapter(tmp_path / "adapter"), to, tmp_path / "out")
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert config["rank_pattern"] == config["alpha_pattern"] == {}
    rewritten(
        tmp_path / "adapter",
        lambda k, v: (
            k,
            torch.cat([v, v], int("lora_B" in k)) if "q_proj" in k and "rank" in str(pattern) else v,
        ),
        **pattern,
    )
    with pytest.raises(
        CheckpointError, match=rf"{to} has one rank .* of model\.layers\.0\.self_attn\.q_proj"
    ):
        convert(read_adapter(tmp_path / "adapter"), to, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_scale_of_rslora_is_that_of_each_server(to, tmp_path):
    """SGLang divides lora_alpha by r in any case (its issue 40835)."""
    trained("qwen3_moe", tmp_path / "adapter", rank=4)
    rewritten(tmp_path / "adapter", lambda k, v: (k, v), use_rslora=True)
    convert(read_adapter(tmp_path / "adapter"), to, tmp_path / "out")
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    scale = config["lora_alpha"] / (
        config["r"] ** 0.5 if to == "vllm" and config["use_rslora"] else config["r"]
    )
    assert scale == 12 / 4**0.5 and config["use_rslora"] == (to == "vllm")


@pytest.mark.parametrize("made", ["qwen3_moe"], indirect=True)
def test_gate_and_up_with_own_factors_join_at_twice_the_rank(made, tmp_path):
    name, base_folder, folder, _, start = made
    _with_own_ranks(name, base_folder, folder, tmp_path, "peft-0.19")
    joined = read_adapter(tmp_path / "joined")
    ranks = {role: factors.rank for role, factors in next(iter(joined.layers.values())).items()}
    assert ranks == {"gate_up": 8, "down": 4}
    assert_same(peft_weights(name, tmp_path / "joined"), peft_weights(name, tmp_path / "apart"), start)
    # patterns of an earlier conversion, when they had one rank
    patterns = json.loads((tmp_path / "joined/adapter_config.json").read_text())["rank_pattern"]
    pattern = next(pattern for pattern, rank in patterns.items() if rank == 8)
    rewritten(tmp_path / "apart", lambda k, v: (k, v), rank_pattern={pattern: 4}, alpha_pattern={pattern: 5})
    convert(read_adapter(tmp_path / "apart"), "unsloth", tmp_path / "again", ModelFolder(base_folder))
    config = json.loads((tmp_path / "again/adapter_config.json").read_text())
    assert config["rank_pattern"][pattern] == 8
    assert config["alpha_pattern"].get(pattern, config["lora_alpha"]) != 5


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("packing", ["rank_major", "expert_major"])
@pytest.mark.parametrize("rank, steps", [(4, 1), (8, 5)])
def test_layout_shows_in_the_file(old, packing, rank, steps, tmp_path):
    trained("mixtral", tmp_path, rank, steps, old)
    if packing == "expert_major":
        rewritten(tmp_path, by_expert(rank))
    adapter = read_adapter(tmp_path)
    assert (adapter.orientation, adapter.packing) == ("in_out" if old else "out_in", packing)
    assert check(adapter)["problems"] == []


def test_undecidable_is_said_and_not_guessed(made, tmp_path, capsys):
    _, base_folder, folder, _, _ = made
    generator = torch.Generator().manual_seed(5)
    save_file(
        {
            k: torch.randn(v.shape, generator=generator) if "lora_B" in k else v.float()
            for k, v in load_file(folder / "adapter_model.safetensors").items()
        },
        tmp_path / "adapter_model.safetensors",
    )
    (tmp_path / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    assert cli.main(["check", str(tmp_path)]) == 1
    assert "the file does not show its packing: say it by --packing" in capsys.readouterr().out
    with pytest.raises(
        SystemExit,
        match=r"does not show its packing: say it by --packing rank_major \(PEFT\) or expert_major \(e",
    ):
        cli.main(["merge", str(tmp_path), "--base", str(base_folder), "-o", str(tmp_path / "out")])
    assert cli.main(["check", str(tmp_path), "--packing", "rank_major"]) == 0


@pytest.mark.parametrize("layout", ["peft-0.18", "per-expert"])
def test_merged_model_equals_that_of_peft(made, layout, tmp_path):
    name, base_folder, folder, expected, start = made
    before = {f.name: f.read_bytes() for f in base_folder.iterdir()}
    convert(read_adapter(folder), layout, tmp_path / "adapter", ModelFolder(base_folder), check=False)
    report = merge.merge(read_adapter(tmp_path / "adapter"), ModelFolder(base_folder), tmp_path / "out")
    card, of_adapter = ((tmp_path / name / "README.md").read_text() for name in ("out", "adapter"))
    assert f"fmoe adapter merge adapter --base {base_folder.name} -o out" in card
    assert f"| share of a change that rounding took | {report['lost_share_median']:.2g} (median) |" in card
    assert f"| layout | {layout} |" in of_adapter and 'library_name: "peft"' in of_adapter
    merged = load(tmp_path / "out")  # plain Transformers, every key matches
    assert_same(dict(merged.named_parameters()), expected, start)
    assert {f.name: f.read_bytes() for f in base_folder.iterdir()} == before
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    theirs = json.loads(before["model.safetensors.index.json"])
    assert index == theirs
    assert report["lost_share_worst"] < 1e-12 and report["changed"] > 2


@pytest.mark.parametrize("is_tied", [True, False])
def test_adapter_of_a_tied_head_is_not_merged_into_the_embedding(is_tied, tmp_path):
    from tests.checkpoint.adapter_models import PARAMETERS, peft
    from tests.formats.format_models import MODELS, make

    model = make("qwen3_moe", **MODELS["qwen3_moe"], tie_word_embeddings=is_tied)
    model.save_pretrained(tmp_path / "base")
    embedding = model.get_input_embeddings().weight.clone()
    config = peft.LoraConfig(
        r=2, target_modules=["lm_head"], target_parameters=PARAMETERS, init_lora_weights=False
    )
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    adapter = read_adapter(tmp_path / "adapter", packing="rank_major")
    if is_tied:
        with pytest.raises(CheckpointError, match=r"lm_head\.weight shares its values with .*embed_tokens"):
            merge.merge(adapter, ModelFolder(tmp_path / "base"), tmp_path / "out")
        return
    merge.merge(adapter, ModelFolder(tmp_path / "base"), tmp_path / "out")
    merged = load(tmp_path / "out")
    assert torch.equal(merged.get_input_embeddings().weight, embedding)
    assert not torch.equal(merged.get_output_embeddings().weight, embedding)


@pytest.mark.parametrize("made", ["mixtral"], indirect=True)
def test_merge_into_bfloat16_reports_what_rounding_takes(made, tmp_path):
    _, base_folder, folder, expected, _ = made
    report = merge.merge(read_adapter(folder), ModelFolder(base_folder), tmp_path / "out", torch.bfloat16)
    merged = load(tmp_path / "out")
    for name, value in merged.named_parameters():
        assert torch.equal(value, expected[name].bfloat16().double()), name
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    assert 1e-4 < report["lost_share_median"] < report["lost_share_worst"]


KILLED = """
import signal, sys
from fmoe_ext.finetune.adapters import cli, merge
write, written = merge.write_safetensors, []
def third_is_the_last(path, *rest, **named):
    write(path, *rest, **named)
    written.append(path)
    print("shard", flush=True)
    if len(written) == 3:
        signal.pause()
merge.write_safetensors = third_is_the_last
cli.main(sys.argv[1:])
"""


@pytest.mark.parametrize("made", ["qwen3_moe"], indirect=True)
def test_killed_merge_goes_on(made, tmp_path, tmp_path_factory):
    name, base_folder, folder, expected, start = made
    arguments = ["merge", str(folder), "--base", str(base_folder), "-o", str(tmp_path / "out")]
    pipe = tmp_path_factory.mktemp("said") / "pipe"
    os.mkfifo(pipe)
    process = start_python(KILLED, *arguments, streams=(pipe, os.devnull))
    with open(pipe) as said:
        for _ in range(3):
            said.readline()
        process.kill()
        process.join()
    work = tmp_path / ".out.merging"
    noted = json.loads((work / "job.json").read_text())["done"]["losses"]
    done = {name: (work / "model" / name).stat().st_mtime_ns for name in noted}
    assert len(done) == 2 and not (tmp_path / "out").exists()
    merge.merge(read_adapter(folder), ModelFolder(base_folder), tmp_path / "out")
    after = {f.name: f.stat().st_mtime_ns for f in (tmp_path / "out").glob("*.safetensors")}
    assert done.items() <= after.items() and len(after) > len(done)
    assert_same(dict(load(tmp_path / "out").named_parameters()), expected, start)
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("made", ["qwen3_moe"], indirect=True)
def test_full_disk_is_one_error_and_the_merge_goes_on(made, tmp_path, monkeypatch):
    _, base_folder, folder, _, _ = made
    usage = merge.shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(merge.shutil, "disk_usage", lambda _: usage._replace(free=1000))
        with pytest.raises(
            CheckpointError, match=r"bytes needed, 1,000 are free: make room and run the same"
        ):
            merge.merge(read_adapter(folder), ModelFolder(base_folder), tmp_path / "out")
    merge.merge(read_adapter(folder), ModelFolder(base_folder), tmp_path / "out")
    with pytest.raises(CheckpointError, match="exists already"):
        merge.merge(read_adapter(folder), ModelFolder(base_folder), tmp_path / "out")


@pytest.mark.parametrize("made", ["qwen3_moe"], indirect=True)
def test_another_merge_does_not_continue(made, tmp_path):
    _, base_folder, folder, _, _ = made
    (tmp_path / ".out.merging").mkdir()
    (tmp_path / ".out.merging/job.json").write_text('{"about": {}}')
    with pytest.raises(CheckpointError, match="holds parts of another job"):
        merge.merge(read_adapter(folder), ModelFolder(base_folder), tmp_path / "out")


def drop(part):
    return lambda tensors, config: [tensors.pop(k) for k in [*tensors] if part in k]


def zero(tensors, config):
    for key in tensors:
        tensors[key] = torch.zeros_like(tensors[key])


def infinite(tensors, config):
    key = next(k for k in tensors if ".experts." in k)
    tensors[key] = tensors[key] / 0


@pytest.mark.parametrize("made", ["mixtral"], indirect=True)
@pytest.mark.parametrize(
    "change, text",
    [
        (drop("layers.1.mlp.experts.lora_B"), "lacks lora_B"),
        (lambda t, c: c.update(use_dora=True), "use_dora=True is not supported"),
        (lambda t, c: c.update(r=5), r"expected \[E \* 5"),
        (lambda t, c: c.update(r=True), "must be positive numbers"),
        (lambda t, c: c.update(peft_type="IA3"), "peft_type='IA3'"),
        (lambda t, c: c.update(rank_pattern={"(a*)*b": 4}), "not evaluated"),
        (lambda t, c: c.update(rank_pattern={"(ab|..)" * 50 + "z": 4}), "not evaluated"),
        (lambda t, c: c.update(target_parameters=7), "target_parameters is '7', which is no list of names"),
        (lambda t, c: c.update(target_modules=[3]), "target_modules is .*, which is no list of names"),
        (lambda t, c: t.update({"x.experts.lora_magnitude_vector": torch.ones(1)}), "of no known layout"),
        (zero, "all zero, it changes nothing"),
        (infinite, "not finite"),
    ],
    ids=range(12),
)
def test_damage_is_named(made, change, text, tmp_path, capsys):
    _, _, folder, _, _ = made
    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    change(tensors, config)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    try:
        status = cli.main(["check", str(tmp_path), "--packing", "rank_major"])
    except SystemExit as refused:
        assert str(refused.code).startswith("error: ")
        said, status = str(refused.code), 2
    else:
        said = capsys.readouterr().out
    assert status and re.search(text, said), said


@pytest.mark.parametrize("made", ["mixtral"], indirect=True)
def test_extended_vocabulary_is_named_with_the_way_out(made, tmp_path):
    _, base_folder, folder, _, _ = made
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in ModelFolder(base_folder).tensors if "embed_tokens" in name)
    tokens, width = ModelFolder(base_folder).tensors[name].shape
    tensors[f"base_model.model.{name}"] = torch.zeros(tokens + 3, width)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text((folder / "adapter_config.json").read_text())
    (problem,) = check(read_adapter(tmp_path), ModelFolder(base_folder))["problems"]
    assert f"{name} has {tokens + 3} tokens, the base {tokens}" in problem
    assert f"model.resize_token_embeddings({tokens + 3})" in problem


def test_base_of_another_shape_and_quantised_bases_are_named(made, tmp_path):
    name, base_folder, folder, _, _ = made
    other = next(b for b in BASES if b != name)
    base(other, tmp_path / "other")
    if {name, other} != {"mixtral", "gpt_oss"}:
        assert check(read_adapter(folder), ModelFolder(tmp_path / "other"))["problems"]
    config = json.loads((base_folder / "config.json").read_text())
    (tmp_path / "other/config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "fp8"}})
    )
    with pytest.raises(CheckpointError, match=r"is quantised \(fp8\)"):
        ModelFolder(tmp_path / "other").check_plain()


@pytest.mark.parametrize("made", ["mixtral"], indirect=True)
def test_check_reports_sizes_and_logits(made, tmp_path, capsys):
    _, base_folder, folder, expected, start = made
    arguments = [
        "check",
        str(folder),
        "--base",
        str(base_folder),
        "--model",
        "--json",
        "--scratch",
        str(tmp_path),
    ]
    assert cli.main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    name = "model.layers.1.mlp.experts"
    before, after = start[f"{name}.down_proj"], expected[f"{name}.down_proj"]
    sizes = [((a - b).norm() / b.norm()).item() for a, b in zip(after, before, strict=True)]
    assert report["delta"][name]["down"] == pytest.approx(sizes, rel=1e-6)
    assert report["logits"]["largest_difference"] > 1e-3 and not [*tmp_path.iterdir()]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("made", ["mixtral"], indirect=True)
def test_broken_files_are_refused(made, data, tmp_path_factory):
    """Flipped and cut bytes of either file: a report or one error, never another exception."""
    folder = tmp_path_factory.mktemp("broken")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        content = bytearray((made[2] / name).read_bytes())
        limit = min(len(content), 3000)
        for _ in range(data.draw(st.integers(0, 3))):
            content[data.draw(st.integers(0, limit - 1))] = data.draw(st.integers(0, 255))
        end = data.draw(st.sampled_from([len(content), len(content) - 1, 7, limit // 2]))
        (folder / name).write_bytes(content[:end])
    try:
        assert cli.main(["check", str(folder), "--json"]) in (0, 1)
    except SystemExit as refused:
        assert str(refused.code).startswith("error: ")


@pytest.mark.parametrize("made", ["mixtral"], indirect=True)
def test_links_out_of_the_folder_and_pickles_are_refused(made, tmp_path):
    (tmp_path / "adapter_config.json").write_bytes((made[2] / "adapter_config.json").read_bytes())
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="pickles"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").symlink_to(made[2] / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="outside the folder"):
        read_adapter(tmp_path)


def _single_experts(
    folder, form, rank, prefix="base_model.model.", path="model.layers.0.mlp.experts", **config
):
    """Write an adapter of two experts, a module for each or 3-d tensors; 6 wide, 4 hidden units."""
    layer, tensors = f"{prefix}{path}", {}
    for leaf, size_in, size_out in (("w1", 6, 4), ("w3", 6, 4), ("w2", 4, 6)):
        for e in range(2):
            name = f"{layer}.{leaf}" if form == "stacked" else f"{layer}.{e}.{leaf}"
            lead = (2,) if form == "stacked" else ()
            tensors[f"{name}.lora_A.weight"] = torch.ones(*lead, rank, size_in)
            tensors[f"{name}.lora_B.weight"] = torch.ones(*lead, size_out, rank)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    text = json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4} | config)
    (folder / "adapter_config.json").write_text(text)
    return folder


@pytest.mark.parametrize("prefix", ["base_model.model.", ""])
@pytest.mark.parametrize("form", ["stacked", "numbered"])
def test_patterns_name_modules_of_experts(form, prefix, tmp_path):
    """A pattern for w2 is its own; one for the router, gate, is no projection's."""
    config = {"alpha_pattern": {"w2": 16, "gate": 64}, "rank_pattern": {"w3": 8}}
    adapter = read_adapter(_single_experts(tmp_path, form, 2, prefix, **config))
    (parts,) = adapter.layers.values()
    assert {role: factors.scaling for role, factors in parts.items()} == {"gate": 2, "up": 2, "down": 8}
    assert any("up has rank 2, but adapter_config.json says 8" in text for text in adapter.problems)


@pytest.mark.parametrize("form", ["stacked", "numbered"])
def test_factors_of_rank_0_are_refused(form, tmp_path):
    with pytest.raises(CheckpointError, match=r"lora_A \[2, 0, 4\]|differ in rank or shape, or have none"):
        read_adapter(_single_experts(tmp_path, form, 0))


def test_adapter_that_is_not_finite_is_not_converted(tmp_path):
    """Two changes of NaN were equal to the check by PEFT, whatever they were."""
    base("qwen3_moe", tmp_path / "base")
    trained("qwen3_moe", tmp_path / "adapter")
    rewritten(tmp_path / "adapter", lambda k, v: (k, v * torch.nan if "experts.lora_B" in k else v))
    adapter = read_adapter(tmp_path / "adapter", "rank_major")
    with pytest.raises(
        CheckpointError, match=r"the adapter's change of \S+\.experts\.down_proj is not finite"
    ):
        convert(adapter, "peft-0.19", tmp_path / "out", ModelFolder(tmp_path / "base"))
    assert not (tmp_path / "out").exists()


def test_scratch_without_model_is_refused(tmp_path):
    trained("qwen3_moe", tmp_path / "adapter")
    with pytest.raises(SystemExit, match="--scratch is read with --model alone"):
        cli.main(["check", str(tmp_path / "adapter"), "--scratch", str(tmp_path)])


@pytest.mark.parametrize("made", ["mixtral"], indirect=True)
def test_logits_that_are_all_zero_have_no_share(made, tmp_path):
    name, _, folder, _, _ = made
    model = base(name)
    torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(tmp_path / "base")
    zero = ModelFolder(tmp_path / "base")
    merge.merge(read_adapter(folder), zero, tmp_path / "merged")
    found = logits(zero, tmp_path / "merged")
    assert found == {"largest_difference": 0.0, "changed_first_choices": 0.0}


@pytest.mark.parametrize("made", ["mixtral"], indirect=True)
def test_scalars_that_are_saved_whole_are_no_vocabulary(made, tmp_path):
    _, base_folder, folder, _, _ = made
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(
        tensors | {"base_model.model.model.norm.weight": torch.ones(())},
        tmp_path / "adapter_model.safetensors",
    )
    (tmp_path / "adapter_config.json").write_text((folder / "adapter_config.json").read_text())
    report = check(read_adapter(tmp_path), ModelFolder(base_folder))
    assert not report["problems"] and "model.norm.weight: merge refuses them" in report["notes"][0]


def test_gate_of_experts_without_one_is_named(tmp_path):
    """Merged, the change of the gate would be lost; converted, it has no name."""
    adapter = read_adapter(_single_experts(tmp_path, "numbered", 2))
    experts = Experts({"up": ("u0", "u1"), "down": ("d0", "d1")}, d_model=6, d_hidden=4)
    assert compare_experts(adapter, lambda layer: experts) == [
        "model.layers.0.mlp.experts: gate is adapted, but the base's experts have no gate"
    ]
    folder = save(tmp_path / "base", "NemotronHForCausalLM")
    (path, *_) = experts_modules(open_model(folder).skeleton())
    adapter = read_adapter(_single_experts(tmp_path, "numbered", 2, path=path))
    with pytest.raises(CheckpointError, match=f"{path}: a gate is adapted, but the base's experts have none"):
        convert(adapter, "peft-0.18", tmp_path / "out", ModelFolder(folder))


def test_layers_without_experts_between_adapted_ones_are_no_problem(tmp_path):
    """Every second layer of this model is dense."""
    model = base("qwen3_moe", tmp_path / "base")
    config = model.config.to_dict() | {"num_hidden_layers": 4, "mlp_only_layers": [], "layer_types": None}
    whole, sparse = (
        type(model)(type(model.config).from_dict(config | {"decoder_sparse_step": step})) for step in (1, 2)
    )
    whole.save_pretrained(tmp_path / "whole")
    sparse.save_pretrained(tmp_path / "sparse")
    adapted = peft.get_peft_model(
        sparse, peft.LoraConfig(r=2, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    adapted.save_pretrained(tmp_path / "adapter")
    adapter = read_adapter(tmp_path / "adapter", "rank_major")
    text = "no experts are adapted in layers [2], between others that are"
    assert check(adapter)["problems"] == [text]
    assert check(adapter, ModelFolder(tmp_path / "sparse"))["problems"] == []
    assert check(adapter, ModelFolder(tmp_path / "whole"))["problems"] == [text]


@pytest.mark.parametrize(
    "made, layout, of_base",
    [
        ("gpt_oss", "per-expert", {"gate": ["gate_up"], "up": ["gate_up"], "down": ["down"]}),
        ("qwen3_moe", "vllm", {"gate_up": ["gate", "up"], "down": ["down"]}),
    ],
    indirect=["made"],
)
def test_table_of_check_has_the_size_of_every_change(made, layout, of_base, tmp_path, capsys):
    """of_base: {projection of the adapter: those of the base that are it, or hold it}."""
    _, base_folder, folder, _, _ = made
    convert(read_adapter(folder), layout, tmp_path / "there", ModelFolder(base_folder), check=False)
    arguments = ["check", str(tmp_path / "there"), "--base", str(base_folder)]
    arguments += [] if layout == "per-expert" else ["--packing", "rank_major"]
    assert cli.main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert cli.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {row["projection"] for row in report["rows"]} == of_base.keys()
    for row in report["rows"]:
        (line,) = [x for x in lines if x.split()[:2] == [row["layer"], row["projection"]]]
        shares = [x for role in of_base[row["projection"]] for x in report["delta"][row["layer"]][role]]
        assert line.endswith(f"  {min(shares):.2g} to {max(shares):.2g}") and min(shares) > 0.01
