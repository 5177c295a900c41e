"""`fmoe export --text`: scales of packed weights are chosen by the inputs that a text gives them."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fmoe_ext
from fmoe_ext import frozen
from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.checkpoint.methods import kind_of
from fmoe_ext.checkpoint.model_folder import ModelFolder
from fmoe_ext.formats import cli, quantized
from fmoe_ext.formats.quantized import export_quantized
from fmoe_ext.frozen.quantized import FITTED
from fmoe_ext.model_files import open_model
from tests.finetune import streamed_models as streamed
from tests.formats.format_models import make
from tests.formats.test_gguf import OSS

transformers = pytest.importorskip("transformers")

SIZES = {"num_hidden_layers": 2, "norm_topk_prob": True, **streamed.WIDE}
TEXT = torch.randint(3, 60, (640,), generator=torch.Generator().manual_seed(1))
HELD_OUT = torch.randint(3, 60, (2, 64), generator=torch.Generator().manual_seed(2))


def save_model(folder, made):
    """A model whose norms let some channels through and others hardly, as trained ones do."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, value in made.named_parameters():
            if key.endswith("layernorm.weight"):
                value.copy_(torch.randn(value.shape, generator=generator).exp())
    made.to(torch.bfloat16).save_pretrained(folder)
    return folder


