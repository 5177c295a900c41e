"""Every architecture with experts that the package gguf knows: read and exported, or refused with a reason."""

from pathlib import Path

import pytest

from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.gguf import metadata
from fmoe_ext.gguf.architectures import ARCHITECTURES

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf", reason="pip install gguf")

NO_CLASS = "Transformers has no class for it"
ALONE = "Transformers lets no other code compute its experts"
OPEN = "not written: "
# {architecture: (model type of Transformers or "", reason)}
REFUSED = {
    "arctic": ("", NO_CLASS),
    "bailingmoe": ("", NO_CLASS),
    "bailingmoe2": ("", NO_CLASS),
    "dbrx": ("dbrx", ALONE),
    "deci": ("", NO_CLASS),
    "deepseek": ("", NO_CLASS),
    "deepseek2-ocr": ("deepseek_ocr2", "the model needs its tower for images, which is in another file"),
    "grok": ("", NO_CLASS),
    "grovemoe": ("", NO_CLASS),
    "jamba": ("jamba", f"{OPEN}Mamba-1 layers, MoE layers in turn with dense ones"),
    "llada-moe": ("", NO_CLASS),
    "llama-embed": ("", "it makes embeddings, no logits"),
    "llama4": ("llama4_text", ALONE),
    "mimo2": ("mimo_v2_flash", f"{OPEN}heads and widths of attention that differ by layer"),
    "minicpm": ("", NO_CLASS),
    "mistral3": ("ministral3", "Transformers' class for it has no experts"),
    "mistral4": (
        "mistral4",
        f"{OPEN}a scale of queries by position, which llama.cpp's converter leaves out; YaRN by default, and "
        "AutoModelForCausalLM of Transformers 5.20 does not know its configuration",
    ),
    "nomic-bert-moe": ("nomic_bert", "an encoder, and Transformers' class for it has no experts"),
    "phimoe": ("phimoe", "its router is SparseMixer, which llama.cpp computes as softmax"),
    "rnd1": ("", NO_CLASS),
    "smallthinker": ("", NO_CLASS),
    "step35": ("step3p5", ALONE),
}
# Models whose architecture has experts by the token's kind (text or image), not by a router
BY_KIND = ("clip", "cogvlm")


def registry():
    """Names of the architectures whose tensors in the package gguf include those of experts."""
    experts = {gguf.MODEL_TENSOR[f"FFN_{role}_EXP"] for role in ("GATE", "UP", "DOWN", "GATE_UP")}
    return {
        gguf.MODEL_ARCH_NAMES[arch] for arch, tensors in gguf.MODEL_TENSORS.items() if experts & {*tensors}
    }


def read():
    """{architecture: model types of Transformers}."""
    found = {}
    for kind in sorted(ARCHITECTURES, key=lambda kind: kind.model_type):
        for name in (kind.name, *kind.also):
            found.setdefault(name, []).append(kind.model_type)
    return found


def table():
    """The rows of docs/formats.md on architectures."""
    known = read()
    exported = {kind.name for kind in ARCHITECTURES}
    rows = {
        name: ("read and exported: " if name in exported else "read as ")
        + ", ".join(f"`{model}`" for model in models)
        for name, models in known.items()
    }
    rows |= {name: f"refused: {reason}" for name, (_, reason) in REFUSED.items()}
    return "\n".join(f"| `{name}` | {rows[name]} |" for name in sorted(rows))


def test_every_architecture_is_read_or_has_a_reason():
    assert read().keys() | REFUSED.keys() == registry(), "name it in REFUSED, or read it"
    assert not read().keys() & REFUSED.keys() and not registry() & {*BY_KIND}


@pytest.mark.parametrize("name", REFUSED)
def test_architecture_that_is_not_read_is_refused_by_name(name, tmp_path):
    with pytest.raises(CheckpointError, match=f"GGUF is read for afmoe, .*, but this model is {name}$"):
        metadata.find(str(tmp_path / "model.gguf"), {"general.architecture": name})


def test_reasons_hold_for_the_installed_transformers():
    for name, (model_type, reason) in REFUSED.items():
        assert (model_type in transformers.CONFIG_MAPPING) == bool(model_type), name
        guesses = {name, name.replace("moe", "_moe"), f"{name}_moe"} - {"llama-embed"}
        assert reason != NO_CLASS or not guesses & {*transformers.CONFIG_MAPPING}, name


def test_documentation_has_the_table():
    page = Path(__file__).parents[2].joinpath("docs/formats.md").read_text()
    assert table() in page, "paste the result of tests.formats.test_gguf_architectures.table()"
