"""Streams of every architecture of Transformers: logits and LoRA gradients of the resident model, or refused."""

import pytest
import torch

import fmoe_ext
from fmoe_ext import huggingface
from fmoe_ext.checkpoint import CheckpointError

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from transformers.models.auto import modeling_auto  # noqa: E402

from tests.finetune.streamed_models import with_adapters  # noqa: E402
from tests.huggingface.huggingface_models import make_ids  # noqa: E402
from tests.huggingface.moe_architectures import outcomes, said_in_docs, skip_without, tiny_model  # noqa: E402

SHORT = (
    "AriaTextForCausalLM",  # names and order of its own in files
    "DeepseekV4ForCausalLM",  # hash routing, names of DeepSeek's files
    "NemotronHForCausalLM",  # no gate
    "Qwen3VLMoeForConditionalGeneration",  # transposed stacks, towers for images
    "InklingForCausalLM",  # gate and up in turn
    "Ernie4_5_VLMoeForConditionalGeneration",  # one list of experts for text and images
    "DiffusionGemmaForBlockDiffusion",  # experts of the encoder tied to the decoder's
)


def logits_of(model):
    torch.manual_seed(0)  # of models that draw tokens, as those of diffusion
    with torch.no_grad():
        return model(input_ids=make_ids())[0]


def logits_and_gradients(model, experts):
    adapted = with_adapters(model, target_parameters=experts).train()
    torch.manual_seed(0)  # of routers that add noise
    logits = adapted(input_ids=make_ids())[0]
    logits.square().mean().backward()
    return logits.detach(), {n: p.grad for n, p in adapted.named_parameters() if p.grad is not None}


def small_model(name):
    """A small model in float64, in float32 where its layers mix that in."""
    model = tiny_model(name)
    try:
        logits_of(model)
    except RuntimeError:
        model = tiny_model(name, torch.float32)
        logits_of(model)
    return model


def outcome(name, folder):
    """Result for an architecture, in the words of the table."""
    try:
        model = small_model(name)
    except Exception as error:  # whatever a class says of sizes that it does not expect
        return f"not tried: {type(error).__name__}"
    found = [module for module in model.modules() if hasattr(module, "is_transposed")]
    if not found:
        return "not tried: no experts in the small model"
    model.save_pretrained(folder)
    is_causal = type(model.config) in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    auto = transformers.AutoModelForCausalLM if is_causal else transformers.AutoModelForImageTextToText
    resident = huggingface.use(auto.from_pretrained(folder, dtype="auto")).eval()
    try:
        streamed = fmoe_ext.stream(folder, 2**32)
    except CheckpointError as error:
        return f"refused: {str(error).replace(str(folder), '').lstrip(': ')}"
    expected, logits = logits_of(resident), logits_of(streamed)
    if not torch.equal(expected, logits):
        return f"WRONG: logits differ by {(expected - logits).abs().max().item():.1e}"
    experts = ["experts.gate_up_proj" if found[0].has_gate else "experts.up_proj", "experts.down_proj"]
    try:
        (_, expected), (_, gradients) = (logits_and_gradients(m, experts) for m in (resident, streamed))
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return f"equal logits; no LoRA: {type(error).__name__}: {str(error)[:80]}"
    assert gradients.keys() == expected.keys() != set()
    near = {"rtol": 1e-9, "atol": 1e-12} if logits.dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-6}
    wrong = [n for n, g in gradients.items() if not torch.allclose(g, expected[n], **near)]
    return f"WRONG: gradients of {wrong[:2]}" if wrong else "equal"


@pytest.mark.parametrize("name", SHORT)
def test_stream_has_the_logits_and_gradients_of_the_resident_model(name, tmp_path):
    skip_without(name)
    assert outcome(name, tmp_path) == "equal"


@pytest.mark.slow
def test_stream_of_every_architecture_is_equal_or_refused(tmp_path):
    """The table of docs/formats.md is that of the installed version and others; five minutes."""
    found = outcomes(outcome, tmp_path)
    assert not {name: text for name, text in found.items() if text.startswith("WRONG")}
    said = said_in_docs("Streamed architectures")
    differ = {name: text for name, text in found.items() if said.get(short_of(name)) != text}
    assert not differ, f"paste into docs/formats.md:\n{table(found)}"


def short_of(name):
    return name.replace("ForConditionalGeneration", " (with images)").removesuffix("ForCausalLM")


def table(found):
    """Rows of docs/formats.md: what became of the architectures, equal ones first."""
    by_text = {}
    for name, text in found.items():
        by_text.setdefault(text, []).append(short_of(name))
    order = sorted(by_text.items(), key=lambda item: (item[0] != "equal", item[0]))
    return "\n".join(
        [
            "| stream | architectures |",
            "|---|---|",
            *(f"| {text} | {', '.join(names)} |" for text, names in order),
        ]
    )