def save_oss(folder):
    """GPT-OSS: stacks [E, in, out], gates and ups in turn."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    return save_model(folder, make("gpt_oss", **OSS | sizes))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    made = streamed.make_model("Qwen3MoeForCausalLM", vocab_size=1024, **SIZES)
    return save_model(tmp_path_factory.mktemp("model"), made)


@pytest.mark.parametrize("format", FITTED)
def test_no_block_errs_more_by_its_importance(format):
    weight = torch.randn(2, 8, 512, generator=torch.Generator().manual_seed(0))
    weight[0, 0, :256] = 0
    importance = torch.randn(2, 1, 512, generator=torch.Generator().manual_seed(1)).exp().square()
    importance[:, :, ::7] = 0

    def errors(q, by):
        return (by * (q.dequantize() - weight).square()).unflatten(-1, (2, 256)).sum(-1)

    plain, chosen = frozen.quantize(weight, format), frozen.quantize(weight, format, importance)
    before, after = errors(plain, importance), errors(chosen, importance)
    assert (after <= before * (1 + 1e-6)).all() and after.sum() < 0.95 * before.sum()
    # elementwise importance of the same numbers
    same = frozen.quantize(weight, format, importance.expand(weight.shape).contiguous())
    assert torch.equal(same.data, chosen.data)
    nothing = frozen.quantize(torch.zeros(1, 2, 256), format, torch.ones(1, 1, 256))
    assert torch.equal(nothing.dequantize(), torch.zeros(1, 2, 256))
    with pytest.raises(ValueError, match="0 or more"):
        frozen.quantize(weight, format, -importance)
    with pytest.raises(ValueError, match=r"must broadcast to \[2, 8, 512\], but got \[3, 1, 512\]"):
        frozen.quantize(weight, format, torch.ones(3, 1, 512))


def test_formats_without_a_choice_say_so():
    with pytest.raises(ValueError, match="q8_0 leaves no choice to an importance"):
        frozen.quantize(torch.ones(1, 1, 32), "q8_0", torch.ones(1, 1, 32))


def measured(folder):
    """({parameter: mean squares}, tokens in) as the export measures them."""
    job = quantized._Packed(open_model(folder), "nf4")
    job.calibrate(TEXT.view(-1, 64).split(4), "auto")
    return job


def test_importance_is_the_mean_square_of_inputs(model):
    found = measured(model).importance
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, experts_implementation="eager"
    ).eval()
    seen = {"q": [], "x": [], "idx": []}

    def see_experts(_, args):
        seen["x"].append(args[0])
        seen["idx"].append(args[1])

    layer = plain.model.layers[0]  # before any experts, whose sums are in another order
    layer.self_attn.q_proj.register_forward_pre_hook(lambda _, args: seen["q"].append(args[0]))
    layer.mlp.experts.register_forward_pre_hook(see_experts)
    with torch.no_grad():
        for batch in TEXT.view(-1, 64).split(4):
            plain(input_ids=batch)
    seen["q"] = [rows.flatten(0, 1) for rows in seen["q"]]
    seen = {key: torch.cat(parts) for key, parts in seen.items()}
    expected = seen["q"].float().square().mean(0)
    torch.testing.assert_close(
        found["model.layers.0.self_attn.q_proj.weight"][0], expected, rtol=1e-3, atol=0
    )
    ups, downs, counts = [], [], []
    for e in range(6):
        x = seen["x"][(seen["idx"] == e).any(-1)].float()
        gate, up = (x @ layer.mlp.experts.gate_up_proj[e].float().T).chunk(2, -1)
        ups.append(x.square().sum(0))
        downs.append((torch.nn.functional.silu(gate) * up).square().sum(0))
        counts.append(len(x))
    counts = torch.tensor(counts)[:, None]
    for leaf, sums in (("gate_up_proj", torch.stack(ups)), ("down_proj", torch.stack(downs))):
        expected = (sums + 16 * sums.sum(0) / counts.sum()) / (counts + 16)
        mean = found[f"model.layers.0.mlp.experts.{leaf}"][:, 0]
        torch.testing.assert_close(mean, expected.detach(), rtol=0.03, atol=1e-4 * float(expected.max()))


@pytest.mark.parametrize("type", ["mxfp4", "nvfp4", "nf4"])
def test_folder_errs_less_where_the_text_is(type, model, tmp_path):
    """Every other tensor, key and file is as without a text; every weight's error falls, and that of the output."""
    export_quantized(model, tmp_path / "plain", "packed", type)
    export_quantized(model, tmp_path / "text", "packed", type, tokens=TEXT, seq_len=64)
    job = measured(model)
    base, plain, chosen = (ModelFolder(folder) for folder in (model, tmp_path / "plain", tmp_path / "text"))
    assert plain.config == chosen.config and plain.tensors.keys() == chosen.tensors.keys()
    kind, falls = kind_of(plain), []
    for name, tensor in base.tensors.items():
        if name not in job.wanted:
            assert torch.equal(chosen.tensors[name].read(), tensor.read()), name
            continue
        stem, by = name.removesuffix(".weight"), job.inputs(name)
        values = [kind.matrix(f, stem).decode(f.tensors, torch.float32) for f in (plain, chosen)]
        before, after = ((by * (v - tensor.read().float()).square()).sum() for v in values)
        assert after <= before * 1.0001, name
        falls.append(float(after / before))
    assert len(falls) == 44 and sum(falls) / 44 < (0.995 if type == "mxfp4" else 0.95)
    for file in (tmp_path / "plain").iterdir():
        if file.suffix != ".safetensors" and file.name != "README.md":
            assert file.read_bytes() == (tmp_path / "text" / file.name).read_bytes(), file.name
    card = (tmp_path / "text/README.md").read_text()
    assert (
        "| scales chosen by | 640 tokens of a text, SHA-256" in card and f"--type {type} --text TEXT" in card
    )
    assert "scales chosen by" not in (tmp_path / "plain/README.md").read_text()
    if type == "mxfp4":  # whose three scales gain little: other choices of experts may outweigh it
        return
    errors = []
    with torch.no_grad():
        exact = fmoe_ext.stream(model, dtype=torch.float32)(input_ids=HELD_OUT).logits
        for folder in ("plain", "text"):
            found = fmoe_ext.stream(tmp_path / folder, dtype=torch.float32)(input_ids=HELD_OUT).logits
            errors.append(float((found - exact).square().mean()))
    assert errors[1] < errors[0]


