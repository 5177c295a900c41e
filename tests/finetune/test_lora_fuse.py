"""lora.fuse: PEFT's adapters on experts, beside the frozen weights, against PEFT's own forward."""

import copy

import pytest
import torch

import fmoe_ext
from fmoe_ext import lora
from fmoe_ext.finetune import peft_lora
from tests.finetune.test_peft import (
    MOE_PARAMETERS,
    TARGETS,
    assert_same,
    make_both,
    step,
    tokens,
    with_adapters,
)
from tests.huggingface.huggingface_models import make_ids, make_model

peft = pytest.importorskip("peft")


@pytest.fixture
def counted(monkeypatch):
    """Number of calls of the fused operator."""
    calls = []
    operator = fmoe_ext.frozen.frozen_mlp

    def count(*args):
        calls.append(args)
        return operator(*args)

    monkeypatch.setattr(fmoe_ext.frozen, "frozen_mlp", count)  # of Transformers' experts
    monkeypatch.setattr(peft_lora.FusedParamWrapper, "mlp_with_adapters", staticmethod(count))
    return calls


@pytest.mark.parametrize(
    "name", ["experts", "one of the experts' weights", "all", "experts and a copied head"]
)
def test_layer_equals_peft(name, counted):
    ours, plain = make_both()
    before = ours(tokens()).detach()
    ours, plain = with_adapters(ours, **TARGETS[name]), with_adapters(plain, **TARGETS[name])
    assert lora.fuse(ours) is ours
    adapted = step(plain)
    assert_same(step(ours), adapted)
    assert counted
    with ours.disable_adapter():
        torch.testing.assert_close(ours(tokens()), before, rtol=1e-12, atol=1e-14)
    ours.merge_adapter()
    torch.testing.assert_close(ours(tokens()), adapted["out"], rtol=1e-12, atol=1e-14)
    ours.unmerge_adapter()
    assert_same(step(ours), adapted)
    merged = ours.merge_and_unload()
    torch.testing.assert_close(merged(tokens()), adapted["out"], rtol=1e-12, atol=1e-14)


def adapted_model(architecture, implementation):
    from fmoe_ext import huggingface

    huggingface.register()
    model = make_model(architecture, implementation, torch.float64)
    return with_adapters(model, target_modules=["q_proj"], target_parameters=MOE_PARAMETERS)


def gradients_of(model):
    ids = make_ids()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {"logits": out.logits.detach(), **gradients}


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "GptOssForCausalLM", "MixtralForCausalLM"])
def test_models_of_transformers_equal_peft_on_eager(architecture, counted, tmp_path):
    expected = gradients_of(adapted_model(architecture, "eager"))
    model = lora.fuse(adapted_model(architecture, "fmoe"))
    got = gradients_of(model)
    assert_same(got, expected)
    assert bool(counted) == (architecture != "GptOssForCausalLM")  # its activation runs between two products
    model.save_pretrained(tmp_path)
    base = make_model(architecture, "fmoe", torch.float64)
    loaded = lora.fuse(peft.PeftModel.from_pretrained(base, tmp_path))
    assert torch.equal(loaded(input_ids=make_ids()).logits, model(input_ids=make_ids()).logits)
    with torch.no_grad():
        merged = model.merge_and_unload()(input_ids=make_ids()).logits
    torch.testing.assert_close(merged, expected["logits"], rtol=1e-10, atol=1e-12)


def test_two_active_adapters_add_up():
    ours, plain = make_both()
    results = []
    for model in (ours, plain):
        model = with_adapters(model, **TARGETS["experts"])
        torch.manual_seed(3)
        config = peft.LoraConfig(r=3, lora_alpha=5, init_lora_weights=False, **TARGETS["experts"])
        model.add_adapter("second", config)
        model.base_model.set_adapter(["default", "second"])
        results.append(step(lora.fuse(model) if model.base_model.model is ours else model))
    assert_same(*results)


def test_checkpointing_recomputes_with_the_adapters():
    model = lora.fuse(adapted_model("Qwen3MoeForCausalLM", "fmoe"))
    expected = gradients_of(model)
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    assert_same(gradients_of(model), expected)


def test_copy_of_a_fused_model_has_its_own_adapters():
    model = lora.fuse(with_adapters(make_both()[0], **TARGETS["experts"]))
    other = copy.deepcopy(model)
    expected = model(tokens()).detach()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.mul_(0 if "lora" in name else 1)
    assert torch.equal(other(tokens()), expected) and not torch.equal(model(tokens()), expected)


def kept_weights(model):
    """Shapes of the tensors with one entry an expert that backward keeps beside the parameters."""
    parameters = {p.data_ptr() for p in model.parameters()}
    kept = []

    def pack(t):
        if t.dim() == 3 and t.data_ptr() not in parameters:
            kept.append(tuple(t.shape))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(tokens())
    return kept


def test_no_sum_of_weight_and_adapter_is_kept():
    model = with_adapters(make_both()[0], **TARGETS["experts"])
    assert kept_weights(model) and not kept_weights(lora.fuse(model))


def test_adapters_that_the_experts_would_not_compute_raise():
    model = lora.fuse(adapted_model("Qwen3MoeForCausalLM", "fmoe"))
    model.base_model.model.set_experts_implementation("eager")
    with pytest.raises(
        RuntimeError, match=r"^the adapter of gate_up_proj was left out: .* set_experts_implementation"
    ):
        model(input_ids=make_ids())
    model.base_model.model.set_experts_implementation("fmoe")
    assert torch.isfinite(model(input_ids=make_ids()).logits).all()


def test_models_without_adapters_on_experts_are_refused():
    model = with_adapters(make_both()[0], target_modules=["head"])
    with pytest.raises(
        ValueError, match=r"^PeftModel has no adapter of PEFT on experts that fmoe_ext computes"
    ):
        lora.fuse(model)


def test_adapter_added_to_a_fused_model_equals_peft():
    models = []
    for fused in (True, False):
        model = adapted_model("Qwen3MoeForCausalLM", "fmoe" if fused else "eager")
        if fused:
            lora.fuse(model)
        config = peft.LoraConfig(
            r=3, target_modules=["q_proj"], target_parameters=MOE_PARAMETERS, init_lora_weights=False
        )
        model.add_adapter("second", config)
        generator = torch.Generator().manual_seed(4)
        for name, p in model.named_parameters():
            if ".second." in name:
                p.data.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / 10)
        model.set_adapter("second")
        models.append(model)
    ours, plain = (gradients_of(model) for model in models)
    assert ours.keys() == plain.keys() and any("experts" in name for name in plain)
    for name, expected in plain.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-9, atol=1e-12)
    for model in models:
        model.set_adapter("default")
    ours, plain = (gradients_of(model) for model in models)
    torch.testing.assert_close(ours["logits"], plain["logits"], rtol=1e-9, atol=1e-12)
