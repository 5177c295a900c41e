"""A fmoefied Transformers model on a padded batch has the numbers of its sequences one by one."""

import copy
import pickle
from functools import partial

import pytest
import torch

from fmoe_ext import fmoefy
from fmoe_ext.gates import SoftmaxGate, total_loss
from fmoe_ext.tokens import valid_tokens

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


def test_error_inside_leaves_no_mask_behind():
    ids, mask, positions = batch("right")
    model = make()
    with pytest.raises(ValueError, match="are for 27 tokens"):
        model.model.layers[0].mlp.forward = lambda x: (_ for _ in ()).throw(ValueError("are for 27 tokens"))
        model(input_ids=ids, attention_mask=mask, position_ids=positions)
    model = make()
    assert model(input_ids=ids[:1]).logits.isfinite().all()


def additive(allowed):
    return torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -1e9)


def masks():
    """name: how the mask of a padded batch reaches LlamaModel: its arguments."""
    ids, mask, positions = batch("right")
    causal = torch.ones(S, S, dtype=torch.bool).tril() & (mask > 0)[:, None, None]
    rest = {"position_ids": positions}
    return {
        "by name": ((ids,), {"attention_mask": mask, **rest}),
        "by position": ((ids, mask), rest),
        "4-D boolean": ((ids,), {"attention_mask": causal, **rest}),
        "4-D additive": ((ids, additive(causal)), rest),
    }


@pytest.mark.parametrize("way", masks())
def test_mask_reaches_the_layers_of_a_base_model_however_it_is_given(way):
    args, kwargs = masks()["by name"]
    model = make().model
    model(*args, **kwargs)
    expected = total_loss(model)
    args, kwargs = masks()[way]
    model(*args, **kwargs)
    torch.testing.assert_close(total_loss(model), expected, rtol=1e-12, atol=0)
    model(args[0])
    assert not torch.isclose(total_loss(model), expected, rtol=1e-4), "the mask changes nothing"


def test_4d_mask_with_a_cache_leaves_out_the_padding_of_the_new_tokens():
    ids, mask, positions = batch("right")
    model = make().model
    causal = torch.ones(S, S, dtype=torch.bool).tril() & (mask > 0)[:, None, None]
    seen = []
    model.layers[0].mlp.gate.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    half = model(
        ids[:, :4], attention_mask=causal[:, :, :4, :4], position_ids=positions[:, :4], use_cache=True
    )
    cache = half.past_key_values
    model(ids[:, 4:], attention_mask=causal[:, :, 4:], position_ids=positions[:, 4:], past_key_values=cache)
    assert seen == [int(mask[:, :4].sum()), int(mask[:, 4:].sum())]


def test_4d_mask_of_a_static_cache_is_read_where_the_new_tokens_are():
    ids, mask, positions = batch("right")
    model, seen = make(), []
    causal = torch.zeros(ids.shape[0], 1, S, S + 3, dtype=torch.bool)  # the cache has room for three more
    causal[..., :S] = torch.ones(S, S, dtype=torch.bool).tril() & (mask > 0)[:, None, None]
    model.model.layers[0].mlp.gate.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    cache = transformers.StaticCache(config=model.config, max_cache_len=S + 3)
    for part in (slice(0, 4), slice(4, S)):
        given = dict(position_ids=positions[:, part], past_key_values=cache)
        model(ids[:, part], attention_mask=causal[:, :, part], **given)
    assert seen == [int(mask[:, :4].sum()), int(mask[:, 4:].sum())]


def test_valid_tokens_around_the_model_take_precedence():
    ids, mask, positions = batch("right")
    model, seen = make(), []
    model.model.layers[0].mlp.gate.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    only_first = torch.arange(S).expand_as(ids) == 0
    with valid_tokens(only_first):
        model(input_ids=ids, attention_mask=mask, position_ids=positions)
    assert seen == [len(LENGTHS)]


def other(name):
    """-> a fmoefied model of few tokens whose layers get other tokens than the model, its inputs but the ids."""
    shared = dict(vocab_size=V, hidden_size=16, max_position_embeddings=64, pad_token_id=0)
    heads = dict(num_attention_heads=2, num_hidden_layers=2, intermediate_size=24)
    seq2seq = dict(
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=24, decoder_ffn_dim=24, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    if name == "longformer":
        config = transformers.LongformerConfig(**shared, **heads, attention_window=4)
        model = transformers.LongformerModel(config)
    elif name == "led":
        config = transformers.LEDConfig(vocab_size=V, d_model=16, attention_window=4, **seq2seq)
        model = transformers.LEDModel(config)
    elif name == "prophetnet":
        config = transformers.ProphetNetConfig(
            **shared, num_encoder_layers=1, num_decoder_layers=1, num_encoder_attention_heads=2,
            num_decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, ngram=2,
        )  # fmt: skip
        model = transformers.ProphetNetModel(config)
    elif name == "fsmt":
        config = transformers.FSMTConfig(
            langs=["a", "b"], src_vocab_size=V, tgt_vocab_size=V, d_model=16, max_position_embeddings=64,
            use_cache=False, **seq2seq,
        )  # fmt: skip
        model = transformers.FSMTModel(config)
    return model.eval()


@pytest.mark.parametrize("name", ["longformer", "led", "prophetnet", "fsmt"])
def test_models_with_other_tokens_inside_give_padding_no_expert(name):
    dense = other(name)
    moe = fmoefy(copy.deepcopy(dense), 4, init="upcycle", distributed_experts=False)
    ids, mask, _ = batch("right")
    inputs = {"input_ids": ids, "attention_mask": mask}
    if name != "longformer":
        inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    seen = []
    for module in moe.modules():
        if isinstance(module, SoftmaxGate):
            module.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    with torch.no_grad():
        out, expected = (model(**inputs)[0][mask > 0] for model in (moe, dense))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)  # their masks overflow in float64
    real = sum(LENGTHS)
    assert set(seen) == ({real, 3 * real} if name == "prophetnet" else {real})


class Doubling(torch.nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        return self.mlp(torch.cat([x, x], 1))[:, : x.shape[1]]


def test_layer_with_another_number_of_tokens_is_refused_by_the_models_name():
    ids, mask, positions = batch("right")
    model = make()
    layer = model.model.layers[0]
    layer.mlp = Doubling(layer.mlp)
    with pytest.raises(
        ValueError, match=r"layer in LlamaModel gets 54 tokens, but its attention_mask is for 27: "
    ):
        model(input_ids=ids, attention_mask=mask, position_ids=positions)
    assert model(input_ids=ids).logits.isfinite().all()
