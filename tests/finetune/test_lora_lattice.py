"""lora.fuse(quantize=): training with the packed sum of weight and adapter."""

import itertools

import pytest
import torch

import fmoe_ext
from fmoe_ext.finetune.adapters.reading import read_adapter
from fmoe_ext.finetune.adapters.repack import repack
from tests.checkpoint.test_adapter_repack import KINDS, made
from tests.finetune.streamed_models import checkpoint_layers, pack, save, with_adapters
from tests.huggingface.huggingface_models import make_ids
from tests.sweeps import rest_is_long


def on_lattice(source, format, dtype=torch.float32):
    model = with_adapters(fmoe_ext.stream(source, 2**30, dtype=dtype), fuse=False)
    return fmoe_ext.lora.fuse(model, quantize=format)


EXPORTED = list(itertools.product(KINDS, (torch.float32, torch.bfloat16)))


@pytest.mark.parametrize(
    ("kind", "dtype"), rest_is_long(EXPORTED, [EXPORTED[i] for i in (1, 2, 5, 6, 8, 11)])
)
def test_exported_model_has_the_logits_of_the_training_forward(kind, dtype, tmp_path):
    source, _ = made(tmp_path, kind)
    model = on_lattice(source, kind.partition(" ")[0], dtype).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    ids = make_ids(4, 10)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = model(input_ids=ids).logits.detach()
    model.save_pretrained(tmp_path / "trained")
    repack(read_adapter(tmp_path / "trained", "rank_major"), source, tmp_path / "out", None)
    result = tmp_path / "out" / source.name if source.is_file() else tmp_path / "out"
    with torch.no_grad():
        found = fmoe_ext.stream(result, 2**30, dtype=dtype)(input_ids=ids).logits
        before = fmoe_ext.stream(source, 2**30, dtype=dtype)(input_ids=ids).logits
    assert torch.equal(found, expected)
    assert (before - expected).norm() > 0.05 * expected.norm()


@pytest.mark.parametrize("kind", KINDS[:2])
def test_gradients_are_those_of_the_sum_at_the_rounded_weights(kind, tmp_path):
    """Directional derivatives: those of the loss of plain adapters on the exported model, with B A = 0 added there."""
    source, _ = made(tmp_path, kind)
    model = on_lattice(source, "mxfp4").train()
    checkpoint_layers(model)
    ids = make_ids(4, 10)
    model(input_ids=ids, labels=ids).loss.backward()
    model.save_pretrained(tmp_path / "trained")
    repack(read_adapter(tmp_path / "trained", "rank_major"), source, tmp_path / "out", None)
    plain = with_adapters(fmoe_ext.stream(tmp_path / "out", 2**30, dtype=torch.float32)).train()
    factors = {name: p for name, p in model.named_parameters() if "lora_" in name}
    for name, p in plain.named_parameters():
        if "lora_B" in name:
            p.data.zero_()  # the sum is in the weights: B's gradient is the same, and A's is checked by a step of B
    plain(input_ids=ids, labels=ids).loss.backward()
    for name, p in plain.named_parameters():
        if "lora_B" in name:
            torch.testing.assert_close(factors[name].grad, p.grad, rtol=2e-3, atol=1e-6)
            assert p.grad.norm() > 0
        elif "lora_A" in name:
            assert factors[name].grad.norm() > 0


def test_other_formats_are_refused(tmp_path):
    packed = pack(
        save(tmp_path / "packed", dtype=torch.bfloat16, intermediate_size=32, moe_intermediate_size=32)
    )
    plain = save(tmp_path / "plain", dtype=torch.bfloat16)
    for source, format, said in (
        (packed, "int4", r'^quantize="int4" trains .* are mxfp4: give stream\(\)'),
        (plain, "mxfp4", r'^quantize="mxfp4" trains .* are floats: give stream\(\)'),
        (packed, "nf4", '^quantize must be one of mxfp4, int4, q4_k, mxfp8, nvfp4, but got "nf4"'),
    ):
        with pytest.raises(ValueError, match=said):
            on_lattice(source, format)


def test_two_active_adapters_are_refused(tmp_path):
    peft = pytest.importorskip("peft")
    source, _ = made(tmp_path, "mxfp4")
    model = on_lattice(source, "mxfp4")
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    model.add_adapter("second", peft.LoraConfig(r=2, target_parameters=targets, init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(
        RuntimeError, match="one adapter at a time is rounded with its weight, but default, second"
    ):
        fmoe_ext.lora.fuse(model, quantize="mxfp4")(input_ids=make_ids())
