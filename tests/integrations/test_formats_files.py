"""export() where the machine fails it, on several ranks, as GGUF, and how much memory it takes."""

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

import fmoe_ext
from fmoe_ext import fmoefy
from fmoe_ext.checkpoint import CheckpointError
from tests.integrations.test_formats import (
    HEADS,
    MODELS,
    assert_equal_logits,
    llama,
    load,
    logits,
    make,
    moe_layers,
)

transformers = pytest.importorskip("transformers")


def wide_llama():
    return fmoefy(make("llama", hidden_size=128, intermediate_size=512, num_key_value_heads=4), 8)


@pytest.mark.parametrize("format", ["mixtral", "gguf"])
def test_no_room(format, tmp_path):
    """A limit on the size of files, as on a full disk: one error with the bytes needed, nothing left behind."""
    if format == "gguf":
        pytest.importorskip("gguf", reason="pip install gguf")
    model = wide_llama()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"no space left on the device.* bytes needed"):
            fmoe_ext.export(model, tmp_path / "out", format)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


KILLED = """
import os, signal, sys
from fmoe_ext.integrations.formats import writing
from tests.integrations.test_formats import llama
import fmoe_ext

write = writing.write_model_files
def write_and_die(*arguments):
    write(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
writing.write_model_files = write_and_die
fmoe_ext.export(llama(), sys.argv[1], "mixtral")
"""


def test_killed(tmp_path):
    """Nothing is at the place of a killed export; the next one removes what it left and writes."""
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": str(root)},
        timeout=300,
        capture_output=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert not (tmp_path / "out").exists() and len(list(tmp_path.glob(".out.*.tmp"))) == 1
    fmoe_ext.export(llama(), tmp_path / "out", "mixtral")
    assert [f.name for f in tmp_path.iterdir() if not f.name.endswith(".lock")] == ["out"]
    assert_equal_logits(load(tmp_path / "out"), logits(llama()))


def test_files_that_lie(tmp_path):
    """Damaged folders are refused at import, in our words; the model on disk stays."""
    fmoe_ext.export(llama(), tmp_path / "out", "mixtral")
    file = tmp_path / "out" / "model.safetensors"
    content = file.read_bytes()
    for damaged in (content[:1000], content[:-8], b"\xff" * 8 + content[8:]):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="a safetensors file is truncated or damaged"):
            fmoe_ext.import_model(tmp_path / "out")
        assert file.read_bytes() == damaged
        with pytest.raises(CheckpointError, match="is no safetensors file, or truncated, or damaged"):
            fmoe_ext.checkpoint.load(tmp_path / "out", llama())
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="is damaged: its SHA-256"):
        fmoe_ext.checkpoint.load(tmp_path / "out", llama())


MEMORY = """
import sys
import fmoe_ext
from fmoe_ext import fmoefy
from tests.integrations.test_formats import make

def kilobytes(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1])

model = fmoefy(make("llama", hidden_size=256, intermediate_size=2048), 8).float()
fmoe_ext.export(fmoefy(make("llama"), 2), sys.argv[1] + "/small", "mixtral")  # what is imported at the first call
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak is the present size now
before = kilobytes("VmRSS:")
fmoe_ext.export(model, sys.argv[1] + "/out", "mixtral")
print(sum(p.nbytes for p in model.parameters()) // 1024, kilobytes("VmHWM:") - before)
"""


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak is read from Linux's /proc"
)
def test_memory(tmp_path):
    """A tensor at a time: the peak grows by a small part of the model."""
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(root)},
        timeout=300,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    model, more = map(int, done.stdout.split()[-2:])
    assert model > 50_000 and more < model / 5, (model, more)
    print(f"{model} KiB of parameters, {more} KiB more at the peak")


def save_on_ranks(folder):
    """Experts over two ranks: this rank's part of what one process saves and exports."""
    model = fmoefy(make("qwen3", **HEADS), 2)
    with torch.no_grad():
        for layer in moe_layers(model):
            for value in layer.experts.parameters():
                value += layer.ep_rank
    model.save_pretrained(f"{folder}/saved")
    fmoe_ext.export(model, f"{folder}/exported", "qwen3_moe")
    try:
        fmoe_ext.export(model, f"{folder}/exported", "qwen3_moe")
    except CheckpointError as error:
        text = str(error)
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    fmoe_ext.checkpoint.load(f"{folder}/saved", model)
    return text, [layer.experts.htoh4.weight.detach().clone() for layer in moe_layers(model)]


def test_experts_over_ranks(pool, tmp_path):
    """save_pretrained and export from all ranks, loaded in one process and again on the ranks."""
    from fmoe_ext.integrations.huggingface import from_pretrained

    results = pool.run(save_on_ranks, str(tmp_path), timeout=300.0)
    whole = from_pretrained(tmp_path / "saved", dtype=torch.float64)
    assert [layer.num_experts for layer in moe_layers(whole)] == [4, 4]
    for rank, (text, weights) in enumerate(results):
        assert "exists already: give a new folder" in text
        for layer, mine in zip(moe_layers(whole), weights, strict=True):
            assert torch.equal(mine, layer.experts.htoh4.weight[2 * rank : 2 * rank + 2])
    assert_equal_logits(load(tmp_path / "exported"), logits(whole))
    assert sorted(f.name for f in tmp_path.iterdir()) == ["exported", "saved"]
    with pytest.raises(ValueError, match=r"world_size: from_pretrained loads all experts into one process"):
        from_pretrained(tmp_path / "saved", world_size=2)


