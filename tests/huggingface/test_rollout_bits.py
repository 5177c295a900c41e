"""Decoders of Transformers inside batch_invariant(): generation, training and every batch have the same bits."""

from contextlib import nullcontext

import pytest
import torch

import fmoe_ext
from tests.huggingface.rollout_models import DTYPES, make_model, texts
from tests.sweeps import rest_is_slow

transformers = pytest.importorskip("transformers")


def log_probabilities(logits):
    return torch.log_softmax(logits.float(), -1)


@torch.no_grad()
def generated(model, tokens, sizes, mask=None, cache=None):
    """Log-probabilities of tokens in parts of the sizes, with a cache."""
    found, begin = [], 0
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    for size in sizes:
        end, given = begin + size, {}
        if mask is not None:
            given = {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
        out = model(tokens[:, begin:end], past_key_values=cache, use_cache=True, **given)
        cache, begin = out.past_key_values, end
        found.append(out.logits)
    return log_probabilities(torch.cat(found, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_generate_and_a_step_of_training(dtype):
    """generate()'s own log-probabilities, sampled from a padded batch; the loss of training has their gradient."""
    model, tokens = make_model("Qwen3Moe", dtype), texts(3, 7)
    mask = torch.ones_like(tokens)
    mask[0, :4] = mask[2, :1] = 0
    tokens = tokens.masked_fill(mask == 0, 0)
    with fmoe_ext.batch_invariant():
        torch.manual_seed(0)
        out = model.generate(
            **{"input_ids": tokens, "attention_mask": mask, "do_sample": True, "max_new_tokens": 6},
            **{"output_logits": True, "return_dict_in_generate": True, "eos_token_id": None, "top_k": 0},
        )
        sampled = log_probabilities(torch.stack(out.logits, 1))
        for row, begin in ((0, 4), (1, 0), (2, 1)):  # each trained alone
            text = out.sequences[row : row + 1, begin:]
            trained = log_probabilities(model.train()(text).logits[:, -7:-1])
            assert torch.equal(trained[0], sampled[row])
        trained.gather(2, text[:, -6:, None]).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    log_probabilities(model(text).logits[:, -7:-1]).gather(2, text[:, -6:, None]).sum().backward()
    for name, p in model.named_parameters():
        if p.grad is not None:
            bound = (2e-5 if dtype == torch.float32 else 0.1) * p.grad.abs().max().clamp(min=1e-3)
            assert (found[name] - p.grad).abs().max() <= bound, name


@pytest.mark.parametrize("where", ["inside", "after"])
def test_recomputation_keeps_the_bits(where):
    """A backward inside the block, and after it with the mode passed to the checkpoint."""
    model, tokens = make_model("Qwen3Moe").train(), texts(2, 9)
    options = {"use_reentrant": False}
    if where == "after":
        options["context_fn"] = lambda: (nullcontext(), fmoe_ext.batch_invariant())
    results = []
    for recomputes in (False, True):
        if recomputes:
            model.gradient_checkpointing_enable(options)
        model.zero_grad()
        with fmoe_ext.batch_invariant():
            loss = model(tokens, labels=tokens, use_cache=False).loss
            if where == "inside":
                loss.backward()
        if where == "after":
            loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) > 10
    assert all(map(torch.equal, *results))


LONG_TEXTS = [(name, dtype) for dtype in DTYPES for name in ("Qwen3Moe", "GptOss", "DeepseekV3", "Gemma3")]
IN_CI = [(name, dtype) for name, dtype in LONG_TEXTS if dtype is torch.bfloat16 or name == "Qwen3Moe"]


@pytest.mark.long
@pytest.mark.parametrize(("name", "dtype"), rest_is_slow(LONG_TEXTS, IN_CI), ids=str)
def test_lengths_batches_paddings_caches_and_threads(name, dtype):
    model, length, threads = make_model(name, dtype), 300, torch.get_num_threads()
    tokens = texts(16, length)
    try:
        torch.set_num_threads(2)
        with fmoe_ext.batch_invariant(), torch.no_grad():
            whole = log_probabilities(model(tokens, use_cache=False).logits)
            assert torch.equal(log_probabilities(model(tokens[3:8], use_cache=False).logits), whole[3:8])
            assert torch.equal(generated(model, tokens[5:12], [17, 64, 1, 1, 100, 117]), whole[5:12])
            for size in (1, 2, 3, 31, 64, 65, 100, 129, 255):
                assert torch.equal(
                    log_probabilities(model(tokens[2:4, :size], use_cache=False).logits), whole[2:4, :size]
                ), size
            for batch in range(1, 17):
                rows = log_probabilities(model(tokens[:batch, :40], use_cache=False).logits)
                assert torch.equal(rows, whole[:batch, :40]), batch
            # What follows are thousands of small products: on busy cores two threads wait for each other at each.
            torch.set_num_threads(1)
            assert torch.equal(log_probabilities(model(tokens[3:8], use_cache=False).logits), whole[3:8])
            assert torch.equal(generated(model, tokens[:1], [1] * length), whole[:1])
            cache = transformers.StaticCache(model.config, max_cache_len=length + 11)
            sizes = [90, *[1] * 30, 100, 80]
            assert torch.equal(generated(model, tokens[:4], sizes, cache=cache), whole[:4])
            for num_pads in (1, 16, 63):
                pads = torch.zeros(4, num_pads, dtype=torch.long)
                left = torch.cat((pads, tokens[:4]), 1)
                mask = (torch.arange(length + num_pads) >= num_pads).long().expand(4, -1)
                sizes = [num_pads + 100, *[1] * 20, length - 120]
                found = generated(model, left, sizes, mask)
                assert torch.equal(found[:, num_pads:], whole[:4]), num_pads
                right = torch.cat((tokens[:4], pads), 1)
                found = generated(model, right, [length + num_pads], mask.flip(1))
                assert torch.equal(found[:, :length], whole[:4]), num_pads
    finally:
        torch.set_num_threads(threads)
