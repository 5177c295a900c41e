"""GGUF files of Gemma 4: factors of the router, frequencies and softcap."""

import copy

import numpy
import pytest
import torch

from fmoe_ext import huggingface
from fmoe_ext.checkpoint import CheckpointError
from tests.formats import test_gguf_routing
from tests.formats.test_gguf_keys import logits, rewritten, streamed, write
from tests.formats.test_gguf_routing import WIDE, build

gguf = pytest.importorskip("gguf", reason="pip install gguf")

files = test_gguf_routing.files  # a fixture


def test_frequencies_of_gemma_4_are_read_or_refused(files, tmp_path):
    model, arch, original = files("gemma4_text")
    sliding = {f"{arch}.rope.freq_base_swa": 50.0}
    other = copy.deepcopy(model.config)
    other.rope_parameters["sliding_attention"]["rope_theta"] = 50.0
    theirs = huggingface.use(type(model)(other).double().eval())
    theirs.load_state_dict(model.state_dict())
    file = rewritten(original, tmp_path / "model.gguf", sliding)
    torch.testing.assert_close(logits(streamed(file)), logits(theirs), rtol=1e-5, atol=1e-5)
    assert (logits(theirs) - logits(model)).abs().max() > 1e-3
    model.config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"rope\.freq_base_swa is 50\.0, but the model is computed"):
        streamed(file)

    def all_rotated(name, data):
        return (data * 0 + 1 if name == "rope_freqs.weight" else data), None

    file = rewritten(original, file, {}, all_rotated)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is \[1\.0, .* but the model is computed"):
        streamed(file)
    (tmp_path / "config.json").unlink()
    assert streamed(file).config.rope_parameters["full_attention"]["partial_rotary_factor"] == 1
    file = rewritten(original, file, {}, renamed={"rope_freqs.weight": "other.weight"})
    with pytest.raises(CheckpointError, match=r"lacks rope_freqs\.weight"):
        streamed(file)


def test_softcap_that_a_file_of_gemma_4_lacks_is_that_of_llama_cpp(files, tmp_path):
    _, arch, original = files("gemma4_text, shared")
    key = f"{arch}.final_logit_softcapping"
    assert streamed(original).config.final_logit_softcapping is None
    file = rewritten(original, tmp_path / "model.gguf", {key: None})
    assert streamed(file).config.final_logit_softcapping == 30


def test_experts_of_gemma_4_in_nvfp4_have_the_factors_of_the_router(tmp_path, monkeypatch):
    """As llama.cpp's converter writes them: the factors of the file are those of the weights too."""
    plain = write(build("gemma4_text", **WIDE)[0], tmp_path / "out", {}, monkeypatch)
    values, raw = {}, gguf.GGMLQuantizationType.NVFP4

    def pack(name, data):
        if not name.endswith("_down_exps.weight"):
            return data, None
        packed = numpy.resize(
            numpy.arange(1, 120, dtype=numpy.uint8), (*data.shape[:2], data.shape[2] // 64 * 36)
        )
        values[name] = gguf.quants.dequantize(packed, raw)
        return packed, raw

    packed = streamed(rewritten(plain, tmp_path / "packed.gguf", {}, pack))
    decoded = streamed(
        rewritten(plain, tmp_path / "decoded.gguf", {}, lambda name, data: (values.get(name, data), None))
    )
    assert len(values) == 4
    torch.testing.assert_close(logits(packed), logits(decoded), rtol=1e-5, atol=1e-5)
    assert (packed.model.layers[0].router.per_expert_scale == 1).all()
    assert (decoded.model.layers[0].router.per_expert_scale != 1).all()