def halves(w, heads):
    """What llama.cpp's converter does to rows of q and k, backwards."""
    return w.reshape(heads, -1, 2, w.shape[1]).transpose(0, 2, 1, 3).reshape(w.shape)


def by_hand(tensors, layers, heads, kv_heads, pairs):
    """{name of Transformers: array} of a GGUF file, written down independently of the code under test."""
    state = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        "model.norm.weight": tensors["output_norm.weight"],
        "lm_head.weight": tensors["output.weight"],
    }
    names = {
        **{
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "attn_v": "self_attn.v_proj",
        },
        **{
            "attn_output": "self_attn.o_proj",
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
        },
        **{"ffn_gate_inp": "mlp.gate", "ffn_down_shexp": "mlp.shared_expert.down_proj"},
        **{"ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj"},
        **{"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj"},
    }
    for i in range(layers):
        blk = {
            name.removeprefix(f"blk.{i}."): v for name, v in tensors.items() if name.startswith(f"blk.{i}.")
        }
        if pairs:
            blk["attn_q.weight"] = halves(blk["attn_q.weight"], heads)
            blk["attn_k.weight"] = halves(blk["attn_k.weight"], kv_heads)
        mlp = f"model.layers.{i}.mlp."
        gate, up = blk.pop("ffn_gate_exps.weight"), blk.pop("ffn_up_exps.weight")
        state[f"{mlp}experts.gate_up_proj"] = numpy.concatenate([gate, up], 1)
        state[f"{mlp}experts.down_proj"] = blk.pop("ffn_down_exps.weight")
        if "ffn_gate_inp_shexp.weight" in blk:
            state[f"{mlp}shared_expert_gate.weight"] = blk.pop("ffn_gate_inp_shexp.weight")[None]
        for name, value in blk.items():
            stem, _, kind = name.rpartition(".")
            state[f"model.layers.{i}.{names[stem]}.{kind}"] = value
    return state


GGUF = {
    "mixtral": ("mixtral", "llama", {**MODELS["mixtral"], "sliding_window": None}),
    "qwen3_moe": ("qwen3_moe", "qwen3moe", {**MODELS["qwen3_moe"], "mlp_only_layers": []}),
    "qwen2_moe": ("qwen2_moe", "qwen2moe", MODELS["qwen2_moe"]),
    "olmoe": ("olmoe", "olmoe", {**MODELS["olmoe"], "clip_qkv": None}),
}


@pytest.mark.parametrize("name", GGUF)
def test_gguf(name, tmp_path):
    """Read by gguf's own reader and put back by hand: the model's logits, as exact as float32 is."""
    gguf = pytest.importorskip("gguf", reason="pip install gguf")
    model_type, architecture, values = GGUF[name]
    theirs = make(model_type, **values)
    expected, expected_state = logits(theirs), theirs.state_dict()
    fmoe_ext.export(fmoe_ext.import_model(make(model_type, **values)), tmp_path / "out", "gguf")
    assert [f.name for f in (tmp_path / "out").iterdir()] == ["model.gguf"]
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    facts = {name: field.contents() for name, field in reader.fields.items()}
    assert facts["general.architecture"] == architecture
    assert facts["tokenizer.ggml.model"] == "no_vocab"
    assert facts[f"{architecture}.expert_count"] == 6
    assert facts[f"{architecture}.expert_used_count"] == theirs.config.num_experts_per_tok
    assert facts[f"{architecture}.vocab_size"] == 61 and facts[f"{architecture}.block_count"] == 2
    assert facts[f"{architecture}.attention.head_count_kv"] == 2
    assert facts[f"{architecture}.rope.freq_base"] == theirs.config.rope_parameters["rope_theta"]
    tensors = {t.name: t.data for t in reader.tensors}
    known = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), 2).mapping.values()
    assert {t.removesuffix(".weight").removesuffix(".bias") for t in tensors} <= {n for _, n in known}
    state = by_hand(tensors, 2, 4, 2, pairs=name == "mixtral")
    assert state.keys() == expected_state.keys()
    assert all(numpy.array_equal(v, expected_state[k].float().numpy()) for k, v in state.items())
    theirs.load_state_dict({k: torch.tensor(v) for k, v in state.items()})
    assert (logits(theirs) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_gguf_of_a_bfloat16_model(tmp_path):
    gguf = pytest.importorskip("gguf", reason="pip install gguf")
    model = llama().bfloat16()
    fmoe_ext.export(model, tmp_path / "out", "gguf")
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    assert types["blk.0.ffn_up_exps.weight"] == "BF16" and types["token_embd.weight"] == "BF16"
    assert types["blk.1.ffn_gate_inp.weight"] == types["blk.0.attn_norm.weight"] == "F32"
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"gguf is written for mixtral, .* but this model is gpt_oss"):
        fmoe_ext.export(fmoe_ext.import_model(make("gpt_oss", **MODELS["gpt_oss"])), tmp_path / "out", "gguf")
    sizes = {**MODELS["qwen3_moe"], "norm_topk_prob": False, "mlp_only_layers": []}
    with pytest.raises(CheckpointError, match="norm_topk_prob=False has no place in GGUF's qwen3moe"):
        fmoe_ext.export(fmoe_ext.import_model(make("qwen3_moe", **sizes)), tmp_path / "out", "gguf")
    assert not list(tmp_path.iterdir())