@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "GptOssForCausalLM"])
@pytest.mark.parametrize("type", ["q4_k", "mxfp4"])
def test_gguf_file_errs_less(name, type, model, tmp_path):
    gguf = pytest.importorskip("gguf")
    folder = model if name.startswith("Qwen") else save_oss(tmp_path / "in")
    floats = fmoe_ext.import_model(folder)
    with pytest.warns(UserWarning, match="no vocabulary"):
        fmoe_ext.export(floats, tmp_path / "floats", "gguf")
    export_quantized(folder, tmp_path / "plain", "gguf", type)
    export_quantized(folder, tmp_path / "text", "gguf", type, tokens=TEXT, seq_len=64)

    def read(part):
        tensors = gguf.GGUFReader(tmp_path / part / "model.gguf").tensors
        return {t.name: (t.tensor_type, gguf.dequantize(t.data, t.tensor_type)) for t in tensors}

    exact, plain, chosen = (read(part) for part in ("floats", "plain", "text"))
    assert {n: t[0] for n, t in plain.items()} == {n: t[0] for n, t in chosen.items()}
    job = measured(folder) if name.startswith("Qwen") else None
    packed = [n for n, (kind, _) in chosen.items() if kind.name == type.upper()]
    for name_, (_, values) in plain.items():
        if name_ not in packed:
            assert np.array_equal(values, chosen[name_][1]), name_
    if job is None:  # its importance is tested by the folder's writer; here that values moved and stay near
        assert any(not np.array_equal(plain[n][1], chosen[n][1]) for n in packed)
        return
    places = {"ffn_gate_exps": "mlp.experts.gate_up_proj", "ffn_up_exps": "mlp.experts.gate_up_proj"}
    places |= {"ffn_down_exps": "mlp.experts.down_proj", "attn_output": "self_attn.o_proj.weight"}
    places |= {f"attn_{x}": f"self_attn.{x}_proj.weight" for x in "qkv"}
    falls = []
    for name_ in packed:
        _, layer, leaf, _ = name_.split(".")
        by = job.importance[f"model.layers.{layer}.{places[leaf]}"].numpy()
        before, after = (
            float((by * (part[name_][1] - exact[name_][1]) ** 2).sum()) for part in (plain, chosen)
        )
        assert after <= before * 1.0001, name_
        falls.append(after / before)
    assert len(falls) == 14 and np.mean(falls) < {"q4_k": 0.95, "mxfp4": 0.995}[type]


def test_stacks_of_gpt_oss(tmp_path):
    folder = save_oss(tmp_path / "in")
    for out, tokens in (("plain", None), ("text", TEXT)):
        export_quantized(folder, tmp_path / out, "packed", "mxfp4", tokens=tokens, seq_len=64)
    job = quantized._Packed(open_model(folder), "mxfp4")
    job.calibrate(TEXT.view(-1, 64).split(4), "auto")
    exact = load_file(folder / "model.safetensors")
    plain, chosen = (load_file(tmp_path / out / "model.safetensors") for out in ("plain", "text"))
    for key, by in job.importance.items():
        if ".experts." not in key:
            continue
        before, after = (
            frozen.Quantized("mxfp4", part[f"{key}_blocks"], part[f"{key}_scales"]).dequantize().mT
            for part in (plain, chosen)
        )
        errors = [(by * (part - exact[key].float()).square()).sum() for part in (before, after)]
        assert by.shape == (exact[key].shape[0], exact[key].shape[1], 1) and errors[1] < errors[0]
    rest = {k for k in plain if not k.endswith(("_blocks", "_scales"))}
    assert all(torch.equal(plain[k], chosen[k]) for k in rest) and plain.keys() == chosen.keys()


def test_command_takes_text_and_token_ids(model, tmp_path, capsys):
    (tmp_path / "ids.json").write_text(json.dumps(TEXT.tolist()))
    more = ["--tokens", str(tmp_path / "ids.json"), "--seq-len", "64"]
    assert cli.main([str(model), "--to", "packed", "--type", "nf4", "-o", str(tmp_path / "out"), *more]) == 0
    export_quantized(model, tmp_path / "same", "packed", "nf4", tokens=TEXT, seq_len=64)
    one, other = (load_file(tmp_path / part / "model.safetensors") for part in ("out", "same"))
    assert all(torch.equal(one[key], other[key]) for key in other)
    with pytest.raises(SystemExit, match=r"--type q8_0 leaves no choice to a text.*mxfp4, nf4, nvfp4, q4_k"):
        cli.main([str(model), "--to", "gguf", "--type", "q8_0", "-o", str(tmp_path / "no"), *more])
    with pytest.raises(CheckpointError, match="at least 96 say something"):
        export_quantized(model, tmp_path / "no", "packed", "nf4", tokens=TEXT[:64], seq_len=64)
    assert not (tmp_path / "no").exists()
