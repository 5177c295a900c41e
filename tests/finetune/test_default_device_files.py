"""Models and adapters in files, read and written under another default device."""

import functools

import numpy
import pytest
import torch

import fmoe_ext
from fmoe_ext import checkpoint
from fmoe_ext.checkpoint.cli import main
from tests.default_device import assert_same_under_default, files, ids

pytest.importorskip("transformers")


def exported_and_imported(folder):
    from tests.formats.format_models import MODELS, make

    model = make("qwen3_moe", **MODELS["qwen3_moe"]).float()
    x = ids(1, 12)

    def run():
        ours = fmoe_ext.import_model(model)
        logits = ours(input_ids=x).logits.detach()
        fmoe_ext.export(ours, folder / "exported", "qwen3_moe")
        fmoe_ext.checkpoint.load(folder / "exported", ours)
        ours.save_pretrained(folder / "ours")
        return logits, files(folder), ours(input_ids=x).logits.detach()

    return run


def converted(folder):
    from tests.checkpoint.test_checkpoint_cli import make

    model = make()
    checkpoint.save(folder / "ours", model)

    def run():
        source = folder / "ours"
        for i, (format, *options) in enumerate([("hf-fused",), ("hf-mixtral",), ("fastmoe", "--ranks", "2")]):
            main(["convert", str(source), "--to", format, "-o", str(folder / str(i)), *options])
            source = folder / str(i)
        main(["merge", str(source), "-o", str(folder / "merged.safetensors")])
        checkpoint.load(folder / "merged.safetensors", model)
        return files(folder, ".safetensors"), model

    return run


def streamed(kind, folder):
    from tests.finetune.streamed_models import WIDE, pack, save, write_gguf

    sizes = WIDE | {"num_hidden_layers": 2}
    source = save(folder / "model", dtype=torch.float32, **sizes)
    if kind == "gguf":
        source, _ = write_gguf(source, "q4_k")
    elif kind == "mxfp4":
        source = pack(source)
    x = ids(2, 12)

    def run():
        with torch.random.fork_rng():
            model = fmoe_ext.stream(source, 2**30, dtype=torch.float32, activations=folder)
            logits = model(input_ids=x).logits.detach()
            new = model.generate(x, max_new_tokens=3, do_sample=False)
        return logits, new

    return run


def tuned(folder):
    from tests.finetune.streamed_models import WIDE, save, with_adapters

    source, x = save(folder / "model", dtype=torch.float32, **WIDE | {"num_hidden_layers": 2}), ids(2, 12)
    with torch.device("cpu"):
        model = with_adapters(fmoe_ext.stream(source, 2**30, activations=folder))

    def run():
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    return run


def merged(folder):
    from fmoe_ext.finetune.adapters import cli
    from tests.checkpoint.adapter_models import base, trained

    base("qwen3_moe", folder / "base")
    trained("qwen3_moe", folder / "adapter", steps=1)

    def run():
        given = [str(folder / "adapter"), "--base", str(folder / "base")]
        codes = [
            cli.main(["merge", *given, "-o", str(folder / "out")]),
            cli.main(["convert", *given, "--to", "per-expert", "-o", str(folder / "other")]),
            cli.main(["check", *given]),
        ]
        return codes, files(folder / "out", ".safetensors")

    return run


def repacked(folder):
    from fmoe_ext.finetune.adapters import cli
    from tests.checkpoint.test_adapter_repack import made

    source, adapter = made(folder, "int4")
    numpy.save(folder / "ids.npy", ids(400).numpy())

    def run():
        given = [str(adapter), "--base", str(source), "--packing", "rank_major", "--to", "packed"]
        text = ["--tokens", str(folder / "ids.npy"), "--seq-len", "20"]
        code = cli.main(["merge", *given, *text, "-o", str(folder / "out")])
        return code, files(folder / "out", ".safetensors")

    return run


def pruned(folder):
    from fmoe_ext.compress import prune
    from tests.finetune.streamed_models import save

    source, text = save(folder / "model", dtype=torch.float32, num_hidden_layers=2), ids(600)

    def run():
        options = {"keep": 0.5, "seq_len": 20, "merge": 0.01, "scores": folder / "scores.json"}
        reports = [prune(source, folder / out, text, **options) for out in ("first", "second")]
        return [report["layers"] for report in reports], files(folder / "first").keys()

    return run


OF_FILES = {
    **{f"streamed {kind}": functools.partial(streamed, kind) for kind in ("safetensors", "mxfp4", "gguf")},
    **{case.__name__: case for case in (converted, exported_and_imported, tuned, merged, repacked, pruned)},
}


@pytest.mark.parametrize("name", OF_FILES)
def test_same_files_and_logits(name, tmp_path):
    assert_same_under_default(OF_FILES[name], tmp_path)
