"""Fmoefied models of the architectures of Transformers: their first output, and what is saved and loaded."""

import copy
import inspect

import pytest
import torch

from fmoe_ext import fmoefy

transformers = pytest.importorskip("transformers")

from fmoe_ext.huggingface import from_pretrained  # noqa: E402
from tests.huggingface.tiny_architectures import architectures, tiny_model  # noqa: E402

# their files have split, merged or renamed tensors, infinities, positions that are not saved ...
CONVERTED = (
    "HrmTextForCausalLM", "OlmoHybridForCausalLM", "GteForMaskedLM", "JinaEmbeddingsV3ForMaskedLM",
    "NomicBertForMaskedLM", "FalconH1ForCausalLM", "MarianMTModel",
)  # fmt: skip
# ... or an activation without a name, or none in the configuration
WITHOUT_A_NAME = (
    "ArceeForCausalLM", "NemotronForCausalLM", "ApertusForCausalLM", "PersimmonForCausalLM",
    "Jais2ForCausalLM", "NanoChatForCausalLM", "BloomForCausalLM", "MptForCausalLM", "Lfm2ForCausalLM",
    "OpenAIGPTLMHeadModel",
)  # fmt: skip


def differences(model, folder):
    """Names of what is another tensor after saving and loading."""
    saved_by_transformers = set(model.state_dict()) - set(model._keys_to_ignore_on_save or ())
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in saved_by_transformers:
                p.add_(0.01 * torch.randn_like(p))
    model.save_pretrained(folder)
    again = from_pretrained(folder)
    states = [
        {**m.state_dict(), **dict(m.named_buffers())}  # those too that are not saved
        for m in (model, again)
    ]
    names = states[0].keys() | states[1].keys()
    return [
        name
        for name in names
        if not all(name in s for s in states) or not states[0][name].equal(states[1][name])
    ]


@pytest.mark.parametrize("name", [*CONVERTED, *WITHOUT_A_NAME])
def test_fmoefied_model_saved_and_loaded_is_the_same(name, tmp_path):
    model = fmoefy(tiny_model(name), 2, top_k=1)
    assert differences(model, tmp_path) == []
    with pytest.raises(Exception, match=r"needs fmoe_ext\.huggingface\.from_pretrained"):
        type(model).from_pretrained(tmp_path)


@pytest.mark.slow
def test_every_architecture_saved_and_loaded_is_the_same(tmp_path):
    """Every one that fmoefy takes; the others are MoE models already, or have no MLP that it reads."""
    equal, refused, different = [], {}, {}
    for name in architectures():
        model = tiny_model(name)
        if model is None:
            continue
        try:
            fmoefy(model, 2, top_k=1)
        except ValueError as error:
            refused[name] = str(error).splitlines()[0]
            continue
        wrong = differences(model, tmp_path / name)
        if wrong:
            different[name] = wrong[:3]
        else:
            equal.append(name)
    for name, why in refused.items():
        print(f"{name}: {why}")
    print(f"{len(equal)} are the same, {len(refused)} are not taken by fmoefy")
    assert not different
    assert len(equal) > 300


def inputs_for(model):
    """Candidates of inputs of a tiny model."""
    parameters = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 58, (2, 8), generator=generator)
    rest = {"decoder_input_ids": ids} if "decoder_input_ids" in parameters else {}
    shapes = {"pixel_values": (2, 3, 16, 16), "input_features": (2, 64, 16), "input_values": (2, 4000)}
    if "input_ids" in parameters:
        yield {"input_ids": ids, **rest}
    for name, shape in shapes.items():
        if name in parameters:
            yield {name: torch.randn(shape, dtype=torch.float64, generator=generator), **rest}


def first_tensor(output):
    values = output.values() if hasattr(output, "values") else output
    return next(v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point())


def outputs(dense, moe):
    """The first tensors that both return; None where no inputs are found that the dense model takes."""
    for inputs in inputs_for(dense):
        try:
            torch.manual_seed(3)
            expected = first_tensor(dense(**inputs))
        except Exception:  # an architecture may raise anything for inputs that it does not expect
            continue
        torch.manual_seed(3)
        return first_tensor(moe(**inputs)), expected
    return None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* stay dense")
def test_every_architecture_upcycled_has_the_first_output_of_the_dense_model():
    wrong, equal = {}, []
    for name in architectures():
        model = tiny_model(name)
        if model is None:
            continue
        model.double()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=0.1)
            try:
                moe = fmoefy(copy.deepcopy(model), 4, init="upcycle")
            except ValueError:  # it has no MLP that can be read
                continue
            both = outputs(model, moe)
        if both is None or not both[1].isfinite().all():
            continue
        error = ((both[0] - both[1]).abs().max() / both[1].abs().max()).item()
        if error <= 1e-12:
            equal.append(name)
        else:
            wrong[name] = error
    print(f"{len(equal)} are equal")
    assert not wrong
    assert len(equal) > 100
