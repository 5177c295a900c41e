"""New tokens of a stream: packed weights, sparse attention, threads that share a model."""

import threading

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gguf")

from fmoe_ext.adapters import Lora, given, take
from fmoe_ext.finetune.streaming import experts
from fmoe_ext.finetune.streaming.linear import PackedLinear
from tests.finetune.streamed_models import WIDE, of_values, resident, save, streamed, write_gguf
from tests.finetune.test_stream_packed import error
from tests.huggingface import moe_architectures
from tests.huggingface.huggingface_models import make_ids
from tests.huggingface.moe_architectures import tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_new_token_of_packed_weights_is_as_exact(tmp_path, dtype, batch):
    """After a prompt, by packed projections and experts, against the decoded model in float32."""
    folder = save(tmp_path, dtype=torch.bfloat16, num_hidden_layers=2, **WIDE)
    file, values = write_gguf(folder, "q8_0", "q4_k")
    model, logits = streamed(file, dtype=dtype), []
    assert type(model.model.layers[0].self_attn.k_proj) is PackedLinear
    for each in (model, of_values(folder, values)):
        past = each(make_ids(batch, 5), use_cache=True).past_key_values
        logits.append(each(make_ids(batch, 1), past_key_values=past, use_cache=True).logits.double())
    assert error(*logits) < (1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("architecture", ["AXK2", "DeepseekV32", "GlmMoeDsa", "HYV4"])
def test_sparse_attention_keeps_its_choice_of_tokens(architecture, tmp_path, monkeypatch):
    """Its code masks the other tokens where the attention's name is "sdpa" or "eager" alone."""
    changed = moe_architectures.CHANGES.get(f"{architecture}Config", {})
    ids = make_ids()
    logits = []
    for topk in (ids.shape[1], 2):
        monkeypatch.setitem(
            moe_architectures.CHANGES, f"{architecture}Config", {**changed, "index_topk": topk}
        )
        tiny_model(f"{architecture}ForCausalLM").save_pretrained(tmp_path)
        with torch.no_grad():
            logits.append(resident(tmp_path)(ids).logits)
            torch.testing.assert_close(streamed(tmp_path)(ids).logits, logits[-1], rtol=1e-9, atol=1e-9)
    assert (logits[0] - logits[1]).abs().max() > 1e-4


def test_experts_of_a_token_stay_while_another_thread_reads_layers(tmp_path, monkeypatch):
    """A server's threads share a model: one computes with chosen experts while a prompt of another needs the memory."""
    folder = save(tmp_path / "model", dtype=torch.float32, num_hidden_layers=2)
    model, whole = streamed(folder, 1), resident(folder)
    token, prompt = make_ids(1, 1), make_ids(2, 12)
    is_computing, is_done = threading.Event(), threading.Event()
    compute = experts.compute

    def slowly(*given):
        is_computing.set()
        is_done.wait(0.3)  # what the other thread has to wait for
        return compute(*given)

    def read_layers():
        is_computing.wait()
        with torch.no_grad():
            found.append(model(prompt).logits)
        is_done.set()

    found = []
    other = threading.Thread(target=read_layers)
    monkeypatch.setattr(experts, "compute", slowly)
    other.start()
    with torch.no_grad():
        torch.testing.assert_close(model(token).logits, whole(token).logits)
        other.join()
        torch.testing.assert_close(found[0], whole(prompt).logits)
    assert model.expert_stream.statistics.misses > 0


def test_adapters_wait_for_the_calls_of_their_own_thread():
    module, lora = torch.nn.Linear(2, 2), Lora(torch.ones(1, 1, 2), torch.ones(1, 2, 1))
    taken, barrier = [], threading.Barrier(2)

    def call():
        with given(module, "weight", lora):
            barrier.wait()
            taken.append(take(module))
            barrier.wait()

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken == [{"weight": lora}] * 2 and take(module) == {}
