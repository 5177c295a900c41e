"""A fmoefied Transformers model on a padded batch has the numbers of its sequences one by one."""

import copy
import pickle
from functools import partial

import pytest
import torch

from fmoe_ext import fmoefy
from fmoe_ext.gates import SoftmaxGate, total_loss

transformers = pytest.importorskip("transformers", reason="needs Transformers")

V, S = 40, 9
LENGTHS = (5, 9, 3)


def make(checkpointing=False):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    model = fmoefy(
        transformers.LlamaForCausalLM(config).double(),
        num_experts=4,
        gate=partial(SoftmaxGate, z_weight=0.1),
        distributed_experts=False,
    ).double()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def batch(side):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, V, (len(LENGTHS), S), generator=generator)
    place, lengths = torch.arange(S), torch.tensor(LENGTHS)[:, None]
    mask = place < lengths if side == "right" else place >= S - lengths
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return ids, mask.long(), positions


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("side", ["right", "left"])
def test_loss_and_gradients_do_not_know_padding(side, checkpointing):
    ids, mask, positions = batch(side)
    gradients, losses, logits = [], [], []
    for filling in (0, 7):  # what stands in the place of padding
        model = make(checkpointing)
        out = model(input_ids=ids.where(mask > 0, filling), attention_mask=mask, position_ids=positions)
        losses.append(total_loss(model))
        logits.append(out.logits[mask > 0].detach())
        (logits[-1].new_tensor(0) + out.logits[mask > 0].square().mean() + losses[-1]).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert torch.equal(losses[0], losses[1])
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-12, atol=1e-13)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    model = make()
    alone = [model(input_ids=row[kept > 0][None]).logits[0] for row, kept in zip(ids, mask, strict=True)]
    torch.testing.assert_close(logits[0], torch.cat(alone).detach(), rtol=1e-10, atol=1e-11)


def test_without_the_mask_padding_changes_the_loss():
    ids, mask, positions = batch("right")
    model, losses = make(), []
    for filling in (0, 7):
        model(input_ids=ids.where(mask > 0, filling), position_ids=positions)
        losses.append(total_loss(model))
    assert losses[0] != losses[1], "the other test would show nothing"


def test_generation_with_a_cache_and_copies():
    ids, mask, _ = batch("left")
    model = make().eval()
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        out = other.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
        row = ids[2][mask[2] > 0][None]
        alone = other.generate(row, attention_mask=row > 0, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert out[2, S:].tolist() == alone[0, row.shape[1] :].tolist()


def test_an_error_inside_leaves_no_mask_behind():
    ids, mask, positions = batch("right")
    model = make()
    with pytest.raises(ValueError, match="are for 27 tokens"):
        model.model.layers[0].mlp.forward = lambda x: (_ for _ in ()).throw(ValueError("are for 27 tokens"))
        model(input_ids=ids, attention_mask=mask, position_ids=positions)
    model = make()
    assert model(input_ids=ids[:1]).logits.isfinite().all()
